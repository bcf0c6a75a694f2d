"""Values over steps: the series behind pictures, the report, the live panel and the notebook.

Idea: a screen is a thousand dots wide, a run may have millions of steps. `thin` cuts a series into stretches of equal
length and keeps the lowest and the highest value of each, so the drawn line is the same, spikes included. A terminal
has too few dots for that: there `Series.means` of the same stretches are drawn.

Contract: `RunNumbers` takes what `read_history` returns, also of older runs and of damaged files. A value that is no
number is missing and leaves no trace. NaN and infinity are values that happened and are kept. No torch.
"""

import bisect
import csv
import dataclasses
import io
import itertools
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from flatout.files import disk_errors, whole_file
from flatout.observe.human import human_count, printable
from flatout.observe.sinks import LARGEST, RunHistory, is_count, rows_with_step
from flatout.records import EigenstateRecord, EvalRecord, StepRecord

Array = numpy.ndarray[Any, numpy.dtype[Any]]
Points = Sequence[tuple[int, float]]
Curve = dict[str, Any]  # of the report; s: steps, t: tokens (a list, or tokens per step), e: seconds, v: values

MOST_POINTS, FEWEST_POINTS = 2400, 240  # of a curve in the report, and how thin many runs beside each other may become
_SHARED_POINTS = 3600  # per kind of curve, by all runs together
_LARGEST = 1e100  # what is drawn must survive being squared
_DAMAGED = 1e30  # a count, a size or a time beyond this is damage
_SHORT = 40  # steps below which smoothing would hide more than it shows
_NEAREST = 1e-12  # |λ| is shown no nearer to 1 than this


# --- numbers of a record ----------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """The value if it is a number that a float can hold, NaN and infinity included; else None."""
    if type(value) is float:
        return value
    return value if type(value) is int and abs(value) <= LARGEST else None


def amount(value: Any) -> float | None:
    """The value if it can be a count, a size or a time; else None."""
    known = number(value)
    return known if known is not None and 0 <= known <= _DAMAGED else None


def finite(values: Iterable[Any]) -> list[float]:
    """The numbers among the values that arithmetic can be done on."""
    return [value for value in values if number(value) is not None and -_DAMAGED <= value <= _DAMAGED]


# --- one series -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Values `y` in the order of `x`: steps, tokens or seconds of training. NaN and infinity are values too."""

    x: Array
    y: Array
    name: str = ""
    unit: str = ""

    @property
    def bad(self) -> Array:
        """The places of values that are not finite."""
        return self.x[~numpy.isfinite(self.y)]

    @property
    def values(self) -> Array:
        """The finite values."""
        return self.y[numpy.isfinite(self.y)]

    def thinned(self, most: int, *, logarithmic: bool = False) -> "Series":
        kept = thin(self.x, self.y, most, logarithmic=logarithmic)
        return replace(self, x=self.x[kept], y=self.y[kept])

    def means(self, most: int) -> "Series":
        """At most `most` means of the finite values of a stretch, each at its last place; a short series as it is."""
        if len(self.x) <= most:
            return self
        starts, is_finite = _stretches(self.x, most), numpy.isfinite(self.y)
        sums = numpy.add.reduceat(numpy.where(is_finite, self.y, 0.0), starts)
        counts = numpy.add.reduceat(is_finite.astype(float), starts)
        ends = numpy.append(starts[1:], len(self.x)) - 1
        return replace(self, x=self.x[ends], y=numpy.where(counts > 0, sums / numpy.maximum(counts, 1.0), math.nan))

    @property
    def points(self) -> Points:
        return list(zip(self.x.astype(int).tolist(), self.y.tolist(), strict=True))


def thin(x: Any, y: Any, most: int, *, logarithmic: bool = False) -> Array:
    """Positions to keep for about `most` points: both ends, and the lowest and highest value of every stretch of `x`.

    Of values that are not finite, the first and the last of every stretch are kept. A short series is kept whole.
    """
    x, y = numpy.asarray(x, dtype=numpy.float64), numpy.asarray(y, dtype=numpy.float64)
    if len(x) <= most:
        return numpy.arange(len(x))
    starts = _stretches(numpy.log10(numpy.maximum(x, 1e-9)) if logarithmic else x, most // 2)
    is_finite = numpy.isfinite(y)
    low, high = (numpy.where(is_finite, y, beyond) for beyond in (math.inf, -math.inf))
    kept = [0, len(x) - 1]
    for begin, end in itertools.pairwise([*starts.tolist(), len(x)]):
        kept += [begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())]
    bad = numpy.flatnonzero(~is_finite)
    change = numpy.flatnonzero(numpy.diff(numpy.searchsorted(starts, bad, side="right")))
    return numpy.unique(numpy.concatenate([kept, bad[:1], bad[change], bad[change + 1], bad[-1:]]).astype(int))


