"""The verb estimate: words in, what a run will take out, before it is started.

Contract: as in `flatout.cli`. Nothing is written. A run that does not fit is shown with the table of what would, and
ends with the error and exit code 5. Ctrl-C and SIGTERM end at once and leave nothing behind.
"""

import json
import sys
import time

from flatout.errors import ResourceError
from flatout.words import Parser, add_config, load_pretraining, number_between


def estimate(words: list[str]) -> int:
    parser = Parser(
        "estimate",
        "Time, memory, disk, energy and cost of a run, from a short timed piece of it. Trains nothing that is kept.",
    )
    add_config(parser)
    parser.add_argument(
        "--price",
        metavar="PER_HOUR",
        type=number_between(float, 0, 1e6),
        help="what an hour of the machine costs, in any currency",
    )
    parser.add_argument(
        "--seconds",
        type=number_between(float, 0.1, 3600),
        default=15.0,
        help="time training steps for this long; default 15. Evaluation, sample and checkpoint come on top",
    )
    parser.add_argument("--no-probe", action="store_true", help="build and time nothing: sizes and counts only")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the sheet")
    parsed = parser.parse_words(words)
    loaded = load_pretraining(parsed, "estimate")
    began = time.perf_counter()
    from flatout import api  # noqa: F401 - what `flatout train` imports is part of its start-up

    imported = time.perf_counter() - began
    from flatout.observe.measured.estimate_table import print_estimate
    from flatout.tuning.estimate import estimate as look
    from flatout.tuning.signals import exit_code_of, terminated_like_interrupted, word_of

    try:
        with terminated_like_interrupted():
            result = look(
                loaded,
                price=parsed.price,
                seconds=parsed.seconds,
                probe=not parsed.no_probe,
                imported=imported,
                notice=_tell,
            )
    except KeyboardInterrupt as stopped:
        print(f"{word_of(stopped)}; nothing was written", file=sys.stderr)
        return exit_code_of(stopped)
    finally:
        _tell("")
    body = result.to_json()
    if parsed.json:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_estimate(body)
    if result.problem:
        raise ResourceError(f"this run does not fit as it is: {result.problem}", result.way_out)
    return 0


def _tell(what: str) -> None:
    """What is being done, on a line of the terminal that is wiped afterwards; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{f'{what} ...' if what else ''}", end="", file=sys.stderr, flush=True)
