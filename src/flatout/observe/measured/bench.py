"""The ladder: rows read back, the table, the picture.

Rows that were measured before, read back from the bench.jsonl of a ladder or the ablate.jsonl of an ablation.

Contract: a last row that was being written when the process ended is cut off, and that is told. Anything else that is
not a row is an error that names its line, and the file stays as it is: it may be somebody else's.

The ladder on the terminal: where it is while it runs, and the table at its end.

Contract: what is still going on goes to stderr, the table to stdout; a rung without a speed says why in its place.

The ladder as a picture: how fast each rung is, and beside it what its switch brought.

Idea: two panels share one list of rungs. The left one shows tokens per second, the right one the gain on a logarithmic
axis, on which a factor of two up and one down are equally long, with its interval as a line. A gain is coloured only
where its verdict is faster or slower. If asked for, the range that the guides claim is a pale bar behind the gain.

Contract: any rows can be drawn, also none with a speed; a rung without one says why where its bar would be. Nothing
overlaps, and the same rows give the same bytes. A picture that cannot be written leaves the one that is there as it is.
"""

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from flatout.errors import DataError
from flatout.files import disk_errors
from flatout.observe.human import Terminal, human_count, printable, say
from flatout.observe.picture import BLUE, FAINT, INK, RED, SMALL, TEAL, Axes, Figure, new_figure, write_picture
from flatout.records import AblateRow, BenchProgress, BenchRow, ablate_row_from_json, bench_row_from_json

_Row = TypeVar("_Row", BenchRow, AblateRow)


