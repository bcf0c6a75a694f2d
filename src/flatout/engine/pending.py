"""Step reports on their way from the device to the host, read late.

Asking the device for a loss makes the host wait for it and leaves the device idle afterwards. So each report is copied
in the background and read when it has arrived; only a host far ahead, or a caller who needs every number now, waits.
"""

import collections
import dataclasses
import time

import torch
from torch import Tensor

MOST_WAITING = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    step: int
    loss: float
    grad_norm: float
    applied: bool
    learning_rate: float
    loss_scale: float
    seconds: float


class PendingReports:
    """A queue of reports; seconds run from the end of one step to the end of the next on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.queue: collections.deque[tuple[int, Tensor, _Mark, _Mark]] = collections.deque()
        self.last = _Mark(self.cuda)

    def restart(self) -> None:
        """Forgets the time since the last step: evaluation and saving are not training."""
        self.last = _Mark(self.cuda)

    def push(self, step: int, report: Tensor) -> None:
        if self.cuda:
            host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            host.copy_(report, non_blocking=True)
        else:
            host = report
        mark = _Mark(self.cuda)
        self.queue.append((step, host, self.last, mark))
        self.last = mark

    def ready(self) -> list[StepReport]:
        """The reports that have arrived, in order, without waiting unless too many are under way."""
        arrived = []
        while self.queue and (len(self.queue) > MOST_WAITING or self.queue[0][3].passed()):
            arrived.append(self._take())
        return arrived

    def drain(self) -> list[StepReport]:
        """All reports, waiting for the device."""
        return [self._take() for _ in range(len(self.queue))]

    def _take(self) -> StepReport:
        step, report, before, after = self.queue.popleft()
        seconds = after.seconds_since(before)
        loss, norm, applied, rate, scale = report.tolist()
        return StepReport(
            step=step,
            loss=loss,
            grad_norm=norm,
            applied=applied == 1.0,
            learning_rate=rate,
            loss_scale=scale,
            seconds=seconds,
        )


class _Mark:
    """A point in time on the device's stream, or on the host's clock where there is no stream."""

    def __init__(self, cuda: bool) -> None:
        self.host = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if cuda else None
        if self.event is not None:
            self.event.record()

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: "_Mark") -> float:
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000
