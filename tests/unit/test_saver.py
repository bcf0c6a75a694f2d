"""Saving beside training: the same bytes as at once, whatever happens to the process that writes them."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.checkpoints.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint, write_checkpoint
from flatout.engine import saver as module
from flatout.engine import writer as writing
from flatout.engine.saver import Saver, SharedBlock, hold_back
from flatout.engine.step import TrainStep
from flatout.engine.writer import Writer
from flatout.errors import ResourceError
from flatout.folders import process_lives
from tests.power_loss import read_tree
from tests.unit.test_checkpoint import make
from tests.unit.test_tensor_file import some_tensors

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process stays until it goes on")


class Beside:
    """A saver into a folder, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.notices: list[str] = []
        self.step: Any = SimpleNamespace(hold_back=None)
        self.saver = Saver(folder, CPU, self.step, self.notices.append)

    def save(self, checkpoint: Checkpoint) -> module.Saved:
        return self.saver.begin(checkpoint).result()

    @property
    def pid(self) -> int:
        assert self.saver.writer is not None
        assert self.saver.writer.pid is not None
        return self.saver.writer.pid


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
        assert saved.notice is None
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


def test_block_and_process_stay_from_save_to_save(beside: Beside):
    beside.save(make(1))
    block, pid = beside.saver.block, beside.pid
    beside.save(make(2))
    assert (beside.saver.block, beside.pid) == (block, pid)
    beside.save(with_large(make(3), torch.arange(2**19)))
    assert beside.saver.block is not block, "what does not fit gets a new one"
    assert torch.equal(read_checkpoint(beside.saver.folder / "step-00000003").model["large"], torch.arange(2**19))
    assert not process_lives(pid)


def test_only_the_next_update_waits_for_the_copy(beside: Beside):
    written = beside.saver.begin(make(1))
    assert beside.step.hold_back is not None
    TrainStep.before_update(beside.step)
    assert beside.step.hold_back is None
    written.result()


def stopped(beside: Beside) -> int:
    """Saves once, and stops the writer."""
    beside.save(make(1))
    os.kill(beside.pid, signal.SIGSTOP)
    return beside.pid


def check_saved_all_the_same(beside: Beside, tmp_path: Path, why: str) -> None:
    assert beside.saver.last_save is not None
    saved = beside.saver.last_save.result()
    assert why in (saved.notice or "")
    path, _ = write_checkpoint(tmp_path / "at-once", make(2))
    assert read_tree(saved.path) == read_tree(path)
    assert beside.save(make(3)).notice is None, "the next save has a writer again"
    assert len(list(beside.saver.folder.iterdir())) == 3


def test_a_writer_that_is_killed_costs_a_notice(tmp_path: Path, beside: Beside):
    pid = stopped(beside)
    assert not beside.saver.begin(make(2)).done()
    os.kill(pid, signal.SIGKILL)
    check_saved_all_the_same(beside, tmp_path, f"it ended with code -{int(signal.SIGKILL)}")


