"""All runs in a folder as rows: how each stands, how far it came, its loss, its size and its age.

Contract: needs no torch and writes nothing. A run that cannot be read has a row that says so. The loss is the best on
validation text, or without one the last of training.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from flatout.errors import DataError
from flatout.observe.human import Terminal, human_bytes, human_seconds, printable
from flatout.observe.live.follow import holds_run, touched
from flatout.observe.report.series import at_work, number, state_of
from flatout.observe.sinks import RunHistory, read_history, rows_with_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. `loss_of` is validation or training, and empty where there is no loss."""

    run: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    loss_of: str
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


def print_runs(rows: Iterable[RunRow]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "state", "step", "loss", "size", "age"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
    for row in rows:
        of = "" if row.steps is None else f" of {row.steps:,}"
        loss = "–" if row.loss is None else f"{row.loss:.4f}"
        table.add_row(
            printable(row.run),
            row.state,
            "–" if row.step is None else f"{row.step:,}{of}",
            f"{loss} (training)" if row.loss_of == "training" else loss,
            human_bytes(row.bytes),
            human_seconds(row.age_seconds),
        )
    Terminal(width_of_files=160).print(table)


def _row(folder: Path) -> RunRow:
    known: dict[str, Any] = {"step": None, "steps": None, "loss": None, "loss_of": ""}
    try:
        history = read_history(folder)
    except DataError:
        known["state"] = "starting" if at_work(folder) else "no records"
    else:
        state = state_of(history)
        loss, loss_of = _loss(history)
        known = {"state": state.word, "step": state.step, "steps": state.steps, "loss": loss, "loss_of": loss_of}
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
