"""What steps need, made ahead of time by threads and handed out in the order of steps.

Contract: nothing is made for a step before the first or after the last one. What a thread raises is raised where its
result is asked for, and ends it all. After `close`, which waits for no more than what is being made, no thread runs.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

import torch

Made = TypeVar("Made")

PREFETCH = 4


@final
class Ahead(Generic[Made]):
    """`make(step)` for one step after the other, by `workers` threads, or when asked for where there are none."""

    def __init__(
        self,
        make: Callable[[int], Made],
        *,
        first_step: int,
        last_step: int,
        workers: int,
        device: torch.device,
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers is 0 or more, not {workers}")
        self._make = make
        self._next_step = self._asked = first_step
        self._last_step = last_step
        self._waiting: deque[Future[Made]] = deque()
        self._prefetch = max(PREFETCH, workers)
        self._pool = ThreadPoolExecutor(workers, "flatout-loader", _use_device, (device,)) if workers else None

    def take(self) -> tuple[int, Made]:
        """The next step and what was made for it; StopIteration after the last."""
        step = self._next_step
        if step >= self._last_step:
            self.close()
            raise StopIteration
        if self._pool is None:
            made = self._make(step)
        else:
            while self._asked < self._last_step and len(self._waiting) < self._prefetch:
                self._waiting.append(self._pool.submit(self._make, self._asked))
                self._asked += 1
            try:
                made = self._waiting.popleft().result()
            except BaseException:
                self.close()
                raise
        self._next_step = step + 1
        return step, made

    def close(self) -> None:
        """Stop the threads and end the iteration. May be called at any time and more than once."""
        self._next_step = self._last_step
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def with_index(device: torch.device | str) -> torch.device:
    """The device with its number, which threads cannot look up: the current one is each thread's own."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _use_device(device: torch.device) -> None:
    # The current CUDA device belongs to a thread; without this, pinning would wake up the first device on every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
