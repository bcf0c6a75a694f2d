"""The verbs report and serve-report: run folders in, one HTML page out, as a file or in the browser.

Contract: as in `flatout.cli`. Neither needs torch. An existing file is replaced only if it is a report, or with
--overwrite. The server is for this machine alone, and Ctrl-C or SIGTERM is how it is meant to end: the exit code is 0.
"""

import json
import sys
from pathlib import Path

from flatout.words import Parser


def report(words: list[str]) -> int:
    parser = Parser(
        "report",
        "Write one HTML page that shows a run, or several side by side: curves, speed, samples, switches, config. The "
        "page needs no network and no other file.",
    )
    _add_runs(parser)
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder, or here for several")
    parser.number("--price", 0, 1e6, metavar="PER_HOUR", help="what an hour of the machine costs, in any currency")
    parser.flag("--overwrite", "also replace a file that is no report of flatout")
    parser.flag("--json", "print what the page would show as JSON, and write no page")
    parsed = parser.parse_mixed(words)
    if parsed.json:
        from flatout.observe.report.data import report_data
        from flatout.observe.report.report import read_runs

        print(json.dumps(report_data(read_runs(_folders(parsed.runs)), price=parsed.price), allow_nan=False))
        return 0
    from flatout import api

    target = api.report(parsed.runs, parsed.out, overwrite=parsed.overwrite, price=parsed.price)
    print(f"wrote {target} ({target.stat().st_size / 1000:,.0f} kB); open it in a browser")
    return 0


def serve_report(words: list[str]) -> int:
    parser = Parser(
        "serve-report",
        "Show the report of runs in the browser, on this machine only, refreshed while they go on. Ctrl-C ends it.",
    )
    _add_runs(parser)
    parser.number("--port", 1, 65535, help="port to listen on; default: a free one from 8484 on")
    parsed = parser.parse_mixed(words)
    folders = _folders(parsed.runs)
    from flatout.observe.report.server import serve
    from flatout.verbs.measuring import terminated_like_interrupted

    try:
        with terminated_like_interrupted():
            serve(folders, port=parsed.port, ready=_tell)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _tell(url: str) -> None:
    print(f"the report is at {url} (Ctrl-C ends it)", flush=True)


def _add_runs(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="a run folder, or a name under runs/; default: the newest run there"
    )


def _folders(runs: list[str]) -> list[Path]:
    from flatout.observe.live.follow import find_run

    return [find_run(run) for run in runs] or [find_run(None)]
