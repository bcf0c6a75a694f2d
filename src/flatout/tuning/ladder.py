"""The ladder: every rung is first proven harmless, then measured.

Idea: one reference run (exact arithmetic, nothing fused) gives the losses that any trainer of this model, data, seed
and batch must have. A rung trains the first steps of that same run with its own switches. If its losses lie within the
tolerance of its arithmetic, it goes on training with the clock on; if not, it is red and has no speed at all.

Contract:
- Every rung sees the same batches, seed and global batch. Only `speed` differs between two rungs.
- A rung that cannot be had here, runs out of memory or breaks is a row that says so, and the ladder goes on without it.
- A switch that is not green is not carried up: the rungs above stand on what works.
- Rows are yielded as they are measured; whoever stops listening keeps them.
Trap: all rungs share one process. `borrowed_run` clears up between them; a CUDA context that a kernel has broken cannot
be cleared, and every rung after it will say so.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.engine.features import Speed
from flatout.engine.run import Run
from flatout.errors import ResourceError, UserError
from flatout.model.count import parameter_count
from flatout.records import BenchProgress, BenchRow
from flatout.tuning.claims import claim_of
from flatout.tuning.measure import Measurement, Steps, borrowed_run, of_steps, parity_losses, summary_of
from flatout.tuning.plan import Plan, absences, check_same, config_for, make_plan, refusals, rungs_for
from flatout.tuning.practice_data import scratch_folder
from flatout.tuning.rungs import (
    REFERENCE,
    SAMPLES,
    Rung,
    as_words,
    check_asked,
    choose_rungs,
    settings_of,
    tolerance_of,
)
from flatout.tuning.tricks import PERIOD, PERIODIC, trick

TIMED_SECONDS = 8.0  # a slow rung takes fewer steps than asked for, and never fewer than the next line says
FEWEST_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How measuring one rung went; `parity` and `measured` are None where it did not come so far."""

    status: str
    reason: str
    parity: float | None = None
    measured: Measurement | None = None
    speed: Speed | None = None


def bench(
    loaded: LoadedConfig,
    *,
    steps: int,
    parity_steps: int,
    batch_tokens: int | None = None,
    names: Sequence[str] | None = None,
    only: str | None = None,
    earlier: Sequence[BenchRow] = (),
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[BenchProgress], None] = lambda _: None,
) -> Generator[BenchRow]:
    """Measures the rungs of the ladder for a config and yields a row for each.

    `names` chooses rungs, `only` one of the groups ladder, without and extra; without either, all are measured. What a
    rung is compared with is measured too. The gate takes `parity_steps` steps, the clock at most `steps`. Rungs in
    `earlier` were measured before, with the same config on the same machine, and stand for themselves.
    """
    check_asked(loaded, names)
    with scratch_folder("flatout-bench-") as scratch:
        plan = make_plan(loaded, scratch, steps, parity_steps, batch_tokens, notice)
        check_same(plan, earlier)
        other = sorted({row.steps for row in earlier if _other_steps(row, steps)})
        if other:
            told = " and ".join(str(count) for count in other)
            notice(
                f"rungs that are there were timed for {told} steps, now it is {steps}: fewer steps are a rougher figure"
            )
        listed = rungs_for(plan)
        how = functools.partial(absences, plan)
        present, chosen, absent = choose_rungs(listed, names, only, plan.device.kind, how)
        places = {rung.name: place for place, rung in enumerate(listed)}
        known = {row.rung: row for row in earlier}
        rungs = [rung for rung in chosen if rung.name not in known]
        if rungs:
            progress(BenchProgress(0, len(rungs), "reference", "reference"))
        reference = reference_losses(plan, notice) if rungs else []
        for row in _climb(plan, present, rungs, known, reference, progress):
            yield dataclasses.replace(row, place=places[row.rung])
        for rung, reason in absent:
            if rung.name not in known:
                row = row_of(plan, rung, settings_of(rung, []), Outcome("absent", reason))
                yield dataclasses.replace(row, place=places[rung.name])


def reference_losses(plan: Plan, notice: Callable[[str], None]) -> list[float]:
    """The losses that all rungs are held against; the micro-batch shrinks until it fits."""
    size = int(REFERENCE["speed.micro_batch"])
    while True:
        try:
            more = SAMPLES if plan.chosen else {}
            with _run_of(plan, {**REFERENCE, **more, "speed.micro_batch": str(size)}) as run:
                return parity_losses(run, plan.parity_steps)
        except ResourceError:
            if size == 1:
                raise
        size //= 2
        notice(f"the reference does not fit; trying it with {size} sequences at a time")


@contextlib.contextmanager
def _run_of(plan: Plan, settings: dict[str, str]) -> Iterator[Run]:
    """The run of a rung for the length of a block; over samples, of the chosen steps."""
    with borrowed_run(config_for(plan, settings)) as run:
        yield of_steps(run, plan.chosen) if plan.chosen else run


# --- the rungs --------------------------------------------------------------------------------------------------------


