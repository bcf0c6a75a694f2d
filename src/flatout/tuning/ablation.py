"""Ablation: what each field of a config is worth, by whole runs with and without it; to learning what `bench` is to
speed.

Idea: a field is judged by pairs of runs that differ in nothing else: same seed, so the same order of the data and the
same random draws, and as many tokens. What counts is the validation loss at the end. `effects` makes a verdict of the
differences.

Contract:
- Runs go through the same loop as `flatout train` and write nothing. Data is prepared once, where training would put
  it.
- A row is a finished run and is yielded as soon as it is known; a run that is among the `earlier` rows, by the hash of
  its settings, data and device, is not made again. The order is seed by seed, so that all fields have as many pairs.
- After about `minutes`, nothing is begun; a run that would probably end later is not begun either.
- A changed run that diverges, runs out of memory or is no valid config is a row with that status, and has no pair. An
  error of the unchanged run is an error of the ablation.
Trap: a model field that adds or removes weights shifts the draws of those that are initialised after them; such pairs
share the order of the data, and scatter more.

What paired losses of a few seeds say of a field: the mean difference, its interval, and the verdict that it carries.

Idea: a pair is two runs of one seed, which read the same data in the same order: the config as it is, and the config
with one field changed. Their difference is loss with the change minus loss without, so a positive one speaks for the
value in the config. A few pairs of one field say almost nothing of how much differences scatter; all fields together
say enough.

Contract:
- Numbers only: no torch, no config.
- The noise of a difference is the spread of the paired differences about each field's own mean, pooled over all fields.
  A field whose own pairs lie further apart than that keeps its own spread: some changes are noisier than others.
- All pairs of a seed share one run, the unchanged one, so the pooled spread is known less well than the number of its
  pairs suggests. The degrees of freedom say so (Satterthwaite's approximation, with half of the variance shared).
- An interval misses the true difference in at most `MISS` of all cases. A verdict of helps or hurts needs the whole
  interval on one side of 0. Of twenty fields that do nothing, one may still get such a verdict.
- Without two pairs of any field nothing is known of the noise: `half_width` is None, and there is no verdict.
"""

import dataclasses
import functools
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.data.prepare import data_folder, has_dataset, prepare_data
from flatout.data.shards import read_manifest
from flatout.device import detect_device
from flatout.errors import many
from flatout.records import AblateRow, EvalRecord
from flatout.rows import (
    BAD,
    GOOD,
    Bar,
    BarPanel,
    Block,
    Heading,
    Picture,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_seconds,
    or_dash,
    shortened,
)
from flatout.shown import Shown
from flatout.tuning.changes import Change, with_words
from flatout.tuning.measure import WholeRun, for_trials, machine_of
from flatout.tuning.practice_data import scratch_folder

MISS = 0.05
SHARED = 0.5  # correlation of two fields' differences of one seed: the unchanged run is in both
HELPS, HURTS, ALIKE, UNKNOWN = "helps", "hurts", "no difference seen", ""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What the pairs of a field say. `half_width` is half of the interval about `mean`: a smaller difference than that
    could not have been seen."""

    mean: float
    half_width: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """Of the value that was not changed: it helps where the change raises the loss."""
        if self.half_width is None:
            return UNKNOWN
        if abs(self.mean) <= self.half_width:
            return ALIKE
        return HELPS if self.mean > 0 else HURTS


@dataclasses.dataclass(frozen=True)
class Noise:
    """The standard deviation of one paired difference, pooled over fields, and how well that is known."""

    deviation: float
    degrees: float


def effects(differences: Mapping[str, Sequence[float]]) -> dict[str, Effect]:
    """The effect of every field that has pairs, from the differences of its pairs in the order of the seeds."""
    noise = pooled(list(differences.values()))
    return {field: _measured_effect(own, noise) for field, own in differences.items() if own}


def _measured_effect(own: Sequence[float], noise: Noise | None) -> Effect:
    mean = statistics.fmean(own)
    if noise is None:
        return Effect(mean, None, len(own))
    deviation = max(noise.deviation, math.sqrt(_squares(own) / max(1, len(own) - 1)))
    return Effect(mean, quantile(noise.degrees) * deviation / math.sqrt(len(own)), len(own))


def pooled(differences: Sequence[Sequence[float]]) -> Noise | None:
    """The noise of one difference; None where no field has two pairs."""
    several = [own for own in differences if len(own) > 1]
    # A field that the run does not use makes no difference at all, and says nothing of the noise of others.
    several = [own for own in several if any(own)] or several
    if not several:
        return None
    free = [len(own) - 1 for own in several]
    # The variance of such a sum of squares has a term for every two fields that share runs.
    shared = sum(
        (1.0 if first == second else SHARED**2) * min(free[first], free[second])
        for first in range(len(free))
        for second in range(len(free))
    )
    return Noise(math.sqrt(sum(map(_squares, several)) / sum(free)), sum(free) ** 2 / shared)


def _squares(own: Sequence[float]) -> float:
    """The squared distances from the mean, added up."""
    mean = math.fsum(own) / max(1, len(own))
    return sum((difference - mean) ** 2 for difference in own)


def quantile(degrees: float, miss: float = MISS) -> float:
    """How many standard errors an interval of Student's t reaches to each side, so that it misses in `miss` of cases.

    With t = sqrt(degrees) tan(angle), the share inside is an integral of cos(angle) to the power of degrees - 1.
    """
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if 2 * scale * _integral(angle, degrees - 1) < 1 - miss:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _integral(angle: float, power: float, pieces: int = 200) -> float:
    """Of cos to that power, from 0 to an angle, by Simpson's rule."""
    width = angle / pieces
    values = [math.cos(number * width) ** power for number in range(pieces + 1)]
    return width / 3 * (values[0] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]) + values[-1])


