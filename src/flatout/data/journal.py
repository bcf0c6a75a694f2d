"""The work folder of a prepare: finished parts, kept so that a killed prepare can go on.

Idea: a part's result is one file, written under another name, flushed, and renamed; it is there whole or not at all.
The folder also holds the plan it belongs to. Whoever opens the folder with the same plan finds the finished parts;
with another plan they are removed.

Contract: what `read` returns is what `write` was given, or a `DataError`. A kill at any moment costs at most the parts
that were under way.
"""

import hashlib
import json
import os
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from flatout.corpus.document import Problem
from flatout.data.part import PIECE, PartResult, Pieces
from flatout.data.plan import Done
from flatout.errors import DataError
from flatout.files import canonical_json

_PLAN = "plan.json"
_PARTS = "parts"
_READ_HERE = "read-here.json"
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class PartHead:
    """What is known of a finished part beside its arrays."""

    source: int
    bytes: int
    files: int
    tokens: int
    documents: int
    records: int
    replaced: int
    dropped: dict[str, int]
    problems: tuple[Problem, ...]
    rejected: dict[int, str]


@dataclass(frozen=True)
class StoredPart:
    """A finished part, read back."""

    head: PartHead
    tokens: bytes
    pieces: Pieces
    signatures: bytes


@final
class Journal(Done):
    """The finished parts of one plan."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        self._parts = folder / _PARTS
        self._notes = folder / _READ_HERE
        wanted = canonical_json(plan)
        if not _same(folder / _PLAN, wanted):
            # The old plan goes first: without it, whatever is left of its parts belongs to nobody.
            (folder / _PLAN).unlink(missing_ok=True)
            shutil.rmtree(self._parts, ignore_errors=True)
            self._notes.unlink(missing_ok=True)
            self._parts.mkdir()
            _write_whole(folder / _PLAN, [wanted])
        self._numbers = {int(path.stem) for path in self._parts.glob("*.part")}
        self._known: dict[str, int] = json.loads(self._notes.read_bytes()) if self._notes.exists() else {}

    def has(self, number: int) -> bool:
        return number in self._numbers

    def parts_of(self, file: int) -> int | None:
        return self._known.get(str(file))

    def note(self, file: int, parts: int) -> None:
        self._known[str(file)] = parts
        _write_whole(self._notes, [canonical_json(self._known)])

    def write(self, number: int, source: int, size: int, files: int, result: PartResult, itemsize: int) -> PartHead:
        """Keep a result; when this returns, a kill cannot lose it."""
        pieces = np.frombuffer(result.pieces, dtype=PIECE)
        head = PartHead(
            source=source,
            bytes=size,
            files=files,
            tokens=len(result.tokens) // itemsize,
            documents=int(np.count_nonzero(pieces["flags"] & 1)),
            records=result.records,
            replaced=result.replaced,
            dropped=result.dropped,
            problems=result.problems,
            rejected=result.rejected,
        )
        body = [result.tokens, result.pieces, result.signatures]
        described = {
            "head": asdict(head),
            "sizes": [len(part) for part in body],
            "sha256": [hashlib.sha256(part).hexdigest() for part in body],
        }
        raw = canonical_json(described)
        _write_whole(self._path(number), [_SIZE.pack(len(raw)), raw, *body])
        self._numbers.add(number)
        return head

    def head(self, number: int) -> PartHead:
        """All of a finished part but its arrays."""
        with self._path(number).open("rb") as file:
            return _head_from(_described(file)["head"])

    def read(self, number: int, *, tokens: bool = True, signatures: bool = True) -> StoredPart:
        """A finished part, checked; arrays that are not asked for are empty."""
        try:
            with self._path(number).open("rb") as file:
                described = _described(file)
                wanted = (tokens, True, signatures)
                body: list[bytes] = []
                for size, digest, want in zip(described["sizes"], described["sha256"], wanted, strict=True):
                    if not want:
                        file.seek(size, os.SEEK_CUR)
                        body.append(b"")
                        continue
                    raw = file.read(size)
                    if len(raw) != size or hashlib.sha256(raw).hexdigest() != digest:
                        raise ValueError("its content is not what was written")
                    body.append(raw)
            head = _head_from(described["head"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the unfinished part {self._path(number)} is damaged: {error}", "prepare again with --overwrite"
            ) from error
        return StoredPart(head, body[0], np.frombuffer(body[1], dtype=PIECE), body[2])

    def _path(self, number: int) -> Path:
        return self._parts / f"{number:08d}.part"


def _described(file: Any) -> dict[str, Any]:
    return json.loads(file.read(_SIZE.unpack(file.read(_SIZE.size))[0]))


def _head_from(content: dict[str, Any]) -> PartHead:
    problems = tuple(Problem(**problem) for problem in content["problems"])
    rejected = {int(row): reason for row, reason in content["rejected"].items()}
    return PartHead(**{**content, "problems": problems, "rejected": rejected})


def _same(path: Path, wanted: bytes) -> bool:
    return path.exists() and path.read_bytes() == wanted


def _write_whole(path: Path, chunks: list[bytes]) -> None:
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
