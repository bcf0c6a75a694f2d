"""Signals that end a measurement: Ctrl-C and SIGTERM both keep what was found, each with its own word and exit code."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is to end a measurement as Ctrl-C does."""


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`; afterwards it does again what it did before."""

    def stop(_number: int, _frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def word_of(stopped: KeyboardInterrupt) -> str:
    return "terminated" if isinstance(stopped, Terminated) else "interrupted"


def exit_code_of(stopped: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)
