"""Losses over steps as lines of text: training as a line of braille dots, validation as marks, on one axis.

Contract: pure, for any points and any size. Every value has its place on the axis, whose ends are labelled with the
values they stand for. The axis leaves out what is rare and far above, such as the first losses, which would press all
else flat: such a column has an arrow in its top row, and the title says from where on. A cross is a loss that is not
finite.
"""

import math
from collections.abc import Sequence

from rich.text import Text

from flatout.observe.series import Points

TRAINING, VALIDATION, ABOVE, BROKEN = "⠒", "●", "↑", "×"
_FAINT, _LINE, _MARK, _WARN = "bright_black", "cyan", "magenta", "yellow"
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a braille cell, by column and from the bottom up
_BRAILLE = 0x2800
_USUAL = 0.95  # of the columns after the first tenth are on the axis, and all where that costs little room
_APART = 3  # cells between two marks: what lies below stays visible


def chart(training: Points, validation: Points, title: str, width: int, height: int) -> list[Text]:
    """A title, the curves with their scale on the left, and from five lines on the steps below them."""
    rows, first = height - (2 if height >= 5 else 1), min((step for step, _ in training), default=0)
    validation = [point for point in validation if point[0] >= first]
    last = max((step for step, _ in (*training, *validation)), default=0)
    limits = _limits(training, validation, first, last)
    labels = [loss_text(value) for value in limits]
    left = max(7, *map(len, labels)) + 1
    across = width - left
    if rows < 1 or across < 2:
        return [Text("")] * height
    grid = _Grid(across, rows, (first, last), limits)
    grid.line(training)
    grid.marks(validation)
    parts = [(f"{title}: ", _FAINT), (TRAINING * 2, _LINE), (" training", _FAINT)]
    parts += [("  ", ""), (VALIDATION, _MARK), (" validation", _FAINT)] if validation else []
    parts += [(f"  {ABOVE} above {labels[1]}", _WARN)] if grid.above else []
    lines = [Text.assemble(*parts)]
    for row in range(rows):
        label = labels[0] if row == rows - 1 else labels[1] if row == 0 else ""
        lines.append(Text.assemble((f"{label:>{left - 1}} ", _FAINT), *grid.cells(row)))
    if len(lines) == height:
        return lines
    begin, end = f"{first:,}", f"step {last:,}"
    gap = across - len(begin) - len(end)
    return [*lines, Text(" " * left + (begin + " " * gap + end if gap > 0 and last > first else end), style=_FAINT)]


def loss_text(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def _limits(training: Points, validation: Points, first: int, last: int) -> tuple[float, float]:
    """The values of the lower and the upper edge."""
    late = first + 0.1 * (last - first)
    known = [value for _, value in (*training, *validation) if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, most = min(known), max(known)
    usual = sorted(value for step, value in training if step >= late and math.isfinite(value)) or [most]
    top = max(usual[int(_USUAL * (len(usual) - 1))], *(value for step, value in validation if step >= late), low)
    top = most if not math.isfinite(top) or most - low <= 1.3 * (top - low) else top
    if top - low < 1e-3 * max(abs(low), abs(top), 0.1):  # a flat line gets an axis that can be labelled
        room = 5e-3 * max(abs(low), abs(top), 0.1)
        return low - room, top + room
    return low, top


class _Grid:
    """Cells of a chart: dots two by four in each, and marks in the place of dots."""

    def __init__(self, across: int, rows: int, steps: tuple[int, int], limits: tuple[float, float]) -> None:
        self.across, self.rows, self.above = across, rows, False
        self._first, self._span = steps[0], max(steps[1] - steps[0], 1)
        self._low, self._range = limits[0], limits[1] - limits[0]
        self._bits: dict[tuple[int, int], int] = {}
        self._signs: dict[tuple[int, int], tuple[str, str]] = {}

    def line(self, points: Points) -> None:
        """Draws means of what falls into one column of dots, and lines between them."""
        columns: dict[int, list[float]] = {}
        for step, value in points:
            columns.setdefault(self._column(step), []).append(value)
        before: tuple[int, float] | None = None
        for column, values in sorted(columns.items()):
            level = self._level(mean_of(values))
            if level is None:
                self._signs[column // 2, self.rows - 1] = (BROKEN, _WARN)
                before = None
                continue
            if before is None:
                before = (column, level)
            self._segment(before, (column, level))
            before = (column, level)

    def marks(self, points: Points) -> None:
        """Draws points of their own, from the last one backwards as many as leave the line visible."""
        leftmost = self.across + _APART
        for step, value in sorted(points, reverse=True):
            column, level = self._column(step) // 2, self._level(value)
            if column > leftmost - _APART:
                continue
            leftmost = column
            if level is None:
                self._signs[column, self.rows - 1] = (BROKEN, _WARN)
            elif level > self._top:
                self._arrow(column)
            else:
                self._signs[column, self._row(level)] = (VALIDATION, _MARK)

    def cells(self, row: int) -> list[tuple[str, str]]:
        return [
            self._signs.get(
                (column, row), (chr(_BRAILLE + bits) if (bits := self._bits.get((column, row))) else " ", _LINE)
            )
            for column in range(self.across)
        ]

    @property
    def _top(self) -> float:
        return 4 * self.rows - 1

    def _column(self, step: int) -> int:
        """Of dots, of which a cell has two."""
        return round((step - self._first) / self._span * (2 * self.across - 1))

    def _level(self, value: float) -> float | None:
        """How many dots above the lower edge; None for what has no place."""
        return (value - self._low) / self._range * self._top if math.isfinite(value) else None

    def _row(self, level: float) -> int:
        return self.rows - 1 - max(0, round(level)) // 4

    def _arrow(self, column: int) -> None:
        self.above = True
        self._signs.setdefault((column, 0), (ABOVE, _WARN))

    def _segment(self, begin: tuple[int, float], end: tuple[int, float]) -> None:
        """Dots from one point to the next, without gaps where the line is steep."""
        count = max(1, end[0] - begin[0])
        height = begin[1]
        for place in range(0 if begin == end else 1, count + 1):
            column = begin[0] + (place if end[0] > begin[0] else 0)
            level = begin[1] + (end[1] - begin[1]) * place / count
            if level > self._top + 0.5:
                self._arrow(column // 2)
            low, high = sorted((min(height, self._top), min(level, self._top)))
            if min(height, level) <= self._top + 0.5:
                for dot in range(max(0, round(low)), round(high) + 1):
                    cell = column // 2, self._row(dot)
                    self._bits[cell] = self._bits.get(cell, 0) | _DOTS[column % 2][dot % 4]
            height = level


def mean_of(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN only if there are none, so that one bad step does not blank a column."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
