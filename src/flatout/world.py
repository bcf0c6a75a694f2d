"""The processes that train one model: the rank of this one, and its collectives.

Contract: everything that depends on all data of a step (labelled tokens, loss, gradients and their norm, whether all
values are finite), and every decision that all processes must make alike, goes through this object. `World` is a single
process: its methods return their argument, without a copy, a kernel or a wait. `Ranks` (parallel/ranks.py) is one of
several processes. A `World` with a size and hosts stands for processes that do not exist: their run is planned, not
trained.

Gradients are summed, not averaged, because the loss is divided by the labelled tokens of all processes. `totals` and
`gather` are for values on the host.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from flatout.pulse import Pulse


class Reducer(Protocol):
    """Sums the gradients of all processes while the backward pass of the last micro-batch is still running."""

    in_place: bool  # whether gradients keep their memory from step to step

    def passes(self, count: int) -> int:
        """How many passes this process makes in a step with `count` micro-batches of its own: at least `count`."""
        ...

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The global norm of reduced gradients, or of the parameters; the same in all processes."""
        ...

    def last_micro_batch(self) -> None:
        """From here on a gradient may be reduced as soon as it is complete."""

    def finish(self) -> None:
        """Waits until every gradient is the sum over all processes, on the device."""

    def clear(self) -> None:
        """Zeroes gradients in place."""


@dataclasses.dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local: int = 0  # local rank, which selects the device
    pulse: Pulse = dataclasses.field(default_factory=Pulse, repr=False, compare=False)  # read by the agent of this host
    hosts: tuple[str, ...] = ()  # host name of each rank; empty without a launcher

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's contiguous share of `count` items, empty only if there are fewer items than processes."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def deal(self, count: int) -> Iterator[int]:
        """Every `size`-th number from `rank` on, as many for each process: the last ones may be `count` or more."""
        return iter(range(self.rank, -(-count // self.size) * self.size, self.size))

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on the device."""
        return value

    def follow_first(self, value: Tensor) -> None:
        """Overwrites `value` with that of rank 0, on the device."""

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """The sums over all processes of numbers on the host."""
        return list(numbers)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process, on the host."""
        return self.totals([int(flag)])[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """A value of JSON from every process, in the order of ranks, on the host."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 in all processes; it must be a JSON value."""
        return self.gather(value)[0]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """An error of one process in this block is raised in all of them; one of them prints it."""
        yield

    @contextlib.contextmanager
    def rank0_first(self) -> Iterator[None]:
        """Rank 0 runs this block first, then the first process of every other host, then all others.

        All processes leave the block together, however long the first ones take.
        """
        yield
