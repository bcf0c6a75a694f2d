"""What a finder found, as a config file: the preset, what the user had written beyond it, and the values found.

The file has the form of `fragment.py`'s, checksum in the first line included, so that one rule says for all of `tune`
whether a file may be written over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.config.load import LoadedConfig
from flatout.config.yaml_loader import format_value
from flatout.tuning.fragment import FIRST_LINE, signed


def config_text(loaded: LoadedConfig, found: Mapping[str, Any], first: str, comments: Sequence[str] = ()) -> str:
    """The YAML of a config file that is the given config with the values of `found`, by dotted path.

    `first` is the rest of the first line, from its comma on: what was found, and where.
    """
    values, sections = loaded.config.model_dump(), {}
    presets = {source.where for source in loaded.sources.values() if source.kind == "preset"}
    preset = next((where.removeprefix("preset ") for where in presets if where.startswith("preset ")), None)
    for path, source in loaded.sources.items():
        section, _, name = path.partition(".")
        # A layer's null that silences an alternative below it (train.tokens beside train.steps) follows by itself.
        silenced = source.where.endswith(")") and values[section][name] is None
        if path not in found and (source.by_user or source.kind == "hardware") and not silenced:
            sections.setdefault(section, {})[name] = values[section][name]
    for path, value in found.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = [*(f"# {' '.join(comment.split())}" for comment in comments), *([f"preset: {preset}"] if preset else [])]
    for section, fields in sections.items():
        lines += ["", f"{section}:", *(f"  {name}: {format_value(value)}" for name, value in fields.items())]
    body = "\n".join(lines) + "\n"
    return signed(f"{FIRST_LINE}{' '.join(first.split())}", body)


def words_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The values found as they stand on a command line."""
    return tuple(f"{path}={value if isinstance(value, str) else format_value(value)}" for path, value in found.items())
