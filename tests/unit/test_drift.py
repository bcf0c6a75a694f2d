"""Ranks that should hold the same weights and do not."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.engine.loop import check_alike, check_start, sum_of_bits
from flatout.errors import DriftError, UsageError
from flatout.launch import OtherProcessError
from flatout.world import World


@dataclasses.dataclass(frozen=True)
class Everybody(World):
    """A world in which all ranks say what was put down for them."""

    said: tuple[tuple[int, int], ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size if isinstance(value, str) else [list(one) for one in self.said]


def run_of(*said: tuple[int, int], shards: int = 1, rank: int = 0) -> Any:
    """A run whose ranks have (the number of their slices, their bits)."""
    run: Any = SimpleNamespace(
        base_hash="b",
        world=Everybody(rank, len(said), said=said),
        trained=SimpleNamespace(updated=[SimpleNamespace(parameter=torch.ones(2))], sharding=None),
    )
    if shards > 1:
        run.trained.sharding = SimpleNamespace(count=shards, number=said[rank][0])
    return run


def check(*said: tuple[int, int], **how: Any) -> None:
    check_alike(run_of(*said, **how), 2000)


def test_copies_are_compared_and_slices_with_their_like():
    check((0, 5), (0, 5))
    check((0, 5), (1, 6), shards=2)
    check((0, 5), (1, 6), (0, 5), (1, 6), shards=2)
    with pytest.raises(DriftError, match="rank 1 are not"):
        check((0, 5), (0, 6))
    with pytest.raises(DriftError, match="rank 0 are not"):
        check((0, 5), (0, 6), (0, 6))
    with pytest.raises(DriftError, match="rank 3 are not"):
        check((0, 5), (1, 6), (0, 5), (1, 7), shards=2)
    with pytest.raises(OtherProcessError):
        check((0, 5), (0, 6), rank=1)


def test_ranks_that_begin_with_other_weights_are_refused():
    check_start(run_of((0, 5), (0, 5)))
    with pytest.raises(UsageError, match="rank 2 begins with other weights"):
        check_start(run_of((0, 5), (0, 5), (0, 6)))


def test_one_changed_bit_changes_the_sum():
    tensors = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.empty(0, 4)]
    before = sum_of_bits(tensors)
    tensors[0].view(torch.int32)[1, 2] ^= 1
    assert sum_of_bits(tensors) != before
