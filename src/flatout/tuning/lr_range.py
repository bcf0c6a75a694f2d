"""The learning-rate finder: an exponential range test on real training steps, and what to make of its curve.

Idea: the rate rises by a constant factor with every step of a training run, from far too small to far too large. The
loss first stands still, then falls, then rises again; where it falls says which rates the run can bear. The schedule of
a `TrainStep` is a table of rates, so the test is a run with another table and nothing else is special about it: the
config's own model, optimizer, clipping, precision and data. Where a config has several rates, all of them rise in its
ratios; the curve is over that of the matrices, which is Muon's where the config has Muon.

Contract:
- `range_test` gives the run back bit for bit: weights, moments, counters, loss scale, 8-bit scales, random streams and
  the table of rates are deep copies put back, also after an error. Batches depend on the step's number alone, so the
  order of the data is as it was.
- In fine-tuning every step is taken once before, with a rate of zero: how hard its samples are is not read as a loss
  that falls or rises.
- It stops at a non-finite loss and where the smoothed loss is above four times its best.
- `read_curve` is arithmetic on numbers only. The rule that chooses is calibrated by measurements: see lab/finders.md.
Trap: the curve is of a hundred steps from random weights, so its minimum is a rate that a run bears for a moment, not
one to train with; and a small model bears any rate, so where the minimum lies is chance. How deep it is, is not: the
choice is where most of the fall is over. In fine-tuning it is the other way round: the fall comes late, because
adapters begin at zero, and ends where the model forgets what it knew. The choice is the middle of the floor between.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.config.optimizers import RANGE_STEPS
from flatout.config.sections import MOST_RATE, OptimConfig
from flatout.engine.run import Run
from flatout.engine.state import Progress, capture, restore
from flatout.errors import ConfigError, UsageError
from flatout.ops.gradients import clear_gradients
from flatout.rows import OWN, ChartPanel, Picture, Points, ResultRow, Sentence, Sheet, Table, human_seconds
from flatout.shown import Shown
from flatout.tuning.changes import config_text, words_of
from flatout.tuning.measure import Steps, borrowed_run, machine_of
from flatout.tuning.practice_data import practice_config, scratch_folder

LOW, HIGH, STEPS = 1e-7, 1.0, RANGE_STEPS
DIVERGED = 4.0  # times the best smoothed loss
MEMORY = 0.8  # of the running mean that looks for divergence, per step
MEDIAN = 5  # steps: a loss is read as their median, so that one step that jumps has no effect
WIDTH = 0.2  # decades: standard deviation of the bell that smooths the medians
KNEE = 0.8  # of the whole fall is over there; why so much and no more: lab/finders.md
CHOSEN = "knee"
FLOOR = 0.05  # of the whole fall: losses so near the lowest are the floor of a curve of fine-tuning
RISE = 0.25  # of the whole fall: so far above the best the loss has risen for good, and the rest is not read
LEAST_FALL = 0.02  # of the first loss: a curve that falls by less has nothing to read
MOST_SKIPPED = 40  # steps that fp16 may take to find its loss scale


@dataclasses.dataclass(frozen=True)
class Point:
    """One step: the rate it was taken with, and the loss it saw, which is of the weights before it.

    In fine-tuning less what its samples are harder than others for the base.
    """

    rate: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Suggestion:
    name: str
    rate: float
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveReading:
    """What a curve says. `smoothed` has a value for every finite point, of which the first `read` were looked at."""

    smoothed: tuple[float, ...]
    read: int
    suggestions: tuple[Suggestion, ...]
    chosen: str

    @property
    def rate(self) -> float:
        return next(suggestion.rate for suggestion in self.suggestions if suggestion.name == self.chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LrResult(Shown):
    """One call of the finder. `before` is the rate the config had; `fragment` a config file with the one found.

    `field` is whose rate that is, of the points too; `found` has it and all other rates of the config, in its ratios.
    `notes` say what to think of it.
    """

    config: str
    device: str
    data: str
    low: float
    high: float
    steps: int
    points: tuple[Point, ...]
    reading: CurveReading
    field: str
    rate: float
    found: dict[str, float]
    before: float
    notes: tuple[str, ...]
    ended: str
    words: tuple[str, ...]
    fragment: str
    seconds: float
    flatout: str
    torch: str

    def to_json(self) -> dict[str, Any]:
        body = {"type": "learning_rate", **dataclasses.asdict(self)}
        # JSON has no word for a loss that is not finite; it is written as text, as in metrics.jsonl.
        body["points"] = [
            {"rate": point.rate, "loss": point.loss if math.isfinite(point.loss) else str(point.loss)}
            for point in self.points
        ]
        return body

    def sheet(self) -> Sheet:
        return sheet_of(self)

    def picture(self) -> Picture:
        return picture_of(self)


def find_rate(
    loaded: LoadedConfig,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    progress: Callable[[int, Point], None] = lambda _step, _point: None,
) -> LrResult:
    """The learning rate for a config, from `steps` training steps with rates from `low` to `high`."""
    began, said = time.monotonic(), list[str]()
    with scratch_folder("flatout-lr-") as scratch:
        fitted, described = practice_config(loaded, scratch, said.append, streams=True)
        optim = fitted.config.optim
        field, before = next(iter(optim.rates.items()))
        _check_rates(optim, high, before)
        with borrowed_run(fitted) as run:
            device = machine_of(run.speed.device, run.speed.threads)
            points, ended = range_test(run, low=low, high=high, steps=steps, progress=progress)
    if steps < RANGE_STEPS:
        said.append(
            f"{steps} steps raise the rate faster than the {RANGE_STEPS} that the choice was calibrated with, and what "
            f"they find is often several times too high; --steps {RANGE_STEPS} gives a rate to train with"
        )
    tuning = loaded.config.fine_tunes
    reading = read_curve([point.rate for point in points], [point.loss for point in points], tuning=tuning)
    all_rates = optim.scaled_rates(reading.rate / before)
    found = {path: float(f"{rate:.1e}") for path, rate in all_rates.items()}  # two digits: the test knows no more
    rate = found[f"optim.{field}"]
    return LrResult(
        config=loaded.config.output.name,
        device=device,
        data=described,
        low=low,
        high=high,
        steps=steps,
        points=tuple(points),
        reading=reading,
        field=f"optim.{field}",
        rate=rate,
        found=found,
        before=before,
        notes=tuple(said),
        ended=ended,
        words=words_of(found),
        fragment=config_text(
            loaded,
            found,
            f", learning rate, on {device}: a range test of {steps} steps from {low:g} to {points[-1].rate:.2g}, "
            f"{ended}.",
            [f"{suggestion.name} {suggestion.rate:.2e}" for suggestion in reading.suggestions]
            + [f"chosen: {reading.chosen}; the config had {before:g}"]
            + ([f"these are rates of optim.{field}; all others rose with it"] if len(found) > 1 else []),
        ),
        seconds=time.monotonic() - began,
        flatout=flatout.__version__,
        torch=torch.__version__,
    )


def _check_rates(optim: OptimConfig, high: float, first: float) -> None:
    """Refuses a last rate that takes another rate, in its ratio to the first one, beyond what a config may hold."""
    field, largest = max(optim.rates.items(), key=lambda item: item[1])
    if high * largest / first > MOST_RATE:
        raise UsageError(
            f"--to {high:g} takes optim.{field} to {high * largest / first:g}, and rates above {MOST_RATE:g} are "
            "never taken",
            f"set --to {10.0 ** math.floor(math.log10(MOST_RATE * first / largest)):g}",
        )


# --- the test ---------------------------------------------------------------------------------------------------------


def range_test(
    run: Run,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    progress: Callable[[int, Point], None] = lambda _step, _point: None,
) -> tuple[list[Point], str]:
    """The points of a range test, and why it ended. The run is afterwards what it was before, bit for bit.

    Rates are those of the matrices; all others rise with them.
    """
    rates = [low * (high / low) ** (number / max(1, steps - 1)) for number in range(steps)]
    points: list[Point] = []
    best, mean, skipped = math.inf, 0.0, 0
    longer = run.replanned(steps=max(run.steps, steps + MOST_SKIPPED))
    excess = _excess(longer, steps + (MOST_SKIPPED if run.step.loss_scale is not None else 0))
    with untouched(run):
        run.step.optimizer.follow(rates)
        run.step.updates.zero_()
        with Steps(longer) as stepping:
            while len(points) < steps:
                report = stepping.take(1)[0]
                overflow = run.step.loss_scale is not None and not report.applied and math.isfinite(report.loss)
                if overflow and skipped < MOST_SKIPPED:  # the rate stands still with the count of updates
                    skipped += 1
                    continue
                point = Point(rates[len(points)], report.loss - excess.get(report.step, 0.0))
                points.append(point)
                progress(len(points), point)
                if not report.applied:
                    return points, f"the loss was not finite at {point.rate:.1e}"
                mean = MEMORY * mean + (1 - MEMORY) * point.loss
                smoothed = mean / (1 - MEMORY ** len(points))
                best = min(best, smoothed)
                if smoothed > DIVERGED * best:
                    return points, f"the loss was {DIVERGED:g} times its best at {point.rate:.1e}"
    return points, "the last rate was reached"


def _excess(run: Run, steps: int) -> dict[int, float]:
    """By how much the loss of each step is above their mean before anything is learned; for fine-tuning alone.

    A few samples differ from the next few by more than a model that has learned before gains in the whole test.
    """
    if not run.plan.fine_tunes:
        return {}
    with untouched(run):
        run.step.optimizer.follow([0.0])
        with Steps(run) as stepping:
            losses = {report.step: report.loss for report in stepping.take(steps)}
    mean = statistics.fmean(losses.values())
    return {step: loss - mean for step, loss in losses.items()}


@contextlib.contextmanager
def untouched(run: Run) -> Iterator[None]:
    """Training inside the block leaves the run as it was: a deep copy of everything that moves is put back."""
    step = run.step
    # `capture` hands out the live tensors, which the block would write into. DO NOT leave out the copy.
    kept = _copied(capture(run, Progress()))
    schedules, was_training = step.optimizer.schedules_KU, run.model.training
    had_gradients = any(parameter.grad is not None for parameter in run.model.parameters())
    try:
        yield
    finally:
        step.optimizer.forget()  # moments that were not there before must not stay
        restore(run, kept)
        step.optimizer.schedules_KU = schedules
        # A recorded graph adds into the gradients it knows: they are emptied where they lie.
        clear_gradients(step.optimizer.parameters, drop=not (had_gradients or step.keep_gradients))
        run.model.train(was_training)


def _copied(checkpoint: Any) -> Any:
    """A checkpoint whose tensors are its own, on the host."""

    def copy(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    parts = {name: getattr(checkpoint, name).items() for name in ("model", "optimizer", "run")}
    own = {name: {key: copy(value) for key, value in part} for name, part in parts.items()}
    return dataclasses.replace(checkpoint, **own)


# --- reading the curve ------------------------------------------------------------------------------------------------


def read_curve(rates: Sequence[float], losses: Sequence[float], *, tuning: bool = False) -> CurveReading:
    """The suggestions of a curve, and which of them to take. A curve that never falls is a `ConfigError`.

    `tuning` says that the model has learned before.
    """
    finite = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if len(finite) < 10:
        raise _no_curve(f"only {len(finite)} steps had a finite loss")
    places = [math.log10(rate) for rate, _ in finite]
    smoothed = smooth(places, without_jumps([loss for _, loss in finite]))
    read = first_rise(smoothed)
    bottom = min(range(read), key=lambda index: smoothed[index])
    fall = smoothed[0] - smoothed[bottom]
    if fall < LEAST_FALL * abs(smoothed[0]):
        raise _no_curve(f"the loss went from {smoothed[0]:.4g} to {smoothed[bottom]:.4g} at best")
    knee = _crossing(places, smoothed, bottom, KNEE * fall)
    suggestions = [
        Suggestion("minimum / 10", 10.0 ** places[bottom] / 10, "a tenth of the rate with the lowest loss"),
        Suggestion("knee", knee, f"where {KNEE:.0%} of the fall is over"),
    ]
    chosen = CHOSEN
    if tuning:
        low = smoothed[bottom] + FLOOR * fall
        first = next(index for index in range(bottom + 1) if smoothed[index] <= low)
        end = next((index for index in range(bottom, len(smoothed)) if smoothed[index] > low), len(smoothed))
        if end < len(smoothed) or len(finite) < len(losses):  # without a rise nothing says where the floor ends
            chosen, rate = "floor", 10.0 ** ((places[first] + places[end - 1]) / 2)
            suggestions.append(Suggestion(chosen, rate, "the middle of the rates with the lowest losses"))
    return CurveReading(smoothed=tuple(smoothed), read=read, suggestions=tuple(suggestions), chosen=chosen)


def without_jumps(losses: Sequence[float]) -> list[float]:
    """Each loss as the median of those around it: a batch that throws the loss up for a step or two leaves no trace."""
    half = MEDIAN // 2
    return [statistics.median(losses[max(0, index - half) : index + half + 1]) for index in range(len(losses))]


def smooth(places: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Each loss as the mean of those around it, weighted by a bell over the logarithm of the rate."""
    result = []
    for here in places:
        weights = [math.exp(-0.5 * ((place - here) / WIDTH) ** 2) for place in places]
        result.append(sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights))
    return result


