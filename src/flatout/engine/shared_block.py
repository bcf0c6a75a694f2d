"""Host memory that holds a checkpoint's files while another process writes them.

Idea: one anonymous block, mapped once, in which every safetensors file lies byte for byte as on the disk. For CUDA it
is registered as pinned memory, so that copies from the device neither wait nor are waited for: they go over a stream of
their own, which first waits for what the device has been told so far.

Contract: after `take` returns, the tensors may be read but not changed before `Copied.hold_back` was called on the
stream that changes them. What the block holds is complete after `Copied.wait`, and stays until the next `take`.
Trap: memory that is only reserved can fail when it is used, and a process dies of that. So all of it is touched when it
is mapped.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatout.engine.writer import Span
from flatout.model.weights import header_of, in_file_order

_ALIGNED = 256  # bytes: where the first tensor of a file begins
_SPARE = 2**20  # bytes for texts that grow
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


@dataclass(frozen=True)
class Copied:
    """A copy under way; without an event it is done already.

    Another thread may wait for it while this one records a CUDA graph: recordings mind their own thread only.
    """

    device: torch.device
    event: torch.cuda.Event | None
    source: object  # what is copied stays until then

    def hold_back(self) -> None:
        """Makes the current stream wait for the copy before it does anything else. The host goes on."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


@final
class SharedBlock:
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
    ) -> tuple[dict[str, Span], dict[str, Span], Copied]:
        """Copies files into the block: where those of tensors and those of text lie, and when they do."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        spans, end = {}, 0
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for name, unordered in tensors.items():
                ordered = in_file_order(unordered)
                header = header_of(ordered)
                place = start = _aligned(end + len(header)) - len(header)
                place = self._put(place, header)
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
        return spans, written, Copied(self.device, event, tensors)

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
        with contextlib.suppress(BufferError):  # somebody holds a view: then it goes with that
            self.map.close()
        os.close(self.handle)


def needed_bytes(tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, bytes]) -> int:
    """The size of the block that holds these files."""
    headers = sum(len(header_of(in_file_order(file))) + _ALIGNED for file in tensors.values())
    values = sum(tensor.nbytes for file in tensors.values() for tensor in file.values())
    return headers + values + sum(len(text) for text in texts.values())


def block_bytes(need: int) -> int:
    """Some more than is needed now, in whole pages."""
    return -(-(need + _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


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
