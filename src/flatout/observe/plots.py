"""Runs as pictures: two or three of one run, or one that compares several; and what goes beside them as CSV.

Idea: `metrics` shows how a run went: learning rate, throughput, memory, gradient norm, parameter norm and step time.
`results` shows what it learned: loss over steps, tokens and time. `eigenstates` shows how far back the states of
eigenstate blocks look, by layer. `comparison` shows the losses and throughput of several runs, with a table as legend.

Contract: needs no torch and opens no window. Every run that can be read can be drawn, also while it goes on; a panel
says "not recorded" where it has no values. Files are whole or not there. Any number of runs of any length can be
compared: each has a colour, and after ten a new line style; where one is many times as long as another, the horizontal
axes are logarithmic.

Trap: over plain tokens the loss has the same shape as over steps, so that panel has a logarithmic axis.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from flatout.errors import UsageError, many
from flatout.files import check_replaceable, disk_errors
from flatout.folders import make_folders, remove_empty
from flatout.observe import picture
from flatout.observe.human import human_count, human_parameters, human_seconds, loss_text, printable
from flatout.observe.picture import (
    BLUE,
    COLOURS,
    FAINT,
    GREY,
    INK,
    ORANGE,
    RED,
    SMALL,
    TEAL,
    Axes,
    Curve,
    Figure,
    Marks,
    Quantity,
    Units,
    draw_panel,
    drawable,
    is_picture,
    new_figure,
    time_unit,
    unit_for,
    write_picture,
)
from flatout.observe.series import (
    EVALS,
    STEPS,
    Array,
    RunNumbers,
    Series,
    distance_from_1,
    is_table,
    number,
    short_tokens,
    window_of,
    write_tables,
)
from flatout.observe.sinks import ENDINGS, distinct_names, incomparable, minutes_of, read_history

WIDTH, WIDE, NARROW, HEIGHT = 15.0, 18.0, 9.0, 8.6  # WIDE is a comparison, NARROW a single panel
Draw = Callable[[Axes, RunNumbers], None]


def metrics_figure(run: RunNumbers) -> Figure:
    panels = [_learning_rate, _throughput, _memory, _gradient_norm, _parameter_norm, _step_time]
    return page_figure(run, "how it ran", panels)


def results_figure(run: RunNumbers) -> Figure:
    losses: list[Draw] = [
        functools.partial(_loss, title="Loss", against="step"),
        functools.partial(_loss, title="Loss over tokens", against="tokens"),
        functools.partial(_loss, title="Loss over time", against="seconds"),
    ]
    return page_figure(run, "what it learned", [*losses, _learning_rate, _throughput])


def page_figure(run: RunNumbers, what: str, panels: Sequence[Draw], caption: str | None = None) -> Figure:
    """Panels below a header: six, five of which the first is twice as wide, or three in one row."""
    figure = picture.new_figure(WIDTH, HEIGHT)
    draw_title(figure, f"{run.name}: {what}", _facts(run), _state(run))
    words = _caption(run) if caption is None else caption
    figure.text(0.985, 0.955, words, size=SMALL, color=FAINT, va="center", ha="right")
    grid = figure.add_gridspec(2, 3, left=0.065, right=0.985, top=0.835, bottom=0.075, wspace=0.2, hspace=0.38)
    if len(panels) == 3:
        cells = [grid[:, column] for column in range(3)]
    else:
        first = [grid[0, :2]] if len(panels) == 5 else [grid[0, 0], grid[0, 1]]
        cells = [*first, grid[0, 2], *(grid[1, column] for column in range(3))]
    for cell, draw in zip(cells, panels, strict=True):
        draw(figure.add_subplot(cell), run)
    return figure


# --- panels -----------------------------------------------------------------------------------------------------------


def _in_unit(values: Sequence[float], largest: float, units: Units) -> list[str]:
    """Values in the unit in which an axis up to `largest` is drawn, so that words and ticks can be compared."""
    factor, unit = unit_for(largest, units)
    return [f"{value / factor:{',.0f' if value >= 1e3 * factor else '.3g'}} {unit}" for value in values]


def _median(values: Array) -> float:
    return float(numpy.median(values))


LOSS = Quantity(slack=1.5, logarithmic_from=100)
THROUGHPUT = Quantity(slack=1, from_zero=True)
_LEARNING_RATE = Quantity(from_zero=True)
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"))
_MEMORY = Quantity(_BYTES, from_zero=True)
_GRADIENT_NORM = Quantity(slack=2, logarithmic_from=30)
_PARAMETER_NORM = Quantity(slack=20)


def _marks(run: RunNumbers, *names: str, against: str = "step") -> list[Marks]:
    """Where the run was resumed, and what else happened to it."""
    kinds = {
        "skipped": Marks(run.skipped, "update skipped", ORANGE, "v"),
        "notices": Marks(run.notices, "notice", GREY, "s"),
    }
    resumes = run.place((int(step) for step in run.resumes), against)
    return [Marks(resumes, "resumed", FAINT), *(kinds[name] for name in names)]


def _loss(axes: Axes, run: RunNumbers, title: str, against: str) -> None:
    lines = [
        Curve(run.series("loss", against), BLUE, "training", smoothed=True),
        Curve(run.series("loss", against, of="eval"), ORANGE, "validation", dots=len(run.evals) <= 60, best=True),
    ]
    marks, words, steps = _marks(run, against=against), _last_words(run, against), against == "step"
    if steps:
        marks, best = _marks(run, "skipped", "notices"), run.best()
        words = "" if best is None else f"best validation loss {loss_text(best['loss'])} at step {best['step']:,}"
    draw_panel(
        axes, title, lines, LOSS, against, logarithmic=against == "tokens", marks=marks, words=words, legend=steps
    )


def _words(run: RunNumbers, **words: Callable[[Array], str]) -> str:
    """A note on each field that has values."""
    return ", ".join(note(values) for field, note in words.items() if len(values := run.series(field).values))


def _learning_rate(axes: Axes, run: RunNumbers) -> None:
    words = _words(run, learning_rate=lambda rates: f"highest {rates.max():.3g}, last {rates[-1]:.3g}")
    lines = [Curve(run.series("learning_rate"), TEAL, "rate")]
    draw_panel(axes, "Learning rate", lines, _LEARNING_RATE, marks=_marks(run), words=words)


def _throughput(axes: Axes, run: RunNumbers) -> None:
    words = _words(
        run,
        tokens_per_second=lambda rates: f"median {human_count(_median(rates))} tokens/s",
        mfu=lambda shares: f"MFU {100 * _median(shares):.0f}%",
    )
    lines = [Curve(run.series("tokens_per_second"), BLUE, "tokens/s", smoothed=True)]
    draw_panel(axes, "Throughput", lines, THROUGHPUT, marks=_marks(run, "notices"), words=words)


def _memory(axes: Axes, run: RunNumbers) -> None:
    peak, reserved = run.series("memory_bytes"), run.series("reserved_bytes")
    most = {
        name: float(curve.values.max()) for name, curve in (("peak", peak), ("held", reserved)) if len(curve.values)
    }
    sizes = _in_unit(list(most.values()), max(most.values(), default=0.0), _BYTES)
    words = ", ".join(f"{name} {size}" for name, size in zip(most, sizes, strict=True))
    lines = [Curve(peak, BLUE, "peak in use"), Curve(reserved, ORANGE, "held by the allocator")]
    draw_panel(axes, "Memory", lines, _MEMORY, marks=_marks(run, "notices"), words=words)


def _gradient_norm(axes: Axes, run: RunNumbers) -> None:
    words = _words(run, grad_norm=lambda norms: f"median {_median(norms):.3g}, highest {norms.max():.3g}")
    lines = [Curve(run.series("grad_norm"), BLUE, "norm", smoothed=True)]
    draw_panel(axes, "Gradient norm", lines, _GRADIENT_NORM, marks=_marks(run, "skipped"), words=words)


def _parameter_norm(axes: Axes, run: RunNumbers) -> None:
    words = _words(run, parameter_norm=lambda norms: f"first {norms[0]:.4g}, last {norms[-1]:.4g}")
    lines = [Curve(run.series("parameter_norm"), BLUE, "norm")]
    draw_panel(axes, "Parameter norm", lines, _PARAMETER_NORM, marks=_marks(run), words=words)


def _step_time(axes: Axes, run: RunNumbers) -> None:
    step, waiting = run.series("seconds"), run.series("data_seconds")
    median = _median(step.values) if len(step.values) else 0.0
    # One step that compiles must not change the unit of all others, so the median chooses it.
    quantity = Quantity(
        [(1.0, "seconds")] if median >= 1 else [(1e-3, "milliseconds")],
        slack=1,
        from_zero=True,
        words_of=lambda seconds: _in_unit([seconds], seconds, _TIMES)[0],  # beyond the axis, so in its own unit
    )
    words = f"median {_in_unit([median], median, _TIMES)[0]}" if len(step.values) else ""
    lines = [
        Curve(step, BLUE, "step", smoothed=True),
        Curve(waiting, ORANGE, "waiting for data", smoothed=True, raw=False),
    ]
    draw_panel(axes, "Step time", lines, quantity, marks=_marks(run), words=words)


# --- words and frames ------------------------------------------------------------------------------------------------


def _caption(run: RunNumbers) -> str:
    """What the kinds of lines mean."""
    window = window_of(len(run.rows))
    parts = [f"pale: each step   ·   strong: mean of {window:,} steps"] if window > 1 else []
    return "   ·   ".join([*parts, *(["dashed line: resumed"] if len(run.resumes) else [])])


def draw_title(figure: Figure, name: str, facts: str, state: str, *, warning: bool = False) -> None:
    """Three lines above the panels; the first leaves room for a caption at its right."""
    width = figure.get_figwidth()
    left = 0.975 / width
    title = fitted(picture.drawable(name), 16, 0.53 * width)  # bold letters take a tenth more
    figure.text(left, 0.955, title, size=16, weight="bold", color=INK, va="center")
    figure.text(left, 0.918, fitted(facts, 10, width - 1.5), size=10, color=FAINT, va="center")
    figure.text(left, 0.890, fitted(state, 10, width - 1.5), size=10, color=RED if warning else INK, va="center")


def _facts(run: RunNumbers) -> str:
    info = run.info
    parts = [_text(info, "family")]
    some = [number(info.get(f"{name}_parameters")) for name in ("trained", "table")]
    parts += [human_parameters(size, *some)] if (size := number(info.get("parameters"))) is not None else []
    parts += [f"{size:,.0f} tokens per step"] if (size := number(info.get("batch_tokens"))) is not None else []
    parts += [f"context {size:,.0f}"] if (size := number(info.get("context"))) is not None else []
    parts += [f"{_text(info, 'tokenizer')} tokenizer" if _text(info, "tokenizer") else "", _text(info, "device")]
    return "   ·   ".join(part for part in parts if part)


def _text(info: dict[str, Any], field: str) -> str:
    value = info.get(field)
    return picture.shortened(picture.drawable(value), 40) if isinstance(value, str) else ""


def _state(run: RunNumbers) -> str:
    """How far the run came, and whether it has ended."""
    if not run.rows:
        return "no step was taken"
    done, asked = run.rows[-1]["step"], number(run.info.get("steps"))
    asked = None if minutes_of(run.info.get("config")) is not None else asked
    where = f"step {done:,}" + (f" of {asked:,.0f}" if asked is not None and asked != done else "")
    reason = None if run.end is None else run.end.get("reason")
    parts = [f"{where}, no end yet: still running, or killed"]
    if isinstance(reason, str):
        parts = [f"{ENDINGS.get(reason, 'ended')} at {where}"]
    if spent := spent_on(run):
        parts.append(f"{spent} of training")
    if len(run.resumes):
        parts.append("resumed once" if len(run.resumes) == 1 else f"resumed {len(run.resumes)} times")
    if len(run.skipped):
        parts.append(f"{many(len(run.skipped), 'update')} skipped")
    return "   ·   ".join(parts)


def fitted(text: str, size: float, room: float) -> str:
    """The text in about `room` inches, cut in its middle: names of runs often differ at their ends only."""
    most = max(4, int(72 * room / (0.65 * size)))  # most letters are narrower than that
    head = most // 2
    return text if len(text) <= most else f"{text[:head]}\u2026{text[len(text) - (most - head - 1) :]}"


def spent_on(run: RunNumbers) -> str:
    seconds = run.axes["seconds"]
    return human_seconds(float(seconds[-1])) if len(seconds) and math.isfinite(seconds[-1]) else ""


def _last_words(run: RunNumbers, against: str) -> str:
    """How much there was of what a loss is drawn against."""
    axis = run.axes[against][numpy.isfinite(run.axes[against])]
    if not len(axis):
        return ""
    last = float(axis[-1])
    divisor, unit = time_unit(last)
    return f"{human_count(last)} tokens" if against == "tokens" else f"{last / divisor:.3g} {unit}"


_OF_STATES = Quantity(logarithmic_from=0.0)
_MOST_NAMES = 8


def eigenstates_figure(run: RunNumbers) -> Figure:
    """The picture, not yet written."""
    panels = [_horizon, _magnitude, _period]
    return page_figure(run, "what its states remember", panels, "line: median of a layer's states")


def _horizon(axes: Axes, run: RunNumbers) -> None:
    words, context = _last(run, "horizon", lambda value: f"{short_tokens(value)} tokens"), run.eigenstates.context
    draw_panel(axes, "Memory horizon", _lines(run, "horizon"), _OF_STATES, words=words, context=context)


def _magnitude(axes: Axes, run: RunNumbers) -> None:
    from matplotlib.ticker import FuncFormatter

    words = _last(run, "magnitude", lambda value: f"{value:.6g}")
    # On a plain axis all that remembers long would lie on the line of 1: what is drawn is how far |λ| is from it.
    lines = [dataclasses.replace(line, series=distance_from_1(line.series)) for line in _lines(run, "magnitude")]
    draw_panel(axes, "|λ|", lines, _OF_STATES, words=words, legend=False)
    if any(len(line.series.values) for line in lines):
        axes.invert_yaxis()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda distance, _: f"{1 - distance:.12g}"))
        axes.set_ylabel("|λ| (logarithmic towards 1)", size=SMALL, color=FAINT)


def _period(axes: Axes, run: RunNumbers) -> None:
    words = _last(run, "period", lambda value: f"{short_tokens(value)} tokens")
    draw_panel(axes, "Period", _lines(run, "period"), _OF_STATES, words=words, legend=False)


def _lines(run: RunNumbers, quantity: str) -> list[Curve]:
    layers = run.eigenstates.layers
    named = _named(len(layers))
    return [
        Curve(run.layer_series(layer, quantity), colour, f"layer {layer.layer}" if place in named else "")
        for place, (layer, colour) in enumerate(zip(layers, _colours(len(layers)), strict=True))
    ]


def _last(run: RunNumbers, quantity: str, words_of: Callable[[float], str]) -> str:
    """The newest medians of all layers, from the lowest to the highest."""
    known = [value for layer in run.eigenstates.layers if (value := layer.last(quantity)) is not None]
    ends = [words_of(end(known)) for end in (min, max)] if known else []
    return f"last {' to '.join(dict.fromkeys(ends))}" if ends else ""


def _named(count: int) -> set[int]:
    """The lines that are in the legend: all of a few, else five that are evenly spread, with both ends."""
    if count <= _MOST_NAMES:
        return set(range(count))
    return {round(place * (count - 1) / 4) for place in range(5)}


def _colours(count: int) -> list[str]:
    """Dark to light with depth, so that neighbours look alike and any two can still be distinguished."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count == 1:
        return [BLUE]
    return [to_hex(colormaps["viridis"](0.88 * place / (count - 1))) for place in range(count)]


