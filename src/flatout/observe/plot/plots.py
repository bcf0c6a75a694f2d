"""A run as pictures and tables: what it learned, how it ran, and how it compares with other runs.

Idea: two pictures per run. `metrics` shows how it ran: learning rate, throughput, memory, gradient norm, parameter norm
and step time. `results` shows what it learned: loss over steps, tokens and time. Several runs share one picture, with a
table of names as its legend. A run with eigenstate blocks has a third picture, `eigenstates`: what they remember. The
numbers lie beside as CSV, so that everything can be drawn again in another way.

Contract: needs no torch and opens no window. Every run that can be read can be drawn, also one that is still going on.
Files are whole or not there. Runs are drawn from at most a few thousand points each, however long they are.

Several runs in one picture: losses over steps, tokens and time, throughput, and a table of names as the legend.

Contract: any number of runs of any lengths and names. Each has a colour, and after ten of them another kind of line;
the table names as many as fit. Where one run is many times as long as another, the axes are logarithmic, so that both
can be seen. Runs whose losses cannot be compared are drawn all the same, with a line that says so.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from flatout.errors import UsageError
from flatout.files import check_replaceable, disk_errors
from flatout.folders import make_folders, remove_empty
from flatout.observe.human import human_count, printable
from flatout.observe.picture import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    PURPLE,
    SMALL,
    TEAL,
    Axes,
    Figure,
    drawable,
    is_picture,
    new_figure,
    write_picture,
)
from flatout.observe.plot.panels import Line, Quantity, draw_panel
from flatout.observe.plot.run import (
    EIGENSTATE_PANELS,
    HEIGHT,
    LOSS,
    PANELS,
    THROUGHPUT,
    WIDE,
    draw_title,
    eigenstate_panel_figure,
    eigenstates_figure,
    fitted,
    loss_text,
    metrics_figure,
    panel_figure,
    results_figure,
    spent_on,
)
from flatout.observe.plot.series import EIGENSTATES as EIGENSTATES_TABLE
from flatout.observe.plot.series import EVALS, STEPS, Curve, RunNumbers, is_table, write_tables
from flatout.observe.sinks import distinct_names, read_history

_COLOURS = (BLUE, ORANGE, TEAL, PURPLE, "#c94f7c", "#8c6d46", "#5f6b76", "#9aa62a", "#38b0c9", "#e3b505")
_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MOST_NAMES = 22
_FAR_APART = 20  # times as long
_SPEEDS = dataclasses.replace(THROUGHPUT, logarithmic_from=30)
_WORDS = {"step": "steps", "tokens": "tokens", "seconds": "time"}
Look = tuple[str, Any]


def comparison_figure(runs: Sequence[RunNumbers]) -> Figure:
    """The picture, not yet written."""
    figure = new_figure(WIDE, HEIGHT)
    facts = "lines are means over neighbouring steps   ·   a star is a run's best validation loss"
    draw_title(figure, f"{len(runs):,} runs compared", facts, _warning(runs), warning=True)
    grid = figure.add_gridspec(
        2, 4, left=0.054, right=0.985, top=0.835, bottom=0.075, wspace=0.22, hspace=0.38, width_ratios=(1, 1, 1, 1.2)
    )
    looks: list[Look] = [(_COLOURS[place % 10], _STYLES[place // 10 % 3]) for place in range(len(runs))]
    pairs = list(zip(runs, looks, strict=True))

    panels: list[tuple[Any, str, list[Line], Quantity, str, list[Line]]] = []
    for column, (kind, word) in enumerate(_WORDS.items()):
        training = [_line(run.curve("loss", kind), look, smoothed=True) for run, look in pairs]
        validation = [_line(run.eval_curve(kind), look, smoothed=False) for run, look in pairs]
        panels.append((grid[0, column], f"Training loss over {word}", training, LOSS, kind, []))
        panels.append((grid[1, column], f"Validation loss over {word}", validation, LOSS, kind, training))
    speeds = [_line(run.curve("tokens_per_second"), look, smoothed=True) for run, look in pairs]
    panels.append((grid[0, 3], "Throughput", speeds, _SPEEDS, "step", []))
    for cell, title, lines, quantity, kind, beside in panels:
        axes, far = figure.add_subplot(cell), _far_apart(beside or lines)
        draw_panel(axes, title, lines, quantity, kind, logarithmic=far, legend=False, beside=beside)
    _draw_names(figure.add_subplot(grid[1, 3]), runs, looks)
    return figure


def _line(curve: Curve, look: Look, *, smoothed: bool) -> Line:
    dots = not smoothed and len(curve.x) <= 60
    return Line(curve, look[0], style=look[1], smoothed=smoothed, raw=False, best=not smoothed, dots=dots)


def _far_apart(lines: Sequence[Line]) -> bool:
    ends = [float(line.curve.x[-1]) for line in lines if len(line.curve.x)]
    return bool(ends) and 0 < _FAR_APART * min(ends) <= max(ends)


def _draw_names(axes: Axes, runs: Sequence[RunNumbers], looks: Sequence[Look]) -> None:
    """The legend: name, best validation loss, throughput and time of each run."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    shown = len(runs) if len(runs) <= _MOST_NAMES else _MOST_NAMES - 1
    rows = max(9, min(len(runs), _MOST_NAMES) + 1)
    size = SMALL if rows <= 15 else 7.0
    axes.set_ylim(rows - 0.5, -0.7)
    room = 0.38 * WIDE * axes.get_position().width  # inches, between a name's beginning and the next column
    ends = (0.63, 0.8, 1.0)
    axes.text(0.1, 0, "run", size=size, color=FAINT, va="center")
    for place, words in zip(ends, ("best val", "tokens/s", "time"), strict=True):
        axes.text(place, 0, words, size=size, color=FAINT, ha="right", va="center")
    for row, (run, look) in enumerate(zip(runs[:shown], looks, strict=False), start=1):
        axes.plot([0.0, 0.08], [row, row], color=look[0], linestyle=look[1], linewidth=2.2)
        axes.text(0.1, row, fitted(drawable(run.name), size, room), size=size, color=INK, va="center")
        best, speeds = run.best(), run.curve("tokens_per_second").values
        cells = (
            "" if best is None else loss_text(best["loss"]),
            "" if not len(speeds) else human_count(float(numpy.median(speeds))),
            spent_on(run),
        )
        for place, words in zip(ends, cells, strict=True):
            axes.text(place, row, words, size=size, color=INK, ha="right", va="center")
    if shown < len(runs):
        axes.text(0.1, shown + 1, f"and {len(runs) - shown:,} more", size=size, color=FAINT, va="center")


