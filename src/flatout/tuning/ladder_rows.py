"""The rows of a ladder as a sheet and a picture: how fast each rung is, the gain of its switch, and the verdict.

Contract: any rows can be shown, also none with a speed; a rung without one says why in its place. A gain is drawn in
colour only where its verdict is faster or slower.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from flatout.records import BenchProgress, BenchRow
from flatout.rows import (
    BAD,
    OWN,
    Bar,
    BarPanel,
    Block,
    Heading,
    Picture,
    ResultRow,
    Sentence,
    Sheet,
    Table,
    human_count,
    or_dash,
)

TITLES = {
    "ladder": "one switch at a time",
    "without": "each one taken out of the full set (gain: what it is worth there)",
    "extra": "what the full set leaves out, each added to it alone",
}
LOST = ("red", "failed", "out_of_memory")  # a switch this device has, but the ladder went on without
UNDECIDED = ("no difference seen", "too noisy to tell")
_WORDS = {"out_of_memory": "no memory"}
_TIMES = "\u00d7"


def progress_line(place: BenchProgress) -> str:
    words = f"{place.rung}: {place.phase}"
    if place.phase == "reference":
        held = "the rung is" if place.total == 1 else f"all {place.total} rungs are"
        words = f"the reference that {held} held against"
    return f"[{place.number}/{place.total}] {words}"


def row_line(row: BenchRow, place: BenchProgress) -> str:
    """What came of a rung, as soon as it is known."""
    found = short_reason(row) if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f} tokens/s"
    if row.gain is not None:
        gain = with_error(row.gain or 1, row.error)
        over = f"worth {gain} in" if row.group == "without" else f"{gain} over"
        found += f"; {over} {row.against}: {verdict_of(row)}"
    return f"[{place.number}/{place.total}] {row.rung}: {_WORDS.get(row.status, row.status)}, {found}"


def sheet_of(rows: Sequence[BenchRow], ladder: Sequence[str] = ()) -> Sheet:
    """The table of a ladder; `ladder` is for `full_set`."""
    measured = [row for row in rows if row.status != "absent"]
    # Where the peak of a card is not known, or nothing was compiled, there is no column for it.
    columns = {
        name: cell
        for name, cell in _CELLS.items()
        if name not in ("MFU", "compile s") or any(cell(row) != "-" for row in measured)
    }
    blocks: list[Block] = [Sentence(headline(rows), OWN)]
    for group, title in titles(rows, ladder).items():
        shown = [_row(row, columns) for row in measured if row.group == group]
        if shown:
            blocks += [Heading(title), Table(rows=shown, names="rung")]
    missing = [row for row in rows if row.status == "absent"]
    if missing:
        blocks += [Heading("not measured"), *(Sentence(f"  {row.rung:<24}{row.reason}", "faint") for row in missing)]
    lines = ["", *total_lines(rows, ladder), *noise_lines(rows)]
    return Sheet(blocks=[*blocks, *map(Sentence, lines)], width=150)


def _row(row: BenchRow, columns: dict[str, Callable[[BenchRow], str]]) -> ResultRow:
    cells = {"parity": f"{_WORDS.get(row.status, row.status)} {or_dash(row.parity, '{:.1e}')}"}
    cells |= {name: "-" if row.tokens_per_second is None else cell(row) for name, cell in columns.items()}
    return ResultRow(
        name=row.rung,
        cells=cells,
        value=row.gain,
        interval=interval_of(row),
        verdict=verdict_of(row) or "-",
        reason=short_reason(row, 200),
        tone=BAD if row.status in ("red", "failed") else "",
    )


# The columns of a rung that has a speed.
_CELLS: dict[str, Callable[[BenchRow], str]] = {
    "tokens/s": lambda row: or_dash(row.tokens_per_second, "{:,.0f}"),
    "ms": lambda row: or_dash(row.milliseconds, "{:,.1f}"),
    "spread": lambda row: or_dash(row.spread, "{:.1%}"),
    "MFU": lambda row: or_dash(row.mfu, "{:.1%}"),
    "peak GiB": lambda row: or_dash(None if row.peak_bytes is None else row.peak_bytes / 2**30, "{:.2f}"),
    "compile s": lambda row: or_dash(row.compile_seconds or None, "{:.1f}"),
    "gain": lambda row: "-" if row.gain is None else with_error(row.gain, row.error),
    "factor": lambda row: "-" if row.factor is None else with_error(row.factor, row.factor_error or None),
}


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
    known = "" if error is None else f" \u00b1{100 * error:.{0 if error >= 0.1 else 1}f}%"
    return f"{value:.{1 if value >= 10 else 2}f}{times}{known}"


def interval_of(row: BenchRow) -> tuple[float, float] | None:
    return None if row.gain_low is None or row.gain_high is None else (row.gain_low, row.gain_high)


def verdict_of(row: BenchRow) -> str:
    """The verdict with the interval of the gain that led to it; of one that was too noisy, why."""
    if row.verdict == UNDECIDED[1]:
        why = f"{row.pairs} pairs are too few" if row.error is None else f"below {row.error:.0%} nothing is seen"
        return f"{row.verdict} ({why})"
    interval = interval_of(row)
    if not row.verdict or interval is None:
        return row.verdict
    return f"{row.verdict} ({with_error(interval[0], None, '')} to {with_error(interval[1], None)})"


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
    """The rung that is the full set; None where the top of the ladder was not measured, or that is not known.

    `ladder` names the rungs of this kind of device, bottom to top. The last green one is the top if all above it were
    tried, or cannot be had; or if others were measured against it, which is what the full set is there for.
    """
    green = [row.rung for row in rows if row.group == "ladder" and row.status == "green"]
    if not green:
        return None
    last, measured = green[-1], {row.rung for row in rows}
    compared = any(row.group != "ladder" and row.gain is not None and row.against == last for row in rows)
    tried = last in ladder and measured.issuperset(ladder[ladder.index(last) :])
    return last if compared or tried else None


def titles(rows: Sequence[BenchRow], ladder: Sequence[str] = ()) -> dict[str, str]:
    """The title above each group of rungs."""
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


def short_reason(row: BenchRow, most: int = 110) -> str:
    reason = " ".join(row.reason.split())
    return reason if len(reason) <= most else reason[: most - 3] + "..."


# --- the picture ------------------------------------------------------------------------------------------------------


def picture_of(rows: Sequence[BenchRow], ladder: Sequence[str] = ()) -> Picture:
    """How fast each rung is, and beside it the gain of its switch; rungs that the device lacks are left out.

    The gain is on a logarithmic axis, on which a factor of two up and one down are equally long.
    """
    names: list[str | Heading] = []
    speeds: list[Bar] = []
    gains: list[Bar] = []
    for group, title in titles(rows, ladder).items():
        part = [row for row in rows if row.group == group and row.status != "absent"]
        names += [Heading(title)] if part else []
        for row in part:
            speeds.append(_speed_bar(row, len(names)))
            gains += _gain_bars(row, len(names))
            names.append(row.rung)
    ends = [end for row in rows for end in (row.gain, row.gain_low, row.gain_high)]
    known = [end for end in ends if end is not None and math.isfinite(end)]
    limits = (min([0.75, *known]) / 1.1, max([2.0, *known]) * 1.1)
    title = "gain of the switch with its interval"
    panels = [
        BarPanel(title="tokens per second while it was timed", bars=speeds, form=human_count),
        BarPanel(title=title, bars=gains, limits=limits, at=1.0, log=True, form="{:g}\u00d7".format),
    ]
    lines = [headline(rows), "; ".join(total_lines(rows, ladder))] if rows else []
    return Picture(title="What each switch is worth", lines=lines, names=names, bars=panels)


def _speed_bar(row: BenchRow, line: int) -> Bar:
    if row.tokens_per_second is None:
        return Bar(line=line, words=f"{row.status.replace('_', ' ')}: {short_reason(row, 42)}", colour="red")
    colour = {"ladder": "blue", "without": "grey"}.get(row.group, "teal")
    factor = "" if row.factor is None else f"  {with_error(row.factor, None, _TIMES)}"
    return Bar(line=line, parts=[(row.tokens_per_second, colour)], words=f"{row.tokens_per_second:,.0f}{factor}")


def _gain_bars(row: BenchRow, line: int) -> Iterator[Bar]:
    if row.gain is None:
        return
    yield Bar(
        line=line,
        dot=row.gain,
        interval=interval_of(row),
        words=with_error(row.gain, row.error, _TIMES),
        colour={"faster": "teal", "slower": "red"}.get(row.verdict, "grey"),
        pale=row.verdict not in ("faster", "slower"),
    )
