"""Batches of samples: every sample once per epoch, rows that never mix, the same at any step."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.batch import Batch, Delivery, LargestRows, Schedule, Span
from flatout.data.sample_data import SampleLoader, SampleOrder, SampleRows, first_samples, fullest_steps, row_lengths
from flatout.data.samples import Samples
from flatout.ops.reference import IGNORED
from flatout.world import World

CPU = torch.device("cpu")


def made(lengths: list[int], seed: int = 0, share: float = 0.5) -> Samples:
    """Samples whose tokens tell where they are from: 1000 * sample + place."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate([1000 * (number + 1) + np.arange(length) for number, length in enumerate(lengths)])
    labelled = rng.random(len(tokens)) < share
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labelled[offsets[:-1]] = False
    return Samples(tokens.astype(np.uint32), labelled, offsets)


def batches(samples: Samples, batch_samples: int, first: int, last: int, **more) -> list[Batch]:
    with loader_of(samples, SampleOrder(len(samples), batch_samples, seed=3), first, last, **more) as loader:
        return list(loader)


def loader_of(samples: Samples, order: SampleOrder, first: int, last: int, **more) -> SampleLoader:
    schedule = more.pop("schedule", Schedule.constant(order.batch_samples, 256))
    delivery = Delivery(device=CPU, workers=more.pop("workers", 0), micro_batch=more.pop("micro_batch", None))
    rows = SampleRows(samples, batch_samples=order.batch_samples, **{"row_tokens": 256, "packing": True, **more})
    return SampleLoader(rows, order, delivery, Span(schedule=schedule, first_step=first, last_step=last))


