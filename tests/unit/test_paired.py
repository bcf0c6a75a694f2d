"""Paired differences of a few seeds: intervals, verdicts, and how often they are wrong."""

import functools
import random

import pytest

from flatout.tuning import ablation
from flatout.tuning.ablation import Effect, effects, pooled, quantile
from flatout.tuning.measure import steady_seconds


@pytest.mark.parametrize(("degrees", "known"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(degrees: float, known: float):
    assert quantile(degrees) == pytest.approx(known, abs=5e-4)
    assert quantile(degrees, 0.01) > quantile(degrees, 0.05)


@pytest.mark.parametrize(
    ("pairs", "half_width"),
    [
        ([0.0, 1.0], 6.3531),  # 12.706 * 0.70711 / sqrt(2)
        ([1.0, 2.0, 3.0], 2.4841),  # 4.3027 * 1 / sqrt(3)
        ([1.0, 2.0, 3.0, 4.0], 2.0543),  # 3.1824 * 1.29099 / sqrt(4)
        ([*range(11)], 2.2281),  # 2.2281 * 3.31662 / sqrt(11)
    ],
)
def test_the_interval_of_a_field_alone_is_that_of_students_t(pairs: list[float], half_width: float):
    """Neither wider nor narrower; and the same for each of two fields whose pairs are the same."""
    (found,) = effects({"a": pairs}).values()
    assert found.half_width == pytest.approx(half_width, abs=2e-4)
    both = effects({"a": pairs, "b": pairs})
    noise = pooled([pairs, pairs])
    assert noise is not None
    expected = quantile(noise.degrees) * noise.deviation / len(pairs) ** 0.5
    assert [one.half_width for one in both.values()] == [pytest.approx(expected)] * 2
    assert expected < half_width, "two fields know their noise better than one"


@pytest.mark.parametrize(("fields", "seeds"), [(1, 2), (8, 2), (4, 3), (8, 5)])
def test_fields_that_do_nothing_seldom_get_a_verdict(fields: int, seeds: int, monkeypatch: pytest.MonkeyPatch):
    """All pairs of a seed share the unchanged run, which a count of pairs as degrees of freedom would forget."""
    monkeypatch.setattr(ablation, "quantile", functools.cache(quantile))
    chance = random.Random(f"{fields} {seeds}")
    wrong, trials = 0, 2400 // fields
    for _ in range(trials):
        plain = [chance.gauss(0, 1) for _ in range(seeds)]
        found = effects({str(field): [chance.gauss(0, 1) - own for own in plain] for field in range(fields)})
        wrong += sum(one.verdict in ("helps", "hurts") for one in found.values())
    assert wrong / (trials * fields) <= 0.064  # 5%, and three standard errors of 2,400 draws


def test_an_effect_beyond_the_noise_is_seen_with_its_sign():
    chance = random.Random(3)
    shifts = {"good": 0.5, "bad": -0.5, "idle": 0.0, "also idle": 0.0}
    found = effects({name: [shift + chance.gauss(0, 0.02) for _ in range(3)] for name, shift in shifts.items()})
    assert [found[name].verdict for name in shifts] == ["helps", "hurts", "no difference seen", "no difference seen"]
    assert 0 < (found["idle"].half_width or 0.0) < 0.1


def test_a_field_noisier_than_the_others_keeps_its_own_spread():
    quiet = {str(number): [0.1, 0.1001] for number in range(8)}
    found = effects({**quiet, "noisy": [0.1, 1.1]})
    assert found["noisy"].verdict == "no difference seen"
    assert (found["noisy"].half_width or 0.0) > (found["0"].half_width or 0.0) > 0


def test_without_two_pairs_there_is_a_number_and_no_verdict():
    assert effects({"a": [0.3], "b": [-0.1], "c": []}) == {"a": Effect(0.3, None, 1), "b": Effect(-0.1, None, 1)}
    assert effects({"a": [0.3]})["a"].verdict == ""
    assert pooled([[0.1], []]) is None
    # One pair of a field is judged by the noise of the others.
    assert effects({"a": [5.0], "b": [0.1, 0.11], "c": [0.2, 0.19]})["a"].verdict == "helps"


def test_a_field_that_is_not_used_does_not_make_the_others_look_sure():
    used = {"a": [0.3, 0.1], "b": [-0.2, 0.2]}
    found = effects({**used, "unused": [0.0, 0.0]})
    assert {name: found[name] for name in used} == effects(used)
    assert effects({"unused": [0.0, 0.0]})["unused"].verdict == "no difference seen"


def test_degrees_of_freedom_know_what_is_shared():
    one = pooled([[0.0, 1.0]])
    eight = pooled([[0.0, 1.0]] * 8)
    assert one is not None
    assert eight is not None
    assert one.degrees == 1.0
    assert eight.degrees == pytest.approx(8 / (1 + 7 / 4))
    assert eight.deviation == pytest.approx(one.deviation)


def test_steady_seconds_leave_out_compiling_warming_up_and_spikes():
    steps = [30.0, 2.0, 1.5, 1.2, *[1.0] * 20]
    steps[12] = 9.0
    assert steady_seconds(steps, 4) == [float(number) for number in range(1, 25)]
    stages = [1.0] * 20 + [2.0] * 20
    assert steady_seconds(stages, 4)[-1] == pytest.approx(60.0, abs=3.0)
    assert steady_seconds([3.0, 1.0], 4)[-1] == pytest.approx(2.0)
    assert steady_seconds([], 4) == []
