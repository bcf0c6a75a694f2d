"""The verb runs: a table of the runs that are there.

Contract: as in `flatout.cli`. Needs no torch and writes nothing.
"""

import dataclasses
import json
import math
from pathlib import Path

from flatout.errors import DataError
from flatout.words import Parser


def runs(words: list[str]) -> int:
    parser = Parser("runs", "List runs: how each stands, its step, its best validation loss, its size and its age.")
    parser.add_argument("folder", nargs="?", default="runs", help="folder that the runs lie in; default: runs")
    sorts = ("age", "name", "state", "step", "loss", "size")
    parser.add_argument("--sort", choices=sorts, default="age", help="newest first by default")
    parser.flag("--reverse", "the other way round")
    parser.flag("--json", "print a JSON line for each run")
    parsed = parser.parse_words(words)
    from flatout.observe.runs import list_runs, print_runs

    folder = Path(parsed.folder)
    rows = list_runs(folder, sort=parsed.sort) if folder.is_dir() else []
    if not rows:
        raise DataError(f"there is no run under {folder}/", "name the folder of your runs, or start one: flatout train")
    rows = rows[::-1] if parsed.reverse else rows
    if not parsed.json:
        print_runs(rows)
        return 0
    for row in rows:
        loss = row.loss if row.loss is None or math.isfinite(row.loss) else str(row.loss)
        print(json.dumps({**dataclasses.asdict(row), "loss": loss}, ensure_ascii=False, allow_nan=False))
    return 0
