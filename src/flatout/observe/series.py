"""The numbers of a run as arrays, and how many of them a picture can show.

Idea: a picture is a thousand dots wide, a run may have millions of steps. `thin` keeps, of all steps that fall on one
column of dots, the first, the lowest, the highest and the last: the drawn line is the same, spikes included. `smooth`
is a mean over neighbours on both sides, so the smooth line is not late.

Contract: any metrics file that `read_history` reads can be taken, also one that was edited or is of an older version.
What is no number counts as missing; NaN and infinity are numbers that happened, and are kept as such. No torch.

Trap: missing and NaN are different things. A missing value leaves no trace, a NaN must be seen.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from flatout.observe.eigenstates import LayerHistory, eigenstate_history
from flatout.observe.sinks import RunHistory, is_count, rows_with_step

Array = numpy.ndarray[Any, numpy.dtype[Any]]
DRAWN = (
    "loss", "learning_rate", "grad_norm", "seconds", "tokens_per_second", "mfu", "memory_bytes", "reserved_bytes",
    "parameter_norm", "data_seconds",
)  # fmt: skip
COLUMNS = 900  # of dots in a panel; more than one of ours has
_LARGEST = 1e100  # what is drawn must survive being squared
_MEMORY_WORDS = re.compile(
    r"out of memory|allocate memory|STATUS_ALLOC_FAILED|with micro-batches of|sequences at once", re.I
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points in the order of `x`, which is finite; `y` is NaN where the value was NaN or infinite."""

    x: Array
    y: Array

    @property
    def bad(self) -> Array:
        """Where the value was not finite."""
        return self.x[~numpy.isfinite(self.y)]

    @property
    def values(self) -> Array:
        return self.y[numpy.isfinite(self.y)]


class RunNumbers:
    """A run that was read, as arrays: its steps and evaluations, each step once and in order.

    `axes` holds what steps can be drawn against: step, tokens and seconds of training; `columns` each field that is
    drawn, as values and whether they were told. Of the marks, each is a list of steps: `skipped` updates, notices about
    `memory`, other `notices`, and `resumes`.
    """

    def __init__(self, history: RunHistory, name: str | None = None) -> None:
        self.name = history.folder.resolve().name if name is None else name
        self.info, self.end = history.info, history.end
        self.rows, self.evals = _once_per_step(history.steps), _once_per_step(history.evals)
        self.columns = {field: _numbers([row.get(field) for row in self.rows]) for field in (*DRAWN, "tokens")}
        seconds, told = self.columns["seconds"]
        spent = numpy.where(numpy.isfinite(seconds) & (seconds > 0), numpy.minimum(seconds, _LARGEST), 0.0)
        clock = numpy.cumsum(spent) if told.any() else numpy.full(len(self.rows), math.nan)
        step = _array(row["step"] for row in self.rows)
        self.axes: dict[str, Array] = {"step": step, "tokens": self.columns["tokens"][0], "seconds": clock}
        skipped = [row["step"] for row in self.rows if row.get("applied") is False]
        memory, notices = _notices(history.notices, set(skipped))
        self.skipped, self.memory, self.notices = _array(skipped), _array(memory), _array(notices)
        self.resumes = _array(_resumes(history.infos, self.rows))
        self.eigenstates = eigenstate_history(history.eigenstates)

    def curve(self, field: str, against: str = "step") -> Curve:
        """A field of the steps where it was told."""
        return _curve(self.axes[against], *self.columns[field])

    def eval_curve(self, against: str = "step") -> Curve:
        """Validation loss."""
        values, told = _numbers([row.get("loss") for row in self.evals])
        return _curve(self.place([row["step"] for row in self.evals], against), values, told)

    def layer_curve(self, layer: LayerHistory, quantity: str, quantile: str = "50%") -> Curve:
        """What the states of an eigenstate block had, over steps."""
        return _curve(_array(layer.steps), *_numbers(list(layer.values[quantity][quantile])))

    def place(self, steps: Iterable[int], against: str) -> Array:
        """Where steps lie on an axis: at the newest step that is not after them; 0 before the first."""
        wanted = _array(steps)
        if against == "step":
            return wanted
        ordered, axis = self.axes["step"], self.axes[against]
        if not len(ordered):
            return numpy.full(len(wanted), math.nan)
        found = numpy.searchsorted(ordered, wanted, side="right") - 1
        before = numpy.where(numpy.isfinite(axis[0]), 0.0, math.nan)  # an axis that was not recorded stays unknown
        return numpy.where(found < 0, before, axis[found])

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest loss that is a number; the first of equal ones, as the engine counts."""
        losses = [(number(row.get("loss")), row) for row in self.evals]
        known = [(loss, row) for loss, row in losses if loss is not None and math.isfinite(loss)]
        return min(known, key=lambda pair: pair[0], default=(0.0, None))[1]


def number(value: Any) -> float | None:
    """The value as a float, None if it is none; a whole number too large for one is infinite."""
    if isinstance(value, float):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# --- what a picture can show ------------------------------------------------------------------------------------------


def thin(curve: Curve, columns: int = COLUMNS, *, logarithmic: bool = False) -> Curve:
    """The curve with at most four points in each column, its extremes among them; short curves stay as they are."""
    if len(curve.x) <= 4 * columns:
        return curve
    place = _column_of(curve.x, columns, logarithmic=logarithmic)
    finite = numpy.isfinite(curve.y)
    index = numpy.flatnonzero(finite)
    if not len(index):
        return Curve(curve.x[:1], curve.y[:1])
    # Sorted by column and then by value, the lowest of a column comes first and the highest last.
    by_value = index[numpy.lexsort((curve.y[index], place[index]))]
    kept = [_ends_of_groups(place, index), _ends_of_groups(place, by_value)]
    # A gap is drawn only where a whole column has nothing to show.
    empty = numpy.setdiff1d(place, place[index])
    kept.append(numpy.searchsorted(place, empty))
    chosen = numpy.unique(numpy.concatenate(kept))
    return Curve(curve.x[chosen], numpy.where(finite[chosen], curve.y[chosen], math.nan))


def evenly_in_logarithm(curve: Curve, count: int = 400) -> Array:
    """Values at places that are evenly spaced on a logarithmic axis."""
    finite = numpy.isfinite(curve.y) & (curve.x > 0)
    if not finite.any():
        return curve.y[finite]
    x = numpy.log10(curve.x[finite])
    return numpy.interp(numpy.linspace(x[0], x[-1], count), x, curve.y[finite])


def thin_marks(x: Array, low: float, high: float, columns: int = COLUMNS, *, logarithmic: bool = False) -> Array:
    """At most one mark in each column between `low` and `high`."""
    scale = numpy.log10 if logarithmic else (lambda value: value)
    width = (scale(high) - scale(low)) or 1.0
    place = numpy.floor((scale(x) - scale(low)) / width * columns)
    return x[numpy.unique(place, return_index=True)[1]]


def window_of(count: int) -> int:
    """How many steps a smooth line takes the mean of; 1 means that the curve is drawn as it is."""
    return 1 if count < 40 else 2 * max(2, count // 100) + 1


def smooth(y: Array, window: int) -> Array:
    """The mean over `window` neighbours; NaN is left out of it, and stays where there is nothing else.

    At the beginning, where losses fall fast, it takes in few of them, also on a logarithmic axis.
    """
    finite = numpy.isfinite(y)
    place = numpy.arange(len(y))
    half = numpy.minimum(window // 2, place // 5)
    sums = numpy.concatenate(([0.0], numpy.cumsum(numpy.where(finite, y, 0.0))))
    counts = numpy.concatenate(([0], numpy.cumsum(finite)))
    first, last = place - half, numpy.minimum(place + half + 1, len(y))
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    return numpy.where(count > 0, total / numpy.maximum(count, 1), math.nan)


def usual_range(values: Array, slack: float) -> tuple[float, float] | None:
    """The lowest and highest of the values, but no further from the middle 90% of them than `slack` times its width.

    What is only a little further is taken in: leaving it out would win nothing.
    """
    values = numpy.clip(values[numpy.isfinite(values)], -_LARGEST, _LARGEST)
    if not len(values):
        return None
    lowest, highest = float(values.min()), float(values.max())
    if math.isinf(slack):
        return lowest, highest
    low, high = (float(limit) for limit in numpy.quantile(values, (0.05, 0.95)))
    low, high = max(lowest, low - slack * (high - low)), min(highest, high + slack * (high - low))
    near = 0.6 * (high - low)
    return (lowest if low - lowest <= near else low), (highest if highest - high <= near else high)


# --- reading ----------------------------------------------------------------------------------------------------------


def _once_per_step(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Rows that name a step, in its order; of several that name the same one, the last."""
    return tuple({row["step"]: row for row in rows_with_step(rows)}.values())


