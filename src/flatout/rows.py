"""What was measured, as rows: the one form between a measurement and every place that shows it. No torch.

A measuring verb makes a `Sheet` of headings, lines and tables, and a `Picture` if it has one. `observe/sheets.py` shows
any of them: on the terminal, as Markdown, as PNG or SVG. So a new verb brings its measurement and its rows, and no
printing or drawing of its own.

Contract: a cell is text, and the name of its column has the unit. Text may come from anywhere: whoever shows it removes
control characters. The JSON of a result is its own record (`to_json`), not its sheet.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flatout.errors import DataError
from flatout.files import disk_errors

_Any = TypeVar("_Any")

# How a row is shown: of one's own choice, good or bad news, or of less interest.
OWN, GOOD, BAD, FAINT = "own", "good", "bad", "faint"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One thing that was measured: its name, cells by column, the verdict, and the reason for it or for a gap.

    `value` and `interval` are the number that the verdict is about, for pictures and programs.
    """

    name: str = ""
    cells: Mapping[str, str] = field(default_factory=dict)
    value: float | None = None
    interval: tuple[float, float] | None = None
    verdict: str = ""
    reason: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under the name of their first column. Columns stand on the right, except the first one and those in `left`.

    On a narrow terminal the columns in `extras` are left out, the first of them first. With `marks`, rows of tone `own`
    have a star in front.
    """

    rows: Sequence[ResultRow]
    names: str = ""
    left: Sequence[str] = ()
    extras: Sequence[str] = ()
    marks: bool = False
    numbers: bool = False  # names are numbers, and stand on the right
    code: bool = False  # names are those of kernels or files: long ones are cut in the middle

    @property
    def columns(self) -> list[str]:
        found = list(dict.fromkeys(name for row in self.rows for name in row.cells))
        return [*found, *(["verdict"] if any(row.verdict for row in self.rows) else [])]


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Sentence:
    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets:
    """Lines, each with words for a command line or a file's name before it, which may be empty."""

    items: Sequence[tuple[str, str]]


Block = Heading | Sentence | Bullets | Table


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Blocks from top to bottom. Files and pipes get lines of up to `width` columns; all but headings are indented."""

    blocks: Sequence[Block]
    width: int = 160
    indent: int = 0


# --- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A mark on a line of a picture: parts one after another, each with its colour, or a dot with its interval.

    The words stand at the right edge of the panel.
    """

    line: float
    parts: Sequence[tuple[float, str]] = ()
    dot: float | None = None
    interval: tuple[float, float] | None = None
    words: str = ""
    colour: str = "blue"
    pale: bool = False


@dataclass(frozen=True, kw_only=True)
class BarPanel:
    """A panel of bars. A line is drawn `at` a value; `form` shows a tick."""

    title: str
    bars: Sequence[Bar]
    limits: tuple[float, float] | None = None
    at: float | None = None
    log: bool = False
    form: Callable[[float], str] = "{:g}".format
    legend: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of a chart: `look` is line, dots, crosses or steps. With `best`, the lowest has a star."""

    points: Sequence[tuple[float, float]]
    look: str = "line"
    colour: str = "blue"
    name: str = ""
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class ChartPanel:
    """A panel of curves. `marks` are values of x with their names and colours; `ticks` are words on the x axis."""

    title: str
    curves: Sequence[Points]
    x: str = ""
    y: str = ""
    log: bool = False
    limits: tuple[float, float] | None = None
    ticks: Sequence[str] = ()
    marks: Sequence[tuple[float, str, str]] = ()
    wide: bool = False  # over the whole width, with a legend


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A title, lines below it, panels of bars that share the lines of `names`, and charts below these.

    A `Heading` among the names is a title of the group that follows.
    """

    title: str
    lines: Sequence[str] = ()
    names: Sequence[str | Heading] = ()
    bars: Sequence[BarPanel] = ()
    charts: Sequence[ChartPanel] = ()


# --- numbers ----------------------------------------------------------------------------------------------------------


def human_count(value: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"


def human_bytes(value: float) -> str:
    for limit, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f} B"


def human_seconds(value: float) -> str:
    if not 90 <= value < math.inf:  # a damaged record may hold NaN
        return f"{value:.0f}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
    return f"{hours // 24}d{hours % 24}h"


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def or_dash(value: Any, form: str | Callable[[Any], str]) -> str:
    """The value as `form` shows it; a dash for None."""
    if value is None:
        return "-"
    return form.format(value) if isinstance(form, str) else form(value)


# --- rows on the disk -------------------------------------------------------------------------------------------------


def read_rows(
    path: Path, parse: Callable[[str], _Any], kind: str, again: str, notice: Callable[[str], None] = lambda _: None
) -> list[_Any]:
    """The rows of a file of JSON lines of a `kind`, in the order in which they were measured.

    A last row that was being written when the process ended is cut off, with a `notice`. Anything else that is no row
    is an error that names its line, and leaves the file as it is; `again` says what happens after that line is removed.
    """
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    rows = [_row(path, number, line, parse, again) for number, line in enumerate(lines, start=1)]
    if torn:
        number, beginning = len(lines) + 1, f'{{"type": "{kind}"'.encode()
        if not torn.startswith(beginning[: len(torn)]):
            raise _damaged(path, number, "it is no row, and has no end", again)
        with disk_errors(str(path), safe=""):
            os.truncate(path, len(whole) + len(newline))
        notice(f"{path}: line {number}, the last one, was cut off while it was written, and is dropped")
    return rows


def _row(path: Path, number: int, line: bytes, parse: Callable[[str], _Any], again: str) -> _Any:
    try:
        return parse(line.decode("utf-8"))
    except ValueError as error:  # of UTF-8 and of JSON, too
        raise _damaged(path, number, str(error), again) from error


def _damaged(path: Path, number: int, why: str, again: str) -> DataError:
    return DataError(
        f"{path} is damaged in line {number}: {why}",
        f"remove that line, and {again}; or name a new folder with --out",
    )
