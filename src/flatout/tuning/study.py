"""Hyperparameter search: short real runs, Optuna proposes, bad ones are cut short, nothing is lost.

Idea: a trial is the config's own run with other values, through the same loop as `flatout train`, and what counts is
the validation loss at its end. Optuna (the extra `search`) draws the next values from what the trials before have shown
(TPE) and says at every evaluation whether a trial is worse than the median of the others there.

Contract:
- With a study file every finished trial is on disk before the next begins. A killed search goes on where it was:
  `trials` counts finished ones, a trial that was under way is taken again. Another space or another config is refused.
- A trial that diverges, runs out of memory or is no valid config counts as the worst there is, and its row says why.
- Trials write nothing but to a temporary folder; data is prepared once, where `flatout train` would put it.
Trap: an objective of a few hundred steps favours what is good in a few hundred steps: high rates, small models. Make
the trials as long as you can pay for, and look at the picture, not only at the best.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.config.yaml_loader import format_value
from flatout.data.prepare import prepare_data
from flatout.device import detect_device
from flatout.errors import (
    DataError,
    DivergedError,
    UsageError,
    many,
)
from flatout.files import disk_errors, open_to_append
from flatout.records import EvalRecord
from flatout.rows import (
    FAINT,
    OWN,
    Block,
    ChartPanel,
    Picture,
    Points,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_seconds,
    or_dash,
)
from flatout.shown import Shown
from flatout.tuning.changes import Dimension, Space, config_text, with_values, words_of
from flatout.tuning.measure import WholeRun, for_trials, length_of, machine_of
from flatout.tuning.practice_data import scratch_folder, settled_for_runs

TRIALS = 20
BEFORE_CUTTING = 4  # finished trials
ENOUGH = 10  # trials that came to their end, before anything is said of what matters
WORST = 1e9  # what a failed trial counts as; only the order of losses matters to the proposals
NAME = "flatout"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow(Shown):
    """One trial. `status` is done, pruned, diverged, out_of_memory, invalid or interrupted, and `reason` says why.

    `loss` is the last validation loss it had; only that of a trial that is done was at the end.
    """

    number: int
    status: str
    reason: str
    values: dict[str, Any]
    loss: float | None
    step: int
    seconds: float
    best: bool  # of those up to here


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyResult(Shown):
    """The end of a search: the best trial, and a config file with its values."""

    rows: tuple[TrialRow, ...]
    best: TrialRow
    forms: dict[str, str]
    importance: dict[str, float | None]
    words: tuple[str, ...]
    fragment: str
    study: str | None
    config: str
    device: str
    seconds: float
    flatout: str
    torch: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "study", **dataclasses.asdict(self)}

    def sheet(self) -> Sheet:
        return sheet_of(self)

    def picture(self) -> Picture:
        return picture_of(self)


# A trial's number and values, and one of its evaluations or None when it begins.
Told = Callable[[int, dict[str, Any], EvalRecord | None], None]


def search(
    loaded: LoadedConfig,
    space: Space,
    *,
    trials: int = TRIALS,
    study: Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: Told = lambda *_: None,
) -> Generator[TrialRow | StudyResult]:
    """Trains until there are `trials` finished ones in all and yields a row for each new one; the `StudyResult` last.

    What a preset leaves open until its data is known is settled once, for all trials, with a `notice`. `progress`
    hears a trial's number and values when it begins, and each of its evaluations.
    """
    optuna = _optuna()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        storage = None if study is None else stack.enter_context(_opened(optuna, study))
        kept = _study(optuna, storage, loaded, space, study)
        for trial in kept.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            # What was under way when a search was killed will not end any more.
            kept.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        base = for_trials(settled_for_runs(loaded, notice))
        if loaded.config.data_kind == "text" and loaded.size is None:  # else the first trial makes what has to be made
            prepare_data(base.config.data, base.config.clean)
        # A run that warms up for longer looks worse at first: the first third says nothing yet.
        warm_up = (length_of(base) or 0) // 3
        kept.pruner = optuna.pruners.MedianPruner(n_startup_trials=BEFORE_CUTTING, n_warmup_steps=warm_up)
        scratch = stack.enter_context(scratch_folder("flatout-search-"))
        while len(rows := rows_of(kept)) < trials:
            # A fresh seed for every trial: one that is taken again after a kill must not repeat an earlier draw.
            seed = random.Random(f"{loaded.config.train.seed} {len(kept.trials)}").randrange(2**31)
            kept.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(4, trials // 2)))
            trial = kept.ask({one.path: _distribution(optuna, one) for one in space.dimensions})
            values = {one.path: one.settled(trial.params[one.path]) for one in space.dimensions}
            progress(trial.number, values, None)
            _run(kept, trial, base, values, scratch / str(trial.number), progress)
            yield rows_of(kept)[-1]
        yield _result(loaded, space, rows, study, time.monotonic() - began)


def _run(kept: Any, trial: Any, base: LoadedConfig, values: dict[str, Any], folder: Path, progress: Told) -> None:
    """Trains one trial and tells the study what came of it."""
    began, states, run = time.monotonic(), _optuna().trial.TrialState, WholeRun()
    try:
        for record in run.train(lambda: with_values(base, values, "trial"), folder):
            progress(trial.number, values, record)
            trial.report(record.loss, record.step)
            if record.reason != "end" and trial.should_prune():
                run.status, run.reason = "pruned", f"worse than the median at step {record.step}"
                break
    finally:
        # One entry for all of it: each is a transaction that waits for the disk.
        facts = {"status": run.status, "reason": run.reason, "values": values, "loss": run.loss}
        facts |= {"step": run.step, "seconds": time.monotonic() - began}
        trial.set_user_attr("facts", facts)
        if run.status == "interrupted":
            kept.tell(trial, state=states.FAIL)
        elif run.status == "pruned":
            kept.tell(trial, state=states.PRUNED)
        else:
            kept.tell(trial, WORST if run.status != "done" or run.loss is None else run.loss)


def _distribution(optuna: Any, one: Dimension) -> Any:
    kinds = optuna.distributions
    if one.form == "choices":
        return kinds.CategoricalDistribution(list(one.values))
    low, high, *steps = one.values
    for step in steps:  # the end that the steps reach
        high = low + (high - low) // step * step
    how = {"log": one.form == "log", **({"step": steps[0]} if steps else {})}
    return (kinds.IntDistribution if one.whole else kinds.FloatDistribution)(low, high, **how)


# --- the study and its file -------------------------------------------------------------------------------------------


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise DataError(
            "a search needs the package optuna, which is not installed", "pip install 'flatout[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextlib.contextmanager
def _opened(optuna: Any, path: Path) -> Iterator[Any]:
    """The file of a study, for this process alone; made where there is none."""
    if any(character in str(path) for character in "?#%\0"):
        raise UsageError(f"--study {str(path)!r} has a character that SQLite takes for its own", "name another file")
    try:
        import fcntl
    except ImportError:  # Windows
        raise UsageError(
            "--study needs file locks that Windows does not have", "leave --study out, or use Flatout in WSL"
        ) from None
    made = not os.path.lexists(path)
    with disk_errors(f"the study {path}", safe=""), open_to_append(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another search is at work on the study {path}", "wait for it, or name another file with --study"
            ) from None
        _check_study(path)
        import sqlalchemy.exc

        try:
            storage = optuna.storages.RDBStorage(f"sqlite:///{path.resolve()}")
        except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
            if made:
                path.unlink()
            raise DataError(
                f"{path} is not a study that can be read: {type(error).__name__}", "name another file with --study"
            ) from error
        try:
            yield storage
        finally:
            empty = made and not any(one.n_trials for one in optuna.get_all_study_summaries(storage))
            storage.engine.dispose()
            if empty:  # it was refused before its first trial: nothing is left of it
                path.unlink()


def _check_study(path: Path) -> None:
    """Refuses a file that is no study of ours: Optuna would put its tables into whatever database it finds."""
    if not path.stat().st_size:
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path.resolve()}?mode=rw", uri=True)) as database:
            names = {name for (name,) in database.execute("select study_name from studies")}
    except sqlite3.Error as error:
        raise DataError(f"{path} is not a study that can be read: {error}", "name another file with --study") from error
    if names - {NAME}:
        raise DataError(f"{path} holds studies of another program", "name another file with --study")


def _study(optuna: Any, storage: Any, loaded: LoadedConfig, space: Space, path: Path | None) -> Any:
    """The study, new or as it was left; one of another space or config is refused."""
    study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
    facts = {"space": space.spelling, "config": config_facts(loaded, space)}
    known = study.user_attrs
    for name in ("space", "config"):
        if name in known and known[name] != facts[name]:
            before, now = _differing(known[name], facts[name])
            raise UsageError(
                f"the study {path} was made with another {name}: {before} there, {now} now",
                "name another file with --study, or search as it was",
            )
    for name, fact in facts.items():
        if name not in known:
            study.set_user_attr(name, fact)
    return study


def config_facts(loaded: LoadedConfig, space: Space) -> str:
    """What must be the same in every trial of a study, as one text: all that is not searched over nor only output."""
    searched = {one.path for one in space.dimensions}
    facts = {
        f"{section}.{name}": value
        for section, fields in loaded.config.model_dump().items()
        for name, value in fields.items()
        if section not in ("output", "checkpoint", "speed") and f"{section}.{name}" not in searched
    }
    return json.dumps(facts, sort_keys=True)


def _differing(before: str, now: str) -> tuple[str, str]:
    """The first entry in which two facts differ, as each has it."""
    first, second = json.loads(before), json.loads(now)
    path = next(path for path in sorted({*first, *second}) if first.get(path) != second.get(path))
    return tuple(f"{path} {json.dumps(facts[path]) if path in facts else 'absent'}" for facts in (first, second))  # pyright: ignore[reportReturnType]


def rows_of(study: Any) -> list[TrialRow]:
    """The finished trials of a study, in order; those that were interrupted are not among them."""
    rows: list[TrialRow] = []
    best = math.inf
    for trial in study.get_trials(deepcopy=False):
        facts = trial.user_attrs.get("facts")
        if not trial.state.is_finished() or facts is None or facts["status"] == "interrupted":
            continue
        leading = facts["status"] == "done" and facts["loss"] < best
        best = min(best, facts["loss"]) if leading else best
        rows.append(TrialRow(number=trial.number, best=leading, **facts))
    return rows


# --- the result -------------------------------------------------------------------------------------------------------


def _result(loaded: LoadedConfig, space: Space, rows: list[TrialRow], path: Path | None, seconds: float) -> StudyResult:
    done = [row for row in rows if row.status == "done"]
    if not done:
        reasons = sorted({f"{row.status}: {row.reason}" for row in rows})
        raise DivergedError(
            f"none of {many(len(rows), 'trial')} came to its end; {reasons[0] if reasons else 'there were none'}",
            "search over smaller rates or models, or make the trials shorter",
        )
    best = min(done, key=lambda row: row.loss or math.inf)
    device = machine_of(detect_device(loaded.config.speed.device))
    tried = many(len(rows), "trial")
    first = f", search, on {device}: validation loss {best.loss:.4f} at step {best.step}, the best of {tried}."
    return StudyResult(
        rows=tuple(rows),
        best=best,
        forms={one.path: one.form for one in space.dimensions},
        importance={one.path: importance(one, done) for one in space.dimensions},
        words=words_of(best.values),
        fragment=config_text(loaded, best.values, first, [f"{one.path}: {one.text}" for one in space.dimensions]),
        study=None if path is None else str(path),
        config=loaded.config.output.name,
        device=device,
        seconds=seconds,
        flatout=flatout.__version__,
        torch=torch.__version__,
    )


def importance(one: Dimension, done: list[TrialRow]) -> float | None:
    """The share of the differences in loss that goes along with this field by itself: with a parabola over a number,
    with means over choices. None where the trials are too few for that."""
    import numpy as np

    losses = np.array([row.loss for row in done], dtype=float)
    values = [row.values[one.path] for row in done]
    total = float(((losses - losses.mean()) ** 2).sum())
    if len(done) < ENOUGH or total == 0.0 or len({json.dumps(value) for value in values}) < 2:
        return None
    if one.form == "choices":
        groups = [losses[[value == choice for value in values]] for choice in one.values]
        fitted = np.concatenate([np.full(len(group), group.mean()) for group in groups if len(group)])
        rest = float(((np.concatenate(groups) - fitted) ** 2).sum())
        parameters = sum(1 for group in groups if len(group))
    else:
        places = np.log([float(value) for value in values]) if one.form == "log" else np.array(values, dtype=float)
        places = (places - places.mean()) / (places.std() or 1.0)
        degree = min(2, len(set(places.tolist())) - 1)
        rest = float(((losses - np.polyval(np.polyfit(places, losses, degree), places)) ** 2).sum())
        parameters = degree + 1
    # Corrected for how many numbers were fitted: with few trials anything explains something.
    share = 1 - (rest / max(1, len(done) - parameters)) / (total / (len(done) - 1))
    return min(1.0, max(0.0, share))


# --- what is shown ----------------------------------------------------------------------------------------------------

_SHOWN = 20  # rows of the table
_STATUS = {
    "done": "",
    "pruned": "cut short",
    "diverged": "diverged",
    "out_of_memory": "out of memory",
    "invalid": "no valid config",
}


def trial_line(row: TrialRow) -> str:
    """One trial in one line."""
    values = ", ".join(f"{path} {_value(value)}" for path, value in row.values.items())
    loss = "" if row.loss is None else f", loss {row.loss:.4f}"
    status = _STATUS.get(row.status, row.status)
    told = f", {status}: {row.reason}" if status else ", best so far" if row.best else ""
    return f"trial {row.number}: {values}{loss} after {human_seconds(row.seconds)}{told}"


def sheet_of(result: StudyResult) -> Sheet:
    """The trials, the best first, and in a sentence what was found."""
    ordered = sorted(result.rows, key=lambda row: (row.status != "done", row.status, row.loss or math.inf))
    rows = [_row(row, result) for row in ordered[:_SHOWN]]
    blocks: list[Block] = [Table(rows=rows, names="trial", left=(" ",), marks=True, numbers=True)]
    if len(ordered) > _SHOWN:
        blocks.append(Sentence(f"and {len(ordered) - _SHOWN} more"))
    explained = [(share, path) for path, share in result.importance.items() if share is not None]
    alone = "{:.0%} of the differences in loss go along with {} alone"
    blocks += [Sentence(alone.format(share, path)) for share, path in sorted(explained, reverse=True)]
    counts = {status: sum(row.status == status for row in result.rows) for status in _STATUS}
    told = ", ".join(f"{count} {_STATUS[status] or 'to the end'}" for status, count in counts.items() if count)
    blocks.append(
        Sentence(
            f"best of {many(len(result.rows), 'trial')}: number {result.best.number}, validation loss "
            f"{result.best.loss:.4f}; {told}; on {result.device}"
        )
    )
    note = "note: the best {} is at the edge of its range; a wider one may hold a better"
    blocks += [Sentence(note.format(path)) for path in at_the_edge(result)]
    return Sheet(blocks=blocks, width=200)


def _row(row: TrialRow, result: StudyResult) -> ResultRow:
    cells = {"loss": or_dash(row.loss, "{:.4f}"), **{path: _value(row.values[path]) for path in result.forms}}
    cells |= {"steps": str(row.step), "time": human_seconds(row.seconds), " ": _STATUS.get(row.status, row.status)}
    tone = OWN if row.number == result.best.number else FAINT if row.status != "done" else ""
    return ResultRow(name=str(row.number), cells=cells, value=row.loss, tone=tone)


def at_the_edge(result: StudyResult) -> list[str]:
    """Fields of which the best value is the first or last of the values that were tried, among four at least."""
    found = []
    for path, form in result.forms.items():
        values = sorted({row.values[path] for row in result.rows}) if form != "choices" else []
        if len(values) >= 4 and result.best.values[path] in (values[0], values[-1]):
            found.append(path)
    return found


def picture_of(result: StudyResult) -> Picture:
    """Every trial and the best so far; below, the loss over the values of each field.

    The fields show more than one number of importance does: whether the best value lies in the middle of a valley, or
    at the edge of its range, where the range should be wider. Trials that were cut short are pale, at the loss they had
    then; those that failed are crosses at the top. A loss far above the others does not flatten the rest.
    """
    limits = _limits([row.loss for row in result.rows if row.status == "done" and row.loss is not None])
    best, leading = math.inf, []
    for row in result.rows:
        best = min(best, row.loss or math.inf) if row.status == "done" else best
        leading += [(row.number, best)] if math.isfinite(best) else []
    history = _points(result, [row.number for row in result.rows], limits)
    history += [Points(points=leading, look="steps", colour="red", name="best so far", pale=True)] if leading else []
    charts = [
        ChartPanel(title="", curves=history, x="trial", y="validation loss", limits=limits, whole=True, wide=True),
        *(_field_chart(result, path, limits) for path in result.forms),
    ]
    tried, loss = many(len(result.rows), "trial"), result.best.loss
    lines = [f"{tried}; the best, number {result.best.number}, has validation loss {loss:.4f}; on {result.device}"]
    return Picture(title=f"Search of {result.config}", lines=lines, charts=charts)


def _field_chart(result: StudyResult, path: str, limits: tuple[float, float]) -> ChartPanel:
    form, values, share = result.forms[path], [row.values[path] for row in result.rows], result.importance[path]
    ticks = sorted({_value(value) for value in values}) if form == "choices" else []
    places = [ticks.index(_value(value)) if ticks else float(value) for value in values]
    title = path + ("" if share is None else f"   ({share:.0%} of the differences)")
    whole = not ticks and all(isinstance(value, int) for value in values)
    curves = _points(result, places, limits)
    return ChartPanel(title=title, curves=curves, limits=limits, log=form == "log", whole=whole, ticks=ticks)


def _points(result: StudyResult, places: Sequence[float], limits: tuple[float, float]) -> list[Points]:
    looks = {
        "pruned": Points(points=[], look="dots", colour="faint", name="cut short"),
        "done": Points(points=[], look="dots", name="to the end"),
        "failed": Points(points=[], look="crosses", colour="red", name="failed"),
        "best": Points(points=[], look="rings", colour="red"),
    }
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in looks}
    for place, row in zip(places, result.rows, strict=True):
        kind = row.status if row.status in looks else "failed"
        point = (place, limits[1] if kind == "failed" or row.loss is None else row.loss)
        points[kind].append(point)
        if row.number == result.best.number:
            points["best"].append(point)
    return [dataclasses.replace(look, points=points[kind]) for kind, look in looks.items() if points[kind]]


def _limits(losses: Sequence[float]) -> tuple[float, float]:
    """From a little below the best to a little above most of these: what lies far out is drawn at the top."""
    low = min(losses, default=0.0)
    quarter = statistics.quantiles(losses, n=4)[2] if len(losses) > 2 else max(losses, default=1.0)
    high = min(max(losses, default=1.0), low + 3 * max(quarter - low, 1e-3))
    room = max(high - low, 1e-3)
    return low - 0.08 * room, high + 0.12 * room


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else format_value(value)
