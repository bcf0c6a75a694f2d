"""Streams: what comes out of a file, whole, damaged or made to deceive, and where long texts are cut."""

import bz2
import codecs
import gzip
import itertools
import lzma
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.corpus import streams
from flatout.corpus.document import InputFile
from flatout.corpus.streams import ByteStream, TextLine, TextPiece, before, decode, lines, pieces, whole_characters
from flatout.data.tokenizer import Gpt2Tokenizer
from flatout.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "gz": lambda data: gzip.compress(data, 6, mtime=0),
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "xz": lambda data: lzma.compress(data, preset=0),
    "bz2": lambda data: bz2.compress(data),
}
PACKED = [method for method in COMPRESS if method != "none"]
TEXT = b"".join(b"line %d of a text that is long enough to be cut\n" % number for number in range(5000))

one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stored(folder: Path, data: bytes, method: str = "none") -> InputFile:
    path = folder / f"file.{method}"
    path.write_bytes(data)
    return InputFile(str(path), "file", "text", method, len(data))


def read_all(file: InputFile, count: int = 2**16) -> tuple[bytes, ByteStream]:
    with ByteStream(file) as stream:
        return b"".join(iter(lambda: stream.read(count), b"")), stream


class Generated:
    """A stream that is made up as it is read."""

    problem = None

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)

    def read(self, count: int) -> bytes:
        return next(self._chunks, b"")


@pytest.mark.parametrize("method", COMPRESS)
@pytest.mark.parametrize("count", [1000, 2**16, 2**22])
def test_every_compression_gives_the_text_back(tmp_path: Path, method: str, count: int) -> None:
    data = COMPRESS[method](TEXT)
    text, stream = read_all(stored(tmp_path, data, method), count)
    assert text == TEXT
    assert stream.problem is None
    assert stream.position == len(data)


@pytest.mark.parametrize("method", PACKED)
def test_several_members_are_one_text(tmp_path: Path, method: str) -> None:
    parts = [b"one\n", b"", TEXT, b"two"]
    text, stream = read_all(stored(tmp_path, b"".join(map(COMPRESS[method], parts)), method))
    assert text == b"".join(parts)
    assert stream.problem is None


