"""What the schema knows about each field, and how its complaints are put to a user.

The idea: a user meets one error at a time, as `where: path is value, but rule`, with a hint that gives the field's own
sentence and what it allows. Both are read from the schema, so a new field needs no new words here.

The contract: every `ConfigError` made here has a message and a hint of one line each. The trap: pydantic's location
can be longer than a field's path (a union's branch, a list's index) or shorter (a check across fields), so it is
matched to the nearest known path and never trusted to be one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flatout.config.schema import RunConfig
from flatout.config.yaml_loader import format_value, has_control_character, looks_like_value, printable, shorten
from flatout.errors import ConfigError


@dataclass(frozen=True)
class FieldFact:
    """One leaf of the schema: `owner` is the section's class and `name` the field's name in it."""

    owner: type[BaseModel]
    name: str
    description: str
    takes_integers_only: bool


# Words other trainers use, so that a config written from habit gets a useful answer.
_ELSEWHERE_CALLED = {
    "accum_steps": "speed.accumulation",
    "batch_size": "train.batch_tokens",
    "block_size": "model.context",
    "d_ff": "model.mlp_width",
    "d_model": "model.width",
    "dtype": "speed.precision",
    "eval_interval": "eval.every",
    "grad_accum_steps": "speed.accumulation",
    "grad_clip": "optim.clip",
    "gradient_accumulation_steps": "speed.accumulation",
    "gradient_checkpointing": "speed.checkpointing",
    "gradient_clip": "optim.clip",
    "hidden_size": "model.width",
    "log_interval": "output.log_every",
    "lr": "optim.learning_rate",
    "max_grad_norm": "optim.clip",
    "max_iters": "train.steps",
    "max_length": "model.context",
    "max_steps": "train.steps",
    "micro_batch_size": "speed.micro_batch",
    "min_lr_ratio": "optim.min_ratio",
    "n_embd": "model.width",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_epochs": "train.epochs",
    "num_workers": "speed.workers",
    "output_dir": "output.folder",
    "save_interval": "checkpoint.every",
    "seq_len": "model.context",
    "sequence_length": "model.context",
    "use_amp": "speed.precision",
    "use_compile": "speed.compile",
    "vocab_size": "model.vocab",
    "warmup_iters": "optim.warmup_steps",
}

_TYPE_RULES = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "finite_number": "it must be a finite number",
    "string_pattern_mismatch": "it does not have the required form",
    "model_type": "it must be a section with fields of its own",
    "missing": "it must be given",
}
_RANGE_RULES = {
    "greater_than": ("gt", "it must be above"),
    "greater_than_equal": ("ge", "it must be at least"),
    "less_than": ("lt", "it must be below"),
    "less_than_equal": ("le", "it must be at most"),
}


@cache
def field_facts() -> dict[str, FieldFact]:
    """Every leaf of the schema by dotted path, in the schema's order."""
    facts: dict[str, FieldFact] = {}
    waiting: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    while waiting:
        prefix, owner = waiting.pop(0)
        for name, field in owner.model_fields.items():
            section = section_class(field.annotation)
            if section is not None:
                waiting.append((f"{prefix}{name}.", section))
            else:
                only_integers = _takes_integers_only(field.annotation)
                facts[prefix + name] = FieldFact(owner, name, field.description or "", only_integers)
    return facts


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section that a field's annotation names, or None when the field is a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


@cache
def section_paths() -> tuple[str, ...]:
    """Dotted paths of the sections, such as `model`."""
    paths = dict.fromkeys(path.rpartition(".")[0] for path in field_facts())
    return tuple(path for path in paths if path)


def allowed_values(path: str) -> str:
    """What a field takes, in words: `a whole number, at least 1 and at most 1000`."""
    fact = field_facts()[path]
    described = fact.owner.model_json_schema()["properties"][fact.name]
    return ", or ".join(_allowed_by(part) for part in described.get("anyOf", [described]))


def unknown_key(path: str, where: str, *, top_level_extras: tuple[str, ...] = ()) -> ConfigError:
    """The error for a dotted path that is no field, with the nearest known one."""
    if path in section_paths():
        parts = [known.rpartition(".")[2] for known in field_facts() if known.startswith(path + ".")]
        return ConfigError(f"{where}: {path} is a section, not a value", f"give one of its fields: {', '.join(parts)}")
    close = nearest_paths(path, top_level_extras)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        parent = path.rpartition(".")[0]
        hint = _known_below(parent if parent in section_paths() else "", top_level_extras)
    return ConfigError(f"{where}: {shorten_path(path)} is not a known key", hint)


def nearest_paths(path: str, top_level_extras: tuple[str, ...] = ()) -> list[str]:
    """At most two known paths that `path` was probably meant to be, the likeliest first."""
    # difflib takes quadratic time, and no field's name is this long.
    path = path[:100].strip().lower().replace("-", "_").lstrip("_")
    parent, _, name = path.rpartition(".")
    if name in _ELSEWHERE_CALLED:
        return [_ELSEWHERE_CALLED[name]]
    known = [*field_facts(), *section_paths(), *top_level_extras]
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if same_name:
        return same_name[:2]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    found = [siblings[match] for match in _close_matches(name, list(siblings), 0.6)]
    found += _close_matches(path, known, 0.75)
    if not found:
        names = {other.rpartition(".")[2]: other for other in known}
        found = [names[match] for match in _close_matches(name, list(names), 0.7)]
    return list(dict.fromkeys(found))[:2]


