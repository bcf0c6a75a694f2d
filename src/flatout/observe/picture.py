"""Pictures as files, and the panel that all plots of runs are made of.

`write_picture` writes PNG or SVG by the file's name: the same bytes for the same figure, whole or not at all. Each file
names us as its software (PNG) or creator (SVG), and only a file with that mark is replaced.

`draw_panel` takes a `Quantity` and `Curve`s over steps, tokens or time, and chooses units, limits and logarithmic axes.
Raw values are pale, their smooth line is strong. Limits are those of the usual values, so that one step of compiling
does not flatten the rest: values beyond are triangles at the edge. Any number of points of any size can be drawn. NaN
and infinity are red crosses at the upper edge. Text is never taken as a formula.

Trap: matplotlib computes with values outside the limits too, and 1e300 overflows there, so they are clipped a few
heights of the panel beyond its edge.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from flatout.errors import DataError, ResourceError, UsageError
from flatout.files import check_replaceable, disk_errors, write_whole
from flatout.observe.human import human_count, printable
from flatout.observe.series import Array, Series, smooth, thin_marks, usual_range, window_of
from flatout.rows import shortened as shortened

if TYPE_CHECKING:  # matplotlib is imported only where something is drawn; who draws takes these names from here
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis

# One style for all pictures: these are the light colours of page/report.css. Their ground is white on dark pages too.
INK, FAINT, LINE, GRID, RED = "#1b2129", "#57606b", "#b6bcc3", "#e8ebef", "#b3261e"
COLOURS = ("#0b62b8", "#c4510a", "#0a7d5a", "#8547bd", "#b42d78", "#7d5c00", "#0d7286", "#56606c", "#9aa62a", "#e3b505")
BLUE, ORANGE, TEAL, PURPLE, GREY = *COLOURS[:4], "#8a929b"
SMALL = 9.0
_METADATA = {"png": {"Software": "flatout"}, "svg": {"Creator": "flatout", "Date": None}}
_PNG_MARK = b"tEXtSoftware\0flatout"
_SVG_MARK = b"<dc:title>flatout</dc:title>"


def new_figure(width: float, height: float, dpi: int = 120) -> Figure:
    """A figure of this size in inches that belongs to no window and to no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write_picture(path: str | Path, draw: Callable[[], Figure], *, overwrite: bool = False) -> None:
    """Writes what `draw` makes; with `overwrite`, also in the place of a file that is no picture of ours."""
    path = Path(path)
    shown = printable(str(path))
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise UsageError(f"a picture cannot be written as {printable(path.name)!r}", "name a .png or .svg file")
    content = picture_bytes(draw, form)
    if "\0" in str(path) or not path.parent.is_dir():
        raise ResourceError(
            f"could not write the picture {shown}: there is no such folder", "name a folder that is there"
        )
    check_replaceable(path, is_picture, overwrite=overwrite)
    with disk_errors(f"the picture {shown}", safe=""):
        write_whole(path, content)


def picture_bytes(draw: Callable[[], Figure], form: str = "png", **metadata: str) -> bytes:
    """What `draw` makes, as PNG or SVG, without the user's own style, a date or random names in it."""
    try:
        import matplotlib
    except ImportError as error:
        raise DataError("a picture needs the package matplotlib", "pip install matplotlib") from error
    content = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "flatout", "text.parse_math": False, "text.color": INK})
        draw().savefig(content, format=form, metadata=_METADATA[form] | metadata)
    return content.getvalue()


def is_picture(path: Path) -> bool:
    """Whether `write_picture` wrote this file."""
    with path.open("rb") as file:
        begin = file.read(4096)
    if begin.startswith(b"\x89PNG\r\n\x1a\n"):
        return _PNG_MARK in begin.partition(b"IDAT")[0]
    return begin.startswith(b"<?xml") and _SVG_MARK in begin.partition(b"</metadata>")[0]


