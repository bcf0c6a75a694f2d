"""Tables: every row of parquet, CSV and Hugging Face datasets is a document or accounted for, whatever is damaged."""

import codecs
import csv
import gzip
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout import corpus
from flatout.corpus import readers
from flatout.corpus import rows as rows_module
from flatout.corpus.arrow import HubStream, parquet_group_bytes, read_parquet
from flatout.corpus.document import Document, InputFile, Problem, ReadOptions, Slice
from flatout.corpus.rows import FieldError, read_csv, text_of
from flatout.corpus.sources import hub_parts, slices_of
from flatout.corpus.streams import ByteStream
from flatout.errors import DataError
from tests.handmade import Memory

# One text for each trap: line ends of all kinds, quotes, separators, more than one byte, nothing.
TEXTS = ["plain", "two\nlines", "\u2028 and \x85 and \x0b\x0c\x1c", 'a "quote", or two""', "\r", "馬克·吐溫", "", " \t"]


def texts(results: Iterable[Document | Problem]) -> list[str]:
    return [result.text for result in results if isinstance(result, Document)]


def problems(results: Iterable[Document | Problem]) -> list[Problem]:
    return [result for result in results if isinstance(result, Problem)]


def lost(results: Iterable[Document | Problem]) -> int:
    return sum(problem.records for problem in problems(results))


def input_file(path: Path, format: str, method: str = "none") -> InputFile:
    return InputFile(str(path), path.name, format, method, path.stat().st_size)


# Fields.


def test_a_field_is_a_path() -> None:
    record = {
        "text": "a",
        "page": {"body": "b", "parts": ["c", {"x": "d"}]},
        "talk": [{"say": "e"}, {"say": "f"}],
        "page.dot": "g",
        "deep": [["h", "i"], ["j"]],
        "none": [],
        "1": "k",
    }
    assert text_of(record, "text") == "a"
    assert text_of(record, "page.body") == "b"
    assert text_of(record, "page.parts.0") == "c"
    assert text_of(record, "page.parts.1.x") == "d"
    assert text_of(record, "talk.*.say") == "e\nf"
    assert text_of(record, "page.dot") == "g"
    assert text_of(record, "deep.*.*") == "h\ni\nj"
    assert text_of(record, "none.*") == ""
    assert text_of(record, "1") == "k"
    assert text_of("itself", "text") == "itself"


@pytest.mark.parametrize(
    ("record", "field", "words"),
    [
        ({"a": 1, "b\n": 2}, "text", ["lacks", "'text'", "a, b\\n"]),
        ({str(number): 0 for number in range(20)}, "text", ["7 and 12 more"]),
        ({"text": 3}, "text", ["a number"]),
        ({"text": True}, "text", ["a boolean"]),
        ({"text": ["x"]}, "text", ["a list of 1"]),
        ({"text": {"inner": "x"}}, "text", ["an object with inner"]),
        ({"text": b"x"}, "text", ["bytes"]),
        ({"a": {"c": "x"}}, "a.b", ["'b' of 'a.b'", "c"]),
        ({"a": "x"}, "a.b", ["a text", "'b' of 'a.b'"]),
        ({"a": ["x"]}, "a.b", ["a list"]),
        ({"a": ["x"]}, "a.1", ["element", "has 1"]),
        ({"a": ["x"]}, "a." + "9" * 5000, ["has 1"]),
        ({"a": ["x"]}, "a.²", ["a list"]),
        ({"a": ["x", None]}, "a.*", ["null"]),
        ("plain", "body", ["a plain string", "'body'"]),
        (7, "text", ["a number"]),
    ],
)
def test_a_field_that_holds_no_text_says_what_is_there(record: object, field: str, words: list[str]) -> None:
    error = text_of(record, field)
    assert isinstance(error, FieldError)
    assert error.kind == "field"
    assert not error.null
    assert all(word in error.message for word in words), error.message
    assert error.message.isprintable()
    assert len(error.message) < 1000


