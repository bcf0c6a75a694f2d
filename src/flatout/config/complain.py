"""What the schema knows about each field, and how its complaints are put to a user.

The idea: a user meets one error at a time, as `where: path is value, but rule`, with a hint that gives the field's own
sentence and what it allows. Both are read from the schema, so a new field needs no new words here.

The contract: every `ConfigError` made here has a message and a hint of one line each. The trap: pydantic's location
can be longer than a field's path (a union's branch, a list's index) or shorter (a check across fields), and a union
complains once for each of its branches. So a location is walked along the schema, the parts it does not know are left
out, and of the complaints about one field the most particular is told.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
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
    annotation: Any

    @property
    def takes_lists(self) -> bool:
        """Whether a list may be the field's value."""
        return _item_annotation(self.annotation) is not None


@dataclass(frozen=True)
class _Spot:
    """A place in a config: `trail` holds, from the outside in, the path of each step and what the schema says of it."""

    trail: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def path(self) -> str:
        return self.trail[-1][0] if self.trail else ""

    @property
    def described(self) -> Mapping[str, Any]:
        return self.trail[-1][1] if self.trail else _schema()

    @property
    def field(self) -> str:
        """The field's path that this place belongs to, or the section's."""
        return next((path for path, _ in self.trail if path in field_facts()), self.path)

    def origin(self, origins: Mapping[str, str], fallback: str) -> str:
        """Where the nearest thing around this place was written."""
        return next((origins[path] for path, _ in reversed(self.trail) if path in origins), fallback)


# Words other trainers use, so that a config written from habit gets a useful answer.
_ELSEWHERE_CALLED = {
    "accum_steps": "speed.accumulation",
    "amp": "speed.precision",
    "attn_implementation": "speed.attention",
    "batch_size": "train.batch_tokens",
    "bf16": "speed.precision",
    "block_list": "clean.blocked_urls",
    "block_size": "model.context",
    "blocklist": "clean.blocked_urls",
    "content_field": "data.field",
    "content_key": "data.field",
    "d_ff": "model.mlp_width",
    "d_model": "model.width",
    "data_dir": "data.source",
    "data_files": "data.source",
    "data_path": "data.source",
    "dataset": "data.source",
    "dataset_format": "data.format",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "dataset_type": "data.format",
    "datasets": "data.source",
    "dedup": "clean.exact_duplicates",
    "deduplicate": "clean.exact_duplicates",
    "document_separator": "data.document_start",
    "dtype": "speed.precision",
    "eigenstates": "model.states",
    "encoding_errors": "data.invalid_utf8",
    "eval_data": "data.val_source",
    "eval_dataset": "data.val_source",
    "eval_interval": "eval.every",
    "exact_dedup": "clean.exact_duplicates",
    "file_format": "data.format",
    "file_type": "data.format",
    "flash": "speed.attention",
    "flash_attention": "speed.attention",
    "flash_attn": "speed.attention",
    "fp16": "speed.precision",
    "fuzzy_dedup": "clean.near_duplicates",
    "grad_accum_steps": "speed.accumulation",
    "grad_clip": "optim.clip",
    "gradient_accumulation_steps": "speed.accumulation",
    "gradient_checkpointing": "speed.checkpointing",
    "gradient_clip": "optim.clip",
    "head_dim": "model.head_size",
    "hidden_size": "model.width",
    "input_file": "data.source",
    "json_keys": "data.field",
    "k_eigenstates": "model.states",
    "lang": "clean.languages",
    "langs": "clean.languages",
    "language": "clean.languages",
    "layer_pattern": "model.pattern",
    "layer_types": "model.pattern",
    "log_interval": "output.log_every",
    "lr": "optim.learning_rate",
    "max_chars": "clean.max_characters",
    "max_grad_norm": "optim.clip",
    "max_iters": "train.steps",
    "max_length": "model.context",
    "max_steps": "train.steps",
    "micro_batch_size": "speed.micro_batch",
    "min_chars": "clean.min_characters",
    "min_length": "clean.min_characters",
    "min_lr_ratio": "optim.min_ratio",
    "minhash": "clean.near_duplicates",
    "minhash_dedup": "clean.near_duplicates",
    "minhash_threshold": "clean.near_duplicates",
    "mixture": "data.source",
    "n_embd": "model.width",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "near_dedup": "clean.near_duplicates",
    "num_eigenstates": "model.states",
    "num_epochs": "train.epochs",
    "num_workers": "speed.workers",
    "output_dir": "output.folder",
    "pack_sequences": "data.packing",
    "sample_packing": "data.packing",
    "rms_norm_eps": "model.norm_eps",
    "rope_theta": "model.rope_base",
    "save_interval": "checkpoint.every",
    "separator": "data.document_start",
    "seq_len": "model.context",
    "sequence_length": "model.context",
    "sequence_packing": "data.packing",
    "shard_size": "data.shard_tokens",
    "sliding_window": "model.window",
    "stream": "data.streaming",
    "test_size": "data.val_fraction",
    "text_column": "data.field",
    "text_field": "data.field",
    "text_key": "data.field",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "tokenizer_type": "data.tokenizer",
    "tf32": "speed.precision",
    "tokens_per_shard": "data.shard_tokens",
    "torch_compile": "speed.compile",
    "train_data": "data.source",
    "train_file": "data.source",
    "train_files": "data.source",
    "url_blocklist": "clean.blocked_urls",
    "use_amp": "speed.precision",
    "use_compile": "speed.compile",
    "val_data": "data.val_source",
    "val_file": "data.val_source",
    "val_split": "data.val_fraction",
    "validation_data": "data.val_source",
    "validation_file": "data.val_source",
    "validation_split": "data.val_fraction",
    "validation_split_percentage": "data.val_fraction",
    "vocab_size": "model.vocab",
    "warmup_iters": "optim.warmup_steps",
}

