"""Layers of values become one config, and each value remembers where it was written.

The idea: every layer (preset, hardware overlay, file, command line) is a flat mapping from dotted path to value and
source. Merging is one pass from the lowest layer to the highest; only the merged values meet the schema.

The contract: `load_config` returns a `LoadedConfig` whose `sources` holds every leaf field, or raises `ConfigError`.
The trap: some fields are alternatives to each other (`train.steps` and `train.tokens`), so a value in a higher layer
must also silence its alternatives in lower ones, or no preset could ever be shortened by a file.

Settings that a program gives: sections as mappings, fields by dotted path, values as Python has them.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flatout.config import yaml_loader
from flatout.config.catalogue import (
    DEFAULT_PRESET,
    check_shipped,
    preset_names,
    preset_path,
    run_name,
    shipped_names,
    source_name,
)
from flatout.config.complain import validate
from flatout.config.facts import choices, field_facts, item_annotation, names_in, section_paths, with_whole_numbers
from flatout.config.former import as_now
from flatout.config.model_section import GPT2
from flatout.config.schema import RunConfig
from flatout.config.sizes import LONG, LONG_SIZES, Sized, preset_and_size, size_layer, size_names, size_words
from flatout.config.source import DEFAULT, IN_PYTHON, Layer, Setting, Source, SourceKind
from flatout.config.suggest import unknown_key
from flatout.config.yaml_loader import shorten
from flatout.errors import ConfigError, UsageError
from flatout.shown import Shown


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


def python_layer(values: Mapping[str, Any], where: str, *, extras: tuple[str, ...] = ()) -> Layer:
    """The layer of what a program gave; `where` is what errors call it, `extras` are keys that are no sections."""
    layer: Layer = {}
    for path, value in _by_path(values, where):
        if path not in field_facts():
            raise unknown_key(path, where, top_level_extras=extras)
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


_FILE_KEYS = ("preset", "hardware", "size")
COMMAND_LINE = "command line"

# A layer that gives one of a group silences those it does not give itself in the layers below.
ALTERNATIVES = (
    ("train.steps", "train.epochs", "train.tokens", "train.minutes"),
    ("speed.micro_batch", "speed.accumulation"),
)


@dataclass(frozen=True)
class LoadedConfig(Shown):
    """A valid config and, for every leaf by dotted path, the source of its value.

    `notices` are lines for whoever trains it. `hardware` is an overlay that was named; what it sets depends on the
    memory that the model needs, which `flatout.resolve.sizing` works out. `size` is that of a preset with sizes, until
    `flatout.resolve.sizing` has derived its settings again with the data at hand.
    """

    config: RunConfig
    sources: Mapping[str, Source]
    notices: tuple[str, ...] = ()
    hardware: str | None = None
    size: Sized | None = None

    def __repr__(self) -> str:
        where = [source.where for source in self.sources.values() if source.kind in ("preset", "size", "hardware")]
        rows = [row for row in explain(self) if self.sources[row.path].by_user]
        own = [f"{row.path}={yaml_loader.format_value(row.value)}" for row in rows]
        return f"LoadedConfig({', '.join([*dict.fromkeys(where), *own])})"

    def _shown_rows(self) -> dict[str, str]:
        """The settings that are not defaults, each with its source."""
        rows = [row for row in explain(self) if self.sources[row.path].kind not in ("default", "family")]
        return {row.path: f"{yaml_loader.format_value(row.value)} ({row.source})" for row in rows}


Config = LoadedConfig | RunConfig  # as a program gives it to a function


@dataclass(frozen=True)
class ExplainRow:
    """One line of `flatout config explain`; `value` is the plain value, `format_value` writes it as YAML."""

    path: str
    value: Any
    source: str
    description: str


def load_config(
    target: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    size: str | None = None,
    **settings: Any,
) -> LoadedConfig:
    """Merges defaults < preset < size < file < overrides < settings, and checks the result.

    `target` is a preset's name, a config file, or a mapping of what such a file holds; None is the default preset. A
    file may name a `preset:` whose values it changes and a `hardware:` overlay; the `hardware` argument wins over the
    file's. `overrides` are words such as `train.steps=100`, `settings` the same as keywords, by section or by path:
    `train={"steps": 100}`, `**{"train.steps": 100}`. An overlay comes between preset and file, and is only named in the
    result: `flatout.resolve.sizing.fitted` applies it. `size`, such as 124m, is for presets that have sizes; a file
    names it as `size:`.
    """
    check_kinds(target, overrides, hardware, size)
    if isinstance(target, Mapping):
        return _from_mapping(target, overrides, settings, {"hardware": hardware, "size": size})
    path = _path_of(target)
    if path is not None or (target and target not in preset_names()):
        _refuse_data(Path(str(target)) if path is None else path)
    tree = yaml_loader.read_yaml(path) if path is not None else {}
    file_name = yaml_loader.printable(str(path))
    if path is not None and path.name == "config.yaml" and path.with_name("metrics.jsonl").exists():  # of a run
        stored = yaml_loader.format_sections(as_now({section: node.plain for section, node in tree.items()}))
        tree = yaml_loader.parse_yaml(stored.encode("utf-8"), file_name)
    if path is None:
        preset = str(target) if target is not None else DEFAULT_PRESET
        preset_where = COMMAND_LINE
    else:
        preset, preset_where = _named_in_file(tree, "preset", file_name)
    named = {"preset": (preset, preset_where)}
    for key, given in {"hardware": hardware, "size": size}.items():
        named[key] = _named_in_file(tree, key, file_name) if given is None else (given, COMMAND_LINE)

    values = {key: node for key, node in tree.items() if key not in _FILE_KEYS}
    own = dict(_settings(values, "file", file_name, extras=_FILE_KEYS))
    above = [_override_layer(overrides), python_layer(settings, "keyword")]
    where = file_name if path is not None else f"preset {preset}"
    name = path.stem if path is not None else None
    loaded = _layered(named, [own, *above], name, where, asked=target is not None)
    if path is None or preset is not None:
        return loaded
    return replace(loaded, notices=tuple(_on_defaults(file_name, loaded, "`preset: NAME` in its first lines")))


def _name_of(preset: str | None, own: Layer, merged: Layer, *, asked: bool) -> tuple[str, str]:
    """A run's name, and after what it is called: the preset, and a text in the place of the preset's `own`.

    Without `asked` (the default preset), the text's name alone: the default preset is named after another text.
    """
    if preset is not None and "lora.rank" in merged and merged["lora.rank"].value == 0:
        preset = preset.replace("lora", "finetune")  # it trains all weights
    source, before = merged.get("data.source"), own.get("data.source")
    text = source.value if source is not None and source is not before else None
    called = source_name(text) if isinstance(text, str) and (before is None or before.value != text) else ""
    if not re.search(r"\w", called):
        return preset or "run", "name of the config"
    if preset is None or not asked:
        return called, "name of the text"
    return f"{preset}-{called}", "names of the config and the text"


def _from_mapping(
    target: Mapping[str, Any],
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    given: Mapping[str, str | None],
) -> LoadedConfig:
    """The config that a mapping holds, with layers above it; what is `given` beside it wins over its own names."""
    where = "the mapping"
    named: dict[str, Any] = {key: given.get(key) or target.get(key) for key in _FILE_KEYS}
    for key, name in named.items():
        if name is not None and not isinstance(name, str):
            raise ConfigError(
                f"{where}: {key} is {yaml_loader.shorten(name)}, but it must be a name",
                f"the names are {', '.join(_names(key))}",
            )
    values = {key: value for key, value in target.items() if key not in _FILE_KEYS}
    own = python_layer(values, where, extras=_FILE_KEYS)
    above = [_override_layer(overrides), python_layer(settings, "keyword")]
    shipped: dict[str, tuple[str | None, str]] = {key: (name, where) for key, name in named.items()}
    loaded = _layered(shipped, [own, *above], None, where, asked=True)
    if named["preset"] is not None:
        return loaded
    return replace(loaded, notices=tuple(_on_defaults(where, loaded, '"preset": NAME in it')))


def _layered(
    shipped: Mapping[str, tuple[str | None, str]], above: Sequence[Layer], name: str | None, where: str, *, asked: bool
) -> LoadedConfig:
    """A preset below the layers of the user, with a size and an overlay; each with who named it."""
    (preset, preset_where), (hardware, hardware_where) = shipped["preset"], shipped["hardware"]
    preset, size = preset_and_size(preset, *shipped["size"])
    below = {} if preset is None else _preset_layer(preset, preset_where)
    if hardware is not None:
        check_shipped("hardware", hardware, hardware_where)
    sized, derived = size_layer(preset, size, shipped["size"][1], merged=_merge([below, *above]), written=_merge(above))
    merged = _merge([below, derived, *above])
    preset = f"{size}-{preset}" if preset in LONG else preset  # what a run is called after
    called, named_by = _name_of(preset, below, merged, asked=asked) if name is None else (name, "name of the config")
    merged.setdefault("output.name", Setting(run_name(called), Source("default", named_by)))
    return replace(_validated(merged, where), hardware=hardware, size=sized)


def _on_defaults(name: str, loaded: LoadedConfig, way: str) -> Iterator[str]:
    """A config without a preset is not one with the default preset, which a reader may take it for."""
    left = sum(source.kind in ("default", "family") for source in loaded.sources.values())
    if left > 1:  # the run's name is the file's
        yield (
            f"{name} names no preset, so the {left - 1} settings that it leaves out have Flatout's own defaults, "
            f"not a preset's; {way} changes that"
        )


# Files of these kinds are never configs. Others may be one, JSON too: YAML holds all of it.
_DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".text", ".md", ".smi", ".smiles", ".warc", ".wet")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


def _refuse_data(path: Path) -> None:
    """Naming a text or its folder instead of a config is a common slip, and YAML's error about it would not help."""
    plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
    name, kind = yaml_loader.printable(str(path)), plain.suffix.lower()
    text = f"flatout train {shlex.quote(f'data.source={yaml_loader.format_value(name)}')}"
    if os.path.isdir(path):
        raise ConfigError(
            f"{name} is a folder, not a config",
            f"to train on its texts: `{text}`; a model is named as model.init_from=FOLDER, a run by --resume FOLDER",
        )
    if not os.path.isfile(path) or kind in (".yaml", ".yml"):
        return
    if kind not in _DATA:
        try:
            tree = yaml_loader.read_yaml(path)
        except ConfigError:
            tree = {"": None}
        if not tree or tree.keys() & {*RunConfig.model_fields, *_FILE_KEYS}:
            return
    text += "" if kind in (*_DATA, ".json") else " data.format=text"  # a type that is not read otherwise
    raise ConfigError(
        f"{name} is data, not a config", f"to train on its text: `{text}`; to fine-tune on it: chat.source={name}"
    )


