"""Files to documents: one reader for each format, all of them lazy.

`read_slice` turns a stretch of a file into `Document`s and `Problem`s. Formats that are text from end to end and files
of GPT-2 tokens are read here; rows with fields are in `rows`, Arrow tables and hub datasets in `arrow`, WARC in
`crawl`.

Contract: every record becomes one document, or is counted in one problem; what is broken is left out and reading goes
on where that is possible. Joining the results of a file's slices gives the results of the file, except that places are
lines in a slice that starts at 0 and bytes in another. Memory is bounded by `LINE_LIMIT` a record and `PIECE` a piece
of text. Only a missing package raises.

Trap: a compressed text that breaks off is a document as far as it goes, with a problem. A line that breaks off is none.
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from flatout.corpus import streams
from flatout.corpus.document import (
    GPT2_END_OF_TEXT,
    REJECTED_UTF8,
    Document,
    InputFile,
    Problem,
    ProblemKind,
    ReadOptions,
    Results,
    Row,
    Rows,
    Slice,
    gpt2_tokens,
)
from flatout.corpus.rows import bad_byte, document_of, not_utf8, read_csv, read_csv_rows
from flatout.corpus.streams import CHUNK, LINE_LIMIT, PIECE, ByteStream, Watch, decode

REJECTED_BOMB = "bomb"
REJECTED_TOKENS = "token_range"
# A NUL byte in this much of a file shows that it is no text.
HEAD = 2**13
# The files of modded-nanogpt begin with 256 numbers of four bytes: these two, the number of tokens, and zeros.
_TOKENS_HEADER = 1024
_TOKENS_MAGIC = (20240520, 1)
_TEXT_FORMATS = frozenset({"text", "jsonl", "json", "csv", "tsv", "smiles"})


def read_slice(slice: Slice, options: ReadOptions, *, watch: Watch | None = None) -> Results:
    """The documents and problems of a stretch of a file.

    `watch` is called with the position of the reading in the file on disk.
    """
    file = slice.file
    if file.format in _TEXT_FORMATS and _is_binary(file):
        if slice.start == 0:
            yield _binary(file, records=1 if file.format == "text" else 0)
    elif file.format == "text":
        yield from _read_text(slice, options, watch)
    elif file.format == "jsonl":
        yield from _documents(_json_line_rows(slice, options, watch), file, options)
    elif file.format == "smiles":
        yield from _read_molecules(slice, options, watch)
    elif file.format in ("parquet", "hub"):
        from flatout.corpus import arrow

        is_hub = file.format == "hub"
        yield from arrow.HubStream(file.path, options, file.name) if is_hub else arrow.read_parquet(slice, options)
    else:
        with ByteStream(file, watch=watch) as stream:
            yield from _read_stream(stream, file, options)


def read_rows(file: InputFile, *, watch: Watch | None = None) -> Iterator[Row | Problem]:
    """The records of a JSON, JSON lines, CSV, TSV or parquet file with all their fields, in order."""
    if file.format in _TEXT_FORMATS and _is_binary(file):
        yield _binary(file, records=0)
    elif file.format == "jsonl":
        yield from _undropped(_json_line_rows(Slice(file), ReadOptions(), watch))
    elif file.format == "parquet":
        from flatout.corpus import arrow

        yield from arrow.read_parquet_rows(file)
    elif file.format in ("json", "csv", "tsv"):
        with ByteStream(file, watch=watch) as stream:
            is_json = file.format == "json"
            yield from _undropped(_json_rows(stream, file, ReadOptions())) if is_json else read_csv_rows(stream, file)
    else:
        raise ValueError(f"there are no rows in the format {file.format!r}")


def _undropped(rows: Rows) -> Iterator[Row | Problem]:
    """Without dropped documents, of which there are none under the policy `strict`."""
    return (row for row in rows if not isinstance(row, Document))


def _documents(rows: Rows, file: InputFile, options: ReadOptions) -> Results:
    return (document_of(row, file, options) if isinstance(row, Row) else row for row in rows)


def _json_line_rows(slice: Slice, options: ReadOptions, watch: Watch | None) -> Rows:
    for line in _records(slice, options, watch):
        if not isinstance(line, _Record):
            yield line
            continue
        try:
            yield Row(json.loads(line.text), line.place, line.replaced)
        except (ValueError, RecursionError) as error:
            if not line.ended and _ends_early(line.text, error):
                yield Problem(slice.file.name, line.place, "truncated", "the file ends inside the line", records=1)
            else:
                yield Problem(slice.file.name, line.place, "json", _not_json(error), records=1)


def _read_stream(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    if file.format == "json":
        return _documents(_json_rows(stream, file, options), file, options)
    if file.format == "tokens":
        return _read_tokens(stream, file, options)
    if file.format == "warc":
        from flatout.corpus import crawl

        return crawl.read_warc(stream, file, options)
    if file.format in ("csv", "tsv"):
        return read_csv(stream, file, options)
    raise ValueError(f"there is no reader for the format {file.format!r}")


def _binary(file: InputFile, records: int) -> Problem:
    message = "it is binary, or text that is not in UTF-8: its first bytes hold NUL"
    return Problem(file.name, "", "binary", message, records)


def _is_binary(file: InputFile) -> bool:
    """Whether a file is no text: its beginning is full of NUL bytes, or holds some and is not UTF-8 either.

    A NUL byte or two in a text are characters of it; a problem of their own line names them.
    """
    with ByteStream(file) as stream:
        head = stream.read(HEAD)
    if b"\0" not in head:
        return False
    try:
        head[: streams.whole_characters(head)].decode("utf-8")
    except UnicodeDecodeError:
        return True
    return head.count(0) > len(head) // 10


# Text.


def _read_text(slice: Slice, options: ReadOptions, watch: Watch | None) -> Results:
    file = slice.file
    mark = options.document_start.encode("utf-8") if options.document_start else None
    with ByteStream(file, streams.before(slice.start), watch) as stream:
        lost = 0
        for piece in streams.pieces(stream, start=slice.start, end=slice.end, mark=mark, size=PIECE):
            whole_file = piece.begins and piece.final and piece.offset == 0
            place = "" if whole_file else f"byte {piece.offset}"
            broken = stream.problem if piece.final else None
            if broken is not None and piece.begins and not piece.raw:
                lost = 1
            elif broken is not None and broken.kind == "bomb":
                yield Document("", place, piece.begins, True, rejected=REJECTED_BOMB)
            else:
                if broken is not None:
                    del piece.raw[streams.whole_characters(piece.raw) :]
                signature = piece.offset == 0 and piece.raw.startswith(codecs.BOM_UTF8)
                first = len(codecs.BOM_UTF8) if signature else 0
                del piece.raw[:first]
                at = piece.offset + first
                yield from _decoded(piece, file, options, place, "byte {}", at, divisible=mark is None)
        if stream.problem is not None:
            yield replace(stream.problem, records=lost)


def _decoded(
    piece: streams.TextPiece,
    file: InputFile,
    options: ReadOptions,
    place: str,
    place_of_byte: str,
    first: int,
    *,
    divisible: bool = False,
) -> Results:
    """The document of a piece; `place_of_byte` has a gap for a byte's number, which for the first is `first`."""
    whole = piece.begins and piece.ends
    try:
        text, replaced = decode(piece.raw, options.invalid_utf8)
    except UnicodeDecodeError as error:
        if options.invalid_utf8 == "skip" or not whole:
            yield Document("", place, piece.begins, piece.ends, rejected=REJECTED_UTF8)
        if options.invalid_utf8 == "strict":
            place = place_of_byte.format(first + error.start)
            yield Problem(file.name, place, "not-utf8", bad_byte(error), records=1 if whole else 0)
    else:
        yield Document(text, place, piece.begins, piece.ends, replaced, divisible=divisible)


