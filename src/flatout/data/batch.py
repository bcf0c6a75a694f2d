"""One batch, and the loaders of batches: made ahead of time by threads, handed out in the order of steps.

Idea: what a step needs is made on the host, by `workers` threads or in the loop where there are none, as a `Batch` or
as the `Raw` ids of one. Both are put on the device when the loop asks for them, so loaders cannot differ in that.

Contract: a loader is a one-pass iterator over the batches of its steps, in their order, and a context manager. Nothing
is made for a step before the first or after the last one. After `close`, which never waits for more than what is being
made, none of its threads runs. What a worker raises is raised in the loop, with one exception: the first time that a
worker hangs or cannot read, a notice names its stack, and others make the batch again, if it can be made again.

Trap: torch has few operations on unsigned types, so ids travel as int16 or int32 bits and are masked on arrival. Ids of
32768 and above are negative until then.
"""

import abc
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np
import torch

from flatout.data.positions import Reading, Schedule
from flatout.data.threads import LoaderError, Threads, told
from flatout.data.tokenizer import Ids
from flatout.device import use_device
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED
from flatout.world import World

PREFETCH = 4

# Shapes: B sequences of the batch (the share of this process), T context, W = T + 1.


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How batches reach the device. A matter of speed: the tokens are the same."""

    device: torch.device
    workers: int = 0
    resident: bool = False  # all tokens are kept on the device
    micro_batch: int | None = None  # windows or rows that are worked on at once
    joined: bool = False  # for kernels that go by the bounds of samples and know no rows
    world: World = field(default_factory=World)  # each of its processes reads its share of a step
    patience: float = 300.0  # seconds after which a thread that makes a batch is taken to hang


@dataclass(frozen=True, kw_only=True)
class Span:
    """Steps from `first_step` to the one before `last_step`, each reading what the table of positions says.

    `position` is what a loader said of itself before the first of them, if any.
    """

    schedule: Schedule
    first_step: int
    last_step: int
    position: dict[str, Any] | None = None


@dataclass(frozen=True)
class Batch:
    """Tokens and, for each, the token that follows it: both [B, T] int64 on the device; IGNORED has no label.

    `packed` is what the host knows of rows in which attention must stay inside documents. `pieces` is how many rows a
    window of the longest length was cut into, `attention_window` that of this step where it is not the model's own.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    step: int
    packed: PackedRows | None = None
    pieces: int = 1
    attention_window: int | None = None

    @classmethod
    def of_rows(cls, packed: PackedRows, step: int, device: torch.device, **more: Any) -> "Batch":
        """On the host yet, in memory from which `device` copies by itself: others would hold the loop up until the
        device has done all its work."""
        tokens_BT, targets_BT = (pinned(torch.from_numpy(x), device) for x in (packed.tokens_BT, packed.targets_BT))
        return cls(tokens_BT, targets_BT, step, packed, **more)

    @property
    def count(self) -> int:
        """Tokens, without padding where that is known."""
        return self.tokens.numel() if self.packed is None else self.packed.tokens

    def on(self, device: torch.device) -> "Batch":
        return replace(self, tokens=_moved(self.tokens, device), targets=_moved(self.targets, device))


