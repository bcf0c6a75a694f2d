"""Configs as functions are given them: loaded from files, stored in a checkpoint, or made in Python."""

from collections.abc import Sequence
from pathlib import Path

from flatout.config.load import LoadedConfig, load_stored
from flatout.config.schema import RunConfig
from flatout.config.source import DEFAULT, Source

Config = LoadedConfig | RunConfig


def stored_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config a run was trained with, from its newest checkpoint, with changes on top."""
    from flatout.engine.checkpoint import read_checkpoint  # here: the doctor must do without torch
    from flatout.engine.run_folder import checkpoint_to_load

    checkpoint = read_checkpoint(checkpoint_to_load(path))
    return load_stored(checkpoint.config, overrides)


def with_sources(config: Config) -> LoadedConfig:
    """A config made in Python counts as written by the user in every field that was set; an overlay is applied."""
    if isinstance(config, LoadedConfig):
        from flatout.engine.overlays import fitted  # here: the doctor must do without torch

        return fitted(config)
    set_or_not = {True: Source("python", "config"), False: DEFAULT}
    sources = {
        f"{section}.{name}": set_or_not[name in getattr(config, section).model_fields_set]
        for section, values in config.model_dump().items()
        for name in values
    }
    return LoadedConfig(config, sources)


def plain(config: Config) -> RunConfig:
    return config.config if isinstance(config, LoadedConfig) else config
