"""An ablation: its table and its picture.

An ablation on the terminal: a line for each run as it ends, and the table of what each field is worth.

Contract: it reads the JSON form of a result (`AblateResult.to_json`). A difference is the loss with the change minus
the loss as configured, so a positive one speaks for the value in the config, and so does the verdict "helps".

An ablation as a picture: the difference that each field makes, with its interval, and how it came about.

Contract: it reads the JSON form of a result (`AblateResult.to_json`). To the right of the line at 0 the value in the
config has the lower loss. Intervals that reach over 0 are pale. A difference far beyond the others does not flatten
the rest: it is drawn at the edge, with its number.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from flatout.errors import many
from flatout.observe.human import Terminal, human_count, human_seconds, printable, say
from flatout.observe.picture import (
    BLUE,
    FAINT,
    GREY,
    INK,
    LINE,
    ORANGE,
    PURPLE,
    RED,
    SMALL,
    TEAL,
    Axes,
    Figure,
    drawable,
    new_figure,
    shortened,
    write_picture,
)
from flatout.records import AblateRow

HELPS, HURTS = "helps", "hurts"
_STYLES = {HELPS: "green", HURTS: "bold red"}
_VALUES = ("config", "change")
_SHORT, _LONG = 6, 24  # characters of a value; longer ones are cut
_WIDE = 102  # columns of a terminal that has room for all of the table


def run_line(row: AblateRow, number: int, total: int) -> str:
    """One finished run in one line."""
    name = f"{row.field}={row.changed}" if row.field else "as configured"
    at = ", equal seconds" if row.equal == "seconds" else ""
    told = f"loss {row.loss:.4f}" if row.loss is not None else f"{row.status}: {row.reason}"
    steps = f"after {many(row.steps, 'step')}, {human_seconds(row.whole_seconds)}"
    return printable(f"[{number}/{total}] {name}, seed {row.seed}{at}: {told} {steps}")


def print_ablation(body: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """What each field is worth, at equal tokens and at equal seconds, and how small a difference could be seen."""
    console = Terminal(stream, width_of_files=160)
    say(console, sentence(body))
    for equal in ("tokens", "seconds"):
        rows = ordered(body, equal)
        if rows:
            say(console, "")
            say(console, title(body, equal), "bold")
            console.print(_table(rows, console.width, seconds=equal == "seconds"))
    say(console, "")
    for line in notes(body):
        say(console, line)


def ordered(body: Mapping[str, Any], equal: str) -> list[Mapping[str, Any]]:
    """The effects at equal tokens or seconds, what helps most first; without a difference last."""
    rows = [one for one in body["effects"] if one["equal"] == equal]
    return sorted(rows, key=lambda one: (one["difference"] is None, -(one["difference"] or 0.0)))


def sentence(body: Mapping[str, Any]) -> str:
    if body["loss"] is None:
        return f"{body['config']}: no run of the config as it is has ended yet; on {body['device']}"
    ended = sum(not row["field"] for row in body["rows"])
    spread = "" if body["spread"] is None else f" (standard deviation {body['spread']:.4f})"
    return (
        f"{body['config']} as it is: validation loss {body['loss']:.4f} over "
        f"{many(ended, 'seed')}{spread}, {many(body['steps'], 'step')}, {body['tokens']:,} tokens, "
        f"{_seconds(body['training_seconds'])} of training; on {body['device']}"
    )


def title(body: Mapping[str, Any], equal: str) -> str:
    amount = f"{body['tokens']:,}" if equal == "tokens" else f"{_seconds(body['training_seconds'])} of training steps"
    return f"at equal {equal} ({amount})"


def difference_text(one: Mapping[str, Any]) -> str:
    error = "" if one["half_width"] is None else f" ± {one['half_width']:.4f}"
    return "-" if one["difference"] is None else f"{one['difference']:+.4f}{error}"


def _table(rows: Sequence[Mapping[str, Any]], width: int, *, seconds: bool) -> Table:
    """A narrow terminal goes without the two losses, and cuts the values of fields before anything else."""
    names = ["field", "config", "change", *(["steps"] if seconds else [])]
    names += [*(["loss", "changed"] if width >= _WIDE else []), "difference", "verdict"]
    cells = [_cells(one) for one in rows]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in names}
    room = width - sum(widths[name] for name in names if name not in _VALUES) - 2 * (len(names) - 1)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        left = name in ("field", "verdict", *_VALUES)
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one, cell in zip(rows, cells, strict=True):
        cell |= {name: shortened(cell[name], min(_LONG, max(_SHORT, room // 2))) for name in _VALUES}
        table.add_row(*(printable(cell[name]) for name in names), style=_STYLES.get(one["verdict"], ""))
    return table


def _cells(one: Mapping[str, Any]) -> dict[str, str]:
    def loss(name: str) -> str:
        return "-" if one[name] is None else f"{one[name]:.4f}"

    return {
        "field": one["field"],
        "config": one["configured"],
        "change": one["changed"],
        "steps": f"{one['steps']:,}" if one["pairs"] else "-",
        "loss": loss("loss"),
        "changed": loss("changed_loss"),
        "difference": difference_text(one),
        "verdict": one["reason"].partition(":")[0].replace("_", " ") or one["verdict"] or _without_verdict(one),
    }


def _without_verdict(one: Mapping[str, Any]) -> str:
    return "one pair: no verdict" if one["pairs"] else "not run yet"


def notes(body: Mapping[str, Any]) -> Iterator[str]:
    """What the table means, what it could not have shown, and what is still missing."""
    yield (
        "difference: loss with the change minus loss as configured, over pairs of one seed, with its 95% interval; "
        "helps, hurts: of the value in the config"
    )
    for equal in ("tokens", "seconds"):
        widths = [one["half_width"] for one in body["effects"] if one["equal"] == equal and one["half_width"]]
        if widths:
            spread = f"{min(widths):.4f}" + (f" to {max(widths):.4f}" if max(widths) > 1.05 * min(widths) else "")
            yield (
                f"smallest difference that could be seen at equal {equal}: {spread} (noise of a pair "
                f"{body['noise'][equal]:.4f}, {body['degrees'][equal]:.1f} degrees of freedom)"
            )
    failed = {f"{one['field']}={one['changed']}: {one['reason']}" for one in body["effects"] if one["reason"]}
    yield from sorted(failed)
    for one in body["effects"]:
        if one["verdict"] == HURTS:
            yield (
                f"{one['field']}={one['changed']} instead of {one['configured']} lowered the loss by "
                f"{-one['difference']:.4f} ± {one['half_width']:.4f} at equal {one['equal']}"
            )
    unread = {one["field"] for one in body["effects"] if one["pairs"] and one["difference"] == 0.0}
    if unread:
        yield f"equal to the last digit with and without: {', '.join(sorted(unread))}; does this run use it?"
    if body["loss"] is not None and not body["noise"]:
        way = ": --seeds 2 trains a second one" if len(body["seeds"]) == 1 else ""
        yield f"one pair says nothing of the noise, so there is no verdict{way}"
    if body["left_out"]:
        reasons = dict.fromkeys(body["left_out"].values())
        paths = {why: [path for path, other in body["left_out"].items() if other == why] for why in reasons}
        told = "; ".join(f"{', '.join(those)} ({why})" for why, those in paths.items())
        yield f"left out: {told}; --fields names what to change"
    if body["missing"]:
        yield f"not run yet: {many(body['missing'], 'run')}; the same command goes on with them"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else human_seconds(value)


_COLOURS = {"tokens": BLUE, "seconds": ORANGE}
_LINES = (BLUE, ORANGE, TEAL, PURPLE, RED, GREY)
_LEFT, _RIGHT = 0.28, 0.71  # of the panel of differences: names to the left, verdicts to the right
_CURVES = 6  # fields whose way is drawn: those with the largest differences


def draw_ablation(body: Mapping[str, Any], path: str | Path) -> None:
    """Writes the picture to `path`, as PNG or SVG by its suffix."""
    write_picture(path, lambda: _figure(body))


def _figure(body: Mapping[str, Any]) -> Figure:
    kinds = [equal for equal in ("tokens", "seconds") if ordered(body, equal)]
    names = list(dict.fromkeys(_name(one) for equal in kinds for one in ordered(body, equal)))
    curves = _curves(body)
    below = 3.1 if curves else 0.0
    height = 1.9 + (0.14 + 0.24 * len(kinds)) * len(names) + below
    figure = new_figure(11.0, height, dpi=110)
    heading = drawable(f"What each field of {printable(str(body['config']))[:60]} is worth")
    figure.text(0.012, 1 - 0.36 / height, heading, size=15, weight="bold", color=INK)
    figure.text(0.012, 1 - 0.62 / height, shortened(drawable(sentence(body)), 150), size=SMALL, color=FAINT)
    share = 1 - (1.0 + 0.75 + below) / height
    panel = figure.add_axes((_LEFT, (below + 0.75) / height, _RIGHT - _LEFT, share))
    _draw_differences(panel, body, kinds, names)
    if curves:
        _draw_curves(figure.add_axes((0.08, 0.6 / height, 0.66, 2.1 / height)), curves)
    return figure


def _draw_differences(axes: Axes, body: Mapping[str, Any], kinds: Sequence[str], names: Sequence[str]) -> None:
    limits = _limits([one for one in body["effects"] if one["difference"] is not None])
    axes.axvline(0.0, color=LINE, linewidth=1.2, zorder=1)
    for place, equal in enumerate(kinds):
        shift = (place - (len(kinds) - 1) / 2) * 0.36
        for one in ordered(body, equal):
            _draw_effect(axes, one, names.index(_name(one)) + shift, limits)
        axes.plot([], [], "o-", color=_COLOURS[equal], label=f"at equal {equal}")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, ncols=2, labelcolor=FAINT)
    axes.set_xlim(*limits)
    axes.locator_params(axis="x", nbins=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [shortened(drawable(name), 44) for name in names])
    axes.set_xlabel(
        "loss with the change minus loss as configured\n(right of 0 the value in the config helps)",
        size=SMALL,
        color=INK,
    )
    _dress(axes, "x")


def _draw_effect(axes: Axes, one: Mapping[str, Any], height: float, limits: tuple[float, float]) -> None:
    """One difference with its interval, and the two in words to the right of the panel."""
    sure, (low, high) = one["verdict"] in ("helps", "hurts"), limits
    told = one["reason"] or f"{difference_text(one)}  {one['verdict'] or 'no verdict'}"
    axes.annotate(
        shortened(drawable(told), 44),
        (1.02, height),
        xycoords=("axes fraction", "data"),
        size=SMALL,
        color=INK if sure else FAINT,
        va="center",
    )
    if one["difference"] is None:
        return
    look = {"color": _COLOURS[one["equal"]], "alpha": 1.0 if sure else 0.45}
    if one["half_width"] is not None:
        ends = (one["difference"] - one["half_width"], one["difference"] + one["half_width"])
        inside = [min(max(end, low), high) for end in ends]
        axes.plot(inside, [height, height], linewidth=2.0, solid_capstyle="butt", **look)
    axes.plot([min(max(one["difference"], low), high)], [height], "o", markersize=6, clip_on=False, **look)


def _limits(effects: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Around 0 and most differences with their intervals."""
    reach = sorted(abs(one["difference"]) + (one["half_width"] or 0.0) for one in effects) or [1.0]
    typical = statistics.median(reach)
    most = max([value for value in reach if value <= 6 * typical] or reach) or 1e-3
    return -1.08 * most, 1.08 * most


