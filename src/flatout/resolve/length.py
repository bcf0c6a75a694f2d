"""How long a run is, and what each of its steps reads: the table of the config, or what a checkpoint says was read.

A length may be given in steps, tokens, epochs or minutes; warm-up follows from it.
"""

import dataclasses
import itertools
import math

from flatout.checkpoints.checkpoint import Checkpoint
from flatout.config.optimizers import FAR_BELOW, SMALL_BASE, usual_rate
from flatout.config.schema import CheckpointConfig, EvalConfig, OptimConfig, RunConfig
from flatout.config.sections import keeps_best
from flatout.data.batch import DataFacts, Schedule, Stage, TrainingData
from flatout.errors import CheckpointError, ConfigError, many
from flatout.model.count import parameter_count
from flatout.optim.rules import Pace

MOST_STEPS = 20_000_000  # the schedule is a table with one entry per step
# Steps of fine-tuning: the base of tutorial 2 answers with broken words after 12 steps on its 19 samples, and rightly
# after 102.
FEW_STEPS, ENOUGH_STEPS = 50, 100
UNPLANNED_STEPS = 1000  # of a run in minutes whose steps are not known yet


def asked_schedule(config: RunConfig, windows: int | None = None) -> Schedule:
    """The table that a config asks for, of one stage or several; `windows` are those of an epoch, where it has one."""
    train, context = config.train, config.model.context
    if not train.staged:
        return Schedule.constant(train.batch_tokens // context, context)
    stages = [Stage(0, batch // length, length, window) for batch, length, window in train.stages(context)]
    if train.steps is not None or train.minutes is not None:
        return Schedule.in_stages(stages, context, steps=train.steps or UNPLANNED_STEPS)
    return Schedule.in_stages(stages, context, windows=_windows_of_run(config, windows))


def _windows_of_run(config: RunConfig, windows: int | None) -> float:
    """How many windows a run reads whose length is given in tokens or epochs."""
    tokens = config.train.tokens
    return (config.train.epochs or 0) * (windows or 0) if tokens is None else -(-tokens // config.model.context)


def schedule_of(data: TrainingData, resumed: Checkpoint | None) -> Schedule:
    """The data's table from a checkpoint's step on. Before it, what the checkpoint says was read."""
    earlier = None if resumed is None else stored_schedule(data, resumed)
    return data.schedule if resumed is None or earlier is None else data.schedule.after(earlier, resumed.step)


def stored_schedule(data: TrainingData, checkpoint: Checkpoint) -> Schedule | None:
    """The table by which the run of a checkpoint read, where that says so and it is not the same for every run."""
    rows = checkpoint.state.get("schedule")
    if rows is None or data.facts.steps_per_epoch is not None:  # samples: every step of an epoch has its own
        return None
    try:
        return dataclasses.replace(data.schedule, stages=tuple(Stage(*row) for row in rows))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's state.json has no usable schedule: {error}", "name another checkpoint"
        ) from error


def steps_of(config: RunConfig, facts: DataFacts, schedule: Schedule | None = None) -> int:
    """The steps of a run that reads by `schedule`: the config's own, unless it was resumed with another batch size."""
    train = config.train
    if train.steps is not None or train.minutes is not None:
        steps = train.steps or UNPLANNED_STEPS
    elif facts.steps_per_epoch is not None:
        steps = math.ceil((train.epochs or 0) * facts.steps_per_epoch)
    else:
        table = schedule or asked_schedule(config, facts.windows)
        steps = table.steps_until(_windows_of_run(config, facts.windows))
    if steps > MOST_STEPS:
        size = "train.batch_tokens" if facts.batch_samples is None else "chat.batch_samples"
        raise ConfigError(f"the run would have {steps:,} steps, more than {MOST_STEPS:,}", f"raise {size}")
    return steps


def too_few_steps(config: RunConfig, facts: DataFacts, steps: int, vocab: int) -> str | None:
    """What to say of a fine-tuning run that is too short for its rows, with a length that would do; else None."""
    if facts.steps_per_epoch is None or not 0 < steps < FEW_STEPS:
        return None
    epochs = math.ceil(ENOUGH_STEPS / facts.steps_per_epoch)
    enough = f"train.steps={ENOUGH_STEPS}"
    if config.train.steps is None:
        enough = f"train.epochs={epochs}, which makes {epochs * facts.steps_per_epoch}"
    size = parameter_count(config.model, vocab)
    usual = usual_rate(config.optim.kind, size, tunes=True, adapters=config.lora.rank > 0)
    field, rate = next(iter(config.optim.rates.items()))
    if usual is not None and size < SMALL_BASE and rate < usual / FAR_BELOW:
        enough += f", and optim.{field}={usual:g} for a base of only {size:,} parameters"
    found = f"{many(steps, 'step')} on {many(facts.epoch_samples or 0, 'sample')}"
    return f"{found} teach a model little: set {enough}"


def pace_of(config: RunConfig, schedule: Schedule, steps: int) -> Pace | None:
    """How far a run has come before each of its steps, where steps differ in size because the config says so."""
    train = config.train
    if not train.batch_stages or config.fine_tunes:
        return None
    sizes = [schedule.at(step).windows for step in range(max(steps, 1))]
    read = list(itertools.accumulate(sizes, initial=0))
    usual = train.batch_tokens / config.model.context
    return Pace(
        places=[len(sizes) * position / read[-1] for position in read],
        factors=[math.sqrt(size / usual) for size in sizes],
    )


def optim_of(config: RunConfig, facts: DataFacts, schedule: Schedule, steps: int) -> OptimConfig:
    """The config's, with its warm-up in steps."""
    per_epoch = facts.steps_per_epoch

    def steps_in(epochs: float) -> int:
        if per_epoch is not None:
            return math.ceil(epochs * per_epoch)
        return schedule.steps_until(epochs * (facts.windows or 0))

    return config.optim.with_warmup_steps(steps, steps_in)


@dataclasses.dataclass(frozen=True)
class Visits:
    """How often a run stops training for something else."""

    evaluations: int
    samples: int
    checkpoints: int


def visits_of(
    evaluating: EvalConfig, saving: CheckpointConfig, steps: int, windows: int | None, sequences: int
) -> Visits:
    """How often a run of this length reaches its intervals; its end counts as well.

    `windows` are those of an epoch, `sequences` those of a step, or samples. Where the best evaluation is kept,
    checkpoints are as many as evaluations at most, since saved steps mostly are evaluated ones.
    """

    def times(every: int, epochs: int) -> int:
        if every:
            return math.ceil(steps / every)
        if epochs and windows:
            return min(steps, math.ceil(steps * sequences / (windows * epochs)))
        return min(steps, 1)

    evaluations, checkpoints = times(evaluating.steps, evaluating.epochs), times(saving.steps, saving.epochs)
    return Visits(
        evaluations=evaluations,
        samples=times(evaluating.sample_every, 0) if evaluating.sample_tokens else 0,
        checkpoints=max(checkpoints, evaluations) if keeps_best(evaluating, saving) else checkpoints,
    )
