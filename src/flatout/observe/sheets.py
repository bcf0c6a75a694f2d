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
from typing import TextIO

import numpy
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flatout.observe import picture
from flatout.observe.human import Terminal, one_line, printable, say
from flatout.observe.picture import (
    FAINT,
    INK,
    LINE,
    RED,
    SMALL,
    Axes,
    Curve,
    Figure,
    Marks,
    Quantity,
    drawable,
    shortened,
)
from flatout.observe.series import Series
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

_WIDTH, _ROW, _CHART, _COLUMNS = 12.0, 0.27, 2.9, 3  # inches, and charts beside each other
_LETTER = 0.0058  # of the width, that a letter beside a bar takes
_MOST_WORDS = 52  # letters beside a bar
_COLOURS = {
    "blue": picture.BLUE, "orange": picture.ORANGE, "red": RED, "teal": picture.TEAL, "purple": picture.PURPLE,
    "grey": picture.GREY, "faint": LINE,
}  # fmt: skip


def draw_picture(made: Picture, path: str | Path, *, overwrite: bool = False) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    picture.write_picture(path, lambda: figure_of(made), overwrite=overwrite)


def figure_of(made: Picture) -> Figure:
    """The figure, not yet written: titles, panels of bars side by side, wide charts, then the others in threes."""
    top = 0.5 + 0.22 * len(made.lines)
    below = 0.75 if any(panel.legend for panel in made.bars) else 0.45  # ticks of bars, and a legend under them
    rows = _ROW * max(len(made.names), 3) + 0.55 + below if made.bars else 0.0
    charts = sorted(made.charts, key=lambda chart: not chart.wide)
    wide = sum(chart.wide for chart in charts)
    columns = max(1, min(_COLUMNS, len(charts) - wide))
    tall = 4.6 if len(charts) == 1 else _CHART
    height = top + rows + (wide + math.ceil((len(charts) - wide) / columns)) * tall + 0.1
    figure = picture.new_figure(_WIDTH, height, dpi=110)
    figure.text(0.012, 1 - 0.36 / height, _words(made.title, 90), size=15, weight="bold", color=INK)
    for number, line in enumerate(made.lines):
        figure.text(0.012, 1 - (0.6 + 0.22 * number) / height, _words(line, 150), size=SMALL, color=FAINT)
    if made.bars:
        _draw_rows(figure, made, (height - top - rows + below) / height, (rows - below - 0.5) / height)
    for number, chart in enumerate(charts):
        line, place = (number, 0) if chart.wide else divmod(number - wide, columns)
        line += 0 if chart.wide else wide
        across = 0.92 if chart.wide else 0.92 / columns
        bottom = height - top - rows - (line + 1) * tall + 0.55
        box = (0.07 + place * across, bottom / height, across - (0.0 if chart.wide else 0.055), (tall - 0.95) / height)
        _draw_chart(figure.add_axes(box), chart)
    return figure


def _words(text: str, most: int) -> str:
    return shortened(drawable(printable(text)), most)


def _draw_rows(figure: Figure, made: Picture, bottom: float, tall: float) -> None:
    """Panels side by side: the names of their lines at the left, and at the right of each the words of its bars."""
    names = ["" if isinstance(name, Heading) else _words(name, 44) for name in made.names]
    left = 0.02 + 0.0062 * max(map(len, names), default=0)
    words = [max((len(_words(bar.words, _MOST_WORDS)) for bar in panel.bars), default=0) for panel in made.bars]
    inside = (0.985 - left - _LETTER * sum(words)) / len(made.bars) - 0.025
    for number, (panel, longest) in enumerate(zip(made.bars, words, strict=True)):
        axes = figure.add_axes((left, bottom, inside, tall))
        axes.set_ylim(max(len(names), 3) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
        for place, name in enumerate(made.names if number == 0 else ()):
            if isinstance(name, Heading):
                where = {"transform": axes.get_yaxis_transform(), "va": "center"}
                axes.text(0.0, place + 0.15, name.text, size=SMALL, weight="bold", color=FAINT, **where)
        _draw_bars(axes, panel)
        left += inside + 0.025 + _LETTER * longest


def _draw_bars(axes: Axes, panel: BarPanel) -> None:
    picture.draw_frame(axes, panel.title)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    ends = [sum(length for length, _ in bar.parts) for bar in panel.bars]
    low, high = panel.limits or (0.0, 1.05 * max(ends, default=0.0) or 1.0)
    axes.set_xlim(low, high)
    if panel.log:
        axes.set_xscale("log")
        picture.set_logarithmic_ticks(axes.xaxis, panel.form)
    else:
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _place: panel.form(value))
    if panel.at is not None:
        axes.axvline(panel.at, color=INK, linewidth=0.8, zorder=1)
    for bar in panel.bars:
        alpha, end, colour = 0.45 if bar.pale else 1.0, 0.0, _COLOURS[bar.colour]
        for length, part in bar.parts:
            axes.barh(bar.line, length, 0.56, left=end, color=_COLOURS[part], alpha=alpha, zorder=2)
            end += length
        if bar.interval is not None:
            axes.plot(bar.interval, [bar.line] * 2, color=colour, linewidth=2.0, alpha=alpha, zorder=4)
        if bar.dot is not None:
            axes.plot([min(max(bar.dot, low), high)], [bar.line], "o", color=colour, alpha=alpha, zorder=4)
        ink = FAINT if bar.pale else RED if bar.colour == "red" else INK
        where = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.02, bar.line, _words(bar.words, _MOST_WORDS), size=8, color=ink, **where)
    for name, part in panel.legend.items():
        axes.plot([], [], "s", color=_COLOURS[part], label=name)
    if panel.legend:
        under = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "borderaxespad": 2.6}  # below the ticks
        axes.legend(ncols=4, fontsize=8, frameon=False, labelcolor=FAINT, **under)


def _draw_chart(axes: Axes, chart: ChartPanel) -> None:
    lines = [
        Curve(
            Series(*numpy.array(points.points, dtype=float).T),
            _COLOURS[points.colour],
            drawable(points.name),
            best=points.best,
            look=points.look,
        )
        for points in chart.curves
    ]
    marks = [Marks(numpy.array([x]), drawable(name), _COLOURS[colour]) for x, name, colour in chart.marks]
    quantity = Quantity([(1.0, chart.y)], limits=chart.limits)
    across = drawable(chart.x)
    picture.draw_panel(
        axes, drawable(chart.title), lines, quantity, across, logarithmic=chart.log, marks=marks, legend=chart.wide
    )
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), [shortened(drawable(tick), 14) for tick in chart.ticks])
        axes.set_xlim(-0.6, len(chart.ticks) - 0.4)
