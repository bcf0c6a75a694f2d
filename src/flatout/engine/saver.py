"""Saves checkpoints beside training: copied at once, written by a process of its own, waited for when it matters.

A save begins with `Saver.begin`, which copies the run's state into shared memory (`SharedBlock`) and returns. A thread
waits for the copy, hands it to the writer (engine/writer.py) and waits for the answer. If the writer fails, that thread
saves the same bytes itself, and a notice says so; if that fails too, the save ends with the error of the disk.
Where a checkpoint is `SMALL`, or there is no memory for a copy, `begin` writes it and returns when it is on the disk.
Both ways write by `save_files`.

Contract: one save at a time; the next `begin` comes after the one before was waited for. The state that is saved is
that of `begin`: the next update of the weights waits for the copy on the device (`TrainStep.before_update`), everything
before it does not. The block is complete after the copy's event, and stays so until the next `take`.
Trap: memory that is only reserved can fail when it is used, and a process dies of that. So all of it is touched when it
is mapped.
"""

import contextlib
import dataclasses
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_path, write_checkpoint
from flatout.engine.recovery import wait_for_room
from flatout.engine.step import TrainStep
from flatout.engine.writer import SavePlan, Span, Writer, WriterError, save_plan
from flatout.host import host_memory
from flatout.model.weights import header_of, in_file_order
from flatout.resolve.memory import SMALL
from flatout.rows import human_bytes

