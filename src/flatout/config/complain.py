"""How the schema's complaints are put to a user.

The idea: a user meets one error at a time, as `where: path is value, but rule`, with a hint that gives the field's own
sentence and what it allows. Both are read from the schema, so a new field needs no new words here.

The contract: every `ConfigError` made here has a message and a hint of one line each. The trap: pydantic's location
can be longer than a field's path (a union's branch, a list's index) or shorter (a check across fields), and a union
complains once for each of its branches. So a location is walked along the schema, the parts it does not know are left
out, and of several complaints about one field the most specific is shown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flatout.config import facts, suggest
from flatout.config.schema import RunConfig
from flatout.config.yaml_loader import has_control_character, looks_like_value, printable, shorten
from flatout.errors import ConfigError

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
_UNKNOWN_KEYS = ("extra_forbidden", "invalid_key")
_RANGE_RULES = {
    "greater_than": ("gt", "it must be above"),
    "greater_than_equal": ("ge", "it must be at least"),
    "less_than": ("lt", "it must be below"),
    "less_than_equal": ("le", "it must be at most"),
}


def validate(values: object, origins: Mapping[str, str], fallback: str) -> RunConfig:
    """The config that nested `values` make, or one `ConfigError`.

    `origins` says by dotted path where a value was written; `fallback` stands in for paths it does not hold.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain_error(error.errors(include_url=False), origins, fallback) from None
    for path in facts.field_facts():
        for inner, text in _texts_in(facts.value_at(config, path), path):
            if has_control_character(text):
                where = origins.get(inner, origins.get(path, fallback))
                raise ConfigError(
                    f"{inner} is {shorten(text)}, but it may not hold control characters",
                    f"remove them; {_help(facts.spot_at(path.split('.')))}",
                    where=where,
                    setting=path,
                )
    return config


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


def _explain_error(errors: Sequence[ErrorDetails], origins: Mapping[str, str], fallback: str) -> ConfigError:
    error, spot, wanted = _most_particular(errors)
    kind, context, path = error["type"], error.get("ctx", {}), spot.path
    where = spot.origin(origins, fallback)
    if kind in _UNKNOWN_KEYS:
        in_item = spot.field != path
        return _unknown_in_item(spot, where) if in_item else suggest.unknown_key(path, where)
    if kind == "value_error":
        conflict = context.get("error")
        hint = getattr(conflict, "hint", "change one of the values it names")
        return _explain_conflict(path, str(conflict or error["msg"]), hint, origins, fallback)
    if kind == "missing":
        return ConfigError(f"{path} is missing", _help(spot), where=where, setting=path)
    if kind in _RANGE_RULES:
        name, words = _RANGE_RULES[kind]
        rule = f"{words} {facts.number_text(context[name])}"
    elif kind in ("literal_error", "string_pattern_mismatch"):
        rule = f"it must be {facts.allowed_values(spot.described)}"
    elif path in facts.section_paths():
        rule = "it must be a section with fields of its own"
    elif wanted and kind in _WANTED:
        rule = f"it must be {' or '.join(wanted)}"
    else:
        rule = _RULES.get(kind, f"it was refused: {error['msg']}")
    what = f"{path} is {shorten(error['input'])}" if path else f"the config is {shorten(error['input'])}"
    # A list of choices is long, and the rule has given it.
    hint = _help(spot, allowed=kind not in ("literal_error", "string_pattern_mismatch")) + _advice(
        kind, spot, error["input"]
    )
    return ConfigError(f"{what}, but {printable(rule)}", hint, where=where, setting=spot.field)


def _most_particular(errors: Sequence[ErrorDetails]) -> tuple[ErrorDetails, facts.Spot, list[str]]:
    """The complaint to show, its value's spot, and what that spot takes according to all complaints about it.

    It is about the first field that has any; there about the first wrong item of a list; and of the branches of a
    union about the one that got furthest, which is the one that was meant.
    """
    found = [(error, facts.spot_at(error["loc"], unknown=error["type"] in _UNKNOWN_KEYS)) for error in errors]
    field = found[0][1].field
    found = [(error, spot) for error, spot in found if spot.field == field]
    inner = next((spot for _, spot in found if spot.path != field), None)
    if inner is not None:
        outside = [path for path, _ in inner.trail].index(field)
        item = inner.trail[outside + 1][0]
        found = [(error, spot) for error, spot in found if any(path == item for path, _ in spot.trail)]
    # A misspelt key often leaves a field missing as well; the misspelling is what there is to mend.
    error, spot = max(found, key=lambda pair: (len(pair[1].trail), pair[0]["type"] in _UNKNOWN_KEYS))
    kinds = [other["type"] for other, there in found if there.path == spot.path]
    return error, spot, [_WANTED[kind] for kind in kinds if kind in _WANTED]


def _unknown_in_item(spot: facts.Spot, where: str) -> ConfigError:
    """The error for an unknown key in a mapping inside a list."""
    parent, around = spot.trail[-2]
    name = suggest.shorten_path(spot.path.removeprefix(f"{parent}."))
    known = [key for option in facts.options_of(around) for key in option.get("properties", {})]
    return ConfigError(f"{where}: {parent}.{name} is not a known key", f"the keys of an item are {', '.join(known)}")


def _explain_conflict(path: str, text: str, hint: str, origins: Mapping[str, str], fallback: str) -> ConfigError:
    """A check across fields: keeps the schema's sentence and finds the fields it speaks of, to say who wrote them."""
    words = {word.strip(".") for word in re.findall(r"[\w.]+", text)}
    below = f"{path}." if path else ""
    named = [known for known in facts.field_facts() if known in words or (below and known.removeprefix(below) in words)]
    written = [f"{known} from {origins[known]}" for known in named if known in origins]
    head, tail = f"{path}: " if path else "", f" ({', '.join(written)})" if written else ""
    return ConfigError(f"{head}{printable(text)}{tail}", hint, where="" if written else fallback)


def _help(spot: facts.Spot, *, allowed: bool = True) -> str:
    """The description of the nearest value around a spot that has one, and what that allows; a section's keys."""
    if spot.field in facts.field_facts():
        described = next(described for _, described in reversed(spot.trail) if "description" in described)
        return described["description"] + (f" Allowed: {facts.allowed_values(described)}." if allowed else "")
    return suggest.known_below(spot.path if spot.path in facts.section_paths() else "", ())


def _advice(kind: str, spot: facts.Spot, value: object) -> str:
    options = facts.options_of(spot.described)
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
        if suggest.VALUE_ELSEWHERE_CALLED.get(value.lower()) in choices:
            return f" Did you mean {suggest.VALUE_ELSEWHERE_CALLED[value.lower()]}?"
        close = suggest.close_matches(value[:100].lower(), choices, 0.6)
        return f" Did you mean {close[0]}?" if close else ""
    return ""
