"""The agent of a host: starts its workers, watches them, and starts all of them again after a failure.

Idea: it does what `torchrun` does, and judges. torch's agent restarts whatever has failed, sends SIGTERM to all ranks
as soon as one leaves (also while rank 0 still writes its error) and by default kills saves that take longer than 30 s.
This one knows our exit codes: what the user has to mend is never tried again, a save is waited for, and what each rank
has left in its `pulse` says which of them was the cause. Workers see torchrun's variables: nothing below knows the
difference.

Contract: one line for every restart, on standard error: which rank, why, how many steps are repeated, how many restarts
are left. Out of memory does not count as a restart: it ends by itself, since the micro-batch is halved each time. When
the agent ends, none of its workers runs; when it is killed, the kernel ends them.

A worker is `python -m flatout VERB` with the words of the command, in a session of its own, so that a Ctrl-C in the
terminal reaches the agent alone. Rank 0 has the command's own output; of the others only standard error is passed on,
line by line, with their rank. After `Workers.end` nothing that a worker has started runs, unless it put itself into a
session of its own. Processes that do so (programs of strangers, trackers) end when the worker's pipe does.
"""

import abc
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

import flatout
from flatout.checkpoints.checkpoint_files import list_checkpoints
from flatout.errors import UserError
from flatout.host import whole_cores
from flatout.launch import AGENT, Attempt, LostRankError, OtherProcessError
from flatout.pulse import Slots, State, read_json, stack_of

_POLL = 0.05  # seconds
# Seconds in which ranks leave by themselves after one has failed; fewer where they had `parallel.timeout` already.
_GRACE, _SHORT_GRACE = 5.0, 1.0
_NOISE = re.compile(r"\[(rank\d+\]:\[)?[WIE]\d{4} ")  # torch's own log, which says it once more
_ANSWER = 1.0  # seconds that a worker has to write its stack
_KILL = 30.0  # seconds after which one that was killed is taken to hang in the kernel
_STOPS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_RANKED = ("done", "stopped", "refused", "memory", "killed", "host", "frozen", "stuck", "failed", "lost")


# --- the worker processes of a host -----------------------------------------------------------------------------------


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
        """Notes the exit code, once there is one, and ends processes that the worker has left behind."""
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
        """Sends a signal to one worker. Ranks agree after every step, so all of them act on it."""
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


# --- why an attempt ended ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttemptEnd:
    """`kind`: done, stopped (by a signal, after saving), refused (the user can mend it), memory (a smaller micro-batch
    may fit), killed, frozen (by SIGSTOP), stuck, failed (an error of ours), host (one is gone), lost (got no answer).

    `text` is empty where the rank itself printed the error. `steps` have been begun.
    """

    kind: str
    rank: int
    code: int
    text: str = ""
    stack: Sequence[str] = ()
    steps: int = 0
    micro_batch: int | None = None

    @property
    def ends(self) -> bool:
        """Whether the run ends here, however many restarts are left."""
        # An error before the first step is the same the next time.
        return self.kind in ("done", "stopped", "refused") or (self.kind == "failed" and not self.steps)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "stack": list(self.stack)}


def first_of(causes: Sequence[AttemptEnd]) -> AttemptEnd:
    """The one that explains the others: those of all hosts, or of all ranks."""
    named = [cause for cause in causes if cause.kind != "done"] or causes
    chosen = min(named, key=lambda cause: (_RANKED.index(cause.kind), cause.rank))
    return dataclasses.replace(chosen, steps=max(cause.steps for cause in causes))


def cause_of(workers: Workers, *, waited: bool = False) -> AttemptEnd:
    """Judges the workers of this host, before the last of them are ended.

    `waited`: ranks of other hosts have, and not in vain for one that is only slow.
    """
    waited = waited or any(workers.state(worker) is State.TIMED_OUT for worker in workers.all)
    return first_of([_of_worker(workers, worker, waited) for worker in workers.all])