def _stretches(place: Array, count: int) -> Array:
    """Where the stretches begin, of which there are at most `count`, equally long and none of them empty."""
    return numpy.unique(numpy.searchsorted(place, numpy.linspace(place[0], place[-1], max(count, 1) + 1)[:-1]))


class GrowingSeries:
    """The series of a run that goes on. It keeps every step, in 16 bytes."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)

    def cut_back(self, step: int) -> None:
        """Forgets what came after `step`: a resumed run repeats it."""
        count = bisect.bisect_right(self._steps, step)
        del self._steps[count:], self._values[count:]

    @property
    def series(self) -> Series:
        return Series(numpy.array(self._steps), numpy.array(self._values))


def thin_marks(x: Array, low: float, high: float, most: int, *, logarithmic: bool = False) -> Array:
    """At most `most` marks between `low` and `high`, one in each stretch."""
    scale = numpy.log10 if logarithmic else (lambda value: value)
    width = (scale(high) - scale(low)) or 1.0
    stretch = numpy.floor((scale(x) - scale(low)) / width * most)
    return x[numpy.unique(stretch, return_index=True)[1]]


# --- smooth lines and limits ------------------------------------------------------------------------------------------


def window_of(count: int) -> int:
    """The number of steps in a mean of a smooth line; 1 means that the series is drawn as it is."""
    return 1 if count < _SHORT else 2 * max(2, count // 100) + 1


def smooth(y: Array, window: int) -> Array:
    """The mean over `window` neighbours on both sides, so that it is not late; NaN is left out of it.

    At the beginning, where losses fall fast, it takes in few neighbours, also on a logarithmic axis.
    """
    is_finite = numpy.isfinite(y)
    place = numpy.arange(len(y))
    half = numpy.minimum(window // 2, place // 5)
    sums = numpy.concatenate(([0.0], numpy.cumsum(numpy.where(is_finite, y, 0.0))))
    counts = numpy.concatenate(([0], numpy.cumsum(is_finite)))
    first, last = place - half, numpy.minimum(place + half + 1, len(y))
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    return numpy.where(count > 0, total / numpy.maximum(count, 1), math.nan)


def medians(series: Series, most: int) -> Series:
    """About `most` medians of the finite values in a window of a fiftieth of the series; of a short series none.

    Not means: one spike would make a plateau as wide as the window. Windows are narrower towards both ends, and of a
    very wide one some hundred values are used.
    """
    count = len(series.x)
    positions = numpy.unique([*range(0, count, math.ceil(count / max(most, 1)) or 1), count - 1])
    reach = max(3, count // 100)
    kept: list[int] = []
    found: list[float] = []
    for position in positions.tolist() if count >= _SHORT else ():
        half = min(reach, position, count - 1 - position)
        window = series.y[position - half : position + half + 1 : 1 + reach // 80]
        window = window[numpy.isfinite(window)]
        if len(window):
            kept.append(position)
            found.append(float(numpy.median(window)))
    return replace(series, x=series.x[kept], y=numpy.array(found))


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


# --- eigenstate blocks ------------------------------------------------------------------------------------------------

QUANTITIES = ("magnitude", "horizon", "period")
QUANTILES = ("min", "10%", "50%", "90%", "max")
MOST_LAYERS = 1000  # more than any model has; a damaged file could name any number


@dataclasses.dataclass(frozen=True)
class LayerHistory:
    """One block over training: `values[quantity][quantile]` and `beyond` have an entry for each of `steps`."""

    layer: int
    states: int | None
    steps: tuple[int, ...]
    values: dict[str, dict[str, tuple[float | None, ...]]]
    beyond: tuple[float | None, ...]

    def last(self, quantity: str, quantile: str = "50%") -> float | None:
        return self.values[quantity][quantile][-1]

    def first(self, quantity: str, quantile: str = "50%") -> float | None:
        return self.values[quantity][quantile][0]


@dataclasses.dataclass(frozen=True)
class EigenstateHistory:
    """All eigenstate blocks of a run, from the input to the output; `context` is the one its records name."""

    context: int | None
    layers: tuple[LayerHistory, ...]

    @property
    def sentence(self) -> str:
        return memory_sentence([(layer.layer, layer.last("horizon")) for layer in self.layers], self.context)

    def middle(self, quantity: str) -> list[tuple[int, float]]:
        """(step, median over layers of their medians), where there is a finite one: a whole model as one curve."""
        found: dict[int, list[float]] = {}
        for layer in self.layers:
            for step, value in zip(layer.steps, layer.values[quantity]["50%"], strict=True):
                if value is not None and math.isfinite(value):
                    found.setdefault(step, []).append(value)
        return [(step, statistics.median(found[step])) for step in sorted(found)]


def eigenstate_history(rows: Sequence[dict[str, Any]]) -> EigenstateHistory:
    """These rows, layer by layer."""
    by_step = {row["step"]: row for row in rows if is_count(row.get("step"))}
    context = next((row["context"] for row in reversed(by_step.values()) if is_count(row.get("context"), 1)), None)
    records: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for step in sorted(by_step):
        layers = by_step[step].get("layers")
        named = {
            layer["layer"]: layer
            for layer in (layers if isinstance(layers, list | tuple) else ())
            if isinstance(layer, dict) and is_count(layer.get("layer"), 1) and layer["layer"] <= MOST_LAYERS
        }
        for number, layer in named.items():
            records.setdefault(number, []).append((step, layer))
    return EigenstateHistory(context, tuple(_layer(number, records[number]) for number in sorted(records)))


def memory_sentence(medians: Sequence[tuple[int, float | None]], context: int | None) -> str:
    """Median horizons, from the shortest to the longest, with their layers; empty where none is known."""
    known = [(horizon, layer) for layer, horizon in medians if horizon is not None and not math.isnan(horizon)]
    if not known:
        return ""
    (short, first), (long, last) = min(known), max(known, key=lambda pair: pair[0])
    words = f"eigenstate memory: median horizon {short_tokens(short)} tokens"
    if short_tokens(short) != short_tokens(long):
        words += f" (layer {first}) to {short_tokens(long)} (layer {last})"
    else:
        count = len(known)
        words += f" (layer {first})" if count == 1 else " in both layers" if count == 2 else f" in all {count} layers"
    return words + (f", context {context:,}" if context else "")


def record_sentence(record: EigenstateRecord) -> str:
    return memory_sentence([(layer.layer, layer.horizon.get("50%")) for layer in record.layers], record.context)


def short_tokens(value: float) -> str:
    """A number of tokens: `3.2`, `181`, `8.2k`, `infinite`."""
    if not math.isfinite(value):
        return "infinite" if value > 0 else "NaN"
    return f"{value:.2g}" if value < 10 else human_count(value) if value < 1e15 else f"{value:.3g}"


def _layer(number: int, records: Sequence[tuple[int, dict[str, Any]]]) -> LayerHistory:
    def column(quantity: str, quantile: str) -> tuple[float | None, ...]:
        groups = [layer.get(quantity) for _, layer in records]
        return tuple(_number(group.get(quantile)) if isinstance(group, dict) else None for group in groups)

    counts = [layer["states"] for _, layer in records if is_count(layer.get("states"), 1)]
    return LayerHistory(
        layer=number,
        states=counts[-1] if counts else None,
        steps=tuple(step for step, _ in records),
        values={quantity: {name: column(quantity, name) for name in QUANTILES} for quantity in QUANTITIES},
        beyond=tuple(_number(layer.get("beyond")) for _, layer in records),
    )


def _number(value: Any) -> float | None:
    """A number that a float can hold, else None. Below zero is none of these: that is damage."""
    return None if (known := number(value)) is None or known < 0 else float(known)


# --- the series of a run ----------------------------------------------------------------------------------------------

UNITS = {
    "loss": "loss, nats per token",
    "bits_per_byte": "bits per byte",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
    "grad_norm": "norm, before clipping",
    "parameter_norm": "norm of all weights",
    "memory_bytes": "bytes",
    "reserved_bytes": "bytes",
    "horizon": "tokens until 1/e is left",
    "period": "tokens per turn",
    "magnitude": "|λ|",
}


class RunNumbers:
    """A run that was read, as series: its steps and evaluations, each step once and in order.

    `axes` holds what steps can be drawn against: step, tokens and seconds of training. Each of the marks is a list of
    steps: `skipped` updates, `notices` and `resumes`.
    """

    def __init__(self, history: RunHistory, name: str | None = None) -> None:
        self.name = history.folder.resolve().name if name is None else name
        self.info, self.end = history.info, history.end
        self.rows, self.evals = _once_per_step(history.steps), _once_per_step(history.evals)
        self._records = {"step": self.rows, "eval": self.evals, "machine": rows_with_step(history.machine)}
        tokens, seconds = ([number(row.get(field)) for row in self.rows] for field in ("tokens", "seconds"))
        spent = [max(0.0, min(value, _LARGEST)) if value is not None and value == value else 0.0 for value in seconds]
        if all(value is None for value in seconds):
            spent = [math.nan] * len(self.rows)
        self.axes = {
            "step": _array(row["step"] for row in self.rows),
            "tokens": _array(math.nan if value is None else value for value in tokens),
            "seconds": _array(itertools.accumulate(spent)),
        }
        skipped = [row["step"] for row in self.rows if row.get("applied") is False]
        notices = {row["step"] for row in rows_with_step(history.notices)} - set(skipped)  # a skip is one event
        self.skipped, self.notices = _array(skipped), _array(sorted(notices))
        self.resumes = _array(_resumes(history.infos, self.rows))
        self.eigenstates = eigenstate_history(history.eigenstates)

    def series(self, field: str, against: str = "step", *, of: str = "step") -> Series:
        """A field of the records of steps, of evaluations (`eval`) or of the `machine`, where it is a number."""
        known = [(row["step"], value) for row in self._records[of] if (value := number(row.get(field))) is not None]
        return self.series_of(known, field, against)

    def layer_series(self, layer: LayerHistory, quantity: str, quantile: str = "50%") -> Series:
        """A quantity of the states of an eigenstate block."""
        points = zip(layer.steps, layer.values[quantity][quantile], strict=True)
        return self.series_of([(step, value) for step, value in points if value is not None], quantity)

    def series_of(self, points: Points, name: str, against: str = "step") -> Series:
        """Steps and their values, placed on an axis of this run."""
        x, y = self.place((step for step, _ in points), against), _array(value for _, value in points)
        known = numpy.abs(x) < _LARGEST
        x, y = x[known], y[known]
        if (numpy.diff(x) < 0).any():  # tokens of an edited file; steps and seconds never fall
            order = numpy.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return Series(x, y, name, UNITS.get(name, ""))

    def place(self, steps: Iterable[float], against: str) -> Array:
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

    def best(self, field: str = "loss") -> dict[str, Any] | None:
        """The evaluation with the lowest loss that is a number; the first of equal ones, as the engine counts."""
        losses = [(number(row.get(field)), row) for row in self.evals]
        known = [(loss, row) for loss, row in losses if loss is not None and math.isfinite(loss)]
        return min(known, key=lambda pair: pair[0], default=(0.0, None))[1]


def _once_per_step(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Rows that name a step, in its order; of several that name the same one, the last."""
    return tuple({row["step"]: row for row in rows_with_step(rows)}.values())


