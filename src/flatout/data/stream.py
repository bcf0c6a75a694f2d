"""Training straight from a source: its documents become batches while it is read, and nothing is written to disk.

The training documents of a source, in order, each ended by the end-of-text id, are one row of tokens; when the source
ends it is read again. Worker processes read, clean and tokenize its parts ahead of the loop (`plan.parts_of_lap`). A
thread cuts the row into blocks of `block_windows` windows of context + 1 tokens at stride context. Position p of the
run lies in block p // windows and reads the window that `WindowOrder` gives for p, with the block's number as its
epoch.

Contract: the row is what `prepare` with data.split=document writes as the training split. Batches depend on nothing but
(source, settings, schedule, seed, step, rank). A `Position`, which is plain JSON, is enough to resume from. Memory is
bounded by a few blocks and parts, except that validation text is held. Input that cannot be used is left out with a
notice. A source without training text is an error, not an endless loop. After `close` no thread and no worker runs; an
error in the background is raised in the loop.

Traps: a document of more than 16 MiB comes in pieces. Each piece goes to training or validation by its own hash, and a
rule that rejects a later piece drops the document from there on. A shuffle within blocks does not mix a source that is
sorted by topic or language: prepare such a source instead.
"""

import contextlib
import hashlib
import itertools
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus.document import Problem
from flatout.corpus.sources import HUB
from flatout.data.batch import BatchLoader, DataFacts, Delivery, Raw, Schedule, Span, TrainingData, as_signed
from flatout.data.inspect import cause_of, causes_of, mend_of
from flatout.data.pack import Progress, worker_count
from flatout.data.part import (
    BEGINS,
    ENDS,
    NONE_TAKEN,
    Choice,
    CorpusPart,
    PartHead,
    PartResult,
    Pieces,
    Recipe,
    copies_of,
    dropped_by_then,
    share_of,
)
from flatout.data.plan import (
    CUTTING,
    PART_BYTES,
    Inputs,
    Lap,
    Position,
    Request,
    check_streamable,
    find_inputs,
    limits_of,
    parts_of_lap,
    request_of,
    size_and_time,
)
from flatout.data.sampler import WindowOrder
from flatout.data.shards import HeldTokens
from flatout.data.tokenizer import Ids, Tokenizer, load_tokenizer, token_dtype
from flatout.data.workers import LoaderError, ProcessEngine, Threads, WorkerGoneError
from flatout.errors import DataError, ResourceError, many
from flatout.files import canonical_json
from flatout.finding import Check, Finding
from flatout.records import PrepareProgress

VAL_TOKENS = 2**20
MOST_LISTED = 5
_MOST_WORKERS = 8
# A source of no more tokens is kept, since reading it again for each epoch would cost more than it is worth.
_SMALL_SOURCE = 2**22


@dataclass(frozen=True)
class Chunk:
    """The training tokens of a part, where it begins, and notices about it."""

    position: Position
    ids: Ids
    notices: tuple[str, ...] = ()


# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamDataset:
    """A source that is trained on as it is read. Stands where a prepared dataset would."""

    train: "TokenStream"
    val: HeldTokens
    tokenizer: Tokenizer
    notices: tuple[str, ...]


