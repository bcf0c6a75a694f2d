"""The verbs train and finetune: words in, `flatout.api.train` called, records shown as they come.

Contract: as in `flatout.cli`. The first signal saves and ends the run, and the run does not need its terminal.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout import records
from flatout.errors import UsageError, UserError
from flatout.launch import AGENT, launch
from flatout.streams import output_that_may_go_away
from flatout.tuning.signals import handled
from flatout.verbs.launching import add_launching, start_workers, starts_workers, told_by_one
from flatout.words import Parser, add_config, load, on_hardware, one_line, quoted

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig

_DRAWN = 20  # steps: a run that ends with fewer has no curve to draw


def train(words: list[str]) -> int:
    parser = Parser(
        "train",
        "Train a model. SIGINT, SIGTERM and SIGHUP save a checkpoint and end the run, a second Ctrl-C quits at once; "
        "SIGUSR1 saves and goes on.",
    )
    add_config(parser)
    parser.number(
        "--minutes",
        0.01,
        1e6,
        metavar="N",
        help="train so long: this machine's speed decides size, batch and steps; with --resume RUN, so much longer",
    )
    return _run_training(parser, words)


def finetune(words: list[str]) -> int:
    parser = Parser("finetune", "Fine-tune a model on conversations or instructions, by LoRA unless lora.rank=0.")
    add_config(parser, default="lora")
    return _run_training(parser, words)


def _run_training(parser: Parser, words: list[str]) -> int:
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="resume a run: auto (if there is one), a run folder or a checkpoint"
    )
    parser.flag("--json", "print records as JSON lines and nothing else")
    parser.flag("--view", "a panel with curve, speed, card and warnings")
    add_launching(parser)
    parsed, starts = told_by_one(lambda: _understood(parser, words))
    resume: str | None = parsed.resume
    stored = None if resume in (None, "auto") or parsed.config_given else _point(resume)

    def checked() -> "LoadedConfig | None":
        return _loaded(parser.verb, parsed, resume, stored)

    if starts:
        return start_workers(parser.verb, parsed, lambda: (checked(), _for_workers(words, parsed, stored)))
    loaded = told_by_one(checked)
    with output_that_may_go_away():  # the terminal is not the run
        return _follow_training(parsed, loaded, resume, stored)


def _point(resume: str) -> Path:
    """What a command resumes. When our agent starts workers again, that is the run: the checkpoint may be gone."""
    found = launch()
    return found.folder if found is not None and found.resumes and found.folder is not None else Path(resume)


def _for_workers(words: list[str], parsed: argparse.Namespace, stored: Path | None) -> list[str]:
    """The words for the processes that are started. What --minutes adds to a run is reckoned once, here: they may be
    started again."""
    if stored is None or getattr(parsed, "minutes", None) is None:
        return words
    from flatout import api

    point, more = api.more_minutes(stored, parsed.minutes)
    return [*words, "--resume", str(point), *more]


def _understood(parser: Parser, words: list[str]) -> tuple[argparse.Namespace, bool]:
    """The parsed words, and whether this process starts others."""
    parsed = parser.parse_words(words)
    starts = starts_workers(parsed)
    _in_minutes(parsed)
    if parsed.view and parsed.json:
        raise UsageError("--view and --json exclude each other", "leave one of them out")
    if parsed.size is not None and parsed.resume not in (None, "auto") and not parsed.config_given:
        raise UsageError("--size is for a new run, and a run that is resumed keeps its size", "leave --size out")
    if parsed.resume == "":
        raise UsageError("--resume needs auto or a folder", "for example --resume auto")
    return parsed, starts


def _in_minutes(parsed: argparse.Namespace) -> None:
    """--minutes as settings; where no config is named, those of the preset that learns most in a time."""
    minutes = getattr(parsed, "minutes", None)
    if minutes is None:
        return
    twice = next((word for word in parsed.overrides if word.startswith(("train.steps=", "train.minutes="))), None)
    if twice is not None and not os.environ.get(AGENT):  # our agent gives its workers both
        raise UsageError(
            f"--minutes and {twice.partition('=')[0]} both say how long the run is", "leave one of them out"
        )
    if parsed.resume not in (None, "auto"):
        if parsed.config_given:
            raise UsageError(
                "--resume RUN with --minutes takes the config of the run",
                "leave the config out; settings may be given",
            )
        return
    parsed.config = parsed.config or "record"
    parsed.overrides = [f"train.minutes={minutes!r}", *parsed.overrides]


def _loaded(verb: str, parsed: argparse.Namespace, resume: str | None, stored: Path | None) -> "LoadedConfig | None":
    """The config of the command; None where that of the run in `stored` serves."""
    if stored is not None and not stored.is_dir():
        from flatout.config.suggest import run_hint

        hint = run_hint(str(stored), "name a run folder, a checkpoint folder, or auto")
        raise UsageError(f"--resume {quoted(str(stored))} is not a folder", hint)
    loaded = None if stored is not None else load(parsed, tell=False)
    if loaded is not None and verb == "finetune":
        from flatout.api.configs import check_rows_named

        check_rows_named(loaded, resume)
    return loaded


def _follow_training(
    parsed: argparse.Namespace, loaded: "LoadedConfig | None", resume: str | None, stored: Path | None
) -> int:
    found = launch()
    from flatout import api
    from flatout.observe.live.console import JsonReader, TerminalReader
    from flatout.observe.live.prepare_bar import PrepareBar
    from flatout.observe.live.view import ViewReader

    if loaded is None or stored is not None:
        started = found is not None and found.attempt is not None  # by our agent, which has reckoned the minutes
        if getattr(parsed, "minutes", None) is not None and stored is not None and not started:
            stored, more = api.more_minutes(stored, parsed.minutes)
            parsed.overrides, resume = [*more, *parsed.overrides], str(stored)
        loaded = on_hardware(api.stored_config(stored or Path(), parsed.overrides), parsed.hardware)
    terminal = ViewReader if parsed.view else TerminalReader
    reader = JsonReader() if parsed.json else terminal(loaded.config.output.log_every)
    preparing = PrepareBar()
    speaks = found is None or found.rank == 0
    stop = StopOnSignal(
        at_once=reader.leave_at_once if isinstance(reader, ViewReader) else lambda: None, stays=found is not None
    )
    folder = checkpoint = None
    steps = 0
    interrupted = nothing_left = False
    with stop:
        try:
            asked = {"stop": stop.requested, "save": stop.save, "progress": preparing}
            for record in api.train(loaded, resume=resume, alerts=False, **asked):  # the reader has its own
                if isinstance(record, records.RunInfo):
                    stop.training = True
                    preparing.close()
                    folder, nothing_left = record.folder, record.nothing_left
                    if speaks and isinstance(reader, ViewReader):
                        reader.recall(record)
                elif isinstance(record, records.EndRecord):
                    steps, checkpoint, interrupted = record.step, record.checkpoint, record.reason == "interrupted"
                if speaks:
                    reader.show(record)
        finally:
            preparing.close()
            reader.close()
    if not speaks:
        return 128 + stop.number if interrupted and stop.number is not None else 0
    if nothing_left:
        return 0
    if folder is not None and steps >= _DRAWN:
        _draw(Path(folder))
    if interrupted and (stop.number is not None or found is not None):
        if checkpoint is not None:
            verb = "finetune" if loaded.config.fine_tunes else "train"
            way = f"{_program()} {verb} --resume {shlex.quote(str(folder))}"
            print(f"saved {checkpoint}; resume with: {way}", file=sys.stderr)
        return 0 if stop.number is None else 128 + stop.number  # else the rank that got the signal has it in its code
    if not parsed.json:
        verb = "chat" if loaded.config.fine_tunes else "generate"
        print(f"try it: {_program()} {verb} {shlex.quote(str(folder))}")
    return 0


def _draw(folder: Path) -> None:
    """The run's pictures and tables. Training is done: what goes wrong here is told and costs nothing."""
    from flatout.observe.plot.plots import write_run_plots

    try:
        write_run_plots(folder)
    except UserError as error:
        print(
            f"note: no plots: {one_line(error.message)}; with `flatout plot`: {one_line(error.hint)}", file=sys.stderr
        )


