"""Windows of tokens to batches on the device, the same ones however they get there.

Idea: step s reads positions s * batch_size to (s + 1) * batch_size - 1 of the window order, and each rank takes its
contiguous share of them. `HostLoader` reads from the shards, ahead of time and in background threads; `DeviceLoader`
keeps the split on the device and gathers there. Both hand raw ids to one function that makes the batch, so they cannot
differ. Windows lie at a fixed stride in the joined documents, or are those of a `Packing` of whole documents.

Contract: batches come in the order of steps, for any number of workers, and depend on nothing but (shards, order,
batch_size, context, stride or packing, step, rank). A loader is a one-pass iterator and a context manager; after
`close`, which never waits for more than the batches being read, none of its threads runs. What a worker raises is
raised in the loop.

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

from flatout.data.ahead import Ahead, BatchLoader, with_index
from flatout.data.best_fit import Packing, best_fit
from flatout.data.sampler import WindowOrder, window_count, window_starts
from flatout.data.shards import Tokens, TokenShards
from flatout.data.tokenizer import Ids
from flatout.errors import DataError, ResourceError
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED

_COPY_TOKENS = 2**25

# Shapes: B sequences of the batch (this rank's share), T context, W = T + 1.


@dataclass(frozen=True)
class Batch:
    """Tokens and, for each, the token that follows it: both [B, T] int64 on the device; IGNORED has no label.

    `documents`, where there are any, is [B, T] int32: which document of its row each token belongs to, from 0 on, and
    -1 for padding. `packed` says the same on the host, of rows in which attention must stay inside documents.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    step: int
    documents: torch.Tensor | None = None
    packed: PackedRows | None = None

    @property
    def count(self) -> int:
        """Tokens, without padding where that is known."""
        return self.tokens.numel() if self.packed is None else self.packed.tokens


