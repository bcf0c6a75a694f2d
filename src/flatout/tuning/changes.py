"""Settings that measurements change: search spaces, the fields of an ablation, and what was found as a config file.

A search space, from YAML or Python:

    optim.learning_rate: {log: [1e-4, 1e-2]}      # a number, evenly over its logarithm
    optim.weight_decay: {range: [0.0, 0.3]}       # a number, evenly; whole where the field takes whole numbers
    model.layers: {range: [2, 6]}
    optim.schedule: {choices: [cosine, wsd]}

It is as strict as the config loader, with file and line in every complaint. Every end of a range and every choice is
tried in the config before anything is trained. Refused are fields that make losses incomparable (the text, the
evaluation), that only buy a longer run, or that do not change what is learned (`speed`, which is `flatout tune`'s).

An ablation changes one field of the whole config at a time. A field that is true or false has one other value; any
other field is written with it (`optim.schedule=linear`). Without a list, every field of `model`, `optim` and `train`
that the config sets differently from its default goes back to the default (leave-one-out). A named field that cannot
be changed is a `ConfigError`; without a list, such a field is left out with the reason.

The file of what was found has the preset, what the user wrote beyond it, and the values found. `flatout train FILE`
trains with them. A cap that emulated a smaller card is not in it. The first line ends with a checksum of all others, so
that a file edited since can be recognised.

No torch here.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flatout.config.facts import choices, field_facts, kinds_of, section_paths, value_at, with_whole_numbers
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.model_section import GPT2
from flatout.config.optimizers import TUNED as TUNED_FILE
from flatout.config.sizes import AUTO, LONG
from flatout.config.source import Source
from flatout.config.suggest import unknown_key
from flatout.config.unused import check_used
from flatout.config.yaml_loader import Node, format_value, printable, read_yaml, shorten
from flatout.errors import ConfigError, many
from flatout.records import TuneRow
from flatout.tuning.search import Candidate

FORMS = {"log": "[low, high]", "range": "[low, high]", "choices": "[one, other, ...]"}
MOST_FIELDS, MOST_CHOICES = 30, 100

_REFUSED = {
    "data": "trials with other text could not be compared by their loss",
    "clean": "trials with other text could not be compared by their loss",
    "chat": "trials with other samples could not be compared by their loss",
    "lora.init_from": "it is a path to weights, not a setting",
    "eval": "all trials have to be evaluated alike",
    "checkpoint": "it does not change what is learned",
    "output": "it does not change what is learned",
    "speed": "it does not change what is learned; `flatout tune` finds what is fastest",
    "train.steps": "the longest run would win",
    "train.epochs": "the longest run would win",
    "train.tokens": "the longest run would win",
    "train.minutes": "the longest run would win",
    "train.seed": "the luckiest seed is not a better setting",
    "train.deterministic": "it does not change what is learned",
    "model.vocab": "trials with other tokens could not be compared by their loss",
    "model.init_from": "it is a path to weights, not a setting",
}
_MAY_BE_SEARCHED = ("chat.batch_samples",)  # of a section that is refused otherwise


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One field and its values. `form` is log, range or choices; `whole`: only whole numbers are meant."""

    path: str
    form: str
    values: tuple[Any, ...]
    whole: bool
    where: str

    @property
    def text(self) -> str:
        return f"{{{self.form}: {format_value(list(self.values))}}}"

    def settled(self, value: Any) -> Any:
        """A drawn value as it is trained with: three digits are all that a short run can tell apart."""
        if self.form == "choices" or self.whole or not isinstance(value, float):
            return value
        return min(max(float(f"{value:.3g}"), float(self.values[0])), float(self.values[1]))


@dataclasses.dataclass(frozen=True)
class Space:
    dimensions: tuple[Dimension, ...]

    @property
    def spelling(self) -> str:
        """One text for one space, whatever its file looks like."""
        return json.dumps({d.path: [d.form, list(d.values)] for d in self.dimensions}, sort_keys=True)


def read_space(path: Path, loaded: LoadedConfig) -> Space:
    """The search space in a file, every value of it tried in the config."""
    name = printable(str(path))
    if not path.exists():  # else the hint would be about configs
        raise ConfigError(
            f"{name}: no such file",
            "name a file with the fields to search over, in lines such as `optim.learning_rate: {log: [1e-4, 1e-2]}`",
        )
    tree = read_yaml(path)
    if not tree:
        raise ConfigError(
            f"{name}: names no field to search over", "write lines such as `optim.learning_rate: {log: [1e-4, 1e-2]}`"
        )
    if len(tree) > MOST_FIELDS:
        raise ConfigError(f"{name}: names {len(tree)} fields, at most {MOST_FIELDS} make sense", "search over fewer")
    return _tried(tuple(_dimension(path, node, f"{name}:{node.line}") for path, node in tree.items()), loaded)


def space_of(fields: Mapping[str, Mapping[str, Sequence[Any]]], loaded: LoadedConfig) -> Space:
    """The search space that a program gives, as a file would hold it."""
    where = "search space"
    if not 0 < len(fields) <= MOST_FIELDS:
        raise ConfigError(
            f"{where}: names {len(fields)} fields, and 1 to {MOST_FIELDS} make sense", "search over those"
        )
    return _tried(tuple(_dimension(path, _node(form), where) for path, form in fields.items()), loaded)


