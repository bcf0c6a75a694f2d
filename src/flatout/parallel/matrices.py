"""Whole matrices for processes that share Muon's work: what they hold goes to an owner, and the result comes back.

Contract: what arrives has the bits that were sent. All processes make the same calls in the same order.

Shape legend: N parameters of a unit, R rows that a process holds of each, C columns.
"""

from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from flatout.parallel.ranks import Ranks
from flatout.pulse import Pulse
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


@final
class Copies:
    """Data parallel: every process has all of it, so only results are sent."""

    def __init__(self, world: Ranks) -> None:
        self.number, self.count, self._pulse = world.rank, world.size, world.pulse

    def room(self, rows: int) -> int:
        return rows

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        return held_NRC if owner == self.number else None

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        received = held_NRC if whole_NRC is None else whole_NRC
        self.follow(received, owner)
        return received

    def follow(self, values: Tensor, owner: int) -> None:
        _broadcast(values, owner, None, self._pulse)


@final
class Slices:
    """FSDP2: every process has some rows of every matrix, the last ones fewer than the others, or none."""

    def __init__(self, sharding: "Sharding", world: World) -> None:
        self.number, self.count, self._group = sharding.number, sharding.count, sharding.group
        self._pulse = world.pulse

    def room(self, rows: int) -> int:
        return -(-rows // self.count)

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        mine = owner == self.number
        slices = [torch.empty_like(held_NRC) for _ in range(self.count)] if mine else None
        sent = None if slices is None else [_bits(one) for one in slices]
        with self._pulse.waiting():
            dist.gather(_bits(held_NRC), sent, group=self._group, group_dst=owner)
        return None if slices is None else torch.cat(slices, dim=1)[:, :rows]

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        received = torch.empty_like(held_NRC)
        sent = None
        if whole_NRC is not None:
            missing = self.count * held_NRC.shape[1] - whole_NRC.shape[1]
            filled = torch.nn.functional.pad(whole_NRC, (0, 0, 0, missing))
            sent = [_bits(one.contiguous()) for one in filled.chunk(self.count, dim=1)]
        with self._pulse.waiting():
            dist.scatter(_bits(received), sent, group=self._group, group_src=owner)
        return received

    def follow(self, values: Tensor, owner: int) -> None:
        _broadcast(values, owner, self._group, self._pulse)


def exchange_of(world: World, sharding: "Sharding | None") -> Copies | Slices | None:
    """How the processes of `world` share whole matrices; None for one alone."""
    if sharding is not None:
        return Slices(sharding, world)
    return Copies(world) if isinstance(world, Ranks) else None


def _broadcast(values: Tensor, owner: int, group: dist.ProcessGroup | None, pulse: Pulse) -> None:
    with pulse.waiting():
        dist.broadcast(_bits(values), group=group, group_src=owner)


def _bits(values: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not know every type."""
    return values.view(torch.uint8)