def _curves(body: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """By field, the mean difference at equal tokens at every evaluation that all its pairs have."""
    plain = {row["seed"]: row["curve"] for row in body["rows"] if not row["field"]}
    found: dict[str, list[tuple[int, float]]] = {}
    for one in sorted(ordered(body, "tokens"), key=lambda one: -abs(one["difference"] or 0.0))[:_CURVES]:
        points: dict[int, list[float]] = {}
        own = [row for row in body["rows"] if _name(row) == _name(one) and row["equal"] == "tokens"]
        for row in own:
            before = {tokens: loss for tokens, _, loss in plain.get(row["seed"], ())}
            for tokens, _, loss in row["curve"]:
                if tokens in before:
                    points.setdefault(tokens, []).append(loss - before[tokens])
        whole = [(tokens, statistics.fmean(at)) for tokens, at in sorted(points.items()) if len(at) == len(own)]
        if len(whole) > 1:
            found[_name(one)] = whole
    return found


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    axes.axhline(0.0, color=LINE, linewidth=1.2, zorder=1)
    for colour, (name, points) in zip(_LINES, curves.items(), strict=False):
        label = shortened(drawable(name), 36)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.4, label=label)
    # The first evaluations differ most and matter least: the last half decides the height of the panel.
    late = [0.0, *(loss for points in curves.values() for _, loss in points[len(points) // 2 :])]
    room = 0.25 * (max(late) - min(late)) or 1e-3
    axes.set_ylim(min(late) - room, max(late) + room)
    axes.xaxis.set_major_formatter(lambda tokens, _: human_count(tokens))
    axes.set_xlabel("tokens", size=SMALL, color=INK)
    axes.set_title("difference over the run, at equal tokens", size=SMALL, color=INK, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False, labelcolor=FAINT)
    _dress(axes, "y")


def _dress(axes: Axes, grid: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.grid(axis=grid, color="#e7eaee", linewidth=0.8)
    axes.set_axisbelow(True)


def _name(one: Mapping[str, Any]) -> str:
    """Of an effect or a row."""
    return f"{one['field']} {one['configured']} \u2192 {one['changed']}"
