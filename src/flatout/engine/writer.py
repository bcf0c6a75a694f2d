"""A process that writes checkpoints while training goes on, out of memory that it shares with the trainer.

The trainer puts whole files into the shared memory and sends a plan: which bytes are which file of which checkpoint.
The writer saves them by `save_files`, as the trainer itself would, and answers with the size or with the disk's error.
It imports no torch and starts in about a tenth of a second.

Contract: the writer ends with the pipe that it reads from. A trainer that is killed takes it along, in the middle of a
file if need be; the work folder has our mark and is swept away by the next start. On Linux the kernel ends the writer,
even a stopped one. Elsewhere a stopped writer publishes nothing when it goes on: just before a folder gets its name,
the writer looks whether its trainer is still there.
While it writes it sends a sign of life every second, so a writer that hangs does not look like a slow disk.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from flatout.checkpoints.checkpoint_files import save_files
from flatout.confined import pythons, root_of
from flatout.files import PIECE
from flatout.pulse import die_with_parent

PATIENCE = 60.0  # seconds without a sign of life
_BEAT = 1.0
_START = (
    "import sys; sys.path += sys.argv[4:]; from flatout.engine.writer import serve; serve(*map(int, sys.argv[1:4]))"
)
# Of the parent's group, the terminal, or a batch system that signals every process: the parent decides what they mean.
_PARENTS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
Span = tuple[int, int]  # from and to, in the shared memory


@dataclass(frozen=True)
class SavePlan:
    """One checkpoint: where it goes, and which bytes of the shared memory are which of its files."""

    target: str
    step: int
    tensors: dict[str, Span]
    texts: dict[str, Span]


class WriterError(Exception):  # no UserError: the trainer writes the checkpoint itself then
    """The writer cannot be started, has ended or hangs; the message says which."""


def save_plan(memory: memoryview, plan: SavePlan, last_look: Callable[[], None] = lambda: None) -> int:
    """Saves a checkpoint out of the shared memory and returns its size; OSError where that fails."""
    tensors = {name: _pieces(memory[start:end]) for name, (start, end) in plan.tensors.items()}
    texts = {name: bytes(memory[start:end]) for name, (start, end) in plan.texts.items()}
    return save_files(Path(plan.target), plan.step, tensors, texts, last_look=last_look)


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    return (whole[start : start + PIECE] for start in range(0, len(whole), PIECE))


@final
class Writer:
    """The trainer's side of a writer that reads the memory behind a file descriptor.

    Trap: Linux ends the writer with the thread that started it, so that thread must stay until `close`.
    """

    _pipe: Connection
    _process: subprocess.Popen[bytes] | None

    def __init__(self, memory: int) -> None:
        for program in pythons():
            with contextlib.suppress(OSError, EOFError, ValueError):
                self._start(program, memory)
                if self._heard() == {"ready": True}:
                    return
            self.close()
        raise WriterError("it could not be started")

    def _start(self, program: str, memory: int) -> None:
        ours, theirs = socket.socketpair()
        self._pipe, self._process = Connection(ours.detach()), None
        with theirs:
            handles = theirs.fileno(), memory
            numbers, null = map(str, (*handles, os.getpid())), subprocess.DEVNULL
            self._process = subprocess.Popen(
                [program, "-I", "-S", "-c", _START, *numbers, root_of("flatout")],
                pass_fds=handles, stdin=null, stdout=null, stderr=null, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def save(self, plan: SavePlan) -> int:
        """Has a checkpoint saved and returns its size. OSError of the disk, WriterError of the process."""
        try:
            self._pipe.send_bytes(json.dumps(asdict(plan)).encode("ascii"))
            answer = self._heard()
            while answer is None:
                answer = self._heard()
        except (EOFError, OSError, ValueError):
            raise WriterError(f"it ended with code {self.close()}") from None
        if "bytes" in answer:
            return answer["bytes"]
        raise OSError(answer["errno"], answer["reason"])

    def _heard(self) -> dict[str, Any] | None:
        """An answer, or None for a sign of life."""
        if not self._pipe.poll(PATIENCE):
            self.close()
            raise WriterError(f"it has given no sign of life for {PATIENCE:g} s")
        return json.loads(self._pipe.recv_bytes())

    def close(self) -> int | None:
        """Ends the process; returns its exit code."""
        self._pipe.close()
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)  # it ends with its pipe, unless it hangs
        self._process.kill()
        return self._process.wait()


# --- the writer's side ------------------------------------------------------------------------------------------------


def serve(pipe_handle: int, memory_handle: int, parent: int) -> None:
    """Saves the plans that come through the pipe, until it ends."""
    die_with_parent(parent)
    for name in _PARENTS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    pipe, lock = Connection(pipe_handle), threading.Lock()
    memory = memoryview(mmap.mmap(memory_handle, 0, access=mmap.ACCESS_READ))

    def send(value: dict[str, Any] | None) -> None:
        with lock:
            pipe.send_bytes(json.dumps(value).encode("ascii"))

    def look_after_parent() -> None:
        if os.getppid() != parent:
            os._exit(1)

    def work(request: bytes) -> None:
        try:
            answer = {"bytes": save_plan(memory, SavePlan(**json.loads(request)), look_after_parent)}
        except OSError as error:
            answer = {"errno": error.errno, "reason": error.strerror or str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            answer = {"errno": None, "reason": f"{type(error).__name__}: {error}"}
        send(answer)

    under_way: Future[None] | None = None
    thread = ThreadPoolExecutor(1)
    with contextlib.suppress(EOFError, OSError):
        send({"ready": True})
        while True:  # this thread only listens, so it hears the end of the pipe in the middle of a file, too
            if pipe.poll(_BEAT):
                under_way = thread.submit(work, pipe.recv_bytes())
            elif under_way is not None and not under_way.done():
                send(None)
    os._exit(0)
