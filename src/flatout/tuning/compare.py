"""What two rungs timed in turns say: the ratio of their speeds, its interval, and the verdict that this carries.

Idea: a pair is one turn of the reference and one of the rung, next to each other, and a coin decides which comes first.
A load that changes nothing but the time of day is then as likely to help the one as the other, whatever it looks like:
drift, spikes, steps. So under the true ratio, half of the pairs lie above it and half below, and counting pairs (the
sign test, turned round) gives an interval for the ratio that needs no law of the noise.

Contract:
- The interval of a look at the data misses the true ratio in at most `MISS` of all cases. There are at most four looks
  (`LOOKS`), so an interval is wrong in at most 2 of 100 rungs, and so is a verdict.
- `FLOOR` is added on both sides: the same rung built twice differs by that much, by where its memory lies.
- A verdict of faster or slower is given only where the whole interval is on one side of 1.
Trap: `ratio` is a median, its interval is not symmetric about it, and the noise of a busy machine is not symmetric.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

LOOKS = (10, 20, 40, 80)  # pairs after which the interval is looked at, to go on only where it is too wide
MISS = 0.005  # of the intervals at one look
FLOOR = 0.01
CLEAR = 0.05  # an error up to which "no difference seen" says something
FASTER, SLOWER, ALIKE, NOISY = "faster", "slower", "no difference seen", "too noisy to tell"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A ratio of speeds with its interval, from so many pairs; too few pairs have the interval of all numbers."""

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
    """When to look at the interval if there are at most so many pairs."""
    return tuple(look for look in LOOKS if look <= pairs) or (max(1, pairs),)


def chained(errors: Sequence[float]) -> float:
    """The error of a product of ratios whose errors are independent of each other."""
    return math.expm1(math.sqrt(sum(math.log1p(error) ** 2 for error in errors)))
