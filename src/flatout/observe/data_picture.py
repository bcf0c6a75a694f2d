"""A prepared dataset on one page: as a picture, and as tables on the terminal.

Idea: the first look at a corpus answers three questions: how long are its documents, what happened to the input, and
which tokens make it up. The picture has one panel for each and the key numbers above them.

Contract: any summary can be drawn, that of one document or with tokens of any script; nothing overlaps, and the same
summary gives the same bytes. Text from data cannot act on the terminal, and in the picture is never taken as a formula.

Trap: bins of whole numbers cannot have equal widths on a logarithmic axis, so plain counts would show steps that are
not in the data. The picture therefore draws counts per doubling of the length, and areas are what can be compared.
"""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from flatout.errors import DataError, ResourceError, UsageError
from flatout.observe.console import _Console, human_bytes, human_count, printable
from flatout.records import DataSummary, SplitSummary, TokenCount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _DPI = 13.0, 8.0, 120
_SANS, _MONOSPACE = "DejaVu Sans", "DejaVu Sans Mono"  # both come with matplotlib
_LEFT = 0.065
_INK, _FAINT = "#22272e", "#6e7781"
_BLUE, _LIGHT_BLUE, _ORANGE, _RED = "#2f6db5", "#8fb8de", "#e08a1e", "#c0392b"
_MOST_REASONS = 9
_MOST_TOKENS = 20
_LONGEST_TOKEN = 16
_LONGEST_REASON = 36
_PROBLEMS_SHOWN = 5
_BLOCKS = "▁▂▃▄▅▆▇█"


def draw_data(summary: DataSummary, path: str | Path) -> None:
    """Write the picture of a dataset to `path`, as PNG or SVG by its suffix."""
    path = Path(path)
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise UsageError(f"a picture cannot be written as {printable(path.name)!r}", "name a .png or .svg file")
    try:
        import matplotlib
    except ImportError as error:
        raise DataError("a picture needs the package matplotlib", "pip install 'flatout[data]'") from error
    content = io.BytesIO()
    # Without the user's own style, and without a date or random names: one summary, one picture.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "flatout", "text.parse_math": False})
        figure = _figure(summary)
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise ResourceError(
            f"could not write the picture {printable(str(path))}: {error.strerror}",
            "name a file in a folder that is there and that you may write to",
        ) from error


def _figure(summary: DataSummary) -> "Figure":
    """The figure, not yet written; it belongs to no window and to no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    _draw_header(figure, summary)
    _draw_lengths(_panel(figure, "How long the documents are", _LEFT, (_LEFT, 0.5, 0.55, 0.3)), summary)
    _draw_records(_panel(figure, "Where the records went", _LEFT, (0.235, 0.1, 0.38, 0.27)), summary)
    tokens = _panel(figure, "Most frequent tokens", 0.675, (0.79, 0.055, 0.19, 0.745))
    _draw_tokens(tokens, summary.top_tokens[:_MOST_TOKENS])
    return figure


def print_data(summary: DataSummary, console: RichConsole | None = None) -> None:
    """Show a dataset on the terminal."""
    console = console or _Console(highlight=False)
    facts = _facts(summary)
    console.print(Text(_one_line(summary.folder), style="bold"))
    console.print(Text(", ".join(facts[:3])))
    console.print(Text(", ".join(facts[3:])))
    console.print()
    console.print(_split_table(summary))
    console.print()
    console.print(_length_table(summary.splits))
    console.print(_sparkline(console, summary))
    console.print()
    _print_report(console, summary)
    console.print()
    console.print(_token_table(console, summary.top_tokens))
    for sample in summary.samples:
        console.print()
        head = f"{sample.split} document {sample.document:,} ({_many(sample.tokens, 'token')})"
        console.print(Text(head, style="bold"))
        console.print(Text(_one_line(sample.text) + ("..." if sample.cut else "")))


def _facts(summary: DataSummary) -> list[str]:
    """The key numbers in words."""
    documents, tokens, text_bytes, disk, shards = (
        sum(getattr(split, name) for split in summary.splits)
        for name in ("documents", "tokens", "text_bytes", "disk_bytes", "shards")
    )
    unused = "all used" if not summary.unused_ids else f"{summary.unused_ids:,} never used"
    return [
        _many(tokens, "token"),
        _many(documents, "document"),
        f"{human_bytes(text_bytes)} of text",
        f"{text_bytes / tokens:.2f} bytes per token",
        f"tokenizer {summary.tokenizer} ({_many(summary.vocab, 'id')}, {unused})",
        f"{_many(shards, 'shard')} of {summary.dtype}, {human_bytes(disk)}",
    ]


def _where_records_went(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(what, records, kind) for each row of the account; kind is kept, dropped or damaged."""
    kept = [(f"kept for {_SPLIT_WORDS.get(name, name)}", count, "kept") for name, count in report["kept"].items()]
    reasons = sorted(report["dropped"].items(), key=lambda pair: (-pair[1], pair[0]))
    dropped = [(f"dropped: {reason.replace('_', ' ')}", count, "dropped") for reason, count in reasons if count]
    if len(dropped) > _MOST_REASONS:
        rest = dropped[_MOST_REASONS - 1 :]
        dropped = dropped[: _MOST_REASONS - 1]
        dropped.append((f"dropped: {len(rest)} other reasons", sum(count for _, count, _ in rest), "dropped"))
    damaged = [("could not be read", report["damaged"], "damaged")] if report["damaged"] else []
    return kept + dropped + damaged


