"""The verb plot: names of run folders in, pictures and tables out.

Contract: as in `flatout.cli`. Needs no torch. What cannot be read, and files that are in the way, are found before
anything is written. A file is replaced only where it carries our mark, or with --overwrite. Ctrl-C and SIGTERM leave
whole files, each of them of before or of now.
"""

import json

from flatout.verbs.measuring import add_overwrite, ended_by_signals
from flatout.words import Parser


def plot(words: list[str]) -> int:
    parsed = _parser().parse_mixed(words)
    from flatout import api

    how = {"svg": parsed.svg, "each": parsed.each, "tables": not parsed.no_csv, "overwrite": parsed.overwrite}
    with ended_by_signals(lambda: "files that are there are whole"):
        written = api.plot(parsed.runs, parsed.out, **how)
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
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, such as runs/shakespeare")
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