SEEDS = 2
EVALUATIONS = 4  # of a run, for its curve
# With one of these changed, as many steps are not as many tokens.
_BATCH = ("train.batch_tokens", "train.batch_stages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldEffect(Shown):
    """What the pairs of a field say.

    `difference` is the loss with the change minus the loss as configured, the mean over `pairs` seeds; `half_width` is
    half of its interval, the smallest difference that these runs could have shown. `verdict` is of the value in the
    config: helps, hurts or no difference seen; empty where there is none. `reason` says why a changed run failed.
    """

    field: str
    configured: str
    changed: str
    pairs: int
    loss: float | None  # as configured, the mean over the same seeds
    changed_loss: float | None
    difference: float | None
    half_width: float | None
    verdict: str
    steps: int  # of the changed run, the median over the seeds
    step_time: float | None  # of the changed run over that of the unchanged one
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateResult(Shown):
    """The end of an ablation: what each field is worth, and the noise that it was judged by.

    `noise` is the standard deviation of one paired difference, pooled over the fields; `degrees` are its degrees of
    freedom. `missing` counts the runs that were not begun for lack of time.
    """

    effects: tuple[FieldEffect, ...]
    left_out: dict[str, str]
    seeds: tuple[int, ...]
    loss: float | None  # of the config as it is, the mean over the seeds
    spread: float | None  # standard deviation of that over the seeds
    steps: int
    tokens: int
    training_seconds: float  # of a run of the config as it is, the median over the seeds
    noise: float | None
    degrees: float | None
    rows: tuple[AblateRow, ...]
    missing: int
    config: str
    device: str
    seconds: float
    flatout: str
    torch: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "ablation", **dataclasses.asdict(self)}

    def sheet(self) -> Sheet:
        return sheet_of(self)

    def picture(self) -> Picture:
        return picture_of(self.config, _sentence(self), self.effects)


# Which run of how many, in words, and its evaluations as they come; None when it begins.
RunProgress = Callable[[int, int, str, EvalRecord | None], None]


@dataclasses.dataclass(frozen=True)
class _Job:
    """A run to make: a change or none, and a seed."""

    change: Change | None
    seed: int

    @property
    def words(self) -> str:
        name = "as configured" if self.change is None else self.change.word
        return f"{name}, seed {self.seed}"


def ablate(
    loaded: LoadedConfig,
    changes: Sequence[Change],
    *,
    left_out: Mapping[str, str] | None = None,
    seeds: int = SEEDS,
    minutes: float | None = None,
    earlier: Sequence[AblateRow] = (),
    progress: RunProgress = lambda *_: None,
) -> Generator[AblateRow | AblateResult]:
    """Trains what is missing and yields a row for each new run; the `AblateResult` last."""
    began = time.monotonic()
    runs = _Runs(loaded, earlier, None if minutes is None else began + 60 * minutes)
    first = loaded.config.train.seed
    jobs = [_Job(change, seed) for seed in range(first, first + seeds) for change in (None, *changes)]
    missing = 0
    with scratch_folder("flatout-ablate-") as scratch:
        for number, job in enumerate(jobs, start=1):
            if runs.row_of(job) is not None:
                continue
            if not (runs.can_be_made(job) and runs.in_time(job)):
                missing += 1
                continue
            report = functools.partial(progress, number, len(jobs), job.words)
            yield runs.make(job, scratch / str(number), report)
    yield _result(runs, changes, dict(left_out or {}), jobs, missing, time.monotonic() - began)


