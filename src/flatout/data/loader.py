"""Windows of tokens to batches on the device, the same ones however they get there.

Idea: a step reads the positions of the window order that its `Schedule` gives, and each rank takes its contiguous
share of them. `HostLoader` reads from the shards, ahead of time and in background threads; `DeviceLoader` keeps the
split on the device and gathers there. Both hand raw ids to one function that makes the batch, so they cannot differ.
Windows lie at a fixed stride in the joined documents, or are those of a `Packing` of whole documents.

Contract: batches come in the order of steps, for any number of workers, and depend on nothing but (shards, order,
schedule, stride or packing, step, rank).

Trap: torch has few operations on unsigned types, so ids travel as int16 or int32 bits and are masked on arrival. Ids of
32768 and above are negative until then.

Trap: in joined documents the target of a document's last token is the first of the next one. `Batch.documents` tells
where that is; in packed windows there is no such target.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.ahead import Ahead, with_index
from flatout.data.batch import Batch, BatchLoader
from flatout.data.best_fit import Packing, best_fit
from flatout.data.positions import Reading, Schedule
from flatout.data.sampler import WindowOrder, window_count, window_starts
from flatout.data.shards import Tokens, TokenShards
from flatout.data.tokenizer import Ids
from flatout.errors import DataError, ResourceError
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED

_COPY_TOKENS = 2**25

# Shapes: B sequences of the batch (this rank's share), T context, W = T + 1.


@final
@dataclass(frozen=True)
class _Raw:
    """What a batch is made of: windows of ids [B, W], or any row of ids and for each token its source in it [B, T]."""

    ids: torch.Tensor
    sources: torch.Tensor | None
    documents: torch.Tensor | None

    def pinned(self, device: torch.device) -> "_Raw":
        return self._each(lambda tensor: pinned(tensor, device))

    def on(self, device: torch.device) -> "_Raw":
        # Pinned memory makes the copy asynchronous; torch keeps it alive until the copy is done.
        return self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "_Raw":
        sources, documents = (None if tensor is None else change(tensor) for tensor in (self.sources, self.documents))
        return _Raw(change(self.ids), sources, documents)


@final
@dataclass(frozen=True)
class _Plan:
    """Which windows a rank reads at a step, and where their tokens lie."""

    shards: TokenShards
    order: WindowOrder
    schedule: Schedule
    stride: int
    packing: Packing | None
    rank: int
    world_size: int
    apart: bool = False

    @property
    def context(self) -> int:
        return self.schedule.longest

    def windows(self, reading: Reading) -> npt.NDArray[np.int64]:
        share = reading.windows // self.world_size
        return self.order.indices(reading.start + self.rank * share, share)

    def documents(self, windows: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Of windows over joined documents that are kept apart, and one token more: whether the last target is of the
        same document."""
        if not self.apart:
            return None
        starts = window_starts(windows, self.stride)
        return torch.from_numpy(_documents_in(self.shards.document_starts(), starts, self.context + 1))


def window_order(
    shards: TokenShards, *, context: int, stride: int, seed: int, packing: Packing | None = None
) -> WindowOrder:
    """The order over all windows of a split or of its packing; without a single window it is a `DataError`."""
    return WindowOrder(_count_windows(shards, context, stride, packing), seed)


def pack_documents(shards: TokenShards, context: int) -> Packing:
    """The documents of a split, whole wherever they fit, in windows of `context` inputs."""
    starts = shards.document_starts()
    shards.check_document_starts()  # a packing by wrong lengths would train on pieces that are no documents
    return best_fit(np.diff(starts.astype(np.int64), append=shards.tokens), context)


