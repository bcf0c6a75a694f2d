"""The ladder on the terminal: where it is while it runs, and the table at its end.

Contract: what is still going on goes to stderr, the table to stdout; a rung without a speed says why in its place.
"""

import statistics
import sys
from collections.abc import Callable, Sequence

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from flatout.observe.human import human_count, printable
from flatout.observe.terminal import Terminal, say
from flatout.records import BenchProgress, BenchRow

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
