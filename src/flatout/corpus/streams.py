"""The bytes of a file that may be compressed, as lines or as the pieces of long texts.

Idea: everything here goes forward through a file in small steps, so that memory does not depend on the size of a file,
a line or a document, nor on what a compressed file makes of itself.

Contract: damage does not raise. A stream that meets it ends early, after all that came before, and keeps a `Problem`
that says what and where. Lines end at b"\\n" and nowhere else: the other characters that Unicode calls line ends may
stand inside one. Only a file without any has lines that end at b"\\r". A UTF-8 byte-order mark at the very start of a
file is a signature, not text, and is dropped.

A document longer than `PIECE` is cut, for k = 1, 2, ..., at the first safe place at or after its byte k * PIECE. Safe
is right before a single space or newline that stands between two printable ASCII characters. GPT-2's tokenizer begins
a token there whatever stands around: its tokens do not go on over white space, and the last white-space character of a
run either belongs to the word after it or is a token of its own. Where there is no such place within PIECE / 16 bytes,
the cut is before the next character. So a cut depends on nothing but the document's bytes near it, and whoever starts
to read in the middle of a file finds the same cuts.

Trap: offsets count bytes of the text, which are not those on disk where a file is compressed.
"""

import bz2
import codecs
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

from flatout.corpus.document import InputFile, InvalidUtf8, Problem, ProblemKind, needed

CHUNK = 2**20
PIECE = 2**24
SMALLEST_PIECE = 2**6
LINE_LIMIT = 2**26
# More spaces than this before a mark are no indentation, so that the search for marks has an end.
INDENT_LIMIT = 2**10

# How much goes into a decompressor at once: the less, the less is lost where damage begins. Nothing else limits what
# zstd gives back, which is up to 32768 times as much.
_FEED = {"gz": 2**12, "zst": 2**11, "xz": 2**12, "bz2": 2**12}
_METHODS = {"gz": "gzip", "zst": "zstd", "xz": "xz", "bz2": "bzip2"}
# These may be filled up with zeros at the end.
_PADDED = ("gz", "xz")
# The checksum at the end of a file goes in by itself, so that a wrong one does not cost the text before it.
_TRAILER = {"gz": 8, "zst": 4, "xz": 0, "bz2": 0}
_CHECKSUM = re.compile("checksum|incorrect (data|length) check")
_BOMB_RATIO = 1000
_BOMB_BYTES = 2**24
# Memory of a decompressor for earlier output; the command line tools have about the same limits.
_ZSTD_WINDOW = 2**27
_XZ_MEMORY = 2**28

# How much of a file is looked at for line ends.
_LINE_HEAD = 2**16
# How much is read at once to find the end of what began before the end of a slice.
_PAST_END = 2**16
_END = sys.maxsize

_SAFE_CUT = re.compile(rb"(?<=[!-~])[ \n](?=[!-~])")
# A character has at most three bytes after its first.
_CONTINUED = re.compile(rb"[\x80-\xbf]{0,3}")
# Called with the number of bytes of a file on disk that have been read.
Watch = Callable[[int], None]


