"""Ranks that train one model have the same weights, bit for bit. Now and then they compare.

What makes them differ is a fault of memory, of a device or of ours; nothing in the loss tells it for a long time.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from flatout.engine.run import Run
from flatout.errors import DriftError
from flatout.launch import OtherProcessError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """A sum over the bits of all values, read as whole numbers: one pass on the device, one number to the host."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack([place * total for place, total in enumerate(sums, 1)]).sum())


def check_alike(run: Run, step: int) -> None:
    """Compares the weights of all ranks where that is due; an error names the ranks that differ from most others."""
    every, world = run.config.parallel.check_every, run.world
    if world.size == 1 or not every or step % every:
        return
    tensors = [one.parameter.detach() for one in run.trained.updated]
    found = world.gather(sum_of_bits(tensor for tensor in tensors if not hasattr(tensor, "placements")))  # not sharded
    most, count = Counter(found).most_common(1)[0]
    if count == world.size:
        return
    if not world.first:
        raise OtherProcessError(DriftError.exit_code)
    # Of two that differ nobody can say which is right; rank 0, which writes the checkpoints, is named as the other.
    usual = most if count > 1 else found[0]
    ranks = ", ".join(str(rank) for rank, value in enumerate(found) if value != usual)
    raise DriftError(
        f"after step {step:,} the weights of rank {ranks} are not those of the others; {every:,} steps ago they were",
        "memory or a GPU may be faulty, see `flatout doctor` there; resume from a checkpoint of before: --resume "
        "RUN/checkpoints/step-N",
    )
