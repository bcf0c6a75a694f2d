"""The verb watch: follows a run that another process trains, in the terminal, as JSON lines or in the browser.

Contract: as in `flatout.cli`. Needs no torch and never writes into the run's folder. Ends by itself when the run does:
code 0 if the run said so itself, 1 if its process is gone without a last word. Ctrl-C ends the watching, not the run.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config.optimizers import rate_setting
from flatout.errors import DataError, UsageError
from flatout.words import Parser, one_line

if TYPE_CHECKING:
    from flatout.records import Record

DIVERGED = 3  # updates in a row that were skipped: the trainer gives up then
LOST = 1


def watch(words: list[str]) -> int:
    parser = Parser("watch", "Follow a run that another process trains: how far it is, how it goes, what goes wrong.")
    parser.add_argument("run", nargs="?", help="a run folder, or a name under runs/; default: the newest run there")
    parser.flag("--json", "print the run's records as JSON lines and nothing else")
    parser.flag("--web", "show its report in the browser, on this machine only")
    parser.number("--port", 0, 65535, help="port of --web; default: a free one")
    parser.epilog = "Ends with the run: code 0, or 1 if the run's process is gone without having finished."
    parsed = parser.parse_words(words)
    if parsed.web and parsed.json:
        raise UsageError("--web and --json exclude each other", "leave one of them out")
    if parsed.port is not None and not parsed.web:
        raise UsageError("--port is for --web", "add --web, or leave --port out")
    from flatout.observe.live.follow import find_run

    folder = find_run(parsed.run)
    from flatout.verbs.measuring import Terminated, exit_code_of, terminated_like_interrupted

    with terminated_like_interrupted():
        try:
            if parsed.web:
                return _serve(folder, parsed.port)
            return _show(folder, as_json=parsed.json)
        except KeyboardInterrupt as stopped:
            if not isinstance(stopped, Terminated):
                print("stopped watching; the run is not affected", file=sys.stderr)
            return exit_code_of(stopped)


def _serve(folder: Path, port: int | None) -> int:
    from flatout.observe.report.server import serve

    def ready(address: str) -> None:
        print(f"watching {one_line(str(folder))} at {address} (Ctrl-C ends it)", flush=True)

    serve([folder], port=port, ready=ready)
    return 0


def _show(folder: Path, *, as_json: bool) -> int:
    from flatout.observe.live.console import JsonReader
    from flatout.observe.live.follow import METRICS, follow
    from flatout.observe.live.view import ViewReader

    if not (folder / METRICS).exists():
        print(f"waiting for the first record of {one_line(str(folder))}", file=sys.stderr)
    reader: JsonReader | ViewReader | None = JsonReader() if as_json else None
    last = _LastWord()
    try:
        for record in follow(folder):
            if reader is None:
                reader = ViewReader(_log_every(record))
            last.hear(record)
            reader.show(record)
    finally:
        if reader is not None:
            reader.close()
    return last.tell(folder)


def _log_every(record: "Record") -> int:
    """How often the run itself prints a line; its first record says so."""
    output = getattr(record, "config", {}).get("output")
    value = output.get("log_every") if isinstance(output, dict) else None
    return value if isinstance(value, int) and value > 0 else 10


@dataclasses.dataclass
class _LastWord:
    """How a run ended, from the records it left."""

    reason: str | None = None
    step: int = 0
    skipped: int = 0
    heard: bool = False
    rate: str = "optim.learning_rate"

    def hear(self, record: "Record") -> None:
        from flatout.records import EndRecord, RunInfo, StepRecord

        self.heard = True
        if isinstance(record, EndRecord):
            self.reason = record.reason
        elif isinstance(record, RunInfo):
            self.reason, self.step, self.skipped = None, record.start_step, 0
            self.rate = rate_setting(record.config)
        elif isinstance(record, StepRecord):
            self.reason, self.step = None, record.step
            self.skipped = 0 if record.applied else self.skipped + 1

    def tell(self, folder: Path) -> int:
        """The exit code; where the run has no ending of its own, says so."""
        shown = one_line(str(folder))
        again = f"resume with: flatout train --resume {shlex.quote(shown)}"
        if self.reason == "interrupted":
            print(f"the run was interrupted; {again}", file=sys.stderr)
        if self.reason is not None:
            return 0
        if not self.heard:
            from flatout.observe.live.follow import METRICS

            if (folder / METRICS).exists():  # as `plot` and `report` have it
                raise DataError(
                    f"{folder / METRICS} holds no run", "name the folder of a run that was started by flatout train"
                )
            print(f"error: the run in {shown} ended before its first record", file=sys.stderr)
            print("hint: start it again with flatout train, which says what is wrong", file=sys.stderr)
        elif self.skipped >= DIVERGED:
            stopped = (
                f"the run stopped at step {self.step:,} after {self.skipped} skipped updates in a row: it diverged"
            )
            print(f"{stopped}; lower {self.rate}, then {again}", file=sys.stderr)
        else:
            dead = f"the run seems dead: no process works in {shown}, and its last record is of step {self.step:,}"
            print(f"{dead}; {again}", file=sys.stderr)
        return LOST
