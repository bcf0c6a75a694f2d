"""Finished parts to one dataset: which documents stay, which split each goes to, and the shards.

Idea: parts are gone through in the order of their numbers, twice. The first pass decides what is kept (it looks at the
index of each part, not at the tokens); the second writes. What is decided depends on the order of documents only, so
the number of workers cannot matter.

Contract: memory holds one part at a time and one byte per document; looking for near duplicates holds more (see
`flatout.corpus.near`). Every record ends up in exactly one of the report's counts, and the sum is checked.

Trap: the border of a contiguous split falls inside a document. Its tokens are not cut, for a tokenizer may join what
the border separates: its text is read again, cut, and tokenized as two.

Why records of the input could not be used: problems grouped by file and cause, with the settings that mend them.

Idea: a file whose rows lack the field has a problem for each row, and one cause. A cause counts records, as the report
of a dataset does, so that all numbers in a message are of the same thing.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import numpy.typing as npt

from flatout.config.suggest import close_matches
from flatout.corpus.clean import SIMILAR
from flatout.corpus.document import Problem, shown
from flatout.corpus.fields import USUAL
from flatout.corpus.near import SLOTS, near_duplicates
from flatout.data.journal import SIGNATURES, Journal
from flatout.data.manifest import (
    MANIFEST,
    OFFSET_DTYPE,
    PROBLEMS,
    REPORT,
    SPLITS,
    TOKENIZER,
    VERSION,
    FileInfo,
    Manifest,
    SplitInfo,
)
from flatout.data.part import BEGINS, ENDS, REJECTED, PartHead, PartResult, Recipe, copies_of, share_of, text_of
from flatout.data.plan import Inputs, Request, find_part
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype
from flatout.errors import DataError, many
from flatout.files import canonical_json

_OTHER_MENDS: Mapping[str, str] = {
    "field": "set data.field to where the text is",
    "binary": "take binary files out of the source",
}
_NEAR = 0.85  # how alike a field that was asked for and one that is there are, where the first is a slip of the pen
_LISTED = 3  # causes of one kind
_KINDS = 6


@dataclass(frozen=True)
class Cause:
    """One kind of problem in one file: the first of them, how many there are, and the records lost by all."""

    first: Problem
    count: int
    records: int

    @property
    def told(self) -> str:
        """Where it is, what, and which field these records have: `mend_of` tells the setting that fits all files."""
        first = self.first
        if max(self.count, self.records) <= 1:
            return f"{first.told}{f'; it has the field {first.instead}' if first.instead else ''}"
        instead = f"; these rows have the field {first.instead}" if first.instead else ""
        place = f", the first in {first.place}" if first.place else ""
        count = many(self.records, "record") if self.records else many(self.count, "place")
        return f"{first.file}: {count}{place}: {first.message}{instead}"


def cause_of(problem: Problem) -> Cause:
    """The cause of one problem."""
    return Cause(problem, 1, problem.records)


def causes_of(problems: Iterable[Problem]) -> list[Cause]:
    """The causes of problems, those with the most records first."""
    found: dict[tuple[str, str, str], Cause] = {}
    for problem in problems:
        key = (problem.file, problem.kind, problem.instead)
        if (cause := found.get(key)) is None:
            found[key] = cause_of(problem)
        else:
            found[key] = replace(cause, count=cause.count + 1, records=cause.records + problem.records)
    return sorted(found.values(), key=lambda cause: -cause.records)


def lines_of(causes: Sequence[Cause]) -> list[str]:
    """Causes to be listed: the first few of each kind and how many more there are, so that none hides the others."""
    kinds: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        kinds.setdefault((cause.first.kind, cause.first.instead), []).append(cause)
    lines: list[str] = []
    for alike in list(kinds.values())[:_KINDS]:
        lines += [cause.told for cause in alike[:_LISTED]]
        lines += _counted(alike[_LISTED:], " with the same problem")
    others = [cause for alike in list(kinds.values())[_KINDS:] for cause in alike]
    return [*lines, *_counted(others, "")]


def _counted(causes: Sequence[Cause], which: str) -> list[str]:
    if not causes:
        return []
    files, records = len({cause.first.file for cause in causes}), sum(cause.records for cause in causes)
    count = f"{many(records, 'more record')} of {many(files, 'file')}" if records else many(files, "more file")
    return [f"... and {count}{which}"]


def names_to_read(causes: Iterable[Cause], fields: Sequence[str] = ()) -> list[str]:
    """`fields` with the names that read records which lack them; nothing if no such name is known.

    A field that is nearly one of those names, and no usual one, was a slip and is left out.
    """
    others = [cause.first.instead for cause in causes if cause.first.instead]
    meant = [field for field in fields if field in USUAL or not close_matches(field, others, _NEAR)]
    return list(dict.fromkeys([*meant, *others])) if set(others) - set(fields) else []


def mend_of(causes: Sequence[Cause], fields: Sequence[str] = ()) -> str:
    """What to set or do so that the records can be used. `fields` are those that some records have."""
    mends: dict[str, None] = {}
    if names := names_to_read(causes, fields):
        # In quotes, since brackets mean something to a shell.
        setting = f"data.field={names[0]}" if len(names) == 1 else f"'data.field=[{','.join(names)}]'"
        count = sum(cause.records for cause in causes if cause.first.instead)
        mends[f"{setting} reads {count:,} of them" if count else f"set {setting}"] = None
    for cause in causes:
        if not cause.first.instead and not (names and cause.first.kind == "field"):
            is_encoding = cause.first.kind == "not-utf8"
            mends[encoding_mend(causes) if is_encoding else _OTHER_MENDS.get(cause.first.kind, "mend the input")] = None
    return "; ".join(list(mends)[:3])


def encoding_mend(causes: Iterable[Cause]) -> str:
    """What to do about text that is not UTF-8, and what the setting that reads it costs; nothing where all is."""
    files = list(dict.fromkeys(cause.first.file for cause in causes if cause.first.kind == "not-utf8"))
    if not files:
        return ""
    which = f"{files[0]} and {many(len(files) - 1, 'more file')}" if len(files) > 1 else files[0]
    return (
        f"convert {which} to UTF-8 (from latin-1: `iconv -f latin1 -t utf-8`), or data.invalid_utf8=replace loses "
        "those letters"
    )


KEPT, DROPPED, EXACT, NEAR, UNCHOSEN = range(5)
_REASONS = {EXACT: "exact_duplicate", NEAR: "near_duplicate", UNCHOSEN: "weight"}
_UNLIKE = 10  # times its share of training is a kind's share of validation, where it is hardly trained on
_DOCUMENTS_AT_ONCE = 4_000_000
SHARD_TOKENS = 100_000_000  # in a file
Flags = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Tick = Callable[[], None]


@dataclass(frozen=True)
class Finished:
    """The finished parts of a request, in a journal, and what they were made by."""

    journal: Journal
    parts: int
    inputs: Inputs
    request: Request
    recipe: Recipe
    tokenizer: Tokenizer
    settings: dict[str, Any]


@dataclass
class _Long:
    """A document in several pieces, as it is put together."""

    digest: Any = field(default_factory=hashlib.sha256)
    reason: str | None = None

    def halves(self) -> tuple[int, int]:
        raw = self.digest.digest()
        return int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:16], "big")


@final
class Decisions:
    """What becomes of each document, numbered through all parts by where it begins."""

    def __init__(self, finished: Finished) -> None:
        self._journal = finished.journal
        self._request = request = finished.request
        self.parts = parts = finished.parts
        self.heads = [finished.journal.head(number) for number in range(parts)]
        self.bounds = np.cumsum([0, *(head.documents for head in self.heads)], dtype=np.int64)
        self.status: Flags = np.zeros(int(self.bounds[-1]), dtype=np.uint8)
        self._long: dict[int, _Long] = {}
        self.dropped: Counter[str] = sum((Counter(head.dropped) for head in self.heads), Counter())
        self._find_long_documents()
        if "exact_duplicates" in request.clean.drop and parts:
            self._drop_exact()
        if "near_duplicates" in request.clean.drop:
            self._drop_near()
        self._choose_by_weight()
        for status, reason in _REASONS.items():
            if count := int(np.count_nonzero(self.status == status)):
                self.dropped[reason] += count

    def index(self, number: int, stored: PartResult | None = None) -> tuple[npt.NDArray[np.int64], Numbers, Numbers]:
        """For each piece of a part its document (-1: of none), and the two halves of the documents' hashes."""
        pieces = (stored or self._journal.read(number, tokens=False, signatures=False)).pieces
        begins = pieces["flags"] & BEGINS != 0
        documents = np.cumsum(begins, dtype=np.int64) - 1 + self.bounds[number]
        high, low = pieces["high"][begins].copy(), pieces["low"][begins].copy()
        for document, long in self._long.items():
            if self.bounds[number] <= document < self.bounds[number + 1]:
                row = document - self.bounds[number]
                high[row], low[row] = long.halves()
        return documents, high, low

    def copies(self, number: int, low: Numbers) -> npt.NDArray[np.int64]:
        """How often each document that begins in a part is taken, by the weight of its source."""
        return copies_of(self._request.sources[self.heads[number].source].weight, low)

    def _find_long_documents(self) -> None:
        current: int | None = None
        for number in range(self.parts):
            pieces = self._journal.read(number, tokens=False, signatures=False).pieces
            whole = BEGINS | ENDS
            for row in np.flatnonzero(pieces["flags"] & whole != whole):
                flags = int(pieces["flags"][row])
                if flags & BEGINS:
                    current = int(self.bounds[number]) + int(np.count_nonzero(pieces["flags"][:row] & BEGINS))
                    self._long[current] = _Long()
                if current is None:  # the piece that begins it could not be read, and is listed as a problem
                    continue
                long = self._long[current]
                long.digest.update(pieces["high"][row].tobytes() + pieces["low"][row].tobytes())
                if flags & REJECTED:
                    long.reason = long.reason or self.heads[number].rejected[int(row)]
                if flags & ENDS:
                    current = None
        for document, long in self._long.items():
            if long.reason is not None:
                self.status[document] = DROPPED
                self.dropped[long.reason] += 1

    def _drop_exact(self) -> None:
        buckets = len(self.status) // _DOCUMENTS_AT_ONCE + 1
        for bucket in range(buckets):
            found: list[tuple[Numbers, Numbers, npt.NDArray[np.int64]]] = []
            for number in range(self.parts):
                _, high, low = self.index(number)
                here = self.status[self.bounds[number] : self.bounds[number + 1]]
                rows = np.flatnonzero((here == KEPT) & (high % np.uint64(buckets) == bucket))
                found.append((high[rows], low[rows], rows + self.bounds[number]))
            high, low, documents = (np.concatenate(column) for column in zip(*found, strict=True))
            # Documents are in rising order, and the sort keeps the order of equals: the first of them stays.
            order = np.lexsort((low, high))
            again = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
            self.status[documents[order[1:][again]]] = EXACT

    def _drop_near(self) -> None:
        kept = np.flatnonzero(self.status == KEPT)
        path = self._journal.folder / SIGNATURES
        path.unlink(missing_ok=True)  # of a prepare that was killed
        try:
            # They may be larger than memory; the search reads them through a map.
            with path.open("xb") as file:
                for number in range(self.parts):
                    file.write(self._signatures(number))
            rows = np.memmap(path, dtype="<u4", mode="r", shape=(len(kept), SLOTS)) if len(kept) else None
            if rows is not None:
                self.status[kept[near_duplicates(rows, SIMILAR) >= 0]] = NEAR
        finally:
            path.unlink(missing_ok=True)

    def _signatures(self, number: int) -> bytes:
        """The signatures of the documents that are still kept and begin in a part."""
        here = self.status[self.bounds[number] : self.bounds[number + 1]]
        stored = self._journal.read(number, tokens=False)
        return np.frombuffer(stored.signatures, dtype="<u4").reshape(len(here), SLOTS)[here == KEPT].tobytes()

    def _choose_by_weight(self) -> None:
        if all(source.weight >= 1 for source in self._request.sources):
            return
        for number in range(self.parts):
            _, _, low = self.index(number)
            here = self.status[self.bounds[number] : self.bounds[number + 1]]
            here[(self.copies(number, low) == 0) & (here == KEPT)] = UNCHOSEN


