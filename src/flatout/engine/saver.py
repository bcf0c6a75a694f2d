"""Saves checkpoints beside training: copied at once, written by a thread, waited for when it matters.

A save begins with `Saver.begin`, which copies the run's state into host memory (`HostCopy`) and returns. A thread waits
for the copy and writes it. Where a checkpoint is `SMALL`, or there is no memory for a copy, `begin` writes it and
returns when it is on the disk. Both ways write by `write_checkpoint`.

Hashing and writing release Python's lock, so the thread does not slow steps down: measured in lab/log.md.

Contract: one save at a time; the next `begin` comes after the one before was waited for. The state that is saved is
that of `begin`: the next update of the weights waits for the copy on the device (`TrainStep.before_update`), everything
before it does not. The copy is complete after its event, and stays so until the next `take`.
Trap: memory that is only reserved can fail when it is used, and a process dies of that. So all of it is touched when it
is mapped.
"""

import contextlib
import dataclasses
import functools
import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint import Checkpoint, write_checkpoint
from flatout.engine.step import TrainStep
from flatout.host import host_memory
from flatout.resolve.memory import SMALL
from flatout.rows import human_bytes

_ROOM = 0.5  # of the free memory a copy may take
_ALIGNED = 64  # bytes: where a tensor begins
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint on the disk. `background_seconds` is how long it was written beside training."""

    path: Path
    bytes: int
    background_seconds: float | None = None


@final
class Saver:
    def __init__(
        self,
        folder: Path,
        device: torch.device,
        step: TrainStep,
        notice: Callable[[str], None],
    ) -> None:
        """`folder` is that of the checkpoints."""
        self.folder, self.device, self.step, self.notice = folder, device, step, notice
        self.has_room = True  # for a copy, as far as is known
        self.copy: HostCopy | None = None
        self.thread = ThreadPoolExecutor(1, "flatout-saver")
        self.last_save: Future[Saved] | None = None
        self.beside = False  # whether the last save goes on beside training

    def begin(self, checkpoint: Checkpoint) -> Future[Saved]:
        """Takes the state of the run. It may change again when this returns, by updates through `TrainStep` only."""
        assert self.last_save is None or self.last_save.done(), "a save waits for the one before"
        copy = self._room_for(checkpoint) if self.has_room else None
        self.beside = copy is not None
        if copy is None:
            path, size = write_checkpoint(self.folder, checkpoint)
            self.last_save = finished(Saved(path=path, bytes=size))
            return self.last_save
        held, copied = copy.take(checkpoint)
        self.step.hold_back = functools.partial(hold_back, copied, self.device)
        self.last_save = self.thread.submit(self._save, checkpoint, held, copied)
        return self.last_save

    def then(self, work: Callable[[Saved], None]) -> Future[Saved]:
        """Has `work` done by the thread once the last save is on the disk; the save ends with it."""
        assert self.last_save is not None, "nothing was begun"
        last = self.last_save

        def follow() -> Saved:
            saved = last.result()
            work(saved)
            return saved

        self.last_save = self.thread.submit(follow)
        return self.last_save

    def close(self) -> None:
        """Waits for the last save and gives its memory back."""
        if self.last_save is not None:
            with contextlib.suppress(Exception):  # of the disk or the device: whoever closes has an error to raise
                self.last_save.result()
        self.step.hold_back = None
        self.thread.shutdown(cancel_futures=True)
        self._let_go()

    def _save(self, _source: Checkpoint, held: Checkpoint, copied: torch.cuda.Event | None) -> Saved:
        """Runs in the thread. `_source` has the tensors that are copied, which must stay until then."""
        began = time.perf_counter()
        if copied is not None:
            copied.synchronize()
        path, size = write_checkpoint(self.folder, held)
        return Saved(path=path, bytes=size, background_seconds=time.perf_counter() - began)

    def _room_for(self, checkpoint: Checkpoint) -> "HostCopy | None":
        """Memory for a copy; None where the checkpoint is to be written at once."""
        need = needed_bytes(checkpoint)
        if self.copy is not None and need <= len(self.copy.map):
            return self.copy
        if need < SMALL:
            return None
        self._let_go()
        why = _why_not(need)
        if why is None:
            try:
                self.copy = HostCopy(need, self.device)
            except (OSError, MemoryError, ValueError) as error:
                why = f"there is no memory for a copy: {error}"
        if why is not None:
            self.has_room = False
            self.notice(f"checkpoints are written while training waits: {why}")
        return self.copy

    def _let_go(self) -> None:
        """Gives the memory back. Call it while nothing is being written."""
        if self.copy is not None:
            self.copy.close()
        self.copy = None


def _why_not(need: int) -> str | None:
    """Why there is no room for a copy of this many bytes."""
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
class HostCopy:
    """Host memory that holds the tensors of a checkpoint while they are written.

    For CUDA it is registered as pinned memory, so that copies from the device neither wait nor are waited for: they go
    over a stream of their own, which first waits for the work that was queued before.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """OSError where the system does not give that much memory."""
        self.map = mmap.mmap(-1, max(size, 1))
        self.bytes_N = torch.frombuffer(self.map, dtype=torch.uint8)
        self.bytes_N.zero_()
        self.device = device
        self.pinned = device.type == "cuda" and _register(self.bytes_N, device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def take(self, checkpoint: Checkpoint) -> tuple[Checkpoint, torch.cuda.Event | None]:
        """The checkpoint with its tensors in this memory, and when they are there.

        Without an event they are there already. With one, the source's tensors must not change before `hold_back`.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        place = 0
        held: dict[str, dict[str, Tensor]] = {}
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for part, tensors in _tensors_of(checkpoint).items():
                copies = held[part] = dict[str, Tensor]()
                for name, tensor in tensors.items():
                    target = self.bytes_N[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    target.copy_(tensor, non_blocking=True)
                    copies[name] = target
                    place += _aligned(tensor.nbytes)
        event = None if self.stream is None else torch.cuda.Event(blocking=True)
        if event is not None:
            event.record(self.stream)
        return dataclasses.replace(checkpoint, **held), event

    def close(self) -> None:
        """Gives the memory back. Whoever still reads from it must be through."""
        if self.stream is not None:
            self.stream.synchronize()
        if self.pinned:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self.bytes_N.data_ptr())
        del self.bytes_N
        with contextlib.suppress(BufferError):  # a view of it is still held: then it goes with that
            self.map.close()


def hold_back(copied: torch.cuda.Event | None, device: torch.device) -> None:
    """Makes the current stream wait for a copy before it does anything else. The host goes on."""
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)


def needed_bytes(checkpoint: Checkpoint) -> int:
    """The size of a copy of its tensors."""
    parts = _tensors_of(checkpoint).values()
    return sum(_aligned(tensor.nbytes) for tensors in parts for tensor in tensors.values())


def _tensors_of(checkpoint: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    return {"model": checkpoint.model, "optimizer": checkpoint.optimizer, "run": checkpoint.run}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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
