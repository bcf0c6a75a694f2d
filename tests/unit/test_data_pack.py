"""Packing: exact splits, documents and offsets, the same bytes every time, and nothing half-made left behind."""

import errno
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest

from flatout import cli, folders
from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus import readers, sources
from flatout.corpus.clean import CleanRules
from flatout.corpus.document import Document, Problem, ReadOptions, Slice
from flatout.data import merge, plan, shards
from flatout.data import pack as pack_module
from flatout.data import part as part_module
from flatout.data.inspect import read_problems, read_report
from flatout.data.merge import Journal
from flatout.data.pack import pack_corpus
from flatout.data.part import PIECE, CorpusPart, PartHead, PartResult, Recipe
from flatout.data.plan import request_of
from flatout.data.prepare import prepare_data
from flatout.data.shard_data import notices_on_folder
from flatout.data.shards import Manifest, open_dataset, read_manifest, verify_dataset
from flatout.data.tokenizer import ByteTokenizer, load_tokenizer
from flatout.data.workers import Worker
from flatout.errors import DataError, ResourceError
from flatout.folders import MARK
from flatout.records import PrepareProgress
from tests.end_to_end.forked import Forked

TEXTS = [f"document {number} says {'ho ' * (number % 7)}\n" for number in range(60)]


def pack(
    source: Any,
    folder: Path,
    tokenizer: str = "bytes",
    split: Any = "contiguous",
    val_fraction: float = 0.1,
    clean: CleanConfig | None = None,
    more: dict[str, Any] | None = None,
    **how: Any,
) -> Manifest:
    data = DataConfig(
        source=source, tokenizer=tokenizer, split=split, **{"validation": val_fraction, **(more or {})},
    )  # fmt: skip
    return pack_corpus(request_of(data, clean), folder, **how)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even small files into many parts."""
    monkeypatch.setattr(plan, "PART_BYTES", 256)


def rows(folder: Path, texts: list[str] = TEXTS) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: bytes of files, where links lead, and that a folder is one."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes()
    return found


def split_tokens(folder: Path) -> tuple[list[int], list[int]]:
    dataset = open_dataset(folder, verify="full")
    return dataset.train.read(0, dataset.train.tokens).tolist(), dataset.val.read(0, dataset.val.tokens).tolist()


def test_shakespeare_splits_at_the_customary_character(tmp_path: Path) -> None:
    manifest = pack("shakespeare", tmp_path / "char", "char")
    assert (manifest.vocab, manifest.dtype) == (66, "uint16")
    # The document ends in the validation split, and so does its end-of-text id.
    assert [manifest.splits[name].tokens for name in ("train", "val")] == [1_003_854, 111_540 + 1]
    dataset = open_dataset(tmp_path / "char", verify="full")
    assert dataset.tokenizer.decode(dataset.val.read(0, 15)) == "?\n\nGREMIO:\nGood"
    manifest = pack("shakespeare", tmp_path / "gpt2", "gpt2")
    assert [manifest.splits[name].tokens for name in ("train", "val")] == [301_966, 36_059 + 1]
    assert [manifest.splits[name].text_bytes for name in ("train", "val")] == [1_003_854, 111_540]


def test_contiguous_cuts_inside_the_document_at_the_border(tmp_path: Path) -> None:
    pack(rows(tmp_path, ["aaaa", "bbbbbb", "cc"]), tmp_path / "data", "bytes", "contiguous", 0.5)
    train, val = split_tokens(tmp_path / "data")
    # The cut document has no end of text in training, for it does not end there.
    assert train == [*b"aaaa", 256, *b"bb"]
    assert val == [*b"bbbb", 256, *b"cc", 256]
    dataset = open_dataset(tmp_path / "data")
    assert dataset.train.document_starts().tolist() == [0, 5]
    assert dataset.val.document_starts().tolist() == [0, 5]
    assert [split.documents for split in dataset.manifest.splits.values()] == [2, 2]


def test_contiguous_at_the_end_of_a_document_cuts_none(tmp_path: Path) -> None:
    pack(rows(tmp_path, ["aaaa", "bb", "cccccc"]), tmp_path / "data", "bytes", "contiguous", 0.5)
    assert split_tokens(tmp_path / "data") == ([*b"aaaa", 256, *b"bb", 256], [*b"cccccc", 256])
    dataset = open_dataset(tmp_path / "data")
    assert dataset.train.document_starts().tolist() == [0, 5]
    assert dataset.val.document_starts().tolist() == [0]
    report = read_report(tmp_path / "data")
    assert report is not None
    assert report["kept"] == {"train": 2, "val": 1}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.5, 0.9])
def test_contiguous_loses_and_repeats_nothing(tmp_path: Path, fraction: float) -> None:
    texts = ["é漢😀" * 20, "x", "long " * 30, "y\n"]
    manifest = pack(rows(tmp_path, texts), tmp_path / "data", "char", "contiguous", fraction)
    train, val = split_tokens(tmp_path / "data")
    tokenizer = open_dataset(tmp_path / "data").tokenizer
    end = tokenizer.end_of_text
    decoded = {name: tokenizer.decode([i for i in ids if i != end]) for name, ids in (("train", train), ("val", val))}
    assert decoded["train"] + decoded["val"] == "".join(texts)
    assert tokenizer.decode([*train, *val]) == "".join(f"{text}<|endoftext|>" for text in texts)
    for name, text in decoded.items():
        assert manifest.splits[name].text_bytes == len(text.encode()), "bits per byte are over these"
    assert len(decoded["train"]) == int(len("".join(texts)) * (1 - fraction))


def test_document_split_is_by_the_text_alone(tmp_path: Path) -> None:
    def documents(folder: str, texts: list[str]) -> tuple[set[str], set[str]]:
        pack(rows(tmp_path, texts), tmp_path / folder, "bytes", "document", 0.3)
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
    pack(rows(tmp_path), tmp_path / "data", "gpt2", "document", 0.3)
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


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 37)
    first = pack(rows(tmp_path), tmp_path / "a", "gpt2", "document", 0.3)
    second = pack(rows(tmp_path), tmp_path / "b", "gpt2", "document", 0.3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first == second == read_manifest(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    moved = pack(rows(tmp_path / "elsewhere"), tmp_path / "c", "gpt2", "document", 0.3)
    assert moved.fingerprint == first.fingerprint
    other = pack(rows(tmp_path), tmp_path / "d", "gpt2", "document", 0.4)
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize("shard_tokens", [1, 7, 100, 10**9])
def test_the_size_of_shards_does_not_change_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int
) -> None:
    pack(rows(tmp_path, TEXTS[:8]), tmp_path / "one", "bytes", "contiguous", 0.2)
    monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
    manifest = pack(rows(tmp_path, TEXTS[:8]), tmp_path / "many", "bytes", "contiguous", 0.2)
    assert split_tokens(tmp_path / "one") == split_tokens(tmp_path / "many")
    made = manifest.splits["train"].shards
    assert len(made) == -(-manifest.splits["train"].tokens // shard_tokens)
    assert all(shard.bytes == 2 * shard_tokens for shard in made[:-1])


def test_a_large_vocabulary_is_kept_in_four_bytes(tmp_path: Path) -> None:
    text = "".join(chr(code) for code in range(0x10000, 0x10000 + 70_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    manifest = pack(str(tmp_path / "a.txt"), tmp_path / "data", "char")
    assert manifest.dtype == "uint32"
    assert split_tokens(tmp_path / "data") == (list(range(63_000)), list(range(63_000, 70_001)))


def test_progress_counts_up_to_the_whole(tmp_path: Path, small_parts: None) -> None:
    told: list[PrepareProgress] = []
    manifest = pack(rows(tmp_path), tmp_path / "data", "bytes", "document", 0.3, progress=told.append)
    reading = [step for step in told if step.phase == "reading"]
    assert len(reading) > 5
    assert (reading[-1].documents, reading[-1].files) == (60, 1)
    assert reading[-1].tokens == sum(split.tokens for split in manifest.splits.values())
    assert reading[-1].bytes == reading[-1].total_bytes == (tmp_path / "rows.jsonl").stat().st_size
    assert [step.bytes for step in reading] == sorted(step.bytes for step in reading)


def test_a_tokenizer_of_one_dataset_prepares_another(tmp_path: Path) -> None:
    first = pack("shakespeare", tmp_path / "a", "char")
    (tmp_path / "new.txt").write_text("To be, or not to be.\n" * 9, encoding="utf-8")
    second = pack(str(tmp_path / "new.txt"), tmp_path / "b", str(tmp_path / "a" / "tokenizer.json"))
    assert second.tokenizer_fingerprint == first.tokenizer_fingerprint
    (tmp_path / "new.txt").write_text("To bé", encoding="utf-8")
    with pytest.raises(DataError, match="'é'"):
        pack(str(tmp_path / "new.txt"), tmp_path / "c", str(tmp_path / "a" / "tokenizer.json"))


# What is refused


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="came out empty") as caught:
        pack("shakespeare", tmp_path / "a", "char", "document")
    assert "contiguous" in caught.value.hint
    (tmp_path / "x.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="train split came out empty"):
        pack(str(tmp_path / "x.txt"), tmp_path / "a", "bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.txt"]


def test_an_existing_dataset_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    first = pack(rows(tmp_path), tmp_path / "data", "bytes")
    with pytest.raises(DataError, match="already holds a dataset"):
        pack("shakespeare", tmp_path / "data", "char")
    assert verify_dataset(tmp_path / "data") == first
    second = pack("shakespeare", tmp_path / "data", "char", overwrite=True)
    assert verify_dataset(tmp_path / "data") == second != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_that_hold_something_else_are_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(DataError, match=r"holds 'thesis\.txt'"):
        pack("shakespeare", tmp_path / "mine", "char", overwrite=overwrite)
    pack("shakespeare", tmp_path / "data", "char")
    (tmp_path / "data" / "notes.md").write_text("precious", encoding="utf-8")
    with pytest.raises(DataError):
        pack("shakespeare", tmp_path / "data", "char", overwrite=overwrite)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file"):
        pack("shakespeare", tmp_path / "file", "char", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").read_text("utf-8") == "precious"
    assert (tmp_path / "data" / "notes.md").exists()


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    made = [pack(rows(tmp_path), folder, "char") for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c")]
    assert made[0] == made[1] == verify_dataset(tmp_path / "empty") == verify_dataset(tmp_path / "a" / "b" / "c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = rows(tmp_path)

    def change(_: PrepareProgress) -> None:
        with open(source, "a", encoding="utf-8") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        pack(source, tmp_path / "data", "bytes", progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# Mixtures, validation sources, duplicates, standard input


def texts_of(folder: Path) -> tuple[list[str], list[str]]:
    """The documents of both splits of a dataset of bytes."""
    train, val = (ByteTokenizer().decode(ids).split("<|endoftext|>") for ids in split_tokens(folder))
    return train[:-1], val[:-1]


def test_a_validation_source_is_the_validation_split(tmp_path: Path) -> None:
    (tmp_path / "v.jsonl").write_text('{"text": "for validation"}\n', encoding="utf-8")
    pack(rows(tmp_path), tmp_path / "data", more={"validation": str(tmp_path / "v.jsonl")})
    assert texts_of(tmp_path / "data") == (TEXTS, ["for validation"])


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_weights_repeat_or_thin_out_training_documents(tmp_path: Path, small_parts: None, weight: float) -> None:
    (tmp_path / "other").mkdir()
    other = rows(tmp_path / "other", [f"other {number}" for number in range(40)])
    source = [{"path": rows(tmp_path), "weight": weight}, other]
    pack(source, tmp_path / "plain", "bytes", "document", 0.3)
    train, val = texts_of(tmp_path / "plain")
    pack([rows(tmp_path), other], tmp_path / "one", "bytes", "document", 0.3)
    once, val_once = texts_of(tmp_path / "one")
    mine = [text for text in once if text in TEXTS]
    taken = [train.count(text) for text in mine]
    assert all(int(weight) <= count <= int(weight) + 1 for count in taken)
    assert abs(sum(taken) - weight * len(mine)) <= 12
    assert [text for text in train if text.startswith("other")] == [text for text in once if text.startswith("other")]
    assert set(val) <= set(val_once)
    assert len(val) == len(set(val))
    report = read_report(tmp_path / "plain")
    assert report is not None
    assert report["records"] == 100 == sum(report["kept"].values()) + sum(report["dropped"].values())


LIMITS_HERE = [("max_documents", 17), ("max_tokens", 400), ("max_bytes", 400), ("max_documents", 1000)]


@pytest.mark.parametrize(("limit", "most"), LIMITS_HERE)
def test_limits_take_the_first_whole_documents(tmp_path: Path, small_parts: None, limit: str, most: int) -> None:
    manifest = pack(rows(tmp_path), tmp_path / "data", split="document", more={limit: most}, workers=0)
    sizes = {"max_documents": [1] * len(TEXTS), "max_tokens": [len(text) + 1 for text in TEXTS]}
    count = int(np.count_nonzero(np.cumsum(sizes.get(limit, [len(text) for text in TEXTS])) <= most))
    train, val = texts_of(tmp_path / "data")
    assert sorted(train + val) == sorted(TEXTS[:count])
    assert manifest.settings[limit] == most
    report = read_report(tmp_path / "data")
    assert report is not None
    assert report["records"] - report["dropped"].get("limit", 0) == count
    assert report["records"] < len(TEXTS) or most == 1000, "the rest is not read"
    if most == 400:
        again = pack(rows(tmp_path), tmp_path / "again", split="document", more={limit: most}, workers=2)
        assert again.to_bytes() == manifest.to_bytes()


def test_a_limit_is_of_each_source_and_not_of_the_validation_source(tmp_path: Path, small_parts: None) -> None:
    names = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "val")]
    for name in names:
        name.write_text("".join(f'{{"text": "{name.stem}{number:03d} words"}}\n' for number in range(50)))
    mixture = [{"path": str(names[0]), "weight": 2}, str(names[1])]
    pack(mixture, tmp_path / "data", more={"validation": str(names[2]), "max_documents": 3}, workers=0)
    train, val = texts_of(tmp_path / "data")
    first, second = ([f"{name}{number:03d} words" for number in range(3)] for name in "ab")
    assert train == first + first + second
    assert len(val) == 50


def test_a_limited_prepare_goes_on_where_it_was_stopped(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal.write
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    for name in names:
        Path(name).write_text("".join(f'{{"text": "{Path(name).stem}{n:03d} words"}}\n' for n in range(90)))
    limit = {"max_documents": 31}
    whole = pack(names, tmp_path / "whole", more=limit, workers=0)
    for stop in (1, 3, 5):
        left = iter(range(stop))

        def dies(journal: Journal, number: int, result: PartResult, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(journal, number, result)

        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", dies)
            with pytest.raises(KeyboardInterrupt):
                pack(names, tmp_path / f"data{stop}", more=limit, workers=0)
        assert pack(names, tmp_path / f"data{stop}", more=limit, workers=0).to_bytes() == whole.to_bytes()


def test_the_characters_of_a_limited_source_are_those_of_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "aab bab"}\n{"text": "abba b"}\n{"text": "xyz"}\n')
    manifest = pack(str(tmp_path / "a.jsonl"), tmp_path / "data", "char", more={"max_documents": 2}, workers=0)
    assert manifest.vocab == 3 + 1


def joined_text(folder: Path) -> str:
    """The text of both splits, without what ends its documents."""
    tokenizer = open_dataset(folder).tokenizer
    texts = (tokenizer.decode([number for number in ids if number != tokenizer.end_of_text])
             for ids in split_tokens(folder))  # fmt: skip
    return "".join(texts)


@pytest.mark.grid
@pytest.mark.parametrize("piece", [128, 2**24], ids=["in pieces", "in one"])
@pytest.mark.parametrize("tokenizer", ["char", "bytes", "bpe-300"])
@pytest.mark.parametrize("limit", ["max_bytes", "max_tokens"])
def test_a_limit_cuts_a_text_without_documents_at_a_character(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, limit: str, tokenizer: str, piece: int
) -> None:
    monkeypatch.setattr(plan, "PIECE", piece)
    monkeypatch.setattr(readers, "PIECE", piece)
    text = "".join(f"word {number} of a long tëxt\n" for number in range(120))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    clean = CleanConfig(drop=["near_duplicates"])
    for most in (609, 610, 611):  # 610 bytes end inside of a character
        folder = tmp_path / f"data{most}"
        manifest = pack(str(tmp_path / "text.txt"), folder, tokenizer, "contiguous", 0.25, clean=clean,
                        more={limit: most}, workers=0)  # fmt: skip
        taken = joined_text(folder)
        assert text.startswith(taken)
        splits = manifest.splits.values()
        size = len(taken.encode())
        assert size == sum(split.text_bytes for split in splits)
        if limit == "max_bytes":
            assert size == most - (most == 610)
        else:
            ids = sum(split.tokens for split in splits)  # one of them ends the text
            if tokenizer == "bpe-300":  # a border between two splits may part a token
                assert most - 1 <= ids <= most + 3
            else:
                assert ids == most - (tokenizer == "bytes" and most == 611)
        if tokenizer == "char":
            assert manifest.vocab == len(set(taken)) + 1, "the characters are those of what is taken"
        report = read_report(folder)
        assert report is not None
        assert (report["records"], sum(report["kept"].values()), report["dropped"]) == (1, 1, {})


def test_a_limit_cuts_the_text_file_that_it_falls_into(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10, encoding="utf-8")
    for most, kept in ((25, ["a" * 10, "b" * 10, "c" * 5]), (20, ["a" * 10, "b" * 10]), (4, ["aaaa"])):
        folder = tmp_path / f"data{most}"
        pack(str(tmp_path), folder, "bytes", "contiguous", 0.3, more={"max_bytes": most, "format": "text"})
        assert joined_text(folder) == "".join(kept)
        assert (read_report(folder) or {})["records"] == len(kept)
        shutil.rmtree(folder)
    pack(str(tmp_path), tmp_path / "two", "bytes", "contiguous", 0.3, more={"max_bytes": 25, "max_documents": 2})
    assert (read_report(tmp_path / "two") or {})["text_bytes"] == 20
    manifest = pack(str(tmp_path), tmp_path / "char", "char", "contiguous", 0.3, more={"max_documents": 2})
    assert manifest.vocab == 2 + 1, "a and b"


def test_a_first_document_past_the_limit_is_an_error(tmp_path: Path) -> None:
    for tokenizer in ("bytes", "char"):
        with pytest.raises(DataError, match=r"first document of .* is larger than data.max_bytes=10,") as error:
            pack(rows(tmp_path), tmp_path / "data", tokenizer, more={"max_bytes": 10})
        assert error.value.hint == "raise data.max_bytes"
        assert not (tmp_path / "data").exists()
    (tmp_path / "long.txt").write_text("# one\nlong enough\n# two\n", encoding="utf-8")
    limits = {"max_bytes": 10, "max_documents": 3, "document_start": "# "}
    with pytest.raises(DataError, match=r"is larger than data.max_bytes=10,") as error:
        pack(str(tmp_path / "long.txt"), tmp_path / "data", "bytes", more=limits)
    assert error.value.hint == "raise data.max_bytes, or set a data.document_start that occurs more often"


def test_another_limit_is_another_dataset(tmp_path: Path) -> None:
    data = DataConfig(source=rows(tmp_path), tokenizer="bytes", folder=str(tmp_path / "data"), max_documents=20)
    prepare_data(data)
    assert prepare_data(data)[1] is False
    for other in (None, 21):
        with pytest.raises(DataError, match="was prepared with max_documents 20"):
            prepare_data(data.model_copy(update={"max_documents": other}))


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_copies_of_a_text_over_several_parts_are_whole(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    monkeypatch.setattr(plan, "PIECE", 128)
    monkeypatch.setattr(readers, "PIECE", 128)
    text = "".join(f"word {number} of a long text\n" for number in range(100))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "val.txt").write_text("for validation", encoding="utf-8")
    source = [{"path": str(tmp_path / "text.txt"), "weight": weight}]
    pack(source, tmp_path / "data", more={"validation": str(tmp_path / "val.txt")})
    train, _ = texts_of(tmp_path / "data")
    assert train == [text] * int(weight)


def test_copies_of_a_source_are_cut_where_it_is_cut_itself(tmp_path: Path, small_parts: None) -> None:
    (tmp_path / "other").mkdir()
    other = rows(tmp_path / "other", [f"other {number}" for number in range(20)])
    for weight in (1, 2):
        source = [{"path": rows(tmp_path), "weight": weight}, other]
        pack(source, tmp_path / str(weight), "bytes", "contiguous", 0.6)
    (train, val), (train_twice, val_twice) = (split_tokens(tmp_path / str(weight)) for weight in (1, 2))
    assert np.array_equal(train_twice, np.tile(train, 2))
    assert np.array_equal(val_twice, val)


def test_a_long_document_is_cut_at_the_border_and_ends_once(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PIECE", 128)
    monkeypatch.setattr(readers, "PIECE", 128)
    text = "".join(f"word {number} of a long text\n" for number in range(40))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    pack(str(tmp_path / "text.txt"), tmp_path / "data", "bytes", "contiguous", 0.6)
    border = int(len(text) * 0.4)
    assert split_tokens(tmp_path / "data") == ([*text[:border].encode()], [*text[border:].encode(), 256])
    dataset = open_dataset(tmp_path / "data")
    assert [split.document_starts().tolist() for split in (dataset.train, dataset.val)] == [[0], [0]]
    assert (read_report(tmp_path / "data") or {})["kept"] == {"train": 1, "val": 0}


def test_what_is_dropped_does_not_move_the_cut(tmp_path: Path, small_parts: None) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    for folder, texts in ((kept, TEXTS), (again, [*TEXTS, *TEXTS[:30]])):
        folder.mkdir()
        clean = CleanConfig(drop=["exact_duplicates"])
        pack(rows(folder, texts), folder / "data", "bytes", "contiguous", 0.3, clean=clean)
    assert split_tokens(again / "data") == split_tokens(kept / "data")


def test_a_document_over_several_parts_goes_to_one_split(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PIECE", 128)
    monkeypatch.setattr(readers, "PIECE", 128)
    texts = ["".join(f"word {number} of long text {name}\n" for number in range(100)) for name in range(6)]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    pack(str(tmp_path / "texts"), tmp_path / "data", "bytes", "document", 0.5)
    train, val = texts_of(tmp_path / "data")
    assert train
    assert val
    assert sorted([*train, *val]) == sorted(texts)


@pytest.mark.parametrize("at_once", [4, 4_000_000])
def test_exact_duplicates_keep_the_first(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("flatout.data.merge._DOCUMENTS_AT_ONCE", at_once)
    unique = [f"text number {number}" for number in range(30)]
    texts = [*unique, *unique[5:20], "the end", unique[0]]
    clean = CleanConfig(drop=["exact_duplicates"])
    pack(rows(tmp_path, texts), tmp_path / "data", "bytes", "document", 0.3, clean=clean)
    train, val = texts_of(tmp_path / "data")
    assert sorted([*train, *val]) == sorted([*unique, "the end"])
    assert train == [text for text in [*unique, "the end"] if text in train]
    assert (read_report(tmp_path / "data") or {})["dropped"] == {"exact_duplicate": 16}


def test_long_documents_beside_short_ones_are_compared_to_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PIECE", 128)
    monkeypatch.setattr(readers, "PIECE", 128)
    head = "".join(f"word {number} of a long text\n" for number in range(10))
    texts = ["short", head + "one end", head + "another end", head + "one end", "the last"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "val.txt").write_text("for validation", encoding="utf-8")
    clean = CleanConfig(drop=["exact_duplicates"])
    pack(str(tmp_path / "texts"), tmp_path / "data", clean=clean, more={"validation": str(tmp_path / "val.txt")})
    assert texts_of(tmp_path / "data")[0] == [*texts[:3], "the last"]
    assert (read_report(tmp_path / "data") or {})["dropped"] == {"exact_duplicate": 1}


def test_a_long_document_of_which_one_piece_is_rejected_is_dropped_whole(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PIECE", 128)
    monkeypatch.setattr(readers, "PIECE", 128)
    (tmp_path / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n " * 2, encoding="utf-8")
    pack(str(tmp_path / "letters.txt"), tmp_path / "letters", "char")
    tokenizer = str(tmp_path / "letters" / "tokenizer.json")
    long = "words of a long text\n" * 20
    texts = ["short", long + "to its end", "between", long[:200] + "é" + long, "the last"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "val.txt").write_text("for validation", encoding="utf-8")
    more = {"validation": str(tmp_path / "val.txt")}
    pack(str(tmp_path / "texts"), tmp_path / "data", tokenizer, more=more)
    dataset = open_dataset(tmp_path / "data")
    decoded = dataset.tokenizer.decode(dataset.train.read(0, dataset.train.tokens))
    assert decoded == "".join(f"{text}<|endoftext|>" for text in [*texts[:3], "the last"])
    report = read_report(tmp_path / "data") or {}
    assert (report["dropped"], report["kept"]) == ({"tokenizer": 1}, {"train": 4, "val": 1})


def test_near_duplicates_and_rules_are_counted(tmp_path: Path, small_parts: None) -> None:
    prose = [" ".join(f"word{number}x{place}" for place in range(60)) for number in range(12)]
    texts = [*prose, prose[3] + " and a few more words", "short", ""]
    clean = CleanConfig(drop=["short", "near_duplicates"])
    pack(rows(tmp_path, texts), tmp_path / "data", "bytes", "document", 0.4, clean=clean)
    report = read_report(tmp_path / "data")
    assert report is not None
    assert report["dropped"] == {"near_duplicate": 1, "too_short": 1, "empty": 1}
    assert report["records"] == 15
    assert sum(report["kept"].values()) == 12


def test_bad_lines_are_listed_and_the_rest_is_kept(tmp_path: Path, small_parts: None) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    lines[7], lines[20], lines[41] = b'{"text": "cut', b'{"other": 1}', b'{"text": "\xff\xfe"}'
    path.write_bytes(b"\n".join(lines))
    pack(str(path), tmp_path / "data", "bytes", "document", 0.3)
    train, val = texts_of(tmp_path / "data")
    assert sorted([*train, *val]) == sorted(text for number, text in enumerate(TEXTS) if number not in (7, 20, 41))
    problems = read_problems(tmp_path / "data", 10)
    assert [problem["kind"] for problem in problems] == ["json", "field", "not-utf8"]
    report = read_report(tmp_path / "data")
    assert report is not None
    assert (report["records"], report["damaged"], report["problem_count"]) == (60, 3, 3)


def test_of_very_many_bad_lines_the_last_entry_stands_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "_MOST_PROBLEMS", 3)
    lines = [json.dumps({"text": text} if number % 10 else {"other": number}) for number, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pack(str(tmp_path / "rows.jsonl"), tmp_path / "data", "bytes", "document", 0.3)
    first, second, last = read_problems(tmp_path / "data", 10)
    assert [problem["place"] for problem in (first, second, last)] == ["line 1", "line 11", "line 21"]
    assert last["message"] == f"4 problems from here on, the first: {first['message']}"
    assert [problem["records"] for problem in (first, second, last)] == [1, 1, 4]


def test_an_input_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("nonsense\n" * 3, encoding="utf-8")
    with pytest.raises(DataError, match=r"nothing could be read, none of 3 records: .*bad\.jsonl: 3 records, .*line 1"):
        pack(str(tmp_path / "bad.jsonl"), tmp_path / "data")
    with pytest.raises(DataError, match="60 too_short"):
        pack(rows(tmp_path), tmp_path / "data", clean=CleanConfig(drop=["short"]))


@pytest.mark.parametrize("limits", [(256, 10**6), (10**6, 7)], ids=["characters", "documents"])
def test_a_compressed_file_is_cut_by_what_is_in_it_and_goes_on_from_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    characters, documents = limits
    monkeypatch.setattr(plan, "PART_BYTES", characters)
    monkeypatch.setattr(plan, "_MOST_DOCUMENTS", documents)
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 0)
    source = Path(rows(tmp_path)).read_bytes()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl.gz").write_bytes(gzip.compress(source))
    (tmp_path / "texts" / "b.jsonl.gz").write_bytes(gzip.compress(source))
    request = request_of(DataConfig(source=str(tmp_path / "texts")))
    inputs = plan.find_inputs(request)

    class Before(plan.Done):
        """A prepare that had finished some parts, and read the first file to its end."""

        def __init__(self, parts: int, first: int | None) -> None:
            self.parts, self.first = parts, first
            self.noted: dict[int, int] = {}

        def has(self, number: int, source: int) -> bool:
            return number < self.parts

        def parts_of(self, file: int) -> int | None:
            return None if file else self.first

        def note(self, file: int, parts: int) -> None:
            self.noted[file] = parts

    done = Before(0, None)
    parts = [part for part in plan.parts_of(inputs, request.options, done) if isinstance(part, CorpusPart)]
    half = len(parts) // 2
    assert done.noted == {0: half, 1: half}
    assert [part.number for part in parts] == list(range(2 * half))
    assert [Path(part.file).name for part in parts] == ["a.jsonl.gz"] * half + ["b.jsonl.gz"] * half
    assert sum(part.bytes for part in parts) == inputs.bytes
    assert [part.files for part in parts] == ([0] * (half - 1) + [1]) * 2, "a file counts with its last part"
    assert all(part.bytes >= 0 for part in parts)
    texts = [[item.text for item in part.documents if isinstance(item, Document)] for part in parts]
    assert [text for part in texts for text in part] == TEXTS + TEXTS
    for part in texts[: half - 1]:
        assert len(part) == documents or len("".join(part)) >= characters > len("".join(part[:-1]))
    for count in (3, half, half + 2):
        again = list(plan.parts_of(inputs, request.options, Before(count, None)))
        assert again == [*range(count), *parts[count:]]
    read: list[str] = []
    monkeypatch.setattr(plan, "read_slice", lambda each, *_, **__: read.append(each.file.name) or iter(()))
    list(plan.parts_of(inputs, request.options, Before(half, half)))
    assert [Path(name).name for name in read] == ["b.jsonl.gz"], "what is known to be done is not read again"


def test_the_cut_of_a_contiguous_split_is_by_characters_for_any_tokenizer(tmp_path: Path, small_parts: None) -> None:
    pack(rows(tmp_path), tmp_path / "data", "gpt2", "contiguous", 0.37)
    train, val = split_tokens(tmp_path / "data")
    tokenizer = load_tokenizer("gpt2")
    head, tail = tokenizer.decode(train), tokenizer.decode(val)
    assert (head + tail).replace("<|endoftext|>", "") == "".join(TEXTS)
    assert len(head.replace("<|endoftext|>", "")) == int(len("".join(TEXTS)) * 0.63)


# What interrupts


def test_workers_do_not_change_a_byte(tmp_path: Path, small_parts: None) -> None:
    for workers in (0, 1, 3):
        pack(rows(tmp_path), tmp_path / f"data{workers}", "gpt2", "document", 0.3, workers=workers)
    for workers in (1, 3):
        assert contents(tmp_path / "data0") == contents(tmp_path / f"data{workers}")


def test_an_interrupted_prepare_goes_on(tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rows(tmp_path)
    pack(source, tmp_path / "whole", "bytes", "document", 0.3)
    ran: list[int] = []

    def interrupt(progress: PrepareProgress) -> None:
        ran.append(progress.documents)
        if len(ran) in (3, 6):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pack(source, tmp_path / "data", "bytes", "document", 0.3, progress=interrupt)
        assert not (tmp_path / "data").exists()
    kept = sorted((tmp_path / ".data.partial" / "parts").iterdir())
    assert len(kept) >= 3
    stamps = {path.name: path.stat().st_mtime_ns for path in kept}

    def watch(progress: PrepareProgress) -> None:
        for path in (tmp_path / ".data.partial" / "parts").glob("*.part"):
            if path.name in stamps:
                assert path.stat().st_mtime_ns == stamps[path.name], "a finished part was made again"

    pack(source, tmp_path / "data", "bytes", "document", 0.3, progress=watch)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
    assert not (tmp_path / ".data.partial").exists()


def test_parts_of_another_plan_are_not_used(tmp_path: Path, small_parts: None) -> None:
    source = rows(tmp_path)

    def interrupt(progress: PrepareProgress) -> None:
        if progress.documents > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "data", "bytes", "document", 0.3, progress=interrupt)
    texts = [text.upper() for text in TEXTS]
    rows(tmp_path, texts)
    pack(source, tmp_path / "data", "bytes", "document", 0.3)
    train, val = texts_of(tmp_path / "data")
    assert sorted([*train, *val]) == sorted(texts)


def stored_part() -> PartResult:
    problem = Problem("a.txt", "line 3", "json", "no JSON", records=2)
    head = PartHead(1, 10, 1, 3, 1, 4, 2, {"empty": 1}, (problem,), {0: "too_long"})
    return PartResult(head, b"tokens", np.array([(3, 9, 9, 1, 2, 3)], dtype=PIECE), b"signature")


def test_a_journal_keeps_what_belongs_to_its_plan_and_nothing_else(tmp_path: Path) -> None:
    result = stored_part()
    journal = Journal(tmp_path, {"plan": 1})
    journal.write(7, result)
    journal.note(0, 3)
    journal.note(4, 1)
    again = Journal(tmp_path, {"plan": 1})
    assert [again.has(number, result.head.source) for number in (6, 7, 8)] == [False, True, False]
    assert [again.parts_of(file) for file in (0, 1, 4)] == [3, None, 1]
    assert again.head(7) == result.head
    read = again.read(7)
    assert (read.tokens, read.pieces.tobytes(), read.signatures) == (
        result.tokens, result.pieces.tobytes(), result.signatures,
    )  # fmt: skip
    index = again.read(7, tokens=False, signatures=False)
    assert (index.tokens, index.pieces.tobytes(), index.signatures) == (b"", result.pieces.tobytes(), b"")
    (tmp_path / "parts" / "mine.txt").touch()
    other = Journal(tmp_path, {"plan": 2})
    assert not other.has(7, result.head.source)
    assert other.parts_of(0) is None
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["mine.txt"], "what is not ours stays"
    assert not Journal(tmp_path, {"plan": 1}).has(7, 1), "what was of the first plan is gone for good"


def test_a_journal_believes_nothing_that_was_changed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"plan": 1})
    journal.write(7, stored_part())
    journal.note(0, 3)
    path = tmp_path / "parts" / "00000007.part"
    whole = path.read_bytes()
    (tmp_path / "parts" / "00000008.part").write_bytes(whole)
    assert not journal.has(8, 1), "another part's"
    for damaged in (whole[:-1], whole + b"x", whole[:20], b"", whole[:-1] + b"x", whole[:50] + b"x" + whole[51:]):
        path.write_bytes(damaged)
        assert not Journal(tmp_path, {"plan": 1}).has(7, 1)
        with pytest.raises(DataError, match="was damaged meanwhile"):
            journal.read(7, tokens=False)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="its size is not what was written"):
        journal.head(7)
    [notes] = [path for path in tmp_path.iterdir() if b'"parts"' in (path.read_bytes() if path.is_file() else b"")]
    sealed = json.loads(notes.read_bytes())
    for wrong in ({"parts": {"0": 2}}, {"plan": "another"}, {"sha256": "0" * 64}, {"parts": 3}):
        notes.write_text(json.dumps({**sealed, **wrong}), encoding="utf-8")
        assert Journal(tmp_path, {"plan": 1}).parts_of(0) is None
    notes.write_text(json.dumps(sealed), encoding="utf-8")
    assert Journal(tmp_path, {"plan": 1}).parts_of(0) == 3


def test_a_failure_keeps_the_old_dataset(tmp_path: Path) -> None:
    def fail(_: PrepareProgress) -> NoReturn:
        raise KeyboardInterrupt

    old = pack(rows(tmp_path), tmp_path / "data", "bytes")
    with pytest.raises(KeyboardInterrupt):
        pack("shakespeare", tmp_path / "data", "char", overwrite=True, progress=fail)
    assert verify_dataset(tmp_path / "data") == old


def pack_and_die(source: str, folder: Path, moment: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(done: PrepareProgress) -> None:
        if moment == "document" and done.documents > 30:
            die()

    plan.PART_BYTES = 256
    module = {"write_file": merge, "merge_parts": pack_module, "_publish": folders, "rename": os}.get(moment)
    if module is not None:
        setattr(module, moment, die)
    pack(source, folder, "bytes", "document", 0.3, progress=progress)


@pytest.mark.parametrize("moment", ["document", "write_file", "merge_parts", "_publish", "rename"])
def test_a_killed_packer_leaves_nothing_that_loads_and_the_next_one_succeeds(
    tmp_path: Path, small_parts: None, moment: str
) -> None:
    source = rows(tmp_path)
    assert Forked(pack_and_die, source, tmp_path / "data", moment).wait() == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="there is no folder"):
        open_dataset(tmp_path / "data")
    pack(source, tmp_path / "data", "bytes", "document", 0.3)
    pack(source, tmp_path / "undisturbed", "bytes", "document", 0.3)
    assert contents(tmp_path / "data") == contents(tmp_path / "undisturbed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl", "undisturbed"]


def test_two_packers_never_share_a_folder(tmp_path: Path) -> None:
    def second(_: PrepareProgress) -> None:
        with pytest.raises(DataError, match="another process is preparing"):
            pack("shakespeare", tmp_path / "data", "char")

    manifest = pack("shakespeare", tmp_path / "data", "char", progress=second)
    assert verify_dataset(tmp_path / "data") == manifest


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, ResourceError), (errno.EDQUOT, ResourceError), (errno.EROFS, DataError)]
)
def test_a_disk_that_fails_is_reported_and_the_next_try_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[DataError]
) -> None:
    def fail(_: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(kind) as caught:
            pack("shakespeare", tmp_path / "data", "char")
    assert str(tmp_path / "data") in caught.value.message
    assert caught.value.exit_code == (5 if kind is ResourceError else 3)
    pack("shakespeare", tmp_path / "data", "char")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_too_little_disk_is_told_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = plan.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"1000 B free, and preparing 1\.1 MiB .* about 4\.3 MiB") as caught:
        pack("shakespeare", tmp_path / "deep" / "data", "bytes")
    assert "data.folder" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def pack_small_files_only(folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
    try:
        pack("shakespeare", folder, "char")
    except ResourceError as error:
        return error.exit_code
    return 0


def test_a_write_that_really_fails_is_a_resource_error(tmp_path: Path) -> None:
    assert Forked(pack_small_files_only, tmp_path / "data", stderr=tmp_path / "errors").wait() == 5
    assert (tmp_path / "errors").read_text() == ""
    assert not (tmp_path / "data").exists()


def test_packing_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from flatout.cli import main; "
        "main(['prepare', 'data.tokenizer=gpt2', 'data.folder=' + sys.argv[1]]); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_the_manifest_says_what_was_asked(tmp_path: Path) -> None:
    manifest: Manifest = pack(rows(tmp_path), tmp_path / "data", "bytes", "document", 0.25)
    settings = manifest.settings
    assert (settings["source"], settings["split"], settings["validation"]) == (rows(tmp_path), "document", 0.25)
    assert settings["source_bytes"] == Path(rows(tmp_path)).stat().st_size
    assert manifest.tokenizer_fingerprint == load_tokenizer("bytes").fingerprint
    on_disk = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    assert on_disk["fingerprint"] == manifest.fingerprint
    assert {file.name for file in manifest.files} | {"manifest.json"} == set(contents(tmp_path / "data"))


# What `flatout prepare` makes of a dataset that is already there


def prepare(*words: str) -> int:
    from flatout import cli

    return cli.main(["prepare", "data.tokenizer=bytes", "model.context=16", *words])


def test_a_source_that_changed_is_noticed_even_at_the_same_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one text " * 20, encoding="utf-8")
    assert prepare("data.source=a.txt") == prepare("data.source=a.txt") == 0
    Path("a.txt").write_text("two text " * 20, encoding="utf-8")
    assert prepare("data.source=a.txt") == 3
    assert "another content" in capsys.readouterr().err
    Path("a.txt").unlink()
    assert prepare("data.source=a.txt") == 0  # the shards stand for themselves


def test_a_dataset_inside_its_own_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some text " * 20, encoding="utf-8")
    assert prepare("data.source=texts", "data.folder=texts/tokens") == 3
    assert [path.name for path in Path("texts").iterdir()] == ["a.txt"]
    assert prepare("data.source=texts", "data.folder=tokens") == 0


def test_damaged_shards_are_found_by_prepare_and_mended_by_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"data.source={rows(tmp_path)}", "data.folder=out"]
    assert prepare(*words) == 0
    shard = Path("out/train-00000.bin")
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])
    from flatout import cli

    for command in (lambda: prepare(*words), lambda: cli.main(["prepare", "inspect", "out"])):
        assert command() == 3
        assert "--overwrite" in capsys.readouterr().err
    Path("out/manifest.json").write_text("{", encoding="utf-8")
    assert prepare(*words) == 3
    assert "--overwrite" in capsys.readouterr().err
    assert prepare(*words, "--overwrite") == prepare(*words) == 0


def test_looking_at_a_dataset_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout import cli

    (tmp_path / "else").mkdir()
    pack(rows(tmp_path), tmp_path / "out", "bytes")
    monkeypatch.chdir(tmp_path / "else")
    assert cli.main(["prepare", "inspect", "../out"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["else", "out", "rows.jsonl"]
    assert list((tmp_path / "else").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_told(tmp_path: Path) -> None:
    pack(rows(tmp_path), tmp_path / "out", "bytes")
    words = ["prepare", "verify", str(tmp_path / "out")]
    assert Forked(cli.main, words, stdout="/dev/full", stderr=tmp_path / "errors").wait() == 5
    assert [line.split(":")[0] for line in (tmp_path / "errors").read_text().splitlines()] == ["error", "hint"]


# --- damage in the work folder, and names that are not ours -----------------------------------------------------------


def interrupted(folder: Path, source: Any, **how: Any) -> None:
    """A prepare that is stopped when all parts are finished."""

    def stop(progress: PrepareProgress) -> None:
        if progress.phase == "merging":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, folder, "bytes", "document", 0.3, progress=stop, **how)


def test_only_damaged_parts_are_made_again(tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rows(tmp_path)
    interrupted(tmp_path / "data", source)
    part = tmp_path / ".data.partial" / "parts" / "00000002.part"
    raw = bytearray(part.read_bytes())
    raw[60] ^= 1  # inside the description of the part, which was not hashed once
    part.write_bytes(raw)
    made: list[int] = []
    write = Journal.write
    monkeypatch.setattr(
        Journal, "write", lambda self, number, *rest: (made.append(number), write(self, number, *rest))[1]
    )
    pack(source, tmp_path / "data", "bytes", "document", 0.3)
    assert made == [2]


@pytest.mark.parametrize("what", ["a guest in the target", "a damaged part"])
def test_finished_parts_stay_when_the_same_command_can_go_on(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source, target = rows(tmp_path), tmp_path / "data"
    guest, part = target / "letter.txt", tmp_path / ".data.partial" / "parts" / "00000002.part"

    def interfere(progress: PrepareProgress) -> None:
        if progress.phase != "merging" or guest.exists():
            return
        if what == "a damaged part":
            part.write_bytes(b"damaged")
        else:
            target.mkdir()
            guest.write_text("dear")

    # The first part is merged before the damage is done, and all of them before the target is looked at.
    with pytest.raises(DataError, match="was damaged meanwhile" if what == "a damaged part" else "letter.txt"):
        pack(source, target, "bytes", "document", 0.3, progress=interfere)
    guest.unlink(missing_ok=True)
    made: list[int] = []
    write = Journal.write
    monkeypatch.setattr(
        Journal, "write", lambda self, number, *rest: (made.append(number), write(self, number, *rest))[1]
    )
    pack(source, target, "bytes", "document", 0.3)
    assert made == ([2] if what == "a damaged part" else [])
    pack(source, tmp_path / "other", "bytes", "document", 0.3)
    assert contents(target) == contents(tmp_path / "other")
    assert not part.parent.exists()


def test_signals_to_the_whole_group_leave_workers_at_work(tmp_path: Path) -> None:
    """A terminal that closes sends SIGHUP to all of a group, and the parent decides what comes of it."""
    recipe = Recipe(ReadOptions(), CleanRules())
    (file,) = sources.find_files(rows(tmp_path)).files
    part = CorpusPart(0, 0, (Slice(file),))
    worker = Worker()
    try:
        before = worker.call("characters", recipe, part)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            worker._process.send_signal(number)
        assert worker.call("characters", recipe, part) == before
    finally:
        worker.kill()


@pytest.mark.parametrize(
    "what", ["a file", "a folder", "a link", "a dangling link", "no mark", "a guest", "a linked part"]
)
def test_a_work_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path, small_parts: None, what: str) -> None:
    source, work, target = rows(tmp_path), tmp_path / ".data.partial", tmp_path / "data"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    if what == "a file":
        work.write_text("my notes")
    elif what == "a folder":
        work.mkdir()
        (work / "notes.txt").write_text("mine")
    elif what == "a link":
        work.symlink_to(mine)
    elif what == "a dangling link":
        work.symlink_to(tmp_path / "nowhere")
    else:
        interrupted(target, source)
        if what == "no mark":
            (work / MARK).unlink()
        elif what == "a guest":
            (work / "notes.txt").write_text("mine")
        else:
            (work / "parts" / "00000001.part").unlink()
            (work / "parts" / "00000001.part").symlink_to(mine / "letter.txt")
    before = tree(tmp_path)
    with pytest.raises(DataError, match="not ours") as caught:
        pack(source, target, "bytes", "document", 0.3)
    assert "--overwrite" in caught.value.hint
    assert tree(tmp_path) == before
    pack(source, target, "bytes", "document", 0.3, overwrite=True)
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before
    verify_dataset(target)
    assert {Path(name).parts[0] for name in after} == {"data", "mine", "rows.jsonl", ".data.partial"}


def test_a_refused_command_keeps_the_parts_of_another(tmp_path: Path, small_parts: None) -> None:
    interrupted(tmp_path / "data", rows(tmp_path))
    before = tree(tmp_path)
    with pytest.raises(DataError, match="no source"):
        pack(str(tmp_path / "rows.json"), tmp_path / "data", "bytes", "document", 0.3)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("what", ["content", "link", "folder"])
def test_a_lock_file_that_is_not_ours_stays(tmp_path: Path, what: str) -> None:
    source, lock = rows(tmp_path), tmp_path / ".data.lock"
    if what == "content":
        lock.write_text("mine")
    elif what == "link":
        (tmp_path / "letter.txt").touch()
        lock.symlink_to(tmp_path / "letter.txt")
    else:
        lock.mkdir()
    before = tree(tmp_path)
    with pytest.raises(DataError, match="in the way"):
        pack(source, tmp_path / "data", "bytes")
    assert tree(tmp_path) == before
    assert lock.is_symlink() == (what == "link")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pack_module.fcntl, "flock", fail)
    with pytest.raises(DataError, match="cannot lock files") as caught:
        pack("shakespeare", tmp_path / "deep" / "data", "char")
    assert "data.folder" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_folders_with_names_like_ours_survive_overwriting(tmp_path: Path) -> None:
    source = rows(tmp_path)
    pack(source, tmp_path / "data", "bytes")
    for name in (".data.old", "data.old-0123abcd", "data.tmp-2024"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    pack(source, tmp_path / "data", "bytes", overwrite=True)
    assert tree(tmp_path) == before


def test_overwriting_removes_only_what_the_manifest_names(tmp_path: Path) -> None:
    source = rows(tmp_path)
    pack(source, tmp_path / "data", "bytes")
    (tmp_path / "data" / "train-00007.bin").write_bytes(b"not of this dataset")
    with pytest.raises(DataError, match="train-00007"):
        pack(source, tmp_path / "data", "bytes", overwrite=True)
    (tmp_path / "data" / "train-00007.bin").unlink()
    (tmp_path / "data" / "manifest.json").write_bytes(b"")  # and a damaged manifest does not keep it from being made
    pack(source, tmp_path / "data", "bytes", overwrite=True)
    verify_dataset(tmp_path / "data")
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text('{"name": "of another program"}')
    with pytest.raises(DataError, match="not a dataset"):
        pack(source, tmp_path / "other", "bytes", overwrite=True)


@pytest.mark.parametrize(
    "folder",
    ["x" * 300, "x" * 250, "/", ".", "..", "rows.jsonl", "rows.jsonl/data", "closed/data", "nul\0byte", "loop"],
)
def test_a_folder_that_cannot_be_is_an_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    rows(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    if folder == "closed/data":
        refuse = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(pack_module, "make_folders", Mock(side_effect=refuse))
    before = tree(tmp_path)
    with pytest.raises(DataError) as caught:
        prepare_data(DataConfig(source="rows.jsonl", tokenizer="bytes", folder=folder))
    assert caught.value.hint
    assert "\0" not in caught.value.message
    assert tree(tmp_path) == before


def test_a_large_row_group_is_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {number} " + "abc " * 50 for number in range(400)]  # compressed, it is a tenth of that
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in.parquet", compression="zstd")
    pack(str(tmp_path / "in.parquet"), tmp_path / "whole", "bytes", "document", 0.3)
    monkeypatch.setattr(sources, "PIECE", 2**13)
    data = DataConfig(source=str(tmp_path / "in.parquet"), tokenizer="bytes")
    inputs = plan.find_inputs(request_of(data))
    held = [len(part.slices) for part in plan.parts_of(inputs, request_of(data).options, plan.Done())]
    assert len(held) > 2
    assert set(held) == {1}
    pack(str(tmp_path / "in.parquet"), tmp_path / "cut", "bytes", "document", 0.3)
    assert contents(tmp_path / "whole") == contents(tmp_path / "cut")


# --- folders of other files -------------------------------------------------------------------------------------------


def mixed_folder(place: Path, counts: dict[str, int]) -> str:
    for suffix, count in counts.items():
        for number in range(count):
            path = place / f"{suffix.strip('.') or 'plain'}-{number}{suffix}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"line of {path.name}\n" * 3)
    return str(place)


def test_files_that_are_passed_over_are_told_before_anything_is_read(tmp_path: Path) -> None:
    told: list[PrepareProgress] = []
    source = mixed_folder(tmp_path / "in", {".txt": 9, ".py": 4, ".c": 2, ".h": 1, ".rs": 1, "": 1})
    pack(source, tmp_path / "data", "bytes", progress=told.append)
    assert told[0].notice == "18 files: read 9 .txt; passed over 4 .py, 2 .c, 1 .h, 2 others"
    assert (told[0].files, told[0].bytes) == (0, 0)
    assert not any(progress.notice for progress in told[1:])


def test_training_tells_what_its_data_was_not_made_from(tmp_path: Path) -> None:
    pack(mixed_folder(tmp_path / "in", {".txt": 3, ".py": 2}), tmp_path / "data", "bytes")
    (remark,) = notices_on_folder(tmp_path / "data")
    assert remark.found.endswith("was prepared from 3 of 5 files; passed over 2 .py")


def test_a_folder_of_mostly_other_files_is_refused_unless_a_format_is_given(tmp_path: Path) -> None:
    source = mixed_folder(tmp_path / "in", {".txt": 2, ".py": 5, ".cfg": 3})
    (tmp_path / "in" / "download.part").write_text("half")  # what programs leave does not count
    before = tree(tmp_path)
    with pytest.raises(DataError, match="passed over") as caught:
        pack(source, tmp_path / "deep" / "data", "bytes")
    assert "11 files: read 2 .txt; passed over 5 .py, 3 .cfg, 1 .part" in caught.value.message
    assert "data.format=text" in caught.value.hint
    assert tree(tmp_path) == before
    pack(source, tmp_path / "data", "bytes", more={"format": "text"})
    report = read_report(tmp_path / "data")
    assert report is not None
    assert (report["files"], report["passed_over"]) == (10, {".part": 1})
    pack([f"{source}/txt-0.txt", f"{source}/txt-1.txt"], tmp_path / "chosen", "bytes")


def test_splits_of_a_saved_dataset_are_no_reason_to_refuse_it() -> None:
    found = sources.FoundFiles(files=(Mock(),), left={name: f"split {name}" for name in ("test", "validation", "more")})
    assert not found.mostly_unknown


def test_a_tokenizer_is_learned_from_the_training_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the sly fox and the red cow, " * 90 + "zyzzyva " * 40, encoding="utf-8")
    manifest = pack(str(tmp_path / "a.txt"), tmp_path / "data", "bpe-300", "contiguous", 0.2)
    assert (manifest.tokenizer_kind, manifest.settings["tokenizer"]) == ("huggingface", "bpe-300")
    assert 260 < manifest.vocab < 300, "a small text gives fewer"
    tokenizer = open_dataset(tmp_path / "data").tokenizer
    assert len(tokenizer.encode("the")) < 3
    assert len(tokenizer.encode("zyzz")) == 4, "validation text teaches nothing"
    assert tokenizer.end_of_text == manifest.vocab - 1
    train, val = split_tokens(tmp_path / "data")
    assert tokenizer.decode([*train, *val]) == (tmp_path / "a.txt").read_text(encoding="utf-8") + "<|endoftext|>"
    assert pack(str(tmp_path / "a.txt"), tmp_path / "again", "bpe-300", "contiguous", 0.2) == manifest


@pytest.mark.parametrize(("first", "second"), [("bpe-300", "bpe-301"), ("bpe-300", "char"), ("char", "bpe-300")])
def test_a_learned_tokenizer_of_another_size_is_another(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "a.txt").write_text("the sly fox and the red cow, " * 90, encoding="utf-8")
    made = {"source": str(tmp_path / "a.txt"), "folder": str(tmp_path / "data")}
    prepare_data(DataConfig(**made, tokenizer=first))
    prepare_data(DataConfig(**made, tokenizer=first))
    with pytest.raises(DataError, match=f"was prepared with tokenizer '{first}', the config says '{second}'"):
        prepare_data(DataConfig(**made, tokenizer=second))


def test_no_part_of_compressed_files_holds_much_more_text_than_one_of_plain_files(tmp_path: Path) -> None:
    """A part was a few megabytes on disk, and decompressed up to a thousand times as much."""
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(6):
        (source / f"small{number}.txt.gz").write_bytes(gzip.compress(b"a" * 2**20, 1))
    with gzip.open(source / "large.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(40):
            file.write(b"a" * 2**20)
    request = request_of(DataConfig(source=str(source)), CleanConfig())
    inputs = plan.find_inputs(request)
    sizes = []
    for part in plan.parts_of(inputs, request.options, plan.Done()):
        assert isinstance(part, CorpusPart)
        read = (item for each in part.slices for item in readers.read_slice(each, request.options))
        items = [*part.documents, *read]
        sizes.append(sum(len(item.text) for item in items if isinstance(item, Document)))
    assert sum(sizes) == 46 * 2**20
    assert max(sizes) <= 2 * 2**24
    assert {2 * 2**20, 4 * 2**20} <= set(sizes), "four of the small ones together, and two"