def test_null_and_half_surrogates_are_told_apart() -> None:
    for record, field in (({"text": None}, "text"), ({"a": None}, "a.b"), ({"a": {"b": None}}, "a.b")):
        error = text_of(record, field)
        assert isinstance(error, FieldError)
        assert error.null
    for record in ({"text": "x\ud800"}, "x\ud800"):
        error = text_of(record, "text")
        assert isinstance(error, FieldError)
        assert error.kind == "surrogate"
        assert "\\ud800" in error.message


def test_bytes_are_text_only_with_a_decoder() -> None:
    assert text_of({"a": [b"x", "y"]}, "a.*", bytes.decode) == "x\ny"
    assert isinstance(text_of({"a": [b"x", "y"]}, "a.*"), FieldError)


# Parquet.


def parquet(folder: Path, columns: dict[str, Any], **settings: Any) -> InputFile:
    path = folder / "table.parquet"
    pq.write_table(pa.table(columns), path, **settings)
    return input_file(path, "parquet")


def read_table(
    file: InputFile, field: str = "text", policy: str = "strict", first: int = 0, last: int | None = None
) -> list:
    return list(read_parquet(Slice(file, first, last), ReadOptions(fields=(field,), invalid_utf8=policy)))


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_rows_come_back_in_order(tmp_path: Path, compression: str, dictionary: bool) -> None:
    rows = TEXTS * 100
    columns = {"id": range(len(rows)), "text": rows}
    file = parquet(tmp_path, columns, compression=compression, use_dictionary=dictionary, row_group_size=300)
    results = read_table(file)
    assert texts(results) == rows
    assert [result.place for result in results] == [f"row {number}" for number in range(1, 801)]


@pytest.mark.parametrize("shares", [2, 3, 7, 400])
def test_shares_of_row_groups_join_to_all_of_them(tmp_path: Path, shares: int) -> None:
    rows = [f"row {number} {'x' * (number % 5)}" for number in range(1000)]
    file = parquet(tmp_path, {"text": rows}, row_group_size=600, write_page_checksum=True)
    options = ReadOptions()
    whole = list(read_parquet(Slice(file), options))

    def joined(field: str = "text") -> list:
        return [
            result
            for group in range(2)
            for share in range(shares)
            for result in read_parquet(Slice(file, group, group + 1, share, shares), ReadOptions(fields=(field,)))
        ]

    assert joined() == whole
    assert sum(problem.records for problem in joined("none")) == 1000
    # Damage costs the same rows, each told of by the share it is in.
    raw = bytearray((tmp_path / "table.parquet").read_bytes())
    raw[200] ^= 1
    (tmp_path / "table.parquet").write_bytes(raw)
    whole = list(read_parquet(Slice(file), options))
    damaged = joined()
    assert texts(damaged) == texts(whole)
    for results in (whole, damaged):
        assert sum(result.records for result in results if isinstance(result, Problem)) == 600


@pytest.mark.parametrize(
    "type",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.binary()),
    ],
    ids=str,
)
def test_all_types_of_text_columns_are_read(tmp_path: Path, type: pa.DataType) -> None:
    text = pa.array([*TEXTS, None], pa.binary() if "binary" in str(type) else pa.string()).cast(type)
    assert read_table(parquet(tmp_path, {"text": text})) == [
        Document(text, f"row {number}") for number, text in enumerate([*TEXTS, ""], start=1)
    ]


