"""The verb plot: names of run folders in, pictures and tables out.

Contract: as in `flatout.cli`. Needs no torch. What cannot be read, and files that are in the way, are found before
anything is written. A file is replaced only where it carries our mark, or with --overwrite. Ctrl-C and SIGTERM leave
whole files, each of them of before or of now.
"""

import argparse
import json
import os
from pathlib import Path

from flatout.errors import DataError, UsageError
from flatout.files import disk_errors
from flatout.verbs.measuring import add_overwrite, ended_by_signals
from flatout.words import Parser, quoted

_FORMS = (".png", ".svg")


def plot(words: list[str]) -> int:
    parsed = _parser().parse_mixed(words)
    runs = [_run_folder(word) for word in parsed.runs]
    if parsed.each and len(runs) > 1:
        raise UsageError("--each goes with one run", "leave it out, or name one run")
    folder, form, name = _target(parsed, runs)
    with ended_by_signals(lambda: "files that are there are whole"):
        written = _write(parsed, runs, folder, form, name)
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
    parser.flag("--svg", "write SVG pictures instead of PNG")
    parser.flag("--each", "also write every panel as a picture of its own")
    parser.flag("--no-csv", "write pictures only")
    add_overwrite(parser)
    parser.flag("--json", "print the files written as JSON")
    return parser


def _run_folder(word: str) -> Path:
    """The folder, if there is a run in it; else an error that names one where there is."""
    path = Path(word)
    if not word or not os.path.isdir(word):
        from flatout.config.suggest import run_hint

        hint = run_hint(word, "name a run folder, for example runs/shakespeare-char")
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


def _target(parsed: argparse.Namespace, runs: list[Path]) -> tuple[Path, str, str | None]:
    """Where files go: a folder, the form of pictures, and the name of the picture where one was given."""
    several = len(runs) > 1
    folder, form, name = Path(parsed.out or "plots"), "svg" if parsed.svg else "png", None
    if parsed.out is None:
        folder = folder if several else runs[0] / "plots"
    elif not parsed.out:
        raise UsageError("--out needs a folder", "for example --out plots")
    elif parsed.out.lower().endswith(_FORMS) and not os.path.isdir(parsed.out):
        if not several:
            raise UsageError(
                f"a run has several pictures, and --out {quoted(parsed.out)} names one",
                "name a folder with --out; --svg writes SVG",
            )
        folder, form, name = folder.parent, folder.suffix[1:].lower(), folder.name
        if parsed.svg and form != "svg":
            raise UsageError(f"--svg does not go with --out {quoted(parsed.out)}", "name a file that ends in .svg")
    own = folder.name == "plots" and os.path.isfile(folder.absolute().parent / "metrics.jsonl")
    if own and several:
        raise UsageError(
            f"{folder} is the plots folder of a run, whose files it would replace", "name another folder with --out"
        )
    return folder, form, name


def _write(parsed: argparse.Namespace, runs: list[Path], folder: Path, form: str, name: str | None) -> list[Path]:
    """Draws, once it is known that nothing is in the way."""
    from flatout.observe.plot.plots import COMPARISON, write_comparison, write_run_plots
    from flatout.observe.plot.tables import EIGENSTATES, EVALS, STEPS

    how = {"overwrite": parsed.overwrite}
    if len(runs) == 1:
        return write_run_plots(runs[0], out=folder, form=form, tables=not parsed.no_csv, each=parsed.each, **how)
    before = "" if name is None else f"{Path(name).stem}-"
    tables = [] if parsed.no_csv else [folder / f"{before}{table}" for table in (STEPS, EVALS, EIGENSTATES)]
    return write_comparison(runs, folder / (name or f"{COMPARISON}.{form}"), *tables, **how)
