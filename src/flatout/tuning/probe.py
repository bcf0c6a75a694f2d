"""Trying settings on the device: real training steps including the update, timed by the protocol of `measure.py`.

Idea: one model is built and stays; another micro-batch, checkpointing or loss is another way of walking through it
(`Run.under`). A step of the whole global batch would take seconds where the micro-batch is small, so steps of two
lengths are timed, which gives the time of a micro-batch and that of the update, and a whole step follows from them. The
choice is confirmed by whole steps in the end.

Contract: nothing of the caller's is touched. The weights are the probe's own, data is read or made in a temporary
folder, the random state and torch's switches are borrowed per step, a memory limit too.
Trap: a peak counts only with gradients and moments in place, so a step has two micro-batches at least, where the batch
has two, and the first step is never the one that is timed.

Trying settings on a fine-tuning run: whole steps of its own samples.

Idea: a micro-batch is a number of packed rows, and a step has as many rows as its samples fill. So steps are not put
together from shorter ones as in pretraining: the fullest of the run are taken first, which shows whether a setting fits
at all, then some that are spread over an epoch, which show how fast it is. How many is settled by the first setting
that fits, and every other is timed on the very same steps, so that their tokens per second can be compared.

Contract: as in `probe.py`. Tokens are those that something is predicted from, without padding, as a run counts them.
`Timing.seconds` is what a step of the mean number of tokens would take.
Trap: packed rows come in several shapes, and a recording of one is made when it comes for the second time, after some
micro-batches that were not recorded. Where CUDA graphs are on, steps are taken so often before they are timed.
"""

import contextlib
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from flatout.config.facts import field_facts
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.source import Source
from flatout.data.batch import LargestRows
from flatout.device import detect_device, limit_memory, peak_memory_bytes
from flatout.engine.graphs import WARM_UPS
from flatout.engine.run import Run
from flatout.engine.spans import StepReport
from flatout.errors import HardwareError, ResourceError
from flatout.resolve.fit_check import memory_on
from flatout.resolve.memory import memory_of
from flatout.resolve.switches import Speed, resolve_speed
from flatout.tuning import probe
from flatout.tuning.changes import TUNED, kept_settings, written_paths
from flatout.tuning.measure import Steps, borrowed_run, free_memory, of_steps, with_sequences
from flatout.tuning.practice_data import PracticeSamples
from flatout.tuning.search import Candidate, Trial

