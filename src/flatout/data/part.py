"""One part of a corpus: read, cleaned and tokenized, by whichever process gets it; and the limits of a source.

A part is a few megabytes of the input, and its result depends on the part and the recipe alone. So parts may run in any
order, anywhere, and again after a kill; `merge` puts their results together in the order of their numbers.

Contract: `run_part` never raises for bad input. Every record of the part is a piece of the result, or counted in
`dropped` or in a problem. Memory is bounded by the part and its largest document.

Limits (`data.max_documents` and the like) take the longest run of documents from the start of the source that stays
within every limit. Rows and other documents are taken whole. A text without documents of its own (a file without
`data.document_start`) is cut at the last character that fits, and so is a document of more than 16 MiB. Documents that
a rule of their own drops (empty, too short, another language) do not count; duplicates and documents that a weight
leaves out do, since those are only found later. Preparing and streaming count alike, and stop reading at the limit.

Trap: a text file above 16 MiB is one document in several pieces, which may lie in several parts. Whether such a
document is kept is known only when all of its pieces are; a rejected piece is therefore kept in the index.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.clean import CleanRules, rejection, signature
from flatout.corpus.document import Document, Problem, ReadOptions, Slice
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import format_of
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype, tokenizer_from_json
from flatout.errors import DataError
from flatout.files import canonical_json

BEGINS, ENDS, REJECTED, DIVISIBLE = 1, 2, 4, 8
# A row per piece. `high` and `low` are the first sixteen bytes of the SHA-256 of its text.
PIECE = np.dtype(
    [("tokens", "<u8"), ("bytes", "<u8"), ("characters", "<u8"), ("high", "<u8"), ("low", "<u8"), ("flags", "u1")]
)
Pieces = npt.NDArray[np.void]
_BATCH_CHARACTERS = 2**20
_MOST_PROBLEMS = 10_000


@dataclass(frozen=True)
class Recipe:
    """All that decides the result of a part. No tokenizer means no tokens."""

    options: ReadOptions
    rules: CleanRules
    tokenizer: dict[str, Any] | None = None
    near: bool = False


@dataclass(frozen=True)
class CorpusPart:
    """A stretch of one source: slices for the worker to read, or documents of one file that were read already."""

    number: int
    source: int
    slices: tuple[Slice, ...] = ()
    documents: tuple[Document | Problem, ...] = ()
    file: str = ""
    # How much of the input this is, for the progress bar: bytes as they lie on disk, and files that end with it.
    bytes: int = 0
    files: int = 0


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
    # Rejected pieces of documents in several pieces, by position in `pieces`, and the rule.
    rejected: dict[int, str]
    # Whether a limit ends the source inside this part; what comes after it has been taken out.
    last: bool = False


@dataclass(frozen=True)
class PartResult:
    """The result of a part. Tokens and signatures are bytes, since they travel between processes and into files."""

    head: PartHead
    tokens: bytes
    pieces: Pieces
    signatures: bytes


def run_part(recipe: Recipe, part: CorpusPart) -> PartResult:
    """Read, clean and tokenize a part."""
    work = _Work(tokenizer_of(recipe), recipe.near)
    for file, item in judged(recipe, part):
        work.add(file, item)
    return work.result(part)


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a recipe for tokens."""
    assert recipe.tokenizer is not None, "a recipe for tokens names a tokenizer"
    return _tokenizer(canonical_json(recipe.tokenizer))


def characters_of_part(recipe: Recipe, part: CorpusPart) -> str:
    """The characters in the documents of a part that are kept, sorted."""
    found: set[str] = set()
    for _, item in judged(recipe, part):
        if isinstance(item, Document) and item.rejected is None:
            found.update(item.text)
    return "".join(sorted(found))


