"""The numbers of runs as CSV: one row per step, one per evaluation, and one per look at each eigenstate block.

Contract: every field of a step that is a number has its column, and so has what the pictures draw besides: seconds of
training so far, and the validation loss of the steps that had one. A missing value is an empty cell; NaN and infinity
are `nan` and `inf`. Files are whole or not there, and are written row by row: a long run needs no memory for them.

Trap: a spreadsheet takes text that begins with `=` as a formula. Names of runs are text, so such a name gets an
apostrophe before it.
"""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.files import disk_errors, whole_file
from flatout.observe.eigenstates import QUANTILES, QUANTITIES
from flatout.observe.human import printable
from flatout.observe.series import RunNumbers
from flatout.records import EvalRecord, StepRecord

STEPS, EVALS, EIGENSTATES = "steps.csv", "evals.csv", "eigenstates.csv"
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name != "update_ratio")  # several
_EVAL_FIELDS = tuple(field.name for field in dataclasses.fields(EvalRecord))
STEP_HEADER = (*_STEP_FIELDS, "training_seconds", "val_loss")
EVAL_HEADER = (*_EVAL_FIELDS, "tokens_seen", "training_seconds")
_OF_STATES = tuple((quantity, quantile) for quantity in QUANTITIES for quantile in QUANTILES)
EIGENSTATE_HEADER = (
    "step", "layer", "states", *(f"{quantity}_{quantile}" for quantity, quantile in _OF_STATES), "beyond_context",
    "tokens_seen", "training_seconds",
)  # fmt: skip


def write_tables(runs: Sequence[RunNumbers], *paths: Path, names: bool = False) -> list[Path]:
    """Writes the tables of steps, evaluations and eigenstates to as many paths as are given; returns those written.

    That of eigenstate blocks is written only where a run has some. With `names`, the first column is the run's name.
    """
    first = ("run",) if names else ()
    tables = [(STEP_HEADER, _step_rows), (EVAL_HEADER, _eval_rows)]
    tables += [(EIGENSTATE_HEADER, _eigenstate_rows)] if any(run.eigenstates.layers for run in runs) else []
    written = dict(zip(paths, tables, strict=False))
    for path, (header, rows) in written.items():
        _write(path, (*first, *header), (_named(run, rows(run), names=names) for run in runs))
    return list(written)


def is_table(path: Path, *, names: bool) -> bool:
    """Whether the file is one of ours, of this version or an older one: a comment line would keep spreadsheets and
    pandas from reading it, so its columns are the mark, which are ours alone and all of them ours."""
    with path.open("rb") as file:
        columns = file.readline(4000).decode("utf-8", "replace").strip().split(",")
    begin = ["run", "step"] if names else ["step"]
    known = {"run", *STEP_HEADER, *EVAL_HEADER, *EIGENSTATE_HEADER}
    return columns[: len(begin)] == begin and "training_seconds" in columns and known >= set(columns)


def _named(run: RunNumbers, rows: Iterable[tuple[Any, ...]], *, names: bool) -> Iterable[tuple[Any, ...]]:
    first = (_safe(run.name),)
    return (first + row for row in rows) if names else rows


def _step_rows(run: RunNumbers) -> Iterator[tuple[Any, ...]]:
    losses = {row["step"]: _cell(row.get("loss")) for row in run.evals}
    columns = [_column(run.rows, field) for field in _STEP_FIELDS]
    spent = map(_known, run.axes["seconds"].tolist())
    return zip(*columns, spent, (losses.get(row["step"]) for row in run.rows), strict=True)


def _eval_rows(run: RunNumbers) -> Iterator[tuple[Any, ...]]:
    steps = [row["step"] for row in run.evals]
    columns = [_column(run.evals, field) for field in _EVAL_FIELDS]
    tokens, seconds = (run.place(steps, axis).tolist() for axis in ("tokens", "seconds"))
    return zip(*columns, map(_whole, tokens), map(_known, seconds), strict=True)


def _eigenstate_rows(run: RunNumbers) -> Iterator[tuple[Any, ...]]:
    """Step by step, and at each step layer by layer."""
    rows: list[tuple[Any, ...]] = []
    for layer in run.eigenstates.layers:
        columns = [layer.values[quantity][quantile] for quantity, quantile in _OF_STATES]
        tokens, seconds = (run.place(layer.steps, axis).tolist() for axis in ("tokens", "seconds"))
        ends = (layer.beyond, map(_whole, tokens), map(_known, seconds))
        for step, *values in zip(layer.steps, *columns, *ends, strict=True):
            rows.append((step, layer.layer, layer.states, *values))
    return iter(sorted(rows, key=lambda row: row[:2]))


def _column(rows: Sequence[dict[str, Any]], field: str) -> Iterable[Any]:
    values = [row.get(field) for row in rows]
    return values if set(map(type, values)) <= {float, int, type(None)} else map(_cell, values)


def _cell(value: Any) -> Any:
    """What stands in the table; None is an empty cell."""
    if isinstance(value, bool):
        return int(value)
    return _safe(value) if isinstance(value, str) else value if isinstance(value, int | float) else None


def _known(value: float) -> float | None:
    """A place on an axis; None where it is not known."""
    return value if math.isfinite(value) else None


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _safe(text: str) -> str:
    """Text in one line that no spreadsheet takes as a formula."""
    text = printable(" ".join(text.split())).encode("utf-8", "backslashreplace").decode("utf-8")
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _write(path: Path, header: Iterable[str], parts: Iterable[Iterable[tuple[Any, ...]]]) -> None:
    what, safe = f"the table {printable(str(path))}", ", or name another folder with --out"
    with disk_errors(what, safe=safe), whole_file(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for rows in parts:
            writer.writerows(rows)
        file.detach()  # writes what it holds
