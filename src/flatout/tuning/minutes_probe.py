"""How fast this machine trains a size: real steps of two lengths, on the run's own data."""

import dataclasses
import statistics
import time
from typing import Any

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import micro_batch_of
from flatout.config.sizes import LADDER, Known, Shape
from flatout.config.source import Source
from flatout.data.pack import Progress
from flatout.device import Device
from flatout.engine.run import Run
from flatout.errors import ResourceError, many
from flatout.records import PrepareProgress
from flatout.resolve.opening import DataSource
from flatout.resolve.sizing import (
    Decision,
    applied,
    decide,
    fits,
    fitted,
    fitted_to,
    is_small,
    on_device,
    shape_named,
    written,
)
from flatout.tuning.measure import Steps, borrowed_run, with_sequences
from flatout.tuning.minutes import Budget, Prospect, SizeSpeed, choose
from flatout.world import World

STEP_TOKENS = {"cuda": 32_768}  # of the shorter steps that are timed
STEP_TOKENS_ELSEWHERE = 1024
LONGER = 3  # times as many in the longer ones
TIMED_SECONDS, FEWEST, MOST = 0.8, 3, 40  # of one length of steps
FIRST = {"cuda": Shape(8, 512)}  # what is measured first
FIRST_ELSEWHERE = Shape(3, 96)
ROWS = 5  # that are told
EVALUATIONS, MANY_EPOCHS = 10, 5.0  # of a long run, and of one that reads its text more often than that
LONG = 10.0  # minutes: such a run is saved after so many of them, too
MOST_LOOKED = 1_048_576  # tokens of an evaluation


def in_minutes(source: DataSource, world: World, *, uncounted: Known | None = None) -> DataSource:
    """What is asked for, with the steps and the size that fit into a length that is told in minutes.

    The first of several processes measures for all. Settings that leave nothing open stay as they are. `uncounted` is
    what is known where the data of `source` only stands in for the run's.
    """
    asked, device = source.asked, source.device
    train = asked.config.train
    if train.minutes is None or train.steps is not None or asked.config.fine_tunes:
        return source
    asked = fitted(asked)
    told = Decision().as_dict()
    with world.fail_together(), world.rank0_first():  # the first one prepares the data, and the others find it
        known = dataclasses.replace(uncounted or source.known(), ranks=world.size)
    with world.fail_together():
        if world.first and source.arrays is None:
            told = plan(asked, known, device, source.progress).as_dict()
        elif world.first and asked.size is not None:  # arrays that come from Python may be given only once
            told = decide(asked, shape_named(asked.size), known, device).as_dict()
    told = world.broadcast(told)
    with world.fail_together():
        chosen = applied(asked, told)
        return source.with_settings(chosen if asked.size is None else on_device(chosen, device))


def plan(loaded: LoadedConfig, known: Known, device: Device, progress: Progress | None = None) -> Decision:
    """Chooses size, batch and steps for `train.minutes` of a preset with sizes; those of any other config are kept."""
    minutes = loaded.config.train.minutes
    assert minutes is not None, "only a length in minutes is planned"
    config, own = loaded.config, written(loaded)
    budget = Budget(
        seconds=60 * minutes,
        vocab=known.vocab,
        unique=known.unique,
        batch=config.train.batch_tokens if loaded.size is None else own.get("train.batch_tokens"),
        context=config.model.context if loaded.size is None else own.get("model.context"),
        ranks=known.ranks,
        tables=config.model.bigram_rows > 0 and ("model.bigram_rows" in own or not is_small(device)),
    )
    shapes, first = shapes_for(loaded, known, device)

    def measure(shape: Shape) -> SizeSpeed | None:
        if progress is not None:
            progress(_measuring(f"measuring how fast size {shape.name} trains here"))
        found = measured_speed(loaded, shape, dataclasses.replace(known, ranks=1), device)
        return None if found is None else dataclasses.replace(found, token=found.token / known.ranks)

    prospects = choose(budget, shapes, first, measure, time.monotonic)
    if not prospects:
        raise ResourceError(
            f"a model of {first.layers} blocks and width {first.width} does not fit {device.name}",
            "name a smaller one with --size, such as --size 4x128",
        )
    best = prospects[0]
    return decision_for(loaded, best, prospects, known, device)


def _measuring(notice: str) -> PrepareProgress:
    return PrepareProgress("measuring", 0, 0, 0, 0, 0, 0, 0, notice)


def shapes_for(loaded: LoadedConfig, known: Known, device: Device) -> tuple[list[Shape], Shape]:
    """The shapes to choose from, and the one to measure first."""
    model, size = loaded.config.model, loaded.size
    fixed = size is None or size.name != "auto" or {"model.layers", "model.width"} & written(loaded).keys()
    if fixed:
        only = Shape(model.layers, model.width)
        return [only], only
    shapes = list(LADDER)
    if device.kind == "cuda" and device.memory_bytes is not None:
        card = hardware_for(device.memory_bytes)
        shapes = [shape for shape in LADDER if fits(trial_of(loaded, shape, known, device), card)]
    first = FIRST.get(device.kind, FIRST_ELSEWHERE)
    return shapes, first if first in shapes else shapes[-1] if shapes else LADDER[0]


