"""The verb tune: words in, `flatout.api.tune` called, a table and a config file out.

Contract: as in `flatout.cli`. An existing file is replaced only if `tune` itself has written it and nobody has edited
it since, or with --overwrite; that, and whether a file can be made there, is asked before anything is measured. What
was found is shown even where it cannot be written in the end. Ctrl-C, SIGTERM and SIGHUP show what was measured so far
and write nothing; once the file is there the work is done, and a signal does not make it a failure.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import ResourceError, UserError
from flatout.verbs.targets import add_overwrite, config_target, write_config
from flatout.words import Parser, add_config, load, number_between

if TYPE_CHECKING:
    from flatout.records import TuneResult, TuneRow


def tune(words: list[str]) -> int:
    parser = Parser(
        "tune",
        "Find the micro-batch, checkpointing and loss with the most tokens per second for the config's global batch, "
        "in pretraining or fine-tuning, by real training steps on this device. What is learned does not change.",
    )
    add_config(parser)
    parser.add_argument(
        "--memory", metavar="GIB", type=number_between(float, 0.1, 10_000), help="emulate a GPU with this much memory"
    )
    parser.add_argument("--out", metavar="FILE", help="write the config found to this YAML file, to train with")
    add_overwrite(parser)
    parser.add_argument("--exhaustive", action="store_true", help="try every micro-batch with everything else")
    parser.add_argument(
        "--compile", action="store_true", help="try torch.compile's modes as well; takes minutes for each"
    )
    parser.add_argument(
        "--seconds",
        type=number_between(float, 1, 1e6),
        help="take the best found after this long; default 120, 1200 with compile, 3600 with --exhaustive",
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of the table")
    parsed = parser.parse_words(words)
    out = None if parsed.out is None else config_target(Path(parsed.out), overwrite=parsed.overwrite)
    if not parsed.config_given and any(word.startswith("chat.source=") for word in parsed.overrides):
        parsed.config = "lora"  # as `flatout finetune` does
    loaded = load(parsed)
    verb = "train" if loaded.config.chat.source is None else "finetune"
    from flatout import api
    from flatout.observe.measured.tune_table import TuneReader
    from flatout.records import TuneResult, record_to_json
    from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of

    reader = TuneReader()
    rows: list[TuneRow] = []
    result: TuneResult | None = None
    failure: UserError | None = None
    shown = parsed.json
    try:
        with terminated_like_interrupted():
            try:
                for record in api.tune(
                    loaded,
                    memory=parsed.memory,
                    exhaustive=parsed.exhaustive,
                    compile=parsed.compile,
                    seconds=parsed.seconds,
                    progress=reader.progress,
                ):
                    if parsed.json:
                        print(record_to_json(record), flush=True)
                    if isinstance(record, TuneResult):
                        result = record
                    else:
                        rows.append(record)
            finally:
                reader.close()
            assert result is not None, "the last record of a search"
            failure = None if out is None else _write(out, result.fragment, overwrite=parsed.overwrite)
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


def _write(path: Path, text: str, *, overwrite: bool) -> UserError | None:
    """Writes the whole file or nothing; why it could not, which is told after the result is shown."""
    try:
        write_config(path, text, overwrite=overwrite)
    except UserError as error:
        return ResourceError(error.message, error.hint)
    return None


def _holds(path: Path, text: str) -> bool:
    """Whether the file is there and whole; the file is asked, since a signal can come right after its writing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") == text
    except OSError:
        return False


def _print_choice(result: "TuneResult", out: Path | None, parsed: argparse.Namespace, verb: str) -> None:
    from flatout.tuning.fragment import train_words

    if out is not None:
        print(f"wrote {out}; train with: flatout {verb} {shlex.quote(str(out))}")
        return
    print(result.fragment, end="")
    words = [*([parsed.config] if parsed.config else []), *train_words(parsed.overrides, result.words)]
    words += ["--hardware", parsed.hardware] if parsed.hardware else []
    print(f"\ntrain with: flatout {verb} {shlex.join(words)}")
    if parsed.out is None:
        print("or write it to a file with --out FILE")