@final
class ByteStream:
    """The text of a file, decompressed, read forward. Where `read` ends, `problem` says whether it really ended there.

    Where nothing is compressed it may be read from byte `start` on. `position` is how far the reading has come in the
    file on disk; `watch` is called with it.
    """

    def __init__(self, file: InputFile, start: int = 0, watch: Watch | None = None) -> None:
        if start and file.compression != "none":
            raise ValueError("a compressed file is read from its beginning")
        self.problem: Problem | None = None
        self.position = start
        self._watch = watch
        self._name = file.name
        self._method = file.compression
        self._decoder: Any = None if file.compression == "none" else _decoder(file.compression)
        self._fresh = True  # the decoder has been given nothing yet
        self._input = b""
        self._input_at = 0
        self._text = bytearray()
        self._text_bytes = 0
        self._ended = False
        self._file: io.FileIO | None = None
        try:
            self._file = open(file.path, "rb", buffering=0)  # noqa: SIM115  # close() closes it
            self._file.seek(start)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            self._stop("unreadable", _reason(error))

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.read, b"")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, count: int = CHUNK) -> bytes:
        """The next bytes, `count` at most; b"" at the end."""
        if self._watch is not None:
            self._watch(self.position)
        if self._decoder is None:
            data = self._from_disk(count)
            self.position += len(data)
            return data
        while len(self._text) < count and not self._ended:
            self._decompress()
        result = bytes(memoryview(self._text)[:count])
        del self._text[:count]
        return result

    def _decompress(self) -> None:
        """One step: feeds a little of the file to the decoder, or takes a little more output from it."""
        if self._decoder.eof:
            self._decoder, self._fresh = _decoder(self._method), True
        start, data = self.position, b""
        if getattr(self._decoder, "needs_input", True):
            data = self._take(_FEED[self._method])
            if not data:
                if not self._fresh and not self._ended:
                    self._stop("truncated", f"the file ends inside its {_METHODS[self._method]} data")
                self._ended = True
                return
            if self._fresh and start and self._method in _PADDED:
                data = data.lstrip(b"\0")
                if not data:
                    return
        try:
            # bz2 could give a million times what it is given, and like xz takes a limit on what it gives at once.
            limit = (CHUNK,) if self._method in ("xz", "bz2") else ()
            text = self._decoder.decompress(data, *limit)
        except Exception as error:  # noqa: BLE001  # each library has its own; bz2 raises OSError
            self.position = start
            what = f"after its {_METHODS[self._method]} data comes something else" if self._fresh and start else ""
            what = what or f"it is not {_METHODS[self._method]}, or damaged"
            self._stop("checksum" if _CHECKSUM.search(str(error)) else "compression", f"{what}: {error}")
            return
        self._fresh = False
        if self._decoder.eof:
            unused = len(self._decoder.unused_data)
            self._input_at -= unused
            self.position -= unused
        self._text += text
        self._text_bytes += len(text)
        if self._text_bytes > max(_BOMB_BYTES, _BOMB_RATIO * self.position):
            self._stop("bomb", f"decompressed, it is more than {_BOMB_RATIO} times as large")

    def _take(self, count: int) -> bytes:
        if self._input_at == len(self._input):
            self._input, self._input_at = self._from_disk(CHUNK), 0
        left = len(self._input) - self._input_at
        trailer = _TRAILER[self._method]
        count = min(count, left - trailer if left > trailer else left)
        data = self._input[self._input_at : self._input_at + count]
        self._input_at += count
        self.position += count
        return data

    def _from_disk(self, count: int) -> bytes:
        if self._ended or self._file is None:
            return b""
        try:
            return self._file.read(count)
        except OSError as error:
            self._stop("unreadable", _reason(error))
            return b""

    def _stop(self, kind: ProblemKind, message: str) -> None:
        self._ended = True
        place = f"byte {self.position}"
        if self._decoder is not None:
            place = f"compressed {place}, after {self._text_bytes} bytes of text"
        self.problem = Problem(self._name, place, kind, message, records=0)


class TextLine(NamedTuple):
    """A line without its b"\\n". One above the limit has no `raw`, only a length. `ended`: there was a b"\\n"."""

    number: int
    offset: int
    raw: bytes | None
    length: int
    ended: bool


def before(start: int) -> int:
    """Where to open a file to read what begins at `start` or later: the byte before shows if a line begins there."""
    return max(start - 1, 0)


def line_end(file: InputFile) -> bytes:
    """What ends the lines of a file: b"\\r" where its beginning has only those, as in files of old Macs."""
    with ByteStream(file) as stream:
        head = stream.read(_LINE_HEAD)
    return b"\r" if b"\r" in head[:-1] and b"\n" not in head else b"\n"


