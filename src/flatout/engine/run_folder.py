"""Where a run lives: its folder, its lock, and the checkpoint it goes on from.

runs/NAME/
  config.yaml        the resolved config
  metrics.jsonl      every record
  run.lock           held while a process works here
  best.json          which checkpoint had the lowest validation loss
  checkpoints/step-00000500/ ...
"""

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout.config.schema import OutputConfig
from flatout.engine.checkpoint import (
    Damaged,
    list_checkpoints,
    newest_good,
    set_aside,
    sweep_leftovers,
    verify_checkpoint,
)
from flatout.errors import CheckpointError, UsageError
from flatout.files import disk_errors

RUNS = Path("runs")


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or bool(list_checkpoints(checkpoints_of(folder)))


def choose_folder(output: OutputConfig, resume: str | None) -> Path:
    """The folder this run will use. Never one that holds another run, unless resuming it was asked for."""
    if resume not in (None, "auto"):
        return run_of(Path(resume))
    if output.folder is not None:
        folder = Path(output.folder)
        if resume is None and holds_run(folder):
            raise UsageError(
                f"{folder} already holds a run",
                "add --resume auto to go on with it, or set output.folder to a new folder",
            )
        return folder
    taken = numbered_runs(output.name)
    begun = [path for _, path in taken if holds_run(path)]
    if resume == "auto" and begun:
        return begun[-1]
    number = taken[-1][0] + 1 if taken else 1
    return RUNS / (output.name if number == 1 else f"{output.name}+{number}")


def numbered_runs(name: str) -> list[tuple[int, Path]]:
    """runs/NAME, runs/NAME+2, runs/NAME+3 ... that exist, by number. A name has no plus, so none is another's."""
    pattern = re.compile(re.escape(name) + r"(?:\+([1-9]\d{0,8}))?")
    found = ((pattern.fullmatch(path.name), path) for path in RUNS.iterdir()) if RUNS.is_dir() else ()
    return sorted((int(match[1] or 1), path) for match, path in found if match)


def newest_run() -> Path:
    """The run under runs/ that has a checkpoint and whose records were written last."""
    runs = [path for path in RUNS.iterdir() if list_checkpoints(checkpoints_of(path))] if RUNS.is_dir() else []
    if not runs:
        raise CheckpointError("there is no run under runs/", "name a run folder, or train one with `flatout train`")
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in (run, *run.glob("metrics.jsonl"))))


def run_of(path: Path) -> Path:
    """The run folder a path means: itself, or the run that a checkpoint folder belongs to."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder", "name a run folder or one of its checkpoints/step-N folders")
    if is_checkpoint(path):
        return path.resolve().parent.parent if path.resolve().parent.name == "checkpoints" else path
    return path


def is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def checkpoint_to_load(path: Path, *, best: bool = False) -> Path:
    """The checkpoint that a run folder or checkpoint folder names: the best, or else the newest."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder", "name a run folder or one of its checkpoints/step-N folders")
    if is_checkpoint(path):
        return path
    found = dict(list_checkpoints(checkpoints_of(path)))
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint", "name a run folder that has checkpoints/step-N in it")
    best_step = read_best(path) if best else None
    return found[best_step] if best_step in found else found[max(found)]


def read_best(run: Path) -> int | None:
    try:
        value = json.loads((run / "best.json").read_bytes())
        return int(value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a pointer for convenience: without it the newest checkpoint serves


def find_resume_point(run: Path, resume: str | None) -> tuple[Path | None, list[Damaged]]:
    """The verified checkpoint to go on from, or None to start anew. Call it while holding the lock.

    `auto` falls back past damaged checkpoints, which come with it; a path means that checkpoint and no other.
    """
    if resume is None:
        return None, []
    if resume == "auto":
        return newest_good(checkpoints_of(run))
    chosen = checkpoint_to_load(Path(resume))
    verify_checkpoint(chosen)
    return chosen, []


def set_damaged_aside(damaged: Sequence[Damaged]) -> list[str]:
    """Renames checkpoints that nothing can go on from; a line for each."""
    told: list[str] = []
    for one in damaged:
        aside = set_aside(one.path, "damaged")
        told.append(f"checkpoint of step {one.step} is damaged and was set aside as {aside.name}: {one.why}")
    return told


def set_later_aside(run: Path, chosen: Path, notice: Callable[[str], None]) -> None:
    """Going back to an older checkpoint: the later ones would be taken for its future, so they step aside."""
    for step, path in list_checkpoints(checkpoints_of(run)):
        if path.name > chosen.name:
            aside = set_aside(path, "superseded")
            notice(f"going back to {chosen.name}: the later checkpoint of step {step} was set aside as {aside.name}")


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Holds the folder against a second process. The operating system frees it however the holder dies."""
    for place in (run, *run.parents):
        if place.exists() and not place.is_dir():
            what = "it is a file" if place == run else f"{place} is a file"
            raise UsageError(f"{run} cannot be the run's folder: {what}", "set output.folder to a new folder")
    with disk_errors(f"run folder {run}", safe=""):
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(handle):
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace").strip() if hasattr(os, "pread") else ""
            raise UsageError(
                f"{run} is in use by another process ({owner or 'unknown'})",
                "wait for it to end, stop it, or set output.folder to another folder",
            )
        with contextlib.suppress(OSError):  # who holds it is for messages only; on a full disk there is no room for it
            os.ftruncate(handle, 0)
            os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        sweep_leftovers(checkpoints_of(run))
        sweep_leftovers(run)  # an adapter's folder
        try:
            yield
        finally:
            if [path.name for path in run.iterdir()] == ["run.lock"]:  # nothing was begun: leave no empty run behind
                (run / "run.lock").unlink()
                run.rmdir()
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