def _program() -> str:
    """How to call us again: by name where the shell finds it, else by the path we were called with."""
    called = sys.argv[0]
    return called if Path(called).name == "flatout" and shutil.which("flatout") is None else "flatout"


class StopOnSignal:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to save and stop; the second SIGINT quits at once.

    SIGUSR1 is a request to save and go on. Before training has begun there is nothing to save: SIGUSR1 waits for the
    first step, and any other signal ends the process. A signal that the process was started to ignore (nohup, a
    shell's `trap ''`) stays ignored.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None, *, stays: bool = False) -> None:
        """`at_once` is the last thing done before the process quits without a word to anybody else. Where it `stays`,
        signals are heard to the end of the process: one of several ranks may get its own after all have saved."""
        self.at_once = at_once
        self.stays = stays
        self.number: int | None = None
        self.training = False
        self.asked_to_save = False
        self.before: dict[int, Any] = {}

    def requested(self) -> bool:
        return self.number is not None

    def save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self.asked_to_save = self.asked_to_save, False
        return asked

    def __enter__(self) -> "StopOnSignal":
        handlers = {"SIGINT": self._handle, "SIGTERM": self._handle, "SIGHUP": self._handle, "SIGUSR1": self._ask}
        for name, handler in handlers.items():
            self.before |= handled(name, handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self.stays:
            return
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, _number: int, _frame: object) -> None:
        self.asked_to_save = True

    def _handle(self, number: int, _frame: object) -> None:
        if not self.training:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if self.number is not None and number == signal.SIGINT:
            self.at_once()
            _cry("quitting at once; checkpoints that were finished are intact")
            os._exit(130)
        self.number = number
        _cry("stopping: saving after this step (Ctrl-C again quits at once)")


def _cry(text: str) -> None:
    """A line on standard error from a signal handler, where Python's own streams may be in use."""
    with contextlib.suppress(OSError):  # the terminal may be gone, which is what SIGHUP says
        os.write(2, f"\n{text}\n".encode("ascii"))
