"""Notices: what a run tells its user besides numbers while it goes on.

Parts of the run leave notices in `Notices`, or are asked for theirs; the loop takes them after every step and makes a
record of each. Asking must be cheap and must not wait for the device.
"""

from collections import deque
from collections.abc import Callable


class Notices:
    """Notices that nobody has been given yet."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()  # the thread that saves adds some, too
        self._sources: list[Callable[[], list[str]]] = []

    def add(self, notice: str) -> None:
        self._waiting.append(notice)

    def follow(self, source: Callable[[], list[str]]) -> None:
        """Asks `source` for its notices whenever some are taken."""
        self._sources.append(source)

    def take(self) -> list[str]:
        """All of them, oldest first."""
        notices = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for source in self._sources:
            notices += source()
        return notices
