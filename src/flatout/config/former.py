"""Settings that earlier versions had: constants now, or joined with another one.

A file or a stored config that still has one is read where it says what holds now, so that those of earlier versions
load. Any other value is refused with what it is now, and on a command line each of them is.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError


class Constant(NamedTuple):
    value: Any
    why: str  # a clause


CONSTANTS: Mapping[str, Constant] = {
    "model.state_heads": Constant(8, "modulation has 8 groups of states, or as many as divide model.states"),
    "model.resonance": Constant(0.0, "states are read as they are"),
    "model.energy": Constant(0.0, "the loss has no term for eigenvalues"),
    "data.shard_tokens": Constant(100_000_000, "the size of shard files changes nothing"),
    "clean.max_characters": Constant(None, "clean.drop=[quality] drops documents of more than 100,000 words"),
    "clean.blocked_urls": Constant(None, "take such pages out of the crawl before it is prepared"),
    "chat.too_long": Constant("truncate", "samples are cut at chat.max_tokens, and the report counts them"),
    "optim.weight_decay_end": Constant(None, "optim.weight_decay holds for the whole run"),
    "optim.momentum": Constant(0.95, "optim.muon_rate is what Muon needs"),
    "optim.momentum_start": Constant(0.85, "optim.muon_rate is what Muon needs"),
    "optim.momentum_warmup_steps": Constant(100, "optim.muon_rate is what Muon needs"),
    "optim.momentum_cooldown_steps": Constant(0, "a cool-down of the momentum gained nothing"),
    "train.batch_rate_power": Constant(0.5, "rates go with the root of the batch"),
    "eval.epoch_end": Constant(False, "eval.every takes epochs, too, such as `1 epoch`"),
    "checkpoint.minutes": Constant(0.0, "checkpoint.every takes minutes, too, such as `10 minutes`"),
    "checkpoint.epochs": Constant(0, "checkpoint.every takes epochs, too, such as `2 epochs`"),
    "checkpoint.full_disk_wait": Constant(300.0, "a run on a full disk saves again once there is room: resume it"),
    "parallel.check_every": Constant(1000, "to compare the weights takes no time that could be seen"),
}


def _dropped(rule: str) -> Callable[[Any], tuple[str, Any] | None]:
    return lambda value: ("clean.drop", [rule]) if value is True else None


_OF_A_SOURCE = ("field", "document_start")


def _without_nulls(source: Any) -> tuple[str, Any]:
    """Sources of a mixture had fields and a `document_start` of their own."""
    if isinstance(source, list):
        source = [
            {name: value for name, value in one.items() if value is not None or name not in _OF_A_SOURCE}
            if isinstance(one, Mapping)
            else one
            for one in source
        ]
    return "data.source", source


# By the former path: the field of today and its value there, or None where nothing is said that does not hold anyway.
_JOINED: Mapping[str, Callable[[Any], tuple[str, Any] | None]] = {
    "clean.exact_duplicates": _dropped("exact_duplicates"),
    "clean.repetition": _dropped("repetition"),
    "clean.quality": _dropped("quality"),
    "data.source": _without_nulls,
    "data.reshuffle": lambda value: ("data.packing", "reshuffle") if value is True else None,
    "optim.warmup": lambda value: None if value is None else ("optim.warmup", value),
    "optim.warmup_steps": lambda value: ("optim.warmup", value),
}


def refusal(path: str, where: str) -> ConfigError | None:
    """What to say to somebody who sets what became constant; None for any other key."""
    constant = CONSTANTS.get(path)
    if constant is None:
        return None
    return ConfigError(
        f"{where}: {path} is no setting any more: it is always {format_value(constant.value)}",
        f"leave it out: {constant.why}",
    )


def section_now(section: str, values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """A section of a file as this version has it: by path, each value and the name that it stands under there.

    Names that are no fields stay, for whoever reads them to refuse.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in sorted(values, key=lambda name: f"{section}.{name}" in _JOINED):  # they win over the fields they joined
        path, value = f"{section}.{name}", values[name]
        constant, join = CONSTANTS.get(path), _JOINED.get(path)
        if constant is not None and constant.value == value:
            continue
        if join is not None:
            joined = join(value)
            if joined is None:
                continue
            path, value = joined
            if path == "clean.drop" and path in found:
                value = [*found[path][0], *value]
        found[path] = value, name
    return found


def as_now(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config as this version writes it."""
    return {
        section: {path.removeprefix(f"{section}."): value for path, (value, _) in section_now(section, values).items()}
        if isinstance(values, Mapping)
        else values
        for section, values in stored.items()
    }