def test_columns_with_fields_are_read_along_the_path(tmp_path: Path) -> None:
    columns = {
        "page": [{"body": "a", "n": 1}, {"body": None, "n": 2}, None],
        "talk": [[{"say": "b"}, {"say": "c"}], [], None],
        "mixed": pa.array([{"list": [{"x": "d"}]}] * 3),
        "dotted.name": ["e", "f", "g"],
        "map": pa.array([[("k", "h")], [("k", "i")], [("k", "j")]], pa.map_(pa.string(), pa.string())),
        "inner": [{"a.b": "l"}] * 3,
    }
    file = parquet(tmp_path, columns)
    assert texts(read_table(file, "page.body")) == ["a", "", ""]
    assert texts(read_table(file, "talk.*.say")) == ["b\nc", "", ""]
    assert texts(read_table(file, "mixed.list.0.x")) == ["d"] * 3
    assert texts(read_table(file, "dotted.name")) == ["e", "f", "g"]
    assert texts(read_table(file, "map.k")) == ["h", "i", "j"]
    assert texts(read_table(file, "inner.a.b")) == ["l"] * 3
    first, *others = read_table(file, "talk.0.say")
    assert first.text == "b"
    assert others[0].kind == "field"
    assert "has 0" in others[0].message
    assert others[1] == Document("", "row 3")  # null is no text, and no damage


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("body", ["no column 'body'", "id, page, talk"]),
        ("page.text", ["lacks the field 'text' of 'page.text'", "body"]),
        ("id", ["int64, not text"]),
        ("id.x", ["a number where"]),
        ("page", ["an object with body"]),
        ("talk.say", ["a list where"]),
        ("talk.*", ["an object with say"]),
    ],
)
def test_a_field_that_no_row_has_is_a_problem_of_all_rows(tmp_path: Path, field: str, words: list[str]) -> None:
    columns = {"id": [1, 2, 3], "page": [{"body": "a"}] * 3, "talk": [[{"say": "b"}]] * 3}
    found = read_table(parquet(tmp_path, columns), field)
    assert {problem.kind for problem in found} == {"field"}
    assert sum(problem.records for problem in found) == 3
    assert all(word in found[0].message for word in words), found[0].message


def test_texts_in_parquet_follow_the_policy(tmp_path: Path) -> None:
    bad = pa.array([b"fine", b"caf\xe9", b"good"])
    string = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    for column, field in ((bad, "text"), (string, "text"), (string.dictionary_encode(), "text")):
        file = parquet(tmp_path, {"text": column})
        first, problem, last = read_table(file, field)
        assert (first.text, last.text) == ("fine", "good")
        assert (problem.kind, problem.records, problem.place) == ("not-utf8", 1, "row 2, byte 3 of it")
        assert read_table(file, field, "replace")[1] == Document("caf\ufffd", "row 2", replaced=1)
        assert read_table(file, field, "skip")[1] == Document("", "row 2", rejected="invalid_utf8")


def test_groups_of_rows_are_read_by_themselves(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(25)]
    file = parquet(tmp_path, {"text": rows}, row_group_size=10)
    sizes = parquet_group_bytes(file.path)
    assert len(sizes) == 3
    assert all(size > 0 for size in sizes)
    for cut in range(4):
        assert read_table(file, last=cut) + read_table(file, first=cut) == read_table(file)
    assert [result.place for result in read_table(file, first=2)] == [f"row {number}" for number in range(21, 26)]
    assert [problem.records for problem in read_table(file, "no", first=1, last=2)] == [10]


def test_a_damaged_row_group_costs_its_rows_and_no_others(tmp_path: Path) -> None:
    rows = [f"the text of row {number}" for number in range(30)]
    settings = {"row_group_size": 10, "use_dictionary": False, "compression": "zstd"}
    file = parquet(tmp_path, {"text": rows}, write_page_checksum=True, **settings)
    group = pq.ParquetFile(file.path).metadata.row_group(1).column(0)
    data = bytearray(Path(file.path).read_bytes())
    middle = group.data_page_offset + group.total_compressed_size // 2
    data[middle : middle + 4] = b"\xff" * 4
    Path(file.path).write_bytes(data)
    results = read_table(file)
    assert texts(results) == rows[:10] + rows[20:]
    (problem,) = problems(results)
    assert (problem.kind, problem.records, problem.place) == ("format", 10, "row 11")
    assert results.index(problem) == 10
    assert texts(read_table(file, first=2)) == rows[20:]


def test_parquet_cut_anywhere_says_that_it_is(tmp_path: Path) -> None:
    file = parquet(tmp_path, {"text": ["a", "b"]}, compression="none")
    data = Path(file.path).read_bytes()
    for cut in {*range(1, len(data), 9), *range(1, 20), *range(len(data) - 20, len(data))}:
        Path(file.path).write_bytes(data[:cut])
        (problem,) = read_table(file)
        assert (problem.kind, problem.records) == ("truncated", 0), cut
        assert "nothing" in problem.message
        assert read_table(file, first=1) == []
    assert parquet_group_bytes(file.path) == []


