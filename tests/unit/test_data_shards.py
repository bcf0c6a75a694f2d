"""Shards: reads across borders, and every kind of damage or mismatch refused with the file and both values."""

import gc
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data import shards as module
from flatout.data.shards import VERSION, TokenShards, _canonical, open_dataset, read_manifest, verify_dataset
from flatout.data.tokenizer import ByteTokenizer, CharTokenizer
from flatout.errors import DataError
from tests.handmade import write_dataset

TEXT = "".join(f"line {number} of a small text\n" for number in range(40))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of many small shards. Tests read it; those that damage take a copy."""
    border = int(len(TEXT) * 0.8)
    folder = tmp_path_factory.mktemp("shards") / "data"
    return write_dataset(folder, [TEXT[:border].encode()], [TEXT[border:].encode()], shard_tokens=37)


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def refusal(folder: Path, **arguments: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        open_dataset(folder, **arguments)
    assert caught.value.hint
    return caught.value


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the manifest and give it the hashes it would have, as a deliberate hand could."""
    content = json.loads((folder / "manifest.json").read_bytes()) | changes
    for name in ("fingerprint", "manifest_sha256"):
        del content[name]
    learned = {name: value for name, value in content.items() if name not in ("settings", "report", "problems")}
    content["fingerprint"] = hashlib.sha256(_canonical(learned)).hexdigest()
    content["manifest_sha256"] = hashlib.sha256(_canonical(content)).hexdigest()
    (folder / "manifest.json").write_bytes(_canonical(content))


def test_a_split_reads_as_one_array(prepared: Path) -> None:
    train = TokenShards(prepared, "train", verify="full")
    border = int(len(TEXT) * 0.8)
    assert len(train.manifest.splits["train"].shards) > 5
    assert (train.tokens, train.vocab, train.dtype) == (border, 257, np.dtype("uint16"))
    assert bytes(train.read(0, train.tokens).tolist()) == TEXT[:border].encode()
    assert train.read(train.tokens, 0).tolist() == []


@pytest.fixture(params=["positioned", "unannounced", "mapped"])
def train(request: pytest.FixtureRequest, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> TokenShards:
    """The training split as each kind of system reads it."""
    if request.param == "unannounced":
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(module, "_POSITIONED", module._POSITIONED and request.param != "mapped")
    return TokenShards(prepared, "train")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reads_and_gathers_equal_slices(train: TokenShards, data: st.DataObject) -> None:
    stream = TEXT[: train.tokens].encode()
    length = data.draw(st.integers(1, train.tokens))
    starts = data.draw(st.lists(st.integers(0, train.tokens - length), max_size=20))
    windows = train.gather(np.array(starts, dtype=np.int64), length)
    assert windows.shape == (len(starts), length)
    assert windows.dtype == train.dtype
    for start, window in zip(starts, windows, strict=True):
        assert bytes(window.tolist()) == stream[start : start + length] == bytes(train.read(start, length).tolist())


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=st.lists(st.tuples(st.integers(0, 610), st.integers(0, 150)), max_size=20))
def test_ranges_of_any_length_come_one_after_the_other(train: TokenShards, ranges: list[tuple[int, int]]) -> None:
    stream = TEXT[: train.tokens].encode()
    starts, lengths = (
        np.array(column, dtype=np.int64) for column in (zip(*ranges, strict=True) if ranges else ([], []))
    )
    expected = b"".join(stream[start : start + length] for start, length in ranges)
    assert bytes(train.read_ranges(starts, lengths).tolist()) == expected


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 10**6), (10**6, 1), (5, -1)])
def test_reading_outside_the_split_is_an_error(train: TokenShards, start: int, length: int) -> None:
    with pytest.raises(IndexError):
        train.read(start, length)
    with pytest.raises(IndexError):
        train.gather(np.array([0, start]), length)
    with pytest.raises(IndexError):
        train.read_ranges(np.array([0, start]), np.array([1, length]))


