"""How a checkpoint's folder is written, whole or not at all.

Two phases. `write_files` puts files into a work folder, hashed and synced, and says what it wrote: several processes
may do so in one folder. `commit` ends it, once: the manifest with the hash of every file. The folder is then synced and
renamed by `whole_folder`, and its parent synced.

The files of a run's folder, and how to tell that a run of ours wrote them. No torch here: the doctor asks, too.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flatout.errors import UsageError
from flatout.files import canonical_json, sync_and_hash, write_new, write_pieces
from flatout.folders import whole_folder
from flatout.lock import LOCK, is_signed

BEST = "best.json"
_FILES = ("config.yaml", "metrics.jsonl", BEST)
_FOLDERS = ("checkpoints", "adapter")
_PARTS = (LOCK, *_FILES, *_FOLDERS)
OWN_NAMES = "|".join(map(re.escape, (*_FILES, "adapter")))  # what a run replaces as a whole; a pattern
MANIFEST = "manifest.json"
TENSOR_FILES = ("model", "optimizer", "run")
JSON_FILES = ("state", "config", "tokenizer")
CHECKPOINT_FILES = frozenset(
    (MANIFEST, *(f"{name}.safetensors" for name in TENSOR_FILES), *(f"{name}.json" for name in JSON_FILES))
)
_STEP = re.compile(r"step-(\d{8})")


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every finished checkpoint in a `checkpoints` folder, oldest first."""
    return sorted((step, path) for step, path in _named_like_checkpoints(folder) if _looks_like_checkpoint(path))


def _named_like_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match]


def _looks_like_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, whole or damaged: some of our files may be lost, but hardly most of them."""
    return sum((path / name).is_file() for name in CHECKPOINT_FILES) > len(CHECKPOINT_FILES) // 2


def check_own(run: Path) -> None:
    """Refuses a folder in which a run would write over files that are not a run's, or through a link."""
    for name in _PARTS:
        if (run / name).is_symlink():
            raise UsageError(
                f"{run / name} is a link, and a run's own files may not be links",
                "set output.folder to a folder on the disk you want; that folder's own path may be a link",
            )
        right = (run / name).is_dir() if name in _FOLDERS else (run / name).is_file()
        if not right and (run / name).exists():
            what = "folder" if name in _FOLDERS else "plain file"
            raise UsageError(f"{run / name} is there and is no {what}", "set output.folder to a new folder")
    for _, path in _named_like_checkpoints(run / "checkpoints"):
        if not _looks_like_checkpoint(path):
            raise UsageError(
                f"{path} is named like a checkpoint but is not one",
                "move it away, or set output.folder to a new folder",
            )
    if _is_run(run):
        return
    for name in _FILES:
        if (run / name).exists():
            raise UsageError(
                f"{run} already holds {name}, which no run of Flatout wrote", "set output.folder to a new folder"
            )


def _is_run(run: Path) -> bool:
    """Whether a run of ours began here: by the text of its lock, or by its records."""
    if is_signed(run / LOCK):
        return True
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            first = json.loads(file.readline(2**20))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("type") in ("run", "notice")


PLAIN, SLICED = 1, 2  # formats of a manifest: whole tensors, or slices of them by several processes
Entries = dict[str, dict[str, Any]]  # of each file by its name: bytes and sha256


def save_files(
    target: Path,
    step: int,
    tensors: Mapping[str, Iterable[memoryview]],
    texts: Mapping[str, bytes],
) -> int:
    """Writes the folder `target` and returns its size in bytes, without the manifest; OSError where that fails.

    A checkpoint of the same step, of a future that the run was taken back from, is set aside.
    """
    with whole_folder(target) as work:
        entries = write_files(work, tensors, texts)
        commit(work, step, entries)
        if target.is_symlink() or target.exists():
            set_aside(target, "superseded")
    return sum(entry["bytes"] for entry in entries.values())


def write_files(work: Path, tensors: Mapping[str, Iterable[memoryview]], texts: Mapping[str, bytes]) -> Entries:
    """Writes files into a folder, large ones as pieces, and makes them durable."""
    with ThreadPoolExecutor(max(len(tensors), 1)) as threads:  # hashing takes longest, and is one thread for a file
        written = threads.map(write_pieces, [work / name for name in tensors], tensors.values())
        entries: Entries = dict(zip(tensors, written, strict=True))
    for name, content in texts.items():
        write_new(work / name, content)
        entries[name] = sync_and_hash(work / name)
    return entries


def commit(work: Path, step: int, entries: Entries, slices: Mapping[str, Any] | None = None) -> None:
    """Writes the manifest: the last file of a checkpoint, after all others are durable, with `slices` if there are."""
    form = {"format": PLAIN} if slices is None else {"format": SLICED, "slices": slices}
    write_new(work / MANIFEST, sealed({**form, "step": step, "files": entries}))
    sync_and_hash(work / MANIFEST)


def sealed(content: dict[str, Any]) -> bytes:
    """JSON that carries its own hash."""
    return canonical_json({**content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


def unsealed(raw: bytes) -> dict[str, Any]:
    """The content of `sealed`; ValueError, with the reason, for anything else."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not valid JSON") from error
    if not isinstance(content, dict) or raw != canonical_json(content):
        raise ValueError("is not in the form it was written")
    body = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != hashlib.sha256(canonical_json(body)).hexdigest():
        raise ValueError("does not match its own SHA-256")
    return content


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint so that it is no longer one; nothing is deleted."""
    numbers = itertools.count(1)
    names = (path.with_name(f"{path.name}.{why}" + (f"-{n}" if n > 1 else "")) for n in numbers)
    aside = next(name for name in names if not os.path.lexists(name))
    os.rename(path, aside)
    return aside
