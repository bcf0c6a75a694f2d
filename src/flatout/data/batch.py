"""Where a step reads, one batch, the loaders of batches, and what a run asks of any kind of data.

`Schedule`: the data is a sequence of windows of `longest` tokens; a position is a window's number in reading order. A
`Stage` says what each step takes from its first step on; a stage with shorter sequences cuts every window into rows, so
an epoch has the same windows in every stage. The table is exact and a pure function of the step number. Learning rates
follow applied updates and are no part of it.

`BatchLoader`: a one-pass iterator over the batches of its steps, in their order, and a context manager. What a step
needs is made on the host, by threads or in the loop, as a `Batch` or as the `Raw` ids of one, and put on the device
when the loop asks for it. Nothing is made for a step before the first or after the last one. After `close`, which waits
only for what is being made, none of its threads runs. An exception of a worker is raised in the loop, except that the
first time a worker hangs or cannot read, a notice names its stack and others make the batch again, if that is possible.

`TrainingData`: setup and loop know this protocol and no kind of data: batches from a position, an evaluation set,
facts, notices, and what a checkpoint keeps. A kind is opened by `resolve/opening.py`.

Trap: torch has few operations on unsigned types, so ids travel as int16 or int32 bits and are masked on arrival. Ids of
32768 and above are negative until then. In joined documents the target of a document's last token is the first of the
next one, unless documents are kept apart.
"""

import abc
import bisect
import functools
import itertools
import math
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.shards import Tokens, TokenShards
from flatout.data.tokenizer import Ids, Tokenizer
from flatout.data.workers import LoaderError, Threads, innermost_frames
from flatout.device import use_device
from flatout.errors import DataError, UsageError
from flatout.finding import Finding
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED
from flatout.world import World

Array = npt.NDArray[np.int64]


@final
@dataclass(frozen=True)
class Stage:
    """What each step takes from `first_step` on; `attention_window` replaces the model's where it is given."""

    first_step: int
    sequences: int
    length: int
    attention_window: int | None = None


@final
@dataclass(frozen=True)
class StepReading:
    """What one step reads: `windows` windows from position `start` on, each cut into `pieces` rows of `length`."""

    start: int
    windows: int
    pieces: int
    length: int
    attention_window: int | None

    def share(self, world: World) -> "StepReading":
        """What one process of several reads: a contiguous share."""
        if not 0 <= world.rank < world.size or self.windows % world.size:
            raise ValueError(f"no share of {self.windows} windows for rank {world.rank} of {world.size}")
        windows = self.windows // world.size
        return replace(self, start=self.start + world.rank * windows, windows=windows)

    def cut(self, windows_BT: torch.Tensor) -> torch.Tensor:
        """Whole windows as rows of this length."""
        return windows_BT if self.pieces == 1 else windows_BT.reshape(-1, self.length)


