"""Saving beside training: the same bytes as at once."""

import dataclasses
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.checkpoints.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint, write_checkpoint
from flatout.engine import saver as module
from flatout.engine.saver import HostCopy, Saver, hold_back
from flatout.engine.step import TrainStep
from flatout.errors import ResourceError
from tests.power_loss import read_tree
from tests.unit.test_checkpoint import make
from tests.unit.test_tensor_file import some_tensors

CPU = torch.device("cpu")


class Beside:
    """A saver into a folder, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.notices: list[str] = []
        self.step: Any = SimpleNamespace(hold_back=None)
        self.saver = Saver(folder, CPU, self.step, self.notices.append)

    def save(self, checkpoint: Checkpoint) -> module.Saved:
        return self.saver.begin(checkpoint).result()


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 0)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    one = Beside(tmp_path / "beside")
    yield one
    one.saver.close()


def of_all_types(step: int) -> Checkpoint:
    made = make(step)
    return Checkpoint(**{**vars(made), "model": some_tensors("cpu"), "run": {}})


def test_the_folder_is_byte_for_byte_that_of_a_save_at_once(tmp_path: Path, beside: Beside):
    for checkpoint in (make(7), of_all_types(8), make(9)):
        path, size = write_checkpoint(tmp_path / "at-once", checkpoint)
        saved = beside.save(checkpoint)
        assert read_tree(saved.path) == read_tree(path)
        assert saved.bytes == size
        assert saved.background_seconds is not None
    assert read_tree(tmp_path / "beside") == read_tree(tmp_path / "at-once"), "and nothing is left beside them"


def test_what_changes_after_the_copy_does_not_reach_the_file(tmp_path: Path, beside: Beside):
    expected, checkpoint = make(1), make(1)
    written = beside.saver.begin(checkpoint)
    for tensors in checkpoint.tensor_files().values():
        for tensor in tensors.values():
            tensor.fill_(77)
    found = read_checkpoint(written.result().path)
    for name, tensors in expected.tensor_files().items():
        mine = found.tensor_files()[name]
        assert all(torch.equal(mine[key], tensor) for key, tensor in tensors.items())


def with_large(checkpoint: Checkpoint, tensor: torch.Tensor) -> Checkpoint:
    return dataclasses.replace(checkpoint, model={**checkpoint.model, "large": tensor})


def test_the_memory_stays_from_save_to_save(beside: Beside):
    beside.save(make(1))
    copy = beside.saver.copy
    beside.save(make(2))
    assert beside.saver.copy is copy
    beside.save(with_large(make(3), torch.arange(2**19)))
    assert beside.saver.copy is not copy, "what does not fit gets new memory"
    assert torch.equal(read_checkpoint(beside.saver.folder / "step-00000003").model["large"], torch.arange(2**19))


def test_only_the_next_update_waits_for_the_copy(beside: Beside):
    written = beside.saver.begin(make(1))
    assert beside.step.hold_back is not None
    TrainStep.before_update(beside.step)
    assert beside.step.hold_back is None
    written.result()


def test_a_full_disk_is_an_error_and_the_next_save_is_whole(tmp_path: Path, beside: Beside):
    """The system's limit on the size of a file stands for the end of the disk."""
    checkpoint = with_large(make(1), torch.zeros(2**16))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(ResourceError, match=r"could not write checkpoint .*step-00000001: File too large") as told:
            beside.save(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in told.value.hint
    assert list(tmp_path.iterdir()) == [], "no work folder is left"
    verify_checkpoint(beside.save(checkpoint).path)


def test_closing_waits_for_the_last_save(tmp_path: Path):
    one = Beside(tmp_path / "beside")
    one.save(make(1))
    one.saver.begin(make(2))
    one.saver.close()
    verify_checkpoint(tmp_path / "beside" / "step-00000002")


@pytest.mark.gpu
def test_a_gpu_is_copied_from_without_waiting_and_only_what_follows_the_copy_waits():
    device = torch.device("cuda")
    weights = torch.arange(2**24, dtype=torch.float32, device=device)
    moments = weights.flip(0)
    block = HostCopy(2 * weights.nbytes, device)
    checkpoint = dataclasses.replace(make(1), model={"w": weights}, optimizer={"m": moments}, run={})
    try:
        assert block.pinned
        torch.cuda._sleep(10**8)  # the device is busy, and what it then does is part of the copy
        weights.mul_(2)
        held, copied = block.take(checkpoint)
        assert copied is not None
        assert not copied.query(), "the host went on"
        hold_back(copied, device)
        weights.fill_(-1)
        moments.fill_(-1)
        copied.synchronize()
        assert torch.equal(held.model["w"], 2 * torch.arange(2**24).float())
        assert torch.equal(held.optimizer["m"], torch.arange(2**24).float().flip(0))
        assert bool((weights == -1).all())
    finally:
        block.close()


@pytest.mark.gpu
def test_the_files_of_a_gpu_are_those_of_a_save_at_once(tmp_path: Path):
    made = make(1)
    checkpoint = Checkpoint(**{**vars(made), "model": some_tensors("cuda")})
    one = Beside(tmp_path / "beside")
    one.saver.device = torch.device("cuda")
    try:
        saved = one.save(checkpoint)
        assert saved.background_seconds is not None
        path, _ = write_checkpoint(tmp_path / "at-once", checkpoint)
        assert read_tree(saved.path) == read_tree(path)
    finally:
        one.saver.close()


# --- whether to ------------------------------------------------------------------------------------------------------


def saved_at_once(one: Beside, checkpoint: Checkpoint) -> bool:
    try:
        return one.save(checkpoint).background_seconds is None
    finally:
        one.saver.close()


def test_small_checkpoints_are_written_at_once_and_nothing_is_said(tmp_path: Path, monkeypatch):
    monkeypatch.undo()
    one = Beside(tmp_path)
    assert saved_at_once(one, make(1))
    assert one.notices == []


@pytest.mark.parametrize(("free", "at_once"), [(2**30, False), (200, True)])
def test_a_copy_leaves_room(tmp_path: Path, monkeypatch, free, at_once):
    monkeypatch.setattr(module, "host_memory", lambda: (free, 2**40))
    one = Beside(tmp_path)
    assert saved_at_once(one, make(1)) == at_once
    assert [("of host memory, and 200 B are free" in told) for told in one.notices] == [True] * at_once


def test_where_there_is_no_memory_a_save_waits_and_says_so(tmp_path: Path, monkeypatch):
    def none(*_args):
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(module, "HostCopy", none)
    one = Beside(tmp_path)
    assert saved_at_once(one, make(1))
    assert saved_at_once(one, make(2))
    assert len(one.notices) == 1
    assert "Cannot allocate memory" in one.notices[0]
