"""Where parts run: in this process or in worker processes; and threads that make batches ahead.

`ProcessEngine` maps a task over parts and yields each part with its result as soon as it is there, in any order, with a
bounded number under way. A worker is a fresh Python that reads jobs from its standard input and writes results to its
standard output; so it never imports the user's script, shares no threads or locks with this process, and ends by itself
when this process dies, even by SIGKILL.

Contract: tasks are functions of (recipe, part) that depend on nothing else. A `UserError` in a worker is raised here;
any other failure names the worker's traceback. After `close` no worker runs. Threads are daemons, unlike those of
`concurrent.futures`: the end of the process does not wait for one that hangs in a read from a disk or a network.

Trap: jobs travel as pickles, from this process to its own children only; nothing of the kind is ever written to disk.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeVar, final

import flatout
from flatout.data.part import CorpusPart, Recipe, characters_of_part, run_part
from flatout.errors import ResourceError, UserError
from flatout.pulse import die_with_parent

Argument = TypeVar("Argument")
_FRAMES = 4  # of a stack that a message names
_LEAVE = 10.0  # seconds


class LoaderError(UserError):
    """A loader that hangs or dies, for the second time if it can be replaced. Saved checkpoints are whole."""

    exit_code = 1


@final
class Threads:
    """Calls functions in threads, in the order in which they were handed over."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """Each thread calls `begin` first."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._begin, self._closed, self._lock = begin, False, threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"{name}_{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[Argument], Any], argument: Argument) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads are closed")
            self._jobs.put((future, function, argument))
        return future

    def close(self, *, wait: bool) -> None:
        """Ends the threads once they have made what they are making; jobs that have not begun are cancelled.

        One that hangs is not waited for longer than a few seconds.
        """
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):  # without waiting: a thread may take the last job first
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)
        until = time.monotonic() + _LEAVE
        for thread in self._threads if wait else ():
            thread.join(max(0.0, until - time.monotonic()))

    def stack(self) -> str:
        """The innermost frames of the first thread that is not waiting for a job, in one line."""
        frames = sys._current_frames()
        for thread in self._threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None and frame.f_code.co_name != "_work":
                return innermost_frames(traceback.extract_stack(frame))
        return "no thread of it runs"

    def _work(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            future, function, argument = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(argument))
            except BaseException as error:  # noqa: BLE001 (raised again in the loop)
                future.set_exception(error)
            del job, future  # what was made is the loop's alone


def innermost_frames(stack: traceback.StackSummary) -> str:
    """The innermost frames of a stack, innermost first."""
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in list(reversed(stack))[:_FRAMES])


Task = Literal["tokens", "characters"]
Place = TypeVar("Place")
TASKS: dict[str, Callable[[Recipe, CorpusPart], Any]] = {"tokens": run_part, "characters": characters_of_part}


@final
class ProcessEngine:
    """Runs parts in worker processes; a thread per worker hands it its jobs. Without any, a thread does them itself.

    Use it as a context manager.
    """

    def __init__(self, workers: int) -> None:
        self._workers = [Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for worker in self._workers or [None]:
            self._idle.put(worker)
        self._threads = Threads(max(workers, 1), "flatout-worker")
        self._replaced = self._closed = False
        self._notices: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: Task, recipe: Recipe, parts: Iterable[CorpusPart]) -> Iterator[tuple[CorpusPart, Any]]:
        """Each part with its result, in the order in which they finish. Parts are taken only as fast as needed."""
        # One job more than there are workers is ready, so that none waits for this thread to read the next.
        most = len(self._workers) + 1
        under_way: dict[Future[Any], CorpusPart] = {}
        for part in parts:
            if len(under_way) >= most:
                yield from _finished(under_way)
            under_way[self._threads.submit(partial(self._call, task, recipe), part)] = part
        while under_way:
            yield from _finished(under_way)

    def in_order(
        self, task: Task, recipe: Recipe, parts: Iterable[tuple[Place, CorpusPart]]
    ) -> Generator[tuple[Place, Any]]:
        """The results of parts with their places, in the order of parts. What waits for a slow one is bounded."""
        most = 2 * max(len(self._workers), 1)
        waiting: deque[tuple[Place, Future[Any]]] = deque()
        for place, part in parts:
            waiting.append((place, self._threads.submit(partial(self._call, task, recipe), part)))
            # What is ready goes on at once: the next part may be long in coming.
            while waiting and (len(waiting) >= most or waiting[0][1].done()):
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()

    def close(self, *, wait: bool = True) -> None:
        """Stops all workers at once. `wait`: for what this process itself is reading, which may hang."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.close(wait=wait)

    def taken_notices(self) -> list[str]:
        """The notices since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def _call(self, task: Task, recipe: Recipe, part: CorpusPart) -> Any:
        worker = self._idle.get()
        try:
            return TASKS[task](recipe, part) if worker is None else self._ask(worker, task, recipe, part)
        finally:
            self._idle.put(worker)

    def _ask(self, worker: "Worker", task: Task, recipe: Recipe, part: CorpusPart) -> Any:
        """Asks a worker. The first worker that dies is replaced, since a part does not depend on an earlier try."""
        try:
            return worker.call(task, recipe, part)
        except WorkerGoneError as error:
            if self._replaced or self._closed:
                raise
            self._replaced = True
            self._notices.append(f"{error.message}; it was replaced")
            worker.start_again()
            return worker.call(task, recipe, part)


