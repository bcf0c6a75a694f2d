"""Which settings to try, in which order, and which one to take: no torch, no clock, only numbers that come back.

Idea: memory is known before it is used, up to a few percent (`estimate_memory`), and better once some sizes of a way of
working were measured, which give the estimate an offset and a slope. So little is tried that cannot fit, and what lies
at the border is tried. Speed is not known, but it behaves: it rises with the micro-batch, ever more slowly,
and may fall again; recomputing makes the same micro-batch slower and a larger one possible.

Contract: a search is a generator that yields candidates and is sent their trials. `choose` takes the fastest that fits,
and among those within a hundredth of it the one with the least memory.
Trap: dominance ("more recomputing is slower at the same micro-batch") holds for tokens per second and not to the last
percent. That is why `exhaustive` exists, and why the two may differ by some percent.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal

MARGIN = 0.08  # of the memory stays free: fragmentation, evaluation, a sample
FALL = 0.98  # a smaller micro-batch below this share of the best so far ends the descent
WORTH = 1.02  # smaller gains are noise, and not worth a search
CLOSE = 0.99  # as good as the best: memory decides
# Recomputing a block costs a forward pass of it; this much of the speed is the most that can be left.
BEST_CASE = {"none": 1.0, "selective": 1.0, "full": 0.87}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The switches that `tune` turns. None of them changes what is learned."""

    micro_batch: int
    checkpointing: str
    loss: str
    kernels: str
    compile: str
    loss_chunk: int
    optimizer_offload: bool
    threads: int | Literal["auto"] = "auto"  # on a CPU

    @property
    def path(self) -> "Candidate":
        """The way of working, whatever the micro-batch."""
        return dataclasses.replace(self, micro_batch=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a candidate. `status` is fits, over (the margin is not free), out_of_memory or absent."""

    candidate: Candidate
    status: str
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    reason: str = ""

    @property
    def rate(self) -> float:
        return self.tokens_per_second or 0.0


Search = Generator[Candidate, Trial, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchSpace:
    """What may be combined. The first loss and the first chunk are the config's own, smaller chunks follow."""

    micro_batches: tuple[int, ...]  # ascending divisors of the batch
    checkpointings: tuple[str, ...]  # from none to full
    losses: tuple[str, ...]
    loss_chunks: tuple[int, ...]
    kernels: str
    compile: str
    optimizer_offload: bool
    context: int
    threads: int | Literal["auto"] = "auto"  # on a CPU

    def candidate(self, micro_batch: int, checkpointing: str, loss: str, chunk: int | None = None) -> Candidate:
        return Candidate(
            micro_batch=micro_batch,
            checkpointing=checkpointing,
            loss=loss,
            loss_chunk=chunk or self.loss_chunks[0],
            kernels=self.kernels,
            compile=self.compile,
            optimizer_offload=self.optimizer_offload,
            threads=self.threads,
        )

    def versions(self, micro_batch: int, checkpointing: str, loss: str) -> Iterable[Candidate]:
        """The same with chunks of the loss that need ever less memory, where that makes a difference."""
        for chunk in self.loss_chunks:
            if chunk == self.loss_chunks[0] or (loss != "plain" and chunk < micro_batch * self.context):
                yield self.candidate(micro_batch, checkpointing, loss, chunk)


class Memory:
    """What a candidate will need: the estimate, set right by what was measured."""

    def __init__(self, estimate: Callable[[Candidate], int], capacity: int | None) -> None:
        self.estimate = estimate
        self.usable = None if capacity is None else int((1 - MARGIN) * capacity)
        self.measured: dict[Candidate, int] = {}
        self.too_large: dict[Candidate, int] = {}  # by path, the smallest micro-batch that failed

    def learn(self, trial: Trial) -> None:
        candidate = trial.candidate
        if trial.peak_bytes is not None:
            self.measured[candidate] = trial.peak_bytes
        if trial.status in ("over", "out_of_memory"):
            before = self.too_large.get(candidate.path, candidate.micro_batch)
            self.too_large[candidate.path] = min(before, candidate.micro_batch)

    def predicted(self, candidate: Candidate) -> tuple[float, float]:
        """(bytes, how far they may be wrong). One measured size of a path gives the estimate an offset, two a slope."""
        guess = float(self.estimate(candidate))
        own = sorted((c for c in self.measured if c.path == candidate.path), key=lambda c: c.micro_batch)
        if len(own) >= 2:
            small, large = own[-2], own[-1]
            between = max(self.estimate(large) - self.estimate(small), 1)
            slope = min(max((self.measured[large] - self.measured[small]) / between, 0.75), 1.33)
            return self.measured[large] + slope * (guess - self.estimate(large)), 0.02
        if own:
            return guess + self.measured[own[0]] - self.estimate(own[0]), 0.05
        return guess, 0.10

    def may_fit(self, candidate: Candidate) -> bool:
        """False only where it is sure enough that trying would be a waste."""
        if candidate.micro_batch >= self.too_large.get(candidate.path, math.inf):
            return False
        need, doubt = self.predicted(candidate)
        return self.usable is None or need * (1 - doubt) <= self.usable

    def fitting(self, space: SwitchSpace, micro_batch: int, checkpointing: str, loss: str) -> Candidate | None:
        """The version with the largest chunk that will fit; at the border, the one with the smallest that may."""
        versions = list(space.versions(micro_batch, checkpointing, loss))
        if self.usable is None:
            return versions[0]
        for candidate in versions:
            if self.may_fit(candidate) and self.predicted(candidate)[0] <= self.usable:
                return candidate
        return versions[-1] if self.may_fit(versions[-1]) else None


class Trials:
    """Trials so far. Nothing is tried twice."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.seen: dict[Candidate, Trial] = {}

    def attempt(self, candidate: Candidate) -> Generator[Candidate, Trial, Trial]:
        if candidate not in self.seen:
            trial = yield candidate
            self.seen[candidate] = trial
            self.memory.learn(trial)
        return self.seen[candidate]

    def best(self) -> Trial | None:
        fitting = [trial for trial in self.seen.values() if trial.status == "fits"]
        return max(fitting, key=lambda trial: trial.rate, default=None)


def choose(trials: Iterable[Trial]) -> Trial | None:
    """The fastest that fits; of those as good as it, the one that needs the least memory."""
    fitting = [trial for trial in trials if trial.status == "fits"]
    top = max((trial.rate for trial in fitting), default=0.0)
    close = [trial for trial in fitting if trial.rate >= CLOSE * top]
    if any(trial.peak_bytes is None for trial in close):
        return max(close, key=lambda trial: trial.rate, default=None)
    return min(close, key=lambda trial: (trial.peak_bytes or 0, -trial.rate), default=None)


def exhaustive(space: SwitchSpace, trials: Trials) -> Search:
    """Every micro-batch with every loss and checkpointing, small ones first, up to the first that does not fit."""
    for loss in space.losses:
        for checkpointing in space.checkpointings:
            for micro_batch in space.micro_batches:
                if (yield from _attempt_size(space, trials, micro_batch, checkpointing, loss)) is None:
                    break


def quick(space: SwitchSpace, trials: Trials) -> Search:
    """The losses at one size; then each checkpointing from its largest micro-batch down, if it can still win."""
    for loss in (yield from _losses_worth_it(space, trials)):
        largest = 0  # micro-batch that some less recomputing path can have
        for checkpointing in space.checkpointings:
            if not _can_win(space, trials, loss, checkpointing, largest):
                continue
            fitted = yield from _descend(space, trials, loss, checkpointing, largest)
            largest = max([largest, *(trial.candidate.micro_batch for trial in fitted)])


def other_threads(trials: Trials, best: Candidate, counts: Sequence[int]) -> Search:
    """The best so far with other numbers of CPU threads."""
    for count in counts:
        yield from trials.attempt(dataclasses.replace(best, threads=count))


def _attempt_size(
    space: SwitchSpace, trials: Trials, micro_batch: int, checkpointing: str, loss: str
) -> Generator[Candidate, Trial, Trial | None]:
    """The trial of a size, with smaller chunks of the loss where larger ones did not fit; None where none did."""
    for _ in space.loss_chunks:
        candidate = trials.memory.fitting(space, micro_batch, checkpointing, loss)
        if candidate is None:
            return None
        trial = yield from trials.attempt(candidate)
        if trial.status == "fits":
            return trial
    return None


def _losses_worth_it(space: SwitchSpace, trials: Trials) -> Generator[Candidate, Trial, Sequence[str]]:
    """The losses that are faster or smaller than every other, the fastest first, by one trial each.

    Compared at a middling size: the speed there distinguishes them, and a trial is short.
    """
    if len(space.losses) == 1:
        return space.losses
    for checkpointing in space.checkpointings:
        sizes = [m for m in space.micro_batches if trials.memory.fitting(space, m, checkpointing, space.losses[0])]
        if sizes:
            break
    else:
        return space.losses
    memory = trials.memory

    def sure(micro_batch: int) -> bool:
        need, doubt = memory.predicted(space.candidate(micro_batch, checkpointing, space.losses[0]))
        return memory.usable is None or need * (1 + doubt) <= memory.usable

    most = max([m for m in sizes if m * space.context <= 16384 and sure(m)] or sizes[:1])
    found: dict[str, Trial] = {}
    for loss in space.losses:
        trial = yield from _attempt_size(space, trials, most, checkpointing, loss)
        if trial is not None:
            found[loss] = trial
    if not found:  # an estimate that promised too much: the descent finds out where it begins to fit
        return space.losses[:1]

    def dominated(loss: str) -> bool:
        mine = found[loss]
        return any(
            other.rate >= mine.rate and (other.peak_bytes or 0) <= (mine.peak_bytes or 0)
            for name, other in found.items()
            if name != loss
        )

    worth = [loss for loss in found if not dominated(loss)]
    fastest = max(trial.rate for trial in found.values())
    # What is much slower at one size could win only by a much larger one; recomputing is the cheaper way to that.
    return sorted([loss for loss in worth if found[loss].rate > 0.8 * fastest], key=lambda loss: -found[loss].rate)


def _can_win(space: SwitchSpace, trials: Trials, loss: str, checkpointing: str, largest: int) -> bool:
    """Whether larger micro-batches than `largest` could beat the best, if speed went on rising as it did last.

    It rises ever more slowly, so this is an upper bound. With fewer than two sizes known, nothing is ruled out.
    """
    best = trials.best()
    known = [
        trial
        for trial in trials.seen.values()
        if trial.status == "fits" and trial.candidate.loss == loss and trial.candidate.kernels == space.kernels
        and trial.candidate.compile == space.compile
    ]  # fmt: skip
    by_path: dict[Candidate, list[Trial]] = {}
    for trial in known:
        by_path.setdefault(trial.candidate.path, []).append(trial)
    lines = [sorted(line, key=lambda trial: trial.candidate.micro_batch) for line in by_path.values() if len(line) > 1]
    if best is None or not lines or largest == 0:
        return True
    top = max((m for m in space.micro_batches if trials.memory.fitting(space, m, checkpointing, loss)), default=0)
    if top <= largest:
        return False
    line = max(lines, key=lambda line: line[-1].candidate.micro_batch)
    small, large = line[-2], line[-1]
    doublings = math.log2(large.candidate.micro_batch / small.candidate.micro_batch)
    gain = max(1.0, large.rate / small.rate) ** (1 / doublings)
    already = BEST_CASE[large.candidate.checkpointing]
    highest = max(trial.rate for trial in line) / already
    bound = highest * gain ** math.log2(top / large.candidate.micro_batch) * BEST_CASE[checkpointing]
    return bound > WORTH * best.rate


def _descend(
    space: SwitchSpace, trials: Trials, loss: str, checkpointing: str, above: int
) -> Generator[Candidate, Trial, list[Trial]]:
    """From the largest micro-batch that fits down to `above`, until speed falls; two sizes at least."""
    fitted: list[Trial] = []
    since_best = 0
    for micro_batch in reversed([m for m in space.micro_batches if m > above]):
        trial = yield from _attempt_size(space, trials, micro_batch, checkpointing, loss)
        if trial is None:
            continue
        top = max((other.rate for other in fitted), default=0.0)
        fitted.append(trial)
        since_best = 0 if trial.rate > top else since_best + 1
        if trial.rate < FALL * top or since_best >= 3:
            break
    return fitted
