"""Which size, batch and length have the lowest loss when the time is up: measured speeds and a scaling law. No torch.

Idea: one size is measured, the law names the best one by what speed goes like with size, that one is measured, and so
on until the best one has been measured or the time for measuring is spent. So at most three sizes are tried. Seconds in
which kernels are built for the first size do not count: on a new machine they are many, and say nothing of the next.

What a model of some size learns from so many tokens: a scaling law to choose sizes by. No torch here.

Idea: loss = E + A / N^a + B / D^b + C / S, with N dense parameters, D tokens of which repeated ones count less, and S
steps. Only the choice has to be right, not the loss: near the best size the curve is flat.

Where the constants come from:
- Words (a vocabulary like GPT-2's): fitted to the runs of `record` on enwik8 that `tests/unit/test_minutes.py` lists,
  of 16M to 353M parameters, 8M to 130M tokens, 0.3 to 5 epochs, ending between 2.65 and 3.65; off by 0.018 (root of
  the mean square) and by 0.049 at most. Steps smaller than the rule's are not in it: with 24,576 tokens, at lower
  rates, losses are up to 0.09 higher. Several powers fit about as well; these make 7 tokens for each parameter the best
  at 51M and 11 at 353M, near what longer runs have (12 in nanochat, `scripts/base_train.py`, 92d63d4).
- More than 15 parameters for each new token count for nothing: after 8M tokens 124M parameters were at 3.363, 353M at
  3.404.
- Characters: fitted to 8 runs of `record` on Shakespeare with tables of bigrams, 0.03M, 0.10M and 0.34M parameters
  after 0.7M to 3.3M characters, ending between 1.58 and 1.66 (`lab/minutes.jsonl` and `small_tables.jsonl`); off
  by 0.007. Tables help small models most: without them 0.34M parameters were as good as 0.10M.
- Subwords (a small vocabulary learned from the text): the law of characters, times the 2.2 that a loss is larger by,
  with a floor that fits 0.16M parameters after two and three epochs of Shakespeare (3.357, 3.336).
- Repeated tokens: the form of Muennighoff et al. 2023, "Scaling data-constrained language models", with R* = 2 instead
  of their 15.4: by our runs a second epoch is worth 0.8 of a first, and ten of them 3. With it, ten epochs of 12.7M
  tokens differ by as much between 16M and 51M parameters as measured (3.77 and 3.57). Small vocabularies have runs of
  up to 2.5 epochs only.
- Tables of values and bigrams are worth more where text is read once: 0.06, by the same fit. Bigrams alone were worth
  0.02 there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flatout.config.sizes import ONCE, SMALL_VOCAB, Shape, batch_of

_REPEATS = 2.0  # epochs beyond the first after which repeated tokens teach hardly anything
_MOST_FOR_EACH = 15.0  # parameters for each new token that lower the loss
_CHARACTERS = 300  # vocabularies up to so many ids


@dataclass(frozen=True)
class Law:
    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    steps: float
    tables: float = 0.0  # what they take off the loss where text is read once, beyond what they do elsewhere

    def loss(self, parameters: float, tokens: float, steps: float) -> float:
        """The loss after `tokens` fresh tokens in so many steps."""
        return (
            self.floor
            + self.size / parameters**self.size_power
            + self.data / max(tokens, 1.0) ** self.data_power
            + self.steps / max(steps, 1.0)
        )


WORDS = Law(floor=1.81, size=1810.0, size_power=0.5, data=819.0, data_power=0.4, steps=20.0, tables=0.06)
CHARACTERS = Law(floor=1.282, size=35.0, size_power=0.5, data=231.0, data_power=0.5, steps=12.6)
SUBWORDS = Law(floor=2.58, size=77.0, size_power=0.5, data=508.0, data_power=0.5, steps=27.7)


def law_for(vocab: int) -> Law:
    return CHARACTERS if vocab <= _CHARACTERS else SUBWORDS if vocab <= SMALL_VOCAB else WORDS


def effective_tokens(tokens: float, unique: float | None) -> float:
    """Fresh tokens that teach as much as `tokens` of a text that has `unique` ones."""
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    return unique * (1 + _REPEATS * (1 - math.exp(-repeats / _REPEATS)))


def effective_parameters(parameters: float, tokens: float, unique: float | None) -> float:
    """As many as so much text can teach."""
    return min(parameters, _MOST_FOR_EACH * (tokens if unique is None else min(tokens, unique)))


MOST_MEASURED = 3
BATCHES = (1, 2, 4)  # times that of the rule
SECONDS = 20.0  # for measuring
_SLOWER = 0.9  # power of FLOPs that a token's time goes with, where one size is all that was measured


@dataclass(frozen=True)
class SizeSpeed:
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

    def prospect(self, shape: Shape, speed: SizeSpeed, *, measured: bool) -> Prospect:
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

    def _with(self, shape: Shape, speed: SizeSpeed, batch: int, measured: bool) -> Prospect:
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
    measure: Callable[[Shape], SizeSpeed | None],
    clock: Callable[[], float],
) -> list[Prospect]:
    """All shapes that fit, the best one first. `measure` says how fast a shape is; None where it does not fit."""
    found: dict[Shape, SizeSpeed | None] = {}
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


def _prospects(budget: Budget, shapes: Sequence[Shape], found: Mapping[Shape, SizeSpeed | None]) -> list[Prospect]:
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


def _speed_of(shape: Shape, known: Mapping[Shape, SizeSpeed], budget: Budget) -> SizeSpeed | None:
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
    return SizeSpeed(base.token * ratio**power, base.update * max(matrices, 0.1))
