"""The worker processes of one host: started, watched, and ended together with everything that they have started.

A worker is `python -m flatout VERB` with the words of the command, in a session of its own, so that a Ctrl-C in the
terminal reaches the agent alone. It sees the variables that torchrun sets. Rank 0 has the command's own output; from
the others only their standard error is passed on, line by line, with their rank.

Contract: after `end` nothing that a worker has started runs, unless it put itself into a session of its own. What does
so (programs of strangers, trackers) ends when the worker's pipe does.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, final

import flatout
from flatout.host import whole_cores
from flatout.launch import AGENT, Attempt, LostRankError
from flatout.pulse import Slots, State, stack_of

_NOISE = re.compile(r"\[(rank\d+\]:\[)?[WIE]\d{4} ")  # torch's own log, which says it once more
_ANSWER = 1.0  # seconds that a worker has to write its stack
_KILL = 30.0  # seconds after which one that was killed is taken to hang in the kernel


@dataclasses.dataclass(frozen=True)
class Place:
    """Which ranks this host has, of how many, and where they meet."""

    first: int
    count: int
    size: int
    address: str
    port: int
    agents_store: bool = False  # the store is served by an agent, else by rank 0


@final
class WorkerProcess:
    def __init__(self, process: subprocess.Popen[bytes], rank: int, local: int) -> None:
        self.process, self.rank, self.local = process, rank, local
        self.code: int | None = None  # negative: the signal that killed it
        self.reader: threading.Thread | None = None
        self.stopped_since: float | None = None

    def look(self) -> None:
        """Notes the exit code, once there is one, and ends what the worker has left behind."""
        if self.code is None and _has_ended(self.process):
            _end_group(self.process.pid)
            self.code = self.process.wait()

    def signal(self, number: int) -> None:
        """Not by `Popen.send_signal`, which would reap a process that has ended meanwhile: `look` does that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by SIGSTOP or a debugger."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2][1:2] in "Tt"
        except OSError:
            return False


@final
class Workers:
    def __init__(
        self, command: Sequence[str], place: Place, attempt: Attempt, restarts: int, folder: Path, listen: int | None
    ) -> None:
        self.folder, self.place = folder, place
        self.slots = Slots(folder, place.count, create=True)
        self.all: list[WorkerProcess] = []
        shared = _environment(place, attempt, restarts, folder)
        for local in range(place.count):
            rank = place.first + local
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self.all.append(_start(command, environment, rank, local, listen if rank == 0 else None))

    def look(self) -> None:
        for worker in self.all:
            worker.look()
            if worker.code is None and worker.stopped:
                worker.stopped_since = worker.stopped_since or time.monotonic()
            else:
                worker.stopped_since = None

    def state(self, worker: WorkerProcess) -> State:
        return self.slots.state(worker.local)

    def step(self, worker: WorkerProcess) -> int:
        return self.slots.row(worker.local)["step"]

    def micro_batch(self, worker: WorkerProcess) -> int:
        return self.slots.row(worker.local)["micro_batch"]

    @property
    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self.all if worker.code is None]

    @property
    def listening(self) -> bool:
        """Whether the worker that gets signals knows what to do with one that does not end it."""
        return bool(self.running) and self.state(self.running[0]) is not State.STARTING

    def pass_on(self, number: int) -> None:
        """Hands a signal to one worker: what one rank is told, all of them do after the same step."""
        if self.running:
            self.running[0].signal(number)

    def stack(self, worker: WorkerProcess) -> Sequence[str]:
        """Where a worker is that does not answer; nothing where it is stopped or cannot say."""
        path = self.folder / f"stack-{worker.local}"
        if worker.code is not None or not path.exists() or worker.stopped:
            return ()
        worker.signal(signal.SIGQUIT)
        until = time.monotonic() + _ANSWER
        while time.monotonic() < until and not path.stat().st_size:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of it
        return stack_of(path)

    def end(self) -> None:
        """Ends all workers at once, stopped ones too, and waits for them."""
        for worker in self.running:
            _end_group(worker.process.pid)
        for worker in self.all:
            if worker.code is None:
                worker.code = self._killed(worker)
            if worker.reader is not None:
                worker.reader.join(timeout=2)

    def _killed(self, worker: WorkerProcess) -> int:
        try:
            return worker.process.wait(_KILL)
        except subprocess.TimeoutExpired as error:
            raise LostRankError(
                f"rank {worker.rank} (pid {worker.process.pid}) was killed and does not end: it hangs in the kernel",
                "its GPU, disk or network does not answer: see `dmesg`, and restart the host before you go on",
            ) from error


def _environment(place: Place, attempt: Attempt, restarts: int, folder: Path) -> Mapping[str, str]:
    root = str(Path(flatout.__file__).parents[1])
    threads = max(1, whole_cores() // place.count)
    shared = {
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.count),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": "flatout",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(place.agents_store),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        AGENT: dataclasses.replace(attempt, agent=os.getpid(), pulse=str(folder)).as_json(),
    }
    return {**shared, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _start(
    command: Sequence[str], environment: Mapping[str, str], rank: int, local: int, listen: int | None
) -> WorkerProcess:
    speaks = rank == 0
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flatout", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if speaks else subprocess.DEVNULL,
        stderr=None if speaks else subprocess.PIPE,
        start_new_session=True,
        pass_fds=() if listen is None else (listen,),
    )
    worker = WorkerProcess(process, rank, local)
    if process.stderr is not None:
        worker.reader = threading.Thread(target=_pass_on_lines, args=(process.stderr, rank), daemon=True)
        worker.reader.start()
    return worker


def _pass_on_lines(stream: IO[bytes], rank: int) -> None:
    """Errors name their rank where that matters; anything else a rank says gets it here."""
    with stream:
        for data in stream:
            line = data.decode("utf-8", "replace").rstrip("\n")
            if line and not _NOISE.match(line):
                print(line if line.startswith(("error: ", "hint: ")) else f"rank {rank}: {line}", file=sys.stderr)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it, so that the number of its group cannot be given to others before that is ended, too."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)
