"""TensorBoard, trackio and Weights & Biases beside metrics.jsonl, which stays the truth of a run.

Idea: each tracker has a thread of its own with a queue before it; `write` only puts a record there. TensorBoard's files
are written by that thread, the others by a child process that it feeds (`tracker_child`).

Contract: nothing is imported or started for a tracker that is not asked for. `write` never waits and never raises. A
tracker that fails, or cannot keep up, is told of once in a message, and the run goes on without it. `close` gives each
tracker a while to finish, then leaves it. Both return what there is to tell, which the caller turns into notices.
"""

import contextlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, final

import flatout
from flatout.errors import ConfigError
from flatout.files import open_to_append
from flatout.observe.human import printable
from flatout.records import Record, RunInfo, record_to_json

MOST_WAITING = 20_000  # records; a step's takes about 1 KB
CLOSE_SECONDS = 30.0
_TITLES = {"tensorboard": "TensorBoard", "trackio": "trackio", "wandb": "Weights & Biases"}


class Tracker(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """Refuses a tracker whose package is missing, before a run is started; imports nothing."""
    for name in names:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"output.trackers names {name}, and the package {name} is not installed",
                f"pip install {name}, or take it out of output.trackers; metrics.jsonl is written anyway",
            )


def open_trackers(names: Sequence[str], folder: Path, info: RunInfo) -> "Trackers":
    """Trackers for a run that begins with `info`, which is their first record; give the later ones to `write`."""
    return Trackers([_Lane(name, _opener(name, folder, info), info) for name in dict.fromkeys(names)])


def _opener(name: str, folder: Path, info: RunInfo) -> Callable[[Callable[[str], None]], Tracker]:
    def tensorboard(_tell: Callable[[str], None]) -> Tracker:
        from flatout.observe.track.tensorboard import TensorBoard

        return TensorBoard(folder, info)

    return tensorboard if name == "tensorboard" else lambda tell: _Child(name, folder, tell)


@final
class Trackers:
    """All trackers of a run."""

    def __init__(self, lanes: Sequence["_Lane"]) -> None:
        self._lanes = list(lanes)

    def write(self, record: Record) -> list[str]:
        """Hands a record over; returns messages that came up since the last call. A `RunInfo` they have already."""
        for lane in self._lanes if not isinstance(record, RunInfo) else ():
            lane.put(record)
        return self._messages()

    def close(self, seconds: float = CLOSE_SECONDS) -> list[str]:
        """Lets the trackers finish, for at most `seconds` in all; returns the last messages."""
        for lane in self._lanes:
            lane.finish()
        until = time.monotonic() + seconds
        for lane in self._lanes:
            lane.leave(until)
        messages, self._lanes = self._messages(), []
        return messages

    def _messages(self) -> list[str]:
        return [message for lane in self._lanes for message in lane.messages()]


@final
class _Lane:
    """A queue and the thread that empties it into one tracker."""

    def __init__(self, name: str, opener: Callable[[Callable[[str], None]], Tracker], info: RunInfo) -> None:
        self.title = _TITLES[name]
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._off = threading.Event()
        self._left_out = 0
        self._queue.put(info)
        self._thread = threading.Thread(target=self._work, args=(opener,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        if self._off.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._left_out:
                self._tell("cannot keep up: records are left out of it from here on; metrics.jsonl has them all")
            self._left_out += 1

    def finish(self) -> None:
        # A full queue belongs to a tracker that hangs: then its thread is not waited for.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def leave(self, until: float) -> None:
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive() and not self._off.is_set():
            self._off.set()
            self._tell("did not finish in time and was left alone: its last records may be missing there")

    def messages(self) -> list[str]:
        found = []
        while not self._told.empty():
            found.append(self._told.get())
        return found

    def _tell(self, words: str) -> None:
        self._told.put(printable(f"{self.title} {words}"))

    def _work(self, opener: Callable[[Callable[[str], None]], Tracker]) -> None:
        tracker: Tracker | None = None
        try:
            tracker = opener(self._tell)
            while (record := self._queue.get()) is not None and not self._off.is_set():
                tracker.write(record)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever happens to a tracker must not happen to the run
            self._off.set()
            words = " ".join(str(error).split()) or type(error).__name__
            self._tell(f"failed and is off for the rest of the run: {words[:300]}")
            if tracker is not None:
                with contextlib.suppress(Exception):
                    tracker.close()
        finally:
            self._off.set()


class _ChildError(Exception):
    """What a child said before it ended."""


@final
class _Child:
    """A tracker in a process of its own, fed with JSON lines."""

    def __init__(self, name: str, folder: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._log = folder / f"{name}.log"
        root = str(Path(flatout.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # A session of its own: Ctrl-C is for the trainer, which then says what there is to say, and ends the pipe.
        command = "from flatout.observe.track.child import serve; serve()"
        with open_to_append(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, name, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._failed = False

    def write(self, record: Record) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(record_to_json(record).encode("utf-8", "replace") + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._failed = True
            raise _ChildError(self._last_words()) from None

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._failed and (words := self._last_words()):
            raise _ChildError(words)

    def _last_words(self) -> str:
        """Waits for the end of the child, passes its notes on, and returns why it failed: empty if it did not."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            lines = [line.decode("utf-8", "replace").rstrip("\n") for line in answers]
        code = self._process.wait()
        why = ""
        for line in lines:
            kind, _, words = line.partition(" ")
            if kind == "note":
                self._tell(f"says: {words}")
            elif kind == "failed":
                why = words
        if not why and code:
            why = f"its process ended with code {code}"
        return f"{why} (see {self._log})" if why else ""
