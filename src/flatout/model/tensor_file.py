"""A safetensors file in one pass: tensors leave the device, are hashed and are written at the same time.

The library's own writer first copies everything to the host, then copies it again, then writes; whoever wants a hash
reads the file once more. Here pieces of some megabytes go round: while some are hashed and written, the next one comes
from the device through pinned memory. A run stands still while it is saved, so this is time of training.

Contract: byte for byte the library's file, which goes by type, then by name. What is returned is what
`files.sync_and_hash` would say of the file, and the file is on the disk by then. A failing disk raises OSError.
Trap: a piece is used again once both threads are through with it, and not before.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Self, final

import torch
from torch import Tensor

PIECE = 2**24  # bytes
_PLACES = 4  # for pieces, which go round
# In the order in which the library has their tensors.
_NAMES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes a new file and makes it durable; returns its size and SHA-256."""
    order = {dtype: index for index, dtype in enumerate(_NAMES)}
    ordered = sorted(tensors.items(), key=lambda item: (order[item[1].dtype], item[0]))
    with path.open("xb", buffering=0) as file:
        with _Pipeline(file) as pipeline:
            pipeline.put(torch.frombuffer(bytearray(_header(ordered, metadata)), dtype=torch.uint8))
            for _, tensor in ordered:
                bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                for start in range(0, bytes_N.numel(), PIECE):
                    pipeline.put(bytes_N[start : start + PIECE])
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": pipeline.digest.hexdigest()}


def _header(ordered: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@final
class _Pipeline:
    """One thread hashes and one writes what this one hands over, both in order."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.at_work: list[list[Future[None]]] = [[] for _ in range(_PLACES)]
        self.pinned: list[Tensor | None] = [None] * _PLACES
        self.turns = itertools.cycle(range(_PLACES))

    def put(self, piece_N: Tensor) -> None:
        place = next(self.turns)
        self._wait(place)
        host_N = piece_N if piece_N.device.type == "cpu" else self._fetch(piece_N, place)
        view = host_N.numpy().data
        hashing, writing = self.threads
        self.at_work[place] = [hashing.submit(self.digest.update, view), writing.submit(self._write, view)]

    def _fetch(self, piece_N: Tensor, place: int) -> Tensor:
        if not piece_N.is_cuda:
            return piece_N.cpu()
        pinned_N = self.pinned[place]
        if pinned_N is None:
            pinned_N = self.pinned[place] = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        return pinned_N[: piece_N.numel()].copy_(piece_N)

    def _write(self, view: memoryview) -> None:
        while view:  # the operating system may take a part only
            view = view[self.file.write(view) or 0 :]

    def _wait(self, place: int) -> None:
        for future in self.at_work[place]:
            future.result()
        self.at_work[place] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for place in range(_PLACES):
                    self._wait(place)
        finally:
            for thread in self.threads:  # nobody may be left who reads from memory that is given back
                thread.shutdown(cancel_futures=True)
