"""Command lines run inside the test's process, and what the disk looks like before and after them."""

import contextlib
import hashlib
import io
import os
import resource
import signal
import stat
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout import cli

Facts = tuple[str, ...]
Disk = dict[str, Facts]
SECONDS = 60
_HANDLERS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGALRM") if hasattr(signal, name)
]


@dataclass(frozen=True)
class Outcome:
    """What one command line did. `code` is None where an exception escaped; `trouble` is then its traceback."""

    words: tuple[str, ...]
    code: int | None
    output: str
    errors: str
    trouble: str = ""

    @property
    def both(self) -> str:
        """All that was printed, first to standard output."""
        return self.output + self.errors

    @property
    def refused(self) -> bool:
        return self.code in (2, 3, 5)


class TookTooLong(BaseException):
    """A command that did not end by itself."""


def call(words: Sequence[str], *, typed: str = "", seconds: float = SECONDS, memory: int | None = None) -> Outcome:
    """Runs one command line as a process would, with streams that are as strict as real ones.

    `typed`: its standard input. `memory`: how many bytes it may map in addition to what is mapped already.
    """
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    code, trouble = None, ""
    with _put_back(), _memory_limit(memory), _time_limit(seconds):
        sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code = cli.main(list(words))
            except BaseException:  # noqa: BLE001  # whatever escapes is what is looked for
                trouble = traceback.format_exc()
    said = [stream.buffer.getvalue().decode("utf-8") for stream in (output, errors)]  # pyright: ignore
    return Outcome(tuple(words), code, said[0], said[1], trouble)


def complaint(outcome: Outcome) -> str:
    """What is wrong with how a command ended, in a line; nothing where all is well.

    A refused command says one `error:` line and one `hint:` line, last of all, and each can be shown in a terminal.
    """
    if outcome.trouble:
        return f"traceback: {outcome.trouble.strip().splitlines()[-1]}"
    if "Traceback" in outcome.errors:
        return "a traceback on stderr"
    if not outcome.refused:
        return ""
    lines = outcome.errors.split("\n")
    kinds = [line.partition(":")[0] for line in lines]
    if kinds.count("error") != 1 or kinds.count("hint") != 1 or kinds[-3:] != ["error", "hint", ""]:
        return f"not one error and one hint line: {outcome.errors[-600:]!r}"
    if not all(line.isprintable() for line in lines[-3:]) or len(lines[-2]) <= len("hint: "):
        return f"lines that cannot be shown: {lines[-3:]!r}"
    return ""


def look(folder: Path) -> Disk:
    """Everything in a folder by its relative path: kind and mode, and the bytes' hash or where a link points to."""
    found: Disk = {".": _facts(str(folder))}
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                found[os.path.relpath(entry.path, folder)] = _facts(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return found


def differences(before: Disk, after: Disk) -> list[str]:
    """One line for every path that is gone, changed or new."""
    lines: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            lines.append(f"gone: {path!r}")
        elif path not in before:
            lines.append(f"new: {path!r}")
        elif before[path] != after[path]:
            lines.append(f"changed: {path!r} {before[path][:2]} -> {after[path][:2]}")
    return lines


def _facts(path: str) -> Facts:
    status = os.lstat(path)
    mode = oct(stat.S_IMODE(status.st_mode))
    if stat.S_ISLNK(status.st_mode):
        return ("link", os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return ("folder", mode)
    if not stat.S_ISREG(status.st_mode):
        return ("other", mode)
    with open(path, "rb") as file:
        return ("file", mode, hashlib.file_digest(file, "sha256").hexdigest())


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Leaves folder, signals, environment and input as they were, whatever a command did to them."""
    here, before, environment = (
        os.getcwd(),
        {number: signal.getsignal(number) for number in _HANDLERS},
        dict(os.environ),
    )
    stdin = sys.stdin
    try:
        yield
    finally:
        sys.stdin = stdin
        os.chdir(here)
        for number, handler in before.items():
            signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TookTooLong(f"took more than {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _memory_limit(more: int | None) -> Iterator[None]:
    if more is None or not Path("/proc/self/statm").exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
