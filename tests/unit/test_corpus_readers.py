"""Readers: every record is a document or counted in a problem, whatever happened to the file."""

import bz2
import codecs
import functools
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.corpus import arrow, crawl, readers
from flatout.corpus import rows as rows_module
from flatout.corpus.document import REJECTED_UTF8, Document, InputFile, Problem, ReadOptions, Slice
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import find_files, slices_of
from flatout.data.tokenizer import Gpt2Tokenizer

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 6, mtime=0),
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data),
}
ROWS = ["one\u2028still one\u2029\u0085", "two\r", "", "three \U0001f600", "four\n\nfive\t\\"]

one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stored(folder: Path, name: str, content: bytes | str) -> InputFile:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (file,) = find_files(str(path)).files
    return file


def read(file: InputFile, *, piece: int = 2**24, limit: int = 2**26, **options) -> list[Document | Problem]:
    return read_part(Slice(file), piece, limit, **options)


def read_part(part: Slice, piece: int, limit: int = 2**26, **options) -> list[Document | Problem]:
    with (
        patch.object(readers, "PIECE", piece),
        patch.object(readers, "LINE_LIMIT", limit),
        patch.object(rows_module, "LINE_LIMIT", limit),
    ):
        return list(read_slice(part, ReadOptions(**options)))


def texts(results: list[Document | Problem]) -> list[str]:
    assert all(isinstance(result, Document) for result in results), results
    return [result.text for result in results]


def told(results: list[Document | Problem]) -> list[str | tuple[str, str, int]]:
    """Texts of documents; kind, place and records of problems."""
    return [
        result.text if isinstance(result, Document) else (result.kind, result.place, result.records)
        for result in results
    ]


# Text.


def test_a_text_file_is_one_document_with_its_line_ends_untouched(tmp_path: Path) -> None:
    content = "one\r\ntwo\rthree\u2028four\u0085\x0c\n"
    file = stored(tmp_path, "a.txt", codecs.BOM_UTF8 + content.encode())
    assert read(file) == [Document(content, divisible=True)]
    assert read(stored(tmp_path, "b.txt", codecs.BOM_UTF8)) == [Document("", divisible=True)]


def test_a_mark_at_the_beginning_of_a_line_begins_a_document(tmp_path: Path) -> None:
    content = "head\n<page>one <page>\nx\n  <page>two\n\t<page>three"
    file = stored(tmp_path, "a.txt", content)
    assert read(file, document_start="<page>") == [
        Document("head\n", "byte 0"),
        Document("<page>one <page>\nx\n", "byte 5"),
        Document("  <page>two\n", "byte 24"),
        Document("\t<page>three", "byte 36"),
    ]
    file = stored(tmp_path, "b.txt", codecs.BOM_UTF8 + b"<page>one\n<page>two")
    assert texts(read(file, document_start="<page>")) == ["<page>one\n", "<page>two"]
    assert texts(read(file, document_start="é")) == ["<page>one\n<page>two"]


