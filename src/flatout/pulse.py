"""What a worker reports to the agent that started it: where it is in the run, and whether it waits for other ranks.

Idea: the agent of a host makes a folder and names it in its `Attempt`. `slots` in it is memory that the agent and its
workers share, a line of numbers for each worker, so telling costs a store into memory and no system call. Rare things
are files: `run.json` (the run folder), `stack-N` (the stack of worker N, which its process writes when it gets
SIGQUIT, even while Python hangs in a library).

Contract: nothing here raises in a run. Without an agent (torchrun, srun, one process) every method does nothing.
"""

import contextlib
import enum
import faulthandler
import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, final

from flatout.launch import attempt_of

_FIELDS = ("state", "step", "micro_batch")
_ROW = 8 * len(_FIELDS)


class State(enum.IntEnum):
    """What a worker does. A hung worker works, and those that it holds up wait."""

    STARTING = 0
    WORKING = 1
    WAITING = 2  # for other ranks
    LOST = 3  # leaves because another rank is gone
    TIMED_OUT = 4  # leaves because another rank has not answered in time
    OUT_OF_MEMORY = 5  # leaves, and would go on with the micro-batch that it noted
    ENDED = 6  # the run is over or saved: what is left is plots and goodbyes


@final
class Slots:
    """The shared numbers of all workers of a host, as the agent sees them."""

    def __init__(self, folder: Path, workers: int, *, create: bool = False) -> None:
        path = folder / "slots"
        if create:
            path.write_bytes(bytes(_ROW * workers))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.numbers = memoryview(self._memory).cast("q")

    def row(self, worker: int) -> dict[str, int]:
        begin = worker * len(_FIELDS)
        return dict(zip(_FIELDS, self.numbers[begin : begin + len(_FIELDS)], strict=True))

    def state(self, worker: int) -> State:
        return State(self.row(worker)["state"])


@final
class Pulse:
    """The worker's side. `Pulse()` reports to no agent."""

    def __init__(self, folder: Path | None = None, worker: int = 0, agent: int = 0) -> None:
        self.folder, self._worker, self._stack = folder, worker, None
        self._numbers: memoryview | list[int] = [0] * len(_FIELDS)
        self._state, self._step, self._micro_batch = range(len(_FIELDS))
        if folder is not None:
            begin = worker * len(_FIELDS)
            self._numbers = Slots(folder, 0).numbers[begin : begin + len(_FIELDS)]
            self._stack = _stack_on_request(folder / f"stack-{worker}")
            die_with_parent(agent)

    @property
    def state(self) -> State:
        return State(self._numbers[self._state])

    def set_state(self, state: State) -> None:
        self._numbers[self._state] = state

    def at_step(self, step: int) -> None:
        self._numbers[self._step] = step

    def note_micro_batch(self, size: int) -> None:
        self._numbers[self._micro_batch] = size

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._numbers[self._state] = State.WAITING
        yield  # an error leaves the mark: whoever gets no answer was waiting
        self._numbers[self._state] = State.WORKING

    def note_run(self, folder: Path, *, accepted: bool) -> None:
        """Where the run is; once it is `accepted`, a restart resumes there whatever the command says."""
        if self.folder is not None and self._worker == 0:
            write_json(self.folder / "run.json", {"folder": str(folder), "accepted": accepted})


def pulse() -> Pulse:
    """The pulse of this process, by its environment."""
    attempt, worker = attempt_of(), os.environ.get("LOCAL_RANK", "")
    if attempt is None or attempt.pulse is None or not worker.isdecimal():
        return Pulse()
    try:
        return Pulse(Path(attempt.pulse), int(worker), attempt.agent)
    except (OSError, ValueError):  # the agent is gone already
        return Pulse()


def write_json(path: Path, value: Any) -> None:
    """A small file that its reader sees whole. It need not outlive the machine."""
    whole = path.with_name(path.name + ".new")
    with contextlib.suppress(OSError):
        whole.write_text(json.dumps(value), encoding="utf-8")
        whole.replace(path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stack_on_request(path: Path) -> IO[str] | None:
    """SIGQUIT writes the stacks of all threads to a file, from the signal handler itself."""
    if not hasattr(signal, "SIGQUIT") or not hasattr(faulthandler, "register"):
        return None
    file = path.open("w", encoding="utf-8")
    faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)
    return file


def die_with_parent(parent: int | None = None) -> None:
    """The kernel ends this process when the one that started it dies, even where this one is stopped. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it died before
        os._exit(1)


def stack_of(path: Path, most: int = 8) -> Sequence[str]:
    """The innermost frames of the main thread, from what `faulthandler` wrote."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    begin = max((place for place, line in enumerate(lines) if line.startswith("Current thread")), default=-1)
    if begin < 0:  # the interpreter was in a library: the main thread is the last
        begin = max((place for place, line in enumerate(lines) if line.startswith("Thread")), default=-1)
    frames = []
    for line in lines[begin + 1 :]:
        if not line.startswith("  File"):
            break
        frames.append(line.strip())
    return frames[:most]
