"""Training straight from a source: its documents become batches while it is read, and nothing is written to disk.

Idea: the training documents of a source, in order, each ended by the end-of-text id, are one row of tokens, and when
the source ends it is read again. Worker processes read, clean and tokenize its parts ahead of the loop (`stream_parts`
knows which), here the training text is picked out of each, and `stream_loader` makes batches of it: windows shuffled
within blocks. So the batch of a step depends on nothing but (source, settings, seed, step).

Contract: the row is what `prepare` with data.split=document writes as the training split. Memory is bounded by a few
blocks and parts, except that validation text is held. A `Position`, which is plain JSON, is enough to go on from.
Input that cannot be used is left out and told. A source without training text is an error, not an endless loop.

Trap: a document of more than 16 MiB comes in pieces, and there is no room to wait for its last one. Each piece goes to
training or validation by its own hash, and a rule that rejects a later piece drops the document from there on.

Trap: a shuffle within blocks does not mix a source that is sorted, by topic or language. Prepare such a source instead.
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus.document import Problem
from flatout.corpus.sources import HUB
from flatout.data.pack import Progress, worker_count
from flatout.data.part import BEGINS, ENDS, PIECE, REJECTED, Part, PartResult, Pieces, Recipe
from flatout.data.plan import PART_BYTES, STDIN, Inputs, Request, find_inputs, request_of
from flatout.data.stream_parts import Lap, Position, Workers, parts_of_lap
from flatout.data.tokenizer import Ids, Tokenizer, load_tokenizer, token_dtype
from flatout.errors import ConfigError, DataError
from flatout.files import canonical_json
from flatout.records import PrepareProgress

VAL_TOKENS = 2**20
TOLD_PROBLEMS = 5
_MOST_WORKERS = 8
# A source of no more tokens is kept, since reading it again for each epoch would cost more than it is worth.
_SMALL_SOURCE = 2**22
_PREPARE = "prepare the source instead: leave out data.streaming"
_WHOLE = BEGINS | ENDS
Choice = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Chunk:
    """The training tokens of a part, where it begins, and what there is to tell of it."""

    position: Position
    ids: Ids
    notices: tuple[str, ...] = ()


# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamManifest:
    """What training asks of a manifest."""

    fingerprint: str


@final
class HeldTokens:
    """The validation tokens, in memory."""

    def __init__(self, ids: Ids, folder: str, text_bytes: int, documents: int) -> None:
        self.split = "val"
        self.folder = folder
        self.tokens = len(ids)
        self.text_bytes = text_bytes
        self.documents = documents
        self._ids = ids

    def read(self, start: int, length: int) -> Ids:
        """Tokens `start` to `start + length - 1`, as a copy."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split with {self.tokens}")
        return self._ids[start : start + length].copy()


@dataclass(frozen=True)
class StreamDataset:
    """A source that is trained on as it is read. Stands where a prepared dataset would."""

    train: "TokenStream"
    val: HeldTokens
    manifest: StreamManifest
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
    _check_request(data, clean or CleanConfig())
    request = request_of(data, clean)
    tokenizer = load_tokenizer(data.tokenizer, None)
    inputs = find_inputs(request, Path())
    stream = TokenStream(request, inputs, tokenizer, workers)
    found = stream.validation(VAL_TOKENS if val_tokens is None else val_tokens, progress)
    held = found.finish(request, stream.folder)
    notices = [inputs.passed_over_told] if inputs.passed_over else []
    notices += _all_notices(stream.problems, len(stream.problems))
    if data.val_source is not None:  # else they are met again, and told, in training
        notices += _all_notices(found.problems, found.problem_count)
    if isinstance(data.source, list) and len(data.source) > 1:
        notices.append("the sources are read one after the other; to have them shuffled among each other, prepare them")
    if data.split == "contiguous" and data.val_source is None:
        notices.append("a stream has no end to take validation text from: data.split is document here, not contiguous")
    return StreamDataset(stream, held, StreamManifest(stream.fingerprint), tokenizer, tuple(notices))


