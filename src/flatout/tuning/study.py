"""Hyperparameter search: short real runs, Optuna proposes, bad ones are cut short, nothing is lost.

Idea: a trial is the config's own run with other values, through the same loop as `flatout train`, and what counts is
the validation loss at its end. Optuna (the extra `search`) draws the next values from what the trials before have shown
(TPE) and says at every evaluation whether a trial is worse than the median of the others there.

Contract:
- With a study file every finished trial is on disk before the next begins. A killed search goes on where it was:
  `trials` counts finished ones, a trial that was under way is taken again. Another space or another config is refused.
- A trial that diverges, runs out of memory or is no valid config is told and counts as the worst there is.
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
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.data.prepare import prepare_data
from flatout.device import detect_device
from flatout.engine.loop import train_loop
from flatout.errors import (
    ConfigError,
    DataError,
    DeviceMemoryError,
    DivergedError,
    HardwareError,
    ResourceError,
    UsageError,
    many,
)
from flatout.files import disk_errors, open_to_append
from flatout.records import EvalRecord
from flatout.tuning.changes import Dimension, Space, config_text, with_values, words_of
from flatout.tuning.measure import borrowed_run, machine_of
from flatout.tuning.practice_data import scratch_folder, settled_for_runs

TRIALS = 20
EVALUATIONS = 8  # of a trial, unless the config says more; after each it may be cut short
BEFORE_CUTTING = 4  # finished trials
ENOUGH = 10  # trials that came to their end, before anything is said of what matters
WORST = 1e9  # what a failed trial counts as; only the order of losses matters to the proposals
NAME = "flatout"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow:
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
class StudyResult:
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

    What a preset leaves open until its data is known is settled once, for all trials, and `notice` is told. `progress`
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
        warm_up = (_steps(base) or 0) // 3
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
    began, states, last = time.monotonic(), _optuna().trial.TrialState, None
    status, reason = "interrupted", "stopped from outside"
    try:
        with borrowed_run(with_values(base, values, "trial")) as run, contextlib.closing(
            train_loop(run, folder, resumed=None, stop=lambda: False, saves=False)
        ) as records:  # fmt: skip
            folder.mkdir(parents=True)
            for record in records:
                if not isinstance(record, EvalRecord):
                    continue
                last = record
                progress(trial.number, values, record)
                if not math.isfinite(record.loss):
                    raise DivergedError(f"the validation loss was {record.loss} at step {record.step}", "")
                trial.report(record.loss, record.step)
                if record.reason == "end":
                    status, reason = "done", ""
                    break
                if trial.should_prune():
                    status, reason = "pruned", f"worse than the median at step {record.step}"
                    break
    except (DivergedError, ResourceError, ConfigError) as error:
        status, reason = status_of(error)
    finally:
        # One entry for all of it: each is a transaction that waits for the disk.
        loss = None if last is None or not math.isfinite(last.loss) else last.loss
        facts = {"status": status, "reason": reason, "values": values, "loss": loss}
        facts |= {"step": 0 if last is None else last.step, "seconds": time.monotonic() - began}
        trial.set_user_attr("facts", facts)
        if status == "interrupted":
            kept.tell(trial, state=states.FAIL)
        elif status == "pruned":
            kept.tell(trial, state=states.PRUNED)
        else:
            kept.tell(trial, WORST if status != "done" or last is None else last.loss)


def status_of(error: DivergedError | ResourceError | ConfigError | HardwareError) -> tuple[str, str]:
    """What a short run that failed counts as, and why; an error that is no property of its values is raised again."""
    if isinstance(error, DivergedError):
        return "diverged", error.message
    if isinstance(error, ConfigError | HardwareError):
        return "invalid", error.message
    if not isinstance(error, DeviceMemoryError):
        raise error  # a full disk
    return "out_of_memory", error.message


def for_trials(loaded: LoadedConfig, evaluations: int = EVALUATIONS) -> LoadedConfig:
    """The config as a trial trains it: nothing saved, no samples, some evaluations unless the user wrote how many."""
    config, steps = loaded.config, _steps(loaded)
    every = config.eval.every
    if not loaded.sources["eval.every"].by_user and steps is not None:
        every = max(1, steps // evaluations)
    words = {"eval.every": every, "eval.sample_tokens": 0, "eval.patience": 0}
    return with_values(loaded, {**words, "checkpoint.every": 0})


def _steps(loaded: LoadedConfig) -> int | None:
    """The length of a trial, where the config says it without the data."""
    train = loaded.config.train
    return train.steps or (None if train.tokens is None else math.ceil(train.tokens / train.mean_batch))


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
