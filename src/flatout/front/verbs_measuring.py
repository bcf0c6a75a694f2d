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
import dataclasses
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flatout
from flatout.errors import HardwareError, ResourceError, UsageError, UserError
from flatout.folders import free_folder
from flatout.front.output import (
    Line,
    add_overwrite,
    config_target,
    ended_by_signals,
    exit_code_of,
    folder_target,
    picture_target,
    study_target,
    terminated_like_interrupted,
    word_of,
    write_config,
)
from flatout.front.verbs_training import told_by_one
from flatout.front.words import Parser, add_config, load_any, one_line
from flatout.launch import launch

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.records import BenchProgress, BenchRow, TuneResult, TuneRow
    from flatout.tuning.ablation import AblateResult
    from flatout.tuning.lr_range import Point


# --- bench ------------------------------------------------------------------------------------------------------------


GROUPS = ("ladder", "without", "extra")
BENCH_ROWS, BENCH_PICTURE = "bench.jsonl", "bench.png"


def bench(words: list[str]) -> int:
    parsed = _bench_parser().parse_words(words)
    names = None if parsed.rungs is None else [name.strip() for name in parsed.rungs.split(",") if name.strip()]
    if names is not None and not names:
        raise UsageError("--rungs needs names of rungs", "for example --rungs bf16,compile")
    if names is not None and parsed.only is not None:
        raise UsageError(
            "--rungs goes without --only: the one names rungs, the other a part of the ladder", "leave one of them out"
        )
    if parsed.go_on and parsed.out is None:
        raise UsageError("--go-on needs the folder of the rows", "name it with --out FOLDER")
    from flatout.tuning.rungs import check_asked

    loaded = load_any(parsed)
    check_asked(loaded, names)
    folder = _free_folder(loaded.config.output.name) if parsed.out is None else Path(parsed.out)
    folder_target(folder, "" if parsed.out == "" else str(folder), BENCH_ROWS)
    line, place = Line(logs=True), None

    def notice(message: str) -> None:
        line.close()
        print(one_line(message), file=sys.stderr)

    rows: list[BenchRow] = _earlier_rows(folder, notice) if parsed.go_on else []
    _check_picture(folder, rows, going_on=parsed.go_on)
    from flatout.records import record_to_json
    from flatout.tuning.ladder_rows import progress_line, row_line

    def progress(now: "BenchProgress") -> None:
        nonlocal place
        place = now
        if line.watched or now.phase != "timing":  # one line a rung is enough in a file
            line.show(progress_line(now))

    before = len(rows)
    options = ("steps", "parity_steps", "batch_tokens", "only", "seconds", "go_on")
    asked = {name: getattr(parsed, name) for name in options}
    stopped: KeyboardInterrupt | None = None
    try:
        with terminated_like_interrupted():
            told = {"notice": notice, "progress": progress}
            for row in flatout.bench(loaded, **asked, rungs=names, folder=folder, **told):
                rows.append(row)
                if row.status != "absent" and place is not None:  # the table lists these together
                    notice(row_line(row, place))
                if parsed.json:
                    print(record_to_json(row), flush=True)
    except KeyboardInterrupt as signalled:
        stopped = signalled
    finally:
        line.close()
    bad = any(row.status in ("red", "failed") for row in rows[before:])
    measured = any(row.status != "absent" for row in rows)
    ladder = _ladder_names(loaded.config.speed.device, samples=loaded.config.fine_tunes) if rows else []
    _finish(rows, folder, ladder, quiet=parsed.json, claims=parsed.claims)
    if stopped is not None:
        kept = (
            f"{_rungs(len(rows))} in {folder}, --go-on measures the others" if measured else "nothing was measured yet"
        )
        print(f"{word_of(stopped)}; {kept}", file=sys.stderr)
        return exit_code_of(stopped)
    _check_something_was_had(names, rows)
    return 4 if bad else 0


