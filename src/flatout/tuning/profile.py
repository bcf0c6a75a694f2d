"""A few real training steps under torch's profiler, and everything that comes of them in one folder.

    trace.json.gz            for Perfetto or chrome://tracing, with the ranges of `trace.RANGES` by name
    kernels.csv              every kernel, or on a CPU every operator, with its kind and its share
    profile.json             all figures and the verdict, for programs

Idea: the profiler slows the host down, so a step that waits for its host looks worse under it than it is. Steps are
therefore timed without it first, in the same process; the profiler then says what the device did in them.

Contract: the run's own code is not touched. Ranges are put around parts of its `TrainStep` for the profiled steps and
taken off again, also after an error; no switch of torch stays changed. Nothing but the folder is written.
Several ranks take the same steps: all but the first `attend`, and each says how long it worked and waited.
Trap: a step trains. A run that was profiled has moved its weights; it is built for the occasion and thrown away.
Trap: a replayed graph runs none of our Python, so forward and backward are one piece there: `micro-batch`.
Trap: the wait for the first batch and the first steps (compiling, recording, tuning) are in no figure but peak memory.

What holds the memory of a run, in a few lines.

Idea: a peak is one number, and the question is what it is made of. Weights, gradients and moments are counted as the
tensors they are; what is left of the measured peak is activations and whatever lives for a moment only. The estimate
that every run prints before its start stands beside it, so that it can be held to the truth.

Contract: `memory_parts` reads and changes nothing.

Parts of a step by name in a trace of torch's profiler, put around it from outside and taken off again.
"""

import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

import flatout
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.source import DEFAULT, IN_PYTHON
from flatout.device import Device, out_of_memory, peak_memory_bytes
from flatout.engine.run import Run
from flatout.engine.spans import PendingReports, SpanTotals
from flatout.engine.step import TrainStep
from flatout.errors import HardwareError, UserError
from flatout.files import disk_errors, write_whole
from flatout.host import CoreUse, ThreadTrial, core_clock, core_use, usable_cores
from flatout.model.count import parameter_count
from flatout.model.protocol import LanguageModel
from flatout.records import SLOW_RANK, slowest_over_median
from flatout.resolve.case import Probes, ShardingChoice
from flatout.resolve.fit_check import memory_on
from flatout.resolve.switches import resolve_speed
from flatout.tuning.bottleneck import STEP, Diagnosis, Kernel, Measurements, Range, TraceFacts, judge, read_trace
from flatout.world import Reducer


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """One line of what holds memory; `measured` and `estimated` in bytes, None where it is not known."""

    name: str
    measured: int | None
    estimated: int | None


def memory_parts(run: Run) -> tuple[MemoryPart, ...]:
    """What holds memory. On CUDA the parts add up to the measured peak; elsewhere only tensors can be counted."""
    estimate, device = run.plan.memory, run.speed.device
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    gradients = sum(parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)
    # Those of torch's autocast live inside a step only, and count as working memory.
    narrow = run.model.narrow.weights.copies.values()
    copied = itertools.chain.from_iterable((one.values_MK, one.turned_KM, one.unit) for one in narrow)
    copies = sum(tensor.nbytes for tensor in copied if tensor is not None)
    tensors = list(run.step.optimizer.tensors().values())
    moments = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.kind)
    passing = estimate.activations + estimate.working + estimate.graphs - estimate.later
    parts = [
        MemoryPart("weights", weights, weights),
        MemoryPart("copies of weights in narrower types", copies, estimate.weights - weights),
        MemoryPart("gradients", gradients, estimate.gradients),
        MemoryPart("optimizer's moments", moments, estimate.optimizer),
    ]
    if device.kind != "cuda":
        parts.append(MemoryPart("activations and working memory at the peak", None, passing))
        peak = peak_memory_bytes(device.torch_device)
        return (*parts, MemoryPart("the whole process at its peak, Python and torch included", peak, None))
    torch.cuda.synchronize(device.torch_device)
    where = device.torch_device
    between, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    peak, most_reserved = torch.cuda.max_memory_allocated(where), torch.cuda.max_memory_reserved(where)
    kept = sum(parameter.grad.nbytes for parameter in run.model.parameters() if parameter.grad is not None)
    others = max(0, between - weights - copies - moments - kept)
    parts += [
        MemoryPart("tokens on the device, libraries", others, None),
        MemoryPart("activations and working memory at the peak", max(0, peak - between - (gradients - kept)), passing),
        MemoryPart("peak allocated", peak, estimate.total),
        MemoryPart("allocated between two steps", between, None),
        MemoryPart("cached by the allocator between two steps", reserved - between, None),
        MemoryPart("peak reserved", most_reserved, None),
    ]
    host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    return (*parts, *([MemoryPart("moments in the host's memory", host, None)] if host > 2**20 else []))


