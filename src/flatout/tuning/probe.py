"""Trying settings on the device: real training steps including the update, timed by the protocol of `measure.py`.

Idea: one model is built and stays; another micro-batch, checkpointing or loss is another way of walking through it
(`with_speed`). A step of the whole global batch would take seconds where the micro-batch is small, so steps of two
lengths are timed, which gives the time of a micro-batch and that of the update, and a whole step follows from them. The
choice is confirmed by whole steps in the end.

Contract: nothing of the caller's is touched. The weights are the probe's own, data is read or made in a temporary
folder, the random state and torch's switches are borrowed per step, a memory limit too.
Trap: a peak counts only with gradients and moments in place, so a step has two micro-batches at least, where the batch
has two, and the first step is never the one that is timed.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch

import flatout
from flatout.config.load import LoadedConfig, Source, format_value, load_stored
from flatout.config.schema import RunConfig
from flatout.device import detect_device, limit_memory, peak_memory_bytes
from flatout.engine.features import Speed, resolve_speed
from flatout.engine.setup import Run, memory_of, with_speed
from flatout.errors import HardwareError, ResourceError
from flatout.records import TuneProgress, TuneResult, TuneRow
from flatout.tuning.fragment import TUNED, fragment_of, words_of
from flatout.tuning.measure import Steps, borrowed_run, free_memory
from flatout.tuning.practice_data import practice_data
from flatout.tuning.search import Candidate, Memory, Search, Space, Trial, Trials, around, choose, exhaustive, quick

SECONDS, COMPILED_SECONDS, EXHAUSTIVE_SECONDS = 120.0, 1200.0, 3600.0
SEARCHING = 0.8  # of the time; the rest is for confirming
TIMED_SECONDS = 0.5  # of one length of steps
SMALL_CHUNK = 2048
COMPILE_MODES = ("default", "regional", "max-autotune")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a whole optimizer step, and the most memory held."""

    seconds: float
    peak_bytes: int | None


