"""Where a run lives: its folder, its lock, and the checkpoint it goes on from.

runs/NAME/
  config.yaml        the resolved config
  metrics.jsonl      every record
  run.lock           held while a process works here; its text marks the folder as a run of ours
  best.json          which checkpoint had the lowest validation loss, as the verdicts say
  checkpoints/step-00000500/ ...
  adapter/           of a fine-tuning run

Nothing here is written or removed before a run is accepted: until then the folder may hold other things of the user's.
"""

import contextlib
import dataclasses
import errno
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from flatout.checkpoints.checkpoint import (
    Checkpoint,
    Unusable,
    newest_good,
    read_verdict,
    sweep_leftovers,
    verify_checkpoint,
)
from flatout.checkpoints.checkpoint_files import MANIFEST, OWN_NAMES, list_checkpoints, set_aside
from flatout.config.schema import OutputConfig
from flatout.errors import CheckpointError, ResourceError, UsageError
from flatout.files import FULL, disk_errors, sync_folder
from flatout.folders import make_folders, remove_empty, sweep
from flatout.lock import LOCK, LOCK_MARK, is_held, owner_of, sign

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
        if folder.resolve() == folder.resolve().parent:
            raise UsageError(
                f"output.folder={folder} is the root of a disk", "set output.folder to a folder of its own"
            )
        if resume is None and holds_run(folder):
            raise UsageError(
                f"{folder} already holds a run",
                "add --resume auto to resume it, or set output.folder to a new folder",
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
    _check_folder(path)
    above = path.resolve().parent
    return above.parent if is_checkpoint(path) and above.name == "checkpoints" else path


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder", "name a run folder or one of its checkpoints/step-N folders")


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def checkpoint_to_load(path: Path, *, best: bool = False, locked: bool = False) -> Path:
    """The checkpoint that a run folder or checkpoint folder names: the best, or else the newest.

    One whose loss was found not to be finite is passed over, as long as there is another. `locked` says that this
    process holds the run's lock, so that no other one trains it.
    """
    _check_folder(path)
    if is_checkpoint(path):
        return path
    found = dict(list_checkpoints(checkpoints_of(path)))
    if not found:
        if not locked and is_held(path / LOCK):
            raise CheckpointError(
                f"{path} is being trained ({owner_of(path / LOCK) or 'unknown'}) and has no checkpoint yet",
                f"wait for its first one; `flatout watch {shlex.quote(str(path))}` shows how far it is",
            )
        begun = (path / "metrics.jsonl").is_file()
        way = "it ended before its first one: start it again" if begun else "name a run folder that has checkpoints"
        raise CheckpointError(f"{path} holds no checkpoint", way)
    best_step = read_best(path) if best else None
    if best_step in found:
        return found[best_step]
    newest_first = [found[step] for step in sorted(found, reverse=True)]
    return next((place for place in newest_first if not _diverged(place)), newest_first[0])


def _diverged(checkpoint: Path) -> bool:
    verdict = read_verdict(checkpoint)
    return verdict is not None and not verdict.finite


def read_best(run: Path) -> int | None:
    """The step of the checkpoint with the lowest validation loss, by the verdicts in the checkpoints.

    Each verdict names the best step until then. `best.json` repeats that for people and other programs.
    """
    found = dict(list_checkpoints(checkpoints_of(run)))
    verdicts = (read_verdict(path) for path in found.values())
    claims = [verdict.best for verdict in verdicts if verdict is not None]
    _, step = min((claim for claim in claims if claim is not None and claim[1] in found), default=(0.0, None))
    return step


def find_resume_point(run: Path, resume: str | None) -> tuple[Path | None, list[Unusable]]:
    """The verified checkpoint to go on from, or None to start anew. Call it while holding the lock.

    `auto` falls back past damaged and diverged checkpoints, which come with it; a path means that checkpoint and no
    other.
    """
    if resume is None:
        return None, []
    if resume == "auto":
        return newest_good(checkpoints_of(run))
    chosen = checkpoint_to_load(Path(resume), locked=True)
    verify_checkpoint(chosen)
    return chosen, []


def set_unusable_aside(one: Unusable) -> str:
    """Renames a checkpoint that nothing can go on from; returns a notice."""
    aside = set_aside(one.path, one.state)
    return f"the checkpoint of step {one.step} is {one.state} and was set aside as {aside.name}: {one.why}"


def set_later_aside(run: Path, chosen: Checkpoint, notice: Callable[[str], None]) -> None:
    """Going back to an older checkpoint: the later ones would be taken for its future, so they step aside."""
    for step, path in list_checkpoints(checkpoints_of(run)):
        if step > chosen.step:
            aside = set_aside(path, "superseded")
            notice(f"going back to step {chosen.step}: the later one of step {step} was set aside as {aside.name}")


@dataclasses.dataclass
class RunLock:
    """A run folder held against other processes. Until `accept`, leaving it puts the disk back as it was."""

    run: Path
    handle: int
    created: bool
    accepted: bool = False

    def accept(self) -> None:
        """The run goes ahead: signs the lock, and removes leftovers of killed processes."""
        try:
            # A lock file that another program made is not ours to write to.
            os.lseek(self.handle, 0, os.SEEK_SET)
            if self.created or os.read(self.handle, len(LOCK_MARK)) == LOCK_MARK:
                # By these lines the files that come next are known as ours. They are durable first, and since nothing
                # is written over, a power loss cannot take the earlier ones.
                sign(self.handle)
                sync_folder(self.run)
        except OSError as error:  # the lock is held without its text, too
            if error.errno in FULL:
                raise
        self.accepted = True
        sweep_leftovers(checkpoints_of(self.run))
        sweep(self.run, OWN_NAMES, locked=True)


@contextlib.contextmanager
def run_lock(run: Path, *, movable: bool = True) -> Iterator[RunLock]:
    """Holds the folder against a second process. The operating system frees it however the holder dies.

    `movable` says that output.folder could name another folder, as it cannot for a run that is resumed by its path.
    """
    for place in (run, *run.parents):
        if place.exists() and not place.is_dir():
            what = "it is a file" if place == run else f"{place} is a file"
            raise UsageError(f"{run} cannot be the run's folder: {what}", "set output.folder to a new folder")
    with disk_errors(f"run folder {run}", safe=""):
        made = make_folders(run)
    created = False
    try:
        with disk_errors(f"run folder {run}", safe=""):
            handle, created = _open_lock(run / LOCK)
        try:
            _take_lock(handle, run, created=created, movable=movable)
            lock = RunLock(run, handle, created=created)
            try:
                yield lock
            finally:
                if created and not lock.accepted:
                    with contextlib.suppress(OSError):
                        (run / LOCK).unlink()
        finally:
            os.close(handle)
    finally:
        remove_empty(made)  # those that are still empty


def _open_lock(path: Path) -> tuple[int, bool]:
    """A handle of the lock file, and whether it was created now. A link is not followed."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        pass
    if path.is_symlink() or not path.is_file():
        raise UsageError(f"{path} is not a plain file, which a run's lock must be", "set output.folder to a new folder")
    return os.open(path, flags), False


def _take_lock(handle: int, run: Path, *, created: bool, movable: bool) -> None:
    try:
        # A process that was refused removes its lock file again: then the file that we hold is no longer the lock.
        held = _try_lock(handle) and os.path.samestat(os.fstat(handle), os.stat(run / LOCK))
    except FileNotFoundError:
        held = False
    except OSError as error:
        if created:
            (run / LOCK).unlink(missing_ok=True)
        raise ResourceError(
            f"{run} cannot be locked against a second process: {error.strerror}",
            "its disk has no file locks: set output.folder to a folder on a local disk",
        ) from error
    if not held:
        raise UsageError(
            f"{run} is in use by another process ({owner_of(run / LOCK) or 'unknown'})",
            f"wait for it to end{', stop it, or set output.folder to another folder' if movable else ' or stop it'}; "
            f"`flatout watch {shlex.quote(str(run))}` shows how far it is",
        )


def _try_lock(handle: int) -> bool:
    """False where another process holds the lock; OSError where the disk has none."""
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
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
