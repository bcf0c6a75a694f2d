"""The verbs config, runs, watch, plot and report: what there is to set, and how runs went.

Contract: as in `flatout.cli`. None of them needs torch, and `watch` and `runs` write nothing. An existing file is
replaced only where it carries our mark, or with --overwrite. `watch` ends by itself when the run does: code 0 if the
run said so itself, 1 if its process is gone without a last word. Ctrl-C ends the watching, not the run. The server of
reports is for this machine alone, and Ctrl-C or SIGTERM is how it is meant to end: the exit code is 0.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import flatout
from flatout.config import catalogue
from flatout.config import load as configs
from flatout.config.facts import allowed_values, field_facts, section_paths, spot_at, value_at
from flatout.config.yaml_loader import format_value
from flatout.errors import DataError, UsageError, page, quoted
from flatout.front.configs import load
from flatout.front.output import Line, ended_by_signals, held_signal
from flatout.front.words import one_line

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.records import Record

# --- config -----------------------------------------------------------------------------------------------------------


def explain(parsed: argparse.Namespace) -> int:
    """Explains all settings, or one: the field and the config may come in any order."""
    words = [word for word in (parsed.field, parsed.config) if word is not None]
    fields = [path for path in map(_field_called, words) if path is not None]
    configs_named = [word for word in words if _field_called(word) is None]
    if left := [*fields[1:], *configs_named[1:]]:
        raise UsageError(f"unexpected word {quoted(left[0])}", "write settings as SECTION.FIELD=VALUE")
    parsed.config = next(iter(configs_named), None)
    loaded = load(parsed)
    if fields:
        _explain_field(fields[0], loaded, as_json=parsed.json)
        return 0
    rows = configs.explain(loaded)
    if parsed.json:
        print(json.dumps([vars(row) for row in rows], ensure_ascii=False))
    else:
        _print_aligned([(row.path, format_value(row.value), row.source, row.description) for row in rows])
    return 0


def _field_called(word: str) -> str | None:
    """The path of the setting that a word names, or the word itself where it can be nothing but a mistyped setting."""
    section, _, name = word.partition(".")
    if word in field_facts():
        return word
    if os.path.exists(word) or word in configs.preset_names():
        return None
    if not name:
        return next((path for path in field_facts() if path.partition(".")[2] == word), None)
    return word if section in section_paths() and name not in ("yaml", "yml") else None


def _explain_field(path: str, loaded: "LoadedConfig", *, as_json: bool) -> None:
    """Prints what is known of one setting."""
    if path not in field_facts():
        from flatout.config.suggest import unknown_key

        raise unknown_key(path, "command line")
    fact, source = field_facts()[path], loaded.sources[path]
    default = format_value(fact.get_default(call_default_factory=True))
    about = {
        "setting": path,
        "value": format_value(value_at(loaded.config, path)),
        "from": source.where,
        "why": _WHY[source.kind].format(default=default),
        "allowed": allowed_values(spot_at(path.split(".")).described),
        "meaning": str(fact.description),
        "documented": f"{page('reference/settings.md')}#{path}",
    }
    if about["value"] == "null":
        about["why"] += "; null: Flatout works it out, and the run's first lines show the result"
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
    else:
        for name, text in about.items():
            print(f"{name:<10}  {text}")


_WHY = {
    "default": "no preset, overlay, file or word sets it",
    "family": "the default of this model.family, where others have {default}",
    "preset": "the preset sets it; without one it is {default}",
    "size": "the size of the model decides it; without one it is {default}",
    "hardware": "the overlay sets it, so that the run fits the card's memory",
    "file": "a config file wins over presets, sizes and overlays; Flatout's default is {default}",
    "override": "the command line wins over files and presets; Flatout's default is {default}",
    "python": "it was set in Python; Flatout's default is {default}",
}


def show(parsed: argparse.Namespace) -> int:
    print(configs.show(load(parsed).config), end="")
    return 0


def search(parsed: argparse.Namespace) -> int:
    from flatout.config.suggest import field_hint, search_fields

    found = search_fields(parsed.words)
    if not found:
        hint = field_hint(parsed.words[0]) or "`flatout config explain` lists every setting"
        raise UsageError(f"no setting is about {quoted(' '.join(parsed.words))}", hint)
    if parsed.json:
        print(json.dumps([vars(row) for row in found], ensure_ascii=False))
        return 0
    elsewhere = [f" (elsewhere: {', '.join(row.elsewhere)})" if row.elsewhere else "" for row in found]
    _print_aligned(
        [(row.path, row.default, row.description + more) for row, more in zip(found, elsewhere, strict=True)]
    )
    return 0


def _print_aligned(rows: Sequence[Sequence[str]]) -> None:
    """A line for each row, its cells one below the other; the last one is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        print("  ".join([*(f"{text:<{width}}" for text, width in zip(row[:-1], widths, strict=True)), row[-1]]))


def schema(_: argparse.Namespace) -> int:
    print(json.dumps(configs.schema_json(), indent=2))
    return 0


def presets(_: argparse.Namespace) -> int:
    kinds: dict[catalogue.ShippedKind, str] = {"preset": "presets", "hardware": "hardware overlays"}
    for kind, title in kinds.items():
        print(f"{title}:")
        names = catalogue.shipped_names(kind)
        width = max(map(len, names)) + 2
        for name in names:
            print(f"  {name:<{width}}{catalogue.summary(kind, name)}")
    return 0


