"""Numbers as people write them, and text that cannot move the cursor or rename the window."""

import math
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without control characters, newlines and tabs kept."""
    return _CONTROL.sub("\ufffd", text)


def human_count(value: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"


def human_parameters(parameters: float, trained: float | None, tables: float | None = None) -> str:
    """The size of a model; `trained` is that of the adapters beside it, where it is frozen.

    `tables` of the parameters lie in value and bigram tables, of which a token reads a row each.
    """
    frozen = "" if trained is None else f" frozen and {human_count(trained)} trained"
    parts = f" ({human_count(parameters - tables)} dense, {human_count(tables)} in tables)" if tables else ""
    return f"{human_count(parameters)}{frozen} parameters{parts}"


def human_bytes(value: float) -> str:
    for limit, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f} B"


def human_seconds(value: float) -> str:
    if not 90 <= value < math.inf:  # a damaged record may hold NaN
        return f"{value:.0f}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
    return f"{hours // 24}d{hours % 24}h"
