"""Files to documents: one reader for each format, all of them lazy.

Idea: `read_slice` turns a stretch of a file into `Document`s and `Problem`s. What tables and crawls are made of is for
`tables` and `crawl` to know; here are the formats that are text from end to end, and files of GPT-2 tokens.

Contract: every record becomes one document, or is counted in one problem; what is broken is left out and the reading
goes on where that is possible. Joining the results of a file's slices gives the results of the file, except that places
are lines in a slice that starts at 0 and bytes in another. Memory is bounded by `LINE_LIMIT` a record and `PIECE` a
piece of text. Only what is no fault of the data raises: a package that is missing.

Trap: a compressed text that breaks off still is a document, as far as it goes; the problem says that it does. A line
that breaks off is not: half a row of JSON is none.
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
    Row,
    Slice,
    gpt2_tokens,
)
from flatout.corpus.fields import bad_byte, document_of, not_utf8
from flatout.corpus.streams import CHUNK, LINE_LIMIT, PIECE, ByteStream, Watch, decode

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

_SPACES = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_BLANK = re.compile(r"\s*\Z")
_KEY = re.compile(r'\{[ \t\n\r]*("(?:[^"\\]++|\\.)*+")', re.DOTALL)
# A text with its quotes is one token; a quote by itself is one that is never closed.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)
# What looks like a text and is the end of an object, whose last text has lost a quote, with the beginning of the next.
_HIDDEN = re.compile(r'\}[ \t\n\r]*,[ \t\n\r]*\{[ \t\n\r]*"$')
_MEMBER = re.compile(r'[ \t\n\r]*"(?:[^"\\]++|\\.)*+"[ \t\n\r]*:', re.DOTALL)
_OUTSIDE = re.compile(r'["\[\]{},]')
_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
# How far to look for the end of a broken element at once, and how much of that to look at again with what follows.
_LOOK = 2**18
_OVERLAP = 2**10
# How much of an element to try first, how far commas are followed at least, and how much passed text to carry along.
_TRY = 2**10
_REACH = 2**12
_PASSED = 2**14
_DECODER = json.JSONDecoder()
# More characters than the longest word of JSON, or than a character that is written as two escapes.
_ESCAPE = 16
_WORDS = ("true", "false", "null")
# What is left of a number, or of a character that is written as an escape, that was cut.
_CUT = re.compile(r"-|\.|[eE][+-]?|\\?u[0-9a-fA-F]{0,4}")


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
        from flatout.corpus import tables

        yield from tables.HubStream(file.path, options, file.name)
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
                yield from _undropped(_json_rows(stream, file, ReadOptions()))
                return
            from flatout.corpus import tables

            yield from tables.read_csv_rows(stream, file)
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


def _json_rows(stream: ByteStream, file: InputFile, options: ReadOptions) -> Rows:
    """The elements of an array, or else values that follow one another, of which there may be just one."""
    for item in _json_values(stream, file):
        if isinstance(item, Problem):
            yield item
            continue
        place, value, replaced = f"element {item.number}", item.value, 0
        if not item.raw.isascii():
            try:
                text, replaced = decode(item.raw.encode("utf-8", "surrogateescape"), options.invalid_utf8)
            except UnicodeDecodeError as error:
                yield not_utf8(error, file, place, options)
                continue
            value = json.loads(text) if replaced else value
        yield Row(value, place, replaced)


def _read_stream(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    if file.format == "json":
        return _documents(_json_rows(stream, file, options), file, options)
    if file.format == "tokens":
        return _read_tokens(stream, file, options)
    if file.format == "warc":
        from flatout.corpus import crawl

        return crawl.read_warc(stream, file, options)
    if file.format in ("csv", "tsv"):
        from flatout.corpus import tables

        return tables.read_csv(stream, file, options)
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
    if not line.ended and isinstance(error, json.JSONDecodeError) and _is_cut(line.text, error):
        return Problem(file.name, line.place, "truncated", "the file ends inside the line", records=1)
    return Problem(file.name, line.place, "json", _not_json(error), records=1)


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether a text is fine as far as it goes: nothing, or a part of a word, stands where it is found wrong."""
    if error.msg.startswith("Extra data"):
        return False
    rest = text[error.pos : error.pos + _ESCAPE].rstrip()
    if error.msg.startswith("Unterminated string"):
        return True
    return _BLANK.match(text, error.pos + len(rest)) is not None and (
        any(word.startswith(rest) for word in _WORDS) or _CUT.fullmatch(rest) is not None
    )


