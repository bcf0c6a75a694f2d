"""The verb profile: words in, a few steps under torch's profiler, a page and a folder of files out.

Contract: as in `flatout.cli`. Mistakes in the words and a folder that cannot be written answer before all else.
In the ranks of a launcher the first one speaks. Ctrl-C and SIGTERM leave no folder. No run is written, and no data is
prepared where the config asks for it.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from flatout.launch import launch
from flatout.verbs.launching import told_by_one
from flatout.verbs.measuring import ended_by_signals
from flatout.words import Parser, add_config, load_any

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig


def profile(words: list[str]) -> int:
    parser = Parser(
        "profile",
        "Take some real training steps under torch's profiler and say what holds them: arithmetic, memory, launches or "
        "data, and which switch to try. Writes a trace, a memory snapshot, the kernels and a page to read.",
    )
    add_config(parser)
    timed = "steps under the profiler; default 4, fewer if a step has many micro-batches"
    parser.number("--steps", 1, 1000, help=timed)
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the files go; default: profile/NAME, numbered when that is taken"
    )
    parser.flag("--json", "print the figures as one JSON object instead of the page")
    found = launch()

    def checked() -> "tuple[argparse.Namespace, LoadedConfig]":
        parsed = parser.parse_words(words)
        return parsed, load_any(parsed, tell=found is None or found.rank == 0)

    parsed, loaded = told_by_one(checked)
    with ended_by_signals(lambda: "nothing was written"):
        from flatout import api

        done = api.profile(loaded, parsed.out, steps=parsed.steps, progress=_say)
    if done is None:
        return 0
    if parsed.json:
        print(json.dumps(done.figures, ensure_ascii=False))
    else:
        from flatout.observe.measured.profile_page import page_of, print_page

        print_page(page_of(done.figures, str(done.folder)))
    return 0


def _say(text: str) -> None:
    print(f"profile: {text}", file=sys.stderr, flush=True)
