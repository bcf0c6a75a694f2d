"""Command lines in processes whose streams and signals are not as usual."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.observe.sinks import read_metrics
from tests.end_to_end.forked import Forked


def outcome_of(scenario: dict[str, Any]) -> dict[str, Any]:
    """The exit code of a command line, and what it has written.

    words    the command line                     folder   of its run, whose steps the signals wait for
    stdout   closed, full, left or kept           stderr   closed, full or kept
    encoding of both streams                      ignored  signals that the process is started to ignore
    signals  to send, each two steps after the one before
    """
    folder = Path(scenario["folder"])
    kept = {name: Path(f"{folder}.{name}") for name in ("stdout", "stderr")}
    process, step = Forked(_main, scenario, kept), 0
    for name in scenario.get("signals", []):
        ended = not process.wait_until(lambda beyond=step + 2: last_step(folder) >= beyond)
        assert not ended, "the run ended before it was sent a signal"
        step = last_step(folder)
        process.send_signal(getattr(signal, name))
    code = process.wait()
    return {"code": code, **{name: path.read_text() if path.exists() else "" for name, path in kept.items()}}


def last_step(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return max((row["step"] for row in rows if row["type"] == "step"), default=0)


def _main(scenario: dict[str, Any], kept: dict[str, Path]) -> None:
    code = 70
    try:
        _take_over(scenario, kept)
        code = cli.main(scenario["words"])
    finally:
        os._exit(code)


def _take_over(scenario: dict[str, Any], kept: dict[str, Path]) -> None:
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