class Probe:
    """A model on a device, and the ways in which it can be trained there."""

    def __init__(self, loaded: LoadedConfig, data: dict, memory: float | None) -> None:
        # Everything as asked for, with data that is here and steps enough; the length of the run plays no part.
        words = ["train.steps=1000", "model.init_from=null", "eval.epoch_end=false"]
        words += [] if memory is None else [f"speed.memory_limit={memory!r}"]
        values = {**loaded.config.model_dump(), "data": data}
        self.config = load_stored(values, words, where="tune").config
        kinds = {path: source.kind for path, source in loaded.sources.items()}
        self.written = {path for path, kind in kinds.items() if kind in ("file", "override") and path not in TUNED}
        self.device = limit_memory(detect_device(self.config.speed.device), self.config.speed.memory_limit)
        if memory is not None and self.device.kind != "cuda":
            raise HardwareError(
                f"a memory of {memory:g} GiB can be emulated on a CUDA device only, and this is {self.device.name}",
                "leave --memory out",
            )
        self.sequences = self.config.train.batch_tokens // self.config.model.context
        self.run: Run | None = None
        self.context: Generator[Run] | None = None
        self.vocab = 0
        self.corpus_bytes = 0
        self.update_seconds: dict[bool, float] = {}  # by whether the optimizer is offloaded

    def open(self, candidate: Candidate) -> None:
        """Builds the model for a way of compiling; everything else about a candidate can change later."""
        self.close()
        sources = {path: Source("file" if path in self.written else "preset", "tune") for path in _paths(self.config)}
        self.context = _held(LoadedConfig(self.config_for(candidate), sources))
        self.run = next(self.context)
        self.vocab = self.run.model.vocab
        tokens = self.run.dataset.train
        self.corpus_bytes = (tokens.tokens or 0) * tokens.dtype.itemsize

    def close(self) -> None:
        self.run = None
        if self.context is not None:
            self.context.close()
            self.context = None

    def config_for(self, candidate: Candidate) -> RunConfig:
        values = {
            "micro_batch": candidate.micro_batch,
            "accumulation": None,
            "checkpointing": candidate.checkpointing,
            "loss": candidate.loss,
            "loss_chunk": candidate.loss_chunk,
            "kernels": candidate.kernels,
            "compile": candidate.compile,
            "optimizer_offload": candidate.optimizer_offload,
        }
        return self.config.model_copy(update={"speed": self.config.speed.model_copy(update=values)})

    def resolve(self, config: RunConfig) -> Speed:
        return resolve_speed(
            config, self.device, self.corpus_bytes, lambda path: path in self.written, vocab=self.vocab or None
        )

    def estimate(self, candidate: Candidate) -> int:
        """Needs no model: the switches are those of the run as it was built, with the candidate's in their place."""
        assert self.run is not None
        speed = self.run.speed
        triton = candidate.kernels == "triton"
        execution = dataclasses.replace(
            speed.execution,
            kernels=candidate.kernels,
            checkpointing=candidate.checkpointing,
            loss=candidate.loss,
            loss_chunk=candidate.loss_chunk,
            residual=speed.execution.residual if triton else "fp32",
        )
        speed = dataclasses.replace(
            speed,
            execution=execution,
            micro_batch=candidate.micro_batch,
            compile=candidate.compile,
            optimizer_offload=candidate.optimizer_offload,
        )
        return memory_of(self.config, self.vocab, speed).total

    def capacity(self) -> int | None:
        """Bytes that a run may use: the limit, or the card without what others hold on it."""
        if self.device.kind != "cuda":
            return self.device.memory_bytes
        free, _ = torch.cuda.mem_get_info(self.device.torch_device)
        free += torch.cuda.memory_reserved(self.device.torch_device)
        return min(free, self.device.memory_bytes or free)

    def attempt(self, candidate: Candidate) -> tuple[Trial, Timing | None, bool]:
        """(what came of it, its timing, whether CUDA graphs were on). Out of memory is an answer, not an error."""
        if self.run is None or self.run.speed.compile != candidate.compile:
            self.open(candidate)
        assert self.run is not None
        config = self.config_for(candidate)
        speed = self.resolve(config)
        missing = _difference(candidate, speed)
        if missing:
            return Trial(candidate=candidate, status="absent", reason=missing), None, False
        timing = self._timed(config, speed)
        _forget(self.run)
        if isinstance(timing, str):
            return Trial(candidate=candidate, status="out_of_memory", reason=timing), None, speed.cuda_graphs
        rate = self.config.train.batch_tokens / timing.seconds
        trial = Trial(candidate=candidate, status="fits", tokens_per_second=rate, peak_bytes=timing.peak_bytes)
        return trial, timing, speed.cuda_graphs

    def confirm(self, candidate: Candidate, seconds: float) -> Timing | str | None:
        """Whole steps of the global batch; a sentence where memory runs out, None where `seconds` are not enough."""
        timing = None
        config = self.config_for(candidate)
        if self.run is None or self.run.speed.compile != candidate.compile:
            self.open(candidate)
        assert self.run is not None
        self.run = with_speed(self.run, config, self.resolve(config))
        try:
            with Steps(self.run) as steps:
                first = steps.take(1)[0].seconds
                if 2 * first > seconds:
                    return None
                steps.take(1)
                reports = steps.take(max(1, min(3, int(seconds / max(first, 1e-3)) - 2)))
                timing = Timing(statistics.median(r.seconds for r in reports), self._peak(0))
        except ResourceError as error:
            timing = error.message
        _forget(self.run)
        return timing

    def _timed(self, config: RunConfig, speed: Speed) -> Timing | str:
        assert self.run is not None
        if speed.compile != "off":
            torch._dynamo.reset()
        self.run = with_speed(self.run, config, speed)
        count = self.sequences // speed.micro_batch
        try:
            return self._step_seconds(self.run, count, known=self.update_seconds.get(speed.optimizer_offload))
        except ResourceError as error:
            return error.message

    def _step_seconds(self, run: Run, count: int, known: float | None) -> Timing:
        """The time of a step with `count` micro-batches, from steps with fewer of them."""
        size, short = run.step.micro_batch, min(count, 2)
        with Steps(dataclasses.replace(run, sequences=short * size)) as steps:
            steps.take(2 if short > 1 else 4)  # compiles, makes the moments, records graphs at the third micro-batch
            held = self._held_by_graphs(run)
            first = _median_seconds(steps)
            peak = self._peak(held)
        if short == count:
            return Timing(first, peak)
        if known is not None and first >= TIMED_SECONDS:
            return Timing(count * max(first - known, 0.5 * first) / short + known, peak)
        # The longer step lasts for about as long as all of the short ones, and is the whole one where that is short.
        long = min(count, max(short + 1, math.ceil(short * TIMED_SECONDS / max(first, 1e-4))))
        with Steps(dataclasses.replace(run, sequences=long * size)) as steps:
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
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device.torch_device)

    def _peak(self, held: int) -> int | None:
        """None on a CPU, where only the whole process's peak is known, and never falls."""
        if self.device.kind != "cuda":
            return None
        return max(peak_memory_bytes(self.device.torch_device), held)


