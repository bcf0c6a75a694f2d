"""What holds the memory of a run, in a few lines and in every block.

Idea: a peak is one number, and the question is what it is made of. Weights, gradients and moments are counted as the
tensors they are; what is left of the measured peak is activations and whatever lives for a moment only. The estimate
that every run prints before its start stands beside it, so that it can be held to the truth.

Contract: `memory_parts` reads and changes nothing. `write_snapshot` takes a step of the caller's with the allocator's
history on, and turns it off again.
Trap: torch's snapshot has no public name and is meant to be pickled. Ours is JSON, and says so if torch has changed.
"""

import contextlib
import dataclasses
import gzip
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.device import peak_memory_bytes
from flatout.engine.run import Run
from flatout.files import disk_errors, write_whole

_HISTORY = 200_000  # entries of the allocator's history; a step has some thousands per micro-batch


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """One line of what holds memory; `measured` and `estimated` in bytes, None where nobody knows."""

    name: str
    measured: int | None
    estimated: int | None


def memory_parts(run: Run) -> tuple[MemoryPart, ...]:
    """What holds memory. On CUDA the parts add up to the measured peak; elsewhere only tensors can be counted."""
    estimate, device = run.plan.memory, run.speed.device
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    gradients = sum(parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)
    # Those of torch's autocast live inside a step only, and count as working memory.
    narrow = run.model.narrow.weights.copies.values()
    copied = itertools.chain.from_iterable((one.values_MK, one.turned_KM, one.unit) for one in narrow)
    copies = sum(tensor.nbytes for tensor in copied if tensor is not None)
    tensors = list(run.step.optimizer.tensors().values())
    moments = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.kind)
    passing = estimate.activations + estimate.working + estimate.graphs - estimate.later
    parts = [
        MemoryPart("weights", weights, weights),
        MemoryPart("copies of weights in narrower types", copies, estimate.weights - weights),
        MemoryPart("gradients", gradients, estimate.gradients),
        MemoryPart("optimizer's moments", moments, estimate.optimizer),
    ]
    if device.kind != "cuda":
        parts.append(MemoryPart("activations and working memory at the peak", None, passing))
        peak = peak_memory_bytes(device.torch_device)
        return (*parts, MemoryPart("the whole process at its peak, Python and torch included", peak, None))
    torch.cuda.synchronize(device.torch_device)
    where = device.torch_device
    between, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    peak, most_reserved = torch.cuda.max_memory_allocated(where), torch.cuda.max_memory_reserved(where)
    kept = sum(parameter.grad.nbytes for parameter in run.model.parameters() if parameter.grad is not None)
    others = max(0, between - weights - copies - moments - kept)
    parts += [
        MemoryPart("tokens on the device, libraries", others, None),
        MemoryPart("activations and working memory at the peak", max(0, peak - between - (gradients - kept)), passing),
        MemoryPart("peak allocated", peak, estimate.total),
        MemoryPart("allocated between two steps", between, None),
        MemoryPart("cached by the allocator between two steps", reserved - between, None),
        MemoryPart("peak reserved", most_reserved, None),
    ]
    host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return (*parts, *([MemoryPart("moments in the host's memory", host, None)] if host > 2**20 else []))


def write_snapshot(device: torch.device, step: Callable[[], object], path: Path) -> list[str]:
    """One `step` with the allocator's history on, as JSON; a line for the user if this torch cannot do that.

    torch's own form is a pickle, which nobody should have to open; and it repeats the stack of every event.
    """
    memory = torch.cuda.memory  # what is asked of it here has no public name
    snapshot: Mapping[str, Any] | None = None
    try:
        memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_HISTORY)
    except (AttributeError, TypeError, NotImplementedError) as error:
        return [f"no memory snapshot: {type(error).__name__}: {error}"]
    try:
        step()
        torch.cuda.synchronize(device)
        with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
            snapshot = memory._snapshot(device)
    finally:
        memory._record_memory_history(enabled=None)
    if snapshot is None:
        return ["no memory snapshot: this torch does not give one"]
    content = json.dumps(shared_frames(snapshot), default=str, separators=(",", ":")).encode("utf-8")
    with disk_errors(path.name, safe=""):
        write_whole(path, gzip.compress(content, 6, mtime=0))
    return []


def shared_frames(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot with one table of `code_lines`, to which every `frames` refers by number."""
    numbers: dict[tuple[str, int, str], int] = {}

    def smaller(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): _numbered(item) if key == "frames" else smaller(item) for key, item in value.items()}
        return [smaller(item) for item in value] if isinstance(value, list | tuple) else value

    def _numbered(frames: Any) -> list[int]:
        keys = [(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames or ()]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    body = {key: smaller(value) for key, value in snapshot.items()}
    return {"code_lines": [{"filename": a, "line": b, "name": c} for a, b, c in numbers], **body}
