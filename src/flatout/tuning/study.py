"""Hyperparameter search: short real runs, Optuna proposes, bad ones are cut short, nothing is lost.

Idea: a trial is the config's own run with other values, through the same loop as `flatout train`, and what counts is
the validation loss at its end. Optuna (the extra `search`) draws the next values from what the trials before have shown
(TPE) and says at every evaluation whether a trial is worse than the median of the others there.

Contract:
- A row is yielded as soon as its trial has ended. Rows of an `earlier` search count as trials of this one, so a killed
  search resumes; a trial that was under way is taken again. Rows of another space or another config are refused.
- A trial that diverges, runs out of memory or is no valid config counts as the worst there is, and its row says why.
- Trials write nothing but to a temporary folder; data is prepared once, where `flatout train` would put it.
Trap: an objective of a few hundred steps favours what is good in a few hundred steps: high rates, small models. Make
the trials as long as you can pay for, and look at the picture, not only at the best.
"""

import dataclasses
import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
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
WORST = 1e9  # what a failed trial counts as; only the order of losses matters to the proposals


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow(Shown):
    """One trial. `status` is done, pruned, diverged, out_of_memory or invalid, and `reason` says why.

    `evaluations` are its (step, validation loss), and `loss` is the last of them; only that of a trial that is done was
    at the end. `search` is a hash of the space and of the config's other fields.
    """

    number: int
    status: str
    reason: str
    values: dict[str, Any]
    loss: float | None
    step: int
    evaluations: tuple[tuple[int, float], ...]
    seconds: float
    best: bool  # of those up to here
    search: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "trial", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyResult(Shown):
    """The end of a search: the best trial, and a config file with its values."""

    rows: tuple[TrialRow, ...]
    best: TrialRow
    forms: dict[str, str]
    words: tuple[str, ...]
    fragment: str
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
TrialProgress = Callable[[int, dict[str, Any], EvalRecord | None], None]