@final
class _Runs:
    """The runs of an ablation: those that are there, and how another one is made."""

    def __init__(self, loaded: LoadedConfig, earlier: Sequence[AblateRow], deadline: float | None) -> None:
        self.loaded, self.deadline = loaded, deadline
        self.base = for_trials(loaded, EVALUATIONS)
        data, shards = self.base.config.data, loaded.config.data_kind == "text"  # samples are made by the first run
        if shards and (deadline is None or time.monotonic() < deadline):
            prepare_data(data, self.base.config.clean)
        self.device = machine_of(detect_device(loaded.config.speed.device))
        prepared = shards and has_dataset(data_folder(data))
        self.dataset = read_manifest(data_folder(data)).fingerprint if prepared else ""
        self.rows = {row.hash: row for row in earlier}
        self.configs: dict[tuple[str, ...], tuple[LoadedConfig, str]] = {}

    def row_of(self, job: _Job) -> AblateRow | None:
        return self.rows.get(self._hash(job))

    def reference(self, seed: int) -> AblateRow | None:
        return self.row_of(_Job(None, seed))

    def _config(self, job: _Job) -> LoadedConfig:
        return self._made(*self._words(job))[0]

    def _hash(self, job: _Job) -> str:
        return self._made(*self._words(job))[1]

    def _words(self, job: _Job) -> Iterator[str]:
        yield f"train.seed={job.seed}"
        if job.change is not None:
            yield job.change.word
            train = self.base.config.train
            if job.change.path in _BATCH and train.steps is not None:
                yield f"train.tokens={round(train.steps * train.mean_batch)}"

    def _made(self, *words: str) -> tuple[LoadedConfig, str]:
        """The config with some settings, and the hash by which its run is found again."""
        if words in self.configs:
            return self.configs[words]
        loaded = with_words(self.base, words)
        sections = loaded.config.model_dump()
        facts = {name: fields for name, fields in sections.items() if name not in ("output", "checkpoint")}
        text = json.dumps([facts, self.dataset, self.device], sort_keys=True)
        self.configs[words] = loaded, hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
        return self.configs[words]

    def can_be_made(self, job: _Job) -> bool:
        """Whether the run that this one is compared with is there."""
        return job.change is None or self.reference(job.seed) is not None

    def in_time(self, job: _Job) -> bool:
        """Whether a run would end before the deadline, if it takes as long as the slowest with this change or none."""
        if self.deadline is None:
            return True
        hashes = {hash for _, hash in self.configs.values()}
        rows = [row for row in self.rows.values() if row.hash in hashes]
        like = [row for row in rows if job.change is not None and row.field == job.change.path]
        if like:
            rows = [row for row in rows if not row.field] + like
        known = [row.whole_seconds for row in rows]
        return time.monotonic() + max(known, default=0.0) < self.deadline

    def make(self, job: _Job, folder: Path, report: Callable[[EvalRecord | None], None]) -> AblateRow:
        """Trains one run and keeps its row."""
        report(None)
        began, change = time.monotonic(), job.change
        loaded = self._config(job)
        run = WholeRun()
        for evaluation in run.train(lambda: loaded, folder):
            report(evaluation)
        if change is None and run.error is not None:
            raise run.error  # there is nothing to compare with
        row = AblateRow(
            field="" if change is None else change.path,
            configured="" if change is None else change.configured,
            changed="" if change is None else change.changed,
            seed=job.seed,
            status=run.status,
            reason=run.reason,
            loss=run.loss if run.status == "done" else None,
            steps=len(run.steps),
            tokens=run.tokens,
            seconds=run.seconds,
            whole_seconds=time.monotonic() - began,
            curve=tuple(run.curve),
            hash=self._hash(job),
            config=self.loaded.config.output.name,
            device=self.device,
            flatout=flatout.__version__,
            torch=torch.__version__,
        )
        self.rows[row.hash] = row
        return row


# --- the result -------------------------------------------------------------------------------------------------------