def _warning(runs: Sequence[RunNumbers]) -> str:
    """What forbids a comparison of losses, if something does."""
    for field, words in (("tokenizer", "tokenizers"), ("vocab", "vocabularies"), ("dataset", "data")):
        told = {str(run.info.get(field)) for run in runs}
        if field == "tokenizer":
            told.discard("model")  # a fine-tuned model's own, which may be any of the others
        if len(told) > 1:
            return f"these runs have different {words}: a lower loss need not mean a better model"
    return ""


METRICS, RESULTS, EIGENSTATES, COMPARISON, FOLDER = "metrics", "results", "eigenstates", "comparison", "plots"


def write_run_plots(
    folder: Path,
    *,
    out: Path | None = None,
    form: str = "png",
    tables: bool = True,
    each: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Draws the run in `folder`, by default into its own `plots` folder; returns the files written.

    With `each`, every panel is a picture of its own as well. With `overwrite`, files that are not ours are replaced.
    """
    target = folder / FOLDER if out is None else out
    places = [target / name for name in (STEPS, EVALS, EIGENSTATES_TABLE)]
    names = picture_names(each=each)
    check_places([target / f"{name}.{form}" for name in names] + (places if tables else []), overwrite=overwrite)
    run = RunNumbers(read_history(folder))
    pictures: dict[str, Callable[[], Figure]] = {
        METRICS: lambda: metrics_figure(run),
        RESULTS: lambda: results_figure(run),
        **{name: lambda draw=draw: panel_figure(run, draw) for name, draw in PANELS.items() if each},
    }
    if run.eigenstates.layers:
        pictures[EIGENSTATES] = lambda: eigenstates_figure(run)
        for name in EIGENSTATE_PANELS if each else ():
            pictures[name] = lambda name=name: eigenstate_panel_figure(run, name)
    with _folder(target):
        written = write_tables([run], *places) if tables else []
        for name, make in pictures.items():
            path = target / f"{name}.{form}"
            write_picture(path, make, overwrite=overwrite)
            written.append(path)
    return written


def write_comparison(folders: Sequence[Path], picture: Path, *tables: Path, overwrite: bool = False) -> list[Path]:
    """Draws several runs into one picture, PNG or SVG by its name, and writes their numbers where `tables` are named:
    that of steps, of evaluations, and of eigenstates."""
    check_places([picture, *tables], names=True, overwrite=overwrite)
    paths = [folder.resolve() for folder in folders]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise UsageError(f"the run {folders[place]} is named twice", "name each run once")
    runs = [RunNumbers(read_history(path), name) for path, name in zip(folders, distinct_names(folders), strict=True)]
    with _folder(picture.parent):
        written = write_tables(runs, *tables, names=True)
        write_picture(picture, lambda: comparison_figure(runs), overwrite=overwrite)
    return [*written, picture]


def picture_names(*, each: bool) -> list[str]:
    """What the pictures of one run can be called, without their endings; those of eigenstates not every run has."""
    return [METRICS, RESULTS, EIGENSTATES, *({**PANELS, **EIGENSTATE_PANELS} if each else ())]


def check_places(files: Sequence[Path], *, names: bool = False, overwrite: bool = False) -> None:
    """Refuses places where a file is that is not ours; `names`: the tables are those of several runs."""
    for path in files:
        is_ours = functools.partial(is_table, names=names) if path.suffix == ".csv" else is_picture
        check_replaceable(path, is_ours, overwrite=overwrite, way="name another folder with --out")


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Makes a folder for files, or says why there cannot be one; takes it back where nothing came into it."""
    shown = printable(str(folder))
    with disk_errors(f"the folder {shown}", safe=", or name another one with --out"):
        try:
            made = make_folders(folder)
            if not folder.is_dir():
                raise FileExistsError
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(
                f"{shown} cannot be a folder: there is a file in the way", "move it, or name another folder with --out"
            ) from error
        except ValueError as error:  # a name with a zero in it
            raise UsageError(f"{shown} is no name for a folder", "name another one with --out") from error
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise
