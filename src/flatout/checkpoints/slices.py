"""Tensors of a checkpoint that lie in slices: which files there are, what the manifest says of them, whole ones again.

A sharded run writes `model-00001-of-00004.safetensors` and so on in the place of `model.safetensors`, and likewise for
the optimizer: one file for each process that holds slices. The manifest, then of format 2, has `slices`: of every
tensor its type, its shape, and each slice with its file, its offset in the whole tensor and its own shape. Slices are
of rows, one after the other; a tensor without rows (a count of updates) is one slice. All else is as in the plain form.

Contract: a manifest whose slices do not make up every tensor exactly once is refused before anything is read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint_files import SLICED
from flatout.checkpoints.run_files import JSON_FILES
from flatout.model.weights import opened, read_safetensors

SLICED_FILES = ("model", "optimizer")
_NAME = re.compile(rf"({'|'.join(SLICED_FILES)})-(\d{{5}})-of-(\d{{5}})\.safetensors")
_WHOLE = {"run.safetensors", *(f"{name}.json" for name in JSON_FILES)}


def slice_file(name: str, number: int, count: int) -> str:
    """The file with the slices of `name` that the process with this number, from 0, holds."""
    return f"{name}-{number + 1:05d}-of-{count:05d}.safetensors"


def joined_entries(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all processes' slices, each with the slices of one process, as one for each tensor."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = found.setdefault(name, {**entry, "slices": []})
            known["slices"] += entry["slices"]
    return found


def entry_of(file: str, shape: Sequence[int], start: int, tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of one slice, whose rows begin at `start` of a tensor with this shape."""
    offset = [start, *[0] * (tensor.ndim - 1)] if tensor.ndim else []
    own = {"file": file, "offset": offset, "shape": list(tensor.shape)}
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(shape), "slices": [own]}


def is_sliced(manifest: Mapping[str, Any]) -> bool:
    return manifest.get("format") == SLICED


def well_formed(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest of slices says what ours say: our files, and tensors that are made up of them exactly."""
    files, slices = manifest.get("files"), manifest.get("slices")
    if not isinstance(files, dict) or not isinstance(slices, dict) or set(slices) != set(SLICED_FILES):
        return False
    if not all(name in _WHOLE or _NAME.fullmatch(name) for name in files) or not files.keys() >= _WHOLE:
        return False
    return all(
        isinstance(tensors, dict) and all(_adds_up(entry, part, files) for entry in tensors.values())
        for part, tensors in slices.items()
    )


def _adds_up(entry: object, part: str, files: Mapping[str, Any]) -> bool:
    """Whether the slices of one tensor are its rows, each once and in order."""
    if not isinstance(entry, dict) or not isinstance(getattr(torch, str(entry.get("dtype")), None), torch.dtype):
        return False
    shape, slices = entry.get("shape"), entry.get("slices")
    if not _is_shape(shape) or not isinstance(slices, list) or not slices:
        return False
    assert isinstance(shape, list)
    row = 0
    for one in slices:
        if not isinstance(one, dict) or not (_is_shape(one.get("shape")) and _is_shape(one.get("offset"))):
            return False
        match = _NAME.fullmatch(str(one.get("file")))
        if match is None or match[1] != part or one["file"] not in files:
            return False
        if one["offset"] != ([row, *[0] * (len(shape) - 1)] if shape else []) or one["shape"][1:] != shape[1:]:
            return False
        row += one["shape"][0] if one["shape"] else 0
    return row == shape[0] if shape else len(slices) == 1 and slices[0]["shape"] == []


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def read_tensors(folder: Path, manifest: Mapping[str, Any], name: str) -> Mapping[str, Tensor]:
    """The whole tensors of `name` (model, optimizer, run), on the CPU, mapped into memory."""
    if not is_sliced(manifest) or name not in SLICED_FILES:
        return read_safetensors(folder / f"{name}.safetensors")
    entries: dict[str, Any] = manifest["slices"][name]
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry in entries.values():
            for one in entry["slices"]:
                if one["file"] not in files:
                    files[one["file"]] = stack.enter_context(opened(folder / one["file"]))
        return _Joined(
            {key: [files[one["file"]].get_tensor(key) for one in entry["slices"]] for key, entry in entries.items()}
        )


@final
class _Joined(Mapping[str, Tensor]):
    """Tensors that are put together each time they are asked for: every process of a host reads all of them."""

    def __init__(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