def load_stored(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "checkpoint",
    written: str = COMMAND_LINE,
) -> LoadedConfig:
    """A config kept in a checkpoint with overrides on top, which were `written` there; what it holds counts as a
    preset's, so that a run may move to a machine that lacks a switch."""
    stored = _layer_of(resolve_from_mapping(values, where), where)
    return _validated(_merge([stored, _override_layer(overrides, where=written)]), where)


def as_loaded(config: Config, *, all_written: bool = False) -> LoadedConfig:
    """A config that a function was given, with its sources.

    Of one that was made in Python, the fields that were set count as written by the user, or all of them.
    """
    if isinstance(config, LoadedConfig):
        return config
    if not isinstance(config, RunConfig):
        raise UsageError(
            f"a {type(config).__name__} was given as the config",
            "load it first: flatout.load_config takes a preset's name, a file or a mapping",
        )
    if all_written:
        return LoadedConfig(config, dict.fromkeys(field_facts(), IN_PYTHON))
    written = {f"{section}.{name}" for section, values in config for name in values.model_fields_set}
    set_here = dict.fromkeys(written, Source("python", "config"))
    return LoadedConfig(config, dict.fromkeys(field_facts(), DEFAULT) | set_here)


def with_values(loaded: LoadedConfig, values: Mapping[str, Any], source: Source) -> LoadedConfig:
    """A loaded config with other values of some fields, which come from `source`."""
    return with_layer(loaded, {path: Setting(value, source) for path, value in values.items()}, source.where)


