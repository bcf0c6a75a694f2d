"""Step reports on their way from the device to the host, read late.

Asking the device for a loss makes the host wait for it and leaves the device idle afterwards. So each report is copied
in the background and read when it has arrived; only a host far ahead, or a caller who needs every number now, waits.
"""

import collections
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.engine.spans import Mark, spans_between

MOST_WAITING = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    step: int
    loss: float
    grad_norm: float
    applied: bool
    learning_rate: float
    loss_scale: float
    parameter_norm: float | None  # where it was asked for
    tokens: int
    seconds: float
    data_seconds: float
    spans: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class _Waiting:
    step: int
    report: Tensor
    before: Mark
    after: Mark
    marks: Sequence[tuple[str, Mark]]
    tokens: int
    data_seconds: float


class PendingReports:
    """A queue of reports; seconds run from the end of one step to the end of the next on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.queue: collections.deque[_Waiting] = collections.deque()
        self.last = Mark(self.cuda)

    def restart(self) -> None:
        """Forgets the time since the last step: evaluation and saving are not training."""
        self.last = Mark(self.cuda)

    def push(
        self,
        step: int,
        report: Tensor,
        *,
        marks: Sequence[tuple[str, Mark]] = (),
        tokens: int = 0,
        data_seconds: float = 0.0,
    ) -> None:
        """`marks` are those of the step, `tokens` those of its batch, for which the host waited `data_seconds`."""
        if self.cuda:
            host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            host.copy_(report, non_blocking=True)
        else:
            host = report
        mark = Mark(self.cuda)
        self.queue.append(_Waiting(step, host, self.last, mark, marks, tokens, data_seconds))
        self.last = mark

    def ready(self) -> list[StepReport]:
        """The reports that have arrived, in order, without waiting unless too many are under way."""
        arrived = []
        while self.queue and (len(self.queue) > MOST_WAITING or self.queue[0].after.passed()):
            arrived.append(self._take())
        return arrived

    def drain(self) -> list[StepReport]:
        """All reports, waiting for the device."""
        return [self._take() for _ in range(len(self.queue))]

    def _take(self) -> StepReport:
        waiting = self.queue.popleft()
        seconds = waiting.after.seconds_since(waiting.before)
        loss, norm, applied, rate, scale, parameter_norm = waiting.report.tolist()
        return StepReport(
            step=waiting.step,
            loss=loss,
            grad_norm=norm,
            applied=applied == 1.0,
            learning_rate=rate,
            loss_scale=scale,
            parameter_norm=None if parameter_norm < 0 else parameter_norm,
            tokens=waiting.tokens,
            seconds=seconds,
            data_seconds=waiting.data_seconds,
            spans=tuple(spans_between(waiting.before, waiting.marks)),
        )
