"""Weights on disk: safetensors only. Names and shapes of our own are checked before anything is overwritten."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.files import CHECK_ACCESS, why_unreadable

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
    """A file of safetensors to read from, mapped into memory; `hint` is for one that is none."""
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


def why_not_these(names: Iterable[str], sections: str = "model section") -> str:
    """The hint for tensors of other names than the model's."""
    if any(name.endswith(".frequency_K") for name in names):
        return "its eigenstates are of an earlier form, with other weights; train it again, or use the version it is of"
    return f"it belongs to another model; check the {sections}"


def assign_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copies tensors into the model; names and shapes must match exactly."""
    assign_tensors(dict(model.named_parameters()), tensors, origin, "model section")


@torch.no_grad()
def assign_tensors(
    expected: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor], origin: str, sections: str
) -> None:
    """Copies all tensors, or none; `sections` are those of a config that say which there must be."""
    check_tensors({name: parameter.shape for name, parameter in expected.items()}, tensors, origin, sections)
    for name, parameter in expected.items():
        parameter.copy_(tensors[name])


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], origin: str, sections: str
) -> None:
    """Refuses tensors of other names or shapes than expected."""
    hint = why_not_these(tensors, sections)
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "has no tensor" if name in expected else "holds an unknown tensor"
        raise CheckpointError(f"{origin} {what} {name}", hint)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            shapes = f"{tuple(tensors[name].shape)}, the model needs {tuple(shape)}"
            raise CheckpointError(f"{origin}: {name} has shape {shapes}", hint)