_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MOST_RUNS = 22
_FAR_APART = 20  # times as long
_SPEEDS = dataclasses.replace(THROUGHPUT, logarithmic_from=30)
_WORDS = {"step": "steps", "tokens": "tokens", "seconds": "time"}
Look = tuple[str, Any]


def comparison_figure(runs: Sequence[RunNumbers]) -> Figure:
    """The picture, not yet written."""
    figure = new_figure(WIDE, HEIGHT)
    apart = incomparable([run.info for run in runs])
    # Where losses do not compare, bits per byte lead.
    by_bytes = bool(apart) and any(len(run.series("bits_per_byte", of="eval").values) for run in runs)
    judged, words, row = ("bits_per_byte", "Bits per byte", 0) if by_bytes else ("loss", "Validation loss", 1)
    facts = f"lines are means over neighbouring steps   ·   a star is a run's best {words.lower()}"
    draw_title(figure, f"{len(runs):,} runs compared", facts, apart, warning=True)
    grid = figure.add_gridspec(
        2, 4, left=0.054, right=0.985, top=0.835, bottom=0.075, wspace=0.22, hspace=0.38, width_ratios=(1, 1, 1, 1.2)
    )
    looks: list[Look] = [(COLOURS[place % 10], _STYLES[place // 10 % 3]) for place in range(len(runs))]
    pairs = list(zip(runs, looks, strict=True))

    panels: list[tuple[Any, str, list[Curve], Quantity, str, list[Curve]]] = []
    for column, (kind, word) in enumerate(_WORDS.items()):
        training = [_line(run.series("loss", kind), look, smoothed=True) for run, look in pairs]
        validation = [_line(run.series(judged, kind, of="eval"), look, smoothed=False) for run, look in pairs]
        panels.append((grid[1 - row, column], f"Training loss over {word}", training, LOSS, kind, []))
        panels.append((grid[row, column], f"{words} over {word}", validation, LOSS, kind, training))
    speeds = [_line(run.series("tokens_per_second"), look, smoothed=True) for run, look in pairs]
    panels.append((grid[0, 3], "Throughput", speeds, _SPEEDS, "step", []))
    for cell, title, lines, quantity, kind, beside in panels:
        axes, far = figure.add_subplot(cell), _far_apart(beside or lines)
        draw_panel(axes, title, lines, quantity, kind, logarithmic=far, legend=False, beside=beside)
    _draw_names(figure.add_subplot(grid[1, 3]), runs, looks, judged)
    return figure


def _line(series: Series, look: Look, *, smoothed: bool) -> Curve:
    dots = not smoothed and len(series.x) <= 60
    return Curve(series, look[0], style=look[1], smoothed=smoothed, raw=False, best=not smoothed, dots=dots)


def _far_apart(lines: Sequence[Curve]) -> bool:
    ends = [float(line.series.x[-1]) for line in lines if len(line.series.x)]
    return bool(ends) and 0 < _FAR_APART * min(ends) <= max(ends)


def _draw_names(axes: Axes, runs: Sequence[RunNumbers], looks: Sequence[Look], judged: str) -> None:
    """The legend: name, best validation loss or bits per byte, throughput and time of each run."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    shown = len(runs) if len(runs) <= _MOST_RUNS else _MOST_RUNS - 1
    rows = max(9, min(len(runs), _MOST_RUNS) + 1)
    size = SMALL if rows <= 15 else 7.0
    axes.set_ylim(rows - 0.5, -0.7)
    room = 0.38 * WIDE * axes.get_position().width  # inches, between a name's beginning and the next column
    ends = (0.63, 0.8, 1.0)
    axes.text(0.1, 0, "run", size=size, color=FAINT, va="center")
    for place, words in zip(ends, ("best val" if judged == "loss" else "bits/byte", "tokens/s", "time"), strict=True):
        axes.text(place, 0, words, size=size, color=FAINT, ha="right", va="center")
    for row, (run, look) in enumerate(zip(runs[:shown], looks, strict=False), start=1):
        axes.plot([0.0, 0.08], [row, row], color=look[0], linestyle=look[1], linewidth=2.2)
        axes.text(0.1, row, fitted(drawable(run.name), size, room), size=size, color=INK, va="center")
        best, speeds = run.best(judged), run.series("tokens_per_second").values
        cells = (
            "" if best is None else loss_text(best[judged]),
            "" if not len(speeds) else human_count(float(numpy.median(speeds))),
            spent_on(run),
        )
        for place, words in zip(ends, cells, strict=True):
            axes.text(place, row, words, size=size, color=INK, ha="right", va="center")
    if shown < len(runs):
        axes.text(0.1, shown + 1, f"and {len(runs) - shown:,} more", size=size, color=FAINT, va="center")


METRICS, RESULTS, EIGENSTATES, COMPARISON, FOLDER = "metrics", "results", "eigenstates", "comparison", "plots"


def write_run_plots(
    folder: Path, *, out: Path | None = None, form: str = "png", tables: bool = True, overwrite: bool = False
) -> list[Path]:
    """Draws the run in `folder`, by default into its own `plots` folder; returns the files written.

    With `overwrite`, files that are not ours are replaced.
    """
    target = folder / FOLDER if out is None else out
    places = [target / name for name in (STEPS, EVALS)] if tables else []
    names = (METRICS, RESULTS, EIGENSTATES)
    check_places([*places, *(target / f"{name}.{form}" for name in names)], overwrite=overwrite)
    run = RunNumbers(read_history(folder))
    figures = [metrics_figure, results_figure, *([eigenstates_figure] if run.eigenstates.layers else [])]
    with _folder(target):
        written = write_tables([run], *places)
        for name, figure_of in zip(names, figures, strict=False):
            path = target / f"{name}.{form}"
            write_picture(path, functools.partial(figure_of, run), overwrite=overwrite)
            written.append(path)
    return written


def write_comparison(folders: Sequence[Path], picture: Path, *tables: Path, overwrite: bool = False) -> list[Path]:
    """Draws several runs into one picture, PNG or SVG by its name, and writes their numbers where `tables` are named:
    that of steps and that of evaluations."""
    check_places([picture, *tables], names=True, overwrite=overwrite)
    paths = [folder.resolve() for folder in folders]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise UsageError(f"the run {folders[place]} is named twice", "name each run once")
    runs = [RunNumbers(read_history(path), name) for path, name in zip(folders, distinct_names(folders), strict=True)]
    with _folder(picture.parent):
        written = write_tables(runs, *tables, names=True)
        write_picture(picture, lambda: comparison_figure(runs), overwrite=overwrite)
    return [*written, picture]


def check_places(files: Sequence[Path], *, names: bool = False, overwrite: bool = False) -> None:
    """Refuses places where a file is that is not ours; `names`: the tables are those of several runs."""
    for path in files:
        is_ours = functools.partial(is_table, names=names) if path.suffix == ".csv" else is_picture
        check_replaceable(path, is_ours, overwrite=overwrite, way="name another folder with --out")


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Makes a folder for files, or says why there cannot be one; takes it back where nothing came into it."""
    shown = printable(str(folder))
    with disk_errors(f"the folder {shown}", safe=", or name another one with --out"):
        try:
            made = make_folders(folder)
            if not folder.is_dir():
                raise FileExistsError
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(
                f"{shown} cannot be a folder: there is a file in the way", "move it, or name another folder with --out"
            ) from error
        except ValueError as error:  # a name with a zero in it
            raise UsageError(f"{shown} is no name for a folder", "name another one with --out") from error
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise
