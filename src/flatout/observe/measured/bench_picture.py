"""The ladder as a picture: how fast each rung is, and beside it what its switch brought.

Idea: two panels share one list of rungs. The left one shows tokens per second, the right one the gain on a logarithmic
axis, on which a factor of two up and one down are equally long, with its interval as a line. A gain is coloured only
where its verdict is faster or slower. If asked for, the range that the guides claim is a pale bar behind the gain.

Contract: any rows can be drawn, also none with a speed; a rung without one says why where its bar would be. Nothing
overlaps, and the same rows give the same bytes. A picture that cannot be written leaves the one that is there as it is.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from flatout.observe.human import printable
from flatout.observe.measured.bench_table import headline, short_reason, titles, total_lines, with_error
from flatout.observe.picture import BLUE, FAINT, INK, RED, SMALL, TEAL, Axes, Figure, new_figure, write_picture
from flatout.records import BenchRow

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