_SPLIT_WORDS = {"train": "training", "val": "validation"}


def _side_notes(summary: DataSummary) -> list[str]:
    report = summary.report
    if report is None:
        return ["This dataset was made without a report, so what was dropped is not known."]
    notes = [f"{_many(report['records'], 'record')} from {_many(report['files'], 'file')}"]
    notes[0] += f", {human_bytes(report['input_bytes'])}"
    if not report["damaged"] and not any(report["dropped"].values()):
        notes.append("nothing was dropped")
    if report["problem_count"]:
        notes.append(f"{_many(report['problem_count'], 'problem')} in problems.jsonl")
    if report["replaced_characters"]:
        notes.append(f"{report['replaced_characters']:,} invalid byte sequences replaced")
    if report["passed_over"]:
        others = sorted(report["passed_over"].items(), key=lambda pair: (-pair[1], pair[0]))
        more = f" and {len(others) - 4} other types" if len(others) > 4 else ""
        notes.append("passed over " + ", ".join(f"{count:,} {_one_line(kind)}" for kind, count in others[:4]) + more)
    return notes


# --- the picture ------------------------------------------------------------------------------------------------------


def _draw_header(figure: "Figure", summary: DataSummary) -> None:
    name = Path(summary.folder).name or summary.folder
    facts = _facts(summary)
    figure.text(_LEFT, 0.955, _drawable(_shortened(name, 70)), size=17, weight="bold", color=_INK, va="center")
    figure.text(_LEFT, 0.915, "   ·   ".join(facts[:4]), size=11.5, color=_INK, va="center")
    figure.text(_LEFT, 0.885, "   ·   ".join([*facts[4:], *_window_words(summary)]), size=10, color=_FAINT, va="center")


def _window_words(summary: DataSummary) -> list[str]:
    train = next((split for split in summary.splits if split.name == "train"), None)
    if train is None or train.windows is None or train.remainder is None:
        return []
    return [f"{_many(train.windows, 'window')} of {summary.context:,} tokens, {train.remainder:,} tokens left over"]


def _draw_lengths(axes: "Axes", summary: DataSummary) -> None:
    documents, tokens = _by_length(summary)
    edges = _drawn_edges(summary.splits[0].edges)
    if len(documents) == 1:  # all of one length: there is no distribution, and a bar says so
        heights, unit = ([100.0], [100.0]), "% of all"
    else:
        widths = [math.log2(high / low) for low, high in itertools.pairwise(edges)]
        heights = [
            [100 * count / width / sum(counts) for count, width in zip(counts, widths, strict=True)]
            for counts in (documents, tokens)
        ]
        unit = "% per doubling of length"
    axes.stairs(heights[0], edges, fill=True, color=_LIGHT_BLUE, label="documents")
    axes.stairs(heights[1], edges, color=_ORANGE, linewidth=1.8, baseline=None, label="tokens in them")
    axes.set_xscale("log")
    axes.set_xlim(edges[0] / 1.06, edges[-1] * 1.06)
    axes.set_ylim(0, 1.12 * max(*heights[0], *heights[1]))
    axes.set_xlabel("tokens in a document", size=10, color=_INK, labelpad=5)
    axes.set_ylabel(unit, size=10, color=_INK)
    _set_length_ticks(axes, edges)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=2, frameon=False, fontsize=10, borderaxespad=0.2,
        labelcolor=_INK, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
    _tidy(axes, keep=("left", "bottom"))


