"""Prepared shards as the data of a run: verified, packed where that is asked for, read by the step number alone.

`HostLoader` reads from the shards, in background threads and ahead of time; `DeviceLoader` keeps the split on the
device and gathers there. Both hand on raw ids (`batch.Raw`), so they cannot differ. Windows lie at a fixed stride in
the joined documents, or are those of a `Packing` of whole documents. With a `Reshuffle` documents are joined in another
order in every epoch. Batches depend on nothing but (windows, schedule, step, rank).
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus.sources import counted_by_type
from flatout.data.batch import (
    Batch,
    BatchLoader,
    DataFacts,
    Delivery,
    Raw,
    Schedule,
    Span,
    StepReading,
    TrainingData,
    _documents_in,
    _too_short,
    _within,
    as_signed,
    pinned,
)
from flatout.data.inspect import read_report
from flatout.data.pack import Progress
from flatout.data.prepare import check_complete, data_folder, prepare_data
from flatout.data.sampler import Packing, Pieces, Reshuffle, WindowOrder, window_count
from flatout.data.sampler import best_fit as fit
from flatout.data.shards import Dataset, Tokens, TokenShards, Verify, open_dataset, read_manifest
from flatout.errors import DataError, ResourceError, many
from flatout.finding import Check, Finding
from flatout.folders import remove_empty, retire
from flatout.ops.documents import PackedRows

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

    def numbers(self, reading: StepReading) -> npt.NDArray[np.int64]:
        return self.order.indices(reading.start, reading.windows)

    def pieces(self, reading: StepReading, reshuffle: Reshuffle) -> Pieces:
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
    tokens = int(ends[-1])  # given, or torch would wait for the device
    places = torch.repeat_interleave(shifts, lengths, output_size=tokens) + torch.arange(tokens, device=device)
    return places.view(len(pieces.counts), -1)


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


LARGE_CORPUS = 4 * 2**30  # bytes


def open_shards(data: DataConfig, clean: CleanConfig, progress: Progress | None = None) -> Dataset:
    """The dataset that a config names, prepared now where it is not there yet."""
    folder, fresh = prepare_data(data, clean, progress)
    if fresh:
        check_complete(data, clean)  # where records were dropped, it is trained on only when asked again
    return open_dataset(folder, verify=_how_to_verify(folder))


@dataclasses.dataclass(frozen=True)
class PreparedShards:
    """A dataset, and what of its folder was not there before it was opened."""

    dataset: Dataset
    folder: Path
    made: tuple[Path, ...]  # folders, outermost first
    empty: bool  # whether the folder was there, with nothing in it

    @contextlib.contextmanager
    def kept_if_used(self) -> Iterator[None]:
        """Removes a dataset that was made just now if it turns out too short in the block: it would be in the way."""
        try:
            yield
        except DataError:
            with contextlib.suppress(OSError):  # what cannot be removed must not hide why the run was refused
                if (self.made or self.empty) and retire(self.folder, [path.name for path in self.folder.iterdir()]):
                    remove_empty(self.made[:-1])
                    if self.empty:
                        self.folder.mkdir()
            raise


def prepared_shards(
    data: DataConfig, clean: CleanConfig, progress: Progress | None = None, *, again: bool = False
) -> PreparedShards:
    """The dataset that a config names, prepared now where it is not there yet; `again` takes what is there as it is.

    A dataset with records that could not be read stays: who asks again trains on the rest.
    """
    if again:
        if not (folder := data_folder(data)).is_dir():
            raise DataError(
                f"the run's data folder {folder} is not here",
                "call this from the folder the run was trained in, or name the shards with --data",
            )
        return PreparedShards(open_dataset(folder, verify="full"), folder, (), empty=False)
    folder = data_folder(data).resolve()  # a link stays
    made = tuple(place for place in (*reversed(folder.parents), folder) if not place.exists())
    empty = folder.is_dir() and not any(folder.iterdir())
    return PreparedShards(open_shards(data, clean, progress), folder, made, empty)


@final
class ShardData(TrainingData):
    """A dataset in shards, with the windows and the order in which they are read; what is only evaluated has none."""

    def __init__(self, dataset: Dataset, windows: Windows | None, schedule: Schedule, *, apart: bool) -> None:
        self.train, self.val, self.tokenizer = dataset.train, dataset.val, dataset.tokenizer
        self.windows, self.schedule, self.apart = windows, schedule, apart
        self.facts = DataFacts(
            fingerprint=dataset.manifest.fingerprint,
            place=self.train.folder,
            train_tokens=self.train.tokens,
            windows=None if windows is None else windows.order.windows,
            corpus_bytes=self.train.tokens * self.train.dtype.itemsize,
            attended=_attended(self.train, schedule.longest) if apart else None,
        )

    def split(self, name: str) -> Tokens:
        return self.train if name == "train" else self.val

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        assert self.windows is not None, "it is trained on"
        loader = DeviceLoader if delivery.resident else HostLoader
        return loader(self.windows, delivery, span)

    def notices(self, delivery: Delivery) -> Iterator[Finding]:
        assert self.windows is not None, "it is trained on"
        yield from notices_on_folder(Path(self.train.folder))
        packing = self.windows.packing
        if packing is not None:
            share, alone = packing.padding, packing.remainder
            text = f"best fit: {packing.windows:,} windows, {share:.2%} padding, {alone:,} tokens without a pair"
            yield Check("data", "packing").note(text)
        if self.windows.reshuffle is not None and self.windows.reshuffle.documents == 1:
            text = "the training text is one document, whose order stays (data.document_start cuts it)"
            yield Check("data", "reshuffle").note(f"data.packing=reshuffle: {text}")


def notices_on_folder(folder: Path) -> Iterator[Finding]:
    """What a user should know of how a dataset was prepared and checked."""
    report = read_report(folder)
    if report is not None and report["passed_over"]:
        total = report["files"] + sum(report["passed_over"].values())
        yield Check("data", "passed over").note(
            f"{folder} was prepared from {report['files']:,} of {many(total, 'file')}; passed over "
            f"{counted_by_type(report['passed_over'])}"
        )
    if report is not None and report["problem_count"]:
        yield Check("data", "losses").note(
            f"{report['damaged']:,} of {many(report['records'], 'record')} of the source could not be used; "
            f"see {folder / 'problems.jsonl'}"
        )
    if _how_to_verify(folder) == "sizes":
        yield Check("data", "verified").note(
            f"only the sizes of the shards in {folder} were checked; `flatout prepare verify` checks every byte"
        )


def _how_to_verify(folder: Path) -> Verify:
    """Small corpora are checked byte for byte at every start; hashing large ones would take minutes."""
    return "full" if sum(file.bytes for file in read_manifest(folder).files) <= LARGE_CORPUS else "sizes"


def _attended(train: TokenShards, context: int) -> float:
    """The mean length of the document a token finds itself in; a longer one is cut into windows and a rest."""
    lengths = np.diff(train.document_starts().astype(np.int64), append=train.tokens)
    whole, rest = np.divmod(lengths, context)
    squares = whole.sum() * float(context) ** 2 + (rest.astype(float) ** 2).sum()
    return float(squares / train.tokens)