_VALUE_ELSEWHERE_CALLED = {
    "bfloat16": "bf16",
    "false": "off",
    "float16": "fp16",
    "float32": "fp32",
    "half": "fp16",
    "no": "off",
    "true": "on",
    "yes": "on",
}

_ITEM_ELSEWHERE_CALLED = {
    "file": "path",
    "name": "path",
    "probability": "weight",
    "proportion": "weight",
    "ratio": "weight",
    "source": "path",
    "type": "format",
    "upsample": "weight",
}

# What a value should have been, by the type of the complaint that it is not.
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a mapping",
}
_RULES = {
    "finite_number": "it must be a finite number",
    "string_too_short": "it must not be empty",
    "too_short": "it must not be empty",
}
# The patterns of the schema in words; a pattern is for machines.
_FORMS = {
    r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$": "auto, cpu, mps, cuda or cuda:N",
    r"^[AEW]{1,1000}$": "letters A, E and W, as in EEEA",
    r"^[a-z]{2,3}$": "a code of two or three small letters, such as en",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$": "up to 100 letters, digits, dots, dashes and underscores, none of the last "
    "three in front",
}
_UNKNOWN_KEYS = ("extra_forbidden", "invalid_key")
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
                facts[prefix + name] = FieldFact(owner, name, field.description or "", field.annotation)
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
    """What a field takes, in words: `a whole number at least 1 and at most 1000`."""
    return _allowed(_spot_at(path.split(".")).described)


def choices(path: str) -> str:
    """The words that a field is chosen from, as a sentence; nothing for a field that is no choice."""
    options = _options(_spot_at(path.split(".")).described)
    for how, described in (("One of", options), ("Any of", [option.get("items", {}) for option in options])):
        found = [format_value(value) for option in described for value in option.get("enum", [])]
        if found:
            return f"{how} {', '.join(found)}."
    return ""


def with_whole_numbers(annotation: Any, value: Any) -> Any:
    """`1e9` is a float by YAML's rules; where only whole numbers are taken, in lists too, a whole float is one."""
    if isinstance(value, float):
        kinds = _kinds(annotation)
        return int(value) if value.is_integer() and int in kinds and float not in kinds else value
    if isinstance(value, list) and (item := _item_annotation(annotation)) is not None:
        return [with_whole_numbers(item, inner) for inner in value]
    if isinstance(value, dict):
        models = [model for kind in _kinds(annotation) if (model := section_class(kind)) is not None]
        fields = models[0].model_fields if models else {}
        return {
            key: with_whole_numbers(fields[key].annotation, inner) if key in fields else inner
            for key, inner in value.items()
        }
    return value


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


def nearest_fields(name: str) -> list[str]:
    """The same for a word without a section: fields only, whichever section's name it resembles too."""
    found = [path for path in nearest_paths(name) if path in field_facts()]
    if found:
        return found
    names = {path.rpartition(".")[2]: path for path in reversed(field_facts())}
    return [names[match] for match in _close_matches(name[:100].lower(), list(names), 0.7)]


def is_called_elsewhere(name: str) -> bool:
    """Whether a word is another trainer's for a field of ours, whose values may be in other units."""
    return name.lower() in _ELSEWHERE_CALLED


