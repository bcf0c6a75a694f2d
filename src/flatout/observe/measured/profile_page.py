"""A profile as one page to read: the same blocks as Markdown for the folder and in colour for the terminal.

Idea: the answer stands first (what holds the step, what to try), then the figures that it came from, largest first.

Contract: the page is made of `profile.json` alone, as plain values, so it needs neither torch nor the run. Names of
kernels, paths and messages come from elsewhere: control characters are taken out, and Markdown shows them as code.
"""

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from flatout.observe.human import Terminal, exposed_share, human_bytes, human_count, printable, say, slowest_rank

TOP = 10  # kernels on the page; kernels.csv has all
MOST_RANKS = 16  # on the page
_BAR = 20  # characters for the whole step
_WIDTH_OF_FILES = 100_000  # columns where nobody watches: a file has no right margin
_INDENT = (0, 0, 0, 2)
_NAME = 58  # characters of a kernel's name
_SHOWN = ("precision", "kernels", "compile", "cuda_graphs", "attention", "loss", "checkpointing", "loader", "workers")
_WHAT_IS_IN = {
    "trace.json.gz": "the steps event by event: open it at ui.perfetto.dev or in chrome://tracing",
    "memory_snapshot.json.gz": "every block of the allocator and one step's history, with lines of code",
    "kernels.csv": "all kernels with kind, time, calls and share",
    "profile.json": "every figure of this page, for programs",
    "reading.md": "this page",
}


@dataclasses.dataclass(frozen=True)
class Paragraph:
    text: str
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Bullets:
    """Lines; of each the first part is code, and may be empty."""

    items: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns whose names begin with `>` are numbers and stand on the right; a leading space in a cell is depth."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    code: int | None = None  # the column that holds names of kernels


Block = Paragraph | Heading | Bullets | Table


def page_of(report: Mapping[str, Any], folder: str | None = None) -> list[Block]:
    """The page of a profile's report, which is `profile.json` as Python values."""
    parts = (_answer, _step, _ranks, _rates, _memory, _kernels)
    return [block for part in parts for block in part(report)] + list(_end(report, folder))


def _answer(report: Mapping[str, Any]) -> Iterator[Block]:
    verdict, used = report["verdict"], report["used"]
    size = f"{human_count(report['parameters'])} parameters"
    shape = f"{report['micro_batch']} x {report['context']:,} tokens x {report['accumulation']}"
    where = f" in each of {len(report['ranks']['step_seconds'])} ranks" if report.get("ranks") else ""
    yield Heading(f"{report['config']}: {verdict['bottleneck']}", 1)
    yield Paragraph(verdict["sentence"], "bold")
    yield Bullets(tuple(("", line) for line in verdict["evidence"]))
    yield Heading("Try next")
    yield Bullets(tuple((advice["words"], advice["why"]) for advice in verdict["advice"]))
    yield Heading("What was profiled")
    switches = ", ".join(f"{name} {used[name]}" for name in _SHOWN if name in used)
    lines = [
        f"{size}, {shape} a step{where}, on {report['device']} (torch {report['torch']}, flatout {report['flatout']})",
        f"speed: {switches}",
        *([f"data: {report['data']}"] if report["data"] else []),
        *report["notices"],
    ]
    yield Bullets(tuple(("", line) for line in lines))


def _step(report: Mapping[str, Any]) -> Iterator[Block]:
    cuda, step = report["device_kind"] == "cuda", report["step_seconds"]
    busy = "device busy" if cuda else "in operators"
    gap = "idle: waiting for the host" if cuda else "outside of operators: Python"
    kinds = sorted(report["seconds_by_kind"].items(), key=lambda item: -item[1])
    lines = [
        ("the whole step", step),
        (busy, report["busy_seconds"]),
        *((f"  {kind}", seconds) for kind, seconds in kinds if seconds >= 0.0005 * step),
        ("idle: waiting for data" if cuda else "waiting for data", report["idle_for_data_seconds"]),
        (gap, report["idle_for_host_seconds"]),
    ]
    yield Heading("Where the step's time goes")
    bars = {name: "█" * round(_BAR * min(1.0, max(0.0, seconds / step))) for name, seconds in lines}
    rows = [(name, _ms(seconds, report), f"{seconds / step:.1%}", bars[name]) for name, seconds in lines]
    yield Table(("", "> ms", "> share", " "), tuple(rows))
    how = (
        ": it slows the host down, not the kernels. So the whole step and the waiting are timed without it "
        f"({report['timed_steps']} steps), the kernels with it ({report['profiled_steps']})."
        if cuda
        else f". The shares of operators are measured under it ({report['profiled_steps']} steps) "
        f"and scaled to the step without it ({report['timed_steps']} steps)."
    )
    yield Paragraph(f"Under the profiler a step takes {_ms(report['profiled_step_seconds'], report)} ms{how}")
    clock = "ms on the host, profiled" if cuda else "ms"
    yield Heading("By part of the step")
    rows = [
        (
            "  " * part["depth"] + part["name"],
            *([_ms(part["device_seconds"], report)] if cuda else []),
            _ms(part["host_seconds"], report),
            f"{part['calls']:g}",
        )
        for part in report["ranges"]
    ]
    yield Table(("part", *(["> ms on the device"] if cuda else []), f"> {clock}", "> times a step"), tuple(rows))


