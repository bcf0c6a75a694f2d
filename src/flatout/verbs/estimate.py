"""The verb estimate: words in, what a run will take out, before it is started.

Contract: as in `flatout.cli`. Nothing is written. A run that does not fit is shown with the table of what would, and
ends with the error and exit code 5. Ctrl-C and SIGTERM end at once and leave nothing behind.
"""

import contextlib
import json
import time

from flatout.errors import ResourceError
from flatout.verbs.measuring import Line, ended_by_signals
from flatout.words import Parser, add_config, load_any


def estimate(words: list[str]) -> int:
    parser = Parser(
        "estimate",
        "Time, memory, disk, energy and cost of a run, from a short timed piece of it. Trains nothing that is kept.",
    )
    add_config(parser)
    parser.number("--price", 0, 1e6, metavar="PER_HOUR", help="what an hour of the machine costs, in any currency")
    parser.number(
        "--seconds",
        0.1,
        3600.0,
        default=15.0,
        help="time training steps for this long; default 15. Evaluation, sample and checkpoint come on top",
    )
    parser.flag("--no-probe", "build and time nothing: sizes and counts only")
    parser.flag("--json", "print one JSON line instead of the sheet")
    parsed = parser.parse_words(words)
    loaded = load_any(parsed)
    began = time.perf_counter()
    import flatout.api.training  # noqa: F401 - what `flatout train` imports is part of its start-up

    imported = time.perf_counter() - began
    from flatout import api
    from flatout.observe.measured.estimate_table import print_estimate

    line, asked = Line(), {"price": parsed.price, "seconds": parsed.seconds, "probe": not parsed.no_probe}
    with ended_by_signals(lambda: "nothing was written"), contextlib.closing(line):
        result = api.estimate(loaded, **asked, imported=imported, notice=lambda what: line.show(f"{what} ..."))
    body = result.to_json()
    if parsed.json:
        print(json.dumps(body, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        print_estimate(body)
    if result.problem:
        raise ResourceError(f"this run does not fit as it is: {result.problem}", result.way_out)
    return 0
