"""Windows of tokens to batches on the device, the same ones however they get there.

Idea: step s reads positions s * batch_size to (s + 1) * batch_size - 1 of the window order, and each rank takes its
contiguous share of them. `HostLoader` gathers from the memory-mapped shards, ahead of time and in background threads;
`DeviceLoader` keeps the split on the device and gathers there. Both hand the raw windows to one function that makes
the batch, so they cannot differ.

Contract: batches come in the order of steps, for any number of workers, and depend on nothing but (shards, order,
batch_size, context, stride, step, rank). A loader is a one-pass iterator and a context manager; after `close`, which
never waits for more than the batches being read, none of its threads runs. What a worker raises is raised in the loop.

Trap: torch has few operations on unsigned types, so ids travel as int16 or int32 bits and are masked on arrival. Ids of
32768 and above are negative until then.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

import numpy as np
import torch

from flatout.data.sampler import WindowOrder, window_count, window_starts
from flatout.data.shards import TokenShards
from flatout.data.tokenizer import Ids
from flatout.errors import DataError, ResourceError
from flatout.ops.reference import IGNORED

PREFETCH = 4
_COPY_TOKENS = 2**25

# Shapes: B sequences of the batch (this rank's share), T context, W = T + 1.


@dataclass(frozen=True)
class Batch:
    """Tokens and, for each, the token that follows it: both [B, T] int64 on the device; IGNORED has no label."""

    tokens: torch.Tensor
    targets: torch.Tensor
    step: int


@final
@dataclass(frozen=True)
class _Plan:
    """Which windows a rank reads at a step."""

    order: WindowOrder
    batch_size: int
    stride: int
    rank: int
    world_size: int

    def windows(self, step: int) -> np.ndarray:
        share = self.batch_size // self.world_size
        return self.order.indices(step * self.batch_size + self.rank * share, share)


def window_order(shards: TokenShards, *, context: int, stride: int, seed: int) -> WindowOrder:
    """The order over all windows of a split; a split without a single window is a `DataError`."""
    _check_length(shards, context)
    return WindowOrder(window_count(shards.tokens, context, stride), seed)


@final
class HostLoader:
    """Batches gathered from memory-mapped shards by `workers` threads, or in the loop when there are none."""

    def __init__(
        self,
        shards: TokenShards,
        order: WindowOrder,
        *,
        batch_size: int,
        context: int,
        stride: int,
        device: torch.device | str,
        workers: int,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers is 0 or more, not {workers}")
        self._plan = _checked_plan(shards, order, batch_size, context, stride, rank, world_size)
        self._shards = shards
        self._context = context
        self._device = _with_index(device)
        self._next_step = first_step
        self._last_step = last_step
        self._waiting: deque[Future[torch.Tensor]] = deque()
        self._asked = first_step
        self._prefetch = max(PREFETCH, workers)
        self._pool = ThreadPoolExecutor(workers, "flatout-loader", _use_device, (self._device,)) if workers else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        step = self._next_step
        if step >= self._last_step:
            self.close()
            raise StopIteration
        if self._pool is None:
            windows = self._read(step)
        else:
            self._ask_ahead(self._pool)
            try:
                windows = self._waiting.popleft().result()
            except BaseException:
                self.close()
                raise
        self._next_step = step + 1
        # Pinned memory makes the copy asynchronous; torch keeps it alive until the copy is done.
        return _batch(windows.to(self._device, non_blocking=self._device.type == "cuda"), step)

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called at any time and more than once."""
        self._next_step = self._last_step
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_ahead(self, pool: ThreadPoolExecutor) -> None:
        while self._asked < self._last_step and len(self._waiting) < self._prefetch:
            self._waiting.append(pool.submit(self._read, self._asked))
            self._asked += 1

    def _read(self, step: int) -> torch.Tensor:
        starts = window_starts(self._plan.windows(step), self._plan.stride)
        windows = _as_signed(self._shards.gather(starts, self._context + 1))
        return windows.pin_memory() if self._device.type == "cuda" else windows