def _of_worker(workers: Workers, worker: WorkerProcess, waited: bool) -> AttemptEnd:
    state, code, steps = workers.state(worker), worker.code, workers.step(worker)
    who = f"rank {worker.rank} (pid {worker.process.pid})"
    when = f"in step {steps}" if steps else "before its first step"
    cause = AttemptEnd("done", worker.rank, 0, steps=steps)
    if code is None:
        if worker.stopped:
            return dataclasses.replace(cause, kind="frozen", code=1, text=f"{who} was stopped (SIGSTOP) {when}")
        if waited and state in (State.STARTING, State.WORKING):
            stack, text = workers.stack(worker), f"{who} hangs {when}"
            return dataclasses.replace(cause, kind="stuck", code=1, text=text, stack=stack)
        return dataclasses.replace(cause, kind="lost", code=1, text=f"{who} waited for others {when}")
    number = -code if code < 0 else code - 128
    if number in _STOPS:
        return dataclasses.replace(cause, kind="stopped", code=128 + number)
    if code < 0:
        text = f"{who} was killed by {_name(number)} {when}"
        return dataclasses.replace(cause, kind="killed", code=128 + number, text=text)
    if code == 0:
        return cause
    if state is State.OUT_OF_MEMORY:
        size = workers.micro_batch(worker)
        text = f"{who} ran out of memory {when}"
        return dataclasses.replace(cause, kind="memory", code=code, text=text, micro_batch=size)
    if state in (State.LOST, State.TIMED_OUT):
        return dataclasses.replace(cause, kind="lost", code=code, text=f"{who} got no answer from other ranks {when}")
    if code in (2, 3, 4, 5):
        return dataclasses.replace(cause, kind="refused", code=code)
    return dataclasses.replace(cause, kind="failed", code=code, text=f"{who} failed {when}")


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# --- where attempts meet ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Left:
    """State that passes from attempt to attempt: the run folder, whether one of them wrote there, a micro-batch that
    fits, and how often the run was started again."""

    folder: str | None = None
    accepted: bool = False
    micro_batch: int | None = None
    restarts: int = 0


Met = tuple[Place, Left, Attempt, int | None]


class Hosts(abc.ABC):
    speaks = True  # whether this agent is the one that prints errors

    @abc.abstractmethod
    def meet(self, left: Left, stopping: Callable[[], bool]) -> contextlib.AbstractContextManager[Met]:
        """Where this attempt's workers meet, the state of all hosts from the attempts before, and an open socket."""

    @abc.abstractmethod
    def failed(self) -> bool:
        """Whether another host has failed in this attempt."""

    @abc.abstractmethod
    def others(self, own: AttemptEnd) -> Sequence[AttemptEnd]:
        """Why this attempt ended on the other hosts."""

    @abc.abstractmethod
    def refuse(self, error: UserError) -> UserError:
        """The error to raise for one that this host has before it meets the others: one of all hosts prints it."""


@final
class OneHost(Hosts):
    def __init__(self, gpus: int) -> None:
        self._gpus, self._attempts = gpus, 0

    @contextlib.contextmanager
    def meet(self, left: Left, stopping: Callable[[], bool]) -> Iterator[Met]:
        self._attempts += 1
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(1024)
            place = Place(0, self._gpus, self._gpus, *listening.getsockname())
            name, socket_number = str(self._attempts), listening.fileno()
            attempt = Attempt(name, socket_number, left.folder, left.accepted, left.micro_batch)
            yield place, left, attempt, listening.fileno()

    def failed(self) -> bool:
        return False

    def others(self, own: AttemptEnd) -> Sequence[AttemptEnd]:
        return ()

    def refuse(self, error: UserError) -> UserError:
        return error


# --- the agent --------------------------------------------------------------------------------------------------------


class FailedError(UserError):
    """A run that failed more often than it may be started again."""


