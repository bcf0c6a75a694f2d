"""The verb bundle: a run folder in, one zip file for a bug report out.

Contract: as in `flatout.cli`. Nothing of the run is changed. An existing file is replaced only if it is a bundle, or
with --overwrite. With --no-doctor neither torch nor the machine is looked at.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from flatout.verbs.measuring import Line, ended_by_signals
from flatout.words import Parser


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
