"""Which fields `flatout ablate` changes, one at a time, and to what.

Idea: a field is judged by what its value in the config is worth there, so a change is made to the whole config and to
nothing else. A field that is true or false has one other value; any other field is written with it
(`optim.schedule=linear`). Without a list, every field of `model`, `optim` and `train` that the config sets differently
from its default goes back to the default, one at a time (leave-one-out).

Contract: no torch. Every change is tried in the config before anything is trained. A field that was named and cannot be
changed is a `ConfigError`; one that nobody named is left out with the reason.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from flatout.config.facts import choices, field_facts, kinds_of, value_at
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.model_section import GPT2
from flatout.config.suggest import unknown_key
from flatout.config.unused import check_used
from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError
from flatout.tuning.search_space import reason_against

_WHERE = "--fields"
_SECTIONS = ("model", "optim", "train")
# Of sections that are refused otherwise: what changes what is learned, and leaves the validation loss comparable.
_ALLOWED = ("speed.precision", "speed.fp8", "speed.optimizer_state", "data.packing")
_SIZES = ("layers", "width", "heads", "kv_heads", "head_size", "mlp_width", "states", "context")
_NOT_BY_THEMSELVES = {
    **{f"model.{name}": "a size" for name in _SIZES},
    "model.family": "other fields depend on it",
}


@dataclasses.dataclass(frozen=True)
class Change:
    """One field with another value; `configured` and `changed` are the two as YAML."""

    path: str
    configured: str
    changed: str

    @property
    def word(self) -> str:
        """The change as a word of a command line."""
        return f"{self.path}={self.changed}"

    def made_in(self, loaded: LoadedConfig) -> LoadedConfig:
        """The config with the change; what does not go together is a `ConfigError`."""
        return with_words(loaded, [self.word])


def with_words(loaded: LoadedConfig, words: Sequence[str]) -> LoadedConfig:
    """The config with settings on top."""
    return dataclasses.replace(loaded, config=load_stored(loaded.config.model_dump(), words, where="the config").config)


def split_fields(text: str) -> list[str]:
    """The entries of a list with commas between them; commas inside brackets belong to an entry."""
    entries, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            entries.append("")
        else:
            entries[-1] += letter
    return [entry.strip() for entry in entries if entry.strip()]


def check_length(loaded: LoadedConfig) -> None:
    """Refuses a config whose runs cannot be of equal length."""
    if loaded.config.train.minutes is not None:
        raise ConfigError(
            "a run of train.minutes has no number of tokens at which others could be compared with it",
            "give its length as train.steps or train.tokens",
        )


def choose(fields: Sequence[str] | None, loaded: LoadedConfig) -> tuple[list[Change], dict[str, str]]:
    """The changes that were asked for, or leave-one-out; and which fields are left out, with why."""
    check_length(loaded)
    return changes_to_defaults(loaded) if fields is None else (named_changes(fields, loaded), {})


def named_changes(entries: Sequence[str], loaded: LoadedConfig) -> list[Change]:
    """The changes that were asked for: `section.field` flips what is true or false, `section.field=value` is any."""
    changes: list[Change] = []
    for entry in entries:
        change = _named(entry, loaded)
        if change in changes:
            raise ConfigError(f"{_WHERE}: {change.word} is named twice", "leave one of the two out")
        changes.append(change)
    if not changes:
        raise ConfigError(f"{_WHERE} names no field", f"for example {_WHERE} model.qk_norm,optim.schedule=linear")
    return changes


def check_named(entry: str) -> str:
    """The field that an entry names; one that nobody knows or that cannot be changed is refused."""
    path = entry.partition("=")[0].strip()
    if path not in field_facts():
        raise unknown_key(path, _WHERE)
    reason = None if path in _ALLOWED else reason_against(path)
    if reason is not None:
        raise ConfigError(f"{_WHERE}: {path} cannot be ablated: {reason}", "leave it out")
    return path


def _named(entry: str, loaded: LoadedConfig) -> Change:
    path, equals = check_named(entry), "=" in entry
    value = value_at(loaded.config, path)
    if not equals and bool not in kinds_of(field_facts()[path].annotation):
        default = _default(path, loaded)
        other = "VALUE" if value == default else format_value(default)
        raise ConfigError(
            f"{_WHERE}: {path} is {format_value(value)} and has more than one other value",
            f"write the one to compare with: {path}={other}. {choices(path)}",
        )
    word = entry if equals else f"{path}={format_value(not value)}"
    made = load_stored(loaded.config.model_dump(), [word], where="the config", written=_WHERE)
    check_used(made)  # a change that no run looks at is not worth one
    other = value_at(made.config, path)
    if other == value:
        raise ConfigError(f"{_WHERE}: {path} is {format_value(value)} in the config already", "write another value")
    return Change(path, format_value(value), format_value(other))


def changes_to_defaults(loaded: LoadedConfig) -> tuple[list[Change], dict[str, str]]:
    """Leave-one-out: what the config sets differently from the default, back to it; and what is left out, with why."""
    changes: list[Change] = []
    left_out: dict[str, str] = {}
    for path, value, default in _set(loaded):
        change = Change(path, format_value(value), format_value(default))
        if path in _NOT_BY_THEMSELVES:
            left_out[path] = _NOT_BY_THEMSELVES[path]
            continue
        try:
            change.made_in(loaded)
        except ConfigError as error:
            left_out[path] = f"{change.word} alone does not go: {error.what}"
            continue
        changes.append(change)
    if not changes:
        raise ConfigError(
            "the config sets nothing of model, optim and train differently from its default",
            f"name fields with {_WHERE}, such as {_WHERE} model.qk_norm,optim.schedule=linear",
        )
    return changes, left_out


def _set(loaded: LoadedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Fields that the config sets and that may be compared: path, value and default, where these differ."""
    for path in field_facts():
        if path.partition(".")[0] not in _SECTIONS or reason_against(path) is not None:
            continue
        value, default = value_at(loaded.config, path), _default(path, loaded)
        if value != default and loaded.sources[path].kind not in ("default", "family"):
            yield path, value, default


def _default(path: str, loaded: LoadedConfig) -> Any:
    section, _, name = path.partition(".")
    if section == "model" and name in GPT2 and loaded.config.model.family == "gpt2":
        return GPT2[name]
    return field_facts()[path].get_default(call_default_factory=True)
