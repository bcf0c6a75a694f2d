"""Runs of several ranks under the agent of `flatout train --gpus N`, watched and disturbed from outside."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.observe.sinks import read_metrics
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.end_to_end.forked_ranks import train_in_forks

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"


def words(corpus: Path, folder: str, steps: int, every: int = 10, timeout: float = 4) -> list[str]:
    kept = [word for word in TINY if not word.startswith("checkpoint.every")]
    extra = [f"train.steps={steps}", f"checkpoint.every={every}", f"parallel.timeout={timeout}", "eval.tokens=64"]
    return [
        *kept,
        *extra,
        "eval.sample_tokens=0",
        "model.dropout=0.1",
        f"data.source={corpus}",
        f"output.folder={folder}",
    ]


class Command:
    """A `flatout train` with its workers: forks of a process that has imported torch, or, with `prefix`, real ones.

    `prefix` is the program that the command is an argument of.
    """

    def __init__(self, arguments: list[str], fault: str = "", prefix: tuple[str, ...] = (), log: str = "told") -> None:
        self.log = Path(log)
        variables = {"OMP_NUM_THREADS": "1", "FAULT": fault}
        self.process: Forked | subprocess.Popen[bytes]
        if prefix:
            path = os.pathsep.join([str(FAULTS), str(ROOT / "src"), str(ROOT)])
            words = [*prefix, sys.executable, "-m", "flatout", "train", *arguments]
            environment = {**os.environ, **variables, "PYTHONPATH": path}
            with self.log.open("a") as told:
                self.process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=told)
        else:
            self.process = Forked(train_in_forks, arguments, stderr=self.log, **variables)
        self.seen: dict[int, str] = {}  # when each of its processes was started: numbers are given again

    @property
    def told(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, of the workers that run now."""
        children = children_by_parent()
        names = {pid: _read(f"/proc/{pid}/comm").split() for pid in children.get(self.process.pid, ())}
        self.seen |= {pid: _start_of(pid) for pid in self.all_running(children)}
        return {int(name[1]): pid for pid, name in names.items() if name[:1] == ["rank"]}

    def helper(self, rank: int, module: str) -> int | None:
        """The process that a rank has started to run something of a module, if there is one now."""
        found = children_by_parent().get(self.ranks().get(rank, -1), ())
        return next((pid for pid in found if module in _read(f"/proc/{pid}/cmdline")), None)

    def all_running(self, children: dict[int, list[int]] | None = None) -> list[int]:
        """The command and everything that it and its workers have started."""
        children, found = children_by_parent() if children is None else children, [self.process.pid]
        for pid in found:
            found += children.get(pid, ())
        return found

    def wait_until(self, happened: Callable[[], bool], seconds: float = 600) -> None:
        until = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"it ended with {self.process.poll()}: {self.told}"
            assert time.monotonic() < until, f"nothing happened for {seconds} s: {self.told}"
            time.sleep(0.02)

    def wait(self, seconds: float = 600) -> int:
        return self.process.wait(seconds)

    def left_behind(self) -> set[int]:
        """Processes of its own that still run a little after the command has ended."""
        until = time.monotonic() + 60
        while (left := {pid for pid in self.seen if self._runs(pid)}) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in self.seen:
            if self._runs(pid):
                os.kill(pid, signal.SIGKILL)

    def _runs(self, pid: int) -> bool:
        return self.seen[pid] != "" and _start_of(pid) == self.seen[pid]


def children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        fields = _read(f"{place}/stat").rpartition(")")[2].split()
        if len(fields) > 1:
            found.setdefault(int(fields[1]), []).append(int(place.name))
    return found


def _start_of(pid: int) -> str:
    """By the clock of the machine; empty where no such process runs."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def last_step(folder: str) -> int:
    """The last step that was recorded; of a long file the end is enough."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        found = re.findall(rb'^{"type":\s?"step".*?"step":\s?(\d+)', file.read(), flags=re.MULTILINE)
    return int(found[-1]) if found else 0


def saved_steps(folder: str) -> list[int]:
    return [step for step, _ in list_checkpoints(Path(folder) / "checkpoints")]


def logged(folder: str) -> list[tuple]:
    """Every step and evaluation with its loss, and every checkpoint."""
    kinds = ("step", "eval", "checkpoint")
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    return [(row["type"], row["step"], row.get("loss")) for row in rows if row["type"] in kinds]


def assert_same_end(folder: str, reference: str, steps: int) -> None:
    """The last checkpoints are the same, bit for bit."""
    final = f"checkpoints/step-{steps:08d}"
    mine, theirs = read_checkpoint(Path(folder) / final), read_checkpoint(Path(reference) / final)
    for name in ("model", "optimizer", "run"):
        ours, expected = getattr(mine, name), getattr(theirs, name)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected), name
