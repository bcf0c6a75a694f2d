"""The verb plot: names of run folders in, pictures and tables out.

Contract: as in `flatout.cli`. Needs no torch. What cannot be read, and files that are in the way, are found before
anything is written. A file is replaced only where it carries our mark, or with --overwrite. Ctrl-C and SIGTERM leave
whole files, each of them of before or of now.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from flatout.errors import DataError, UsageError
from flatout.files import disk_errors
from flatout.words import Parser, quoted

_FORMS = (".png", ".svg")


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where files go: a folder, or with `picture` a picture of that name with its tables beside it."""

    folder: Path
    form: str
    picture: Path | None = None


def plot(words: list[str]) -> int:
    parsed = _parser().parse_mixed(words)
    runs = [_run_folder(word) for word in parsed.runs]
    if parsed.each and len(runs) > 1:
        raise UsageError("--each goes with one run", "leave it out, or name one run")
    target = _target(parsed, runs)
    from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of

    try:
        with terminated_like_interrupted():
            written = _write(parsed, runs, target)
    except KeyboardInterrupt as stopped:
        print(f"{word_of(stopped)}; files that are there are whole", file=sys.stderr)
        return exit_code_of(stopped)
    if parsed.json:
        print(json.dumps({"files": [str(path) for path in written]}))
        return 0
    from flatout.observe.human import printable

    for path in written:
        print(f"wrote {printable(str(path))}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "plot",
        "Draw a run: what it learned and how it ran, as two pictures, with the numbers as CSV beside them; a run with "
        "eigenstate blocks has a third. Several runs are drawn into one picture, to compare them. A run that still "
        "goes on can be drawn too.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, such as runs/shakespeare-char")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where files go; default: plots in the run's folder, for several runs ./plots. For several runs it may "
        "also be the picture's name, ending in .png or .svg",
    )
    parser.add_argument("--svg", action="store_true", help="write SVG pictures instead of PNG")
    parser.add_argument("--each", action="store_true", help="also write every panel as a picture of its own")
    parser.add_argument("--no-csv", action="store_true", help="write pictures only")
    parser.add_argument("--overwrite", action="store_true", help="also replace files that flatout did not write")
    parser.add_argument("--json", action="store_true", help="print the files written as JSON")
    return parser


def _run_folder(word: str) -> Path:
    """The folder, if there is a run in it; else an error that names one where there is."""
    path = Path(word)
    if not word or not os.path.isdir(word):
        hint = "name a run folder, for example runs/shakespeare-char"
        if path.name == "metrics.jsonl" and os.path.isfile(word):
            hint = f"name its folder: {path.parent}"
        raise UsageError(f"{quoted(word)} is not a folder", hint)
    if os.path.isfile(path / "metrics.jsonl"):
        return path
    absolute = path.absolute()
    for above in absolute.parents[:3]:
        if os.path.isfile(above / "metrics.jsonl"):
            raise DataError(f"{quoted(word)} is part of a run, and no run", f"name the run: {above}")
    with disk_errors(f"a list of {quoted(word)}", safe=""):
        inside = sorted(name for name in os.listdir(path) if os.path.isfile(path / name / "metrics.jsonl"))
    if inside:
        raise DataError(
            f"{quoted(word)} holds runs, and is none itself",
            f"name a run, such as {path / inside[0]}",
        )
    raise DataError(f"{quoted(word)} is not a run: it has no metrics.jsonl", "name a run folder, such as runs/NAME")


def _target(parsed: argparse.Namespace, runs: list[Path]) -> _Target:
    """Where files go, if nothing is in the way there."""
    several = len(runs) > 1
    form = "svg" if parsed.svg else "png"
    if parsed.out is None:
        target = _Target(Path("plots") if several else runs[0] / "plots", form)
    elif not parsed.out:
        raise UsageError("--out needs a folder", "for example --out plots")
    elif not parsed.out.lower().endswith(_FORMS) or os.path.isdir(parsed.out):
        target = _Target(Path(parsed.out), form)
    elif not several:
        raise UsageError(
            f"a run has several pictures, and --out {quoted(parsed.out)} names one",
            "name a folder with --out; --svg writes SVG",
        )
    else:
        picture = Path(parsed.out)
        if parsed.svg and picture.suffix.lower() != ".svg":
            raise UsageError(f"--svg does not go with --out {quoted(parsed.out)}", "name a file that ends in .svg")
        target = _Target(picture.parent, picture.suffix[1:].lower(), picture)
    own = target.folder.name == "plots" and os.path.isfile(target.folder.absolute().parent / "metrics.jsonl")
    if own and several:
        raise UsageError(
            f"{target.folder} is the plots folder of a run, whose files it would replace",
            "name another folder with --out",
        )
    from flatout.observe.plot.plots import check_places

    check_places(_files(parsed, target, several=several), names=several, overwrite=parsed.overwrite)
    return target


def _files(parsed: argparse.Namespace, target: _Target, *, several: bool) -> list[Path]:
    from flatout.observe.plot.plots import COMPARISON, picture_names
    from flatout.observe.plot.tables import EIGENSTATES, EVALS, STEPS

    folder = target.folder
    if target.picture is not None:
        pictures, before = [target.picture], f"{target.picture.stem}-"
    else:
        names = [COMPARISON] if several else picture_names(each=parsed.each)
        pictures, before = [folder / f"{name}.{target.form}" for name in names], ""
    return pictures + ([] if parsed.no_csv else [folder / f"{before}{name}" for name in (STEPS, EVALS, EIGENSTATES)])


def _write(parsed: argparse.Namespace, runs: list[Path], target: _Target) -> list[Path]:
    from flatout.observe.plot.plots import write_comparison, write_run_plots

    if len(runs) == 1:
        return write_run_plots(
            runs[0],
            out=target.folder,
            form=target.form,
            tables=not parsed.no_csv,
            each=parsed.each,
            overwrite=parsed.overwrite,
        )
    picture, *tables = _files(parsed, target, several=True)
    return write_comparison(runs, picture, *tables, overwrite=parsed.overwrite)
