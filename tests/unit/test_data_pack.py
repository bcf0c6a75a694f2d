"""Packing: exact splits, documents and offsets, the same bytes every time, and nothing half-made left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from flatout.data import pack
from flatout.data.manifest import Manifest, read_manifest
from flatout.data.pack import pack_corpus
from flatout.data.readers import Document
from flatout.data.shards import open_dataset, verify_dataset
from flatout.data.tokenizer import ByteTokenizer, load_tokenizer
from flatout.errors import DataError, ResourceError

TEXTS = [f"document {number} says {'ho ' * (number % 7)}\n" for number in range(60)]


def rows(folder: Path, texts: list[str] = TEXTS) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def split_tokens(folder: Path) -> tuple[list[int], list[int]]:
    dataset = open_dataset(folder, verify="full")
    return dataset.train.read(0, dataset.train.tokens).tolist(), dataset.val.read(0, dataset.val.tokens).tolist()


def test_shakespeare_splits_at_the_customary_character(tmp_path: Path) -> None:
    manifest = pack_corpus("shakespeare", tmp_path / "char", "char")
    assert (manifest.vocab, manifest.dtype) == (65, "uint16")
    assert [manifest.splits[name].tokens for name in ("train", "val")] == [1_003_854, 111_540]
    dataset = open_dataset(tmp_path / "char", verify="full")
    assert dataset.tokenizer.decode(dataset.val.read(0, 15)) == "?\n\nGREMIO:\nGood"
    manifest = pack_corpus("shakespeare", tmp_path / "gpt2", "gpt2")
    # The document ends in the validation split, and so does its end-of-text id.
    assert [manifest.splits[name].tokens for name in ("train", "val")] == [301_966, 36_059 + 1]
    assert [manifest.splits[name].text_bytes for name in ("train", "val")] == [1_003_854, 111_540]


def test_contiguous_cuts_inside_the_document_at_the_border(tmp_path: Path) -> None:
    pack_corpus(rows(tmp_path, ["aaaa", "bbbbbb", "cc"]), tmp_path / "data", "bytes", "contiguous", 0.5)
    train, val = split_tokens(tmp_path / "data")
    # The cut document has no end of text in training, for it does not end there.
    assert train == [*b"aaaa", 256, *b"bb"]
    assert val == [*b"bbbb", 256, *b"cc", 256]
    dataset = open_dataset(tmp_path / "data")
    assert dataset.train.document_starts().tolist() == [0, 5]
    assert dataset.val.document_starts().tolist() == [0, 5]
    assert [split.documents for split in dataset.manifest.splits.values()] == [2, 2]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.5, 0.9])
def test_contiguous_loses_and_repeats_nothing(tmp_path: Path, fraction: float) -> None:
    texts = ["é漢😀" * 20, "x", "long " * 30, "y\n"]
    pack_corpus(rows(tmp_path, texts), tmp_path / "data", "char", "contiguous", fraction)
    train, val = split_tokens(tmp_path / "data")
    tokenizer = open_dataset(tmp_path / "data").tokenizer
    assert tokenizer.decode(train) + tokenizer.decode(val) == "".join(texts)
    assert len(train) == int(len("".join(texts)) * (1 - fraction))


def test_document_split_is_by_the_text_alone(tmp_path: Path) -> None:
    def documents(folder: str, texts: list[str]) -> tuple[set[str], set[str]]:
        pack_corpus(rows(tmp_path, texts), tmp_path / folder, "bytes", "document", 0.3)
        tokenizer = ByteTokenizer()
        train, val = (tokenizer.decode(ids).split("<|endoftext|>")[:-1] for ids in split_tokens(tmp_path / folder))
        assert len(train) + len(val) == len(texts)
        return set(train), set(val)

    train, val = documents("a", TEXTS)
    assert 8 <= len(val) <= 28
    assert not train & val
    assert documents("b", TEXTS[::-1]) == (train, val)
    more_train, more_val = documents("c", [*TEXTS, *TEXTS, "another one"])
    assert train <= more_train
    assert val <= more_val


def test_documents_are_tokenized_one_by_one_and_end_in_the_id(tmp_path: Path) -> None:
    pack_corpus(rows(tmp_path), tmp_path / "data", "gpt2", "document", 0.3)
    dataset = open_dataset(tmp_path / "data", verify="full")
    starts = dataset.train.document_starts().astype(np.int64)
    ends = [*starts[1:].tolist(), dataset.train.tokens]
    seen = [dataset.train.read(start, end - start) for start, end in zip(starts.tolist(), ends, strict=True)]
    assert len(seen) == dataset.manifest.splits["train"].documents
    for ids in seen:
        assert ids[-1] == 50256
        text = dataset.tokenizer.decode(ids[:-1])
        assert text in TEXTS
        assert dataset.tokenizer.encode(text).tolist() == ids[:-1].tolist()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first = pack_corpus(rows(tmp_path), tmp_path / "a", "gpt2", "document", 0.3, 37)
    second = pack_corpus(rows(tmp_path), tmp_path / "b", "gpt2", "document", 0.3, 37)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first == second == read_manifest(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    moved = pack_corpus(rows(tmp_path / "elsewhere"), tmp_path / "c", "gpt2", "document", 0.3, 37)
    assert moved.fingerprint == first.fingerprint
    other = pack_corpus(rows(tmp_path), tmp_path / "d", "gpt2", "document", 0.4, 37)
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize("shard_tokens", [1, 7, 100, 10**9])
def test_the_size_of_shards_does_not_change_the_stream(tmp_path: Path, shard_tokens: int) -> None:
    pack_corpus(rows(tmp_path, TEXTS[:8]), tmp_path / "one", "bytes", "contiguous", 0.2)
    manifest = pack_corpus(rows(tmp_path, TEXTS[:8]), tmp_path / "many", "bytes", "contiguous", 0.2, shard_tokens)
    assert split_tokens(tmp_path / "one") == split_tokens(tmp_path / "many")
    shards = manifest.splits["train"].shards
    assert len(shards) == -(-manifest.splits["train"].tokens // shard_tokens)
    assert all(shard.bytes == 2 * shard_tokens for shard in shards[:-1])


def test_a_large_vocabulary_is_kept_in_four_bytes(tmp_path: Path) -> None:
    text = "".join(chr(code) for code in range(0x10000, 0x10000 + 70_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    manifest = pack_corpus(str(tmp_path / "a.txt"), tmp_path / "data", "char")
    assert manifest.dtype == "uint32"
    assert split_tokens(tmp_path / "data") == (list(range(63_000)), list(range(63_000, 70_000)))


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    manifest = pack_corpus(
        rows(tmp_path), tmp_path / "data", "bytes", "document", 0.3, progress=lambda *counts: calls.append(counts)
    )
    splits = manifest.splits.values()
    total = (60, sum(split.tokens for split in splits), sum(split.text_bytes for split in splits))
    assert calls[-1] == total
    assert calls == sorted(calls)


def test_a_tokenizer_of_one_dataset_prepares_another(tmp_path: Path) -> None:
    first = pack_corpus("shakespeare", tmp_path / "a", "char")
    (tmp_path / "new.txt").write_text("To be, or not to be.\n" * 9, encoding="utf-8")
    second = pack_corpus(str(tmp_path / "new.txt"), tmp_path / "b", str(tmp_path / "a" / "tokenizer.json"))
    assert second.tokenizer_fingerprint == first.tokenizer_fingerprint
    (tmp_path / "new.txt").write_text("To bé", encoding="utf-8")
    with pytest.raises(DataError, match="'é'"):
        pack_corpus(str(tmp_path / "new.txt"), tmp_path / "c", str(tmp_path / "a" / "tokenizer.json"))


# What is refused


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="came out empty") as caught:
        pack_corpus("shakespeare", tmp_path / "a", "char", "document")
    assert "contiguous" in caught.value.hint
    (tmp_path / "x.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="train split came out empty"):
        pack_corpus(str(tmp_path / "x.txt"), tmp_path / "a", "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.txt"]


def test_an_existing_dataset_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    first = pack_corpus(rows(tmp_path), tmp_path / "data", "bytes")
    with pytest.raises(DataError, match="already holds a dataset"):
        pack_corpus("shakespeare", tmp_path / "data", "char")
    assert verify_dataset(tmp_path / "data") == first
    second = pack_corpus("shakespeare", tmp_path / "data", "char", overwrite=True)
    assert verify_dataset(tmp_path / "data") == second != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_that_hold_something_else_are_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(DataError, match=r"holds 'thesis\.txt'"):
        pack_corpus("shakespeare", tmp_path / "mine", "char", overwrite=overwrite)
    pack_corpus("shakespeare", tmp_path / "data", "char")
    (tmp_path / "data" / "notes.md").write_text("precious", encoding="utf-8")
    with pytest.raises(DataError):
        pack_corpus("shakespeare", tmp_path / "data", "char", overwrite=overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file"):
        pack_corpus("shakespeare", tmp_path / "file", "char", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").read_text("utf-8") == "precious"
    assert (tmp_path / "data" / "notes.md").exists()


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pack_corpus("shakespeare", tmp_path / "empty", "char")
    pack_corpus("shakespeare", tmp_path / "a" / "b" / "c", "char")
    verify_dataset(tmp_path / "empty")
    verify_dataset(tmp_path / "a" / "b" / "c")


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([["x" * 100], ["x" * 101]])
    monkeypatch.setattr(pack, "read_documents", lambda _: [Document(text, "test") for text in next(passes)])
    with pytest.raises(DataError, match="100 characters at first and then 101"):
        pack_corpus("shakespeare", tmp_path / "data", "bytes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("split", "fraction", "shard"),
    [("random", 0.1, 10), ("document", 0.0, 10), ("document", 1.0, 10), ("document", 0.1, 0)],
)
def test_impossible_settings_are_refused(tmp_path: Path, split: str, fraction: float, shard: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        pack_corpus("shakespeare", tmp_path / "data", "char", split, fraction, shard)  # type: ignore[arg-type]


# What interrupts


def test_a_failure_at_any_document_leaves_nothing(tmp_path: Path) -> None:
    source = rows(tmp_path)
    for moment in (1, 30, 60):

        def fail(documents: int, *_: int, moment: int = moment) -> None:
            if documents == moment:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pack_corpus(source, tmp_path / "data", "bytes", "document", 0.3, progress=fail)
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_failure_keeps_the_old_dataset(tmp_path: Path) -> None:
    def fail(*_: int) -> NoReturn:
        raise KeyboardInterrupt

    old = pack_corpus(rows(tmp_path), tmp_path / "data", "bytes")
    with pytest.raises(KeyboardInterrupt):
        pack_corpus("shakespeare", tmp_path / "data", "char", overwrite=True, progress=fail)
    assert verify_dataset(tmp_path / "data") == old


KILLED = """
import os, signal, sys
from flatout.data import pack
source, folder, moment = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "document":
    pack.pack_corpus(source, folder, "bytes", "document", 0.3, progress=lambda n, *_: die() if n == 30 else None)
