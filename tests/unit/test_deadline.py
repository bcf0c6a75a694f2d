"""Runs that end on time: the plan, its clock, and what a checkpoint keeps of it. The clock is the tests' own."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.config.schema import OptimConfig
from flatout.data.batch import Schedule
from flatout.engine import loop
from flatout.engine.deadline import Deadline
from flatout.engine.loop import begin, noted
from flatout.errors import CheckpointError
from flatout.optim.optimizers import Optimizers, trainables
from flatout.optim.rules import cooling_from, rules_of
from flatout.records import CheckpointRecord, EvalRecord
from flatout.world import World
from tests.set_up import set_up

WSD = OptimConfig(schedule="wsd", decay_fraction=0.6, min_ratio=0.0, warmup=10, learning_rate=1.0)


class Pretended:
    """A machine whose steps take as long as it is told, and a run on it."""

    def __init__(self, seconds: float, planned: int) -> None:
        self.now = 0.0
        self.trained = 0.0
        self.deadline = Deadline(
            seconds, planned, cooling_from(WSD, planned), Schedule.constant(4, 16), clock=lambda: self.now
        )
        self.optimizers = Optimizers(rules_of(WSD, planned, fused=False), trainables(nn.Linear(4, 4)))
        self.rates: list[float] = []

    def train(self, pace: Callable[[int], float], *, tail: float = 0.0, save: float = 0.0, first: int = 0) -> int:
        """Steps until the deadline says that it was the last; `pace(step)` are the seconds of a step.

        At the end come an evaluation and a sample, which take half of the `tail` each, and a `save`.
        """
        self.deadline.evaluation = self.deadline.sample = tail / 2
        self.deadline.checkpoint = save
        self.deadline.start()
        step = first
        while True:
            self.rates.append(self.optimizers.look_up(torch.tensor(step)).item())
            step += 1
            self.now += pace(step)
            self.trained += pace(step)
            if self.deadline.look(step, step, self.trained, World()):
                self.optimizers.stretch(*self.deadline.stretch)
            self.deadline.cools_down(step)
            if step == self.deadline.last_step:
                return step


@pytest.mark.parametrize(
    "pace",
    [
        lambda _: 0.1,  # as planned
        lambda _: 0.25,  # slower than planned
        lambda _: 0.03,  # faster
        lambda step: 0.1 if step < 300 else 0.2,  # slower from within the cool-down on
        lambda step: 0.1 if step < 100 else 0.04,  # faster from before it on
        lambda step: 0.1 * (1 + 0.5 * math.sin(step)),  # unsteady
    ],
)
def test_a_run_ends_on_time_with_its_cool_down_complete(pace: Callable[[int], float]) -> None:
    run = Pretended(100.0, planned=1000)
    last = run.train(pace, tail=4.0, save=8.0)
    tail = 4.0 * max(1.0, pace(last) / pace(1)) + 8.0  # a slower machine evaluates more slowly; the disk is not slower
    assert 0.985 * 100 <= run.now + tail <= 100.5, "on time, with evaluation, sample and save inside"
    assert run.rates[40] == pytest.approx(1.0), "after a warm-up that is stretched, too"
    assert run.rates[-1] < 0.02, "the rate has reached its end"
    falling = run.rates[40:]
    assert all(after <= before + 1e-6 for before, after in itertools.pairwise(falling)), "it never rises"
    steepest = max(before - after for before, after in itertools.pairwise(falling))
    assert steepest < 10 / last, "it never jumps"
    assert run.deadline.cooldown_step is not None
    assert 0.15 * last < run.deadline.cooldown_step < 0.7 * last


@pytest.mark.parametrize(("since", "times"), [(500, 5.0), (800, 4.0)])
def test_a_machine_that_becomes_much_slower_evaluates_more_slowly_too(since: int, times: float) -> None:
    run = Pretended(100.0, planned=1000)
    run.train(lambda step: 0.1 if step < since else 0.1 * times, tail=2.0)
    assert 97.0 <= run.now + 2.0 * times <= 101.0
    assert run.rates[-1] < 0.02
    falling = run.rates[40:]
    assert all(0 <= before - after + 1e-6 < 0.021 for before, after in itertools.pairwise(falling)), "it never jumps"


def test_a_resumed_run_has_the_time_that_is_left_and_its_rates() -> None:
    state = {"planned": 1000, "spent": 60.0, "anchor": [240, 480.0], "last_step": 490, "cooldown_step": 200}
    resumed = Pretended(100.0, planned=1000)
    resumed.deadline.resume(state, 300)
    resumed.optimizers.stretch(*resumed.deadline.stretch)
    assert resumed.deadline.elapsed == 60.0
    assert resumed.deadline.place(300) == pytest.approx(480 + 60 * 520 / 250)
    last = resumed.train(lambda _: 0.2, first=300)
    assert resumed.now == pytest.approx(40.0, abs=1.0)
    assert last == pytest.approx(500, abs=5)
    assert resumed.deadline.cooldown_step == 200


def test_more_minutes_go_on_at_the_full_rate_and_cool_down_again() -> None:
    run = Pretended(100.0, planned=1000)
    run.train(lambda _: 0.1)
    assert run.deadline.cooldown_step == pytest.approx(400, abs=10)
    step = 400
    longer = Pretended(140.0, planned=1400)
    longer.deadline.resume({**run.deadline.saved(), "spent": 40.0, "cooldown_step": 400}, step)
    longer.optimizers.stretch(*longer.deadline.stretch)
    longer.train(lambda _: 0.1, first=step)
    assert longer.rates[0] == pytest.approx(1.0)
    assert longer.rates[-1] < 0.02
    assert longer.deadline.cooldown_step == pytest.approx(560, abs=10)
    assert longer.now == pytest.approx(100.0, abs=1.0)
    short = Pretended(60.0, planned=600)
    short.deadline.resume({**run.deadline.saved(), "spent": 40.0}, step)
    assert short.deadline.place(step) == cooling_from(WSD, 600), "less than a cool-down is left: it begins at once"


def test_a_cool_down_whose_first_step_could_not_be_saved_begins_one_later() -> None:
    deadline = Pretended(100.0, planned=1000).deadline
    assert [deadline.cools_down(step) for step in (399, 400, 401)] == [False, True, False]
    deadline.put_off()
    assert deadline.cools_down(401)
    assert deadline.cooldown_step == 401


def test_a_checkpoint_without_a_plan_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no usable plan"):
        Pretended(1.0, planned=10).deadline.resume(None, 5)


def test_what_comes_at_the_end_is_known_before_the_first_step_and_measured_from_then_on(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.minutes=1", "train.steps=1000", "optim.schedule=wsd", "eval.sample_tokens=20", "eval.tokens=512"]
    run = set_up(tiny(*words))
    assert run.deadline is not None
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    begin(run)
    first = run.step.micro_batch * run.plan.model.context
    assert run.deadline.evaluation == pytest.approx(512 / first), "of which one batch took a second"
    assert run.deadline.sample == pytest.approx(20 / loop.FEW), "of which the first tokens took a second"
    size = 12 * sum(weight.numel() for weight in run.model.parameters())  # weights and two moments
    assert run.deadline.checkpoint == pytest.approx(size / 1e9, rel=0.1)
    saved = CheckpointRecord(step=1, path="", bytes=1, seconds=2.0, best=False, background_seconds=3.0)
    judged = EvalRecord(
        step=1, loss=1.0, perplexity=1.0, bits_per_byte=None, tokens=1, seconds=7.0, best=False, reason="step"
    )
    assert list(noted(run, iter([saved, judged]))) == [saved, judged]
    assert (run.deadline.checkpoint, run.deadline.evaluation) == (5.0, 7.0), "the last save ends after its writer"