def test_a_writer_that_hangs_is_ended(tmp_path: Path, beside: Beside, monkeypatch):
    pid = stopped(beside)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "PATIENCE", 0.2)
        written = beside.saver.begin(make(2))
        while not written.done():
            time.sleep(0.01)
    check_saved_all_the_same(beside, tmp_path, "no sign of life for 0.2 s")
    assert not process_lives(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stopped process with its parent")
def test_a_stopped_writer_ends_with_a_trainer_that_is_killed():
    code = (
        "import os, signal, tempfile, time; from flatout.engine.writer import Writer; file = tempfile.TemporaryFile();"
        "file.truncate(4096); writer = Writer(file.fileno()); os.kill(writer.pid, signal.SIGSTOP);"
        "print(writer.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.communicate()
    until = time.monotonic() + 600
    while process_lives(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_slow_disk_is_no_hanging_writer(beside: Beside, monkeypatch):
    slow = "import time; from flatout.checkpoints import checkpoint_files as c; s = c.sync_and_hash; "
    slow += "c.sync_and_hash = lambda path: (time.sleep(0.15), s(path))[1]; "
    first, rest = writing._START.split("; ", 2)[:2], writing._START.split("; ", 2)[2]
    late = "from flatout.engine import writer; writer._BEAT = 0.05; "
    monkeypatch.setattr(writing, "_START", "; ".join(first) + "; " + slow + late + rest)
    heard, hear = list[Any](), Writer._heard
    monkeypatch.setattr(Writer, "_heard", lambda writer: heard.append(hear(writer)) or heard[-1])
    assert beside.save(make(1)).notice is None
    assert None in heard, "a sign of life while the disk is slow"


def test_a_full_disk_is_a_notice_and_then_an_error(tmp_path: Path, beside: Beside):
    """The system's limit on the size of a file stands for the end of the disk."""
    checkpoint = with_large(make(1), torch.zeros(2**16))
    beside.saver.block = SharedBlock(2**20, CPU)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        beside.saver.writer = Writer(beside.saver.block.handle)
        with pytest.raises(ResourceError, match=r"could not write checkpoint .*step-00000001: File too large") as told:
            beside.save(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in told.value.hint
    assert list((tmp_path).iterdir()) == [], "no work folder is left"
    saved = beside.save(checkpoint)  # the writer has its limit still, and this process has none
    assert "failed at step 1: File too large; this process wrote it" in (saved.notice or "")
    verify_checkpoint(saved.path)


def test_no_process_is_left_when_saving_ends(tmp_path: Path):
    one = Beside(tmp_path / "beside")
    one.save(make(1))
    pid = one.pid
    one.saver.begin(make(2))
    one.saver.close()
    verify_checkpoint(tmp_path / "beside" / "step-00000002")
    assert not process_lives(pid)


@pytest.mark.parametrize("stop", [False, pytest.param(True, marks=LINUX)])
def test_the_writer_ends_with_its_trainer(stop: bool):
    """Killed, the trainer cleans nothing up."""
    code = (
        "import os, sys, time\n"
        "from flatout.engine.writer import Writer\n"
        "memory = os.memfd_create('x'); os.ftruncate(memory, 4096)\n"
        "writer = Writer(memory); print(writer.pid, flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        time.sleep(0.1)
        assert process_lives(pid)
        if stop:
            os.kill(pid, signal.SIGSTOP)
    finally:
        trainer.kill()
        trainer.communicate()
    deadline = time.monotonic() + 600
    while process_lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process_lives(pid)


def test_the_writer_needs_no_torch():
    code = "import sys, flatout.engine.writer; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.gpu
def test_a_gpu_is_copied_from_without_waiting_and_only_what_follows_the_copy_waits():
    device = torch.device("cuda")
    weights = torch.arange(2**24, dtype=torch.float32, device=device)
    moments, texts = weights.flip(0), {"state.json": b"{}"}
    block = SharedBlock(3 * weights.nbytes, device)
    try:
        assert block.pinned
        torch.cuda._sleep(10**8)  # the device is busy, and what it then does is part of the copy
        weights.mul_(2)
        tensors, _, copied = block.take({"model": {"w": weights}, "optimizer": {"m": moments}}, texts)
        assert copied is not None
        assert not copied.query(), "the host went on"
        hold_back(copied, device)
        weights.fill_(-1)
        moments.fill_(-1)
        copied.synchronize()
        expected = {"model": 2 * torch.arange(2**24).float(), "optimizer": torch.arange(2**24).float().flip(0)}
        for name, (_, end) in tensors.items():
            found = bytes(block.memory[end - weights.nbytes : end])
            assert found == expected[name].numpy().tobytes(), name
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


@pytest.mark.parametrize(("free", "at_once"), [(2**30, False), (2000, True)])
def test_a_copy_leaves_room(tmp_path: Path, monkeypatch, free, at_once):
    monkeypatch.setattr(module, "host_memory", lambda: (free, 2**40))
    one = Beside(tmp_path)
    assert saved_at_once(one, make(1)) == at_once
    assert [("of host memory, and 2.0 KiB are free" in told) for told in one.notices] == [True] * at_once


def test_where_there_is_no_memory_a_save_waits_and_says_so(tmp_path: Path, monkeypatch):
    def none(*_args):
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(module, "SharedBlock", none)
    one = Beside(tmp_path)
    assert saved_at_once(one, make(1))
    assert saved_at_once(one, make(2))
    assert len(one.notices) == 1
    assert "Cannot allocate memory" in one.notices[0]
