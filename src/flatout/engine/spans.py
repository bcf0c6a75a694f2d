"""A step's numbers, and where its time goes by marks on the device's own clock: both are read late.

Idea: a mark ends one span and begins the next, so a step of n micro-batches needs 2n + 2 of them. On CUDA a mark is an
event in the stream: the host drops it and goes on, and reads the times when the step's report has arrived. Elsewhere it
is the host's clock.

Contract: the spans of a step add up to it, from the end of the step before to its last mark; `wait` is what the device
stood still in between, for data or for the host. Forward and backward of a replayed graph cannot be separated: they
are `micro-batch`.
Trap: an event recorded while a graph is being recorded becomes part of the graph, and has no time.

Asking the device for a loss makes the host wait for it and leaves the device idle afterwards. So each step's report is
copied in the background and read when it has arrived; only a host far ahead, or a caller who needs every number now,
waits.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.records import OTHER_SPANS, STEP_SPANS, SpanRecord
from flatout.world import World

MOST_WAITING = 32


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
        if not self.event.query():  # asked first, so that a profile shows a wait only where the host waited
            self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


class StepClock:
    """The marks of the step under way."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Mark] | tuple[str, Mark, Mark]] = []

    def begin(self) -> None:
        """A step begins; marks of one that failed are forgotten."""
        self.marks = [("wait", Mark(self.cuda))]
        _UNDER_WAY.set(self)

    def mark(self, name: str) -> None:
        """Ends a span of this name."""
        if not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self.marks.append((name, Mark(self.cuda)))

    def take(self) -> "Marks":
        _UNDER_WAY.set(None)
        marks, self.marks = self.marks, []
        return marks


# A name, the mark that ends the span, and the one that begins it: by default the mark before.
Marks = Sequence[tuple[str, Mark] | tuple[str, Mark, Mark]]
_UNDER_WAY: ContextVar[StepClock | None] = ContextVar("flatout_step", default=None)


def spans_between(before: Mark, marks: Marks) -> Iterator[tuple[str, float]]:
    """(name, seconds) from `before` to the last mark; the marks must have passed."""
    for name, mark, *beginning in marks:
        yield name, max(0.0, mark.seconds_since(*(beginning or [before])))
        before = before if beginning else mark


def span(name: str) -> AbstractContextManager[None]:
    """Times the code in its `with` block, in a model or a part of one, under a name of your own.

        with flatout.span("router"):
            scores = self.router(h)

    The seconds are in each `SpanRecord` and in the report beside those of the steps, and `flatout profile` shows the
    block as a range. They are read from the device's clock, without waiting for it. Blocks may lie inside each other.
    Outside of training steps, in code that is compiled or replayed as a CUDA graph, and in the backward pass, nothing
    is timed.
    """
    if not isinstance(name, str) or not name or name in (*STEP_SPANS, *OTHER_SPANS):
        raise UsageError(f"a span cannot be called {name!r}", "choose another name than those of our own spans")
    return _UserSpan(name)


class _UserSpan(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: StepClock | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        self.range = torch.profiler.record_function(self.name)
        self.range.__enter__()
        self.clock = _UNDER_WAY.get()
        if self.clock is not None:
            self.began = Mark(self.clock.cuda and not torch.cuda.is_current_stream_capturing())

    def __exit__(self, *error: object) -> None:
        if torch.compiler.is_compiling():
            return
        self.range.__exit__(None, None, None)
        if self.clock is not None and (not self.clock.cuda or self.began.event is not None):
            self.clock.marks.append((self.name, Mark(self.clock.cuda), self.began))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    step: int
    loss: float
    grad_norm: float
    applied: bool
    learning_rate: float
    loss_scale: float
    parameter_norm: float | None  # where it was asked for
    update_ratios: tuple[float, ...]  # of every group of the optimizers, with it
    tokens: int
    seconds: float
    data_seconds: float
    spans: tuple[tuple[str, float], ...]


class PendingReports:
    """A queue of reports; seconds run from the end of one step to the end of the next on the device's own clock."""

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        """With a `lag` every report is read that many steps later, so that several processes read in step."""
        self.cuda, self.lag = device.type == "cuda", lag
        self.queue: collections.deque[tuple[Mark, Callable[[], StepReport]]] = collections.deque()
        self.last = Mark(self.cuda)

    def restart(self) -> None:
        """Forgets the time since the last step: evaluation and saving are not training."""
        self.last = Mark(self.cuda)

    def push(self, step: int, report: Tensor, *, marks: Marks = (), tokens: int = 0, data_seconds: float = 0.0) -> None:
        """`marks` are those of the step, `tokens` those of its batch, for which the host waited `data_seconds`."""
        if self.cuda:
            host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            host.copy_(report, non_blocking=True)
        else:
            host = report
        before, after = self.last, Mark(self.cuda)

        def read() -> StepReport:
            seconds = after.seconds_since(before)  # first: it waits for the copy
            loss, norm, applied, rate, scale, parameter_norm, *ratios = host.tolist()
            return StepReport(
                step=step,
                loss=loss,
                grad_norm=norm,
                applied=applied == 1.0,
                learning_rate=rate,
                loss_scale=scale,
                parameter_norm=None if parameter_norm < 0 else parameter_norm,
                update_ratios=tuple(ratios),
                tokens=tokens,
                seconds=seconds,
                data_seconds=data_seconds,
                spans=tuple(spans_between(before, marks)),
            )

        self.queue.append((after, read))
        self.last = after

    def ready(self) -> list[StepReport]:
        """The reports that have arrived, in order, without waiting unless too many are under way."""
        arrived, most = [], MOST_WAITING if self.lag is None else self.lag
        while self.queue and (len(self.queue) > most or (self.lag is None and self.queue[0][0].passed())):
            arrived.append(self.queue.popleft()[1]())
        return arrived

    def drain(self) -> list[StepReport]:
        """All reports, waiting for the device."""
        return [self.queue.popleft()[1]() for _ in range(len(self.queue))]


class SpanTotals:
    """Sums of spans between two records."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.busy = 0.0  # seconds of steps, without waiting for other ranks
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.calls: dict[str, int] = collections.Counter()

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds
        self.calls[name] += 1

    def add_step(self, spans: Iterable[tuple[str, float]]) -> None:
        self.steps += 1
        for name, seconds in spans:
            self.add(name, seconds)
            self.busy += seconds if name in STEP_SPANS and name != "reduction" else 0.0

    def take(self, step: int, world: World) -> SpanRecord:
        """The record of all spans since the last one. All ranks must ask for it at the same step."""
        busy = round(self.busy, 6)
        ranks = tuple(world.gather(busy)) if world.size > 1 else ()
        seconds = {name: round(seconds, 6) for name, seconds in self.seconds.items()}
        record = SpanRecord(step=step, steps=self.steps, seconds=seconds, calls=dict(self.calls), rank_seconds=ranks)
        self.reset()
        return record
