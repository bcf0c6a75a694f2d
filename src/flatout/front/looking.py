"""Looking at runs and machines: pictures, tables, one HTML page, and the doctor's visit. Needs no torch."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.config.load import Config, LoadedConfig
from flatout.diagnose.examine import examine
from flatout.diagnose.machine import gather_machine
from flatout.errors import UsageError, quoted
from flatout.finding import Finding
from flatout.front.configs import with_sources
from flatout.observe.bundle import Private, bundle_files, is_secret, write_bundle
from flatout.observe.bundle import check_target as check_bundle_target
from flatout.observe.plots import COMPARISON, write_comparison, write_run_plots
from flatout.observe.report import check_target, write_report
from flatout.observe.runs import SORTS, RunRow, find_run, follow, list_runs
from flatout.observe.series import EVALS, STEPS
from flatout.observe.sinks import read_history
from flatout.records import Record

# --- drawing ----------------------------------------------------------------------------------------------------------


_FORMS = (".png", ".svg")


def plot(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    svg: bool = False,
    tables: bool = True,
    overwrite: bool = False,
) -> list[Path]:
    """Draws a run as pictures with its numbers as CSV beside them, or several runs into one; returns the files written.

    They go to the run's own folder `plots`, those of several runs to ./plots, or to the folder `out`, which for several
    runs may also be the picture's name. Files that are not ours are replaced only with
    `overwrite`.
    """
    named = [runs] if isinstance(runs, str | Path) else list(runs)
    if not named:
        raise UsageError("no run was named", "name a run folder, such as runs/NAME")
    folders = [find_run(str(run)) for run in named]
    folder, form, name = _target(None if out is None else str(out), folders, svg=svg)
    if len(folders) == 1:
        return write_run_plots(folders[0], out=folder, form=form, tables=tables, overwrite=overwrite)
    before = "" if name is None else f"{Path(name).stem}-"
    files = [folder / f"{before}{table}" for table in (STEPS, EVALS)] if tables else []
    return write_comparison(folders, folder / (name or f"{COMPARISON}.{form}"), *files, overwrite=overwrite)


def _target(out: str | None, runs: list[Path], *, svg: bool) -> tuple[Path, str, str | None]:
    """Where files go: a folder, the form of pictures, and the name of the picture where one was named."""
    several = len(runs) > 1
    if out is None:
        return (Path("plots") if several else runs[0] / "plots"), "svg" if svg else "png", None
    if not out:
        raise UsageError("--out needs a folder", "for example --out plots")
    folder, form, name = Path(out), "svg" if svg else "png", None
    is_picture = out.lower().endswith(_FORMS) and not os.path.isdir(out)
    if is_picture and not several:
        raise UsageError(f"a run has several pictures, and --out {quoted(out)} names one", "name a folder with --out")
    if is_picture:
        folder, form, name = folder.parent, folder.suffix[1:].lower(), folder.name
    if several and folder.name == "plots" and os.path.isfile(folder.absolute().parent / "metrics.jsonl"):
        raise UsageError(
            f"{folder} is the plots folder of a run, whose files it would replace", "name another folder with --out"
        )
    return folder, form, name


def report(
    runs: str | Path | Sequence[str | Path] = (),
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    price: float | None = None,
) -> Path:
    """Writes one HTML page that shows a run, or several side by side, and returns its path.

    `runs` are folders or names under runs/; without any it is the newest run there. The page is report.html in the
    run's folder, for several runs ./report.html. A file that is no report is replaced only with `overwrite`.
    `price` is what an hour of the machine costs.
    """
    named = [runs] if isinstance(runs, str | Path) else list(runs)
    folders = [find_run(str(run)) for run in named] or [find_run(None)]
    beside = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    target = beside if out is None else Path(out)
    check_target(target, overwrite=overwrite)  # before anything is read
    write_report(folders, target, overwrite=overwrite, price=price)
    return target


# --- diagnosing -------------------------------------------------------------------------------------------------------


def doctor(
    config: Config | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    size: str | None = None,
    quick: bool = False,
    gpus: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """Checks machine, data and config, and yields what was found, each with advice where there is some.

    A config that is named, with `overrides`, may have mistakes: they are findings too. `quick` leaves out compiling and
    slow trials. `gpus` is how many ranks the config is meant for.
    """
    target = str(config) if isinstance(config, str | Path) else config
    if not isinstance(target, str | LoadedConfig | None):
        target = with_sources(target)
    if overrides and isinstance(target, LoadedConfig):
        raise UsageError("overrides are for a config by its name", "change the config itself, or name its file")
    how = {"hardware": hardware, "size": size, "quick": quick, "gpus": gpus}
    return examine(target, overrides, progress=progress, **how)


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(folder: str | Path = "runs", *, sort: str = "age", reverse: bool = False) -> list[RunRow]:
    """The runs that lie in a folder, as rows with state, step, loss, size and age; none where there is no such folder.

    `sort` is age (the newest first), name, state, step, loss or size.
    """
    if sort not in SORTS:
        raise UsageError(f"runs cannot be sorted by {sort!r}", f"use one of {', '.join(SORTS)}")
    rows = list_runs(Path(folder), sort=sort) if Path(folder).is_dir() else []
    return rows[::-1] if reverse else rows


def watch(run: str | Path | None = None) -> Iterator[Record]:
    """The records of a run, from its first to its last; waits for more while a process works on it.

    `run` is a folder or a name under runs/, by default the newest run there.
    """
    return follow(find_run(None if run is None else str(run)))


def bundle(
    run: str | Path | None = None,
    out: str | Path | None = None,
    *,
    doctor: bool = True,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Writes one zip file of a run for a bug report and returns its path, by default RUN-bundle.zip.

    It holds config, environment, the doctor's findings, metrics and a list of the run's files; data, samples, weights
    and keys stay out.
    Without `doctor` the machine is not looked at. A file that is no bundle is replaced only with `overwrite`.
    """
    folder = find_run(None if run is None else str(run))
    target = Path(f"{folder.resolve().name}-bundle.zip") if out is None else Path(out)
    check_bundle_target(target, overwrite=overwrite)  # before anything is looked at
    read_history(folder)  # a folder without a run is an error now
    machine, findings = None, []
    if doctor:
        progress("looking at the machine ...")
        machine, findings = _machine_without_secrets(folder)
    private = Private.of(os.environ, Path.home())
    write_bundle(target, bundle_files(folder, private, machine=machine, doctor=findings))
    return target


def _machine_without_secrets(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the machine is, and what the doctor finds of it and of the run's config."""
    machine = gather_machine()
    findings = examine(str(folder / "config.yaml"), quick=True, machine=machine)
    found = [{"type": "finding", **dataclasses.asdict(finding)} for finding in findings]
    facts = dataclasses.asdict(machine)
    facts["environment"] = {name: value for name, value in machine.environment.items() if not is_secret(name)}
    for card in facts["cards"]:
        card.pop("identity")  # its number identifies the owner, not the bug
        card.pop("processes")
    return facts, found