def _held(loaded: LoadedConfig) -> Generator[Run]:
    with borrowed_run(loaded) as run:
        yield run


def _median_seconds(steps: Steps) -> float:
    first = steps.take(1)[0].seconds
    count = max(2, min(8, int(TIMED_SECONDS / max(first, 1e-3))))
    return statistics.median([first, *(report.seconds for report in steps.take(count))])


def _forget(run: Run) -> None:
    """Drops moments, gradients and recordings, and gives their memory back: the next trial begins with weights only."""
    run.step.optimizer.zero_grad(set_to_none=True)
    run.step.optimizer.state.clear()
    run.step.rebuild()
    free_memory()


def _difference(candidate: Candidate, speed: Speed) -> str:
    """Why a candidate is not what would run here, or nothing."""
    used = {
        "checkpointing": speed.execution.checkpointing,
        "loss": speed.execution.loss,
        "kernels": speed.execution.kernels,
        "compile": speed.compile,
        "optimizer_offload": speed.optimizer_offload,
    }
    why = {feature.name: feature.why for feature in speed.features}
    for name, value in used.items():
        if getattr(candidate, name) != value:
            return f"{name} {getattr(candidate, name)} would be {value}: {why.get(name) or 'not here'}"
    return ""


def _paths(config: RunConfig) -> list[str]:
    return [f"{section}.{name}" for section, values in config.model_dump().items() for name in values]


def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


# --- the whole of it --------------------------------------------------------------------------------------------------


def tune(
    loaded: LoadedConfig,
    *,
    memory: float | None = None,
    thorough: bool = False,
    compiled: bool = False,
    seconds: float | None = None,
    progress: Callable[[TuneProgress], None] = lambda _: None,
) -> Generator[TuneRow | TuneResult]:
    """Tries settings for a config on this device and yields a row for each; the last record is the `TuneResult`.

    `memory` is a cap in GiB that emulates a smaller card, `thorough` tries everything, `compiled` the modes of
    torch.compile as well. After `seconds` the best so far is taken.
    """
    if compiled and detect_device(loaded.config.speed.device).kind != "cuda":
        raise HardwareError(
            "torch.compile's modes are tried on CUDA only, and this is no such device", "leave --compile out"
        )
    with tempfile.TemporaryDirectory(prefix="flatout-tune-") as scratch:
        data, described = practice_data(loaded.config, Path(scratch))
        probe = Probe(loaded, data.model_dump(), memory)
        try:
            yield from _Tuning(loaded, probe, described, seconds, progress).run(thorough, compiled)
        finally:
            probe.close()