def _bench_parser() -> Parser:
    from flatout.tuning.rungs import every_name  # which needs no torch

    about = (
        "Measure every speed switch on this machine: from a naive baseline up, one at a time, then each one out of the "
        "full set, then the rest. A rung whose losses are not the reference's prints no speed. The others are timed in "
        "turns with the rung they are compared with, and called faster or slower only where the error allows it."
    )
    parser = Parser("bench", _filled(about))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the names below are not to be broken at hyphens
    add_config(parser)
    settings = (
        f"{parser.epilog} The ladder sets the switches of `speed` itself; speed.micro_batch is the most it tries."
    )
    listing = f"rungs (docs/bench.md tells what each one is):\n{_filled(', '.join(every_name()), '  ')}"
    parser.epilog = f"{_filled(settings)}\n\n{listing}"
    parser.number("--steps", 3, 10_000, default=800, help="most steps to time per rung; default 800")
    parity = "steps whose losses must be the reference's; default 20"
    parser.number("--parity-steps", 2, 10_000, default=20, help=parity)
    parser.number("--batch-tokens", 1, 2**40, help="tokens per step; default: the config's, at most 64 sequences")
    limit = "begin no other rung after about this many seconds, at least 10; --go-on measures the rest"
    parser.number("--seconds", 10, 1e6, metavar="SECONDS", help=limit)
    parser.add_argument(
        "--rungs", metavar="A,B,C", help="only these rungs, and what they are compared with; the names are below"
    )
    parser.add_argument("--only", choices=GROUPS, help="only this part of the ladder")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"where {BENCH_ROWS} and {BENCH_PICTURE} go; default: bench/NAME, numbered when taken",
    )
    parser.flag("--go-on", "measure what is missing in the rows that --out holds already")
    parser.flag("--claims", "show what guides claim of each switch, in the table and the picture")
    parser.flag("--json", "print rows as JSON lines instead of the table")
    return parser


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 78, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _earlier_rows(folder: Path, notice: Callable[[str], None]) -> "list[BenchRow]":
    """The rows to continue from; prints a notice if there are none."""
    from flatout.front.measuring import earlier_rungs

    rows = earlier_rungs(folder / BENCH_ROWS, notice)
    if not rows:
        notice(f"there is nothing to continue from in {folder}: the ladder starts at its beginning")
    return rows


def _check_picture(folder: Path, rows: "Sequence[BenchRow]", *, going_on: bool) -> None:
    """Refuses a folder with a picture that is not of the ladder whose rows lie beside it."""
    picture, why = folder / BENCH_PICTURE, ""
    if not os.path.lexists(picture) or ((folder / BENCH_ROWS).exists() and not going_on):
        return  # such rows are refused anyway, and in better words
    from flatout.observe.picture import is_picture

    if all(row.status == "absent" for row in rows):
        why = ", and no measured rows beside it: it is not of this ladder"
    elif picture.is_symlink() or not is_picture(picture):
        why = " and does not look like a picture of flatout"
    if why:
        raise UsageError(f"{picture} is there{why}", "name another folder with --out, or move the picture away")


def _ladder_names(device: str, *, samples: bool) -> list[str]:
    """The ladder of this kind of device, bottom to top, also what this very one cannot have."""
    from flatout.device import detect_device
    from flatout.tuning.rungs import all_rungs

    kind = detect_device(device).kind
    listed = all_rungs(kind=kind, micro_batch=1, attention="sdpa", eigenstates=True, samples=samples)
    return [rung.name for rung in listed if rung.group == "ladder"]


def _finish(rows: "list[BenchRow]", folder: Path, ladder: Sequence[str], *, quiet: bool, claims: bool) -> None:
    """The table and the picture of what was measured."""
    if not rows:
        return
    from flatout.observe.sheets import draw_picture, print_sheet
    from flatout.tuning.ladder_rows import picture_of, sheet_of

    complete = sorted(rows, key=lambda row: row.place)
    if not quiet:
        print_sheet(sheet_of(complete, ladder, claims=claims))
    if not (folder / BENCH_ROWS).exists():
        return
    made = [folder / BENCH_ROWS]
    if any(row.status != "absent" for row in complete):
        try:
            draw_picture(picture_of(complete, ladder, claims=claims), folder / BENCH_PICTURE)
        except ResourceError as error:
            raise ResourceError(error.message, f"{error.hint}; the rows are kept, and --go-on draws them") from error
        made.append(folder / BENCH_PICTURE)
    print(f"wrote {' and '.join(str(path) for path in made)}", file=sys.stderr if quiet else sys.stdout)


def _check_something_was_had(names: Sequence[str] | None, rows: "Sequence[BenchRow]") -> None:
    asked = [row for row in rows if row.rung in (names or ())]
    if asked and len(asked) == len(set(names or ())) and all(row.status == "absent" for row in asked):
        why = f"this machine cannot have {', '.join(row.rung for row in asked)}"
        why += f" ({asked[0].reason})" if len(asked) == 1 else ""
        raise HardwareError(f"nothing was measured: {why}", "without --rungs, all that this machine has is measured")


def _rungs(count: int) -> str:
    return "1 rung is" if count == 1 else f"{count} rungs are"


