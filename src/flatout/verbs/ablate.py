"""The verb ablate: words in, `flatout.api.ablate` called, a table, rows and a picture out.

Contract: as in `flatout.cli`. Mistakes in the words, fields that cannot be changed and a folder that cannot be written
answer before anything is trained. Rows are on disk as soon as their runs have ended, and the same command goes on with
them; Ctrl-C, SIGTERM and SIGHUP end with the table and the picture of what is there. A picture that is not ours is
never written over. The exit code is 4 when the config as it is diverged.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from flatout.verbs.measuring import Line, folder_target, picture_target
from flatout.words import Parser, add_config, load_any

ROWS, PICTURE = "ablate.jsonl", "ablate.png"


def ablate(words: list[str]) -> int:
    parsed = _parser().parse_words(words)
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
    folder_target(folder, "" if parsed.out == "" else str(folder), ROWS)
    if folder.is_dir():
        picture_target(folder / PICTURE, "--out")
    from flatout import api
    from flatout.observe.measured.ablate import run_line
    from flatout.records import record_to_json
    from flatout.verbs.measuring import exit_code_of, terminated_like_interrupted, word_of

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
            for record in api.ablate(loaded, **asked, minutes=parsed.minutes, notice=notice, progress=progress):
                if isinstance(record, api.AblateResult):
                    result = record
                    continue
                line.close()
                if parsed.json:
                    print(record_to_json(record), flush=True)
                else:
                    print(run_line(record, *place), file=sys.stderr, flush=True)
    except KeyboardInterrupt as signalled:
        stopped = signalled
    if result is None and (folder / ROWS).exists():
        *_, result = api.ablate(loaded, **asked, minutes=0.0, notice=notice)  # what there is to show, and nothing more
    if isinstance(result, api.AblateResult):
        _hand_over(result.to_json(), folder, quiet=parsed.json)
    if stopped is not None:
        kept = f"{folder / ROWS} keeps the runs that ended, the same command goes on with them"
        print(f"{word_of(stopped)}; {kept if result else 'no run had ended yet'}", file=sys.stderr)
        return exit_code_of(stopped)
    return 0


def _parser() -> Parser:
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
        "--out", metavar="FOLDER", help=f"where {ROWS} and {PICTURE} go, and rows are looked for; default: ablate/NAME"
    )
    parser.flag("--json", "print runs and the result as JSON lines instead of the table")
    return parser


def _hand_over(body: dict[str, Any], folder: Path, *, quiet: bool) -> None:
    """The table and the picture."""
    from flatout.observe.measured.ablate import draw_ablation, print_ablation

    if quiet:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_ablation(body)
    if any(one["pairs"] for one in body["effects"]):
        draw_ablation(body, folder / PICTURE)
        made = f"wrote {folder / ROWS} and {folder / PICTURE}"
        print(made, file=sys.stderr if quiet else sys.stdout)