def _climb(
    plan: Plan,
    present: Sequence[Rung],
    rungs: Sequence[Rung],
    known: Mapping[str, BenchRow],
    reference: Sequence[float],
    progress: Callable[[BenchProgress], None],
) -> Generator[BenchRow]:
    chosen = {rung.name for rung in rungs}
    climbed: list[Rung] = []  # the rungs of the ladder whose switches are on
    timed: dict[str, BenchRow] = {}
    number = 0
    for rung in present:
        row = known.get(rung.name)
        if row is not None:
            timed |= {rung.name: row} if row.milliseconds is not None else {}
            words = dict(word.split("=", 1) for word in row.words if "=" in word)  # its micro-batch may have shrunk
            carried_up = rung.group == "ladder" and row.status == "green"
            climbed += [dataclasses.replace(rung, words=words)] if carried_up else []
            continue
        if rung.name not in chosen:
            climbed += [rung] if rung.group == "ladder" else []
            continue
        number += 1
        carried = {step.name for step in climbed}
        if rung.group == "without" and rung.switch not in carried:
            reason = f"{rung.switch} is not in the full set"
            yield row_of(plan, rung, settings_of(rung, climbed), Outcome("absent", reason))
            continue

        def tell(phase: str, number: int = number, name: str = rung.name) -> None:
            progress(BenchProgress(number, len(rungs), name, phase))

        rung, outcome = _measured(plan, rung, climbed, reference, tell)
        # The rung below may have turned out red: the one that is really stood on counts.
        ladder = rung.group == "ladder"
        against = rung.against if not ladder and rung.against in timed else climbed[-1].name if climbed else None
        if outcome.status == "green":
            climbed += [rung] if ladder else []
        settings = settings_of(rung, climbed)
        row = row_of(plan, dataclasses.replace(rung, against=against), settings, outcome)
        timed |= {rung.name: row} if row.milliseconds is not None else {}
        yield with_gains(row, timed)


def with_gains(row: BenchRow, rows: Mapping[str, BenchRow]) -> BenchRow:
    """The row with its gain and factor, as far as what they are over is among `rows`, by name."""

    def milliseconds(name: str | None) -> float | None:
        other = rows.get(name or "")
        if other is None:
            return None
        return other.mean_milliseconds if _periodic(row) else other.milliseconds

    own, other, base = (milliseconds(name) for name in (row.rung, row.against, "baseline"))
    if own is None:
        return row
    gain = None if other is None else other / own
    gain = 1 / gain if gain is not None and row.group == "without" else gain
    return dataclasses.replace(row, gain=gain, factor=None if base is None else base / own)


def _periodic(row: BenchRow) -> bool:
    return any(word in PERIODIC for word in row.words)


def _other_steps(row: BenchRow, steps: int) -> bool:
    """Whether a row was timed for more or fewer steps than are asked for now, and not only because it is slow."""
    if row.milliseconds is None or _periodic(row):
        return False
    seconds = row.steps * row.milliseconds / 1000
    return row.steps > steps or (row.steps < steps and seconds < TIMED_SECONDS / 2)


def _measured(
    plan: Plan, rung: Rung, climbed: Sequence[Rung], reference: Sequence[float], tell: Callable[[str], None]
) -> tuple[Rung, Outcome]:
    """The rung as it was measured, which may have a smaller micro-batch than was asked for."""
    while True:
        tell("parity")
        settings = settings_of(rung, climbed)
        try:
            return rung, _try(plan, rung, settings, reference, tell)
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
    plan: Plan, rung: Rung, settings: dict[str, str], reference: Sequence[float], tell: Callable[[str], None]
) -> Outcome:
    tolerance = tolerance_of(settings)
    with _run_of(plan, settings) as run, trick(rung.trick, plan.device) as after_step:
        notices = list(refusals(run.speed, settings).values())
        with Steps(run, after_step=after_step) as stepping:
            early = stepping.take(plan.parity_steps)
            parity = largest_difference([report.loss for report in early], reference)
            notices += run.new_notices.take()
            lost = given_up(notices, rung)
            if lost is not None:
                return Outcome("failed", lost, parity, None, run.speed)
            if not parity <= tolerance:
                differs = f"the losses differ by {parity:.2g}, more than {tolerance:g}"
                return Outcome("red", "; ".join([differs, *notices]), parity, None, run.speed)
            tell("timing")
            typical = statistics.median(report.seconds for report in early[len(early) // 2 :])
            whole = math.lcm(PERIOD if rung.trick in PERIODIC else 1, len(plan.chosen) or 1)
            timed = stepping.take(step_count(plan.steps, typical, whole=whole))
        notices += run.new_notices.take()
        return Outcome("green", "; ".join(notices), parity, summary_of(run, early, timed), run.speed)


def given_up(notices: Sequence[str], rung: Rung) -> str | None:
    """The message by which a run gave up the very switch that a rung is about: its speed would be another one's."""
    names = [path.removeprefix("speed.") for path in rung.words]
    return next((line for line in notices for name in names if line.startswith(f"{name} became ")), None)


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest distance of two runs at any step; a loss that is no number is infinitely far away."""
    pairs = zip(losses, reference, strict=True)
    distances = [abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf for one, other in pairs]
    return max(distances)


def step_count(steps: int, seconds: float, *, whole: int = 1) -> int:
    """How many steps to time when one takes `seconds`: as asked for, fewer when slow, in whole periods of a trick."""
    count = max(FEWEST_STEPS, min(steps, int(TIMED_SECONDS / max(seconds, 1e-9))))
    return -(-count // whole) * whole


def row_of(plan: Plan, rung: Rung, settings: dict[str, str], outcome: Outcome) -> BenchRow:
    speed, claim = outcome.speed, None if plan.chosen else claim_of(rung.name)  # guides tell of pretraining
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
        claim="" if claim is None else claim.text,
        claim_low=None if claim is None else claim.low,
        claim_high=None if claim is None else claim.high,
        config=plan.config.output.name,
        config_words=plan.config_words,
        data=plan.data,
        parameters=parameter_count(plan.config.model, plan.vocab),
        context=plan.config.model.context,
        batch_tokens=plan.batch_tokens,
        micro_batch=None if speed is None else speed.micro_batch,
        accumulation=None if speed is None else speed.accumulation,
        device=plan.machine,
        flatout=flatout.__version__,
        torch=torch.__version__,
        commit=plan.commit,
        **{**timed, "milliseconds": milliseconds},
    )