def _free_folder(name: str) -> Path:
    """bench/NAME, or the first bench/NAME-2, bench/NAME-3 ... that holds neither rows nor a picture."""
    return free_folder(
        Path("bench") / name, lambda folder: any(os.path.lexists(folder / made) for made in (BENCH_ROWS, BENCH_PICTURE))
    )


# --- ablate -----------------------------------------------------------------------------------------------------------


ABLATE_ROWS, ABLATE_PICTURE = "ablate.jsonl", "ablate.png"


def ablate(words: list[str]) -> int:
    parsed = _ablate_parser().parse_words(words)
    loaded = load_any(parsed)
    from flatout.tuning.changes import check_length, check_named, choose, split_fields

    fields = None if parsed.fields is None else split_fields(parsed.fields)
    # What is wrong with them is told before anything else. Values of a size wait for the data, and so do their changes.
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
    asked: dict[str, Any] = {"fields": fields, "seeds": parsed.seeds, "equal": parsed.equal, "folder": folder}

    noticed: set[str] = set()

    def notice(message: str) -> None:
        if message not in noticed:  # what was measured is read once more at the end
            noticed.add(message)
            line.close()
            print(f"note: {message}", file=sys.stderr)

    def progress(number: int, total: int, job: str, record: Any) -> None:
        nonlocal place
        place = (number, total)
        told = "" if record is None else f", loss {record.loss:.4f} at step {record.step}"
        line.show(f"[{number}/{total}] {job}{told}")

    stopped: KeyboardInterrupt | None = None
    try:
        with terminated_like_interrupted(), contextlib.closing(line):
            for record in flatout.ablate(loaded, **asked, minutes=parsed.minutes, notice=notice, progress=progress):
                if isinstance(record, flatout.AblateResult):
                    result = record
                    continue
                line.close()
                if parsed.json:
                    print(record_to_json(record), flush=True)
                else:
                    print(one_line(run_line(record, *place)), file=sys.stderr, flush=True)
    except KeyboardInterrupt as signalled:
        stopped = signalled
    if result is None and (folder / ABLATE_ROWS).exists():
        *_, result = flatout.ablate(
            loaded, **asked, minutes=0.0, notice=notice
        )  # what there is to show, and nothing more
    if isinstance(result, flatout.AblateResult):
        _hand_over_ablation(result, folder, quiet=parsed.json)
    if stopped is not None:
        kept = f"{folder / ABLATE_ROWS} keeps the runs that ended, the same command goes on with them"
        print(f"{word_of(stopped)}; {kept if result else 'no run had ended yet'}", file=sys.stderr)
        return exit_code_of(stopped)
    return 0


def _ablate_parser() -> Parser:
    parser = Parser(
        "ablate",
        "Find what each field of a config is worth: whole runs with and without it, with the same seeds, at equal "
        "tokens and at equal seconds. A field helps or hurts only where the noise between seeds allows to say so.",
    )
    add_config(parser)
    parser.add_argument(
        "--fields",
        metavar="A.B,C.D=X",
        help="fields to change, one at a time: true or false is flipped, others are written with their other value; "
        "default: whatever model, optim and train set differently from the default, back to it",
    )
    parser.number("--seeds", 1, 100, default=2, help="pairs of runs per field; default 2, one gives no verdict")
    parser.add_argument(
        "--equal",
        choices=("tokens", "seconds", "both"),
        default="both",
        help="what two runs that are compared have in common; default both",
    )
    parser.number("--minutes", 0, 1e6, help="begin no run that would end later; 0 shows what is there")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"where {ABLATE_ROWS} and {ABLATE_PICTURE} go, and rows are looked for; default: ablate/NAME",
    )
    parser.flag("--json", "print runs and the result as JSON lines instead of the table")
    return parser


def _hand_over_ablation(result: "AblateResult", folder: Path, *, quiet: bool) -> None:
    """The table and the picture."""
    from flatout.observe.sheets import draw_picture

    _show(result, as_json=quiet)
    if any(one.pairs for one in result.effects):
        draw_picture(result.picture(), folder / ABLATE_PICTURE)
        made = f"wrote {folder / ABLATE_ROWS} and {folder / ABLATE_PICTURE}"
        print(made, file=sys.stderr if quiet else sys.stdout)


# --- tune -------------------------------------------------------------------------------------------------------------


def tune(words: list[str]) -> int:
    finders = {"lr": tune_lr, "search": tune_search}
    return finders[words[0]](words[1:]) if words and words[0] in finders else _tune_speed(words, tuple(finders))