def _ranks(report: Mapping[str, Any]) -> Iterator[Block]:
    """How several ranks share the work; nothing for one."""
    ranks = report.get("ranks")
    if not ranks:
        return
    work, waits = ranks["busy_seconds"], ranks["reduction_seconds"]
    count = len(work)
    shown = sorted(sorted(range(count), key=lambda rank: -work[rank])[:MOST_RANKS])
    rows = [
        (
            f"{rank}",
            _ms(ranks["step_seconds"][rank], report),
            _ms(work[rank], report),
            _ms(waits[rank], report),
            f"{exposed_share(waits[rank], work[rank]):.1%}",
        )
        for rank in shown
    ]
    yield Heading("Ranks")
    lines = [f"slowest rank: {slowest_rank(work)}"]
    if ranks["sent_bytes"] is not None:
        sent, reduced = human_bytes(ranks["sent_bytes"]), human_bytes(ranks["reduced_bytes"])
        lines.append(f"gradients of {reduced} a step; each rank sends {sent} of them in a ring")
    if ranks["exposed_seconds"] is not None:
        communication = report["seconds_by_kind"].get("communication", 0.0)
        alone = f"{_ms(ranks['exposed_seconds'], report)} of {_ms(communication, report)} ms"
        lines.append(f"communication with nothing else on rank 0's device: {alone} (under the profiler)")
    if count > MOST_RANKS:
        lines.append(f"the {MOST_RANKS} slowest of {count} ranks; profile.json has all")
    yield Bullets(tuple(("", line) for line in lines))
    yield Table(("rank", "> ms a step", "> at work", "> waiting for gradients", "> share waiting"), tuple(rows))
    yield Paragraph(
        "Means over the steps without the profiler, the whole step as a median. A rank waits for the last "
        "gradients of others after its own backward pass; what was sent before that is hidden."
    )


def _rates(report: Mapping[str, Any]) -> Iterator[Block]:
    peak, mfu, products = report["peak_flops_per_second"], report["mfu"], report["product_flops_per_second"]
    rows = [
        ("tokens per second", f"{report['tokens_per_second']:,.0f}", ""),
        (
            "FLOP/s of the whole step" + (", of one rank" if report.get("ranks") else ""),
            _flops(report["flops_per_second"]),
            "peak not known" if mfu is None else f"MFU {mfu:.1%} of {_flops(peak)}",
        ),
    ]
    if products is not None:
        share = "" if not peak else f"{products / peak:.1%} of the peak"
        rows.append(("FLOP/s in products and attention", _flops(products), share))
    rate, limit = report["update_bytes_per_second"], report["peak_bytes_per_second"]
    if rate is not None:
        share = "the memory's peak is not known" if not limit else f"{rate / limit:.0%} of {limit / 1e12:.2f} TB/s"
        rows.append(("memory bandwidth in the update", f"{rate / 1e12:.2f} TB/s", share))
    what = "kernels" if report["device_kind"] == "cuda" else "operators"
    mean = f"{1e6 * report['mean_kernel_seconds']:.1f} µs each on average"
    rows.append((f"{what} per second", f"{report['kernels_per_second']:,.0f}", mean))
    rows.append((f"{what} per step", f"{report['kernels_per_step']:,.0f}", ""))
    yield Heading("Rates")
    yield Table(("", "> rate", "  "), tuple(rows))


def _memory(report: Mapping[str, Any]) -> Iterator[Block]:
    rows = [(part["name"], _bytes(part["measured"]), _bytes(part["estimated"])) for part in report["memory"]]
    yield Heading("Memory")
    yield Table(("", "> measured", "> estimated before"), tuple(rows))


