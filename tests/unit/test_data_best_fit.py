"""Best-fit packing: as few windows as the plain method, every pair of every document once, and no target astray."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.sampler import Packing, best_fit

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 90)), max_size=120)


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing as the textbooks have it: what is left of each window, in the order they were opened."""
    sizes = []
    for length in lengths:
        pairs = length - 1
        sizes += [capacity] * (pairs // capacity) + [pairs % capacity] * (pairs % capacity > 0)
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [window for window, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= size
        else:
            rooms.append(capacity - size)
    return rooms


def rooms_of(packing: Packing) -> list[int]:
    parts = np.split(packing.sizes, packing.first[1:-1])
    return [packing.capacity - int(part.sum()) for part in parts] if packing.windows else []


@settings(max_examples=400, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 40))
def test_windows_are_filled_as_by_the_plain_method(lengths: list[int], capacity: int) -> None:
    packing = best_fit(np.array(lengths, dtype=np.int64), capacity)
    rooms = rooms_of(packing)
    assert sorted(rooms) == sorted(plain_best_fit(lengths, capacity))
    assert len(rooms) == packing.windows
    assert min(rooms, default=0) >= 0
    assert packing.padding == pytest.approx(sum(rooms) / max(1, len(rooms) * capacity))
    # No window could have taken in another: at most half of all room is wasted.
    fullest_first = sorted(rooms)
    assert sum(fullest_first[-2:]) < capacity or len(rooms) < 2


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 40))
def test_every_pair_is_in_one_window(lengths: list[int], capacity: int) -> None:
    packing = best_fit(np.array(lengths, dtype=np.int64), capacity)
    starts = np.cumsum([0, *lengths])
    expected = [
        place for first, length in zip(starts, lengths, strict=False) for place in range(first, first + length - 1)
    ]
    found = [
        place
        for start, size in zip(packing.starts.tolist(), packing.sizes.tolist(), strict=True)
        for place in range(start, start + size)
    ]
    assert sorted(found) == expected
    assert packing.pairs == len(expected)
    assert packing.remainder == lengths.count(1)
    # Only documents that cannot fit are cut, and only into full windows.
    cut = np.isin(packing.starts, starts[:-1], invert=True)
    assert len(packing.starts) == sum(-(-(length - 1) // capacity) for length in lengths)
    assert np.count_nonzero(cut) == sum(max(0, -(-(length - 1) // capacity) - 1) for length in lengths)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(1, 40), data=st.data())
def test_rows_are_laid_out_piece_by_piece(lengths: list[int], capacity: int, data: st.DataObject) -> None:
    packing = best_fit(np.array(lengths, dtype=np.int64), capacity)
    if not packing.windows:
        return
    windows = data.draw(st.lists(st.integers(0, packing.windows - 1), max_size=8))
    layout = packing.layout(np.array(windows, dtype=np.int64))
    sources = layout.sources(layout.starts)
    assert sources.shape == layout.documents.shape == (len(windows), capacity)
    for window, row, documents in zip(windows, sources.tolist(), layout.documents.tolist(), strict=True):
        pieces = range(packing.first[window], packing.first[window + 1])
        places = [packing.starts[p] + k for p in pieces for k in range(packing.sizes[p])]
        numbers = [number for number, p in enumerate(pieces) for _ in range(packing.sizes[p])]
        padding = [-1] * (capacity - len(places))
        assert row == places + padding
        assert documents == numbers + padding
        assert places == sorted(places)


def test_the_same_documents_give_the_same_packing() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 2000)
    one, other = best_fit(lengths, 64), best_fit(lengths.astype(np.uint64), 64)
    for name in ("first", "starts", "sizes"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_a_packing_never_changes_between_versions() -> None:
    # A resumed run reads on in the windows it began with.
    packing = best_fit(np.array([5, 1, 23, 9, 4, 4, 12, 2, 8, 3, 17, 6]), 10)
    assert packing.first.tolist() == [0, 1, 2, 3, 4, 6, 8, 10, 13, 15]
    assert packing.starts.tolist() == [6, 16, 46, 71, 29, 68, 38, 60, 0, 81, 26, 42, 88, 56, 58]
    assert packing.sizes.tolist() == [10, 10, 10, 10, 8, 2, 3, 7, 4, 6, 2, 3, 5, 1, 1]
    assert packing.remainder == 1


def test_a_hundred_thousand_documents_waste_next_to_nothing() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64) + 1
    packing = best_fit(lengths, 1024)
    assert packing.pairs == int(lengths.sum()) - len(lengths)
    assert packing.padding < 0.001


@pytest.mark.parametrize("capacity", [2**16, 2**16 + 1])
def test_wide_windows_sort_as_narrow_ones_do(capacity: int) -> None:
    lengths = [capacity + 2, 2, capacity, capacity // 2, capacity // 2, 3 * capacity + 1]
    packing = best_fit(np.array(lengths), capacity)
    assert sorted(rooms_of(packing)) == sorted(plain_best_fit(lengths, capacity))


def test_nothing_to_pack_and_nothing_to_pack_it_into() -> None:
    empty = best_fit(np.array([], dtype=np.int64), 8)
    assert (empty.windows, empty.pairs, empty.padding, empty.remainder) == (0, 0, 0.0, 0)
    assert best_fit(np.array([1, 1, 2]), 8).remainder == 2
    for lengths, capacity in (([3], 0), ([-1], 4), ([3], 2**31)):
        with pytest.raises(ValueError, match="no windows"):
            best_fit(np.array(lengths), capacity)


def test_empty_documents_are_in_no_window_and_padding_is_a_share_of_all_places() -> None:
    packing = best_fit(np.array([0, 9, 1, 0, 4]), 8)
    assert (packing.windows, packing.pairs, packing.remainder) == (2, 11, 1)
    assert packing.starts.tolist() == [0, 10]
    assert packing.padding == pytest.approx(5 / 16)
    with pytest.raises(ValueError, match="no windows of 8 tokens"):
        best_fit(np.array([3, -1]), 8)
