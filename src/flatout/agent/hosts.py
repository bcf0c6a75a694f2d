"""How the agents of all hosts meet before each attempt, and tell each other when one of them has failed.

`OneHost` is a host alone, without torch: rank 0 serves the store at a socket that the agent has opened.
"""

import abc
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import final

from flatout.agent.cause import Cause
from flatout.agent.workers import Place
from flatout.errors import UserError
from flatout.launch import Attempt


@dataclasses.dataclass(frozen=True)
class Left:
    """What the attempts so far have left: the run folder, whether they wrote there, a micro-batch that fits, and how
    often the run was started again."""

    folder: str | None = None
    accepted: bool = False
    micro_batch: int | None = None
    restarts: int = 0


Met = tuple[Place, Left, Attempt, int | None]


class Hosts(abc.ABC):
    speaks = True  # whether this agent is the one that tells errors

    @abc.abstractmethod
    def meet(self, left: Left, stopping: Callable[[], bool]) -> contextlib.AbstractContextManager[Met]:
        """Where this attempt's workers meet, what all hosts know of the attempts before, and an open socket."""

    @abc.abstractmethod
    def failed(self) -> bool:
        """Whether another host has failed in this attempt."""

    @abc.abstractmethod
    def others(self, own: Cause) -> Sequence[Cause]:
        """Why this attempt ended on the other hosts."""

    @abc.abstractmethod
    def refuse(self, error: UserError) -> UserError:
        """What to raise for an error that this host has before it meets the others: one of all hosts tells it."""


@final
class OneHost(Hosts):
    def __init__(self, gpus: int) -> None:
        self._gpus, self._attempts = gpus, 0

    @contextlib.contextmanager
    def meet(self, left: Left, stopping: Callable[[], bool]) -> Iterator[Met]:
        self._attempts += 1
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(1024)
            place = Place(0, self._gpus, self._gpus, *listening.getsockname())
            name, socket_number = str(self._attempts), listening.fileno()
            attempt = Attempt(name, socket_number, left.folder, left.accepted, left.micro_batch)
            yield place, left, attempt, listening.fileno()

    def failed(self) -> bool:
        return False

    def others(self, own: Cause) -> Sequence[Cause]:
        return ()

    def refuse(self, error: UserError) -> UserError:
        return error