@pytest.mark.parametrize("content", ["word " * 100, "語" * 100, "x" * 500, "word\n" * 60])
def test_a_long_text_comes_in_pieces(tmp_path: Path, content: str) -> None:
    file = stored(tmp_path, "a.txt", content)
    found = read(file, piece=64)
    assert "".join(texts(found)) == content
    assert [piece.begins for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(64 - 8 <= len(piece.text.encode()) <= 64 + 8 for piece in found[:-1])
    assert [piece.place for piece in found] == [
        f"byte {len(''.join(texts(found[:number])).encode())}" for number in range(len(found))
    ]


def test_invalid_utf8_in_a_text_follows_the_policy(tmp_path: Path) -> None:
    file = stored(tmp_path, "a.txt", codecs.BOM_UTF8 + b"ab\xffcd\xff")
    (problem,) = read(file)
    assert (problem.kind, problem.place, problem.records) == ("not-utf8", "byte 5", 1)
    assert "0xff" in problem.message
    assert read(file, invalid_utf8="replace") == [Document("ab\ufffdcd\ufffd", replaced=2, divisible=True)]
    assert read(file, invalid_utf8="skip") == [Document("", rejected=REJECTED_UTF8)]


def test_invalid_utf8_in_a_piece_rejects_the_piece(tmp_path: Path) -> None:
    file = stored(tmp_path, "a.txt", b"word " * 20 + b"\xff" + b" word" * 20)
    good, bad, problem, last = read(file, piece=70)
    assert (good.begins, good.ends, good.rejected) == (True, False, None)
    assert bad == Document("", "byte 74", False, False, rejected=REJECTED_UTF8)
    assert (problem.kind, problem.place, problem.records) == ("not-utf8", "byte 100", 0)
    assert (last.begins, last.ends, last.rejected) == (False, True, None)
    skipped = read(file, piece=70, invalid_utf8="skip")
    assert skipped == [good, bad, last]
    replaced = read(file, piece=70, invalid_utf8="replace")
    assert [piece.replaced for piece in replaced] == [0, 1, 0]


# Rows.


def test_json_lines_end_at_newline_only(tmp_path: Path) -> None:
    lines = [json.dumps({"text": row, "other": 1}, ensure_ascii=False) for row in ROWS]
    file = stored(tmp_path, "a.jsonl", codecs.BOM_UTF8 + "\r\n\n \t\n".join(lines).encode())
    assert read(file) == [Document(row, f"line {3 * number + 1}") for number, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("row", "kind", "part"),
    [
        ('{"text": ', "json", "not JSON"),
        ('{"text": "a"} {"text": "b"}', "json", "Extra data at character 14"),
        ('{"text": "a', "json", "not JSON: Unterminated string starting at character 9"),
        ('["text"]', "field", "list"),
        ("3", "field", "number"),
        ('{"content": "x", "id": 3}', "field", "content, id"),
        ('{"text": ["x"]}', "field", "list"),
        ('{"text": "a\\ud800"}', "surrogate", "surrogate"),
        ("[" * 100_000, "json", "nested too deeply"),
        ("1" * 10_000, "json", "digits"),
        ("\ufeff{}", "json", "BOM"),
        (b'{"text": "\xff"}', "not-utf8", "0xff"),
    ],
)
def test_a_bad_row_is_told_with_its_line_and_the_rest_is_read(
    tmp_path: Path, row: str | bytes, kind: str, part: str
) -> None:
    raw = row if isinstance(row, bytes) else row.encode()
    file = stored(tmp_path, "a.jsonl", b'{"text": "fine"}\n\n' + raw + b'\n{"text": "good"}\n')
    first, problem, last = read(file)
    assert (first.text, last) == ("fine", Document("good", "line 4"))
    assert (problem.kind, problem.records, problem.file) == (kind, 1, file.name)
    assert problem.place.startswith("line 3")
    assert part in problem.message


def test_policies_for_invalid_utf8_in_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        content = b'{"text": "a\xffb", "x": "\xff"}\n{"text": "\xc3\xa9"}'
        file = stored(tmp_path, name, content)
        first, last = read(file, invalid_utf8="replace")
        assert (first.text, first.replaced, last.text, last.replaced) == ("a\ufffdb", 2, "é", 0)
        first, last = read(file, invalid_utf8="skip")
        assert (first.text, first.rejected, last.text) == ("", REJECTED_UTF8, "é")
        problem, last = read(file)
        assert (problem.kind, problem.records, last.text) == ("not-utf8", 1, "é")
        assert problem.place.endswith("1, byte 11 of it")


def test_fields_are_paths(tmp_path: Path) -> None:
    rows = [{"a": {"b": ["x", "y"]}, "turns": [{"say": "hello"}, {"say": "bye"}], "c.d": "dots"}]
    file = stored(tmp_path, "a.jsonl", "".join(map(json.dumps, rows)))
    assert texts(read(file, fields=("a.b.1",))) == ["y"]
    assert texts(read(file, fields=("a.b.*",))) == ["x\ny"]
    assert texts(read(file, fields=("turns.*.say",))) == ["hello\nbye"]
    assert texts(read(file, fields=("c.d",))) == ["dots"]
    assert [result.kind for result in read(file, fields=("a.b.2",))] == ["field"]


TABLE = [
    {"content": "one", "body": None}, {"content": "", "body": "two"}, {"content": None, "body": "three"},
    {"content": "four", "body": "not this"}, {"content": None, "body": ""},
]  # fmt: skip


def test_only_a_name_that_a_command_line_takes_is_suggested(tmp_path: Path) -> None:
    long = "word " * 20
    for row, instead in (
        ({"id": "x7", "comment": long}, "comment"),
        ({"id": "x7", "note": "short"}, ""),
        ({"it's": long, "a b": long, "\x1b[31m": long, "x" * 100: long}, ""),
        ({"meta": {"page": long}}, "meta.page"),
        ({"messages": [{"role": "user", "content": "hello"}, {"role": "x", "content": "y"}]}, ""),
        ({"turns": [{"content": long}]}, "turns.*.content"),
        ({"n": 5}, ""),
    ):
        (problem,) = read(stored(tmp_path, "a.jsonl", json.dumps(row)))
        assert (problem.kind, problem.instead) == ("field", instead)


def table_in(suffix: str) -> bytes:
    """The same rows in a format."""
    if suffix == ".parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), sink)
        return sink.getvalue()
    if suffix in (".csv", ".tsv"):
        comma = "," if suffix == ".csv" else "\t"
        rows = [["content", "body"], *([value or "" for value in row.values()] for row in TABLE)]
        return "".join(comma.join(row) + "\n" for row in rows).encode()
    return json.dumps(TABLE).encode() if suffix == ".json" else "\n".join(map(json.dumps, TABLE)).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_of_several_fields_the_first_with_text_is_taken_in_each_record(tmp_path: Path, suffix: str) -> None:
    file = stored(tmp_path, f"a{suffix}", table_in(suffix))
    assert texts(read(file, fields=("missing", "content", "body"))) == ["one", "two", "three", "four", ""]
    assert texts(read(file, fields=("body", "content")))[3] == "not this"
    lost = read(file, fields=("text", "page"))
    assert sum(problem.records for problem in lost) == len(TABLE)
    assert lost[0].instead == "content"
    assert "'text'" in lost[0].message
    assert "'page'" in lost[0].message


def test_a_line_above_the_limit_is_told_and_left_out(tmp_path: Path) -> None:
    rows = ['{"text": "a"}', json.dumps({"text": "x" * 100}), '{"text": "b"}']
    file = stored(tmp_path, "a.jsonl", "\n".join(rows))
    assert told(read(file, limit=50)) == ["a", ("too-long", "line 2", 1), "b"]


def test_molecules_are_the_first_words(tmp_path: Path) -> None:
    file = stored(tmp_path, "a.smi", "Smiles name\nCCO ethanol\n\n  c1ccccc1\tbenzene\r\nsmiles\nO")
    assert told(read(file)) == ["CCO", "c1ccccc1", "smiles", "O"]
    assert [document.place for document in read(file)] == ["line 2", "line 4", "line 5", "line 6"]
    file = stored(tmp_path, "b.smiles", b"C\nC\xff\nN")
    assert told(read(file)) == ["C", ("not-utf8", "line 2, byte 1 of it", 1), "N"]


# JSON.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"text": "a"}, "b" , {"text": "c"}]', ["a", "b", "c"]),
        ('\ufeff \n[\n{"text": "a"}\n]\n', ["a"]),
        ('{"text": "a"}', ["a"]),
        ('"a"', ["a"]),
        ('{"text": "a"}{"text": "b"}\n\n{"text": "c"}', ["a", "b", "c"]),
        ("[]", []),
        ("  ", []),
        ("[3, [], null]", [("field", "element 1", 1), ("field", "element 2", 1), ""]),
        ('["a", {"x": 1}, "b"]', ["a", ("field", "element 2", 1), "b"]),
        ('["a", "\\ud800", "b"]', ["a", ("surrogate", "element 2", 1), "b"]),
        # Reading ends at the first damage.
        ('["a", {"text": }, {"text": "this is not read"}]', ["a", ("json", "element 2, byte 15", 1)]),
        ('["a" "b"]', ["a", ("json", "element 1, byte 5", 0)]),
        ('["a", "b, "c", "d"]', ["a", "b, ", ("json", "element 2, byte 11", 0)]),
        ('{"text": "a"}\n{"text": oh}\n{"text": "c", "more": 1}\n', ["a", ("json", "element 2, byte 23", 1)]),
        ('["a", ]', ["a"]),
        ('["a"', ["a", ("truncated", "element 1, byte 4", 0)]),
        ('["a", ', ["a", ("truncated", "element 1, byte 6", 0)]),
        ('["a", "b', ["a", ("truncated", "element 2, byte 6", 1)]),
        ('["a", {"text": "b",', ["a", ("truncated", "element 2, byte 19", 1)]),
        ('["a", {"text": nul\n', ["a", ("truncated", "element 2, byte 15", 1)]),
        ('["a"] "b"', ["a", ("json", "element 1, byte 6", 0)]),
        ('["a", ' + "[" * 100_000, ["a", ("json", "element 2, byte 6", 1)]),
        ('["a", ' + "1" * 10_000 + "]", ["a", ("json", "element 2, byte 6", 1)]),
        ("[1", [("field", "element 1", 1), ("truncated", "element 1, byte 2", 0)]),
    ],
)
def test_json_values_one_after_another(tmp_path: Path, content: str, expected: list) -> None:
    assert told(read(stored(tmp_path, "a.json", content))) == expected


