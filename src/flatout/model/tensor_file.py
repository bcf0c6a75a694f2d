"""A safetensors file in one pass: tensors leave the device, are hashed and are written at the same time.

The library's own writer first copies everything to the host, then copies it again, then writes; whoever wants a hash
reads the file once more. Here pieces of some megabytes go round: while some are hashed and written, the next one comes
from the device through pinned memory (`files.write_pieces`).

Contract: byte for byte the library's file, which goes by type, then by name. What is returned is what
`files.sync_and_hash` would say of the file, and the file is on the disk by then. A failing disk raises OSError.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.files import PIECE, PLACES, write_pieces

# In the order in which the library has their tensors. Their sizes never grow, so that tensors which lie one after the
# other as in the file are aligned.
_NAMES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes a new file and makes it durable; returns its size and SHA-256."""
    return write_pieces(path, pieces_of(tensors, metadata))


def pieces_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The bytes of a file, for `write_pieces`: those from a GPU come through memory that is used again and again."""
    pinned: list[Tensor | None] = [None] * PLACES
    places = itertools.cycle(range(PLACES))
    next(places)
    ordered = in_file_order(tensors)
    yield memoryview(header_of(ordered, metadata))
    for tensor in ordered.values():
        bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, bytes_N.numel(), PIECE):
            piece_N, place = bytes_N[start : start + PIECE], next(places)
            if piece_N.is_cuda:
                pinned_N = pinned[place]
                if pinned_N is None:
                    pinned_N = pinned[place] = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
                piece_N = pinned_N[: piece_N.numel()].copy_(piece_N)
            yield piece_N.cpu().numpy().data


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    order = {dtype: index for index, dtype in enumerate(_NAMES)}
    return dict(sorted(tensors.items(), key=lambda item: (order[item[1].dtype], item[0])))


def header_of(ordered: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands before the tensors, which follow without gaps."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
