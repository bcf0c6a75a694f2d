"""Checkpoints that are either whole or absent: safetensors and JSON, no pickle.

Writing: a temporary folder beside the target; every file written and fsynced; `manifest.json` with the SHA-256 of each
file last; folder fsynced; renamed; parent fsynced. A process killed at any moment leaves the previous checkpoint as it
was, and at worst a temporary folder that the next start sweeps away.

Judging: a checkpoint is evaluated after it was written, and `verdict.json` in it says with what result. Only then are
older checkpoints removed, and never the newest one whose loss was finite. A resume from a checkpoint without a verdict
evaluates it first.

Reading: every byte is hashed before any of it is used. The manifest must equal its own canonical form and carries its
own hash, so a flipped bit in it is found too.

Tensors of a checkpoint that lie in slices: which files there are, what the manifest says of them, whole ones again.

A sharded run writes `model-00001-of-00004.safetensors` and so on in the place of `model.safetensors`, and likewise for
the optimizer: one file for each process that holds slices. The manifest, then of format 2, has `slices`: of every
tensor its type, its shape, and each slice with its file, its offset in the whole tensor and its own shape. Slices are
of rows, one after the other; a tensor without rows (a count of updates) is one slice. All else is as in the plain form.

Contract: a manifest whose slices do not make up every tensor exactly once is refused before anything is read.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint_files import (
    CHECKPOINT_FILES,
    JSON_FILES,
    MANIFEST,
    PLAIN,
    SLICED,
    TENSOR_FILES,
    list_checkpoints,
    save_files,
    sealed,
    unsealed,
)
from flatout.config.former import as_now
from flatout.config.yaml_loader import shorten
from flatout.errors import CheckpointError, DamagedError
from flatout.files import (
    FULL,
    canonical_json,
    disk_errors,
    hash_file,
    read_bounded,
    reading_hint,
    write_new,
    write_whole,
)
from flatout.folders import retire, sweep
from flatout.model.weights import opened, pieces_of, read_safetensors

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
    """The manifest's entry of one slice, whose rows begin at `start` of a tensor with this shape."""
    offset = [start, *[0] * (tensor.ndim - 1)] if tensor.ndim else []
    own = {"file": file, "offset": offset, "shape": list(tensor.shape)}
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(shape), "slices": [own]}


def well_formed(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest of slices has the form of ours: our files, and tensors that they make up exactly."""
    files, slices = manifest.get("files"), manifest.get("slices")
    if not isinstance(files, dict) or not isinstance(slices, dict) or set(slices) != set(SLICED_FILES):
        return False
    if not all(name in _WHOLE or _NAME.fullmatch(name) for name in files) or not files.keys() >= _WHOLE:
        return False
    try:
        return all(_adds_up(entry, part, files) for part, tensors in slices.items() for entry in tensors.values())
    except (AttributeError, KeyError, TypeError):
        return False


def _adds_up(entry: Mapping[str, Any], part: str, files: Mapping[str, Any]) -> bool:
    """Whether the slices of one tensor are its rows, each once and in order. A wrong type is an error, or False."""
    shape, slices, row = entry["shape"], entry["slices"], 0
    if not isinstance(getattr(torch, entry["dtype"]), torch.dtype) or not _is_shape(shape) or not slices:
        return False
    for one in slices:
        match = _NAME.fullmatch(one["file"])
        if match is None or match[1] != part or one["file"] not in files:
            return False
        if not _is_shape(one["shape"]) or len(one["shape"]) != len(shape) or one["shape"][1:] != shape[1:]:
            return False
        if not _is_shape(one["offset"]) or one["offset"] != ([row, *[0] * (len(shape) - 1)] if shape else []):
            return False
        row += one["shape"][0] if shape else 0
    return row == shape[0] if shape else len(slices) == 1


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def read_tensors(folder: Path, manifest: Mapping[str, Any], name: str) -> Mapping[str, Tensor]:
    """The whole tensors of `name` (model, optimizer, run), on the CPU, mapped into memory."""
    if manifest["format"] != SLICED or name not in SLICED_FILES:
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


VERDICT, BASE_MARK = "verdict.json", "base-of.txt"
MOST_IDS = 2**32  # of a vocabulary
# What entries of state.json that only some checkpoints have must be; what is in them is checked by who reads them.
_STATE = {"described": dict, "template": dict, "stream": dict, "deadline": dict, "stops": list, "base": str}
_KINDS = {dict: "mapping", list: "list", str: "text"}
Fact = TypeVar("Fact", int, str)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    run: Mapping[str, Tensor]
    state: dict[str, Any]
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    path: Path | None = None  # where it was read from

    @property
    def step(self) -> int:
        return _entry(self.state, "step", int)

    def without_tensors(self) -> "Checkpoint":
        """Without its tensors after a run has resumed: the files, and with them the space of their disk, go free."""
        return dataclasses.replace(self, model={}, optimizer={}, run={})

    def tensor_files(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of each safetensors file, by the file's name."""
        return {f"{name}.safetensors": getattr(self, name) for name in TENSOR_FILES}

    def text_files(self) -> dict[str, bytes]:
        return {f"{name}.json": canonical_json(getattr(self, name)) for name in JSON_FILES}

    @property
    def dataset(self) -> str:
        """The fingerprint of the data that it was trained on."""
        return _entry(self.state, "dataset", str)


def vocab_in(state: Mapping[str, Any]) -> int:
    """The number of ids that a checkpoint's model has."""
    return _entry(state, "vocab", int, range(1, MOST_IDS + 1))


def _entry(state: Mapping[str, Any], name: str, kind: type[Fact], allowed: range = range(2**63)) -> Fact:
    """An entry of `state` that every checkpoint has."""
    value: object = state.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value not in allowed):
        raise CheckpointError(
            f"the checkpoint's state.json has {name} {shorten(value)}, which is not valid",
            "it was not written by Flatout: name another checkpoint",
        )
    return value


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> tuple[Path, int]:
    """Writes `folder/step-N` atomically; returns it and its size in bytes."""
    target = checkpoint_path(folder, checkpoint.step)
    with disk_errors(f"checkpoint {target}"):
        return target, write_plain(target, checkpoint)


