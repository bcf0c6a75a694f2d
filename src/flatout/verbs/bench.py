"""The verb bench: words in, `flatout.api.bench` called, a table, rows and a picture out.

Contract: as in `flatout.cli`. Mistakes in the words, unknown rungs and a folder that cannot be written answer before
anything is built. Rows are on disk as soon as they are measured; Ctrl-C and SIGTERM end with the table, the rows and
the picture of what was measured so far. The exit code is 4 when a rung's losses were wrong or a rung broke, 2 when this
machine can have none of the rungs that were named; that leaves no file. A picture that is not of this ladder is never
written over.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import HardwareError, ResourceError, UsageError
from flatout.folders import free_folder
from flatout.verbs.measuring import folder_target
from flatout.words import Parser, add_config, load_any

if TYPE_CHECKING:
    from flatout.records import BenchRow

GROUPS = ("ladder", "without", "extra")
ROWS, PICTURE = "bench.jsonl", "bench.png"


def bench(words: list[str]) -> int:
    parsed = _parser().parse_words(words)
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
    folder_target(folder, "" if parsed.out == "" else str(folder), ROWS)
    from flatout.observe.measured.bench import BenchReader

    reader = BenchReader()
    rows: list[BenchRow] = _earlier_rows(folder, reader.notice) if parsed.go_on else []
    _check_picture(folder, rows, going_on=parsed.go_on)
    from flatout import api
    from flatout.records import record_to_json
    from flatout.verbs.measuring import exit_code_of, terminated_like_interrupted, word_of

    before = len(rows)
    options = ("steps", "parity_steps", "batch_tokens", "only", "seconds", "go_on")
    asked = {name: getattr(parsed, name) for name in options}
    stopped: KeyboardInterrupt | None = None
    try:
        with terminated_like_interrupted():
            told = {"notice": reader.notice, "progress": reader.progress}
            for row in api.bench(loaded, **asked, rungs=names, folder=folder, **told):
                rows.append(row)
                reader.row(row)
                if parsed.json:
                    print(record_to_json(row), flush=True)
    except KeyboardInterrupt as signalled:
        stopped = signalled
    finally:
        reader.close()
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


def _parser() -> Parser:
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
        "--out", metavar="FOLDER", help=f"where {ROWS} and {PICTURE} go; default: bench/NAME, numbered when taken"
    )
    parser.flag("--go-on", "measure what is missing in the rows that --out holds already")
    parser.flag("--claims", "show what guides claim of each switch, in the table and the picture")
    parser.flag("--json", "print rows as JSON lines instead of the table")
    return parser


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 78, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _earlier_rows(folder: Path, notice: Callable[[str], None]) -> "list[BenchRow]":
    """What is there to continue from; that there is nothing is told."""
    from flatout.observe.measured.bench import read_bench

    rows = read_bench(folder / ROWS, notice) if (folder / ROWS).exists() else []
    if not rows:
        notice(f"there is nothing to continue from in {folder}: the ladder starts at its beginning")
    return rows


def _check_picture(folder: Path, rows: "Sequence[BenchRow]", *, going_on: bool) -> None:
    """Refuses a folder with a picture that is not of the ladder whose rows lie beside it."""
    picture, why = folder / PICTURE, ""
    if not os.path.lexists(picture) or ((folder / ROWS).exists() and not going_on):
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
    from flatout.observe.measured.bench import draw_bench, print_bench
    from flatout.tuning.rungs import TOTALS

    complete = sorted(rows, key=lambda row: row.place)
    if not quiet:
        print_bench(complete, [claim.text for claim in TOTALS] if claims else (), ladder=ladder)
    if not (folder / ROWS).exists():
        return
    made = [folder / ROWS]
    if any(row.status != "absent" for row in complete):
        try:
            draw_bench(complete, folder / PICTURE, ladder, claims=claims)
        except ResourceError as error:
            raise ResourceError(error.message, f"{error.hint}; the rows are kept, and --go-on draws them") from error
        made.append(folder / PICTURE)
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
        Path("bench") / name, lambda folder: any(os.path.lexists(folder / made) for made in (ROWS, PICTURE))
    )