def _tune_speed(words: list[str], finders: tuple[str, ...]) -> int:
    parser = Parser(
        "tune",
        "Find the micro-batch, checkpointing and loss with the most tokens per second for the config's global batch, "
        "in pretraining or fine-tuning, by real training steps on this device. What is learned does not change.",
    )
    parser.actions = finders
    add_config(parser)
    parser.number("--memory", 0.1, 10_000.0, metavar="GIB", help="emulate a GPU with this much memory")
    parser.add_argument("--out", metavar="FILE", help="write the config found to this YAML file, to train with")
    add_overwrite(parser)
    parser.flag("--exhaustive", "try every micro-batch with everything else")
    parser.flag("--compile", "try torch.compile's modes as well; takes minutes for each")
    parser.number(
        "--seconds",
        1,
        1e6,
        help="take the best found after this long; default 120, 1200 with compile, 3600 with --exhaustive",
    )
    parser.flag("--json", "print rows as JSON lines instead of the table")
    parsed = parser.parse_words(words)
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    loaded = load_any(parsed)
    verb = _verb_of(loaded)
    from flatout.observe.sheets import print_sheet
    from flatout.records import TuneResult, record_to_json
    from flatout.tuning.tuner import progress_line, sheet_of

    line = Line(logs=True)
    rows: list[TuneRow] = []
    result: TuneResult | None = None
    failure: UserError | None = None
    shown = parsed.json
    asked = {name: getattr(parsed, name) for name in ("memory", "exhaustive", "compile", "seconds")}
    try:
        with terminated_like_interrupted():
            with contextlib.closing(line):
                for record in flatout.tune(loaded, **asked, progress=lambda now: line.show(progress_line(now))):
                    if parsed.json:
                        print(record_to_json(record), flush=True)
                    if isinstance(record, TuneResult):
                        result = record
                    else:
                        rows.append(record)
            assert result is not None, "the last record of a search"
            failure = None if out is None else _failure_of(_writing(out, result.fragment, parsed))
            if not shown:
                shown = True
                print_sheet(sheet_of(rows, result))
                _print_choice(result, None if failure else out, parsed, verb)
    except KeyboardInterrupt as stopped:
        if result is not None and out is not None and _holds(out, result.fragment):
            print(f"{word_of(stopped)}; {out} was written before that, and is whole", file=sys.stderr)
            return 0
        if not shown:
            print_sheet(sheet_of(rows, None))
        print(f"{word_of(stopped)}; nothing was written", file=sys.stderr)
        return exit_code_of(stopped)
    if failure is not None:
        raise failure
    return 0


