"""Sources: which files a source means, in what order, and what is said of those that cannot be used."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from flatout.corpus import arrow
from flatout.corpus import document as shipped
from flatout.corpus.document import InputFile, Slice
from flatout.corpus.sources import FoundFiles, find_files, format_of, slices_of, unread_text
from flatout.corpus.streams import PIECE
from flatout.errors import DataError


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(found: FoundFiles, folder: Path) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in found.files]


def problems(found: FoundFiles) -> list[tuple[str, str, int]]:
    return [(os.path.basename(problem.file), problem.kind, problem.records) for problem in found.problems]


def refusal(source: Path | str) -> DataError:
    with pytest.raises(DataError) as caught:
        find_files(str(source))
    return caught.value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", ("text", "none")),
        ("A.TXT.GZ", ("text", "gz")),
        ("a.md.bz2", ("text", "bz2")),
        ("a.b.jsonl.zst", ("jsonl", "zst")),
        ("a.ndjson", ("jsonl", "none")),
        ("a.json.xz", ("json", "xz")),
        ("a.csv", ("csv", "none")),
        ("a.tsv.gz", ("tsv", "gz")),
        ("a.parquet", ("parquet", "none")),
        ("a.parquet.gz", (None, "gz")),
        ("a.warc.wet.gz", ("warc", "gz")),
        ("a.warc", ("warc", "none")),
        ("a.smi", ("smiles", "none")),
        ("a.bin.xz", ("tokens", "xz")),
        ("a.gz", (None, "gz")),
        (".txt", (None, "none")),
        ("a.py", (None, "none")),
        ("a", (None, "none")),
    ],
)
def test_formats_are_told_by_names(name: str, expected: tuple[str | None, str]) -> None:
    assert format_of(name) == expected


def test_shakespeare_ships_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = find_files("shakespeare", number=3).files
    assert (file.name, file.format, file.bytes, file.source) == ("shakespeare", "text", 1_115_394, 3)
    assert Path(file.path).read_bytes().startswith(b"First Citizen:\n")
    monkeypatch.setattr(shipped, "SHAKESPEARE_SHA256", "0" * 64)
    assert "damaged" in refusal("shakespeare").message


def test_a_folder_is_listed_in_the_order_of_names(tmp_path: Path) -> None:
    texts = ["b.txt", "a/z.txt", "a/b/c.TXT", "a.txt", "B.txt", "a-b.txt"]
    put(tmp_path, dict.fromkeys(texts, b"text"))
    put(tmp_path, {"rows.jsonl.gz": b"xx", "data.parquet": b"xx", "sub.txt/inner.csv": b"xx"})
    put(tmp_path, {".hidden/x.txt": b"x", ".z.txt": b"x", "__/y.py": b"x", "v.tar.gz": b"x", "done": b"x"})
    put(tmp_path, {"a.txt.lock": b"x", "c.jsonl.part": b"x"})
    found = find_files(str(tmp_path), number=2)
    assert names(found, tmp_path) == [
        *["B.txt", "a/b/c.TXT", "a/z.txt", "a-b.txt", "a.txt", "b.txt"],
        *["data.parquet", "rows.jsonl.gz", "sub.txt/inner.csv"],
    ]
    assert found.problems == ()
    assert found.passed_over == {".lock": 1, ".part": 1, ".py": 1, ".tar.gz": 1, "no suffix": 1}
    assert sum(file.bytes for file in found.files) == 6 * 4 + 3 * 2
    assert {file.source for file in found.files} == {2}
    assert found.files[7] == InputFile(
        str(tmp_path / "rows.jsonl.gz"), str(tmp_path / "rows.jsonl.gz"), "jsonl", "gz", 2, 2
    )


def test_a_format_holds_for_every_file_of_the_source(tmp_path: Path) -> None:
    put(tmp_path, {"a.log": b"x", "b.json.gz": b"x", "c": b"x", "d.lock": b"x", "e.txt~": b"x", ".f": b"x"})
    found = find_files(str(tmp_path), format="jsonl")
    assert [(file.format, file.compression) for file in found.files] == [
        ("jsonl", "none"),
        ("jsonl", "gz"),
        ("jsonl", "none"),
    ]
    assert found.passed_over == {".lock": 1, ".txt~": 1}
    (file,) = find_files(str(tmp_path / "a.log"), format="text").files
    assert file.format == "text"


def test_a_crawl_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    crawl = b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"
    put(tmp_path, {"a.wet.txt": crawl, "b.txt.gz": gzip.compress(crawl), "c.txt": b"WARC/1", "d.jsonl": crawl})
    assert [file.format for file in find_files(str(tmp_path)).files] == ["warc", "warc", "text", "jsonl"]
    assert [file.format for file in find_files(str(tmp_path), format="text").files] == ["text"] * 4


def test_what_cannot_be_used_is_told_and_the_rest_is_found(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    put(outside, {"far.txt": b"far"})
    put(folder, {"good.txt": b"text", "empty.txt": b"", "deep/good.txt": b"text", ".cache/blob": b"hidden"})
    (folder / "out.txt").symlink_to(outside / "far.txt")
    (folder / "up.txt").symlink_to("../outside/far.txt")
    (folder / "gone.txt").symlink_to("nothing.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "outside").symlink_to(outside)
    (folder / "inside").symlink_to(folder / "deep")
    (folder / "again.txt").symlink_to("good.txt")
    (folder / "blob.txt").symlink_to(".cache/blob")
    (folder / "blob_again.txt").symlink_to(".cache/blob")
    (folder / "out.py").symlink_to(outside / "far.txt")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "pipe")
    found = find_files(str(folder))
    assert names(found, folder) == ["blob.txt", "deep/good.txt", "good.txt"]
    assert problems(found) == [
        ("gone.txt", "link", 0),
        ("loop.txt", "link", 0),
        ("out.txt", "link", 0),
        ("outside", "link", 0),
        ("up.txt", "link", 0),
    ]
    assert found.passed_over == {".py": 1, "empty": 1, "no file": 1, "no suffix": 1}


def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"a.txt": b"x", "b.jsonl": b"x", "good.txt": b"x", "locked/c.txt": b"x"})
    true_open, true_scandir = open, os.scandir

    def guarded_open(path, *rest, **more):
        if str(path).endswith(("a.txt", "b.jsonl")):
            raise PermissionError(13, "Permission denied")
        return true_open(path, *rest, **more)

    def guarded_scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return true_scandir(path)

    # Tests may run as root, to whom everything is permitted.
    monkeypatch.setattr("builtins.open", guarded_open)
    monkeypatch.setattr(os, "scandir", guarded_scandir)
    found = find_files(str(tmp_path))
    assert names(found, tmp_path) == ["good.txt"]
    assert problems(found) == [("a.txt", "unreadable", 1), ("b.jsonl", "unreadable", 0), ("locked", "unreadable", 0)]
    assert all("Permission denied" in problem.message for problem in found.problems)
    alone = find_files(str(tmp_path / "a.txt"))
    assert (alone.files, problems(alone)) == ((), [("a.txt", "unreadable", 1)])


def test_strange_names_are_shown_safely_and_opened_as_they_are(tmp_path: Path) -> None:
    put(tmp_path, {"a\x1b[31m\n.txt": b"x"})
    with open(os.fsencode(str(tmp_path)) + b"/\xff.txt", "wb") as file:
        file.write(b"y")
    found = find_files(str(tmp_path))
    assert [os.path.basename(file.name) for file in found.files] == ["a\\x1b[31m\\n.txt", "\\udcff.txt"]
    assert all(os.path.exists(file.path) for file in found.files)
    put(tmp_path, {"\x07.txt": b""})
    assert problems(find_files(str(tmp_path / "\x07.txt"))) == [("\\x07.txt", "empty", 0)]


def test_a_source_that_is_not_there_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"story.txt": b"x", "table.xlsx": b"x", "other/a.png": b"x", "other/b.png": b"x"})
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "did you mean shakespeare?" in refusal("shakespear").hint
    assert "did you mean story.txt?" in refusal("storry.txt").hint
    assert "did you mean other/a.png?" in refusal("other/aa.png").hint
    assert "a folder" in refusal("no/such/place").hint
    assert "there is no source" in refusal("nul\0byte").message
    assert ".xlsx" in refusal("table.xlsx").message
    assert ".jsonl" in refusal("table.xlsx").hint
    assert "no files" in refusal("bare").message
    assert "2 of .png" in refusal("other").message
    os.mkfifo("pipe.txt")
    assert "neither a file nor a folder" in refusal("pipe.txt").message


def test_an_empty_file_is_no_problem_among_others(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": b""})
    found = find_files(str(tmp_path / "a.txt"))
    assert (found.files, problems(found)) == ((), [("a.txt", "empty", 0)])
    assert "it has 1 of empty" in refusal(tmp_path).message
    put(tmp_path, {"b.txt": b"x", "c.csv": b"", "d.parquet": b"", "e.bin": b""})
    found = find_files(str(tmp_path))
    assert (names(found, tmp_path), found.problems, found.passed_over) == (["b.txt"], (), {"empty": 4})
    assert (found.summary, found.unknown) == ("5 files: read 1 .txt; passed over 4 empty", 0)


BINARY_FILES = {
    "a.png": b"\x89PNG\r\n\x1a\n", "b.pdf": b"%PDF-1.4\n% letters\n", "c.docx": b"PK\3\4\xff", "d.zip": b"PK\3\4",
    "e.tar.gz": gzip.compress(b"x"), "f.so": b"\x7fELF\0\0", "no-suffix": b"\0\1",
}  # fmt: skip


def test_binary_files_are_told_as_such_and_not_taken_for_unread_text(tmp_path: Path) -> None:
    put(tmp_path, BINARY_FILES)
    put(tmp_path, {"text.txt": b"x", "tool.py": b"print('h\xc3\xa9')", "page.html": b"<p>", "README": b"x"})
    found = find_files(str(tmp_path))
    assert found.summary == (
        "11 files: read 1 .txt; passed over 1 .html, 1 .py, 1 no suffix, "
        "7 binary (.docx .pdf .png .so .tar.gz .zip ...)"
    )
    assert (found.unknown, unread_text(found.passed_over)) == (3, [".html", ".py", "no suffix"])
    assert not FoundFiles(found.files, (), {f"{n}.png": ".png (binary)" for n in range(9)}).mostly_unknown


def test_a_bin_file_in_a_folder_is_told_what_it_was_taken_for(tmp_path: Path) -> None:
    ids = np.array([464, 3290, 11687, 13, 50256] * 40, "<u2")
    chance = np.random.default_rng(0)
    put(tmp_path, {
        "tokens.bin": ids.tobytes(), "tokens2.bin.gz": gzip.compress(ids.tobytes()),
        "headed.bin": np.array([20240520, 1, 200], "<i4").tobytes() + bytes(1012) + ids.tobytes(),
        "weights.bin": chance.standard_normal(500).astype("<f4").tobytes(), "letters.bin": b"the ox\n" * 40,
        "noise.bin": chance.bytes(4000), "text.txt": b"x",
    })  # fmt: skip
    found = find_files(str(tmp_path))
    assert names(found, tmp_path) == ["headed.bin", "text.txt", "tokens.bin", "tokens2.bin.gz"]
    assert found.summary == (
        "7 files: read 2 .bin (as GPT-2 tokens), 1 .bin.gz (as GPT-2 tokens), 1 .txt; "
        "passed over 3 .bin (not GPT-2 tokens)"
    )
    assert find_files(str(tmp_path / "noise.bin")).files[0].format == "tokens", "a file that is named is read"
    assert len(find_files(str(tmp_path), format="tokens").files) == 7
    for name in ("weights.bin", "letters.bin", "noise.bin", "tokens2.bin.gz"):
        (tmp_path / name).unlink()
    assert find_files(str(tmp_path)).summary == "3 files: read 2 .bin (as GPT-2 tokens), 1 .txt"
    (tmp_path / "text.txt").unlink()
    assert find_files(str(tmp_path)).summary == ""


def test_hub_names_are_taken_as_they_are() -> None:
    (file,) = find_files("hf:someone/some-data:config:train", number=1).files
    spec = "hf:someone/some-data:config:train"
    assert file == InputFile(spec, spec, "hub", "none", 0, 1)
    for source in ("hf:", "hf:a:b:c:d"):
        assert "names no dataset" in refusal(source).message


def input_file(format: str, size: int, compression: str = "none") -> InputFile:
    return InputFile("path", "name", format, compression, size)


@pytest.mark.parametrize("format", ["text", "jsonl", "smiles"])
def test_plain_files_are_sliced_by_bytes(format: str) -> None:
    file = input_file(format, 2 * PIECE + 1)
    assert slices_of(file) == [
        Slice(file, 0, PIECE),
        Slice(file, PIECE, 2 * PIECE),
        Slice(file, 2 * PIECE, None),
    ]
    assert slices_of(input_file(format, PIECE)) == [Slice(input_file(format, PIECE))]
    file = input_file(format, 5)
    assert slices_of(file, 2) == [Slice(file, 0, 2), Slice(file, 2, 4), Slice(file, 4, None)]


def test_other_files_are_read_whole_or_in_one_go() -> None:
    for format in ("text", "jsonl", "smiles", "json", "csv", "tsv", "tokens"):
        small, large = input_file(format, 2**24, "gz"), input_file(format, 2**25 + 1, "gz")
        assert slices_of(small) == [Slice(small)]
        assert slices_of(large) is None
    for format in ("json", "csv", "tsv", "tokens"):
        assert slices_of(input_file(format, 2**24 + 1)) is None
    crawl = input_file("warc", 2**30, "gz")
    assert slices_of(crawl) == [Slice(crawl)]
    assert slices_of(input_file("hub", 0)) is None


def test_tables_are_sliced_by_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "parquet_group_bytes", lambda path: [5, 5, 5, 20, 1])
    file = input_file("parquet", 36)
    assert slices_of(file, 10) == [Slice(file, 0, 2), Slice(file, 2, 3), Slice(file, 3, 4), Slice(file, 4, None)]
    assert slices_of(file, 100) == [Slice(file)]
    # A row group that is larger than a piece is cut into shares of its rows.
    monkeypatch.setattr(arrow, "parquet_group_bytes", lambda path: [5, 2 * PIECE + 1, 5])
    file = input_file("parquet", 2**20)
    shares = [Slice(file, 1, 2, share, 3) for share in range(3)]
    assert slices_of(file, 10) == [Slice(file, 0, 1), *shares, Slice(file, 2, None)]
    monkeypatch.setattr(arrow, "parquet_group_bytes", lambda path: [2**60])
    assert len(slices_of(file) or []) == 1025  # not as many as a damaged footer asks for
    # Of a damaged one nothing is known before it is read.
    monkeypatch.setattr(arrow, "parquet_group_bytes", lambda path: [])
    assert slices_of(input_file("parquet", 5)) == [Slice(input_file("parquet", 5))]


def test_a_dataset_in_arrow_files_is_refused(tmp_path: Path) -> None:
    for name in ("dataset_dict.json", "dataset_info.json"):
        put(tmp_path / name[:11], {"train/a.txt": b"x", name: b"{}"})
        error = refusal(str(tmp_path / name[:11]))
        assert "save_to_disk" in error.message
        assert "to_parquet" in error.hint
