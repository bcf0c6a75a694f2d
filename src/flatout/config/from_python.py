"""Settings that a program gives: sections as mappings, fields by dotted path, values as Python has them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.config.facts import field_facts, names_in, section_paths, with_whole_numbers
from flatout.config.source import Layer, Setting, Source
from flatout.config.suggest import unknown_key
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError


def check_kinds(target: object, overrides: Iterable[object], hardware: object, size: object) -> None:
    """Refuses what cannot be meant as a config, as words, as an overlay or as a size."""
    if not isinstance(target, str | Path | Mapping | None):
        raise ConfigError(
            f"a {type(target).__name__} was given as the config",
            "give a preset's name, a file, or a mapping such as model_dump() of a RunConfig",
        )
    if isinstance(overrides, str | Mapping) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(
            f"the overrides are {shorten(overrides)}, but they must be a list of words",
            'write ["train.steps=100"], or give keywords: train={"steps": 100}',
        )
    if not isinstance(hardware, str | None):
        raise ConfigError(f"hardware is {shorten(hardware)}, but it must be a name", "for example hardware='8gb'")
    if not isinstance(size, str | None):
        raise ConfigError(f"size is {shorten(size)}, but it must be a name", "for example size='124m'")


def python_layer(values: Mapping[str, Any], where: str, *, extras: tuple[str, ...] = (), tunes: bool = False) -> Layer:
    """The layer of what a program gave; `where` is what errors call it, `extras` are keys that are no sections.

    `tunes` says that the config is for fine-tuning.
    """
    layer: Layer = {}
    for path, value in _by_path(values, where):
        if path not in field_facts():
            raise unknown_key(path, where, top_level_extras=extras, tunes=tunes)
        if path in layer:
            raise ConfigError(f"{where}: {path} is given twice", "give it in its section or by its path, not both")
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
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return value.item()
    return str(value) if isinstance(value, Path) else value
