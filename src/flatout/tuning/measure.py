"""The timing protocol, in one place: what a tokens-per-second figure of Flatout means.

Idea: a figure is worth something only when everybody measures the same thing. Here it is real optimizer steps
(forward, backward, clip, update) on real batches of the run's own loader, timed from the end of one step to the end of
the next on the device's clock, or on the host's where there is none. First steps, which compile and warm up, are taken
and not timed. The figure is the median; how far the steps lie apart stands beside it.

Contract:
- `Steps` takes steps, `summary_of` is what they were like: first those that are not timed, then those that are.
  `after_step(number)` is called on the host after each step, inside the timed region: what it costs is measured.
- Peak memory is reset when stepping begins and covers the first step too: a graph is captured, and its memory claimed,
  there and never again.
- Running out of device memory is a `ResourceError`, raised after nothing but this run's own state has changed.
- `borrowed_run` leaves nothing behind: not the weights, not a compiled function, not a cached block of memory.
Trap: a step trains. A run that was measured has moved its weights, moments and random stream; build another one.
Trap: an exception's traceback keeps the frames of the step alive, and they keep the step's tensors. Leave the `except`
block before asking for memory again.

`WholeRun` is for verbs that compare losses: a run through the same loop as `flatout train`, which writes nothing but to
a temporary folder. If it diverges, runs out of memory or is no valid config, that is its status and not an error.
"""

import contextlib
import dataclasses
import itertools
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, final

import torch

from flatout import device
from flatout.config.load import LoadedConfig
from flatout.data.batch import Schedule
from flatout.device import Device, out_of_memory
from flatout.engine.loop import train_loop
from flatout.engine.run import Run
from flatout.engine.spans import PendingReports, StepReport
from flatout.errors import ConfigError, DeviceMemoryError, DivergedError, HardwareError, ResourceError
from flatout.model.quantize import QuantizedWeight
from flatout.records import EvalRecord, StepRecord
from flatout.resolve.resolve import planned
from flatout.tuning.changes import with_values
from flatout.world import World

WARMUP = 4  # steps: compile, autotuning's last surprises, 8-bit scales, recording of graphs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the timed steps of a run were like.

    `milliseconds` is the median step, `spread` the distance between the quartiles as a share of it, and
    `mean_milliseconds` sees what happens in some steps only; `compile_seconds` is what the first step took beyond a
    median one, 0 where nothing was compiled.
    """

    milliseconds: float
    mean_milliseconds: float
    spread: float
    peak_bytes: int | None
    compile_seconds: float
    steps: int


def parity_losses(run: Run, steps: int, began: Callable[[float], None] = lambda _: None) -> list[float]:
    """The losses of the first `steps` real training steps; a loss is of the weights before its step.

    `began` gets the seconds of the second step, which compiles nothing.
    """
    with Steps(run) as stepping:
        first = stepping.take(min(2, steps))
        began(first[-1].seconds)
        return [report.loss for report in (*first, *stepping.take(steps - len(first)))]


@final
class Steps:
    """A run being stepped: one loader and one clock, from the run's first batch on."""

    def __init__(self, run: Run, *, after_step: Callable[[int], None] | None = None) -> None:
        self.run = run
        self.device = run.speed.device.torch_device
        self.after_step = after_step
        _reset_peak(self.device)
        self.pending = PendingReports(self.device)
        with out_of_memory():
            self.loader = run.batches(0)

    def take(self, count: int) -> list[StepReport]:
        """The next `count` steps, all of them finished on the device."""
        self.pending.restart()
        reports: list[StepReport] = []
        with out_of_memory():
            for _ in range(count):
                batch = next(self.loader, None)
                if batch is None:
                    raise ValueError(f"the run has only {self.run.steps} steps")
                report = self.run.take_step(batch)
                if self.device.type == "mps":  # its marks are the host's, which would run ahead
                    torch.mps.synchronize()
                if self.after_step is not None:
                    self.after_step(batch.step + 1)
                self.pending.push(batch.step + 1, report)
                reports += self.pending.ready()
            return reports + self.pending.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()


def with_sequences(run: Run, sequences: int) -> Run:
    """The same run with this number of sequences in every step."""
    return run.replanned(schedule=Schedule.constant(sequences, run.plan.model.context))


def of_steps(run: Run, steps: tuple[int, ...]) -> Run:
    """The same run, which takes these of its steps over and over; none stands for all of them in turn."""
    if not steps:
        return run
    return run.replanned(schedule=dataclasses.replace(run.plan.schedule, chosen=steps))


def summary_of(run: Run, untimed: Sequence[StepReport], timed: Sequence[StepReport]) -> Measurement:
    """The figures of `timed` steps, of which `untimed` went before; peak memory is that of now."""
    seconds = [report.seconds for report in timed]
    median = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [median] * 3
    first = untimed[0].seconds if untimed else median
    compiles = run.speed.compile != "off" or run.speed.execution.kernels == "triton" or run.speed.cuda_graphs
    return Measurement(
        milliseconds=1000 * median,
        mean_milliseconds=1000 * statistics.fmean(seconds),
        spread=(quarters[2] - quarters[0]) / max(median, 1e-9),
        peak_bytes=run.peak_memory_bytes(),
        compile_seconds=max(first - median, 0.0) if compiles else 0.0,
        steps=len(timed),
    )


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        # Linux resets the process's peak on request; elsewhere it stays that of the largest rung so far.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextlib.contextmanager
def borrowed_run(loaded: LoadedConfig, world: World | None = None, *, beside: bool = False) -> Iterator[Run]:
    """A run with fresh weights for the length of a block; afterwards its memory and its compiled code are gone.

    The tensors go even while the run is still referenced, so one rung cannot weigh on the next. `beside` another
    borrowed run, which lasts longer, compiled code stays until that one ends.
    """
    free_memory(compiled=not beside)
    run: Run | None = None
    try:
        with out_of_memory():
            run = Run(planned(loaded, world), world)
        yield run
    finally:
        if run is not None:
            release(run)
        del run
        free_memory(compiled=not beside)