@final
class HostLoader(BatchLoader):
    """Batches read from the shards by `workers` threads, or in the loop when there are none.

    With a `packing` the stride plays no part, and batches tell documents. With documents `apart` batches are packed
    rows, laid out for `micro_batch` windows at once.
    """

    def __init__(
        self,
        shards: TokenShards,
        order: WindowOrder,
        schedule: Schedule,
        *,
        stride: int,
        device: torch.device | str,
        workers: int,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
        packing: Packing | None = None,
        apart: bool = False,
        micro_batch: int | None = None,
    ) -> None:
        if apart:
            shards.check_document_starts()
        self._plan = _checked(_Plan(shards, order, schedule, stride, packing, rank, world_size, apart))
        self._micro_batch = micro_batch
        self._device = with_index(device)
        span = {"first_step": first_step, "last_step": last_step}
        self._ahead = Ahead(self._read, workers=workers, device=self._device, **span)

    def __next__(self) -> Batch:
        step, read = self._ahead.take()
        if isinstance(read, Batch):
            return _moved(read, self._device)
        return _batch(read.on(self._device), step, self._plan.schedule.at(step))

    def close(self) -> None:
        self._ahead.close()

    def _read(self, step: int) -> _Raw | Batch:
        plan, reading = self._plan, self._plan.schedule.at(step)
        windows = plan.windows(reading)
        if plan.packing is None:
            ids = plan.shards.gather(window_starts(windows, plan.stride), plan.context + 1)
            raw = _Raw(as_signed(ids), None, plan.documents(windows))
        else:
            layout = plan.packing.layout(windows)
            lengths = layout.sizes + 1
            ids = plan.shards.read_ranges(layout.starts, lengths)
            sources = layout.sources(np.cumsum(lengths) - lengths)
            raw = _Raw(as_signed(ids), torch.from_numpy(sources), torch.from_numpy(layout.documents))
        if plan.apart:
            packed = _packed_rows(raw, reading)
            rows = (self._micro_batch or reading.windows) * reading.pieces
            packed.prepare(rows, pin=self._device.type == "cuda")
            return replace(_packed_batch(packed, step, self._device), pieces=reading.pieces, window=reading.window)
        return raw.pinned(self._device)


@final
class DeviceLoader(BatchLoader):
    """Batches gathered on the device from the whole split, kept there in two or four bytes a token."""

    def __init__(
        self,
        shards: TokenShards,
        order: WindowOrder,
        schedule: Schedule,
        *,
        stride: int,
        device: torch.device | str,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
        packing: Packing | None = None,
    ) -> None:
        self._plan = _checked(_Plan(shards, order, schedule, stride, packing, rank, world_size))
        self._device = with_index(device)
        self._next_step = first_step
        self._last_step = last_step
        self._resident: torch.Tensor | None = _resident(shards, self._device)

    def __next__(self) -> Batch:
        step = self._next_step
        if step >= self._last_step or self._resident is None:
            self.close()
            raise StopIteration
        self._next_step = step + 1
        reading = self._plan.schedule.at(step)
        raw = self._gathered(self._resident, self._plan.windows(reading))
        return _batch(raw.pinned(self._device).on(self._device), step, reading)

    def close(self) -> None:
        self._next_step = self._last_step
        self._resident = None

    def _gathered(self, resident: torch.Tensor, windows: npt.NDArray[np.int64]) -> _Raw:
        plan = self._plan
        if plan.packing is not None:
            layout = plan.packing.layout(windows)
            sources = torch.from_numpy(layout.sources(layout.starts))
            return _Raw(resident, sources, torch.from_numpy(layout.documents))
        # Row i is window i: a view with overlapping rows, which costs nothing.
        rows = resident.unfold(0, plan.context + 1, plan.stride)
        numbers = pinned(torch.from_numpy(windows), self._device)
        numbers = numbers.to(self._device, non_blocking=self._device.type == "cuda")
        return _Raw(rows[numbers], None, None)