def _is_final(text: str, error: json.JSONDecodeError) -> bool:
    """Whether more text could not mend an error: a text that just ends too early fails near its end."""
    return error.pos < len(text) - _ESCAPE and not error.msg.startswith("Unterminated string")


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"it cannot be read: {error}"


# JSON.


def _json_values(stream: ByteStream, file: InputFile) -> "Iterator[_Value | Problem]":
    held: Problem | None = None
    for item in _JsonText(stream, file.name).values():
        if held is not None:
            yield held
        held = item if isinstance(item, Problem) else None
        if held is None:
            yield item
    # Where the file itself breaks off, that is the reason for whatever is wrong with its end.
    if stream.problem is not None:
        yield replace(stream.problem, records=0 if held is None else held.records)
    elif held is not None:
        yield held


class _Value(NamedTuple):
    """A value, its number among those of the file, and how it is written."""

    number: int
    value: object
    raw: str


class _Step(NamedTuple):
    """A place in a text to go on from, and how many elements are passed; `found`: a sound one follows, or the end."""

    at: int
    passed: int
    found: bool = False


@final
class _JsonText:
    """JSON values from a text that is read as it is needed. Bytes that are not UTF-8 come as halves of surrogates.

    A value that is not complete yet looks like a broken one, so it is tried again with twice as much text, up to the
    limit. Since the text doubles, the time is linear in the size of the value.

    After a broken element the reading goes on with the next sound one, and those in between are counted. Where its
    brackets and quotes match, the commas between elements tell where it ends. Where they do not, the next object that
    begins like the elements before does: a quote inside of a text is escaped, so no text looks like an object.
    """

    def __init__(self, stream: ByteStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._offset = 0  # of the text's first byte
        self._ended = False
        self._number = 0
        self._in_array = False
        self._like: type = dict  # what elements are
        self._key = ""  # the first name in the last object, as it is written
        self._reach = _LOOK  # how far commas are followed
        self._unsound: set[int] = set()  # where no element begins, among the places that one step looks at

    def values(self) -> Iterator[_Value | Problem]:
        """Every value, and a problem for each stretch of text that holds none."""
        self._grow()
        self._at = 1 if self._text.startswith("\ufeff") else 0
        self._in_array = self._peek() == "["
        yield from self._array() if self._in_array else self._sequence()

    def _sequence(self) -> Iterator[_Value | Problem]:
        while self._peek():
            item = self._value()
            yield item if isinstance(item, _Value) else self._past(item)

    def _array(self) -> Iterator[_Value | Problem]:
        self._at += 1
        expected = "first"
        item: _Value | Problem | None = None
        told = False  # that something follows the closing bracket
        while True:
            following = self._peek()
            if expected == "after":
                if not following:
                    return
                if not told:
                    yield self._broken("there is something after the closing bracket")
                    told = True
                self._at += following in ",[]"
                expected = "after" if following == "]" else "first"
            elif not following:
                if not isinstance(item, Problem):
                    yield self._broken("the array has no closing bracket", kind="truncated")
                return
            elif following == "]":
                if expected == "element":
                    yield self._broken("there is a comma before the closing bracket")
                self._at += 1
                expected = "after"
            elif expected != "separator":
                item = self._element()
                item = item if isinstance(item, _Value) else self._past(item)
                yield item
                expected = "separator"
            elif following == ",":
                self._at += 1
                item, expected = None, "element"
            else:
                if isinstance(item, _Value):
                    item = self._without_comma(item)
                    yield item
                expected = "separator" if self._peek() in (",", "") else "element"

    def _element(self) -> _Value | Problem:
        """The next value of an array, unless it is the first name in an object that has lost its bracket."""
        like = self._like
        item = self._value()
        if isinstance(item, Problem) or self._peek() != ":":
            return item
        self._like = like
        return self._broken("there is a name without an object around it", 1)

    def _without_comma(self, item: _Value) -> Problem:
        """An element that is not followed by a comma, but by another element, or by something else."""
        problem = self._broken("there is no comma after the element")
        if self._text[self._at] in '{["':
            return problem
        # After a text, the quote that ends it is likely that of another one, which begins here.
        lost = self._next_element()
        return replace(problem, records=max(lost - (not isinstance(item.value, str)), 0))

    def _past(self, problem: Problem) -> Problem:
        """The problem of a broken element, with the number of elements up to the next that is sound."""
        if problem.kind == "truncated":
            self._at = len(self._text)
            return problem
        if problem.kind == "too-long":
            self._skip()
            return problem
        lost = self._next_element()
        self._number += lost - 1
        return replace(problem, records=lost)

    def _value(self) -> _Value | Problem:
        self._number += 1
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended and _is_cut(self._text, error):
                    return self._broken("the file ends inside the element", 1, error.pos, "truncated")
                if self._ended or _is_final(self._text, error):
                    return self._broken(f"it is not JSON: {error.msg.removesuffix(' at')}", 1, error.pos)
                end = len(self._text)
                value = None
            except (ValueError, RecursionError) as error:
                return self._broken(_not_json(error), 1)
            if end - self._at > LINE_LIMIT:
                return self._broken(f"the element has more than {LINE_LIMIT:,} characters", 1, kind="too-long")
            # A number that ends where the text does may go on.
            if end < len(self._text) or self._ended:
                raw = self._text[self._at : end]
                self._at = end
                self._like, self._key = type(value), _first_key(raw) if isinstance(value, dict) else self._key
                return _Value(self._number, value, raw)
            self._grow()

    def _next_element(self) -> int:
        """Goes on from a broken element to the comma or bracket after it, or to the next one, or to the end of the
        text; returns how many elements were passed over."""
        lost = 0
        while True:
            while len(self._text) - self._at < _LOOK and not self._ended:
                self._grow()
            # Places and errors are counted from the beginning of the text, which must not be far away then.
            if self._at > max(_PASSED, len(self._text) // 64):
                self._cut()
            end = min(self._at + _LOOK, len(self._text))
            step = self._step(end)
            if step.found:
                self._at = step.at
                return lost + step.passed
            if self._reach < _LOOK:
                self._reach = _LOOK
            elif step.passed:
                lost += step.passed
                self._at = step.at
            elif end < len(self._text) or not self._ended:
                self._at = end - _OVERLAP
            else:
                rest = self._after(self._at)
                self._at = len(self._text)
                return max(lost + bool(rest), 1)

    def _step(self, end: int) -> "_Step":
        """What the first way that finds a sound element comes to, or else the first that passes any."""
        self._unsound.clear()
        first = self._by_commas(min(end, self._at + self._reach)) if self._in_array else _Step(self._at, 0)
        if first.found:
            self._reach = _LOOK
            return first
        ways = (self._by_key, self._by_any_comma if self._in_array else self._by_lines)
        for way in ways:
            step = way(end)
            if step.found:
                # Following commas was in vain; where that happens to many elements, it must not take long.
                self._reach = max(self._reach // 2, _REACH)
                return step
            first = first if first.passed else step
        return first

    def _by_commas(self, end: int) -> "_Step":
        """The first comma or bracket outside of all brackets and quotes that a sound element, or the end, follows.

        It ends where a quote or a bracket is missing: then what looks like the inside may be the outside.
        """
        passed, last = 0, self._at
        around: list[str] = []
        before = ""
        for match in _TOKEN.finditer(self._text, self._at, end):
            token = match[0]
            if token == '"' or _HIDDEN.search(token) or (token, before, around[-1:]) == ("{", ",", ["{"]):
                break
            before = token
            if token in ("{", "["):
                around.append(token)
            elif around and token in ("}", "]"):
                around.pop()
            elif not around and token == ",":
                # Without its first bracket, an object has commas here that are none between elements.
                if _MEMBER.match(self._text, match.end()) is None:
                    passed, last = passed + 1, match.end()
                if self._is_sound(match.end()):
                    return _Step(match.start(), max(passed, 1), True)
            elif not around and token == "]" and self._ended and not self._after(match.end()):
                return _Step(match.start(), passed + 1, True)
        return _Step(last, passed)

    def _by_any_comma(self, end: int) -> "_Step":
        """The first comma that a sound element follows, wherever quotes and brackets are."""
        if self._like is dict:
            return _Step(self._at, 0)
        commas = re.compile(",").finditer(self._text, self._at, end)
        found = next((match.start() for match in commas if self._is_sound(match.end())), None)
        return _Step(self._at, 0) if found is None else _Step(found, 1, True)

    def _by_key(self, end: int) -> "_Step":
        """The first sound object that begins with the name that others begin with, and how many began so before it."""
        key = self._key or _first_key(self._text[self._at : end]) if self._like is dict else ""
        matches = re.compile(r"\{[ \t\r\n]*" + re.escape(key)).finditer(self._text, self._at + 1, end) if key else ()
        return self._first_sound(match.start() for match in matches if self._may_begin(match.start()))

    def _may_begin(self, at: int) -> bool:
        """Whether an object may begin here, by what stands before it: a comma, another object, or a line end."""
        place = at
        while place > self._at and self._text[place - 1] in _SPACES:
            place -= 1
        return self._text[at - 1] == "\n" or (place > self._at and self._text[place - 1] in ",}")

    def _by_lines(self, end: int) -> "_Step":
        """The first line that begins with a sound value, among values that follow one another."""
        lines = re.compile("\n(?=[^ \t\r\n])").finditer(self._text, self._at, end)
        return self._first_sound(match.end() for match in lines)

    def _first_sound(self, places: Iterable[int]) -> "_Step":
        passed, last = 0, self._at
        for place in places:
            if self._is_sound(place):
                return _Step(place, passed + 1, True)
            passed, last = passed + 1, place
        return _Step(last, passed)

    def _is_sound(self, at: int) -> bool:
        """Whether an object or a value like those before begins here; one that is not read in full yet may be."""
        at = self._past_space(at)
        if at in self._unsound:
            return False
        self._unsound.add(at)
        try:
            value, end = self._decoded(at)
        except json.JSONDecodeError as error:
            return not self._ended and not _is_final(error.doc, error)
        except (ValueError, RecursionError):
            return False
        if type(value) not in (dict, self._like) or value == {}:
            return False
        following = self._after(end)
        return not self._in_array or following in (",", "]") or (not following and not self._ended)

    def _decoded(self, at: int) -> tuple[object, int]:
        """The value that begins here and its end, from as little of the text as will do, since most tries fail soon."""
        size = _TRY
        while True:
            part = self._text[at : at + size]
            whole = at + size >= len(self._text)
            try:
                value, end = _DECODER.raw_decode(part)
            except json.JSONDecodeError as error:
                if whole or _is_final(part, error):
                    raise
            else:
                if whole or end < len(part):
                    return value, at + end
            size *= 8

    def _after(self, at: int) -> str:
        """The next character from here on that is no space, if it is read yet."""
        at = self._past_space(at)
        return self._text[at : at + 1]

    def _past_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _skip(self) -> None:
        """Passes over an element without holding it, by its brackets and quotes."""
        depth, quoted = 0, False
        while True:
            match = (_IN_STRING if quoted else _OUTSIDE).search(self._text, self._at)
            if match is None:
                if self._ended:
                    self._at = len(self._text)
                    return
                # The half of an escape may be all that there is of it yet.
                self._at = max(self._at, len(self._text) - self._text.endswith("\\"))
                self._grow()
                continue
            token = match[0]
            if not depth and not quoted and token in ",]}":
                self._at = match.start()
                return
            self._at = match.end()
            if token == '"':
                quoted = not quoted
            elif not quoted:
                depth += 1 if token in "{[" else -1 if token in "}]" else 0
            if not depth and not quoted and not self._in_array and token in '"}]':
                return

    def _peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            self._at = self._past_space(self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._grow()

    def _grow(self) -> None:
        self._cut()
        raw = self._stream.read(max(CHUNK, len(self._text)))
        self._ended = not raw
        self._text += self._bytes.decode(raw, final=self._ended)

    def _cut(self) -> None:
        """Lets go of the text before the place that the reading has come to."""
        self._offset = self._offset_of(self._at)
        self._text = self._text[self._at :]
        self._at = 0

    def _offset_of(self, at: int) -> int:
        return self._offset + len(self._text[:at].encode("utf-8", "surrogateescape"))

    def _broken(self, message: str, records: int = 0, at: int | None = None, kind: ProblemKind = "json") -> Problem:
        place = f"element {self._number}, byte {self._offset_of(self._at if at is None else at)}"
        return Problem(self._name, place, kind, message, records)


def _first_key(raw: str) -> str:
    """The first name in the first object of a text, with its quotes; nothing where there is none."""
    match = _KEY.search(raw)
    return match[1] if match else ""


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
