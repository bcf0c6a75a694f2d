"""Window order: a bijection in every epoch, stable for ever, looking random; and exact counts of windows."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.sampler import WindowOrder, remainder, window_count

SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=150, deadline=None)
@given(windows=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_bijection(windows: int, seed: int, epoch: int) -> None:
    indices = WindowOrder(windows, seed).indices(epoch * windows, windows)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(windows))


@pytest.mark.parametrize("windows", [2**16 - 1, 2**16, 2**16 + 1, 4**9 + 1])
def test_large_ranges_are_bijections_too(windows: int) -> None:
    assert len(np.unique(WindowOrder(windows, 5).indices(windows * 3, windows))) == windows


@settings(max_examples=100, deadline=None)
@given(windows=st.integers(1, 200), seed=SEEDS, position=st.integers(0, 10**12), cuts=st.lists(st.integers(0, 90)))
def test_any_way_of_asking_gives_the_same_order(windows: int, seed: int, position: int, cuts: list[int]) -> None:
    order = WindowOrder(windows, seed)
    whole = order.indices(position, sum(cuts))
    starts = [position, *(position + total for total in itertools.accumulate(cuts))]
    parts = [order.indices(start, count) for start, count in zip(starts, cuts, strict=False)]
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *parts]))


def test_the_order_never_changes_between_versions() -> None:
    assert WindowOrder(10, 1337).indices(0, 20).tolist() == [4, 6, 3, 8, 2, 7, 9, 0, 1, 5, 3, 8, 0, 6, 2, 7, 1, 5, 4, 9]
    assert WindowOrder(10**12, 0).indices(2**61, 3).tolist() == [205151855606, 991097511534, 271805919758]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    windows = 1000
    first = WindowOrder(windows, 1).indices(0, windows)
    for other in (WindowOrder(windows, 1).indices(windows, windows), WindowOrder(windows, 2).indices(0, windows)):
        assert np.count_nonzero(first == other) < 12


@pytest.mark.parametrize("windows", [2, 3, 4, 5])
def test_all_orders_of_a_few_windows_are_equally_likely(windows: int) -> None:
    epochs = 20_000
    rows = WindowOrder(windows, 7).indices(0, epochs * windows).reshape(epochs, windows)
    seen = Counter(map(tuple, rows.tolist()))
    orders = math.factorial(windows)
    expected = epochs / orders
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(windows)))
    # Mean orders - 1, standard deviation sqrt(2 (orders - 1)): five of those is far out for a fixed seed.
    assert chi_square < orders - 1 + 5 * math.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("windows", [100, 1000])
def test_positions_and_distances_look_random(windows: int) -> None:
    epochs = 400_000 // windows
    rows = WindowOrder(windows, 3).indices(0, epochs * windows).reshape(epochs, windows)
    tenth = windows // 10
    table = np.zeros((10, 10))
    np.add.at(table, (np.arange(windows) // tenth, rows // tenth), 1)
    # Neighbours never coincide, so their distance is one of 1 .. windows - 1, which nine divides for these sizes.
    distances = np.bincount(((np.diff(rows, axis=1) % windows - 1) // ((windows - 1) // 9)).ravel(), minlength=9)
    for counts in (table, distances):
        expected = counts.sum() / counts.size
        assert ((counts - expected) ** 2 / expected).sum() < counts.size + 5 * math.sqrt(2 * counts.size)
    assert abs(np.corrcoef(np.arange(windows), rows[0])[0, 1]) < 5 / math.sqrt(windows)


@pytest.mark.parametrize(("windows", "seed"), [(0, 0), (-1, 0), (2**63, 0), (1, -1), (1, 2**64)])
def test_impossible_orders_are_refused(windows: int, seed: int) -> None:
    with pytest.raises(ValueError, match=r"order|seed"):
        WindowOrder(windows, seed)


def test_impossible_positions_are_refused() -> None:
    for position, count in [(-1, 1), (0, -1), (2**62, 1)]:
        with pytest.raises(ValueError, match="positions"):
            WindowOrder(3, 0).indices(position, count)


@settings(max_examples=300, deadline=None)
@given(tokens=st.integers(0, 300), context=st.integers(1, 40), stride=st.integers(1, 60))
def test_windows_are_counted_exactly(tokens: int, context: int, stride: int) -> None:
    starts = [start for start in range(0, tokens, stride) if start + context + 1 <= tokens]
    count = window_count(tokens, context, stride)
    assert count == len(starts)
    assert (np.arange(count) * stride).tolist() == starts


@settings(max_examples=300, deadline=None)
@given(tokens=st.integers(0, 300), context=st.integers(1, 40), stride=st.integers(1, 60))
def test_every_token_is_in_a_window_or_in_the_remainder(tokens: int, context: int, stride: int) -> None:
    seen = np.zeros(tokens, dtype=bool)
    for start in np.arange(window_count(tokens, context, stride)) * stride:
        seen[start : start + context + 1] = True
    assert remainder(tokens, context, stride) == np.count_nonzero(~seen)


def test_the_last_full_window_is_included() -> None:
    assert window_count(9, 4, 4) == 2
    assert window_count(8, 4, 4) == 1
    assert window_count(5, 4, 1) == 1
    assert window_count(4, 4, 1) == 0
