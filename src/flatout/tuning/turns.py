"""Two rungs in turns: a few steps of the one, a few of the other, so that both see the same machine.

Idea: what a machine does beside a measurement changes from second to second. Two rungs timed one after the other differ
by that change as well as by their switches; timed in turns of a fraction of a second they differ by their switches.

Contract:
- Each pair of turns has the order that a coin gives it (`compare.py` says why), the same coins in every sitting of the
  same two rungs.
- A sitting ends when its ratio is known well enough, or after `seconds`, but not before the first look, at ten pairs;
  and at `most` even before that. It then has a comparison all the same, however few pairs there were.
- Where memory does not hold both runs at once, each is built anew for every one of its turns.
Trap: the compiler's cache belongs to the process. The reference is built beside the rung without clearing it, so that
neither is compiled again during its turns.

The time that a ladder may take, and how much of it a rung gets.

Contract: the first rung is always measured. No rung is begun that could not be judged in the time that is left, and one
that is under way ends at the limit with what it has.
"""

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Self, final

from flatout.config.load import LoadedConfig
from flatout.device import Device, use_expandable_segments
from flatout.engine.run import Run
from flatout.engine.spans import StepReport
from flatout.errors import ResourceError, UsageError
from flatout.tuning.claims import PERIOD, PERIODIC, trick
from flatout.tuning.compare import LOOKS, Comparison, compare, looks_up_to
from flatout.tuning.measure import WARMUP, Steps, borrowed_run, of_steps
from flatout.tuning.plan import Plan

SITTING_SECONDS = 30.0  # over one rung
PATIENCE = 3  # how many times as long a slow rung may take for ten pairs of turns


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
        """About how many seconds to sit over a rung, of so many that are to come, and how many at the very most."""
        share = self.left / rungs - self.steps * self.typical
        enough = max(share, 2 * LOOKS[0] * self.typical)
        return min(SITTING_SECONDS, enough), min(PATIENCE * SITTING_SECONDS, max(self.left, 0.0))

    def check(self, plan: Plan, seconds: float) -> None:
        """Refuses a limit that cannot hold the reference and one rung, when a step takes so many seconds."""
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
