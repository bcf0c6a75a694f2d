"""Weights on disk: safetensors only. Names and shapes are checked before a model's weights are overwritten.

`write_tensors` copies from the device, hashes and writes at the same time, in pieces of some megabytes: while some are
hashed and written, the next one is copied through pinned memory (`files.write_pieces`). The library's own writer copies
everything to the host, copies it again and then writes, and a hash takes another read.

Contract: the file is byte for byte that of the library, whose order is by type, then by name. When `write_tensors`
returns, the file is synced to disk; it returns what `files.sync_and_hash` does. A failing disk raises OSError.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.files import CHECK_ACCESS, PIECE, PLACES, why_unreadable, write_pieces

# In the library's order, by decreasing size, so that tensors without gaps between them are aligned.
_NAMES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes a new file and syncs it to disk; returns its size and SHA-256."""
    return write_pieces(path, pieces_of(tensors, metadata))


def pieces_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The bytes of a file, for `write_pieces`. Those from a GPU pass through reused pinned memory."""
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
    """The file's header; the tensors follow without gaps."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_OWN = "check the path, or fetch the file again"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, on the CPU."""
    with opened(path, _OWN) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a file, without their values."""
    with opened(path, _OWN) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict


@contextmanager
def opened(path: Path, hint: str = "it is torn or damaged; fetch it again") -> Iterator[Any]:
    """Opens a memory-mapped safetensors file; `hint` is part of the error if it is not one."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        if (reason := why_unreadable(path)) is not None:
            raise CheckpointError(f"{path} cannot be read: {reason}", CHECK_ACCESS) from error
        with path.open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                hint = "run `git lfs pull` in the folder"
                raise CheckpointError(f"{path} is a pointer of Git LFS, not the weights", hint) from error
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}", hint) from error


def assign_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copies tensors into the model; names and shapes must match."""
    assign_tensors(dict(model.named_parameters()), tensors, origin, "model section")


@torch.no_grad()
def assign_tensors(
    expected: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor], origin: str, sections: str
) -> None:
    """Copies all tensors, or none. `sections`: sections of the config that determine the tensors, for the hint."""
    check_tensors({name: parameter.shape for name, parameter in expected.items()}, tensors, origin, sections)
    for name, parameter in expected.items():
        parameter.copy_(tensors[name])


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], origin: str, sections: str
) -> None:
    """Refuses tensors of other names or shapes than expected."""
    hint = f"it belongs to another model; check the {sections}"
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "has no tensor" if name in expected else "holds an unknown tensor"
        raise CheckpointError(f"{origin} {what} {name}", hint)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            shapes = f"{tuple(tensors[name].shape)}, the model needs {tuple(shape)}"
            raise CheckpointError(f"{origin}: {name} has shape {shapes}", hint)
