"""A plan for many GPUs as a picture: what fills a rank's memory in each form, how long a step takes, the rate per GPU.

Contract: it reads the JSON form of a plan. A form that cannot run says so above its bar.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.observe.human import human_bytes, printable
from flatout.observe.measured.plan_table import headline, short_seconds
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