def _holds(path: Path, text: str) -> bool:
    """Whether the file is there and whole; the file is asked, since a signal can come right after its writing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") == text
    except OSError:
        return False


def _print_choice(result: "TuneResult", out: Path | None, parsed: argparse.Namespace, verb: str) -> None:
    if out is None:
        print(f"{result.fragment}\n", end="")
    print(_train_with(verb, out, result.words, parsed))
    if parsed.out is None:
        print("or write it to a file with --out FILE")


# --- tune lr, tune search ---------------------------------------------------------------------------------------------


def tune_lr(words: list[str]) -> int:
    parser = Parser(
        "tune lr",
        "Find a learning rate by a range test: real training steps whose rate rises from far too small to too large.",
    )
    add_config(parser)
    parser.add_argument("--out", metavar="FILE", help="write the config found to this YAML file, to train with")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve to this PNG or SVG file")
    parser.number("--from", 1e-12, 100.0, dest="start", metavar="RATE", default=1e-7, help="first rate; default 1e-7")
    parser.number("--to", 1e-12, 100.0, dest="end", metavar="RATE", default=1.0, help="last rate; default 1")
    parser.number("--steps", 20, 100_000, default=100, help="steps between them, 20 to 100,000; default 100")
    add_overwrite(parser)
    parser.flag("--json", "print one JSON line instead of the table")
    parsed = parser.parse_words(words)
    low, high, steps = parsed.start, parsed.end, parsed.steps
    out, plot = _targets(parsed)
    loaded = load_any(parsed)

    def progress(number: int, point: "Point") -> None:
        line.show(f"step {number} of {steps}: rate {point.rate:.1e}, loss {point.loss:.4f}")

    line = Line()
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = flatout.tune_lr(loaded, low=low, high=high, steps=steps, progress=progress)
    return _hand_over(result, _verb_of(loaded), out, plot, parsed)


def tune_search(words: list[str]) -> int:
    parser = Parser(
        "tune search",
        "Search hyperparameters by short real runs. Fields and ranges stand in SPACE.yaml; bad trials are cut short.",
    )
    add_config(parser)
    parser.usage = f"{parser.prog} SPACE.yaml [CONFIG] [SECTION.FIELD=VALUE ...] [options]"
    parser.number("--trials", 1, 100_000, default=20, help="finished trials in all; default 20")
    parser.add_argument(
        "--study", metavar="FILE.db", help="keep the trials in this SQLite file, to continue with later"
    )
    parser.add_argument("--out", metavar="FILE", help="write the best config to this YAML file, to train with")
    parser.add_argument("--plot", metavar="FILE", help="draw all trials to this PNG or SVG file")
    add_overwrite(parser)
    parser.flag("--json", "print a JSON line per trial and one for the result")
    named = bool(words) and not words[0].startswith("-")
    parsed = parser.parse_words(words[1:] if named else words)
    if not named:
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
        told = "" if record is None else f", loss {record.loss:.4f} at step {record.step}"
        shown = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in values.items())
        line.show(f"trial {number}: {shown}{told}")

    def became() -> str:
        kept = f"; {study} keeps the trials so far, the same command continues with them" if study else ""
        return f"{trials} {'trial was' if trials == 1 else 'trials were'} made{kept}; nothing else was written"

    def notice(message: str) -> None:
        line.close()
        print(f"note: {message}", file=sys.stderr)

    asked = {"trials": parsed.trials, "study": study, "notice": notice, "progress": progress}
    with ended_by_signals(became), contextlib.closing(line):
        for record in flatout.search(words[0], loaded, **asked):
            line.close()
            if isinstance(record, flatout.StudyResult):
                result = record
                continue
            trials += 1
            if parsed.json:
                print(json.dumps({"type": "trial", **dataclasses.asdict(record)}, ensure_ascii=False), flush=True)
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
    """Shows what was found, then writes it; an error of writing comes after everything else."""
    from flatout.observe.sheets import draw_picture

    _show(result, as_json=parsed.json)
    unwritten = None if out is None else _failure_of(_writing(out, result.fragment, parsed))
    undrawn = (
        None if plot is None else _failure_of(lambda: draw_picture(result.picture(), plot, overwrite=parsed.overwrite))
    )
    if not parsed.json:
        print(_train_with(verb, None if unwritten else out, result.words, parsed))
        if unwritten is not None:
            print(result.fragment, end="")
        if plot is not None and undrawn is None:
            print(f"drew {plot}")
    if failure := unwritten or undrawn:
        raise failure
    return 0


# --- what all of them have in common ----------------------------------------------------------------------------------


def _writing(out: Path, fragment: str, parsed: argparse.Namespace) -> Callable[[], None]:
    return lambda: write_config(out, fragment, overwrite=parsed.overwrite)


def _failure_of(write: Callable[[], None]) -> UserError | None:
    """Why writing did not work, to be told after everything was shown."""
    try:
        write()
    except UserError as error:
        return ResourceError(error.message, error.hint)
    return None


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


def profile(words: list[str]) -> int:
    parser = Parser(
        "profile",
        "Take some real training steps under torch's profiler and say what holds them: arithmetic, memory, launches or "
        "data, and which switch to try. Writes a trace, a memory snapshot, the kernels and a page to read.",
    )
    add_config(parser)
    timed = "steps under the profiler; default 4, fewer if a step has many micro-batches"
    parser.number("--steps", 1, 1000, help=timed)
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the files go; default: profile/NAME, numbered when that is taken"
    )
    parser.flag("--json", "print the figures as one JSON object instead of the page")
    found = launch()

    def checked() -> "tuple[argparse.Namespace, LoadedConfig]":
        parsed = parser.parse_words(words)
        return parsed, load_any(parsed, tell=found is None or found.rank == 0)

    parsed, loaded = told_by_one(checked)
    with ended_by_signals(lambda: "nothing was written"):
        done = flatout.profile(loaded, parsed.out, steps=parsed.steps, progress=_say)
    if done is None:
        return 0
    if parsed.json:
        print(json.dumps(done.figures, ensure_ascii=False))
    else:
        from flatout.observe.sheets import print_sheet
        from flatout.tuning.profile_page import sheet_of

        print_sheet(sheet_of(done.figures, str(done.folder)))
    return 0


def _say(text: str) -> None:
    print(f"profile: {text}", file=sys.stderr, flush=True)