_ROOM = 0.5  # of the free memory a copy may take
_ALIGNED = 256  # bytes: where the first tensor of a file begins
_SPARE = 2**20  # bytes for texts that grow
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
Value = TypeVar("Value")


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
        self.last_save: Future[Saved] | None = None
        self.beside = False  # whether the last save goes on beside training

    def begin(self, checkpoint: Checkpoint) -> Future[Saved]:
        """Takes the state of the run. It may change again when this returns, by updates through `TrainStep` only."""
        assert self.last_save is None or self.last_save.done(), "a save waits for the one before"
        files = checkpoint.tensor_files(), checkpoint.text_files()
        block = self._block_of(needed_bytes(*files)) if self.has_room else None
        self.beside = block is not None
        if block is None:
            path, size = write_checkpoint(self.folder, checkpoint)
            self.last_save = finished(Saved(path=path, bytes=size))
            return self.last_save
        tensors, texts, copied = block.take(*files)
        self.step.hold_back = functools.partial(hold_back, copied, self.device)
        target = checkpoint_path(self.folder, checkpoint.step)
        plan = SavePlan(str(target.absolute()), checkpoint.step, tensors, texts)
        self.last_save = self.thread.submit(self._save, checkpoint, block, plan, copied)
        return self.last_save

    def then(self, work: Callable[[Saved], None], step: int) -> Future[Saved]:
        """Has `work` done by the thread once the last save is on the disk; the save ends with it.

        Where the disk is full, the work waits for room and is done again.
        """
        assert self.last_save is not None, "nothing was begun"
        last = self.last_save

        def follow() -> Saved:
            saved = last.result()
            wait_for_room(lambda: work(saved), step, self.patience, self.notice)
            return saved

        self.last_save = self.thread.submit(follow)
        return self.last_save

    def close(self) -> None:
        """Waits for the last save, ends the writer and gives its memory back."""
        try:
            if self.last_save is not None:
                with contextlib.suppress(Exception):  # of the disk or the device: whoever closes has an error to raise
                    self.last_save.result()
        finally:
            self.step.hold_back = None
            if self.writer is not None:
                self.writer.close()  # first: a thread may be waiting for its answer
            self.thread.shutdown(cancel_futures=True)
            self._let_go()

    def _save(
        self, checkpoint: Checkpoint, block: "SharedBlock", plan: SavePlan, copied: torch.cuda.Event | None
    ) -> Saved:
        """Runs in the thread. It holds the checkpoint, whose tensors must stay until they are copied."""
        began, notice = time.perf_counter(), None
        target = checkpoint_path(self.folder, checkpoint.step)
        if copied is not None:
            copied.synchronize()
        try:
            if self.writer is None:
                self.writer = Writer(block.handle)
            size = self.writer.save(plan)
        except (OSError, WriterError) as error:
            if isinstance(error, WriterError):
                self.writer = None  # the next save starts another
            why = error.strerror if isinstance(error, OSError) else str(error)
            notice = f"the process that writes checkpoints failed at step {plan.step}: {why}; this process wrote it"
            write = functools.partial(save_plan, block.memory, plan)
            size = wait_for_room(write, plan.step, self.patience, self.notice, what=f"checkpoint {target}")
        seconds = time.perf_counter() - began
        return Saved(path=target, bytes=size, background_seconds=seconds, notice=notice)

    def _block_of(self, need: int) -> "SharedBlock | None":
        """Memory for a copy of this many bytes; None where the checkpoint is to be written at once."""
        if self.block is not None and need <= len(self.block.map):
            return self.block
        if need < SMALL:
            return None
        self._let_go()
        why = _why_not(need)
        if why is None:
            try:
                pages = -(-(need + _SPARE) // mmap.PAGESIZE)
                self.block = SharedBlock(pages * mmap.PAGESIZE, self.device)
            except (OSError, MemoryError, ValueError) as error:
                why = f"there is no memory for a copy: {error}"
        if why is not None:
            self.has_room = False
            self.notice(f"checkpoints are written while training waits: {why}")
        return self.block

    def _let_go(self) -> None:
        """Ends the writer and gives its memory back. Call it while nothing is being written."""
        if self.writer is not None:
            self.writer.close()
        if self.block is not None:
            self.block.close()
        self.writer = self.block = None


def _why_not(need: int) -> str | None:
    """Why there is no room for a copy of this many bytes."""
    if os.name != "posix":
        return "this system does not share memory between processes in the way that a copy needs"
    available, total = host_memory()
    room = available if available is not None else total
    if room is None or need > _ROOM * room:
        return f"a copy needs {human_bytes(need)} of host memory, and {human_bytes(room or 0)} are free"
    return None


def finished(value: Value) -> Future[Value]:
    """A future that has its value already."""
    future: Future[Value] = Future()
    future.set_result(value)
    return future


# --- the memory -------------------------------------------------------------------------------------------------------


@final
class SharedBlock:
    """Host memory that holds a checkpoint's files, byte for byte as on the disk, while another process writes them.

    For CUDA it is registered as pinned memory, so that copies from the device neither wait nor are waited for: they go
    over a stream of their own, which first waits for the work that was queued before.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """OSError where the system does not give that much memory."""
        self.handle = _anonymous(size)
        try:
            self.map = mmap.mmap(self.handle, size)
        except BaseException:
            os.close(self.handle)
            raise
        self.bytes_N = torch.frombuffer(self.map, dtype=torch.uint8)
        self.bytes_N.zero_()
        self.device = device
        self.pinned = device.type == "cuda" and _register(self.bytes_N, device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def memory(self) -> memoryview:
        return memoryview(self.map)

    @torch.no_grad()
    def take(
        self, tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, bytes]
    ) -> tuple[dict[str, Span], dict[str, Span], torch.cuda.Event | None]:
        """Copies files into the block; returns where those of tensors and those of text lie, and when they are there.

        Without an event they are there already. With one, the tensors must not change before `hold_back`.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        spans, end = {}, 0
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for name, unordered in tensors.items():
                ordered = in_file_order(unordered)
                header = header_of(ordered)
                start = -(-(end + len(header)) // _ALIGNED) * _ALIGNED - len(header)  # tensors begin aligned
                place = self._put(start, header)
                for tensor in ordered.values():
                    end = place + tensor.nbytes
                    target = self.bytes_N[place:end].view(tensor.dtype).view(tensor.shape)
                    target.copy_(tensor, non_blocking=True)
                    place = end
                spans[name], end = (start, place), place
        event = None if self.stream is None else torch.cuda.Event(blocking=True)
        if event is not None:
            event.record(self.stream)
        written = {}
        for name, content in texts.items():
            written[name], end = (end, end + len(content)), self._put(end, content)
        return spans, written, event

    def _put(self, place: int, content: bytes) -> int:
        self.map[place : place + len(content)] = content
        return place + len(content)

    def close(self) -> None:
        """Gives the memory back. Whoever still reads from it in this process must be through."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.pinned:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self.bytes_N.data_ptr())
        del self.bytes_N
        with contextlib.suppress(BufferError):  # a view of it is still held: then it goes with that
            self.map.close()
        os.close(self.handle)


def hold_back(copied: torch.cuda.Event | None, device: torch.device) -> None:
    """Makes the current stream wait for a copy before it does anything else. The host goes on."""
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)


def needed_bytes(tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, bytes]) -> int:
    """The size of the block that holds these files."""
    headers = sum(len(header_of(in_file_order(file))) + _ALIGNED for file in tensors.values())
    values = sum(tensor.nbytes for file in tensors.values() for tensor in file.values())
    return headers + values + sum(len(text) for text in texts.values())


def _anonymous(size: int) -> int:
    """A handle of memory that has no name, or of a file that has none any more where the system has no such memory."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("flatout-checkpoint")
    else:
        handle, name = tempfile.mkstemp(prefix="flatout-checkpoint-")
        os.unlink(name)
    try:
        os.ftruncate(handle, size)
        if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _register(bytes_N: Tensor, device: torch.device) -> bool:
    """Whether the memory is pinned now. If not, copies from the device take longer and are as right."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = cudart.cudaHostRegister(bytes_N.data_ptr(), bytes_N.numel(), _PORTABLE)
        if code == cudart.cudaError.success:
            return True
        with contextlib.suppress(RuntimeError):  # CUDA reports the failed call to the next one: let it be this one
            torch.ones(1, device=device)
    return False
