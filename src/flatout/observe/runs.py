"""Runs in their folders: which one is meant, whether it goes on, its records while it grows, and a table of all runs.

Idea: `Follower` remembers how far it has read metrics.jsonl and returns what was added; `follow` asks it again until
the lock of the run is free. Silence does not mean the end: a long compilation is silent too.

Contract: needs no torch and writes nothing. `Follower` returns every record once, in the file's order; it keeps half a
line until the rest is there. A resumed run replaces its file by a shorter one (`MetricsFile`); records read before do
not come again, and the `RunInfo` that follows says from which step the run goes on. Lines that are no records and
unknown fields are left out; a field that is missing or of another type gets the emptiest value of its type.

Traps: the file is never kept open, since Windows would then refuse to replace it and the resumed run would fail. A
killed run and a running one have the same last record. `run.lock` shows which it is; it is only read, since looking at
a run must not keep it from starting.
"""

import dataclasses
import functools
import json
import math
import os
import time
import types
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, final

from rich.table import Table

from flatout import records
from flatout.config.suggest import run_hint
from flatout.errors import DataError, UsageError
from flatout.folders import process_lives
from flatout.lock import LOCK, is_held, owner_of
from flatout.observe.human import Terminal, human_bytes, human_seconds, loss_text, printable, say
from flatout.observe.series import amount, finite, number
from flatout.observe.sinks import (
    NUMBERS,
    RunHistory,
    incomparable,
    minutes_of,
    read_history,
    rows_with_step,
)
from flatout.records import EndRecord, Record, RunInfo, StepRecord

RUNS = Path("runs")
METRICS = "metrics.jsonl"
POLL_SECONDS = 0.2
LOCK_SECONDS = 1.0  # between two questions for the lock
_CHUNK = 1 << 20
_TAIL = 64

State = Literal["running", "ended", "elsewhere"]

# The preview of a fine-tuning run is for the terminal it was started on.
_KINDS = {
    name: kind
    for kind, name in records.NAMES.items()
    if kind in typing.get_args(Record) and kind is not records.PreviewRecord
}


