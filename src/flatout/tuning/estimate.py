"""Time, memory and cost of a run, from a short timed piece of that very run.

Idea: some real steps are timed by the protocol of `measure.py`, an evaluation, a sample and a checkpoint once each, and
the config says how often each of them will come.

Contract:
- Every figure says how it came about: `counted` (exact, from the config and the data), `measured` here, `projected`
  (something measured, times how often), `estimated` by a formula without measuring, or `unknown`. No figure is made
  up: without a probe there is no time.
- Nothing is left behind: the model is the probe's own, data is read or made in a temporary folder, the checkpoint goes
  to a temporary folder on the disk of the run, random states and torch's switches are borrowed.
- A run that does not fit is an answer: the result holds the sentence in `problem`, and a way out.
Trap: the sum is that of a run that goes through. Early stopping ends sooner, and a checkpoint at every evaluation is
assumed where the best one is kept.
Trap: the mean of the steps adds up to a run's time, not their median. It needs some seconds of steps.
"""

import contextlib
import dataclasses
import mmap
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.config.sections import keeps_best
from flatout.device import out_of_memory
from flatout.engine.evaluate import evaluate
from flatout.engine.run import Run
from flatout.engine.saver import Saver
from flatout.engine.state import Progress, capture
from flatout.errors import ConfigError, DataError, ResourceError, many
from flatout.files import disk_errors
from flatout.generation.engine import generate_tokens
from flatout.generation.sampling import Sampling
from flatout.model.count import LayerRow, parameter_count, table_count
from flatout.resolve.checks import check_memory
from flatout.resolve.length import Visits, visits_of
from flatout.resolve.memory import checkpoint_size, layers_of, trained_count
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import planned
from flatout.rows import (
    OWN,
    Block,
    Heading,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_bytes,
    human_count,
    human_seconds,
    or_dash,
)
from flatout.shown import Shown
from flatout.tuning.measure import (
    WARMUP,
    Steps,
    borrowed_run,
    free_memory,
    machine_of,
    of_steps,
    summary_of,
    with_sequences,
)
from flatout.tuning.practice_data import PracticeSamples, is_made_up, practice_config, practice_samples, scratch_folder