# Records on lines.


def _read_molecules(slice: Slice, options: ReadOptions, watch: Watch | None) -> Results:
    for line in _records(slice, options, watch):
        if not isinstance(line, _Record):
            yield line
            continue
        molecule = line.text.split(None, 1)[0]
        if line.place != "line 1" or molecule.lower() != "smiles":
            yield Document(molecule, line.place, replaced=line.replaced)


class _Record(NamedTuple):
    """A line that is not blank. `ended`: there was a line end after it."""

    place: str
    text: str
    replaced: int
    ended: bool


def _records(slice: Slice, options: ReadOptions, watch: Watch | None) -> Iterator[_Record | Document | Problem]:
    """The lines that are not blank, as records, dropped documents or problems."""
    file = slice.file
    lost = 0
    with ByteStream(file, streams.before(slice.start), watch) as stream:
        for line in streams.lines(stream, LINE_LIMIT, start=slice.start, end=slice.end, ending=streams.line_end(file)):
            raw = line.raw
            if not line.ended and stream.problem is not None:
                lost = 0 if raw is not None and (not raw or raw.isspace()) else 1
                break
            place = f"byte {line.offset}" if slice.start else f"line {line.number}"
            if raw is None:
                message = f"the line has {line.length:,} bytes; the limit is {LINE_LIMIT:,}"
                yield Problem(file.name, place, "too-long", message, records=1)
                continue
            try:
                text, replaced = decode(raw, options.invalid_utf8)
            except UnicodeDecodeError as error:
                _is_cut = not line.ended and streams.whole_characters(raw) == error.start
                if _is_cut and options.invalid_utf8 != "skip":
                    yield Problem(file.name, place, "truncated", "the file ends inside a character", records=1)
                else:
                    yield not_utf8(error, file, place, options)
                continue
            if text and not text.isspace():
                yield _Record(place, text, replaced, line.ended)
        if stream.problem is not None:
            yield replace(stream.problem, records=lost)


