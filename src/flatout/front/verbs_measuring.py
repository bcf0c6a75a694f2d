"""The verbs bench, ablate, tune and profile: words in, measurements called, tables, rows, configs and pictures out.

Contract: as in `flatout.cli`. Mistakes in the words, unknown rungs and fields, and files that cannot be written answer
before anything is built or measured. Rows are on disk as soon as they are measured; Ctrl-C, SIGTERM and SIGHUP end with
the table, the rows and the picture of what was measured so far. A picture or a config that is not ours is not replaced
without --overwrite. Exit codes: `bench` 4 when a rung's losses were wrong or a rung broke, 2 when this machine can have
none of the rungs that were named; `ablate` 4 when the config as it is diverged. `tune` shows what it found even where
it cannot be written; a study keeps its trials; once the file of `tune` is there the work is done, and a signal does not
make it a failure. `profile`: in the ranks of a launcher the first one speaks, and a signal leaves no folder.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.errors import HardwareError, UsageError, many
from flatout.folders import free_folder
from flatout.front.configs import load_any
from flatout.front.output import (
    Line,
    config_target,
    ended_by_signals,
    folder_target,
    held_signal,
    picture_target,
    study_target,
    write_config,
)
from flatout.front.verbs_training import reported_once
from flatout.front.words import one_line
from flatout.launch import launch

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.records import BenchProgress, BenchRow, TuneRow
    from flatout.tuning.ablation import AblateResult
    from flatout.tuning.lr_range import Point


# --- bench ------------------------------------------------------------------------------------------------------------


GROUPS = ("ladder", "without", "extra")
BENCH_ROWS, BENCH_PICTURE = "bench.jsonl", "bench.png"


def bench(parsed: argparse.Namespace) -> int:
    names = None if parsed.rungs is None else [name.strip() for name in parsed.rungs.split(",") if name.strip()]
    if names is not None and not names:
        raise UsageError("--rungs needs names of rungs", "for example --rungs bf16,compile")
    if names is not None and parsed.only is not None:
        raise UsageError(
            "--rungs goes without --only: the one names rungs, the other a part of the ladder", "leave one of them out"
        )
    from flatout.tuning.rungs import check_asked

    loaded = load_any(parsed)
    check_asked(loaded, names)
    folder = _free_folder(loaded.config.output.name) if parsed.out is None else Path(parsed.out)
    folder_target(folder, "" if parsed.out == "" else str(folder), BENCH_ROWS)
    line, place = Line(logs=True), None

    def notice(message: str) -> None:
        line.close()
        print(one_line(message), file=sys.stderr)

    rows: list[BenchRow] = []
    if os.path.lexists(folder / BENCH_PICTURE) and not (folder / BENCH_ROWS).exists():
        raise UsageError(f"{folder / BENCH_PICTURE} is there already", "name another folder with --out")
    from flatout.records import record_to_json
    from flatout.tuning.ladder_rows import progress_line, row_line

    def progress(now: "BenchProgress") -> None:
        nonlocal place
        place = now
        if line.watched or now.phase != "timing":  # one line a rung is enough in a file
            line.show(progress_line(now))

    options = ("steps", "parity_steps", "batch_tokens", "only", "seconds")
    asked = {name: getattr(parsed, name) for name in options}
    asked |= {"notice": notice, "progress": progress}
    with held_signal() as stop, contextlib.closing(line):
        for row in flatout.bench(loaded, **asked, rungs=names, folder=folder):
            rows.append(row)
            if row.status != "absent" and place is not None:  # the table lists these together
                notice(row_line(row, place))
            if parsed.json:
                print(record_to_json(row), flush=True)
    bad = any(row.status in ("red", "failed") for row in rows)
    measured = any(row.status != "absent" for row in rows)
    ladder = _ladder_names(loaded.config.speed.device, samples=loaded.config.fine_tunes) if rows else []
    _finish(rows, folder, ladder, quiet=parsed.json)
    if stop.number is not None:
        kept = f"{many(len(rows), 'rung')} {'is' if len(rows) == 1 else 'are'} in {folder}"
        return stop.reported(kept if measured else "nothing was measured yet")
    _check_something_was_had(names, rows)
    return 4 if bad else 0


def _ladder_names(device: str, *, samples: bool) -> list[str]:
    """The ladder of this kind of device, bottom to top, also what this very one cannot have."""
    from flatout.device import detect_device
    from flatout.tuning.rungs import all_rungs

    kind = detect_device(device).kind
    listed = all_rungs(kind=kind, micro_batch=1, attention="sdpa", eigenstates=True, samples=samples)
    return [rung.name for rung in listed if rung.group == "ladder"]


def _finish(rows: "list[BenchRow]", folder: Path, ladder: Sequence[str], *, quiet: bool) -> None:
    """The table and the picture of what was measured."""
    if not rows:
        return
    from flatout.observe.sheets import draw_picture, print_sheet
    from flatout.tuning.ladder_rows import picture_of, sheet_of

    complete = sorted(rows, key=lambda row: row.place)
    if not quiet:
        print_sheet(sheet_of(complete, ladder))
    if not (folder / BENCH_ROWS).exists():
        return
    made = [folder / BENCH_ROWS]
    if any(row.status != "absent" for row in complete):
        draw_picture(picture_of(complete, ladder), folder / BENCH_PICTURE)
        made.append(folder / BENCH_PICTURE)
    print(f"wrote {' and '.join(str(path) for path in made)}", file=sys.stderr if quiet else sys.stdout)


def _check_something_was_had(names: Sequence[str] | None, rows: "Sequence[BenchRow]") -> None:
    asked = [row for row in rows if row.rung in (names or ())]
    if asked and len(asked) == len(set(names or ())) and all(row.status == "absent" for row in asked):
        why = f"this machine cannot have {', '.join(row.rung for row in asked)}"
        why += f" ({asked[0].reason})" if len(asked) == 1 else ""
        raise HardwareError(f"nothing was measured: {why}", "without --rungs, all that this machine has is measured")


def _free_folder(name: str) -> Path:
    """bench/NAME, or the first bench/NAME-2, bench/NAME-3 ... that holds neither rows nor a picture."""
    return free_folder(
        Path("bench") / name, lambda folder: any(os.path.lexists(folder / made) for made in (BENCH_ROWS, BENCH_PICTURE))
    )


# --- ablate -----------------------------------------------------------------------------------------------------------


ABLATE_ROWS, ABLATE_PICTURE = "ablate.jsonl", "ablate.png"


def ablate(parsed: argparse.Namespace) -> int:
    loaded = load_any(parsed)
    from flatout.tuning.changes import check_length, check_named, choose, split_fields

    fields = None if parsed.fields is None else split_fields(parsed.fields)
    # Bad fields are refused before anything else. Values of a size wait for the data, and so do their changes.
    if loaded.size is None:
        choose(fields, loaded)
    else:
        check_length(loaded)
        for entry in fields or ():
            check_named(entry)
    folder = Path("ablate") / loaded.config.output.name if parsed.out is None else Path(parsed.out)
    folder_target(folder, "" if parsed.out == "" else str(folder), ABLATE_ROWS)
    if folder.is_dir():
        picture_target(folder / ABLATE_PICTURE, "--out")
    from flatout.records import record_to_json
    from flatout.tuning.ablation import run_line

    line, place, result = Line(), (0, 0), None
    asked: dict[str, Any] = {"fields": fields, "seeds": parsed.seeds, "folder": folder}

    noticed: set[str] = set()

    def notice(message: str) -> None:
        if message not in noticed:  # what was measured is read once more at the end
            noticed.add(message)
            line.notice(message)

    def progress(number: int, total: int, job: str, record: Any) -> None:
        nonlocal place
        place = (number, total)
        at = "" if record is None else f", loss {record.loss:.4f} at step {record.step}"
        line.show(f"[{number}/{total}] {job}{at}")

    with held_signal() as stop, contextlib.closing(line):
        for record in flatout.ablate(loaded, **asked, minutes=parsed.minutes, notice=notice, progress=progress):
            if isinstance(record, flatout.AblateResult):
                result = record
                continue
            line.close()
            if parsed.json:
                print(record_to_json(record), flush=True)
            else:
                print(one_line(run_line(record, *place)), file=sys.stderr, flush=True)
    if result is None and (folder / ABLATE_ROWS).exists():
        # What there is to show, and nothing more.
        *_, result = flatout.ablate(loaded, **asked, minutes=0.0, notice=notice)
    if isinstance(result, flatout.AblateResult):
        _hand_over_ablation(result, folder, quiet=parsed.json)
    if stop.number is not None:
        kept = f"{folder / ABLATE_ROWS} keeps the runs that ended, the same command goes on with them"
        return stop.reported(kept if result else "no run had ended yet")
    return 0


def _hand_over_ablation(result: "AblateResult", folder: Path, *, quiet: bool) -> None:
    """The table and the picture."""
    from flatout.observe.sheets import draw_picture

    _show(result, as_json=quiet)
    if any(one.pairs for one in result.effects):
        draw_picture(result.picture(), folder / ABLATE_PICTURE)
        made = f"wrote {folder / ABLATE_ROWS} and {folder / ABLATE_PICTURE}"
        print(made, file=sys.stderr if quiet else sys.stdout)


# --- tune -------------------------------------------------------------------------------------------------------------


def tune(parsed: argparse.Namespace) -> int:
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    loaded = load_any(parsed)
    verb = _verb_of(loaded)
    from flatout.observe.sheets import print_sheet
    from flatout.records import TuneResult, record_to_json
    from flatout.tuning.tuner import progress_line, sheet_of

    line = Line(logs=True)
    rows: list[TuneRow] = []
    result: TuneResult | None = None
    asked = {name: getattr(parsed, name) for name in ("memory", "exhaustive", "seconds")}
    with held_signal() as stop, contextlib.closing(line):
        for record in flatout.tune(loaded, **asked, progress=lambda now: line.show(progress_line(now))):
            if parsed.json:
                print(record_to_json(record), flush=True)
            if isinstance(record, TuneResult):
                result = record
            else:
                rows.append(record)
    if not parsed.json:
        print_sheet(sheet_of(rows, result))
    if result is None or stop.number is not None:
        return stop.reported("nothing was written")
    if out is not None:
        write_config(out, result.fragment, overwrite=parsed.overwrite)
    if not parsed.json:
        print("" if out else result.fragment, end="")
        print(_train_with(verb, out, result.words, parsed))
        print("" if out else "or write it to a file with --out FILE\n", end="")
    return 0


# --- tune lr, tune search ---------------------------------------------------------------------------------------------


def tune_lr(parsed: argparse.Namespace) -> int:
    low, high, steps = parsed.start, parsed.end, parsed.steps
    out, plot = _targets(parsed)
    loaded = load_any(parsed)

    def progress(number: int, point: "Point") -> None:
        line.show(f"step {number} of {steps}: rate {point.rate:.1e}, loss {point.loss:.4f}")

    line = Line()
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = flatout.tune_lr(loaded, low=low, high=high, steps=steps, progress=progress)
    return _hand_over(result, _verb_of(loaded), out, plot, parsed)


def tune_search(parsed: argparse.Namespace) -> int:
    if parsed.space is None:
        raise UsageError(
            "`flatout tune search` needs a file with the fields to search over",
            "write lines such as `optim.learning_rate: {log: [1e-4, 1e-2]}` to space.yaml and name it first",
        )
    out, plot = _targets(parsed)
    study = None if parsed.study is None else study_target(Path(parsed.study))
    loaded = load_any(parsed)
    from flatout.tuning.study import trial_line

    line, trials, result = Line(), 0, None

    def progress(number: int, values: dict[str, Any], record: Any) -> None:
        at = "" if record is None else f", loss {record.loss:.4f} at step {record.step}"
        shown = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in values.items())
        line.show(f"trial {number}: {shown}{at}")

    def became() -> str:
        kept = f"; {study} keeps the trials so far, the same command continues with them" if study else ""
        return f"{trials} {'trial was' if trials == 1 else 'trials were'} made{kept}; nothing else was written"

    asked = {"trials": parsed.trials, "study": study, "notice": line.notice, "progress": progress}
    with ended_by_signals(became), contextlib.closing(line):
        for record in flatout.search(parsed.space, loaded, **asked):
            line.close()
            if isinstance(record, flatout.StudyResult):
                result = record
                continue
            trials += 1
            if parsed.json:
                print(json.dumps(record.to_json(), ensure_ascii=False), flush=True)
            else:
                print(one_line(trial_line(record)), file=sys.stderr, flush=True)
    return _hand_over(result, _verb_of(loaded), out, plot, parsed)


def _targets(parsed: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Where the config and the picture go; a config is never without its picture."""
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    plot = None if parsed.plot is None else Path(parsed.plot)
    plot = out.with_suffix(".png") if plot is None and out is not None else plot
    return out, None if plot is None else picture_target(plot, "--plot", overwrite=parsed.overwrite)


