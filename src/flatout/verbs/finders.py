"""The verbs `tune lr` and `tune search`: words in, a learning rate or a whole config out.

Contract: as in `flatout.cli` and `flatout.verbs.tune`. A config is replaced only if `tune` wrote it and nobody has
edited it since, a picture only if it is ours, others with --overwrite; that is asked before anything is trained.
Ctrl-C, SIGTERM and SIGHUP write none; a study keeps its trials.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError, UsageError, UserError
from flatout.verbs.targets import add_overwrite, config_target, picture_target, study_target, write_config
from flatout.words import Parser, add_config, load_pretraining, number_between, one_line


def tune_lr(words: list[str]) -> int:
    parser = Parser(
        "tune lr",
        "Find a learning rate by a range test: real training steps whose rate rises from far too small to too large.",
    )
    add_config(parser)
    parser.add_argument("--out", metavar="FILE", help="write the config found to this YAML file, to train with")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve to this PNG or SVG file")
    rate = number_between(float, 1e-12, 100)
    parser.add_argument("--from", dest="low", metavar="RATE", type=rate, default=1e-7, help="first rate; default 1e-7")
    parser.add_argument("--to", dest="high", metavar="RATE", type=rate, default=1.0, help="last rate; default 1")
    parser.add_argument(
        "--steps",
        type=number_between(int, 20, 100_000),
        default=100,
        help="steps between them, 20 to 100,000; default 100",
    )
    add_overwrite(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    parsed = parser.parse_words(words)
    if parsed.low * 10 > parsed.high:
        raise UsageError(
            f"--from {parsed.low:g} and --to {parsed.high:g} are less than a factor of ten apart",
            "a range test needs rates from far too small to far too large, such as --from 1e-7 --to 1",
        )
    out, plot = _targets(parsed)
    loaded = load_pretraining(parsed, "tune lr")
    from flatout.observe.measured.lr_picture import draw_rates, print_rates
    from flatout.tuning.lr_range import find_rate
    from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of

    line = _Line()
    try:
        with terminated_like_interrupted():
            result = find_rate(
                loaded,
                low=parsed.low,
                high=parsed.high,
                steps=parsed.steps,
                progress=lambda number, point: line.show(
                    f"step {number} of {parsed.steps}: rate {point.rate:.1e}, loss {point.loss:.4f}"
                ),
            )
    except KeyboardInterrupt as stopped:
        line.close()
        print(f"{word_of(stopped)}; nothing was written", file=sys.stderr)
        return exit_code_of(stopped)
    finally:
        line.close()
    return _hand_over(result, print_rates, draw_rates, out, plot, parsed)


def tune_search(words: list[str]) -> int:
    parser = Parser(
        "tune search",
        "Search hyperparameters by short real runs. Fields and ranges stand in SPACE.yaml; bad trials are cut short.",
    )
    add_config(parser)
    parser.usage = f"{parser.prog} SPACE.yaml [CONFIG] [SECTION.FIELD=VALUE ...] [options]"
    parser.add_argument(
        "--trials", type=number_between(int, 1, 100_000), default=20, help="finished trials in all; default 20"
    )
    parser.add_argument("--study", metavar="FILE.db", help="keep the trials in this SQLite file, to go on with later")
    parser.add_argument("--out", metavar="FILE", help="write the best config to this YAML file, to train with")
    parser.add_argument("--plot", metavar="FILE", help="draw all trials to this PNG or SVG file")
    add_overwrite(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON line per trial and one for the result")
    if words[:1] and not words[0].startswith("-"):
        space_file, rest = words[0], words[1:]
    else:
        space_file, rest = None, words
    parsed = parser.parse_words(rest)
    if space_file is None:
        raise UsageError(
            "`flatout tune search` needs a file with the fields to search over",
            "write lines such as `optim.learning_rate: {log: [1e-4, 1e-2]}` to space.yaml and name it first",
        )
    out, plot = _targets(parsed)
    study = None if parsed.study is None else study_target(Path(parsed.study), "--study")
    loaded = load_pretraining(parsed, "tune search")
    from flatout.tuning.search_space import read_space

    space = read_space(Path(space_file), loaded)
    from flatout.observe.measured.study_picture import draw_study, print_study, trial_line
    from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of
    from flatout.tuning.study import StudyResult, TrialRow, search

    line, rows, result = _Line(), [], None
    try:
        with terminated_like_interrupted():
            for record in search(loaded, space, trials=parsed.trials, study=study, progress=line.trial):
                line.close()
                if isinstance(record, StudyResult):
                    result = record
                    continue
                rows.append(record)
                if parsed.json:
                    print(json.dumps({"type": "trial", **dataclasses.asdict(record)}, ensure_ascii=False), flush=True)
                else:
                    print(trial_line(dataclasses.asdict(record)), file=sys.stderr, flush=True)
    except KeyboardInterrupt as stopped:
        line.close()
        kept = f"; {study} keeps the trials so far, the same command goes on with them" if study else ""
        print(f"{word_of(stopped)} after {_count(rows)}{kept}; nothing else was written", file=sys.stderr)
        return exit_code_of(stopped)
    finally:
        line.close()
    assert isinstance(result, StudyResult), "the last record of a search"
    assert all(isinstance(row, TrialRow) for row in rows)
    return _hand_over(result, print_study, draw_study, out, plot, parsed)


def _count(rows: list[Any]) -> str:
    return f"{len(rows)} {'trial' if len(rows) == 1 else 'trials'}"


# --- what both have in common -----------------------------------------------------------------------------------------


def _targets(parsed: Any) -> tuple[Path | None, Path | None]:
    """Where the config and the picture go; a config is never without its picture."""
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    plot = None if parsed.plot is None else Path(parsed.plot)
    plot = out.with_suffix(".png") if plot is None and out is not None else plot
    return out, None if plot is None else picture_target(plot, "--plot", overwrite=parsed.overwrite)


def _hand_over(
    result: Any,
    show: Callable[[dict[str, Any]], None],
    draw: Callable[..., None],
    out: Path | None,
    plot: Path | None,
    parsed: Any,
) -> int:
    """Shows what was found, then writes it; what could not be written is told after everything else."""
    body = result.to_json()
    if parsed.json:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        show(body)
    failures = [
        None if out is None else _failure_of(lambda: write_config(out, result.fragment, overwrite=parsed.overwrite)),
        None if plot is None else _failure_of(lambda: draw(body, plot, overwrite=parsed.overwrite)),
    ]
    if not parsed.json:
        _print_ways(out, failures[0], result.fragment, result.words, parsed)
        if plot is not None and failures[1] is None:
            print(f"drew {plot}")
    for failure in failures:
        if failure is not None:
            raise failure
    return 0


class _Line:
    """One line on the terminal that is written over; nothing where nobody watches."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            self.shown = True
            print(f"\r\x1b[K{one_line(text)[:160]}", end="", file=sys.stderr, flush=True)

    def trial(self, number: int, values: dict[str, Any], record: Any) -> None:
        told = "" if record is None else f", loss {record.loss:.4f} at step {record.step}"
        shown = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in values.items())
        self.show(f"trial {number}: {shown}{told}")

    def close(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = False


def _failure_of(write: Any) -> UserError | None:
    """Why writing did not work, to be told after everything was shown."""
    try:
        write()
    except UserError as error:
        return ResourceError(error.message, error.hint)
    return None


def _print_ways(
    out: Path | None, failure: UserError | None, fragment: str, found: tuple[str, ...], parsed: Any
) -> None:
    """How to train with what was found."""
    from flatout.tuning.fragment import train_words

    if out is not None and failure is None:
        print(f"wrote {out}; train with: flatout train {shlex.quote(str(out))}")
        return
    words = [*([parsed.config] if parsed.config else []), *train_words(parsed.overrides, found)]
    words += ["--hardware", parsed.hardware] if parsed.hardware else []
    print(f"train with: flatout train {shlex.join(words)}")
    if failure is not None:
        print(fragment, end="")