@contextlib.contextmanager
def quiet_profiler(activities: Sequence[ProfilerActivity]) -> Iterator[torch.profiler.profile]:
    """torch's profiler without the reminder, at every first start in torch 2.11, that a second cycle forgets the first.

    There is one cycle here. `acc_events`, which the reminder names, would silence it too, but makes a Python object of
    every event when the profiler stops: seconds of work for nothing.
    """
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events", category=UserWarning)
            profiler = stack.enter_context(torch.profiler.profile(activities=activities))
        yield profiler


@contextlib.contextmanager
def named_ranges(step: TrainStep) -> Iterator[None]:
    """Names the parts of a step in a trace: micro-batch, in it forward and backward; optimizer, in it reduction."""
    micro_batch, update, model = step.run_micro_batch, step._update, _NamedModel(step.model)

    def named_micro_batch(*values: Any) -> Tensor:
        with record_function("micro-batch"), model.backward_until_the_end():
            return micro_batch(*values)

    def named_update(loss: Tensor) -> Tensor:
        with record_function("optimizer"):
            return update(loss)

    named: dict[str, Any] = {"run_micro_batch": named_micro_batch, "_update": named_update, "model": model}
    if step.reducer is not None:
        named["reducer"] = _NamedReducer(step.reducer)
    before = {name: vars(step)[name] for name in named if name in vars(step)}
    vars(step).update(named)
    try:
        yield
    finally:
        for name in named:
            vars(step).pop(name)
        vars(step).update(before)


class _NamedReducer:
    """A reducer whose wait for other ranks is named reduction."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def finish(self) -> None:
        with record_function("reduction"):
            self._reducer.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


class _NamedModel:
    """A model whose call is named forward; what follows in the same micro-batch is backward."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._backward: record_function | None = None

    def __call__(self, *values: Any) -> Any:
        self._close()
        with record_function("forward"):
            result = self._model(*values)
        self._backward = record_function("backward")
        self._backward.__enter__()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @contextlib.contextmanager
    def backward_until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None