setattr(pack.Path if moment == "rename" else pack, moment, die)
pack.pack_corpus(source, folder, "bytes", "document", 0.3)
"""


@pytest.mark.parametrize("moment", ["document", "_write_file", "_move_into_place", "rename"])
def test_a_killed_packer_leaves_nothing_that_loads_and_the_next_one_succeeds(tmp_path: Path, moment: str) -> None:
    source = rows(tmp_path)
    command = [sys.executable, "-c", KILLED, source, str(tmp_path / "data"), moment]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="there is no folder"):
        open_dataset(tmp_path / "data")
    pack_corpus(source, tmp_path / "data", "bytes", "document", 0.3)
    verify_dataset(tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl"]


def test_two_packers_never_share_a_folder(tmp_path: Path) -> None:
    def second(*_: int) -> None:
        with pytest.raises(DataError, match="another process is preparing"):
            pack_corpus("shakespeare", tmp_path / "data", "char")

    manifest = pack_corpus("shakespeare", tmp_path / "data", "char", progress=second)
    assert verify_dataset(tmp_path / "data") == manifest


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, ResourceError), (errno.EDQUOT, ResourceError), (errno.EROFS, DataError)]
)
def test_a_disk_that_fails_is_reported_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[DataError]
) -> None:
    def fail(_: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind) as caught:
        pack_corpus("shakespeare", tmp_path / "data", "char")
    assert str(tmp_path / "data") in caught.value.message
    assert caught.value.exit_code == (5 if kind is ResourceError else 3)
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys
from flatout.data.pack import pack_corpus
from flatout.errors import ResourceError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
try:
    pack_corpus("shakespeare", sys.argv[1], "char", shard_tokens=10**9)
except ResourceError as error:
    sys.exit(error.exit_code)
"""


def test_a_write_that_really_fails_is_a_resource_error(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(tmp_path / "data")]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (5, "")
    assert list(tmp_path.iterdir()) == []


def test_packing_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, flatout.data.pack as p; p.pack_corpus('shakespeare', sys.argv[1], 'gpt2'); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_the_manifest_says_what_was_asked(tmp_path: Path) -> None:
    manifest: Manifest = pack_corpus(rows(tmp_path), tmp_path / "data", "bytes", "document", 0.25, 1000)
    settings = manifest.settings
    assert (settings.source, settings.split, settings.val_fraction) == (rows(tmp_path), "document", 0.25)
    assert settings.source_bytes == Path(rows(tmp_path)).stat().st_size
    assert manifest.tokenizer_fingerprint == load_tokenizer("bytes").fingerprint
    on_disk = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    assert on_disk["fingerprint"] == manifest.fingerprint
    assert {file.name for file in manifest.files} | {"manifest.json"} == set(contents(tmp_path / "data"))