TIMED_SECONDS = 0.5  # of one length of steps


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a whole optimizer step, and the most memory held."""

    seconds: float
    peak_bytes: int | None


class Probe:
    """A model on a device, and the ways in which it can be trained there."""

    def __init__(self, loaded: LoadedConfig, data: dict, memory: float | None) -> None:
        # Everything as asked for, with data that is here and steps enough; the length of the run plays no part.
        words = ["train.steps=1000", "eval.every=0"]
        words += [] if loaded.config.fine_tunes else ["model.init_from=null"]
        words += [] if memory is None else [f"speed.memory_limit={memory!r}"]
        values = {**loaded.config.model_dump(), "data": data}
        self.kept = kept_settings(loaded)
        self.kept_written = {f"speed.{name}": loaded.sources[f"speed.{name}"] for name in self.kept}
        # What a candidate cannot have is an answer; what the user wrote and cannot have is an error, raised by `check`.
        tuned = {f"speed.{name}" for name in TUNED}
        written = {path: source for path, source in written_paths(loaded).items() if path not in tuned}
        sources = dict.fromkeys(field_facts(), Source("preset", "tune")) | written
        self.settings = LoadedConfig(load_stored(values, words, where="tune").config, sources)
        speed, train = self.settings.config.speed, self.settings.config.train
        self.device = limit_memory(detect_device(speed.device), speed.memory_limit)
        if memory is not None and self.device.kind != "cuda":
            raise HardwareError(
                f"a memory of {memory:g} GiB can be emulated on a CUDA device only, and this is {self.device.name}",
                "leave --memory out",
            )
        self.sequences = train.batch_tokens // self.settings.config.model.context
        self.run: Run | None = None
        self.stack = contextlib.ExitStack()  # what the run is borrowed by
        self.vocab: int | None = None
        self.corpus_bytes: int | None = 0
        self.step_tokens: float | None = None  # of samples, on average
        self.update_seconds: dict[bool, float] = {}  # by whether the optimizer is offloaded
        self.recorded: dict[Candidate, bool] = {}  # whether a candidate's micro-batch is replayed as a graph

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.settings.config.train.batch_tokens

    def micro_batches(self) -> tuple[int, ...]:
        """The sizes that differ, ascending."""
        return divisors(self.sequences)

    def accumulation(self, candidate: Candidate) -> int:
        """Micro-batches of a step."""
        return self.sequences // candidate.micro_batch

    def check(self) -> None:
        """Refuses what the user wrote and this device cannot have, as a training run would."""
        self._resolved(self.settings, self.corpus_bytes, self.kept_written)

    def open(self, candidate: Candidate) -> None:
        """Builds the model for a way of compiling; everything else about a candidate can change later."""
        self.close()
        run = self.run = self.stack.enter_context(borrowed_run(self.settings_for(candidate)))
        self.vocab, self.corpus_bytes = run.model.vocab, run.data.facts.corpus_bytes

    def close(self) -> None:
        self.run = None
        self.stack.close()

    def settings_for(self, candidate: Candidate) -> LoadedConfig:
        values, config = {**dataclasses.asdict(candidate), "accumulation": None}, self.settings.config
        speed = config.speed.model_copy(update=values)
        return dataclasses.replace(self.settings, config=config.model_copy(update={"speed": speed}))

    def resolve(self, settings: LoadedConfig) -> Speed:
        return self._resolved(settings, self.corpus_bytes, {})

    def _resolved(self, settings: LoadedConfig, corpus_bytes: int | None, written: dict[str, Source]) -> Speed:
        known, sources = {"vocab": self.vocab, "step_tokens": self.step_tokens}, {**settings.sources, **written}
        return resolve_speed(settings.config, self.device, corpus_bytes, sources.__getitem__, **known)

    def estimate(self, candidate: Candidate) -> int:
        """Needs no model: the switches are those of the run as it was built, with the candidate's in their place."""
        assert self.run is not None
        speed = self.run.speed
        if candidate not in self.recorded:
            self.recorded[candidate] = self.resolve(self.settings_for(candidate)).cuda_graphs
        speed = dataclasses.replace(
            speed,
            **{**dataclasses.asdict(candidate), "threads": speed.threads},
            residual=speed.residual if candidate.kernels == "triton" else "fp32",
            accumulation=self.accumulation(candidate),
            cuda_graphs=self.recorded[candidate],
        )
        return self._need(speed, self.run.model.vocab)

    def _need(self, speed: Speed, vocab: int) -> int:
        return memory_of(self.settings.config, vocab, speed).total

    def capacity(self) -> int | None:
        """Bytes that a run may use: the limit, or the card without what others hold on it."""
        if self.device.kind != "cuda":
            return self.device.memory_bytes
        free, _ = torch.cuda.mem_get_info(self.device.torch_device)
        free += torch.cuda.memory_reserved(self.device.torch_device)
        return min(free, self.device.memory_bytes or free)

    def attempt(self, candidate: Candidate) -> tuple[Trial, Timing | None, bool]:
        """(what came of it, its timing, whether CUDA graphs were on). Out of memory is an answer, not an error."""
        speed = self.resolve(self.settings_for(candidate))
        missing = _difference(candidate, speed)
        if missing:
            return Trial(candidate=candidate, status="absent", reason=missing), None, False
        if speed.compile != "off":
            torch._dynamo.reset()
        timing, recorded = self._tried(candidate, self._measured)
        graphs = speed.cuda_graphs and recorded
        if not isinstance(timing, Timing):
            return Trial(candidate=candidate, status="out_of_memory", reason=timing or ""), None, graphs
        rate = self.batch_tokens / timing.seconds
        trial = Trial(candidate=candidate, status="fits", tokens_per_second=rate, peak_bytes=timing.peak_bytes)
        return trial, timing, graphs

    def confirm(self, candidate: Candidate, seconds: float) -> Timing | str | None:
        """Whole steps of the global batch; a sentence where memory runs out, None where `seconds` are not enough."""
        return self._tried(candidate, lambda run: self._whole_steps(run, seconds))[0]

    def _tried(self, candidate: Candidate, measure: Callable[[Run], Timing | None]) -> tuple[Timing | str | None, bool]:
        """What was measured of a candidate, or a sentence where memory ran out; whether no recording was given up.

        Moments, gradients and recordings are dropped afterwards: the next trial begins with weights only.
        """
        settings = self.settings_for(candidate)
        if self.run is None or self.run.speed.compile != candidate.compile:
            self.open(candidate)
        assert self.run is not None
        plan, speed = self.run.plan, self.resolve(settings)
        plan = dataclasses.replace(
            plan,
            settings=dataclasses.replace(plan.settings, config=settings.config),
            speed=speed,
            memory=memory_on(plan.data, settings.config, plan.vocab, speed),
        )
        run = self.run = self.run.under(plan)
        try:
            timing = measure(run)
        except ResourceError as error:
            timing = error.message
        recorded = run.step.graph is None or not run.step.graph.failed
        run.step.optimizer.forget()
        run.step.use_micro_batch(run.step.micro_batch)
        free_memory()
        return timing, recorded

    def _whole_steps(self, run: Run, seconds: float) -> Timing | None:
        with Steps(run) as steps:
            first = steps.take(1)[0].seconds
            if 2 * first > seconds:
                return None
            steps.take(1)
            reports = steps.take(max(1, min(3, int(seconds / max(first, 1e-3)) - 2)))
            return Timing(statistics.median(r.seconds for r in reports), self._peak(0))

    def _measured(self, run: Run) -> Timing:
        known = self.update_seconds.get(run.speed.optimizer_offload)
        return self._step_seconds(run, self.sequences // run.step.micro_batch, known)

    def _step_seconds(self, run: Run, count: int, known: float | None) -> Timing:
        """The time of a step with `count` micro-batches, from steps with fewer of them."""
        size, short = run.step.micro_batch, min(count, 2)
        with Steps(with_sequences(run, short * size)) as steps:
            # Compiles, makes the moments, records graphs at the third micro-batch; 8-bit scales are a step late.
            steps.take((2 if short > 1 else 4) + (1 if run.speed.execution.fp8 else 0))
            held = self._held_by_graphs(run)
            first = _median_seconds(steps)
            peak = self._peak(held)
        if short == count:
            return Timing(first, peak)
        if known is not None and first >= TIMED_SECONDS:
            return Timing(count * max(first - known, 0.5 * first) / short + known, peak)
        # The longer step lasts for about as long as all of the short ones, and is the whole one where that is short.
        long = min(count, max(short + 1, math.ceil(short * TIMED_SECONDS / max(first, 1e-4))))
        with Steps(with_sequences(run, long * size)) as steps:
            steps.take(1)
            second = statistics.median(report.seconds for report in steps.take(2))
        each = max((second - first) / (long - short), 0.5 * second / long)
        update = min(max(first - short * each, 0.0), first)
        self.update_seconds.setdefault(run.speed.optimizer_offload, update)
        return Timing(second if long == count else count * each + update, peak)

    def _held_by_graphs(self, run: Run) -> int:
        """Memory that recorded graphs keep to themselves; torch's peak of allocated bytes does not show it."""
        if not run.speed.cuda_graphs:
            return 0
        torch.cuda.synchronize(self.device.torch_device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device.torch_device)

    def _peak(self, held: int) -> int | None:
        """None on a CPU, where only the whole process's peak is known, and never falls."""
        if self.device.kind != "cuda":
            return None
        return max(peak_memory_bytes(self.device.torch_device) or 0, held)


def _median_seconds(steps: Steps) -> float:
    first = steps.take(1)[0].seconds
    count = max(2, min(8, int(TIMED_SECONDS / max(first, 1e-3))))
    return statistics.median([first, *(report.seconds for report in steps.take(count))])


def _difference(candidate: Candidate, speed: Speed) -> str:
    """Why a candidate is not what would run here, or nothing."""
    why = {feature.name: feature.why for feature in speed.features}
    for name in ("checkpointing", "loss", "kernels", "compile", "optimizer_offload"):
        asked, used = getattr(candidate, name), getattr(speed, name)
        if asked != used:
            return f"{name} {asked} would be {used}: {why.get(name) or 'not here'}"
    return ""


def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


MOST_STEPS = 8  # of an epoch that are timed
REPEATS = 3  # how often each of them is, while that is quick


class SampleProbe(Probe):
    """A model on a device, and the ways in which it can be fine-tuned there."""

    def __init__(self, loaded: LoadedConfig, practice: PracticeSamples, memory: float | None) -> None:
        super().__init__(loaded, practice.settings.config.data.model_dump(), memory)
        described = {"model": practice.settings.config.model, "lora": practice.settings.config.lora}
        config = self.settings.config.model_copy(update=described)
        self.settings = dataclasses.replace(self.settings, config=config)
        self.practice = practice
        self.sequences = config.chat.batch_samples
        self.corpus_bytes, self.step_tokens = None, practice.step_tokens
        self.steps: tuple[int, ...] | None = None  # those that are timed
        self.found: dict[tuple[int, bool], dict[int, LargestRows]] = {}

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step on average."""
        return round(self.practice.step_tokens)

    def micro_batches(self) -> tuple[int, ...]:
        """Divisors of the batch, as `speed.micro_batch` takes them, up to one that holds all rows of any step."""
        sizes = divisors(self.sequences)
        enough = next(size for size in sizes if size >= self.practice.rows)
        return tuple(size for size in sizes if size <= enough)

    def accumulation(self, candidate: Candidate) -> int:
        """The most micro-batches of a step."""
        return -(-self.practice.rows // candidate.micro_batch)

    def _largest(self, speed: Speed) -> dict[int, LargestRows]:
        key = (speed.micro_batch, speed.delivery().joined)
        if key not in self.found:
            self.found[key] = self.practice.largest(speed)
        return self.found[key]

    def _need(self, speed: Speed, vocab: int) -> int:
        return max(memory_of(self.settings.config, vocab, speed, one).total for one in self._largest(speed).values())

    def _measured(self, run: Run) -> Timing:
        timing = self._whole_steps(run, None)
        assert timing is not None, "there is time enough"
        return timing

    def _whole_steps(self, run: Run, seconds: float | None) -> Timing | None:
        """None where `seconds` are not enough for the fullest steps."""
        fullest, graphs = tuple(self._largest(run.speed)), run.speed.cuda_graphs
        untimed = 1 + WARM_UPS if graphs else 1
        with Steps(of_steps(run, fullest)) as steps:
            reports = steps.take(len(fullest))
            if seconds is not None and reports[0].seconds * (untimed + 1) * len(fullest) > seconds:
                return None
            steps.take((untimed - 1) * len(fullest))
            reports = steps.take(len(fullest))
            peak = self._peak(self._held_by_graphs(run))
        longest = max(report.seconds for report in reports)
        if self.steps is None:
            self.steps = self.practice.spread(_how_many(longest))
        chosen = self.steps
        if chosen:
            repeats = REPEATS if REPEATS * len(chosen) * longest <= 4 * probe.TIMED_SECONDS or seconds else 1
            with Steps(of_steps(run, chosen)) as steps:
                steps.take((2 if graphs else 1) * len(chosen))
                reports = steps.take(repeats * len(chosen))
                peak = None if peak is None else max(peak, self._peak(self._held_by_graphs(run)) or 0)
        return Timing(self.practice.step_tokens / self._rate(chosen or fullest, reports), peak)

    def _rate(self, chosen: Sequence[int], reports: Sequence[StepReport]) -> float:
        """Tokens per second over all of the steps, each with its median time."""
        seconds: dict[int, list[float]] = defaultdict(list)
        for number, report in enumerate(reports):
            seconds[chosen[number % len(chosen)]].append(report.seconds)
        whole = sum(statistics.median(times) for times in seconds.values())
        return sum(self.practice.tokens(step) for step in seconds) / max(whole, 1e-9)


def _how_many(seconds: float) -> int:
    """Steps to time where the fullest takes so long. None where that is too long for any but the fullest itself."""
    if seconds > 2 * probe.TIMED_SECONDS:
        return 0
    return max(2, min(MOST_STEPS, int(probe.TIMED_SECONDS / max(seconds, 1e-4))))
