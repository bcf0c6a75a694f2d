"""The files of a run's folder, and how to tell that a run of ours wrote them. No torch here: the doctor asks, too."""

import json
import re
from pathlib import Path

from flatout.errors import UsageError

LOCK = "run.lock"
_FILES = ("config.yaml", "metrics.jsonl", "best.json")
_PARTS = (LOCK, *_FILES, "checkpoints", "adapter")
_OWNER = re.compile(rb"pid \d+ on [^\n]*\n")


def check_own(run: Path) -> None:
    """Refuses a folder in which a run would write over files that are not a run's, or through a link."""
    for name in _PARTS:
        if (run / name).is_symlink():
            raise UsageError(
                f"{run / name} is a link, and a run's own files may not be links",
                "set output.folder to a folder on the disk you want; that folder's own path may be a link",
            )
    if (run / "checkpoints").exists() and not (run / "checkpoints").is_dir():
        raise UsageError(f"{run / 'checkpoints'} is a file", "set output.folder to a new folder")
    if _is_run(run):
        return
    for name in _FILES:
        if (run / name).exists():
            raise UsageError(
                f"{run} already holds {name}, which no run of Flatout wrote", "set output.folder to a new folder"
            )


def _is_run(run: Path) -> bool:
    """Whether a run of ours began here: by the text of its lock, or by its records."""
    if owner_of(run / LOCK) is not None:
        return True
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            first = json.loads(file.readline(2**20))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("type") in ("run", "notice")


def owner_of(lock: Path) -> str | None:
    """Who held a lock last, by its text; None where nobody of ours wrote it."""
    try:
        raw = b"" if lock.is_symlink() else lock.read_bytes()[:300]
    except OSError:
        return None
    return raw.decode("utf-8", "replace").strip() if _OWNER.fullmatch(raw) else None