def drawable(text: str, family: str = "DejaVu Sans") -> str:
    """The text with each character that the font lacks as an escape, in the place of an empty box."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties(family=[family]))).get_charmap()
    return "".join(
        letter if letter.isprintable() and ord(letter) in glyphs else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


_MOST_POINTS = 3600  # two stretches for every column of dots, each with its lowest and its highest value
_FEW = 40  # points, up to which each one is a dot
_TINY = 1e-30  # what is smaller has no place on a logarithmic axis
_NICE = [1, 2, 2.5, 5, 10]  # between two ticks, times a power of ten
_MARKS = 9  # on an inch; more would touch each other


Units = Sequence[tuple[float, str]]  # of every unit its size and its name


def unit_for(largest: float, units: Units) -> tuple[float, str]:
    return next((unit for unit in units if largest >= unit[0]), units[-1])


@dataclasses.dataclass(frozen=True)
class Quantity:
    """How a panel shows values. `units` are those of its axis: the first whose size is not above the largest value, or
    the last one; without any it is the unit of the series. `words_of` puts a value into words.

    `slack` is as in `usual_range`. Where the highest value is more than `logarithmic_from` times the lowest, the axis
    is logarithmic.
    """

    units: Units = ()
    slack: float = math.inf
    from_zero: bool = False
    logarithmic_from: float = math.inf
    words_of: Callable[[float], str] = lambda value: short_number(float(f"{value:.3g}"))
    limits: tuple[float, float] | None = None  # in the place of those by `slack`


@dataclasses.dataclass(frozen=True)
class Curve:
    """One curve. `smoothed` ones are drawn pale with their mean on top, or with `raw` off by the mean alone."""

    series: Series
    colour: str
    label: str = ""
    smoothed: bool = False
    raw: bool = True
    dots: bool = False
    style: str = "-"
    best: bool = False  # a star at the lowest point
    look: str = "line"  # or dots, crosses or steps


@dataclasses.dataclass(frozen=True)
class Marks:
    """Steps at which something happened: at the lower edge, or as lines from bottom to top, of which one is named."""

    places: Array
    label: str
    colour: str
    marker: str = ""  # a line where empty


def draw_panel(
    axes: Axes,
    title: str,
    lines: Sequence[Curve],
    quantity: Quantity,
    across: str = "step",
    *,
    logarithmic: bool = False,
    marks: Sequence[Marks] = (),
    words: str = "",
    legend: bool = True,
    beside: Sequence[Curve] = (),
    context: int | None = None,
) -> None:
    """Draws everything into `axes`; `words` stand above its right end, and lines `beside` share its horizontal axis.

    That is step, tokens or seconds, and `logarithmic` only where there are ten times as many at its end as at its
    beginning. The `context` is a dashed line to hold the others against, always within the limits.
    """
    draw_frame(axes, title, words)
    lines = [dataclasses.replace(line, series=_drawable(line.series)) for line in lines if len(line.series.x)]
    places = numpy.concatenate([line.series.x for line in (*lines, *beside)] or [numpy.zeros(0)])
    logarithmic = logarithmic and len(places) > 0 and places.min() > _TINY and places.max() >= 10 * places.min()
    stretch = _set_horizontal(axes, places if len(places) else numpy.zeros(1), across, logarithmic=logarithmic)
    if not lines:
        _say(axes, "not recorded")
        axes.set_xticks([])
        return
    divisor = _set_vertical(axes, lines, quantity, context)
    for line in lines:
        scaled = dataclasses.replace(line.series, x=line.series.x / stretch, y=line.series.y / divisor)
        _draw_line(axes, dataclasses.replace(line, series=scaled), lambda value: quantity.words_of(divisor * value))
    if context is not None:
        draw_context(axes, context, context / divisor, zorder=2)
    for kind in marks:
        _draw_marks(axes, kind, kind.places / stretch)
    if not any(len(line.series.values) for line in lines):
        _say(axes, "no finite value")
    if legend:
        _draw_legend(axes)


def _drawable(series: Series) -> Series:
    """Values that are not finite as NaN, and room for sums and units."""
    y = numpy.where(numpy.isfinite(series.y), numpy.clip(series.y, -1e300, 1e300), numpy.nan)
    return dataclasses.replace(series, y=y)


def draw_frame(axes: Axes, title: str, words: str = "") -> None:
    """What all panels look like."""
    # Without `y`, matplotlib measures every label of the panel to find the place of its title.
    axes.set_title(title, loc="left", y=1.0, size=11.5, weight="bold", color=INK, pad=7)
    axes.set_title(words, loc="right", y=1.0, size=SMALL, color=FAINT, pad=7)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    axes.tick_params(length=3, color=LINE, labelcolor=INK, labelsize=SMALL)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_context(axes: Axes, context: int, height: float, zorder: int) -> None:
    dashes = (0, (5, 3))
    axes.axhline(height, color=INK, linewidth=1.1, linestyle=dashes, zorder=zorder, label=f"context {context:,}")


# --- units ------------------------------------------------------------------------------------------------------------


def time_unit(seconds: float) -> tuple[float, str]:
    """Divisor and name of the unit for a time of this length."""
    for limit, divisor, name in ((4 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (180, 60, "minutes")):
        if seconds >= limit:
            return float(divisor), name
    return 1.0, "seconds"


def short_number(value: float, _place: object = None) -> str:
    """A tick's text: thousands as k, millions as M, and no more digits than needed."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 10_000:
        text = human_count(size)
        return f"-{text}" if value < 0 else text
    return f"{value:,.6g}"


