"""The verb tune: words in, `flatout.api.tune` called, a table and a config file out.

Contract: as in `flatout.cli`. An existing file is written over only if `tune` itself has written it; that is asked
before anything is measured. Ctrl-C shows what was measured so far and writes nothing.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.files import disk_errors
from flatout.words import Parser, add_config, load, number_between

if TYPE_CHECKING:
    from flatout.records import TuneResult, TuneRow

FIRST_LINE = "# Found by `flatout tune`"


def tune(words: list[str]) -> int:
    parser = Parser(
        "tune",
        "Find the micro-batch, checkpointing and loss with the most tokens per second for the config's global batch, "
        "by real training steps on this device. What is learned does not change.",
    )
    add_config(parser)
    parser.add_argument(
        "--memory", metavar="GIB", type=number_between(float, 0.1, 10_000), help="emulate a GPU with this much memory"
    )
    parser.add_argument("--out", metavar="FILE", help="write the config found to this YAML file, to train with")
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
    out = None if parsed.out is None else _writable(Path(parsed.out))
    loaded = load(parsed)
    from flatout import api
    from flatout.observe.tune_table import TuneReader
    from flatout.records import TuneResult, record_to_json

    reader = TuneReader()
    rows: list[TuneRow] = []
    result: TuneResult | None = None
    interrupted = False
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
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reader.close()
    if result is not None and out is not None:
        with disk_errors(str(out), safe=""):
            out.write_text(result.fragment, encoding="utf-8")
    if not parsed.json:
        reader.table(rows, result)
        if result is not None:
            _print_choice(result, out, parsed.config, parsed.overrides)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _writable(path: Path) -> Path:
    if path.is_dir() or path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out {str(path)!r} is not the name of a YAML file", "for example --out tuned.yaml")
    if not path.parent.is_dir():
        raise UsageError(f"the folder of --out {str(path)!r} does not exist", "create it first")
    if path.exists():
        with disk_errors(str(path), safe=""), path.open(encoding="utf-8", errors="replace") as file:
            ours = file.readline().startswith(FIRST_LINE)
        if not ours:
            raise UsageError(f"--out {str(path)!r} exists and was not written by `flatout tune`", "name another file")
    return path


def _print_choice(result: "TuneResult", out: Path | None, config: str | None, overrides: list[str]) -> None:
    if out is not None:
        print(f"wrote {out}; train with: flatout train {out}")
        return
    print(result.fragment, end="")
    words = " ".join(["flatout train", *([config] if config else []), *overrides, *result.words])
    print(f"\ntrain with: {words}\nor write it to a file with --out FILE")
