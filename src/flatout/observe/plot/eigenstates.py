"""The picture of a run's eigenstate blocks: how far back they look and how fast they turn, by layer, over training.

Idea: a layer has hundreds of states. Over training each layer is the line of its median, in a colour that goes with its
depth; beside it the newest record shows how widely the states of each layer are spread. Horizons and periods are tokens
on logarithmic axes, with the context marked: what is above it is memory that a training sequence cannot fill.

Contract: as in `run`. For runs that have such blocks; any damage in their records leaves gaps or red crosses.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy

from flatout.observe.eigenstates import QUANTILES, LayerHistory, short_tokens
from flatout.observe.picture import BLUE, FAINT, GREY, INK, RED, SMALL, Axes, Figure
from flatout.observe.plot import panels
from flatout.observe.plot.panels import Line, Quantity, draw_panel
from flatout.observe.plot.run import Draw, page_figure, panel_figure
from flatout.observe.plot.series import Curve, RunNumbers

_OF_LINES = "line: median"
_OF_BARS = "bar: all states, middle 80% strong   ·   diamond: at the start"
_HORIZON = Quantity(lambda high: (1.0, "tokens until 1/e is left"), logarithmic_from=0.0)
_PERIOD = Quantity(lambda high: (1.0, "tokens per turn"), logarithmic_from=0.0)
_MAGNITUDE = Quantity(lambda high: (1.0, "|λ|"), logarithmic_from=0.0)
_NEAREST = 1e-12  # to 1, that |λ| is drawn
_MOST_NAMES, _MOST_TICKS = 8, 16
_LOWEST, _HIGHEST = 1e-6, 1e100  # tokens; what lies beyond is drawn as these


def eigenstates_figure(run: RunNumbers) -> Figure:
    """The picture, not yet written."""
    caption = f"{_OF_LINES}   ·   {_OF_BARS}"
    return page_figure(run, "what its states remember", list(EIGENSTATE_PANELS.values()), caption)


def eigenstate_panel_figure(run: RunNumbers, name: str) -> Figure:
    """One of the panels alone."""
    caption = _OF_BARS if name.endswith("-by-layer") else _OF_LINES
    return panel_figure(run, EIGENSTATE_PANELS[name], caption)


def _horizon(axes: Axes, run: RunNumbers) -> None:
    words = run.eigenstates.sentence.removeprefix("eigenstate memory: ")
    context = run.eigenstates.context
    draw_panel(axes, "Memory horizon", _lines(run, "horizon"), _HORIZON, words=words, context=context)


def _magnitude(axes: Axes, run: RunNumbers) -> None:
    from matplotlib.ticker import FuncFormatter

    words = _last(run, "magnitude", lambda value: f"{value:.6g}")
    # On a plain axis all that remembers long would lie on the line of 1: what is drawn is how far |λ| is from it.
    lines = []
    for line in _lines(run, "magnitude"):
        curve = Curve(line.curve.x, numpy.maximum(1.0 - line.curve.y, _NEAREST))
        lines.append(dataclasses.replace(line, curve=curve))
    draw_panel(axes, "|λ|", lines, _MAGNITUDE, words=words, legend=False)
    if any(len(line.curve.values) for line in lines):
        axes.invert_yaxis()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda distance, _: f"{1 - distance:.12g}"))
        axes.set_ylabel("|λ| (logarithmic towards 1)", size=SMALL, color=FAINT)


def _period(axes: Axes, run: RunNumbers) -> None:
    words = _last(run, "period", lambda value: f"{short_tokens(value)} tokens")
    draw_panel(axes, "Period", _lines(run, "period"), _PERIOD, words=words, legend=False)


def _lines(run: RunNumbers, quantity: str) -> list[Line]:
    layers = run.eigenstates.layers
    named = _named(len(layers))
    return [
        Line(run.layer_curve(layer, quantity), colour, f"layer {layer.layer}" if place in named else "")
        for place, (layer, colour) in enumerate(zip(layers, _colours(len(layers)), strict=True))
    ]


def _last(run: RunNumbers, quantity: str, tell: Callable[[float], str]) -> str:
    """The newest medians of all layers, from the lowest to the highest."""
    known = [value for layer in run.eigenstates.layers if (value := layer.last(quantity)) is not None]
    ends = [tell(end(known)) for end in (min, max)] if known else []
    return f"last {' to '.join(dict.fromkeys(ends))}" if ends else ""


def _named(count: int) -> set[int]:
    """Which of so many lines are in the legend: all of a few, else some that are evenly spread, both ends too."""
    if count <= _MOST_NAMES:
        return set(range(count))
    return {round(place * (count - 1) / 4) for place in range(5)}


def _colours(count: int) -> list[str]:
    """Dark to light with depth, so that neighbours look alike and any two can still be told apart."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count == 1:
        return [BLUE]
    return [to_hex(colormaps["viridis"](0.88 * place / (count - 1))) for place in range(count)]