SECONDS = 15.0  # of timed steps; what else is timed comes on top
_UNTIMED = "it needs timed steps, and there were none"
_MOMENTS = "fp32 weights and two moments"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the time of a run: `times` times `each` seconds, and `once` for what only the first of them costs."""

    name: str
    times: int
    each: Figure
    once: float
    seconds: Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateResult(Shown):
    """What a run will be like. Seconds are of the clock on the wall, bytes of the device unless `disk` is said.

    `peak_estimate` is the formula's (model/count.py; on a CPU, where torch's own share counts too, with the process as
    it is before the model), `peak_measured` the most that was held in the probe, all parts of it included.
    """

    config: str
    device: str
    flatout: str
    torch: str
    data: str
    problem: str  # why it does not fit, and `way_out` what would; empty where it does
    way_out: str
    parameters: Figure
    steps: Figure
    batch_tokens: int
    micro_batch: int
    accumulation: int
    context: int
    tokens: Figure
    epochs: Figure
    tokens_per_parameter: Figure
    tokens_per_second: Figure
    step_seconds: Figure
    spread: float | None
    mfu: Figure
    seconds: Figure
    parts: tuple[TimePart, ...]
    price: float | None
    cost: Figure
    peak_estimate: Figure
    peak_measured: Figure
    device_bytes: int | None
    checkpoint_bytes: Figure
    disk_bytes: Figure
    memory_parts: dict[str, int]  # of `peak_estimate`; `later` is to be taken off
    layers: tuple[LayerRow, ...]
    notes: tuple[str, ...]
    probe_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"type": "estimate", **dataclasses.asdict(self)}

    def sheet(self) -> Sheet:
        return sheet_of(self)


def estimate(
    loaded: LoadedConfig,
    *,
    price: float | None = None,
    seconds: float = SECONDS,
    probe: bool = True,
    imported: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> EstimateResult:
    """What the run of a config will take. `price` is per hour, `seconds` what steps may be timed for.

    `imported` is what importing took before the config was looked at; it is counted into the start-up. `notice` hears
    what is being done.
    """
    if loaded.config.train.minutes is not None:
        raise ConfigError(
            f"the run takes {many(loaded.config.train.minutes, 'minute')}, as train.minutes says",
            "give its length in train.steps, train.tokens or train.epochs to have its time estimated",
        )
    began = time.monotonic()
    with scratch_folder("flatout-estimate-") as scratch:
        notice("opening the data")
        practice, said = None, list[str]()
        if not loaded.config.fine_tunes:
            fitted, described = practice_config(loaded, scratch, said.append)
        else:
            practice = practice_samples(loaded, scratch, notice)
            data, described = practice.settings.config.data, practice.described
            fitted = dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))
        made_up = is_made_up(fitted.config.data, scratch)
        if made_up and loaded.config.train.epochs is not None:
            raise DataError(
                "train.epochs counts passes over data that is not prepared, so the length of the run is not known",
                "prepare it with `flatout prepare`, or give train.tokens or train.steps instead",
            )
        plan, streaming = planned(fitted, must_fit=False), loaded.config.data_kind == "stream"
        looked = _Look(plan, practice, said, made_up=made_up, streaming=streaming, began=began)
        problem, way_out, timed = "", "", None
        try:
            if probe:
                timed = time_run(
                    fitted,
                    validation_tokens=looked.validation_tokens,
                    seconds=seconds,
                    notice=notice,
                    practice=practice,
                )
            else:
                check_memory(plan, resumed=False)
        except ResourceError as error:
            problem, way_out = error.message, error.hint
        return looked.result(described, timed, (problem, way_out), price, imported)


class _Look:
    """What is known of a config's run without building it."""

    def __init__(
        self,
        plan: RunPlan,
        practice: PracticeSamples | None,
        said: Sequence[str],
        *,
        made_up: bool,
        streaming: bool,
        began: float,
    ) -> None:
        self.plan, self.practice, self.said, self.made_up, self.began = plan, practice, said, made_up, began
        self.speed, self.vocab, self.streaming = plan.speed, plan.vocab, streaming
        facts, there, asked = plan.data.facts, plan.data.val.tokens - 1, plan.eval.tokens
        self.windows, self.sequences = facts.windows, facts.batch_samples or plan.schedule.at(0).windows
        self.batch_tokens = plan.train.batch_tokens if facts.step_tokens is None else round(facts.step_tokens)
        self.validation_tokens = there if asked is None else min(asked, there)
        if made_up or streaming:
            self.windows, self.validation_tokens = None, asked
        self.parameters = parameter_count(plan.model, plan.vocab)
        self.trained = trained_count(plan.settings.config, plan.vocab)
        self.base = _resident_bytes() if self.speed.device.kind == "cpu" else 0

    def result(
        self, data: str, timed: Timed | None, problem: tuple[str, str], price: float | None, imported: float | None
    ) -> EstimateResult:
        plan, speed, steps = self.plan, self.speed, self.plan.steps
        visits = visits_of(plan.eval, plan.checkpoint, steps, self.windows, self.sequences)
        tokens = steps * self.batch_tokens
        parts = () if timed is None else self._parts(timed, steps, visits, imported)
        missing = "without what libraries load at the first step" if speed.device.kind == "cpu" else ""
        epochs = None if self.windows is None else steps * self.sequences / self.windows
        return EstimateResult(
            config=plan.output.name,
            device=machine_of(speed.device, speed.threads),
            flatout=flatout.__version__,
            torch=torch.__version__,
            data=data,
            problem=problem[0],
            way_out=problem[1],
            parameters=Figure(self.parameters, "counted", self._trained_words() or self._table_words()),
            steps=Figure(steps, "counted"),
            batch_tokens=self.batch_tokens,
            micro_batch=speed.micro_batch,
            accumulation=speed.accumulation,
            context=plan.model.context,
            tokens=Figure(tokens, "counted"),
            epochs=_known(
                epochs, "counted", why="the data is not prepared" if self.made_up else "a stream is not counted"
            ),
            tokens_per_parameter=_known(
                None if self.practice is not None else tokens / self.parameters,
                "counted",
                why=f"the model has learned before; {self._trained_words()}",
            ),
            spread=None if timed is None else timed.spread,
            parts=parts,
            price=price,
            peak_estimate=Figure(self.base + plan.memory.total, "estimated", missing),
            device_bytes=speed.device.memory_bytes,
            memory_parts={"process": self.base} | dataclasses.asdict(plan.memory),
            layers=layers_of(plan.model, self.vocab, speed) if self.practice is None else (),
            notes=tuple(self._notes(timed)),
            probe_seconds=time.monotonic() - self.began,
            **_rates(timed),
            **_costs(parts, price),
            **self._disk(timed, visits),
        )

    def _disk(self, timed: Timed | None, visits: Visits) -> dict[str, Figure]:
        """What a checkpoint takes, and all that are there at once."""
        size = checkpoint_size(self.trained, self.plan.model, self.plan.optim, self.plan.settings.config.speed)
        size = Figure(size, "estimated", _MOMENTS)
        if timed is not None and timed.checkpoint_bytes is not None:
            size = Figure(timed.checkpoint_bytes, "measured")
        # Kept ones, the best, and the one being written before an older one goes.
        kept = self.plan.checkpoint.keep + keeps_best(self.plan.eval, self.plan.checkpoint)
        at_once = min(visits.checkpoints, kept + 1)
        every = Figure((size.value or 0) * at_once, "projected", f"{at_once} at once")
        return {"checkpoint_bytes": size, "disk_bytes": every}

    def _parts(self, timed: Timed, steps: int, visits: Visits, imported: float | None) -> tuple[TimePart, ...]:
        def part(name: str, times: int, each: Figure, once: float = 0.0) -> TimePart:
            total = each
            if each.value is not None:
                total = Figure(times * each.value + (once if times else 0.0), "projected", each.note)
            elif not times:
                total = Figure(0.0, "counted")
            return TimePart(name=name, times=times, each=each, once=once, seconds=total)

        start = timed.setup + timed.first + (imported or 0.0)
        words = ["imports"] if imported is not None else []
        words += ["data and model", "what the first step takes beyond a later one"]
        return (
            part("start-up", 1, Figure(start, "measured", ", ".join(words))),
            part("training", steps, Figure(timed.step, "measured", timed.note)),
            part("evaluations", visits.evaluations, timed.evaluation, timed.evaluation_once),
            part("samples", visits.samples, timed.sample),
            part("checkpoints", visits.checkpoints, timed.checkpoint),
        )

    def _table_words(self) -> str:
        tables = table_count(self.plan.model, self.vocab)
        return f"{self.parameters - tables:,} dense, {tables:,} in tables" if tables else ""

    def _trained_words(self) -> str:
        return "" if self.practice is None else f"{self.trained:,} values are trained"

    def _notes(self, timed: Timed | None) -> Iterator[str]:
        yield from self.said
        if self.made_up:
            on_what = "" if timed is None else ", and steps were timed on random tokens"
            yield f"the data is not prepared: preparing it is not counted{on_what}"
        if self.streaming and timed is not None:
            yield "the text is streamed: reading, cleaning and tokenizing it while training is not in the timed steps"
        if self.plan.eval.patience:
            yield "eval.patience is set: the run may stop earlier"
        saving = self.plan.checkpoint
        if keeps_best(self.plan.eval, saving) and saving.every != self.plan.eval.every:
            yield "the best checkpoint is kept: one at every evaluation is assumed"