@pytest.mark.parametrize("method", PACKED)
def test_a_truncated_file_gives_what_it_has_and_a_problem(tmp_path: Path, method: str) -> None:
    noise = np.random.default_rng(0).integers(32, 127, 300_000, dtype=np.uint8).tobytes()
    data = COMPRESS[method](noise)
    for cut in (1, 5, 100, len(data) // 2, len(data) - 9, len(data) - 1):
        text, stream = read_all(stored(tmp_path, data[:cut], method))
        assert noise.startswith(text)
        assert stream.problem is not None
        assert stream.problem.kind == "truncated"
        assert stream.problem.records == 0
        assert stream.problem.place == f"compressed byte {cut}, after {len(text)} bytes of text"
    # Of a file that lacks only its end, no more than the decompressor's last block is lost.
    assert len(text) > 0.5 * len(noise) or method in ("bz2", "xz")


@pytest.mark.parametrize("method", ["gz", "xz", "bz2"])
def test_no_changed_byte_goes_unnoticed(tmp_path: Path, method: str) -> None:
    text = b"A short text, with a few repeated words: words, words, words.\n" * 3
    data = COMPRESS[method](text)
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        found, stream = read_all(stored(tmp_path, changed, method))
        assert found == text or stream.problem is not None, place


@pytest.mark.parametrize(("method", "place"), [("gz", -8), ("gz", -4), ("zst", -1)])
def test_a_wrong_checksum_does_not_cost_the_text(tmp_path: Path, method: str, place: int) -> None:
    data = bytearray(COMPRESS[method](b"some text"))
    data[place] ^= 1
    text, stream = read_all(stored(tmp_path, bytes(data), method))
    assert text == b"some text"
    assert stream.problem is not None
    assert stream.problem.kind == "checksum"


@pytest.mark.parametrize("method", PACKED)
def test_what_is_not_compressed_or_goes_on_otherwise_is_told(tmp_path: Path, method: str) -> None:
    text, stream = read_all(stored(tmp_path, b"this is no archive, whatever its name", method))
    assert text == b""
    assert stream.problem is not None
    assert stream.problem.kind == "compression"
    assert stream.problem.place.startswith("compressed byte 0,")
    data = COMPRESS[method](TEXT)
    text, stream = read_all(stored(tmp_path, data + b"garbage that follows", method))
    assert text == TEXT
    assert stream.problem is not None
    assert stream.problem.kind == "compression"
    assert stream.problem.place.startswith(f"compressed byte {len(data)},")


@pytest.mark.parametrize("method", ["gz", "xz"])
def test_zeros_after_the_data_are_padding(tmp_path: Path, method: str) -> None:
    padding = bytes(3 * streams.CHUNK)
    text, stream = read_all(stored(tmp_path, COMPRESS[method](b"one ") + padding + COMPRESS[method](b"two"), method))
    assert text == b"one two"
    assert stream.problem is None


@pytest.mark.parametrize("method", PACKED)
def test_a_bomb_is_stopped(tmp_path: Path, method: str) -> None:
    size = 2**25
    compressor = {
        "gz": lambda: gzip.compress(bytes(size), 9),
        "zst": lambda: zstandard.ZstdCompressor(level=1).compress(bytes(size)),
        "xz": lambda: lzma.compress(bytes(size), preset=0),
        "bz2": lambda: bz2.compress(bytes(size)),
    }[method]
    data = compressor()
    assert size > 1000 * len(data)
    with ByteStream(stored(tmp_path, data, method)) as stream:
        total = sum(map(len, stream))
    assert stream.problem is not None
    assert stream.problem.kind == "bomb"
    assert 2**24 < total < size or method == "zst"
    # A text that is merely very repetitive is none.
    small, stream = read_all(stored(tmp_path, COMPRESS[method](bytes(2**23)), method))
    assert len(small) == 2**23
    assert stream.problem is None


def test_a_large_text_is_no_bomb_up_to_a_thousand_times_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_BOMB_BYTES", 2**16)
    data = COMPRESS["gz"](random.Random(0).randbytes(500) * 1000)
    assert 100 * len(data) < 500_000 < 900 * len(data)
    text, stream = read_all(stored(tmp_path, data, "gz"))
    assert (len(text), stream.problem) == (500_000, None)


def test_a_zstd_frame_that_wants_too_much_memory_is_refused(tmp_path: Path) -> None:
    def frame(window_log: int) -> bytes:
        return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + b"\x29\x00\x00hello"

    assert read_all(stored(tmp_path, frame(20), "zst"))[0] == b"hello"
    text, stream = read_all(stored(tmp_path, frame(28), "zst"))
    assert text == b""
    assert stream.problem is not None
    assert stream.problem.kind == "compression"
    assert "memory" in stream.problem.message


def test_a_missing_package_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match="needs the package zstandard"):
        ByteStream(stored(tmp_path, b"", "zst"))


@pytest.mark.parametrize("method", COMPRESS)
@pytest.mark.parametrize("path", ["/no/such/file", "/", "a\0b", "/proc/self/mem"])
def test_what_the_system_refuses_is_a_problem(path: str, method: str) -> None:
    text, stream = read_all(InputFile(path, "file", "text", method, 1))
    assert text == b""
    assert stream.problem is not None
    assert stream.problem.kind == "unreadable"
    assert "cannot read it" in stream.problem.message


@one_folder
@given(
    data=st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r", b"\xe2\x80\xa8", b"\xff"])).map(b"".join), step=st.data()
)
def test_lines_are_those_between_newlines_however_sliced(tmp_path: Path, data: bytes, step: st.DataObject) -> None:
    file = stored(tmp_path, data)
    with ByteStream(file) as stream:
        whole = list(lines(stream))
    raws = data.split(b"\n")
    if not raws[-1]:
        raws.pop()
    assert [line.raw for line in whole] == raws
    assert [line.number for line in whole] == list(range(1, len(raws) + 1))
    assert all(data[line.offset : line.offset + line.length] == line.raw for line in whole)
    assert [line.ended for line in whole] == [True] * (len(raws) - 1) + [data.endswith(b"\n")] * (len(raws) > 0)
    cuts = sorted(step.draw(st.sets(st.integers(1, len(data) + 2), max_size=5)))
    sliced: list[TextLine] = []
    for start, end in itertools.pairwise([0, *cuts, None]):
        with ByteStream(file, before(start or 0)) as stream:
            sliced += lines(stream, start=start or 0, end=end)
    assert [line[1:] for line in sliced] == [line[1:] for line in whole]


