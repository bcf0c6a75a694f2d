"""Which size, batch and length have the lowest loss when the time is up: measured speeds and a scaling law. No torch.

Idea: one size is measured, the law names the best one by what speed goes like with size, that one is measured, and so
on until the best one has been measured or the time for measuring is spent. So at most three sizes are tried. Seconds in
which kernels are built for the first size do not count: on a new machine they are many, and say nothing of the next.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flatout.config.sizes import ONCE, Shape, batch_of
from flatout.tuning.law import effective_parameters, effective_tokens, law_for

MOST_MEASURED = 3
BATCHES = (1, 2, 4)  # times that of the rule
SECONDS = 20.0  # for measuring
_SLOWER = 0.9  # power of FLOPs that a token's time goes with, where one size is all that was measured


@dataclass(frozen=True)
class Speed:
    """Seconds of a token, and of what a step takes once however many tokens it has: mostly the update."""

    token: float
    update: float
    built: float = 0.0  # seconds in which kernels were built before the first step

    def tokens_in(self, seconds: float, batch: int) -> float:
        return seconds * batch / (batch * self.token + self.update)


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a size would reach."""

    shape: Shape
    measured: bool
    tokens_per_second: float
    tokens: int
    batch: int
    loss: float

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time that there is, and the data; `batch` is one that the user wrote.

    `tables` says whether a model has tables of values and bigrams where the text is read once.
    """

    seconds: float
    vocab: int
    unique: int | None = None
    batch: int | None = None
    context: int | None = None
    ranks: int = 1
    tables: bool = False

    def prospect(self, shape: Shape, speed: Speed, *, measured: bool) -> Prospect:
        """What a size would reach at that speed, with the best of the batch of the rule and multiples of it.

        Where a step costs much however few tokens it has, as on a CPU, a larger batch reads more text in the same time.
        """
        context = self.context or shape.context
        rule = self.batch or context
        for _ in range(8):  # tokens and batch follow from each other, and settle at once
            rule = self.batch or batch_of(int(speed.tokens_in(self.seconds, rule)), context, self.ranks)
        batches = [rule] if self.batch else [times * rule for times in BATCHES]
        rows = [self._with(shape, speed, batch, measured) for batch in batches]
        return min(rows, key=lambda row: row.loss)

    def _with(self, shape: Shape, speed: Speed, batch: int, measured: bool) -> Prospect:
        tokens = speed.tokens_in(self.seconds, batch)
        law, fresh = law_for(self.vocab), effective_tokens(tokens, self.unique)
        parameters = effective_parameters(shape.dense(self.vocab), tokens, self.unique)
        once = self.unique is None or tokens <= ONCE * self.unique
        return Prospect(
            shape=shape,
            measured=measured,
            tokens_per_second=tokens / self.seconds,
            tokens=max(batch, int(tokens)),
            batch=batch,
            loss=law.loss(parameters, fresh, tokens / batch) - (law.tables if self.tables and once else 0.0),
        )


def choose(
    budget: Budget,
    shapes: Sequence[Shape],
    first: Shape,
    measure: Callable[[Shape], Speed | None],
    clock: Callable[[], float],
) -> list[Prospect]:
    """All shapes that fit, the best one first. `measure` says how fast a shape is; None where it does not fit."""
    found: dict[Shape, Speed | None] = {}
    spent, following = 0.0, first
    while True:
        before = clock()
        speed = found[following] = measure(following)
        took = clock() - before - (speed.built if speed is not None and following == first else 0.0)
        spent += took
        prospects = _prospects(budget, shapes, found)
        if not prospects or len(found) == MOST_MEASURED:
            break
        best = prospects[0].shape
        if best in found or spent + 1.5 * took > SECONDS:
            break
        following = best
    # Where something did not fit, what was not tried may not fit either.
    return [row for row in prospects if row.measured] if None in found.values() else prospects


def _prospects(budget: Budget, shapes: Sequence[Shape], found: Mapping[Shape, Speed | None]) -> list[Prospect]:
    known = {shape: speed for shape, speed in found.items() if speed is not None}
    too_large = min((flops(shape, budget) for shape, speed in found.items() if speed is None), default=math.inf)
    rows = [
        budget.prospect(shape, speed, measured=shape in known)
        for shape in dict.fromkeys((*shapes, *known))
        if flops(shape, budget) < too_large and (speed := _speed_of(shape, known, budget)) is not None
    ]
    return sorted(rows, key=lambda row: row.loss)


def flops(shape: Shape, budget: Budget) -> float:
    """FLOPs of a training token."""
    attention = 6 * shape.layers * shape.width * (budget.context or shape.context)
    return 6.0 * shape.dense(budget.vocab) + attention


def _speed_of(shape: Shape, known: Mapping[Shape, Speed], budget: Budget) -> Speed | None:
    """A measured speed, or one that follows from the nearest measured sizes by their FLOPs."""
    if shape in known or not known:
        return known.get(shape)
    wanted = math.log(flops(shape, budget))
    near = sorted(known, key=lambda other: abs(math.log(flops(other, budget)) - wanted))[:2]
    base, power = known[near[0]], _SLOWER
    if len(near) == 2:
        apart = math.log(flops(near[1], budget)) - math.log(flops(near[0], budget))
        if abs(apart) > 0.1:
            power = math.log(known[near[1]].token / base.token) / apart
            power = min(1.2, max(0.3, power))
    ratio = math.exp(wanted - math.log(flops(near[0], budget)))
    matrices = shape.layers * shape.width**2 / (near[0].layers * near[0].width ** 2)
    return Speed(base.token * ratio**power, base.update * max(matrices, 0.1))
