"""Two rungs in turns, and what their paired times say: the ratio of speeds, its interval, and the verdict.

Idea: what a machine does beside a measurement changes from second to second. Two rungs timed one after the other differ
by that change as well as by their switches; timed in turns of a fraction of a second they differ by their switches. A
pair is one turn of the reference and one of the rung, next to each other, and a coin decides which comes first. A load
that changes nothing but the time of day is then as likely to help one as the other, whatever it looks like: drift,
spikes, steps. So under the true ratio, half of the pairs lie above it and half below, and counting pairs (the sign
test, turned round) gives an interval for the ratio that needs no law of the noise.

Contract:
- The interval of a look at the data misses the true ratio in at most `MISS` of all cases. There are at most four looks
  (`LOOKS`), so an interval is wrong in at most 2 of 100 rungs, and so is a verdict.
- `FLOOR` is added on both sides: the same rung built twice differs by that much, by where its memory lies.
- The verdict is faster or slower only where the whole interval is on one side of 1.
- Each sitting of the same two rungs has the same coins. It ends when its ratio is known well enough, or after
  `seconds`, but not before the first look, at ten pairs; and at `most` even before that. It then has a comparison all
  the same, however few pairs there were.
- Where memory does not hold both runs at once, each is built anew for every one of its turns.
Trap: `ratio` is a median, its interval is not symmetric about it, and the noise of a busy machine is not symmetric.
Trap: the compiler's cache belongs to the process. The reference is built beside the rung without clearing it, so that
neither is compiled again during its turns.

`trick` does around the steps of a rung what the guides advise and what is no setting of Flatout, because it should do
nothing, or harm. Emptying the cache gives memory back that the next step asks for again; collecting Python's garbage
finds none in a step that makes no cycles; cuDNN's benchmark is for convolutions; and a limit on how the allocator
splits blocks makes it keep more of them.
"""

import contextlib
import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self, final

import torch

from flatout.config.load import LoadedConfig
from flatout.device import Device, allocator_words, use_expandable_segments
from flatout.engine.run import Run
from flatout.engine.spans import StepReport
from flatout.errors import ResourceError
from flatout.tuning.measure import WARMUP, Steps, borrowed_run, of_steps