def write_plain(target: Path, checkpoint: Checkpoint) -> int:
    """Writes a whole checkpoint as the folder `target`; returns its size in bytes."""
    pieces = {name: pieces_of(tensors) for name, tensors in checkpoint.tensor_files().items()}
    return save_files(target, checkpoint.step, pieces, checkpoint.text_files())


def remove_checkpoint(path: Path) -> bool:
    """Removes a checkpoint; False, with nothing changed, where it is a link or holds files that are not ours."""
    try:
        files = _read_manifest(path)["files"]
    except CheckpointError:
        return False
    return retire(path, {*files, MANIFEST, VERDICT, BASE_MARK})


def sweep_leftovers(folder: Path) -> None:
    """Removes leftovers of killed processes. Call it only while holding the run's lock."""
    sweep(folder, r"step-\d{8}", locked=True)


def keep_newest(folder: Path, keep: int, best_step: int | None, cooldown_step: int | None = None) -> list[Path]:
    """Removes all but the newest `keep` checkpoints, the best one, the one before a cool-down, the newest with a finite
    loss, and those under adapters of other runs. Returns checkpoints that are kept because they hold foreign files."""
    found = list_checkpoints(folder)
    finite = next((step for step, path in reversed(found) if (v := read_verdict(path)) is not None and v.finite), None)
    doomed = [
        path for step, path in found[: max(0, len(found) - keep)] if step not in (best_step, cooldown_step, finite)
    ]
    return [path for path in doomed if not (path / BASE_MARK).exists() and not remove_checkpoint(path)]


def mark_as_base(checkpoint: Path, run: Path) -> bool:
    """Says in a checkpoint that the adapters of `run` are worth nothing without it; False where it is read-only."""
    try:
        content = f"adapters in {run.resolve()} need these weights\n".encode()
        write_new(checkpoint / BASE_MARK, content, durable=True)
    except FileExistsError:  # it is kept already
        return True
    except OSError as error:
        if error.errno in FULL:
            raise
        return False
    return True


