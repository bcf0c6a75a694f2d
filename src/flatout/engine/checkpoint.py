"""Checkpoints that are either whole or absent: safetensors and JSON, no pickle.

Writing: a temporary folder beside the target; every file written and fsynced; `manifest.json` with the SHA-256 of each
file last; folder fsynced; renamed; parent fsynced; only then are older checkpoints removed. A process killed at any
moment leaves the previous checkpoint as it was, and at worst a temporary folder that the next start sweeps away.

Reading: every byte is hashed before any of it is used. The manifest must equal its own canonical form and carries its
own hash, so a flipped bit in it is found too.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.errors import CheckpointError, DamagedError
from flatout.files import (
    CHECK_ACCESS,
    canonical_json,
    disk_errors,
    hash_file,
    sync_and_hash,
    sync_folder,
)
from flatout.model.tensor_file import write_tensors
from flatout.model.weights import read_safetensors

FORMAT = 1
BASE_MARK = "base-of.txt"
_NAME = re.compile(r"^step-(\d{8})$")
_TENSOR_FILES = ("model", "optimizer", "run")
_JSON_FILES = ("state", "config", "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    run: dict[str, Tensor]
    state: dict[str, Any]
    config: dict[str, Any]
    tokenizer: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every finished checkpoint in a `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = ((_NAME.match(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


# --- writing ----------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> tuple[Path, int]:
    """Writes `folder/step-N` atomically; returns it and its size in bytes."""
    target = checkpoint_path(folder, checkpoint.step)
    temporary = folder / f"{target.name}.tmp-{os.getpid()}"
    with disk_errors(f"checkpoint {target}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            size = _write_files(temporary, checkpoint)
            _publish(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target, size


def _write_files(folder: Path, checkpoint: Checkpoint) -> int:
    paths = [folder / f"{name}.safetensors" for name in _TENSOR_FILES]
    tensors: list[dict[str, Tensor]] = [getattr(checkpoint, name) for name in _TENSOR_FILES]
    with ThreadPoolExecutor(len(paths)) as threads:  # hashing is what takes longest, and is one thread for a file
        told = threads.map(write_tensors, paths, tensors)
        entries: dict[str, dict[str, Any]] = {path.name: entry for path, entry in zip(paths, told, strict=True)}
    for name in _JSON_FILES:
        path = folder / f"{name}.json"
        path.write_bytes(canonical_json(getattr(checkpoint, name)))
        entries[path.name] = sync_and_hash(path)
    manifest = {"format": FORMAT, "step": checkpoint.step, "files": entries}
    manifest["sha256"] = hashlib.sha256(canonical_json(manifest)).hexdigest()
    path = folder / "manifest.json"
    path.write_bytes(canonical_json(manifest))
    sync_and_hash(path)
    sync_folder(folder)
    return sum(entry["bytes"] for entry in entries.values())


def _publish(temporary: Path, target: Path) -> None:
    if target.exists():  # the same step saved before, in a run that was rolled back: the new one takes its place
        old = target.with_name(f"{target.name}.old-{os.getpid()}")
        os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old)
    else:
        os.rename(temporary, target)
    sync_folder(target.parent)


def remove_checkpoint(path: Path) -> None:
    """Renames first: a half-deleted folder must not be taken for a checkpoint."""
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def sweep_leftovers(folder: Path) -> None:
    """Removes what killed processes left half written or half deleted. Call it only while holding the run's lock."""
    if folder.is_dir():
        for path in folder.iterdir():
            if re.search(r"\.(tmp|old)-\d+$", path.name):
                shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path, keep: int, best_step: int | None) -> None:
    """Removes all but the newest `keep` checkpoints, the best one, and those under somebody's adapters."""
    steps = list_checkpoints(folder)
    for step, path in steps[: max(0, len(steps) - keep)]:
        if step != best_step and not (path / BASE_MARK).exists():
            remove_checkpoint(path)


def mark_as_base(checkpoint: Path, run: Path) -> bool:
    """Says in a checkpoint that the adapters of `run` are worth nothing without it; False where that cannot be."""
    try:
        (checkpoint / BASE_MARK).write_text(f"adapters in {run.resolve()} need these weights\n", encoding="utf-8")
    except OSError:
        return False
    return True