def _result(
    runs: _Runs,
    changes: Sequence[Change],
    left_out: dict[str, str],
    jobs: Sequence[_Job],
    missing: int,
    seconds: float,
) -> AblateResult:
    plain = [row for job in jobs if job.change is None and (row := runs.row_of(job)) is not None]
    losses = [row.loss for row in plain if row.loss is not None]
    pairs = {change.word: list(_pairs(runs, jobs, change)) for change in changes}
    differences = {
        word: [other.loss - own.loss for own, other in pair if own.loss is not None and other.loss is not None]
        for word, pair in pairs.items()
    }
    noise, judged = pooled(list(differences.values())), effects(differences)
    return AblateResult(
        effects=tuple(_effect(change, pairs[change.word], judged.get(change.word)) for change in changes),
        left_out=left_out,
        seeds=tuple(dict.fromkeys(job.seed for job in jobs)),
        loss=statistics.fmean(losses) if losses else None,
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        steps=plain[0].steps if plain else 0,
        tokens=plain[0].tokens if plain else 0,
        training_seconds=statistics.median(row.seconds for row in plain) if plain else 0.0,
        noise=None if noise is None else noise.deviation,
        degrees=None if noise is None else noise.degrees,
        rows=tuple(dict.fromkeys(row for job in jobs if (row := runs.row_of(job)) is not None)),
        missing=missing,
        config=runs.loaded.config.output.name,
        device=runs.device,
        seconds=seconds,
        flatout=flatout.__version__,
        torch=torch.__version__,
    )


def _pairs(runs: _Runs, jobs: Sequence[_Job], change: Change) -> Iterator[tuple[AblateRow, AblateRow]]:
    """The unchanged and the changed run of every seed that has both."""
    for job in jobs:
        if job.change == change:
            own, other = runs.reference(job.seed), runs.row_of(job)
            if own is not None and other is not None:
                yield own, other


def _effect(change: Change, pairs: Sequence[tuple[AblateRow, AblateRow]], judged: Effect | None) -> FieldEffect:
    whole = [(own.loss, other.loss) for own, other in pairs if own.loss is not None and other.loss is not None]
    done = [(own, other) for own, other in pairs if other.status == "done"]
    ratios = [(other.seconds / other.steps) / (own.seconds / own.steps) for own, other in done]
    return FieldEffect(
        field=change.path,
        configured=change.configured,
        changed=change.changed,
        pairs=len(whole),
        loss=statistics.fmean(own for own, _ in whole) if whole else None,
        changed_loss=statistics.fmean(other for _, other in whole) if whole else None,
        difference=None if judged is None else judged.mean,
        half_width=None if judged is None else judged.half_width,
        verdict="" if judged is None else judged.verdict,
        steps=statistics.median_low(other.steps for _, other in pairs) if pairs else 0,
        step_time=statistics.median(ratios) if ratios else None,
        reason=next((f"{other.status}: {other.reason}" for _, other in pairs if other.status != "done"), ""),
    )


# --- what is shown ----------------------------------------------------------------------------------------------------


def sheet_of(result: AblateResult) -> Sheet:
    """What each field is worth, and how small a difference could be seen."""
    blocks: list[Block] = [Sentence(_sentence(result))]
    if rows := [_row(one) for one in _ordered(result.effects)]:
        extras = ("loss", "changed", "step time", "config", "change")
        blocks += [Sentence(""), Table(rows=rows, names="field", left=extras[3:], extras=extras)]
    return Sheet(blocks=[*blocks, Sentence(""), *map(Sentence, _notes(result))])


def advice_of(one: FieldEffect) -> str:
    """What to do about a field: which value to keep or to take, and what the other one costs."""
    if one.verdict in (HELPS, HURTS):
        do, value, other = ("keep", one.configured, one.changed) if one.verdict == HELPS else (
            "take", one.changed, one.configured
        )  # fmt: skip
        return f"{do} {shortened(value, _LONG)} ({shortened(other, _LONG)} +{abs(one.difference or 0.0):.3f})"
    if one.reason:
        return one.reason.partition(":")[0].replace("_", " ")
    return one.verdict or ("one pair: no verdict" if one.pairs else "not run yet")


_LONG = 24  # characters of a value; longer ones are cut


def _ordered(effects: Sequence[FieldEffect]) -> list[FieldEffect]:
    """The effects, what helps most first; without a difference last."""
    return sorted(effects, key=lambda one: (one.difference is None, -(one.difference or 0.0)))


def _row(one: FieldEffect) -> ResultRow:
    cells = {
        "config": shortened(one.configured, _LONG),
        "change": shortened(one.changed, _LONG),
        "step time": or_dash(one.step_time, "{:.2f}x"),
        "loss": or_dash(one.loss, "{:.4f}"),
        "changed": or_dash(one.changed_loss, "{:.4f}"),
        "difference": _difference(one),
    }
    tone = {HELPS: GOOD, HURTS: BAD}.get(one.verdict, "")
    return ResultRow(name=one.field, cells=cells, value=one.difference, verdict=advice_of(one), tone=tone)


def _difference(one: FieldEffect) -> str:
    error = "" if one.half_width is None else f" \u00b1 {one.half_width:.4f}"
    return "-" if one.difference is None else f"{one.difference:+.4f}{error}"