def test_a_signature_at_the_start_is_dropped_and_nowhere_else(tmp_path: Path) -> None:
    bom = codecs.BOM_UTF8
    with ByteStream(stored(tmp_path, bom + b"one\n" + bom + b"two")) as stream:
        assert [line.raw for line in lines(stream)] == [b"one", bom + b"two"]


def test_a_line_above_the_limit_is_counted_and_not_kept(tmp_path: Path) -> None:
    data = b"short\n" + b"x" * 100 + b"\n" + b"y" * 10 + b"\nend"
    with ByteStream(stored(tmp_path, data)) as stream:
        found = list(lines(stream, 10))
    assert [line.raw for line in found] == [b"short", None, b"y" * 10, b"end"]
    assert [line.length for line in found] == [5, 100, 10, 3]
    assert found[2].offset == 107


def test_a_line_of_a_gigabyte_takes_no_memory() -> None:
    chunk = b"x" * streams.CHUNK
    stream = Generated([b"first\n", *itertools.repeat(chunk, 1024), b"\nlast"])
    tracemalloc.start()
    found = list(lines(stream, 2**22))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.raw, line.length) for line in found] == [(b"first", 5), (None, 2**30), (b"last", 4)]
    assert peak < 2**24


def expected_pieces(data: bytes, mark: bytes | None, size: int) -> list[tuple[int, bytes, bool, bool]]:
    """The rule for documents and cuts, written down once more and without any regard for memory."""
    starts = [0]
    if mark is not None:
        starts += [match.start() for match in re.finditer(rb"(?<=\n)[ \t]{0,1024}" + re.escape(mark), data)]
    result = []
    for start, end in itertools.pairwise([*sorted(set(starts)), len(data)]):
        document = data[start:end]
        cuts = [0]
        for nominal in range(size, len(document), size):
            safe = [
                place
                for place in range(nominal, min(nominal + size // 16, len(document) - 1))
                if re.fullmatch(rb"[!-~][ \n][!-~]", document[place - 1 : place + 2])
            ]
            place = safe[0] if safe else nominal + size // 16
            while not safe and place < min(len(document), nominal + size // 16 + 3) and document[place] & 0xC0 == 0x80:
                place += 1
            if place < len(document):
                cuts.append(place)
        ends = [*cuts[1:], len(document)]
        for first, last in zip(cuts, ends, strict=True):
            result.append((start + first, document[first:last], first == 0, last == len(document)))
    return result


def plain(piece: TextPiece) -> tuple[int, bytes, bool, bool]:
    return piece.offset, bytes(piece.raw), piece.begins, piece.ends


TEXTS = st.lists(
    st.sampled_from(["a", "word", " ", "\n", "  ", "é", "語", "\U0001f600", "\n<D>", "\n \t<D>", "<D>", "x" * 40]),
    max_size=200,
)


@one_folder
@given(
    words=TEXTS,
    mark=st.sampled_from([None, b"<D>", b"\n", b" ", b"xx"]),
    size=st.integers(64, 200),
    data=st.data(),
)
def test_pieces_follow_the_rule_however_sliced(
    tmp_path: Path, words: list[str], mark: bytes | None, size: int, data: st.DataObject
) -> None:
    raw = "".join(words).encode()
    expected = expected_pieces(raw, mark, size)
    chunk = data.draw(st.integers(1, 300))
    chunks = [raw[start : start + chunk] for start in range(0, len(raw), chunk)]
    whole = list(pieces(chunks, mark=mark, size=size))
    assert list(map(plain, whole)) == expected
    assert [piece.final for piece in whole] == [False] * (len(whole) - 1) + [True]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) + 2), max_size=4)))
    sliced = []
    for start, end in itertools.pairwise([0, *cuts, None]):
        with ByteStream(stored(tmp_path, raw), before(start or 0)) as stream:
            sliced += map(plain, pieces(stream, start=start or 0, end=end, mark=mark, size=size))
    assert sliced == expected