def _array(values: Iterable[int]) -> Array:
    return numpy.fromiter(values, dtype=numpy.float64)


def _numbers(values: list[Any]) -> tuple[Array, Array]:
    """The values as floats, and which of them were told at all."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return numpy.array(values, dtype=numpy.float64), numpy.ones(len(values), dtype=bool)
    known = values if kinds <= {float, type(None)} else [number(value) for value in values]
    told = numpy.array([value is not None for value in known], dtype=bool)
    return numpy.array(known, dtype=numpy.float64), told  # None becomes NaN


def _curve(x: Array, y: Array, told: Array) -> Curve:
    used = told & (numpy.abs(x) < _LARGEST)
    x, y = x[used], y[used]
    if len(x) > 1 and (numpy.diff(x) < 0).any():  # tokens of an edited file; steps and seconds never fall
        order = numpy.argsort(x, kind="stable")
        x, y = x[order], y[order]
    return Curve(x, numpy.where(numpy.isfinite(y), numpy.clip(y, -1e300, 1e300), math.nan))  # room for sums and units


def _column_of(x: Array, columns: int, *, logarithmic: bool) -> Array:
    place = numpy.log10(numpy.maximum(x, 1e-9)) if logarithmic else x
    width = (place[-1] - place[0]) or 1.0
    return numpy.minimum((place - place[0]) / width * columns, columns - 1).astype(numpy.int64)


def _ends_of_groups(place: Array, index: Array) -> Array:
    """Of points sorted by column, the first and the last of each column."""
    change = numpy.flatnonzero(numpy.diff(place[index]))
    return numpy.concatenate((index[:1], index[change], index[change + 1], index[-1:]))


def _notices(rows: Sequence[dict[str, Any]], skipped: set[int]) -> tuple[list[int], list[int]]:
    """Steps with a notice about memory, and with another one; that of a skipped step is the same event."""
    memory, others = set(), set()
    for row in rows_with_step(rows):
        step, message = row["step"], row.get("message")
        if isinstance(message, str) and _MEMORY_WORDS.search(message):
            memory.add(step)
        elif step not in skipped:
            others.add(step)
    return sorted(memory), sorted(others)


def _resumes(infos: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[int]:
    """Steps after which the run went on: neither a start before the first step, nor one that took no step."""
    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 0)
    starts = {info["start_step"] for info in infos if is_count(info.get("start_step"))}
    return sorted(start for start in starts if max(1, first) <= start < last)
