"""The ladder: every rung is first proven harmless, then measured.

Idea: one reference run (exact arithmetic, nothing fused) gives the losses that any trainer of this model, data, seed
and batch must have. A rung trains the first steps of that same run with its own switches. If its losses lie within the
tolerance of its arithmetic, it goes on training with the clock on, in turns with the rung that it is compared with
(`turns.py`); if not, it is red and has no speed at all.

Contract:
- Every rung sees the same batches, seed and global batch. Only `speed` differs between two rungs. Of the config, only
  the length, the cap of the batch and the warm-up are changed, each with a notice. A rung's values count as a preset's,
  so that a device answers with a reason instead of an error.
- A rung that cannot be had here, runs out of memory or breaks is a row that says so, and the ladder goes on without it.
- A switch that is not green is not carried up: the rungs above stand on what works.
- Rows are yielded as they are measured; whoever stops listening keeps them.
- `Clock` deals out the seconds: the first rung is always measured, no rung is begun that could not be judged in the
  time that is left, and one that is under way ends at the limit with what it has.
- A gain is measured in turns or not at all. A factor is the product of such ratios from the baseline up.
Trap: all rungs share one process. `borrowed_run` clears up between them; a CUDA context that a kernel has broken cannot
be cleared, and every rung after it will say so.
"""

import dataclasses
import functools
import gc
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, final

import torch

import flatout
from flatout.config.facts import field_facts, value_at
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.schema import SpeedConfig, micro_batch_of
from flatout.config.source import DEFAULT, Source
from flatout.config.yaml_loader import format_value
from flatout.device import Device, allocator_words, detect_device
from flatout.errors import ConfigError, HardwareError, ResourceError, UsageError, UserError, many
from flatout.model.count import parameter_count
from flatout.ops.attention import FA4
from flatout.records import BenchProgress, BenchRow
from flatout.resolve.memory import training_flops
from flatout.resolve.opening import DataSource, vocabulary_of
from flatout.resolve.switches import Speed, resolve_speed
from flatout.tuning.measure import Measurement, borrowed_run, machine_of, of_steps, parity_losses, summary_of
from flatout.tuning.practice_data import practice_config, practice_samples, scratch_folder
from flatout.tuning.rungs import (
    BASELINE,
    OWN_SWITCHES,
    REFERENCE,
    SAMPLES,
    Rung,
    all_rungs,
    as_words,
    check_asked,
    choose_rungs,
    settings_of,
    tolerance_of,
)
from flatout.tuning.turns import LOOKS, PERIOD, PERIODIC, Comparison, Side, chained, sit, tricks_for

