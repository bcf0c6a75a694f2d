"""Saves checkpoints beside training: copied at once, written by a process of its own, waited for when it matters.

A save begins with `begin`, which copies the run's state into shared memory (`SharedBlock`) and returns. A thread waits
for the copy, hands it to the writer (`Writer`) and waits for the answer. If the writer fails, that thread saves the
same bytes itself, and a notice says so; if that fails too, `wait` raises the error of the disk.
Where a checkpoint is `SMALL`, or there is no memory for a copy, `begin` writes it and returns when it is on the disk.
Both ways write by `save_files`.

Contract: one save at a time, `wait` before the next `begin`. The state that is saved is that of `begin`: the next
update of the weights waits for the copy on the device (`TrainStep.before_update`), everything before it does not.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import final

import torch

from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_path, write_checkpoint
from flatout.engine.full_disk import wait_for_room
from flatout.engine.shared_block import Copied, SharedBlock, block_bytes, needed_bytes
from flatout.engine.step import TrainStep
from flatout.engine.writer import Plan, Writer, WriterError, save_plan
from flatout.files import readable_sizes
from flatout.host import host_memory
from flatout.resolve.memory import SMALL

_ROOM = 0.5  # of the free memory a copy may take
_OFF = "checkpoints are written while training waits: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint on the disk. `background_seconds` is how long it was written beside training."""

    path: Path
    bytes: int
    background_seconds: float | None = None
    notice: str | None = None


@final
class Saver:
    def __init__(
        self,
        folder: Path,
        device: torch.device,
        step: TrainStep,
        notice: Callable[[str], None],
        patience: float = 0.0,
    ) -> None:
        """`folder` is that of the checkpoints, `patience` how many seconds a save may wait for space on a full disk."""
        self.patience = patience
        self.folder, self.device, self.step, self.notice = folder, device, step, notice
        self.has_room = True  # for a copy, as far as is known
        self.block: SharedBlock | None = None
        self.writer: Writer | None = None
        self.thread = ThreadPoolExecutor(1, "flatout-saver")
        self.last: Future[Saved] | None = None
        self.beside = False  # whether the last save goes on beside training

    def begin(self, checkpoint: Checkpoint) -> None:
        """Takes the state of the run. It may change again when this returns, by updates through `TrainStep` only."""
        assert self.last is None, "a save waits for the one before"
        files = checkpoint.tensor_files(), checkpoint.text_files()
        block = self._block_of(needed_bytes(*files)) if self.has_room else None
        self.beside = block is not None
        if block is None:
            path, size = write_checkpoint(self.folder, checkpoint)
            self.last = _finished(Saved(path=path, bytes=size))
            return
        tensors, texts, copied = block.take(*files)
        self.step.copying = copied
        target = checkpoint_path(self.folder, checkpoint.step)
        plan = Plan(str(target.absolute()), checkpoint.step, tensors, texts)
        self.last = self.thread.submit(self._save, block, plan, copied, target)

    def then(self, work: Callable[[Saved], None], step: int) -> None:
        """Has work done beside training with a save that goes on beside it, once that is on the disk.

        Where the disk is full, the work waits for room and is done again.
        """
        assert self.last is not None, "nothing was begun"
        assert self.beside, "the save is done"
        last = self.last

        def follow() -> Saved:
            saved = last.result()
            wait_for_room(lambda: work(saved), step, self.patience, self.notice)
            return saved

        self.last = self.thread.submit(follow)

    @property
    def done(self) -> bool:
        """Whether nothing is being written."""
        return self.last is None or self.last.done()

    def done_within(self, seconds: float) -> bool:
        """Whether nothing is being written, at the latest after a while."""
        return self.last is None or bool(wait([self.last], seconds).done)

    def wait(self) -> Saved:
        """The last save, once it is on the disk and what follows is done; the error if one of them failed."""
        assert self.last is not None, "nothing was begun"
        last, self.last = self.last, None
        return last.result()

    def close(self) -> None:
        """Waits for the last save and ends what was started for saving."""
        try:
            if self.last is not None:
                with contextlib.suppress(Exception):  # of the disk or the device: whoever closes has an error to tell
                    self.wait()
        finally:
            self.step.copying = None
            if self.writer is not None:
                self.writer.close()  # first: a thread may be waiting for its answer
            self.thread.shutdown(cancel_futures=True)
            self._let_go()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _save(self, block: SharedBlock, plan: Plan, copied: Copied, target: Path) -> Saved:
        began, notice = time.perf_counter(), None
        copied.wait()
        try:
            if self.writer is None:
                self.writer = Writer(block.handle)
            size = self.writer.save(plan)
        except (OSError, WriterError) as error:
            if isinstance(error, WriterError):
                self.writer = None  # the next save starts another
            why = error.strerror if isinstance(error, OSError) else str(error)
            notice = f"the process that writes checkpoints failed at step {plan.step}: {why}; this process wrote it"
            size = self._save_here(block, plan, target)
        seconds = time.perf_counter() - began
        return Saved(path=target, bytes=size, background_seconds=seconds, notice=notice)

    def _save_here(self, block: SharedBlock, plan: Plan, target: Path) -> int:
        """Saves in this process, and waits for room on a full disk while training goes on."""
        how = {"what": f"checkpoint {target}"}
        return wait_for_room(lambda: save_plan(block.memory, plan), plan.step, self.patience, self.notice, **how)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _block_of(self, need: int) -> SharedBlock | None:
        """Memory for a copy of so many bytes; None where the checkpoint is to be written at once."""
        if self.block is not None and need <= len(self.block.map):
            return self.block
        if need < SMALL:
            return None
        self._let_go()
        why = self._why_not(need)
        if why is None:
            try:
                self.block = SharedBlock(block_bytes(need), self.device)
            except (OSError, MemoryError, ValueError) as error:
                why = f"there is no memory for a copy: {error}"
        if why is not None:
            self.has_room = False
            self.notice(_OFF + why)
        return self.block

    def _why_not(self, need: int) -> str | None:
        if os.name != "posix":
            return "this system does not share memory between processes in the way that a copy needs"
        available, total = host_memory()
        room = available if available is not None else total
        if room is None or need > _ROOM * room:
            size, free = readable_sizes(need, room or 0)
            return f"a copy needs {size} of host memory, and {free} are free"
        return None

    def _let_go(self) -> None:
        """Ends the writer and gives its memory back. Call it while nothing is being written."""
        if self.writer is not None:
            self.writer.close()
        if self.block is not None:
            self.block.close()
        self.writer = self.block = None


def _finished(saved: Saved) -> Future[Saved]:
    future: Future[Saved] = Future()
    future.set_result(saved)
    return future
