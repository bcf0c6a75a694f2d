"""What a run has to say once it is under way: a graph that could not be recorded, code compiled again.

Parts of the run leave messages here, or are asked for theirs; the loop takes them after every step and turns each
into a notice. Asking must be cheap and must not wait for the device.
"""

from collections.abc import Callable


class News:
    def __init__(self) -> None:
        self._messages: list[str] = []
        self._sources: list[Callable[[], list[str]]] = []

    def add(self, message: str) -> None:
        self._messages.append(message)

    def follow(self, source: Callable[[], list[str]]) -> None:
        """Asks `source` for its messages whenever news are taken."""
        self._sources.append(source)

    def take(self) -> list[str]:
        """Everything not told yet, oldest first."""
        messages, self._messages = self._messages, []
        for source in self._sources:
            messages += source()
        return messages
