"""Crawls to documents: WARC files of web pages, and WET files of their text.

Idea: the framing of records is read here and not by fastwarc, which passes over damage without a word: a record whose
end is missing comes back shorter, and one with a broken head not at all. What the records hold is for libraries:
fastwarc undoes transfer and content encodings, resiliparse finds the main text of a page.

Contract: a response, resource or conversion record is a document, or is counted in a problem. A response without text
is a rejected document. Requests, metadata, revisits and notes about the crawl are no documents and are not counted.
The text of a page is what resiliparse makes of it, and the text of a WET record is what stands there.

A record is sound if `Content-Length` leads to a blank line, to another record or to the end. After one that is not, the
reading goes on at the next line that begins a record. Files in which line ends were translated, as happens to WET files
that went through an editor, have heads with "\\n" and lengths that are not right: there a record may also end where
the next one begins.

Trap: a page that the crawler itself cut short (`WARC-Truncated`) is a document as far as it goes. Offsets count bytes
of the decompressed file. A page is taken at its word about its encoding, as browsers do; bytes that do not fit it
matter only if they are part of the main text. Pages with blocks nested deeper than browsers would nest them are
rejected, since the extraction takes time quadratic in the depth.
"""

import codecs
import functools
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from flatout.corpus.document import Document, InputFile, Problem, ProblemKind, ReadOptions, Results, needed, shown
from flatout.corpus.rows import not_utf8
from flatout.corpus.streams import LINE_LIMIT, ByteStream, Window, decode

REJECTED_TYPE = "not_html"
REJECTED_STATUS = "http_status"
REJECTED_DEPTH = "html_depth"

HEAD_LIMIT = 2**18
DEPTH_LIMIT = 512

_NO_TEXT = frozenset({b"warcinfo", b"request", b"metadata", b"revisit"})
_TEXT = frozenset({b"response", b"resource", b"conversion"})
_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_PLAIN_TYPES = frozenset({"text/plain", "text/markdown"})

_VERSION = re.compile(rb"WARC/1\.[0-9](\r?\n)")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_BEGIN = re.compile(rb"WARC/1\.[0-9]\r?\n[A-Za-z]")
_NEXT = re.compile(rb"(?<=\n)" + _BEGIN.pattern)
# The most bytes that a match of _NEXT spans, with the line end before it.
_NEXT_BYTES = 12
# Gaps shorter than this are padding between records, not lost data.
_SHORTEST = 32
_VERSIONS = (b"WARC/1.0\r\n", b"WARC/1.1\r\n")
_LINE_ENDS = b"\r\n"
_LINES = re.compile(rb"[\r\n]*")
# How far to look past the end of a record for a sign that it is one.
_TAIL = 4 + _NEXT_BYTES

_STATUS = re.compile(rb"HTTP/[0-9.]+[ \t]+([0-9]{3})(?![0-9])")
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([^\s;,\"']+)", re.IGNORECASE)
# Servers send all kinds of things; nothing else of it matters here.
_HTTP_FIELDS = re.compile(rb"\n(content-type|content-encoding|transfer-encoding)[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE)
_ENCODINGS = (b"content-encoding", b"transfer-encoding")
_AS_IT_IS = (b"", b"identity")
_BLOCK = re.compile(r"<(/?)(?:div|article)\b", re.IGNORECASE)
# What pages call these encodings is in truth a larger one, which browsers use and Python calls by another name.
_LARGER = {"gbk": "gb18030", "euc_kr": "cp949", "shift_jis": "cp932", "big5": "big5hkscs"}
_NEEDS = "reading WARC files needs"
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))

Fields = dict[bytes, bytes]


