"""Processes that train together, kept between tests: importing torch takes longer than what most tests do with it."""

import atexit
import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.end_to_end.forked import FORKS

TIMEOUT = 600.0  # seconds, for one call: it only ends what hangs


class Workers:
    """As many processes as were ever asked for at once. One that fails takes the others with it."""

    def __init__(self) -> None:
        self.held: list[tuple[BaseProcess, Connection]] = []
        atexit.register(self.end)

    def run(self, size: int, function: Callable[..., Any], *values: Any) -> list[Any]:
        """What `function(*values)` returns in each of `size` processes, which a launcher seems to have started."""
        while len(self.held) < size:
            self._start()
        port = _free_port()
        for rank, (_, pipe) in enumerate(self.held[:size]):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            pipe.send(({**place, **{name: str(number) for name, number in numbers.items()}}, function, values))
        return self._answers(size)

    def _answers(self, size: int) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.held[:size])}
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), TIMEOUT)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answer, failure = pipe.recv()
                except EOFError:
                    answer, failure = None, "the process is gone"
                if failure is not None:
                    self.end()
                    raise AssertionError(f"rank {rank}: {failure}")
                found[rank] = answer
            if not ready:
                self.end()
                raise AssertionError(f"rank {sorted(waiting.values())} did not answer within {TIMEOUT:g} s")
        return [found[rank] for rank in range(size)]

    def _start(self) -> None:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.held.append((process, ours))

    def end(self) -> None:
        for process, pipe in self.held:
            process.kill()
            process.join()
            pipe.close()
        self.held.clear()


WORKERS = Workers()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            place, function, values = pipe.recv()
            os.environ.update(place)
            try:
                answer, failure = function(*values), None
            except BaseException:  # noqa: BLE001 (told to who asked)
                answer, failure = None, traceback.format_exc()
            pipe.send((answer, failure))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