def open_stream(
    data: DataConfig,
    clean: CleanConfig | None = None,
    *,
    val_tokens: int | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> StreamDataset:
    """Find the files of a source and read its validation text: the first `val_tokens` of it, or `VAL_TOKENS`.

    `workers` is the number of worker processes; None takes one per core, up to eight, and none for a small source.
    """
    check_streamable(data, clean or CleanConfig())
    request = request_of(data, clean)
    tokenizer = load_tokenizer(data.tokenizer, None)
    inputs = find_inputs(request)
    stream = TokenStream(request, inputs, tokenizer, workers)
    found = stream.validation(VAL_TOKENS if val_tokens is None else val_tokens, progress)
    held = found.finish(request, stream.folder)
    notices = [inputs.summary] if inputs.summary else []
    notices += _all_notices(stream.problems, len(stream.problems))
    if data.val_source is not None:  # else training meets and reports them again
        notices += _all_notices(found.seen.problems, found.read.problems)
    if isinstance(data.source, list) and len(data.source) > 1:
        notices.append("the sources are read one after the other; to have them shuffled among each other, prepare them")
    if data.split == "contiguous" and data.val_source is None:
        notices.append("a stream has no end to take validation text from: data.split is document here, not contiguous")
    return StreamDataset(stream, held, tokenizer, tuple(notices))


@final
class TokenStream:
    """The training tokens of a source, in order and without end, from any `Position` on."""

    def __init__(self, request: Request, inputs: Inputs, tokenizer: Tokenizer, workers: int | None = None) -> None:
        self.dtype = token_dtype(tokenizer.vocab)
        self.problems = inputs.problems
        self.folder = ", ".join(source.path for source in request.sources)  # for messages, like the folder of a dataset
        self._request = request
        self._inputs = inputs
        self._end = tokenizer.end_of_text
        self._recipe = Recipe(request.options, request.rules, tokenizer.to_json())
        self._stamps = _stamps(inputs)
        self._workers = _worker_count(inputs) if workers is None else workers
        own_val = request.data.val_source is not None
        laps = [
            Lap(copy, source.weight, tuple(f for f in inputs.files if f.source == number), request.limits(number))
            for number, source in enumerate(request.sources)
            for copy in range(math.ceil(source.weight))
        ]
        self.laps = laps[:-1] if own_val else laps
        self._val_laps = laps[-1:] if own_val else [lap for lap in laps if not lap.copy]
        self._val_fraction = None if own_val else request.data.val_fraction
        self.fingerprint = self._fingerprint(tokenizer)

    def chunks(self, position: Position, workers: ProcessEngine, *, least: int = 1) -> Generator[Chunk]:
        """The training tokens from `position` on, without end. An epoch of less than `least` is a `DataError`."""
        return _Flow(self, position, workers, least).run()

    def open_workers(self) -> ProcessEngine:
        return ProcessEngine(self._workers)

    def validation(self, tokens: int, progress: Progress | None) -> "_Validation":
        """The validation text up to its first `tokens` targets, or to the end of the source."""
        found = _Validation(tokens + 1, len(self._inputs.files), progress)
        tail = Position()
        with self.open_workers() as workers:
            results = self.results(workers, Position(), self._val_laps)
            with contextlib.closing(results):
                for place, result in results:
                    pieces, lap = result.pieces, self._val_laps[place.lap]
                    dropped, rejected = dropped_by_then(pieces, tail.rejected and place.lap == tail.lap)
                    chosen = self._in_val(pieces) & ~dropped & (copies_of(lap.weight, pieces["low"]) > 0)
                    ids, joins = self._chosen(result, chosen, tail.joins)
                    tail = replace(place, joins=joins, rejected=rejected)
                    found.add(result.head, ids, pieces[chosen])
                    if found.enough:
                        break
        return found

    def results(
        self, workers: ProcessEngine, position: Position, laps: Sequence[Lap] | None = None
    ) -> Generator[tuple[Position, PartResult]]:
        """The results of the parts of an epoch from `position` on, each with its place in the epoch.

        A lap ends with the part in which its source reaches a limit.
        """
        laps = self.laps if laps is None else laps
        full: set[int] = set()
        lap, rejected, taken = position.lap, position.rejected, position.taken
        try:
            for place, result in workers.in_order("tokens", self._recipe, self.parts(position, laps, full)):
                if place.lap in full:
                    continue
                if place.lap != lap:
                    lap, rejected, taken = place.lap, False, NONE_TAKEN
                place = replace(place, taken=taken)
                if (limits := laps[lap].limits) is not None:
                    dropped, rejected = dropped_by_then(result.pieces, rejected)
                    count, taken, ended = limits.within(result.pieces, dropped, taken)
                    if count < len(result.pieces):
                        part = partial(self._part_at, place, laps)
                        result, taken = limits.trimmed(result, count, taken, self._recipe, part)
                    limits.check(taken, ended, laps[lap].files[0].path)
                    full |= {lap} if ended else set()
                yield place, result
        except ResourceError as error:
            hint = "if the machine ran out of memory, free some; go on with --resume auto"
            gone = isinstance(error, WorkerGoneError)  # again: the first one is replaced
            raise (LoaderError if gone else ResourceError)(error.message, hint) from error

    def parts(
        self, position: Position, laps: Sequence[Lap] | None = None, full: Collection[int] = ()
    ) -> Iterator[tuple[Position, CorpusPart]]:
        """The parts of an epoch from `position` on, each with its place in the epoch; none of laps that are full."""
        laps = self.laps if laps is None else laps
        for number in range(position.lap, len(laps)):
            start = position if number == position.lap else Position()
            for place, part in parts_of_lap(laps[number].files, self._request.options, start):
                if number in full:
                    break
                yield replace(place, lap=number), part

    def _part_at(self, place: Position, laps: Sequence[Lap]) -> CorpusPart:
        return next(self.parts(place, laps))[1]

    def train_ids(self, position: Position, result: PartResult) -> tuple[Ids, bool, bool]:
        """The training tokens of the part at `position`, and `joins` and `rejected` for the part after it."""
        lap, pieces = self.laps[position.lap], result.pieces
        dropped, rejected = dropped_by_then(pieces, position.rejected)
        chosen = ~dropped & (copies_of(lap.weight, pieces["low"]) > lap.copy)
        if self._val_fraction is not None:
            chosen &= ~self._in_val(pieces)
        ids, joins = self._chosen(result, chosen, position.joins)
        return ids, joins, rejected

    def check_unchanged(self) -> None:
        if _stamps(self._inputs) != self._stamps:
            raise DataError(
                "the source changed while it was read", "start a new run when nothing writes to it, or prepare it"
            )

    def _chosen(self, result: PartResult, chosen: Choice, joins: bool) -> tuple[Ids, bool]:
        """The tokens of the chosen pieces, and whether the last document goes on in the next part."""
        ids, pieces = np.frombuffer(result.tokens, dtype=self.dtype), result.pieces
        if not chosen.all():
            ids = ids[np.repeat(chosen, pieces["tokens"].astype(np.int64))]
        breaks, joins = _breaks(pieces, chosen, joins)
        return (ids if self._end is None or not len(breaks) else np.insert(ids, breaks, self._end)), joins

    def _in_val(self, pieces: Pieces) -> Choice:
        if self._val_fraction is None:
            return np.ones(len(pieces), dtype=bool)
        return share_of(pieces["high"]) < self._val_fraction

    def _fingerprint(self, tokenizer: Tokenizer) -> str:
        settings = self._request.settings(self._inputs.bytes, None)
        del settings["split"]  # it only says how to prepare
        described = {
            "format": "flatout-stream",
            "settings": settings,
            "tokenizer": tokenizer.fingerprint,
            "inputs": self._stamps,
        }
        if any(file.compression != "none" for file in self._inputs.files):
            described["cutting"] = CUTTING
        return hashlib.sha256(canonical_json(described)).hexdigest()


def _worker_count(inputs: Inputs) -> int:
    # The size of a hub dataset is not known.
    hub = any(file.format == "hub" for file in inputs.files)
    return min(worker_count(2 * PART_BYTES if hub else inputs.bytes), _MOST_WORKERS)


def _stamps(inputs: Inputs) -> list[list[Any]]:
    """Sizes and times of the input, with the files of a hub dataset that is a folder here."""
    stamps = inputs.stamps()
    for file in inputs.files:
        folder = file.path.removeprefix(HUB).partition(":")[0]
        if file.format == "hub" and os.path.isdir(folder):
            found = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
            stamps += [[path, *size_and_time(path)] for path in sorted(found)]
    return stamps


# --- parts, and what of them is trained on ----------------------------------------------------------------------------


def _breaks(pieces: Pieces, chosen: Choice, joins: bool) -> tuple[npt.NDArray[np.int64], bool]:
    """Where among the chosen tokens a document breaks off, and whether the last piece goes on in the next part.

    A document of several pieces breaks off where one of them is not chosen; the text after it must not go on from it.
    """
    if not len(pieces):
        return np.empty(0, dtype=np.int64), joins
    goes_on = chosen & (pieces["flags"] & ENDS == 0)
    continues = chosen & (pieces["flags"] & BEGINS == 0)
    ends = np.cumsum(np.where(chosen, pieces["tokens"], 0).astype(np.int64))
    broken = ends[:-1][goes_on[:-1] & ~continues[1:]]
    if joins and not continues[0]:
        broken = np.concatenate([[0], broken])
    return broken, bool(goes_on[-1])


# --- reading ahead ----------------------------------------------------------------------------------------------------


@final
class _Flow:
    """The chunks of a stream from a position on, epoch after epoch."""

    def __init__(self, stream: TokenStream, position: Position, workers: ProcessEngine, least: int) -> None:
        self._stream = stream
        self._now = position
        self._least = least
        self._workers = workers
        self._seen = _Seen()

    def run(self) -> Generator[Chunk]:
        while True:
            whole, before = self._now.begins_epoch, self._now.tokens
            kept: list[Chunk] | None = [] if whole else None
            self._stream.check_unchanged()
            for chunk in self._epoch():
                if kept is not None:
                    kept.append(chunk)
                    if self._now.tokens - before > _SMALL_SOURCE:
                        kept = None
                yield chunk
            if whole and self._now.tokens - before < self._least:
                raise self._too_little(self._now.tokens - before)
            now = self._now
            self._now = Position(epoch=now.epoch + 1, tokens=now.tokens, problems=now.problems, joins=now.joins)
            if kept is not None and not self._now.joins:
                yield from self._again(kept, self._now.tokens - before)

    def _epoch(self) -> Iterator[Chunk]:
        stream, lap = self._stream, self._now.lap
        notices = epoch_notices(self._now.epoch, self._now.tokens) if self._now.begins_epoch else ()
        for place, result in stream.results(self._workers, self._now):
            at = {"lap": place.lap, "file": place.file, "part": place.part, "hub": place.hub, "taken": place.taken}
            here = replace(self._now, **at)
            if place.lap != lap:
                lap, here = place.lap, replace(here, rejected=False)
            ids, joins, rejected = stream.train_ids(here, result)
            problems = result.head.problems if not here.epoch and not stream.laps[here.lap].copy else ()
            self._seen.add(result.head)
            counts = {"tokens": here.tokens + len(ids), "problems": here.problems + len(problems)}
            self._now = replace(here, joins=joins, rejected=rejected, **counts)
            yield Chunk(here, ids, (*notices, *_notices_of(problems, here.problems)))
            notices = ()

    def _again(self, kept: list[Chunk], tokens: int) -> Iterator[Chunk]:
        """A small source, repeated from memory without end."""
        first = kept[0].position.tokens
        for epoch in itertools.count(self._now.epoch):
            moved = self._now.tokens + (epoch - self._now.epoch) * tokens - first
            for number, chunk in enumerate(kept):
                counts = {"tokens": chunk.position.tokens + moved, "problems": self._now.problems}
                position = replace(chunk.position, epoch=epoch, **counts)
                yield Chunk(position, chunk.ids, () if number else epoch_notices(epoch, position.tokens))

    def _too_little(self, tokens: int) -> DataError:
        return DataError(
            f"{self._stream.folder} gives {tokens} training tokens, and a window needs {self._least}: {self._seen}",
            "give a source with more text, loosen the clean section, or lower model.context or data.validation",
        )


@final
class _Seen:
    """Counts of the records that were read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []  # the first few
        self._records, self._dropped = 0, Counter[str]()

    def add(self, head: PartHead) -> None:
        self._records += head.records
        self._dropped.update(head.dropped)
        self.problems += head.problems[: MOST_LISTED - len(self.problems)]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self._dropped.most_common(3))
        text = f"of {many(self._records, 'record')}, {reasons or 'none'} dropped"
        return f"{text}; {self.problems[0].text}" if self.problems else text


@final
class _Validation:
    """Collects the validation text."""

    def __init__(self, wanted: int, files: int, progress: Progress | None) -> None:
        self.seen = _Seen()
        self.read = PrepareProgress("validation", 0, files, 0, 0, 0, 0, 0)
        self._wanted, self._progress = wanted, progress
        self._ids: list[Ids] = []
        self._bytes = 0

    @property
    def enough(self) -> bool:
        return self.read.tokens >= self._wanted

    def add(self, head: PartHead, ids: Ids, pieces: Pieces) -> None:
        """`ids` and `pieces` are those of the validation text in the part."""
        self._ids.append(ids)
        self._bytes += int(pieces["bytes"].sum())
        self.seen.add(head)
        documents = int(np.count_nonzero(pieces["flags"] & BEGINS))
        self.read = self.read.plus(documents=documents, tokens=len(ids), problems=len(head.problems))
        self.read = self.read.plus(files=head.files, bytes=head.bytes)
        if self._progress is not None:
            self._progress(self.read)

    def finish(self, request: Request, folder: str) -> HeldTokens:
        if self.read.tokens < 2:
            own, problems = request.data.val_source, self.seen.problems
            hint = "set data.validation to a text with more in it"
            if problems and problems[0].kind == "field":
                hint = mend_of(causes_of(problems))
            elif own is None:
                hint += " or to a higher share, or data.document_start where a file holds many documents"
                hint += "" if limits_of(request.data) is None else ", or a higher limit on documents, tokens or bytes"
            raise DataError(f"{folder if own is None else own} gives no validation text: {self.seen}", hint)
        ids = np.concatenate(self._ids)[: self._wanted]
        # Only whole pieces have a size in bytes: the part that is cut off counts with the mean of bytes a token.
        return HeldTokens(ids, folder, round(self._bytes * len(ids) / self.read.tokens))


def _notices_of(problems: Sequence[Problem], before: int) -> tuple[str, ...]:
    """Notices about problems: the first few in full, then how many there are."""
    after = before + len(problems)
    text = [f"left out: {cause_of(problem).text}" for problem in problems[: max(0, MOST_LISTED - before)]]
    counts = (10**power for power in range(1, len(str(after))) if 10**power > before)
    text += [f"{many(n, 'problem')} in the source so far; the latest: {problems[n - before - 1].text}" for n in counts]
    return tuple(text)


def _all_notices(problems: Sequence[Problem], count: int) -> tuple[str, ...]:
    """Notices about the first of `count` problems, and how many more there are."""
    text = tuple(f"left out: {cause_of(problem).text}" for problem in problems[:MOST_LISTED])
    return text if count <= len(text) else (*text, f"{count - len(text):,} more problems in the source")


def epoch_notices(ended: int, tokens: int) -> tuple[str, ...]:
    """The notice at the end of an epoch; a small source has many epochs, of which few are reported."""
    if not ended or (ended > 3 and str(ended).strip("0") != "1"):
        return ()
    times = "once" if ended == 1 else f"{ended:,} times"
    return (f"the source has been read {times}, {tokens:,} training tokens, and is read again",)


BLOCK_WINDOWS = 4096
BLOCK_TOKENS = 2**23
_BLOCKS_AHEAD = 3


def block_windows(context: int) -> int:
    """How many windows are shuffled among each other."""
    return max(1, min(BLOCK_WINDOWS, BLOCK_TOKENS // context))


@final
@dataclass(frozen=True)
class StreamBlock:
    """The tokens of a block's windows and one more; where it begins, and where the next one does."""

    number: int
    ids: Ids
    position: Position
    following: Position
    notices: tuple[str, ...]


@final
class StreamLoader(BatchLoader):
    """Batches of a stream, in the order of steps.

    Without a position of its first step the source is read from its beginning.
    """

    def __init__(self, stream: TokenStream, delivery: Delivery, span: Span, *, seed: int) -> None:
        super().__init__(delivery, span, workers=0)
        context = self.schedule.longest
        self._order = WindowOrder(block_windows(context), seed)
        self._held: dict[int, StreamBlock] = {}
        self._positions: dict[int, Position] = {}
        first, inside = divmod(self.schedule.at(self._next_step).start, self._order.windows)
        # The notices of a block are given when it is taken up, which was before a step that begins inside of it.
        self._old = first if inside else -1
        self._ahead: _Ahead | None = None
        if self._next_step < self._last_step:
            begin = Position(**span.position or {})
            self._ahead = _Ahead(stream, begin, first, self._order.windows, context, delivery.patience)

    def position(self) -> dict[str, Any]:
        return self._positions[self._block_of(self._next_step)].to_json()

    def notices(self) -> list[str]:
        return [*super().notices(), *([] if self._ahead is None else self._ahead.notices())]

    def close(self) -> None:
        super().close()
        self._held.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _made(self, step: int) -> Raw:
        reading = self.reading(step)
        blocks = np.arange(reading.start, reading.start + reading.windows) // self._order.windows
        while int(blocks[-1]) not in self._held:
            assert self._ahead is not None
            self._take(self._ahead.next())
        ids = self._gather(self._order.indices(reading.start, reading.windows), blocks)
        next_block = self._block_of(step + 1)
        for kept in (self._held, self._positions):  # no later step asks for the blocks before
            for number in [number for number in kept if number < next_block]:
                del kept[number]
        return Raw(step, reading, as_signed(ids)).pinned(self.device)

    def _take(self, block: StreamBlock) -> None:
        self._held[block.number] = block
        self._positions[block.number] = block.position
        self._positions[block.number + 1] = block.following
        if block.number > self._old:
            self._notices += block.notices

    def _gather(self, windows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> Ids:
        context = self.schedule.longest
        ids = np.empty((len(windows), context + 1), dtype=self._held[int(blocks[0])].ids.dtype)
        for number in range(int(blocks[0]), int(blocks[-1]) + 1):
            # Row i is window i: a view with overlapping rows.
            rows = np.lib.stride_tricks.sliding_window_view(self._held[number].ids, context + 1)[::context]
            ids[blocks == number] = rows[windows[blocks == number]]
        return ids

    def _block_of(self, step: int) -> int:
        """The block that a step begins in."""
        return self.schedule.at(step).start // self._order.windows


@final
class _Ahead:
    """Blocks, made by a thread a few ahead of the loop."""

    def __init__(
        self, stream: TokenStream, position: Position, first: int, windows: int, context: int, patience: float
    ) -> None:
        if position.tokens > first * windows * context:  # it belongs to a later step
            position = Position()
        self._stream, self._least, self._size = stream, context + 1, windows * context
        self._patience = patience
        self._moved = time.monotonic()  # when the last part of the source came in
        self._hangs = False
        self._workers = stream.open_workers()
        self._made = self._blocks(position, first)
        self._thread = Threads(1, "flatout-stream-blocks")
        self._waiting = deque(self._thread.submit(next, self._made) for _ in range(_BLOCKS_AHEAD))

    def next(self) -> StreamBlock:
        """The next block, waiting for it as long as parts of it come in."""
        began, waiting = time.monotonic(), self._waiting.popleft()
        while True:
            left = max(began, self._moved) + self._patience - time.monotonic()
            try:
                block = waiting.result(max(left, 0.01))
                break
            except TimeoutError:
                if waiting.done():  # the source's own
                    raise
                if left <= 0:
                    self._hangs = True
                    raise LoaderError(
                        f"the stream has given nothing for {self._patience:g} s, at {self._thread.stack()}",
                        "check the disk or network that data.source is on",
                    ) from None
        self._waiting.append(self._thread.submit(next, self._made))
        return block

    def notices(self) -> list[str]:
        return self._workers.taken_notices()

    def close(self) -> None:
        self._workers.close(wait=not self._hangs)
        self._thread.close(wait=not self._hangs)
        with contextlib.suppress(ValueError):  # the thread is still in it, and hangs
            self._made.close()

    def _blocks(self, position: Position, number: int) -> Generator[StreamBlock]:
        size, marks, marked = self._size, dict[int, Position](), number
        notices: defaultdict[int, list[str]] = defaultdict(list)
        row = np.empty(size + 1, dtype=self._stream.dtype)
        at, filled = number * size, 0  # the next token to take, and how many are in the row
        with contextlib.closing(self._stream.chunks(position, self._workers, least=self._least)) as chunks:
            for chunk in chunks:
                self._moved = time.monotonic()
                begin, end = chunk.position.tokens, chunk.position.tokens + len(chunk.ids)
                notices[begin // size] += chunk.notices
                # A block begins in the first part that has its first token or comes after it, be it without tokens.
                while end > marked * size or begin >= marked * size:
                    marks[marked] = chunk.position
                    marked += 1
                while at < end:
                    taken = chunk.ids[at - begin : at - begin + size + 1 - filled]
                    row[filled : filled + len(taken)] = taken
                    at, filled = at + len(taken), filled + len(taken)
                    if filled < size + 1:
                        break
                    yield StreamBlock(number, row, marks.pop(number), marks[number + 1], tuple(notices.pop(number, ())))
                    fresh = np.empty_like(row)
                    fresh[0] = row[-1]
                    row, filled, number = fresh, 1, number + 1


@final
class StreamData(TrainingData):
    """A source that is trained on as it is read."""

    def __init__(self, dataset: StreamDataset, schedule: Schedule, *, seed: int) -> None:
        self.dataset, self.schedule, self.seed = dataset, schedule, seed
        self.val, self.tokenizer = dataset.val, dataset.tokenizer
        place = dataset.train.folder
        self.facts = DataFacts(fingerprint=dataset.train.fingerprint, place=place, train_tokens=None)

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        return StreamLoader(self.dataset.train, delivery, span, seed=self.seed)

    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        return [Check("data", "stream").note(notice) for notice in self.dataset.notices]

    def last_notices(self, position: dict[str, Any] | None) -> Iterable[str]:
        if position is not None and position["problems"] > MOST_LISTED:
            yield f"{many(position['problems'], 'problem')} in the source in all"
