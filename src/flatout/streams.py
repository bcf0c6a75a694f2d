"""Standard output and standard error that may be closed, full, left by their reader, or in a narrow encoding.

Contract: a stream that is closed when the process starts becomes one that goes nowhere, so that no file we open later
gets its number: whatever a library prints would be written into that file. A character that the encoding lacks is
written as an escape that JSON understands. An `Outlet` never raises: what it can no longer write goes nowhere.
"""

import codecs
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, final

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
    """Inside, standard output never raises; when it is lost, standard error is told once."""

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
