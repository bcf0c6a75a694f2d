"""The range test: what it reads out of a curve, and that the run it was done with is as before, bit for bit."""

import copy
import dataclasses
import itertools
import math
import random

import pytest
import torch

from flatout.engine.run import Run
from flatout.engine.state import Progress, capture
from flatout.errors import ConfigError
from flatout.tuning import lr_range
from flatout.tuning.lr_range import (
    first_rise,
    range_test,
    read_curve,
    smooth,
    untouched,
    without_jumps,
)
from flatout.tuning.measure import Steps
from tests.set_up import set_up

RATES = [10.0 ** (-7 + 7 * index / 99) for index in range(100)]


def curve(rate: float, *, knee: float = 1e-3, noise: float = 0.0, dice: random.Random | None = None) -> float:
    """A loss that falls around `knee`, is lowest at six times that, and rises beyond."""
    place = math.log10(rate / knee)
    fall = 1.5 / (1 + math.exp(-4 * place))
    rise = 0.8 * max(0.0, place - 0.8) ** 2
    return 4.2 - fall + rise + (dice.gauss(0, noise) if dice is not None else 0.0)


def losses(**settings) -> list[float]:
    return [curve(rate, **settings) for rate in RATES]


def rate_of(reading, name: str) -> float:
    return next(one.rate for one in reading.suggestions if one.name == name)


def test_the_suggestions_lie_where_their_names_say():
    reading = read_curve(RATES, losses())
    bottom = min(range(reading.read), key=lambda index: reading.smoothed[index])
    assert rate_of(reading, "minimum / 10") == pytest.approx(RATES[bottom] / 10)
    assert RATES[bottom] == pytest.approx(6e-3, rel=0.4)
    assert RATES[0] < rate_of(reading, "knee") < RATES[bottom]
    assert reading.chosen == "knee"
    assert reading.rate == rate_of(reading, "knee")
    over = (reading.smoothed[0] - curve(reading.rate)) / (reading.smoothed[0] - reading.smoothed[bottom])
    assert over == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("knee", [1e-5, 1e-4, 3e-2])
def test_another_scale_of_rates_moves_every_suggestion_along(knee: float):
    here, there = read_curve(RATES, losses()), read_curve(RATES, losses(knee=knee))
    for one, other in zip(here.suggestions, there.suggestions, strict=True):
        factor = (other.rate / one.rate) / (knee / 1e-3)
        assert 0.5 < factor < 2, one.name
    assert there.rate / here.rate == pytest.approx(knee / 1e-3, rel=0.5)


def test_noise_moves_the_choice_by_less_than_a_factor_of_two():
    calm = read_curve(RATES, losses()).rate
    found = [read_curve(RATES, losses(noise=0.05, dice=random.Random(seed))).rate for seed in range(20)]
    assert max(found) / min(found) < 2
    assert all(0.5 < rate / calm < 2 for rate in found)


def test_steps_that_jump_do_not_move_the_choice():
    calm, values = read_curve(RATES, losses()).rate, losses()
    for index in (60, 66, 67):
        values[index] += 2.0
    assert read_curve(RATES, values).rate == pytest.approx(calm, rel=0.15)


def test_a_second_valley_beyond_the_first_rise_is_not_read():
    values = losses()
    for index in range(90, 100):
        values[index] = 1.0  # deeper than the first
    reading = read_curve(RATES, values)
    assert reading.read < 90
    assert reading.rate == pytest.approx(read_curve(RATES, losses()).rate)


def test_fine_tuning_takes_the_middle_of_the_floor():
    reading = read_curve(RATES, losses(), tuning=True)
    assert reading.chosen == "floor"
    assert rate_of(reading, "knee") < reading.rate < RATES[reading.read]
    lowest = min(reading.smoothed[: reading.read])
    assert curve(reading.rate) - lowest < 0.05 * (reading.smoothed[0] - lowest)
    assert read_curve(RATES, losses()).suggestions == reading.suggestions[:-1], "pretraining has its own"
    broken = read_curve(RATES[:61], [*losses()[:60], math.nan], tuning=True)
    assert RATES[40] < broken.rate < RATES[60], "a loss that is not finite has risen"
    assert read_curve(RATES[:60], losses()[:60], tuning=True).chosen == "knee", "a curve that never rises has no floor"


def test_a_loss_that_is_not_finite_ends_the_curve():
    values = [*losses()[:75], math.nan]
    reading = read_curve(RATES[:76], values)
    assert len(reading.smoothed) == 75
    assert math.isfinite(reading.rate)


@pytest.mark.parametrize("values", [[4.2] * 100, [4.2 + rate for rate in RATES], [4.2] * 5 + [math.nan] * 95])
def test_a_curve_that_never_falls_has_nothing_to_read(values: list[float]):
    with pytest.raises(ConfigError, match="no curve to read"):
        read_curve(RATES, values)