def _node(value: Any) -> Node:
    """A value of Python as the YAML reader would give it."""
    if isinstance(value, Mapping):
        return Node({str(key): _node(item) for key, item in value.items()}, 0)
    return Node([_node(item) for item in value] if isinstance(value, list | tuple) else value, 0)


def _tried(dimensions: tuple[Dimension, ...], loaded: LoadedConfig) -> Space:
    """The space, every end of it tried in the config."""
    space = Space(dimensions)
    for dimension in space.dimensions:
        for value in dimension.values[:2] if dimension.form != "choices" else dimension.values:
            _try(loaded, dimension, value)
    return space


def with_values(loaded: LoadedConfig, values: Mapping[str, Any], where: str = "search space") -> LoadedConfig:
    """The config with other values; what does not go together is a `ConfigError`."""
    return with_words(loaded, [f"{path}={format_value(value)}" for path, value in values.items()], where)


def with_words(loaded: LoadedConfig, words: Sequence[str], where: str = "the config") -> LoadedConfig:
    """The config with settings on top."""
    return dataclasses.replace(loaded, config=load_stored(loaded.config.model_dump(), words, where=where).config)


def _dimension(path: str, node: Node, where: str) -> Dimension:
    if path not in field_facts():
        if path in section_paths() and isinstance(node.value, dict):
            inner = next(iter(node.value), "learning_rate")
            raise ConfigError(
                f"{where}: {path} is a section", f"write the whole path of each field here, such as `{path}.{inner}:`"
            )
        raise unknown_key(path, where)
    reason = reason_against(path)
    if reason is not None and path not in _MAY_BE_SEARCHED:
        raise ConfigError(f"{where}: {path} cannot be searched over: {reason}", "leave it out of the space")
    form, items = _form(path, node, where)
    annotation = field_facts()[path].annotation
    if form == "choices":
        return Dimension(path, form, _choices(path, items, annotation, where), False, where)
    values = [with_whole_numbers(annotation, item.value) for item in items]
    low, _ = _ends(path, form, values, where)
    kinds, all_whole = kinds_of(annotation), all(isinstance(value, int) for value in values)
    whole = int in kinds and (all_whole or float not in kinds)
    if whole and not all_whole:
        _fail(where, f"{path} takes whole numbers only", f"write for example {{{form}: [1, 8]}}")
    if form == "log" and low <= 0:
        _fail(where, f"{path}: a logarithmic range begins above 0, not at {format_value(low)}", "raise its low end")
    return Dimension(path, form, tuple(values if whole else map(float, values)), whole, where)


def reason_against(path: str) -> str | None:
    """Why losses of runs with other values of a field cannot be compared, or need not be."""
    return _REFUSED.get(path) or _REFUSED.get(path.partition(".")[0])


def _form(path: str, node: Node, where: str) -> tuple[str, list[Node]]:
    example = f"write `{path}: {{log: [1e-4, 1e-2]}}`, or with range or choices"
    if not isinstance(node.value, dict) or len(node.value) != 1:
        _fail(where, f"{path} is {shorten(node.plain)}, not one form of values", example)
    form, inner = next(iter(node.value.items()))
    if form not in FORMS:
        near = difflib.get_close_matches(form, FORMS, n=1, cutoff=0.5)
        _fail(where, f"{path}: {shorten(form)} is no form of values", f"did you mean {near[0]}?" if near else example)
    if not isinstance(inner.value, list):
        _fail(where, f"{path}: {form} takes a list {FORMS[form]}, not {shorten(inner.plain)}", example)
    return form, inner.value


def _ends(path: str, form: str, values: list[Any], where: str) -> tuple[float, float]:
    if len(values) != 2:
        _fail(where, f"{path}: {form} takes two numbers {FORMS[form]}, not {len(values)}", "give exactly these")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _fail(where, f"{path}: {shorten(value)} is not a number", f"{form} takes numbers; for words use choices")
    if not values[0] < values[1]:
        ends = f"{format_value(values[0])} is not below {format_value(values[1])}"
        _fail(where, f"{path}: {ends}", "write the low end first")
    return values[0], values[1]


def _choices(path: str, items: list[Node], annotation: Any, where: str) -> tuple[Any, ...]:
    values = []
    for item in items:
        if isinstance(item.value, list | dict):
            _fail(where, f"{path}: a choice is a single value, not {shorten(item.plain)}", "write words or numbers")
        values.append(with_whole_numbers(annotation, item.value))
    if not 2 <= len(values) <= MOST_CHOICES:
        _fail(
            where, f"{path}: {len(values)} choices", f"give between 2 and {MOST_CHOICES}, or write the value as a word"
        )
    if len({format_value(value) for value in values}) < len(values):
        _fail(where, f"{path}: a choice is written twice", "keep one of the two")
    return tuple(values)


