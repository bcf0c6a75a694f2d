"""Streams, files that are asked for, a line that passes, and signals that end a verb.

Standard output and standard error may be closed, full, left by their reader, or in a narrow encoding. A stream that is
closed when the process starts becomes one that goes nowhere, so that no file we open later gets its number: whatever a
library prints would be written into that file. A character that the encoding lacks is written as an escape that JSON
understands. An `Outlet` never raises: what it can no longer write goes nowhere.

Files are looked at before anything is measured, and again when they are written. An existing config file is replaced
only if `tune` wrote it and it was not edited since, a picture only if it carries our mark; `--overwrite` replaces
others too. Links are never followed. Looking leaves nothing behind.
Ctrl-C, SIGTERM and SIGHUP all keep what was found, each with its own word and exit code; one that the process was
started to ignore, by nohup or a shell's `trap ''`, stays ignored.
"""

import codecs
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO, final

from flatout.errors import UsageError, UserError, quoted
from flatout.files import check_folder_writable, check_replaceable, disk_errors, write_whole
from flatout.folders import make_folders, remove_empty
from flatout.front.words import one_line

# --- streams ----------------------------------------------------------------------------------------------------------


_ESCAPE = "flatout-escape"


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Inside, the three standard streams are there, take any text, and standard error never raises."""
    _fill_closed()
    codecs.register_error(_ESCAPE, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors=_ESCAPE)
    with contextlib.redirect_stderr(Outlet(sys.stderr)):
        yield


@contextlib.contextmanager
def output_that_may_go_away() -> Iterator[None]:
    """Inside, standard output never raises; when it is lost, standard error gets one notice."""

    def tell(error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        print(
            f"note: standard output cannot be written ({reason}); the run goes on without it, its records are in its "
            "metrics.jsonl",
            file=sys.stderr,
        )

    with contextlib.redirect_stdout(Outlet(sys.stdout, tell)):
        try:
            yield
        finally:
            sys.stdout.flush()


def go_nowhere(stream: Any) -> None:
    """Points a stream's file elsewhere: what is still in its buffer cannot be written, and Python would complain at
    exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, number)
        os.close(nothing)


@final
class Outlet:
    """A text stream that passes everything on while it can, and nothing from the first error on."""

    def __init__(self, stream: TextIO, lost: Callable[[Exception], None] = lambda _: None) -> None:
        self._stream = stream
        self._lost = lost
        self._gone = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # Python's word for a closed file is ValueError
            self._gone = True
            go_nowhere(self._stream)
            self._lost(error)


def _fill_closed() -> None:
    """Opens nothing in the place of standard streams that were closed: Python has None there."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Characters that cannot be encoded as \\uXXXX, those beyond 16 bits as two: the only escape that JSON knows."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[place : place + 2] for place in range(0, len(units), 2))
    return "".join(f"\\u{pair.hex()}" for pair in pairs), error.end


# --- files that are asked for, a line that passes, and signals --------------------------------------------------------


CONFIGS, PICTURES = (".yaml", ".yml"), (".png", ".svg")


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which are to end a measurement as Ctrl-C does."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Terminated`; afterwards they do again what they did before."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise Terminated(number)

    before = handled("SIGTERM", stop) | handled("SIGHUP", stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handled(name: str, handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """Handles a signal from now on; returns its number and what it did before, or nothing where it is left alone: this
    system does not have it, or whoever started the process wants it ignored."""
    number = getattr(signal, name, None)
    if number is None or signal.getsignal(number) is signal.SIG_IGN:
        return {}
    return {number: signal.signal(number, handler)}


class HeldSignal:
    """The number of a signal that ended a block, if one did."""

    number: int | None = None

    def reported(self, said: str) -> int:
        """Prints what became of the work; returns the signal's own exit code."""
        words = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}
        print(f"{words.get(self.number or 0, 'hung up')}; {said}", file=sys.stderr)
        return 128 + (self.number or 0)


@contextlib.contextmanager
def held_signal() -> Iterator[HeldSignal]:
    """Ends the block where a signal comes, and keeps its number for the caller to look at."""
    stop = HeldSignal()
    try:
        with terminated_like_interrupted():
            yield stop
    except KeyboardInterrupt as signalled:
        stop.number = signalled.number if isinstance(signalled, Terminated) else signal.SIGINT


@contextlib.contextmanager
def ended_by_signals(said: Callable[[], str]) -> Iterator[None]:
    """Leaves with a signal's own exit code where one ends the block; `said` is what became of the work."""
    with held_signal() as stop:
        yield
    if stop.number is not None:
        raise SystemExit(stop.reported(said()))


class Line:
    """One line on the terminal that is written over; without a terminal, a line each if it `logs`, else nothing."""

    def __init__(self, *, watched: bool = True, logs: bool = False) -> None:
        self.watched = watched and sys.stderr.isatty()
        self.logs = logs
        self.shown = False

    def show(self, text: str) -> None:
        if self.watched:
            self.shown = True
            print(f"\r\x1b[K{one_line(text)[:160]}", end="", file=sys.stderr, flush=True)
        elif self.logs:
            print(one_line(text), file=sys.stderr, flush=True)

    def notice(self, message: str) -> None:
        self.close()
        print(f"note: {message}", file=sys.stderr)

    def close(self) -> None:
        if self.shown:
            self.shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def config_target(path: Path, *, overwrite: bool = False) -> Path:
    """The path, if a config file can be written there."""
    _check_name(path, "--out", CONFIGS)
    _check_config(path, overwrite=overwrite)
    return path


def picture_target(path: Path, option: str, *, overwrite: bool = False) -> Path:
    """The path, if a picture can be written there."""
    from flatout.observe.picture import is_picture

    _check_name(path, option, PICTURES)
    check_replaceable(path, is_picture, overwrite=overwrite, way=f"name another file with {option}")
    return path


def study_target(path: Path) -> Path:
    """The path, if the trials of a search can be kept there; whether a file that is there has some, the search asks."""
    _check_name(path, "--study", (".jsonl",))
    check_replaceable(path, lambda _: True, way="name another file with --study")
    return path


def lines_target(path: Path, option: str, *, overwrite: bool = False) -> Path:
    """The path, if JSON lines can be written there as a new file."""
    _check_name(path, option, (".jsonl",))
    check_replaceable(path, lambda _: False, overwrite=overwrite, way=f"name another file with {option}")
    return path


def folder_target(folder: Path, written: str, rows: str) -> None:
    """Tries whether a folder for rows and a picture can be made and written, and leaves nothing behind."""
    if not written:
        raise UsageError("--out needs a folder", "for example --out rows")
    with disk_errors(f"to the folder {written}", safe=", or name another one with --out"):
        parent = next(filter(os.path.lexists, (folder, *folder.parents)))
        if not parent.is_dir():
            raise UsageError(f"--out {quoted(written)}: {str(parent)!r} is not a folder", "name another one with --out")
        made = make_folders(folder)
        try:
            check_folder_writable(folder)
        finally:
            remove_empty(made)
    if (folder / rows).is_symlink():
        raise UsageError(f"{folder / rows} is a link, and links are not followed", "name another folder with --out")


def write_config(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Writes the whole file, or prints the text where that is not possible."""
    try:
        _check_config(path, overwrite=overwrite)  # the file may have been written during the measurement
        with disk_errors(str(path), safe="; what was found is printed above"):
            write_whole(path, text.encode("utf-8"))
    except UserError:
        print(text, file=sys.stderr)
        raise


def _check_name(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    shown = f"{option} {quoted(str(path))}"
    with disk_errors(str(path), safe=f", or name another file with {option}"):
        if path.suffix.lower() not in suffixes or (path.exists() and not path.is_file()):
            raise UsageError(
                f"{shown} is not the name of a {suffixes[0]} file", f"for example {option} found{suffixes[0]}"
            )
        if not path.parent.is_dir():
            raise UsageError(f"the folder of {shown} does not exist", "create it first")
        check_folder_writable(path.parent)
        if path.exists() and not os.access(path, os.W_OK):  # a file that may not be written is not replaced either
            raise PermissionError(13, "Permission denied", str(path))


def _check_config(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not path.is_symlink() and not overwrite:
        raise UsageError(f"--out {quoted(str(path))} is already there", "name another file, or add --overwrite")
    check_replaceable(path, lambda _: False, overwrite=overwrite, way="name another file with --out")