def merge_parts(finished: Finished, folder: Path, tick: Tick) -> Manifest:
    """Write the dataset of the finished parts into `folder`; the manifest comes last."""
    tokenizer, inputs = finished.tokenizer, finished.inputs
    decisions = Decisions(finished)
    if not np.any(decisions.status == KEPT):
        raise _nothing_left(decisions, inputs)
    with contextlib.closing(_Splitter(finished, decisions, folder)) as writer:
        splits = writer.write(tick)
    listed = itertools.chain(inputs.problems, *(head.problems for head in decisions.heads))
    lines = (
        json.dumps(asdict(problem), ensure_ascii=True, sort_keys=True).encode("ascii") + b"\n" for problem in listed
    )
    problems = write_file(folder / PROBLEMS, lines)
    report = _report(decisions, inputs, writer.kept, splits)
    if writer.contiguous and (apart := _unlike_training(writer.from_types, finished.request)):
        report["unlike_training"] = apart
    manifest = Manifest(
        version=VERSION,
        dtype=token_dtype(tokenizer.vocab).name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=write_file(folder / TOKENIZER, [json.dumps(tokenizer.to_json()).encode("ascii"), b"\n"]),
        splits=splits,
        settings=finished.settings,
        report=write_file(folder / REPORT, [canonical_json(report)]),
        problems=problems,
    )
    write_file(folder / MANIFEST, [manifest.to_bytes()])
    return manifest


def _unlike_training(from_types: Mapping[str, Counter[tuple[int, str]]], request: Request) -> list[str]:
    """The kinds of files that most of validation comes from, where training has nearly none of them."""
    train, val = (from_types[name] for name in SPLITS)
    apart = [kind for kind, size in val.most_common() if size * train.total() > _UNLIKE * train[kind] * val.total()]
    if sum(val[kind] for kind in apart) * 2 < val.total():
        return []
    several = len(request.sources) > 1
    return [f"{type} of {shown(request.sources[source].path)}" if several else type for source, type in apart]


def _border(finished: Finished, decisions: Decisions) -> int | None:
    """The character, counted over what is kept, at which a contiguous split begins validation."""
    data = finished.request.data
    if data.split != "contiguous" or data.val_source is not None:
        return None
    characters = 0
    for number in range(finished.parts):
        stored = finished.journal.read(number, tokens=False, signatures=False)
        documents, _, _ = decisions.index(number, stored)
        characters += int(stored.pieces["characters"][_kept(decisions, documents)].sum())
    return int(characters * (1.0 - data.val_fraction))


def _text_of(finished: Finished, decisions: Decisions, number: int, piece: Any) -> str:
    """The text of a piece of the part of that number, read again."""
    source = decisions.heads[number].source
    first = next(n for n, head in enumerate(decisions.heads) if head.source == source)
    return text_of(finished.recipe, find_part(finished.inputs, finished.recipe.options, number, source, first), piece)


