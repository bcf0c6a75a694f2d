"""The guides' tricks that should do nothing, or harm: done around the steps of a rung, so that the ladder can show it.

None of them is a setting of Flatout. Emptying the cache gives memory back that the next step asks for again; collecting
Python's garbage finds none in a step that makes no cycles; cuDNN's benchmark is for convolutions; and a limit on how
the allocator splits blocks makes it keep more of them.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from flatout.device import Device, allocator_words, use_expandable_segments

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
