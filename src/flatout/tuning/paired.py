"""What paired losses of a few seeds say of a field: the mean difference, its interval, and the verdict that it carries.

Idea: a pair is two runs of one seed, which read the same data in the same order: the config as it is, and the config
with one field changed. Their difference is loss with the change minus loss without, so a positive one speaks for the
value in the config. A few pairs of one field say almost nothing of how much differences scatter; all fields together
say enough.

Contract:
- Numbers only: no torch, no config.
- The noise of a difference is the spread of the paired differences about each field's own mean, pooled over all fields.
  A field whose own pairs lie further apart than that keeps its own spread: some changes are noisier than others.
- All pairs of a seed share one run, the unchanged one, so the pooled spread is known less well than the number of its
  pairs suggests. The degrees of freedom say so (Satterthwaite's approximation, with half of the variance shared).
- An interval misses the true difference in at most `MISS` of all cases. A verdict of helps or hurts needs the whole
  interval on one side of 0. Of twenty fields that do nothing, one may still get such a verdict.
- Without two pairs of any field nothing is known of the noise: `half_width` is None, and there is no verdict.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

MISS = 0.05
SHARED = 0.5  # correlation of two fields' differences of one seed: the unchanged run is in both
HELPS, HURTS, ALIKE, UNKNOWN = "helps", "hurts", "no difference seen", ""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What the pairs of a field say. `half_width` is half of the interval about `mean`: a smaller difference than that
    could not have been seen."""

    mean: float
    half_width: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """Of the value that was not changed: it helps where the change raises the loss."""
        if self.half_width is None:
            return UNKNOWN
        if abs(self.mean) <= self.half_width:
            return ALIKE
        return HELPS if self.mean > 0 else HURTS


@dataclasses.dataclass(frozen=True)
class Noise:
    """The standard deviation of one paired difference, pooled over fields, and how well that is known."""

    deviation: float
    degrees: float


def effects(differences: Mapping[str, Sequence[float]]) -> dict[str, Effect]:
    """The effect of every field that has pairs, from the differences of its pairs in the order of the seeds."""
    noise = pooled(list(differences.values()))
    return {field: _effect(own, noise) for field, own in differences.items() if own}


def _effect(own: Sequence[float], noise: Noise | None) -> Effect:
    mean = statistics.fmean(own)
    if noise is None:
        return Effect(mean, None, len(own))
    deviation = max(noise.deviation, math.sqrt(_squares(own) / max(1, len(own) - 1)))
    return Effect(mean, quantile(noise.degrees) * deviation / math.sqrt(len(own)), len(own))


def pooled(differences: Sequence[Sequence[float]]) -> Noise | None:
    """The noise of one difference; None where no field has two pairs."""
    several = [own for own in differences if len(own) > 1]
    # A field that the run does not use makes no difference at all, and tells nothing of the noise of others.
    several = [own for own in several if any(own)] or several
    if not several:
        return None
    free = [len(own) - 1 for own in several]
    # The variance of such a sum of squares has a term for every two fields that share runs.
    shared = sum(
        (1.0 if first == second else SHARED**2) * min(free[first], free[second])
        for first in range(len(free))
        for second in range(len(free))
    )
    return Noise(math.sqrt(sum(map(_squares, several)) / sum(free)), sum(free) ** 2 / shared)


def _squares(own: Sequence[float]) -> float:
    """The squared distances from the mean, added up."""
    mean = math.fsum(own) / max(1, len(own))
    return sum((difference - mean) ** 2 for difference in own)


def quantile(degrees: float, miss: float = MISS) -> float:
    """How many standard errors an interval of Student's t reaches to each side, so that it misses in `miss` of cases.

    With t = sqrt(degrees) tan(angle), the share inside is an integral of cos(angle) to the power of degrees - 1.
    """
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if 2 * scale * _integral(angle, degrees - 1) < 1 - miss:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _integral(angle: float, power: float, pieces: int = 200) -> float:
    """Of cos to that power, from 0 to an angle, by Simpson's rule."""
    width = angle / pieces
    values = [math.cos(number * width) ** power for number in range(pieces + 1)]
    return width / 3 * (values[0] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]) + values[-1])


def steady_seconds(seconds: Sequence[float], warmup: int) -> list[float]:
    """How long training had taken after each step, without what only some steps have: compiling, warming up, a load.

    Each step counts as the lower quartile of the nine around it, since what disturbs a step only makes it longer; the
    steps of the warm-up count as the first ones after it. Steps that become longer or shorter in stages are kept apart.
    """
    late = list(seconds[warmup:]) or list(seconds)
    around = [sorted(late[max(0, index - 4) : index + 5]) for index in range(len(late))]
    steady = [near[len(near) // 4] for near in around]
    return list(itertools.accumulate(steady[:1] * (len(seconds) - len(late)) + steady))