def test_json_is_read_in_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"text": row * count, "n": 12345} for row in ROWS for count in (1, 3, 50)] + ["plain", "\u00e9" * 300]
    contents = [json.dumps(values, ensure_ascii=False, indent=indent) for indent in (None, 1)]
    contents.append("".join(json.dumps(value) for value in values))
    expected = [value if isinstance(value, str) else value["text"] for value in values]
    for content, step in itertools.product(contents, (1, 7, 64)):
        monkeypatch.setattr(readers, "CHUNK", step)
        found = read(stored(tmp_path, "a.json", content))
        assert texts(found) == expected
        # Places count bytes although the text is decoded and dropped as it goes.
        broken = read(stored(tmp_path, "a.json", content.rstrip("]") + ", é and what comes after it"))[-1]
        assert broken.kind == "json"
        assert broken.message.endswith("bytes are not read")
        assert broken.place.endswith(f"byte {len(content.rstrip(']').encode()) + (2 if content[0] == '[' else 0)}")


@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_an_element_above_the_limit_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(readers, "CHUNK", step)
    for long in ("x" * 200, '\\"], {' * 40, {"text": ['"' * 100, {"a": "]" * 99}]}):
        file = stored(tmp_path, "a.json", json.dumps(["a", long, "b"]))
        assert told(read(file, limit=100)) == ["a", ("too-long", "element 2, byte 6", 1)]


