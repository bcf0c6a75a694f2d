"""Configs as functions are given them: loaded from files, stored in a checkpoint, or made in Python."""

from collections.abc import Sequence
from pathlib import Path

from flatout.config.facts import field_facts
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.schema import RunConfig
from flatout.config.source import DEFAULT, IN_PYTHON, Source
from flatout.errors import UsageError

Config = LoadedConfig | RunConfig
_IN_PYTHON = dict.fromkeys(field_facts(), IN_PYTHON)


def stored_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config a run was trained with, from its newest checkpoint, with changes on top."""
    from flatout.checkpoints.checkpoint import read_checkpoint  # here: the doctor must do without torch
    from flatout.checkpoints.run_folder import checkpoint_to_load

    checkpoint = read_checkpoint(checkpoint_to_load(Path(path)))
    return load_stored(checkpoint.config, overrides)


def as_asked(config: Config) -> LoadedConfig:
    """A config with its sources. Every value of one that was made in Python counts as written there."""
    return config if isinstance(config, LoadedConfig) else LoadedConfig(plain(config), _IN_PYTHON)


def with_sources(config: Config) -> LoadedConfig:
    """A config made in Python counts as written by the user in every field that was set; an overlay is applied."""
    if isinstance(config, LoadedConfig):
        if config.hardware is None:
            return config
        from flatout.resolve.sizing import fitted  # here: the doctor must do without torch

        return fitted(config)
    config = plain(config)
    set_or_not = {True: Source("python", "config"), False: DEFAULT}
    sources = {
        f"{section}.{name}": set_or_not[name in getattr(config, section).model_fields_set]
        for section, values in config.model_dump().items()
        for name in values
    }
    return LoadedConfig(config, sources)


def plain(config: Config) -> RunConfig:
    """The values alone; what is no config is refused."""
    if isinstance(config, LoadedConfig):
        return config.config
    if not isinstance(config, RunConfig):
        raise UsageError(
            f"a {type(config).__name__} was given as the config",
            "load it first: flatout.load_config takes a preset's name, a file or a mapping",
        )
    return config
