"""A prepared dataset on one page: as a picture, and as tables on the terminal.

Idea: the first look at a corpus answers three questions: how long are its documents, what happened to the input, and
which tokens make it up. The picture has one panel for each and the key numbers above them.

Contract: any summary can be drawn, that of one document or with tokens of any script; nothing overlaps, and the same
summary gives the same bytes. Text from data cannot act on the terminal, and in the picture is never taken as a formula.

Trap: bins of whole numbers cannot have equal widths on a logarithmic axis where numbers are small, and plain counts
would show steps that are not in the data. A bin that is wider than the others is drawn lower: areas can be compared.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from flatout.errors import many
from flatout.observe import picture
from flatout.observe.human import Terminal, human_bytes, human_count, printable
from flatout.observe.picture import BLUE, FAINT, INK, LINE, ORANGE, RED, Axes, Figure, drawable, shortened
from flatout.records import DataSummary, TokenCount

_WIDTH, _HEIGHT = 13.0, 8.0
_SANS, _MONOSPACE = "DejaVu Sans", "DejaVu Sans Mono"  # both come with matplotlib
_LEFT = 0.065
_SMALL = 9.5
_MOST_REASONS = 9
_MOST_TOKENS = 20
_LONGEST_TOKEN = 16
_LONGEST_LABEL = 24  # where escapes stand for letters
_LONGEST_REASON = 36
_PROBLEMS_SHOWN = 5
_SPACE = "\u2423"  # the open box that stands for a space
_BLOCKS = "▁▂▃▄▅▆▇█"


def draw_data(summary: DataSummary, path: str | Path, *, overwrite: bool = False) -> None:
    """Write the picture of a dataset to `path`, as PNG or SVG by its suffix."""
    picture.write_picture(path, lambda: _figure(summary), overwrite=overwrite)


def _figure(summary: DataSummary) -> Figure:
    """The figure, not yet written; it belongs to no window and to no global state."""
    figure = picture.new_figure(_WIDTH, _HEIGHT)
    _draw_header(figure, summary)
    _draw_lengths(_panel(figure, "How long the documents are", (_LEFT, 0.5, 0.55, 0.305)), summary)
    _draw_records(_panel(figure, "Where the records went", (_LEFT, 0.135, 0.55, 0.245)), summary)
    tokens = _panel(figure, "Most frequent tokens", (0.68, 0.05, 0.3, 0.755))
    _draw_tokens(tokens, summary.top_tokens[:_MOST_TOKENS])
    return figure


def print_data(summary: DataSummary, console: RichConsole | None = None) -> None:
    """Show a dataset on the terminal."""
    console = console or Terminal()
    for part in (_about, _splits_and_lengths, _about_records, _about_tokens, _about_samples):
        for item in part(console, summary):
            console.print(item)


def _facts(summary: DataSummary) -> list[str]:
    """The key numbers in words."""
    documents, tokens, text_bytes, disk, shards = (
        sum(getattr(split, name) for split in summary.splits)
        for name in ("documents", "tokens", "text_bytes", "disk_bytes", "shards")
    )
    unused = "all used" if not summary.unused_ids else f"{summary.unused_ids:,} never used"
    return [
        many(tokens, "token"),
        many(documents, "document"),
        f"{human_bytes(text_bytes)} of text",
        f"{text_bytes / tokens:.2f} bytes per token",
        f"tokenizer {summary.tokenizer} ({many(summary.vocab, 'id')}, {unused})",
        f"{many(shards, 'shard')} of {summary.dtype}, {human_bytes(disk)}",
    ]


def _where_records_went(summary: DataSummary, report: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(what, records, kind) for each row of the account; kind is kept, dropped or damaged."""
    counts = dict(report["kept"])
    # The report counts a document that is cut in two where it begins, in training.
    documents = {split.name: split.documents for split in summary.splits}
    cut = 1 if documents.get("val", 0) > counts.get("val", 0) and counts.get("train", 0) else 0
    kept = [("kept for both, cut in two", cut, "kept")] if cut else []
    for name, count in counts.items():
        alone = count - (cut if name == "train" else 0)
        kept += [(f"kept for {_SPLIT_WORDS.get(name, name)}", alone, "kept")] if alone or not cut else []
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
    notes = [f"{many(report['records'], 'record')} from {many(report['files'], 'file')}"]
    notes[0] += f", {human_bytes(report['input_bytes'])}"
    if not report["damaged"] and not any(report["dropped"].values()):
        notes.append("nothing was dropped")
    if report["problem_count"]:
        notes.append(f"{many(report['problem_count'], 'problem')} in problems.jsonl")
    if report["replaced_characters"]:
        notes.append(f"{report['replaced_characters']:,} invalid byte sequences replaced")
    if report["passed_over"]:
        others = sorted(report["passed_over"].items(), key=lambda pair: (-pair[1], pair[0]))
        # Only the suffix is cut, which may be of any length: `.bin (not GPT-2 tokens)` stays whole.
        kinds = [(_one_line(kind).partition(" ("), count) for kind, count in others[:4]]
        words = [f"{count:,} {(name[:20] or 'without suffix') + more + why}" for (name, more, why), count in kinds]
        words += [many(len(others) - 4, "other type")] if len(others) > 4 else []
        notes.append(f"files passed over: {', '.join(words)}")
    return notes


