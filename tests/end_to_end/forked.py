"""Commands in processes of their own, which may be killed, without the seconds that importing torch takes in each.

They are forks of one process that has imported it, which begins with the first of them and ends with the tests. Those
of `tests/ranks.py` are, too: torch's FSDP asks for the compiler.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# As the agent sets it for its workers; torch reads it once, when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.parallel_runs", "flatout.front.models", "flatout.parallel.sharding", "torch._dynamo"]
)


class Forked:
    """`target(*arguments)` at work in the current folder and environment; its value is the exit status.

    `stdout` and `stderr` name the files that it writes to, behind what is there.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *arguments: object,
        stdout: str | Path = os.devnull,
        stderr: str | Path = os.devnull,
        **environment: str,
    ) -> None:
        streams = [str(stdout), str(stderr)]
        variables = {**os.environ, **environment}
        self._process = FORKS.Process(target=_run, args=(os.getcwd(), streams, variables, target, arguments))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative where a signal ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, "it did not end in time"
        return code

    def wait_until(self, happened: Callable[[], bool], pause: float = 0.01) -> bool:
        """True when it happened, False when the process ended first."""
        while self.poll() is None:
            if happened():
                return True
            time.sleep(pause)
        return False


def _run(
    folder: str,
    streams: list[str],
    environment: dict[str, str],
    target: Callable[..., int],
    arguments: tuple[object, ...],
) -> None:
    os.chdir(folder)
    os.environ.clear()  # the server may have been started with others
    os.environ.update(environment)
    tempfile.tempdir = None  # found anew, by this environment
    for number, path in enumerate(streams, 1):
        place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(place, number)
        os.close(place)
    open_streams()
    sys.exit(target(*arguments))


def open_streams() -> None:
    """As Python does at its start."""
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