def read_warc(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    """The documents of a WARC or WET file."""
    pages = _Pages(file, options)
    for record in _Records(stream, file):
        if isinstance(record, Problem):
            yield record
        elif (found := pages.document(record)) is not None:
            yield found


class _Record(NamedTuple):
    """A sound record; `block` is what stands below its head, and empty for kinds without text."""

    number: int
    offset: int
    kind: bytes
    fields: Fields
    block: bytes


class _Head(NamedTuple):
    size: int
    fields: Fields
    length: int
    translated: bool


@final
class _Records(Window):
    """The records of a stream, and problems where it is damaged. Every position here is an offset in the stream."""

    def __init__(self, stream: ByteStream, file: InputFile) -> None:
        super().__init__(iter(stream.read, b""), 0)
        self._stream = stream
        self._name = file.name
        self._number = 0
        self._inexact = False  # a record with translated line ends had a wrong length
        self._end_reported = False  # a problem has said how the stream ended

    def __iter__(self) -> Iterator[_Record | Problem]:
        while self._skip_line_ends():
            self._number += 1
            yield self._next()
        if self._stream.problem is not None and not self._end_reported:
            yield self._broken_off("after it", records=0)
        elif not self.end:
            yield Problem(self._name, "", "empty", "there is nothing in it", records=0)

    def _next(self) -> _Record | Problem:
        head = self._head()
        if isinstance(head, Problem):
            return head
        if head.length <= LINE_LIMIT:
            self.reach(self.at + head.size + head.length + _TAIL)
            if self._is_end(self.at + head.size + head.length, head.translated):
                return self._take(head, head.length)
        return self._up_to_next(head) if head.translated else self._unsound(head)

    def _take(self, head: _Head, size: int) -> _Record:
        begin = self.at + head.size
        kind = _kind(head.fields)
        block = b"" if kind in _NO_TEXT else self._bytes(begin, begin + size)
        record = _Record(self._number, self.at, kind, head.fields, block)
        self.at = begin + size
        return record

    def _head(self) -> _Head | Problem:
        self.reach(self.at + _NEXT_BYTES)
        version = _VERSION.match(self.data, self.at - self.base)
        if version is None:
            return self._no_record()
        # Before the data grows, which moves it under the match.
        begin, translated = self.base + version.end(), version[1] == b"\n"
        while (blank := _BLANK_LINE.search(self.data, begin - 1 - self.base)) is None:
            if self.end - self.at > HEAD_LIMIT:
                return self._bad_head({}, f"its head has more than {HEAD_LIMIT:,} bytes")
            if not self.grow():
                # The last line may be half of one.
                fields = _fields(self._bytes(begin, self.end).rpartition(b"\n")[0]) or {}
                return self._broken_off("the file ends inside its head", _counted(fields))
        fields = _fields(self._bytes(begin, self.base + blank.start()))
        if fields is None:
            return self._bad_head({}, "its head has a line that is no field")
        length = fields.get(b"content-length", b"")
        if not length.isdigit() or len(length) > 18:
            return self._bad_head(fields, f"its head has no length that is a number, but '{_excerpt(length)}'")
        return _Head(self.base + blank.end() - self.at, fields, int(length), translated)

    def _bad_head(self, fields: Fields, message: str) -> Problem:
        problem = Problem(self._name, self._place(), "record", message, _counted(fields))
        self._seek_next(self.at + 1)
        return problem

    def _no_record(self) -> Problem:
        rest = self._bytes(self.at, self.at + _NEXT_BYTES)
        if self.ended and any(version.startswith(rest) for version in _VERSIONS):
            return self._broken_off("the file ends inside its first line", records=1)
        at, place, first = self.at, self._place(), self.at == 0
        self._number -= 1
        # A damaged line end after a record is no reason to lose the next.
        if near := _BEGIN.search(self.data, at - self.base, at - self.base + _TAIL):
            self.at = self.base + near.start()
        elif not self._seek_next(at + 1) and first:
            message = f"it is no WARC file: it begins with '{_excerpt(rest)}'"
            return Problem(self._name, place, "format", message, records=0)
        size = self.at - at
        self._number += 1 if size >= _SHORTEST else 0
        message = f"here are {size:,} bytes that begin no record: '{_excerpt(rest)}'"
        return Problem(self._name, place, "record", message, records=1 if size >= _SHORTEST else 0)

    def _unsound(self, head: _Head) -> Problem:
        """The problem of a record whose length is wrong or too much, and on to the next one."""
        place, begin, records = self._place(), self.at + head.size, _counted(head.fields)
        found = self._seek_next(begin)
        size = self.at - begin
        if head.translated or (head.length > LINE_LIMIT and 0 <= size - head.length <= _TAIL):
            message = f"the record has {size if head.translated else head.length:,} bytes; the limit is {LINE_LIMIT:,}"
            return Problem(self._name, place, "too-long", message, records)
        says = f"its head says that it has {head.length:,} bytes"
        if found:
            return Problem(self._name, place, "record", f"{says}, but the next begins after {size:,}", records)
        if size < head.length:
            return self._broken_off(f"{says}, but the file ends after {size:,}", records, place)
        return Problem(self._name, place, "record", f"{says}, but it does not end there", records)

    def _up_to_next(self, head: _Head) -> _Record | Problem:
        """A record with translated line ends: everything up to the next record."""
        begin = look = self.at + head.size
        while (following := self._find_next(look)) is None:
            look = max(begin, self.end - _NEXT_BYTES)
            if self.end - begin > LINE_LIMIT + _TAIL or not self.grow():
                break
        end = self.end if following is None else following
        if end - begin > LINE_LIMIT + _TAIL:
            return self._unsound(head)
        block = self._bytes(begin, end).rstrip(_LINE_ENDS)
        if following is None:
            # A length that was right before the line ends were translated is too much by one a line.
            most = len(block) + block.count(b"\n") + _TAIL if self._inexact else end - begin
            if head.length > most or self._stream.problem is not None:
                message = f"its head says that it has {head.length:,} bytes, but the file ends after {end - begin:,}"
                problem = self._broken_off(message, _counted(head.fields))
                self.at = end
                return problem
        self._inexact = True
        record = self._take(head, len(block))
        self.at = end
        return record

    def _is_end(self, end: int, translated: bool) -> bool:
        """Whether a record can end here: a blank line follows, be it damaged, or another record, or nothing."""
        if end > self.end:
            return False
        tail = self._bytes(end, end + _TAIL)
        if tail.startswith(b"\n\n" if translated else b"\r\n\r\n"):
            return True
        if begin := _BEGIN.search(tail):
            gap = tail[: begin.start()]
            damaged = sum(found != right for found, right in zip(gap, b"\r\n\r\n", strict=False))
            return not gap.strip(_LINE_ENDS) or (not translated and len(gap) == 4 and damaged <= 2)
        return not tail.strip(_LINE_ENDS) and end + len(tail) == self.end

    def _skip_line_ends(self) -> bool:
        """Whether something follows."""
        while True:
            # The pattern also matches the empty string.
            match = _LINES.match(self.data, self.at - self.base)
            self.at = self.base + match.end() if match else self.at
            if self.at < self.end:
                return True
            if not self.grow():
                return False

    def _seek_next(self, start: int) -> bool:
        """Goes on to the next line at or after `start` that begins a record, or to the end of the stream."""
        while (following := self._find_next(start)) is None:
            start = max(start, self.end - _NEXT_BYTES)
            self.at = max(self.at, start - 1)
            if not self.grow():
                self.at = self.end
                return False
        self.at = following
        return True

    def _find_next(self, start: int) -> int | None:
        match = _NEXT.search(self.data, start - self.base)
        return None if match is None else self.base + match.start()

    def _bytes(self, start: int, end: int) -> bytes:
        with memoryview(self.data) as data:
            return bytes(data[start - self.base : end - self.base])

    def _place(self) -> str:
        return f"record {self._number}, byte {self.at}"

    def _broken_off(self, message: str, records: int, place: str | None = None) -> Problem:
        """A problem for what was being read when the stream ended."""
        damage = self._stream.problem
        self._end_reported = True
        kind = "truncated" if damage is None else damage.kind
        message = message if damage is None else f"{message}: {damage.message} ({damage.place})"
        problem = Problem(self._name, place or self._place(), kind, message, records)
        self.at = self.end
        return problem


@final
class _Pages:
    """What the records hold."""

    def __init__(self, file: InputFile, options: ReadOptions) -> None:
        self._file = file
        self._options = options

    def document(self, record: _Record) -> Document | Problem | None:
        """The record's document, or nothing if it is of a kind that has none."""
        if record.kind in _NO_TEXT:
            return None
        place = f"record {record.number}"
        if b"warc-segment-number" in record.fields:
            return self._problem(record, "it is a part of a record in several parts, which are not put together")
        if record.kind not in _TEXT:
            return self._problem(record, f"it is of an unknown kind, '{_excerpt(record.kind)}'")
        address = record.fields.get(b"warc-target-uri", b"").strip(b"<>")
        if record.kind == b"resource" and address.startswith(b"metadata:"):
            return None  # what wget writes about itself
        page = _Page(record.fields.get(b"content-type", b""), record.block)
        if record.kind == b"conversion":
            if page.stated and _media_type(page.stated) not in _PLAIN_TYPES:
                return Document("", place, rejected=REJECTED_TYPE)
            try:
                text, replaced = decode(page.body, self._options.invalid_utf8)
            except UnicodeDecodeError as error:
                return not_utf8(error, self._file, place, self._options)
            return Document(text, place, replaced=replaced)
        if record.kind == b"response":
            page = self._answer(record)
            if isinstance(page, str):
                return Document("", place, rejected=page)
            if isinstance(page, Problem):
                return page
        type = self._type(record, page)
        if type not in _HTML_TYPES and type not in _PLAIN_TYPES:
            return Document("", place, rejected=REJECTED_TYPE)
        return self._text(page, type in _HTML_TYPES, place)

    def _answer(self, record: _Record) -> "_Page | Problem | str":
        """The page that an HTTP answer holds, or the name of the rule that rejects it."""
        answer = record.block
        if _media_type(record.fields.get(b"content-type", b"")) != "application/http":
            return REJECTED_TYPE  # a name looked up, a file sent by FTP
        status = _STATUS.match(answer)
        if status is None:
            return self._problem(record, f"its HTTP answer begins with '{_excerpt(answer)}'")
        if status[1] != b"200":
            return REJECTED_STATUS
        blank = _BLANK_LINE.search(answer, status.end())
        end = blank.end() if blank else len(answer)
        fields = {name.lower(): value.strip() for name, value in _HTTP_FIELDS.findall(answer, status.end(), end)}
        page = _Page(fields.get(b"content-type", b""), answer[end:])
        type = _media_type(page.stated)
        if type and type not in _HTML_TYPES and type not in _PLAIN_TYPES:
            return REJECTED_TYPE
        if any(fields.get(name, b"").lower() not in _AS_IT_IS for name in _ENCODINGS):
            return self._decompressed(record, page)
        return page

    def _type(self, record: _Record, page: "_Page") -> str:
        type = _media_type(page.stated or record.fields.get(b"warc-identified-payload-type", b""))
        if type:
            return type
        type = _resiliparse("parse.encoding").detect_mime(page.body[:1024])
        return "text/html" if type == "text/plain" and page.body.lstrip().startswith(b"<") else type

    def _text(self, page: "_Page", html: bool, place: str) -> Document | Problem:
        text, error = _as_text(page)
        if html:
            if _too_deep(text):
                return Document("", place, rejected=REJECTED_DEPTH)
            # Without the texts of images, whole figures would be dropped, and many code listings with them.
            text = _resiliparse("extract.html2text").extract_plain_text(text, main_content=True, alt_texts=True)
        replaced = text.count("\ufffd") if error is not None else 0
        if error is not None and replaced and self._options.invalid_utf8 != "replace":
            return not_utf8(error, self._file, place, self._options)
        return Document(text, place, replaced=replaced)

    def _decompressed(self, record: _Record, page: "_Page") -> "_Page | Problem":
        """The page without the transfer and content encodings of its answer."""
        head = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\n"
        framed = b"%sContent-Length: %d\r\n\r\n%s\r\n\r\n" % (head, len(record.block), record.block)
        records = _fastwarc().ArchiveIterator
        try:
            whole = next(iter(records(io.BytesIO(framed), auto_decode="all"))).reader.read(LINE_LIMIT + 1)
        except Exception as error:  # noqa: BLE001  # the library does not say what it raises
            # Some crawlers keep the head of the answer as it was and the body decoded.
            if page.body.lstrip().startswith(b"<"):
                return page
            return self._problem(record, f"its HTTP body cannot be decoded: {_excerpt(str(error).encode())}")
        if len(whole) > LINE_LIMIT:
            message = f"its HTTP body has over {LINE_LIMIT:,} bytes when decoded, which is the limit"
            return self._problem(record, message, "too-long")
        return _Page(page.stated, whole)

    def _problem(self, record: _Record, message: str, kind: ProblemKind = "record") -> Problem:
        return Problem(self._file.name, f"record {record.number}, byte {record.offset}", kind, message, records=1)


class _Page(NamedTuple):
    """A page as it was sent, and what was said of its type."""

    stated: bytes
    body: bytes


def _resiliparse(module: str) -> Any:
    return needed(f"resiliparse.{module}", _NEEDS)


@functools.cache
def _fastwarc() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fastwarc 1.1 warns about itself
        return needed("fastwarc.warc", _NEEDS)


def _as_text(page: _Page) -> tuple[str, UnicodeDecodeError | None]:
    """The text of a page. Where bytes do not fit its encoding, U+FFFD stands for them, and the error for the first."""
    body, encoding = page.body, None
    for mark, name in _MARKS:
        if body.startswith(mark):
            body, encoding = body[len(mark) :], name
            break
    charset = _CHARSET.search(page.stated)
    encodings = _resiliparse("parse.encoding")
    if encoding is None and charset is not None:
        encoding = encodings.map_encoding_to_html5(charset[1].decode("latin-1"), fallback_utf8=False)
    if encoding is None:
        encoding = encodings.detect_encoding(body, from_html_meta=True)
    encoding = _LARGER.get(encoding, encoding)
    try:
        return str(body, encoding), None
    except UnicodeDecodeError as error:
        return str(body, encoding, "replace"), error


def _too_deep(html: str) -> bool:
    """Whether blocks may be nested above the limit. Ends that match no start do not count."""
    blocks = _BLOCK.findall(html)
    if blocks.count("") <= DEPTH_LIMIT:
        return False
    depth = 0
    for slash in blocks:
        depth = depth + 1 if not slash else max(depth - 1, 0)
        if depth > DEPTH_LIMIT:
            return True
    return False


def _kind(fields: Fields) -> bytes:
    return fields.get(b"warc-type", b"").lower()


def _counted(fields: Fields) -> int:
    """How many records are lost with one of this kind; one of unknown kind counts."""
    return 0 if _kind(fields) in _NO_TEXT else 1


def _fields(block: bytes) -> Fields | None:
    """The fields of a head, or None if a line is none. A line that begins with a space goes on with the one before."""
    fields: Fields = {}
    name = b""
    for line in block.split(b"\n"):
        if line[:1] in (b" ", b"\t") and name:
            fields[name] += b" " + line.strip()
            continue
        name, colon, value = line.partition(b":")
        name = name.strip().lower()
        if not colon or not name:
            if line.strip():
                return None
            continue
        fields[name] = value.strip()
    return fields


def _media_type(stated: bytes) -> str:
    return stated.partition(b";")[0].strip().lower().decode("latin-1")


def _excerpt(raw: bytes) -> str:
    return shown(raw[:40].decode("latin-1"))
