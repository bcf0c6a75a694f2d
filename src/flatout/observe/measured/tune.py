"""What `flatout tune` and `flatout tune lr` show.

What `flatout tune` tries, while it does, and the table it chose from.

A learning-rate range test as a picture and in the terminal: the loss over the rate, suggestions named, one chosen.

Contract: it reads the JSON form of a result (`LrResult.to_json`). The rate is on a logarithmic axis; what lies beyond
the first clear rise was not read and is pale. A loss that blew up at the end does not flatten the rest: the axis ends a
little above the first loss. Labels never lie on each other: each stands on a line of its own above the curve.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from flatout.errors import many
from flatout.observe.human import Terminal, human_seconds, printable, say
from flatout.observe.picture import BLUE, FAINT, INK, RED, SMALL, Axes, Figure, new_figure, write_picture
from flatout.records import TuneProgress, TuneResult, TuneRow

_STATUS = {"fits": "", "over": "no margin", "out_of_memory": "out of memory", "absent": "not here"}


class TuneReader:
    """A live line on stderr where somebody watches, a plain line per trial elsewhere; the table goes to stdout."""

    def __init__(self, stream: TextIO | None = None, progress_stream: TextIO | None = None) -> None:
        self.console = Terminal(progress_stream or sys.stderr, soft_wrap=True)
        self.output = Terminal(stream, width_of_files=160)

    def progress(self, progress: TuneProgress) -> None:
        used = f"{human_seconds(progress.seconds)} of at most {human_seconds(progress.budget)}"
        line = f"trial {progress.number}: {progress.text} ({used})"
        if self.console.is_terminal:
            self.console.redraw(line)
        else:
            say(self.console, line)

    def close(self) -> None:
        self.console.end_line()

    def table(self, rows: Sequence[TuneRow], result: TuneResult | None) -> None:
        """All rows, the fastest first, with the chosen one marked; then in a sentence what was chosen and why then.

        All figures are the search's, so that they compare; what was confirmed of the chosen row stands behind it.
        """
        if not rows:
            return
        chosen = None if result is None else result.chosen.number
        confirmed = result.chosen if result is not None and result.confirmed else None
        best = max((row.tokens_per_second or 0.0 for row in rows if row.status == "fits"), default=0.0)
        table = Table(box=None, header_style="bold", pad_edge=False)
        offloads = any(row.optimizer_offload for row in rows)
        compiles = len({(row.kernels, row.compile) for row in rows}) > 1
        names = ["", "micro-batch", "checkpointing", "loss", *(["kernels", "compile"] if compiles else [])]
        threads = len({row.threads for row in rows}) > 1
        names += [*(["threads"] if threads else []), *(["optimizer"] if offloads else [])]
        names += ["tokens/s", "of best", "ms", "peak GiB", "estimate", ""]
        right = {"micro-batch", "threads", "tokens/s", "of best", "ms", "peak GiB", "estimate"}
        for name in names:
            table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
        for row in sorted(rows, key=lambda row: (row.status != "fits", -(row.tokens_per_second or 0.0))):
            cells = ["*" if row.number == chosen else "", f"{row.micro_batch} x {row.accumulation}", row.checkpointing]
            cells += [row.loss if row.loss == "plain" else f"{row.loss} {row.loss_chunk}"]
            cells += [row.kernels, row.compile] if compiles else []
            cells += [str(row.threads)] if threads else []
            cells += ["host" if row.optimizer_offload else "device"] if offloads else []
            rate = row.tokens_per_second
            told = ["-"] * 3 if rate is None else [f"{rate:,.0f}", f"{rate / best:.1%}" if best else "-"]
            told += [] if rate is None else ["-" if row.milliseconds is None else f"{row.milliseconds:,.1f}"]
            cells += [*told, "-" if row.peak_bytes is None else _gib(row.peak_bytes), _gib(row.estimate_bytes)]
            how = "whole steps" if result is None or result.batch_samples is None else "measured again"
            notes = [
                f"{how}: {confirmed.tokens_per_second or 0.0:,.0f}" if confirmed and row.number == chosen else "",
                _STATUS[row.status],
                "graphs" if row.cuda_graphs else "",
                row.reason if row.status == "absent" else "",
            ]
            cells += [", ".join(note for note in notes if note)]
            table.add_row(*cells, style="bold" if row.number == chosen else "dim" if row.status != "fits" else "")
        self.output.print(table)
        if result is not None:
            # Whoever shows it may break the line: breaks of ours would stay in files, and leave spaces at their ends.
            say(self.output, _sentence(result))
            if result.note:
                say(self.output, f"note: {result.note}")


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f}"


def _sentence(result: TuneResult) -> str:
    row = result.chosen
    threads = "" if row.threads == "auto" else f", threads {row.threads}"
    memory = "" if result.capacity_bytes is None or row.peak_bytes is None else (
        f", {row.peak_bytes / 2**30:.2f} of {result.capacity_bytes / 2**30:.1f} GiB"
    )  # fmt: skip
    return (
        f"chose micro-batch {row.micro_batch} x {row.accumulation}, checkpointing {row.checkpointing}, "
        f"loss {row.loss}{threads}: {row.tokens_per_second or 0.0:,.0f} tokens/s ({_how(result)}){memory}, "
        f"on {result.device}; {many(result.tried, 'trial')} in {human_seconds(result.seconds)} on {result.data}; "
        f"{result.ended}"
    )


def _how(result: TuneResult) -> str:
    """Where the figure of the choice comes from."""
    samples = result.batch_samples is not None
    if not result.confirmed:
        return "of whole steps" if samples else "put together from shorter steps"
    return (
        "of whole steps, measured again"
        if samples
        else "of whole steps; the table's are put together from shorter ones"
    )


def draw_rates(body: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    write_picture(path, lambda: _figure(body), overwrite=overwrite)


def print_rates(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """The suggestions as a table, the chosen one marked, and in a sentence what was done."""
    console = Terminal(stream, width_of_files=160)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "suggestion", "rate", "meaning"):
        table.add_column(name, justify="right" if name == "rate" else "left", no_wrap=True)
    for suggestion in body["reading"]["suggestions"]:
        own = suggestion["name"] == body["reading"]["chosen"]
        cells = ["*" if own else "", suggestion["name"], f"{suggestion['rate']:.1e}", suggestion["meaning"]]
        table.add_row(*cells, style="bold" if own else "")
    console.print(table)
    losses = [float(point["loss"]) for point in body["points"]]
    best = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
    say(
        console,
        f"{len(losses)} steps on {body['device']} in {human_seconds(body['seconds'])}, loss {losses[0]:.3f} to "
        f"{best:.3f} at best; {body['ended']}; the config had {body['before']:g}",
    )
    others = [path for path in body["found"] if path != body["field"]]
    if others:
        say(console, f"rates are those of {body['field']}; {', '.join(others)} rose with it, in the config's ratios")
    for note in body.get("notes", ()):
        say(console, f"note: {note}")


def _figure(body: Mapping[str, Any]) -> Figure:
    figure = new_figure(9.0, 5.6)
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.72))
    figure.text(0.015, 0.945, _title(body), size=15, weight="bold", color=INK)
    for height, line in zip((0.906, 0.872), _sentences(body), strict=True):
        figure.text(0.015, height, printable(line), size=SMALL, color=FAINT)
    _draw_curve(axes, body)
    _draw_suggestions(axes, body)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, colors=FAINT)
    axes.set_xlabel(_axis(body), size=10, color=INK)
    axes.set_ylabel("training loss", size=10, color=INK)
    axes.grid(axis="y", color="#e7eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def _title(body: Mapping[str, Any]) -> str:
    whose = "" if len(body["found"]) == 1 else f" ({body['field']})"  # the table has the others
    return f"Learning rate: {body['rate']:g}{whose}"


def _axis(body: Mapping[str, Any]) -> str:
    return "learning rate" if len(body["found"]) == 1 else f"{body['field']}, with which the other rates rose"


def _sentences(body: Mapping[str, Any]) -> tuple[str, str]:
    count, chosen = len(body["points"]), body["reading"]["chosen"]
    return (
        f"range test of {str(body['config'])[:60]} on {str(body['device'])[:80]}",
        f"{count} steps in {human_seconds(body['seconds'])}, {body['ended']}; chosen by {chosen}, the config had "
        f"{body['before']:g}",
    )


def _draw_curve(axes: Axes, body: Mapping[str, Any]) -> None:
    reading = body["reading"]
    points = [(point["rate"], float(point["loss"])) for point in body["points"]]
    points = [(rate, loss) for rate, loss in points if math.isfinite(loss)]
    rates, losses = [rate for rate, _ in points], [loss for _, loss in points]
    smoothed, read = reading["smoothed"], reading["read"]
    axes.set_xscale("log")
    axes.scatter(rates, losses, s=9, color=FAINT, alpha=0.45, linewidths=0, label="loss of a step")
    axes.plot(rates[:read], smoothed[:read], color=BLUE, linewidth=2.2, label="smoothed")
    if read < len(rates):
        axes.plot(rates[read - 1 :], smoothed[read - 1 :], color=BLUE, linewidth=1.4, alpha=0.35)
        axes.axvspan(rates[read - 1], rates[-1], color="#f3f4f6", zorder=0)
        axes.text(
            1.0, 1.01, "grey: risen for good, not read", size=8, color=FAINT, ha="right", transform=axes.transAxes
        )
    low, first = min(smoothed), smoothed[0]
    top = max([first, *(loss for loss in losses[:read])])
    room = top - low or 1.0
    # A band above the curve is for the names.
    axes.set_ylim(low - 0.08 * room, top + (0.12 + 0.075 * len(reading["suggestions"])) * room)
    axes.set_xlim(rates[0] / 1.15, rates[-1] * 1.15)
    decades = range(math.ceil(math.log10(rates[0]) - 0.01), math.floor(math.log10(rates[-1]) + 0.01) + 1)
    axes.set_xticks([10.0**decade for decade in decades], [f"1e{decade}" if decade else "1" for decade in decades])
    axes.legend(loc="lower left", fontsize=8, frameon=False, labelcolor=FAINT)


def _draw_suggestions(axes: Axes, body: Mapping[str, Any]) -> None:
    reading = body["reading"]
    bottom, top = axes.get_ylim()
    left, right = (math.log10(limit) for limit in axes.get_xlim())
    suggestions = sorted(reading["suggestions"], key=lambda suggestion: suggestion["rate"])
    for place, suggestion in enumerate(suggestions):
        chosen = suggestion["name"] == reading["chosen"]
        colour, rate = (RED if chosen else FAINT), suggestion["rate"]
        height = top - (0.025 + 0.048 * place) * (top - bottom)
        axes.plot(
            [rate, rate], [bottom, height], color=colour, linewidth=1.6 if chosen else 1.0,
            linestyle="-" if chosen else (0, (4, 3)), zorder=1,
        )  # fmt: skip
        words = f"{suggestion['name']}  {rate:.1e}" + ("  (chosen)" if chosen else "")
        # Names run to the side that has room for them, over the lines of the others.
        leftwards = math.log10(rate) > left + 0.72 * (right - left)
        axes.annotate(
            words, (rate, height), xytext=(-5 if leftwards else 5, 0), textcoords="offset points", size=SMALL,
            va="center", ha="right" if leftwards else "left", color=colour, weight="bold" if chosen else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=5,
        )  # fmt: skip
