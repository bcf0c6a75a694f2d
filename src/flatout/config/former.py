"""Settings that earlier versions had: constants now, or joined with another one.

A file or a stored config that still has one is read where it says what holds now, so that those of earlier versions
load. Any other value is refused with what it is now, and on a command line each of them is.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError


class Constant(NamedTuple):
    value: Any
    why: str  # a clause


CONSTANTS: Mapping[str, Constant] = {}
_JOINED = {"optim.warmup_steps": "optim.warmup"}
_NULL = ("optim.warmup",)  # nothing was said by null, which the field no longer has


def refusal(path: str, where: str) -> ConfigError | None:
    """What to say to somebody who sets what became constant; None for any other key."""
    constant = CONSTANTS.get(path)
    if constant is None:
        return None
    return ConfigError(
        f"{where}: {path} is no setting any more: it is always {format_value(constant.value)}",
        f"leave it out: {constant.why}",
    )


def path_now(path: str, value: Any) -> str | None:
    """The field that a setting in a file belongs to; None where it says nothing that does not hold anyway."""
    constant = CONSTANTS.get(path)
    if (constant is not None and constant.value == value) or (path in _NULL and value is None):
        return None
    return _JOINED.get(path, path)


def as_now(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config as this version writes it."""
    found: dict[str, Any] = {}
    for section, values in stored.items():
        if not isinstance(values, Mapping):
            found[section] = values
            continue
        paths = ((path_now(f"{section}.{name}", value), value) for name, value in values.items())
        found[section] = {path.removeprefix(f"{section}."): value for path, value in paths if path is not None}
    return found