def test_indentation_has_a_limit() -> None:
    for spaces, count in ((1024, 2), (1025, 1)):
        found = list(pieces([b"one\n" + b" " * spaces + b"<D> two"], mark=b"<D>"))
        assert len(found) == count


def test_marks_are_found_across_chunks_and_far_apart() -> None:
    filler = b"y" * (3 * streams.CHUNK)
    data = b"head\n" + filler + b"\n  <page>one\n" + filler + b"\n<page>two"
    chunks = [data[start : start + 1000] for start in range(0, len(data), 1000)]
    found = list(pieces(chunks, mark=b"<page>"))
    assert [bytes(piece.raw[:9]) for piece in found] == [b"head\nyyyy", b"  <page>o", b"<page>two"]
    assert b"".join(piece.raw for piece in found) == data
    later = list(pieces([data[5:]], mark=b"<page>", start=6))
    assert [piece.offset for piece in later] == [piece.offset for piece in found[1:]]


@pytest.mark.parametrize("mark", [b"<page>", b"aab"])
def test_a_mark_is_found_wherever_a_chunk_ends_inside_it(mark: bytes) -> None:
    data = b"head\n" + mark + b"one\n \t" + mark + b"two\na" + mark + b"\n" + mark
    starts = [0, 5, data.index(b" \t"), data.rindex(mark)]
    for size in range(1, len(mark) + 2):
        for first in range(size):
            chunks = [data[:first], *(data[at : at + size] for at in range(first, len(data), size))]
            found = list(pieces(chunks, mark=mark))
            assert [piece.offset for piece in found] == starts, (size, first)
            assert b"".join(piece.raw for piece in found) == data


def test_cuts_do_not_change_gpt2_tokens() -> None:
    tokenizer = Gpt2Tokenizer()
    random = Random(0)
    for _ in range(10):
        words = random.choices(["word", "Don't", "42", "'s", "--", "é", "x.", "\U0001f600"], k=5000)
        text = "".join(word + random.choice([" ", "\n", "  ", "\n\n", " \n", "\t", "\xa0", " "]) for word in words)
        found = list(pieces([text.encode()], size=4096))
        assert len(found) > 3
        # All of them are safe places: none had to be taken for want of one.
        assert all(piece.raw[:1] in (b" ", b"\n") for piece in found[1:])
        ids = np.concatenate([tokenizer.encode(piece.raw.decode()) for piece in found])
        assert np.array_equal(ids, tokenizer.encode(text))


def test_a_long_text_is_cut_within_bounded_memory() -> None:
    chunk = b"some words " * 10_000
    tracemalloc.start()
    total = 0
    for piece in pieces(itertools.repeat(chunk, 600), size=2**20):
        total += len(piece.raw)
        assert len(piece.raw) < 2**20 + 2**16
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 600 * len(chunk)
    assert peak < 2**23


def test_pieces_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 64"):
        list(pieces([b"text"], size=63))


def test_invalid_utf8_is_told_or_replaced_and_counted() -> None:
    raw = "a\ufffdb".encode() + b"\xff\xe2\x80 c\xc3"
    assert decode(b"plain", "strict") == ("plain", 0)
    assert decode(raw, "replace") == ("a\ufffdb\ufffd\ufffd c\ufffd", 3)
    for policy in ("strict", "skip"):
        with pytest.raises(UnicodeDecodeError) as caught:
            decode(raw, policy)
        assert caught.value.start == 5


@pytest.mark.parametrize(("raw", "left"), [(b"", 0), (b"ab", 2), ("aé".encode(), 3), ("aé".encode()[:-1], 1)])
def test_a_character_that_breaks_off_is_left_out(raw: bytes, left: int) -> None:
    assert whole_characters(raw) == left
    for character in ("é", "語", "\U0001f600"):
        encoded = character.encode()
        for cut in range(1, len(encoded)):
            assert whole_characters(b"some text" + encoded[:cut]) == 9
        assert whole_characters(b"some text" + encoded) == 9 + len(encoded)


def test_a_compressed_file_cannot_be_entered_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="from its beginning"):
        ByteStream(stored(tmp_path, b"", "gz"), 5)
