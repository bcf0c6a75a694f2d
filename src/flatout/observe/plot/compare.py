"""Several runs in one picture: losses over steps, tokens and time, throughput, and a table of names as the legend.

Contract: any number of runs of any lengths and names. Each has a colour, and after ten of them another kind of line;
the table names as many as fit. Where one run is many times as long as another, the axes are logarithmic, so that both
can be seen. Runs whose losses cannot be compared are drawn all the same, with a line that says so.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy

from flatout.observe.human import human_count
from flatout.observe.picture import BLUE, FAINT, INK, ORANGE, PURPLE, SMALL, TEAL, Axes, Figure, drawable, new_figure
from flatout.observe.plot.panels import Line, Quantity, draw_panel
from flatout.observe.plot.run import HEIGHT, LOSS, THROUGHPUT, WIDE, draw_title, fitted, loss_text, spent_on
from flatout.observe.plot.series import Curve, RunNumbers

_COLOURS = (BLUE, ORANGE, TEAL, PURPLE, "#c94f7c", "#8c6d46", "#5f6b76", "#9aa62a", "#38b0c9", "#e3b505")
_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MOST_NAMES = 22
_FAR_APART = 20  # times as long
_SPEEDS = dataclasses.replace(THROUGHPUT, logarithmic_from=30)
_WORDS = {"step": "steps", "tokens": "tokens", "seconds": "time"}
Look = tuple[str, Any]


def comparison_figure(runs: Sequence[RunNumbers]) -> Figure:
    """The picture, not yet written."""
    figure = new_figure(WIDE, HEIGHT)
    facts = "lines are means over neighbouring steps   ·   a star is a run's best validation loss"
    draw_title(figure, f"{len(runs):,} runs compared", facts, _warning(runs), warning=True)
    grid = figure.add_gridspec(
        2, 4, left=0.054, right=0.985, top=0.835, bottom=0.075, wspace=0.22, hspace=0.38, width_ratios=(1, 1, 1, 1.2)
    )
    looks: list[Look] = [(_COLOURS[place % 10], _STYLES[place // 10 % 3]) for place in range(len(runs))]
    pairs = list(zip(runs, looks, strict=True))

    panels: list[tuple[Any, str, list[Line], Quantity, str, list[Line]]] = []
    for column, (kind, word) in enumerate(_WORDS.items()):
        training = [_line(run.curve("loss", kind), look, smoothed=True) for run, look in pairs]
        validation = [_line(run.eval_curve(kind), look, smoothed=False) for run, look in pairs]
        panels.append((grid[0, column], f"Training loss over {word}", training, LOSS, kind, []))
        panels.append((grid[1, column], f"Validation loss over {word}", validation, LOSS, kind, training))
    speeds = [_line(run.curve("tokens_per_second"), look, smoothed=True) for run, look in pairs]
    panels.append((grid[0, 3], "Throughput", speeds, _SPEEDS, "step", []))
    for cell, title, lines, quantity, kind, beside in panels:
        axes, far = figure.add_subplot(cell), _far_apart(beside or lines)
        draw_panel(axes, title, lines, quantity, kind, logarithmic=far, legend=False, beside=beside)
    _draw_names(figure.add_subplot(grid[1, 3]), runs, looks)
    return figure


def _line(curve: Curve, look: Look, *, smoothed: bool) -> Line:
    dots = not smoothed and len(curve.x) <= 60
    return Line(curve, look[0], style=look[1], smoothed=smoothed, raw=False, best=not smoothed, dots=dots)


def _far_apart(lines: Sequence[Line]) -> bool:
    ends = [float(line.curve.x[-1]) for line in lines if len(line.curve.x)]
    return bool(ends) and 0 < _FAR_APART * min(ends) <= max(ends)


def _draw_names(axes: Axes, runs: Sequence[RunNumbers], looks: Sequence[Look]) -> None:
    """The legend: name, best validation loss, throughput and time of each run."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    shown = len(runs) if len(runs) <= _MOST_NAMES else _MOST_NAMES - 1
    rows = max(9, min(len(runs), _MOST_NAMES) + 1)
    size = SMALL if rows <= 15 else 7.0
    axes.set_ylim(rows - 0.5, -0.7)
    room = 0.38 * WIDE * axes.get_position().width  # inches, between a name's beginning and the next column
    ends = (0.63, 0.8, 1.0)
    axes.text(0.1, 0, "run", size=size, color=FAINT, va="center")
    for place, words in zip(ends, ("best val", "tokens/s", "time"), strict=True):
        axes.text(place, 0, words, size=size, color=FAINT, ha="right", va="center")
    for row, (run, look) in enumerate(zip(runs[:shown], looks, strict=False), start=1):
        axes.plot([0.0, 0.08], [row, row], color=look[0], linestyle=look[1], linewidth=2.2)
        axes.text(0.1, row, fitted(drawable(run.name), size, room), size=size, color=INK, va="center")
        best, speeds = run.best(), run.curve("tokens_per_second").values
        cells = (
            "" if best is None else loss_text(best["loss"]),
            "" if not len(speeds) else human_count(float(numpy.median(speeds))),
            spent_on(run),
        )
        for place, words in zip(ends, cells, strict=True):
            axes.text(place, row, words, size=size, color=INK, ha="right", va="center")
    if shown < len(runs):
        axes.text(0.1, shown + 1, f"and {len(runs) - shown:,} more", size=size, color=FAINT, va="center")


def _warning(runs: Sequence[RunNumbers]) -> str:
    """What forbids a comparison of losses, if something does."""
    for field, words in (("tokenizer", "tokenizers"), ("vocab", "vocabularies"), ("dataset", "data")):
        told = {str(run.info.get(field)) for run in runs}
        if field == "tokenizer":
            told.discard("model")  # a fine-tuned model's own, which may be any of the others
        if len(told) > 1:
            return f"these runs have different {words}: a lower loss need not mean a better model"
    return ""