# --- the picture ------------------------------------------------------------------------------------------------------


def _draw_header(figure: Figure, summary: DataSummary) -> None:
    name = Path(summary.folder).name or summary.folder
    facts = _facts(summary)
    figure.text(_LEFT, 0.955, shortened(drawable(name), 70), size=17, weight="bold", color=INK, va="center")
    figure.text(_LEFT, 0.915, "   ·   ".join(facts[:4]), size=11.5, color=INK, va="center")
    figure.text(_LEFT, 0.885, "   ·   ".join([*facts[4:], *_window_words(summary)]), size=10, color=FAINT, va="center")


def _window_words(summary: DataSummary) -> list[str]:
    train = next((split for split in summary.splits if split.name == "train"), None)
    if train is None or train.windows is None or train.remainder is None:
        return []
    return [
        f"{many(train.windows, 'window')} of {summary.context:,} tokens, {many(train.remainder, 'token')} left over"
    ]


def _draw_lengths(axes: Axes, summary: DataSummary) -> None:
    documents, tokens = _by_length(summary)
    edges = _drawn_edges(summary.splits[0].edges)
    widths = [math.log(high / low) for low, high in itertools.pairwise(edges)]
    usual = sorted(widths)[len(widths) // 2]
    heights = [
        [100 * count / sum(counts) * usual / width for count, width in zip(counts, widths, strict=True)]
        for counts in (documents, tokens)
    ]
    highest = max(*heights[0], *heights[1])
    axes.stairs(heights[0], edges, fill=True, color="#8fb8de", label="documents")
    axes.stairs(heights[1], edges, color=ORANGE, linewidth=1.8, baseline=None, label="tokens in them")
    axes.set_xscale("log")
    margin = 1.06 if len(widths) > 1 else 4.0
    axes.set_xlim(edges[0] / margin, edges[-1] * margin)
    axes.set_ylim(0, 1.3 * highest)
    # No ticks where the marks have their names.
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= min(100, 1.05 * highest)])
    _mark(axes, summary.splits[0].quantiles["50%"], "median {:,}", 1.23 * highest)
    if summary.context is not None:
        _mark(axes, summary.context, "context {:,}", 1.11 * highest)
    axes.set_xlabel("tokens in a document", size=10, color=INK, labelpad=5)
    axes.set_ylabel("% in a bar", size=10, color=INK)
    _set_length_ticks(axes)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=2, frameon=False, fontsize=10, borderaxespad=0.2,
        labelcolor=INK, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
    _tidy(axes, keep=("left", "bottom"))