def validate(values: object, origins: Mapping[str, str], fallback: str) -> RunConfig:
    """The config that nested `values` make, or one `ConfigError`.

    `origins` says by dotted path where a value was written; `fallback` stands in for paths it does not hold.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain_error(error.errors(include_url=False)[0], origins, fallback) from None
    for path in field_facts():
        value = value_at(config, path)
        if isinstance(value, str) and has_control_character(value):
            raise ConfigError(
                f"{origins.get(path, fallback)}: {path} is {shorten(value)}, but it may not hold control characters",
                f"remove them; {_help(path)}",
            )
    return config


def value_at(config: RunConfig, path: str) -> Any:
    """The value of a dotted path such as `model.width`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def shorten_path(path: str) -> str:
    """A key as it is shown in a message: as written where it is a plain word, quoted and escaped otherwise."""
    return path if re.fullmatch(r"[\w.-]{1,80}", path) and path.isprintable() else shorten(path)


def _explain_error(error: ErrorDetails, origins: Mapping[str, str], fallback: str) -> ConfigError:
    location = [str(part) for part in error["loc"]]
    path = ".".join(location)
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown_key(path, fallback)
    if kind == "value_error":
        return _explain_conflict(path, str(context.get("error", error["msg"])), origins, fallback)
    while path not in field_facts() and path not in section_paths() and location:
        location.pop()
        path = ".".join(location)
    if kind == "missing":
        return ConfigError(f"{fallback}: {path} is missing", _help(path))
    if kind in _RANGE_RULES:
        name, words = _RANGE_RULES[kind]
        rule = f"{words} {_number(context[name])}"
    elif kind == "literal_error":
        rule = f"it must be {allowed_values(path)}"
    else:
        rule = _TYPE_RULES.get(kind, f"it was refused: {error['msg']}")
    where = origins.get(path, fallback)
    what = f"{path} is {shorten(error['input'])}" if path else f"the config is {shorten(error['input'])}"
    return ConfigError(f"{where}: {what}, but {printable(rule)}", _help(path) + _advice(kind, path, error["input"]))


def _explain_conflict(path: str, text: str, origins: Mapping[str, str], fallback: str) -> ConfigError:
    """A check across fields: keeps the schema's sentence and finds the fields it speaks of, to say who wrote them."""
    words = {word.strip(".") for word in re.findall(r"[\w.]+", text)}
    below = f"{path}." if path else ""
    named = [known for known in field_facts() if known in words or (below and known.removeprefix(below) in words)]
    written = [f"{known} from {origins[known]}" for known in named if known in origins]
    where = f" ({', '.join(written)})" if written else ""
    head = "" if written else f"{fallback}: "
    head += f"{path}: " if path else ""
    hint = f"set {_either(named)} accordingly" if named else "change one of the values it names"
    return ConfigError(f"{head}{printable(text)}{where}", hint)


def _help(path: str) -> str:
    if path in field_facts():
        return f"{field_facts()[path].description} Allowed: {allowed_values(path)}."
    return _known_below(path if path in section_paths() else "", ())


def _known_below(section: str, extras: tuple[str, ...]) -> str:
    if section:
        names = [path.removeprefix(section + ".") for path in field_facts() if path.startswith(section + ".")]
        return f"the keys of {section} are {', '.join(names)}"
    return f"the keys at the top level are {', '.join([*section_paths(), *extras])}"


def _advice(kind: str, path: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return " Put it in double quotes to make it text."
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and looks_like_value(value):
        return " Remove the quotes: a value in quotes is text."
    if kind == "literal_error" and isinstance(value, str):
        fact = field_facts()[path]
        choices = fact.owner.model_json_schema()["properties"][fact.name].get("enum", [])
        close = _close_matches(value[:100].lower(), [str(choice) for choice in choices], 0.6)
        return f" Did you mean {close[0]}?" if close else ""
    return ""


def _allowed_by(described: Mapping[str, Any]) -> str:
    if "enum" in described:
        return f"one of {', '.join(format_value(value) for value in described['enum'])}"
    kind = described.get("type")
    if kind in ("integer", "number"):
        words = {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        limits = [f"{word} {_number(described[name])}" for name, word in words.items() if name in described]
        noun = "a whole number" if kind == "integer" else "a number"
        return noun + (" " + " and ".join(limits) if limits else "")
    if kind == "string":
        return f"text of the form {described['pattern']}" if "pattern" in described else "text"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), f"a value of type {kind}")


def _close_matches(word: str, known: list[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches  # here: only a mistake pays for the import

    return get_close_matches(word, known, n=1, cutoff=cutoff)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**64 else str(value)


def _either(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} or {paths[-1]}"


def _takes_integers_only(annotation: Any) -> bool:
    return int in (kinds := _scalar_kinds(annotation)) and float not in kinds


def _scalar_kinds(annotation: Any) -> set[Any]:
    """The types in an annotation, looking through unions and `Annotated`; literals count as their own type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _scalar_kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set().union(*(_scalar_kinds(part) for part in get_args(annotation))) - {NoneType}
    return {Literal} if origin is Literal else {annotation}
