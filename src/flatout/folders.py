"""Folders that appear whole, and deletions that touch nothing but our own.

A folder is written beside its target under a temporary name. It is created exclusively, so it is never one that was
there before, and it holds a mark with its own name. Publishing is a rename. To delete a finished folder, the same mark
is written into it and it is renamed first. So whatever a killed process leaves behind carries the mark, or is empty and
has a name that only we make (`temporary_name`). Nothing else is ever swept away: not a user's `notes.old-2024`, and no
link.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from flatout.errors import UserError
from flatout.files import TEMPORARY, canonical_json, is_temporary, sync_folder, temporary_name, write_new

MARK = ".flatout-unfinished"
_MARKED_AFTER = 3600.0  # seconds: a folder that is still empty then has lost its writer


@contextlib.contextmanager
def whole_folder(
    target: Path, *, replaces: Collection[str] = (), occupied: Callable[[Path, str], UserError] | None = None
) -> Iterator[Path]:
    """A new folder to fill, which takes the name `target` when the block ends, and is removed if the block fails.

    A target that exists may hold the files named in `replaces` (relative paths) and is then replaced as a whole. With
    any other content it stays as it is, and `occupied(target, name)` makes the error. The caller syncs its own files.
    """
    made = make_folders(target.parent)
    work = None
    try:
        work = _create(target)
        yield work
        sync_folder(work)
        _publish(work, target, replaces, occupied)
    except BaseException:
        if work is not None:
            _remove_marked(work)
        remove_empty(made)
        raise


def claim(folder: Path) -> bool:
    """Creates a folder with our mark, or finds one that has it; False where something else has this name.

    Such a folder keeps its name from one process to the next, so that the next one can resume what is in it. One that
    holds nothing, or only a mark without a byte, is what a kill between creating and marking it leaves.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        if is_marked(folder):
            return True
        if not _is_empty(folder):
            return False
        (folder / MARK).unlink(missing_ok=True)
    _write_mark(folder, folder.name)
    sync_folder(folder.parent)
    return True


def foreign_entry(folder: Path, own: Collection[str]) -> str | None:
    """The first entry of a folder that is not among the relative paths in `own`, or that is a link; None if all are."""
    parents = {str(parent) for name in own for parent in Path(name).parents}
    waiting = [folder]
    while waiting:  # never into a folder that is not ours: it may hold millions of files
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(folder).as_posix()
            expected = name in parents if path.is_dir() else name in own or name == MARK
            if path.is_symlink() or not expected:
                return name
            if path.is_dir():
                waiting.append(path)
    return None


def retire(folder: Path, own: Collection[str]) -> bool:
    """Removes a finished folder of ours; False, with nothing changed, where it is a link or holds anything else."""
    if folder.is_symlink() or not folder.is_dir() or foreign_entry(folder, own) is not None:
        return False
    doomed = _rename_marked(folder)
    sync_folder(folder.parent)  # else a power loss could leave the folder its name and take what is in it
    _remove_marked(doomed)
    return True


def sweep(parent: Path, stem: str, *, locked: bool) -> None:
    """Removes what killed processes left half written or half deleted of targets whose names match `stem` (a pattern).

    `locked`: the caller holds a lock that every writer here takes, so whoever wrote the leftovers is gone. Otherwise
    only those of processes that no longer run on this host are removed, and empty folders after an hour. Files that
    were to replace others (`whole_file`) are removed under a lock only: they do not say who wrote them.
    """
    if parent.is_symlink() or not parent.is_dir():
        return
    for path in list(parent.iterdir()):
        if not re.fullmatch(f"(?:{stem}){TEMPORARY}", path.name):
            continue
        if is_marked(path):
            if locked or not _writer_lives(path):
                _remove_marked(path)
        elif is_temporary(path):
            with contextlib.suppress(OSError):
                _remove_unmarked(path, locked)