def _array(values: Iterable[float]) -> Array:
    return numpy.fromiter(values, dtype=numpy.float64)


def _resumes(infos: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[int]:
    """Steps after which the run went on: neither a start before the first step, nor one that took no step."""
    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 0)
    starts = {info["start_step"] for info in infos if is_count(info.get("start_step"))}
    return sorted(start for start in starts if max(1, first) <= start < last)


# --- the curves of the report -----------------------------------------------------------------------------------------

# By kind of record: the name of a curve and the field it shows.
_CURVES = {
    "step": {
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
    },
    "eval": {"val_loss": "loss", "bits_per_byte": "bits_per_byte"},
    "machine": {
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
    },
}
_SMOOTHED = ("loss", "grad_norm", "tokens_per_second", "mfu", "step_seconds", "data_seconds")


def points_for(runs: int) -> int:
    """The number of points that a curve may have when `runs` runs share a page."""
    return max(FEWEST_POINTS, min(MOST_POINTS, _SHARED_POINTS // max(runs, 1)))


def curves_of(run: RunNumbers, most: int) -> dict[str, Curve]:
    """All curves of a run by name; a number that the run never recorded has none."""
    found: dict[str, Series] = {}
    for kind, fields in _CURVES.items():
        for name, field in fields.items():
            series = run.series(field, of=kind)
            found[name] = series.thinned(most // 2 if kind == "machine" else most)
            if name in _SMOOTHED:
                found[f"{name}_smooth"] = medians(series, most // 4)
    layers = run.eigenstates.layers
    for quantity in QUANTITIES:
        for layer in layers:
            each = max(FEWEST_POINTS // 4, most // len(layers))
            found[f"{quantity}_{layer.layer}"] = distance_from_1(run.layer_series(layer, quantity)).thinned(each)
        middle = run.eigenstates.middle(quantity)
        found[f"{quantity}_middle"] = distance_from_1(run.series_of(middle, quantity)).thinned(most)
    return {name: _sent(run, series) for name, series in found.items() if len(series.x)}


def distance_from_1(series: Series) -> Series:
    """|λ| as its distance from 1, which has digits where |λ| has only nines; any other series as it is."""
    if series.name != "magnitude":
        return series
    return replace(series, y=numpy.where(numpy.isfinite(series.y), numpy.maximum(1.0 - series.y, _NEAREST), series.y))


def _sent(run: RunNumbers, series: Series) -> Curve:
    """The series as JSON; tokens as one factor where they grow with the step, as in nearly every run."""
    steps = series.x.astype(int).tolist()
    tokens, seconds = (numpy.nan_to_num(run.place(steps, axis), posinf=0.0) for axis in ("tokens", "seconds"))
    factor = tokens[-1] / steps[-1] if steps[-1] else 0.0
    even = factor == int(factor) and (tokens == series.x * factor).all()
    return {
        "s": steps,
        "t": int(factor) if even else [int(count) if count.is_integer() else count for count in tokens.tolist()],
        "e": list(map(short, seconds.tolist())),
        "v": list(map(short, series.y.tolist())),
    }


def short(value: float) -> float | int | str:
    """Seven digits, more than a screen can show; NaN and infinity become text."""
    if not math.isfinite(value):
        return str(value)
    rounded = value if value == int(value) else float(f"{value:.7g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < LARGEST else rounded


# --- the same as CSV --------------------------------------------------------------------------------------------------

STEPS, EVALS = "steps.csv", "evals.csv"
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name != "update_ratio")  # several
_EVAL_FIELDS = tuple(field.name for field in dataclasses.fields(EvalRecord))
STEP_HEADER = (*_STEP_FIELDS, "training_seconds", "val_loss")
EVAL_HEADER = (*_EVAL_FIELDS, "tokens_seen", "training_seconds")


def write_tables(runs: Sequence[RunNumbers], *paths: Path, names: bool = False) -> list[Path]:
    """Writes the tables of steps and of evaluations to these paths, if there are any; returns them.

    With `names`, the first column is the run's name.
    """
    tables = [(STEP_HEADER, _step_rows), (EVAL_HEADER, _eval_rows)]
    for path, (header, rows_of) in zip(paths, tables, strict=False):
        shown, safe = f"the table {printable(str(path))}", ", or name another folder with --out"
        with disk_errors(shown, safe=safe), whole_file(path) as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("run", *header) if names else header)
            for run in runs:
                first = [_cell(run.name)] if names else []
                writer.writerows([*first, *(_cell(row.get(name)) for name in header)] for row in rows_of(run))
            file.detach()  # writes what it holds
    return list(paths)


def is_table(path: Path, *, names: bool) -> bool:
    """Whether the file is one of ours, of this version or an older one: a comment line would keep spreadsheets and
    pandas from reading it, so its columns are the mark, which are ours alone and all of them ours."""
    with path.open("rb") as file:
        columns = file.readline(4000).decode("utf-8", "replace").strip().split(",")
    begin = ["run", "step"] if names else ["step"]
    known = {"run", *STEP_HEADER, *EVAL_HEADER}
    return columns[: len(begin)] == begin and "training_seconds" in columns and known >= set(columns)


def _step_rows(run: RunNumbers) -> Iterator[dict[str, Any]]:
    losses = {row["step"]: row.get("loss") for row in run.evals}
    for row in _placed(run, run.rows):
        yield {**row, "val_loss": losses.get(row["step"])}


def _eval_rows(run: RunNumbers) -> Iterator[dict[str, Any]]:
    return _placed(run, run.evals)


def _placed(run: RunNumbers, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with what was seen and spent until their steps, where that is known."""
    tokens, seconds = (run.place((row["step"] for row in rows), axis).tolist() for axis in ("tokens", "seconds"))
    for row, seen, spent in zip(rows, tokens, seconds, strict=True):
        yield {
            **row,
            "tokens_seen": int(seen) if math.isfinite(seen) else None,
            "training_seconds": spent if math.isfinite(spent) else None,
        }


def _cell(value: Any) -> Any:
    """What stands in the table; None is an empty cell. No spreadsheet takes a text as a formula."""
    if isinstance(value, str):
        text = printable(" ".join(value.split())).encode("utf-8", "backslashreplace").decode("utf-8")
        return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
    return int(value) if isinstance(value, bool) else value if isinstance(value, int | float) else None