def evaluation_batches(
    shards: Tokens,
    *,
    context: int,
    batch_size: int,
    device: torch.device | str,
    most_tokens: int | None = None,
    apart: bool = False,
) -> Iterator[Batch]:
    """Every target of the split once, from its start and in order, up to `most_tokens` of them.

    Windows do not overlap in targets. All batches have one shape: where there is no target, the token is 0 and the
    target IGNORED, so a mean must be over the labelled tokens. With documents `apart` batches are packed rows, in which
    a document's last token has no target.
    """
    if context < 1 or batch_size < 1 or (most_tokens is not None and most_tokens < 1):
        raise ValueError(f"no batches of {batch_size} times {context} tokens with at most {most_tokens} in all")
    if shards.tokens < 2:
        raise _too_short(shards, 2, "a token and the one that follows it")
    targets = min(shards.tokens - 1, most_tokens or shards.tokens)
    starts = None
    if apart:
        assert isinstance(shards, TokenShards), "checked by the config"
        shards.check_document_starts()
        starts = shards.document_starts()
    return _evaluation_batches(shards, context, batch_size, torch.device(device), targets, starts)


def _evaluation_batches(
    shards: Tokens,
    context: int,
    batch_size: int,
    device: torch.device,
    targets: int,
    document_starts: npt.NDArray[np.uint64] | None,
) -> Iterator[Batch]:
    size = batch_size * context
    for step, start in enumerate(range(0, targets, size)):
        count = min(size, targets - start)
        # One id more than there are targets: inputs are all but the last, targets all but the first.
        ids = torch.from_numpy(shards.read(start, count + 1).astype(np.int64))
        tokens = torch.zeros(size, dtype=torch.int64)
        labels = torch.full((size,), IGNORED, dtype=torch.int64)
        tokens[:count], labels[:count] = ids[:-1], ids[1:]
        if document_starts is not None:
            begins = start + context * np.arange(batch_size)
            documents = torch.from_numpy(_documents_in(document_starts, begins, context + 1))
            labels_BT = _within(labels.view(batch_size, context), documents)
            documents_BT = documents[:, :-1].masked_fill((torch.arange(size) >= count).view(batch_size, context), -1)
            packed = PackedRows(
                tokens.view(batch_size, context).numpy(), documents_BT.numpy().copy(), labels_BT.numpy()
            )
            yield _moved(_packed_batch(packed, step, device), device)
            continue
        yield Batch(tokens.view(batch_size, context).to(device), labels.view(batch_size, context).to(device), step)


def _batch(raw: _Raw, step: int, reading: Reading) -> Batch:
    """The batch of raw ids, which are on its device already; windows of a shorter stage are cut into rows."""
    tokens_BT, targets_BT = _windows(raw)
    rows = (_cut(tokens_BT, reading), _cut(targets_BT, reading))
    documents = None if raw.documents is None else _cut_documents(raw.documents, reading)
    return Batch(*rows, step, documents, pieces=reading.pieces, window=reading.window)


def window_batch(ids_BW: torch.Tensor, step: int, reading: Reading) -> Batch:
    """The batch of whole windows of ids, in signed types that are masked here."""
    return _batch(_Raw(ids_BW, None, None), step, reading)


