"""Windows of tokens to batches on the device, the same ones however they get there.

Idea: a step reads the positions of the window order that its `Schedule` gives. `HostLoader` reads from the shards, in
background threads and ahead of time; `DeviceLoader` keeps the split on the device and gathers there. Both hand on raw
ids (`batch.Raw`), so they cannot differ. Windows lie at a fixed stride in the joined documents, or are those of a
`Packing` of whole documents. With a `Reshuffle` documents are joined in another order in every epoch.

Contract: batches come in the order of steps, for any number of workers, and depend on nothing but (windows, schedule,
step, rank).

Trap: in joined documents the target of a document's last token is the first of the next one, unless documents are kept
apart; in packed windows there is no such target.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.batch import Batch, BatchLoader, Delivery, Raw, Span, as_signed, pinned
from flatout.data.best_fit import Packing
from flatout.data.best_fit import best_fit as fit
from flatout.data.positions import Reading
from flatout.data.reshuffle import Pieces, Reshuffle
from flatout.data.sampler import WindowOrder, window_count
from flatout.data.shards import Tokens, TokenShards
from flatout.errors import DataError, ResourceError
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED
from flatout.world import World

_COPY_TOKENS = 2**25


@final
@dataclass(frozen=True)
class Windows:
    """All windows of a split, and the order in which they are read. With a `packing` the stride plays no part."""

    shards: TokenShards
    context: int
    stride: int
    packing: Packing | None
    order: WindowOrder
    apart: bool  # a document does not see the one before it
    reshuffle: Reshuffle | None = None  # documents are joined in another order in every epoch

    def numbers(self, reading: Reading) -> npt.NDArray[np.int64]:
        return self.order.indices(reading.start, reading.windows)

    def pieces(self, reading: Reading, reshuffle: Reshuffle) -> Pieces:
        """What the windows of a step are made of, where documents are joined anew in every epoch."""
        epochs = np.arange(reading.start, reading.start + reading.windows) // self.order.windows
        return reshuffle.pieces(epochs, self.numbers(reading) * self.stride, self.context + 1)


def windows_of(
    shards: TokenShards,
    *,
    context: int,
    stride: int,
    seed: int,
    best_fit: bool = False,
    apart: bool = False,
    reshuffle: bool = False,
) -> Windows:
    """The windows of a split, or of its whole documents by best fit; without a single one it is a `DataError`."""
    if best_fit or apart or reshuffle:
        shards.check_document_starts()  # wrong lengths would make pieces that are no documents
    packing = None
    if best_fit:
        packing = fit(np.diff(shards.document_starts().astype(np.int64), append=shards.tokens), context)
        if not packing.windows:
            raise DataError(
                f"no document of the {shards.split} split in {shards.folder} has two tokens",
                "use text with longer documents, or data.packing=concat",
            )
    else:
        check_length(shards, context)
    count = packing.windows if packing is not None else window_count(shards.tokens, context, stride)
    joined = Reshuffle(shards.document_starts(), shards.tokens, seed) if reshuffle else None
    return Windows(shards, context, stride, packing, WindowOrder(count, seed), apart, joined)


def check_length(shards: Tokens, context: int) -> None:
    """Refuses a split without a single window."""
    if shards.tokens < context + 1:
        raise _too_short(shards, context + 1, f"the context of {context} and one target")


def check_evaluable(shards: Tokens) -> None:
    """Refuses a split without a single target."""
    if shards.tokens < 2:
        raise _too_short(shards, 2, "a token and the one that follows it")


@final
class HostLoader(BatchLoader):
    """Batches read from the shards. With documents apart they are packed rows, laid out for a micro-batch at once."""

    def __init__(self, windows: Windows, delivery: Delivery, span: Span) -> None:
        super().__init__(delivery, span, workers=delivery.workers)
        self._windows = windows

    def _made(self, step: int) -> Batch | Raw:
        windows, reading, documents = self._windows, self.reading(step), None
        if windows.reshuffle is not None:
            pieces = windows.pieces(reading, windows.reshuffle)
            ids = windows.shards.read_ranges(pieces.starts, pieces.lengths)
            raw = Raw(step, reading, as_signed(ids.reshape(-1, windows.context + 1)))
            documents = pieces.documents() if windows.apart else None
        elif windows.packing is None:
            starts = windows.numbers(reading) * windows.stride
            raw = Raw(step, reading, as_signed(windows.shards.gather(starts, windows.context + 1)))
            if windows.apart:
                documents = _documents_in(windows.shards.document_starts(), starts, windows.context + 1)
        else:
            layout = windows.packing.layout(windows.numbers(reading))
            lengths = layout.sizes + 1
            ids = as_signed(windows.shards.read_ranges(layout.starts, lengths))
            sources = torch.from_numpy(layout.sources(np.cumsum(lengths) - lengths))
            raw, documents = Raw(step, reading, ids, sources), layout.documents
        if windows.apart and documents is not None:
            return self._packed(raw, torch.from_numpy(documents))
        return raw.pinned(self.device)

    def _packed(self, raw: Raw, documents: torch.Tensor) -> Batch:
        """Rows in which documents stay apart."""
        (tokens_BT, targets_BT), reading = raw.windows(), raw.reading
        if raw.sources is None:
            targets_BT, documents = _within(targets_BT, documents), documents[:, :-1].contiguous()
        documents = reading.cut(documents)
        if reading.pieces > 1:  # numbers begin with 0 in each row, so those of a later piece are counted anew
            documents = torch.where(documents < 0, documents, documents - documents[:, :1])
        packed = PackedRows(reading.cut(tokens_BT).numpy(), documents.numpy(), reading.cut(targets_BT).numpy())
        rows = (self.delivery.micro_batch or reading.windows) * reading.pieces
        packed.prepare(rows, pin=self.device.type == "cuda")
        more = {"pieces": reading.pieces, "attention_window": reading.attention_window}
        return Batch.of_rows(packed, raw.step, self.device, **more)


@final
class DeviceLoader(BatchLoader):
    """Batches gathered on the device from the whole split, kept there in two or four bytes a token."""

    def __init__(self, windows: Windows, delivery: Delivery, span: Span) -> None:
        super().__init__(delivery, span, workers=0)
        self._windows = windows
        self._resident: torch.Tensor | None = _resident(windows.shards, self.device)

    def close(self) -> None:
        super().close()
        self._resident = None

    def _made(self, step: int) -> Raw:
        windows, reading, resident = self._windows, self.reading(step), self._resident
        assert resident is not None
        if windows.reshuffle is not None:
            pieces = windows.pieces(reading, windows.reshuffle)
            return Raw(step, reading, resident[places_of(pieces, self.device)])
        numbers = windows.numbers(reading)
        if windows.packing is not None:
            layout = windows.packing.layout(numbers)
            sources = torch.from_numpy(layout.sources(layout.starts))
            return Raw(step, reading, resident, sources).pinned(self.device)
        # Row i is window i: a view with overlapping rows, which costs nothing.
        rows = resident.unfold(0, windows.context + 1, windows.stride)
        places = pinned(torch.from_numpy(numbers), self.device)
        return Raw(step, reading, rows[places.to(self.device, non_blocking=self.device.type == "cuda")])


def places_of(pieces: Pieces, device: torch.device) -> torch.Tensor:
    """[B, W]: where each token of the windows lies in the split, made on the device: only the pieces travel."""
    ends = np.cumsum(pieces.lengths)
    ranges = torch.from_numpy(np.stack([pieces.starts - ends + pieces.lengths, pieces.lengths]))
    shifts, lengths = pinned(ranges, device).to(device, non_blocking=device.type == "cuda")
    tokens = int(ends[-1])  # told, or torch would wait for the device
    places = torch.repeat_interleave(shifts, lengths, output_size=tokens) + torch.arange(tokens, device=device)
    return places.view(len(pieces.counts), -1)


def evaluation_batches(
    shards: Tokens,
    *,
    context: int,
    batch_size: int,
    device: torch.device,
    most_tokens: int | None = None,
    apart: bool = False,
    world: World | None = None,
) -> Iterator[Batch]:
    """Every target of the split once, from its start and in order, up to `most_tokens` of them.

    Processes of a `world` have every so manieth batch; where they do not come out even, the last ones have no labels.
    Windows do not overlap in targets. All batches have one shape: where there is no target, the token is 0 and the
    target IGNORED, so a mean must be over the labelled tokens. With documents `apart` batches are packed rows, in which
    a document's last token has no target.
    """
    if context < 1 or batch_size < 1 or (most_tokens is not None and most_tokens < 1):
        raise ValueError(f"no batches of {batch_size} times {context} tokens with at most {most_tokens} in all")
    check_evaluable(shards)
    targets, size = min(shards.tokens - 1, most_tokens or shards.tokens), batch_size * context
    document_starts = None
    if apart:
        assert isinstance(shards, TokenShards), "checked by the config"
        shards.check_document_starts()
        document_starts = shards.document_starts()

    def batches() -> Iterator[Batch]:
        for step in (world or World()).deal(-(-targets // size)):
            start = step * size
            count = max(0, min(size, targets - start))
            # One id more than there are targets: inputs are all but the last, targets all but the first.
            ids = torch.from_numpy(shards.read(start if count else 0, count + 1).astype(np.int64))
            tokens_BT = torch.zeros(batch_size, context, dtype=torch.int64)
            labels_BT = torch.full_like(tokens_BT, IGNORED)
            tokens_BT.view(-1)[:count], labels_BT.view(-1)[:count] = ids[:-1], ids[1:]
            batch = Batch(tokens_BT, labels_BT, step)
            if document_starts is not None:
                begins = start + context * np.arange(batch_size)
                documents = torch.from_numpy(_documents_in(document_starts, begins, context + 1))
                labels_BT = _within(labels_BT, documents)
                documents = documents[:, :-1].masked_fill((torch.arange(size) >= count).view_as(tokens_BT), -1)
                packed = PackedRows(tokens_BT.numpy(), documents.numpy().copy(), labels_BT.numpy())
                batch = Batch.of_rows(packed, step, device)
            yield batch.on(device)

    return batches()


def _within(targets_BT: torch.Tensor, documents_BW: torch.Tensor) -> torch.Tensor:
    """Without those targets that are of another document than their token."""
    return targets_BT.masked_fill(documents_BW[:, 1:] != documents_BW[:, :-1], IGNORED)


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


def _too_short(shards: Tokens, needed: int, why: str) -> DataError:
    return DataError(
        f"the {shards.split} split in {shards.folder} has {shards.tokens} tokens and needs at least {needed}: {why}",
        "use more text, a smaller model.context, or another data.validation",
    )
