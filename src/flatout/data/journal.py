"""The work folder of a prepare: finished parts, kept so that a killed prepare can resume.

Idea: a part's result is one file, written under another name, flushed, and renamed; it is there whole or not at all.
The folder also holds the plan it belongs to. Whoever opens the folder with the same plan finds the finished parts;
with another plan they are removed.

Contract: every byte is hashed, with the plan and the number of its part. A part that is not exactly what `write` was
given does not count as finished and is made again; notes that are damaged are made again too. What `read` returns is
what was written, or a `DataError`. A kill or a power loss at any moment costs at most the parts that were under way.

Only names that a journal gives are ever removed here. A folder with anything else in it, or with a link, is refused.
"""

import contextlib
import hashlib
import json
import os
import re
import struct
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, final

import numpy as np

from flatout.corpus.document import Problem
from flatout.data.part import PIECE, PartHead, PartResult
from flatout.data.plan import Done
from flatout.errors import DataError
from flatout.files import TEMPORARY, canonical_json, sync_folder, write_whole
from flatout.folders import MARK

SIGNATURES = "signatures.bin"
_PLAN = "plan.json"
_PARTS = "parts"
_READ_HERE = "read-here.json"
_OWN = re.compile(
    rf"(?:(?:plan\.json|read-here\.json|stdin-\d+|{_PARTS}/\d{{8,}}\.part)(?:{TEMPORARY})?"
    rf"|{re.escape(SIGNATURES)}|{re.escape(MARK)})"
)
# SHA-256 of the description that follows, and its length.
_LEAD = struct.Struct("<32sQ")


class PassingError(DataError):
    """An error that is no fault of the input: the same command gets past it, and goes on with the finished parts."""


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
            # The old plan goes first: without it, whatever is left of its parts belongs to nobody.
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
        """What stands before the arrays of a part, proven to be what was written for this part of this plan."""
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
        # Without notes, the files that they tell of are read again.
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
    """What lies in a work folder, with what is in its folder of parts in place of that. Links are not followed."""
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
    types = tuple((type, count) for type, count in content.get("types", ()))
    return PartHead(**{**content, "problems": problems, "rejected": rejected, "types": types})
