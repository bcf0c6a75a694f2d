"""Finished parts: kept in a work folder so that a killed prepare can resume, then merged into one dataset.

`Journal`: a part's result is one file, written under another name, flushed, and renamed: it is there whole or not at
all. The folder also holds the plan it belongs to; with another plan, finished parts are removed. Every byte is hashed,
with the plan and the number of its part. A part that is not exactly what was written is made again; so are damaged
notes. A kill or a power loss at any moment costs at most the parts that were under way. Only names that a journal gives
are ever removed; a folder with anything else in it, or with a link, is refused.

`merge_parts` goes through the parts in the order of their numbers, twice. The first pass decides which documents are
kept, from the index of each part; the second writes. The result depends on the order of documents only, not on the
number of workers. Memory holds one part at a time and one byte per document; the search for near duplicates holds more
(see `flatout.corpus.clean`). Every record ends up in exactly one of the report's counts, and the sum is checked.

Trap: the border of a contiguous split falls inside a document. Its tokens are not cut, for a tokenizer may join what
the border separates: its text is read again, cut, and tokenized as two.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.clean import SIMILAR, SLOTS, near_duplicates
from flatout.corpus.document import Problem
from flatout.data.inspect import causes_of, mend_of
from flatout.data.part import BEGINS, ENDS, PIECE, REJECTED, PartHead, PartResult, Recipe, copies_of, share_of, text_of
from flatout.data.plan import Done, Inputs, Request, find_part
from flatout.data.shards import (
    MANIFEST,
    PROBLEMS,
    REPORT,
    SPLITS,
    TOKENIZER,
    VERSION,
    Manifest,
    SplitInfo,
    _SplitWriter,
    write_file,
)
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype
from flatout.errors import DataError, many
from flatout.files import TEMPORARY, canonical_json, sync_folder, write_whole
from flatout.folders import MARK

SIGNATURES = "signatures.bin"
_PLAN = "plan.json"
_PARTS = "parts"
_READ_HERE = "read-here.json"
_OWN = re.compile(
    rf"(?:(?:plan\.json|read-here\.json|{_PARTS}/\d{{8,}}\.part)(?:{TEMPORARY})?"
    rf"|{re.escape(SIGNATURES)}|{re.escape(MARK)})"
)
# SHA-256 of the description that follows, and its length.
_LEAD = struct.Struct("<32sQ")


class PassingError(DataError):
    """An error that is no fault of the input: running the same command again resumes with the finished parts."""


@final
class Journal(Done):
    """The finished parts of one plan."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        self._parts = folder / _PARTS
        self._notes = folder / _READ_HERE
        wanted = canonical_json(plan)
        self._plan = hashlib.sha256(wanted).hexdigest()
        plan_file = folder / _PLAN
        if not plan_file.exists() or plan_file.read_bytes() != wanted:
            # The old plan goes first: without it, the rest of its parts count as not finished.
            plan_file.unlink(missing_ok=True)
            sync_folder(folder)
            for path in _entries(folder):
                if path.parent.name == _PARTS and _is_own(path, folder):
                    path.unlink()
            self._notes.unlink(missing_ok=True)
            write_whole(plan_file, wanted, durable=True)
        self._parts.mkdir(exist_ok=True)
        sync_folder(folder)
        self._good: dict[int, int] = {}  # the source of each
        self._known = self._read_notes()

    def has(self, number: int, source: int) -> bool:
        if number not in self._good:
            with contextlib.suppress(DataError):
                self._good[number] = self.read(number).head.source
        return self._good.get(number) == source

    def parts_of(self, file: int) -> int | None:
        return self._known.get(str(file))

    def note(self, file: int, parts: int) -> None:
        self._known[str(file)] = parts
        sealed = {"plan": self._plan, "parts": self._known, "sha256": self._seal(self._known)}
        write_whole(self._notes, canonical_json(sealed), durable=True)

    def write(self, number: int, result: PartResult) -> None:
        """Keep a result; when this returns, a kill cannot lose it."""
        body = [result.tokens, result.pieces.tobytes(), result.signatures]
        described = {
            "plan": self._plan,
            "number": number,
            "head": asdict(result.head),
            "sizes": [len(part) for part in body],
            "sha256": [hashlib.sha256(part).hexdigest() for part in body],
        }
        raw = canonical_json(described)
        lead = _LEAD.pack(hashlib.sha256(raw).digest(), len(raw))
        write_whole(self._path(number), b"".join([lead, raw, *body]), durable=True)
        self._good[number] = result.head.source

    def head(self, number: int) -> PartHead:
        """All of a finished part but its arrays."""
        try:
            with self._path(number).open("rb") as file:
                return _head_from(self._described(file, number)["head"])
        except (OSError, ValueError) as error:
            raise self._damaged(number, error) from error

    def read(self, number: int, *, tokens: bool = True, signatures: bool = True) -> PartResult:
        """A finished part, checked; arrays that are not asked for are empty."""
        try:
            with self._path(number).open("rb") as file:
                described = self._described(file, number)
                wanted = (tokens, True, signatures)
                body: list[bytes] = []
                for size, digest, want in zip(described["sizes"], described["sha256"], wanted, strict=True):
                    raw = file.read(size) if want else b""
                    if want and hashlib.sha256(raw).hexdigest() != digest:
                        raise ValueError("its content is not what was written")
                    if not want:
                        file.seek(size, os.SEEK_CUR)
                    body.append(raw)
        except (OSError, ValueError) as error:
            raise self._damaged(number, error) from error
        return PartResult(_head_from(described["head"]), body[0], np.frombuffer(body[1], dtype=PIECE), body[2])

    def _described(self, file: IO[bytes], number: int) -> dict[str, Any]:
        """The description before the arrays of a part, checked to be that of this part of this plan."""
        size = os.fstat(file.fileno()).st_size
        lead = file.read(_LEAD.size)
        if len(lead) < _LEAD.size:
            raise ValueError("it is too short")
        digest, length = _LEAD.unpack(lead)
        raw = file.read(min(length, size))
        if hashlib.sha256(raw).digest() != digest:
            raise ValueError("its description is not what was written")
        described = json.loads(raw)
        if (described["plan"], described["number"]) != (self._plan, number):
            raise ValueError("it is another part")
        if _LEAD.size + length + sum(described["sizes"]) != size:
            raise ValueError("its size is not what was written")
        return described

    def _damaged(self, number: int, error: Exception) -> PassingError:
        return PassingError(
            f"the finished part {self._path(number)} was damaged meanwhile: {error}",
            "check the disk, and run the same command again: the part is made again",
        )

    def _read_notes(self) -> dict[str, int]:
        # Without notes, their files are read again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            sealed = json.loads(self._notes.read_bytes())
            if sealed["plan"] == self._plan and sealed["sha256"] == self._seal(sealed["parts"]):
                return sealed["parts"]
        return {}

    def _seal(self, parts: dict[str, int]) -> str:
        return hashlib.sha256(canonical_json([self._plan, parts])).hexdigest()

    def _path(self, number: int) -> Path:
        return self._parts / f"{number:08d}.part"


