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
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from flatout.errors import FullDiskError, ResourceError, UsageError

CHECK_ACCESS = "check that it is there and that you may read it"
MOST_LEVELS = 100  # of JSON inside JSON
MOST_JSON = 2**26  # bytes of a file that describes something; the largest tokenizers have half of that
PIECE = 2**24  # bytes that are hashed and written at once
FULL = (errno.ENOSPC, errno.EDQUOT)
PLACES = 4  # pieces that are under way at once
TEMPORARY = r"\.(?:tmp|old)-[0-9a-f]{8}(?:[0-9a-f]{8})?"  # what `temporary_name` adds; earlier versions had 8 digits
CHECKPOINTS_ARE_SAFE = "; finished checkpoints are intact, continue with --resume auto"


def canonical_json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def parse_json(raw: bytes | str) -> Any:
    """The value that a file holds in JSON.

    Raises ValueError for invalid JSON and for JSON nested more than 100 levels deep, which would hit Python's recursion
    limit later.
    """
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


def read_bounded(path: Path, most: int = MOST_JSON) -> bytes:
    """The bytes of a plain file of at most `most` bytes; anything else is an OSError before it is read.

    A file in a foreign folder may be a pipe, a device without an end, or larger than memory.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # opening a pipe would wait
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
        if size > most or len(content) > most:
            size = max(size, len(content))
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; files of its kind have at most {most:,}", str(path))
        return content


def reading_hint(error: OSError) -> str:
    """What to do about a file that could not be read."""
    if error.errno in (errno.EFBIG, errno.EINVAL):  # by `read_bounded`: it is there, and not what it should be
        return "fetch the folder again, or name another one"
    return CHECK_ACCESS


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


def write_new(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Creates a file. One that is there, or a link of that name, is an error: nothing is followed or overwritten.

    `durable`: the file survives a power loss once this returns. One that cannot be written whole is removed again.
    """
    created = path.open("xb")
    try:
        with created as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            sync_folder(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_pieces(path: Path, pieces: Iterable[memoryview]) -> dict[str, Any]:
    """Writes a new file and makes it durable, hashed on the way; returns what `sync_and_hash` would say of it.

    One thread hashes and one writes, both in order. The next piece is asked for once the one `PLACES` before it is both
    hashed and written: only then may its memory be used again.
    """
    digest, source = hashlib.sha256(), iter(pieces)
    at_work: list[list[Future[None]]] = [[] for _ in range(PLACES)]
    with path.open("xb", buffering=0) as file:
        hashing, writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        try:
            for place in itertools.cycle(range(PLACES)):
                _wait_for(at_work[place])
                piece = next(source, None)
                if piece is None:
                    break
                at_work[place] = [hashing.submit(digest.update, piece), writing.submit(_write_all, file, piece)]
            for place in at_work:
                _wait_for(place)
        finally:
            for thread in (hashing, writing):  # no thread may still read from memory that is freed
                thread.shutdown(cancel_futures=True)
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _write_all(file: FileIO, piece: memoryview) -> None:
    while piece:  # the operating system may take a part only
        piece = piece[file.write(piece) or 0 :]


def _wait_for(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Puts a file in place of another one; see `whole_file`."""
    with whole_file(path, durable=durable) as file:
        file.write(content)


def temporary_name(path: Path, kind: str = "tmp") -> Path:
    """A new name beside `path`. Half of its digits follow from the rest, so the name alone shows that we made it."""
    stem = f"{path.name}.{kind}-{secrets.token_hex(4)}"
    return path.with_name(stem + _digits_after(stem))


def is_temporary(path: Path) -> bool:
    """Whether a name was made by `temporary_name`."""
    return re.search(r"\.(tmp|old)-[0-9a-f]{16}$", path.name) is not None and path.name.endswith(
        _digits_after(path.name[:-8])
    )


def _digits_after(stem: str) -> str:
    return hashlib.sha256(f"flatout: {stem}".encode("utf-8", "surrogateescape")).hexdigest()[:8]


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes the place of another one: readers see the old bytes or the new ones, also when writing
    fails.

    A link at `path` is replaced, not followed. `durable`: the new bytes survive a power loss once the block ends.
    """
    temporary = temporary_name(path)
    created = temporary.open("xb")  # so it is ours to remove
    try:
        with created as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def check_replaceable(
    path: Path, is_ours: Callable[[Path], bool], *, overwrite: bool = False, way: str = "name another file"
) -> None:
    """Refuses to put a file at `path` where one is that `is_ours` does not know by a mark of our own.

    `overwrite` is the user's word that it may go. A link does not count as a mark; with `overwrite` the link itself is
    replaced, never the file that it leads to. Folders, pipes and devices are refused anyway. `way` is for the hint.
    """
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(path))
    with disk_errors(shown, safe=f", or {way}"):
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # an impossible name is refused when it is used
            return
        regular = stat.S_ISREG(mode)
        if not regular and not stat.S_ISLNK(mode):
            raise UsageError(f"{shown} is there and is not a file", way)
        if overwrite:
            return
        if not regular:
            raise UsageError(f"{shown} is a link, and links are not followed", f"{way}, or add --overwrite")
        if not is_ours(path):
            raise UsageError(
                f"{shown} is there and does not look like a file that flatout wrote", f"{way}, or add --overwrite"
            )


def check_folder_writable(folder: Path) -> None:
    """Tries whether files can be made in a folder, by one of a random name that is gone again."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".flatout-")
    os.close(handle)
    os.unlink(name)


def open_to_append(path: Path) -> BinaryIO:
    """Opens a file to write at its end, and makes it where there is none. A link is an error, and is not followed."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "ab")


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
        elif number in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            hint = "choose another name"
        else:
            hint = "check the disk"
        kind = FullDiskError if number in FULL else ResourceError
        raise kind(f"could not write {what}: {reason}", f"{hint}{safe}") from error


def _disk_reason(error: Exception) -> tuple[int | None, str]:
    """(errno, words). safetensors wraps the operating system's error in a type of its own and keeps only its text."""
    if isinstance(error, OSError):
        return error.errno, error.strerror or str(error)
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else None
    return number, os.strerror(number) if number is not None else str(error)
