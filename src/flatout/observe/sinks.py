"""Records to files. `metrics.jsonl` is the truth of a run: one line per record, whole lines only, no step twice.

A run read back from its folder: what it said, in columns, whether it has ended or not.

Contract: needs neither torch nor the engine. A torn last line and unknown records are left out; a number that JSON
could not hold ("nan", "inf") is a float again; a field that an older run did not write is None. `MetricsFile` drops
what a resumed run says again, so steps come once and in order.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import DataError, ResourceError
from flatout.files import disk_errors, open_to_append, write_whole
from flatout.observe.human import printable
from flatout.records import Record, TaskRecord, record_to_json

TASKS = "tasks.jsonl"  # scores that were measured after training


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
        with contextlib.suppress(OSError, ResourceError), self.file:  # a full disk has been reported already
            self.flush()


def add_task_records(run: Path, records: Sequence[TaskRecord]) -> None:
    """Appends scores to the tasks.jsonl of a run; a checkpoint that lies elsewhere has no place for them."""
    if not (run / "metrics.jsonl").is_file():
        return
    with disk_errors(str(run / TASKS), safe=""), open_to_append(run / TASKS) as file:
        file.write("".join(f"{record_to_json(record)}\n" for record in records).encode("utf-8"))


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
    """Whether the run of a metrics file ended at a step, with no record after it."""
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


LARGEST = 2**53
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """The records of one run, as dictionaries, by kind."""

    folder: Path
    infos: tuple[dict[str, Any], ...]  # one per start: the first, and every resume
    steps: tuple[dict[str, Any], ...]
    evals: tuple[dict[str, Any], ...]
    epochs: tuple[dict[str, Any], ...]
    samples: tuple[dict[str, Any], ...]
    checkpoints: tuple[dict[str, Any], ...]
    notices: tuple[dict[str, Any], ...]
    spans: tuple[dict[str, Any], ...]
    machine: tuple[dict[str, Any], ...]
    ends: tuple[dict[str, Any], ...]  # an interrupted run that went on has several
    eigenstates: tuple[dict[str, Any], ...] = ()
    tasks: tuple[dict[str, Any], ...] = ()  # also those of tasks.jsonl

    @property
    def info(self) -> dict[str, Any]:
        """What the newest start said of the run."""
        return self.infos[-1]

    @property
    def end(self) -> dict[str, Any] | None:
        """How it ended; None while it goes on, and of a run that was killed."""
        last = max((row["step"] for row in rows_with_step(self.steps)), default=0)
        ends = rows_with_step(self.ends)
        return ends[-1] if ends and ends[-1]["step"] >= last else None

    def column(self, field: str) -> list[Any]:
        """One field of every step, None where it is missing."""
        return [row.get(field) for row in self.steps]


def read_history(folder: Path) -> RunHistory:
    """The run in `folder`; an error where there is none."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{folder} is not a run: it has no metrics.jsonl", "name a run folder, such as runs/NAME")
    try:
        rows = read_metrics(path) + [row for row in read_metrics(folder / TASKS) if row["type"] == "task"]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"{printable(str(path))} cannot be read: {reason}", "check its permissions and the disk"
        ) from error
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(str(row["type"]), []).append(_numbers(row))
    if not kinds.get("run"):
        raise DataError(f"{path} holds no run", "name the folder of a run that was started by flatout train")
    names = ("run", "step", "eval", "epoch", "sample", "checkpoint", "notice", "spans", "machine", "end", "eigenstates",
             "task")  # fmt: skip
    return RunHistory(folder, *(tuple(kinds.get(name, ())) for name in names))


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Each folder's name, with as many parents as it takes to make it unique."""
    parts = [path.resolve().parts for path in folders]
    names: list[str] = []
    for own in parts:
        depth = 1
        while depth < len(own) and sum(other[-depth:] == own[-depth:] for other in parts) > 1:
            depth += 1
        names.append("/".join(own[-depth:]).replace("//", "/"))
    return names


def incomparable(infos: Sequence[dict[str, Any]]) -> str:
    """Why the losses of these runs do not compare, as a sentence; empty where they do."""
    for field, words in (("tokenizer", "tokenizers"), ("vocab", "vocabularies"), ("dataset", "data")):
        values = {str(info.get(field)) for info in infos}
        if field == "tokenizer":
            values.discard("model")  # a fine-tuned model's own, which may be any of the others
        if len(values) > 1:
            return f"losses do not compare: these runs have different {words}; bits per byte are the better measure"
    return ""


def minutes_of(config: Any) -> float | None:
    """The length of a run by its stored config, where that is in minutes: its steps are then a plan that changes."""
    train = config.get("train") if isinstance(config, dict) else None  # what was read from a file may be anything
    minutes = train.get("minutes") if isinstance(train, dict) else None
    return minutes if isinstance(minutes, int | float) and 0 < minutes < math.inf else None


ENDINGS = {"finished": "finished", "early_stop": "stopped early", "interrupted": "interrupted"}  # of a run, in words


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number that a float, or JavaScript, can hold; damage may put anything into a field."""
    return type(value) is int and least <= value < LARGEST


def rows_with_step(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that name a step, in its order, which is how a whole file has them anyway."""
    return sorted((row for row in rows if is_count(row.get("step"))), key=lambda row: row["step"])


def _numbers(value: Any, depth: int = 4) -> Any:
    """Text that stands for a number JSON has no word for becomes that number; in records no other text is like it.

    `depth` is how deep records go: a damaged line may go deeper than Python can follow.
    """
    if isinstance(value, dict) and depth:
        return {key: item if key in _TEXTS else _numbers(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list) and depth:
        return [_numbers(item, depth - 1) for item in value]
    return NUMBERS.get(value, value) if isinstance(value, str) else value


_TEXTS = {"text", "prompt", "message", "config", "features", "folder", "path", "type", "reason", "device", "family",
          "flatout", "torch", "dataset", "tokenizer", "resumed_from", "checkpoint", "throttled", "pieces",
          "task", "metric"}  # fmt: skip
