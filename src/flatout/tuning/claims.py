"""What the guides claim of each switch, so that it can stand beside what was measured here.

None of it was measured in the guides. `low` and `high` are factors in speed (1.5 is half as fast again) over the rung
that ours is measured against; they are None where the claim is of memory alone, or of a gain over something else.
A claim is written down as it is made, also where two of them contradict each other: the range then spans both.

The guides' tricks that should do nothing, or harm: done around the steps of a rung, so that the ladder can show it.

None of them is a setting of Flatout. Emptying the cache gives memory back that the next step asks for again; collecting
Python's garbage finds none in a step that makes no cycles; cuDNN's benchmark is for convolutions; and a limit on how
the allocator splits blocks makes it keep more of them.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator

import torch

from flatout.device import Device, allocator_words, use_expandable_segments


@dataclasses.dataclass(frozen=True)
class Claim:
    text: str
    low: float | None
    high: float | None


# By the name of the rung that tests it (see `rungs.py`).
CLAIMS: dict[str, Claim] = {
    "tf32": Claim("1.5-8x", 1.5, 8.0),
    "bf16": Claim("1.3-3x, half the memory", 1.3, 3.0),
    "fp16": Claim("1.3-3x over fp32", None, None),
    "fused-qkv": Claim("part of 1.1-1.5x, -20% memory", 1.1, 1.5),
    "sdpa": Claim("1.2-4x, -20 to -60% memory", 1.2, 4.0),
    "micro-batch": Claim("1.3-3x", 1.3, 3.0),
    "fused-adamw": Claim("1.05-1.15x", 1.05, 1.15),
    "compile": Claim("1.1-1.5x", 1.1, 1.5),
    "loss": Claim("less memory", None, None),
    "loader-thread": Claim("1.1-1.4x", 1.1, 1.4),
    "device-loader": Claim("1.2x", 1.2, 1.2),
    "expandable": Claim("less fragmentation", None, None),
    "checkpointing-selective": Claim("less memory", None, None),
    "checkpointing-full": Claim("0.95x, -20% memory", 0.95, 0.95),
    "activation-offload": Claim("0.85x, -50% memory", 0.85, 0.85),
    "optimizer-8bit": Claim("less memory", None, None),
    "compile-max-autotune": Claim("1.1-1.3x over eager", None, None),
    "compile-reduce-overhead": Claim("1.15-1.2x over eager", None, None),
    "attention-flash": Claim("1.2-4x over attention by hand", None, None),
    "loss-chunked": Claim("less memory", None, None),
    "workers-4": Claim("1.1-1.4x", 1.1, 1.4),
    "empty-cache": Claim("1.05x, less fragmentation", 1.05, 1.05),
    "empty-cache-each-step": Claim("less fragmentation", None, None),
    "gc-collect": Claim("less fragmentation", None, None),
    "cudnn-benchmark": Claim("1.01-1.02x", 1.01, 1.02),
    "split-512": Claim("less fragmentation", None, None),
}

# What the guides promise of everything together, to stand beside the factor from the baseline to the full set.
TOTALS: tuple[Claim, ...] = (
    Claim("6-20x in one table, 5-10x in its conclusion", 5.0, 20.0),
    Claim("2-5x", 2.0, 5.0),
    Claim("4-6x", 4.0, 6.0),
    Claim("85-107x", 85.0, 107.0),
)


def claim_of(rung: str) -> Claim | None:
    """What the guides say of a rung's switch; taking a switch out is measured against the claim for it."""
    return CLAIMS.get(rung.removeprefix("without-"))


PERIOD = 10  # steps between two cleanings, as the guides have it
PERIODIC = ("empty-cache", "gc-collect")  # a median step does not see them
_ON_CUDA = ("empty-cache", "empty-cache-each-step", "cudnn-benchmark", "split-512")


def tricks_for(device: Device) -> tuple[str, ...]:
    if device.kind != "cuda":
        return ("gc-collect",)
    # What the user has told the allocator in the environment is not undone here, not even for a moment.
    return ("gc-collect", *(name for name in _ON_CUDA if name != "split-512" or allocator_words() is None))


@contextlib.contextmanager
def trick(name: str | None, device: Device) -> Iterator[Callable[[int], None] | None]:
    """Does what a guide says for the length of a block; yields what is to be called after each step, if anything."""
    if name not in (None, "gc-collect", *_ON_CUDA):
        raise ValueError(f"there is no trick {name!r}")
    work = gc.collect if name == "gc-collect" else torch.cuda.empty_cache

    def after_step(number: int) -> None:
        if name not in PERIODIC or number % PERIOD == 0:
            work()

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or name == "cudnn-benchmark"
    if name == "split-512":
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
    try:
        yield after_step if name in (*PERIODIC, "empty-cache-each-step") else None
    finally:
        torch.backends.cudnn.benchmark = before
        if name == "split-512":
            use_expandable_segments(device.torch_device, False)  # setting one puts the others back to their defaults
