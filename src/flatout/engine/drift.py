"""Ranks that hold the same weights hold them bit for bit. Now and then they compare.

Those are all ranks, or of a sharded model the ranks with the same slices: none under FSDP2, one of every host under
hybrid. What makes them differ is a fault of memory, of a device or of ours; nothing in the loss tells it for a long
time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flatout.engine.run import Run
from flatout.errors import DriftError, UsageError
from flatout.launch import OtherProcessError

EVERY = 1000  # steps between comparisons
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """A sum over the bits of all values, read as whole numbers: one pass on the device, one number to the host."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack([place * total for place, total in enumerate(sums, 1)]).sum())


def check_alike(run: Run, step: int) -> None:
    """Compares the weights of ranks where that is due; an error names the ranks that differ from most others."""
    wrong = [] if step % EVERY else _differing(run)
    if not wrong:
        return
    if not run.world.first:
        raise OtherProcessError(DriftError.exit_code)
    raise DriftError(
        f"after step {step:,} the weights of rank {', '.join(wrong)} are not those of the others; {EVERY:,} steps ago "
        "they were",
        "memory or a GPU may be faulty, see `flatout doctor` there; resume from a checkpoint of before: --resume "
        "RUN/checkpoints/step-N",
    )


def check_start(run: Run) -> None:
    """Refuses ranks that begin with other weights than the others, frozen ones included."""
    bases = run.world.gather(run.base_hash)
    wrong = _differing(run) or [str(rank) for rank, base in enumerate(bases) if base != bases[0]]
    with run.world.together():
        if wrong:
            raise UsageError(
                f"rank {', '.join(wrong)} begins with other weights than the others",
                "model and checkpoint must be the same on all hosts: use folders that all of them see",
            )


def _differing(run: Run) -> list[str]:
    """The ranks whose weights are not those of the others that should have the same."""
    world, sharding = run.world, run.trained.sharding
    copies = world.size if sharding is None else world.size // sharding.count
    if copies == 1:
        return []
    place = 0 if sharding is None else sharding.number
    everywhere = world.gather([place, sum_of_bits(one.parameter.detach() for one in run.trained.updated)])
    held = {place for place, _ in everywhere}
    return [str(rank) for rank in sorted(rank for place in held for rank in _odd_ones(everywhere, place))]


def _odd_ones(everywhere: Sequence[tuple[int, int]], held: int) -> list[int]:
    """The ranks that differ from most others that hold the slices of number `held`."""
    found = {rank: bits for rank, (place, bits) in enumerate(everywhere) if place == held}
    most, count = Counter(found.values()).most_common(1)[0]
    # Of two that differ nobody can say which is right; the first, which writes the checkpoints, is not the one named.
    usual = most if count > 1 else next(iter(found.values()))
    return [rank for rank, bits in found.items() if bits != usual]
