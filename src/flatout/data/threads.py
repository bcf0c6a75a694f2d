"""Threads that make batches or read parts ahead of time, and what is done about one that hangs.

They are daemons, unlike those of `concurrent.futures`: the end of the process does not wait for one that hangs in a
read from a disk or a network.
"""

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, final

from flatout.errors import UserError

Argument = TypeVar("Argument")
_FRAMES = 4  # of a stack that is told
_LEAVE = 10.0  # seconds


class LoaderError(UserError):
    """A loader that hangs or dies, again if it can be replaced. What is saved is whole, so a new start may help."""

    exit_code = 1


@final
class Threads:
    """Calls functions in threads, in the order in which they were handed over."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """Each thread calls `begin` first."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._begin, self._closed, self._lock = begin, False, threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"{name}_{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[Argument], Any], argument: Argument) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads are closed")
            self._jobs.put((future, function, argument))
        return future

    def close(self, *, wait: bool) -> None:
        """Ends the threads once they have made what they are making; jobs that have not begun are cancelled.

        One that hangs is not waited for longer than a few seconds.
        """
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):  # without waiting: a thread may take the last job first
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)
        until = time.monotonic() + _LEAVE
        for thread in self._threads if wait else ():
            thread.join(max(0.0, until - time.monotonic()))

    def stack(self) -> str:
        """Where the threads are that do not wait for a job: the innermost frames, in one line."""
        frames = sys._current_frames()
        for thread in self._threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None and frame.f_code.co_name != "_work":
                return told(traceback.extract_stack(frame))
        return "no thread of it runs"

    def _work(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            future, function, argument = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(argument))
            except BaseException as error:  # noqa: BLE001 (raised again in the loop)
                future.set_exception(error)
            del job, future  # what was made is the loop's alone


def told(stack: traceback.StackSummary) -> str:
    """The innermost frames of a stack, innermost first."""
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in list(reversed(stack))[:_FRAMES])
