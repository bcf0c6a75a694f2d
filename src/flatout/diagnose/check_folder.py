"""The folder a run would write to: new, or that of another run, and whether that one can go on. No torch here."""

import shlex
from pathlib import Path

from flatout.config.load import load_config
from flatout.config.schema import RunConfig
from flatout.config.yaml_loader import format_value
from flatout.diagnose.doctor import Check, Finding
from flatout.engine.run_files import check_own, list_checkpoints
from flatout.errors import UserError
from flatout.lock import LOCK, is_held, owner_of

RUNS = Path("runs")
_RUN_FOLDER = Check("config", "run folder")


def folder_of(config: RunConfig) -> Path:
    """Where the run would go, as far as that is known without starting it."""
    return RUNS / config.output.name if config.output.folder is None else Path(config.output.folder)


def check_folder(config: RunConfig) -> Finding:
    """Whether a new run can have its folder, and else what is in the way."""
    folder, verb = folder_of(config), "train" if config.chat.source is None else "finetune"
    file = next((parent for parent in (folder, *folder.parents) if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        return _RUN_FOLDER.bad(
            f"{folder} cannot be the run's folder: {file} is a file", "Set output.folder to a new one."
        )
    if config.output.folder is None:
        taken = f"; {folder} is taken, so it gets a number" if folder.exists() else ""
        return _RUN_FOLDER.ok(f"a new folder {folder}{taken}")
    if is_held(folder / LOCK):
        return _RUN_FOLDER.bad(
            f"another process trains in {folder} ({owner_of(folder / LOCK) or 'unknown'})",
            "Wait for it to end, stop it, or set output.folder to another folder.",
        )
    try:
        check_own(folder)
    except UserError as error:
        return _RUN_FOLDER.bad(error.message, f"{error.hint[0].upper()}{error.hint[1:]}.")
    if not _holds_run(folder):
        return _RUN_FOLDER.ok(f"{folder} is free" if folder.exists() else f"a new folder {folder}")
    steps = [step for step, _ in list_checkpoints(folder / "checkpoints")]
    at = f", saved up to step {steps[-1]:,}" if steps else ", without a checkpoint"
    difference = _difference(config, folder)
    if difference is not None:
        return _RUN_FOLDER.bad(
            f"{folder} holds another run{at}: {difference}",
            "A trained model keeps its shape: that run cannot go on with this config. Set output.folder to a new one, "
            f"or go on with the run as it was: `flatout {verb} --resume {shlex.quote(str(folder))}`.",
        )
    if steps:
        return _RUN_FOLDER.warn(
            f"{folder} holds a run of this model{at}",
            f"`flatout {verb}` refuses to write over it. Add --resume auto to go on with it, or set output.folder to a "
            "new folder.",
        )
    return _RUN_FOLDER.bad(
        f"{folder} holds a run{at}",
        f"There is nothing to resume from, and `flatout {verb}` does not write over it. Set output.folder to a new "
        "folder, or remove that one.",
    )


def _holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or bool(list_checkpoints(folder / "checkpoints"))


def _difference(config: RunConfig, folder: Path) -> str | None:
    """The first field of the model in which the run in the folder differs; None where it fits, or does not tell."""
    path = folder / "config.yaml"
    try:
        stored = load_config(path).config.model.model_dump() if path.is_file() else {}
    except UserError:
        return None
    mine = config.model.model_dump()
    for name, value in stored.items():
        if name not in ("dropout", "init_from") and value != mine.get(name):
            return f"it has model.{name} {format_value(value)}, the config says {format_value(mine.get(name))}"
    return None