def write_json_atomically(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file whole; its content carries its own hash."""
    with disk_errors(str(path)):
        write_whole(path, sealed(value), durable=True)


# --- verdicts ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement on a checkpoint after it was written: its loss on validation text, and the progress of the run
    with that evaluation in it."""

    loss: float
    progress: dict[str, Any]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def best(self) -> tuple[float, int] | None:
        """(loss, step) of the lowest validation loss until this checkpoint."""
        loss, step = self.progress.get("best_loss"), self.progress.get("best_step")
        return (loss, step) if type(loss) is float and math.isfinite(loss) and type(step) is int else None


def write_verdict(checkpoint: Path, verdict: Verdict) -> None:
    """Puts the verdict into a checkpoint's folder. It names the manifest, so it counts for no other checkpoint.

    It is written in place: a torn one counts as none, and a temporary file that a kill leaves in a checkpoint would be
    taken for a foreign one, so that the checkpoint could never be removed.
    """
    content = {**dataclasses.asdict(verdict), "manifest": hash_file(checkpoint / MANIFEST)}
    with disk_errors(f"{checkpoint / VERDICT}"):
        (checkpoint / VERDICT).unlink(missing_ok=True)
        write_new(checkpoint / VERDICT, sealed(content), durable=True)


def read_verdict(checkpoint: Path) -> Verdict | None:
    """None where there is none, or a damaged one: then the checkpoint is evaluated again."""
    if not (checkpoint / VERDICT).is_file():
        return None
    try:
        content = unsealed(read_bounded(checkpoint / VERDICT))
        if content["manifest"] != hash_file(checkpoint / MANIFEST):
            return None
        return Verdict(loss=float(content["loss"]), progress=dict(content["progress"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


# --- reading ----------------------------------------------------------------------------------------------------------


def verify_checkpoint(path: Path) -> None:
    """Hashes every file; the first that is missing, torn or changed is named in a DamagedError."""
    for name, entry in _read_manifest(path)["files"].items():
        _verify_file(path / name, entry)


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise _damaged(file, "is missing")
    if file.stat().st_size != entry["bytes"]:
        raise _damaged(file, f"has {file.stat().st_size:,} bytes, not {entry['bytes']:,}")
    try:
        digest = hash_file(file)
    except OSError as error:  # not damaged: who may read it can go on with it, so it is not set aside
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", reading_hint(error)) from error
    if digest != entry["sha256"]:
        raise _damaged(file, "does not match its SHA-256")


def read_checkpoint(path: Path, *, verified: bool = False) -> Checkpoint:
    """The contents of a checkpoint folder, tensors on the CPU; hashed first unless the caller just did."""
    if not verified:
        verify_checkpoint(path)
    manifest = _read_manifest(path)
    tensors = {name: read_tensors(path, manifest, name) for name in TENSOR_FILES}
    values = {name: read_part(path, name) for name in JSON_FILES}
    _entry(values["state"], "step", int)  # refused now, and not where it is first used
    return Checkpoint(**tensors, **values, path=path)


def read_model(path: Path) -> Mapping[str, Tensor]:
    """The weights of a checkpoint that was verified, on the CPU."""
    return read_tensors(path, _read_manifest(path), "model")


def checkpoint_bytes(path: Path) -> int:
    """The size of a checkpoint's files, by its manifest."""
    return sum(entry["bytes"] for entry in _read_manifest(path)["files"].values())


def read_part(checkpoint: Path, name: str) -> dict[str, Any]:
    """The object in one of `JSON_FILES`. Its hash is right, so who wrote something else wrote no object."""
    path = checkpoint / f"{name}.json"
    try:
        value = json.loads(read_bounded(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", reading_hint(error)) from error
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "name another checkpoint")
    for key, kind in _STATE.items() if name == "state" else ():
        if not isinstance(value.get(key, kind()), kind | None):
            raise CheckpointError(f"{path}: {key} is no {_KINDS[kind]}", "name another checkpoint")
    return as_now(value) if name == "config" else value


@dataclasses.dataclass(frozen=True)
class Unusable:
    """A checkpoint that training cannot go on from, and why."""

    step: int
    path: Path
    state: Literal["damaged", "diverged"]
    why: str


def newest_good(folder: Path) -> tuple[Path | None, list[Unusable]]:
    """The newest checkpoint that verifies and whose loss is not known to be non-finite, and the unusable ones after it.

    Nothing on disk changes. None when there are no checkpoints at all. When there are some and none is good, that is an
    error: starting over in silence would throw the run away.
    """
    unusable: list[Unusable] = []
    for step, path in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except DamagedError as error:
            unusable.append(Unusable(step, path, "damaged", error.message))
            continue
        verdict = read_verdict(path)
        if verdict is None or verdict.finite:
            return path, unusable
        unusable.append(Unusable(step, path, "diverged", f"its validation loss is {verdict.loss}"))
    if unusable:
        raise CheckpointError(
            f"no good checkpoint is left in {folder}: {unusable[0].why}",
            "restore the folder from a backup, or start a new run with another output.folder",
        )
    return None, []


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = unsealed(read_bounded(file))
    except FileNotFoundError as error:
        raise _damaged(file, "is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", reading_hint(error)) from error
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if manifest.get("format") not in (PLAIN, SLICED):
        raise CheckpointError(
            f"{file} has format {manifest.get('format')!r}, this Flatout reads formats {PLAIN} and {SLICED}",
            "update Flatout to read it",
        )
    if not _is_shaped(manifest):
        raise CheckpointError(
            f"{file} does not list the files of a checkpoint", "it was not written by Flatout: name another checkpoint"
        )
    return manifest


def _is_shaped(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has the form of ours: exactly our files, each with a size and a SHA-256."""
    files, step = manifest.get("files"), manifest.get("step")
    if type(step) is not int or not isinstance(files, dict):
        return False
    plain = manifest["format"] == PLAIN
    if not (set(files) == CHECKPOINT_FILES - {MANIFEST} if plain else well_formed(manifest)):
        return False
    entries = [entry for entry in files.values() if isinstance(entry, dict)]
    return len(entries) == len(files) and all(
        type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str) for entry in entries
    )


def _damaged(file: Path, how: str) -> DamagedError:
    way = "restore the file, or name another checkpoint of the run; --resume auto takes the newest whole one"
    return DamagedError(f"damaged checkpoint: {file} {how}", way)


def check_files_alone(state: Mapping[str, Any], origin: str) -> None:
    """Refuses a checkpoint whose model its files cannot make."""
    if state.get("given_model") is not None:
        raise CheckpointError(
            f"{origin} was trained with a model from Python (model=), which its files alone do not make",
            "use it in Python: flatout.load_model(RUN, model=...) with the same model=",
        )