# Tokens.


@functools.cache
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer()


def token_file(documents: list[str], *, header: bool = False, before: bool = False) -> bytes:
    ids = [
        [*[50256][: int(before)], *gpt2().encode(document).tolist(), *[50256][: int(not before)]]
        for document in documents
    ]
    data = np.array(list(itertools.chain(*ids)), "<u2").tobytes()
    if header:
        numbers = np.zeros(256, "<i4")
        numbers[:3] = 20240520, 1, len(data) // 2
        data = numbers.tobytes() + data
    return data


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_tokens_become_text_again(tmp_path: Path, header: bool, before: bool) -> None:
    documents = [row for row in ROWS if row] + ["<|endoftext|> as text", "x" * 5000]
    for suffix, compress in {"": bytes, **COMPRESS}.items():
        file = stored(tmp_path, f"a.bin{suffix}", compress(token_file(documents, header=header, before=before)))
        assert texts(read(file)) == documents


def test_token_documents_may_be_empty_long_or_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = token_file(["one", "", "word " * 100])[:-2]
    file = stored(tmp_path, "a.bin", content)
    found = read(file, piece=64)
    assert texts(found[:2]) == ["one", ""]
    assert "".join(texts(found[2:])) == "word " * 100
    assert (found[2].begins, found[2].ends, found[-1].begins, found[-1].ends) == (True, False, False, True)
    assert {piece.place for piece in found[2:]} == {"token 3"}


