"""One run of two ranks that is disturbed again and again, and what each fault cost it. By hand:

    python -m tests.end_to_end.disturbed --minutes 30 --json soak.json      # a fault every 90 s
    python -m tests.end_to_end.disturbed --faults 100                       # a fault as soon as the run is on again

A table has a row for each fault: the seconds until its cause was told (where ranks are started again), the seconds
until the run was on again, the steps that were repeated, the seconds lost without those of steps, the memory of agent
and ranks just before, and the machine's load. The run must end with the weights of one that nobody has disturbed, bit
for bit.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.end_to_end.many import Command, assert_same_end, last_step, logged, saved_steps, words

TIMEOUT = 4  # parallel.timeout
MOST_LOST, MOST_MEMORY = 15.0, 50.0  # seconds for a fault, MiB that a run may grow
HANGS = 600.0  # seconds after which a run that is not on again is given up
# What, and to whom: a rank, the agent, or the process that reads a stream for rank 1.
KINDS = (
    "kill 0", "kill 1", "stop 0", "stop 1", "hang 0", "hang 1", "stuck 0", "stuck 1", "kill agent", "stop agent",
    "kill loader", "stop loader", "term agent", "term 1", "save agent", "full 0",
    "clock 1",
)  # fmt: skip
RESTARTS = [f"{what} {rank}" for what in ("kill", "stop", "hang") for rank in (0, 1)]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "save": signal.SIGUSR1}
MODULES = {"loader": (1, "flatout.data.workers")}


def kinds_for(data: str) -> list[str]:
    """Shards are read by threads, streams by processes."""
    return [kind for kind in KINDS if data == "stream" or not kind.endswith("loader")]


@dataclasses.dataclass(frozen=True)
class Row:
    fault: str
    step: int
    told: float | None
    seconds: float
    repeated: int
    lost: float
    memory: float  # MiB
    load: float  # of the machine: starting two ranks takes 10 seconds of a core, more where others want it, too


class Disturbed:
    """A run in the working directory, under `run`; `data` is `shards` or `stream`."""

    def __init__(self, data: str, started: list[Command], *, steps: int, every: int, pause: float) -> None:
        self.stream, self.started = data == "stream", started
        source = Path("text")
        source.mkdir(exist_ok=True)
        for number in range(40):
            (source / f"{number}.txt").write_text(f"{number} birds are in the tree. " * (number % 7 + 3))
        self.words = [*words(source, "run", steps, every, TIMEOUT), "--gpus", "2"]
        if self.stream:
            self.words += ["data.streaming=true", "data.tokenizer=bytes", "data.validation=0.2"]
        self.fault = f"slow={pause} beside " + "stream" * self.stream
        self.log = Path("told")
        self.command = self.start()

    def start(self) -> Command:
        command = Command([*self.words, "--restarts", "1000", "--resume", "auto"], self.fault, log=str(self.log))
        self.started.append(command)
        return command

    def disturb(self, kind: str, after: int) -> Row:
        """One fault, `after` steps from now, and what it cost."""
        started = last_step("run")
        self.command.wait_until(lambda: last_step("run") > started, HANGS)
        began, first = time.monotonic(), last_step("run")
        self.command.wait_until(lambda: last_step("run") >= first + after, HANGS)
        pace = (time.monotonic() - began) / max(1, last_step("run") - first)
        victim, memory = self._victim(kind), self._memory()
        saved, reached, began = (saved_steps("run") or [0])[-1], last_step("run"), time.monotonic()
        before = len(self.log.read_text())
        self._do(kind, victim)
        beyond = last_step("run")  # of a command that has ended since, all that it did
        told: list[float] = []

        def on_again() -> bool:
            if not told and "starting all ranks again" in self.log.read_text()[before:]:
                told.append(time.monotonic() - began)
            # What is wrong with a loader shows when what it has read is used up.
            enough = 60 if kind.endswith("loader") or kind.startswith("stuck") else 1
            waits = kind.split()[0] in ("full", "save")
            return last_step("run") > beyond + enough and (not waits or saved_steps("run")[-1] > reached)

        self.command.wait_until(on_again, HANGS)
        seconds = time.monotonic() - began
        repeated = sum(map(int, re.findall(r"(\d+) steps are repeated", self.log.read_text()[before:])))
        if kind in ("kill agent", "full 0"):  # nobody is left to say so
            repeated = beyond - saved
        lost = max(0.0, seconds - pace * (last_step("run") - reached + repeated))
        if kind in RESTARTS:
            assert told, f"{kind} was not noticed: {self.command.told}"
        return Row(kind, reached, told[0] if told else None, seconds, repeated, lost, memory, os.getloadavg()[0])

    def _do(self, kind: str, victim: int | None) -> None:
        """What it says; a command that ends by it is given again."""
        what, whom = kind.split()
        if victim is None:
            Path(f"{what}-{whom}").touch()
            if what == "full":  # the next save ends the run, and somebody makes room
                assert self.command.wait(HANGS) == 5, self.command.told
                self.command = self.start()
            return
        os.kill(victim, SIGNALS[what])
        if kind == "stop agent":  # somebody's Ctrl-Z: the ranks go on, and so does the agent later
            time.sleep(1)
            os.kill(victim, signal.SIGCONT)
        if what != "term" and kind != "kill agent":
            return
        code = self.command.wait(HANGS)
        assert code == (-signal.SIGKILL if what == "kill" else 128 + signal.SIGTERM), f"{kind}: code {code}"
        assert not self.command.left_behind(), f"{kind}: {self.command.left_behind()} still run"
        assert what == "kill" or saved_steps("run")[-1] == last_step("run"), "all that was done is saved"
        self.command = self.start()

    def _victim(self, kind: str) -> int | None:
        """The process that gets a signal; None where a rank does something by itself."""
        what, whom = kind.split()
        if what not in SIGNALS:
            return None
        if whom == "agent":
            return self.command.process.pid
        if whom not in MODULES:
            return self.command.ranks()[int(whom)]
        found: list[int] = []

        def there() -> bool:
            pid = self.command.helper(*MODULES[whom])
            found.extend([] if pid is None else [pid])
            return bool(found)

        self.command.wait_until(there, HANGS)
        return found[0]

    def _memory(self) -> float:
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._own())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def _own(self) -> Iterator[int]:
        yield self.command.process.pid
        yield from self.command.ranks().values()

    def finish(self, steps: int | None) -> int:
        """Ends the run at `steps`, or now, and compares it with one that nobody disturbs; returns its last step."""
        self.command.ranks()
        if steps is None:
            self.command.process.send_signal(signal.SIGTERM)
        code = self.command.wait(600)
        assert code == (0 if steps is not None else 128 + signal.SIGTERM), f"code {code}: {self.command.told}"
        end = saved_steps("run")[-1]
        for command in self.started:
            assert not command.left_behind(), f"{command.left_behind()} still run"
        assert not list(Path("run").glob("**/*.tmp-*"))
        reference = self._reference(end)
        assert_same_end("run", "reference", end)
        losses = [[row for row in logged(run) if row[0] == "step"] for run in ("run", "reference")]
        assert losses[0] == losses[1][: len(losses[0])], "every step once, with the losses of the reference"
        assert not reference.left_behind()
        return end

    def _reference(self, end: int) -> Command:
        same = [word for word in self.words if not word.startswith(("output.folder", "checkpoint.every"))]
        fault = "stream" * self.stream
        reference = Command([*same, "output.folder=reference", f"checkpoint.every={end}"], fault, log="reference-told")
        self.started.append(reference)
        reference.wait_until(lambda: end in saved_steps("reference") or reference.process.poll() == 0, 3600)
        reference.process.send_signal(signal.SIGTERM)
        reference.wait()
        return reference


def faults_of(data: str, seed: int) -> Iterator[str]:
    """All kinds in a random order, then again in another."""
    choose = random.Random(seed)
    while True:
        kinds = kinds_for(data)
        choose.shuffle(kinds)
        yield from kinds


def campaign(data: str, count: int, started: list[Command], tell: Callable[[Row], None], seed: int = 7) -> Disturbed:
    """So many faults, each as soon as the run has got over the one before, in the middle of an interval of saves."""
    choose, gap = random.Random(seed), 20
    steps = (count + 2) * 5 * gap
    run = Disturbed(data, started, steps=steps, every=gap, pause=0.02)
    for _, kind in zip(range(count), faults_of(data, seed), strict=False):
        tell(run.disturb(kind, choose.randint(gap, 2 * gap)))
    run.finish(steps)
    return run


def soak(data: str, minutes: float, every: float, started: list[Command], tell: Callable[[Row], None]) -> Disturbed:
    """A fault every so many seconds."""
    until = time.monotonic() + 60 * minutes
    run = Disturbed(data, started, steps=10**6, every=50, pause=0.1)
    for kind in faults_of(data, seed=11):
        began = time.monotonic()
        tell(run.disturb(kind, 25))
        if time.monotonic() + every > until:
            break
        time.sleep(max(0.0, every - (time.monotonic() - began)))
    run.finish(None)
    return run


HEADER = f"{'fault':<12}{'step':>7}{'told':>8}{'on again':>10}{'repeated':>10}{'lost':>8}{'memory':>12}{'load':>6}"


def line(row: Row) -> str:
    told = "" if row.told is None else f"{row.told:.1f} s"
    times = f"{told:>8}{row.seconds:>8.1f} s{row.repeated:>10}{row.lost:>6.1f} s"
    return f"{row.fault:<12}{row.step:>7}{times}{row.memory:>8.1f} MiB{row.load:>6.1f}"


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEADER, *map(line, rows)])


def growth(rows: Sequence[Row]) -> float:
    return max(row.memory for row in rows) - rows[0].memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="a soak for so long")
    parser.add_argument("--every", type=float, default=90.0, help="seconds between faults of a soak")
    parser.add_argument("--faults", type=int, default=20, help="without --minutes: so many faults in a row")
    parser.add_argument("--data", choices=("shards", "stream"), default="stream")
    parser.add_argument("--json", type=Path, help="write it there, too")
    asked = parser.parse_args()
    target, started, rows, wrong = asked.json and asked.json.absolute(), list[Command](), list[Row](), ""

    def tell(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)

    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="disturbed-") as folder, contextlib.chdir(folder):
        try:
            if asked.minutes is None:
                campaign(asked.data, asked.faults, started, tell)
            else:
                soak(asked.data, asked.minutes, asked.every, started, tell)
        except AssertionError as error:
            wrong = str(error)
        finally:
            for command in started:
                command.end()
    if not rows:
        print(wrong)
        return 1
    lost, more = max(row.lost for row in rows), growth(rows)
    print(f"{len(rows)} faults, {lost:.1f} s lost at most, {more:.1f} MiB more; {wrong or 'the same weights'}")
    if target:
        facts = {"most_lost": lost, "memory_growth": more, "same_weights": not wrong, "wrong": wrong}
        text = json.dumps({**facts, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)
        target.write_text(text + "\n", encoding="utf-8")
    soaked = asked.minutes is None or (more < MOST_MEMORY and lost <= MOST_LOST)
    return 0 if soaked and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
