"""The verbs config, runs, watch, plot, report and bundle: what there is to set, and how runs went.

Contract: as in `flatout.cli`. None of them needs torch, and `watch` and `runs` write nothing. An existing file is
replaced only where it carries our mark, or with --overwrite. `watch` ends by itself when the run does: code 0 if the
run said so itself, 1 if its process is gone without a last word. Ctrl-C ends the watching, not the run. The server of
reports is for this machine alone, and Ctrl-C or SIGTERM is how it is meant to end: the exit code is 0.
"""

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.config.optimizers import rate_setting
from flatout.errors import DataError, UsageError
from flatout.front.output import Line, add_overwrite, ended_by_signals
from flatout.front.words import Parser, add_config, choose_action, load, one_line, quoted

if TYPE_CHECKING:
    from flatout.records import Record


# --- config -----------------------------------------------------------------------------------------------------------


CONFIG_ACTIONS = {
    "explain": "every value, where it came from and what it means",
    "show": "the resolved config as YAML",
    "search": "settings by a word: names, sentences, and what other trainers call them",
    "schema": "the JSON schema of a config file",
    "presets": "the presets and hardware overlays that ship with Flatout",
    "copy": "copy a preset to a file to edit",
}


def config(words: list[str]) -> int:
    action, parser, rest = choose_action("config", words, CONFIG_ACTIONS)
    if action == "copy":
        parser.add_argument("preset", help="name of the preset")
        parser.add_argument("file", nargs="?", help="file to write; default: PRESET.yaml")
    elif action == "search":
        parser.add_argument("words", nargs="+", metavar="WORD", help="settings that hold all of these words")
    elif action in ("explain", "show"):
        add_config(parser)
    if action in ("explain", "search"):
        parser.flag("--json", "print rows as JSON")
    parsed = parser.parse_mixed(rest) if action == "search" else parser.parse_words(rest)
    return _search(parsed) if action == "search" else _config_action(action, parsed)