# --- axes -------------------------------------------------------------------------------------------------------------


def _set_horizontal(axes: Axes, places: Array, across: str, *, logarithmic: bool) -> float:
    """Limits and ticks; returns what places are divided by."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = float(places.min()), float(places.max())
    stretch, unit = 1.0, ""
    if across == "seconds":
        stretch, unit = time_unit(math.sqrt(low * high) if logarithmic else high)
    names = {"tokens": "tokens seen", "seconds": f"training time, {unit}"}
    axes.set_xlabel(names.get(across, across) + (" (logarithmic)" if logarithmic else ""), size=SMALL, color=FAINT)
    low, high = low / stretch, high / stretch
    if logarithmic:
        axes.set_xscale("log")
        margin = (high / low) ** 0.02
        axes.set_xlim(low / margin, high * margin)
        set_logarithmic_ticks(axes.xaxis)
        return stretch
    if across in names or 0 < low < 0.1 * high:
        low = min(low, 0.0)
    margin = 0.015 * (high - low) or max(1.0, 0.05 * abs(high))
    axes.set_xlim(low - (margin if low or high <= 0 or low == high else 0.3 * margin), high + margin)
    whole = across != "seconds" and bool((places % 1 == 0).all())
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=_NICE, integer=whole))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    return stretch


def _set_vertical(axes: Axes, lines: Sequence[Curve], quantity: Quantity, context: int | None) -> float:
    """Limits and ticks; returns what values are divided by."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values, slack = [line.series.values for line in lines], quantity.slack
    if _is_logarithmic(axes):  # what is usual depends on the room it takes, and the beginning takes most of it
        values, slack = [_evenly_in_logarithm(line.series) for line in lines], min(slack, 0.5)
    ranges = [found for array in values if (found := usual_range(array, slack)) is not None]
    ranges += [] if context is None else [(float(context), float(context))]
    ranges = ranges if quantity.limits is None else [quantity.limits]
    low, high = min((pair[0] for pair in ranges), default=0.0), max((pair[1] for pair in ranges), default=1.0)
    logarithmic = low > _TINY and high / low > quantity.logarithmic_from
    if quantity.from_zero and not logarithmic:
        low = min(low, 0.0)
    divisor, name = unit_for(high, quantity.units or [(1.0, lines[0].series.unit)])
    axes.set_ylabel(name + (" (logarithmic)" if logarithmic else ""), size=SMALL, color=FAINT)
    low, high = low / divisor, high / divisor
    if logarithmic:
        set_logarithmic(axes, low, high)
        return divisor
    least = 1e-2 * max(abs(low), abs(high)) or 1.0  # a line that is flat looks flat
    if high - low < least:
        middle = (high + low) / 2
        low, high = middle - least / 2, middle + least / 2
    margin = 0.07 * (high - low)
    axes.set_ylim(low if quantity.from_zero and low == 0 else low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=_NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))
    return divisor


