"""`run.lock`: its text says who holds a run's folder. It is written and read here and nowhere else.

Every start adds a line, and the last line counts. Nothing is written over, so a power loss cannot take earlier lines.
The file lock itself is taken in `checkpoints/run_folder.py`. Reading the text takes none. `is_held` takes a shared one
for an instant, where the operating system lists no holder.
"""

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

LOCK = "run.lock"
LOCK_MARK = b"run of flatout, held by "
_LINE = re.compile(rb"(?:" + LOCK_MARK + rb")?pid (\d{1,9}) on ([^\n]+)\n?")  # the first version wrote no mark
_MOST_BYTES = 2**20


class Owner(NamedTuple):
    """The process that has signed a lock last."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def sign(handle: int) -> None:
    """Adds a line about this process to an open lock file, and makes it durable; where that fails, adds nothing."""
    line = LOCK_MARK + str(Owner(os.getpid(), socket.gethostname())).encode() + b"\n"
    end = os.lseek(handle, 0, os.SEEK_END)
    try:
        while line:
            line = line[os.write(handle, line) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, end)
        raise


def is_signed(lock: Path) -> bool:
    """Whether a run of ours wrote this file."""
    raw = _text(lock)
    return raw.startswith(LOCK_MARK) or _LINE.fullmatch(raw) is not None


def owner_of(lock: Path) -> Owner | None:
    """Who signed a lock last; None where its last line does not say."""
    found = _LINE.fullmatch(_text(lock).strip().rpartition(b"\n")[2])
    return None if found is None else Owner(int(found[1]), found[2].decode("utf-8", "replace"))


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. Do not ask while this process holds it: its own lock is seen like any other."""
    try:
        import fcntl
    except ImportError:  # Windows keeps readers out of the byte that is locked
        try:
            with lock.open("rb") as file:
                file.read(1)
        except OSError as error:
            return isinstance(error, PermissionError)
        return False
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _listed(os.fstat(handle)):
            return True
        # The list has no holder in another container: only trying shows it.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)


def _listed(status: os.stat_result) -> bool:
    """Whether Linux lists a lock of this file: asking so takes no lock, and cannot be in a new run's way."""
    wanted = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(wanted in line and " FLOCK " in line for line in lines)


def _text(lock: Path) -> bytes:
    try:
        if lock.is_symlink() or not lock.is_file():
            return b""
        with lock.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