def test_bad_tokens_cost_their_document_only(tmp_path: Path) -> None:
    good = token_file(["good"])
    ids = np.frombuffer(token_file(["word " * 100]), "<u2").copy()
    ids[2] = 50257
    file = stored(tmp_path, "a.bin", good + ids.tobytes() + good)
    assert told(read(file)) == ["good", ("format", "token 4", 1), "good"]
    # So much of it is read before the bad one is met that its first piece is handed on.
    ids = np.full(600_000, gpt2().encode(" word")[0], "<u2")
    ids[-10:] = 60000
    ids[-1] = 50256
    file = stored(tmp_path, "a.bin", good + ids.tobytes() + good)
    found = read(file, piece=2**20)
    assert (found[0].text, found[-1].text) == ("good", "good")
    assert (found[1].begins, found[1].ends, found[1].rejected) == (True, False, None)
    rejected, problem = found[-3:-1]
    assert (rejected.begins, rejected.ends, rejected.rejected) == (False, True, readers.REJECTED_TOKENS)
    assert (problem.kind, problem.place, problem.records) == ("format", "token 599992", 0)


def test_token_files_that_break_off_are_told(tmp_path: Path) -> None:
    content = token_file(["one", "two"], header=True)
    for suffix, compress in {"": bytes, **COMPRESS}.items():
        file = stored(tmp_path, f"a.bin{suffix}", compress(content[:-1]))
        assert told(read(file)) == ["one", "two", ("truncated", "token 3", 0), ("truncated", "token 3", 0)]
    file = stored(tmp_path, "b.bin", content + token_file(["more"]))
    assert told(read(file)) == ["one", "two", "more", ("format", "token 6", 0)]
    half = gpt2().encode("語")[:1].astype("<u2").tobytes()
    assert told(read(stored(tmp_path, "c.bin", half))) == [("not-utf8", "token 0, byte 0 of its text", 1)]


# Damage.