def _check_request(data: DataConfig, clean: CleanConfig) -> None:
    for name in ("exact_duplicates", "near_duplicates"):
        if getattr(clean, name):
            raise ConfigError(f"clean.{name} needs the whole corpus, and data.streaming does not hold it", _PREPARE)
    if data.tokenizer == "char":
        raise ConfigError(
            "the tokenizer `char` is made from the whole corpus, and data.streaming reads it only as it trains",
            "set data.tokenizer to bytes, gpt2 or a tokenizer.json, such as that of a prepared dataset",
        )
    sources = data.source if isinstance(data.source, list) else [data.source]
    paths = [source if isinstance(source, str | None) else source.path for source in (*sources, data.val_source)]
    if STDIN in paths:
        raise ConfigError(
            "standard input cannot be read twice, so a run that streams from it could not be resumed",
            "write it to a file first, or prepare it: `flatout prepare data.source=-`",
        )


@final
class TokenStream:
    """The training tokens of a source, in order and without end, from any `Position` on."""

    tokens: None = None  # nobody knows before it has been read

    def __init__(self, request: Request, inputs: Inputs, tokenizer: Tokenizer, workers: int | None = None) -> None:
        self.vocab = tokenizer.vocab
        self.dtype = token_dtype(tokenizer.vocab)
        self.problems = inputs.problems
        self.folder = _described(request)  # for messages, as a dataset has one
        self._request = request
        self._inputs = inputs
        self._end = tokenizer.end_of_text
        self._recipe = Recipe(request.options, request.rules, tokenizer.to_json())
        self._stamps = _stamps(inputs)
        self._workers = _worker_count(inputs) if workers is None else workers
        own_val = request.data.val_source is not None
        laps = [
            Lap(copy, source.weight, tuple(file for file in inputs.files if file.source == number))
            for number, source in enumerate(request.sources)
            for copy in range(math.ceil(source.weight))
        ]
        self._laps = laps[:-1] if own_val else laps
        self._val_laps = laps[-1:] if own_val else [lap for lap in laps if not lap.copy]
        self._val_fraction = None if own_val else request.data.val_fraction
        self.fingerprint = self._fingerprint(tokenizer)

    def chunks(self, position: Position, workers: Workers, *, least: int = 1) -> Generator[Chunk]:
        """The training tokens from `position` on, without end. An epoch of less than `least` is a `DataError`."""
        return _Flow(self, position, workers, least).run()

    def open_workers(self) -> Workers:
        return Workers(self._workers)

    def validation(self, tokens: int, progress: Progress | None) -> "_Validation":
        """The validation text up to its first `tokens` targets, or to the end of the source."""
        found = _Validation(tokens + 1, len(self._inputs.files), progress)
        tail = Position()
        with self.open_workers() as workers:
            results = workers.results(self._recipe, self.parts(Position(), self._val_laps))
            with contextlib.closing(results):
                for place, part, result in results:
                    pieces = np.frombuffer(result.pieces, dtype=PIECE)
                    rejected = tail.rejected and place.lap == tail.lap
                    dropped, rejected = _dropped(pieces, rejected)
                    chosen = self._in_val(pieces) & ~dropped & (_copies(self._val_laps[place.lap], pieces) > 0)
                    ids, joins = self._chosen(result, pieces, chosen, tail.joins)
                    tail = replace(place, joins=joins, rejected=rejected)
                    found.add(part, result, ids, pieces[chosen])
                    if found.enough:
                        break
        return found

    def parts(self, position: Position, laps: Sequence[Lap] | None = None) -> Iterator[tuple[Position, Part]]:
        """The parts of an epoch from `position` on, each with its place in the epoch."""
        laps = self._laps if laps is None else laps
        for number in range(position.lap, len(laps)):
            start = position if number == position.lap else Position()
            for place, part in parts_of_lap(laps[number].files, self._request.options, start):
                yield replace(place, lap=number), part

    def train_ids(self, position: Position, result: PartResult) -> tuple[Ids, bool, bool]:
        """The training tokens of the part at `position`, and `joins` and `rejected` for the part after it."""
        lap = self._laps[position.lap]
        pieces = np.frombuffer(result.pieces, dtype=PIECE)
        dropped, rejected = _dropped(pieces, position.rejected)
        chosen = ~dropped & (_copies(lap, pieces) > lap.copy)
        if self._val_fraction is not None:
            chosen &= ~self._in_val(pieces)
        ids, joins = self._chosen(result, pieces, chosen, position.joins)
        return ids, joins, rejected

    def check_unchanged(self) -> None:
        if _stamps(self._inputs) != self._stamps:
            raise DataError(
                "the source changed while it was read", "start a new run when nothing writes to it, or prepare it"
            )

    def copy_of(self, position: Position) -> int:
        return self._laps[position.lap].copy

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def _chosen(self, result: PartResult, pieces: Pieces, chosen: Choice, joins: bool) -> tuple[Ids, bool]:
        """The tokens of the chosen pieces, and whether the last document goes on in the next part."""
        ids = np.frombuffer(result.tokens, dtype=self.dtype)
        if not chosen.all():
            ids = ids[np.repeat(chosen, pieces["tokens"].astype(np.int64))]
        breaks, joins = _breaks(pieces, chosen, joins)
        return (ids if self._end is None or not len(breaks) else np.insert(ids, breaks, self._end)), joins

    def _in_val(self, pieces: Pieces) -> Choice:
        if self._val_fraction is None:
            return np.ones(len(pieces), dtype=bool)
        return _share(pieces["high"]) < self._val_fraction

    def _fingerprint(self, tokenizer: Tokenizer) -> str:
        settings = self._request.settings(self._inputs.bytes, None)
        for name in ("split", "shard_tokens"):  # these say how to prepare
            settings.pop(name, None)
        described = {
            "format": "flatout-stream",
            "settings": settings,
            "tokenizer": tokenizer.fingerprint,
            "inputs": self._stamps,
        }
        return hashlib.sha256(canonical_json(described)).hexdigest()


