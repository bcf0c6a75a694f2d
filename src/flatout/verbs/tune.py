"""The verbs `tune`, `tune lr` and `tune search`: words in, the fastest switches, a learning rate or a whole config out.

Contract: as in `flatout.cli`. A config is replaced only if `tune` itself has written it and nobody has edited it since,
a picture only if it is ours, others with --overwrite; that, and whether a file can be made there, is asked before
anything is measured. What was found is shown even where it cannot be written in the end. Ctrl-C, SIGTERM and SIGHUP
show what was measured so far and write nothing; a study keeps its trials; once the file of `tune` is there the work is
done, and a signal does not make it a failure.
"""

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import ResourceError, UsageError, UserError
from flatout.verbs.measuring import (
    Line,
    add_overwrite,
    config_target,
    ended_by_signals,
    exit_code_of,
    picture_target,
    study_target,
    terminated_like_interrupted,
    word_of,
    write_config,
)
from flatout.words import Parser, add_config, load_any

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.records import TuneResult, TuneRow
    from flatout.tuning.lr_range import Point


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
    from flatout import api
    from flatout.observe.measured.tune import TuneReader
    from flatout.records import TuneResult, record_to_json

    reader = TuneReader()
    rows: list[TuneRow] = []
    result: TuneResult | None = None
    failure: UserError | None = None
    shown = parsed.json
    asked = {name: getattr(parsed, name) for name in ("memory", "exhaustive", "compile", "seconds")}
    try:
        with terminated_like_interrupted():
            with contextlib.closing(reader):
                for record in api.tune(loaded, **asked, progress=reader.progress):
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
                reader.table(rows, result)
                _print_choice(result, None if failure else out, parsed, verb)
    except KeyboardInterrupt as stopped:
        if result is not None and out is not None and _holds(out, result.fragment):
            print(f"{word_of(stopped)}; {out} was written before that, and is whole", file=sys.stderr)
            return 0
        if not shown:
            reader.table(rows, None)
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
    from flatout import api
    from flatout.observe.measured.tune import draw_rates, print_rates

    def progress(number: int, point: "Point") -> None:
        line.show(f"step {number} of {steps}: rate {point.rate:.1e}, loss {point.loss:.4f}")

    line = Line()
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = api.tune_lr(loaded, low=low, high=high, steps=steps, progress=progress)
    return _hand_over(result, _verb_of(loaded), print_rates, draw_rates, out, plot, parsed)


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
    from flatout import api
    from flatout.observe.measured.study_picture import draw_study, print_study, trial_line

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
        for record in api.search(words[0], loaded, **asked):
            line.close()
            if isinstance(record, api.StudyResult):
                result = record
                continue
            trials += 1
            if parsed.json:
                print(json.dumps({"type": "trial", **dataclasses.asdict(record)}, ensure_ascii=False), flush=True)
            else:
                print(trial_line(dataclasses.asdict(record)), file=sys.stderr, flush=True)
    return _hand_over(result, _verb_of(loaded), print_study, draw_study, out, plot, parsed)


def _targets(parsed: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Where the config and the picture go; a config is never without its picture."""
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    plot = None if parsed.plot is None else Path(parsed.plot)
    plot = out.with_suffix(".png") if plot is None and out is not None else plot
    return out, None if plot is None else picture_target(plot, "--plot", overwrite=parsed.overwrite)


def _verb_of(loaded: "LoadedConfig") -> str:
    """The verb that trains a config."""
    return "finetune" if loaded.config.fine_tunes else "train"


def _hand_over(
    result: Any,
    verb: str,
    show: Callable[[dict[str, Any]], None],
    draw: Callable[..., None],
    out: Path | None,
    plot: Path | None,
    parsed: argparse.Namespace,
) -> int:
    """Shows what was found, then writes it; what could not be written is told after everything else."""
    body = result.to_json()
    if parsed.json:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        show(body)
    unwritten = None if out is None else _failure_of(_writing(out, result.fragment, parsed))
    undrawn = None if plot is None else _failure_of(lambda: draw(body, plot, overwrite=parsed.overwrite))
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
