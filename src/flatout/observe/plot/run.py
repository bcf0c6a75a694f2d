"""The pictures of one run: how it ran, what it learned, and each panel alone.

Contract: every run that was read can be drawn. What was not recorded says so in its panel. Above the panels stand the
run's name, what was trained, how far it came and how it ended; at the right of each title the figure to take home.

Trap: over plain tokens the loss has the same shape as over steps. So that panel is logarithmic, where the beginning,
which the first panel leaves off its scale in a long run, can be seen.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy

from flatout.observe.human import human_bytes, human_count, human_parameters, human_seconds, many
from flatout.observe.picture import drawable, shortened
from flatout.observe.plot.panels import (
    BLUE,
    FAINT,
    GRADIENT_NORM,
    GREY,
    INK,
    LEARNING_RATE,
    LOSS,
    MEMORY,
    ORANGE,
    PARAMETER_NORM,
    PURPLE,
    RED,
    SMALL,
    STEP_TIME,
    TEAL,
    THROUGHPUT,
    Across,
    Line,
    Marks,
    draw_panel,
    short_time,
    time_unit,
)
from flatout.observe.plot.series import RunNumbers, number, window_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, WIDE, NARROW, HEIGHT, DPI = 15.0, 18.0, 9.0, 8.6, 120  # WIDE is a comparison, NARROW a single panel
_STEP = Across("step")


def metrics_figure(run: RunNumbers) -> "Figure":
    figure = new_figure(WIDTH, HEIGHT)
    draw_header(figure, run, "how it ran")
    grid = figure.add_gridspec(2, 3, left=0.065, right=0.985, top=0.835, bottom=0.075, wspace=0.2, hspace=0.38)
    for place, draw in enumerate(_METRIC_PANELS.values()):
        draw(figure.add_subplot(grid[place // 3, place % 3]), run)
    return figure


def results_figure(run: RunNumbers) -> "Figure":
    figure = new_figure(WIDTH, HEIGHT)
    draw_header(figure, run, "what it learned")
    grid = figure.add_gridspec(2, 3, left=0.065, right=0.985, top=0.835, bottom=0.075, wspace=0.2, hspace=0.38)
    cells = (grid[0, :2], grid[0, 2], grid[1, 0], grid[1, 1], grid[1, 2])
    for cell, draw in zip(cells, _RESULT_PANELS.values(), strict=True):
        draw(figure.add_subplot(cell), run)
    return figure


def panel_figure(run: RunNumbers, draw: "Callable[[Axes, RunNumbers], None]", caption: str | None = None) -> "Figure":
    figure = new_figure(NARROW, 5.4)
    name = fitted(drawable(run.name), 10.5, 0.4 * NARROW)
    figure.text(0.085, 0.965, name, size=10.5, color=INK, va="center")
    words = _caption(run) if caption is None else caption
    figure.text(0.98, 0.965, words, size=SMALL, color=FAINT, va="center", ha="right")
    draw(figure.add_axes((0.085, 0.105, 0.895, 0.765)), run)
    return figure


def _loss_over_steps(axes: "Axes", run: RunNumbers) -> None:
    marks = [
        *_resumes(run, "step"),
        Marks(run.skipped, "update skipped", ORANGE, "v"),
        Marks(run.memory, "out of memory", PURPLE, "D"),
        Marks(run.notices, "notice", GREY, "s"),
    ]
    best = run.best()
    words = "" if best is None else f"best validation loss {loss_text(best['loss'])} at step {best['step']:,}"
    draw_panel(axes, "Loss", _loss_lines(run, "step"), LOSS, _STEP, marks=marks, words=words)


def _loss_over_tokens(axes: "Axes", run: RunNumbers) -> None:
    draw_panel(
        axes, "Loss over tokens", _loss_lines(run, "tokens"), LOSS, Across("tokens", logarithmic=True),
        marks=_resumes(run, "tokens"), words=_last_words(run, "tokens"), legend=False,
    )  # fmt: skip


def _loss_over_seconds(axes: "Axes", run: RunNumbers) -> None:
    draw_panel(
        axes, "Loss over time", _loss_lines(run, "seconds"), LOSS, Across("seconds"), marks=_resumes(run, "seconds"),
        words=_last_words(run, "seconds"), legend=False,
    )  # fmt: skip


def _learning_rate(axes: "Axes", run: RunNumbers) -> None:
    curve = run.curve("learning_rate")
    words = f"highest {curve.values.max():.3g}, last {curve.values[-1]:.3g}" if len(curve.values) else ""
    draw_panel(
        axes, "Learning rate", [Line(curve, TEAL, "rate")], LEARNING_RATE, _STEP, marks=_resumes(run), words=words
    )


def _throughput(axes: "Axes", run: RunNumbers) -> None:
    curve, mfu = run.curve("tokens_per_second"), run.curve("mfu").values
    words = f"median {human_count(float(numpy.median(curve.values)))} tokens/s" if len(curve.values) else ""
    words += f", MFU {100 * float(numpy.median(mfu)):.0f}%" if len(mfu) else ""
    lines = [Line(curve, BLUE, "tokens/s", smoothed=True)]
    draw_panel(axes, "Throughput", lines, THROUGHPUT, _STEP, marks=[*_resumes(run), *_memory_marks(run)], words=words)


def _memory(axes: "Axes", run: RunNumbers) -> None:
    peak, reserved = run.curve("memory_bytes"), run.curve("reserved_bytes")
    words = ", ".join(
        f"{name} {human_bytes(float(curve.values.max()))}"
        for name, curve in (("peak", peak), ("held", reserved))
        if len(curve.values)
    )
    lines = [Line(peak, BLUE, "peak in use"), Line(reserved, ORANGE, "held by the allocator")]
    draw_panel(axes, "Memory", lines, MEMORY, _STEP, marks=[*_resumes(run), *_memory_marks(run)], words=words)


def _gradient_norm(axes: "Axes", run: RunNumbers) -> None:
    curve = run.curve("grad_norm")
    words = ""
    if len(curve.values):
        words = f"median {float(numpy.median(curve.values)):.3g}, highest {curve.values.max():.3g}"
    lines = [Line(curve, BLUE, "norm", smoothed=True)]
    marks = [*_resumes(run), Marks(run.skipped, "update skipped", ORANGE, "v")]
    draw_panel(axes, "Gradient norm", lines, GRADIENT_NORM, _STEP, marks=marks, words=words)


def _parameter_norm(axes: "Axes", run: RunNumbers) -> None:
    curve = run.curve("parameter_norm")
    words = f"first {curve.values[0]:.4g}, last {curve.values[-1]:.4g}" if len(curve.values) else ""
    draw_panel(
        axes, "Parameter norm", [Line(curve, BLUE, "norm")], PARAMETER_NORM, _STEP, marks=_resumes(run), words=words
    )


def _step_time(axes: "Axes", run: RunNumbers) -> None:
    curve = run.curve("seconds")
    words = f"median {short_time(float(numpy.median(curve.values)))}" if len(curve.values) else ""
    waiting = run.curve("data_seconds")
    lines = [
        Line(curve, BLUE, "step", smoothed=True),
        Line(waiting, ORANGE, "waiting for data", smoothed=True, raw=False),
    ]
    draw_panel(axes, "Step time", lines, STEP_TIME, _STEP, marks=_resumes(run), words=words)


_METRIC_PANELS: "dict[str, Callable[[Axes, RunNumbers], None]]" = {
    "learning-rate": _learning_rate,
    "throughput": _throughput,
    "memory": _memory,
    "gradient-norm": _gradient_norm,
    "parameter-norm": _parameter_norm,
    "step-time": _step_time,
}
_RESULT_PANELS: "dict[str, Callable[[Axes, RunNumbers], None]]" = {
    "loss": _loss_over_steps,
    "loss-over-tokens": _loss_over_tokens,
    "loss-over-time": _loss_over_seconds,
    "learning-rate": _learning_rate,
    "throughput": _throughput,
}


PANELS = _RESULT_PANELS | _METRIC_PANELS


def _loss_lines(run: RunNumbers, against: str) -> list[Line]:
    return [
        Line(run.curve("loss", against), BLUE, "training", smoothed=True),
        Line(run.eval_curve(against), ORANGE, "validation", dots=len(run.evals) <= 60, best=True),
    ]


def _resumes(run: RunNumbers, against: str = "step") -> list[Marks]:
    return [Marks(run.place((int(step) for step in run.resumes), against), "resumed", FAINT)]


def _memory_marks(run: RunNumbers) -> list[Marks]:
    return [Marks(run.memory, "out of memory", PURPLE, "D")]


# --- words and frames ------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> "Figure":
    """A figure that belongs to no window and to no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def draw_header(figure: "Figure", run: RunNumbers, what: str, caption: str | None = None) -> None:
    draw_title(figure, f"{run.name}: {what}", _facts(run), _state(run))
    words = _caption(run) if caption is None else caption
    figure.text(0.985, 0.955, words, size=SMALL, color=FAINT, va="center", ha="right")