def _kept(decisions: Decisions, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    # A piece without a document, before all others, would look at the last one; it is masked out.
    return (documents >= 0) & (decisions.status[documents] == KEPT)


@final
class _Splitter:
    """Writes the kept pieces of all parts into the splits."""

    def __init__(self, finished: Finished, decisions: Decisions, folder: Path) -> None:
        self.kept: Counter[str] = Counter()
        # By split, the characters from each source and type of file.
        self.from_types: dict[str, Counter[tuple[int, str]]] = {name: Counter() for name in SPLITS}
        self._finished, self._decisions = finished, decisions
        self._request, self._tokenizer = finished.request, finished.tokenizer
        self._border = _border(finished, decisions)
        self._dtype = token_dtype(finished.tokenizer.vocab)
        self._writers = {name: _SplitWriter(folder, name, self._dtype) for name in SPLITS}

    @property
    def contiguous(self) -> bool:
        """Whether validation is the end of the text."""
        return self._border is not None

    def write(self, tick: Tick) -> dict[str, SplitInfo]:
        start = position = 0  # in characters: where the source begins, and where its last part ended
        for source, spec in enumerate(self._request.sources):
            numbers = [n for n, head in enumerate(self._decisions.heads) if head.source == source]
            for copy in range(max(1, math.ceil(spec.weight))):
                position, carried = start, (0, 1)
                for number in numbers:
                    position, carried = self._write_part(number, copy, position, carried)
                    tick()
            start = position
        for name, writer in self._writers.items():
            if not writer.tokens:
                kept = sum(self.kept.values())
                raise DataError(
                    f"the {name} split came out empty; {many(kept, 'document')} {'is' if kept == 1 else 'are'} kept",
                    _empty_hint(self._request),
                )
        return {name: writer.finish() for name, writer in self._writers.items()}

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _write_part(
        self, number: int, copy: int, position: int, carried: tuple[int, int]
    ) -> tuple[int, tuple[int, int]]:
        """Write a part once. `position` is the character it begins at; `carried` are hash and copies of the last
        document so far, for its pieces in this part. Both are returned for the next."""
        stored = self._finished.journal.read(number, signatures=False)
        pieces = stored.pieces
        documents, high, low = self._decisions.index(number, stored)
        kept = _kept(self._decisions, documents)
        # Row 0 stands for the document that began in an earlier part.
        local = documents - self._decisions.bounds[number] + 1
        hashes = np.concatenate([np.array([carried[0]], dtype=np.uint64), high])
        taken = np.concatenate([[carried[1]], self._decisions.copies(number, low)])
        copies = taken[local]
        ends = position + np.cumsum(np.where(kept, pieces["characters"], 0).astype(np.int64))
        in_val = self._in_val(stored.head.source, hashes[local], ends - pieces["characters"].astype(np.int64))
        cut = self._cut_row(kept, ends, pieces["characters"])
        ids = np.frombuffer(stored.tokens, dtype=self._dtype)
        for name in SPLITS:
            if name == "val" and copy:
                continue  # validation is measured on each document once
            chosen = kept & (in_val == (name == "val")) & (copies > copy)
            characters = np.where(chosen, pieces["characters"], 0).astype(np.int64)
            if cut is not None and copies[cut] > copy and self._border is not None:
                past = int(ends[cut]) - self._border
                characters[cut] = past if name == "val" else int(pieces["characters"][cut]) - past
            self._count_types(name, stored.head, characters)
            if cut is None:
                self._add(name, ids, pieces, chosen, first_copy=not copy)
                continue
            before, after = chosen.copy(), chosen.copy()
            before[cut:], after[: cut + 1] = False, False
            self._add(name, ids, pieces, before, first_copy=not copy)
            if copies[cut] > copy and self._border is not None:
                border = self._border - (int(ends[cut]) - int(pieces["characters"][cut]))
                self._add_cut(name, number, pieces[cut], border, first_copy=not copy)
            self._add(name, ids, pieces, after, first_copy=not copy)
        end = int(ends[-1]) if len(ends) else position
        return end, (int(hashes[-1]), int(taken[-1]))

    def _count_types(self, name: str, head: PartHead, characters: npt.NDArray[np.int64]) -> None:
        row = 0
        for type, count in head.types:
            self.from_types[name][head.source, type] += int(characters[row : row + count].sum())
            row += count

    def _in_val(self, source: int, hashes: Numbers, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self._request.data.val_source is not None:
            return np.full(len(starts), source == len(self._request.sources) - 1)
        if self._border is not None:
            return starts >= self._border
        return share_of(hashes) < self._request.data.val_fraction

    def _cut_row(self, kept: npt.NDArray[np.bool_], ends: npt.NDArray[np.int64], characters: Numbers) -> int | None:
        if self._border is None:
            return None
        rows = np.flatnonzero(kept & (ends > self._border) & (ends - characters.astype(np.int64) < self._border))
        return int(rows[0]) if len(rows) else None

    def _add(self, name: str, ids: Ids, pieces: Any, chosen: npt.NDArray[np.bool_], *, first_copy: bool) -> None:
        if not chosen.any():
            return
        lengths = pieces["tokens"][chosen].astype(np.int64)
        begins = pieces["flags"][chosen] & BEGINS != 0
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[begins]
        mask = np.repeat(chosen, pieces["tokens"].astype(np.int64))
        self._writers[name].add(ids if mask.all() else ids[mask], starts, int(pieces["bytes"][chosen].sum()))
        if first_copy:
            self.kept[name] += int(np.count_nonzero(begins))

    def _add_cut(self, name: str, number: int, piece: Any, border: int, *, first_copy: bool) -> None:
        """Write the head of the piece in which the border falls to training, its tail to validation."""
        text = _text_of(self._finished, self._decisions, number, piece)
        text = text[:border] if name == "train" else text[border:]
        ids = self._tokenizer.encode(text)
        if name == "val" and piece["flags"] & ENDS and self._tokenizer.end_of_text is not None:
            ids = np.concatenate([ids, np.array([self._tokenizer.end_of_text], dtype=self._dtype)])
        begins = name == "val" or bool(piece["flags"] & BEGINS)
        starts = np.zeros(int(begins), dtype=np.int64)
        self._writers[name].add(ids, starts, len(text.encode("utf-8", "surrogatepass")))
        if first_copy and name == "train" and piece["flags"] & BEGINS:
            self.kept[name] += 1  # a document in both splits is counted where it begins


def _empty_hint(request: Request) -> str:
    data = request.data
    if data.val_source is not None:
        return "check data.source and data.validation"
    other = "data.split=contiguous, which cuts inside a document, " if data.split == "document" else ""
    return f"use more text, {other}or another data.validation than {data.val_fraction}"


def _nothing_left(decisions: Decisions, inputs: Inputs) -> DataError:
    records = sum(head.records for head in decisions.heads)
    causes = causes_of([*(problem for head in decisions.heads for problem in head.problems), *inputs.problems])
    if causes:
        damaged = sum(cause.records for cause in causes)
        lost = f", none of {records:,} records" if damaged == records > 1 else ""
        return DataError(f"nothing could be read{lost}: {causes[0].told}", mend_of(causes))
    why = ", ".join(f"{count:,} {reason}" for reason, count in decisions.dropped.most_common(4)) or "no records at all"
    return DataError(
        f"the source holds no text that is kept: of {many(records, 'record')}, {why}",
        "give a source with text in it"
        + ("" if decisions.dropped.keys() <= {"empty"} else ", or loosen the clean section")
        + ("; data.field names the field of a row that holds it" if decisions.dropped["empty"] else ""),
    )


def _report(decisions: Decisions, inputs: Inputs, kept: Counter[str], splits: dict[str, SplitInfo]) -> dict[str, Any]:
    heads, dropped = decisions.heads, decisions.dropped
    problems = [*inputs.problems, *(problem for head in heads for problem in head.problems)]
    damaged = sum(problem.records for problem in problems)
    records = sum(head.records for head in heads) + sum(problem.records for problem in inputs.problems)
    if records != sum(kept.values()) + sum(dropped.values()) + damaged:
        raise RuntimeError(f"{records} records became {dict(kept)} kept, {dict(dropped)} dropped and {damaged} damaged")
    return {
        "format": "flatout-report",
        "records": records,
        "kept": {name: kept[name] for name in SPLITS},
        "dropped": dict(dropped),
        "damaged": damaged,
        "problem_count": len(problems),
        "replaced_characters": sum(head.replaced for head in heads),
        "files": len(inputs.distinct),
        "passed_over": inputs.passed_over,
        "input_bytes": inputs.bytes,
        "text_bytes": sum(split.text_bytes for split in splits.values()),
    }


@final
class _SplitWriter:
    """Appends documents to one split, beginning a new shard whenever the last one is full."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]) -> None:
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shards: list[FileInfo] = []
        self._shard: HashedFile | None = None
        self._offsets = HashedFile(folder / f"{split}.offsets.bin")

    def add(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Append `ids`, in which documents begin at `starts`; what comes before the first goes on with the last one."""
        self.text_bytes += text_bytes
        if not len(ids):
            return
        if not self.tokens and (not len(starts) or starts[0]):
            starts = np.concatenate([[0], starts])  # the split begins inside a document
        self._offsets.write((starts + self.tokens).astype(OFFSET_DTYPE).tobytes())
        self.documents += len(starts)
        while len(ids):
            room = SHARD_TOKENS - self.tokens % SHARD_TOKENS
            if self._shard is None:
                self._shard = HashedFile(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
            self._shard.write(ids[:room].astype(self._dtype, copy=False).tobytes())
            self.tokens += len(ids[:room])
            ids = ids[room:]
            if self.tokens % SHARD_TOKENS == 0:
                self._finish_shard()

    def finish(self) -> SplitInfo:
        self._finish_shard()
        return SplitInfo(self.tokens, self.documents, self.text_bytes, tuple(self._shards), self._offsets.finish())

    def close(self) -> None:
        """Let go of the files, whatever state they are in."""
        for file in (self._shard, self._offsets):
            if file is not None:
                file.close()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.finish())
            self._shard = None


@final
class HashedFile:
    """A new file that knows the size and SHA-256 of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("xb", buffering=2**20)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> FileInfo:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileInfo(self._path.name, self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        # On a full disk closing tries to flush and fails again, which must not hide the first failure.
        with contextlib.suppress(OSError):
            self._file.close()


def write_file(path: Path, chunks: Iterable[bytes]) -> FileInfo:
    """Write a file whole and flushed, and describe it."""
    with contextlib.closing(HashedFile(path)) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()