def foreign_in(folder: Path) -> str | None:
    """The first entry of a work folder that no journal put there, or that is a link; None if there is none."""
    found = next((path for path in _entries(folder) if not _is_own(path, folder)), None)
    return None if found is None else found.relative_to(folder).as_posix()


def clear(folder: Path) -> None:
    """Removes a work folder: the files that a journal put there, and the folder if nothing else is in it."""
    own = [path for path in _entries(folder) if _is_own(path, folder)]
    for path in sorted(own, key=lambda path: path.name == MARK):  # the mark last: a kill leaves a folder of ours
        path.unlink(missing_ok=True)
    for place in (folder / _PARTS, folder):
        with contextlib.suppress(OSError):
            place.rmdir()


def _entries(folder: Path) -> list[Path]:
    """The entries of a work folder, with those of its folder of parts in the place of that. Links are not followed."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        parts = path.name == _PARTS and path.is_dir() and not path.is_symlink()
        found += sorted(path.iterdir()) if parts else [path]
    return found


def _is_own(path: Path, folder: Path) -> bool:
    name = path.relative_to(folder).as_posix()
    return _OWN.fullmatch(name) is not None and path.is_file() and not path.is_symlink()


def _head_from(content: dict[str, Any]) -> PartHead:
    problems = tuple(Problem(**problem) for problem in content["problems"])
    rejected = {int(row): reason for row, reason in content["rejected"].items()}
    return PartHead(**{**content, "problems": problems, "rejected": rejected})


KEPT, DROPPED, EXACT, NEAR, UNCHOSEN = range(5)
_REASONS = {EXACT: "exact_duplicate", NEAR: "near_duplicate", UNCHOSEN: "weight"}
_DOCUMENTS_AT_ONCE = 4_000_000
Flags = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Tick = Callable[[], None]


@dataclass(frozen=True)
class Finished:
    """The finished parts of a request, in a journal, with the request and the tokenizer."""

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
    """Which documents are kept, numbered through all parts by where they begin."""

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


def _border(finished: Finished, decisions: Decisions) -> int | None:
    """The character, counted over the kept text, at which a contiguous split begins validation."""
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
        self._finished, self._decisions = finished, decisions
        self._request, self._tokenizer = finished.request, finished.tokenizer
        self._border = _border(finished, decisions)
        self._dtype = token_dtype(finished.tokenizer.vocab)
        self._writers = {name: _SplitWriter(folder, name, self._dtype) for name in SPLITS}

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
        return DataError(f"nothing could be read{lost}: {causes[0].text}", mend_of(causes))
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
