"""Kept, dropped and damaged records add up to the input, for every format and any damage to single records.

The input is put together here record by record, so how many there are is known without asking a reader of ours.
"""

import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flatout.config.schema import DataConfig
from flatout.corpus import readers
from flatout.corpus import rows as rows_module
from flatout.corpus.document import Document, Problem, ReadOptions, Slice
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import find_files, slices_of
from flatout.data.inspect import read_report
from flatout.data.pack import pack_corpus
from flatout.data.plan import request_of

LIMIT = 2000
MARK = "=== page"
LONG = "long " * LIMIT

# How a record is written, by what is wrong with it; "{}" is its text, which has no quotes.
JSON = {
    "good": '{"text": "{}", "n": [1, {"text": "nested"}]}',
    "plain": '{"text": "{}"}',
    "null": '{"text": null}',
    "other type": '{"text": 5}',
    "word": "oh {}",
    "no value": '{"text": , "n": 1}',
    "control character": '{"text": "a\tb"}',
    "bad escape": '{"text": "\\x {}"}',
    "number": '{"text": 01}',
    "long": '{"text": "' + LONG + '"}',
    "not UTF-8": '{"text": "\udcff{}"}',
    "half a pair": '{"text": "\\ud800"}',
}
JSON_QUOTES = {
    "quote not closed": '{"text": "{}}',
    "quote not opened": '{"text": {}"}',
    "bracket not closed": '{"text": "{}"',
    "bracket not opened": '"text": "{}"}',
    "brackets not closed": '{"text": [{"text": "{}", "n": [',
}
CSV = {
    "good": "7,{}",
    "quoted": '7,"{}"',
    "line ends": '7,"{}\nand, more"',
    "too few": "{}",
    "too many": "7,{},8",
    "after a quote": '7,"{}"x',
    "NUL": "7,a\0{}",
    "not UTF-8": "7,\udcff{}",
    "long": "7," + LONG,
    "empty": "7,",
}
GOOD = ("good", "plain", "quoted")


