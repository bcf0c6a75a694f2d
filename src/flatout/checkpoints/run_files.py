"""The files of a run's folder, and how to tell that a run of ours wrote them. No torch here: the doctor asks, too."""

import json
import re
from pathlib import Path

from flatout.errors import UsageError
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