def _known(value: float | None, how: str, note: str = "", *, why: str) -> Figure:
    """A figure, or `why` there is none."""
    return Figure(None, "unknown", why) if value is None else Figure(value, how, note)


def _rates(timed: Timed | None) -> dict[str, Figure]:
    """What the timed steps were like."""
    names = ("tokens_per_second", "step_seconds", "peak_measured")
    if timed is None:
        return dict.fromkeys(names, Figure(None, "unknown", _UNTIMED)) | {
            "mfu": Figure(None, "unknown", "no timed steps")
        }
    return {
        "tokens_per_second": Figure(timed.tokens_per_second, "measured", timed.note),
        "step_seconds": Figure(timed.step, "measured", timed.note),
        "peak_measured": _known(timed.peak_bytes, "measured", why="Windows does not report it"),
        "mfu": _known(timed.mfu, "measured", why="the peak rate of this device is not known"),
    }


def _costs(parts: Sequence[TimePart], price: float | None) -> dict[str, Figure]:
    """Time and money of the whole run; a part without a figure is named."""
    total = sum(part.seconds.value or 0.0 for part in parts) if parts else None
    missing = ", ".join(part.name for part in parts if part.seconds.value is None) if parts else _UNTIMED
    without = f"without {missing}, which is unknown" if missing else ""
    money = None if total is None or price is None else price * total / 3600
    no_money = "give a price per hour with --price" if price is None else missing
    return {
        "seconds": _known(total, "projected", without, why=missing),
        "cost": _known(money, "projected", without, why=no_money),
    }