def test_a_changed_byte_in_parquet_loses_no_row_in_silence(tmp_path: Path) -> None:
    rows = [f"text {number}" for number in range(6)]
    file = parquet(tmp_path, {"text": rows}, row_group_size=2, compression="snappy", write_page_checksum=True)
    data = Path(file.path).read_bytes()
    for place in range(0, len(data), 7):
        Path(file.path).write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        results = read_table(file)
        # Either every row is accounted for, or it is said that the table cannot be told.
        assert problems(results) or len(results) == len(rows), place
        assert len(texts(results)) + lost(results) >= len(rows) or not texts(results), (place, results)


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    for data in (b"hello world" * 100, b"\0" * 50, b"PARE" + bytes(40) + b"PARE"):
        path.write_bytes(data)
        (problem,) = read_table(input_file(path, "parquet"))
        assert (problem.kind, problem.records) == ("format", 0)
    path.write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    assert [(problem.kind, problem.records) for problem in read_table(input_file(path, "parquet"))] == [("format", 0)]
    path.unlink()
    assert [problem.kind for problem in read_table(InputFile(str(path), "x", "parquet", "none", 0))] == ["unreadable"]


def test_a_long_row_group_is_not_held_in_memory(tmp_path: Path) -> None:
    rows = ["x" * 50_000 + str(number) for number in range(600)]
    file = parquet(tmp_path, {"text": rows}, use_dictionary=False, compression="none", write_batch_size=10)
    assert len(parquet_group_bytes(file.path)) == 1
    del rows
    before = pa.total_allocated_bytes()
    count = peak = 0
    for result in read_parquet(Slice(file), ReadOptions()):
        assert isinstance(result, Document)
        count += 1
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == 600
    assert peak < 16 * 2**20 < file.bytes


def test_a_value_above_the_limit_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "LINE_LIMIT", 100)
    results = read_table(parquet(tmp_path, {"text": ["short", "é" * 60, "é" * 50]}))
    assert texts(results) == ["short", "é" * 50]
    assert [(problem.kind, problem.records, problem.place) for problem in problems(results)] == [
        ("too-long", 1, "row 2")
    ]


def test_a_file_name_need_not_be_text(tmp_path: Path) -> None:
    file = parquet(tmp_path, {"text": TEXTS})
    odd = os.path.join(os.fsencode(tmp_path), b"\xff.parquet")
    os.rename(file.path, odd)
    assert texts(read_table(InputFile(os.fsdecode(odd), "odd", "parquet", "none", 1))) == TEXTS
    assert len(parquet_group_bytes(os.fsdecode(odd))) == 1


# CSV.


CSV = InputFile("table.csv", "table.csv", "csv", "none", 0)


def read_rows(
    data: bytes | str, field: str = "text", policy: str = "strict", delimiter: str = ",", step: int = 2**20, **more: Any
) -> list:
    data = data.encode() if isinstance(data, str) else data
    stream = Memory(data, more.pop("problem", None), step)
    file = replace(CSV, format="csv" if delimiter == "," else "tsv")
    with patch.object(rows_module, "LINE_LIMIT", more.get("limit", rows_module.LINE_LIMIT)):
        return list(read_csv(stream, file, ReadOptions(fields=(field,), invalid_utf8=policy)))


def written(rows: Iterable[Iterable[object]], **settings: Any) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, **settings).writerows(rows)
    return file.getvalue()


VALUES = st.text(st.sampled_from('ab,\t"\n\r \u2028\x85é\x1c;'), max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    delimiter=st.sampled_from([",", "\t"]),
    step=st.sampled_from([1, 3, 2**20]),
)
@example(rows=[("\r", "", "x"), ("", "", "")], end="\n", quoting=csv.QUOTE_ALL, delimiter=",", step=1)
def test_what_is_written_as_csv_comes_back(
    rows: list[tuple[str, str, str]], end: str, quoting: Any, delimiter: str, step: int
) -> None:
    data = written([("a", "text", "b"), *rows], lineterminator=end, quoting=quoting, delimiter=delimiter)
    assert texts(read_rows(data, delimiter=delimiter, step=step)) == [row[1] for row in rows]
    assert problems(read_rows(data, delimiter=delimiter, step=step)) == []