def read_bench(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[BenchRow]:
    """The rows of a bench.jsonl, in the order in which they were measured."""
    return _read(path, bench_row_from_json, b'{"type": "bench"', "its rung is measured again", notice)


def read_ablate(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[AblateRow]:
    """The rows of an ablate.jsonl, in the order in which they were trained."""
    return _read(path, ablate_row_from_json, b'{"type": "ablate"', "its run is trained again", notice)


def _read(
    path: Path, parse: Callable[[str], _Row], beginning: bytes, again: str, notice: Callable[[str], None]
) -> list[_Row]:
    """`beginning` is that of every row as `record_to_json` writes it, `again` what becomes of one that is removed."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    rows = [_row(path, number, line, parse, again) for number, line in enumerate(lines, start=1)]
    if torn:
        number = len(lines) + 1
        if not torn.startswith(beginning[: len(torn)]):
            raise _damaged(path, number, "it is no row, and has no end", again)
        with disk_errors(str(path), safe=""):
            os.truncate(path, len(whole) + len(newline))
        notice(f"{path}: line {number}, the last one, was cut off while it was written, and is dropped")
    return rows


def _row(path: Path, number: int, line: bytes, parse: Callable[[str], _Row], again: str) -> _Row:
    try:
        return parse(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _damaged(path, number, f"byte {error.start + 1} is not UTF-8", again) from error
    except json.JSONDecodeError as error:
        raise _damaged(path, number, f"{error.msg} at column {error.colno}", again) from error
    except ValueError as error:
        raise DataError(
            f"{path}, line {number} is not a row of this version: {error}", "name a new folder with --out"
        ) from error


def _damaged(path: Path, number: int, why: str, again: str) -> DataError:
    return DataError(
        f"{path} is damaged in line {number}: {why}",
        f"remove that line, and {again}; or name a new folder with --out",
    )


TITLES = {
    "ladder": "one switch at a time",
    "without": "each one taken out of the full set (gain: what it is worth there)",
    "extra": "what the full set leaves out, each added to it alone",
}
LOST = ("red", "failed", "out_of_memory")  # a switch this device has, but the ladder went on without
_STYLES = {"green": "green", "red": "bold red", "out_of_memory": "yellow", "failed": "bold red", "absent": "dim"}
_WORDS = {"out_of_memory": "no memory"}
UNDECIDED = ("no difference seen", "too noisy to tell")
CLAIMS_PAGE = "docs/from-the-guides.md"


class BenchReader:
    """Says which rung is being measured, and what came of it as soon as it is known."""

    def __init__(self) -> None:
        self.console = Terminal(sys.stderr)
        self.status = self.console.status("")
        self.place = BenchProgress(0, 0, "", "")

    def notice(self, message: str) -> None:
        say(self.console, message, "dim")

    def progress(self, place: BenchProgress) -> None:
        self.place = place
        words = f"{place.rung}: {place.phase}"
        if place.phase == "reference":
            held = "the rung is" if place.total == 1 else f"all {place.total} rungs are"
            words = f"the reference that {held} held against"
        line = f"{_number(place)} {words}"
        if self.console.is_terminal:
            self.status.update(Text(line))
            self.status.start()
        elif place.phase != "timing":  # one line a rung is enough in a file
            say(self.console, line)

    def row(self, row: BenchRow) -> None:
        if row.status == "absent":  # the table lists them together
            return
        what = short_reason(row) if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f} tokens/s"
        over = f"worth {with_error(row.gain or 1, row.error)} in {row.against}"
        if row.group != "without":
            over = f"{with_error(row.gain or 1, row.error)} over {row.against}"
        gain = "" if row.gain is None else f"; {over}: {verdict_of(row)}"
        words = Text.assemble(
            f"{_number(self.place)} {row.rung}: ",
            (_WORDS.get(row.status, row.status), _STYLES[row.status]),
            f", {what}{gain}",
        )
        self.console.print(words, soft_wrap=True)

    def close(self) -> None:
        self.status.stop()


def _number(place: BenchProgress) -> str:
    return f"[{place.number}/{place.total}]"


def print_bench(
    rows: Sequence[BenchRow],
    promised: Sequence[str] = (),
    console: RichConsole | None = None,
    ladder: Sequence[str] = (),
) -> None:
    """The table of a ladder; `ladder` is for `full_set`.

    With `promised`, the totals that the guides claim in words, their claim of each switch is shown too.
    """
    if not rows:
        return
    console = console or Terminal(width_of_files=132)
    say(console, headline(rows), "bold")
    measured = [row for row in rows if row.status != "absent"]
    for group, title in titles(rows, ladder).items():
        part = [row for row in measured if row.group == group]
        if part:
            console.print(Text(f"\n{title}"))
            console.print(_table(part, _columns(measured), with_claims=bool(promised)))
            for row in part:
                if row.reason:
                    say(console, f"  {row.rung}: {short_reason(row, 200)}", "dim")
    missing = [row for row in rows if row.status == "absent"]
    if missing:
        console.print(Text("\nnot measured"))
        for row in missing:
            say(console, f"  {row.rung:<24}{row.reason}", "dim")
    console.print("")
    lines = [*total_lines(rows, ladder), *noise_lines(rows)]
    if promised and measured:
        lines.append(f"the guides promise {'; '.join(promised)} of everything together ({CLAIMS_PAGE})")
    for line in lines:
        say(console, line)


def headline(rows: Sequence[BenchRow]) -> str:
    first = rows[0]
    size = f"{human_count(first.parameters)} parameters, context {first.context:,}"
    commit = "" if first.commit is None else f" ({first.commit})"
    return (
        f"{first.config}: {size}, {first.batch_tokens:,} tokens a step; {first.device}, "
        f"torch {first.torch}, flatout {first.flatout}{commit}"
    )


def with_error(value: float, error: float | None, times: str = "x") -> str:
    """A ratio as it is shown everywhere, such as 1.35x ±4.0%."""
    told = "" if error is None else f" \u00b1{100 * error:.{0 if error >= 0.1 else 1}f}%"
    return f"{value:.{1 if value >= 10 else 2}f}{times}{told}"


def verdict_of(row: BenchRow) -> str:
    """The verdict, and of one that was too noisy what it would have taken."""
    if row.verdict != UNDECIDED[1]:
        return row.verdict
    why = f"{row.pairs} pairs are too few" if row.error is None else f"below {row.error:.0%} nothing is seen"
    return f"{row.verdict} ({why})"


def beside_claim(row: BenchRow) -> str:
    """What the interval of a gain says of the range that is claimed; empty where one of them is missing."""
    if row.gain_low is None or row.gain_high is None or row.claim_low is None or row.claim_high is None:
        return ""
    if row.gain_high < row.claim_low:
        return "less here"
    if row.gain_low > row.claim_high:
        return "more here"
    return "agrees" if row.claim_low <= row.gain_low and row.gain_high <= row.claim_high else "unclear"


def noise_lines(rows: Sequence[BenchRow]) -> list[str]:
    """How noisy the machine was while these rungs were timed, and what that leaves open."""
    compared = [row for row in rows if row.gain is not None and row.verdict]
    if not compared:
        return []
    spread = statistics.median(row.spread or 0.0 for row in compared)
    loads = [row.load for row in rows if row.load is not None]
    load = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    lines = [f"noise: the middle half of a rung's steps lay within {spread:.0%} of each other{load}"]
    errors = [row.error for row in compared if row.error is not None]
    if errors:
        lines[0] += f"; gains are known to \u00b1{100 * statistics.median(errors):.1f}% (median)"
    noisy = [row.rung for row in compared if row.verdict == UNDECIDED[1]]
    if noisy:
        lines.append(f"too noisy to tell: {', '.join(noisy)}. Measure again when the machine has less to do")
    return lines


def full_set(rows: Sequence[BenchRow], ladder: Sequence[str] = ()) -> str | None:
    """The rung that is the full set; None where the top of the ladder was not measured, or nobody can tell.

    `ladder` names the rungs of this kind of device, bottom to top. The last green one is the top if all above it were
    tried, or cannot be had; or if others were measured against it, which is what the full set is there for.
    """
    green = [row.rung for row in rows if row.group == "ladder" and row.status == "green"]
    if not green:
        return None
    last, told = green[-1], {row.rung for row in rows}
    compared = any(row.group != "ladder" and row.gain is not None and row.against == last for row in rows)
    tried = last in ladder and told.issuperset(ladder[ladder.index(last) :])
    return last if compared or tried else None


def titles(rows: Sequence[BenchRow], ladder: Sequence[str] = ()) -> dict[str, str]:
    """What stands above each group of rungs."""
    up = "" if full_set(rows, ladder) is None else ", up to the full set"
    return {group: title + (up if group == "ladder" else "") for group, title in TITLES.items()}


def total_lines(rows: Sequence[BenchRow], names: Sequence[str] = ()) -> list[str]:
    """The factor from the bottom of the ladder to its top, and which rungs beside the ladder are faster still.

    Where the top was not measured, the last rung that was is named instead; `names` is the ladder of `full_set`.
    """
    ladder = [row for row in rows if row.group == "ladder" and row.status == "green"]
    lines: list[str] = []
    top = ladder[-1] if ladder else None
    if top is not None and len(ladder) > 1 and top.factor is not None and ladder[0].rung == "baseline":
        lost = [row.rung for row in rows if row.group == "ladder" and row.status in LOST]
        without = f" without {', '.join(lost)}" if lost else ""
        end = f"the full set{without}" if full_set(rows, names) else f"{top.rung}, the last rung that was measured"
        lines.append(
            f"from the baseline to {end}: {with_error(top.factor, top.factor_error, ' times')} "
            f"({top.tokens_per_second:,.0f} tokens/s)"
        )
    faster = [row for row in rows if (row.group, row.verdict) in (("extra", "faster"), ("without", "slower"))]
    if faster:
        lines.append(f"faster than what it is compared with: {', '.join(row.rung for row in faster)}")
    again = next((row for row in rows if row.rung == "full-again" and row.verdict not in ("", *UNDECIDED)), None)
    if again is not None and again.gain is not None:
        lines.append(
            f"full-again is the full set once more and came out at {with_error(again.gain, again.error)}: "
            "differences no larger than that mean nothing here"
        )
    bad = [row.rung for row in rows if row.status in ("red", "failed")]
    if bad:
        lines.append(f"not green: {', '.join(bad)}")
    return lines


def _columns(rows: Sequence[BenchRow]) -> dict[str, Callable[[BenchRow], str]]:
    """The columns of these rows: where nobody knows a card's peak, or nothing was compiled, there is none for it."""
    seldom = ("MFU", "compile s")
    return {name: cell for name, cell in _CELLS.items() if name not in seldom or any(cell(row) != "-" for row in rows)}


def _table(rows: Sequence[BenchRow], columns: dict[str, Callable[[BenchRow], str]], *, with_claims: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rung", overflow="fold")
    for name in ("parity", *columns):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("verdict", *(("guides claim", "") if with_claims else ())):
        table.add_column(name, overflow="fold")
    for row in rows:
        status = f"{_WORDS.get(row.status, row.status)} {_or_dash(row.parity, '{:.1e}')}"
        told = dict.fromkeys(columns, "-")
        if row.tokens_per_second is not None:
            told = {name: cell(row) for name, cell in columns.items()}
        claim = [row.claim, beside_claim(row)] if with_claims else []
        table.add_row(row.rung, Text(status, _STYLES[row.status]), *told.values(), row.verdict or "-", *claim)
    return table


# The columns of a rung that has a speed.
_CELLS: dict[str, Callable[[BenchRow], str]] = {
    "tokens/s": lambda row: _or_dash(row.tokens_per_second, "{:,.0f}"),
    "ms": lambda row: _or_dash(row.milliseconds, "{:,.1f}"),
    "spread": lambda row: _or_dash(row.spread, "{:.1%}"),
    "MFU": lambda row: _or_dash(row.mfu, "{:.1%}"),
    "peak GiB": lambda row: _or_dash(None if row.peak_bytes is None else row.peak_bytes / 2**30, "{:.2f}"),
    "compile s": lambda row: _or_dash(row.compile_seconds or None, "{:.1f}"),
    "gain": lambda row: "-" if row.gain is None else with_error(row.gain, row.error),
    "factor": lambda row: "-" if row.factor is None else with_error(row.factor, row.factor_error or None),
}


def short_reason(row: BenchRow, most: int = 110) -> str:
    reason = printable(" ".join(row.reason.split()))
    return reason if len(reason) <= most else reason[: most - 3] + "..."


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


_ROW, _TOP, _BOTTOM = 0.27, 1.25, 0.75  # inches
_COLOURS = {"ladder": BLUE, "without": "#7f8c9b", "extra": TEAL}
_UNDECIDED = "#c9d0d8"  # the bar of a gain that may be none
_BESIDE = 1.3  # where the words on the gains end, in widths of their panel
_CLAIM, _CLAIM_EDGE = "#f6d9b0", "#e08a1e"
_HEIGHT = 0.66  # of a bar, in rows
TIMES = "\u00d7"


def draw_bench(
    rows: Sequence[BenchRow],
    path: str | Path,
    ladder: Sequence[str] = (),
    *,
    claims: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the picture of a ladder to `path`, as PNG or SVG by its suffix; rungs the device lacks are left out.

    `ladder` names the rungs of this kind of device, so that it is known whether the full set was measured. With
    `claims`, what the guides claim is drawn too.
    """
    if not claims:
        rows = [dataclasses.replace(row, claim="", claim_low=None, claim_high=None) for row in rows]
    write_picture(path, lambda: _figure(rows, ladder), overwrite=overwrite)


def _figure(rows: Sequence[BenchRow], ladder: Sequence[str]) -> Figure:
    lines = _lines(rows, ladder)
    height = _TOP + _BOTTOM + _ROW * max(len(lines), 3)
    figure = new_figure(13.0, height, dpi=110)
    bottom, tall = _BOTTOM / height, 1 - (_TOP + _BOTTOM) / height
    speed = figure.add_axes((0.17, bottom, 0.36, tall))
    gain = figure.add_axes((0.545, bottom, 0.235, tall))
    for axes in (speed, gain):
        axes.set_ylim(max(len(lines), 3) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=SMALL, colors=FAINT)
    if rows:
        figure.text(0.012, 1 - 0.32 / height, "What each switch is worth", size=15, weight="bold", color=INK)
        figure.text(0.012, 1 - 0.58 / height, printable(headline(rows)), size=SMALL, color=FAINT)
        figure.text(0.012, 1 - 0.80 / height, "; ".join(total_lines(rows, ladder)), size=10.5, color=INK)
    _draw_speeds(speed, lines)
    _draw_gains(gain, lines)
    return figure


def _lines(rows: Sequence[BenchRow], ladder: Sequence[str]) -> list[BenchRow | str]:
    """What stands below each other: rungs, and a title before each group."""
    lines: list[BenchRow | str] = []
    for group, title in titles(rows, ladder).items():
        part = [row for row in rows if row.group == group and row.status != "absent"]
        lines += [title, *part] if part else []
    return lines


def _draw_speeds(axes: Axes, lines: Sequence[BenchRow | str]) -> None:
    axes.set_title("tokens per second while it was timed", size=10, color=INK, loc="left")
    axes.set_yticks(range(len(lines)))
    axes.set_yticklabels(["" if isinstance(line, str) else line.rung for line in lines], size=SMALL, color=INK)
    most = max((row.tokens_per_second or 0.0 for row in lines if not isinstance(row, str)), default=0.0) or 1.0
    axes.set_xlim(0, 1.38 * most)  # room for the words at the end of the longest bar
    axes.xaxis.set_major_formatter(_thousands)
    for place, row in enumerate(lines):
        if isinstance(row, str):
            axes.text(0, place + 0.15, row, size=SMALL, weight="bold", color=FAINT, va="center")
        elif row.tokens_per_second is None:
            words = f"{row.status.replace('_', ' ')}: {short_reason(row, 42)}"
            axes.text(0.01 * most, place, words, size=8, color=RED, va="center")
        else:
            axes.barh(place, row.tokens_per_second, _HEIGHT, color=_COLOURS[row.group])
            factor = "" if row.factor is None else f"  {with_error(row.factor, None, TIMES)}"
            words = f"{row.tokens_per_second:,.0f}{factor}"
            axes.text(row.tokens_per_second + 0.012 * most, place, words, size=8, color=INK, va="center")


def _draw_gains(axes: Axes, lines: Sequence[BenchRow | str]) -> None:
    rows = [row for row in lines if not isinstance(row, str)]
    ends = (end for row in rows for end in (row.gain, row.gain_low, row.gain_high))
    gains = [end for end in ends if end is not None]
    claims = [limit for row in rows for limit in (row.claim_low, row.claim_high) if limit is not None and _drawn(row)]
    low, high = min([0.75, *gains, *claims]), max([2.0, *gains, *claims])
    claimed = any(row.claim for row in rows)
    title = "gain of the switch with its error" + (", and the guides' claim (pale)" if claimed else "")
    axes.set_title(title, size=10, color=INK, loc="left")
    axes.set_xscale("log")
    axes.set_xlim(low / 1.1, high * 1.1)
    marks = (0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 32, 64) if high / low > 4 else (0.5, 0.75, 1, 1.5, 2, 3)
    ticks = [mark for mark in marks if low / 1.1 <= mark <= high * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}\u00d7" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.axvline(1.0, color=INK, linewidth=0.8)
    for place, row in enumerate(lines):
        if isinstance(row, str) or not _drawn(row):
            continue
        if row.claim_low is not None and row.claim_high is not None:
            left, right = sorted((row.claim_low, row.claim_high))
            if right / left < 1.01:
                left, right = left / 1.006, right * 1.006  # one figure, not a range: still visible
            axes.barh(
                place, right - left, _HEIGHT + 0.16, left=left, color=_CLAIM, edgecolor=_CLAIM_EDGE, linewidth=0.6
            )
        # In columns at the panel's right edge, where no bar can run into them.
        beside = axes.get_yaxis_transform()
        if row.gain is not None:
            inks = {"faster": (_COLOURS[row.group], INK), "slower": (RED, RED)}
            bar, ink = inks.get(row.verdict, (_UNDECIDED, FAINT))
            axes.barh(place, abs(row.gain - 1.0), 0.36, left=min(1.0, row.gain), color=bar, zorder=3)
            if row.gain_low is not None and row.gain_high is not None:
                axes.plot((row.gain_low, row.gain_high), (place, place), color=INK, linewidth=0.9, zorder=4)
            words = with_error(row.gain, row.error, TIMES)
            axes.text(
                _BESIDE, place, words, size=8, weight="bold", color=ink, va="center", ha="right", transform=beside
            )
        axes.text(_BESIDE + 0.03, place, row.claim, size=8, color=FAINT, va="center", transform=beside)


def _drawn(row: BenchRow) -> bool:
    """The baseline has no gain, and nobody claimed anything of it."""
    return row.gain is not None or bool(row.claim)


def _thousands(value: float, _place: object) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e3 and math.isfinite(value) else f"{value:g}"