WARMUP = 4  # steps, as in `flatout bench`
LEAST_TIMED, MOST_TIMED, TIMED_SECONDS = 4, 20, 1.0
MICRO_BATCHES = 32  # most in the profiled steps, unless --steps says more: a trace that can still be opened
TRACE, KERNELS, REPORT = "trace.json.gz", "kernels.csv", "profile.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds of one step by rank, without the profiler, and the bytes of gradients that a step adds up.

    `exposed_seconds` is the time in which the first rank's device did nothing but communicate, under the profiler.
    """

    step_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    reduction_seconds: tuple[float, ...]
    reduced_bytes: int | None
    sent_bytes: int | None  # by each rank, in a ring
    exposed_seconds: float | None = None

    @property
    def slowest(self) -> int | None:
        """The rank that takes notably longer than the median, if one does."""
        slowest, times = slowest_over_median(self.busy_seconds)
        return slowest if times > 1 + SLOW_RANK else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileReport(Measurements):
    """Everything that a profile found; seconds are of one step."""

    flatout: str
    torch: str
    config: str
    device: str
    data: str
    parameters: int
    warmup_steps: int
    timed_steps: int
    profiled_steps: int
    ranges: tuple[Range, ...]
    memory: tuple[MemoryPart, ...]
    top: tuple[Kernel, ...]
    verdict: Diagnosis
    files: tuple[str, ...]
    notices: tuple[str, ...]
    ranks: RankTimes | None = None  # where there are several

    def to_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        body = dataclasses.asdict(self) | {name: getattr(self, name) for name in _FOLLOWING}
        return {name: value for name, value in body.items() if name not in ("flops", "streaming")}


_FOLLOWING = ("idle_for_data_seconds", "idle_for_host_seconds", "tokens_per_second", "flops_per_second", "mfu")
_FOLLOWING += ("product_flops_per_second", "kernels_per_second", "mean_kernel_seconds")


def fitted(loaded: LoadedConfig, steps: int | None) -> LoadedConfig:
    """The config, long enough to be profiled. In pretraining its weights are drawn, because values cost no time; what
    is fine-tuned has its shape from its base."""
    needed = WARMUP + MOST_TIMED + (steps or MICRO_BATCHES) + 1
    train = loaded.config.train.model_copy(update={"steps": needed, "tokens": None, "epochs": None})
    drawn = {} if loaded.config.fine_tunes else {"init_from": None}
    model = loaded.config.model.model_copy(update=drawn)
    return LoadedConfig(loaded.config.model_copy(update={"train": train, "model": model}), loaded.sources)


def profile_run(
    run: Run,
    folder: Path,
    *,
    steps: int | None = None,
    data: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> ProfileReport:
    """Profiles `steps` steps of a fresh run, by default up to four, and writes the files into an existing folder."""
    device = run.speed.device
    steps = _profiled_steps(run, steps)
    with out_of_memory(), run.batches(0) as loader:
        batches = iter(loader)
        progress(f"{WARMUP} steps to warm up")
        most = _warmed_up(run, batches)
        progress("timing steps without the profiler")
        clock = core_clock()
        step_seconds, waiting, timed, ranks = _timed(run, batches, most)
        used = core_use(clock, core_clock())
        progress(f"{steps} {'step' if steps == 1 else 'steps'} under the profiler")
        events, profiled_seconds = _profiled(run, batches, steps, folder)
        progress("memory")
        memory = memory_parts(run)
    progress("reading the trace")
    facts = _facts(events, steps, step_seconds / profiled_seconds, cuda=device.kind == "cuda")
    measured = _measurements(run, facts, step_seconds, waiting, profiled_seconds, ranks, used)
    with disk_errors(KERNELS, safe=""):
        _write_kernels(facts, folder / KERNELS)
    report = ProfileReport(
        **vars(measured),
        flatout=flatout.__version__,
        torch=torch.__version__,
        config=run.plan.output.name,
        device=_name_of(device, run.speed.threads),
        data=data,
        parameters=parameter_count(run.plan.model, run.model.vocab),
        warmup_steps=WARMUP,
        timed_steps=timed,
        profiled_steps=steps,
        ranges=facts.ranges,
        memory=memory,
        top=facts.kernels[:15],
        verdict=judge(measured, lambda words: can_have(run, words)),
        files=(TRACE, KERNELS, REPORT),
        notices=tuple(run.new_notices.take()),
        ranks=ranks and dataclasses.replace(ranks, exposed_seconds=facts.exposed_seconds),
    )
    with disk_errors(REPORT, safe=""):
        write_whole(folder / REPORT, json.dumps(report.to_json(), indent=1, ensure_ascii=False).encode("utf-8"))
    return report


def attend(run: Run, *, steps: int | None = None) -> None:
    """The steps of `profile_run` in a rank that is not the first."""
    with out_of_memory(), run.batches(0) as loader:
        batches = iter(loader)
        _timed(run, batches, _warmed_up(run, batches))
        for _ in range(_profiled_steps(run, steps)):
            _one_step(run, batches)
        _wait(run.speed.device)


def _profiled_steps(run: Run, asked: int | None) -> int:
    return asked or max(1, min(4, MICRO_BATCHES // run.speed.accumulation))


# --- steps ------------------------------------------------------------------------------------------------------------


def _one_step(run: Run, batches: Iterator[Any]) -> tuple[Tensor, float]:
    """(the step's report on the device, how long the host waited for the batch)."""
    before = time.perf_counter()
    with record_function("data"):
        batch = next(batches, None)
    waited = time.perf_counter() - before
    if batch is None:
        raise ValueError(f"the run has only {run.steps} steps")
    report = run.take_step(batch)
    if run.speed.device.kind == "mps":  # it has no marks of its own, and the host would run ahead
        torch.mps.synchronize()
    return report, waited


def _warmed_up(run: Run, batches: Iterator[Any]) -> int:
    """Takes the first steps; returns how many to time at most. Several ranks have to know it beforehand."""
    for _ in range(WARMUP - 1):
        _one_step(run, batches)
    _wait(run.speed.device)
    began = time.perf_counter()
    _one_step(run, batches)
    _wait(run.speed.device)
    if run.world.size == 1:
        return MOST_TIMED
    enough = math.ceil(TIMED_SECONDS / (time.perf_counter() - began))
    return run.world.broadcast(max(LEAST_TIMED, min(MOST_TIMED, enough)))


def _timed(run: Run, batches: Iterator[Any], most: int) -> tuple[float, float, int, RankTimes | None]:
    """(median seconds of a step and of waiting for its batch, how many steps, times by rank), without the profiler."""
    pending, alone = PendingReports(run.speed.device.torch_device), run.world.size == 1
    reports, waits, totals = [], [], SpanTotals()
    for number in range(most):
        report, waited = _one_step(run, batches)
        pending.push(number, report, marks=run.step.clock.take())
        waits.append(waited)
        reports += pending.ready()
        if alone and len(waits) >= LEAST_TIMED and sum(report.seconds for report in reports) > TIMED_SECONDS:
            break
    reports += pending.drain()
    for report in reports:
        totals.add_step(report.spans)
    seconds = statistics.median(report.seconds for report in reports)
    ranks = None if alone else _rank_times(run, seconds, totals)
    return seconds, statistics.median(waits), len(reports), ranks


def _rank_times(run: Run, step_seconds: float, totals: SpanTotals) -> RankTimes:
    """All ranks must ask for it together."""
    own = [step_seconds, totals.busy / totals.steps, totals.seconds["reduction"] / totals.steps]
    steps, busy, waits = zip(*run.world.gather(own), strict=True)
    size, reduced = run.world.size, getattr(run.step.reducer, "reduced_bytes", None)
    sent = None if reduced is None else round(2 * (size - 1) / size * reduced)
    return RankTimes(
        step_seconds=steps, busy_seconds=busy, reduction_seconds=waits, reduced_bytes=reduced, sent_bytes=sent
    )


def _profiled(run: Run, batches: Iterator[Any], steps: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """(the trace's events, seconds of a step under the profiler); the trace is in the folder then."""
    device = run.speed.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    with named_ranges(run.step), quiet_profiler(activities) as profiler:
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            with record_function(STEP):
                _one_step(run, batches)
        _wait(device)
        seconds = (time.perf_counter() - began) / steps
    with disk_errors(TRACE, safe=""):
        with tempfile.TemporaryDirectory(prefix=".flatout-trace-", dir=folder) as scratch:
            path = Path(scratch) / "trace.json"
            profiler.export_chrome_trace(str(path))
            content = path.read_bytes()
        write_whole(folder / TRACE, gzip.compress(content, 6, mtime=0))
    # A kernel's name may hold anything; a trace that only a strict reader refuses is still worth reading.
    return json.loads(content.decode("utf-8", errors="replace"), strict=False)["traceEvents"], seconds


def _wait(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch_device)
    elif device.kind == "mps":
        torch.mps.synchronize()


# --- figures ----------------------------------------------------------------------------------------------------------


def _facts(events: list[dict[str, Any]], steps: int, factor: float, *, cuda: bool) -> TraceFacts:
    """What a trace says; without a device, with the times of its operators as they are without the profiler."""
    facts = read_trace(events, steps, device=cuda)
    if cuda and not facts.kernels:
        raise HardwareError(
            "torch's profiler saw no kernels on the device",
            "the driver may keep its counters to administrators; KINETO_LOG_LEVEL=1 shows what it says",
        )
    if cuda:
        return facts
    kernels = [dataclasses.replace(kernel, seconds=factor * kernel.seconds) for kernel in facts.kernels]
    ranges = [dataclasses.replace(one, host_seconds=factor * one.host_seconds) for one in facts.ranges]
    return TraceFacts(factor * facts.busy_seconds, tuple(kernels), tuple(ranges))


def _measurements(
    run: Run,
    facts: TraceFacts,
    step_seconds: float,
    waiting: float,
    profiled_seconds: float,
    ranks: RankTimes | None = None,
    cores: CoreUse | None = None,
) -> Measurements:
    tokens, slowest = run.step_tokens, None if ranks is None else ranks.slowest
    return Measurements(
        device_kind=run.speed.device.kind,
        step_seconds=step_seconds,
        profiled_step_seconds=profiled_seconds,
        busy_seconds=facts.busy_seconds,
        data_wait_seconds=waiting,
        seconds_by_kind=facts.by_kind(),
        kernels_per_step=sum(kernel.calls for kernel in facts.kernels),
        batch_tokens=tokens,
        batch_setting="chat.batch_samples" if run.plan.fine_tunes else "train.batch_tokens",
        flops=run.plan.flops_per_token * tokens / run.world.size,
        peak_flops_per_second=run.speed.device.peak_flops,
        micro_batch=run.step.micro_batch,
        accumulation=run.speed.accumulation,
        context=run.plan.model.context,
        streaming=run.plan.settings.config.data_kind == "stream",
        used={feature.name: feature.used for feature in run.speed.features},
        reduction_seconds=0.0 if ranks is None else ranks.reduction_seconds[run.world.rank],
        reduces_in="" if ranks is None else run.plan.parallel.reduce,
        slowest="" if slowest is None else f"rank {slowest}",
        threads_waiting=None if cores is None else cores.waiting,
        cores=usable_cores(),
        cores_others=None if cores is None else cores.others,
    )


def can_have(run: Run, words: str) -> bool:
    """Whether this machine and model can have settings, by the rules of a run and by its estimate of memory."""
    answers = Probes(  # trying out kernels and compilers would take longer than the profile
        attention=lambda *_, **__: None,
        picked=lambda *_, **__: None,
        compiler=lambda _: None,
        threads=lambda *_: ThreadTrial(seconds={run.speed.threads: 0.0}, cores=run.speed.threads),
    )
    settings = [word.replace('"', "") for word in words.replace(", ", ",").split()]
    sources = {setting.partition("=")[0]: IN_PYTHON for setting in settings}
    device, corpus_bytes, vocab = run.speed.device, run.data.facts.corpus_bytes, run.model.vocab
    try:
        config = load_stored(run.plan.stored, settings, where="profile").config
        speed = resolve_speed(
            config,
            device,
            corpus_bytes,
            lambda path: sources.get(path, DEFAULT),
            vocab=vocab,
            step_tokens=run.data.facts.step_tokens,
            probes=answers,
            ranks=run.world.size,
            sharding=ShardingChoice(run.speed.parallel, run.speed.shards),
        )
    except UserError:
        return False
    needed = memory_on(run.data, config, vocab, speed).total + (corpus_bytes or 0 if speed.loader == "device" else 0)
    return device.kind != "cuda" or device.memory_bytes is None or needed < device.memory_bytes


def _write_kernels(facts: TraceFacts, path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", "name", "milliseconds_per_step", "calls_per_step", "mean_microseconds", "share"])
    total = sum(kernel.seconds for kernel in facts.kernels) or 1.0
    for kernel in facts.kernels:
        mean = 1e6 * kernel.seconds / max(kernel.calls, 1e-9)
        row = [kernel.kind, kernel.name, f"{1000 * kernel.seconds:.4f}", f"{kernel.calls:g}", f"{mean:.2f}"]
        writer.writerow([*row, f"{kernel.seconds / total:.4f}"])
    write_whole(path, text.getvalue().encode("utf-8"))


def _name_of(device: Device, threads: int) -> str:
    if device.kind != "cpu":
        return device.name
    return f"{device.name} ({threads} {'thread' if threads == 1 else 'threads'})"
