"""A run as pictures and tables: what it learned, how it ran, and how it compares with other runs.

Idea: two pictures per run. `metrics` shows how it ran: learning rate, throughput, memory, gradient norm, parameter norm
and step time. `results` shows what it learned: loss over steps, tokens and time. Several runs share one picture, with a
table of names as its legend. A run with eigenstate blocks has a third picture, `eigenstates`: what they remember. The
numbers lie beside as CSV, so that everything can be drawn again in another way.

Contract: needs no torch and opens no window. Every run that can be read can be drawn, also one that is still going on.
Files are whole or not there. Runs are drawn from at most a few thousand points each, however long they are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout.errors import UsageError
from flatout.files import check_replaceable, disk_errors
from flatout.folders import make_folders, remove_empty
from flatout.observe.history import distinct_names, read_history
from flatout.observe.human import printable
from flatout.observe.picture import Figure, is_picture, write_picture
from flatout.observe.plot.compare import comparison_figure
from flatout.observe.plot.eigenstates import EIGENSTATE_PANELS, eigenstate_panel_figure, eigenstates_figure
from flatout.observe.plot.run import PANELS, metrics_figure, panel_figure, results_figure
from flatout.observe.plot.series import RunNumbers
from flatout.observe.plot.tables import EIGENSTATES as EIGENSTATES_TABLE
from flatout.observe.plot.tables import EVALS, STEPS, is_table, write_tables

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
