"""What the page tells of a run's eigenstate blocks: a sentence, a row for each layer, and what the words mean.

Contract: numbers and our own words only. A run without such blocks has nothing to show, None.
"""

import math
from typing import Any

from flatout.observe.eigenstates import QUANTILES, EigenstateHistory, LayerHistory, eigenstate_history, short_tokens
from flatout.observe.history import RunHistory
from flatout.observe.report.series import number, short

_FAR = 1e30  # stands for infinity in a bar, which ends at the edge anyway


def eigenstate_part(history: RunHistory) -> dict[str, Any] | None:
    """Sentence, rows from the first layer to the last, and a note."""
    found = eigenstate_history(history.eigenstates)
    if not found.layers:
        return None
    return {
        "context": found.context,
        "sentence": f"{found.sentence[:1].upper()}{found.sentence[1:]}." if found.sentence else "",
        "layers": [_row(layer) for layer in found.layers],
        "note": _note(found, history.info),
    }


def _row(layer: LayerHistory) -> dict[str, Any]:
    ends = [layer.last("horizon", name) for name in ("10%", "90%")]
    beyond = layer.beyond[-1]
    return {
        "layer": layer.layer,
        "states": "–" if layer.states is None else f"{layer.states:,}",
        "bar": [_place(layer.last("horizon", name)) for name in QUANTILES],
        "median": _text(layer.last("horizon")),
        "middle": " to ".join(dict.fromkeys(map(_text, ends))),
        "longest": _text(layer.last("horizon", "max")),
        "beyond": "–" if beyond is None or not 0 <= beyond <= 1 else f"{beyond:.0%}",
        "start": _text(layer.first("horizon")),
        "period": _text(layer.last("period")),
    }


def _note(found: EigenstateHistory, info: dict[str, Any]) -> str:
    words = (
        "A state's horizon is the number of tokens after which 1/e of it is left, -1 / ln |λ|; its period is the "
        "tokens of a whole turn. Bars reach from the shortest to the longest horizon of a layer's states, with the "
        "middle 80% strong and a mark at the median, on a logarithmic scale."
    )
    words += " The upright line is the context." if found.context else ""
    config = info.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    strength = number(model.get("modulation")) if isinstance(model, dict) else None
    if strength is not None and 0 < strength < 100:
        words += (
            f" The input makes horizons up to {math.exp(strength):.3g} times as long or as short from token to token."
        )
    return words


def _text(value: float | None) -> str:
    return "–" if value is None else short_tokens(value)


def _place(value: float | None) -> float | int | str | None:
    if value is None or math.isnan(value):
        return None
    return short(min(value, _FAR))
