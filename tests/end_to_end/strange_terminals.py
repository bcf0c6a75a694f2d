"""Runs command lines in processes whose streams and signals are not as usual, one after the other.

Torch is imported once, here; each command line then runs in a fork, with its own streams. Standard input holds a JSON
list of scenarios, standard output gets a JSON list of what came of them.

    words    the command line                     folder   of its run, whose steps the signals wait for
    stdout   closed, full, left or kept           stderr   closed, full or kept
    encoding of both streams                      ignored  signals that the process is started to ignore
    signals  to send, each two steps after the one before
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.api import models, training
from flatout.observe.sinks import read_metrics

SLOW_IMPORTS = (models, training)  # and torch with it, which every fork would do again


def main() -> None:
    # Inherited or not, what this process ignores is not part of any scenario.
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps([outcome_of(scenario) for scenario in json.load(sys.stdin)]))


def outcome_of(scenario: dict[str, Any]) -> dict[str, Any]:
    folder = Path(scenario["folder"])
    kept = {name: Path(f"{folder}.{name}") for name in ("stdout", "stderr")}
    child = os.fork()
    if child == 0:
        code = 70
        try:
            take_over(scenario, kept)
            code = cli.main(scenario["words"])
        finally:
            os._exit(code)
    step = 0
    for name in scenario.get("signals", []):
        step = wait_beyond(folder, step + 2, child)
        os.kill(child, getattr(signal, name))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"code": code, **{name: path.read_text() if path.exists() else "" for name, path in kept.items()}}


def take_over(scenario: dict[str, Any], kept: dict[str, Path]) -> None:
    for name in scenario.get("ignored", []):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    for number, name in ((1, "stdout"), (2, "stderr")):
        kind = scenario.get(name, "kept")
        if kind == "closed":
            os.close(number)
            setattr(sys, name, None)
            continue
        if kind == "left":
            reader, place = os.pipe()
            os.close(reader)
        else:
            flags = os.O_WRONLY | (0 if kind == "full" else os.O_CREAT)
            place = os.open("/dev/full" if kind == "full" else kept[name], flags, 0o600)
        os.dup2(place, number)
        os.close(place)
        setattr(
            sys,
            name,
            os.fdopen(number, "w", buffering=1 if number == 2 else -1, encoding=scenario.get("encoding", "utf-8")),
        )


def wait_beyond(folder: Path, step: int, child: int) -> int:
    path = folder / "metrics.jsonl"
    while True:
        rows = read_metrics(path) if path.exists() else []
        reached = max((row["step"] for row in rows if row["type"] == "step"), default=0)
        if reached >= step:
            return reached
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it was sent a signal"
        time.sleep(0.01)


if __name__ == "__main__":
    main()