def follow(
    folder: Path, *, wait: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> Iterator[Record]:
    """The records of the run in `folder`, from its first to its last; waits for more while a process works there.

    Ends when none does any more, whether the run said its last word (`EndRecord`) or was killed. Of a run on another
    machine that cannot be known: there it ends after an `EndRecord` only.
    """
    follower = Follower(folder)
    asked, over, ended = -math.inf, False, False
    while True:
        fresh = follower.read()
        for record in fresh:
            yield record
            if isinstance(record, EndRecord | RunInfo | StepRecord):
                ended = isinstance(record, EndRecord)
        if fresh:
            over = False
        elif over:
            return  # the lock was free before this reading: all that the run wrote has been read
        elif clock() - asked >= LOCK_SECONDS:
            asked, state = clock(), run_state(folder)
            over = state == "ended" or (state == "elsewhere" and ended)
        else:
            wait(POLL_SECONDS)


@final
class Follower:
    """What was added to a run's metrics.jsonl since the last call."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self._offset = 0
        self._tail = b""  # the last bytes read: other ones in their place mean another file
        self._seen = array("q")  # a hash per line handed out, in order
        self._old = 0  # how many of them a replaced file may still repeat
        self._next = 0

    def read(self, limit: int = _CHUNK) -> list[Record]:
        """New records, at most `limit` bytes of them (or one line, if that is longer); none if nothing was added."""
        while lines := self._lines(limit):
            found = [record_of_line(line) for line in lines if not self._is_repeated(line)]
            if known := [record for record in found if record is not None]:
                return known  # else a chunk of repeated or foreign lines, which is no end of the file
        return []

    def _lines(self, limit: int) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                return self._new_lines(file, limit)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"could not read {self.path}: {error.strerror}", "check the folder of the run") from error

    def _new_lines(self, file: typing.BinaryIO, limit: int) -> list[bytes]:
        file.seek(self._offset - len(self._tail))
        if file.read(len(self._tail)) != self._tail:
            self._offset, self._tail = 0, b""
            self._old, self._next = len(self._seen), 0
            file.seek(0)
        content = file.read(limit)
        while content and b"\n" not in content:
            more = file.read(limit)
            if not more:
                return []
            content += more
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._tail = (self._tail + whole)[-_TAIL:]
        return whole.split(b"\n")[:-1]

    def _is_repeated(self, line: bytes) -> bool:
        """Whether a line was handed out before the file was replaced: its kept lines come first, in their order."""
        key = hash(line)
        if self._next < self._old:
            for place in range(self._next, self._old):
                if self._seen[place] == key:
                    self._next = place + 1
                    return True
            self._next = self._old  # the first new line: what follows it is new as well
        self._seen.append(key)
        return False


# --- is anybody working there? ----------------------------------------------------------------------------------------


def run_state(folder: Path) -> State:
    """Whether a process holds the run's lock; `elsewhere` if another machine wrote it: locks may not reach there."""
    path = folder / LOCK
    if is_held(path):
        return "running"
    if path.exists() and not os.access(path, os.R_OK):
        return "elsewhere"
    owner = owner_of(path)
    return "ended" if owner is None or owner.is_here else "elsewhere"


# --- which run --------------------------------------------------------------------------------------------------------


def find_run(name: str | None, runs: Path = RUNS) -> Path:
    """The folder that is meant: a path, a name under runs/, a checkpoint in a run, or without a name the newest run."""
    if name is None:
        return _newest(runs)
    path = next((path for path in (Path(name), runs / name) if name and _is_folder(path)), None)
    if path is None:
        raise UsageError(f"{name!r} is not a folder", run_hint(name, "name a run folder, such as runs/NAME", runs))
    if (path / "manifest.json").is_file() and path.resolve().parent.name == "checkpoints":
        path = path.resolve().parent.parent
    if not holds_run(path):
        raise DataError(f"{path} is not a run: it has no {METRICS}", "name a run folder, such as runs/NAME")
    return path


def _newest(runs: Path) -> Path:
    found = [path for path in runs.iterdir() if holds_run(path)] if _is_folder(runs) else []
    if not found:
        raise DataError(f"there is no run under {runs}/", "name a run folder, or start one with `flatout train`")
    return max(found, key=touched)


def holds_run(path: Path) -> bool:
    """Whether a run lies in a folder."""
    # A run that has just been started has its lock, and no record yet.
    return (path / METRICS).is_file() or (path / LOCK).is_file()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long for the system, or with a zero byte in it
        return False


def touched(run: Path) -> float:
    """When a run last said something, in seconds since 1970."""
    times = [0.0]
    for path in (run / METRICS, run / LOCK):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


# --- lines to records -------------------------------------------------------------------------------------------------


def record_of_line(line: bytes) -> Record | None:
    """The record that a line of metrics.jsonl holds; None if it holds none that this version knows."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record_of(row) if isinstance(row, dict) else None


def record_of(row: dict[str, Any]) -> Record | None:
    """The record in a row of metrics.jsonl; None for an unknown kind, a missing field, or a value of another type."""
    name = row.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    try:
        return None if kind is None else _filled(kind, row)
    except (TypeError, KeyError, OverflowError):
        return None


_MOST = 2**63  # of whole numbers: JSON knows those of any length, with which Python cannot divide


def _filled(kind: type, row: dict[str, Any]) -> Any:
    hints = _type_hints(kind)
    return kind(**{name: _value(hint, row[name]) for name, hint in hints.items() if name in row})


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    """What JSON has for a field, in the field's own type."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in hint.__args__ if option is not types.NoneType)
    if hint is Any or (type(value) is hint and (hint is not int or abs(value) <= _MOST)):
        return value
    if hint is float and isinstance(value, str):
        return NUMBERS[value]
    if hint is float and type(value) is int:
        return float(value)
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        return {key: _value(inner[1], item) for key, item in value.items()}
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_value(inner[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _filled(typing.cast(type, hint), value)
    raise TypeError(f"no {hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. `loss_of` is validation or training, and empty where there is no loss.

    Losses compare between runs with the same `tokenizer` and `dataset` (a fingerprint); `bits_per_byte`, the best of
    the run, do so between tokenizers.
    """

    run: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    loss_of: str
    bits_per_byte: float | None
    tokenizer: str | None
    dataset: str | None
    bytes: int
    age_seconds: float


# What rows can be sorted by, and how: the newest, the furthest, the lowest loss and the largest come first.
SORTS: dict[str, Callable[[RunRow], Any]] = {
    "age": lambda row: row.age_seconds,
    "name": lambda row: row.run,
    "state": lambda row: (row.state, row.age_seconds),
    "step": lambda row: -(row.step or 0),
    "loss": lambda row: (row.loss_of != "validation", math.inf if row.loss is None else row.loss),
    "size": lambda row: -row.bytes,
}


def list_runs(folder: Path, *, sort: str = "age") -> list[RunRow]:
    """The runs that lie in `folder`."""
    try:
        found = [path for path in folder.iterdir() if path.is_dir() and holds_run(path)]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{printable(str(folder))} cannot be listed: {reason}", "name a folder of runs") from error
    return sorted(map(_row, found), key=SORTS[sort])


def print_runs(rows: Sequence[RunRow]) -> None:
    """A table; where losses do not compare, bits per byte come before them, and a note says so."""
    apart = incomparable([dataclasses.asdict(row) for row in rows if row.loss is not None])
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ("run", "state", "step", *(("bits/byte",) if apart else ()), "loss", "size", "age")
    for name in names:
        table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
    for row in rows:
        of = "" if row.steps is None else f" of {row.steps:,}"
        loss = "–" if row.loss is None else loss_text(row.loss)
        cells = {
            "run": printable(row.run),
            "state": row.state,
            "step": "–" if row.step is None else f"{row.step:,}{of}",
            "bits/byte": "–" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
            "loss": f"{loss} (training)" if row.loss_of == "training" else loss,
            "size": human_bytes(row.bytes),
            "age": human_seconds(row.age_seconds),
        }
        table.add_row(*(cells[name] for name in names))
    terminal = Terminal(width_of_files=160)
    terminal.print(table)
    if apart:
        say(terminal, f"note: {apart}")


def _row(folder: Path) -> RunRow:
    known: dict[str, Any] = dict.fromkeys(("step", "steps", "loss", "bits_per_byte", "tokenizer", "dataset"))
    try:
        history = read_history(folder)
    except DataError:
        known |= {"state": "starting" if at_work(folder) else "no records", "loss_of": ""}
    else:
        state, info = state_of(history), history.info
        known |= {"state": state.word, "step": state.step, "steps": state.steps}
        known |= {name: info[name] for name in ("tokenizer", "dataset") if isinstance(info.get(name), str)}
        known["bits_per_byte"] = min(finite(row.get("bits_per_byte") for row in history.evals), default=None)
        known["loss"], known["loss_of"] = _loss(history)
    age = max(0.0, time.time() - touched(folder))
    return RunRow(run=str(folder), bytes=_bytes_in(folder), age_seconds=age, **known)


def _loss(history: RunHistory) -> tuple[float | None, str]:
    judged = [loss for row in history.evals if (loss := number(row.get("loss"))) is not None and math.isfinite(loss)]
    if judged:
        return min(judged), "validation"
    steps = rows_with_step(history.steps)
    last = number(steps[-1].get("loss")) if steps else None
    return last, "" if last is None else "training"


def _bytes_in(folder: Path) -> int:
    """What the files of a folder hold; a link counts as the link that it is."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # a checkpoint that was removed meanwhile
                continue
    return total


_QUIET_SECONDS = 120.0  # without a new record; asked only where the process cannot be


@dataclasses.dataclass(frozen=True)
class RunState:
    """`kind` is running, finished, early_stop, interrupted or stopped; `word` and `text` are for people."""

    kind: str
    word: str
    text: str
    step: int
    steps: int | None

    @property
    def goes_on(self) -> bool:
        return self.kind == "running"


def state_of(history: RunHistory) -> RunState:
    rows = rows_with_step(history.steps)
    start = amount(history.info.get("start_step"))
    step = rows[-1]["step"] if rows else int(start or 0)
    planned = None if minutes_of(history.info.get("config")) is not None else amount(history.info.get("steps"))
    steps = None if planned is None else int(planned)
    end = history.end
    reason = None if end is None else str(end.get("reason"))
    where = f"step {step:,}" + ("" if steps is None else f" of {steps:,}")
    # An interrupted run that was started again has said so, and not yet taken a step.
    again = reason == "interrupted" and len(history.infos) > len(history.ends)
    if (reason is None or again) and at_work(history.folder):
        return RunState("running", "running", f"It goes on, at {where}.", step, steps)
    spent = None if end is None else amount(end.get("seconds"))
    after = "" if spent is None else f" after {human_seconds(spent)} of training"
    words = ("stopped", "stopped", f"It stopped at {where} without an end: killed, or ended by an error.")
    if reason == "finished":
        words = (reason, "finished", f"It finished at {where}{after}.")
    elif reason == "early_stop":
        words = (reason, "stopped early", f"It stopped early at {where}{after}: no lower validation loss.")
    elif reason is not None:
        words = ("interrupted", "interrupted", f"It was interrupted at {where}{after}.")
    elif len(rows) >= 3 and all(row.get("applied") is False for row in rows[-3:]):
        words = ("stopped", "diverged", f"It diverged and was stopped at {where}.")
    return RunState(*words, step, steps)


def at_work(folder: Path) -> bool:
    """Whether a process works in the folder, as far as can be seen from here."""
    owner = owner_of(folder / LOCK)
    if owner is not None and owner.is_here and os.name == "posix":
        return process_lives(owner.pid)
    try:
        return time.time() - (folder / "metrics.jsonl").stat().st_mtime < _QUIET_SECONDS
    except OSError:
        return False
