"""`run.lock`: its text says who holds a run's folder. It is written and read here and nowhere else.

Every start adds a line, and the last line counts. Nothing is written over, so a power loss cannot take earlier lines.
The file lock itself is taken in `engine/run_folder.py`; reading the text takes none, so a look at a run cannot keep it
from starting.
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


def _text(lock: Path) -> bytes:
    try:
        if lock.is_symlink() or not lock.is_file():
            return b""
        with lock.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