def validate(values: object, origins: Mapping[str, str], fallback: str) -> RunConfig:
    """The config that nested `values` make, or one `ConfigError`.

    `origins` says by dotted path where a value was written; `fallback` stands in for paths it does not hold.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain_error(error.errors(include_url=False), origins, fallback) from None
    for path in field_facts():
        for place, text in _texts_in(value_at(config, path), path):
            if has_control_character(text):
                where = origins.get(place, origins.get(path, fallback))
                raise ConfigError(
                    f"{where}: {place} is {shorten(text)}, but it may not hold control characters",
                    f"remove them; {_help(_spot_at(path.split('.')))}",
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


def _explain_error(errors: Sequence[ErrorDetails], origins: Mapping[str, str], fallback: str) -> ConfigError:
    error, spot, wanted = _most_particular(errors)
    kind, context, path = error["type"], error.get("ctx", {}), spot.path
    where = spot.origin(origins, fallback)
    if kind in _UNKNOWN_KEYS:
        in_item = spot.field != path
        return _unknown_in_item(spot, where) if in_item else unknown_key(path, where)
    if kind == "value_error":
        conflict = context.get("error")
        hint = getattr(conflict, "hint", "change one of the values it names")
        return _explain_conflict(path, str(conflict or error["msg"]), hint, origins, fallback)
    if kind == "missing":
        return ConfigError(f"{where}: {path} is missing", _help(spot))
    if kind in _RANGE_RULES:
        name, words = _RANGE_RULES[kind]
        rule = f"{words} {_number(context[name])}"
    elif kind in ("literal_error", "string_pattern_mismatch"):
        rule = f"it must be {_allowed(spot.described)}"
    elif path in section_paths():
        rule = "it must be a section with fields of its own"
    elif wanted:
        rule = f"it must be {' or '.join(wanted)}"
    else:
        rule = _RULES.get(kind, f"it was refused: {error['msg']}")
    what = f"{path} is {shorten(error['input'])}" if path else f"the config is {shorten(error['input'])}"
    # A list of choices is long, and the rule has given it.
    hint = _help(spot, allowed=kind not in ("literal_error", "string_pattern_mismatch")) + _advice(
        kind, spot, error["input"]
    )
    return ConfigError(f"{where}: {what}, but {printable(rule)}", hint)


def _most_particular(errors: Sequence[ErrorDetails]) -> tuple[ErrorDetails, _Spot, list[str]]:
    """The complaint to tell, its place, and what its place takes according to all the complaints about it.

    It is about the first field that has any; there about the first wrong item of a list; and of the branches of a
    union about the one that got furthest, which is the one that was meant.
    """
    found = [(error, _spot_at(error["loc"], unknown=error["type"] in _UNKNOWN_KEYS)) for error in errors]
    field = found[0][1].field
    found = [(error, spot) for error, spot in found if spot.field == field]
    inner = next((spot for _, spot in found if spot.path != field), None)
    if inner is not None:
        outside = [path for path, _ in inner.trail].index(field)
        item = inner.trail[outside + 1][0]
        found = [(error, spot) for error, spot in found if any(path == item for path, _ in spot.trail)]
    # A misspelt key often leaves a field missing as well; the misspelling is what there is to mend.
    error, spot = max(found, key=lambda pair: (len(pair[1].trail), pair[0]["type"] in _UNKNOWN_KEYS))
    kinds = [other["type"] for other, place in found if place.path == spot.path]
    return error, spot, [_WANTED[kind] for kind in kinds if kind in _WANTED]


def _spot_at(location: Sequence[str | int], *, unknown: bool = False) -> _Spot:
    """Walks a location along the schema, past the names of union branches; `unknown`: its last part is no field."""
    trail: list[tuple[str, Mapping[str, Any]]] = []
    path, described = "", _schema()
    for part in location[:-1] if unknown else location:
        options = _options(described)
        if isinstance(part, int):
            step = next((option["items"] for option in options if "items" in option), None)
            name = f"{path}[{part}]"
        else:
            fields = {name: inner for option in options for name, inner in option.get("properties", {}).items()}
            step = fields.get(part)
            name = f"{path}.{part}" if path else part
        if step is not None:
            path, described = name, step
            trail.append((path, described))
    if unknown:
        trail.append((f"{path}.{location[-1]}" if path else str(location[-1]), {}))
    return _Spot(tuple(trail))


def _unknown_in_item(spot: _Spot, where: str) -> ConfigError:
    """The error for an unknown key in a mapping inside a list."""
    parent, around = spot.trail[-2]
    name = spot.path.removeprefix(f"{parent}.")
    known = [key for option in _options(around) for key in option.get("properties", {})]
    wanted = name[:100].strip().lower().replace("-", "_")
    elsewhere = _ITEM_ELSEWHERE_CALLED.get(wanted) or _ELSEWHERE_CALLED.get(wanted, "").rpartition(".")[2]
    close = [elsewhere] if elsewhere in known else _close_matches(wanted, known, 0.6)
    hint = f"did you mean {parent}.{close[0]}?" if close else f"the keys of an item are {', '.join(known)}"
    return ConfigError(f"{where}: {parent}.{shorten_path(name)} is not a known key", hint)


def _explain_conflict(path: str, text: str, hint: str, origins: Mapping[str, str], fallback: str) -> ConfigError:
    """A check across fields: keeps the schema's sentence and finds the fields it speaks of, to say who wrote them."""
    words = {word.strip(".") for word in re.findall(r"[\w.]+", text)}
    below = f"{path}." if path else ""
    named = [known for known in field_facts() if known in words or (below and known.removeprefix(below) in words)]
    written = [f"{known} from {origins[known]}" for known in named if known in origins]
    where = f" ({', '.join(written)})" if written else ""
    head = "" if written else f"{fallback}: "
    head += f"{path}: " if path else ""
    return ConfigError(f"{head}{printable(text)}{where}", hint)


