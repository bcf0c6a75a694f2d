"""Sheets and pictures of rows, shown: on the terminal, as Markdown, as PNG or SVG.

Contract: a sheet is plain values, so showing it needs neither torch nor the run. Names of kernels, paths and messages
come from elsewhere: control characters are taken out, and Markdown shows names as code. In a pipe or a file, lines
have no colours and no spaces at their ends.

In a picture nothing overlaps, and the same picture gives the same bytes. What lies beyond the limits of a panel is
drawn at its edge, so that one far value does not flatten the rest.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flatout.observe import picture
from flatout.observe.human import Terminal, one_line, printable, say
from flatout.observe.picture import FAINT, INK, LINE, RED, SMALL, Axes, Figure, drawable, shortened
from flatout.rows import (
    BAD,
    OWN,
    BarPanel,
    Block,
    Bullets,
    ChartPanel,
    Heading,
    Picture,
    ResultRow,
    Sentence,
    Sheet,
    Table,
)

_STYLES = {OWN: "bold", "good": "green", BAD: "bold red", "faint": "dim"}
_NAME = 58  # characters of a kernel's name


# --- terminal ---------------------------------------------------------------------------------------------------------


def print_sheet(sheet: Sheet, stream: TextIO | None = None, *, console: Console | None = None) -> None:
    """Prints a sheet, by default to stdout."""
    console = console or Terminal(stream, width_of_files=sheet.width)
    if console.is_terminal:
        _print(sheet, console)
        return
    plain = Console(file=io.StringIO(), width=max(console.width, sheet.width), highlight=False)
    with plain.capture() as captured:
        _print(sheet, plain)
    for line in captured.get().splitlines():
        say(console, line.rstrip())


def _print(sheet: Sheet, console: Console) -> None:
    inset = (0, 0, 0, sheet.indent)
    for block in sheet.blocks:
        match block:
            case Heading():
                if block.level > 1:
                    console.print("")
                say(console, one_line(block.text), "bold cyan" if block.level == 1 else "bold")
            case Sentence() if sheet.indent:
                console.print(Padding(Text(one_line(block.text), _STYLES.get(block.tone, "")), inset))
            case Sentence():
                say(console, block.text, _STYLES.get(block.tone, ""))
            case Bullets():
                for words, text in block.items:
                    shown = Text.assemble((one_line(words), "green"), ": " if words else "", one_line(text))
                    console.print(Padding(shown, inset))
            case Table():
                console.print(Padding(_rich(block, console.width - sheet.indent), inset))
                for row in block.rows:
                    if row.reason:
                        say(console, f"  {row.name.strip()}: {one_line(row.reason)}", "dim")


def _rich(block: Table, width: int) -> RichTable:
    columns = block.columns
    cells = [_cells(block, row, columns) for row in block.rows]
    headers = [*([""] if block.marks else []), block.names, *columns]
    needed = [max(len(header), *(len(row[place]) for row in cells)) + 2 for place, header in enumerate(headers)]
    for extra in block.extras:
        if sum(needed) - 2 > width and extra in headers:
            place = headers.index(extra)
            for line in (headers, needed, *cells):
                del line[place]
    table = RichTable(
        box=None, header_style="bold", pad_edge=False, show_header=any(header.strip() for header in headers)
    )
    left = {"", "verdict", *([] if block.numbers else [block.names]), *block.left}
    for header in headers:
        table.add_column(header.strip(), justify="left" if header in left else "right", no_wrap=True)
    for row, line in zip(block.rows, cells, strict=True):
        table.add_row(*map(Text, line), style=_STYLES.get(row.tone, ""))
    return table


def _cells(block: Table, row: ResultRow, columns: Sequence[str]) -> list[str]:
    name = row.name
    if block.code and len(name) > _NAME:
        name = f"{name[: _NAME - 20]}\u2026{name[-19:]}"
    marks = ["*" if row.tone == OWN else ""] if block.marks else []
    texts = [row.cells.get(column, "") if column != "verdict" else row.verdict or "-" for column in columns]
    indent = " " * (len(name) - len(name.lstrip()))
    return [*marks, indent + one_line(name), *map(one_line, texts)]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def as_markdown(sheet: Sheet) -> str:
    return "\n\n".join(_markdown(block) for block in sheet.blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_inert(block.text)}"
        case Sentence():
            text = _inert(block.text)
            return f"**{text}**" if block.tone == OWN else text
        case Bullets():
            return "\n".join(f"- {_code(words) + ': ' if words else ''}{_inert(text)}" for words, text in block.items)
        case Table():
            columns = block.columns
            marks = ["---", *("---" if name in block.left else "---:" for name in columns)]
            rows = [[_name(block, row), *(_cell(row.cells.get(name, "")) for name in columns)] for row in block.rows]
            lines = [[block.names.strip(), *(name.strip() for name in columns)], marks, *rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name(block: Table, row: ResultRow) -> str:
    if block.code:
        return _code(row.name).replace("|", "\\|")
    depth = len(row.name) - len(row.name.lstrip())
    return "&nbsp;" * 2 * depth + _cell(row.name)


def _cell(text: str) -> str:
    return _inert(text).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{one_line(text).replace('`', chr(39))}`"


def _inert(text: str) -> str:
    """Text that Markdown does not take for HTML or for a link; backticks of our own sentences stay."""
    return one_line(text).replace("<", "&lt;").replace("[", "\\[")


# --- pictures ---------------------------------------------------------------------------------------------------------

_WIDTH, _ROW, _CHART = 12.0, 0.27, 2.9  # inches
_LETTERS = 15  # of the words beside a bar, on an inch
_COLOURS = {
    "blue": picture.BLUE, "orange": picture.ORANGE, "red": RED, "teal": picture.TEAL, "purple": picture.PURPLE,
    "grey": picture.GREY, "faint": "#b9c2cc",
}  # fmt: skip
_GRID = "#e7eaee"


def draw_picture(made: Picture, path: str | Path, *, overwrite: bool = False) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    picture.write_picture(path, lambda: figure_of(made), overwrite=overwrite)


def figure_of(made: Picture) -> Figure:
    """The figure, not yet written: titles, panels of bars side by side, charts in lines of `columns`."""
    top = 0.5 + 0.22 * len(made.lines)
    below = 0.75 if any(panel.legend for panel in made.bars) else 0.45  # ticks of bars, and a legend under them
    rows = _ROW * max(len(made.names), 3) + 0.55 + below if made.bars else 0.0
    wide = [chart for chart in made.charts if chart.wide]
    small = [chart for chart in made.charts if not chart.wide]
    columns = max(1, min(made.columns, len(small)))
    lines = len(wide) + -(-len(small) // columns)
    tall = 4.6 if len(made.charts) == 1 and not made.bars else _CHART
    height = top + rows + lines * tall + 0.1
    figure = picture.new_figure(_WIDTH, height, dpi=110)
    figure.text(
        0.012, 1 - 0.36 / height, shortened(drawable(printable(made.title)), 90), size=15, weight="bold", color=INK
    )
    for number, line in enumerate(made.lines):
        place = 1 - (0.6 + 0.22 * number) / height
        figure.text(0.012, place, shortened(drawable(printable(line)), 150), size=SMALL, color=FAINT)
    if made.bars:
        _draw_rows(figure, made, (height - top - rows + below) / height, (rows - below - 0.5) / height)
    for number, chart in enumerate([*wide, *small]):
        place = max(0, number - len(wide))
        line = number if chart.wide else len(wide) + place // columns
        across = 0.92 if chart.wide else 0.92 / columns
        left = 0.07 + (0 if chart.wide else place % columns * across)
        bottom = height - top - rows - (line + 1) * tall + 0.55
        box = (left, bottom / height, across - (0.0 if chart.wide else 0.055), (tall - 0.95) / height)
        _draw_chart(figure.add_axes(box), chart)
    return figure


def _draw_rows(figure: Figure, made: Picture, bottom: float, tall: float) -> None:
    names = [("", name.text) if isinstance(name, Heading) else (name, "") for name in made.names]
    longest = max((len(shortened(name, 44)) for name, _ in names), default=0)
    left = 0.02 + 0.0062 * longest
    room = 0.985 - left
    whole = sum(panel.share for panel in made.bars)
    for number, panel in enumerate(made.bars):
        width = room * panel.share / whole
        inside = width - (0.19 if panel.at_edge else 0.015)
        axes = figure.add_axes((left, bottom, inside, tall))
        axes.set_ylim(max(len(names), 3) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        labels = [shortened(drawable(name), 44) for name, _ in names] if number == 0 else [""] * len(names)
        axes.set_yticks(range(len(names)), labels, size=SMALL, color=INK)
        axes.tick_params(axis="y", length=0)
        for place, (_, title) in enumerate(names if number == 0 else ()):
            where = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(0.0, place + 0.15, title, size=SMALL, weight="bold", color=FAINT, **where)
        _draw_bars(axes, panel)
        left += width


def _draw_bars(axes: Axes, panel: BarPanel) -> None:
    axes.set_title(panel.title, size=10, color=INK, loc="left", pad=8)
    if panel.log:
        axes.set_xscale("log")
    ends = [bar.start + sum(length for length, _ in bar.parts) for bar in panel.bars if bar.parts]
    low, high = panel.limits or (0.0, 1.38 * (max(ends, default=0.0) or 1.0))  # room for words after the longest bar
    axes.set_xlim(low, high)
    if panel.log:
        _set_log_ticks(axes, low, high, panel.form)
    else:
        axes.locator_params(axis="x", nbins=7)
        axes.xaxis.set_major_formatter(lambda value, _place: panel.form(value))
    axes.tick_params(axis="x", labelsize=8, colors=FAINT)
    if panel.at is not None:
        axes.axvline(panel.at, color=INK, linewidth=0.8, zorder=1)
    inches = axes.get_position().width * _WIDTH
    for bar in panel.bars:
        alpha, end, start = 0.45 if bar.pale else 1.0, bar.start, bar.start
        for length, colour in bar.parts:
            end = min(max(start + length, low), high)
            axes.barh(
                bar.line,
                end - start,
                0.56,
                left=start,
                color=_COLOURS[colour],
                alpha=alpha,
                zorder=2,
            )
            start = end
        if bar.interval is not None:
            inside = [min(max(edge, low), high) for edge in bar.interval]
            colour = INK if bar.parts else _COLOURS[bar.colour]
            axes.plot(inside, [bar.line] * 2, color=colour, linewidth=0.9 if bar.parts else 2.0, alpha=alpha, zorder=4)
        if bar.dot is not None:
            end = min(max(bar.dot, low), high)
            axes.plot([end], [bar.line], "o", markersize=6, color=_COLOURS[bar.colour], alpha=alpha, zorder=4)
        ink = FAINT if bar.pale else RED if bar.colour == "red" else INK
        look: dict[str, Any] = {"size": 8, "color": ink, "va": "center", "zorder": 5}
        words = shortened(drawable(printable(bar.words)), 40)
        if panel.at_edge:
            axes.text(1.02, bar.line, words, transform=axes.get_yaxis_transform(), **look)
            continue
        place = axes.transAxes.inverted().transform(axes.transData.transform((end, bar.line)))[0]
        if (1 - place) * inches < len(words) / _LETTERS:  # no room behind the bar: over its end, which stays visible
            look |= {"ha": "right"}
            if not bar.parts:
                look |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}}
            elif not bar.pale and bar.parts[-1][1] != "faint":
                look |= {"color": "white"}
        axes.text(end, bar.line, f" {words} ", **look)
    if panel.legend:
        for name, colour in panel.legend.items():
            axes.plot([], [], "s", color=_COLOURS[colour], label=name)
        under = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "borderaxespad": 2.6}  # below the ticks
        axes.legend(ncols=4, fontsize=8, frameon=False, labelcolor=FAINT, **under)


def _set_log_ticks(axes: Axes, low: float, high: float, form: Any) -> None:
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 6 else (1, 2, 5) if high / low < 300 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
    axes.set_xticks(ticks, [form(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


_LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linestyle": "-", "linewidth": 1.6, "marker": ""},
    "points": {"linestyle": "-", "linewidth": 1.4, "marker": "o", "markersize": 3},
    "dots": {"linestyle": "", "marker": "o", "markersize": 4.5},
    "crosses": {"linestyle": "", "marker": "x", "markersize": 5},
    "steps": {"linestyle": "-", "linewidth": 1.2, "drawstyle": "steps-post"},
    "rings": {"linestyle": "", "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8},
}


def _draw_chart(axes: Axes, chart: ChartPanel) -> None:
    axes.set_title(drawable(chart.title), size=SMALL, color=INK, loc="left")
    if chart.log:
        axes.set_xscale("log")
    if chart.limits is not None:
        axes.set_ylim(*chart.limits)
    if chart.at is not None:
        axes.axhline(chart.at, color=LINE, linewidth=1.2, zorder=1)
    low, high = axes.get_ylim() if chart.limits is None else chart.limits
    for curve in chart.curves:
        points = curve.points if chart.limits is None else [(x, min(max(y, low), high)) for x, y in curve.points]
        look = {**_LOOKS[curve.look], "color": _COLOURS[curve.colour], "alpha": 0.45 if curve.pale else 1.0}
        axes.plot(
            *zip(*points, strict=True), label=drawable(curve.name), clip_on=curve.look == "line", zorder=3, **look
        )
    xs = [x for curve in chart.curves for x, _ in curve.points]
    if chart.log:
        edge = axes.set_xlim(min(xs) / 1.2, max(xs) * 1.2)
        _set_log_ticks(axes, *edge, "{:g}".format)
    elif chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), [shortened(drawable(tick), 14) for tick in chart.ticks])
        axes.set_xlim(-0.6, len(chart.ticks) - 0.4)
    elif chart.whole:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif chart.form is not None:
        form = chart.form
        axes.xaxis.set_major_formatter(lambda value, _place: form(value))
    if chart.grey is not None:
        axes.axvspan(chart.grey, axes.get_xlim()[1], color="#f3f4f6", zorder=0)
    _draw_marks(axes, chart)
    axes.set_xlabel(drawable(chart.x), size=SMALL, color=INK)
    axes.set_ylabel(chart.y, size=SMALL, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if chart.wide and any(curve.name for curve in chart.curves):  # above the panel, where no point can be
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=6, fontsize=8, frameon=False, labelcolor=FAINT)


def _draw_marks(axes: Axes, chart: ChartPanel) -> None:
    """Vertical lines with their names, each on a line of its own above the curves."""
    if not chart.marks:
        return
    bottom, top = axes.get_ylim()
    step = 0.12 * (top - bottom)
    axes.set_ylim(bottom, top + step * (len(chart.marks) + 0.5))
    left, right = (math.log10(edge) if chart.log else edge for edge in axes.get_xlim())
    for place, (x, words, chosen) in enumerate(sorted(chart.marks)):
        height, colour = top + step * (len(chart.marks) - place), RED if chosen else FAINT
        style = "-" if chosen else (0, (4, 3))
        axes.plot([x, x], [bottom, height], color=colour, linewidth=1.6 if chosen else 1.0, linestyle=style, zorder=1)
        # Names run to the side that has room for them, over the lines of the others.
        leftwards = (math.log10(x) if chart.log else x) > left + 0.72 * (right - left)
        axes.annotate(
            words, (x, height), xytext=(-5 if leftwards else 5, 0), textcoords="offset points", size=SMALL,
            va="center", ha="right" if leftwards else "left", color=colour, weight="bold" if chosen else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=5,
        )  # fmt: skip
