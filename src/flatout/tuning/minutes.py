"""Which size, batch and length have the lowest loss when the time is up: measured speeds and a scaling law.

Idea: one size is measured, the law names the best one by what speed goes like with size, that one is measured, and so
on until the best one has been measured or the time for measuring is spent. So at most three sizes are tried. Seconds in
which kernels are built for the first size do not count: on a new machine they are many, and say nothing of the next.

The law: loss = E + A / N^a + B / D^b + C / S, with N dense parameters, D tokens of which repeated ones count less, and
S steps. Only the choice has to be right, not the loss: near the best size the curve is flat.

Where the constants come from:
- Words (a vocabulary like GPT-2's): fitted to the runs of `record` on enwik8 that `tests/unit/test_minutes.py` lists,
  of 16M to 353M parameters, 8M to 130M tokens, 0.3 to 5 epochs, ending between 2.65 and 3.65; off by 0.018 (root of
  the mean square) and by 0.049 at most. Steps smaller than the rule's are not in it: with 24,576 tokens, at lower
  rates, losses are up to 0.09 higher. Several powers fit about as well; these make 7 tokens for each parameter the best
  at 51M and 11 at 353M, near what longer runs have (12 in nanochat, `scripts/base_train.py`, 92d63d4).
- More than 15 parameters for each new token count for nothing: after 8M tokens 124M parameters were at 3.363, 353M at
  3.404.
- Characters: fitted to 8 runs of `record` on Shakespeare with tables of bigrams, 0.03M, 0.10M and 0.34M parameters
  after 0.7M to 3.3M characters, ending between 1.58 and 1.66 (`lab/minutes.jsonl` and `small_tables.jsonl`); off
  by 0.007. Tables help small models most: without them 0.34M parameters were as good as 0.10M.
- Subwords (a small vocabulary learned from the text): the law of characters, times the 2.2 that a loss is larger by,
  with a floor that fits 0.16M parameters after two and three epochs of Shakespeare (3.357, 3.336).
- Repeated tokens: the form of Muennighoff et al. 2023, "Scaling data-constrained language models", with R* = 2 instead
  of their 15.4: by our runs a second epoch is worth 0.8 of a first, and ten of them 3. With it, ten epochs of 12.7M
  tokens differ by as much between 16M and 51M parameters as measured (3.77 and 3.57). Small vocabularies have runs of
  up to 2.5 epochs only.
- Tables of values and bigrams are worth more where text is read once: 0.06, by the same fit. Bigrams alone were worth
  0.02 there.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import micro_batch_of
from flatout.config.sizes import LADDER, ONCE, SMALL_VOCAB, Known, Shape, batch_of
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
from flatout.world import World

_REPEATS = 2.0  # epochs beyond the first after which repeated tokens teach hardly anything
_MOST_FOR_EACH = 15.0  # parameters for each new token that lower the loss
_CHARACTERS = 300  # the largest vocabulary of characters, in ids


@dataclass(frozen=True)
class Law:
    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    steps: float
    tables: float = 0.0  # what they take off the loss where text is read once, beyond what they do elsewhere

    def loss(self, parameters: float, tokens: float, steps: float) -> float:
        """The loss after `tokens` fresh tokens in `steps` steps."""
        return (
            self.floor
            + self.size / parameters**self.size_power
            + self.data / max(tokens, 1.0) ** self.data_power
            + self.steps / max(steps, 1.0)
        )


WORDS = Law(floor=1.81, size=1810.0, size_power=0.5, data=819.0, data_power=0.4, steps=20.0, tables=0.06)
CHARACTERS = Law(floor=1.282, size=35.0, size_power=0.5, data=231.0, data_power=0.5, steps=12.6)
SUBWORDS = Law(floor=2.58, size=77.0, size_power=0.5, data=508.0, data_power=0.5, steps=27.7)


def law_for(vocab: int) -> Law:
    return CHARACTERS if vocab <= _CHARACTERS else SUBWORDS if vocab <= SMALL_VOCAB else WORDS


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Fresh tokens that teach as much as `tokens` of a text that has `unique` ones."""
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    return unique * (1 + _REPEATS * (1 - math.exp(-repeats / _REPEATS)))


