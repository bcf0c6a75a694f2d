"""The folder a run would write to, and its disk: whether it may, how fast it is, and whether there is room.

`measure_disk` writes a temporary file that has no name where the system allows that, so nothing is left behind even
when the process is killed. No torch here.
"""

import dataclasses
import functools
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flatout.checkpoints.checkpoint_files import check_own, list_checkpoints
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, OutputConfig
from flatout.config.yaml_loader import format_value
from flatout.errors import UserError, in_gib
from flatout.finding import Check, Finding, finding_of
from flatout.lock import LOCK, is_held, owner_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk that a run would write to. `nearest` is its closest existing parent, `error` why it is unusable."""

    folder: str
    nearest: str
    free_bytes: int | None = None
    error: str = ""
    write_rate: float | None = None  # bytes per second, on the disk for sure


RUNS = Path("runs")
_RUN_FOLDER = Check("config", "run folder")
_check = functools.partial(Check, "disk")

_CHUNK = 2**22
_SLOW = 50e6  # bytes per second; an ordinary hard disk gives more
_SECONDS = 0.6


def measure_disk(folder: Path, *, quick: bool = False) -> Disk:
    """Looks at the disk of `folder`, which need not exist yet."""
    nearest = _nearest(folder)
    disk = Disk(folder=str(folder), nearest=str(nearest))
    if not nearest.is_dir():
        return dataclasses.replace(disk, error=f"{nearest} is a file, not a folder")
    try:
        free = shutil.disk_usage(nearest).free
        disk = dataclasses.replace(disk, free_bytes=free)
        rate = _write_rate(nearest, min((8 if quick else 64) * 2**20, max(0, free // 8)))
    except OSError as error:
        return dataclasses.replace(disk, error=f"{nearest}: {error.strerror or error}")
    return dataclasses.replace(disk, write_rate=rate)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = Path(os.path.abspath(folder))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _write_rate(nearest: Path, size: int) -> float | None:
    """Bytes per second that reach the disk; raises OSError where nothing can be written."""
    chunk = os.urandom(2**20) * (_CHUNK // 2**20)  # not zeros, which some disks do not even store
    with tempfile.TemporaryFile(dir=nearest, prefix=".flatout-doctor-") as file:
        number, written = file.fileno(), 0
        started = time.perf_counter()
        while written < size and time.perf_counter() - started < _SECONDS:
            file.write(chunk)
            written += len(chunk)
        if written == 0:
            file.write(b"1")  # at least whether it may be written
            file.flush()
            return None
        file.flush()
        os.fsync(number)
        return written / (time.perf_counter() - started)


def check_disk(disk: Disk) -> Iterator[Finding]:
    """Rights and speed of the disk."""
    if disk.error:
        yield _check("writable").bad(
            f"the run's folder {disk.folder} cannot be written: {disk.error}",
            "Set output.folder to a folder that you may write to, or make this one writable.",
        )
    if disk.write_rate is not None:
        yield _check("speed").warn_if(
            disk.write_rate < _SLOW,
            f"writes {disk.write_rate / 1e6:.0f} MB/s",
            "That is slow, perhaps a network folder: the run waits while a checkpoint is written. Set output.folder to "
            "a local disk, or save less often with checkpoint.every.",
        )


def check_room(disk: Disk) -> Iterator[Finding]:
    """Its room, where what the run will write is not known."""
    if disk.free_bytes is not None:
        advice = "A run writes checkpoints of 12 bytes for each parameter. Free some space."
        free = f"{in_gib(disk.free_bytes)} free at {disk.nearest}"
        yield _check("space").warn_if(disk.free_bytes < 2**30, free, advice)


# --- the folder -------------------------------------------------------------------------------------------------------


def folder_of(output: OutputConfig) -> Path:
    """Where the run would go, as far as that is known without starting it."""
    return RUNS / output.name if output.folder is None else Path(output.folder)


def check_folder(output: OutputConfig, model: ModelConfig, verb: str) -> Finding:
    """Whether a new run of that verb can have its folder, and else what is in the way."""
    folder = folder_of(output)
    file = next((parent for parent in (folder, *folder.parents) if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        return _RUN_FOLDER.bad(
            f"{folder} cannot be the run's folder: {file} is a file", "Set output.folder to a new one."
        )
    if output.folder is None:
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
        return finding_of(error, "config", "run folder")
    if not _holds_run(folder):
        return _RUN_FOLDER.ok(f"{folder} is free" if folder.exists() else f"a new folder {folder}")
    steps = [step for step, _ in list_checkpoints(folder / "checkpoints")]
    at = f", saved up to step {steps[-1]:,}" if steps else ", without a checkpoint"
    difference = _difference(model, folder)
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


def _difference(model: ModelConfig, folder: Path) -> str | None:
    """The first field of the model in which the run in the folder differs; None where it fits, or is unknown."""
    path = folder / "config.yaml"
    try:
        stored = load_config(path).config.model.model_dump() if path.is_file() else {}
    except UserError:
        return None
    mine = model.model_dump()
    for name, value in stored.items():
        if name not in ("dropout", "init_from") and value != mine.get(name):
            return f"it has model.{name} {format_value(value)}, the config says {format_value(mine.get(name))}"
    return None