def test_places_are_lines_and_blank_lines_are_no_rows() -> None:
    results = read_rows('text,n\n"one\ntwo",1\n\n\r\nthree,2\n"",3\n')
    assert [(result.text, result.place) for result in results] == [
        ("one\ntwo", "line 2"),
        ("three", "line 6"),
        ("", "line 7"),
    ]


def test_bare_quotes_and_carriage_returns_are_characters() -> None:
    assert texts(read_rows('n,text\n1,5" disk\n2,a\rb\n3,it"s"\n4,"c\rd"\n')) == ['5" disk', "a\rb", 'it"s"', "c\rd"]


@pytest.mark.parametrize("step", [1, 7, 2**20])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_line_above_the_limit_costs_its_row_alone(step: int, quote: str) -> None:
    long = f"{quote}{'x' * 200}{quote}"
    results = read_rows(f"id,text\n1,a\n2,{long}\n3,b\n4,{long}", limit=100, step=step)
    assert texts(results) == ["a", "b"]
    found = [(problem.kind, problem.records, problem.place) for problem in problems(results)]
    assert found == [("too-long", 1, "line 3"), ("too-long", 1, "line 5")]


def test_a_line_above_the_limit_inside_quotes_costs_the_row_it_is_in() -> None:
    results = read_rows(f'id,text\n1,"a\n{"x" * 200}"\n2,b\n', limit=100)
    assert texts(results) == ["b"]
    (problem,) = problems(results)
    assert (problem.kind, problem.records, problem.place) == ("too-long", 1, "line 2")


def test_a_byte_order_mark_and_quoted_names_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(codecs.BOM_UTF8 + b'"text","the ""n"""\r\nx,1\r\n'))
    file = input_file(path, "csv", "gz")
    with ByteStream(file) as stream:
        assert list(read_csv(stream, file, ReadOptions())) == [Document("x", "line 2")]
    assert texts(read_rows('"text","the ""n"""\r\nx,1\r\n', 'the "n"')) == ["1"]
    assert texts(read_rows("\ufefftext\nx\n", step=1)) == ["x"]


def test_a_missing_column_is_told_once() -> None:
    (problem,) = read_rows("id,body\n1,x\n2,y\n")
    assert (problem.kind, problem.records) == ("field", 2)
    assert "id, body" in problem.message
    assert problem.instead == "body"
    assert read_rows("") == read_rows("\n\n") == read_rows("text\n") == []


def test_rows_with_other_columns_are_problems() -> None:
    results = read_rows("id,text\n1,a\n2\n3,b,c\n4,d\n")
    assert texts(results) == ["a", "d"]
    assert [(problem.kind, problem.records, problem.place) for problem in problems(results)] == [
        ("csv", 1, "line 3"),
        ("csv", 1, "line 4"),
    ]


def test_something_after_a_closing_quote_is_a_problem() -> None:
    results = read_rows('id,text\n1,"a "b" c"\n2,"d\ne" ,f\n3,g\n')
    assert texts(results) == ["g"]
    assert [(problem.kind, problem.records, problem.place) for problem in problems(results)] == [
        ("csv", 1, "line 2"),
        ("csv", 1, "line 3"),
    ]
    assert "lines 3 to 4" in problems(results)[1].message


def test_a_quote_that_is_not_closed_is_a_problem() -> None:
    results = read_rows('id,text\n1,a\n2,"b\n3,c\n4,d\n')
    assert texts(results) == ["a"]
    (problem,) = problems(results)
    assert (problem.kind, problem.records, problem.place) == ("csv", 1, "line 3")
    assert "lines 3 to" in problem.message