SAMPLES = {
    "a.txt": ("\n".join(f"line {number} of a text" for number in range(40)), 1),
    "a.jsonl": ("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(40)), 40),
    "a.json": (json.dumps([{"text": f"row {number}"} for number in range(40)]), 40),
    "a.smi": ("".join(f"C{number}{'O' * 9}\n" for number in range(40)), 40),
}


def sample(name: str) -> tuple[bytes, list[str]]:
    content, count = SAMPLES[name]
    whole = [content] if count == 1 else rows_of(name)
    return content.encode(), whole


def rows_of(name: str) -> list[str]:
    return [f"C{number}{'O' * 9}" if name == "a.smi" else f"row {number}" for number in range(40)]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_format_in_every_compression(tmp_path: Path, name: str, suffix: str) -> None:
    content, expected = sample(name)
    assert texts(read(stored(tmp_path, name + suffix, COMPRESS[suffix](content)))) == expected
    assert texts(read(stored(tmp_path, name, content))) == expected


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_file_gives_what_is_whole_and_counts_what_is_not(tmp_path: Path, name: str, suffix: str) -> None:
    content, expected = sample(name)
    # Many small members let every compression give up part of the text.
    members = [COMPRESS[suffix](content[start : start + 50]) for start in range(0, len(content), 50)]
    data = b"".join(members)
    inside = sum(map(len, members[:6])) + len(members[6]) // 2
    for cut in (3, inside, len(data) - 5):
        *documents, problem = read(stored(tmp_path, name + suffix, data[:cut]))
        assert problem.kind == "truncated"
        found = texts(documents)
        if name == "a.txt":
            assert problem.records == (0 if documents else 1)
            assert all(expected[0].startswith(text) and text for text in found)
            assert cut == 3 or found
        else:
            assert problem.records in (0, 1)
            assert found == expected[: len(found)]
            assert cut == 3 or 0 < len(found) + problem.records < len(expected) + 1


def test_a_truncated_text_ends_with_a_whole_character(tmp_path: Path) -> None:
    data = gzip.compress("é".encode() * 50)[:-8]  # the end of the data is there, its checksum is not
    members = gzip.compress("語語".encode()[:4]) + gzip.compress(b"rest")[:10]
    assert told(read(stored(tmp_path, "a.txt.gz", members)))[0] == "語"
    document, problem = read(stored(tmp_path, "b.txt.gz", data))
    assert (document, problem.kind, problem.records) == (Document("é" * 50, divisible=True), "truncated", 0)


@pytest.mark.parametrize("name", SAMPLES)
def test_garbage_after_a_member_is_told(tmp_path: Path, name: str) -> None:
    content, expected = sample(name)
    *documents, problem = read(stored(tmp_path, name + ".gz", gzip.compress(content) + b"garbage"))
    assert texts(documents) == expected
    assert (problem.kind, problem.records) == ("compression", 0)


def test_a_bomb_is_no_document(tmp_path: Path) -> None:
    data = gzip.compress(b"a" * 2**25, 9)
    rejected, problem = read(stored(tmp_path, "a.txt.gz", data), piece=2**26)
    assert (rejected.text, rejected.rejected) == ("", readers.REJECTED_BOMB)
    assert (problem.kind, problem.records) == ("bomb", 0)
    (problem,) = read(stored(tmp_path, "a.jsonl.gz", data))
    assert (problem.kind, problem.records) == ("bomb", 1)


def test_a_nul_in_one_line_costs_that_line_only(tmp_path: Path) -> None:
    rows = [b'{"text": "a"}', b'{"text": "b\0"}', b'{"text": "c"}', b'{"text": null}']
    items = read(stored(tmp_path, "a.jsonl", b"\n".join(rows)))
    assert [item.text for item in items if isinstance(item, Document)] == ["a", "c", ""]
    assert [(item.kind, item.place) for item in items if isinstance(item, Problem)] == [("json", "line 2")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.smi", "a.csv", "a.tsv"])
def test_a_binary_file_is_told_once_and_left(tmp_path: Path, name: str) -> None:
    content = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\n" * 100
    expected = ("binary", "", 1 if name == "a.txt" else 0)
    assert told(read(stored(tmp_path, name, content))) == [expected]
    assert told(read(stored(tmp_path, name + ".gz", gzip.compress(content)))) == [expected]
    file = stored(tmp_path, name, content)
    if name != "a.json" and file.format not in ("csv", "tsv"):
        assert list(read_slice(Slice(file, 100, 200), ReadOptions())) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_that_went_away_is_told(tmp_path: Path, name: str) -> None:
    file = stored(tmp_path, name, b"some text")
    (tmp_path / name).unlink()
    assert told(read(file)) == [("unreadable", "byte 0", 1 if name == "a.txt" else 0)]
    if name != "a.json":
        # No slice is silent, and the file's one record is counted once.
        (problem,) = read_slice(Slice(file, 5, None), ReadOptions())
        assert (problem.kind, problem.records) == ("unreadable", 0)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.smi", "a.bin"])
@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("policy", ["strict", "replace", "skip"])
def test_random_damage_never_raises(tmp_path: Path, name: str, suffix: str, policy: str) -> None:
    random = Random(f"{name}{suffix}{policy}")
    content = token_file(ROWS) if name == "a.bin" else sample(name)[0]
    whole = COMPRESS[suffix](content) if suffix else content
    for _ in range(15):
        data = bytearray(whole)
        for _ in range(random.randint(1, 5)):
            start = random.randrange(len(data))
            damage = random.choice([b"", random.randbytes(3), b"\n", b'"', b"\xff"])
            data[start : start + random.randint(0, 4)] = damage
        file = replace(stored(tmp_path, name + suffix, bytes(data)), bytes=len(data))
        results = read(file, piece=64, invalid_utf8=policy)
        assert results
        most = 1 if name != "a.json" else content.count(b"text")  # broken elements side by side are one problem
        assert all(0 <= result.records <= most for result in results if isinstance(result, Problem))


# Slices.


def assert_slices_agree(file: InputFile, target: int, piece: int, **options) -> None:
    def content(results: list[Document | Problem]) -> list:
        # Places are lines in the first slice and bytes in the others.
        return [
            replace(result, place="") if isinstance(result, Document) else (result.kind, result.records)
            for result in results
        ]

    whole = read(file, piece=piece, **options)
    slices = slices_of(file, target)
    assert slices is not None
    sliced = [read_part(part, piece, **options) for part in slices]
    assert content(list(itertools.chain(*sliced))) == content(whole)


WORDS = st.lists(
    st.sampled_from(["a", "word", " ", "\n", "é", "語", "\n<D>", "\n <D>", "x" * 30, b"\xff"]), max_size=60
)


def joined(words: list[str | bytes]) -> bytes:
    return b"".join(word if isinstance(word, bytes) else word.encode() for word in words) or b"x"


@one_folder
@given(
    WORDS,
    st.integers(1, 300),
    st.integers(64, 150),
    st.sampled_from([None, "<D>"]),
    st.sampled_from(["strict", "replace"]),
)
def test_slices_of_a_text_give_its_documents(
    tmp_path: Path, words: list[str | bytes], target: int, piece: int, mark: str | None, policy: str
) -> None:
    raw = joined(words)
    file = stored(tmp_path, "a.txt", raw)
    assert_slices_agree(file, target, piece, document_start=mark, invalid_utf8=policy)
    for suffix in (".gz", ".zst"):
        packed = stored(tmp_path, f"a.txt{suffix}", COMPRESS[suffix](raw))
        options = {"document_start": mark, "invalid_utf8": policy, "piece": piece}
        assert [
            replace(result, file="") if isinstance(result, Problem) else result for result in read(packed, **options)
        ] == [replace(result, file="") if isinstance(result, Problem) else result for result in read(file, **options)]


@one_folder
@given(
    st.lists(
        st.sampled_from(['{"text": "a"}', '{"text": "é語"}', "", " ", "{", '{"x": 1}', '{"text": "' + "x" * 40 + '"}'])
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 60),
    st.booleans(),
)
def test_slices_of_rows_give_the_rows(tmp_path: Path, rows: list[str], end: str, target: int, signed: bool) -> None:
    raw = (codecs.BOM_UTF8 if signed else b"") + (end.join(rows) + end).encode()
    assert_slices_agree(stored(tmp_path, "a.jsonl", raw), target, 64)
    assert_slices_agree(stored(tmp_path, "a.smi", b"SMILES\n" + raw), target, 64)


def test_places_in_later_slices_are_bytes(tmp_path: Path) -> None:
    file = stored(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b"}\nnonsense\n')
    assert [result.place for result in read_slice(Slice(file, 1, None), ReadOptions())] == ["byte 14", "byte 28"]


# Other formats.


@pytest.mark.parametrize("format", ["parquet", "hub", "csv", "tsv", "warc"])
def test_tables_and_crawls_are_read_by_their_modules(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def record(*arguments):
        calls.append(arguments)
        return iter([Document("text")])

    module, name = {
        "parquet": (arrow, "read_parquet"),
        "hub": (arrow, "HubStream"),
        "csv": (readers, "read_csv"),
        "tsv": (readers, "read_csv"),
        "warc": (crawl, "read_warc"),
    }[format]
    monkeypatch.setattr(module, name, record)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    file, options = InputFile(str(path), "file", format, "none", 7), ReadOptions(fields=("x",))
    assert list(read_slice(Slice(file, 2, 5), options)) == [Document("text")]
    (arguments,) = calls
    if format == "parquet":
        assert arguments == (Slice(file, 2, 5), options)
    elif format == "hub":
        assert arguments == (file.path, options, file.name)
    else:
        assert arguments[1:] == (file, options)


def test_an_unknown_format_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no reader"):
        read(replace(stored(tmp_path, "a.txt", b"x"), format="pdf"))