@torch.no_grad()
def release(run: Run) -> None:
    """Takes weights, gradients and moments away from a run, which is of no use afterwards."""
    if run.step.graph is not None:  # recordings keep memory, and the gradients they add to
        run.step.graph.reset()
        run.step.graph = None
    run.step.optimizer.forget()
    run.step.average = None
    run.model.narrow.forget()
    if run.adapters is not None:
        run.adapters.let_go()
    for parameter in run.model.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.parts = ()
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def free_memory(*, compiled: bool = True) -> None:
    """Forgets compiled functions and gives cached device memory back, so that a measurement begins on a clean card."""
    if compiled and "torch._dynamo" in sys.modules:  # whoever never compiled need not pay for importing a compiler
        torch._dynamo.reset()
    device.free_memory(device.detect_device().torch_device)


def machine_of(device: Device, threads: int | None = None) -> str:
    """The device by a name that distinguishes it; a CPU by its model and by how many threads compute."""
    if device.kind != "cpu":
        return device.name
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # only Linux has it
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    if threads is None:
        return f"cpu ({model})"
    return f"cpu ({model}, {threads} {'thread' if threads == 1 else 'threads'})"


# --- whole runs -------------------------------------------------------------------------------------------------------

EVALUATIONS = 8  # of a run, unless the config says more; after each it may be cut short


@final
class WholeRun:
    """One run: how it ended, its steps, and its evaluations as (tokens, seconds, loss).

    `status` is done, diverged, out_of_memory, invalid, or interrupted where the evaluations were not all asked for;
    `reason` says why.
    """

    def __init__(self) -> None:
        self.status, self.reason = "interrupted", "stopped from outside"
        self.error: DivergedError | ResourceError | ConfigError | HardwareError | None = None
        self.steps: list[float] = []
        self.tokens = self.step = 0
        self.curve: list[tuple[int, float, float]] = []

    @property
    def loss(self) -> float | None:
        """The last validation loss."""
        return self.curve[-1][2] if self.curve else None

    @property
    def seconds(self) -> float:
        """Of the training steps so far, without what only some of them have."""
        return (steady_seconds(self.steps, WARMUP) or [0.0])[-1]

    def train(self, config: Callable[[], LoadedConfig], folder: Path) -> Iterator[EvalRecord]:
        """Trains to the end and yields the evaluations. `config` may raise a `ConfigError`: then the run is invalid."""
        try:
            yield from self._evaluations(config(), folder)
            self.status, self.reason = "done", ""
        except (DivergedError, ResourceError, ConfigError, HardwareError) as error:
            self.status, self.reason = _status_of(error)
            self.error = error

    def _evaluations(self, loaded: LoadedConfig, folder: Path) -> Iterator[EvalRecord]:
        with borrowed_run(loaded) as run, contextlib.closing(
            train_loop(run, folder, resumed=None, stop=lambda: False, saves=False)
        ) as records:  # fmt: skip
            folder.mkdir(parents=True)
            for record in records:
                if isinstance(record, StepRecord):
                    self.steps.append(record.seconds)
                    self.tokens = record.tokens
                elif isinstance(record, EvalRecord):
                    self.step = record.step
                    if not math.isfinite(record.loss):
                        raise DivergedError(
                            f"the validation loss was {record.loss} at step {record.step}", "lower optim.learning_rate"
                        )
                    self.curve.append((self.tokens, self.seconds, record.loss))
                    yield record


def _status_of(error: DivergedError | ResourceError | ConfigError | HardwareError) -> tuple[str, str]:
    """The status of a run that failed, and why; an error that its config has no part in is raised again."""
    if isinstance(error, DivergedError):
        return "diverged", error.message
    if isinstance(error, ConfigError | HardwareError):
        return "invalid", error.message
    if not isinstance(error, DeviceMemoryError):
        raise error  # a full disk
    return "out_of_memory", error.message


def for_trials(loaded: LoadedConfig, evaluations: int = EVALUATIONS) -> LoadedConfig:
    """The config as a trial trains it: nothing saved, no samples, some evaluations unless the user wrote how many."""
    config, steps = loaded.config, length_of(loaded)
    every = config.eval.every
    if not loaded.sources["eval.every"].by_user and steps is not None:
        every = max(1, steps // evaluations)
    words = {"eval.every": every, "eval.sample_tokens": 0, "eval.patience": 0}
    return with_values(loaded, {**words, "checkpoint.every": 0})


def length_of(loaded: LoadedConfig) -> int | None:
    """The length of a trial, where the config says it without the data."""
    train = loaded.config.train
    return train.steps or (None if train.tokens is None else math.ceil(train.tokens / train.mean_batch))


def steady_seconds(seconds: Sequence[float], warmup: int) -> list[float]:
    """How long training had taken after each step, without what only some steps have: compiling, warming up, a load.

    Each step counts as the lower quartile of the nine around it, since what disturbs a step only makes it longer; the
    steps of the warm-up count as the first ones after it. Steps that become longer or shorter in stages are kept apart.
    """
    late = list(seconds[warmup:]) or list(seconds)
    around = [sorted(late[max(0, index - 4) : index + 5]) for index in range(len(late))]
    steady = [near[len(near) // 4] for near in around]
    return list(itertools.accumulate(steady[:1] * (len(seconds) - len(late)) + steady))
