"""The processes that train one model together: which of them this is, and what they put together. Today there is one.

Contract: what depends on all data of a step (labelled tokens, loss, gradients and their norm, whether all is finite),
and what all processes must decide alike, goes through this object. With one process every method hands back what it was
given: no copy, no kernel, no wait.

What several need: gradients are added up, not averaged, because the loss is divided by the labelled tokens of all
processes. A norm of shards is the root of the sum of squares. Numbers of the host (`total`, `any`) go by the host.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on the device."""
        return value

    def all(self, flag: Tensor) -> Tensor:
        """Whether `flag` is true in all processes, on the device."""
        return flag

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Adds up the gradients of all processes in place, unless the sink (ops/gradients.py) has done it already."""

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of tensors of which each process may hold a part."""
        return torch.nn.utils.get_total_norm(tensors)

    def total(self, number: int) -> int:
        """The sum over all processes of a number of the host."""
        return number

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in any process, on the host."""
        return flag