def documents_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of each document of a batch."""
    found = []
    for tokens, targets, documents in zip(*tensors(batch), strict=True):
        present = [number for number in documents.unique().tolist() if number >= 0]
        assert present == list(range(len(present)))
        for number in present:
            places = (documents == number).nonzero().flatten()
            # A document lies in one piece.
            assert torch.equal(places, torch.arange(int(places[0]), int(places[-1]) + 1))
            found.append((tokens[places].tolist(), targets[places].tolist()))
        padding = documents < 0
        assert (tokens[padding] == 0).all()
        assert (targets[padding] == IGNORED).all()
    return found


def check_documents(batch: Batch, samples: Samples) -> list[int]:
    """Every document is a whole sample with its labels; returns which."""
    numbers = []
    for inputs, targets in documents_of(batch):
        number = inputs[0] // 1000 - 1
        ids, labelled = samples.sample(number)
        assert inputs == ids[:-1].tolist()
        assert targets == [int(id) if label else IGNORED for id, label in zip(ids[1:], labelled[1:], strict=True)]
        numbers.append(number)
    return numbers


LENGTHS = st.lists(st.integers(2, 257), min_size=1, max_size=40)


@given(lengths=LENGTHS, batch_samples=st.integers(1, 12), packing=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_each_epoch(lengths: list[int], batch_samples: int, packing: bool):
    samples = made(lengths)
    steps = SampleOrder(len(samples), batch_samples, 3).steps_per_epoch
    assert steps == -(-len(lengths) // batch_samples)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        labels = 0
        for batch in batches(samples, batch_samples, epoch * steps, (epoch + 1) * steps, packing=packing):
            seen.update(check_documents(batch, samples))
            labels += int((batch.targets != IGNORED).sum())
            assert batch.tokens.dtype == batch.targets.dtype == torch.int64
            assert tensors(batch)[2].dtype == torch.int32
            assert batch.tokens.shape[1] in row_lengths(256)
        assert seen == Counter(range(len(lengths)))
        assert labels == samples.labels


@given(lengths=LENGTHS, batch_samples=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_packed_rows_are_few_and_short(lengths: list[int], batch_samples: int):
    samples = made(lengths)
    steps = SampleOrder(len(samples), batch_samples, 3).steps_per_epoch
    packed, padded = (batches(samples, batch_samples, 0, steps, packing=packing) for packing in (True, False))
    for one, other in zip(packed, padded, strict=True):
        assert sorted(check_documents(one, samples)) == sorted(check_documents(other, samples))
        rows, length = one.tokens.shape
        assert rows <= other.tokens.shape[0]
        pairs = sum(len(inputs) for inputs, _ in documents_of(one))
        # Any two rows of best fit hold more than one row can, so that half of the widest rows is full.
        assert rows == 1 or pairs * 2 > rows * (256 if rows == 2 else length) - 256
        assert length <= 256


def test_resuming_at_any_step_gives_the_same_batches():
    samples = made([3, 50, 200, 17, 64, 65, 2, 90, 130, 33, 12])
    whole = batches(samples, 4, 0, 9)
    for first in range(9):
        for one, other in zip(whole[first:], batches(samples, 4, first, 9, workers=2), strict=True):
            assert one.step == other.step
            assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    assert batch.packed is not None
    return batch.tokens, batch.targets, torch.from_numpy(batch.packed.documents_BT)


def test_the_last_step_of_an_epoch_takes_what_is_left():
    order = SampleOrder(10, 4, seed=1)
    steps = [order.indices(step) for step in range(6)]
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(10))
    assert np.concatenate(steps[:3]).tolist() != np.concatenate(steps[3:]).tolist()
    assert [len(SampleOrder(3, 8, 0).indices(step)) for step in range(2)] == [3, 3]


def test_a_process_without_a_sample_takes_the_step_and_counts_nothing():
    rows = SampleRows(made([3, 50, 200]), batch_samples=4, row_tokens=256, packing=True)
    shares = [rows.shared(np.arange(3)[World(rank, 4).share(3)]) for rank in range(4)]
    assert [share.tokens for share in shares] == [0, 2, 49, 199]
    assert shares[0].tokens_BT.size
    assert (shares[0].targets_BT == IGNORED).all()


def test_row_lengths_are_few_multiples_of_64():
    assert row_lengths(1) == [64]
    assert row_lengths(256) == [64, 128, 192, 256]
    assert row_lengths(200) == [64, 128, 192, 256]
    lengths = row_lengths(2048)
    assert lengths[-1] == 2048
    assert len(lengths) == 8 + 8 + 8
    assert all(length % 64 == 0 for length in row_lengths(5000))
    assert row_lengths(5000)[-1] == 5056
    for lengths in (row_lengths(2048), row_lengths(100_000)):
        assert lengths == sorted(set(lengths))
        assert all(after / before <= 1.13 for before, after in itertools.pairwise(lengths[8:]))


def test_mixed_lengths_leave_little_padding():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.2, 0.85, 2000)), 2, 2049).astype(int).tolist()
    samples = made(lengths)
    packed = batches(samples, 32, 0, 62, row_tokens=2048)
    filled = sum(int((tensors(batch)[2] >= 0).sum()) for batch in packed)
    assert filled / sum(batch.tokens.numel() for batch in packed) > 0.9
    # Shapes repeat: sixty steps need few different ones.
    assert len({tuple(batch.tokens.shape) for batch in packed}) <= 25


def test_evaluation_sees_every_sample_once_in_order():
    samples = made([3, 50, 200, 17, 64, 65, 2])
    for packing in (False, True):
        found = list(SampleRows(samples, batch_samples=3, row_tokens=256, packing=packing).in_order(CPU, World()))
        assert [sorted(check_documents(batch, samples)) for batch in found] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("most", "count"), [(None, 4), (77, 4), (76, 4), (75, 3), (70, 3), (69, 2), (20, 2), (19, 1), (3, 1), (2, 1)]
)
def test_the_first_samples_are_those_that_fit_whole_and_at_least_one(most: int | None, count: int):
    samples = made([3, 17, 50, 6])
    some = first_samples(samples, most)
    assert len(some) == count
    for number in range(count):
        for mine, theirs in zip(some.sample(number), samples.sample(number), strict=True):
            assert mine.tolist() == theirs.tolist()
    assert len(some.tokens) == len(some.labelled) == some.offsets[-1]


def test_what_cannot_be_loaded_is_refused():
    samples = made([3, 100])
    with pytest.raises(ValueError, match="no room for a sample of 100"):
        batches(samples, 2, 0, 1, row_tokens=98)
    assert batches(samples, 2, 0, 1, row_tokens=99)
    with pytest.raises(ValueError, match="over 5 samples"):
        loader_of(samples, SampleOrder(5, 1, 0), 0, 1)
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(5, 0, 0)


def test_closing_ends_the_threads():
    samples = made([30] * 50)
    loader = loader_of(samples, SampleOrder(50, 2, 0), 0, 99, workers=2, row_tokens=64)
    next(loader)
    loader.close()
    loader.close()
    assert list(loader) == []


def test_joined_batches_hold_the_same_samples_with_less_padding():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.2, 0.85, 640)), 2, 2049).astype(int).tolist()
    samples, cpu = made(lengths), torch.device("cpu")
    rows = {"row_tokens": 2048, "packing": True}
    filled = places = 0
    shapes = set()
    for batch in batches(samples, 32, 0, 20, joined=True, micro_batch=3, **rows):
        check_documents(batch, samples)
        assert batch.packed is not None
        seen, labels = Counter(), 0
        for cut in batch.packed.cuts(3):
            tokens, targets, layout = batch.packed.part(cut, cpu)
            assert tokens.shape[0] == 1
            bounds = layout.bounds_E.tolist()
            for start, end in itertools.pairwise(bounds):
                if end > start and tokens[0, start] > 0:
                    number = int(tokens[0, start]) // 1000 - 1
                    assert tokens[0, start:end].tolist() == samples.sample(number)[0][:-1].tolist()
                    seen[number] += 1
            labels += int((targets != IGNORED).sum())
            places += tokens.numel()
            shapes.add(layout.sizes)
        assert seen == Counter(check_documents(batch, samples))
        assert labels == int((batch.targets != IGNORED).sum())
        filled += batch.packed.tokens
    order = SampleOrder(len(samples), 32, seed=3)
    padding = SampleRows(samples, batch_samples=32, joined=True, **rows).padding(order, 3)
    assert (padding.steps, padding.tokens, padding.places, padding.shapes) == (20, filled, places, len(shapes))
    assert padding.share < 0.06
    in_rows = SampleRows(samples, batch_samples=32, **rows).padding(order, 3)
    assert in_rows.tokens == filled
    assert padding.share < in_rows.share


def test_parts_made_ahead_are_those_made_when_asked():
    samples, cpu = made([3, 50, 200, 17, 64, 65, 2, 90, 130, 33, 12]), torch.device("cpu")
    for joined in (True, False):
        ahead = batches(samples, 6, 0, 4, joined=joined, micro_batch=2)
        for one, other in zip(ahead, batches(samples, 6, 0, 4, joined=joined), strict=True):
            assert one.packed is not None
            assert other.packed is not None
            for size in (1, 2, 6):
                for cut in one.packed.cuts(size):
                    mine, theirs = one.packed.part(cut, cpu), other.packed.part(cut, cpu)
                    values = [(part[0], part[1], *part[2].tensors) for part in (mine, theirs)]
                    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_a_row_for_each_sample_stays_one():
    samples = made([30, 50, 200, 17])
    for batch in batches(samples, 4, 0, 1, packing=False, joined=True):
        assert batch.packed is not None
        assert batch.packed.part(slice(None), torch.device("cpu"))[0].shape == (4, 256)


def test_chosen_steps_come_again_and_again():
    samples = made([5 + n % 7 for n in range(40)])
    order = SampleOrder(40, 4, seed=3)
    only = dataclasses.replace(Schedule.constant(4, 256), chosen=(7, 12))
    whole = batches(samples, 4, 0, 13)
    with loader_of(samples, order, 0, 4, workers=2, schedule=only) as loader:
        for batch, step in zip(loader, (7, 12, 7, 12), strict=True):
            assert torch.equal(batch.tokens, whole[step].tokens)


@given(lengths=st.lists(st.integers(2, 60), min_size=5, max_size=40), size=st.integers(1, 6), epochs=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_the_fullest_steps_are_among_those_looked_at(lengths: list[int], size: int, epochs: int):
    samples = made(lengths)
    order = SampleOrder(len(lengths), size, seed=3)
    steps = epochs * order.steps_per_epoch
    found = fullest_steps(samples, order, steps)
    assert max(found) < steps
    sums = [samples.lengths[order.indices(step)].sum() for step in range(steps)]
    longest = [samples.lengths[order.indices(step)].max() for step in range(steps)]
    assert max(sums) == max(sums[step] for step in found)
    assert max(longest) == max(longest[step] for step in found)
    packed, one_by_one = (
        SampleRows(samples, batch_samples=size, row_tokens=64, packing=packing) for packing in (True, False)
    )
    assert packed.most_rows(order, found) <= size
    for by in (LargestRows.by_tokens, LargestRows.by_labels):
        most = max(by(one)[0] for _, one in one_by_one.micro_batches(order, range(steps), size))
        assert most == max(by(one)[0] for _, one in one_by_one.micro_batches(order, found, size))


def test_what_a_micro_batch_holds_is_counted_from_what_the_loader_makes():
    samples = made([60, 200, 30, 256, 129, 64, 90, 12], share=0.3)
    order = SampleOrder(len(samples), 4, seed=3)
    rows = SampleRows(samples, batch_samples=4, row_tokens=256, packing=True)
    held = [one for _, one in rows.micro_batches(order, range(2), 1)]
    made_by_loader = batches(samples, 4, 0, 2)
    assert sum(one.labels for one in held) == sum(int((tensors(one)[1] != IGNORED).sum()) for one in made_by_loader)
    assert all(one.rows == 1 and 0 < one.labels < one.row_tokens for one in held)
    assert rows.largest(order, 1) == max(held, key=lambda one: (one.rows * one.row_tokens, one.labels))
    wide, narrow = LargestRows(2, 64, 100), LargestRows(1, 192, 90)
    assert max(wide, narrow, key=LargestRows.by_tokens) == narrow
    assert max(wide, narrow, key=LargestRows.by_labels) == wide
    even = LargestRows(1, 64, 100)
    assert max(even, wide, key=LargestRows.by_labels) == wide, "of as many labels, the one with more tokens"


def test_a_run_shorter_than_an_epoch_is_looked_at_as_far_as_it_goes():
    samples = made([5] * 30 + [50])
    order = SampleOrder(31, 1, seed=3)
    longest = next(step for step in range(31) if order.indices(step)[0] == 30)
    assert longest in fullest_steps(samples, order)
    assert all(step < longest for step in fullest_steps(samples, order, longest or 1))


def test_an_epoch_that_is_not_finished_is_looked_at_too():
    samples = made([5] * 30 + [50])
    order = SampleOrder(31, 1, seed=3)
    longest = next(step for step in range(31, 62) if order.indices(step)[0] == 30)
    assert longest < 61
    assert longest in fullest_steps(samples, order, longest + 1)