def _help(spot: _Spot, *, allowed: bool = True) -> str:
    """The sentence of the nearest thing around a place that has one, and what that allows; a section's keys."""
    if spot.field in field_facts():
        described = next(described for _, described in reversed(spot.trail) if "description" in described)
        return described["description"] + (f" Allowed: {_allowed(described)}." if allowed else "")
    return _known_below(spot.path if spot.path in section_paths() else "", ())


def _known_below(section: str, extras: tuple[str, ...]) -> str:
    if section:
        names = [path.removeprefix(section + ".") for path in field_facts() if path.startswith(section + ".")]
        return f"the keys of {section} are {', '.join(names)}"
    return f"the keys at the top level are {', '.join([*section_paths(), *extras])}"


def _advice(kind: str, spot: _Spot, value: object) -> str:
    options = _options(spot.described)
    if kind == "string_type" and isinstance(value, bool | int | float):
        return " Put it in double quotes to make it text."
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and looks_like_value(value):
        return " Remove the quotes: a value in quotes is text."
    if any("items" in option for option in options):
        if value in (None, False) or (isinstance(value, str) and value.lower() in ("off", "none", "no", "false", "")):
            return " Write [] for none."
        if isinstance(value, str | dict):
            return " Put brackets around it to make it a list."
    if kind == "literal_error" and isinstance(value, str):
        choices = [str(choice) for option in options for choice in option.get("enum", [])]
        if value.lower() == "fp8" and spot.path == "speed.precision":
            return " Products in 8 bits have a switch of their own, speed.fp8."
        if _VALUE_ELSEWHERE_CALLED.get(value.lower()) in choices:
            return f" Did you mean {_VALUE_ELSEWHERE_CALLED[value.lower()]}?"
        close = _close_matches(value[:100].lower(), choices, 0.6)
        return f" Did you mean {close[0]}?" if close else ""
    return ""


@cache
def _schema() -> Mapping[str, Any]:
    return RunConfig.model_json_schema()


def _options(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a described value, those that stand elsewhere in the schema fetched from there."""
    parts = described.get("anyOf", [described])
    return [_schema()["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in parts]


def _allowed(described: Mapping[str, Any], join: str = ", or ") -> str:
    return join.join(_allowed_by(option) for option in _options(described))


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
        if "pattern" in described:
            return _FORMS.get(described["pattern"], f"text of the form {described['pattern']}")
        return "text that is not empty" if described.get("minLength") else "text"
    if kind == "array":
        what = "a list that is not empty and" if described.get("minItems") else "a list"
        return f"{what} whose items are {_allowed(described['items'], ' or ')}"
    if kind == "object":
        return "{" + ", ".join(described.get("properties", {})) + "}"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), f"a value of type {kind}")


def _texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a field's value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts_in(item, f"{path}[{number}]")
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _texts_in(getattr(value, name), f"{path}.{name}")


def _close_matches(word: str, known: list[str], cutoff: float) -> list[str]:
    from difflib import get_close_matches  # here: only a mistake pays for the import

    return get_close_matches(word, known, n=1, cutoff=cutoff)


def _number(value: float) -> str:
    if not float(value).is_integer() or abs(value) >= 2**64:
        return str(value)
    return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))


def _item_annotation(annotation: Any) -> Any:
    """The annotation of the items, where an annotation allows a list."""
    return next((get_args(kind)[0] for kind in _kinds(annotation) if get_origin(kind) is list), None)


def _kinds(annotation: Any) -> list[Any]:
    """The types in an annotation, looking through unions and `Annotated`; literals count as their own type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part) if kind is not NoneType]
    return [Literal] if origin is Literal else [annotation]