def _sentence(result: AblateResult) -> str:
    if result.loss is None:
        return f"{result.config}: no run of the config as it is has ended yet; on {result.device}"
    ended = sum(not row.field for row in result.rows)
    spread = "" if result.spread is None else f" (standard deviation {result.spread:.4f})"
    return (
        f"{result.config} as it is: validation loss {result.loss:.4f} over "
        f"{many(ended, 'seed')}{spread}, {many(result.steps, 'step')}, {result.tokens:,} tokens, "
        f"{_seconds(result.training_seconds)} of training; on {result.device}"
    )


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else human_seconds(value)


def _notes(result: AblateResult) -> Iterator[str]:
    """What the table means, what it could not have shown, and what is still missing."""
    yield "difference: loss with the change minus loss as configured, over pairs of one seed, with its 95% interval"
    widths = [one.half_width for one in result.effects if one.half_width]
    if widths:
        spread = f"{min(widths):.4f}" + (f" to {max(widths):.4f}" if max(widths) > 1.05 * min(widths) else "")
        yield (
            f"smallest difference that could be seen: {spread} (noise of a pair {result.noise:.4f}, "
            f"{result.degrees:.1f} degrees of freedom)"
        )
    yield from sorted({f"{one.field}={one.changed}: {one.reason}" for one in result.effects if one.reason})
    for one in result.effects:
        if one.verdict == HURTS:
            yield (
                f"{one.field}={one.changed} instead of {one.configured} lowered the loss by "
                f"{-(one.difference or 0.0):.4f} \u00b1 {one.half_width:.4f}"
            )
    unread = {one.field for one in result.effects if one.pairs and one.difference == 0.0}
    if unread:
        yield f"equal to the last digit with and without: {', '.join(sorted(unread))}; does this run use it?"
    if result.loss is not None and result.noise is None:
        way = ": --seeds 2 trains a second one" if len(result.seeds) == 1 else ""
        yield f"one pair says nothing of the noise, so there is no verdict{way}"
    if result.left_out:
        paths: dict[str, list[str]] = {}
        for path, why in result.left_out.items():
            paths.setdefault(why, []).append(path)
        listed = "; ".join(f"{', '.join(those)} ({why})" for why, those in paths.items())
        yield f"left out: {listed}; --fields names what to change"
    if result.missing:
        yield f"not run yet: {many(result.missing, 'run')}; the same command goes on with them"


def picture_of(config: str, line: str, effects: Sequence[FieldEffect]) -> Picture:
    """The difference that each field makes, with its interval.

    To the right of the line at 0 the value in the config has the lower loss. Intervals that reach over 0 are pale.
    """
    names: list[str | Heading] = []
    bars: list[Bar] = []
    for one in _ordered(effects):
        interval = None
        if one.difference is not None and one.half_width is not None:
            interval = (one.difference - one.half_width, one.difference + one.half_width)
        colour = {HELPS: "blue", HURTS: "red"}.get(one.verdict, "grey")
        words = advice_of(one) if one.verdict else one.reason or f"{_difference(one)}  {advice_of(one)}"
        bar = Bar(line=len(names), dot=one.difference, interval=interval, words=words, colour=colour)
        bars.append(dataclasses.replace(bar, pale=one.verdict not in (HELPS, HURTS)))
        names.append(_name(one))
    title = "loss with the change minus loss as configured (right of 0 the value in the config helps)"
    panel = BarPanel(title=title, bars=bars, limits=_limits(effects), at=0.0)
    return Picture(title=f"What each field of {config} is worth", lines=[line], names=names, bars=[panel])


def _limits(effects: Sequence[FieldEffect]) -> tuple[float, float]:
    """Around 0 and most differences with their intervals."""
    known = [one for one in effects if one.difference is not None]
    reach = sorted(abs(one.difference or 0.0) + (one.half_width or 0.0) for one in known) or [1.0]
    most = max([value for value in reach if value <= 6 * statistics.median(reach)] or reach) or 1e-3
    return -1.08 * most, 1.08 * most


def _name(one: FieldEffect | AblateRow) -> str:
    return f"{one.field} {one.configured} \u2192 {one.changed}"


def run_line(row: AblateRow, number: int, total: int) -> str:
    """One finished run in one line."""
    name = f"{row.field}={row.changed}" if row.field else "as configured"
    outcome = f"loss {row.loss:.4f}" if row.loss is not None else f"{row.status}: {row.reason}"
    steps = f"after {many(row.steps, 'step')}, {human_seconds(row.whole_seconds)}"
    return f"[{number}/{total}] {name}, seed {row.seed}: {outcome} {steps}"