def judged(recipe: Recipe, part: CorpusPart) -> Iterator[tuple[str, Document | Problem]]:
    """The documents of a part, each marked with the first rule that drops it, and the problems met on the way.

    Each comes with the name of its file.
    """
    for file, item in _items(recipe, part):
        if isinstance(item, Document) and item.begins and item.text and item.rejected is None:
            reason = rejection(recipe.rules, item.text)
            yield file, item if reason is None else replace(item, text="", rejected=reason)
        else:
            yield file, item


def text_of(recipe: Recipe, part: CorpusPart, piece: np.void) -> str:
    """The text of a piece of a part, read again."""
    wanted = int(piece["high"]).to_bytes(8, "big") + int(piece["low"]).to_bytes(8, "big")
    for _, item in judged(recipe, part):
        if isinstance(item, Document):
            text = item.text[: int(piece["characters"])]  # of a document that a limit cut, as much as was taken
            if hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16] == wanted:
                return text
    raise DataError("the source changed while it was read", "prepare it again when nothing writes to it")


def _items(recipe: Recipe, part: CorpusPart) -> Iterator[tuple[str, Document | Problem]]:
    for item in part.documents:
        yield part.file, item
    for each in part.slices:
        for item in read_slice(each, recipe.options):
            yield each.file.name, item


@final
class _Work:
    """Collects the result of a part. Texts are tokenized in batches, since many are short."""

    def __init__(self, tokenizer: Tokenizer, near: bool) -> None:
        self._tokenizer = tokenizer
        self._near = near
        self._dtype = token_dtype(tokenizer.vocab)
        self._ending = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=self._dtype)
        self._waiting: list[tuple[str, Document]] = []
        self._waiting_characters = 0
        # Flat, because a part may hold a million molecules.
        self._tokens = bytearray()
        self._columns = array("Q")
        self._pieces = 0
        self._signatures = bytearray()
        self._records = self._replaced = 0
        self._dropped: Counter[str] = Counter()
        self._rejected: dict[int, str] = {}
        self._problems: list[Problem] = []
        self._unlisted, self._first_unlisted = 0, ""

    def add(self, file: str, item: Document | Problem) -> None:
        if isinstance(item, Problem):
            self._records += item.records
            self._problem(item)
            return
        self._records += item.begins
        self._replaced += item.replaced
        if item.begins and item.ends and (item.rejected is not None or not item.text):
            self._dropped[item.rejected or "empty"] += 1
            return
        self._waiting.append((file, item))
        self._waiting_characters += len(item.text)
        if self._waiting_characters >= _BATCH_CHARACTERS:
            self._encode()

    def result(self, part: CorpusPart) -> PartResult:
        self._encode()
        pieces = _as_pieces(self._columns)
        head = PartHead(
            source=part.source,
            bytes=part.bytes,
            files=part.files,
            tokens=len(self._tokens) // self._dtype.itemsize,
            documents=int(np.count_nonzero(pieces["flags"] & BEGINS)),
            records=self._records,
            replaced=self._replaced,
            dropped=dict(self._dropped),
            problems=tuple(self._problems),
            rejected=self._rejected,
        )
        return PartResult(head, bytes(self._tokens), pieces, bytes(self._signatures))

    def _problem(self, problem: Problem) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(problem)
            return
        # A file of another kind altogether may hold millions; the last entry then stands for the rest of its part.
        last, self._unlisted = self._problems[-1], self._unlisted + 1
        self._first_unlisted = self._first_unlisted or last.message
        message = f"{self._unlisted + 1:,} problems from here on, the first: {self._first_unlisted}"
        self._problems[-1] = replace(last, message=message, records=last.records + problem.records)

    def _encode(self) -> None:
        waiting, self._waiting, self._waiting_characters = self._waiting, [], 0
        try:
            encoded = self._tokenizer.encode_batch([document.text for _, document in waiting])
        except DataError:  # it refuses one of the texts; find out which
            encoded = None
        for number, (file, document) in enumerate(waiting):
            ids = self._encode_one(file, document) if encoded is None else encoded[number]
            if ids is not None:
                self._keep(document, ids)

    def _encode_one(self, file: str, document: Document) -> Ids | None:
        try:
            return self._tokenizer.encode(document.text)
        except DataError as error:
            whole = document.begins and document.ends
            self._problem(Problem(file, document.place, "tokenizer", error.message, records=int(whole)))
            if whole:
                return None
            self._rejected[self._pieces] = "tokenizer"
            return np.empty(0, self._dtype)

    def _keep(self, document: Document, ids: Ids) -> None:
        whole = document.begins and document.ends
        if document.ends and document.rejected is None:
            ids = np.concatenate([ids, self._ending])
        if whole and not len(ids):  # a tokenizer may normalise a text away
            self._dropped["empty"] += 1
            return
        if document.rejected is not None:
            self._rejected[self._pieces] = document.rejected
        raw = document.text.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(raw).digest()
        high, low = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
        flags = BEGINS * document.begins | ENDS * document.ends | REJECTED * (self._pieces in self._rejected)
        flags |= DIVISIBLE * document.divisible
        self._columns.extend((len(ids), len(raw), len(document.text), high, low, flags))
        self._pieces += 1
        self._tokens += ids.astype(self._dtype, copy=False).tobytes()
        if self._near and document.begins:
            self._signatures += signature(document.text)