def test_smoothing_keeps_a_constant_and_a_rise_of_the_whole_is_found():
    assert smooth([0.0, 0.1, 0.2], [3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert first_rise([4.0, 3.0, 2.0, 2.05, 2.1, 2.6, 1.0]) == 5
    assert first_rise([4.0, 4.001, 3.0]) == 3


def test_a_loss_is_the_median_of_as_many_on_either_side():
    assert without_jumps([5.0, 4.0, 3.0, 2.0, 1.0]) == [4.0, 3.5, 3.0, 2.5, 2.0]
    assert without_jumps([1.0, 1.0, 1.0, 9.0, 9.0, 1.0, 1.0, 1.0]) == [1.0] * 8


# --- the run itself ---------------------------------------------------------------------------------------------------


def state_of(run: Run) -> dict:
    """Everything that training moves, as copies."""
    held = capture(run, Progress())
    tensors = {
        f"{part}.{name}": value for part in ("model", "optimizer", "run") for name, value in getattr(held, part).items()
    }
    tensors["schedules"] = run.step.optimizer.schedules_KU
    return copy.deepcopy({name: value.detach().clone() for name, value in tensors.items()})


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train(run: Run, first: int, count: int) -> list[float]:
    """Steps of the real run, from batch `first` on."""
    found = []
    with run.batches(first) as loader:
        for batch, _ in zip(loader, range(count), strict=False):
            with run.random.active():
                found.append(run.step(batch.tokens, batch.targets)[0].item())
    return found


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize(
    ("trained", "words"),
    [
        (0, ["model.dropout=0.2"]),
        (3, ["model.dropout=0.2", "speed.precision=bf16", "speed.micro_batch=2"]),
        pytest.param(3, ["speed.fused_optimizer=off"], marks=pytest.mark.slow),
        (3, ["speed.optimizer_state=8bit", "model.width=64"]),
    ],
)
def test_the_run_is_bit_for_bit_what_it_was(tiny, words: list[str], trained: int):
    loaded = tiny(*words)
    run, twin = set_up(loaded), set_up(loaded)
    assert train(run, 0, trained) == train(twin, 0, trained)
    before, outside = state_of(run), torch.get_rng_state()
    points, ended = range_test(run, steps=25)
    assert len(points) == 25
    assert ended == "the last rate was reached"
    assert points[-1].loss != points[0].loss, "it did train"
    assert torch.equal(torch.get_rng_state(), outside)
    assert same(state_of(run), before)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    # And it goes on as its twin does, who never took the test.
    assert train(run, trained, 4) == train(twin, trained, 4)
    assert same(state_of(run), state_of(twin))


def test_a_test_that_breaks_puts_everything_back_too(tiny):
    run = set_up(tiny())
    train(run, 0, 2)
    before = state_of(run)

    def stop(number: int, _point) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        range_test(run, steps=20, progress=stop)
    assert same(state_of(run), before)


def test_what_is_kept_is_a_copy_and_no_alias(tiny):
    run = set_up(tiny())
    train(run, 0, 1)
    before = state_of(run)
    with untouched(run):
        for parameter in run.model.parameters():
            parameter.data.fill_(7.0)
        for name, moments in run.step.optimizer.tensors().items():
            if name.endswith(".exp_avg"):
                moments.fill_(7.0)
    assert same(state_of(run), before)


def test_the_rates_rise_by_one_factor_and_every_step_takes_its_own(tiny):
    run = set_up(tiny("train.steps=3"))  # a shorter run than the test
    points, _ = range_test(run, low=1e-5, high=1e-1, steps=21)
    factors = [later.rate / earlier.rate for earlier, later in itertools.pairwise(points)]
    assert points[0].rate == pytest.approx(1e-5)
    assert points[-1].rate == pytest.approx(1e-1)
    assert factors == pytest.approx([10**0.2] * 20)


def test_the_steps_are_those_of_training_with_these_rates(tiny):
    """Not a simulation: the same losses as a run whose schedule is that table."""
    run, twin = set_up(tiny()), set_up(tiny())
    points, _ = range_test(run, low=1e-5, high=1e-1, steps=12)
    twin.step.optimizer.follow([point.rate for point in points])
    with Steps(twin) as steps:
        assert [report.loss for report in steps.take(12)] == [point.loss for point in points]


def test_with_muon_all_rates_rise_in_the_ratios_of_the_config(tiny):
    """The rates are Muon's, also where a model without weights in its norms has nothing for `learning_rate`."""
    words = ["optim.optimizer=muon", "optim.learning_rate=1e-3", "optim.embedding_rate=0.1", "model.norm=plain-rmsnorm"]
    run = set_up(tiny(*words, "model.tied=false"))
    assert [group.rule.name for group in run.step.optimizer.groups] == ["matrices", "embedding", "head"]
    with untouched(run):
        points, _ = range_test(run, low=2e-4, high=2e-2, steps=3)
        seen = []

        def look(_number: int, _point) -> None:
            seen.append([float(group.numbers["rate"]) for group in run.step.optimizer.groups])

        range_test(run, low=2e-4, high=2e-2, steps=3, progress=look)
    assert [point.rate for point in points] == pytest.approx([2e-4, 2e-3, 2e-2])
    assert seen == [pytest.approx([rate, 5 * rate, rate / 20]) for rate in (2e-4, 2e-3, 2e-2)]


def test_it_stops_where_the_loss_blows_up(tiny):
    run = set_up(tiny("optim.clip=0", "model.qk_norm=false", "optim.betas=[0.9, 0.5]"))
    points, ended = range_test(run, low=1e-3, high=1e4, steps=60)
    assert len(points) < 60
    assert "times its best" in ended or "not finite" in ended


def test_a_loss_that_is_not_finite_stops_it_at_once(tiny, monkeypatch: pytest.MonkeyPatch):
    run = set_up(tiny())
    take = Steps.take

    def broken(self, count: int):
        reports = take(self, count)
        return [dataclasses.replace(r, loss=math.nan, applied=False) if r.step == 4 else r for r in reports]

    monkeypatch.setattr(lr_range.Steps, "take", broken)
    points, ended = range_test(run, steps=20)
    assert len(points) == 4
    assert "not finite" in ended
