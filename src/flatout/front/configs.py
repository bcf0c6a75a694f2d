"""Configs as functions are given them: loaded from files, stored in a checkpoint, or made in Python."""

from collections.abc import Sequence
from pathlib import Path

from flatout.config.load import Config, LoadedConfig, as_loaded, load_config, load_stored


def stored_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config a run was trained with, from its newest checkpoint, with changes on top."""
    from flatout.checkpoints.checkpoint import read_checkpoint  # here: the doctor must do without torch
    from flatout.checkpoints.run_folder import checkpoint_to_load

    checkpoint = read_checkpoint(checkpoint_to_load(Path(path)))
    return load_stored(checkpoint.config, overrides)


def config_to_train(config: Config | None, resume: str | None) -> LoadedConfig:
    """The settings that `train` goes by: those it was given, else those of the run that it resumes by its path."""
    if config is not None:
        return as_loaded(config, all_written=True)
    return load_config() if resume in (None, "auto") else stored_config(resume)


def with_sources(config: Config) -> LoadedConfig:
    """A config with its sources; an overlay is applied."""
    loaded = as_loaded(config)
    if loaded.hardware is None:
        return loaded
    from flatout.resolve.sizing import fitted  # here: the doctor must do without torch

    return fitted(loaded)
