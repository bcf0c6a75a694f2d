"""Which settings all processes of a run must have alike, and how a difference is reported.

Every process reads its own command line, config files and environment. Gradients are added up whatever the others
were given, so ranks with different rates, batches or intervals would train something that no config describes, or wait
for each other for ever. Settings are compared when ranks meet, before the first collective; what is decided later
(sizes, switches, steps) is compared before the model is built.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.config.facts import field_facts
from flatout.config.load import LoadedConfig
from flatout.config.yaml_loader import format_value
from flatout.errors import ConfigError, page

# Settings that may differ between ranks, each with the reason. All others must be alike.
MAY_DIFFER = {
    "data.folder": "a path on this host; the fingerprints of the data in it are compared",
    "output.folder": "the first rank chooses the run folder for all",
    "output.name": "the first rank chooses the run folder for all",
    "output.log_every": "only the first rank prints",
    "output.trackers": "only the first rank writes records",
    "speed.memory_limit": "cards may differ; the form is decided by all ranks, and micro-batches are compared",
    "speed.threads": "hosts may differ; on a CPU the number of threads that is used is compared",
    "speed.workers": "threads that read ahead return the same batches",
}
_MOST, _LONGEST = 8, 200  # settings in a message, characters of a value


def shared_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """The settings that must be alike, by dotted path, as values of JSON; a size and an overlay that wait, too."""
    values = loaded.config.model_dump(mode="json")
    places = ((path, *path.split(".")) for path in field_facts() if path not in MAY_DIFFER)
    found = {path: values[section][name] for path, section, name in places}
    found |= {} if loaded.hardware is None else {"--hardware": loaded.hardware}
    return found | ({} if loaded.size is None else {"the preset": loaded.size.preset, "--size": loaded.size.name})


def digest(values: Mapping[str, Any]) -> str:
    """A hash of values of JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()


def odd_rank(digests: Sequence[str]) -> int | None:
    """The first rank whose values are not those of rank 0."""
    return next((rank for rank, found in enumerate(digests) if found != digests[0]), None)


def different_settings(first: Mapping[str, Any], other: Mapping[str, Any], ranks: tuple[str, str]) -> ConfigError:
    """The refusal of two ranks that were given different settings; `ranks` says which, in words."""
    listed, _ = _differences(first, other)
    return ConfigError(
        f"{' and '.join(ranks)} have different settings: {listed}",
        f"give the same command and config files on all hosts; {page('guides/many-gpus.md')} lists what may differ",
    )


def different_decisions(first: Mapping[str, Any], other: Mapping[str, Any], ranks: tuple[str, str]) -> ConfigError:
    """The refusal of two ranks whose equal settings came out differently, by their hardware, data or files."""
    listed, names = _differences(first, other)
    settings = [name for name in names if name in field_facts()]
    hint = "use the same data, model and checkpoint on all hosts: folders that all of them see"
    if settings:
        hint = f"set {settings[0]} to what all hosts have; `flatout doctor` says what a host lacks"
    return ConfigError(f"{' and '.join(ranks)} cannot train together: {listed}", hint)


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, list[str]]:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    listed = [f"{name} is {_shown(first.get(name))} and {_shown(other.get(name))}" for name in names[:_MOST]]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(listed) + more, names


def _shown(value: object) -> str:
    text = format_value(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
