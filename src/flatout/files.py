"""Bytes that reach the disk whole, and errors of the disk in words.

`canonical_json` gives one value one spelling, so a file can be compared with what it should be, byte for byte.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError

CHECK_ACCESS = "check that it is there and that you may read it"
MOST_LEVELS = 100  # of JSON inside JSON
CHECKPOINTS_ARE_SAFE = "; finished checkpoints are intact, go on with --resume auto"


def canonical_json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def parse_json(raw: bytes | str) -> Any:
    """The value that a file holds in JSON. What is no JSON is a ValueError, and so is what is nested too deeply: Python
    gives up on it somewhere, and not always where it is read."""
    try:
        value = json.loads(raw if isinstance(raw, str) else raw.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        inside = itertools.chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in inside if isinstance(one, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return value


def leads_outside(path: Path, folder: Path) -> bool:
    """Whether a file of `folder` is in truth somewhere else, by a link.

    In the cache of the hub every file of a snapshot is a link into the folder of blobs beside it; that is the inside of
    the repository's own folder, `models--ORGANISATION--NAME`.
    """
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    return not Path(os.path.realpath(path)).is_relative_to(root)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def why_unreadable(path: Path) -> str | None:
    """The operating system's reason why a file cannot be read, which libraries keep to themselves; None if it can."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Makes a written file durable and describes it: size and SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync_folder(path: Path) -> None:
    """Makes renames inside `path` durable; a no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, content: bytes) -> None:
    """Creates a file. One that is there, or a link of that name, is an error: nothing is followed or overwritten."""
    with path.open("xb") as file:
        file.write(content)


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Puts a file in place of another one: readers see the old bytes or the new ones, also when writing fails.

    A link at `path` is replaced, not followed. `durable`: the new bytes survive a power loss once this returns.
    """
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    with temporary.open("xb") as file:  # created here, so it is ours to remove
        try:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Gives the file that is written inside the mode of any new file, by the umask. safetensors makes it its owner's
    alone, and a model that others in the group cannot read is of no use to them.

    The mode is that of an empty file put there first: asking for the umask means changing it, for all threads.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


@contextmanager
def disk_errors(what: str, *, safe: str = CHECKPOINTS_ARE_SAFE) -> Iterator[None]:
    """Turns a full, read-only or failing disk into an error that says what to do, and what is `safe` all the same."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        number, reason = _disk_reason(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "free some space"
        elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = "make it writable or choose another folder"
        else:
            hint = "check the disk"
        raise ResourceError(f"could not write {what}: {reason}", f"{hint}{safe}") from error


def _disk_reason(error: Exception) -> tuple[int | None, str]:
    """(errno, words). safetensors wraps the operating system's error in a type of its own and keeps only its text."""
    if isinstance(error, OSError):
        return error.errno, error.strerror or str(error)
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else None
    return number, os.strerror(number) if number is not None else str(error)
