"""A plan for many GPUs: its tables and its picture.

A plan for many GPUs, for people: a row for each form and number of GPUs, then saving and interruptions.

Contract: it reads the JSON form of a plan (`PlanResult.to_json`), so a stored line is shown like a fresh one.

A plan for many GPUs as a picture: what fills a rank's memory in each form, how long a step takes, the rate per GPU.

Contract: it reads the JSON form of a plan. A form that cannot run says so above its bar.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from flatout.observe.human import Terminal, human_bytes, human_count, human_seconds, printable, say
from flatout.observe.picture import (
    BLUE,
    FAINT,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SMALL,
    TEAL,
    Axes,
    Figure,
    new_figure,
    shortened,
    write_picture,
)  # fmt: skip

# What goes first where the terminal is too narrow for everything.
_STEP_EXTRAS = ("between hosts", "hidden", "compute", "sent", "tokens/s/GPU", "micro-batch")
_SAVE_EXTRAS = ("at 2h00m", "at 60s", "at 30m00s", "at 5m00s", "written in", "pause", "form")


def print_plan(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Everything, to stdout unless told otherwise."""
    console = Terminal(stream, width_of_files=180)
    for line in headline(body):
        say(console, line)
    console.print()
    console.print(_table(_steps(body), _STEP_EXTRAS, console.width))
    say(console, "* parallel.form=auto; micro-batch: sequences x micro-batches of a rank; sent: by a rank in a step")
    usable = f"of each card {human_bytes(body['usable_bytes'])} are usable"
    say(console, f"exposed: communication that compute does not hide; {usable}")
    console.print()
    console.print(Text("checkpoints and interruptions"), style="bold")
    console.print(_table(_saves(body), _SAVE_EXTRAS, console.width))
    say(console, f"one interruption in {body['failure_hours']:,.0f} GPU-hours: {body['failure_source']}")
    say(
        console,
        f"goodput: time in steps that are kept; pause: training stands still for a save, of which "
        f"each host writes {body['disk'] / 1e9:g} GB/s",
    )
    console.print()
    for note in body["notes"]:
        say(console, note)
    console.print()
    say(console, body["recommendation"], "bold")


def headline(body: Mapping[str, Any]) -> list[str]:
    """What is planned, and what is assumed of it."""
    name = body["config"] if body["size"] is None else body["size"]
    share = "" if body["mfu"] is None else f", {100 * body['mfu']:.0f}% of the peak rate"
    return [
        f"{name}: {human_count(body['parameters'])} parameters, {body['batch_tokens']:,} tokens a step of context "
        f"{body['context']:,}, on hosts of {body['per_host']} {body['card']}",
        f"one GPU: {body['one_gpu_tokens_per_second']:,.0f} tokens/s{share}; {body['rate_source']}",
        f"inside a host {body['inside'] / 1e9:g} GB/s for each GPU: {body['inside_source']}",
        f"between hosts {body['across'] / 1e9:g} GB/s for each GPU: {body['across_source']}",
    ]


def short_seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.{0 if value >= 0.1 else 1}f} ms"
    return f"{value:.2f} s" if value < 90 else human_seconds(value)


Row = tuple[dict[str, str], str]  # cells by the name of their column, and a style


def _table(rows: Sequence[Row], extras: Sequence[str], width: int) -> Table:
    """The rows with as many columns as there is room for."""
    names = list(dict.fromkeys(name for cells, _ in rows for name in cells))
    needed = {name: max(len(name), *(len(cells.get(name, "")) for cells, _ in rows)) + 2 for name in names}
    for extra in extras:
        if sum(needed[name] for name in names) - 2 > width and extra in names:
            names.remove(extra)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == "form" else "right", no_wrap=True)
    for cells, style in rows:
        table.add_row(*(cells.get(name, "") for name in names), style=style)
    return table


def _steps(body: Mapping[str, Any]) -> list[Row]:
    rows, before = [], None
    for row in body["rows"]:
        first, before = row["gpus"] != before, row["gpus"]
        again = "" if row["checkpointing"] == "none" else f" {row['checkpointing']}"
        unfit = "refused" if row["refused"] else "does not fit"
        cells = {
            "GPUs": f"{row['gpus']:,}" if first else "",
            "form": f"{body['forms'][row['form']]}{' *' if row['auto'] else ''}",
            "micro-batch": f"{row['micro_batch']} x {row['accumulation']}{again}" if row["fits"] else unfit,
            "memory": human_bytes(row["memory_bytes"]),
        }
        if row["fits"]:
            cells |= {
                "sent": human_bytes(row["sent_bytes"]),
                "between hosts": human_bytes(row["crossed_bytes"]),
                "step": short_seconds(row["step_seconds"]),
                "compute": short_seconds(row["compute_seconds"]),
                "exposed": short_seconds(row["exposed_seconds"]),
                "hidden": short_seconds(max(row["communication_seconds"] - row["exposed_seconds"], 0.0)),
                "tokens/s/GPU": f"{row['tokens_per_second']:,.0f}",
                "efficiency": f"{100 * row['efficiency']:.1f}%",
            }
        rows.append((cells, "dim" if not row["fits"] else "bold" if row["auto"] else ""))
    return rows