CHOSEN = 4  # steps of a run over samples that are taken
MOST_SEQUENCES = 64  # of a step, unless --batch-tokens says more: the naive baseline takes seconds for them on any card
# Fields of `speed` that legitimately end up as something else than was written.
_NOT_CHECKED = ("micro_batch", "accumulation", "workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """What a ladder is about: one config, one device, one dataset, and the same facts in every row.

    `chosen` are the steps that a ladder over samples takes, over and over: they differ, so all rungs take the same.
    """

    settings: LoadedConfig
    device: Device
    machine: str
    corpus_bytes: int | None
    data: str
    vocab: int
    batch_tokens: int  # of a step; of the chosen ones on average
    flops_per_token: float
    chosen: tuple[int, ...]
    steps: int
    parity_steps: int
    config_words: tuple[str, ...]
    commit: str | None


def make_plan(
    loaded: LoadedConfig,
    scratch: Path,
    steps: int,
    parity_steps: int,
    batch_tokens: int | None,
    notice: Callable[[str], None],
) -> LadderPlan:
    """Fits a config for measuring, and says what was changed for that."""
    samples = None
    if loaded.config.fine_tunes:
        if batch_tokens is not None:
            raise UsageError(
                "--batch-tokens is for pretraining, and this config has chat.source", "set chat.batch_samples"
            )
        samples = practice_samples(loaded, scratch, notice)
        practice, described = samples.settings, samples.described
    else:
        practice, described = practice_config(loaded, scratch, notice)
    notice(f"data: {described}")
    _report_unused(practice, notice)
    words = [] if samples is not None else [f"train.batch_tokens={_tokens(practice, batch_tokens, notice)}"]
    words += _length(practice, steps, parity_steps, notice)
    fitted = load_stored(practice.config.model_dump(), words, where="bench")
    if samples is None:
        opened = DataSource(fitted, detect_device(fitted.config.speed.device)).open(fitted)
        data, vocab, attended, chosen = opened.data, vocabulary_of(opened), None, ()
        tokens = fitted.config.train.batch_tokens
    else:
        data, vocab, attended, chosen = samples.data, samples.vocab, samples.data.facts.attended, samples.spread(CHOSEN)
        tokens = round(sum(map(samples.tokens, chosen)) / len(chosen))
    return _plan(
        loaded,
        fitted,
        corpus_bytes=data.facts.corpus_bytes,
        data=described,
        vocab=vocab,
        batch_tokens=tokens,
        flops_per_token=training_flops(fitted.config, vocab, attended),
        chosen=chosen,
        steps=steps,
        parity_steps=parity_steps,
    )


def _tokens(loaded: LoadedConfig, asked: int | None, notice: Callable[[str], None]) -> int:
    """Tokens of a step, of which there may be fewer than the config has."""
    context = loaded.config.model.context
    tokens = asked or loaded.config.train.batch_tokens
    if tokens % context:
        raise ConfigError(
            f"a batch of {tokens} tokens is not a multiple of model.context {context}",
            f"set --batch-tokens to a multiple of it, such as {max(1, tokens // context) * context}",
        )
    written = asked is not None or loaded.sources["train.batch_tokens"].kind == "override"
    if tokens > MOST_SEQUENCES * context and not written:
        tokens = MOST_SEQUENCES * context
        notice(f"a step has {tokens:,} tokens instead of {loaded.config.train.batch_tokens:,}; --batch-tokens sets it")
    return tokens


def _report_unused(loaded: LoadedConfig, notice: Callable[[str], None]) -> None:
    unused = [f"{path}={format_value(value_at(loaded.config, path))}" for path in OWN_SWITCHES if _sets(loaded, path)]
    if unused:
        notice(f"the ladder sets its switches itself; of the config it does not use {', '.join(unused)}")


def _length(loaded: LoadedConfig, steps: int, parity_steps: int, notice: Callable[[str], None]) -> list[str]:
    """Words for a run that is long enough to be measured, and whose rate rises soon."""
    warmup = loaded.config.optim.warmup
    is_long = not isinstance(warmup, int)  # a share of a run, or epochs of data, that are not measured
    if is_long or (warmup > parity_steps and loaded.sources["optim.warmup"].kind != "override"):
        warmup = parity_steps
        notice(f"the learning rate reaches its peak in {warmup} steps, so that the parity gate sees weights move")
    turns = LOOKS[-1]  # each with a step that is not timed
    length = max(1000, parity_steps + steps + turns + PERIOD)
    return [f"train.steps={length}", f"optim.warmup={warmup}"]


def _plan(loaded: LoadedConfig, fitted: LoadedConfig, **known: Any) -> LadderPlan:
    device = detect_device(loaded.config.speed.device)
    threads = resolve_speed(fitted.config, device, None, lambda _: DEFAULT, vocab=known["vocab"]).threads
    if device.kind == "cpu":  # one number for all rungs
        fitted = load_stored(fitted.config.model_dump(), [f"speed.threads={threads}"], where="bench")
    return LadderPlan(
        **known,
        settings=fitted,
        device=device,
        machine=machine_of(device, threads),
        config_words=tuple(
            f"{path}={format_value(value_at(loaded.config, path))}"
            for path, source in loaded.sources.items()
            if source.by_user and not path.startswith("output.") and path not in OWN_SWITCHES
        ),
        commit=commit_of(Path(flatout.__file__).parent),
    )


def _sets(loaded: LoadedConfig, path: str) -> bool:
    """Whether a file or preset gives this switch another value than it has anyway."""
    name = path.removeprefix("speed.")
    default = SpeedConfig.model_fields[name].default
    return loaded.sources[path].kind != "default" and getattr(loaded.config.speed, name) != default


def commit_of(folder: Path) -> str | None:
    """The commit of the code that runs, marked where files were changed since; None outside of a git tree."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):  # no git on this machine
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def config_for(plan: LadderPlan, settings: dict[str, str]) -> LoadedConfig:
    """The config of a rung; its values count as a preset's, so that a device answers with a reason, not an error."""
    config = load_stored(plan.settings.config.model_dump(), as_words(settings), where="bench").config
    return LoadedConfig(config, dict.fromkeys(field_facts(), Source("preset", "bench")))


def resolved(plan: LadderPlan, settings: dict[str, str]) -> Speed:
    config = config_for(plan, settings).config
    how = {"vocab": plan.vocab, "step_tokens": plan.batch_tokens if plan.chosen else None}
    return resolve_speed(config, plan.device, plan.corpus_bytes, lambda _: DEFAULT, **how)


def rungs_for(plan: LadderPlan) -> list[Rung]:
    """Every rung that a device of this kind has; `absences` says which of them this very one cannot have."""
    attention = plain_attention = resolved(plan, {"speed.compile": "off"}).execution.attention
    if attention in FA4:
        words = {"speed.attention": "auto", "speed.kernels": "torch", "speed.compile": "off"}
        plain_attention = resolved(plan, words).execution.attention
    return all_rungs(
        kind=plan.device.kind,
        micro_batch=micro_batch_of(plan.settings.config)[0],
        attention=attention,
        plain_attention=plain_attention,
        eigenstates="E" in plan.settings.config.model.kinds,
        samples=bool(plan.chosen),
    )


def absences(plan: LadderPlan, rungs: Sequence[Rung]) -> dict[str, str]:
    """The rungs that this device cannot have, each with the reason."""
    absent: dict[str, str] = {}
    climbed: list[Rung] = []
    for rung in rungs:
        reason = why_absent(plan, rung, settings_of(rung, climbed))
        if reason is not None:
            absent[rung.name] = reason
        elif rung.group == "ladder":
            climbed.append(rung)
    return absent


def why_absent(plan: LadderPlan, rung: Rung, settings: dict[str, str]) -> str | None:
    if rung.trick is not None:
        if rung.trick in tricks_for(plan.device):
            return None
        return "only CUDA devices have it" if plan.device.kind != "cuda" else f"{allocator_words()} is set"
    if rung.name in ("attention", "fa4-backward") and rung.words == rung.out:
        return f"auto takes {rung.words['speed.attention']} here, which the ladder already has"
    # Whether the compiler works is asked by compiling something: not again for every rung above.
    settings = settings if "speed.compile" in rung.words else {**settings, "speed.compile": "off"}
    try:
        refused = refusals(resolved(plan, settings), settings)
    except HardwareError as error:
        return error.message
    own = [reason for path, reason in refused.items() if path in rung.words]
    return own[0] if own else None


def refusals(speed: Speed, settings: dict[str, str]) -> dict[str, str]:
    """The words of a rung that this device does not follow, each with the reason."""
    found = {f"speed.{feature.name}": feature for feature in speed.features}
    refused: dict[str, str] = {}
    for path, asked in settings.items():
        name, feature = path.removeprefix("speed."), found.get(path)
        if name == path:  # no switch of `speed`
            continue
        if feature is None:  # a switch that is not reported was not used
            refused |= {} if asked == BASELINE.get(path) else {path: f"{name} is not reported"}
        elif name not in _NOT_CHECKED and feature.used.partition(" (")[0] != asked:
            refused[path] = f"{name} is {feature.used} here: {feature.why or 'it was not taken'}"
    return refused


SITTING_SECONDS = 30.0  # over one rung
PATIENCE = 3  # how many times as long a slow rung may take for ten pairs of turns
# Of a rung that is compared with none, whose figure is no part of a gain.
TIMED_SECONDS = 8.0
MOST_STEPS, FEWEST_STEPS = 80, 3


@final
class Clock:
    """The seconds that the whole ladder may take, if there is such a limit, and how they are dealt out."""

    def __init__(self, limit: float | None, parity_steps: int) -> None:
        self.limit = limit
        self.began = time.monotonic()
        # A rung needs the steps of its gate, and ten pairs of turns before anything can be said of it.
        self.steps = parity_steps + 2 * LOOKS[0]
        self.typical = 0.0  # seconds of a step, as far as is known

    @property
    def left(self) -> float:
        return math.inf if self.limit is None else self.limit - (time.monotonic() - self.began)

    @property
    def up(self) -> bool:
        """Whether the time that is left is too short for another rung."""
        return self.left < self.steps * self.typical

    def sitting(self, rungs: int) -> tuple[float, float]:
        """Target and maximum seconds for one of the remaining `rungs`."""
        share = self.left / rungs - self.steps * self.typical
        enough = max(share, 2 * LOOKS[0] * self.typical)
        return min(SITTING_SECONDS, enough), min(PATIENCE * SITTING_SECONDS, max(self.left, 0.0))

    def check(self, plan: LadderPlan, seconds: float) -> None:
        """Refuses a limit that cannot hold the reference and one rung, when a step takes `seconds`."""
        self.typical = seconds
        self.steps = plan.parity_steps + 2 * LOOKS[0] * max(1, len(plan.chosen))  # a turn takes all chosen steps
        needed = (plan.parity_steps + self.steps) * seconds
        if self.limit is None or needed <= self.limit:
            return
        context, tokens = plan.settings.config.model.context, plan.batch_tokens
        fewer = int(tokens * self.limit / needed) // context * context
        smaller = f", or a smaller step: --batch-tokens {fewer}" if fewer else ""
        if plan.chosen:
            smaller = ", or a smaller step: chat.batch_samples"
        raise UsageError(
            f"a step of {tokens:,} tokens takes {seconds:.3g} s here, and one rung with its parity check about "
            f"{needed:.1f} s: more than --seconds {self.limit:g}",
            f"give it more --seconds{smaller}",
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How measuring one rung went; `parity` and `measured` are None where it did not come so far.

    `compared` is None where there was nothing to compare with.
    """

    status: str
    reason: str
    parity: float | None = None
    measured: Measurement | None = None
    speed: Speed | None = None
    compared: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class Ground:
    """What all rungs have in common: the plan, the losses of the reference, and the time."""

    plan: LadderPlan
    losses: Sequence[float]
    clock: Clock


def bench(
    loaded: LoadedConfig,
    *,
    steps: int,
    parity_steps: int,
    batch_tokens: int | None = None,
    names: Sequence[str] | None = None,
    only: str | None = None,
    seconds: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[BenchProgress], None] = lambda _: None,
) -> Generator[BenchRow]:
    """Measures the rungs of the ladder for a config and yields a row for each.

    `names` chooses rungs, `only` one of the groups ladder, without and extra; without either, all are measured. What a
    rung is compared with is measured too. The gate takes `parity_steps` steps, the clock at most `steps`. After about
    `seconds` in all, no other rung is begun.
    """
    check_asked(loaded, names)
    clock = Clock(seconds, parity_steps)
    with scratch_folder("flatout-bench-") as scratch:
        plan = make_plan(loaded, scratch, steps, parity_steps, batch_tokens, notice)
        listed = rungs_for(plan)
        how = functools.partial(absences, plan)
        present, rungs, absent = choose_rungs(listed, names, only, plan.device.kind, how)
        places = {rung.name: place for place, rung in enumerate(listed)}
        if rungs:
            progress(BenchProgress(0, len(rungs), "reference", "reference"))
        ground = Ground(plan, reference_losses(plan, notice, clock) if rungs else [], clock)
        for row in _climb(ground, present, rungs, notice, progress):
            yield dataclasses.replace(row, place=places[row.rung])
        for rung, reason in absent:
            row = row_of(plan, rung, settings_of(rung, []), Outcome("absent", reason))
            yield dataclasses.replace(row, place=places[rung.name])


def reference_losses(plan: LadderPlan, notice: Callable[[str], None], clock: Clock) -> list[float]:
    """The losses that all rungs are held against; the micro-batch shrinks until it fits."""
    size = int(REFERENCE["speed.micro_batch"])
    while True:
        try:
            more = SAMPLES if plan.chosen else {}
            with borrowed_run(config_for(plan, {**REFERENCE, **more, "speed.micro_batch": str(size)})) as run:
                began = functools.partial(clock.check, plan)
                return parity_losses(of_steps(run, plan.chosen), plan.parity_steps, began)
        except ResourceError:
            if size == 1:
                raise
        size //= 2
        notice(f"the reference does not fit; trying it with {many(size, 'sequence')} at a time")


def _side(plan: LadderPlan, name: str, settings: dict[str, str], trick: str | None = None) -> Side:
    return Side(name, config_for(plan, settings), plan.device, trick, plan.chosen)


# --- the rungs --------------------------------------------------------------------------------------------------------


def _climb(
    ground: Ground,
    present: Sequence[Rung],
    rungs: Sequence[Rung],
    notice: Callable[[str], None],
    progress: Callable[[BenchProgress], None],
) -> Generator[BenchRow]:
    plan, waiting = ground.plan, [rung.name for rung in rungs]
    climbed: list[Rung] = []  # the rungs of the ladder whose switches are on
    timed: dict[str, BenchRow] = {}
    for rung in present:
        if rung.name not in waiting:
            climbed += [rung] if rung.group == "ladder" else []
            continue
        if ground.clock.up and len(waiting) < len(rungs):
            notice(f"the time is up; not measured: {', '.join(waiting)}")
            return
        number = len(rungs) - len(waiting) + 1
        carried = {step.name for step in climbed}
        if rung.group == "without" and rung.switch not in carried:
            waiting.remove(rung.name)
            reason = f"{rung.switch} is not in the full set"
            yield row_of(plan, rung, settings_of(rung, climbed), Outcome("absent", reason))
            continue

        def tell(phase: str, number: int = number, name: str = rung.name) -> None:
            progress(BenchProgress(number, len(rungs), name, phase))

        # The rung below may have turned out red: the one that is really stood on counts.
        ladder = rung.group == "ladder"
        against = rung.against if not ladder and rung.against in timed else climbed[-1].name if climbed else None
        # It may also not have been asked for. The last one that was timed is then still good for the factor.
        names = [*(step.name for step in climbed), against]
        beside = next((timed[name] for name in reversed(names) if name in timed), None)
        rung, outcome = _measured(ground, rung, climbed, beside, len(waiting), tell)
        waiting.remove(rung.name)
        if outcome.status == "green":
            climbed += [rung] if ladder else []
        settings = settings_of(rung, climbed)
        row = row_of(plan, dataclasses.replace(rung, against=against), settings, outcome)
        row = with_ratios(row, beside, outcome.compared)
        timed |= {rung.name: row} if row.milliseconds is not None else {}
        yield row


def _as_settings(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def with_ratios(row: BenchRow, beside: BenchRow | None, found: Comparison | None) -> BenchRow:
    """The row with its factor and gain, from what was `found` in turns with the rung `beside`."""
    if row.rung == "baseline" and row.milliseconds is not None:
        return dataclasses.replace(row, factor=1.0, factor_error=0.0)
    if beside is None or found is None:
        return row
    if beside.factor is not None:
        known = beside.factor_error is not None and math.isfinite(found.error)
        row = dataclasses.replace(
            row,
            factor=beside.factor * found.ratio,
            factor_error=chained((beside.factor_error or 0.0, found.error)) if known else None,
        )
    if beside.rung != row.against:
        return row
    found = found.turned() if row.group == "without" else found
    bounds: dict[str, float] = {}
    if math.isfinite(found.error):
        bounds = {"gain_low": found.low, "gain_high": found.high, "error": found.error}
    return dataclasses.replace(row, gain=found.ratio, pairs=found.pairs, verdict=found.verdict, **bounds)


def _measured(
    ground: Ground,
    rung: Rung,
    climbed: Sequence[Rung],
    beside: BenchRow | None,
    waiting: int,
    tell: Callable[[str], None],
) -> tuple[Rung, Outcome]:
    """The rung as it was measured, which may have a smaller micro-batch than was asked for."""
    while True:
        tell("parity")
        settings = settings_of(rung, climbed)
        try:
            return rung, _try(ground, rung, settings, beside, waiting, tell)
        except ResourceError as error:
            outcome = Outcome("out_of_memory", error.message)
        except UserError as error:
            outcome = Outcome("failed", error.message)
        except Exception as error:  # noqa: BLE001 - a foreign compiler or kernel may raise anything: a row, not the end
            first = str(error).strip().partition("\n")[0][:200]
            outcome = Outcome("failed", f"{type(error).__name__}: {first}")
        gc.collect()  # the traceback is gone now, and what it held can go too
        size = int(settings["speed.micro_batch"])
        if outcome.status != "out_of_memory" or not rung.shrinks or size <= 2:
            return rung, outcome
        rung = dataclasses.replace(rung, words={**rung.words, "speed.micro_batch": str(size // 2)})


def _try(
    ground: Ground,
    rung: Rung,
    settings: dict[str, str],
    beside: BenchRow | None,
    waiting: int,
    tell: Callable[[str], None],
) -> Outcome:
    plan, clock, tolerance = ground.plan, ground.clock, tolerance_of(settings)
    with _side(plan, rung.name, settings, rung.trick) as side:
        run = side.run
        notices = list(refusals(run.speed, settings).values())
        early = side.take(plan.parity_steps)
        parity = largest_difference([report.loss for report in early], ground.losses)
        notices += run.new_notices.take()
        lost = given_up(notices, rung)
        if lost is not None:
            return Outcome("failed", lost, parity, None, run.speed)
        if not parity <= tolerance:
            differs = f"the losses differ by {parity:.2g}, more than {tolerance:g}"
            return Outcome("red", "; ".join([differs, *notices]), parity, None, run.speed)
        tell("timing")
        peak = run.peak_memory_bytes()  # before the other run is built beside it
        clock.typical = statistics.median(report.seconds for report in early[len(early) // 2 :])
        found: Comparison | None = None
        seconds, most = clock.sitting(waiting)
        if beside is None:
            timed = side.take(step_count(plan.steps, clock.typical, seconds, whole=side.period))
        else:
            other = _side(plan, beside.rung, _as_settings(beside.settings))
            sitting = sit(side, other, steps=plan.steps, typical=clock.typical, seconds=seconds, most=most)
            found, timed = sitting.compared, sitting.timed
            notices += [f"too large to stand in memory beside {beside.rung}: built anew for every turn"] * sitting.apart
        # The compiler is watched for the whole process: what it says now may be about the other run.
        notices += [line for line in run.new_notices.take() if not line.startswith("compile ")]
        measured = dataclasses.replace(summary_of(run, early, timed), peak_bytes=peak)
        return Outcome("green", "; ".join(notices), parity, measured, run.speed, found)


def given_up(notices: Sequence[str], rung: Rung) -> str | None:
    """The message by which a run gave up the very switch that a rung is about: its speed would be another one's."""
    names = [path.removeprefix("speed.") for path in rung.words]
    return next((line for line in notices for name in names if line.startswith(f"{name} became ")), None)


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest distance of two runs at any step; a loss that is no number is infinitely far away."""
    pairs = zip(losses, reference, strict=True)
    distances = [abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf for one, other in pairs]
    return max(distances)


def step_count(steps: int, seconds: float, limit: float = TIMED_SECONDS, *, whole: int = 1) -> int:
    """How many steps to time when one takes `seconds`: as asked for, fewer when slow, in whole periods of a trick."""
    fitting = int(min(limit, TIMED_SECONDS) / max(seconds, 1e-9))
    count = max(FEWEST_STEPS, min(steps, MOST_STEPS, fitting))
    return -(-count // whole) * whole


def row_of(plan: LadderPlan, rung: Rung, settings: dict[str, str], outcome: Outcome) -> BenchRow:
    speed = outcome.speed
    unmeasured = dict.fromkeys(field.name for field in dataclasses.fields(Measurement)) | {"steps": 0}
    timed: dict[str, Any] = unmeasured if outcome.measured is None else vars(outcome.measured)
    # A trick that happens in some steps only is not seen by a median, and steps over samples differ.
    milliseconds = timed["mean_milliseconds" if rung.trick in PERIODIC or plan.chosen else "milliseconds"]
    rate = None if milliseconds is None else 1000 * plan.batch_tokens / max(milliseconds, 1e-6)
    peak = plan.device.peak_flops
    return BenchRow(
        rung=rung.name,
        group=rung.group,
        place=0,
        status=outcome.status,
        reason=outcome.reason,
        against=rung.against,
        words=(*as_words(rung.words), *([] if rung.trick is None else [rung.trick])),
        settings=tuple(as_words(settings)),
        used={} if speed is None else {feature.name: feature.used for feature in speed.features},
        parity=outcome.parity,
        parity_steps=plan.parity_steps,
        tolerance=tolerance_of(settings),
        tokens_per_second=rate,
        mfu=None if rate is None or peak is None else rate * plan.flops_per_token / peak,
        gain=None,
        factor=None,
        config=plan.settings.config.output.name,
        config_words=plan.config_words,
        data=plan.data,
        parameters=parameter_count(plan.settings.config.model, plan.vocab),
        context=plan.settings.config.model.context,
        batch_tokens=plan.batch_tokens,
        micro_batch=None if speed is None else speed.micro_batch,
        accumulation=None if speed is None else speed.accumulation,
        device=plan.machine,
        flatout=flatout.__version__,
        torch=torch.__version__,
        commit=plan.commit,
        load=None if outcome.measured is None else _load_average(),
        **{**timed, "milliseconds": milliseconds},
    )


def _load_average() -> float | None:
    """Of the last minute, with our own work in it; None where the system has no such figure."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None