def first_rise(smoothed: Sequence[float]) -> int:
    """How many points to read: those before the loss has clearly risen above its best. Beyond, a run is torn up, and
    what looks like a second valley is noise."""
    best = smoothed[0]
    for index, loss in enumerate(smoothed):
        best = min(best, loss)
        fall = smoothed[0] - best
        if fall > LEAST_FALL * abs(smoothed[0]) and loss > best + RISE * fall:
            return index
    return len(smoothed)


def _crossing(places: Sequence[float], smoothed: Sequence[float], bottom: int, depth: float) -> float:
    """The rate at which the loss is first `depth` below its start."""
    level = smoothed[0] - depth
    index = next((index for index in range(1, bottom + 1) if smoothed[index] <= level), bottom)
    before, after = smoothed[index - 1], smoothed[index]
    share = (before - level) / (before - after) if before > after else 1.0
    return 10.0 ** (places[index - 1] + min(max(share, 0.0), 1.0) * (places[index] - places[index - 1]))


def _no_curve(why: str) -> ConfigError:
    return ConfigError(
        f"the range test has no curve to read: {why}",
        "widen it with --from and --to, or take more steps with --steps; does the run learn at all?",
    )


# --- what is shown ----------------------------------------------------------------------------------------------------


def sheet_of(result: LrResult) -> Sheet:
    """The suggestions, the chosen one marked, and in a sentence what was done."""
    rows = [
        ResultRow(
            name=one.name,
            cells={"rate": f"{one.rate:.1e}", "meaning": one.meaning},
            value=one.rate,
            tone=OWN if one.name == result.reading.chosen else "",
        )
        for one in result.reading.suggestions
    ]
    losses = [point.loss for point in result.points]
    best = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
    lines = [
        f"{len(losses)} steps on {result.device} in {human_seconds(result.seconds)}, loss {losses[0]:.3f} to "
        f"{best:.3f} at best; {result.ended}; the config had {result.before:g}"
    ]
    others = [path for path in result.found if path != result.field]
    if others:
        lines.append(f"rates are those of {result.field}; {', '.join(others)} rose with it, in the config's ratios")
    lines += [f"note: {note}" for note in result.notes]
    return Sheet(blocks=[Table(rows=rows, names="suggestion", left=("meaning",), marks=True), *map(Sentence, lines)])


