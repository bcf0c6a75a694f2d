"""The processes that train one model together: which of them this is, and what they put together.

Contract: what depends on all data of a step (labelled tokens, loss, gradients and their norm, whether all is finite),
and what all processes must decide alike, goes through this object. `World` is one process alone: every method hands
back what it was given, with no copy, no kernel and no wait. `Ranks` (parallel/ranks.py) is one of several. A `World`
with a size and hosts stands for several that are not there, whose run is to be decided and not trained.

Gradients are added up, not averaged, because the loss is divided by the labelled tokens of all processes. Numbers of
the host (`totals`, `gather`) go by the host.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from flatout.pulse import Pulse


class Reducer(Protocol):
    """Adds up the gradients of all processes, while the backward pass of the last micro-batch still goes on."""

    in_place: bool  # whether gradients stay where they are from step to step

    def passes(self, count: int) -> int:
        """How many passes this process takes in a step in which it has `count` micro-batches: at least as many."""
        ...

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of reduced gradients, or of the parameters: that of the whole, the same in all processes."""
        ...

    def last_micro_batch(self) -> None:
        """From here on a gradient that is complete may leave."""

    def finish(self) -> None:
        """Every gradient is the sum over all processes afterwards, on the device."""

    def clear(self) -> None:
        """Makes gradients zero where they lie."""


@dataclasses.dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local: int = 0  # the number of this process on its host, which says what device it takes
    pulse: Pulse = dataclasses.field(default_factory=Pulse, repr=False, compare=False)  # for the agent of this host
    hosts: tuple[str, ...] = ()  # the name of each process's host; none where no launcher started it

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Which of `count` things are this process's: a contiguous share, empty only where there are too few."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def deal(self, count: int) -> Iterator[int]:
        """Numbers from 0, dealt in turn, as many to each process: the last ones may be `count` and above."""
        return iter(range(self.rank, -(-count // self.size) * self.size, self.size))

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on the device."""
        return value

    def follow_first(self, value: Tensor) -> None:
        """Puts the first process's value in the place of this one's, on the device."""

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """The sums over all processes of numbers of the host."""
        return list(numbers)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process, on the host."""
        return self.totals([int(flag)])[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """A value of JSON from every process, in the order of ranks, on the host."""
        return [value]

    def told(self, value: Any) -> Any:
        """The first process's value, which is one of JSON."""
        return self.gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes come to the end of this block, or it is an error in all of them, which one of them tells."""
        yield

    @contextlib.contextmanager
    def in_turns(self) -> Iterator[None]:
        """The first process passes this block before the others enter it; so does the first of every other host.

        However long these take, all come out of it together.
        """
        yield