def _caption(run: RunNumbers) -> str:
    """What the kinds of lines mean."""
    window = window_of(len(run.rows))
    parts = [f"pale: each step   ·   strong: mean of {window:,} steps"] if window > 1 else []
    return "   ·   ".join([*parts, *(["dashed line: resumed"] if len(run.resumes) else [])])


def draw_title(figure: "Figure", name: str, facts: str, state: str, *, warning: bool = False) -> None:
    """Three lines above the panels; the first leaves room for a caption at its right."""
    width = figure.get_figwidth()
    left = 0.975 / width
    title = fitted(drawable(name), 16, 0.53 * width)  # bold letters take a tenth more
    figure.text(left, 0.955, title, size=16, weight="bold", color=INK, va="center")
    figure.text(left, 0.918, fitted(facts, 10, width - 1.5), size=10, color=FAINT, va="center")
    figure.text(left, 0.890, fitted(state, 10, width - 1.5), size=10, color=RED if warning else INK, va="center")


def _facts(run: RunNumbers) -> str:
    info = run.info
    parts = [_text(info, "family")]
    trained, samples = number(info.get("trained_parameters")), number(info.get("batch_samples"))
    parts += [human_parameters(size, trained)] if (size := number(info.get("parameters"))) is not None else []
    parts += [f"{samples:,.0f} samples per step"] if samples is not None else []
    size = number(info.get("batch_tokens")) if samples is None else None
    parts += [f"{size:,.0f} tokens per step"] if size is not None else []
    parts += [f"context {size:,.0f}"] if (size := number(info.get("context"))) is not None else []
    parts += [f"{_text(info, 'tokenizer')} tokenizer" if _text(info, "tokenizer") else "", _text(info, "device")]
    return "   ·   ".join(part for part in parts if part)


