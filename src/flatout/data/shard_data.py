"""Prepared shards as the data of a run: verified, packed where that is asked for, read by the step number alone."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy as np

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus.sources import told_by_type
from flatout.data.batch import BatchLoader, Delivery, Span
from flatout.data.inspect import read_report, unlike_training
from flatout.data.loader import DeviceLoader, HostLoader, Windows
from flatout.data.manifest import read_manifest
from flatout.data.pack import Progress
from flatout.data.positions import Schedule
from flatout.data.prepare import check_complete, data_folder, prepare_data
from flatout.data.shards import Dataset, Tokens, TokenShards, Verify, open_dataset
from flatout.data.training_data import DataFacts, TrainingData
from flatout.errors import DataError, many
from flatout.finding import Check, Finding
from flatout.folders import remove_empty, retire

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
            told = f"best fit: {packing.windows:,} windows, {share:.2%} padding, {alone:,} tokens without a pair"
            yield Check("data", "packing").note(told)
        if self.windows.reshuffle is not None and self.windows.reshuffle.documents == 1:
            told = "the training text is one document, whose order stays (data.document_start cuts it)"
            yield Check("data", "reshuffle").note(f"data.packing=reshuffle: {told}")


def notices_on_folder(folder: Path) -> Iterator[Finding]:
    """What a user should know of how a dataset was prepared and checked."""
    report = read_report(folder)
    if report is not None and report["passed_over"]:
        total = report["files"] + sum(report["passed_over"].values())
        yield Check("data", "passed over").note(
            f"{folder} was prepared from {report['files']:,} of {many(total, 'file')}; passed over "
            f"{told_by_type(report['passed_over'])}"
        )
    if report is not None and report["problem_count"]:
        yield Check("data", "losses").note(
            f"{report['damaged']:,} of {many(report['records'], 'record')} of the source could not be used; "
            f"see {folder / 'problems.jsonl'}"
        )
    if report is not None and (told := unlike_training(report)):
        yield Check("data", "validation").warn(told)
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
