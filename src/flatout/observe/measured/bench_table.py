"""The ladder on the terminal: where it is while it runs, and the table at its end.

Contract: what is still going on goes to stderr, the table to stdout; a rung without a speed says why in its place.
"""

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
ROUGH = 0.25  # a spread from which on a gain is marked: its steps lie too far apart to say much
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
        gain = "" if row.gain is None else f", {row.gain:.2f}x {'worth' if row.group == 'without' else row.against}"
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
    rough = rough_rungs(rows)
    for group, title in titles(rows, ladder).items():
        part = [row for row in measured if row.group == group]
        if part:
            console.print(Text(f"\n{title}"))
            with_mfu = any(row.mfu is not None for row in measured)
            console.print(_table(part, rough, with_mfu=with_mfu, with_claims=bool(promised)))
            for row in part:
                if row.reason:
                    say(console, f"  {row.rung}: {short_reason(row, 200)}", "dim")
    missing = [row for row in rows if row.status == "absent"]
    if missing:
        console.print(Text("\nnot measured"))
        for row in missing:
            say(console, f"  {row.rung:<24}{row.reason}", "dim")
    console.print("")
    lines = total_lines(rows, ladder)
    if rough:
        lines.append(
            f"~ one side of this gain has a spread above {ROUGH:.0%}: measure again on a machine that is idle otherwise"
        )
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


def rough_rungs(rows: Sequence[BenchRow]) -> set[str]:
    """The rungs whose gain hangs on steps that lay far apart, their own or those of the rung it is over."""
    noisy = {row.rung for row in rows if row.spread is not None and row.spread > ROUGH}
    return {row.rung for row in rows if row.gain is not None and (row.rung in noisy or row.against in noisy)}


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
    """The factor from the bottom of the ladder to its top, and to the fastest rung if that is another one.

    Where the top was not measured, the last rung that was is named instead; `names` is the ladder of `full_set`.
    """
    ladder = [row for row in rows if row.group == "ladder" and row.status == "green"]
    lines: list[str] = []
    if len(ladder) > 1 and ladder[-1].factor is not None and ladder[0].rung == "baseline":
        top, base = ladder[-1], ladder[0]
        lost = [row.rung for row in rows if row.group == "ladder" and row.status in LOST]
        without = f" without {', '.join(lost)}" if lost else ""
        end = f"the full set{without}" if full_set(rows, names) else f"{top.rung}, the last rung that was measured"
        lines.append(
            f"from the baseline to {end}: {top.factor:.1f} times "
            f"({base.tokens_per_second:,.0f} to {top.tokens_per_second:,.0f} tokens/s)"
        )
    measured = [row for row in rows if row.tokens_per_second]
    fastest = max(measured, key=lambda row: row.tokens_per_second or 0.0, default=None)
    if fastest is not None and ladder and fastest is not ladder[-1]:
        lines.append(f"the fastest rung is {fastest.rung}: {fastest.tokens_per_second:,.0f} tokens/s")
    again = next((row.gain for row in rows if row.rung == "full-again" and row.gain is not None), None)
    if again is not None and not 0.97 < again < 1.03:
        lines.append(
            f"the full set measured again came out at {again:.2f}x: gains no further from 1 than that are noise"
        )
    bad = [row.rung for row in rows if row.status in ("red", "failed")]
    if bad:
        lines.append(f"not green: {', '.join(bad)}")
    return lines


def _table(rows: Sequence[BenchRow], rough: set[str], *, with_mfu: bool, with_claims: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rung", overflow="fold")
    columns = {name: cell for name, cell in _CELLS.items() if with_mfu or name != "MFU"}
    for name in ("parity", *columns):
        table.add_column(name, justify="right", overflow="fold")
    if with_claims:
        table.add_column("guides claim", overflow="fold")
    for row in rows:
        status = f"{_WORDS.get(row.status, row.status)} {_or_dash(row.parity, '{:.1e}')}"
        told = dict.fromkeys(columns, "-")
        if row.tokens_per_second is not None:
            told = {name: _or_dash(value(row), form) for name, (value, form) in columns.items()}
            told["gain"] = ("~" if row.rung in rough else "") + told["gain"]
        claim = [row.claim] if with_claims else []
        table.add_row(row.rung, Text(status, _STYLES[row.status]), *told.values(), *claim)
    return table


# The columns of a rung that has a speed: value and form.
_CELLS: dict[str, tuple[Callable[[BenchRow], float | None], str]] = {
    "tokens/s": (lambda row: row.tokens_per_second, "{:,.0f}"),
    "ms": (lambda row: row.milliseconds, "{:,.1f}"),
    "spread": (lambda row: row.spread, "{:.1%}"),
    "MFU": (lambda row: row.mfu, "{:.1%}"),
    "peak GiB": (lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**30, "{:.2f}"),
    "compile s": (lambda row: row.compile_seconds or None, "{:.1f}"),
    "gain": (lambda row: row.gain, "{:.2f}x"),
    "factor": (lambda row: row.factor, "{:.2f}x"),
}


def short_reason(row: BenchRow, most: int = 110) -> str:
    reason = printable(" ".join(row.reason.split()))
    return reason if len(reason) <= most else reason[: most - 3] + "..."


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