def _search(parsed: argparse.Namespace) -> int:
    from flatout.config.suggest import nearest_fields, search_fields, way_elsewhere

    found = search_fields(parsed.words)
    if not found:
        asked = " ".join(parsed.words)
        near = nearest_fields(parsed.words[0])
        hint = way_elsewhere(parsed.words[0]) or (
            f"did you mean {' or '.join(near)}?" if near else "`flatout config explain` lists every setting"
        )
        raise UsageError(f"no setting is about {quoted(asked)}", hint)
    if parsed.json:
        print(json.dumps([vars(row) for row in found], ensure_ascii=False))
        return 0
    cells = [(row.path, row.default) for row in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, texts in zip(found, cells, strict=True):
        aligned = (f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
        elsewhere = f" (elsewhere: {', '.join(row.elsewhere)})" if row.elsewhere else ""
        print("  ".join([*aligned, row.description]) + elsewhere)
    return 0


def _config_action(action: str, parsed: argparse.Namespace) -> int:
    from flatout.config import catalogue
    from flatout.config import load as configs
    from flatout.config.yaml_loader import format_value

    if action == "schema":
        print(json.dumps(configs.schema_json(), indent=2))
    elif action == "presets":
        kinds: dict[catalogue.ShippedKind, str] = {"preset": "presets", "hardware": "hardware overlays"}
        for kind, title in kinds.items():
            print(f"{title}:")
            names = catalogue.shipped_names(kind)
            width = max(map(len, names)) + 2
            for name in names:
                print(f"  {name:<{width}}{catalogue.summary(kind, name)}")
    elif action == "copy":
        if parsed.file == "":
            raise UsageError("the name of the file to write is empty", "leave it out, or name a .yaml file")
        print(f"wrote {catalogue.copy_preset(parsed.preset, Path(parsed.file or f'{parsed.preset}.yaml'))}")
    elif action == "show":
        print(configs.show(load(parsed).config), end="")
    else:
        rows = configs.explain(load(parsed))
        if parsed.json:
            print(json.dumps([vars(row) for row in rows], ensure_ascii=False))
            return 0
        cells = [(row.path, format_value(row.value), row.source) for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row, texts in zip(rows, cells, strict=True):
            aligned = (f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
            print("  ".join([*aligned, row.description]))
    return 0


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(words: list[str]) -> int:
    parser = Parser("runs", "List runs: how each stands, its step, its best validation loss, its size and its age.")
    parser.add_argument("folder", nargs="?", default="runs", help="folder that the runs lie in; default: runs")
    sorts = ("age", "name", "state", "step", "loss", "size")
    parser.add_argument("--sort", choices=sorts, default="age", help="newest first by default")
    parser.flag("--reverse", "the other way round")
    parser.flag("--json", "print a JSON line for each run")
    parsed = parser.parse_words(words)
    from flatout.observe.runs import list_runs, print_runs

    folder = Path(parsed.folder)
    rows = list_runs(folder, sort=parsed.sort) if folder.is_dir() else []
    if not rows:
        raise DataError(f"there is no run under {folder}/", "name the folder of your runs, or start one: flatout train")
    rows = rows[::-1] if parsed.reverse else rows
    if not parsed.json:
        print_runs(rows)
        return 0
    for row in rows:
        loss = row.loss if row.loss is None or math.isfinite(row.loss) else str(row.loss)
        print(json.dumps({**dataclasses.asdict(row), "loss": loss}, ensure_ascii=False, allow_nan=False))
    return 0


# --- watch ------------------------------------------------------------------------------------------------------------


DIVERGED = 3  # updates in a row that were skipped: the trainer gives up then
LOST = 1


def watch(words: list[str]) -> int:
    parser = Parser("watch", "Follow a run that another process trains: how far it is, how it goes, what goes wrong.")
    parser.add_argument("run", nargs="?", help="a run folder, or a name under runs/; default: the newest run there")
    parser.flag("--json", "print the run's records as JSON lines and nothing else")
    parser.flag("--web", "show its report in the browser, on this machine only")
    parser.number("--port", 0, 65535, help="port of --web; default: a free one")
    parser.epilog = "Ends with the run: code 0, or 1 if the run's process is gone without having finished."
    parsed = parser.parse_words(words)
    if parsed.web and parsed.json:
        raise UsageError("--web and --json exclude each other", "leave one of them out")
    if parsed.port is not None and not parsed.web:
        raise UsageError("--port is for --web", "add --web, or leave --port out")
    from flatout.observe.runs import find_run

    folder = find_run(parsed.run)
    from flatout.front.output import Terminated, exit_code_of, terminated_like_interrupted

    with terminated_like_interrupted():
        try:
            if parsed.web:
                return _serve(folder, parsed.port)
            return _show(folder, as_json=parsed.json)
        except KeyboardInterrupt as stopped:
            if not isinstance(stopped, Terminated):
                print("stopped watching; the run is not affected", file=sys.stderr)
            return exit_code_of(stopped)


def _serve(folder: Path, port: int | None) -> int:
    from flatout.observe.report import serve

    def ready(address: str) -> None:
        print(f"watching {one_line(str(folder))} at {address} (Ctrl-C ends it)", flush=True)

    serve([folder], port=port, ready=ready)
    return 0


def _show(folder: Path, *, as_json: bool) -> int:
    from flatout.observe.runs import METRICS, follow
    from flatout.observe.terminal import JsonReader
    from flatout.observe.view import ViewReader

    if not (folder / METRICS).exists():
        print(f"waiting for the first record of {one_line(str(folder))}", file=sys.stderr)
    reader: JsonReader | ViewReader | None = JsonReader() if as_json else None
    last = _LastWord()
    try:
        for record in follow(folder):
            if reader is None:
                reader = ViewReader(_log_every(record))
            last.hear(record)
            reader.show(record)
    finally:
        if reader is not None:
            reader.close()
    return last.tell(folder)


def _log_every(record: "Record") -> int:
    """How often the run itself prints a line; its first record says so."""
    output = getattr(record, "config", {}).get("output")
    value = output.get("log_every") if isinstance(output, dict) else None
    return value if isinstance(value, int) and value > 0 else 10


@dataclasses.dataclass
class _LastWord:
    """How a run ended, from the records it left."""

    reason: str | None = None
    step: int = 0
    skipped: int = 0
    heard: bool = False
    rate: str = "optim.learning_rate"

    def hear(self, record: "Record") -> None:
        from flatout.records import EndRecord, RunInfo, StepRecord

        self.heard = True
        if isinstance(record, EndRecord):
            self.reason = record.reason
        elif isinstance(record, RunInfo):
            self.reason, self.step, self.skipped = None, record.start_step, 0
            self.rate = rate_setting(record.config)
        elif isinstance(record, StepRecord):
            self.reason, self.step = None, record.step
            self.skipped = 0 if record.applied else self.skipped + 1

    def tell(self, folder: Path) -> int:
        """The exit code; where the run has no ending of its own, says so."""
        shown = one_line(str(folder))
        again = f"resume with: flatout train --resume {shlex.quote(shown)}"
        if self.reason == "interrupted":
            print(f"the run was interrupted; {again}", file=sys.stderr)
        if self.reason is not None:
            return 0
        if not self.heard:
            from flatout.observe.runs import METRICS

            if (folder / METRICS).exists():  # as `plot` and `report` have it
                raise DataError(
                    f"{folder / METRICS} holds no run", "name the folder of a run that was started by flatout train"
                )
            print(f"error: the run in {shown} ended before its first record", file=sys.stderr)
            print("hint: start it again with flatout train, which says what is wrong", file=sys.stderr)
        elif self.skipped >= DIVERGED:
            stopped = (
                f"the run stopped at step {self.step:,} after {self.skipped} skipped updates in a row: it diverged"
            )
            print(f"{stopped}; lower {self.rate}, then {again}", file=sys.stderr)
        else:
            dead = f"the run seems dead: no process works in {shown}, and its last record is of step {self.step:,}"
            print(f"{dead}; {again}", file=sys.stderr)
        return LOST


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(words: list[str]) -> int:
    parsed = _parser().parse_mixed(words)

    how = {"svg": parsed.svg, "each": parsed.each, "tables": not parsed.no_csv, "overwrite": parsed.overwrite}
    with ended_by_signals(lambda: "files that are there are whole"):
        written = flatout.plot(parsed.runs, parsed.out, **how)
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


# --- report -----------------------------------------------------------------------------------------------------------


def report(words: list[str]) -> int:
    parser = Parser(
        "report",
        "Write one HTML page that shows a run, or several side by side: curves, speed, samples, switches, config. The "
        "page needs no network and no other file.",
    )
    _add_runs(parser)
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder, or here for several")
    parser.number("--price", 0, 1e6, metavar="PER_HOUR", help="what an hour of the machine costs, in any currency")
    parser.flag("--overwrite", "also replace a file that is no report of flatout")
    parser.flag("--json", "print what the page would show as JSON, and write no page")
    parsed = parser.parse_mixed(words)
    if parsed.json:
        from flatout.observe.report import read_runs
        from flatout.observe.report_data import report_data

        print(json.dumps(report_data(read_runs(_folders(parsed.runs)), price=parsed.price), allow_nan=False))
        return 0

    target = flatout.report(parsed.runs, parsed.out, overwrite=parsed.overwrite, price=parsed.price)
    print(f"wrote {target} ({target.stat().st_size / 1000:,.0f} kB); open it in a browser")
    return 0


def serve_report(words: list[str]) -> int:
    parser = Parser(
        "serve-report",
        "Show the report of runs in the browser, on this machine only, refreshed while they go on. Ctrl-C ends it.",
    )
    _add_runs(parser)
    parser.number("--port", 1, 65535, help="port to listen on; default: a free one from 8484 on")
    parsed = parser.parse_mixed(words)
    folders = _folders(parsed.runs)
    from flatout.front.output import terminated_like_interrupted
    from flatout.observe.report import serve

    try:
        with terminated_like_interrupted():
            serve(folders, port=parsed.port, ready=_tell)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _tell(url: str) -> None:
    print(f"the report is at {url} (Ctrl-C ends it)", flush=True)


def _add_runs(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="a run folder, or a name under runs/; default: the newest run there"
    )


def _folders(runs: list[str]) -> list[Path]:
    from flatout.observe.runs import find_run

    return [find_run(run) for run in runs] or [find_run(None)]


# --- bundle -----------------------------------------------------------------------------------------------------------


def bundle(words: list[str]) -> int:
    parser = Parser(
        "bundle",
        "Write one zip file with config, environment, doctor's findings, metrics and report of a run, to send with a "
        "bug report. Data, samples and weights stay out, and so do keys.",
    )
    help_run = "a run folder, or a name under runs/; default: the newest run there"
    parser.add_argument("run", metavar="RUN", nargs="?", help=help_run)
    parser.add_argument("--out", metavar="FILE", help="default: RUN-bundle.zip in this folder")
    parser.flag("--no-doctor", "leave out the machine and the doctor's findings")
    parser.flag("--overwrite", "also replace a file that is no bundle of flatout")
    parsed = parser.parse_mixed(words)
    from flatout.observe.bundle import Private, bundle_files, check_target, write_bundle
    from flatout.observe.runs import find_run
    from flatout.observe.sinks import read_history

    folder = find_run(parsed.run)
    target = Path(f"{folder.resolve().name}-bundle.zip") if parsed.out is None else Path(parsed.out)
    check_target(target, overwrite=parsed.overwrite)  # before anything is looked at
    read_history(folder)  # a folder without a run is an error now
    machine, findings = (None, []) if parsed.no_doctor else _look(folder)
    private = Private.of(os.environ, Path.home())
    texts = bundle_files(folder, private, machine=machine, doctor=findings)
    size = write_bundle(folder, private, target, texts)
    print(f"wrote {target} ({size / 1000:,.0f} kB): {', '.join([*texts, 'report.html'])}")
    print("no data, samples, weights or keys are in it; look through it before you send it")
    return 0


def _look(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the machine is, and what the doctor finds of it and of the run's config."""
    from flatout.diagnose.examine import examine
    from flatout.diagnose.machine import gather_machine
    from flatout.observe.bundle import is_secret

    line = Line()
    with ended_by_signals(lambda: "nothing was written"):
        line.show("looking at the machine ...")
        machine = gather_machine()
        found = [
            {"type": "finding", **dataclasses.asdict(finding)}
            for finding in examine(str(folder / "config.yaml"), quick=True, machine=machine)
        ]
        line.close()
    told = dataclasses.asdict(machine)
    told["environment"] = {name: value for name, value in machine.environment.items() if not is_secret(name)}
    for card in told["cards"]:
        card.pop("identity")  # its number tells who owns it, and nothing about a bug
        card.pop("processes")
    return told, found