def decision_for(
    loaded: LoadedConfig, best: Prospect, prospects: list[Prospect], known: Known, device: Device
) -> Decision:
    """The settings of a choice, and what is told of it."""
    where = many(loaded.config.train.minutes or 0.0, "minute")
    told = dataclasses.replace(known, tokens=best.tokens, batch=best.batch)
    sized = Decision() if loaded.size is None else decide(loaded, best.shape, told, device)
    values = {**sized.values, "train.steps": (best.steps, where)}
    if loaded.size is not None:
        context = sized.values.get("model.context", (loaded.config.model.context, ""))[0]
        quiet = _evaluations(loaded.config.train.minutes or 0.0, best, known, context)
        values |= {path: (value, where) for path, value in quiet.items() if not loaded.sources[path].by_user}
    return Decision(values, (*_lines(loaded, best, prospects, known, device), *sized.notices))


def _evaluations(minutes: float, best: Prospect, known: Known, context: int) -> dict[str, Any]:
    """When a run is evaluated and saved: as seldom as can be, since that takes time of the run.

    Text that is read many times is memorised at some point: evaluations on the way find the best weights.
    """
    often = minutes >= LONG or (known.unique is not None and best.tokens > MANY_EPOCHS * known.unique)
    look = max(context, int(0.09 * best.tokens) // context * context)
    return {
        "eval.every": max(1, best.steps // EVALUATIONS) if often else 0,
        "eval.tokens": min(MOST_LOOKED, look),
        "eval.sample_tokens": 0,
        "checkpoint.every": f"{LONG:g} minutes" if minutes >= LONG else 0,
    }


def _lines(loaded: LoadedConfig, best: Prospect, prospects: list[Prospect], known: Known, device: Device) -> list[str]:
    epochs = "" if known.unique is None else f", {best.tokens / known.unique:.2f} epochs"
    first = (
        f"{many(loaded.config.train.minutes or 0.0, 'minute')} on {device.name}: size {best.shape.name}, about "
        f"{many(best.steps, 'step')} of {best.batch:,} tokens, {best.tokens:,} in all{epochs}"
    )
    if len(prospects) == 1:
        return [first]
    near = sorted(prospects[:ROWS] + [row for row in prospects[ROWS:] if row.measured], key=lambda row: row.tokens)
    rows = [
        f"size {row.shape.name}: {row.tokens_per_second:,.0f} tokens/s {'measured' if row.measured else 'reckoned'}, "
        f"{row.tokens:,} tokens, loss about {row.loss:.2f}"
        for row in near
    ]
    return [first, *rows]


def measured_speed(loaded: LoadedConfig, shape: Shape, known: Known, device: Device) -> SizeSpeed | None:
    """Times steps of two lengths: their difference is the tokens', the rest the update's. None: it does not fit."""
    trial = trial_of(loaded, shape, known, device)
    if device.kind == "cuda" and device.memory_bytes is not None:
        trial = fitted_to(trial, hardware_for(device.memory_bytes))
    few, context = micro_batch_of(trial.config)[0], trial.config.model.context
    try:
        with borrowed_run(trial) as run:
            built, short = _step_seconds(run, few)
            _, long = _step_seconds(run, LONGER * few)
    except ResourceError:
        return None
    token = max((long - short) / ((LONGER - 1) * few * context), 0.3 * long / (LONGER * few * context))
    return SizeSpeed(token, max(0.0, short - token * few * context), built)


def trial_of(loaded: LoadedConfig, shape: Shape, known: Known, device: Device) -> LoadedConfig:
    """The config of a size, with steps to be timed: so many micro-batches as the longer ones have."""
    context = (
        loaded.config.model.context if loaded.size is None else written(loaded).get("model.context", shape.context)
    )
    sequences = max(1, STEP_TOKENS.get(device.kind, STEP_TOKENS_ELSEWHERE) // context)
    values = {"train.batch_tokens": LONGER * sequences * context, "train.minutes": None, "train.steps": 1000}
    values |= {"speed.accumulation": None, "speed.micro_batch": sequences}
    if loaded.size is not None:
        values = {path: value for path, (value, _) in decide(loaded, shape, known, device).values.items()} | values
        values |= {"train.tokens": None, "train.epochs": None}
    return dataclasses.replace(with_values(loaded, values, Source("preset", "minutes")), size=None, notices=())


def _step_seconds(run: Run, sequences: int) -> tuple[float, float]:
    """What the first step took beyond the second, and the median of those that follow."""
    with Steps(with_sequences(run, sequences)) as steps:
        first, once = (steps.take(1)[0].seconds for _ in range(2))
        count = max(FEWEST, min(MOST, int(TIMED_SECONDS / max(once, 1e-6))))
        return max(0.0, first - once), statistics.median(report.seconds for report in steps.take(count))