@final
class Agent:
    """`command` is the verb and its words, `timeout` the seconds after which a stopped rank is given up."""

    def __init__(self, command: Sequence[str], hosts: Hosts, *, restarts: int, timeout: float) -> None:
        self.command, self.hosts = command, hosts
        self.restarts, self.timeout = restarts, timeout
        self.attempts = 0
        self.left = Left()  # by the attempts so far
        self.signal: int | None = None  # that ends the run
        self.at_once = self.saving = False

    def run(self) -> int:
        with self._signals():
            while True:
                cause = self._attempt()
                if self.signal is not None:
                    if cause.text and not self.at_once:
                        print(
                            f"{cause.text} before the run was stopped: it has reached {self._point()}", file=sys.stderr
                        )
                    return 128 + self.signal
                if cause.ends:
                    if cause.text:
                        print(f"{cause.text}, which is not tried again", file=sys.stderr)
                    return cause.code
                self._start_again(cause)

    def _attempt(self) -> AttemptEnd:
        if self.signal is not None:
            return AttemptEnd("stopped", 0, 128 + self.signal)
        with tempfile.TemporaryDirectory(prefix="flatout-agent-", ignore_cleanup_errors=True) as name:
            try:
                with self.hosts.meet(self.left, lambda: self.signal is not None) as (place, left, attempt, listen):
                    self.left = left
                    workers = Workers(self.command, place, attempt, self.attempts, Path(name), listen)
                    try:
                        own = self._watch(workers)
                    finally:
                        workers.end()
                        self._keep(Path(name))
                    return first_of([own, *self.hosts.others(own)])
            finally:
                self.attempts += 1

    def _watch(self, workers: Workers) -> AttemptEnd:
        """Waits until all workers have left, or until those that have not must be ended."""
        until: float | None = None
        passed_on = False
        while True:
            time.sleep(_POLL)
            workers.look()
            if not workers.running or self.at_once:
                break
            if self.signal is not None and not passed_on:
                passed_on = True
                workers.pass_on(self.signal)
            if self.saving and workers.listening:
                self.saving = False
                workers.pass_on(signal.SIGUSR1)
            now = time.monotonic()
            if until is None and (self._is_broken(workers) or self.hosts.failed()):
                late = any(
                    worker.stopped_since is not None or workers.state(worker) is State.TIMED_OUT
                    for worker in workers.all
                )
                until = now + (_SHORT_GRACE if late else _GRACE)
            if until is not None and now > until:
                break
        return cause_of(workers, waited=self.hosts.failed())

    def _is_broken(self, workers: Workers) -> bool:
        gone = [worker for worker in workers.all if worker.code is not None]
        if any(worker.code and workers.state(worker) is not State.ENDED for worker in gone):
            return True
        limit = time.monotonic() - self.timeout
        return any(worker.stopped_since is not None and worker.stopped_since < limit for worker in workers.all)

    def _keep(self, folder: Path) -> None:
        """Keeps this attempt's run folder for the next."""
        run = read_json(folder / "run.json")
        if run is not None:
            accepted = self.left.accepted or run["accepted"]
            self.left = dataclasses.replace(self.left, folder=run["folder"], accepted=accepted)

    # --- again ------------------------------------------------------------------------------------------------------

    def _start_again(self, cause: AttemptEnd) -> None:
        """Says why, and prepares the next attempt; raises where there is none."""
        for frame in cause.stack:
            print(f"rank {cause.rank}: {frame}", file=sys.stderr)
        saved, point = self._saved_step(), self._point()
        repeated = max(0, cause.steps - 1 - saved)
        again = f"starting all ranks again from {point}, {repeated} steps are repeated"
        if cause.kind == "memory" and cause.micro_batch:
            self.left = dataclasses.replace(self.left, micro_batch=cause.micro_batch)
            print(f"{cause.text}: {again}, with micro-batches of {cause.micro_batch} on all", file=sys.stderr)
            return
        if self.left.restarts >= self.restarts:
            way = "the same command with --resume auto goes on from there" if saved else "nothing was saved yet"
            many = "no restarts were asked for" if not self.restarts else f"all {self.restarts} restarts are used up"
            error = FailedError(f"{cause.text}, and {many}", f"the run has reached {point}: {way}")
            error.exit_code = cause.code
            raise error if self.hosts.speaks else OtherProcessError(cause.code)
        self.left = dataclasses.replace(self.left, restarts=self.left.restarts + 1)
        left = self.restarts - self.left.restarts
        print(f"{cause.text}: {again} ({left} of {self.restarts} restarts left)", file=sys.stderr, flush=True)

    def _saved_step(self) -> int:
        if self.left.folder is None or not self.left.accepted:
            return 0
        found = list_checkpoints(Path(self.left.folder) / "checkpoints")
        return max((step for step, _ in found), default=0)

    def _point(self) -> str:
        saved = self._saved_step()
        return f"step {saved}" if saved else "the beginning"

    # --- signals ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT, SIGTERM or SIGHUP saves and ends the run, a second SIGINT ends it at once. SIGUSR1 saves.

        A signal that the agent was started to ignore stays ignored, in its workers too.
        """
        before = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        """Only notes it: a signal may come when there are no workers, or while they are being started or judged."""
        if number == getattr(signal, "SIGUSR1", None):
            self.saving = True
        elif self.signal is None:
            self.signal = number
        elif number == signal.SIGINT and not self.at_once:
            self.at_once = True
            with contextlib.suppress(OSError):
                os.write(2, b"\nquitting at once; checkpoints that were finished are intact\n")