def write_json_atomically(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with disk_errors(str(path)):
        temporary.write_bytes(canonical_json(value))
        sync_and_hash(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)


# --- reading ----------------------------------------------------------------------------------------------------------


def verify_checkpoint(path: Path) -> None:
    """Hashes every file; the first that is missing, torn or changed is named in a CheckpointError.

    Its hint names the newest whole checkpoint beside it, which is looked for only then.
    """
    try:
        _verify(path)
    except DamagedError as error:
        whole = _newest_whole(path)
        if whole is None:
            raise DamagedError(error.message, "restore the file: there is no whole checkpoint beside it") from error
        way = f"restore the file, or name the newest whole checkpoint instead: {whole}"
        raise DamagedError(error.message, f"{way} (--resume {shlex.quote(str(whole))} goes on from it)") from error


def _newest_whole(damaged: Path) -> Path | None:
    for _, path in reversed(list_checkpoints(damaged.parent)):
        if path.name != damaged.name:
            with contextlib.suppress(CheckpointError):
                _verify(path)
                return path
    return None


def _verify(path: Path) -> None:
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise _damaged(file, "is missing")
        if file.stat().st_size != entry["bytes"]:
            raise _damaged(file, f"has {file.stat().st_size:,} bytes, not {entry['bytes']:,}")
        try:
            digest = hash_file(file)
        except OSError as error:  # not damaged: who may read it can go on with it, so it is not set aside
            raise CheckpointError(f"{file} cannot be read: {error.strerror}", CHECK_ACCESS) from error
        if digest != entry["sha256"]:
            raise _damaged(file, "does not match its SHA-256")


def read_checkpoint(path: Path, *, verified: bool = False) -> Checkpoint:
    """The contents of a checkpoint folder, tensors on the CPU; hashed first unless the caller just did."""
    if not verified:
        verify_checkpoint(path)
    tensors = {name: read_safetensors(path / f"{name}.safetensors") for name in _TENSOR_FILES}
    values = {name: json.loads((path / f"{name}.json").read_bytes()) for name in _JSON_FILES}
    return Checkpoint(**tensors, **values)


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A checkpoint that does not verify, and why."""

    step: int
    path: Path
    why: str


def newest_good(folder: Path) -> tuple[Path | None, list[Damaged]]:
    """The newest checkpoint that verifies, and the damaged ones after it. Nothing on disk changes.

    None when there are no checkpoints at all. When there are some and none is good, that is an error: starting over
    in silence would throw the run away.
    """
    damaged: list[Damaged] = []
    for step, path in reversed(list_checkpoints(folder)):
        try:
            _verify(path)
        except DamagedError as error:
            damaged.append(Damaged(step, path, error.message))
            continue
        return path, damaged
    if damaged:
        raise CheckpointError(
            f"no good checkpoint is left in {folder}: {damaged[0].why}",
            "restore the folder from a backup, or start a new run with another output.folder",
        )
    return None, []


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint so that it is no longer one; nothing is deleted."""
    numbers = itertools.count(1)
    names = (path.with_name(f"{path.name}.{why}" + (f"-{n}" if n > 1 else "")) for n in numbers)
    aside = next(name for name in names if not name.exists())
    os.rename(path, aside)
    return aside


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        raw = file.read_bytes()
        manifest = json.loads(raw)
    except FileNotFoundError as error:
        raise _damaged(file, "is missing") from error
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error
    except ValueError as error:
        raise _damaged(file, "is not valid JSON") from error
    if not isinstance(manifest, dict) or raw != canonical_json(manifest):
        raise _damaged(file, "is not in the form it was written")
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != hashlib.sha256(canonical_json(body)).hexdigest():
        raise _damaged(file, "does not match its own SHA-256")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest['format']}, this Flatout reads format {FORMAT}", "update Flatout to read it"
        )
    return manifest


def _damaged(file: Path, how: str) -> DamagedError:
    return DamagedError(f"damaged checkpoint: {file} {how}", "restore the file")
