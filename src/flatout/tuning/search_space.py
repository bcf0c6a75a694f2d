"""A search space in YAML: which fields of a config a search may turn, and between which values.

    optim.learning_rate: {log: [1e-4, 1e-2]}      # a number, evenly over its logarithm
    optim.weight_decay: {range: [0.0, 0.3]}       # a number, evenly; whole where the field takes whole numbers
    model.layers: {range: [2, 6]}
    optim.warmup: {steps: [0, 200, 50]}           # from, to, by
    optim.schedule: {choices: [cosine, wsd]}

Contract: as strict as the config loader, with file and line in every complaint. Every end of a range and every choice
is put into the config once before anything is trained, so a value that can never work is told at once. Refused are
fields that make losses incomparable (the text, what is evaluated), that only buy a longer run, or that do not change
what is learned (`speed`, which is `flatout tune`'s).
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flatout.config.facts import field_facts, kinds_of, section_paths, with_whole_numbers
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.suggest import unknown_key
from flatout.config.yaml_loader import Node, format_value, printable, read_yaml, shorten
from flatout.errors import ConfigError

FORMS = {"log": "[low, high]", "range": "[low, high]", "steps": "[low, high, step]", "choices": "[one, other, ...]"}
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
_ALLOWED = ("chat.batch_samples",)  # of a section that is refused otherwise


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One field and its values. `form` is log, range, steps or choices; `whole`: only whole numbers are meant."""

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
    words = [f"{path}={format_value(value)}" for path, value in values.items()]
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
    if reason is not None and path not in _ALLOWED:
        raise ConfigError(f"{where}: {path} cannot be searched over: {reason}", "leave it out of the space")
    form, items = _form(path, node, where)
    annotation = field_facts()[path].annotation
    if form == "choices":
        return Dimension(path, form, _choices(path, items, annotation, where), False, where)
    values = [with_whole_numbers(annotation, item.value) for item in items]
    low, high = _ends(path, form, values, where)
    kinds, all_whole = kinds_of(annotation), all(isinstance(value, int) for value in values)
    whole = int in kinds and (all_whole or float not in kinds)
    if whole and not all_whole:
        _fail(where, f"{path} takes whole numbers only", f"write for example {{{form}: [1, 8]}}")
    if form == "log" and low <= 0:
        _fail(where, f"{path}: a logarithmic range begins above 0, not at {format_value(low)}", "raise its low end")
    if form == "steps" and (values[2] <= 0 or values[2] > high - low):
        _fail(where, f"{path}: the step {format_value(values[2])} does not fit between the ends", "take a smaller step")
    return Dimension(path, form, tuple(values if whole else map(float, values)), whole, where)


def reason_against(path: str) -> str | None:
    """Why losses of runs with other values of a field cannot be compared, or need not be."""
    return _REFUSED.get(path) or _REFUSED.get(path.partition(".")[0])


def _form(path: str, node: Node, where: str) -> tuple[str, list[Node]]:
    example = f"write `{path}: {{log: [1e-4, 1e-2]}}`, or with range, steps or choices"
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
    wanted = 3 if form == "steps" else 2
    if len(values) != wanted:
        _fail(where, f"{path}: {form} takes {wanted} numbers {FORMS[form]}, not {len(values)}", "give exactly these")
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