def _try(loaded: LoadedConfig, dimension: Dimension, value: Any) -> None:
    """Refuses a value that its field does not take; what only fails beside other values is a trial's business."""
    try:
        with_values(loaded, {dimension.path: value}, dimension.where)
    except ConfigError as error:
        if error.setting == dimension.path:
            raise ConfigError(error.what, error.hint, where=dimension.where) from None


def _fail(where: str, problem: str, hint: str) -> NoReturn:
    raise ConfigError(f"{where}: {problem}", hint)


_WHERE = "--fields"
_SECTIONS = ("model", "optim", "train")
# Of sections that are refused otherwise: what changes what is learned, and leaves the validation loss comparable.
_MAY_BE_ABLATED = ("speed.precision", "speed.fp8", "speed.optimizer_state", "data.packing")
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
    """The field that an entry names; an unknown one, or one that cannot be changed, is refused."""
    path = entry.partition("=")[0].strip()
    if path not in field_facts():
        raise unknown_key(path, _WHERE)
    reason = None if path in _MAY_BE_ABLATED else reason_against(path)
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


# The switches of `speed` that tune turns; what a preset says of them is where it starts from, what the user wrote is a
# rule.
TUNED = ("micro_batch", "accumulation", "checkpointing", "loss", "loss_chunk", "kernels", "compile")
TUNED += ("optimizer_offload", "threads")


def written_paths(loaded: LoadedConfig) -> dict[str, Source]:
    """The fields that the user wrote, and where."""
    return {path: source for path, source in loaded.sources.items() if source.by_user}


def kept_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """What the user wrote of the switches that tune turns, by name; auto and null leave the choice to tune."""
    written = written_paths(loaded)
    values = {name: getattr(loaded.config.speed, name) for name in TUNED if f"speed.{name}" in written}
    return {name: value for name, value in values.items() if value not in ("auto", None)}


def train_words(overrides: Sequence[str], tuned: Sequence[str]) -> list[str]:
    """The words of a command line that trains with what was found: tuned words stand in for the user's own."""
    words = {word.partition("=")[0].strip(): word for word in overrides}
    return list((words | {word.partition("=")[0]: word for word in tuned}).values())


def tuned_settings(candidate: Candidate, loaded: LoadedConfig) -> dict[str, Any]:
    """The tuned switches by path; those that say nothing beyond the config are left out."""
    before = loaded.config.speed
    return {
        f"speed.{name}": value
        for name, value in dataclasses.asdict(candidate).items()
        if name not in ("loss_chunk", "optimizer_offload", "threads") or value != getattr(before, name)
    }


def words_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The values found as they stand on a command line."""
    return tuple(f"{path}={value if isinstance(value, str) else format_value(value)}" for path, value in found.items())


def fragment_of(loaded: LoadedConfig, settings: dict[str, Any], row: TuneRow, device: str, capacity: int | None) -> str:
    """The YAML of a config file that is the config with the tuned switches."""
    of = "" if capacity is None else f" of {capacity / 2**30:.1f}"
    peak = "" if row.peak_bytes is None else f", at most {row.peak_bytes / 2**30:.2f}{of} GiB"
    batch = f"{row.micro_batch} x {row.accumulation} sequences"
    if loaded.config.fine_tunes:
        batch = f"{many(loaded.config.chat.batch_samples, 'sample')}, {many(row.micro_batch, 'row')} at once"
    speed = f"{row.tokens_per_second or 0.0:,.0f} tokens/s, {row.milliseconds or 0.0:,.1f} ms per step of {batch}"
    holds = "The switches hold for that device and this model; what is learned depends on them by rounding at most."
    return config_text(loaded, settings, f" on {device}: {speed}{peak}.", [holds])


def config_text(loaded: LoadedConfig, found: Mapping[str, Any], first: str, comments: Sequence[str] = ()) -> str:
    """The YAML of a config file that is the config with the values of `found`, by dotted path.

    `first` is the rest of the first line, after its opening words: what was found, and where.
    """
    values, sections = loaded.config.model_dump(), {}
    named = {one.kind: one.where.split()[1] for one in loaded.sources.values() if one.where.startswith(f"{one.kind} ")}
    preset = named.get("preset")
    replaced = {*found, "speed.accumulation"} if "speed.micro_batch" in found else {*found}
    for path, source in loaded.sources.items():
        section, _, name = path.partition(".")
        # A layer's null that silences an alternative below it (train.tokens beside train.steps) follows by itself.
        silenced = source.where.endswith(")") and values[section][name] is None
        if path not in replaced and (source.by_user or source.kind == "hardware") and not silenced:
            sections.setdefault(section, {})[name] = values[section][name]
    for path, value in found.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = [*(f"# {' '.join(comment.split())}" for comment in comments), *([f"preset: {preset}"] if preset else [])]
    # One that follows from minutes does so again.
    size = loaded.size.name if loaded.size is not None else named.get("size") if preset in LONG else None
    lines += [f"size: {size}"] if size not in (None, AUTO) else []
    for section, fields in sections.items():
        lines += ["", f"{section}:", *(f"  {name}: {format_value(value)}" for name, value in fields.items())]
    body = "\n".join(lines) + "\n"
    return f"{' '.join(f'{TUNED_FILE}{first}'.split())}\n{body}"