def _by_length(summary: DataSummary) -> tuple[list[int], list[int]]:
    """Documents and tokens by length over all splits, which share their edges."""
    documents = zip(*(split.documents_by_length for split in summary.splits), strict=True)
    tokens = zip(*(split.tokens_by_length for split in summary.splits), strict=True)
    return [sum(counts) for counts in documents], [sum(counts) for counts in tokens]


def _drawn_edges(edges: Sequence[int]) -> list[float]:
    if len(edges) > 2:
        return [float(edge) for edge in edges]
    # One bin may be as narrow as [n, n + 1), which is no width at all on a logarithmic axis.
    middle = math.sqrt(edges[0] * (edges[1] - 0.5))
    return [middle / 1.1, middle * 1.1]


def _set_length_ticks(axes: "Axes", edges: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = edges[0] / 1.06, edges[-1] * 1.06
    doublings = math.log2(high / low)
    steps = (1, 10) if doublings > 20 else (1, 2, 5) if doublings > 2.5 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = sorted({step * 10.0**power for power in powers for step in steps})
    ticks = [tick for tick in ticks if low <= tick <= high and (tick == int(tick))]
    if len(edges) == 2 or len(ticks) < 2:
        ticks = [round(math.sqrt(low * high))]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.set_xticklabels([f"{tick:,.0f}" if tick < 10_000 else human_count(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_records(axes: "Axes", summary: DataSummary) -> None:
    notes = _side_notes(summary)
    axes.set_xticks([])
    if summary.report is None:
        axes.set_yticks([])
        axes.text(_LEFT, 0.35, notes[0], transform=axes.figure.transFigure, size=10.5, color=_FAINT, va="top")
        _tidy(axes, keep=())
        return
    rows = _where_records_went(summary.report)
    colours = {"kept": _BLUE, "dropped": _ORANGE, "damaged": _RED}
    total = summary.report["records"] or 1
    texts = [f"{count:,}   {_percent(count / total)}" for _, count, _ in rows]
    labels = [_drawable(_shortened(what, _LONGEST_REASON)) for what, _, _ in rows]
    _bars(axes, labels, [count for _, count, _ in rows], texts, [colours[kind] for _, _, kind in rows], least_rows=6)
    axes.text(0.0, -0.06, "   ·   ".join(notes), transform=axes.transAxes, size=9.5, color=_FAINT, va="top", ha="left")


def _draw_tokens(axes: "Axes", tokens: Sequence[TokenCount]) -> None:
    labels = [_drawable(_token_label(token), _MONOSPACE) for token in tokens]
    texts = [f"{_percent(token.share)}" for token in tokens]
    _bars(axes, labels, [token.count for token in tokens], texts, [_BLUE] * len(tokens), least_rows=_MOST_TOKENS)
    for label in axes.get_yticklabels():
        label.set_fontfamily(_MONOSPACE)


def _bars(
    axes: "Axes", labels: list[str], values: list[int], texts: list[str], colours: list[str], *, least_rows: int
) -> None:
    """Horizontal bars from the top down, each with its text at its end."""
    places = range(len(values))
    most = max(values) or 1
    axes.barh(places, values, height=0.68, color=colours)
    for place, value, text in zip(places, values, texts, strict=True):
        axes.text(value + 0.012 * most, place, text, size=9.5, color=_INK, va="center")
    axes.set_yticks(list(places), labels, size=9.5, color=_INK)
    axes.set_ylim(max(len(values), least_rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.28 * most)
    axes.set_xticks([])
    _tidy(axes, keep=())


def _panel(figure: "Figure", name: str, left: float, box: tuple[float, float, float, float]) -> "Axes":
    """Axes in `box` (left, bottom, width, height, as shares of the figure), named above from `left` on."""
    figure.text(left, box[1] + box[3] + 0.014, name, size=12.5, weight="bold", color=_INK)
    return figure.add_axes(box)


def _tidy(axes: "Axes", keep: tuple[str, ...]) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color("#b6bcc3")
    axes.tick_params(length=0 if not keep else 3, color="#b6bcc3", labelcolor=_INK, labelsize=9.5)


def _drawable(text: str, family: str = _SANS) -> str:
    """The text with each character that the font lacks as an escape: an empty box would tell nothing."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties(family=[family]))).get_charmap()
    return "".join(
        letter if letter.isprintable() and ord(letter) in glyphs else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _token_label(token: TokenCount) -> str:
    return f"'{_shortened(token.text, _LONGEST_TOKEN)}'" if token.text else f"id {token.id}"


# --- the terminal -----------------------------------------------------------------------------------------------------


def _split_table(summary: DataSummary) -> Table:
    table = _table("split", "documents", "tokens", "text", "bytes/token", "shards", "disk")
    if summary.context is not None:
        table.add_column(f"windows of {summary.context:,}", justify="right")
        table.add_column("left over", justify="right")
    for split in summary.splits:
        cells = [f"{split.documents:,}", f"{split.tokens:,}", human_bytes(split.text_bytes)]
        cells += [f"{split.bytes_per_token:.2f}", f"{split.shards:,}", human_bytes(split.disk_bytes)]
        if split.windows is not None:
            cells += [f"{split.windows:,}", f"{split.remainder:,}"]
        table.add_row(split.name, *cells)
    return table


def _length_table(splits: Sequence[SplitSummary]) -> Table:
    names = list(splits[0].quantiles)
    table = _table("tokens per document", *names)
    for split in splits:
        table.add_row(split.name, *(f"{split.quantiles[name]:,}" for name in names))
    return table


def _sparkline(console: RichConsole, summary: DataSummary) -> Text:
    """The histogram in one line for each of documents and tokens, from the shortest length to the longest."""
    edges = summary.splits[0].edges
    if len(edges) < 4 or not console.encoding.startswith("utf"):
        return Text("")
    lines = []
    for name, counts in zip(("documents", "tokens"), _by_length(summary), strict=True):
        most = max(counts)
        blocks = "".join(" " if not count else _BLOCKS[round(7 * count / most)] for count in counts)
        lines.append(f"{name:>9} {edges[0]:,} {blocks} {edges[-1] - 1:,}")
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _print_report(console: RichConsole, summary: DataSummary) -> None:
    report = summary.report
    if report is not None:
        table = _table("what became of the input", "records", "share")
        total = report["records"] or 1
        for what, count, _ in _where_records_went(report):
            table.add_row(_one_line(what), f"{count:,}", _percent(count / total))
        console.print(table)
    console.print(Text("; ".join(_side_notes(summary))))
    for problem in summary.problems[:_PROBLEMS_SHOWN]:
        place = f", {problem['place']}" if problem["place"] else ""
        console.print(Text(_one_line(f"problem: {problem['file']}{place}: {problem['message']}"), style="yellow"))
    count = report["problem_count"] if report is not None else len(summary.problems)
    if count > _PROBLEMS_SHOWN:
        console.print(Text(f"problem: ... and {count - _PROBLEMS_SHOWN:,} more in problems.jsonl", style="yellow"))


def _token_table(console: RichConsole, tokens: Sequence[TokenCount]) -> Table:
    """The tokens in as many columns as fit, read downwards."""
    cells = [(_token_label(token), _percent(token.share)) for token in tokens]
    width = max(Text(label).cell_len for label, _ in cells) + 10
    columns = max(1, min(5, console.width // width))
    rows = math.ceil(len(cells) / columns)
    table = Table(box=None, padding=(0, 2, 0, 0), title="most frequent tokens", title_justify="left")
    table.show_header = False
    table.title_style = "bold"
    for _ in range(columns):
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    for row in range(rows):
        table.add_row(*(Text(cell) for pair in cells[row::rows] for cell in pair))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


# --- words ------------------------------------------------------------------------------------------------------------


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _percent(share: float) -> str:
    percent = 100 * share
    if percent in (0, 100) or 10 <= percent < 99.95:
        return f"{percent:.0f}%" if percent in (0, 100) else f"{percent:.1f}%"
    return f"{percent:.2f}%" if percent >= 0.01 else "<0.01%"


def _one_line(text: str) -> str:
    return printable(" ".join(text.replace("\n", " \u21b5 ").split()))


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"