def _as_pieces(columns: "array[int]") -> Pieces:
    names = PIECE.names or ()
    table = np.array(columns, dtype=np.uint64).reshape(-1, len(names))
    pieces = np.empty(len(table), dtype=PIECE)
    for number, name in enumerate(names):
        pieces[name] = table[:, number]
    return pieces


@lru_cache(maxsize=2)
def _tokenizer(description: bytes) -> Tokenizer:
    return tokenizer_from_json(json.loads(description))


def share_of(half: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Half of a hash as a share from 0 to 1."""
    return half.astype(np.float64) / 2.0**64


def copies_of(weight: float, low: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """How often documents are taken in an epoch, by the weight of their source; `low` are halves of their hashes."""
    return int(weight) + (share_of(low) < weight - int(weight)).astype(np.int64)


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
        self, result: PartResult, count: int, after: Count, recipe: Recipe, part: Callable[[], CorpusPart]
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
                divided = run_part(recipe, CorpusPart(0, head.source, documents=(whole,)))
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
        """The longest beginning of a text that fits. Without a tokenizer, each character counts as a token."""
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
        """Whether there is no room for another document."""
        return any(limit is not None and value >= limit for value, limit in zip(count, self.most, strict=True))

    def exceeded(self, count: Count) -> bool:
        """Whether this is more than may be taken."""
        return any(limit is not None and value > limit for value, limit in zip(count, self.most, strict=True))

    def check(self, count: Count, full: bool, source: str) -> None:
        """Refuses a source whose first document is larger than the limit, so that nothing would be taken."""
        if full and not count[0]:
            # A document is never too large for a limit on their number.
            exceeded = {
                f"data.{key}": most for key, most in zip(LIMITS[1:], self.most[1:], strict=True) if most is not None
            }
            limits = " and ".join(f"{name}={most}" for name, most in exceeded.items())
            smaller = ", or set a data.document_start that occurs more often" if format_of(source)[0] == "text" else ""
            raise DataError(
                f"the first document of {source} is larger than {limits}, and documents are taken whole",
                f"raise {' and '.join(exceeded)}{smaller}",
            )


def _joined(first: PartResult, second: PartResult) -> PartResult:
    head, more = first.head, second.head
    return PartResult(
        replace(
            head,
            tokens=head.tokens + more.tokens,
            documents=head.documents + more.documents,
            records=head.records + more.records,
            dropped=dict(Counter(head.dropped) + Counter(more.dropped)),
            problems=head.problems + more.problems,
            rejected={**head.rejected, **{len(first.pieces) + row: rule for row, rule in more.rejected.items()}},
        ),
        first.tokens + second.tokens,
        np.concatenate([first.pieces, second.pieces]),
        first.signatures + second.signatures,
    )


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