def _text(info: dict[str, Any], field: str) -> str:
    value = info.get(field)
    return shortened(drawable(value), 40) if isinstance(value, str) else ""


def _state(run: RunNumbers) -> str:
    """How far the run came, and whether it has ended."""
    if not run.rows:
        return "no step was taken"
    done, asked = run.rows[-1]["step"], number(run.info.get("steps"))
    where = f"step {done:,}" + (f" of {asked:,.0f}" if asked is not None and asked != done else "")
    reason = None if run.end is None else run.end.get("reason")
    endings = {"finished": "finished", "early_stop": "stopped early", "interrupted": "interrupted"}
    ending = (
        f"{endings.get(reason, 'ended')} at {where}"
        if isinstance(reason, str)
        else f"{where}, no end yet: still running, or killed"
    )
    parts = [ending]
    if spent := spent_on(run):
        parts.append(f"{spent} of training")
    if len(run.resumes):
        parts.append("resumed once" if len(run.resumes) == 1 else f"resumed {len(run.resumes)} times")
    if len(run.skipped):
        parts.append(f"{many(len(run.skipped), 'update')} skipped")
    return "   ·   ".join(parts)


def fitted(text: str, size: float, room: float) -> str:
    """The text within `room` inches, cut in its middle: names of runs often differ at their ends only."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=["DejaVu Sans"])))
    font.set_size(size, 72)
    count = min(len(text), int(72 * room / (0.27 * size)))  # no more than that of the narrowest letters
    while True:
        half = count // 2
        shown = text if count >= len(text) else f"{text[:half]}\u2026{text[len(text) - (count - half) :]}"
        font.set_text(shown)
        if count <= 4 or font.get_width_height()[0] / 64 <= 72 * room:
            return shown
        count -= 1


def loss_text(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3g}"


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