def test_what_was_read_is_a_copy(train: TokenShards) -> None:
    first = train.read(0, 10)
    first[:] = 0
    assert train.read(0, 10).any()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's count of resident memory")
def test_reading_does_not_grow_the_process(tmp_path: Path) -> None:
    def resident() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) * 1024

    size = 2**25
    document = np.random.default_rng(0).integers(0, 257, size // 2, dtype=np.uint16)
    shards = TokenShards(write_dataset(tmp_path / "data", [document]), "train")
    starts = np.random.default_rng(1).permutation(size // 2 // 1024 - 1) * 1024
    before = resident()
    for part in np.array_split(starts, 16):
        shards.gather(part, 1025)
    assert resident() - before < size // 8


@pytest.mark.skipif(not module._POSITIONED, reason="a map that shrinks kills the process")
def test_a_shard_cut_after_it_was_opened_is_named(copy: Path) -> None:
    train = TokenShards(copy, "train")
    os.truncate(copy / "train-00001.bin", 10)
    with pytest.raises(DataError, match=r"train-00001\.bin ends at byte 10") as caught:
        train.read(0, 80)
    assert caught.value.hint
    assert len(train.read(0, 42)) == 42


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of open files")
def test_files_are_closed_with_the_split_and_may_be_many(prepared: Path) -> None:
    resource = pytest.importorskip("resource")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 10, hard))
        train = TokenShards(prepared, "train")
        opened = len(os.listdir("/proc/self/fd")) - before
        assert opened >= len(train.manifest.splits["train"].shards) > 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del train
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_intact_dataset_opens(prepared: Path) -> None:
    dataset = open_dataset(prepared, ByteTokenizer(), "full")
    assert dataset.tokenizer.kind == "bytes"
    assert dataset.val.tokens == dataset.manifest.splits["val"].tokens
    assert dataset.train.vocab == 257
    assert verify_dataset(prepared) == dataset.manifest


def test_flipped_bits_of_the_manifest_are_noticed(copy: Path) -> None:
    path = copy / "manifest.json"
    intact = path.read_bytes()
    for position in range(0, len(intact), 5):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"manifest\.json"):
            read_manifest(copy)
    path.write_bytes(intact)
    read_manifest(copy)


@pytest.mark.parametrize(
    "change",
    [lambda raw: raw[:-1], lambda raw: raw + b"\n", lambda raw: b"", lambda raw: raw[:200], lambda raw: b"\x00"],
)
def test_a_manifest_of_another_length_is_refused(copy: Path, change: Any) -> None:
    path = copy / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    assert "damaged" in refusal(copy).message


def test_a_full_check_notices_any_flipped_bit(copy: Path) -> None:
    generator = np.random.default_rng(0)
    for path in sorted(copy.glob("*.bin")):
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[int(generator.integers(len(intact)))] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        error = refusal(copy, verify="full")
        assert path.name in error.message
        if "SHA-256" in error.message:
            assert hashlib.sha256(intact).hexdigest() in error.message
            assert hashlib.sha256(damaged).hexdigest() in error.message
        path.write_bytes(intact)
    verify_dataset(copy)


def test_a_changed_tokenizer_is_always_noticed(copy: Path) -> None:
    path = copy / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"bytes", b"bytez"))
    assert "tokenizer.json is damaged" in refusal(copy).message


@pytest.mark.parametrize("name", ["train-00002.bin", "val-00000.bin", "val.offsets.bin", "tokenizer.json"])
def test_missing_and_resized_files_are_noticed_without_a_full_check(copy: Path, name: str) -> None:
    path = copy / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\x00\x00")
    message = refusal(copy).message
    assert all(part in message for part in (name, f"{size + 2} bytes", f"have {size}")), message
    path.unlink()
    assert f"{name} is missing" in refusal(copy).message