def _finished(under_way: dict[Future[Any], CorpusPart]) -> Iterator[tuple[CorpusPart, Any]]:
    done, _ = wait(under_way, return_when=FIRST_COMPLETED)
    for future in sorted(done, key=lambda each: under_way[each].number):
        part = under_way.pop(future)
        yield part, future.result()


# Ctrl-C and the end of a terminal reach the whole group, and so may a request to save: the parent decides.
_PARENTS = ("SIGINT", "SIGHUP", "SIGUSR1")


class WorkerGoneError(ResourceError):
    """A worker process died: killed, or out of memory."""


@final
class Worker:
    """A child process that answers one job at a time."""

    def __init__(self) -> None:
        self._start()

    def start_again(self) -> None:
        self.kill()
        self._start()

    def _start(self) -> None:
        root = str(Path(flatout.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # One thread each: there are as many workers as cores. And memory that is freed goes back to the system: the C
        # library would otherwise keep more and more of it for later, and a long prepare would hold more than a short.
        threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        memory = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "4194304", "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from flatout.data.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads, **memory, "PYTHONPATH": path},
        )
        self._recipe: Recipe | None = None

    def call(self, task: Task, recipe: Recipe, part: CorpusPart) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        known = self._recipe is recipe
        self._recipe = recipe
        try:
            _send(self._process.stdin, (task, None if known else recipe, part))
            ok, value = _receive(self._process.stdout)
        except (OSError, EOFError) as error:
            code = self._process.wait()
            raise WorkerGoneError(
                f"a worker process ended with code {code} while it prepared {_name(part)}",
                "if the machine ran out of memory, use fewer --workers; run prepare again to go on",
            ) from error
        if ok:
            return value
        if isinstance(value, UserError):
            raise value
        raise RuntimeError(f"a worker process failed on {_name(part)}:\n{value}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                stream.close()


def serve() -> None:
    """The loop of a worker: answers jobs until its standard input ends."""
    # Nothing that prints may get into the answers.
    die_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in _PARENTS:
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    recipe: Recipe | None = None
    while True:
        try:
            task, given, part = _receive(sys.stdin.buffer)
        except EOFError:
            return
        recipe = given or recipe
        assert recipe is not None, "the first job brings the recipe"
        try:
            reply = True, TASKS[task](recipe, part)
        except UserError as error:
            reply = False, error
        except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
            reply = False, traceback.format_exc()
        try:
            _send(replies, reply)
        except OSError:  # the parent is gone
            os._exit(1)


def _send(stream: IO[bytes], value: Any) -> None:
    # Straight into the pipe: a part's tokens are large, and a copy of them in between would be as large again.
    pickle.dump(value, stream, protocol=5)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    try:
        return pickle.load(stream)
    except pickle.UnpicklingError as error:  # the other end died in the middle of a message
        raise EOFError from error


def _name(part: CorpusPart) -> str:
    return part.file or (part.slices[0].file.name if part.slices else f"part {part.number}")
