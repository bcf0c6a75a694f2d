"""Settings that a program gives: sections as mappings, fields by dotted path, values as Python has them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.config.facts import field_facts, names_in, section_paths, with_whole_numbers
from flatout.config.source import Layer, Setting, Source
from flatout.config.suggest import unknown_key
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError


def python_layer(values: Mapping[str, Any], where: str, *, extras: tuple[str, ...] = ()) -> Layer:
    """The layer of what a program gave; `where` is what errors call it, `extras` are keys that are no sections."""
    layer: Layer = {}
    for path, value in _by_path(values, where):
        if path not in field_facts():
            raise unknown_key(path, where, top_level_extras=extras)
        plain = with_whole_numbers(field_facts()[path].annotation, _plain(value))
        layer[path] = Setting(plain, Source("python", where))
    return layer


def _by_path(values: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key not in section_paths():
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            raise ConfigError(
                f"{where}: {key} is {shorten(value)}, but it is a section",
                f"give its fields, such as {key}={{{names_in(key)[0]!r}: ...}}",
            )


def _plain(value: Any) -> Any:
    """A value of Python as a file would hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