@final
@dataclass(frozen=True)
class _Raw:
    """What a batch is made of: windows of ids [B, W], or any row of ids and for each token its source in it [B, T]."""

    ids: torch.Tensor
    sources: torch.Tensor | None
    documents: torch.Tensor | None

    def pinned(self, device: torch.device) -> "_Raw":
        return self._each(lambda tensor: _pinned(tensor, device))

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
    batch_size: int
    context: int
    stride: int
    packing: Packing | None
    with_documents: bool
    rank: int
    world_size: int
    apart: bool = False

    def windows(self, step: int) -> npt.NDArray[np.int64]:
        share = self.batch_size // self.world_size
        return self.order.indices(step * self.batch_size + self.rank * share, share)

    def documents(self, windows: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Of windows over joined documents, if asked for."""
        if not self.with_documents and not self.apart:
            return None
        starts = window_starts(windows, self.stride)
        # Apart, one token more: whether the last target is of the same document.
        length = self.context + (1 if self.apart else 0)
        return torch.from_numpy(_documents_in(self.shards.document_starts(), starts, length))


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

    With a `packing` the stride plays no part, and batches always tell documents; else `with_documents` asks for them.
    With documents `apart` batches are packed rows, laid out for `micro_batch` rows at once.
    """

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
        packing: Packing | None = None,
        with_documents: bool = False,
        apart: bool = False,
        micro_batch: int | None = None,
    ) -> None:
        if apart:
            shards.check_document_starts()
        plan = _Plan(shards, order, batch_size, context, stride, packing, with_documents, rank, world_size, apart)
        self._plan = _checked(plan)
        self._micro_batch = micro_batch
        self._device = with_index(device)
        span = {"first_step": first_step, "last_step": last_step}
        self._ahead = Ahead(self._read, workers=workers, device=self._device, **span)

    def __next__(self) -> Batch:
        step, read = self._ahead.take()
        return _moved(read, self._device) if isinstance(read, Batch) else _batch(read.on(self._device), step)

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called at any time and more than once."""
        self._ahead.close()

    def _read(self, step: int) -> _Raw | Batch:
        plan, windows = self._plan, self._plan.windows(step)
        if plan.packing is None:
            ids = plan.shards.gather(window_starts(windows, plan.stride), plan.context + 1)
            raw = _Raw(_as_signed(ids), None, plan.documents(windows))
        else:
            layout = plan.packing.layout(windows)
            lengths = layout.sizes + 1
            ids = plan.shards.read_ranges(layout.starts, lengths)
            sources = layout.sources(np.cumsum(lengths) - lengths)
            raw = _Raw(_as_signed(ids), torch.from_numpy(sources), torch.from_numpy(layout.documents))
        if plan.apart:
            packed = _packed_rows(raw)
            packed.prepare(self._micro_batch or plan.batch_size, pin=self._device.type == "cuda")
            return _packed_batch(packed, step, self._device)
        return raw.pinned(self._device)


@final
class DeviceLoader(BatchLoader):
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
        packing: Packing | None = None,
        with_documents: bool = False,
    ) -> None:
        plan = _Plan(shards, order, batch_size, context, stride, packing, with_documents, rank, world_size)
        self._plan = _checked(plan)
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
        return _batch(self._gathered(self._resident, step).pinned(self._device).on(self._device), step)

    def close(self) -> None:
        """End the iteration and let go of the device memory."""
        self._next_step = self._last_step
        self._resident = None

    def _gathered(self, resident: torch.Tensor, step: int) -> _Raw:
        plan, windows = self._plan, self._plan.windows(step)
        if plan.packing is not None:
            layout = plan.packing.layout(windows)
            sources = torch.from_numpy(layout.sources(layout.starts))
            return _Raw(resident, sources, torch.from_numpy(layout.documents))
        # Row i is window i: a view with overlapping rows, which costs nothing.
        rows = resident.unfold(0, plan.context + 1, plan.stride)
        numbers = _pinned(torch.from_numpy(windows), self._device)
        numbers = numbers.to(self._device, non_blocking=self._device.type == "cuda")
        return _Raw(rows[numbers], None, plan.documents(windows))


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


def _batch(raw: _Raw, step: int) -> Batch:
    """The batch of raw ids, which are on its device already."""
    if raw.sources is None:
        ids_BW = _widened(raw.ids)
        return Batch(ids_BW[:, :-1].contiguous(), ids_BW[:, 1:].contiguous(), step, raw.documents)
    padding_BT = raw.sources < 0
    sources = raw.sources.clamp(min=0).flatten()
    tokens_BT = _widened(raw.ids.index_select(0, sources)).view_as(padding_BT).masked_fill_(padding_BT, 0)
    targets_BT = _widened(raw.ids.index_select(0, sources + 1)).view_as(padding_BT).masked_fill_(padding_BT, IGNORED)
    return Batch(tokens_BT, targets_BT, step, raw.documents)


def _packed_rows(raw: _Raw) -> PackedRows:
    """Rows in which documents stay apart, of raw ids on the host."""
    batch = _batch(raw, 0)
    documents, targets_BT = batch.documents, batch.targets
    assert documents is not None
    if raw.sources is None:
        targets_BT, documents = _within(targets_BT, documents), documents[:, :-1].contiguous()
    return PackedRows(batch.tokens.numpy(), documents.numpy(), targets_BT.numpy())


def _within(targets_BT: torch.Tensor, documents_BW: torch.Tensor) -> torch.Tensor:
    """Without those targets that are of another document than their token."""
    return targets_BT.masked_fill(documents_BW[:, 1:] != documents_BW[:, :-1], IGNORED)


def _packed_batch(packed: PackedRows, step: int, device: torch.device) -> Batch:
    """On the host yet, in memory from which `device` copies by itself."""
    tokens_BT, targets_BT = (_pinned(torch.from_numpy(x), device) for x in (packed.tokens_BT, packed.targets_BT))
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


def _checked(plan: _Plan) -> _Plan:
    windows = _count_windows(plan.shards, plan.context, plan.stride, plan.packing)
    if plan.order.windows != windows:
        raise ValueError(f"the order is over {plan.order.windows} windows, and the split has {windows}")
    if not 0 <= plan.rank < plan.world_size or plan.batch_size < 1 or plan.batch_size % plan.world_size:
        raise ValueError(f"no share of {plan.batch_size} sequences for rank {plan.rank} of {plan.world_size}")
    return plan


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


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
