"""Regular expressions from an adapter's config, matched safely.

A pattern such as `(a+)+b` takes exponential time, and a config from elsewhere may contain one on purpose. Plain names
are matched here; all other patterns in a child process with limits (`confined`), once for all paths of a model. The
child imports this module, so it imports the standard library only.
"""

import functools
import re
from collections.abc import Mapping

from flatout.confined import Child, Exceeded
from flatout.errors import CheckpointError

_PLAIN = re.compile(r"[\w.]*")  # no repetition, so no backtracking (a dot is any character)


def whole(pattern: str, paths: tuple[str, ...]) -> frozenset[str]:
    """Paths that a pattern matches from beginning to end."""
    return _matching(pattern, paths)


def endings(pattern: str, paths: tuple[str, ...]) -> frozenset[str]:
    """Paths whose end, after a dot, a pattern matches."""
    return _matching(_ending(pattern), paths, plain=is_plain(pattern))


def is_plain(pattern: str) -> bool:
    """Whether a pattern is matched without a child process."""
    return _PLAIN.fullmatch(pattern) is not None


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"  # as PEFT has it


def what_is_wrong(pattern: str) -> str | None:
    """Why a text is not a regular expression, or None."""
    try:
        re.compile(pattern)
        re.compile(_ending(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def answer(request: Mapping[str, object]) -> list[int]:
    """In the child: indices of the paths that match."""
    pattern, paths = request["pattern"], request["paths"]
    assert isinstance(pattern, str)
    assert isinstance(paths, list)
    fits = re.compile(pattern).fullmatch
    return [place for place, path in enumerate(paths) if fits(path)]


@functools.cache
def child() -> Child:
    return Child("flatout.model.patterns")


@functools.lru_cache(maxsize=64)
def _matching(pattern: str, paths: tuple[str, ...], plain: bool | None = None) -> frozenset[str]:
    plain = is_plain(pattern) if plain is None else plain
    request = {"pattern": pattern, "paths": list(paths)}
    try:
        places = answer(request) if plain else child().ask(request)
    except Exceeded as error:
        raise CheckpointError(
            f"the pattern {pattern[:200]!r} of an adapter's config {error}",
            "do not use this adapter, or list the names of its targets instead of the pattern",
        ) from error
    finally:
        if not plain:
            child().close()
    return frozenset(paths[place] for place in places)