def with_layer(loaded: LoadedConfig, above: Layer, where: str) -> LoadedConfig:
    """A loaded config with other values of some fields, each with its source; `where` is named in errors."""
    layer = {
        path: replace(setting, source=loaded.sources[path]) for path, setting in _layer_of(loaded.config, "").items()
    }
    valid = _validated(layer | above, where)
    return replace(loaded, config=valid.config, sources=valid.sources)


def _layer_of(config: RunConfig, where: str) -> Layer:
    """Every value of a config, as if a preset had given it."""
    source = Source("preset", where)
    return {
        f"{section}.{name}": Setting(value, source)
        for section, values in config.model_dump().items()
        for name, value in values.items()
    }


def resolve_from_mapping(values: Mapping[str, Any], where: str = "stored config") -> RunConfig:
    """The config that a nested mapping from `config.model_dump()` holds, as kept in checkpoints."""
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: is {yaml_loader.shorten(values)}, not a mapping", "it must hold sections such as model, train"
        )
    return validate(as_now(values), {}, where)


def explain(loaded: LoadedConfig) -> list[ExplainRow]:
    """Every field with its value, where that came from, its sentence and its choices, in the schema's order."""
    values = _layer_of(loaded.config, "")
    return [
        ExplainRow(path, values[path].value, loaded.sources[path].where, f"{fact.description} {choices(path)}".rstrip())
        for path, fact in field_facts().items()
    ]