def test_folders_without_a_dataset_are_refused(tmp_path: Path, copy: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nowhere").message
    (tmp_path / "empty").mkdir()
    assert "there is no dataset in" in refusal(tmp_path / "empty").message
    (copy / "manifest.json").unlink()
    assert "there is no dataset in" in refusal(copy).message
    with pytest.raises(DataError):
        TokenShards(tmp_path / "nowhere", "train")


def test_samples_for_fine_tuning_are_no_damaged_shards(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "flatout-samples", "version": 1}', encoding="utf-8")
    refused = refusal(tmp_path)
    assert "holds samples for fine-tuning" in refused.message
    assert "flatout eval RUN" in refused.hint


def test_another_tokenizer_is_refused(prepared: Path) -> None:
    refused = refusal(prepared, wanted=CharTokenizer("ab"))
    assert f"bytes ({ByteTokenizer().fingerprint[:12]}, 257 ids)" in refused.message
    assert f"the model has char ({CharTokenizer('ab').fingerprint[:12]}, 3 ids)" in refused.message
    assert "tokenizer.json" in refused.hint


def test_a_newer_format_is_refused_as_such(copy: Path) -> None:
    rewrite(copy, version=VERSION + 1)
    error = refusal(copy)
    assert f"version {VERSION + 1}" in error.message
    assert f"up to {VERSION}" in error.message
    assert "update" in error.hint


def test_a_missing_split_is_refused(copy: Path) -> None:
    content = json.loads((copy / "manifest.json").read_bytes())
    rewrite(copy, splits={"train": content["splits"]["train"]})
    assert "no split 'val'" in refusal(copy).message


@pytest.mark.parametrize("name", ["../data/train-00000.bin", "/etc/passwd", "train-0.bin", "", "train-00000.bin\n"])
def test_names_in_a_manifest_cannot_leave_the_folder(copy: Path, name: str) -> None:
    content = json.loads((copy / "manifest.json").read_bytes())
    content["splits"]["train"]["shards"][0]["name"] = name
    rewrite(copy, splits=content["splits"])
    assert "not the name of a file" in refusal(copy).message


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab": 70_000},
        {"vocab": 0},
        {"vocab": True},
        {"dtype": "float32"},
        {"splits": []},
        {"tokenizer": None},
        {"settings": []},
        {"format": "other"},
        {"version": "1"},
        {"extra": 1},
    ],
)
def test_contradictions_in_a_manifest_are_refused(copy: Path, changes: dict[str, Any]) -> None:
    rewrite(copy, **changes)
    assert "damaged" in refusal(copy).message


def test_a_vocabulary_that_is_not_the_tokenizers_is_refused(copy: Path) -> None:
    rewrite(copy, vocab=300)
    message = refusal(copy).message
    assert "257" in message
    assert "300" in message


def test_ids_beyond_the_vocabulary_and_broken_offsets_are_found_in_full(copy: Path) -> None:
    def store(name: str, values: np.ndarray) -> None:
        (copy / name).write_bytes(values.tobytes())
        content = json.loads((copy / "manifest.json").read_bytes())
        for split in content["splits"].values():
            for file in (*split["shards"], split["offsets"]):
                if file["name"] == name:
                    file["sha256"] = hashlib.sha256(values.tobytes()).hexdigest()
        rewrite(copy, splits=content["splits"])

    ids = np.fromfile(copy / "train-00001.bin", dtype="<u2")
    for wrong in (257, 300):
        store("train-00001.bin", np.where(np.arange(len(ids)) == 5, wrong, ids).astype("<u2"))
        open_dataset(copy)
        message = refusal(copy, verify="full").message
        assert f"train-00001.bin holds token id {wrong}, and the vocabulary has 257" in message
    store("train-00001.bin", ids)
    store("val.offsets.bin", np.array([3], dtype="<u8"))
    assert "val.offsets.bin" in refusal(copy, verify="full").message