def _mark(axes: Axes, length: int, words: str, height: float) -> None:
    """A vertical line at a length, with its name on the side where there is more room."""
    low, high = axes.get_xlim()
    if not low <= length <= high:
        return
    right = length < math.sqrt(low * high)
    axes.plot([length, length], [0, height * 1.03], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    place = length * (high / low) ** (0.008 if right else -0.008)
    axes.text(place, height, words.format(length), size=_SMALL, color=INK, va="center", ha="left" if right else "right")


def _by_length(summary: DataSummary) -> tuple[list[int], list[int]]:
    """Documents and tokens by length over all splits, which share their edges."""
    documents = zip(*(split.documents_by_length for split in summary.splits), strict=True)
    tokens = zip(*(split.tokens_by_length for split in summary.splits), strict=True)
    return [sum(counts) for counts in documents], [sum(counts) for counts in tokens]


def _drawn_edges(edges: Sequence[int]) -> list[float]:
    if len(edges) > 2:
        return [float(edge) for edge in edges]
    # One bin may be as narrow as [n, n + 1), which is no width at all on a logarithmic axis.
    middle = math.sqrt(edges[0] * (edges[1] - 1))
    return [middle / 1.15, middle * 1.15]


def _set_length_ticks(axes: Axes) -> None:
    from matplotlib.ticker import NullLocator

    low, high = axes.get_xlim()
    doublings = math.log2(high / low)
    steps = (1, 2, 3, 4, 5, 6, 8) if doublings < 3 else (1, 2, 3, 5, 7) if doublings < 6 else (1, 2, 5)
    steps = (1,) if doublings > 16 else steps
    powers = range(max(0, math.floor(math.log10(low))), math.ceil(math.log10(high)) + 1)
    ticks = [tick for power in powers for step in steps if low <= (tick := step * 10**power) <= high]
    if len(ticks) < 2:
        ticks = [max(1, round(math.sqrt(low * high)))]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else human_count(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_records(axes: Axes, summary: DataSummary) -> None:
    from matplotlib.transforms import blended_transform_factory

    notes = [drawable(note) for note in _side_notes(summary)]
    rows = _where_records_went(summary, summary.report) if summary.report is not None else []
    total = sum(count for _, count, _ in rows) or 1
    colours = {"kept": BLUE, "dropped": ORANGE, "damaged": RED}
    bars = [
        (shortened(drawable(what), _LONGEST_REASON), count, f"{count:,}   {_percent(count / total)}", colours[kind])
        for what, count, kind in rows
    ]
    _draw_bars(axes, bars, least_rows=6)
    lines = _wrapped(notes, "   ·   ", 0.55 * _WIDTH)
    below = blended_transform_factory(axes.figure.transFigure, axes.transData)
    place = max(len(rows), 0.2) - 0.35
    axes.text(_LEFT, place, "\n".join(lines), transform=below, size=_SMALL, color=FAINT, va="top", linespacing=1.5)


def _draw_tokens(axes: Axes, tokens: Sequence[TokenCount]) -> None:
    labels = [shortened(drawable(_token_label(token), _MONOSPACE), _LONGEST_LABEL) for token in tokens]
    bars = [(label, token.count, _percent(token.share), BLUE) for label, token in zip(labels, tokens, strict=True)]
    _draw_bars(axes, bars, least_rows=_MOST_TOKENS, family=_MONOSPACE)


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, int, str, str]], *, least_rows: int, family: str = _SANS) -> None:
    """Horizontal bars from the top down within the axes' box: name before it, value, text at its end, and colour."""
    labels, values = [label for label, _, _, _ in bars], [value for _, value, _, _ in bars]
    texts, colours = [text for _, _, text, _ in bars], [colour for _, _, _, colour in bars]
    box = axes.get_position()
    left = max((_inches(label, family) for label in labels), default=0.0) / _WIDTH + 0.008
    right = max((_inches(text, _SANS) for text in texts), default=0.0) / _WIDTH + 0.008
    axes.set_position((box.x0 + left, box.y0, box.width - left, box.height))
    most = max(values, default=0) or 1
    axes.set_xlim(0, most * (box.width - left) / (box.width - left - right))
    places = range(len(values))
    axes.barh(places, values, height=0.68, color=colours)
    for place, value, text in zip(places, values, texts, strict=True):
        axes.annotate(
            text, (value, place), (5, 0), textcoords="offset points", size=_SMALL, color=INK, va="center_baseline"
        )
    axes.set_yticks(list(places), labels, size=_SMALL, color=INK, family=family)
    axes.set_ylim(max(len(values), least_rows) - 0.4, -0.6)
    axes.set_xticks([])
    _tidy(axes, keep=())


def _panel(figure: Figure, name: str, box: tuple[float, float, float, float]) -> Axes:
    """Axes in `box` (left, bottom, width, height, as shares of the figure) with a name above."""
    figure.text(box[0], box[1] + box[3] + 0.016, name, size=12.5, weight="bold", color=INK)
    return figure.add_axes(box)


def _tidy(axes: Axes, keep: tuple[str, ...]) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(LINE)
    axes.tick_params(length=0 if not keep else 3, color=LINE, labelcolor=INK, labelsize=_SMALL)


