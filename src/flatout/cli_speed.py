"""The verb bench: words in, `flatout.api.bench` called, a table, rows and a picture out.

Contract: as in `flatout.cli`. Rows are on disk as soon as they are measured; Ctrl-C ends with the table, the rows and
the picture of what was measured so far. The exit code is 4 when a rung's losses were wrong or a rung broke.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.words import Parser, add_config, load, number_between

if TYPE_CHECKING:
    from flatout.records import BenchRow

GROUPS = ("ladder", "without", "extra")
PICTURE = "bench.png"


def bench(words: list[str]) -> int:
    parser = Parser(
        "bench",
        "Measure every speed switch on this machine: from a naive baseline up, one at a time, then each one out of the "
        "full set, then the rest. A rung whose losses are not the reference's prints no speed.",
    )
    add_config(parser)
    parser.add_argument(
        "--steps", type=number_between(int, 3, 10_000), default=12, help="most steps to time per rung; default 12"
    )
    parser.add_argument(
        "--parity-steps",
        type=number_between(int, 2, 10_000),
        default=20,
        help="steps whose losses must be the reference's; default 20",
    )
    parser.add_argument(
        "--batch-tokens",
        type=number_between(int, 1, 2**40),
        help="tokens per step; default: the config's, at most 64 sequences",
    )
    parser.add_argument("--rungs", metavar="A,B,C", help="only these rungs, and what they are compared with")
    parser.add_argument("--only", choices=GROUPS, help="only this part of the ladder")
    parser.add_argument(
        "--out", metavar="FOLDER", help=f"where bench.jsonl and {PICTURE} go; default: bench/NAME, numbered when taken"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="measure what is missing in the rows that --out holds already"
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of the table")
    parsed = parser.parse_words(words)
    names = None if parsed.rungs is None else [name.strip() for name in parsed.rungs.split(",") if name.strip()]
    if names is not None and (not names or parsed.only is not None):
        raise UsageError("--rungs needs names, and goes without --only", "for example --rungs bf16,compile")
    loaded = load(parsed)
    if parsed.go_on and parsed.out is None:
        raise UsageError("--go-on needs the folder of the rows", "name it with --out FOLDER")
    folder = Path(parsed.out) if parsed.out is not None else _free_folder(loaded.config.output.name)
    from flatout import api
    from flatout.observe.bench_table import BenchReader
    from flatout.observe.sinks import read_bench
    from flatout.records import record_to_json

    reader = BenchReader()
    written = folder / "bench.jsonl"
    rows: list[BenchRow] = read_bench(written) if parsed.go_on and written.exists() else []
    before = len(rows)
    interrupted = False
    try:
        for row in api.bench(
            loaded,
            steps=parsed.steps,
            parity_steps=parsed.parity_steps,
            batch_tokens=parsed.batch_tokens,
            rungs=names,
            only=parsed.only,
            folder=folder,
            go_on=parsed.go_on,
            notice=reader.notice,
            progress=reader.progress,
        ):
            rows.append(row)
            reader.row(row)
            if parsed.json:
                print(record_to_json(row), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reader.close()
    _finish(sorted(rows, key=lambda row: row.place), folder, quiet=parsed.json)
    if interrupted:
        print(f"interrupted; {len(rows)} rungs are in {folder}, --go-on measures the others", file=sys.stderr)
        return 130
    return 4 if any(row.status in ("red", "failed") for row in rows[before:]) else 0


def _finish(rows: "list[BenchRow]", folder: Path, *, quiet: bool) -> None:
    """The table and the picture of what was measured."""
    if not rows:
        return
    from flatout.observe.bench_picture import draw_bench
    from flatout.observe.bench_table import print_bench
    from flatout.tuning.claims import TOTALS

    if not quiet:
        print_bench(rows, [f"{claim.text} ({', '.join(claim.rows)})" for claim in TOTALS])
    draw_bench(rows, folder / PICTURE)
    print(f"wrote {folder / 'bench.jsonl'} and {folder / PICTURE}", file=sys.stderr if quiet else sys.stdout)


def _free_folder(name: str) -> Path:
    """bench/NAME, or the first bench/NAME-2, bench/NAME-3 ... that holds no rows."""
    first = Path("bench") / name
    number, folder = 1, first
    while (folder / "bench.jsonl").exists():
        number += 1
        folder = first.with_name(f"{name}-{number}")
    return folder
