"""Checkpoints are whole or absent, and every damaged bit is found."""

import errno
import hashlib
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatout import folders
from flatout.checkpoints import checkpoint_files as module
from flatout.checkpoints.checkpoint import (
    Checkpoint,
    Verdict,
    keep_newest,
    list_checkpoints,
    newest_good,
    read_checkpoint,
    read_verdict,
    remove_checkpoint,
    sweep_leftovers,
    verify_checkpoint,
    write_checkpoint,
    write_verdict,
)
from flatout.checkpoints.run_folder import set_unusable_aside
from flatout.errors import CheckpointError, ResourceError
from flatout.files import canonical_json


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        model={"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)},
        optimizer={"a.exp_avg": torch.randn(3, 4, generator=generator), "a.step": torch.tensor(float(step))},
        run={"random.cpu": torch.randint(256, (16,), dtype=torch.uint8, generator=generator)},
        state={"step": step, "best_loss": 1 / 3, "best_step": None},
        config={"model": {"layers": 2}},
        tokenizer={"kind": "char", "characters": "ab\n\u00e9"},
    )


def test_what_is_written_is_what_is_read(tmp_path: Path):
    path, size = write_checkpoint(tmp_path, make(7))
    found = read_checkpoint(path)
    expected = make(7)
    for name in ("model", "optimizer", "run"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert (found.state, found.config, found.tokenizer) == (expected.state, expected.config, expected.tokenizer)
    assert size == sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")


def flip_bit(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(raw)


def test_bits_of_the_manifest_count(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path, make(1))
    manifest = path / "manifest.json"
    for bit in range(0, manifest.stat().st_size * 8, 11):
        flip_bit(manifest, bit)
        with pytest.raises(CheckpointError, match=r"manifest\.json|model|optimizer|run|state|config|tokenizer"):
            verify_checkpoint(path)
        flip_bit(manifest, bit)
    verify_checkpoint(path)


def test_flips_truncations_and_losses_are_found_and_the_file_is_named(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path, make(1))
    choose = random.Random(0)
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for _ in range(10):
            flip_bit(file, choose.randrange(len(original) * 8))
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                verify_checkpoint(path)
            file.write_bytes(original)
        for size in {0, 1, len(original) // 2, len(original) - 1}:
            file.write_bytes(original[:size])
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                verify_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
            verify_checkpoint(path)
        file.write_bytes(original)
    verify_checkpoint(path)


def test_newest_good_falls_back_past_damaged_ones_which_are_then_set_aside(tmp_path: Path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, make(step))
    for step in (20, 30):
        flip_bit(tmp_path / f"step-{step:08d}" / "model.safetensors", 1000)
    good, damaged = newest_good(tmp_path)
    assert good == tmp_path / "step-00000010"
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 20, 30], "looking changes nothing"
    notices = [set_unusable_aside(one) for one in damaged]
    assert len(notices) == 2
    assert all("model.safetensors" in notice for notice in notices)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]
    assert (tmp_path / "step-00000030.damaged").is_dir(), "nothing is deleted"


def test_no_good_checkpoint_left_is_an_error_not_a_fresh_start(tmp_path: Path):
    assert newest_good(tmp_path) == (None, [])
    write_checkpoint(tmp_path, make(10))
    (tmp_path / "step-00000010" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        newest_good(tmp_path)


def test_old_ones_go_and_the_best_stays(tmp_path: Path):
    for step in range(10, 70, 10):
        write_checkpoint(tmp_path, make(step))
    keep_newest(tmp_path, 2, best_step=20, cooldown_step=30)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 30, 50, 60]


def test_saving_a_step_again_sets_the_other_one_aside(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path, make(5))
    (path / "notes.txt").write_text("mine")
    write_checkpoint(tmp_path, make(5))
    verify_checkpoint(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000005.superseded"]
    assert (tmp_path / "step-00000005.superseded" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    good, _ = write_checkpoint(tmp_path, make(1))
    calls = 0

    def failing(path: Path) -> dict:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(number, os.strerror(number))
        return real(path)

    real = module.sync_and_hash
    monkeypatch.setattr(module, "sync_and_hash", failing)
    with pytest.raises(ResourceError) as caught:
        write_checkpoint(tmp_path, make(2))
    assert caught.value.exit_code == 5
    assert os.strerror(number) in caught.value.message
    assert "--resume auto" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"], "no temporary files are left"
    verify_checkpoint(good)


def killed(monkeypatch: pytest.MonkeyPatch, place: object, name: str, work: Callable[[], object]) -> None:
    """Does `work` up to a kill inside of the function `name`; nothing is cleaned up, as nothing is after a kill."""

    def dies(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_remove_marked", lambda folder: None)
        patch.setattr(place, name, dies)
        with pytest.raises(KeyboardInterrupt):
            work()


def test_leftovers_of_killed_processes_are_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path, make(1))
    killed(monkeypatch, module, "sync_and_hash", lambda: write_checkpoint(tmp_path, make(2)))
    (tmp_path / "step-00000003.tmp-12345678").mkdir()
    (tmp_path / "step-00000003.old-20240101").mkdir()
    (tmp_path / "step-00000003.old-20240101" / "thesis.txt").write_text("mine")
    (tmp_path / "notes.old-2024").mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    assert len(list(tmp_path.iterdir())) == 5
    sweep_leftovers(tmp_path)
    mine = ["notes.old-2024", "step-00000001", "step-00000003.old-20240101", "step-00000003.tmp-12345678"]
    assert sorted(p.name for p in tmp_path.iterdir()) == mine


def test_nothing_is_swept_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "real").mkdir()
    killed(monkeypatch, module, "sync_and_hash", lambda: write_checkpoint(tmp_path / "real", make(2)))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sweep_leftovers(tmp_path / "link")
    assert len(list((tmp_path / "real").iterdir())) == 1


def test_removal_is_never_seen_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, _ = write_checkpoint(tmp_path, make(1))
    killed(monkeypatch, folders, "_remove_marked", lambda: remove_checkpoint(path))
    assert list_checkpoints(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    sweep_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["a file", "a folder", "a link", "a link to it"])
def test_a_checkpoint_with_somebodys_files_is_not_removed(tmp_path: Path, what: str):
    path, _ = write_checkpoint(tmp_path, make(1))
    if what == "a file":
        (path / "notes.txt").write_text("mine")
    elif what == "a folder":
        (path / "notes").mkdir()
    elif what == "a link":
        (path / "notes").symlink_to(tmp_path)
    else:
        path = path.rename(tmp_path / "moved")
        (tmp_path / "step-00000001").symlink_to(path)
    for step in (2, 3):
        write_verdict(write_checkpoint(tmp_path, make(step))[0], Verdict(loss=1.0, progress={}))
    assert keep_newest(tmp_path, 1, best_step=None) == [tmp_path / "step-00000001"]
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 3]
    verify_checkpoint(path)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_the_newest_with_a_finite_loss_is_never_removed(tmp_path: Path, loss: float):
    for step, found in ((1, 2.0), (2, 1.5), (3, loss), (4, loss)):
        write_verdict(write_checkpoint(tmp_path, make(step))[0], Verdict(loss=found, progress={}))
        keep_newest(tmp_path, 1, best_step=None)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4]
    good, unusable = newest_good(tmp_path)
    assert good == tmp_path / "step-00000002"
    assert [(one.step, one.state) for one in unusable] == [(4, "diverged")]


