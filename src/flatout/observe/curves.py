"""A run's numbers as curves for the report, each with its steps, tokens and seconds, and thin enough to draw.

Idea: a curve of 100,000 steps has more points than a screen has columns. It is cut into buckets of equal length, and of
each bucket the smallest and the largest value stay, so that no spike is lost. Smoothing is done before, on all values.

Contract: works on what `read_history` returns, also of older runs and damaged files: a row without a step, or a value
that is no number, is left out. NaN and infinity stay, as the text that JSON has for them.

Trap: `tokens` grows with the step in every run so far, so it is mostly sent as one factor instead of a list.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from flatout.observe.eigenstates import QUANTITIES, eigenstate_history
from flatout.observe.sinks import LARGEST, RunHistory, rows_with_step

MOST_POINTS, FEWEST_POINTS = 2400, 240  # per curve, and how thin many runs beside each other may become
_SHARED_POINTS = 3600  # per kind of curve, by all runs together
_SMOOTH_SHARE = 100  # the window goes a hundredth of the run to either side
_MOST = 1e30  # beyond it a number is damage, or as good as infinite
_NEAREST = 1e-12  # to 1, that |λ| is told
_SHORT = 40  # steps below which smoothing would hide more than it shows

Curve = dict[str, Any]  # s: steps, t: tokens (a list, or tokens per step), e: seconds, v: values


class Places:
    """Where a step lies on the other two axes, from rows that are in the order of their steps."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.steps = [row["step"] for row in rows]
        self.tokens = [amount(row.get("tokens")) or 0 for row in rows]
        self.seconds = list(itertools.accumulate(amount(row.get("seconds")) or 0.0 for row in rows))

    def at(self, step: int) -> tuple[float, float]:
        """(tokens, seconds) at the end of `step`, or of the last step before it that is known."""
        index = bisect.bisect_right(self.steps, step) - 1
        return (self.tokens[index], self.seconds[index]) if index >= 0 else (0, 0.0)


def number(value: Any) -> float | None:
    """The value if it is a number that a float can hold, NaN and infinity included; else None."""
    if type(value) is float:
        return value
    return value if type(value) is int and abs(value) <= LARGEST else None


def amount(value: Any) -> float | None:
    """The value if it can be a count, a size or a time; else None. Damage is not to spoil the arithmetic on it."""
    known = number(value)
    return known if known is not None and 0 <= known <= _MOST else None


def finite(values: Sequence[Any]) -> list[float]:
    """The numbers among them that arithmetic can be done on."""
    return [value for value in values if number(value) is not None and -_MOST <= value <= _MOST]