def _inches(text: str, family: str) -> float:
    """The width of a small text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    # The width of the path leaves out spaces at its ends; a letter at each side holds them. These have straight lines
    # only, so that their corners are as far out as any curve goes.
    framed = TextPath((0, 0), f"|{text}|", size=_SMALL, prop=FontProperties(family=[family]))
    across = framed.vertices[framed.codes != framed.CLOSEPOLY, 0]
    return float(across.max() - across.min()) / 72


def _wrapped(parts: list[str], between: str, most: float) -> list[str]:
    """Parts put together into lines of at most `most` inches, where a single part is not longer than that."""
    lines: list[str] = []
    for part in parts:
        if lines and _inches(lines[-1] + between + part, _SANS) <= most:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


def _token_label(token: TokenCount) -> str:
    """What a token stands for, its spaces visible; that of part of a character is its id."""
    return shortened(token.text.replace(" ", _SPACE), _LONGEST_TOKEN) if token.text else f"(id {token.id})"


# --- the terminal -----------------------------------------------------------------------------------------------------


def _about(console: RichConsole, summary: DataSummary) -> Iterator[RenderableType]:
    facts = _facts(summary)
    yield _text(console, _one_line(summary.folder), "bold")
    yield _text(console, ", ".join(facts[:4]))
    yield _text(console, facts[4])


def _splits_and_lengths(console: RichConsole, summary: DataSummary) -> Iterator[RenderableType]:
    sizes = _table("", *(split.name for split in summary.splits))
    lengths = _table("length in tokens", *(split.name for split in summary.splits))
    rows = {
        "documents": [f"{split.documents:,}" for split in summary.splits],
        "tokens": [f"{split.tokens:,}" for split in summary.splits],
        "text": [human_bytes(split.text_bytes) for split in summary.splits],
        "bytes per token": [f"{split.bytes_per_token:.3f}" for split in summary.splits],
        "shards": [f"{split.shards:,}" for split in summary.splits],
        "disk": [human_bytes(split.disk_bytes) for split in summary.splits],
    }
    if summary.context is not None:
        rows[f"windows of {summary.context:,}"] = [f"{split.windows:,}" for split in summary.splits]
        rows["tokens left over"] = [f"{split.remainder:,}" for split in summary.splits]
    for name, cells in rows.items():
        sizes.add_row(name, *cells)
    for name in summary.splits[0].quantiles:
        lengths.add_row(name, *(f"{split.quantiles[name]:,}" for split in summary.splits))
    yield ""
    yield Columns([sizes, lengths], padding=(0, 1))
    edges = summary.splits[0].edges
    if len(edges) > 3 and _speaks_unicode(console):
        yield ""
        for name, counts in zip(("documents", "tokens"), _by_length(summary), strict=True):
            line = f"{name:>9}  {edges[0]:,} {_sparkline(counts)} {edges[-1] - 1:,}"
            yield Text(line, no_wrap=True, overflow="crop")


def _sparkline(counts: Sequence[int]) -> str:
    most = max(counts)
    return "".join(" " if not count else _BLOCKS[round((len(_BLOCKS) - 1) * count / most)] for count in counts)


def _about_records(console: RichConsole, summary: DataSummary) -> Iterator[RenderableType]:
    report = summary.report
    yield ""
    if report is not None:
        table = _table("where the records went", "records", "share")
        rows = _where_records_went(summary, report)
        total = sum(count for _, count, _ in rows) or 1
        for what, count, _ in rows:
            table.add_row(_text(console, _one_line(what)), f"{count:,}", _percent(count / total))
        yield table
    yield _text(console, "; ".join(_side_notes(summary)))
    for problem in summary.problems[:_PROBLEMS_SHOWN]:
        place = f", {problem['place']}" if problem["place"] else ""
        yield _text(console, _one_line(f"problem: {problem['file']}{place}: {problem['message']}"), "yellow")
    count = report["problem_count"] if report is not None else len(summary.problems)
    if count > _PROBLEMS_SHOWN:
        yield _text(console, f"problem: ... and {count - _PROBLEMS_SHOWN:,} more in problems.jsonl", "yellow")


def _about_tokens(console: RichConsole, summary: DataSummary) -> Iterator[RenderableType]:
    """The most frequent tokens in as many columns as fit, read downwards."""
    cells = [(_text(console, _token_label(token)), Text(_percent(token.share))) for token in summary.top_tokens]
    width = max(label.cell_len for label, _ in cells) + 10
    columns = max(1, min(5, console.width // width))
    rows = math.ceil(len(cells) / columns)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(columns):
        table.add_column(no_wrap=True, overflow="crop")
        table.add_column(justify="right", no_wrap=True, overflow="fold")
    for row in range(rows):
        table.add_row(*(cell for pair in cells[row::rows] for cell in pair))
    yield ""
    yield Text("most frequent tokens", "bold")
    yield table


def _about_samples(console: RichConsole, summary: DataSummary) -> Iterator[RenderableType]:
    for sample in summary.samples:
        yield ""
        yield Text(f"{sample.split} document {sample.document:,}, {many(sample.tokens, 'token')}", "bold")
        yield _text(console, _one_line(sample.text) + ("..." if sample.cut else ""))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    # Folded where it does not fit: the dots of an ellipsis are in no code page, and a cut number is a wrong one.
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _text(console: RichConsole, words: str, style: str = "") -> Text:
    """Words without markup, and with escapes where the terminal's encoding lacks a character."""
    if not _speaks_unicode(console):
        words = words.encode(console.encoding, "backslashreplace").decode(console.encoding)
    return Text(words, style)


def _speaks_unicode(console: RichConsole) -> bool:
    return console.encoding.lower().startswith("utf")


# --- words ------------------------------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    percent = 100 * share
    if percent in (0, 100) or 10 <= percent < 99.95:
        return f"{percent:.0f}%" if percent in (0, 100) else f"{percent:.1f}%"
    return f"{percent:.2f}%" if percent >= 0.01 else "<0.01%"


def _one_line(text: str) -> str:
    return printable(" ".join(text.replace("\n", " \u21b5 ").split()))
