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
    ReadOptions,
    Row,
    Slice,
    gpt2_tokens,
)
from flatout.corpus.rows import bad_byte, document_of, is_cut, json_rows, not_json, not_utf8, read_csv, read_csv_rows
from flatout.corpus.streams import LINE_LIMIT, PIECE, ByteStream, Watch, decode

Results = Iterator[Document | Problem]
Rows = Iterator[Row | Document | Problem]  # documents: those dropped for their bytes
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

    `watch` is told how far the reading has come in the file on disk.
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
    elif file.format in ("parquet", "saved"):
        from flatout.corpus import arrow

        yield from (arrow.read_parquet if file.format == "parquet" else arrow.read_saved)(slice, options)
    elif file.format == "hub":
        from flatout.corpus import arrow

        yield from arrow.HubStream(file.path, options, file.name)
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
            if file.format == "json":
                yield from _undropped(json_rows(stream, file, ReadOptions()))
                return
            yield from read_csv_rows(stream, file)
    else:
        raise ValueError(f"there are no rows in the format {file.format!r}")


def _undropped(rows: Rows) -> Iterator[Row | Problem]:
    """The same: where invalid bytes are told of, none is a document that is dropped for them."""
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
            yield _broken_line(slice.file, line, error)


def _read_stream(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    if file.format == "json":
        return _documents(json_rows(stream, file, options), file, options)
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

    A NUL byte or two in a text are characters of it; what comes of them is told of their own line.
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
    """The lines that are not blank, or what became of them otherwise."""
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
                is_cut = not line.ended and streams.whole_characters(raw) == error.start
                if is_cut and options.invalid_utf8 != "skip":
                    yield Problem(file.name, place, "truncated", "the file ends inside a character", records=1)
                else:
                    yield not_utf8(error, file, place, options)
                continue
            if text and not text.isspace():
                yield _Record(place, text, replaced, line.ended)
        if stream.problem is not None:
            yield replace(stream.problem, records=lost)


def _broken_line(file: InputFile, line: _Record, error: Exception) -> Problem:
    """A line that is no JSON; where it is the last one and fine as far as it goes, the file was cut."""
    if not line.ended and isinstance(error, json.JSONDecodeError) and is_cut(line.text, error):
        return Problem(file.name, line.place, "truncated", "the file ends inside the line", records=1)
    return Problem(file.name, line.place, "json", not_json(error), records=1)


# GPT-2 tokens.
def has_tokens(file: InputFile) -> bool:
    """Whether a file that is named like one of tokens begins with ids of GPT-2, rather than with letters or others."""
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
        message = f"its header tells of {tokens.expected:,} tokens, and it has {tokens.count:,}"
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
