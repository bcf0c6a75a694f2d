"""Readers: order, strictness, and where each error points."""

import codecs
import json
import os
from pathlib import Path

import pytest

from flatout.data import readers
from flatout.data.readers import Document, read_documents, source_bytes
from flatout.errors import DataError


def texts(source: Path | str) -> list[str]:
    return [document.text for document in read_documents(str(source))]


def refusal(source: Path | str) -> DataError:
    with pytest.raises(DataError) as caught:
        texts(source)
    return caught.value


def test_shakespeare_ships_with_the_package() -> None:
    (document,) = read_documents("shakespeare")
    assert len(document.text) == 1_115_394 == source_bytes("shakespeare")
    assert document.text.startswith("First Citizen:\n")
    assert document.text.endswith("\n")


def test_a_damaged_shipped_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SHAKESPEARE_SHA256", "0" * 64)
    assert "damaged" in refusal("shakespeare").message


def test_a_text_file_is_one_document_with_its_line_ends_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = "one\r\ntwo\rthree\u2028four\u0085\x0c\n"
    path.write_bytes(codecs.BOM_UTF8 + content.encode())
    assert list(read_documents(str(path))) == [Document(content, str(path))]


def test_json_lines_end_at_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ["one\u2028still one\u2029\u0085", "two\r", "", "three \U0001f600"]
    lines = [json.dumps({"text": row, "other": 1}, ensure_ascii=False) for row in rows]
    path.write_bytes(codecs.BOM_UTF8 + "\r\n\n".join(lines).encode())
    documents = list(read_documents(str(path)))
    assert [document.text for document in documents] == ["one\u2028still one\u2029\u0085", "two\r", "three \U0001f600"]
    assert [document.source for document in documents] == [f"{path}:{line}" for line in (1, 3, 7)]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.TXT", "a.txt", "B.txt", "a-b.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "row 1"}\n{"text": "row 2"}\n', encoding="utf-8")
    for name in (".hidden/x.txt", "__/y.md", ".z.txt", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.txt" else "never read", encoding="utf-8")
    expected = ["B.txt", "a/b/c.TXT", "a/z.txt", "a-b.txt", "a.txt", "b.txt", "row 1", "row 2"]
    assert texts(tmp_path) == expected
    assert source_bytes(str(tmp_path)) == sum(map(len, expected[:6])) + 36


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"ab\xffcd", ["a.txt", "byte 0xff", "offset 2"]),
        ("a.txt", codecs.BOM_UTF8 + b"ab\xc3", ["offset 5"]),
        ("a.txt", b"\xed\xa0\x80", ["offset 0"]),
        ("a.txt", b"\xff\xfea\x00", ["offset 0"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ["a.jsonl", "offset 24"]),
    ],
)
def test_broken_utf8_is_refused_with_file_and_byte_offset(
    tmp_path: Path, name: str, content: bytes, parts: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    error = refusal(tmp_path / name)
    assert all(part in error.message for part in [*parts, "not UTF-8"]), error.message
    assert "UTF-8" in error.hint


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ('{"text": ', "is not JSON"),
        ('["text"]', "JSON list"),
        ("3", "JSON int"),
        ('{"content": "x", "id": 3}', "its fields are: content, id"),
        ('{"text": null}', "NoneType"),
        ('{"text": ["x"]}', "list"),
        ('{"text": "a\\ud800"}', "surrogate"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 10_000, "is not JSON"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(tmp_path: Path, row: str, part: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + row + "\n", encoding="utf-8")
    error = refusal(path)
    assert part in error.message
    assert "line 3" in error.message
    assert error.hint


def test_sources_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").write_text('\n{"text": ""}\n', encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.csv").touch()
    assert "no text" in refusal(tmp_path / "empty.txt").message
    assert "no text" in refusal(tmp_path / "empty.jsonl").message
    assert "no files" in refusal(tmp_path / "folder").message
    assert "1 of .csv" in refusal(tmp_path / "other").message


def test_missing_and_unsupported_sources_get_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "story.txt").write_text("x", encoding="utf-8")
    (tmp_path / "table.csv").write_text("x", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "did you mean shakespeare?" in refusal("shakespear").hint
    assert "did you mean story.txt?" in refusal("storry.txt").hint
    assert "a .txt or .jsonl file" in refusal("no/such/place").hint
    assert ".txt" in refusal("table.csv").hint
    os.mkfifo("pipe.txt")
    assert "neither a file nor a folder" in refusal("pipe.txt").message


def test_unreadable_files_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.txt").write_text("x", encoding="utf-8")

    def denied(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "Permission denied" in refusal(tmp_path).message
    monkeypatch.undo()
    monkeypatch.setattr(os, "scandir", denied)
    assert "Permission denied" in refusal(tmp_path).message


def test_strange_file_names_are_escaped_in_messages(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\n.txt").write_bytes(b"\xff")
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_bytes(b"fine")
    assert "\\x1b[31m\\n.txt" in refusal(tmp_path).message
    (tmp_path / "a\x1b[31m\n.txt").unlink()
    (document,) = read_documents(str(tmp_path))
    document.source.encode("utf-8")
