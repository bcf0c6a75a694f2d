"""What the live view keeps of a run.

Contract: takes every record once, in order; a run of a million steps takes no more memory than one of a thousand. A
resumed run says steps again: what is kept of them is forgotten at its `RunInfo`. No terminal and no drawing here.
"""

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import final

from flatout import records
from flatout.observe.live.alerts import Alert, Alerts
from flatout.observe.sinks import minutes_of
from flatout.records import EvalRecord, Record, RunInfo, StepRecord

# Which field of `ViewState` the newest record of a kind is in.
_KEPT = {
    EvalRecord: "evaluation",
    records.MachineRecord: "machine",
    records.EigenstateRecord: "eigenstates",
    records.SampleRecord: "sample",
    records.SpanRecord: "spans",
    records.CheckpointRecord: "saved",
    records.NoticeRecord: "notice",
    records.EndRecord: "end",
}
RECENT = 50  # steps whose mean is shown as speed
QUIET_SECONDS = 20.0
POINTS = 512


@final
class Curve:
    """A series in at most 512 means of equally many steps each; the steps per mean double when it is full."""

    def __init__(self) -> None:
        self.stride = 1
        self._points: list[tuple[int, float]] = []  # last step and mean of its bucket
        self._bucket: list[float] = []
        self._last = 0

    def add(self, step: int, value: float) -> None:
        self._last = step
        self._bucket.append(value)
        if len(self._bucket) < self.stride:
            return
        self._points.append((step, mean_of(self._bucket)))
        self._bucket = []
        if len(self._points) >= POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(second[0], mean_of([first[1], second[1]])) for first, second in pairs]
            self.stride *= 2

    def cut_back(self, step: int) -> None:
        """Forgets what came after `step`: a resumed run says it again."""
        self._points = [point for point in self._points if point[0] <= step]
        self._bucket = self._bucket if self._last <= step else []

    def points(self) -> list[tuple[int, float]]:
        """The last step of each bucket, and its mean."""
        return self._points + ([(self._last, mean_of(self._bucket))] if self._bucket else [])

    def values(self) -> list[float]:
        return [value for _, value in self.points()]


def mean_of(values: Sequence[float]) -> float:
    """The mean of the finite ones; NaN only if there are none, so that one bad step does not blank a bucket."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


@final
class ViewState:
    """What the panel shows, from the records seen so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.heard = clock()
        self.info: RunInfo | None = None
        self.step: StepRecord | None = None
        self.evaluation: EvalRecord | None = None
        self.machine: records.MachineRecord | None = None
        self.eigenstates: records.EigenstateRecord | None = None
        self.sample: records.SampleRecord | None = None
        self.spans: records.SpanRecord | None = None
        self.saved: records.CheckpointRecord | None = None
        self.end: records.EndRecord | None = None
        self.losses, self.validation = Curve(), Curve()
        self.latest: collections.deque[float] = collections.deque(maxlen=POINTS)
        self.alerts: collections.deque[Alert] = collections.deque(maxlen=50)
        self._bests: collections.deque[tuple[float, int]] = collections.deque(maxlen=POINTS)  # each below those before
        self.skipped = 0
        self.notice: records.NoticeRecord | None = None
        self.trained_seconds = self.other_seconds = 0.0
        self._alerts = Alerts()
        self._steps_seen = 0
        self._recent: collections.deque[tuple[float, float, float | None]] = collections.deque(maxlen=RECENT)

    def add(self, record: Record) -> list[Alert]:
        """Takes a record; returns the alerts it raised."""
        self.heard = self._clock()
        if kept := _KEPT.get(type(record)):
            setattr(self, kept, record)
        if isinstance(record, RunInfo):
            self._start(record)
        elif isinstance(record, StepRecord):
            self._step(record)
        elif isinstance(record, EvalRecord | records.CheckpointRecord):
            self.other_seconds += _finite(record.seconds)
        if isinstance(record, EvalRecord):
            self.validation.add(record.step, record.loss)
        lowest = math.inf if self.best is None else self.best[0]
        if isinstance(record, EvalRecord) and -math.inf < record.loss < lowest:
            self._bests.append((record.loss, record.step))
        raised = self._alerts.see(record)
        self.alerts.extend(raised)
        return raised

    def _start(self, info: RunInfo) -> None:
        self.info, self.end, self.notice, self._steps_seen = info, None, None, 0
        self._recent.clear()
        if self.step is not None and self.step.step > info.start_step:
            self.losses.cut_back(info.start_step)
            self.validation.cut_back(info.start_step)
            self.latest.clear()
            while self._bests and self._bests[-1][1] > info.start_step:
                self._bests.pop()

    def _step(self, record: StepRecord) -> None:
        self.step, self.end = record, None
        self.losses.add(record.step, record.loss)
        self.latest.append(record.loss)
        self.skipped += not record.applied
        self._steps_seen += 1
        self.trained_seconds += _finite(record.seconds)
        # The first two steps hold compilation and cold caches.
        if record.tokens_per_second and record.seconds > 0 and self._steps_seen > 2:
            self._recent.append((record.tokens_per_second * record.seconds, record.seconds, record.data_seconds))

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss and its step."""
        return self._bests[-1] if self._bests else None

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(item[1] for item in self._recent)
        if seconds > 0:
            return sum(item[0] for item in self._recent) / seconds
        return None if self.step is None else self.step.tokens_per_second

    @property
    def data_share(self) -> float | None:
        known = [(item[2], item[1]) for item in self._recent if item[2] is not None]
        seconds = sum(item[1] for item in known)
        return min(sum(item[0] for item in known) / seconds, 1.0) if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Training, and as much evaluation and saving for each second of it as there has been until now.

        By the clock where the length is told in minutes, unless some were spent before.
        """
        minutes = None if self.info is None else minutes_of(self.info.config)
        if self.info is not None and minutes is not None:
            spent = self.trained_seconds + self.other_seconds
            return None if self.info.start_step else max(0.0, 60 * minutes - spent)
        if self.info is None or self.step is None or not self.tokens_per_second:
            return None
        training = max(self.info.steps - self.step.step, 0) * self.info.batch_tokens / self.tokens_per_second
        return training * (1 + self.other_seconds / self.trained_seconds) if self.trained_seconds > 0 else training

    @property
    def quiet_seconds(self) -> float | None:
        """How long nothing was heard, if that is long for this run."""
        quiet = self._clock() - self.heard
        usual = 0.0 if self.step is None else 10 * _finite(self.step.seconds)
        return quiet if self.end is None and quiet > max(QUIET_SECONDS, usual) else None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