def lines(
    stream: ByteStream, limit: int = LINE_LIMIT, *, start: int = 0, end: int | None = None, ending: bytes = b"\n"
) -> Iterator[TextLine]:
    """The lines that begin in [start, end), numbered from 1, of a stream opened at `before(start)`.

    The last line of a text need not have an `ending`; if nothing stands in it, it is none.
    """
    stop = _END if end is None else end
    position = offset = before(start)
    number = length = 0
    # The parts of a line that has not ended yet; nothing where its length, which is counted on, is above the limit.
    held: list[bytes] = []
    ours = start == 0  # else all that is read belongs to an earlier line, up to a b"\n"
    while offset < stop:
        ahead = stop - position
        chunk = stream.read(CHUNK if ahead >= CHUNK else ahead if ahead > 0 else _PAST_END)
        if not chunk:
            break
        position += len(chunk)
        if not ours:
            skipped = chunk.find(ending) + 1
            ours = skipped > 0
            offset += skipped or len(chunk)
            if not ours or offset >= stop:
                continue
            chunk = chunk[skipped:]
        first, *others = chunk.split(ending)
        length += len(first)
        if length <= limit:
            held.append(first)
        else:
            held.clear()
        if not others:
            continue
        number += 1
        yield TextLine(number, offset, _joined(held, offset) if length <= limit else None, length, True)
        offset += length + 1
        rest = others.pop()
        for raw in others:
            if offset >= stop:
                return
            size = len(raw)
            number += 1
            yield TextLine(number, offset, raw if size <= limit else None, size, True)
            offset += size + 1
        length = len(rest)
        held = [rest] if length <= limit else []
    if length and offset < stop:
        yield TextLine(number + 1, offset, _joined(held, offset) if length <= limit else None, length, False)


class TextPiece(NamedTuple):
    """A stretch of a document, or all of it. `final`: the text ends with it, be it by damage."""

    offset: int
    raw: bytearray
    begins: bool
    ends: bool
    final: bool


def pieces(
    chunks: Iterable[bytes], *, start: int = 0, end: int | None = None, mark: bytes | None = None, size: int = PIECE
) -> Iterator[TextPiece]:
    """The pieces of a text, whose `chunks` begin at `before(start)`.

    Without a mark the text is one document, and these are its pieces k with k * size in [start, end). With a mark they
    are all pieces of the documents that begin in [start, end): a document begins at byte 0, and at each line that
    begins with the mark. Spaces and tabs may stand before the mark and belong to the document.
    """
    if size < SMALLEST_PIECE:
        raise ValueError(f"a piece has at least {SMALLEST_PIECE} bytes, not {size}")
    window = Window(chunks, before(start))
    stop = _END if end is None else end
    if mark is None:
        yield from _pieces_of_one(window, start, stop, size)
    else:
        yield from _pieces_of_marked(window, start, stop, mark, size)


def decode(raw: bytes | bytearray, policy: InvalidUtf8) -> tuple[str, int]:
    """The text of `raw`, and how many U+FFFD in it stand for invalid bytes.

    A `UnicodeDecodeError`, where the policy is not to replace them, says where the first is.
    """
    try:
        return str(raw, "utf-8"), 0
    except UnicodeDecodeError:
        if policy != "replace":
            raise
    text = str(raw, "utf-8", "replace")
    return text, text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")


def whole_characters(raw: bytes | bytearray) -> int:
    """How many bytes of a text that broke off are left without the character that it broke off in."""
    tail = bytes(raw[-4:])
    return len(raw) - len(tail) + codecs.utf_8_decode(tail, "ignore", False)[1]