# GPT-2 tokens.
def has_tokens(file: InputFile) -> bool:
    """Whether a file that is named like one of tokens begins with ids of GPT-2, and not with letters or other data."""
    with ByteStream(file) as stream:
        head = stream.read(HEAD)
    if np.frombuffer(head[:8], "<i4", len(head[:8]) // 4).tolist() == list(_TOKENS_MAGIC):
        return True
    ids = np.frombuffer(head, "<u2", len(head) // 2)
    letters = len(head) > 1 and all(byte >= ord(" ") or byte in b"\t\n\r" for byte in head)
    return not letters and int(np.count_nonzero(ids > GPT2_END_OF_TEXT)) * 100 <= len(ids)


def _read_tokens(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    """Ids of two bytes each. A document ends with an end-of-text id, or at the end of the file."""
    tokens = _TokenRuns(stream)
    for run in tokens:
        if run.number == 0 and run.ends and not run.ids.size:
            continue  # some files have an end-of-text id before each document instead of after it
        yield from _token_document(run, tokens, stream, file, options)
    if stream.problem is not None:
        yield stream.problem
        return
    place = f"token {tokens.count}"
    if tokens.odd:
        yield Problem(file.name, place, "truncated", "read as GPT-2 tokens of two bytes, it ends inside one", records=0)
    if tokens.expected is not None and tokens.expected != tokens.count:
        message = f"its header says {tokens.expected:,} tokens, and it has {tokens.count:,}"
        yield Problem(file.name, place, "truncated" if tokens.count < tokens.expected else "format", message, records=0)


def _token_document(
    run: "_Run", runs: "_TokenRuns", stream: ByteStream, file: InputFile, options: ReadOptions
) -> Results:
    place = f"token {run.number}"
    table = gpt2_tokens()
    ended = False
    wrong: tuple[int, int] | None = None

    def chunks() -> Iterator[bytes]:
        nonlocal ended, wrong
        for part in itertools.chain([run], runs):
            outside = np.flatnonzero(part.ids >= len(table))
            if wrong is None and outside.size:
                wrong = part.number + int(outside[0]), int(part.ids[outside[0]])
            if wrong is None:
                yield b"".join([table[number] for number in part.ids.tolist()])
            ended = part.ends
            if ended:
                return

    for piece in streams.pieces(chunks(), size=PIECE):
        if wrong is not None and piece.final:
            if not piece.begins:
                yield Document("", place, False, True, rejected=REJECTED_TOKENS)
            message = (
                f"read as GPT-2 tokens of two bytes, of which {wrong[1]} is none: they are below {GPT2_END_OF_TEXT + 1}"
            )
            yield Problem(file.name, f"token {wrong[0]}", "format", message, records=1 if piece.begins else 0)
            continue
        if piece.final and not ended and stream.problem is not None:
            del piece.raw[streams.whole_characters(piece.raw) :]
        yield from _decoded(piece, file, options, place, f"{place}, byte {{}} of its text", piece.offset)


class _Run(NamedTuple):
    """A stretch of a document's ids, and the number of the first in the file. `ends`: an end-of-text id follows."""

    number: int
    ids: npt.NDArray[np.uint16]
    ends: bool


@final
class _TokenRuns:
    """An iterator over the runs of a file, which counts tokens as it goes."""

    def __init__(self, stream: ByteStream) -> None:
        head = stream.read(_TOKENS_HEADER)
        numbers = np.frombuffer(head, "<i4") if len(head) == _TOKENS_HEADER else np.zeros(3, "<i4")
        has_header = tuple(numbers[:2].tolist()) == _TOKENS_MAGIC
        self.expected = int(numbers[2]) if has_header else None
        self.count = 0
        self.odd = b""
        self._runs = self._read(stream if has_header else itertools.chain([head], stream))

    def __iter__(self) -> Iterator[_Run]:
        return self._runs

    def _read(self, chunks: Iterable[bytes]) -> Iterator[_Run]:
        for chunk in chunks:
            data = self.odd + chunk
            ids = np.frombuffer(data, "<u2", len(data) // 2)
            self.odd = data[2 * len(ids) :]
            first, start = self.count, 0
            self.count += len(ids)
            for end in np.flatnonzero(ids == GPT2_END_OF_TEXT).tolist():
                yield _Run(first + start, ids[start:end], True)
                start = end + 1
            if start < len(ids):
                yield _Run(first + start, ids[start:], False)


# JSON.


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_ESCAPE = 16  # more characters than a word of JSON, or a character that is written as two escapes


def _json_rows(stream: ByteStream, file: InputFile, options: ReadOptions) -> Rows:
    """The elements of an array, or values that follow one another; there may be just one."""
    for item in _JsonText(stream, file.name).values():
        if isinstance(item, Problem):
            yield item
            return
        place, value, replaced = f"element {item.number}", item.value, 0
        if not item.raw.isascii():
            try:
                text, replaced = decode(item.raw.encode("utf-8", "surrogateescape"), options.invalid_utf8)
            except UnicodeDecodeError as error:
                yield not_utf8(error, file, place, options)
                continue
            value = json.loads(text) if replaced else value
        yield Row(value, place, replaced)
    if stream.problem is not None:  # after the last value
        yield stream.problem


def _ends_early(text: str, error: Exception) -> bool:
    """Whether a line is right up to its end, and only too short."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    text = text.rstrip()
    if error.msg.startswith("Unterminated string") or error.pos >= len(text):
        return True
    # A word, a number or an escape was cut: the error is where it begins, and nothing closes after it.
    return error.pos >= len(text) - _ESCAPE and text[-1:] not in "}]"


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"it cannot be read: {error}"


class _Value(NamedTuple):
    """A value, its number among those of the file, and how it is written."""

    number: int
    value: object
    raw: str


@final
class _JsonText:
    """JSON values from a text that is read as it is needed. Bytes that are not UTF-8 come as halves of surrogates.

    A value that is not complete yet looks like a broken one, so it is tried again with twice as much text, up to the
    limit. Since the text doubles, the time is linear in the size of the value.
    """

    def __init__(self, stream: ByteStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._offset = 0  # of the text's first byte
        self._ended = False
        self._number = 0  # of the value

    def values(self) -> Iterator[_Value | Problem]:
        """Every value in order, up to the first damage, which is a problem."""
        self._grow()
        self._at = 1 if self._text.startswith("\ufeff") else 0
        in_array = self._peek() == "["
        self._at += in_array
        while (following := self._peek()) and not (in_array and following == "]"):
            self._number += 1
            value = self._value()
            yield value
            if isinstance(value, Problem):
                return
            if in_array and (following := self._peek()) not in (",", "]", ""):
                yield self._damage("there is no comma after the element")
                return
            self._at += in_array and following == ","
        if in_array and not following:
            yield self._damage("the array has no closing bracket", kind="truncated")
        elif in_array:
            self._at += 1
            if self._peek():
                yield self._damage("there is something after the closing bracket")

    def _value(self) -> _Value | Problem:
        """The next value, or what is wrong with it."""
        while True:
            value, end = None, len(self._text)
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # A text that just ends too early fails near its end.
                near = error.pos >= len(self._text) - _ESCAPE or error.msg.startswith("Unterminated string")
                if not near:
                    return self._damage(f"it is not JSON: {error.msg.removesuffix(' at')}", 1, error.pos)
                if self._ended:
                    return self._damage("the file ends inside the element", 1, error.pos, "truncated")
            except (ValueError, RecursionError) as error:
                return self._damage(_not_json(error), 1)
            if end - self._at > LINE_LIMIT:
                return self._damage(f"the element has more than {LINE_LIMIT:,} characters", 1, kind="too-long")
            # A number that ends where the text does may go on.
            if end < len(self._text) or self._ended:
                raw, self._at = self._text[self._at : end], end
                return _Value(self._number, value, raw)
            self._grow()

    def _peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._grow()

    def _grow(self) -> None:
        self._offset = self._offset_of(self._at)
        self._text, self._at = self._text[self._at :], 0
        raw = self._stream.read(max(CHUNK, len(self._text)))
        self._ended = not raw
        self._text += self._bytes.decode(raw, final=self._ended)

    def _offset_of(self, at: int) -> int:
        return self._offset + len(self._text[:at].encode("utf-8", "surrogateescape"))

    def _damage(self, message: str, records: int = 0, at: int | None = None, kind: ProblemKind = "json") -> Problem:
        """The problem that ends the reading; where the stream itself breaks off, that is the reason."""
        place = self._offset_of(self._at if at is None else at)
        # The decoder may hold the beginning of a character.
        rest = self._offset_of(len(self._text)) - place + len(self._bytes.getstate()[0]) + sum(map(len, self._stream))
        if self._stream.problem is not None:
            return replace(self._stream.problem, records=records)
        if rest:
            message = f"{message}; from here on {rest:,} bytes are not read"
        return Problem(self._name, f"element {self._number}, byte {place}", kind, message, records)