@final
@dataclass(frozen=True)
class Schedule:
    """Stages over windows of `longest` tokens.

    If `chosen` is given, only these steps are read, in a cycle (`tune` measures fine-tuning with them).
    """

    stages: tuple[Stage, ...]
    longest: int
    chosen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        firsts = [stage.first_step for stage in self.stages]
        if firsts[:1] != [0] or any(after <= before for before, after in itertools.pairwise(firsts)):
            raise ValueError(f"stages begin at step 0 and rise, not {firsts}")
        for stage in self.stages:
            if stage.length < 1 or self.longest % stage.length or stage.sequences < 1:
                raise ValueError(
                    f"{stage.sequences} sequences of {stage.length} tokens: the length must divide the window length "
                    f"{self.longest}, and both must be at least 1"
                )
            if stage.sequences % (self.longest // stage.length):
                raise ValueError(
                    f"{stage.sequences} sequences of {stage.length} do not fill whole windows of {self.longest}"
                )

    @classmethod
    def constant(cls, sequences: int, length: int) -> "Schedule":
        return cls((Stage(0, sequences, length),), length)

    @classmethod
    def in_stages(
        cls, stages: Sequence[Stage], longest: int, *, windows: float | None = None, steps: int | None = None
    ) -> "Schedule":
        """Stages that read equally many windows, as nearly as whole steps allow, in a run of given windows or steps.

        A stage ends with the step that reaches its share; `first_step` is computed here. Stages without a step, which
        only a very short run has, are left out.
        """
        each = [stage.sequences * stage.length / longest for stage in stages]
        if steps is None:
            assert windows is not None, "a run has a length"
            ends, position, last = [], 0.0, 0
            for number, taken in enumerate(each, start=1):
                count = max(0, math.ceil((windows * number / len(each) - position) / taken))
                position, last = position + count * taken, last + count
                ends.append(last)
        else:
            parts = list(itertools.accumulate(1 / taken for taken in each))
            ends = [round(steps * part / parts[-1]) for part in parts]
        begun = [replace(stage, first_step=first) for stage, first in zip(stages, [0, *ends[:-1]], strict=True)]
        kept = [stage for stage, end in zip(begun, ends, strict=True) if end > stage.first_step]
        return cls(tuple(kept) or (begun[0],), longest)

    def after(self, earlier: "Schedule", step: int) -> "Schedule":
        """This table from `step` on and `earlier` before it, so that positions read before `step` stay."""
        now = bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1
        following = [replace(self.stages[now], first_step=step), *self.stages[now + 1 :]]
        kept = [stage for stage in earlier.stages if stage.first_step < step]
        if kept and replace(kept[-1], first_step=step) == following[0]:  # the same stage goes on
            del following[0]
        return replace(self, stages=(*kept, *following))

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The position at which each stage begins."""
        steps = (after.first_step - before.first_step for before, after in itertools.pairwise(self.stages))
        taken = (count * self._windows(stage) for count, stage in zip(steps, self.stages, strict=False))
        return list(itertools.accumulate(taken, initial=0))

    def _windows(self, stage: Stage) -> int:
        return stage.sequences * stage.length // self.longest

    def at(self, step: int) -> StepReading:
        """What step `step`, counted from 0, reads. The last stage has no end."""
        step = self.chosen[step % len(self.chosen)] if self.chosen else step
        number = bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1
        stage = self.stages[number]
        windows = self._windows(stage)
        start = self._starts[number] + (step - stage.first_step) * windows
        return StepReading(start, windows, self.longest // stage.length, stage.length, stage.attention_window)

    def steps_until(self, position: float) -> int:
        """The steps after which `position` windows have been read; a float, because `train.epochs` may be 1.5."""
        number = max(bisect.bisect_left(self._starts, position) - 1, 0)
        stage = self.stages[number]
        return stage.first_step + math.ceil((position - self._starts[number]) / self._windows(stage))


PREFETCH = 4


# Shapes: B sequences of the batch (the share of this process), T context, W = T + 1.
@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How batches reach the device. This changes the speed only: the tokens are the same."""

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
    reading: StepReading
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
        """What step `step` needs, made on the host."""

    def reading(self, step: int) -> StepReading:
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
        """The next step's batch. If its thread fails, others make it again; a second failure is an error."""
        waiting = self._waiting[0]
        try:
            made = waiting.result(self.delivery.patience)
        except (TimeoutError, OSError) as error:
            if waiting.done():
                what, where = f"failed with {error!r}", innermost_frames(traceback.extract_tb(error.__traceback__))
            else:
                what, where = f"has made no batch for {self.delivery.patience:g} s", pool.stack()
            message = f"the loader {what} in step {self._next_step + 1}, at {where}"
            if not self._replaceable:
                pool.close(wait=waiting.done())
                self._pool = None  # its threads hang and are not waited for
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
        """The notices since the last call."""
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


@final
@dataclass(frozen=True)
class LargestRows:
    """The most that a micro-batch of packed samples holds."""

    rows: int
    row_tokens: int
    labels: int

    def by_tokens(self) -> tuple[int, int]:
        return self.rows * self.row_tokens, self.labels

    def by_labels(self) -> tuple[int, int]:
        return self.labels, self.rows * self.row_tokens


def check_evaluable(shards: Tokens) -> None:
    """Refuses a split without a single target."""
    if shards.tokens < 2:
        raise _too_short(shards, 2, "a token and the one that follows it")


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

    The processes of a `world` take the batches in turn; where they do not come out even, the last batches have no
    labels. Windows do not overlap in targets. All batches have one shape: where there is no target, the token is 0 and
    the target IGNORED, so a mean must be over the labelled tokens. With documents `apart` batches are packed rows, in
    which a document's last token has no target.
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


def _too_short(shards: Tokens, needed: int, why: str) -> DataError:
    return DataError(
        f"the {shards.split} split in {shards.folder} has {shards.tokens} tokens and needs at least {needed}: {why}",
        "use more text, a smaller model.context, or another data.validation",
    )


_DOCUMENTS = 4096  # whose first tokens are looked at; a mean over these is as good as one over all


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What is known of the data before the first step."""

    fingerprint: str
    place: str | Path  # where it comes from, in messages
    train_tokens: int | None  # None where they have not been counted
    windows: int | None = None  # positions of an epoch; None where its end is not known
    corpus_bytes: int | None = None  # of the training tokens, where they are all there
    attended: float | None = None  # the mean length inside which a token attends, where that is not the context
    # Of samples, of which a step takes a fixed number of any length:
    step_tokens: float | None = None  # a mean
    batch_samples: int | None = None
    epoch_samples: int | None = None  # the last step of an epoch takes what is left
    steps_per_epoch: int | None = None
    samples: dict[str, Any] | None = None  # as `RunInfo` has them


class TrainingData(abc.ABC):
    """What a run asks of its data. The defaults are those of plain text: all of it is learned, and generation has no
    end."""

    facts: DataFacts
    schedule: Schedule  # the table of positions that the config asks for
    tokenizer: Tokenizer
    val: Tokens
    apart: bool = False  # a document does not see the one before it
    stops: tuple[int, ...] = ()  # tokens that end a generated text

    @abc.abstractmethod
    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        """The batches of some steps."""

    @abc.abstractmethod
    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        """What to say before the first step."""

    def last_notices(self, position: dict[str, Any] | None) -> Iterable[str]:
        """What to say after the last step, at the position where it ended."""
        return ()

    def split(self, name: str) -> Tokens:
        """The tokens of a split: train, where it can be read from its beginning, or val."""
        if name != "val":
            raise UsageError(
                f"of {self.facts.place} only validation text is held",
                "measure on --split val, or name prepared shards with --data",
            )
        return self.val

    def evaluation(
        self, batch_size: int, delivery: Delivery, tokens: int | None = None, split: str = "val"
    ) -> Iterator[Batch]:
        """A split at full length, or as much of its beginning as has `tokens` tokens."""
        shape = {"context": self.schedule.longest, "batch_size": batch_size, "device": delivery.device}
        how = {"most_tokens": tokens, "apart": self.apart, "world": delivery.world}
        return evaluation_batches(self.split(split), **shape, **how)

    @functools.cached_property
    def tokens_per_byte(self) -> float | None:
        return tokens_per_byte(self.val, self.tokenizer, apart=self.apart)

    def largest(self, delivery: Delivery) -> LargestRows | None:
        """The largest micro-batch; None where all are whole windows."""
        return None

    def prompt(self, text: str) -> list[int]:
        """The prompt of a sample: `text`, unless the data has one of its own."""
        try:
            prompt = self.tokenizer.encode(text).tolist()
        except DataError:  # a prompt the vocabulary cannot spell must not end the run
            prompt = []
        return prompt or self.val.read(0, 1).tolist()

    def preview(self) -> tuple[tuple[str, bool], ...]:
        """Pieces of text, and whether each is learned, to look at before training; nothing where all of it is."""
        return ()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint carries of the data besides fingerprint, tokenizer and position."""
        return {}


def tokens_per_byte(shards: Tokens, tokenizer: Tokenizer, *, apart: bool) -> float | None:
    """Predicted tokens for each byte of text, over a whole split; None where the size in bytes is not known.

    In joined documents every token but the first is predicted. With documents `apart`, the first token of a document
    has no context to be predicted from, so neither it nor its bytes count; their mean size is read from documents all
    over the split. The end of a text is a token without bytes, and predicted like any other.
    """
    tokens, size = shards.tokens, float(shards.text_bytes)
    if apart and size:
        assert isinstance(shards, TokenShards), "checked by the config"
        starts = shards.document_starts()
        some = starts[:: -(-len(starts) // _DOCUMENTS)].astype(np.int64)
        first = shards.read_ranges(some, np.ones_like(some))
        tokens -= len(starts)
        size -= len(starts) * sum(_bytes_of(int(id), tokenizer) for id in first) / len(first)
    return tokens / size if size > 0 else None


def _bytes_of(id: int, tokenizer: Tokenizer) -> int:
    """Bytes of text that a token stands for. One that ends inside of a character decodes to a mark of three bytes, in
    the place of one byte or more that it has: that counts as one."""
    if id == tokenizer.end_of_text:
        return 0
    return len(tokenizer.decode([id]).replace("\ufffd", "?").encode("utf-8"))
