"""Step reports read late: each has the seconds and the numbers of its own step."""

import pytest
import torch

from flatout.engine import spans
from flatout.engine.spans import MOST_WAITING, PendingReports

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a mark reads, to be set."""
    now = [100.0]
    monkeypatch.setattr(spans.time, "perf_counter", lambda: now[0])
    return now


def report(loss: float, norm: float = 1.0, applied: float = 1.0, parameter_norm: float = -1.0) -> torch.Tensor:
    return torch.tensor([loss, norm, applied, 1e-3, 1024.0, parameter_norm], dtype=torch.float64)


def test_every_step_has_its_own_seconds(clock: list[float]) -> None:
    pending = PendingReports(CPU)
    for step, now in enumerate((101.0, 103.0, 106.5), start=1):
        clock[0] = now
        pending.push(step, report(float(step)), tokens=10 * step, data_seconds=0.25 * step)
    taken = pending.drain()
    assert [one.seconds for one in taken] == [1.0, 2.0, 3.5]
    assert [(one.step, one.loss, one.tokens, one.data_seconds) for one in taken] == [
        (1, 1.0, 10, 0.25), (2, 2.0, 20, 0.5), (3, 3.0, 30, 0.75),
    ]  # fmt: skip
    assert pending.drain() == []


def test_what_is_no_training_is_no_step_s_time(clock: list[float]) -> None:
    pending = PendingReports(CPU)
    clock[0] = 101.0
    pending.push(1, report(1.0))
    clock[0] = 150.0  # an evaluation
    pending.restart()
    clock[0] = 152.0
    pending.push(2, report(2.0))
    assert [one.seconds for one in pending.ready()] == [1.0, 2.0]


def test_spans_begin_where_the_step_before_ended(clock: list[float]) -> None:
    pending = PendingReports(CPU)
    for step in (1, 2):
        marks = []
        for name, seconds in (("wait", 0.5), ("forward", 1.0), ("backward", 2.0)):
            clock[0] += seconds
            marks.append((name, spans.Mark(False)))
        pending.push(step, report(1.0), marks=marks)
    assert [one.spans for one in pending.drain()] == [(("wait", 0.5), ("forward", 1.0), ("backward", 2.0))] * 2


def test_numbers_of_a_report_are_told_by_name() -> None:
    pending = PendingReports(CPU)
    pending.push(1, report(2.5, norm=0.75, applied=1.0, parameter_norm=9.0))
    pending.push(2, report(2.5, applied=0.0))
    first, second = pending.drain()
    assert (first.loss, first.grad_norm, first.applied, first.parameter_norm) == (2.5, 0.75, True, 9.0)
    assert (first.learning_rate, first.loss_scale) == (1e-3, 1024.0)
    assert (second.applied, second.parameter_norm) == (False, None)


def test_only_a_host_far_ahead_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans.Mark, "passed", lambda _: False)
    pending = PendingReports(CPU)
    for step in range(MOST_WAITING + 3):
        pending.push(step, report(1.0))
    assert [one.step for one in pending.ready()] == [0, 1, 2]
    assert len(pending.drain()) == MOST_WAITING