def copy(parsed: argparse.Namespace) -> int:
    if parsed.file == "":
        raise UsageError("the name of the file to write is empty", "leave it out, or name a .yaml file")
    print(f"wrote {catalogue.copy_preset(parsed.preset, Path(parsed.file or f'{parsed.preset}.yaml'))}")
    return 0


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(parsed: argparse.Namespace) -> int:
    from flatout.observe.runs import print_runs

    rows = flatout.runs(parsed.folder, sort=parsed.sort, reverse=parsed.reverse)
    if not rows:
        hint = "name the folder of your runs, or start one: flatout train"
        raise DataError(f"there is no run under {Path(parsed.folder)}/", hint)
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


def watch(parsed: argparse.Namespace) -> int:
    from flatout.observe.runs import find_run

    folder = find_run(parsed.run)
    with held_signal() as stop:
        return _show(folder, as_json=parsed.json)
    if stop.number == signal.SIGINT:
        print("stopped watching; the run is not affected", file=sys.stderr)
    return 128 + (stop.number or 0)


def _show(folder: Path, *, as_json: bool) -> int:
    from flatout.observe.runs import METRICS, follow
    from flatout.observe.terminal import JsonReader
    from flatout.observe.view import ViewReader

    if not (folder / METRICS).exists():
        print(f"waiting for the first record of {one_line(str(folder))}", file=sys.stderr)
    reader: JsonReader | ViewReader | None = JsonReader() if as_json else None
    last: Record | None = None
    try:
        for record in follow(folder):
            if reader is None:
                reader = ViewReader(_log_every(record))
            last = record
            reader.show(record)
    finally:
        if reader is not None:
            reader.close()
    return _exit_code(folder, last)


def _log_every(record: "Record") -> int:
    """How often the run itself prints a line; its first record says so."""
    output = getattr(record, "config", {}).get("output")
    value = output.get("log_every") if isinstance(output, dict) else None
    return value if isinstance(value, int) and value > 0 else 10


def _exit_code(folder: Path, last: "Record | None") -> int:
    """The exit code of a run with this last record; where the run has no ending of its own, says so."""
    from flatout.records import EndRecord, RunInfo

    shown = one_line(str(folder))
    again = f"resume with: flatout train --resume {shlex.quote(shown)}"
    if last is None:
        raise DataError(f"the run in {shown} ended before its first record", "start it again with `flatout train`")
    if not isinstance(last, EndRecord):
        step = last.start_step if isinstance(last, RunInfo) else last.step
        print(f"no process works in {shown} any more, and step {step:,} is its last: ", end="", file=sys.stderr)
        print(f"the run was killed, or it diverged; {again}", file=sys.stderr)
        return LOST
    if last.reason == "interrupted":
        print(f"the run was interrupted; {again}", file=sys.stderr)
    return 0


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(parsed: argparse.Namespace) -> int:
    how = {"svg": parsed.svg, "tables": not parsed.no_csv, "overwrite": parsed.overwrite}
    with ended_by_signals(lambda: "files that are there are whole"):
        written = flatout.plot(parsed.runs, parsed.out, **how)
    if parsed.json:
        print(json.dumps({"files": [str(path) for path in written]}))
        return 0
    from flatout.observe.human import printable

    for path in written:
        print(f"wrote {printable(str(path))}")
    return 0


# --- report -----------------------------------------------------------------------------------------------------------


def report(parsed: argparse.Namespace) -> int:
    _check_one_form(parsed)
    if parsed.serve:
        return _serve_reports(parsed)
    if parsed.zip:
        return _bundle(parsed)
    if parsed.json:
        from flatout.observe.report import read_runs
        from flatout.observe.report_data import report_data

        print(json.dumps(report_data(read_runs(_folders(parsed.runs)), price=parsed.price), allow_nan=False))
        return 0
    target = flatout.report(parsed.runs, parsed.out, overwrite=parsed.overwrite, price=parsed.price)
    print(f"wrote {target} ({target.stat().st_size / 1000:,.0f} kB); open it in a browser")
    return 0


def _check_one_form(parsed: argparse.Namespace) -> None:
    """Refuses options of one form of the report beside another form."""
    forms = [f"--{name}" for name in ("zip", "serve", "json") if getattr(parsed, name)]
    if len(forms) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} exclude each other", "leave one of them out")
    for option, form in (("--no-doctor", "--zip"), ("--port", "--serve")):
        if getattr(parsed, option[2:].replace("-", "_")) and form not in forms:
            raise UsageError(f"{option} is for {form}", f"add {form}, or leave {option} out")
    if parsed.zip and len(parsed.runs) > 1:
        raise UsageError("--zip is for one run", "name one run")


def _bundle(parsed: argparse.Namespace) -> int:
    line = Line()
    how = {"overwrite": parsed.overwrite, "doctor": not parsed.no_doctor, "progress": line.show}
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        target = flatout.bundle(next(iter(parsed.runs), None), parsed.out, **how)
    with zipfile.ZipFile(target) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    print(f"wrote {target} ({target.stat().st_size / 1000:,.0f} kB): {', '.join(names)}")
    print("no data, samples, weights or keys are in it; look through it before you send it")
    return 0


def _serve_reports(parsed: argparse.Namespace) -> int:
    folders = _folders(parsed.runs)
    from flatout.observe.report import serve

    with held_signal():
        ready = "the report is at {} (Ctrl-C ends it)"
        serve(folders, port=parsed.port, ready=lambda url: print(ready.format(url), flush=True))
    print("stopped", file=sys.stderr)
    return 0


def _folders(runs: list[str]) -> list[Path]:
    from flatout.observe.runs import find_run

    return [find_run(run) for run in runs] or [find_run(None)]
