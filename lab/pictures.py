"""The pictures of the pages, drawn from the rows beside this file: `python lab/pictures.py`."""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from flatout.errors import many
from flatout.files import write_whole
from flatout.observe import picture
from flatout.observe.plots import LOSS
from flatout.observe.series import Series
from flatout.observe.sheets import figure_of
from flatout.records import BenchRow
from flatout.tuning import ablation, ladder_rows

HERE = Path(__file__).parent
Rows = list[dict[str, Any]]
TIMED = {  # cases of a7f6ad2: colour, name, and how they were trained
    "nanogpt": (picture.FAINT, "nanoGPT, 124M", "AdamW 1.2e-3, cosine, 131,072\ntokens a step, bf16, compiled"),
    "old": (picture.BLUE, "flatout gpt-124m", "trained the same way; RoPE,\nRMSNorm, QK-norm, ReLU²"),
    "modern": (
        picture.ORANGE,
        "flatout modern --size 124m",
        "162M with its untied head;\nNorMuon, 49,152 tokens a step",
    ),
    "record": (picture.TEAL, "flatout record --size 60m", "128M with its value tables;\nNorMuon, 49,152 tokens a step"),
}


def rows_of(name: str, **wanted: Any) -> Rows:
    rows = map(json.loads, (HERE / name).read_text(encoding="utf-8").splitlines())
    return [row for row in rows if all(row[field] == value for field, value in wanted.items())]


def curve_of(points: Any, colour: str, label: str = "") -> picture.Curve:
    series = Series(*numpy.array(points, dtype=float).T, unit="nats per token")
    return picture.Curve(series, colour, label, dots=True)


def time_to_loss(rows: Rows) -> picture.Figure:
    """The settings stand beside the curves; the dashed line is where the baseline ends."""
    curves = {row["case"]: row["curve"] for row in rows}
    figure = picture.new_figure(8.0, 4.3, dpi=200)
    axes = figure.add_axes((0.075, 0.11, 0.57, 0.79))
    lines = [curve_of(curves[case], colour) for case, (colour, *_) in TIMED.items()]
    title = "Validation loss over seconds of training, one H200"
    picture.draw_panel(axes, title, lines, LOSS, "seconds", legend=False)
    axes.set_xlim(0, 108)
    end = curves["nanogpt"][-1][1]
    axes.axhline(end, color=picture.FAINT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    words = f"record passes it after {next(seconds for seconds, loss in curves['record'] if loss < end):.1f} s"
    axes.text(107, end - 0.06, words, size=8, color=picture.FAINT, ha="right", va="top")
    for number, (case, (colour, name, how)) in enumerate(TIMED.items()):
        seconds, loss = curves[case][-1]
        axes.annotate(f"{loss:.2f}", (seconds, loss), (-4, 7), textcoords="offset points", size=picture.SMALL)
        figure.text(0.675, 0.9 - 0.2 * number, name, size=10, weight="bold", color=colour, va="top")
        figure.text(0.675, 0.855 - 0.2 * number, f"{how}\n{loss:.3f} after {seconds:.0f} s", size=8.5, va="top")
    figure.text(0.675, 0.1, "enwik8, two epochs, 52M tokens", size=8, color=picture.FAINT, va="top")
    return figure


def long_learning(rows: Rows) -> picture.Figure:
    figure = picture.new_figure(12.0, 4.3, dpi=110)
    for place, across in enumerate(("tokens", "seconds")):
        lines = [
            curve_of(
                [(point[place], point[2]) for point in row["curve"]],
                colour,
                f"{row['case']}, {row['parameters'] / 1e6:.1f}M, {row['tokens_per_second']:,} tokens/s",
            )
            for row, colour in zip(rows, picture.COLOURS, strict=False)
        ]
        axes = figure.add_axes((0.06 + 0.5 * place, 0.13, 0.42, 0.76))
        title = "Validation loss, context 8,192: the same tokens" if place == 0 else "The same seconds"
        picture.draw_panel(axes, title, lines, LOSS, across, legend=place == 0)
    return figure


def bench(rows: Rows) -> picture.Figure:
    known = {field.name for field in dataclasses.fields(BenchRow)}
    found = [BenchRow(**{name: row[name] for name in row.keys() & known}) for row in rows]
    return figure_of(ladder_rows.picture_of(found, [row.rung for row in found]))


def ablate_record(rows: Rows) -> picture.Figure:
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(f"{row['field']} {row['changed']}", {})[row["seed"]] = row
    plain = {seed: row["loss"] for seed, row in runs.pop(" ").items()}
    judged = ablation.effects({word: [own[seed]["loss"] - plain[seed] for seed in own] for word, own in runs.items()})
    found = []
    for word, one in judged.items():
        first = next(iter(runs[word].values()))
        row = {name: first[name] for name in ("field", "configured", "changed", "steps")}
        unclear = abs(one.mean) - (one.half_width or 0.0) < 1e-4  # losses in the rows are rounded
        row |= {"difference": one.mean, "verdict": ablation.ALIKE if unclear else one.verdict, "reason": ""}
        row |= {"pairs": one.pairs, "half_width": one.half_width, "loss": None, "changed_loss": None, "step_time": None}
        found.append(ablation.FieldEffect(**row))
    mean, seeds = statistics.mean(plain.values()), many(len(plain), "seed")
    line = f"validation loss as it is {mean:.3f}; 60m, 26M tokens, {seeds}, one H200, e456ed6"
    return figure_of(ablation.picture_of("record", line, found))


def hash_of(rows: Rows) -> str:
    """It stands in the picture, so that a test finds one that was drawn from other rows."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


DRAWN: dict[str, tuple[Callable[[Rows], picture.Figure], Rows]] = {
    "time-to-loss-h200.png": (time_to_loss, rows_of("time_to_loss.jsonl", commit="a7f6ad2", seed=1)),
    "long-learning-h200.png": (long_learning, rows_of("long_learning.jsonl")),
    "bench-h200.png": (bench, rows_of("ladder.jsonl", commit="01348df")),
    "ablate-record-h200.png": (ablate_record, rows_of("ablate_record.jsonl", size="60m", commit="e456ed6")),
}


if __name__ == "__main__":
    for name, (draw, rows) in DRAWN.items():
        write_whole(HERE / name, picture.picture_bytes(lambda draw=draw, rows=rows: draw(rows), rows=hash_of(rows)))