class Window:
    """The part of a text that is being looked at: it grows at its end, and what lies before `at` may go.

    Every position here is an offset in the text, and `base` that of the first byte of `data`.
    """

    def __init__(self, chunks: Iterable[bytes], base: int) -> None:
        self.data = bytearray()
        self.base = base
        self.at = base
        self.ended = False
        self._chunks = iter(chunks)

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def grow(self) -> bool:
        """Reads one more chunk; False at the end."""
        drop = min(self.at - self.base, len(self.data))
        del self.data[:drop]
        self.base += drop
        chunk = next(self._chunks, None)
        self.data += chunk or b""
        self.ended = chunk is None
        return not self.ended

    def reach(self, offset: int) -> None:
        while self.end < offset and self.grow():
            pass

    def copy(self, start: int, stop: int) -> bytearray:
        return self.data[max(start - self.base, 0) : max(stop - self.base, 0)]

    def cut(self, nominal: int, look: int, stop: int) -> int | None:
        """The cut at or after `nominal` in a document that goes on to `stop` at least; None where it ends instead."""
        before = nominal - 1
        data = self.copy(before, min(stop, nominal + look + 4))
        if match := _SAFE_CUT.search(data, 1, look + 2):
            return before + match.start()
        # Any character will do; this one may begin before the place that is looked at.
        match = _CONTINUED.match(data, look + 1)
        return before + match.end() if match and match.end() < len(data) else None


def _pieces_of_one(window: Window, start: int, stop: int, size: int) -> Iterator[TextPiece]:
    look = size // 16

    def cut(number: int) -> int | None:
        window.reach(number * size + look + 4)
        return window.cut(number * size, look, window.end)

    number = -(-start // size)
    window.at = before(number * size)
    here = cut(number) if number else 0
    while here is not None and number * size < stop:
        window.at = here
        number += 1
        following = cut(number)
        ends = following is None
        raw = window.copy(here, window.end if following is None else following)
        yield TextPiece(here, raw, number == 1, ends, ends)
        here = following


def _pieces_of_marked(window: Window, start: int, stop: int, mark: bytes, size: int) -> Iterator[TextPiece]:
    look = size // 16
    origin = _first_document(window, mark, start, stop) if start else 0
    while origin is not None and origin < stop:
        here = nominal = origin
        following = None
        ends = False
        while not ends:
            window.at = here
            nominal += size
            following = _next_document(window, mark, here + 1, nominal + look + 4)
            end = window.end if following is None else following
            cut = window.cut(nominal, look, end) if end > nominal else None
            ends = cut is None
            stretch = here, end if cut is None else cut
            yield TextPiece(here, window.copy(*stretch), here == origin, ends, ends and following is None)
            here = stretch[1]
        origin = following


def _first_document(window: Window, mark: bytes, start: int, stop: int) -> int | None:
    # In steps, so that a long stretch without a mark is not held in memory.
    while start < stop:
        window.at = before(start)
        found = _next_document(window, mark, start, min(start + CHUNK, stop))
        start += CHUNK
        if found is not None or (window.ended and window.end <= start):
            return found
    return None


def _next_document(window: Window, mark: bytes, start: int, stop: int) -> int | None:
    """The first line in [start, stop] that begins with the mark, or None. All up to `stop` is in the window then."""
    far = stop + INDENT_LIMIT + len(mark)
    at = start
    while True:
        # The whole mark must be there, so the last bytes are looked at again when there are more.
        hit = window.data.find(mark, at - window.base)
        if hit < 0:
            at = max(at, window.end - len(mark) + 1)
            if window.ended or window.end >= far:
                return None
            window.grow()
            continue
        indented = window.data[max(hit - INDENT_LIMIT - 1, 0) : hit]
        line = indented.rstrip(b" \t")
        begin = window.base + hit - len(indented) + len(line)
        if line.endswith(b"\n") and begin >= start:
            return begin if begin <= stop else None
        at = window.base + hit + 1
        if at > far:
            return None


def _joined(parts: list[bytes], offset: int) -> bytes:
    raw = b"".join(parts)
    return raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw


def _decoder(method: str) -> Any:
    if method == "gz":
        return zlib.decompressobj(wbits=31)
    if method == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    if method == "bz2":
        return bz2.BZ2Decompressor()
    if method == "zst":
        zstandard = needed("zstandard", "reading .zst files needs")
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    raise ValueError(f"no compression {method!r}")


def _reason(error: Exception) -> str:
    return f"cannot read it: {getattr(error, 'strerror', None) or error}"