def raw_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def kinds(*tables: dict[str, str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from([kind for table in tables for kind in table]), min_size=1, max_size=12)


def written(table: dict[str, str], chosen: Sequence[str]) -> list[str]:
    return [table[kind].replace("{}", f"text {number}", 1) for number, kind in enumerate(chosen)]


def check(
    name: str, content: bytes, count: int, good: Sequence[str], target: int = 2**24, **options: str
) -> list[Document | Problem]:
    """Read a file, in slices, and compare with what is known of it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(readers, "LINE_LIMIT", LIMIT),
        patch.object(rows_module, "LINE_LIMIT", LIMIT),
    ):
        (Path(folder) / name).write_bytes(content)
        (file,) = find_files(str(Path(folder) / name)).files
        results = [
            result
            for slice in slices_of(file, target) or [Slice(file)]
            for result in read_slice(slice, ReadOptions(**options))  # pyright: ignore[reportArgumentType]
        ]
    documents = sum(result.begins for result in results if isinstance(result, Document))
    lost = sum(result.records for result in results if isinstance(result, Problem))
    assert documents + lost == count, (content, results)
    texts = [result.text.strip() for result in results if isinstance(result, Document)]
    assert set(good) <= set(texts), (content, results)
    return results


def good_texts(chosen: Sequence[str]) -> list[str]:
    return [f"text {number}" for number, kind in enumerate(chosen) if kind in GOOD]


@settings(max_examples=30, deadline=None)
@given(kinds(JSON, JSON_QUOTES), st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.sampled_from([40, 2**24]))
@example(["good"] * 12, "\r", 40)
def test_json_lines(chosen: list[str], end: str, target: int) -> None:
    lines = [line.replace("\t", "\x01") for line in written({**JSON, **JSON_QUOTES}, chosen)]
    check("a.jsonl", raw_of(end.join(lines) + end), len(chosen), good_texts(chosen), target)


# An array is read up to the first of these.
DAMAGE = {*JSON_QUOTES, "word", "no value", "control character", "bad escape", "number", "long"}


@settings(max_examples=80, deadline=None)
@given(
    kinds(JSON),
    st.sampled_from(["plain", *JSON_QUOTES]),
    st.sampled_from([", ", ",", "\n,\n"]),
    st.sampled_from(["", "\xe9\u4e2d\U0001f600"]),
    st.sampled_from([7, 64, readers.CHUNK]),
)
@example(["plain"] * 49 + ["word", "plain"], "plain", ", ", "", 64)
def test_json_arrays(around: list[str], broken: str, comma: str, after: str, chunk: int) -> None:
    """Every element counts up to the first damage; the problem says where it is and how many bytes follow it."""
    chosen = [*around, broken, "plain"]
    content = raw_of(f'[{comma.join(written({**JSON, **JSON_QUOTES}, chosen))}, "{after}"]')
    damaged = next((number for number, kind in enumerate(chosen) if kind in DAMAGE), len(chosen))
    whole = damaged == len(chosen)
    with patch.object(readers, "CHUNK", chunk):
        results = check("a.json", content, damaged + 1, good_texts(chosen[:damaged]))
    last = results[-1]
    assert isinstance(last, Document) == whole
    if isinstance(last, Problem):
        at, rest = (
            re.fullmatch(r"byte (\d+)", last.place.split(", ")[1]),
            re.search(r"([\d,]+) bytes are", last.message),
        )
        assert at is not None
        left = 0 if rest is None else int(rest[1].replace(",", ""))
        assert int(at[1]) + left == len(content)
        assert last.place.startswith(f"element {damaged + 1}, ")


@settings(max_examples=30, deadline=None)
@given(kinds(CSV), st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from([",", "\t"]), st.booleans())
@example(["good"] * 12, "\r", ",", True)
@example(["good"] * 12, "\r", ",", False)
def test_tables(chosen: list[str], end: str, delimiter: str, named: bool) -> None:
    assume(not {"NUL", "not UTF-8"} <= set(chosen))  # together they make a binary file, which has no rows to count
    header = "n,text" if named else "n,other"
    rows = "".join(f"{row}\n" for row in [header, *written(CSV, chosen)])
    content = raw_of(rows.replace(",", delimiter).replace("\n", end))
    good = [text for text in good_texts(chosen) if named]
    check("a.csv" if delimiter == "," else "a.tsv", content, len(chosen), good)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["good", "null", "long"]), min_size=1, max_size=40), st.data())
def test_parquet(chosen: list[str], data: st.DataObject) -> None:
    """Damage anywhere but in the footer, without which nobody knows how many rows there were."""
    values = {"good": "text", "null": None, "long": LONG}
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [values[kind] for kind in chosen]}), out, row_group_size=7)
    raw = bytearray(out.getvalue())
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    for place in data.draw(st.lists(st.integers(4, footer - 1), max_size=3)):
        raw[place] ^= data.draw(st.integers(1, 255))
    check("a.parquet", bytes(raw), len(chosen), [])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["good", "not UTF-8", "empty"]), min_size=1, max_size=12), st.sampled_from([70, 2**24]))
def test_texts_with_marks(chosen: list[str], target: int) -> None:
    texts = {"good": "text {}", "not UTF-8": "a\udcff", "empty": ""}
    pages = [f"{MARK}\n{texts[kind].format(number)}\n" for number, kind in enumerate(chosen)]
    good = [f"{MARK}\n{text}" for text in good_texts(chosen)]
    check("a.txt", raw_of("".join(pages)), len(chosen), good, target, document_start=MARK)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.sampled_from(["good", "no length", "too short", "too long", "not text", "no kind", "notes"]),
        min_size=1, max_size=10,
    ),
    st.sampled_from(["", ".gz"]),
)  # fmt: skip
def test_crawls(chosen: list[str], suffix: str) -> None:
    records = []
    for number, kind in enumerate(chosen):
        text = f"text {number}".ljust(60, ".")
        length = {"no length": "many", "too short": 50, "too long": 75}.get(kind, len(text))
        media = "image/png" if kind == "not text" else "text/plain"
        of = {"no kind": "poem", "notes": "metadata"}.get(kind, "conversion")
        head = f"WARC/1.0\r\nWARC-Type: {of}\r\nContent-Type: {media}\r\nContent-Length: {length}\r\n\r\n"
        records.append(f"{head}{text}\r\n\r\n".encode())
    content = b"".join(records)
    good = [f"text {number}".ljust(60, ".") for number, kind in enumerate(chosen) if kind == "good"]
    count = len(chosen) - chosen.count("notes")
    check(f"a.wet{suffix}", gzip.compress(content) if suffix else content, count, good)


COMPRESSIONS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.compress, lambda raw: zlib.decompressobj(wbits=31).decompress(raw)),
    ".zst": (
        zstandard.ZstdCompressor().compress,
        lambda raw: zstandard.ZstdDecompressor().decompressobj().decompress(raw),
    ),
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.data())
def test_compressed_files_that_break_off(suffix: str, rows: int, data: st.DataObject) -> None:
    """All that can be decompressed is counted; nobody knows how much there was after it."""
    pack, unpack = COMPRESSIONS[suffix]
    content = "".join(json.dumps({"text": f"text {number * 7919 % 1000}"}) + "\n" for number in range(rows)).encode()
    whole = pack(content)
    cut = whole[: data.draw(st.integers(12, len(whole) - 1))]
    left = unpack(cut)
    lines = left.split(b"\n")
    good = [json.loads(line)["text"] for line in lines[:-1]]
    check(f"a.jsonl{suffix}", cut, len(good) + bool(lines[-1]), good)


def test_the_report_of_a_dataset_adds_up(tmp_path: Path) -> None:
    """All formats side by side, through the whole of preparing."""
    place = tmp_path / "in"
    place.mkdir()
    both = {**JSON, **JSON_QUOTES}
    array = [kind for kind in JSON if kind not in DAMAGE]
    elements = [*JSON, *(kind for each in JSON_QUOTES for kind in ("plain", each)), "plain"]
    rows = [kind for kind in CSV if kind != "NUL"]
    (place / "a.json").write_bytes(raw_of(f"[{', '.join(written(both, [*array, 'word', 'plain']))}]"))
    (place / "b.jsonl").write_bytes(raw_of("\r".join(written(both, [*elements, "plain"])).replace("\t", "\x01")))
    for end, name in (("\n", "c.csv"), ("\r", "d.csv"), ("\r\n", "e.csv")):
        (place / name).write_bytes(raw_of("\n".join(["n,text", *written(CSV, rows)]).replace("\n", end)))
    (place / "f.csv").write_text("n,other\n" + "1,2\n" * 9)
    pq.write_table(pa.table({"text": ["one", None, "three"]}), place / "g.parquet")
    (place / "h.txt").write_text("a whole text")
    data = DataConfig(source=str(place), tokenizer="bytes", split="document", validation=0.3)
    pack_corpus(request_of(data), tmp_path / "out", workers=0)
    report = read_report(tmp_path / "out")
    assert report is not None
    count = len(array) + 1 + len(elements) + 1 + 3 * len(rows) + 9 + 3 + 1
    assert report["records"] == count
    assert sum(report["kept"].values()) + sum(report["dropped"].values()) + report["damaged"] == count