def _saves(body: Mapping[str, Any]) -> list[Row]:
    rows = []
    for gpus, save in body["saves"].items():
        cells = {
            "GPUs": f"{int(gpus):,}",
            "form": body["forms"][save["form"]],
            "checkpoint": human_bytes(save["checkpoint_bytes"]),
            "pause": short_seconds(save["pause_seconds"]),
            "written in": short_seconds(save["write_seconds"]),
            "interruptions/day": f"{save['interruptions_per_day']:.3g}",
            "best interval": human_seconds(save["best_interval"]),
            "goodput": f"{100 * save['best']:.2f}%",
        }
        shares = sorted((int(interval), share) for interval, share in save["by_interval"].items())
        cells |= {f"at {human_seconds(interval)}": f"{100 * share:.2f}%" for interval, share in shares}
        rows.append((cells, ""))
    return rows


_PARTS = (("weights", BLUE), ("gradients", ORANGE), ("optimizer", GREY), ("activations", TEAL))
_LINES = {"data": BLUE, "hybrid": PURPLE, "fsdp": TEAL}
_WIDTH, _APART = 0.27, 0.32  # of a bar, and from bar to bar, where numbers of GPUs are 1 apart
GIB = 2**30
_TALLEST = 1.3  # of the usable memory: bars that are higher are cut


def draw_plan(body: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    write_picture(path, lambda: _figure(body), overwrite=overwrite)


def _figure(body: Mapping[str, Any]) -> Figure:
    counts = list(dict.fromkeys(row["gpus"] for row in body["rows"]))
    figure = new_figure(max(11.0, 4.5 + 1.9 * len(counts)), 5.8)
    title, *assumed = headline(body)
    figure.text(0.012, 0.945, printable(shortened(title, 120)), size=12.5, weight="bold", color=INK)
    figure.text(0.012, 0.905, printable(shortened(assumed[0], 150)), size=SMALL, color=FAINT)
    advice = textwrap.fill(printable(shortened(body["recommendation"], 480)), int(13 * figure.get_figwidth()))
    figure.text(0.012, 0.015, advice, size=SMALL, color=INK, va="bottom")
    memory, rates = figure.add_axes((0.055, 0.2, 0.6, 0.6)), figure.add_axes((0.72, 0.2, 0.265, 0.6))
    for axes in (memory, rates):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL, colors=FAINT)
        axes.set_xticks(range(len(counts)), [f"{gpus:,}" for gpus in counts])
        axes.set_xlim(-0.5, len(counts) - 0.5)
        axes.grid(axis="y", color="#e7eaee", linewidth=0.8)
        axes.set_axisbelow(True)
    _draw_memory(memory, body, counts)
    _draw_rates(rates, body, counts)
    return figure


def _draw_memory(axes: Axes, body: Mapping[str, Any], counts: list[int]) -> None:
    usable = body["usable_bytes"] / GIB
    axes.set_title("memory of a rank, GiB", size=10, color=INK, loc="left", pad=18)
    axes.set_ylim(0, 1.2 * _TALLEST * usable)
    axes.set_xlabel("GPUs; above each bar: form and time of a step, bold is parallel.form=auto", size=SMALL, color=INK)
    for gpus in counts:
        rows = [row for row in body["rows"] if row["gpus"] == gpus]
        for number, row in enumerate(rows):
            place = counts.index(gpus) + (number - (len(rows) - 1) / 2) * _APART
            _draw_bar(axes, row, body["forms"][row["form"]], place, _TALLEST * usable)
    axes.axhline(usable, color=RED, linewidth=0.9, linestyle="--")
    axes.text(-0.49, 1.01 * usable, f"usable {usable:.0f}", size=7, color=RED, ha="left", va="bottom")
    handles = [axes.bar(0, 0, color=colour, label=part) for part, colour in _PARTS]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.03), ncols=4, fontsize=8, frameon=False)


def _draw_bar(axes: Axes, row: Mapping[str, Any], form: str, place: float, highest: float) -> None:
    bottom = 0.0
    for part, colour in _PARTS:
        size = min(row[f"{part}_bytes"] / GIB, highest - bottom)
        axes.bar(place, size, _WIDTH, bottom=bottom, color=colour, alpha=1.0 if row["fits"] else 0.4)
        bottom += size
    time = short_seconds(row["step_seconds"]) if row["fits"] else "refused" if row["refused"] else "does not fit"
    form = form.replace(" ", "\n")
    words = [form, time] if row["memory_bytes"] / GIB <= highest else [form, time, human_bytes(row["memory_bytes"])]
    colour, weight = INK if row["fits"] else RED, "bold" if row["auto"] else "normal"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}  # over the dashed line
    where = {"ha": "center", "va": "bottom", "zorder": 3}
    axes.text(place, 1.01 * bottom, "\n".join(words), size=7, color=colour, weight=weight, bbox=box, **where)


def _draw_rates(axes: Axes, body: Mapping[str, Any], counts: list[int]) -> None:
    axes.set_title("tokens/s of a GPU, against one GPU alone", size=10, color=INK, loc="left", pad=18)
    axes.set_xlabel("GPUs", size=SMALL, color=INK)
    top = 100.0
    for form, colour in _LINES.items():
        rows = [row for row in body["rows"] if row["form"] == form and row["fits"]]
        points = [(counts.index(row["gpus"]), 100 * row["efficiency"]) for row in rows]
        if points:
            places, shares = zip(*points, strict=True)
            axes.plot(places, shares, color=colour, marker="o", markersize=4, linewidth=1.8, label=body["forms"][form])
            top = max(top, *shares)
    axes.axhline(100, color=INK, linewidth=0.8)
    axes.set_ylim(0, 1.08 * top)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.0f}%")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", fontsize=8, frameon=False)
