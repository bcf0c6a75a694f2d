"""The timed piece of a run that an estimate stands on: some steps, an evaluation, a sample, a checkpoint.

Contract: steps are timed by the protocol of `measure.py`, on a model of the probe's own. The checkpoint is written to a
temporary folder on the disk on which the run will write, because disks differ; it is gone afterwards, also after
Ctrl-C. What would take too long is timed in part, and the figure says so.
Trap: a mean is what adds up to a run's time, so it is the mean of the steps and not their median. It has to be of some
seconds of steps, or one hiccup of the machine would be in every step of the run.
"""

import contextlib
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flatout.config.load import LoadedConfig
from flatout.engine.evaluate import evaluate
from flatout.engine.run import Run
from flatout.engine.saver import Saver
from flatout.engine.state import Progress, capture
from flatout.errors import ResourceError
from flatout.files import disk_errors
from flatout.generation import generate_tokens
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.memory import checkpoint_size
from flatout.rows import human_bytes
from flatout.tuning.measure import WARMUP, Steps, borrowed_run, free_memory, of_steps, summary_of, with_sequences
from flatout.tuning.practice_data import PracticeSamples

FEWEST, MOST = 8, 400  # timed steps
SHARE = 0.25  # of the time for steps; an evaluation and a sample may take so much each


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and how it came about; None where it is not known, and `note` says why."""

    value: float | None
    how: str  # counted, measured, projected, estimated or unknown
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """What the probe found. `first` is what the first step took beyond a later one, `evaluation_once` the same of the
    first evaluation."""

    steps: int
    setup: float
    first: float
    step: float
    note: str
    tokens_per_second: float
    spread: float
    mfu: float | None
    evaluation: Figure
    evaluation_once: float
    sample: Figure
    checkpoint: Figure
    checkpoint_bytes: int | None
    peak_bytes: int | None


def time_run(
    loaded: LoadedConfig,
    *,
    validation_tokens: int | None,
    seconds: float,
    notice: Callable[[str], None],
    practice: PracticeSamples | None = None,
) -> Timed:
    """Builds the run of a config, whose data is here, and times its parts; `seconds` are for the steps.

    `validation_tokens` is how many an evaluation will have, None where that is not known. `practice` are the samples of
    a run that is fine-tuned.
    """
    notice("building the model")
    free_memory()  # of whatever was here before: that is not this run's time
    began = time.perf_counter()
    with borrowed_run(loaded) as run:
        built = time.perf_counter() - began
        device = run.speed.device.torch_device
        notice("timing training steps")
        longer = run.replanned(steps=max(run.steps, 4 * MOST))
        if practice is None:
            found = _time_steps(longer, seconds)
        else:
            found = _time_sample_steps(longer, practice, seconds, run.steps)
        notice("timing an evaluation")
        evaluation, once = _time_evaluation(run, validation_tokens, SHARE * seconds)
        notice("timing a sample")
        sample = _time_sample(run, SHARE * seconds)
        peak = run.peak_memory_bytes()
        notice("timing a checkpoint")
        checkpoint, size = _time_checkpoint(run)
        if device.type == "cpu":  # what is written passes through the host's memory, which is the device's here
            peak = run.peak_memory_bytes()
        return Timed(
            steps=run.steps,
            setup=built,
            evaluation=evaluation,
            evaluation_once=once,
            sample=sample,
            checkpoint=checkpoint,
            checkpoint_bytes=size,
            peak_bytes=peak,
            **found,
        )


def _time_steps(run: Run, seconds: float) -> dict[str, Any]:
    """Whole steps where there is time for some, else shorter ones, from which a whole one follows."""
    size, count = run.step.micro_batch, run.speed.accumulation
    few = min(count, 2)
    # Two micro-batches make the moments, compile, and record graphs; how long they take says what there is time for.
    with Steps(with_sequences(run, few * size)) as steps:
        first = steps.take(1)[0].seconds
        short = min(report.seconds for report in steps.take(WARMUP - 1))
    if count == few or FEWEST * short * count / few <= seconds:
        with Steps(run) as steps:
            untimed = steps.take(2)
            wanted = int(seconds / max(untimed[-1].seconds, 1e-6))
            timed = steps.take(max(FEWEST, min(MOST, wanted)))
        found = summary_of(run, untimed, timed)
        step, spread, note = found.mean_milliseconds / 1000, found.spread, f"mean of {len(timed)} steps"
    else:
        step, spread, note = _put_together(run, short, seconds)
    return _step_figures(run, step, run.plan.train.batch_tokens / step, spread, note, first - short)


def _time_sample_steps(run: Run, practice: PracticeSamples, seconds: float, length: int) -> dict[str, Any]:
    """Whole steps, the fullest ones first, for the peak. The others differ, so the rate is over all their tokens.

    They are of the whole run, `length` steps. Each is taken once before it is timed: the first step of a shape
    compiles, or records a graph, which is start-up.
    """
    fullest = tuple(practice.largest(run.speed))
    with Steps(of_steps(run, fullest)) as steps:
        first = steps.take(1)[0].seconds
        short = min(report.seconds for report in steps.take(max(WARMUP, len(fullest))))
    wanted = min(MOST, int(seconds / max(short, 1e-6)))
    chosen = practice.spread(max(FEWEST, wanted // 2), length)
    with Steps(of_steps(run, chosen)) as steps:
        untimed = steps.take(len(chosen))
        rounds = max(1, wanted // len(chosen) - 1)
        timed = steps.take(rounds * len(chosen))
    spent = sum(report.seconds for report in timed) / rounds
    rate = sum(map(practice.tokens, chosen)) / max(spent, 1e-9)
    first += max(0.0, sum(report.seconds for report in untimed) - spent)
    spread, note = summary_of(run, untimed, timed).spread, f"mean of {len(timed)} steps"
    return _step_figures(run, practice.step_tokens / rate, rate, spread, note, first - short)


def _step_figures(run: Run, step: float, rate: float, spread: float, note: str, first: float) -> dict[str, Any]:
    peak = run.speed.device.peak_flops
    return {
        "first": max(0.0, first),
        "step": step,
        "note": note,
        "tokens_per_second": rate,
        "spread": spread,
        "mfu": None if peak is None else rate * run.plan.flops_per_token / peak,
    }


def _put_together(run: Run, short: float, seconds: float) -> tuple[float, float, str]:
    """(seconds of a whole step, spread, how). Steps of two lengths give a micro-batch's time and the update's."""
    size, count = run.step.micro_batch, run.speed.accumulation
    longer = max(3, min(count, int(seconds / 4 / short)))  # three of them take about two thirds of the time
    with Steps(with_sequences(run, 2 * size)) as steps:
        few = [report.seconds for report in steps.take(max(3, min(16, int(seconds / 4 / short))))]
    with Steps(with_sequences(run, longer * size)) as steps:
        many = [report.seconds for report in steps.take(3)]
    low, high = statistics.median(few), statistics.median(many)
    each = max((high - low) / (longer - 2), 0.5 * high / longer)
    update = max(low - 2 * each, 0.0)
    spread = (max(few) - min(few)) / max(low, 1e-9)
    return count * each + update, spread, f"put together from steps of 2 and of {longer} out of {count} micro-batches"


def _time_evaluation(run: Run, tokens: int | None, seconds: float) -> tuple[Figure, float]:
    """Seconds of an evaluation of `tokens` tokens, and what the first costs beyond that."""
    if tokens is None:
        return Figure(None, "unknown", "how much validation text there is, is not known"), 0.0
    context, size, there = run.plan.model.context, run.step.micro_batch, run.data.val.tokens - 1

    def timed(most: int) -> tuple[float, int]:
        """Seconds, and the tokens read: with documents apart, and of samples, fewer have a label."""
        began = time.perf_counter()
        batches = run.data.evaluation(size, run.speed.delivery(size, run.world), most if most < there else None)
        with out_of_memory():
            evaluate(run.model, batches, run.scope)
        return time.perf_counter() - began, min(most, there)

    cold, read = timed(min(tokens, 2 * size * context))
    warm, read = timed(read)
    most = max(read, int(read * seconds / max(warm, 1e-6)))
    spent, read = timed(tokens if 2 * most >= tokens else most)  # what is nearly whole may as well be whole
    if read >= tokens:
        return Figure(spent, "measured"), max(0.0, cold - warm)
    part = Figure(spent * tokens / max(read, 1), "projected", f"from {read:,} of {tokens:,} tokens")
    return part, max(0.0, cold - warm)


def _time_sample(run: Run, seconds: float) -> Figure:
    wanted = run.plan.eval.sample_tokens
    if not wanted:
        return Figure(0.0, "counted", "eval.sample_tokens is 0")
    prompt = run.data.val.read(0, 1).tolist() if run.plan.base is None else run.data.prompt(run.plan.eval.sample_prompt)
    taken, began, cut = 0, time.perf_counter(), False
    how = {"seed": 0, "vocab": run.data.tokenizer.vocab, "stops": run.data.stops}
    with run.scope(), out_of_memory():
        for _ in generate_tokens(run.model, prompt[-run.plan.model.context :], count=wanted, **how):
            taken += 1
            if time.perf_counter() - began > seconds and taken >= min(wanted, 8):
                cut = True
                break
    spent = time.perf_counter() - began
    if not cut:  # the whole of it, or as far as the model goes before it ends its answer
        return Figure(spent, "measured")
    return Figure(spent * wanted / taken, "projected", f"from {taken} of {wanted} tokens")


def _time_checkpoint(run: Run) -> tuple[Figure, int | None]:
    """Seconds that training stands still for one, on the disk on which the run will write, and its bytes.

    Two are saved where they are written beside training: the first one also makes the memory for the copy.
    """
    device = run.speed.device.torch_device
    need = 2 * checkpoint_size(run.trained.count, run.plan.model, run.plan.optim, run.speed)
    try:
        with _beside(Path(run.plan.output.folder or "runs")) as folder:
            free = shutil.disk_usage(folder).free
            if free < 1.1 * need:
                room, needs = human_bytes(free), human_bytes(1.1 * need)
                return Figure(None, "unknown", f"the disk has {room} free, and timing one needs {needs}"), None
            with contextlib.closing(Saver(folder, device, run.step, lambda notice: None)) as saver:
                for step in (1, 2):
                    began = time.perf_counter()
                    written = saver.begin(capture(run, Progress(step=step)))
                    seconds, saved = time.perf_counter() - began, written.result()
                    if saved.background_seconds is None:
                        return Figure(seconds, "measured"), saved.bytes
                took = f"then {saved.background_seconds:.2g} s beside training"
                return Figure(seconds, "measured", took), saved.bytes
    except ResourceError as error:
        return Figure(None, "unknown", error.message), None


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A temporary folder on the disk of a run folder that may not exist yet, and need not exist afterwards."""
    there = folder.absolute()
    while not there.is_dir():
        there = there.parent
    with (
        disk_errors(f"a checkpoint in {there}", safe=""),
        tempfile.TemporaryDirectory(prefix=".flatout-estimate-", dir=there, ignore_cleanup_errors=True) as name,
    ):
        yield Path(name)