def points_for(runs: int) -> int:
    """How many points a curve may have when so many runs share a page."""
    return max(FEWEST_POINTS, min(MOST_POINTS, _SHARED_POINTS // max(runs, 1)))


def curves_of(history: RunHistory, most: int) -> dict[str, Curve]:
    """All curves of a run by name; a kind of number that the run never told has none."""
    steps = rows_with_step(history.steps)
    places = Places(steps)
    curves: dict[str, Curve | None] = {}
    for fields, rows, each in (
        (_STEP_FIELDS, steps, most),
        (_EVAL_FIELDS, rows_with_step(history.evals), most),
        (_MACHINE_FIELDS, rows_with_step(history.machine), most // 2),
    ):
        for name, field in fields.items():
            points = [(row["step"], value) for row in rows if (value := number(row.get(field))) is not None]
            curves[name] = _curve(points, places, each)
            if name in _SMOOTHED:
                curves[f"{name}_smooth"] = _smooth_curve(points, places, most // 4)
    curves |= _eigenstate_curves(history, places, most)
    return {name: curve for name, curve in curves.items() if curve is not None}


_STEP_FIELDS = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "tokens_per_second": "tokens_per_second",
    "mfu": "mfu",
    "memory": "memory_bytes",
    "reserved": "reserved_bytes",
    "step_seconds": "seconds",
    "data_seconds": "data_seconds",
    "parameter_norm": "parameter_norm",
    "loss_scale": "loss_scale",
}
_SMOOTHED = ("loss", "grad_norm", "tokens_per_second", "mfu", "step_seconds", "data_seconds")
_EVAL_FIELDS = {"val_loss": "loss", "bits_per_byte": "bits_per_byte"}
_MACHINE_FIELDS = {
    "utilisation": "utilisation",
    "card_memory": "memory_bytes",
    "power": "power_watts",
    "power_limit": "power_limit_watts",
    "temperature": "temperature",
    "clock": "clock_mhz",
    "cores_busy": "cores_busy",
    "cores_others": "cores_others",
    "load": "load",
    "process_memory": "process_bytes",
}


def _eigenstate_curves(history: RunHistory, places: Places, most: int) -> dict[str, Curve | None]:
    """Medians over each layer's states, as `horizon_3`, and over layers, as `horizon_middle`."""
    found = eigenstate_history(history.eigenstates)
    each = max(FEWEST_POINTS // 4, most // max(len(found.layers), 1))
    curves: dict[str, Curve | None] = {}
    for quantity in QUANTITIES:
        # |λ| is sent as what it lacks to 1: that has digits where |λ| has only nines.
        sent = (lambda value: max(1.0 - value, _NEAREST)) if quantity == "magnitude" else (lambda value: value)
        for layer in found.layers:
            told = zip(layer.steps, layer.values[quantity]["50%"], strict=True)
            known = [(step, value if math.isnan(value) else sent(value)) for step, value in told if value is not None]
            curves[f"{quantity}_{layer.layer}"] = _curve(known, places, each)
        middle = [(step, sent(value)) for step, value in found.middle(quantity)]
        curves[f"{quantity}_middle"] = _curve(middle, places, most)
    return curves


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Which positions to keep: ends, the extremes of every bucket, and in it the first and last non-finite value."""
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = max(1, most // 2)
    kept = {0, count - 1}
    for bucket in range(buckets):
        positions = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        good = [position for position in positions if math.isfinite(values[position])]
        if good:
            kept |= {min(good, key=values.__getitem__), max(good, key=values.__getitem__)}
        if len(good) < len(positions):
            bad = [position for position in positions if not math.isfinite(values[position])]
            kept |= {bad[0], bad[-1]}
    return sorted(kept)


def smoothed(values: Sequence[float], positions: Sequence[int]) -> list[float]:
    """Medians of a window around each of these positions, narrower towards both ends, of what is finite in it.

    Not means: one spike would make a plateau as wide as the window. Of a very wide window some hundred values do.
    """
    reach, last = max(3, len(values) // _SMOOTH_SHARE), len(values) - 1
    stride = 1 + reach // 80
    middles: list[float] = []
    for position in positions:
        half = min(reach, position, last - position)
        window = values[position - half : position + half + 1 : stride]
        seen = [value for value in window if math.isfinite(value)]
        middles.append(statistics.median(seen) if seen else math.nan)
    return middles


def _curve(points: Sequence[tuple[int, float]], places: Places, most: int) -> Curve | None:
    return _sent([points[index] for index in thinned([value for _, value in points], most)], places)


def _smooth_curve(points: Sequence[tuple[int, float]], places: Places, most: int) -> Curve | None:
    if len(points) < _SHORT:
        return None
    stride = max(1, math.ceil(len(points) / max(most, 1)))
    positions = sorted({*range(0, len(points), stride), len(points) - 1})
    middles = smoothed([value for _, value in points], positions)
    pairs = [(points[at][0], value) for at, value in zip(positions, middles, strict=True) if math.isfinite(value)]
    return _sent(pairs, places)


def _sent(points: Sequence[tuple[int, float]], places: Places) -> Curve | None:
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    where = [places.at(step) for step in steps]
    tokens: list[float] | float = [at[0] for at in where]
    factor = tokens[-1] / steps[-1] if steps[-1] else 0
    if factor == int(factor) and all(token == step * factor for step, token in zip(steps, tokens, strict=True)):
        tokens = int(factor)
    return {"s": list(steps), "t": tokens, "e": [short(at[1]) for at in where], "v": [short(value) for value in values]}


def short(value: float) -> float | int | str:
    """Seven digits are more than a screen can show; NaN and infinity become text."""
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