def test_bytes_that_are_no_text_are_problems_of_their_row() -> None:
    data = b"id,text\n1,caf\xe9\n2,a\0b\n3,fine\n"
    results = read_rows(data)
    assert texts(results) == ["fine"]
    assert [(problem.kind, problem.records) for problem in problems(results)] == [("not-utf8", 1), ("binary", 1)]
    assert problems(results)[0].place == "line 2, byte 3 of it"
    assert read_rows(data, policy="replace")[0] == Document("caf\ufffd", "line 2", replaced=1)
    assert read_rows(data, policy="skip")[0] == Document("", "line 2", rejected="invalid_utf8")


@settings(max_examples=150, deadline=None)
@given(
    data=st.text(st.sampled_from('ab,"\n\r'), max_size=40),
    step=st.sampled_from([1, 2, 5]),
    limit=st.sampled_from([5, 99]),
)
@example(data='"""\n"\n', step=1, limit=1)
@example(data='"aaaaaaaa"', step=1, limit=5)
def test_it_does_not_matter_how_much_is_read_at_once(data: str, step: int, limit: int) -> None:
    data = "text\n" + data
    assert read_rows(data, step=step, limit=limit) == read_rows(data, limit=limit)


ROWS = [("id", "text"), ("1", "first"), ("2", 'with "quotes"\nand lines'), ("3", "third"), ("4", "last, quoted")]


def test_csv_cut_anywhere_gives_a_prefix_and_tells_the_loss() -> None:
    data = written(ROWS, lineterminator="\r\n").encode()
    expected = [row[1] for row in ROWS[1:]]
    damage = Problem("table.csv", "compressed byte 9", "truncated", "it ends", records=0)
    for cut in range(len(b"id,text\r\n"), len(data) + 1):
        results = read_rows(data[:cut])
        found = texts(results)
        whole = found[:-1] if found and found[-1] != expected[len(found) - 1] else found
        assert whole == expected[: len(whole)]
        # A last value without quotes may have been longer; nothing in the file says so.
        assert all(expected[len(whole)].startswith(text) for text in found[len(whole) :])
        assert all((problem.kind, problem.records) == ("csv", 1) for problem in problems(results))
        # If the stream says that it was cut, what is not whole is lost.
        *rows, problem = read_rows(data[:cut], problem=damage)
        assert texts(rows) == expected[: len(rows)]
        assert problem.kind == "truncated"
        assert problem.records == (data[:cut].endswith((b"\r\n", b"\n")) is False) or data[:cut].count(b'"') % 2
        assert len(rows) == len(list(csv.reader(io.StringIO(data[:cut].decode())))) - 1 - problem.records