def picture_of(result: LrResult) -> Picture:
    """The loss over the rate, with the suggestions. What lies beyond the first clear rise was not read and is grey.

    A loss that blew up at the end does not flatten the rest: the axis ends a little above the first loss.
    """
    reading, alone = result.reading, len(result.found) == 1
    points = [(point.rate, point.loss) for point in result.points if math.isfinite(point.loss)]
    smoothed = [(rate, loss) for (rate, _), loss in zip(points, reading.smoothed, strict=True)]
    read = reading.read
    low, top = min(reading.smoothed), max([reading.smoothed[0], *(loss for _, loss in points[:read])])
    room = top - low or 1.0
    curves = [
        Points(points=points, look="dots", colour="faint", name="loss of a step"),
        Points(points=smoothed[:read], name="smoothed"),
    ]
    if read < len(points):
        curves.append(Points(points=smoothed[read - 1 :], colour="grey"))
    others = iter(("orange", "purple", "teal", "grey"))
    marks = [
        (one.rate, f"{one.name}  {one.rate:.1e}  (chosen)", "red")
        if one.name == reading.chosen
        else (one.rate, f"{one.name}  {one.rate:.1e}", next(others, "grey"))
        for one in reading.suggestions
    ]
    chart = ChartPanel(
        title="",
        curves=curves,
        x="learning rate" if alone else f"{result.field}, with which the other rates rose",
        y="training loss",
        log=True,
        limits=(low - 0.08 * room, top + 0.05 * room),
        marks=marks,
        wide=True,
    )
    count = f"{len(result.points)} steps in {human_seconds(result.seconds)}, {result.ended}"
    lines = [
        f"range test of {result.config[:60]} on {result.device[:80]}",
        f"{count}; chosen by {reading.chosen}, the config had {result.before:g}",
    ]
    title = f"Learning rate: {result.rate:g}" + ("" if alone else f" ({result.field})")  # the table has the others
    return Picture(title=title, lines=lines, charts=[chart])
