"""Whole documents of a source up to a limit, counted in the order in which they are read.

Contract: what is taken is the longest run of documents from the start of the source that stays within every limit.
Documents that a rule of their own drops (empty, too short, another language) do not count; duplicates and documents
that a weight leaves out do, since those are only found later. Preparing and streaming count alike, so both take the
same documents, and each of them stops reading when a source has given all that it may.

Trap: a document of more than 16 MiB comes in pieces. `within` decides piece by piece; who knows all pieces
(`flatout.data.merge`) leaves such a document out if one of them is past the limit.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from flatout.config.schema import DataConfig
from flatout.data.part import BEGINS, ENDS, REJECTED, Pieces
from flatout.errors import DataError

Choice = npt.NDArray[np.bool_]
Count = tuple[int, int, int]  # documents, tokens with those that end a text, bytes of text
NONE_TAKEN: Count = (0, 0, 0)
LIMITS = ("max_documents", "max_tokens", "max_bytes")  # settings of `data`, in the order of a count
_WHOLE = BEGINS | ENDS


@dataclass(frozen=True)
class Limits:
    """The most that is taken of a source, in the order of a `Count`; None is no limit."""

    most: tuple[int | None, int | None, int | None]

    def within(self, pieces: Pieces, dropped: Choice, before: Count) -> tuple[Choice, Count, bool]:
        """Which pieces of the next part are taken, the count after them, and whether the source has given its all."""
        columns = (pieces["flags"] & BEGINS != 0, pieces["tokens"], pieces["bytes"])
        totals = [
            start + np.cumsum(np.where(dropped, 0, column).astype(np.int64))
            for start, column in zip(before, columns, strict=True)
        ]
        taken = np.ones(len(pieces), dtype=bool)
        for total, limit in zip(totals, self.most, strict=True):
            if limit is not None:
                taken &= total <= limit
        count = int(np.count_nonzero(taken))  # totals never fall, so these are the first pieces
        documents, tokens, size = (int(total[count - 1]) for total in totals) if count else before
        after = (documents, tokens, size)
        complete = not count or bool(pieces["flags"][count - 1] & ENDS)
        return taken, after, count < len(pieces) or (complete and self.reached(after))

    def reached(self, count: Count) -> bool:
        """Whether another document would be one too many."""
        return any(limit is not None and value >= limit for value, limit in zip(count, self.most, strict=True))

    def exceeded(self, count: Count) -> bool:
        """Whether this is more than may be taken."""
        return any(limit is not None and value > limit for value, limit in zip(count, self.most, strict=True))

    def check(self, count: Count, full: bool, source: str) -> None:
        """Refuses a source that has given its all with nothing: its first document is too large by itself."""
        if full and not count[0]:
            given = zip(LIMITS, self.most, strict=True)
            told = " and ".join(f"data.{name}={most}" for name, most in given if most is not None)
            raise DataError(
                f"the first document of {source} is larger than {told}, and documents are taken whole",
                "set the limit higher, set data.document_start where a file holds many documents, or cut a part off: "
                "head -c BYTES FILE > PART",
            )


def limits_of(data: DataConfig) -> Limits | None:
    """The limits that a config sets on each of its sources, if it does."""
    most = (data.max_documents, data.max_tokens, data.max_bytes)
    return None if most == (None, None, None) else Limits(most)


def dropped_by_then(pieces: Pieces, rejected: bool) -> tuple[Choice, bool]:
    """Which pieces belong to a document that has been rejected by then, and whether the last one does."""
    dropped = np.zeros(len(pieces), dtype=bool)
    flags = pieces["flags"]
    for row in np.flatnonzero(flags & _WHOLE != _WHOLE):
        if flags[row] & BEGINS:
            rejected = False
        rejected = rejected or bool(flags[row] & REJECTED)
        dropped[row] = rejected
    return dropped, rejected


@final
class Tally:
    """Counts the parts of one source in their order, whatever the order in which they are finished."""

    def __init__(self, limits: Limits | None, source: str, first: int) -> None:
        self.parts = first  # up to this number all are counted
        self.full = False
        self._limits, self._source = limits, source
        self._count, self._rejected = NONE_TAKEN, False
        self._waiting: dict[int, Pieces] = {}

    def add(self, number: int, pieces: Pieces) -> None:
        if self._limits is None:
            return
        self._waiting[number] = pieces
        while not self.full and self.parts in self._waiting:
            here = self._waiting.pop(self.parts)
            dropped, self._rejected = dropped_by_then(here, self._rejected)
            _, self._count, self.full = self._limits.within(here, dropped, self._count)
            self._limits.check(self._count, self.full, self._source)
            self.parts += 1