def show(config: RunConfig) -> str:
    """The whole config as YAML that loads back to an equal config."""
    return yaml_loader.format_sections(config.model_dump())


def schema_json() -> dict[str, Any]:
    """JSON Schema of a config file, for editors: nothing is required; `preset`, `hardware` and `size` are allowed."""
    schema = RunConfig.model_json_schema()
    schema.pop("required", None)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] = {
        "preset": {"enum": preset_names(), "description": "Preset whose values this file changes."},
        "hardware": {"enum": shipped_names("hardware"), "description": "Overlay that makes a run fit a card's memory."},
        "size": {"type": "string", "description": f"Size {size_words()}."},
        **schema["properties"],
    }
    return schema


def _path_of(target: str | Path | None) -> Path | None:
    """The config file `target` means, or None for a preset. A preset's name wins over a file of that very name."""
    if target is None or isinstance(target, Path):
        return target
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    looks_like_file = target.endswith((".yaml", ".yml")) or any(separator in target for separator in separators)
    if looks_like_file or (target not in preset_names() and os.path.isfile(target)):
        return Path(target)
    return None


def _names(key: str) -> Sequence[str]:
    """The names that a key of a config file may have."""
    if key == "size":
        return (*LONG_SIZES, *size_names())
    return shipped_names("hardware" if key == "hardware" else "preset")


def _named_in_file(tree: Mapping[str, yaml_loader.Node], key: str, file_name: str) -> tuple[str | None, str]:
    """The preset, overlay or size a file names, and where it does so."""
    node = tree.get(key)
    if node is None:
        return None, file_name
    where = f"{file_name}:{node.line}"
    if node.value is not None and not isinstance(node.value, str):
        raise ConfigError(
            f"{where}: {key} is {yaml_loader.shorten(node.plain)}, but it must be a name",
            f"the names are {', '.join(_names(key))}",
        )
    return node.value, where


def _settings(
    tree: Mapping[str, yaml_loader.Node],
    kind: SourceKind,
    where: str,
    *,
    extras: tuple[str, ...] = (),
) -> Iterator[tuple[str, Setting]]:
    """The leaves of a parsed file as (path, setting). A file's sources carry line numbers, those of presets do not."""
    for section, node in tree.items():
        line = f"{where}:{node.line}"
        if section in field_facts():
            parent, _, last = section.rpartition(".")
            raise ConfigError(
                f"{line}: {section} is written with a dot",
                f"dots are for the command line; here, write `{parent}:` and indent `{last}:` below it",
            )
        if section not in section_paths():
            raise unknown_key(section, line, top_level_extras=extras)
        fields = {} if node.value is None else node.value  # a section whose lines are all comments is empty, not wrong
        if not isinstance(fields, dict):
            first = names_in(section)[0]
            raise ConfigError(
                f"{line}: {section} is {yaml_loader.shorten(node.plain)}, but it is a section",
                f"write `{section}:` alone and its fields, such as `{first}: ...`, below it",
            )
        for name, leaf in fields.items():
            path, line = f"{section}.{name}", f"{where}:{leaf.line}"
            if path not in field_facts():
                raise unknown_key(path, line, top_level_extras=extras)
            value = with_whole_numbers(field_facts()[path].annotation, leaf.plain)
            if kind == "file":
                yield path, Setting(value, Source(kind, line), dict(_lines_in(path, leaf, where)))
            else:
                yield path, Setting(value, Source(kind, where))