def effective_parameters(parameters: float, tokens: float, unique: float | None) -> float:
    """As many as so much text can teach."""
    return min(parameters, _MOST_FOR_EACH * (tokens if unique is None else min(tokens, unique)))


MOST_MEASURED = 3
BATCHES = (1, 2, 4)  # times that of the rule
SECONDS = 20.0  # for measuring
_SLOWER = 0.9  # power of FLOPs that a token's time goes with, where one size is all that was measured


@dataclass(frozen=True)
class SizeSpeed:
    """Seconds of a token, and of what a step takes once however many tokens it has: mostly the update."""

    token: float
    update: float
    built: float = 0.0  # seconds in which kernels were built before the first step

    def tokens_in(self, seconds: float, batch: int) -> float:
        return seconds * batch / (batch * self.token + self.update)


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a size would reach."""

    shape: Shape
    measured: bool
    tokens_per_second: float
    tokens: int
    batch: int
    loss: float

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time that there is, and the data; `batch` is one that the user wrote.

    `tables` says whether a model has tables of values and bigrams where the text is read once.
    """

    seconds: float
    vocab: int
    unique: int | None = None
    batch: int | None = None
    context: int | None = None
    ranks: int = 1
    tables: bool = False

    def prospect(self, shape: Shape, speed: SizeSpeed, *, measured: bool) -> Prospect:
        """What a size would reach at that speed, with the best of the batch of the rule and multiples of it.

        Where a step costs much however few tokens it has, as on a CPU, a larger batch reads more text in the same time.
        """
        context = self.context or shape.context
        rule = self.batch or context
        for _ in range(8):  # tokens and batch follow from each other, and settle at once
            rule = self.batch or batch_of(int(speed.tokens_in(self.seconds, rule)), context, self.ranks)
        batches = [rule] if self.batch else [times * rule for times in BATCHES]
        rows = [self._with(shape, speed, batch, measured) for batch in batches]
        return min(rows, key=lambda row: row.loss)

    def _with(self, shape: Shape, speed: SizeSpeed, batch: int, measured: bool) -> Prospect:
        tokens = speed.tokens_in(self.seconds, batch)
        law, fresh = law_for(self.vocab), effective_tokens(tokens, self.unique)
        parameters = effective_parameters(shape.dense(self.vocab), tokens, self.unique)
        once = self.unique is None or tokens <= ONCE * self.unique
        return Prospect(
            shape=shape,
            measured=measured,
            tokens_per_second=tokens / self.seconds,
            tokens=max(batch, int(tokens)),
            batch=batch,
            loss=law.loss(parameters, fresh, tokens / batch) - (law.tables if self.tables and once else 0.0),
        )


def choose(
    budget: Budget,
    shapes: Sequence[Shape],
    first: Shape,
    measure: Callable[[Shape], SizeSpeed | None],
    clock: Callable[[], float],
) -> list[Prospect]:
    """All shapes that fit, the best one first. `measure` says how fast a shape is; None where it does not fit."""
    found: dict[Shape, SizeSpeed | None] = {}
    spent, following = 0.0, first
    while True:
        before = clock()
        speed = found[following] = measure(following)
        took = clock() - before - (speed.built if speed is not None and following == first else 0.0)
        spent += took
        prospects = _prospects(budget, shapes, found)
        if not prospects or len(found) == MOST_MEASURED:
            break
        best = prospects[0].shape
        if best in found or spent + 1.5 * took > SECONDS:
            break
        following = best
    # Where something did not fit, what was not tried may not fit either.
    return [row for row in prospects if row.measured] if None in found.values() else prospects


def _prospects(budget: Budget, shapes: Sequence[Shape], found: Mapping[Shape, SizeSpeed | None]) -> list[Prospect]:
    known = {shape: speed for shape, speed in found.items() if speed is not None}
    too_large = min((flops(shape, budget) for shape, speed in found.items() if speed is None), default=math.inf)
    rows = [
        budget.prospect(shape, speed, measured=shape in known)
        for shape in dict.fromkeys((*shapes, *known))
        if flops(shape, budget) < too_large and (speed := _speed_of(shape, known, budget)) is not None
    ]
    return sorted(rows, key=lambda row: row.loss)