def test_a_compressed_csv_that_breaks_off_keeps_its_rows(tmp_path: Path) -> None:
    rows = [("text",), *((f"row {number} " + "x" * 50,) for number in range(5000))]
    data = gzip.compress(written(rows).encode())
    path = tmp_path / "table.csv.gz"
    path.write_bytes(data[: len(data) // 2])
    file = input_file(path, "csv", "gz")
    with ByteStream(file) as stream:
        *found, problem = read_csv(stream, file, ReadOptions())
    assert len(found) > 1000
    assert texts(found) == [row[0] for row in rows[1 : len(found) + 1]]
    assert isinstance(problem, Problem)
    assert (problem.kind, problem.records) == ("truncated", 1)


# The hub.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for number in range(3):
        rows = [json.dumps({"text": f"{number}-{row}", "page": {"n": [str(row)]}}) for row in range(5)]
        (tmp_path / f"train-{number}.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "test.jsonl").write_text('{"text": "held out", "page": {"n": ["x"]}}\n')
    return tmp_path


EXPECTED = [f"{number}-{row}" for number in range(3) for row in range(5)]


def read_stream(folder: Path, tail: str = "", field: str = "text") -> list:
    path = f"hf:{folder}{tail}"
    return list(HubStream(path, ReadOptions(fields=(field,))))


def test_a_dataset_is_streamed_in_order(hub: Path) -> None:
    results = read_stream(hub)
    assert results == [Document(text, f"row {number}") for number, text in enumerate(EXPECTED, start=1)]
    assert texts(read_stream(hub, "::test")) == ["held out"]
    assert texts(read_stream(hub, ":default:train")) == EXPECTED
    assert texts(read_stream(hub, field="page.n.0"))[:5] == ["0", "1", "2", "3", "4"]


def test_streaming_goes_on_after_any_document(hub: Path) -> None:
    stream = HubStream(f"hf:{hub}", ReadOptions())
    states = [(stream.state_dict(), 0)]
    for done, _ in enumerate(stream, start=1):
        states.append((stream.state_dict(), done))
    for state, done in states:
        again = HubStream(f"hf:{hub}", ReadOptions())
        again.load_state_dict(json.loads(json.dumps(state)))
        results = list(again)
        assert texts(results) == EXPECTED[done:], done
        assert [result.place for result in results] == [f"row {number}" for number in range(done + 1, 16)]
        # What came to its end begins anew.
        assert texts(again) == EXPECTED
    left = HubStream(f"hf:{hub}", ReadOptions())
    assert texts(itertools.islice(left, 7)) == EXPECTED[:7]
    assert texts(left) == EXPECTED[7:]


def test_a_damaged_file_of_a_streamed_dataset_costs_its_rows(hub: Path) -> None:
    (hub / "train-1.jsonl").write_text('{"text": broken\n')
    results = read_stream(hub)
    assert texts(results) == EXPECTED[:5] + EXPECTED[10:]
    (problem,) = problems(results)
    assert (problem.kind, problem.records, problem.place) == ("format", 1, "row 6")
    assert "file 2 of 3" in problem.message


def test_a_streamed_dataset_without_the_field_says_so_once(hub: Path) -> None:
    (problem,) = read_stream(hub, field="body")
    assert problem.kind == "field"
    assert "text, page" in problem.message


@pytest.mark.parametrize(
    ("tail", "hint"),
    [("/not-there", "check the name"), (":no-config", "CONFIG"), ("::no-split", "SPLIT"), (":a:b:c", "hf:NAME")],
)
def test_a_dataset_that_cannot_be_opened_is_an_error_with_a_hint(hub: Path, tail: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        read_stream(hub, tail)
    assert hint in caught.value.hint


def test_without_a_network_a_name_is_an_error_that_says_so(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError) as caught:
        HubStream("hf:some/name", ReadOptions())
    assert "Couldn't reach" in caught.value.message
    assert "HF_HUB_OFFLINE" in caught.value.hint


def test_a_network_that_fails_on_the_way_keeps_the_state(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = HubStream(f"hf:{hub}", ReadOptions())
    rows = iter(stream)
    assert texts(next(rows) for _ in range(5)) == EXPECTED[:5]

    def fails(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr("datasets.IterableDataset.__iter__", fails)
        with pytest.raises(DataError, match="timed out"):
            list(rows)
    state = stream.state_dict()
    again = HubStream(f"hf:{hub}", ReadOptions())
    again.load_state_dict(state)
    assert texts(again) == EXPECTED[5:]


def test_hub_names_have_three_parts_at_most() -> None:
    assert hub_parts("hf:a/b") == ("a/b", None, "train")
    assert hub_parts("hf:a/b:c") == ("a/b", "c", "train")
    assert hub_parts("hf:a/b::d") == ("a/b", None, "d")
    assert hub_parts("hf:a/b:c:d") == ("a/b", "c", "d")
    assert hub_parts("hf:c4") == ("allenai/c4", "en", "train")
    assert hub_parts("hf:c4:de:validation") == ("allenai/c4", "de", "validation")
    assert hub_parts("hf:TinyStories") == ("roneneldan/TinyStories", None, "train")
    assert hub_parts("hf:mine/c4") == ("mine/c4", None, "train")
    for wrong in ("hf:", "hf:a:b:c:d", "a/b", "hf::train"):
        with pytest.raises(DataError):
            hub_parts(wrong)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path, {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "flatout.corpus.arrow")
    monkeypatch.delattr(corpus, "arrow")
    for call in (
        lambda: list(readers.read_slice(Slice(file), ReadOptions())),
        lambda: slices_of(file),
        lambda: list(readers.read_rows(file)),
        lambda: HubStream("hf:a/b", ReadOptions()),
    ):
        with pytest.raises(DataError, match="the package") as caught:
            call()
        assert "flatout[data]" in caught.value.hint
