"""A plan for many GPUs as a picture: what a step's time goes into, for each form, and the rate that is left.

Contract: it reads the JSON form of a plan. A form that does not fit says so where its bar would be.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.observe.human import printable
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

_PARTS = (("compute", BLUE), ("update", GREY), ("exposed", ORANGE))
_NAMES = {"compute": "compute", "update": "optimizer update", "exposed": "exposed communication"}
_LINES = {"data": BLUE, "fsdp": TEAL, "hybrid": PURPLE}
_WIDTH = 0.26  # of a bar, where numbers of GPUs are 1 apart


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
    steps, rates = figure.add_axes((0.055, 0.2, 0.6, 0.6)), figure.add_axes((0.72, 0.2, 0.265, 0.6))
    for axes in (steps, rates):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL, colors=FAINT)
        axes.set_xticks(range(len(counts)), [f"{gpus:,}" for gpus in counts])
        axes.set_xlim(-0.5, len(counts) - 0.5)
        axes.grid(axis="y", color="#e7eaee", linewidth=0.8)
        axes.set_axisbelow(True)
    _draw_steps(steps, body, counts)
    _draw_rates(rates, body, counts)
    return figure


def _draw_steps(axes: Axes, body: Mapping[str, Any], counts: list[int]) -> None:
    """Bars of 100%, so that exposed communication can be compared where steps are of very different length."""
    axes.set_title("time of a step", size=10, color=INK, loc="left", pad=18)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20), [f"{share}%" for share in range(0, 101, 20)])
    axes.set_xlabel("GPUs; in each group: " + ", ".join(body["forms"].values()), size=SMALL, color=INK)
    forms = list(body["forms"])
    for row in body["rows"]:
        place = counts.index(row["gpus"]) + (forms.index(row["form"]) - 1) * (_WIDTH + 0.04)
        if not row["fits"]:
            axes.text(place, 2, "does not fit", size=8, color=RED, rotation=90, ha="center", va="bottom")
            continue
        bottom = 0.0
        for part, colour in _PARTS:
            share = 100 * row[f"{part}_seconds"] / row["step_seconds"]
            axes.bar(place, share, _WIDTH, bottom=bottom, color=colour)
            bottom += share
        words, weight = short_seconds(row["step_seconds"]), "bold" if row["auto"] else "normal"
        axes.text(place, 101.5, words, size=7, color=INK, ha="center", va="bottom", weight=weight)
        if row["auto"]:
            axes.text(place, 2, "parallel: auto", size=8, color="white", rotation=90, ha="center", va="bottom")
    handles = [axes.bar(0, 0, color=colour, label=_NAMES[part]) for part, colour in _PARTS]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.03), ncols=3, fontsize=8, frameon=False)


def _draw_rates(axes: Axes, body: Mapping[str, Any], counts: list[int]) -> None:
    axes.set_title("tokens/s of a GPU, of what one alone has", size=10, color=INK, loc="left", pad=18)
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