# --- the newest record, layer by layer --------------------------------------------------------------------------------


def _by_layer(axes: Axes, run: RunNumbers, title: str, quantity: str, unit: Quantity) -> None:
    """For each layer from the lowest to the highest state, the middle 80% strong, with the median now and at first."""
    from matplotlib.ticker import MaxNLocator

    layers = run.eigenstates.layers
    last = max((layer.steps[-1] for layer in layers), default=0)
    context = run.eigenstates.context if quantity == "horizon" else None
    panels.draw_frame(axes, title, f"step {last:,}" + ("" if context is None else ", dashed: context"))
    places = numpy.array([layer.layer for layer in layers], dtype=float)
    now = {name: _column(layers, quantity, name, newest=True) for name in QUANTILES}
    then = _column(layers, quantity, "50%", newest=False)
    seen = numpy.concatenate([*now.values(), then, [] if context is None else [context]])
    seen = seen[numpy.isfinite(seen)]
    _, high = panels.set_logarithmic(axes, *((float(seen.min()), float(seen.max())) if len(seen) else (1.0, 10.0)))
    now = {name: numpy.where(numpy.isposinf(column), high, column) for name, column in now.items()}
    axes.set_ylabel(unit.unit(high)[1] + " (logarithmic)", size=SMALL, color=FAINT)
    axes.set_xlabel("layer", size=SMALL, color=FAINT)
    axes.set_xlim(places.min() - 0.6, places.max() + 0.6)
    if len(places) <= _MOST_TICKS:
        axes.set_xticks(places, [f"{place:.0f}" for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(False, axis="x")
    wide = min(9.0, 130.0 / (places.max() - places.min() + 1.2))
    if context is not None:
        panels.draw_context(axes, context, context, zorder=1)
    axes.vlines(places, now["min"], now["max"], color=BLUE, alpha=0.35, linewidth=0.35 * wide)
    axes.vlines(places, now["10%"], now["90%"], color=BLUE, linewidth=wide, zorder=2)
    dot = {"linestyle": "none", "markersize": min(6.5, 0.9 * wide), "markeredgewidth": 0.9, "zorder": 4}
    if any(len(layer.steps) > 1 for layer in layers):
        axes.plot(places, then, marker="D", color="white", markeredgecolor=GREY, **dot)
    axes.plot(places, now["50%"], marker="o", color="white", markeredgecolor=INK, **dot)
    lost = numpy.isnan(numpy.stack(list(now.values()))).any(axis=0)
    if lost.any():
        panels.draw_signs(axes, places[lost], 0.95, "X", 7, RED, rim=("white", 0.6))


def _column(layers: Sequence[LayerHistory], quantity: str, quantile: str, *, newest: bool) -> numpy.ndarray:
    """One value of each layer, NaN where it is not known, and within what can be drawn."""
    found = [(layer.last if newest else layer.first)(quantity, quantile) for layer in layers]
    column = numpy.array([math.nan if value is None else value for value in found], dtype=float)
    return numpy.where(numpy.isfinite(column), numpy.clip(column, _LOWEST, _HIGHEST), column)


EIGENSTATE_PANELS: dict[str, Draw] = {
    "eigenstate-horizon": _horizon,
    "eigenstate-horizon-by-layer": functools.partial(
        _by_layer, title="Horizon by layer", quantity="horizon", unit=_HORIZON
    ),
    "eigenstate-magnitude": _magnitude,
    "eigenstate-period": _period,
    "eigenstate-period-by-layer": functools.partial(
        _by_layer, title="Period by layer", quantity="period", unit=_PERIOD
    ),
}