def _resident_bytes() -> int:
    """Memory of this process as it is now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):  # only Linux has it
        return 0
    return pages * mmap.PAGESIZE


# --- the timed piece of the run ---------------------------------------------------------------------------------------


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
    sampling = Sampling(temperature=run.plan.eval.sample_temperature)
    how = {"vocab": run.data.tokenizer.vocab, "stops": run.data.stops, "sampling": sampling}
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


# --- what is shown ----------------------------------------------------------------------------------------------------

_MEMORY_PARTS = {
    "process": "the process before the model",
    "optimizer": "optimizer's state",
    "activations": "activations",
    "working": "alive for a moment",
    "later": "gradients in their place",
    "graphs": "CUDA graphs",
}


def sheet_of(result: EstimateResult) -> Sheet:
    """The whole sheet. Every figure stands beside the word that says how it came about."""
    shape = f"{result.micro_batch} x {result.context} x {result.accumulation}"
    steps = f"{result.steps.value:,.0f} steps of {result.batch_tokens:,} tokens ({shape})"
    rows = list(_rows(result))
    blocks: list[Block] = [
        Sentence(f"{result.config}: {steps}, on {result.device}, torch {result.torch}"),
        Sentence(f"data: {result.data}"),
        Sentence(""),
        Table(rows=rows, left=("  ", "   ")),
    ]
    if result.layers:
        layers = [
            ResultRow(
                name=one.name,
                cells={
                    "times": f"{one.times:,}",
                    "parameters": f"{one.parameters:,}",
                    "FLOP per token": human_count(one.flops),
                    "kept": human_bytes(one.kept_bytes),
                },
            )
            for one in result.layers
        ]
        title = "layers, each; what is kept for backward is of one micro-batch"
        blocks += [Heading(title), Table(rows=layers, names="layer")]
    closing = ["", _meanings(rows), *(f"note: {note}" for note in result.notes)]
    return Sheet(blocks=[*blocks, *map(Sentence, closing)])


def _rows(result: EstimateResult) -> Iterator[ResultRow]:
    yield dataclasses.replace(_row("time to finish", result.seconds, _seconds), tone=OWN)
    for part in result.parts:
        times = "" if part.times == 1 or part.each.value is None else f"{part.times:,} x {_seconds(part.each.value)}"
        once = f"{_seconds(part.once)} more the first time" if part.once >= 0.05 and part.times else ""
        # A part's sum is its own figure times a count; how that figure came about is what there is to say.
        note = ", ".join(word for word in (times, part.each.note, once) if word)
        yield _row(f"  {part.name}", Figure(part.seconds.value, part.each.how, note), _seconds)
    spread = "" if result.spread is None else f", quartiles {100 * result.spread:.0f}% apart"
    speed = dataclasses.replace(result.tokens_per_second, note=result.tokens_per_second.note + spread)
    yield _row("speed", speed, "{:,.0f} tokens/s")
    if result.mfu.value is not None:
        yield _row("  of the card's peak", result.mfu, "{:.1%}")
    yield _row("tokens", result.tokens, human_count)
    yield _row("  epochs", result.epochs, "{:.2f}")
    parameters = f"{result.parameters.value:,.0f} parameters"
    if result.tokens_per_parameter.value is not None and result.parameters.note:
        parameters += f" ({result.parameters.note})"
    yield _row("  per parameter", result.tokens_per_parameter, "{:.2f}", parameters)
    have = "" if result.device_bytes is None else f"of {human_bytes(result.device_bytes)}"
    yield _row("peak memory", result.peak_measured, human_bytes, have)
    yield _row("  by formula", result.peak_estimate, human_bytes)
    for name, size in result.memory_parts.items():
        if size:
            shown = f"{'-' if name == 'later' else ''}{human_bytes(size)}"
            yield ResultRow(
                name=f"    {_MEMORY_PARTS.get(name, name)}", cells={" ": shown, "  ": "estimated", "   ": ""}
            )
    yield _row("checkpoint", result.checkpoint_bytes, human_bytes)
    yield _row("  on disk at most", result.disk_bytes, human_bytes)
    price = "" if result.price is None else f"at {result.price:g} per hour"
    yield _row("cost", result.cost, "{:,.2f}", price)


def _row(name: str, figure: Figure, form: str | Callable[[float], str], note: str = "") -> ResultRow:
    notes = [note, figure.note] if figure.value is not None else [figure.note or note]
    shown = ", ".join(word for word in notes if word)
    return ResultRow(
        name=name, cells={" ": or_dash(figure.value, form), "  ": figure.how, "   ": shown}, value=figure.value
    )


def _meanings(rows: Sequence[ResultRow]) -> str:
    """The meaning of each word that says how a figure came about."""
    used = {row.cells["  "] for row in rows if row.cells[" "] != "-"}
    meanings = {
        "counted": "exact",
        "measured": "here, just now",
        "projected": f"{'measured' if 'measured' in used else 'estimated'}, times how often",
        "estimated": "by formula",
    }
    return "; ".join(f"{how}: {meaning}" for how, meaning in meanings.items() if how in used)


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"
    return f"{value:.1f}s" if value < 90 else human_seconds(value)
