"""Signals that end a measurement: Ctrl-C, SIGTERM and SIGHUP all keep what was found, each with its own word and code.

A signal that the process was started to ignore, by nohup or by a shell's `trap ''`, stays ignored.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


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
