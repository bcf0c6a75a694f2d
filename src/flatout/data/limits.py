"""The first documents of a source up to a limit, counted in the order in which they are read.

Contract: what is taken is the longest run of documents from the start of the source that stays within every limit.
Rows and other documents are taken whole. A text without documents of its own (a file without `data.document_start`) is
cut at the last character that fits, and so is a document of more than 16 MiB, which comes in pieces. Documents that a
rule of their own drops (empty, too short, another language) do not count; duplicates and documents that a weight leaves
out do, since those are only found later. Preparing and streaming count alike, so both take the same text, and each of
them stops reading when a source has given all that it may.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt

from flatout.config.schema import DataConfig
from flatout.corpus.document import Document
from flatout.corpus.sources import format_of
from flatout.data.part import (
    BEGINS,
    DIVISIBLE,
    ENDS,
    REJECTED,
    Part,
    PartResult,
    Pieces,
    Recipe,
    run_part,
    text_of,
    tokenizer_of,
)
from flatout.data.tokenizer import Tokenizer
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

    def within(self, pieces: Pieces, dropped: Choice, before: Count) -> tuple[int, Count, bool]:
        """How many pieces of the next part are taken, the count after them, and whether the source ends there."""
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
        return count, after, count < len(pieces) or (complete and self.reached(after))

    def trimmed(
        self, result: PartResult, count: int, after: Count, recipe: Recipe, part: Callable[[], Part]
    ) -> tuple[PartResult, Count]:
        """The first `count` pieces of a part, with as much of the next one as fits where it may be cut.

        `after` is what counts towards the limits by then; the new count is returned, too. `part` finds the part, whose
        text is read again.
        """
        head, pieces = result.head, result.pieces
        crossing = pieces[count]
        flags, divided = int(crossing["flags"]), None
        if (flags & DIVISIBLE or flags & _WHOLE != _WHOLE) and not self.exceeded(
            (after[0] + bool(flags & BEGINS), 0, 0)
        ):
            text = self.first_characters(text_of(recipe, part(), crossing), after, tokenizer_of(recipe))
            if text or not flags & BEGINS:  # a document that has begun ends here, if only with its end of text
                whole = Document(text, begins=bool(flags & BEGINS), divisible=True)
                divided = run_part(recipe, Part(0, head.source, documents=(whole,)))
        begun = int(np.count_nonzero(pieces["flags"][:count] & BEGINS))
        left_out = head.documents - begun
        each = len(result.signatures) // max(head.documents, 1)
        tokens = int(pieces["tokens"][:count].sum())
        width = len(result.tokens) // max(head.tokens, 1)
        kept = PartResult(
            replace(
                head,
                tokens=tokens,
                documents=begun,
                records=head.records - left_out,
                rejected={row: rule for row, rule in head.rejected.items() if row < count},
                last=True,
            ),
            result.tokens[: tokens * width],
            pieces[:count],
            result.signatures[: begun * each],
        )
        if divided is None:
            return kept, after
        _, after, _ = self.within(divided.pieces, np.zeros(len(divided.pieces), dtype=bool), after)
        return _joined(kept, divided), after

    def first_characters(self, text: str, taken: Count, tokenizer: Tokenizer | None = None) -> str:
        """As much of the beginning of a text as fits. Without a tokenizer, each character is a token."""
        _, most_tokens, most_bytes = self.most
        if most_bytes is not None:
            text = text.encode("utf-8", "surrogatepass")[: max(most_bytes - taken[2], 0)].decode("utf-8", "ignore")
        if most_tokens is None:
            return text
        room = most_tokens - taken[1] - (tokenizer is None or tokenizer.end_of_text is not None)
        if tokenizer is None:
            return text[: max(room, 0)]
        low, high = (0, 0), (len(text), len(tokenizer.encode(text)))  # characters and tokens: what fits, what may not
        if high[1] <= room:
            return text
        turn = False
        while low[1] < room and high[0] - low[0] > 1:
            # Where the tokens are spread evenly the first guess is nearly right; halving bounds the number of guesses.
            share = 0.5 if turn else (room - low[1]) / max(high[1] - low[1], 1)
            guess = min(max(low[0] + round((high[0] - low[0]) * share), low[0] + 1), high[0] - 1)
            tokens = len(tokenizer.encode(text[:guess]))
            low, high = ((guess, tokens), high) if tokens <= room else (low, (guess, tokens))
            turn = not turn
        return text[: low[0]]

    def reached(self, count: Count) -> bool:
        """Whether another document would be one too many."""
        return any(limit is not None and value >= limit for value, limit in zip(count, self.most, strict=True))

    def exceeded(self, count: Count) -> bool:
        """Whether this is more than may be taken."""
        return any(limit is not None and value > limit for value, limit in zip(count, self.most, strict=True))

    def check(self, count: Count, full: bool, source: str) -> None:
        """Refuses a source that has given its all with nothing: its first document is too large by itself."""
        if full and not count[0]:
            # A document is never too large for a limit on their number.
            given = {f"data.{name}": most for name, most in list(zip(LIMITS, self.most, strict=True))[1:]}
            given = {name: most for name, most in given.items() if most is not None}
            told = " and ".join(f"{name}={most}" for name, most in given.items())
            smaller = ", or set a data.document_start that occurs more often" if format_of(source)[0] == "text" else ""
            raise DataError(
                f"the first document of {source} is larger than {told}, and documents are taken whole",
                f"raise {' and '.join(given)}{smaller}",
            )


def _joined(first: PartResult, second: PartResult) -> PartResult:
    head, more = first.head, second.head
    return PartResult(
        replace(
            head,
            tokens=head.tokens + more.tokens,
            documents=head.documents + more.documents,
            records=head.records + more.records,
            dropped={
                rule: head.dropped.get(rule, 0) + more.dropped.get(rule, 0) for rule in {**head.dropped, **more.dropped}
            },
            problems=head.problems + more.problems,
            rejected={**head.rejected, **{len(first.pieces) + row: rule for row, rule in more.rejected.items()}},
        ),
        first.tokens + second.tokens,
        np.concatenate([first.pieces, second.pieces]),
        first.signatures + second.signatures,
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
    """Counts the parts of one source in their order, whatever the order in which they are finished.

    `trim` is called with the number of the part in which a limit ends the source, how many of its pieces are taken, and
    the count by then. It takes out the rest, and returns the new count.
    """

    def __init__(
        self, limits: Limits | None, source: str, first: int, trim: Callable[[int, int, Count], Count]
    ) -> None:
        self.parts = first  # up to this number all are counted
        self.full = False
        self._limits, self._source, self._trim = limits, source, trim
        self._count, self._rejected = NONE_TAKEN, False
        self._waiting: dict[int, tuple[Pieces, bool]] = {}

    def add(self, number: int, result: PartResult) -> None:
        if self._limits is None:
            return
        self._waiting[number] = result.pieces, result.head.last
        while not self.full and self.parts in self._waiting:
            here, last = self._waiting.pop(self.parts)
            dropped, self._rejected = dropped_by_then(here, self._rejected)
            count, self._count, full = self._limits.within(here, dropped, self._count)
            if count < len(here):
                self._count = self._trim(self.parts, count, self._count)
            self.full = full or last
            self._limits.check(self._count, self.full, self._source)
            self.parts += 1