def flops(shape: Shape, budget: Budget) -> float:
    """FLOPs of a training token."""
    attention = 6 * shape.layers * shape.width * (budget.context or shape.context)
    return 6.0 * shape.dense(budget.vocab) + attention


def _speed_of(shape: Shape, known: Mapping[Shape, SizeSpeed], budget: Budget) -> SizeSpeed | None:
    """A measured speed, or one that follows from the nearest measured sizes by their FLOPs."""
    if shape in known or not known:
        return known.get(shape)
    wanted = math.log(flops(shape, budget))
    near = sorted(known, key=lambda other: abs(math.log(flops(other, budget)) - wanted))[:2]
    base, power = known[near[0]], _SLOWER
    if len(near) == 2:
        apart = math.log(flops(near[1], budget)) - math.log(flops(near[0], budget))
        if abs(apart) > 0.1:
            power = math.log(known[near[1]].token / base.token) / apart
            power = min(1.2, max(0.3, power))
    ratio = math.exp(wanted - math.log(flops(near[0], budget)))
    matrices = shape.layers * shape.width**2 / (near[0].layers * near[0].width ** 2)
    return SizeSpeed(base.token * ratio**power, base.update * max(matrices, 0.1))


STEP_TOKENS = {"cuda": 32_768}  # of the shorter steps that are timed
STEP_TOKENS_ELSEWHERE = 1024
LONGER = 3  # times as many in the longer ones
TIMED_SECONDS, FEWEST, MOST = 0.8, 3, 40  # of one length of steps
FIRST = {"cuda": Shape(8, 512)}  # what is measured first
FIRST_ELSEWHERE = Shape(3, 96)
ROWS = 5  # of the notice
EVALUATIONS, MANY_EPOCHS = 10, 5.0  # of a long run, and of one that reads its text more often than that
LONG = 10.0  # minutes: such a run is saved every 10 minutes, too
MOST_LOOKED = 1_048_576  # tokens of an evaluation


def in_minutes(source: DataSource, world: World, *, uncounted: Known | None = None) -> DataSource:
    """What is asked for, with the steps and the size that fit into a length in minutes.

    The first of several processes measures for all. Settings that leave nothing open stay as they are. `uncounted` is
    what is known where the data of `source` only stands in for the run's.
    """
    asked, device = source.asked, source.device
    train = asked.config.train
    if train.minutes is None or train.steps is not None or asked.config.fine_tunes:
        return source
    asked = fitted(asked)
    decision = Decision().as_dict()
    with world.fail_together(), world.rank0_first():  # the first one prepares the data, and the others find it
        known = dataclasses.replace(uncounted or source.known(), ranks=world.size)
    with world.fail_together():
        if world.first and source.arrays is None:
            decision = plan(asked, known, device, source.progress).as_dict()
        elif world.first and asked.size is not None:  # arrays that come from Python may be read only once
            decision = decide(asked, shape_named(asked.size), known, device).as_dict()
    decision = world.broadcast(decision)
    with world.fail_together():
        chosen = applied(asked, decision)
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
    """The settings of a choice, and its notices."""
    where = many(loaded.config.train.minutes or 0.0, "minute")
    planned = dataclasses.replace(known, tokens=best.tokens, batch=best.batch)
    sized = Decision() if loaded.size is None else decide(loaded, best.shape, planned, device)
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
        "checkpoint.every": f"{LONG:g} minutes" if often else 0,  # which also keeps the best one
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
        f"size {row.shape.name}: {row.tokens_per_second:,.0f} tokens/s "
        f"{'measured' if row.measured else '(estimated)'}, {row.tokens:,} tokens, loss about {row.loss:.2f}"
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
    """The config of a size, with steps to be timed: as many micro-batches as the longer ones have."""
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