class _Tuning:
    """One call of `tune`: its clock, its rows, its trials."""

    def __init__(
        self,
        loaded: LoadedConfig,
        probe: Probe,
        data: str,
        seconds: float | None,
        progress: Callable[[TuneProgress], None],
    ) -> None:
        self.loaded, self.probe, self.data, self.progress = loaded, probe, data, progress
        self.began = time.monotonic()
        self.seconds = seconds
        self.budget = SECONDS if seconds is None else seconds
        self.rows: dict[Candidate, TuneRow] = {}
        self.trials: dict[Candidate, Trial] = {}
        self.ended = "everything worth trying was tried"
        self.usable: int | None = None

    def run(self, thorough: bool, compiled: bool) -> Generator[TuneRow | TuneResult]:
        probe = self.probe
        self._say("building the model")
        space = self._space()
        smallest = dataclasses.replace(
            space.candidate(1, space.checkpointings[-1], space.losses[0], space.loss_chunks[-1]),
            optimizer_offload=space.optimizer_offload or self._may_offload(),
        )
        try:
            probe.open(smallest)
        except HardwareError as error:
            if "a step needs about" not in error.message:
                raise
            raise HardwareError(
                f"even one sequence with everything recomputed and offloaded does not fit: {error.message}",
                "take a smaller model or model.context",
            ) from error
        if self.seconds is None and thorough:
            self.budget = EXHAUSTIVE_SECONDS
        elif self.seconds is None and (compiled or space.compile != "off"):
            self.budget = COMPILED_SECONDS
        capacity = probe.capacity()
        method = exhaustive if thorough else quick
        found = Trials(Memory(probe.estimate, capacity))
        self.usable = found.memory.usable if probe.device.kind == "cuda" else None
        yield from self._drive(method(space, found), found)
        if found.best() is None and not space.optimizer_offload and self._may_offload():
            # Nothing fits with the moments on the card: keep them in the host's memory.
            yield from self._drive(method(dataclasses.replace(space, optimizer_offload=True), found), found)
        best = found.best()
        if compiled and best is not None:
            for mode in [mode for mode in COMPILE_MODES if mode != space.compile]:
                other = dataclasses.replace(space, kernels="torch", compile=mode, losses=("plain", "fused"))
                yield from self._drive(around(other, found, best.candidate), found)
        yield self._result(capacity)

    def _may_offload(self) -> bool:
        """Moments in 8 bits were asked for, and stay on the card: offloaded ones would be in fp32."""
        return self.probe.device.kind == "cuda" and self.probe.config.speed.optimizer_state == "fp32"

    def _space(self) -> Space:
        probe = self.probe
        asked = probe.config.speed
        speed = probe.resolve(probe.config)
        paths = ["plain"] if speed.compile != "off" else ["fused", "chunked", "plain"]
        losses = [speed.execution.loss, *(loss for loss in paths if loss != speed.execution.loss)]
        checkpointings: tuple[str, ...] = ("none", "selective", "full")
        if probe.device.kind != "cuda":  # there memory is not what limits, and both only cost time
            losses, checkpointings = losses[:1], (speed.execution.checkpointing,)
        if speed.execution.activation_offload:  # asked for because nothing else fits
            checkpointings = (speed.execution.checkpointing,)
        chunks = (asked.loss_chunk, SMALL_CHUNK) if asked.loss_chunk > SMALL_CHUNK else (asked.loss_chunk,)
        return Space(
            micro_batches=divisors(probe.sequences),
            checkpointings=checkpointings,
            losses=tuple(losses),
            loss_chunks=chunks if probe.device.kind == "cuda" else chunks[:1],
            kernels=speed.execution.kernels,
            compile=speed.compile,
            optimizer_offload=speed.optimizer_offload,
            context=probe.config.model.context,
        )

    def _drive(self, search: Search, found: Trials) -> Generator[TuneRow]:
        """Runs a search to its end, or to the end of the time."""
        try:
            candidate = next(search)
            while True:
                if time.monotonic() - self.began > SEARCHING * self.budget and found.best() is not None:
                    self.ended = f"the {self.budget:.0f} seconds were over; --seconds gives more"
                    search.close()
                    return
                trial = self._try(candidate)
                yield self.rows[candidate]
                candidate = search.send(trial)
        except StopIteration:
            return

    def _try(self, candidate: Candidate) -> Trial:
        self._say(_text(candidate))
        began = time.monotonic()
        trial, timing, graphs = self.probe.attempt(candidate)
        if trial.status == "fits" and self.usable is not None and (trial.peak_bytes or 0) > self.usable:
            trial = dataclasses.replace(trial, status="over", reason="it runs, but leaves no margin")
        self.trials[candidate] = trial
        self.rows[candidate] = TuneRow(
            number=len(self.rows) + 1,
            status=trial.status,
            reason=trial.reason,
            accumulation=self.probe.sequences // candidate.micro_batch,
            cuda_graphs=graphs,
            tokens_per_second=trial.tokens_per_second,
            milliseconds=None if timing is None else 1000 * timing.seconds,
            peak_bytes=trial.peak_bytes,
            estimate_bytes=self.probe.estimate(candidate),
            seconds=time.monotonic() - began,
            **dataclasses.asdict(candidate),
        )
        return trial

    def _result(self, capacity: int | None) -> TuneResult:
        """The choice, confirmed by whole steps where there is time; what fails then is out, and the next one is it."""
        probe = self.probe
        while True:
            chosen = choose(self.trials.values())
            if chosen is None:
                raise ResourceError(
                    f"nothing that was tried fits {probe.device.name}"
                    + ("" if capacity is None else f" with {capacity / 2**30:.1f} GiB"),
                    "take a smaller model or model.context, or set speed.optimizer_state=8bit",
                )
            candidate, row = chosen.candidate, self.rows[chosen.candidate]
            self._say(f"confirming {_text(candidate)}")
            left = self.budget - (time.monotonic() - self.began)
            timing = probe.confirm(candidate, max(2.0, min(20.0, left)))
            if not isinstance(timing, str):
                break
            self.trials[candidate] = dataclasses.replace(chosen, status="out_of_memory", reason=timing)
        if timing is not None:
            row = dataclasses.replace(
                row,
                tokens_per_second=probe.config.train.batch_tokens / timing.seconds,
                milliseconds=1000 * timing.seconds,
                peak_bytes=None if row.peak_bytes is None else max(row.peak_bytes, timing.peak_bytes or 0),
            )
        settings = words_of(candidate, self.loaded)
        return TuneResult(
            chosen=row,
            words=tuple(
                f"{path}={value if isinstance(value, str) else format_value(value)}" for path, value in settings.items()
            ),
            fragment=fragment_of(self.loaded, settings, row, probe.device.name, capacity),
            device=probe.device.name,
            capacity_bytes=capacity,
            batch_tokens=probe.config.train.batch_tokens,
            data=self.data,
            tried=len(self.rows),
            ended=self.ended,
            confirmed=timing is not None,
            seconds=time.monotonic() - self.began,
            flatout=flatout.__version__,
            torch=torch.__version__,
        )

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self.began
        self.progress(TuneProgress(number=len(self.rows) + 1, text=text, seconds=seconds, budget=self.budget))


def _text(candidate: Candidate) -> str:
    parts = [f"micro-batch {candidate.micro_batch}", f"checkpointing {candidate.checkpointing}"]
    parts += [f"loss {candidate.loss}", f"kernels {candidate.kernels}"]
    parts += [f"compile {candidate.compile}"] if candidate.compile != "off" else []
    parts += ["optimizer on the host"] if candidate.optimizer_offload else []
    return ", ".join(parts)
