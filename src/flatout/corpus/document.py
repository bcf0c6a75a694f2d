"""What readers hand on: documents, and the problems of whatever could not become one.

Idea: a reader turns each record of its input (a line, a row, a crawl record, a whole text file) into exactly one of
two things, so that the counts of a report add up to the input: a `Document`, possibly empty or rejected, or a
`Problem` that says how many records it cost.

Contract: a large text comes as several documents in a row, its pieces: the first `begins`, the last `ends`, and none
but the last piece's text ends where a tokenizer would not cut anyway (see `flatout.corpus.streams`). If any piece of a
document is rejected, the whole document is.

The files that ship with Flatout, checked before they are used.
"""

import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Literal

from flatout.errors import DataError

# One place for the words that a report and the tests share.
ProblemKind = Literal[
    "binary",  # a text file that holds NUL bytes
    "bomb",  # a compressed file that grows more than a thousandfold
    "checksum",  # decompressed, but the stored checksum differs
    "compression",  # not what its suffix says, or garbage in the middle
    "csv",  # a row whose columns cannot be found, or that has other columns
    "empty",  # a file without a byte
    "field",  # a record without the text field, or with something else in it
    "format",  # not of the format its name promises
    "json",
    "link",  # a link that leads out of the source folder
    "not-utf8",
    "record",  # a crawl record that is damaged
    "role",  # a message whose role is not known
    "surrogate",  # JSON that escapes half of a surrogate pair
    "template",  # a conversation that the chat template refuses
    "too-long",  # a record above the limit
    "tokenizer",  # a text that the tokenizer refuses
    "truncated",
    "turns",  # a conversation with nothing to learn, or in an order that makes none
    "unreadable",  # the system says no
]
InvalidUtf8 = Literal["strict", "replace", "skip"]
REJECTED_UTF8 = "invalid_utf8"
# How to get the packages that readers and rules need.
INSTALL = "run `make data` in the repository, or install the extra flatout[data] with this Python's pip"


@dataclass(frozen=True)
class Document:
    """One text and where in its file it stands: `line 12`, `row 3`, `byte 1048576`, or nothing for a whole file.

    `replaced` counts the U+FFFD that stand for invalid bytes. `rejected` names the rule that drops the document.
    `divisible`: it is a stretch of plain text without documents of its own, which a limit may cut at any character.
    """

    text: str
    place: str = ""
    begins: bool = True
    ends: bool = True
    replaced: int = 0
    rejected: str | None = None
    divisible: bool = False


@dataclass(frozen=True)
class Row:
    """One record with all its fields. `replaced` counts the U+FFFD that stand for invalid bytes in its texts."""

    value: object
    place: str
    replaced: int = 0


@dataclass(frozen=True)
class Problem:
    """Something in the input that could not be used; `records` is how many records are known to be lost with it."""

    file: str
    place: str
    kind: ProblemKind
    message: str
    records: int
    instead: str = ""  # the field that seems to hold the text, where it is not in the one that was asked for

    @property
    def text(self) -> str:
        """Where it is, and what is wrong."""
        place = f", {self.place}" if self.place else ""
        return f"{self.file}{place}: {self.message}"


Results = Iterator[Document | Problem]
Rows = Iterator[Row | Document | Problem]  # documents: those dropped for their bytes


@dataclass(frozen=True)
class ReadOptions:
    """What readers need to know beside the file; the words are those of the config's `data` section."""

    fields: tuple[str, ...] = ("text",)
    document_start: str | None = None
    invalid_utf8: InvalidUtf8 = "strict"


@dataclass(frozen=True)
class InputFile:
    """A file to read: `path` is what is opened, `name` is fit for a message, `source` is the number of its source."""

    path: str
    name: str
    format: str
    compression: str
    bytes: int
    source: int = 0


@dataclass(frozen=True)
class Slice:
    """A stretch of one file that can be read by itself, from `start` up to `end` (None: to the end).

    The unit depends on the format: bytes of a text, JSON lines or SMILES file, or row groups of parquet;
    other formats have one slice, the whole file. Concatenating the documents of a file's slices
    gives the documents of the file, whatever the cuts. A row group of parquet that is too large for one slice has
    several with the same `start` and `end`, of which each reads its `share` of the rows, one of `shares`.
    """

    file: InputFile
    start: int = 0
    end: int | None = None
    share: int = 0
    shares: int = 1


def needed(module: str, who_needs: str) -> Any:
    """A module of a package that need not be installed; `who_needs` begins the error where it is not."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{who_needs} the package {module.partition('.')[0]}", INSTALL) from error


def reason(error: Exception) -> str:
    """The message of a library's error, in one line."""
    words = " ".join(str(error).split())
    return shown(words or type(error).__name__)[:200]


def shown(name: object) -> str:
    """A name for a message: control characters and undecodable bytes, which could upset a terminal, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(name))


SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_END_OF_TEXT = 50256  # the last id of GPT-2


def shakespeare() -> Path:
    """The path of Tiny Shakespeare."""
    return _checked("tiny_shakespeare.txt", SHAKESPEARE_SHA256)[0]


@cache
def gpt2_tokens() -> tuple[bytes, ...]:
    """The bytes of each token of GPT-2 but the end of text, in the order of their ids."""
    _, raw = _checked("gpt2.tiktoken", GPT2_RANKS_SHA256)
    pairs = [line.split() for line in raw.splitlines()]
    return tuple(binascii.a2b_base64(token) for token, _ in sorted(pairs, key=lambda pair: int(pair[1])))


def _checked(name: str, wanted: str) -> tuple[Path, bytes]:
    path = Path(str(resources.files("flatout.data"))) / "bundled" / name
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != wanted:
        raise DataError(
            f"the shipped file {name} is damaged: its SHA-256 is {found} and should be {wanted}",
            "install flatout again",
        )
    return path, raw