def _verb_of(loaded: "LoadedConfig") -> str:
    """The verb that trains a config."""
    return "finetune" if loaded.config.fine_tunes else "train"


def _show(result: Any, *, as_json: bool) -> None:
    """A result as its sheet, or as one JSON line."""
    from flatout.observe.sheets import print_sheet

    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_sheet(result.sheet())


def _hand_over(result: Any, verb: str, out: Path | None, plot: Path | None, parsed: argparse.Namespace) -> int:
    """Shows what was found, then writes it."""
    from flatout.observe.sheets import draw_picture

    _show(result, as_json=parsed.json)
    if out is not None:
        write_config(out, result.fragment, overwrite=parsed.overwrite)
    if not parsed.json:
        print(_train_with(verb, out, result.words, parsed))
    if plot is not None:
        draw_picture(result.picture(), plot, overwrite=parsed.overwrite)
        if not parsed.json:
            print(f"drew {plot}")
    return 0


# --- what all of them have in common ----------------------------------------------------------------------------------


def _train_with(verb: str, out: Path | None, found: tuple[str, ...], parsed: argparse.Namespace) -> str:
    """How to train with what was found: from the file that was written, or by words."""
    from flatout.tuning.changes import train_words

    if out is not None:
        return f"wrote {out}; train with: flatout {verb} {shlex.quote(str(out))}"
    words = [*([parsed.config] if parsed.config else []), *train_words(parsed.overrides, found)]
    words += ["--hardware", parsed.hardware] if parsed.hardware else []
    words += ["--size", parsed.size] if parsed.size else []
    return f"train with: flatout {verb} {shlex.join(words)}"


# --- profile ----------------------------------------------------------------------------------------------------------


def profile(parsed: argparse.Namespace) -> int:
    first = getattr(launch(), "rank", 0) == 0  # of one process alone there is no launch
    loaded = reported_once(lambda: load_any(parsed, tell=first))

    def say(text: str) -> None:
        if first:
            print(f"profile: {text}", file=sys.stderr, flush=True)

    with ended_by_signals(lambda: "nothing was written"):
        done = flatout.profile(loaded, parsed.out, steps=parsed.steps, progress=say)
    if done is None:
        return 0
    if parsed.json:
        print(json.dumps(done.figures, ensure_ascii=False))
    else:
        from flatout.observe.sheets import print_sheet
        from flatout.tuning.profile_page import sheet_of

        print_sheet(sheet_of(done.figures, str(done.folder)))
    return 0