def _described(request: Request) -> str:
    return ", ".join(source.path for source in request.sources)


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
            stamps += [[path, *_size_and_time(path)] for path in sorted(found)]
    return stamps


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


# --- parts, and what of them is trained on ----------------------------------------------------------------------------


def _dropped(pieces: Pieces, rejected: bool) -> tuple[Choice, bool]:
    """Which pieces belong to a document that has been rejected by then, and whether the last one does."""
    dropped = np.zeros(len(pieces), dtype=bool)
    flags = pieces["flags"]
    for row in np.flatnonzero(flags & _WHOLE != _WHOLE):
        if flags[row] & BEGINS:
            rejected = False
        rejected = rejected or bool(flags[row] & REJECTED)
        dropped[row] = rejected
    return dropped, rejected


def _copies(lap: Lap, pieces: Pieces) -> npt.NDArray[np.int64]:
    """How often each piece is taken in an epoch, by the weight of its source."""
    whole = int(lap.weight)
    return whole + (_share(pieces["low"]) < lap.weight - whole).astype(np.int64)


def _share(half: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Half of a hash as a number from 0 to 1."""
    return half.astype(np.float64) / 2.0**64


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

    def __init__(self, stream: TokenStream, position: Position, workers: Workers, least: int) -> None:
        self._stream = stream
        self._now = position
        self._least = least
        self._workers = workers
        self._records = 0
        self._dropped: Counter[str] = Counter()
        self._first_problem: Problem | None = None

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
            self._next_epoch()
            if kept is not None and not self._now.joins:
                yield from self._again(kept, self._now.tokens - before)

    def _epoch(self) -> Iterator[Chunk]:
        stream, lap = self._stream, self._now.lap
        notices = epoch_notices(self._now.epoch, self._now.tokens) if self._now.begins_epoch else ()
        for place, _, result in self._workers.results(stream.recipe, stream.parts(self._now)):
            if place.lap != lap:
                lap = place.lap
                self._now = replace(self._now, rejected=False)
            here = replace(
                place,
                epoch=self._now.epoch,
                tokens=self._now.tokens,
                problems=self._now.problems,
                joins=self._now.joins,
                rejected=self._now.rejected,
            )
            ids, joins, rejected = stream.train_ids(here, result)
            problems = result.problems if not here.epoch and not stream.copy_of(here) else ()
            self._count(result)
            self._now = replace(
                here,
                tokens=here.tokens + len(ids),
                problems=here.problems + len(problems),
                joins=joins,
                rejected=rejected,
            )
            yield Chunk(here, ids, (*notices, *_notices_of(problems, here.problems)))
            notices = ()

    def _next_epoch(self) -> None:
        now = self._now
        self._now = Position(epoch=now.epoch + 1, tokens=now.tokens, problems=now.problems, joins=now.joins)

    def _again(self, kept: list[Chunk], tokens: int) -> Iterator[Chunk]:
        """A small source, from memory, for ever."""
        first = kept[0].position.tokens
        for epoch in itertools.count(self._now.epoch):
            moved = self._now.tokens + (epoch - self._now.epoch) * tokens - first
            for number, chunk in enumerate(kept):
                position = replace(
                    chunk.position,
                    epoch=epoch,
                    tokens=chunk.position.tokens + moved,
                    problems=self._now.problems,
                )
                yield Chunk(position, chunk.ids, () if number else epoch_notices(epoch, position.tokens))

    def _count(self, result: PartResult) -> None:
        self._records += result.records
        self._dropped.update(result.dropped)
        if self._first_problem is None and result.problems:
            self._first_problem = result.problems[0]

    def _too_little(self, tokens: int) -> DataError:
        why = _what_became(self._records, self._dropped, self._first_problem)
        return DataError(
            f"{self._stream.folder} gives {tokens} training tokens, and a window needs {self._least}: {why}",
            "give a source with more text, loosen the clean section, or lower model.context or data.val_fraction",
        )


@final
class _Validation:
    """Collects the validation text."""

    def __init__(self, wanted: int, files: int, progress: Progress | None) -> None:
        self.problems: list[Problem] = []  # the first few
        self.problem_count = 0
        self._wanted = wanted
        self._progress = progress
        self._ids: list[Ids] = []
        self._tokens = self._documents = self._bytes = self._records = 0
        self._dropped: Counter[str] = Counter()
        self._read = PrepareProgress("validation", 0, files, 0, 0, 0, 0, 0)

    @property
    def enough(self) -> bool:
        return self._tokens >= self._wanted

    def add(self, part: Part, result: PartResult, ids: Ids, pieces: Pieces) -> None:
        """`ids` and `pieces` are those of the validation text in the part."""
        self._ids.append(ids)
        self._tokens += len(ids)
        self._documents += int(np.count_nonzero(pieces["flags"] & BEGINS))
        self._bytes += int(pieces["bytes"].sum())
        self._records += result.records
        self._dropped.update(result.dropped)
        self.problems += result.problems[: TOLD_PROBLEMS - len(self.problems)]
        self.problem_count += len(result.problems)
        told = self._read
        self._read = replace(
            told,
            files=told.files + part.files,
            bytes=told.bytes + part.bytes,
            documents=self._documents,
            tokens=self._tokens,
            problems=self.problem_count,
        )
        if self._progress is not None:
            self._progress(self._read)

    def finish(self, request: Request, folder: str) -> HeldTokens:
        if self._tokens < 2:
            why = _what_became(self._records, self._dropped, self.problems[0] if self.problems else None)
            own = request.data.val_source
            where = own if own is not None else _described(request)
            hint = "set data.val_source to a text with more in it"
            if self.problems and self.problems[0].kind == "field":
                hint = "set data.field to where the text is"
            elif own is None:
                hint += ", data.val_fraction higher, or data.document_start where a file holds many documents"
            raise DataError(f"{where} gives no validation text: {why}", hint)
        ids = np.concatenate(self._ids)[: self._wanted]
        # Only whole pieces have a size in bytes. What is cut off is taken to have as many bytes a token.
        size = round(self._bytes * len(ids) / self._tokens)
        return HeldTokens(ids, folder, size, self._documents)


def _what_became(records: int, dropped: Counter[str], problem: Problem | None) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common(3))
    told = f"of {records:,} records, {reasons or 'none'} dropped"
    return told if problem is None else f"{told}; {_line(problem)}"


def _line(problem: Problem) -> str:
    place = f", {problem.place}" if problem.place else ""
    return f"{problem.file}{place}: {problem.message}"


def _notices_of(problems: Sequence[Problem], before: int) -> tuple[str, ...]:
    """What to say of problems when there have been some before: the first few in full, then how many there are."""
    after = before + len(problems)
    told = [f"left out: {_line(problem)}" for problem in problems[: max(0, TOLD_PROBLEMS - before)]]
    counts = (10**power for power in range(1, len(str(after))) if 10**power > before)
    told += [f"{n:,} problems in the source so far; the latest: {_line(problems[n - before - 1])}" for n in counts]
    return tuple(told)


def _all_notices(problems: Sequence[Problem], count: int) -> tuple[str, ...]:
    """What to say of problems that are all there are; `count` may be more than are given."""
    told = tuple(f"left out: {_line(problem)}" for problem in problems[:TOLD_PROBLEMS])
    return told if count <= len(told) else (*told, f"{count - len(told):,} more problems in the source")


def epoch_notices(ended: int, tokens: int) -> tuple[str, ...]:
    """Of the end of an epoch; a small source has many, of which few are told."""
    if not ended or (ended > 3 and str(ended).strip("0") != "1"):
        return ()
    times = "once" if ended == 1 else f"{ended:,} times"
    return (f"the source has been read {times}, {tokens:,} training tokens, and is read again",)