def test_the_newest_with_a_finite_loss_stays_beside_the_best(tmp_path: Path):
    for step, found in ((1, 1.5), (2, 2.0), (3, math.nan), (4, math.nan)):
        write_verdict(write_checkpoint(tmp_path, make(step))[0], Verdict(loss=found, progress={}))
    keep_newest(tmp_path, 1, best_step=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2, 4]


def test_a_verdict_counts_for_its_own_checkpoint_only(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path, make(1))
    assert read_verdict(path) is None
    write_verdict(path, Verdict(loss=1.5, progress={"best_step": 1}))
    assert read_verdict(path) == Verdict(loss=1.5, progress={"best_step": 1})
    other, _ = write_checkpoint(tmp_path, make(2))
    raw = (path / "verdict.json").read_bytes()
    (other / "verdict.json").write_bytes(raw)
    assert read_verdict(other) is None
    for bit in range(0, len(raw) * 8, 7):
        flip_bit(path / "verdict.json", bit)
        assert read_verdict(path) is None
        flip_bit(path / "verdict.json", bit)
    verify_checkpoint(path)


def sealed(path: Path, change: Callable[[dict], dict]) -> None:
    """A manifest that somebody changed, with a hash that fits."""
    manifest = change({key: value for key, value in json.loads(path.read_bytes()).items() if key != "sha256"})
    path.write_bytes(module.sealed(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {key: value for key, value in m.items() if key != "format"},
        lambda m: {key: value for key, value in m.items() if key != "files"},
        lambda m: {**m, "files": list(m["files"])},
        lambda m: {**m, "files": {}},
        lambda m: {**m, "files": {**m["files"], "../../other.json": m["files"]["state.json"]}},
        lambda m: {**m, "files": {**m["files"], "state.json": "abc"}},
        lambda m: {**m, "files": {**m["files"], "state.json": {"bytes": "1", "sha256": 1}}},
        lambda m: {**m, "step": "1"},
    ],
)
def test_a_manifest_of_another_shape_is_refused_by_name(tmp_path: Path, change: Callable[[dict], dict]):
    path, _ = write_checkpoint(tmp_path, make(1))
    sealed(path / "manifest.json", change)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_checkpoint(path)
    assert not remove_checkpoint(path)


def reseal(path: Path, name: str, content: bytes | dict) -> None:
    """Another content for one of a checkpoint's JSON files, with hashes that fit."""
    raw = content if isinstance(content, bytes) else canonical_json(content)
    (path / f"{name}.json").write_bytes(raw)
    entry = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    sealed(path / "manifest.json", lambda m: {**m, "files": {**m["files"], f"{name}.json": entry}})


@pytest.mark.parametrize("content", [b"[]", b"{}", b"[" * 100_000, b'{"step": "1"}', b'{"step": true}'])
def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path, content: bytes):
    path, _ = write_checkpoint(tmp_path, make(1))
    reseal(path, "state", content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_checkpoint(path)


def test_a_newer_format_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PLAIN", 3)
    path, _ = write_checkpoint(tmp_path, make(1))
    monkeypatch.setattr(module, "PLAIN", 1)
    with pytest.raises(CheckpointError, match="format 3"):
        verify_checkpoint(path)


def test_files_are_plain_json_and_safetensors(tmp_path: Path):
    path, _ = write_checkpoint(tmp_path, make(1))
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors",
        "run.safetensors", "state.json", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((path / "manifest.json").read_text())["step"] == 1