LOOKS = (10, 20, 40, 80)  # pairs after which the interval is looked at, to go on only where it is too wide
MISS = 0.005  # of the intervals at one look
FLOOR = 0.01
CLEAR = 0.05  # an error up to which "no difference seen" says something
FASTER, SLOWER, ALIKE, NOISY = "faster", "slower", "no difference seen", "too noisy to tell"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ratio of speeds with its interval, from a number of pairs; too few pairs have the interval of all numbers."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def error(self) -> float:
        """Half the width of the interval, as a share: the smallest difference from 1 that could have been seen."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    @property
    def verdict(self) -> str:
        if self.low > 1 or self.high < 1:
            return FASTER if self.low > 1 else SLOWER
        return ALIKE if self.error <= CLEAR else NOISY

    @property
    def settled(self) -> bool:
        """Whether more pairs would change nothing: known as well as can be, or the error is small beside the gain."""
        far = abs(math.log(self.ratio)) >= 2 * math.log1p(self.error)
        return self.error <= 3 * FLOOR or (far and self.verdict in (FASTER, SLOWER))

    def turned(self) -> "Comparison":
        """The same of the reference over the rung."""
        return Comparison(1 / self.ratio, 1 / self.high, math.inf if self.low == 0 else 1 / self.low, self.pairs)


def compare(ratios: Sequence[float]) -> Comparison:
    """The comparison that paired ratios of speeds carry."""
    ordered, out = sorted(ratios), left_out(len(ratios))
    low, high = (0.0, math.inf) if out is None else (ordered[out] / (1 + FLOOR), ordered[-1 - out] * (1 + FLOOR))
    return Comparison(statistics.median(ratios), low, high, len(ratios))


def left_out(pairs: int) -> int | None:
    """How many of the smallest and of the largest ratios the interval leaves out; None where all are too few.

    The true ratio lies below the k + 1 smallest of n only if at most k of n coins fell on one side.
    """
    most, below, count = MISS / 2 * 2**pairs, 0, -1
    while below + math.comb(pairs, count + 1) <= most:
        count += 1
        below += math.comb(pairs, count)
    return count if count >= 0 else None


def looks_up_to(pairs: int) -> tuple[int, ...]:
    """When to look at the interval if there are at most `pairs` pairs."""
    return tuple(look for look in LOOKS if look <= pairs) or (max(1, pairs),)


def chained(errors: Sequence[float]) -> float:
    """The error of a product of ratios whose errors are independent of each other."""
    return math.expm1(math.sqrt(sum(math.log1p(error) ** 2 for error in errors)))


PERIOD = 10  # steps between two cleanings, as the guides have it
PERIODIC = ("empty-cache", "gc-collect")  # a median step does not see them
_ON_CUDA = ("empty-cache", "empty-cache-each-step", "cudnn-benchmark", "split-512")


def tricks_for(device: Device) -> tuple[str, ...]:
    if device.kind != "cuda":
        return ("gc-collect",)
    # What the environment sets of the allocator is not undone here, not even for a moment.
    return ("gc-collect", *(name for name in _ON_CUDA if name != "split-512" or allocator_words() is None))


@contextlib.contextmanager
def trick(name: str | None, device: Device) -> Iterator[Callable[[int], None] | None]:
    """Does what a guide says for the length of a block; yields what is to be called after each step, if anything."""
    if name not in (None, "gc-collect", *_ON_CUDA):
        raise ValueError(f"there is no trick {name!r}")
    work = gc.collect if name == "gc-collect" else torch.cuda.empty_cache

    def after_step(number: int) -> None:
        if name not in PERIODIC or number % PERIOD == 0:
            work()

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or name == "cudnn-benchmark"
    if name == "split-512":
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
    try:
        yield after_step if name in (*PERIODIC, "empty-cache-each-step") else None
    finally:
        torch.backends.cudnn.benchmark = before
        if name == "split-512":
            use_expandable_segments(device.torch_device, False)  # setting one puts the others back to their defaults


TURN_SECONDS = 0.2  # short beside the changes of a load, long beside the start of a step


@final
class Side:
    """One rung on the device: its run, its place in the data, and what is done around its steps.

    `chosen` are the steps that it takes over and over, where they differ; none stands for all. After `period` steps
    everything has happened once.
    """

    def __init__(
        self,
        name: str,
        config: LoadedConfig,
        device: Device,
        trick_name: str | None = None,
        chosen: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.config = config
        self.device = device
        self.trick = trick_name
        self.chosen = chosen
        self.period = math.lcm(PERIOD if trick_name in PERIODIC else 1, len(chosen) or 1)
        self.stack = contextlib.ExitStack()
        self.steps: Steps | None = None

    @property
    def run(self) -> Run:
        assert self.steps is not None, "it is not open"
        return self.steps.run

    def open(self, *, beside: bool = False) -> Self:
        """Builds the run; `beside` another one that stays."""
        run = self.stack.enter_context(borrowed_run(self.config, beside=beside))
        self.steps = self.stack.enter_context(Steps(of_steps(run, self.chosen)))
        return self

    def close(self) -> None:
        self.steps = None
        self.stack.close()

    def take(self, count: int) -> list[StepReport]:
        """The next steps, with the process-wide settings that this rung has and the other one may not."""
        assert self.steps is not None, "it is not open"
        use_expandable_segments(self.device.torch_device, on=self.run.speed.expandable_segments)
        with trick(self.trick, self.device) as self.steps.after_step:
            return self.steps.take(count)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Sitting:
    """What came of two rungs in turns; `timed` are steps of the rung, `apart` says that memory held one at a time."""

    compared: Comparison
    timed: list[StepReport]
    apart: bool


@dataclasses.dataclass(frozen=True)
class Turns:
    """How a sitting goes: steps of a turn, steps before them that are not timed, and the most pairs."""

    steps: int
    untimed: int
    pairs: int
    seconds: float
    most: float


def sit(rung: Side, reference: Side, *, steps: int, typical: float, seconds: float, most: float) -> Sitting:
    """Times an open rung and a reference in turns, at most `steps` steps of each, in about `seconds`.

    `typical` is what a step of the rung takes.
    """
    turns = _turns(rung, steps, typical, seconds, most)
    try:
        reference.open(beside=True)
        warm = [report.seconds for report in reference.take(WARMUP)]
        turns = _turns(rung, steps, max(typical, statistics.median(warm[1:])), seconds, most)
        return _sitting(rung, reference, turns, apart=False)
    except ResourceError:
        pass  # the traceback has to go before its memory does
    finally:
        reference.close()
    rung.close()
    return _sitting(rung, reference, turns, apart=True)


def _turns(rung: Side, steps: int, typical: float, seconds: float, most: float) -> Turns:
    count = max(1, min(math.ceil(TURN_SECONDS / max(typical, 1e-9)), steps // LOOKS[0]))
    count = rung.period * -(-count // rung.period)
    # A trick such as emptying the cache leaves its cost to the first step of the other rung.
    return Turns(count, 0 if rung.trick is None else 1, max(1, steps // count), seconds, most)


def _sitting(rung: Side, reference: Side, turns: Turns, *, apart: bool) -> Sitting:
    figure = statistics.fmean if rung.period > 1 else statistics.median  # a median sees nothing periodic
    coin = random.Random(f"{rung.name} {reference.name}")
    ratios: list[float] = []
    timed: list[StepReport] = []
    looks = looks_up_to(turns.pairs)
    began = time.monotonic()
    for look in looks:
        limit = turns.most if look == looks[0] else turns.seconds
        while not ratios or (len(ratios) < look and time.monotonic() - began < limit):
            figures: dict[str, float] = {}
            for side in coin.sample((rung, reference), 2):
                reports = _turn(side, turns, apart=apart)
                figures[side.name] = max(figure([report.seconds for report in reports]), 1e-9)
                timed += reports if side is rung else []
            ratios.append(figures[reference.name] / figures[rung.name])
        if len(ratios) < look or compare(ratios).settled:
            break
    return Sitting(compare(ratios), timed, apart)


def _turn(side: Side, turns: Turns, *, apart: bool) -> Sequence[StepReport]:
    if not apart:
        return side.take(turns.untimed + turns.steps)[turns.untimed :]
    with side:
        side.take(WARMUP)
        return side.take(turns.untimed + turns.steps)[turns.untimed :]
