"""The settings that a hint names, to be applied to the command that got it."""

import re
from collections.abc import Sequence

from flatout.config.facts import section_paths

_WORD = re.compile(rf"(?<![\w.])(?:{'|'.join(section_paths())})\.[a-z_0-9]+=(?:\[[^\]]*\]|[^\s,;`?()]+)")
_PLACEHOLDER = re.compile(r".*=(.*:)?([A-Z][A-Z-]*|\.*)")


def ways_out(hint: str) -> list[list[str]]:
    """The settings of each way that a hint names: `set a.b=1 and a.c=2, or a.d=3` has two ways.

    A way without a setting (`leave it out`) is none of them, and `a.b=N` is no setting.
    """
    found = ([word.rstrip(".:") for word in _WORD.findall(way)] for way in re.split(r"[,;]? or ", hint))
    return [words for words in found if words and not any(map(_PLACEHOLDER.fullmatch, words))]


def with_settings(words: Sequence[str], settings: Sequence[str]) -> list[str]:
    """A command's words with other values, or more of them."""
    replaced = {word.partition("=")[0] for word in settings}
    return [*(word for word in words if word.partition("=")[0] not in replaced), *settings]
