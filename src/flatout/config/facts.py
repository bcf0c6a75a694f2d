"""What the schema knows about each field: its sentence, its type, what it allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flatout.config.schema import RunConfig
from flatout.config.yaml_loader import format_value


@cache
def field_facts() -> dict[str, FieldInfo]:
    """Every leaf of the schema by dotted path, in the schema's order."""
    facts: dict[str, FieldInfo] = {}
    for section, holder in RunConfig.model_fields.items():
        owner = section_class(holder.annotation)
        assert owner is not None, "a config holds sections, and nothing beside them"
        facts |= {f"{section}.{name}": field for name, field in owner.model_fields.items()}
    return facts


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section that a field's annotation names, or None when the field is a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def section_paths() -> tuple[str, ...]:
    """The names of the sections, such as `model`."""
    return tuple(RunConfig.model_fields)


def names_in(section: str) -> list[str]:
    """The names of a section's fields."""
    return [path.removeprefix(f"{section}.") for path in field_facts() if path.startswith(f"{section}.")]


def value_at(config: RunConfig, path: str) -> Any:
    """The value of a dotted path such as `model.width`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def choices(path: str) -> str:
    """The words that a field is chosen from, as a sentence; nothing for a field that is no choice."""
    options = options_of(spot_at(path.split(".")).described)
    for how, described in (("One of", options), ("Any of", [option.get("items", {}) for option in options])):
        found = [format_value(value) for option in described for value in option.get("enum", [])]
        if found:
            return f"{how} {', '.join(found)}."
    return ""


def with_whole_numbers(annotation: Any, value: Any) -> Any:
    """`1e9` is a float by YAML's rules; where only whole numbers are taken, in lists too, a whole float is one."""
    if isinstance(value, float):
        kinds = kinds_of(annotation)
        return int(value) if value.is_integer() and int in kinds and float not in kinds else value
    if isinstance(value, list) and (item := item_annotation(annotation)) is not None:
        return [with_whole_numbers(item, inner) for inner in value]
    if isinstance(value, dict):
        models = [model for kind in kinds_of(annotation) if (model := section_class(kind)) is not None]
        fields = models[0].model_fields if models else {}
        return {
            key: with_whole_numbers(fields[key].annotation, inner) if key in fields else inner
            for key, inner in value.items()
        }
    return value


def item_annotation(annotation: Any) -> Any:
    """The annotation of the items, where an annotation allows a list."""
    return next((get_args(kind)[0] for kind in kinds_of(annotation) if get_origin(kind) is list), None)


def kinds_of(annotation: Any) -> list[Any]:
    """The types in an annotation, looking through unions and `Annotated`; literals count as their own type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in kinds_of(part) if kind is not NoneType]
    return [Literal] if origin is Literal else [annotation]


# The patterns of the schema in words; a pattern is for machines.
_FORMS = {
    r"^[0-9]{1,6}(\.[0-9]{1,6})? epochs?$": "a number of epochs, such as 2 epochs",
    r"^[1-9][0-9]{0,5} epochs?$": "a whole number of epochs, such as 2 epochs",
    r"^[0-9]{1,6}(\.[0-9]{1,6})? minutes?$": "a number of minutes, such as 10 minutes",
    r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$": "auto, cpu, mps, cuda or cuda:N",
    r"^[AENW]{1,1000}$": "letters A, E, N and W, as in EEEA",
    r"^[a-z]{2,3}$": "a code of two or three small letters, such as en",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$": "up to 100 letters, digits, dots, dashes and underscores, none of the last "
    "three in front",
}


@dataclass(frozen=True)
class Spot:
    """A value's spot in a config: `trail` holds, from outside in, each step's path and what the schema says of it."""

    trail: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def path(self) -> str:
        return self.trail[-1][0] if self.trail else ""

    @property
    def described(self) -> Mapping[str, Any]:
        return self.trail[-1][1] if self.trail else _schema()

    @property
    def field(self) -> str:
        """The path of the field that this spot belongs to, or the section's."""
        return next((path for path, _ in self.trail if path in field_facts()), self.path)

    def origin(self, origins: Mapping[str, str], fallback: str) -> str:
        """Where the nearest value around this spot was written."""
        return next((origins[path] for path, _ in reversed(self.trail) if path in origins), fallback)


def spot_at(location: Sequence[str | int], *, unknown: bool = False) -> Spot:
    """Walks a location along the schema, past the names of union branches; `unknown`: its last part is no field."""
    trail: list[tuple[str, Mapping[str, Any]]] = []
    path, described = "", _schema()
    for part in location[:-1] if unknown else location:
        options = options_of(described)
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
    return Spot(tuple(trail))


@cache
def _schema() -> Mapping[str, Any]:
    return RunConfig.model_json_schema()


def options_of(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a described value, those that stand elsewhere in the schema fetched from there."""
    parts = described.get("anyOf", [described])
    return [_schema()["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in parts]


def allowed_values(described: Mapping[str, Any], join: str = ", or ") -> str:
    return join.join(_allowed_by(option) for option in options_of(described))


def _allowed_by(described: Mapping[str, Any]) -> str:
    if "const" in described:
        return format_value(described["const"])
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
        limits = [f"{word} {number_text(described[name])}" for name, word in words.items() if name in described]
        noun = "a whole number" if kind == "integer" else "a number"
        return noun + (" " + " and ".join(limits) if limits else "")
    if kind == "string":
        if "pattern" in described:
            return _FORMS.get(described["pattern"], f"text of the form {described['pattern']}")
        return "text that is not empty" if described.get("minLength") else "text"
    if kind == "array":
        what = "a list that is not empty and" if described.get("minItems") else "a list"
        return f"{what} whose items are {allowed_values(described['items'], ' or ')}"
    if kind == "object":
        return "{" + ", ".join(described.get("properties", {})) + "}"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), f"a value of type {kind}")


def number_text(value: float) -> str:
    if not float(value).is_integer() or abs(value) >= 2**64:
        return str(value)
    return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
