"""Configs as functions are given them: loaded from files, stored in a checkpoint, or made in Python."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from flatout.config.load import Config, LoadedConfig, as_loaded, load_config, load_stored
from flatout.errors import UsageError


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


def check_rows_named(loaded: LoadedConfig, resume: str | None) -> None:
    """Refuses a config without rows, or with those of a preset that are not there.

    Presets name rows and a model as an example: where they are missing, the user has to name some.
    """
    source, origin = loaded.config.chat.source, loaded.sources["chat.source"]
    if source is None:
        raise UsageError("this config has nothing to fine-tune on", "set chat.source, or use `flatout train`")
    if origin.by_user or Path(source).exists():
        return
    written = loaded.sources["model.init_from"].by_user
    model = f"model.init_from={loaded.config.model.init_from if written else 'FOLDER-OR-HUB-NAME'}"
    hint = f"name your rows and a model: flatout finetune {model} chat.source=ROWS.jsonl"
    if resume == "auto":
        from flatout.checkpoints.run_folder import choose_folder  # here: a command answers without torch

        run = choose_folder(loaded.config.output, resume)
        if run.exists():  # by its own name it brings its settings along
            hint = f"resume {run} on what it was trained on: flatout finetune --resume {shlex.quote(str(run))}"
    raise UsageError(f"nothing was named to fine-tune on, and {source}, which {origin.where} has, is not there", hint)