def _windows(raw: _Raw) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [B, T] of whole windows."""
    if raw.sources is None:
        ids_BW = _widened(raw.ids)
        return ids_BW[:, :-1].contiguous(), ids_BW[:, 1:].contiguous()
    padding_BT = raw.sources < 0
    sources = raw.sources.clamp(min=0).flatten()
    tokens_BT = _widened(raw.ids.index_select(0, sources)).view_as(padding_BT).masked_fill_(padding_BT, 0)
    targets_BT = _widened(raw.ids.index_select(0, sources + 1)).view_as(padding_BT).masked_fill_(padding_BT, IGNORED)
    return tokens_BT, targets_BT


def _cut(rows_BT: torch.Tensor, reading: Reading) -> torch.Tensor:
    return rows_BT if reading.pieces == 1 else rows_BT.reshape(-1, reading.length)


def _cut_documents(documents_BT: torch.Tensor, reading: Reading) -> torch.Tensor:
    """Numbers begin with 0 in each row, so those of a later piece are counted anew."""
    rows = _cut(documents_BT, reading)
    return rows if reading.pieces == 1 else torch.where(rows < 0, rows, rows - rows[:, :1])


def _packed_rows(raw: _Raw, reading: Reading) -> PackedRows:
    """Rows in which documents stay apart, of raw ids on the host."""
    (tokens_BT, targets_BT), documents = _windows(raw), raw.documents
    assert documents is not None
    if raw.sources is None:
        targets_BT, documents = _within(targets_BT, documents), documents[:, :-1].contiguous()
    documents = _cut_documents(documents, reading)
    return PackedRows(_cut(tokens_BT, reading).numpy(), documents.numpy(), _cut(targets_BT, reading).numpy())


def _within(targets_BT: torch.Tensor, documents_BW: torch.Tensor) -> torch.Tensor:
    """Without those targets that are of another document than their token."""
    return targets_BT.masked_fill(documents_BW[:, 1:] != documents_BW[:, :-1], IGNORED)


def _packed_batch(packed: PackedRows, step: int, device: torch.device) -> Batch:
    """On the host yet, in memory from which `device` copies by itself."""
    tokens_BT, targets_BT = (pinned(torch.from_numpy(x), device) for x in (packed.tokens_BT, packed.targets_BT))
    return Batch(tokens_BT, targets_BT, step, packed=packed)


def _moved(batch: Batch, device: torch.device) -> Batch:
    # From pinned memory, or the loop would wait here for all that the device still has to do.
    tokens_BT, targets_BT = (x.to(device, non_blocking=device.type == "cuda") for x in (batch.tokens, batch.targets))
    return replace(batch, tokens=tokens_BT, targets=targets_BT)


def _widened(ids: torch.Tensor) -> torch.Tensor:
    return ids.to(torch.int64) & (0xFFFF if ids.dtype == torch.int16 else 0xFFFFFFFF)


def _documents_in(
    document_starts: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], context: int
) -> npt.NDArray[np.int32]:
    """[B, T]: the number of the document within its window, for each token of the windows at `starts`."""
    # Unsigned like the starts of documents: numpy would compare mixed types as floats, in a copy of all of them.
    begins = starts.astype(np.uint64)
    first = np.searchsorted(document_starts, begins, side="right")
    counts = np.searchsorted(document_starts, begins + np.uint64(context - 1), side="right") - first
    rows = np.repeat(np.arange(len(starts)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    changes = np.zeros((len(starts), context), dtype=np.int32)
    changes[rows, document_starts[numbers].astype(np.int64) - starts[rows]] = 1
    return np.cumsum(changes, axis=1, dtype=np.int32)


def as_signed(ids: Ids) -> torch.Tensor:
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
        resident[start : start + count].copy_(as_signed(shards.read(start, count)))
    return resident


def _checked(plan: _Plan) -> _Plan:
    windows = _count_windows(plan.shards, plan.context, plan.stride, plan.packing)
    if plan.order.windows != windows:
        raise ValueError(f"the order is over {plan.order.windows} windows, and the split has {windows}")
    check_shares(plan.schedule, plan.rank, plan.world_size)
    return plan


def check_shares(schedule: Schedule, rank: int, world_size: int) -> None:
    for stage in schedule.stages:
        windows = schedule.at(stage.first_step).windows
        if not 0 <= rank < world_size or windows % world_size:
            raise ValueError(f"no share of {windows} windows for rank {rank} of {world_size}")


def _count_windows(shards: TokenShards, context: int, stride: int, packing: Packing | None) -> int:
    if packing is None:
        if shards.tokens < context + 1:
            raise _too_short(shards, context + 1, f"the context of {context} and one target")
        return window_count(shards.tokens, context, stride)
    if packing.capacity != context:
        raise ValueError(f"the packing is for a context of {packing.capacity}, not of {context}")
    if not packing.windows:
        raise DataError(
            f"no document of the {shards.split} split in {shards.folder} has two tokens",
            "use text with longer documents, or data.packing=concat",
        )
    return packing.windows


def _too_short(shards: Tokens, needed: int, why: str) -> DataError:
    return DataError(
        f"the {shards.split} split in {shards.folder} has {shards.tokens} tokens and needs at least {needed}: {why}",
        "use more text, a smaller model.context, or another data.val_fraction",
    )


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
