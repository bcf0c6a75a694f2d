"""The verbs train and finetune: words in, `flatout.train` called, records shown as they come; --gpus starts processes.

Contract: as in `flatout.cli`. The first signal saves and ends the run, and the run does not need its terminal.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import flatout
from flatout.errors import HardwareError, UsageError, UserError, many, quoted
from flatout.front.configs import check_rows_named, load, on_hardware
from flatout.front.output import handled, output_that_may_go_away
from flatout.front.words import one_line
from flatout.launch import AGENT, START, launch, place_of_slurm

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.parallel.agent import Hosts


# --- train ------------------------------------------------------------------------------------------------------------


_DRAWN = 20  # steps: a run that ends with fewer has no curve to draw


def train(parsed: argparse.Namespace) -> int:
    """Runs train and finetune."""
    starts = reported_once(lambda: _check_words(parsed))
    resume: str | None = parsed.resume
    stored = None if resume in (None, "auto") or parsed.config_given else _point(resume)

    def checked() -> "LoadedConfig | None":
        return _loaded(parsed, resume, stored)

    if starts:
        return start_workers(parsed, lambda: (checked(), _for_workers(parsed, stored)))
    loaded = reported_once(checked)
    with output_that_may_go_away():  # the terminal is not the run
        return _follow_training(parsed, loaded, resume, stored)


def _point(resume: str) -> Path:
    """What a command resumes. When our agent starts workers again, that is the run: the checkpoint may be gone."""
    found = launch()
    return found.folder if found is not None and found.resumes and found.folder is not None else Path(resume)


def _for_workers(parsed: argparse.Namespace, stored: Path | None) -> list[str]:
    """The words for the processes that are started. What --minutes adds to a run is computed once, here: they may be
    started again."""
    if stored is None or getattr(parsed, "minutes", None) is None:
        return parsed.typed

    point, more = flatout.more_minutes(stored, parsed.minutes)
    return [*parsed.typed, "--resume", str(point), *more]


def _check_words(parsed: argparse.Namespace) -> bool:
    """Refuses words that contradict each other; returns whether this process starts others."""
    starts = starts_workers(parsed)
    _in_minutes(parsed)
    if parsed.view and parsed.json:
        raise UsageError("--view and --json exclude each other", "leave one of them out")
    if parsed.size is not None and parsed.resume not in (None, "auto") and not parsed.config_given:
        raise UsageError("--size is for a new run, and a run that is resumed keeps its size", "leave --size out")
    if parsed.resume == "":
        raise UsageError("--resume needs auto or a folder", "for example --resume auto")
    return starts


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


def _loaded(parsed: argparse.Namespace, resume: str | None, stored: Path | None) -> "LoadedConfig | None":
    """The config of the command; None where that of the run in `stored` serves."""
    if stored is not None and not stored.is_dir():
        from flatout.config.suggest import run_hint

        hint = run_hint(str(stored), "name a run folder, a checkpoint folder, or auto")
        raise UsageError(f"--resume {quoted(str(stored))} is not a folder", hint)
    loaded = None if stored is not None else load(parsed, tell=False)
    if loaded is not None and parsed.verb == "finetune":
        check_rows_named(loaded, resume)
    return loaded


def _follow_training(
    parsed: argparse.Namespace, loaded: "LoadedConfig | None", resume: str | None, stored: Path | None
) -> int:
    found = launch()
    from flatout.observe.terminal import JsonReader, PrepareBar, TerminalReader
    from flatout.observe.view import ViewReader
    from flatout.records import EndRecord, RunInfo

    if loaded is None or stored is not None:
        started = found is not None and found.attempt is not None  # by our agent, which has computed the minutes
        if getattr(parsed, "minutes", None) is not None and stored is not None and not started:
            stored, more = flatout.more_minutes(stored, parsed.minutes)
            parsed.overrides, resume = [*more, *parsed.overrides], str(stored)
        loaded = on_hardware(flatout.stored_config(stored or Path(), parsed.overrides), parsed.hardware)
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
            for record in flatout.train(loaded, resume=resume, alerts=False, **asked):  # the reader has its own
                if isinstance(record, RunInfo):
                    stop.training = True
                    preparing.close()
                    folder, nothing_left = record.folder, record.nothing_left
                elif isinstance(record, EndRecord):
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
    """The run's pictures and tables. Training is done: an error here is a notice."""
    from flatout.observe.plots import write_run_plots

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


# --- several processes ------------------------------------------------------------------------------------------------


MOST_PROCESSES = 1024
Found = TypeVar("Found")


