"""Configs as commands and functions are given them: by words, by files, in a checkpoint, or made in Python."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.config.load import Config, LoadedConfig, as_loaded, load_config, load_stored
from flatout.errors import HardwareError, UsageError
from flatout.front.words import Option, one_line, option, word


def config_options(preset: str = "shakespeare", more_sizes: str = "") -> tuple[Option, ...]:
    """What a command takes that takes a config, a hardware overlay and a size; `more_sizes` is what else --size is."""
    from flatout.config.sizes import size_words

    return (
        word("config", f"a preset's name or a YAML file; default: {preset}", nargs="?"),
        option("--config", "CONFIG", "the same as CONFIG", dest="config_option"),
        option("--hardware", "NAME", "memory overlay: 4gb to 80gb, or auto for this machine's GPU"),
        option("--size", "NAME", f"size {size_words()}{more_sizes}"),
    )


def load(words: argparse.Namespace, *, tell: bool = True) -> LoadedConfig:
    """The config that parsed words ask for. Its notices are printed to stderr, where a run does not print them."""
    hardware = words.hardware
    if hardware == "auto":
        # A mistake in the config answers before torch is asked about the GPU.
        load_config(words.config, words.overrides, size=words.size)
        hardware = _hardware_here()
    loaded = load_config(words.config, words.overrides, hardware=hardware, size=words.size)
    loaded = on_hardware(loaded, loaded.hardware)
    if tell:
        print_notices(loaded.notices)
    return loaded


def print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        print(f"note: {one_line(notice)}", file=sys.stderr)


def on_hardware(loaded: LoadedConfig, name: str | None) -> LoadedConfig:
    """A config with the overlay of that name, which may be auto; for that of a run that is resumed, too."""
    if name is None:
        return loaded
    from flatout.config.catalogue import check_shipped
    from flatout.resolve.sizing import fitted_to  # it needs torch: only where an overlay was asked for

    name = _hardware_here() if name == "auto" else name
    check_shipped("hardware", name, "command line")
    return fitted_to(loaded, name)


def load_any(words: argparse.Namespace, *, tell: bool = True) -> LoadedConfig:
    """The config that parsed words ask for, of pretraining or fine-tuning; for rows alone, the preset `lora`."""
    if not words.config_given and any(word.startswith("chat.source=") for word in words.overrides):
        words.config = "lora"  # as `flatout finetune` does
    return load(words, tell=tell)


def load_pretraining(words: argparse.Namespace) -> LoadedConfig:
    """The config that parsed words ask for, in a command that is for plain text only."""
    loaded = load(words)
    if loaded.config.fine_tunes:
        raise UsageError(
            f"`flatout {words.verb}` is for pretraining, and this config has chat.source",
            "leave chat.source out, or fine-tune it with `flatout finetune`",
        )
    return loaded


def _hardware_here() -> str:
    from flatout.config.catalogue import hardware_for
    from flatout.device import detect_device

    device = detect_device()
    if device.kind == "cpu" or device.memory_bytes is None:
        raise HardwareError(
            f"--hardware auto looks for a GPU, and this is {device.name}",
            "leave it out, or name an overlay: `flatout config presets` lists them",
        )
    return hardware_for(device.memory_bytes)


def stored_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config a run was trained with, from its newest checkpoint, with changes on top."""
    from flatout.checkpoints.checkpoint import read_checkpoint  # here: the doctor must do without torch
    from flatout.checkpoints.run_folder import checkpoint_to_load

    checkpoint = read_checkpoint(checkpoint_to_load(Path(path)))
    return load_stored(checkpoint.config, overrides)


def with_sources(config: Config | None) -> LoadedConfig:
    """A config, by default the default preset, with its sources; an overlay is applied."""
    loaded = load_config() if config is None else as_loaded(config)
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