def make_folders(path: Path) -> list[Path]:
    """Creates a folder with its missing parents; returns those that were created, outermost first.

    Their names are durable when this returns: what is synced inside of a folder is lost with the folder's own name.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    made: list[Path] = []
    for place in reversed(missing):
        try:
            place.mkdir()
        except FileExistsError:  # another process made it meanwhile: not ours to remove
            if not place.is_dir():
                raise
        else:
            made.append(place)
            with contextlib.suppress(PermissionError):  # a folder that may be written to and not be listed
                sync_folder(place.parent)
    return made


def remove_empty(made: Collection[Path]) -> None:
    """Takes back the folders of `make_folders` that are still empty."""
    for place in reversed(list(made)):
        with contextlib.suppress(OSError):
            place.rmdir()


# --- marks ------------------------------------------------------------------------------------------------------------


def _create(target: Path) -> Path:
    work = temporary_name(target)
    work.mkdir()
    try:
        _write_mark(work, work.name)
    except BaseException:  # on a full disk, a folder without its mark would stay for ever
        with contextlib.suppress(OSError):
            (work / MARK).unlink(missing_ok=True)
            work.rmdir()
        raise
    return work


def _write_mark(folder: Path, name: str) -> None:
    """The mark names the folder it stands for, so that it means nothing in a copy or after a rename. It is durable
    before anything else happens to the folder: a leftover of a power loss without it would stay for ever."""
    writer = {"flatout": "unfinished", "folder": name, "host": socket.gethostname(), "pid": os.getpid()}
    write_new(folder / MARK, canonical_json(writer), durable=True)


def _read_mark(folder: Path) -> dict[str, object]:
    try:
        handle = os.open(folder / MARK, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            content = json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_marked(folder: Path) -> bool:
    """Whether we wrote this very folder: a real one, not a link, with a mark that names it."""
    try:
        real = stat.S_ISDIR(folder.lstat().st_mode)
    except OSError:
        return False
    mark = _read_mark(folder) if real else {}
    return mark.get("flatout") == "unfinished" and mark.get("folder") == folder.name


def _is_empty(folder: Path) -> bool:
    """Whether a folder, not a link, holds nothing or only a mark without a byte: a kill between creating and marking
    it leaves that, or one between removing the mark and the folder."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    held = list(folder.iterdir())
    return not held or (
        held == [folder / MARK] and held[0].lstat().st_size == 0 and stat.S_ISREG(held[0].lstat().st_mode)
    )


def _writer_lives(folder: Path) -> bool:
    mark = _read_mark(folder)
    pid = mark.get("pid")
    # From another host that cannot be seen; on Windows, asking after a process would end it.
    if mark.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1 or os.name == "nt":
        return True
    if pid == os.getpid():  # a process with our number that was killed, in a container that numbers from 1 again
        return False
    return process_lives(pid)


def process_lives(pid: int) -> bool:
    """Whether a process of this host lives, as far as the host reports it. Not for Windows, where asking would end it.

    One that has ended keeps its number until its parent asks for its exit code, which some never do. Linux says so.
    """
    try:
        os.kill(pid, 0)  # sends nothing, only asks
    except (OSError, OverflowError) as error:
        return not isinstance(error, ProcessLookupError)
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return True
    return state != [b"Z"]


def _rename_marked(folder: Path) -> Path:
    """Renames a folder to a name under which it counts as left over. The mark is written first: a kill in between
    leaves the folder as it was, with a mark that does not fit its name."""
    doomed = temporary_name(folder, "old")
    with contextlib.suppress(FileNotFoundError):  # of an earlier attempt
        (folder / MARK).unlink()
    _write_mark(folder, doomed.name)
    os.rename(folder, doomed)
    return doomed


def _publish(
    work: Path, target: Path, replaces: Collection[str], occupied: Callable[[Path, str], UserError] | None
) -> None:
    doomed = None
    if target.is_symlink() or target.exists():
        name = target.name if target.is_symlink() or not target.is_dir() else foreign_entry(target, replaces)
        if name is not None:
            if occupied is None:
                raise FileExistsError(17, "something else is there already", str(target))
            raise occupied(target, name)
        doomed = _rename_marked(target)
    try:
        os.rename(work, target)
    except BaseException:
        if doomed is not None:
            os.rename(doomed, target)
            (target / MARK).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    with contextlib.suppress(OSError):
        (target / MARK).unlink()
    if doomed is not None:
        _remove_marked(doomed)


def _remove_marked(folder: Path) -> None:
    """Removes a folder that carries our mark, the mark last. Links inside are removed, never followed."""
    if not is_marked(folder):
        return
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.name == MARK:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        sync_folder(folder)  # the mark may not be gone before the rest
        os.unlink(folder / MARK)
        folder.rmdir()


def _remove_unmarked(path: Path, locked: bool) -> None:
    """Removes an empty folder of ours that has no mark, and under a lock a file that was to replace another one."""
    if not locked and time.time() - path.lstat().st_mtime < _MARKED_AFTER:
        return
    if _is_empty(path):
        (path / MARK).unlink(missing_ok=True)
        path.rmdir()
    elif locked and stat.S_ISREG(path.lstat().st_mode):
        path.unlink()


def free_folder(first: Path, taken: Callable[[Path], bool]) -> Path:
    """A folder, or the first of FOLDER-2, FOLDER-3 ... that is not taken."""
    number, folder = 1, first
    while taken(folder):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder
