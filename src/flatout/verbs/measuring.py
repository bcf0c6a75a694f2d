"""What measuring verbs share: the files they are asked to write, a line that passes, and how a signal ends them.

Files are looked at before anything is measured, and again when they are written. Ctrl-C, SIGTERM and SIGHUP all keep
what was found, each with its own word and exit code; one that the process was started to ignore, by nohup or a shell's
`trap ''`, stays ignored.
Contract: an existing config file is replaced only if `tune` wrote it and nobody has edited it since, a picture only if
it carries our mark; `--overwrite` is the user's word that another one may go. Links are never followed. Looking leaves
nothing behind.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import UsageError
from flatout.files import check_folder_writable, check_replaceable, disk_errors, write_whole
from flatout.folders import make_folders, remove_empty
from flatout.words import Parser, one_line, quoted

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


def word_of(stopped: KeyboardInterrupt) -> str:
    if not isinstance(stopped, Terminated):
        return "interrupted"
    return "terminated" if stopped.number == signal.SIGTERM else "hung up"


def exit_code_of(stopped: KeyboardInterrupt) -> int:
    return 128 + (stopped.number if isinstance(stopped, Terminated) else signal.SIGINT)


@contextlib.contextmanager
def ended_by_signals(said: Callable[[], str]) -> Iterator[None]:
    """Leaves with a signal's own exit code where one ends the block; `said` is what became of the work."""
    try:
        with terminated_like_interrupted():
            yield
    except KeyboardInterrupt as stopped:
        print(f"{word_of(stopped)}; {said()}", file=sys.stderr)
        raise SystemExit(exit_code_of(stopped)) from stopped


class Line:
    """One line on the terminal that is written over; nothing where nobody watches."""

    def __init__(self, *, watched: bool = True) -> None:
        self.watched = watched and sys.stderr.isatty()
        self.shown = False

    def show(self, text: str) -> None:
        if self.watched:
            self.shown = True
            print(f"\r\x1b[K{one_line(text)[:160]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown:
            self.shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def add_overwrite(parser: Parser) -> None:
    parser.flag("--overwrite", "also replace files that flatout did not write")


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
    _check_name(path, "--study", (".db", ".sqlite"))
    check_replaceable(path, lambda _: True, way="name another file with --study")
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
    """Writes the whole file or nothing."""
    _check_config(path, overwrite=overwrite)  # it may have been edited while it was measured
    with disk_errors(str(path), safe="; what was found is printed above"):
        write_whole(path, text.encode("utf-8"))


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
    from flatout.tuning.changes import is_unchanged

    shown, way = f"--out {quoted(str(path))}", "name another file with --out"

    def is_ours(path: Path) -> bool:
        unchanged = is_unchanged(path.read_text(encoding="utf-8", errors="replace"))
        if unchanged is None:
            raise UsageError(f"{shown} exists and was not written by `flatout tune`", f"{way}, or add --overwrite")
        if not unchanged:
            raise UsageError(f"{shown} was edited after `flatout tune` wrote it", f"{way}, or add --overwrite")
        return True

    check_replaceable(path, is_ours, overwrite=overwrite, way=way)
