"""Where a step's time goes: marks on the device's own clock, read late.

Idea: a mark ends one span and begins the next, so a step of n micro-batches needs 2n + 2 of them. On CUDA a mark is an
event in the stream: the host drops it and goes on, and reads the times when the step's report has arrived. Elsewhere it
is the host's clock.

Contract: the spans of a step add up to it, from the end of the step before to its last mark; `wait` is what the device
stood still in between, for data or for the host. Forward and backward of a replayed graph cannot be told apart: they
are `micro-batch`.
Trap: an event recorded while a graph is being recorded becomes part of the graph, and has no time.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from flatout.records import SpanRecord


class Mark:
    """A point in time on the device's stream, or on the host's clock where there is no stream."""

    def __init__(self, cuda: bool) -> None:
        self.host = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if cuda else None
        if self.event is not None:
            self.event.record()

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: "Mark") -> float:
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        if not self.event.query():  # asked first, so that a profile shows a wait only where somebody waited
            self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


class StepClock:
    """The marks of the step under way."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Mark]] = []

    def begin(self) -> None:
        """A step begins; marks of one that failed are forgotten."""
        self.marks = [("wait", Mark(self.cuda))]

    def mark(self, name: str) -> None:
        """What was going on until now was `name`."""
        if not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self.marks.append((name, Mark(self.cuda)))

    def take(self) -> list[tuple[str, Mark]]:
        marks, self.marks = self.marks, []
        return marks


def spans_between(before: Mark, marks: Sequence[tuple[str, Mark]]) -> Iterator[tuple[str, float]]:
    """(name, seconds) from `before` to the last mark; the marks must have passed."""
    for name, mark in marks:
        yield name, max(0.0, mark.seconds_since(before))
        before = mark


class SpanTotals:
    """Sums of spans between two records."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] = self.calls.get(name, 0) + 1

    def add_step(self, spans: Iterable[tuple[str, float]]) -> None:
        self.steps += 1
        for name, seconds in spans:
            self.add(name, seconds)

    def take(self, step: int) -> SpanRecord:
        record = SpanRecord(
            step=step,
            steps=self.steps,
            seconds={name: round(seconds, 6) for name, seconds in self.seconds.items()},
            calls=self.calls,
        )
        self.reset()
        return record