def search(
    loaded: LoadedConfig,
    space: Space,
    *,
    trials: int = TRIALS,
    earlier: Sequence[TrialRow] = (),
    notice: Callable[[str], None] = lambda _: None,
    progress: TrialProgress = lambda *_: None,
) -> Generator[TrialRow | StudyResult]:
    """Trains until there are `trials` rows in all, the `earlier` ones included, and yields each new one; the
    `StudyResult` last.

    What a preset leaves open until its data is known is settled once, for all trials, with a `notice`. `progress`
    gets a trial's number and values when it begins, and each of its evaluations.
    """
    optuna = _optuna()
    began, key, rows = time.monotonic(), search_key(loaded, space), list(earlier)
    if any(row.search != key for row in rows):
        raise UsageError(
            "the trials that are there are of another space or another config",
            "name another file with --study, or search as they did",
        )
    study = optuna.create_study()
    distributions = {one.path: _distribution(optuna, one) for one in space.dimensions}
    for row in rows:
        study.add_trial(_as_trial(optuna, row, distributions))
    base = for_trials(settled_for_runs(loaded, notice))
    if loaded.config.data_kind == "text" and loaded.size is None:  # else the first trial makes what has to be made
        prepare_data(base.config.data, base.config.clean)
    # A run that warms up for longer looks worse at first: the first third says nothing yet.
    warm_up = (length_of(base) or 0) // 3
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=BEFORE_CUTTING, n_warmup_steps=warm_up)
    with scratch_folder("flatout-search-") as scratch:
        while len(rows) < trials:
            number = len(rows)
            seed = random.Random(f"{loaded.config.train.seed} {number}").randrange(2**31)
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(4, trials // 2)))
            trial = study.ask(distributions)
            values = {one.path: one.settled(trial.params[one.path]) for one in space.dimensions}
            progress(number, values, None)
            trial_began, run, evaluations = time.monotonic(), WholeRun(), list[tuple[int, float]]()
            for record in run.train(lambda values=values: with_values(base, values, "trial"), scratch / str(number)):
                progress(number, values, record)
                evaluations.append((record.step, record.loss))
                trial.report(record.loss, record.step)
                if record.reason != "end" and trial.should_prune():
                    run.status, run.reason = "pruned", f"worse than the median at step {record.step}"
                    break
            best = min((row.loss for row in rows if row.status == "done" and row.loss is not None), default=math.inf)
            row = TrialRow(
                number=number,
                status=run.status,
                reason=run.reason,
                values=values,
                loss=run.loss,
                step=run.step,
                evaluations=tuple(evaluations),
                seconds=time.monotonic() - trial_began,
                best=run.status == "done" and (run.loss or math.inf) < best,
                search=key,
            )
            state, value = _outcome(optuna, row)
            study.tell(trial, value, state)
            rows.append(row)
            yield row
    yield _result(loaded, space, rows, time.monotonic() - began)


def _outcome(optuna: Any, row: TrialRow) -> tuple[Any, float | None]:
    """A trial's state for Optuna, and its value: a failed one counts as the worst."""
    if row.status == "pruned":
        return optuna.trial.TrialState.PRUNED, None
    return optuna.trial.TrialState.COMPLETE, WORST if row.status != "done" or row.loss is None else row.loss


def _as_trial(optuna: Any, row: TrialRow, distributions: dict[str, Any]) -> Any:
    state, value = _outcome(optuna, row)
    evaluations = dict(row.evaluations)
    known = {"params": row.values, "distributions": distributions, "intermediate_values": evaluations}
    return optuna.trial.create_trial(state=state, value=value, **known)


def _distribution(optuna: Any, one: Dimension) -> Any:
    kinds = optuna.distributions
    if one.form == "choices":
        return kinds.CategoricalDistribution(list(one.values))
    low, high = one.values
    return (kinds.IntDistribution if one.whole else kinds.FloatDistribution)(low, high, log=one.form == "log")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise DataError(
            "a search needs the package optuna, which is not installed", "pip install 'flatout[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def search_key(loaded: LoadedConfig, space: Space) -> str:
    """A hash of what all trials of a search have in common: the space, and what of the config is learned from."""
    searched = {one.path for one in space.dimensions}
    facts = {
        f"{section}.{name}": value
        for section, fields in loaded.config.model_dump().items()
        for name, value in fields.items()
        if section not in ("output", "checkpoint", "speed") and f"{section}.{name}" not in searched
    }
    text = json.dumps([space.spelling, facts], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def trial_row_from_json(line: str) -> TrialRow:
    """The row that a search wrote; a line of anything else is a ValueError."""
    try:
        body = json.loads(line)
        if body.pop("type") != "trial":
            raise ValueError("a record of another kind")
        evaluations = tuple((int(step), float(loss)) for step, loss in body["evaluations"])
        return TrialRow(**{**body, "evaluations": evaluations})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


# --- the result -------------------------------------------------------------------------------------------------------


def _result(loaded: LoadedConfig, space: Space, rows: list[TrialRow], seconds: float) -> StudyResult:
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
        words=words_of(best.values),
        fragment=config_text(loaded, best.values, first, [f"{one.path}: {one.text}" for one in space.dimensions]),
        config=loaded.config.output.name,
        device=device,
        seconds=seconds,
        flatout=flatout.__version__,
        torch=torch.__version__,
    )


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
    outcome = f", {status}: {row.reason}" if status else ", best so far" if row.best else ""
    return f"trial {row.number}: {values}{loss} after {human_seconds(row.seconds)}{outcome}"


def sheet_of(result: StudyResult) -> Sheet:
    """The trials, the best first, and in a sentence what was found."""
    ordered = sorted(result.rows, key=lambda row: (row.status != "done", row.status, row.loss or math.inf))
    rows = [_row(row, result) for row in ordered[:_SHOWN]]
    blocks: list[Block] = [Table(rows=rows, names="trial", left=(" ",), marks=True, numbers=True)]
    if len(ordered) > _SHOWN:
        blocks.append(Sentence(f"and {len(ordered) - _SHOWN} more"))
    counts = {status: sum(row.status == status for row in result.rows) for status in _STATUS}
    ended = ", ".join(f"{count} {_STATUS[status] or 'to the end'}" for status, count in counts.items() if count)
    blocks.append(
        Sentence(
            f"best of {many(len(result.rows), 'trial')}: number {result.best.number}, validation loss "
            f"{result.best.loss:.4f}; {ended}; on {result.device}"
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

    A field's panel shows whether its best value lies in the middle of a valley or at the edge of its range. Trials that
    were cut short are grey, at the loss they had then; those that failed are crosses at the top. A loss far above the
    others does not flatten the rest.
    """
    limits = _limits([row.loss for row in result.rows if row.status == "done" and row.loss is not None])
    best, leading = math.inf, []
    for row in result.rows:
        best = min(best, row.loss or math.inf) if row.status == "done" else best
        leading += [(row.number, best)] if math.isfinite(best) else []
    history = _points(result, [row.number for row in result.rows], limits)
    history += [Points(points=leading, look="steps", colour="red", name="best so far")] if leading else []
    charts = [ChartPanel(title="", curves=history, x="trial", y="validation loss", limits=limits, wide=True)]
    for path, form in result.forms.items():
        values = [row.values[path] for row in result.rows]
        ticks = sorted({_value(value) for value in values}) if form == "choices" else []
        places = [ticks.index(_value(value)) if ticks else float(value) for value in values]
        curves = _points(result, places, limits)
        charts.append(ChartPanel(title=path, curves=curves, limits=limits, log=form == "log", ticks=ticks))
    tried, loss = many(len(result.rows), "trial"), result.best.loss
    lines = [f"{tried}; the best, number {result.best.number}, has validation loss {loss:.4f}; on {result.device}"]
    return Picture(title=f"Search of {result.config}", lines=lines, charts=charts)


def _points(result: StudyResult, places: Sequence[float], limits: tuple[float, float]) -> list[Points]:
    """The trials at these places, in order of x within each kind."""
    kinds: dict[str, list[tuple[float, float]]] = {"pruned": [], "done": [], "failed": []}
    for place, row in zip(places, result.rows, strict=True):
        kind = row.status if row.status in kinds else "failed"
        failed = kind == "failed" or row.loss is None
        kinds[kind].append((place, limits[1] if failed or row.loss is None else row.loss))
    looks = {
        "pruned": Points(points=kinds["pruned"], look="dots", colour="faint", name="cut short"),
        "done": Points(points=kinds["done"], look="dots", name="finished", best=True),
        "failed": Points(points=kinds["failed"], look="crosses", colour="red", name="failed"),
    }
    return [dataclasses.replace(look, points=sorted(look.points)) for look in looks.values() if look.points]


def _limits(losses: Sequence[float]) -> tuple[float, float]:
    """From a little below the best to a little above most of these: what lies far out is drawn at the top."""
    low = min(losses, default=0.0)
    quarter = statistics.quantiles(losses, n=4)[2] if len(losses) > 2 else max(losses, default=1.0)
    high = min(max(losses, default=1.0), low + 3 * max(quarter - low, 1e-3))
    room = max(high - low, 1e-3)
    return low - 0.08 * room, high + 0.12 * room


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else format_value(value)
