"""A hyperparameter search as a picture and in the terminal: every trial, the best so far, and each field by itself.

Idea: the history says whether the search still finds something; a panel per field shows the loss over that field's
values, which tells more than one number of importance: whether the best lies in the middle of a valley or at the edge
of the range, where the range should be wider.

Contract: it reads the JSON form of a result (`StudyResult.to_json`). Trials that were cut short are pale, at the loss
they had then; those that failed are crosses at the top. A loss far above the others does not flatten the rest.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from flatout.errors import many
from flatout.observe.human import Terminal, human_seconds, printable, say
from flatout.observe.picture import BLUE, FAINT, INK, RED, SMALL, Axes, Figure, new_figure, write_picture

_COLUMNS = 3
_SHOWN = 20  # rows of the table
_STATUS = {
    "done": "",
    "pruned": "cut short",
    "diverged": "diverged",
    "out_of_memory": "out of memory",
    "invalid": "no valid config",
}


def trial_line(row: Mapping[str, Any]) -> str:
    """One trial in one line."""
    values = ", ".join(f"{path} {_value(value)}" for path, value in row["values"].items())
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
    status = _STATUS.get(row["status"], row["status"])
    told = f", {status}: {row['reason']}" if status else ", best so far" if row["best"] else ""
    return printable(f"trial {row['number']}: {values}{loss} after {human_seconds(row['seconds'])}{told}")


def print_study(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """The trials, the best first, and in a sentence what was found."""
    console = Terminal(stream, width_of_files=200)
    paths = list(body["forms"])
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "trial", "loss", *paths, "steps", "time", ""):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    ordered = sorted(body["rows"], key=lambda row: (row["status"] != "done", row["status"], row["loss"] or math.inf))
    for row in ordered[:_SHOWN]:
        own = row["number"] == body["best"]["number"]
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        cells = ["*" if own else "", str(row["number"]), loss, *(_value(row["values"][path]) for path in paths)]
        cells += [str(row["step"]), human_seconds(row["seconds"]), _STATUS.get(row["status"], row["status"])]
        style = "bold" if own else "dim" if row["status"] != "done" else ""
        table.add_row(*(printable(cell) for cell in cells), style=style)
    console.print(table)
    if len(ordered) > _SHOWN:
        say(console, f"and {len(ordered) - _SHOWN} more")
    explained = [(share, path) for path, share in body["importance"].items() if share is not None]
    for share, path in sorted(explained, reverse=True):
        say(console, f"{share:.0%} of the differences in loss go along with {path} alone")
    say(console, _sentence(body))
    for path in at_the_edge(body):
        say(console, f"note: the best {path} is at the edge of its range; a wider one may hold a better")


def at_the_edge(body: Mapping[str, Any]) -> list[str]:
    """Fields of which the best value is the first or last of the values that were tried, among four at least."""
    found = []
    for path, form in body["forms"].items():
        values = sorted({row["values"][path] for row in body["rows"]}) if form != "choices" else []
        if len(values) >= 4 and body["best"]["values"][path] in (values[0], values[-1]):
            found.append(path)
    return found


def _sentence(body: Mapping[str, Any]) -> str:
    counts = {status: sum(row["status"] == status for row in body["rows"]) for status in _STATUS}
    told = ", ".join(f"{count} {_STATUS[status] or 'to the end'}" for status, count in counts.items() if count)
    return (
        f"best of {many(len(body['rows']), 'trial')}: number {body['best']['number']}, validation loss "
        f"{body['best']['loss']:.4f}; {told}; on {body['device']}"
    )


def draw_study(body: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    write_picture(path, lambda: _figure(body), overwrite=overwrite)


def _figure(body: Mapping[str, Any]) -> Figure:
    paths = list(body["forms"])
    columns = min(_COLUMNS, len(paths))
    lines = -(-len(paths) // columns)
    height = 3.9 + 2.9 * lines
    figure = new_figure(11.0, height, dpi=110)
    title = f"Search of {printable(str(body['config']))[:60]}"
    figure.text(0.012, 1 - 0.36 / height, title, size=15, weight="bold", color=INK)
    figure.text(0.012, 1 - 0.62 / height, printable(_sentence(body))[:170], size=SMALL, color=FAINT)
    limits = _limits([row["loss"] for row in body["rows"] if row["status"] == "done"])
    _draw_history(figure.add_axes((0.07, 1 - 3.35 / height, 0.91, 2.4 / height)), body, limits)
    for number, path in enumerate(paths):
        line, column = divmod(number, columns)
        width = 0.91 / columns
        place = (0.07 + column * width, 1 - (6.55 + 2.9 * line) / height, width - 0.045, 2.15 / height)
        _draw_field(figure.add_axes(place), body, path, limits)
    return figure


def _draw_history(axes: Axes, body: Mapping[str, Any], limits: tuple[float, float]) -> None:
    rows = body["rows"]
    numbers = [row["number"] for row in rows]
    _scatter(axes, rows, numbers, body["best"]["number"], limits)
    best, leading = math.inf, []
    for row in rows:
        best = min(best, row["loss"]) if row["status"] == "done" else best
        leading.append(best if math.isfinite(best) else math.nan)
    axes.step(numbers, leading, where="post", color=RED, linewidth=1.2, alpha=0.7, label="best so far")
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    _whole_ticks(axes)
    axes.set_xlabel("trial", size=SMALL, color=INK)
    # Above the panel, where no trial can be.
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, labelcolor=FAINT, ncols=4)
    _dress(axes, limits)
    axes.set_ylabel("validation loss", size=SMALL, color=INK)


def _draw_field(axes: Axes, body: Mapping[str, Any], path: str, limits: tuple[float, float]) -> None:
    rows, form = body["rows"], body["forms"][path]
    values = [row["values"][path] for row in rows]
    if form == "choices":
        names = sorted({_value(value) for value in values})
        places = [names.index(_value(value)) for value in values]
        axes.set_xticks(range(len(names)), [name[:14] for name in names])
        axes.set_xlim(-0.6, len(names) - 0.4)
    else:
        places = [float(value) for value in values]
        if all(isinstance(value, int) for value in values):
            _whole_ticks(axes)
    _scatter(axes, rows, places, body["best"]["number"], limits)
    if form == "log":
        axes.set_xscale("log")
        low, high = min(places), max(places)
        axes.set_xlim(low / 1.25, high * 1.25)
        ticks = _log_ticks(low, high)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    share = body["importance"][path]
    axes.set_title(
        path + ("" if share is None else f"   ({share:.0%} of the differences)"), size=SMALL, color=INK, loc="left"
    )
    _dress(axes, limits)


_LOOKS = {
    "pruned": {"color": "#b9c2cc", "marker": "o", "s": 24, "label": "cut short", "linewidths": 0},
    "done": {"color": BLUE, "marker": "o", "s": 30, "label": "to the end", "linewidths": 0},
}


def _scatter(
    axes: Axes, rows: Sequence[Mapping[str, Any]], places: Sequence[float], best: int, limits: tuple[float, float]
) -> None:
    top = limits[1]
    points: dict[str, list[tuple[float, float]]] = {}
    for place, row in zip(places, rows, strict=True):
        finished = row["status"] in _LOOKS
        height = min(row["loss"], top) if finished and row["loss"] is not None else top
        points.setdefault(row["status"] if finished else "failed", []).append((place, height))
        if row["number"] == best:
            ring = {"s": 110, "facecolors": "none", "edgecolors": RED, "linewidths": 1.8}
            axes.scatter([place], [height], zorder=4, **ring)
    for status, look in {**_LOOKS, "failed": {"color": RED, "marker": "x", "s": 30, "label": "failed"}}.items():
        if status in points:
            axes.scatter(*zip(*points[status], strict=True), zorder=3, clip_on=False, **look)


def _dress(axes: Axes, limits: tuple[float, float]) -> None:
    axes.set_ylim(*limits)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.grid(axis="y", color="#e7eaee", linewidth=0.8)
    axes.set_axisbelow(True)


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _limits(losses: Sequence[float]) -> tuple[float, float]:
    """From a little below the best to a little above most of these: what lies far out is drawn at the top."""
    low = min(losses, default=0.0)
    quarter = statistics.quantiles(losses, n=4)[2] if len(losses) > 2 else max(losses, default=1.0)
    high = min(max(losses, default=1.0), low + 3 * max(quarter - low, 1e-3))
    room = max(high - low, 1e-3)
    return low - 0.08 * room, high + 0.12 * room


def _log_ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high / low < 300 else (1,)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [
        step * 10.0**decade for decade in decades for step in steps if low / 1.2 <= step * 10.0**decade <= high * 1.2
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