def _evenly_in_logarithm(series: Series, count: int = 400) -> Array:
    """Values at places that are evenly spaced on a logarithmic axis."""
    finite = numpy.isfinite(series.y) & (series.x > 0)
    if not finite.any():
        return series.y[finite]
    x = numpy.log10(series.x[finite])
    return numpy.interp(numpy.linspace(x[0], x[-1], count), x, series.y[finite])


def _is_logarithmic(axes: Axes) -> bool:
    return axes.get_xscale() == "log"


def set_logarithmic(axes: Axes, low: float, high: float) -> tuple[float, float]:
    """A logarithmic vertical axis with some room around these values; returns its limits."""
    axes.set_yscale("log")
    margin = max((high / low) ** 0.06, 1.04)
    low, high = low / margin, high * margin
    axes.set_ylim(low, high)
    set_logarithmic_ticks(axes.yaxis)
    return low, high


def set_logarithmic_ticks(axis: "Axis", form: Callable[[float], str] = short_number) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 6 else (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _place: form(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


# --- what is drawn ----------------------------------------------------------------------------------------------------


_LOOKS: dict[str, dict[str, Any]] = {
    "dots": {"linestyle": "", "marker": "o", "markersize": 4.5},
    "crosses": {"linestyle": "", "marker": "x", "markersize": 6},
    "steps": {"drawstyle": "steps-post", "linewidth": 1.2},
}


def _draw_line(axes: Axes, line: Curve, words_of: Callable[[float], str]) -> None:
    drawn = curve = line.series
    low, high = axes.get_ylim()
    window = window_of(len(curve.x)) if line.smoothed else 1
    strong: dict[str, Any] = {"color": line.colour, "linestyle": line.style, "linewidth": 1.7, "zorder": 3}
    if window > 1:
        if line.raw:
            _plot(axes, curve, color=line.colour, alpha=0.28, linewidth=0.8)
        drawn = dataclasses.replace(curve, y=smooth(numpy.clip(curve.y, low, high), window))
    elif line.look != "line":
        strong |= _LOOKS[line.look]
    elif line.dots or len(curve.x) <= _FEW:
        strong |= {"marker": "o", "markersize": 3.5}
    drawn = _plot(axes, drawn, label=line.label, **strong)
    # A point between two that are not finite is a dot: a line through one point cannot be seen.
    finite = numpy.concatenate(([False], numpy.isfinite(drawn.y), [False]))
    lonely = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    if lonely.any() and line.look == "line":
        axes.plot(drawn.x[lonely], drawn.y[lonely], "o", color=line.colour, markersize=3.5, zorder=4)
    if line.best and len(curve.values):
        place = int(numpy.nanargmin(curve.y))
        axes.plot(
            curve.x[place : place + 1], numpy.clip(curve.y[place : place + 1], low, high), "*", color=line.colour,
            markersize=13, markeredgecolor="white", markeredgewidth=0.8, zorder=5, clip_on=False,
            label=f"lowest {line.label}" if line.label else "",
        )  # fmt: skip
    _draw_edges(axes, line, words_of)


def _plot(axes: Axes, series: Series, **look: Any) -> Series:
    """Draws at most a few points for each column of dots, none far outside the panel; returns these."""
    low, high = axes.get_ylim()
    thin = series.thinned(_MOST_POINTS, logarithmic=_is_logarithmic(axes))
    far = 5 * (high - low)
    limits = (low / 1e3, high * 1e3) if axes.get_yscale() == "log" else (low - far, high + far)
    drawn = dataclasses.replace(thin, y=numpy.clip(thin.y, *limits))
    axes.plot(drawn.x, drawn.y, **look)
    return drawn


def _draw_edges(axes: Axes, line: Curve, words_of: Callable[[float], str]) -> None:
    """A triangle for what is beyond the limits, a cross for what is no number."""
    curve, named = line.series, bool(line.label)
    low, high = axes.get_ylim()
    with numpy.errstate(invalid="ignore"):
        above, below = curve.y > high, curve.y < low
    for beyond, marker, height in ((above, "^", 0.985), (below, "v", 0.015)):
        if beyond.any():
            extreme = curve.y[beyond].max() if marker == "^" else curve.y[beyond].min()
            words = f"{line.label} off the scale, {'up' if marker == '^' else 'down'} to {words_of(float(extreme))}"
            draw_signs(axes, curve.x[beyond], height, marker, 5, line.colour, words if named else "")
    if len(curve.bad):
        words = f"{line.label}: {_times(len(curve.bad), 'NaN or infinite')}" if named else ""
        rim = ("white", 0.6) if named else (line.colour, 1.8)
        draw_signs(axes, curve.bad, 0.95, "X", 7 if named else 9, RED, words, rim)


def draw_signs(
    axes: Axes,
    places: Array,
    height: float,
    marker: str,
    size: float,
    colour: str,
    label: str = "",
    rim: tuple[str, float] = ("white", 0.5),
) -> None:
    """Small signs at one height of the panel, as many as do not touch each other."""
    places = _apart(axes, places)
    axes.plot(
        places, numpy.full(len(places), height), linestyle="none", marker=marker, markersize=size, color=colour,
        markeredgecolor=rim[0], markeredgewidth=rim[1], transform=axes.get_xaxis_transform(), clip_on=False, zorder=6,
        label=label,
    )  # fmt: skip


def _draw_marks(axes: Axes, kind: Marks, places: Array) -> None:
    low, high = axes.get_xlim()
    places = places[numpy.isfinite(places) & (places >= low) & (places <= high)]
    if len(places) and kind.marker:
        draw_signs(axes, places, 0.025, kind.marker, 6, kind.colour, _times(len(places), kind.label))
    elif len(places):
        # Resumes are explained in the caption.
        label = "" if kind.colour == FAINT else kind.label
        look: dict[str, Any] = {
            "colors": kind.colour,
            "linewidth": 1.0,
            "linestyle": (0, (4, 3)),
            "zorder": 2,
            "label": label,
        }
        axes.vlines(_apart(axes, places), 0, 1, transform=axes.get_xaxis_transform(), **look)


def _apart(axes: Axes, places: Array) -> Array:
    """As many of these places as marks fit beside each other."""
    most = int(_MARKS * _inches(axes)[0])
    return thin_marks(places, *axes.get_xlim(), most, logarithmic=_is_logarithmic(axes))


def _inches(axes: Axes) -> tuple[float, float]:
    figure = axes.get_figure(root=True)
    assert figure is not None
    box = axes.get_window_extent()
    return box.width / figure.dpi, box.height / figure.dpi


def _draw_legend(axes: Axes) -> None:
    """Names, where there is more than one, where they cover least of the lines."""
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(reversed(labels), reversed(handles), strict=True))  # of equal names, the first
    if len(named) < 2:
        return
    ordered = list(dict.fromkeys(labels))
    columns = 2 if _inches(axes)[0] > 6 and len(ordered) > 4 else 1
    axes.legend(
        [named[label] for label in ordered], ordered, loc="best", ncols=columns, fontsize=8, labelcolor=INK,
        framealpha=0.85, edgecolor="none", borderpad=0.3, handlelength=1.6, borderaxespad=0.8,
    ).set_zorder(8)  # fmt: skip


def _say(axes: Axes, words: str) -> None:
    axes.set_yticks([])
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", size=11, color=FAINT)


def _times(count: int, label: str) -> str:
    return label if count == 1 else f"{label} ({count:,})"