def _kernels(report: Mapping[str, Any]) -> Iterator[Block]:
    total = sum(report["seconds_by_kind"].values()) or 1.0
    rows = [
        (
            kernel["name"],
            kernel["kind"],
            _ms(kernel["seconds"], report),
            f"{kernel['calls']:,.0f}",
            f"{kernel['seconds'] / total:.1%}",
        )
        for kernel in report["top"][:TOP]
    ]
    what = "kernel" if report["device_kind"] == "cuda" else "operator"
    yield Heading(f"Longest {what}s")
    yield Table((what, "kind", "> ms a step", "> calls", "> share"), tuple(rows), code=0)


def _end(report: Mapping[str, Any], folder: str | None) -> Iterator[Block]:
    yield Heading("Files" if folder is None else f"Files in {folder}")
    names = [*report["files"], *([] if folder is None else ["reading.md"])]
    yield Bullets(tuple((name, _WHAT_IS_IN.get(name, "")) for name in names))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def as_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_inert(block.text)}"
        case Paragraph():
            text = _inert(block.text)
            return f"**{text}**" if block.style == "bold" else text
        case Bullets():
            return "\n".join(f"- {_code(words) + ': ' if words else ''}{_inert(text)}" for words, text in block.items)
        case Table():
            columns = [column.removeprefix(">").strip() for column in block.columns]
            marks = ["---:" if column.startswith(">") else "---" for column in block.columns]
            rows = [[_cell(cell, code=place == block.code) for place, cell in enumerate(row)] for row in block.rows]
            return "\n".join(f"| {' | '.join(row)} |" for row in [columns, marks, *rows])


def _cell(text: str, *, code: bool) -> str:
    depth = len(text) - len(text.lstrip())
    inside = _code(text) if code else "&nbsp;" * 2 * depth + _inert(text.strip())
    return inside.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', chr(39))}`"


def _inert(text: str) -> str:
    """Text that Markdown does not take for HTML or for a link; backticks of our own sentences stay."""
    return _line(text).replace("<", "&lt;").replace("[", "\\[")


# --- terminal ---------------------------------------------------------------------------------------------------------


def print_page(blocks: Sequence[Block], console: RichConsole | None = None) -> None:
    """Prints the page; where nobody watches, without colours, breaks of lines and spaces at their ends."""
    console = console or Terminal()
    if console.is_terminal:
        _print(blocks, console)
        return
    plain = RichConsole(file=io.StringIO(), width=_WIDTH_OF_FILES, highlight=False)
    with plain.capture() as captured:
        _print(blocks, plain)
    for line in captured.get().splitlines():
        say(console, line.rstrip())


def _print(blocks: Sequence[Block], console: RichConsole) -> None:
    for block in blocks:
        match block:
            case Heading():
                if block.level > 1:
                    console.print("")
                say(console, _line(block.text), "bold cyan" if block.level == 1 else "bold")
            case Paragraph():
                console.print(Padding(Text(_line(block.text), "bold" if block.style else "dim"), _INDENT))
            case Bullets():
                for words, text in block.items:
                    shown = Text.assemble((_line(words), "green"), ": " if words else "", _line(text))
                    console.print(Padding(shown, _INDENT))
            case Table():
                console.print(Padding(_rich(block), _INDENT))


def _rich(block: Table) -> RichTable:
    table = RichTable(
        box=None, header_style="dim", pad_edge=False, show_header=any(c.strip("> ") for c in block.columns)
    )
    for column in block.columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">").strip(), justify="right" if right else "left", no_wrap=True)
    for number, row in enumerate(block.rows):
        depth = [len(cell) - len(cell.lstrip()) for cell in row]
        cells = [" " * indent + _line(cell) for indent, cell in zip(depth, row, strict=True)]
        if block.code is not None:
            cells[block.code] = _short(cells[block.code])
        first = number == 0 and block.columns[0] == "" and "whole" in row[0]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if first else "")
    return table


# --- words ------------------------------------------------------------------------------------------------------------


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 20]}…{name[-19:]}"


def _ms(seconds: float | None, report: Mapping[str, Any]) -> str:
    """Milliseconds, with as many decimals as the whole step deserves: a column of them is easier to compare."""
    decimals = 1 if report["step_seconds"] >= 0.1 else 2 if report["step_seconds"] >= 0.005 else 3
    return "-" if seconds is None else f"{1000 * seconds:,.{decimals}f}"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _bytes(size: int | None) -> str:
    return "-" if size is None else human_bytes(size)
