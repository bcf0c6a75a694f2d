"""Records to files. `metrics.jsonl` is the truth of a run: one line per record, whole lines only, no step twice."""

import contextlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError
from flatout.files import disk_errors, open_to_append, write_whole
from flatout.records import Record, record_to_json


class MetricsFile:
    """Appends records to metrics.jsonl, each flushed at once: a killed run loses at most the line being written.

    On opening, lines after `keep_to_step` are dropped (a resumed run will say them again) and so is a torn last line.
    So are the types of records in `again` at that step itself. What a full disk does not take is kept for the next try.
    """

    def __init__(self, path: Path, *, keep_to_step: int, again: Collection[str] = ()) -> None:
        self.path = path
        self.waiting = b""  # what is not in the file yet
        with disk_errors(str(path)):
            self.file = open_to_append(path)
            if path.stat().st_size:
                self.file.close()  # Windows does not replace a file that is open
                _cut_back(path, keep_to_step, again)
                self.file = open_to_append(path)

    def write(self, record: Record) -> None:
        self.add(record)
        self.flush()

    def add(self, record: Record) -> None:
        """Takes a record for the next `flush`."""
        self.waiting += record_to_json(record).encode("utf-8") + b"\n"

    def flush(self) -> None:
        with disk_errors(str(self.path)):
            while self.waiting:
                self.waiting = self.waiting[os.write(self.file.fileno(), self.waiting) :]

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, ResourceError), self.file:  # a full disk has been told of already
            self.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file as dictionaries; a torn last line is left out. Without a file there are none."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # torn, or nested deeper than anything of ours
            continue
        if isinstance(row, dict) and "type" in row:
            rows.append(row)
    return rows


def ends_at(path: Path, step: int) -> bool:
    """Whether a metrics file tells of a run that ended at a step, and of nothing after it."""
    rows = read_metrics(path)
    ended = any(row["type"] == "end" and _step_of(row) == step for row in rows)
    return ended and all(_step_of(row) <= step for row in rows)


def _step_of(row: dict[str, Any]) -> int:
    step = row.get("step", row.get("start_step"))
    return step if isinstance(step, int) else 0


def _cut_back(path: Path, step: int, again: Collection[str]) -> None:
    rows = [row for row in read_metrics(path) if _step_of(row) <= step]
    kept = [row for row in rows if not (_step_of(row) == step and row["type"] in again)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    write_whole(path, content.encode("utf-8"), durable=True)  # it replaces rows that were safe on the disk