@final
class DeviceLoader:
    """Batches gathered on the device from the whole split, kept there in two or four bytes a token."""

    def __init__(
        self,
        shards: TokenShards,
        order: WindowOrder,
        *,
        batch_size: int,
        context: int,
        stride: int,
        device: torch.device | str,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._plan = _checked_plan(shards, order, batch_size, context, stride, rank, world_size)
        self._device = _with_index(device)
        self._next_step = first_step
        self._last_step = last_step
        # Row i is window i: a view with overlapping rows, which costs nothing.
        self._windows: torch.Tensor | None = _resident(shards, self._device).unfold(0, context + 1, stride)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        step = self._next_step
        if step >= self._last_step or self._windows is None:
            self.close()
            raise StopIteration
        numbers = torch.from_numpy(self._plan.windows(step))
        if self._device.type == "cuda":
            numbers = numbers.pin_memory()
        numbers = numbers.to(self._device, non_blocking=self._device.type == "cuda")
        self._next_step = step + 1
        return _batch(self._windows[numbers], step)

    def close(self) -> None:
        """End the iteration and let go of the device memory."""
        self._next_step = self._last_step
        self._windows = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def evaluation_batches(
    shards: TokenShards, *, context: int, batch_size: int, device: torch.device | str, most_tokens: int | None = None
) -> Iterator[Batch]:
    """Every target of the split once, from its start and in order, up to `most_tokens` of them.

    Windows do not overlap in targets. All batches have one shape: where there is no target, the token is 0 and the
    target IGNORED, so a mean must be over the labelled tokens.
    """
    if context < 1 or batch_size < 1 or (most_tokens is not None and most_tokens < 1):
        raise ValueError(f"no batches of {batch_size} times {context} tokens with at most {most_tokens} in all")
    if shards.tokens < 2:
        raise _too_short(shards, 2, "a token and the one that follows it")
    targets = min(shards.tokens - 1, most_tokens or shards.tokens)
    return _evaluation_batches(shards, context, batch_size, torch.device(device), targets)


def _evaluation_batches(
    shards: TokenShards, context: int, batch_size: int, device: torch.device, targets: int
) -> Iterator[Batch]:
    size = batch_size * context
    for step, start in enumerate(range(0, targets, size)):
        count = min(size, targets - start)
        # One id more than there are targets: inputs are all but the last, targets all but the first.
        ids = torch.from_numpy(shards.read(start, count + 1).astype(np.int64))
        tokens = torch.zeros(size, dtype=torch.int64)
        labels = torch.full((size,), IGNORED, dtype=torch.int64)
        tokens[:count], labels[:count] = ids[:-1], ids[1:]
        yield Batch(tokens.view(batch_size, context).to(device), labels.view(batch_size, context).to(device), step)


def _batch(windows_BW: torch.Tensor, step: int) -> Batch:
    """The batch of raw windows, which are on its device already."""
    mask = 0xFFFF if windows_BW.dtype == torch.int16 else 0xFFFFFFFF
    ids_BW = windows_BW.to(torch.int64) & mask
    return Batch(ids_BW[:, :-1].contiguous(), ids_BW[:, 1:].contiguous(), step)


def _as_signed(ids: Ids) -> torch.Tensor:
    return torch.from_numpy(ids.view(np.int16 if ids.dtype.itemsize == 2 else np.int32))


def _resident(shards: TokenShards, device: torch.device) -> torch.Tensor:
    dtype = torch.int16 if shards.dtype.itemsize == 2 else torch.int32
    try:
        resident = torch.empty(shards.tokens, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        size = shards.tokens * shards.dtype.itemsize
        raise ResourceError(
            f"the {shards.split} split of {size:,} bytes does not fit on {device}", "set speed.loader=host"
        ) from error
    for start in range(0, shards.tokens, _COPY_TOKENS):
        count = min(_COPY_TOKENS, shards.tokens - start)
        resident[start : start + count].copy_(_as_signed(shards.read(start, count)))
    return resident


def _checked_plan(
    shards: TokenShards, order: WindowOrder, batch_size: int, context: int, stride: int, rank: int, world_size: int
) -> _Plan:
    _check_length(shards, context)
    windows = window_count(shards.tokens, context, stride)
    if order.windows != windows:
        raise ValueError(f"the order is over {order.windows} windows, and the split has {windows}")
    if not 0 <= rank < world_size or batch_size < 1 or batch_size % world_size:
        raise ValueError(f"no share of {batch_size} sequences for rank {rank} of {world_size}")
    return _Plan(order, batch_size, stride, rank, world_size)


def _check_length(shards: TokenShards, context: int) -> None:
    if shards.tokens < context + 1:
        raise _too_short(shards, context + 1, f"the context of {context} and one target")


def _too_short(shards: TokenShards, needed: int, why: str) -> DataError:
    return DataError(
        f"the {shards.split} split in {shards.folder} has {shards.tokens} tokens and needs at least {needed}: {why}",
        "use more text, a smaller model.context, or another data.val_fraction",
    )


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _use_device(device: torch.device) -> None:
    # The current CUDA device belongs to a thread; without this, pinning would wake up the first device on every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
