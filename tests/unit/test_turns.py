"""Two rungs in turns: what their pairs say, and that no load makes a verdict."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from flatout.config.load import LoadedConfig
from flatout.device import detect_device
from flatout.errors import ResourceError, UsageError
from flatout.tuning import turns
from flatout.tuning.ladder import Clock, make_plan
from flatout.tuning.turns import (
    ALIKE,
    FASTER,
    LOOKS,
    MISS,
    NOISY,
    SLOWER,
    Comparison,
    Side,
    chained,
    compare,
    left_out,
    sit,
)

Tiny = Callable[..., LoadedConfig]
Load = Callable[[random.Random], Iterator[float]]  # how many times as long each turn takes as on an idle machine


# --- synthetic machines -----------------------------------------------------------------------------------------------


def drifting(_rng: random.Random) -> Iterator[float]:
    return (1.01**turn for turn in itertools.count())


def stepping(rng: random.Random) -> Iterator[float]:
    level = 1.0
    while True:
        level = rng.choice((1.0, 1.5, 3.0, 8.0)) if rng.random() < 0.03 else level
        yield level


def spiking(rng: random.Random) -> Iterator[float]:
    while True:
        yield 1.0 + (rng.expovariate(0.3) if rng.random() < 0.2 else 0.0)


def wandering(rng: random.Random) -> Iterator[float]:
    place = 0.0
    while True:
        place = 0.95 * place + rng.gauss(0, 0.1)
        yield math.exp(place)


def alternating(_rng: random.Random) -> Iterator[float]:
    return itertools.cycle((1.0, 1.5))


LOADS = (drifting, stepping, spiking, wandering, alternating)


def simulated(load: Load, ratio: float, rng: random.Random) -> Comparison:
    """A sitting over two rungs of which one is `ratio` times as fast, under a load, with 2% of its own noise."""
    times = (level * math.exp(rng.gauss(0, 0.02)) for level in load(rng))
    ratios: list[float] = []
    found: Comparison | None = None
    for look in LOOKS:
        while len(ratios) < look:
            pair = next(times), next(times)
            reference, rung = rng.sample(pair, 2)
            ratios.append(ratio * reference / rung)
        found = compare(ratios)
        if found.settled:
            break
    assert found is not None
    return found


@pytest.mark.parametrize("load", LOADS)
def test_no_load_makes_a_verdict_more_often_than_stated(load: Load):
    """1,000 benches of a rung that changes nothing: at most 2 of 100 may be called faster or slower."""
    rng = random.Random(load.__name__)
    verdicts = [simulated(load, 1.0, rng).verdict for _ in range(1000)]
    wrong = verdicts.count(FASTER) + verdicts.count(SLOWER)
    assert wrong <= 1000 * MISS * len(LOOKS)


@pytest.mark.parametrize("load", LOADS)
def test_the_interval_holds_the_true_ratio(load: Load):
    rng = random.Random(load.__name__)
    found = [simulated(load, 1.1, rng) for _ in range(500)]
    missed = sum(not one.low <= 1.1 <= one.high for one in found)
    assert missed <= 500 * MISS * len(LOOKS)
    assert not any(one.verdict == SLOWER for one in found if one.low <= 1.1 <= one.high)


@pytest.mark.parametrize("load", [drifting, stepping, spiking])
def test_a_gain_of_a_tenth_is_seen_under_load(load: Load):
    rng = random.Random(load.__name__)
    verdicts = [simulated(load, 1.1, rng).verdict for _ in range(200)]
    assert verdicts.count(FASTER) >= 198


def test_one_after_the_other_drift_is_a_gain():
    """What turns are for: the same times, but first all of the one rung and then all of the other."""
    times = list(itertools.islice(drifting(random.Random(0)), 40))
    assert statistics.median(times[20:]) / statistics.median(times[:20]) > 1.2


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [9, 10, 20, 40, 80])
def test_the_interval_leaves_out_as_many_as_coins_allow(pairs: int):
    out = left_out(pairs)
    assert out is not None

    def missing(count: int) -> float:
        return 2 * sum(math.comb(pairs, below) for below in range(count + 1)) / 2**pairs

    assert missing(out) <= MISS < missing(out + 1)


def test_too_few_pairs_carry_nothing():
    for pairs in range(1, 9):
        found = compare([2.0] * pairs)
        assert (found.ratio, found.verdict, found.error) == (2.0, NOISY, math.inf)
        assert not found.settled
        assert found.turned().verdict == NOISY


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.02, 1.3, FASTER), (0.7, 0.99, SLOWER), (0.97, 1.05, ALIKE), (0.9, 1.1, NOISY), (1.0, 1.2, NOISY)],
)
def test_a_verdict_is_what_the_interval_carries(low: float, high: float, verdict: str):
    found = Comparison(math.sqrt(low * high), low, high, 20)
    assert found.verdict == verdict
    turned = found.turned()
    assert turned.verdict == {FASTER: SLOWER, SLOWER: FASTER}.get(verdict, verdict)
    assert turned.error == pytest.approx(found.error)
    assert turned.turned().low == pytest.approx(low)


@pytest.mark.parametrize(
    ("low", "high", "settled"),
    [
        (0.98, 1.03, True),  # known as well as can be
        (0.95, 1.05, False),
        (1.6, 2.4, True),  # far from 1 beside its error
        (1.02, 1.3, False),  # faster, and by how much is not known
        (0.5, 0.7, True),
        (0.6, 1.7, False),
    ],
)
def test_more_pairs_are_timed_until_they_would_change_nothing(low: float, high: float, settled: bool):
    found = Comparison(math.sqrt(low * high), low, high, 20)
    assert found.settled == settled
    assert found.turned().settled == settled


def test_spikes_do_not_move_the_ratio():
    quiet = [1.2 + 0.001 * number for number in range(-10, 10)]
    found = compare([*quiet, 30.0, 0.02])
    assert found.ratio == pytest.approx(1.2, abs=0.002)
    assert 1.17 < found.low < 1.2 < found.high < 1.23


def test_errors_of_a_chain_add_up_like_independent_ones():
    assert chained([]) == 0
    assert chained([0.1]) == pytest.approx(0.1)
    assert chained([0.03, 0.04]) == pytest.approx(0.05, rel=0.02)


# --- real steps -------------------------------------------------------------------------------------------------------


def two_sides(tiny: Tiny) -> tuple[Side, Side]:
    device = detect_device("cpu")
    return Side("rung", tiny("train.steps=1000"), device), Side("reference", tiny("train.steps=1000"), device)


def test_a_sitting_takes_turns(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    taken: list[tuple[str, int]] = []
    honest = Side.take

    def noted(side: Side, count: int) -> Any:
        taken.append((side.name, count))
        return honest(side, count)

    monkeypatch.setattr(Side, "take", noted)
    monkeypatch.setattr(turns, "TURN_SECONDS", 60.0)  # a slow step makes turns shorter
    rung, reference = two_sides(tiny)
    with rung:
        found = sit(rung, reference, steps=40, typical=1e-3, seconds=0.0, most=60.0)
        assert reference.steps is None, "it is gone when the sitting is over"
        assert int(rung.run.step.updates) == 40
    assert taken[0] == ("reference", turns.WARMUP)
    pairs = [{name for name, _ in pair} for pair in zip(taken[1::2], taken[2::2], strict=True)]
    assert pairs == [{"rung", "reference"}] * 10
    assert {count for _, count in taken[1:]} == {4}
    assert len({name for name, _ in taken[1::2]}) == 2, "a coin says who begins"
    assert (found.compared.pairs, len(found.timed), found.apart) == (10, 40, False)


def test_a_sitting_ends_at_the_limit(tiny: Tiny):
    rung, reference = two_sides(tiny)
    with rung:
        found = sit(rung, reference, steps=800, typical=1.0, seconds=5.0, most=0.0)
    assert found.compared.pairs == 1, "there is always something to say"
    assert found.compared.verdict == NOISY


def test_where_memory_holds_one_run_each_is_built_for_its_turns(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    honest, built = turns.borrowed_run, [0]

    def small_card(loaded: LoadedConfig, *, beside: bool = False) -> Any:
        if beside:
            raise ResourceError("out of device memory: two are too many", "less")
        built[0] += 1
        return honest(loaded)

    monkeypatch.setattr(turns, "borrowed_run", small_card)
    rung, reference = two_sides(tiny)
    with rung:
        found = sit(rung, reference, steps=3, typical=1.0, seconds=5.0, most=60.0)
    assert found.apart
    assert (found.compared.pairs, built[0]) == (3, 1 + 6)
    assert rung.steps is reference.steps is None


def test_a_failed_sitting_leaves_no_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    rung, reference = two_sides(tiny)

    def interrupted(_ratios: Sequence[float]) -> Comparison:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt), rung:
        sit(rung, reference, steps=3, typical=1.0, seconds=5.0, most=60.0)
    assert rung.steps is reference.steps is None


def test_the_reference_does_not_clear_the_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    from flatout.tuning import measure

    cleared: list[bool] = []
    monkeypatch.setattr(measure, "free_memory", lambda *, compiled=True: cleared.append(compiled))
    rung, reference = two_sides(tiny)
    with rung:
        sit(rung, reference, steps=3, typical=1.0, seconds=5.0, most=60.0)
    assert cleared == [True, False, False, True]


# --- the clock --------------------------------------------------------------------------------------------------------


def test_time_is_dealt_out(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    free = Clock(None, 20)
    free.typical = 1000.0
    assert not free.up
    assert free.sitting(5) == (30.0, 90.0)
    limited = Clock(100.0, 20)
    limited.typical = 0.5
    assert limited.sitting(1) == (30.0, 90.0)
    assert limited.sitting(10) == (10.0, 90.0), "at least the steps of ten pairs, whatever the share"
    now[0] += 81.0
    assert limited.up, "a rung needs 40 steps"
    assert limited.sitting(1)[1] == 19.0
    now[0] += 40.0
    assert limited.sitting(1)[1] == 0.0


def test_a_limit_that_holds_no_rung_is_refused_with_one_that_does(tiny: Tiny, tmp_path: Any):
    plan = make_plan(tiny(), tmp_path / "scratch", 3, 20, None, lambda _: None)
    Clock(61.0, 20).check(plan, 1.0)
    with pytest.raises(UsageError) as error:
        Clock(31.0, 20).check(plan, 1.0)
    assert "more than --seconds 31" in error.value.message
    assert error.value.hint == "give it more --seconds, or a smaller step: --batch-tokens 32"
    with pytest.raises(UsageError) as error:
        Clock(1.0, 20).check(plan, 1.0)
    assert error.value.hint == "give it more --seconds"