def _override_layer(overrides: Sequence[str], *, where: str = COMMAND_LINE) -> Layer:
    layer: Layer = {}
    source = Source("override", where)
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(
                f"{yaml_loader.shorten(override)} is not of the form section.field=value",
                "write an override like train.steps=100",
                where=where,
            )
        if path in _FILE_KEYS:
            raise ConfigError(
                f"{path} cannot be set by an override",
                f"a file names it as `{path}: NAME` in its first lines; the names are {', '.join(_names(path))}",
                where=where,
            )
        if path == "clean":
            layer |= _no_cleaning(text, source)
            continue
        if path not in field_facts():
            raise unknown_key(path, where)
        spot, fact = f"{where}: {path}", field_facts()[path]
        value = yaml_loader.parse_word(text, spot, collections=item_annotation(fact.annotation) is not None)
        layer[path] = Setting(with_whole_numbers(fact.annotation, value), source)
    return layer


def _no_cleaning(text: str, source: Source) -> Layer:
    """Every rule of `clean` switched off: the one section with a value of its own, since presets have many rules on."""
    paths = [f"clean.{name}" for name in names_in("clean")]
    if text.strip() != "off":
        raise ConfigError(
            "clean is a section, not a value",
            f"clean=off switches every rule off; or give one of {', '.join(paths)}",
            where=source.where,
        )
    return {path: Setting(field_facts()[path].default, source) for path in paths}


def _merge(layers: Sequence[Layer]) -> Layer:
    merged: Layer = {}
    for layer in layers:
        for group in ALTERNATIVES:
            given = next((path for path in group if path in layer and layer[path].value is not None), None)
            if given is None:
                continue
            source = layer[given].source
            for path in group:
                if path in merged and path not in layer:
                    merged[path] = Setting(None, Source(source.kind, f"{source.where} ({given})"))
        family = merged["model.family"].value if "model.family" in merged else "gpt"
        if "model.family" in layer and layer["model.family"].value != family:
            # Another family means its own norm, positions and so on, not those a preset chose for the first one.
            for name in GPT2:
                merged.pop(f"model.{name}", None)
        merged.update(layer)
    return merged


def _validated(merged: Layer, fallback: str) -> LoadedConfig:
    """The config that a layer makes; `fallback` is named in errors about values without a source."""
    # Every section is there, so that its own checks run instead of `missing`.
    nested: dict[str, dict[str, Any]] = {section: {} for section in section_paths()}
    written: dict[str, str] = {}
    for path, setting in merged.items():
        section, _, name = path.partition(".")
        nested[section][name] = setting.value
        if setting.source.kind != "default":
            written |= {path: setting.source.where, **setting.lines}
    config = validate(nested, written, fallback)
    family = Source("family", f"family {config.model.family}")
    sources = dict.fromkeys(field_facts(), DEFAULT) | {f"model.{name}": family for name in GPT2}
    return LoadedConfig(config, sources | {path: setting.source for path, setting in merged.items()})


def _lines_in(path: str, node: yaml_loader.Node, where: str) -> Iterator[tuple[str, str]]:
    """By path, the line of everything inside a node."""
    inner: list[tuple[str, yaml_loader.Node]] = []
    if isinstance(node.value, list):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(node.value)]
    elif isinstance(node.value, dict):
        inner = [(f"{path}.{key}", item) for key, item in node.value.items()]
    for name, item in inner:
        yield name, f"{where}:{item.line}"
        yield from _lines_in(name, item, where)


@cache
def _preset_layer(name: str, where: str) -> Layer:
    tree = yaml_loader.read_yaml(preset_path(name, where))
    return dict(_settings(tree, "preset", f"preset {name}"))