def starts_workers(parsed: argparse.Namespace) -> bool:
    """Whether this process is to start others, rather than to train; refuses options that do not go together."""
    if os.environ.get(AGENT):
        return False  # this is one of them
    alone = [name for name in ("nodes", "node_rank", "meet") if getattr(parsed, name) is not None]
    if parsed.gpus is None:
        if alone:
            option = f"--{alone[0].replace('_', '-')}"
            raise UsageError(
                f"{option} goes with --gpus", f"add --gpus N, the GPUs of this host, or leave {option} out"
            )
        return False
    if os.name == "nt":
        raise HardwareError(
            "--gpus needs signals and process groups, which Windows does not have",
            "use Flatout in WSL, or leave --gpus out and train on one GPU",
        )
    found = launch() if "WORLD_SIZE" in os.environ else None
    if found is not None:
        raise UsageError(
            f"--gpus starts processes, and a launcher has started {found.size} already",
            "leave --gpus out under torchrun, or start `flatout train --gpus N` by itself",
        )
    return True


def start_workers(
    parsed: argparse.Namespace, checked: "Callable[[], tuple[LoadedConfig | None, Sequence[str]]]"
) -> int:
    """Starts the processes and stays with them to the end; returns the command's exit code.

    `checked` loads the config and returns the words for them: a mistake is printed here, once, not by every process.
    """
    from flatout.config.sections import ParallelConfig
    from flatout.parallel.agent import Agent

    hosts_of = _hosts(parsed)
    try:
        loaded, words = checked()
        _check_gpus(parsed.gpus, None if loaded is None else loaded.config.speed.device)
    except UserError as error:
        raise hosts_of(START).refuse(error) from error
    timeout = (ParallelConfig() if loaded is None else loaded.config.parallel).timeout
    return Agent([parsed.verb, *words], hosts_of(max(START, timeout)), restarts=parsed.restarts, timeout=timeout).run()


def reported_once(checked: Callable[[], Found]) -> Found:
    """Checks a command. When a launcher has started several processes, one of them prints what is wrong with it."""
    try:
        return checked()
    except UserError as error:
        found = launch()
        if found is None or found.size == 1:
            raise
        from flatout.parallel.ranks import refuse

        raise refuse(found, error) from error


def _hosts(parsed: argparse.Namespace) -> "Callable[[float], Hosts]":
    """How the agents of all hosts meet, given how long to wait for them."""
    from flatout.parallel.agent import OneHost

    nodes, rank, meet = parsed.nodes, parsed.node_rank, parsed.meet
    if nodes is None and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        nodes, rank, meet = _of_slurm(rank, meet)
    if nodes is None and (meet is not None or rank is not None):
        raise UsageError("--node-rank and --meet are for several hosts", "add --nodes M, or leave them out")
    if nodes is None or (nodes == 1 and not rank):
        return lambda _patience: OneHost(parsed.gpus)
    found = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", meet or "")
    if rank is None or found is None or not 0 < int(found[2]) < 65536:
        wrong = "--node-rank" if rank is None else "--meet" if meet is None else f"--meet {quoted(meet)}"
        raise UsageError(
            f"{wrong} is missing" if rank is None or meet is None else f"{wrong} is not HOST:PORT",
            f"give --nodes {nodes} --node-rank R --meet HOST:PORT on each host: its number from 0, and an address of "
            "host 0 with a free port",
        )
    if rank >= nodes:
        raise UsageError(f"--node-rank {rank} is not below --nodes {nodes}", "hosts are numbered from 0")
    from flatout.parallel.many_hosts import ManyHosts

    place = found[1], int(found[2])
    return lambda patience: ManyHosts(parsed.gpus, nodes, rank, place, patience)


def _of_slurm(rank: int | None, meet: str | None) -> tuple[int, int | None, str | None]:
    """srun has started one agent on each host, and says which."""
    tasks, hosts = (int(os.environ.get(f"SLURM_STEP_NUM_{name}", "1")) for name in ("TASKS", "NODES"))
    if tasks != hosts:
        raise UsageError(
            f"srun has started {many(tasks, 'task')} on {many(hosts, 'host')}, and --gpus starts the processes of a "
            "host itself",
            "use --ntasks-per-node=1 with --gpus, or one task for each GPU and no --gpus",
        )
    place_of_slurm()
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return hosts, int(os.environ["SLURM_PROCID"]) if rank is None else rank, meet or where


def _check_gpus(asked: int, device: str | None) -> None:
    """Refuses more processes than there are GPUs, as far as that can be seen without torch."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if names is None else len(names.split(","))
    if device in (None, "cpu") or ":" in device or not cards or asked <= cards or names == "":
        return
    raise HardwareError(
        f"--gpus {asked}, and this host has {cards}", f"use --gpus {cards}, or speed.device=cpu to train without them"
    )
