"""What is on the disk below a folder, to compare before and after."""

import hashlib
import os
import stat
from pathlib import Path


def snapshot(folder: Path) -> dict[str, tuple[str, int, str]]:
    """Every entry: its kind, its mode, and its bytes or where it points. Links are not followed."""
    found: dict[str, tuple[str, int, str]] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode):
                kind, content = "link", os.readlink(path)
            elif stat.S_ISREG(facts.st_mode):
                kind, content = "file", hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                kind, content = "folder" if stat.S_ISDIR(facts.st_mode) else "other", ""
            found[str(path.relative_to(folder))] = (kind, stat.S_IMODE(facts.st_mode), content)
    return found