@final
@dataclass(frozen=True)
class Raw:
    """What a batch is made of: windows of ids [B, W], or any row of ids and for each token its source in it [B, T]."""

    step: int
    reading: Reading
    ids: torch.Tensor
    sources: torch.Tensor | None = None

    def pinned(self, device: torch.device) -> "Raw":
        return self._each(pinned, device)

    def on(self, device: torch.device) -> Batch:
        """The batch, with windows of a shorter stage cut into rows."""
        (tokens_BT, targets_BT), reading = self._each(_moved, device).windows(), self.reading
        more = {"pieces": reading.pieces, "attention_window": reading.attention_window}
        return Batch(reading.cut(tokens_BT), reading.cut(targets_BT), self.step, **more)

    def _each(self, change: Callable[[torch.Tensor, torch.device], torch.Tensor], device: torch.device) -> "Raw":
        sources = None if self.sources is None else change(self.sources, device)
        return replace(self, ids=change(self.ids, device), sources=sources)

    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets [B, T] of whole windows, where the ids are."""
        if self.sources is None:
            ids_BW = _widened(self.ids)
            return ids_BW[:, :-1].contiguous(), ids_BW[:, 1:].contiguous()
        padding_BT = self.sources < 0
        sources = self.sources.clamp(min=0).flatten()
        tokens, targets = (_widened(self.ids.index_select(0, sources + after)) for after in (0, 1))
        tokens_BT = tokens.view_as(padding_BT).masked_fill_(padding_BT, 0)
        return tokens_BT, targets.view_as(padding_BT).masked_fill_(padding_BT, IGNORED)


def as_signed(ids: Ids) -> torch.Tensor:
    return torch.from_numpy(ids.view(np.int16 if ids.dtype.itemsize == 2 else np.int32))


def _widened(ids: torch.Tensor) -> torch.Tensor:
    return ids.to(torch.int64) & (0xFFFF if ids.dtype == torch.int16 else 0xFFFFFFFF)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned memory makes the copy asynchronous; torch keeps it alive until the copy is done.
    return tensor.to(device, non_blocking=device.type == "cuda")


class BatchLoader(abc.ABC):
    """Batches in the order of steps. Data that is found by the step number alone has no position and no notices."""

    read_once = False  # what a step needs cannot be made again

    def __init__(self, delivery: Delivery, span: Span, *, workers: int) -> None:
        if workers < 0:
            raise ValueError(f"workers is 0 or more, not {workers}")
        self.schedule, self.delivery, self.device = span.schedule, delivery, _with_index(delivery.device)
        self._next_step = self._asked = span.first_step
        self._last_step = span.last_step
        self._waiting: deque[Future[Batch | Raw]] = deque()
        self._prefetch = max(PREFETCH, workers)
        self._workers, self._replaceable = workers, not self.read_once
        self._pool = self._new_pool() if workers else None
        self._notices: list[str] = []

    @abc.abstractmethod
    def _made(self, step: int) -> Batch | Raw:
        """What step `step` needs, on the host."""

    def reading(self, step: int) -> Reading:
        """Where this process reads for a step."""
        return self.schedule.at(step).share(self.delivery.world)

    def __next__(self) -> Batch:
        step = self._next_step
        if step >= self._last_step:
            self.close()
            raise StopIteration
        try:
            if self._pool is None:
                made = self._made(step)
            else:
                self._ask(self._pool)
                made = self._first_made(self._pool)
        except BaseException:
            self.close()
            raise
        self._next_step = step + 1
        return made.on(self.device)

    def _new_pool(self) -> Threads:
        return Threads(self._workers, "flatout-loader", lambda: use_device(self.device))

    def _ask(self, pool: Threads) -> None:
        while self._asked < self._last_step and len(self._waiting) < self._prefetch:
            self._waiting.append(pool.submit(self._made, self._asked))
            self._asked += 1

    def _first_made(self, pool: Threads) -> Batch | Raw:
        """What comes next, made by other threads where these fail to; the second time that is an error."""
        waiting = self._waiting[0]
        try:
            made = waiting.result(self.delivery.patience)
        except (TimeoutError, OSError) as error:
            if waiting.done():
                what, where = f"failed with {error!r}", told(traceback.extract_tb(error.__traceback__))
            else:
                what, where = f"has made no batch for {self.delivery.patience:g} s", pool.stack()
            message = f"the loader {what} in step {self._next_step + 1}, at {where}"
            if not self._replaceable:
                pool.close(wait=waiting.done())
                self._pool = None  # its threads hang, and nobody waits for them
                if waiting.done():
                    raise
                raise LoaderError(message, "check the disk or network that the data is on") from error
            self._replaceable = False
            self._notices.append(f"{message}; it was replaced")
            pool.close(wait=waiting.done())
            pool = self._pool = self._new_pool()
            self._waiting.clear()
            self._asked = self._next_step
            self._ask(pool)
            return self._first_made(pool)
        self._waiting.popleft()
        return made

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called at any time and more than once."""
        self._last_step = self._next_step
        self._waiting.clear()
        if self._pool is not None:
            self._pool.close(wait=True)
            self._pool = None

    def position(self) -> dict[str, Any] | None:
        """Plain JSON from which to go on for the step after the last batch that was handed out."""
        return None

    def notices(self) -> list[str]:
        """What there is to tell since this was asked last."""
        notices, self._notices = self._notices, []
        return notices

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_index(device: torch.device) -> torch.device:
    """The device with its number, which threads cannot look up: the current one is each thread's own."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
