import itertools

import pytest

from flatout.config.schema import OptimConfig
from flatout.optim.rules import Pace, rate_factors

KINDS = ["cosine", "linear", "wsd", "one-cycle", "constant"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "updates"), [(0, 1), (0, 10), (1, 1), (5, 100), (100, 100), (200, 100)])
def test_every_factor_is_positive_and_at_most_one(kind, warmup, updates):
    factors = rate_factors(OptimConfig(schedule=kind, warmup=warmup, min_ratio=0.1), updates)
    assert len(factors) == updates
    assert all(0 < factor <= 1 + 1e-12 for factor in factors)


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_rises_to_the_peak_then_never_rises_again(kind):
    factors = rate_factors(OptimConfig(schedule=kind, warmup=10, min_ratio=0.1), 200)
    assert all(a < b for a, b in itertools.pairwise(factors[:10]))
    assert factors[9] == pytest.approx(1.0)
    assert all(a >= b for a, b in itertools.pairwise(factors[9:]))


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "one-cycle"])
def test_the_last_update_runs_at_the_floor(kind):
    assert rate_factors(OptimConfig(schedule=kind, warmup=10, min_ratio=0.1), 200)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "updates"), [(0, 1), (0, 2), (10, 200), (9, 10), (10, 10)])
def test_a_decay_to_zero_wastes_no_update(kind, warmup, updates):
    factors = rate_factors(OptimConfig(schedule=kind, warmup=warmup, min_ratio=0.0), updates)
    assert all(0 < factor <= 1 for factor in factors)
    assert updates < 200 or kind == "constant" or factors[-1] < 0.03


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decay_to_zero_is_that_of_transformers_after_the_warm_up(kind, warmup):
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=40)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    factors = rate_factors(OptimConfig(schedule=kind, warmup=warmup, min_ratio=0.0), 40)
    assert factors[warmup:] == pytest.approx(rates[warmup:], abs=1e-12)


def test_wsd_is_flat_until_its_decay():
    factors = rate_factors(OptimConfig(schedule="wsd", warmup=10, decay_fraction=0.25), 200)
    assert set(factors[10:150]) == {1.0}
    assert factors[150] < 1.0


def test_cosine_is_half_way_down_in_the_middle():
    factors = rate_factors(OptimConfig(schedule="cosine", warmup=0, min_ratio=0.0), 100)
    assert factors[50] == pytest.approx(0.5)


def test_a_decay_that_would_start_inside_the_warm_up_starts_after_it():
    factors = rate_factors(OptimConfig(schedule="wsd", warmup=10, decay_fraction=0.9, min_ratio=0.2), 20)
    assert factors[:10] == pytest.approx([(update + 1) / 10 for update in range(10)])
    assert factors[10:] == pytest.approx([1 - 0.08 * (update + 1) for update in range(10)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_longer_than_the_run_reaches_the_peak_with_its_last_update(kind):
    factors = rate_factors(OptimConfig(schedule=kind, warmup=50), 10)
    assert factors == rate_factors(OptimConfig(schedule=kind, warmup=10), 10)
    assert factors[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("warmup", "steps"), [(7, 7), (0.05, 10), (0.0, 0), (1.0, 200), ("2 epochs", 80), ("0.5 epochs", 20)]
)
def test_a_warm_up_is_told_in_steps_as_a_share_or_in_epochs(warmup, steps):
    optim = OptimConfig(warmup=warmup).with_warmup_steps(200, lambda epochs: round(40 * epochs))
    assert optim.warmup_steps == steps


@pytest.mark.parametrize("kind", KINDS)
def test_stages_decay_over_tokens_and_multiply_the_rates(kind):
    config = OptimConfig(schedule=kind, warmup=2, min_ratio=0.0, decay_fraction=0.5)
    # Six updates of one batch, then three of two: the tokens of twelve small updates.
    read = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12]
    plain = rate_factors(config, 9, Pace([9 * place / 12 for place in read], [1.0] * 9))
    staged = rate_factors(config, 9, Pace([9 * place / 12 for place in read], [1.0] * 6 + [3.0] * 3))
    assert staged == [*plain[:6], *(3 * factor for factor in plain[6:])]
    if kind in ("linear", "wsd"):
        start = 2 if kind == "linear" else 9 - round(4.5)
        start = start * 9 / 12 if kind == "linear" else start
        assert plain[7] == pytest.approx(1 - (8 * 9 / 12 - start) / (9 - start))
    assert rate_factors(config, 9, Pace(range(10), [1.0] * 9)) == rate_factors(config, 9)
