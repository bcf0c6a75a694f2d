"""How a run stands: it goes on, it has ended and how, or it stopped without a word.

Trap: a killed run and a running one have the same last record. `run.lock` tells them apart, which holds the number of
the process at work; it is only read, never locked, since a look at a run must not be able to keep it from starting.
"""

import dataclasses
import os
import time
from pathlib import Path

from flatout.folders import process_lives
from flatout.lock import LOCK, owner_of
from flatout.observe.history import RunHistory, early_stop_reason, minutes_of, rows_with_step
from flatout.observe.human import human_seconds
from flatout.observe.report.series import amount

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
    told = ("stopped", "stopped", f"It stopped at {where} without an end: killed, or ended by an error.")
    if reason == "finished":
        told = (reason, "finished", f"It finished at {where}{after}.")
    elif reason == "early_stop":
        told = (reason, "stopped early", f"It stopped early at {where}{after}: {early_stop_reason(history.info)}.")
    elif reason is not None:
        told = ("interrupted", "interrupted", f"It was interrupted at {where}{after}.")
    elif len(rows) >= 3 and all(row.get("applied") is False for row in rows[-3:]):
        told = ("stopped", "diverged", f"It diverged and was stopped at {where}.")
    return RunState(*told, step, steps)


def at_work(folder: Path) -> bool:
    """Whether a process works in the folder, as far as can be told from here."""
    owner = owner_of(folder / LOCK)
    if owner is not None and owner.is_here and os.name == "posix":
        return process_lives(owner.pid)
    try:
        return time.time() - (folder / "metrics.jsonl").stat().st_mtime < _QUIET_SECONDS
    except OSError:
        return False
