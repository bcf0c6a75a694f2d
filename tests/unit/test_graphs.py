"""The recording of a micro-batch: when it is made, replayed, made anew, given up. A fake recorder replaces CUDA."""

import numpy as np
import pytest
import torch

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine import graphs
from flatout.engine.graphs import WARM_UPS, MicroBatchGraph
from flatout.engine.monitor import Notices
from flatout.engine.setup import only_adapters
from flatout.engine.step import TrainStep
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.gpt import build_model
from flatout.ops.documents import PackedRows, Room
from flatout.ops.gradients import clear_gradients
from flatout.ops.reference import IGNORED
from tests.made_optimizers import made_optimizers

VOCAB = 19
SMALL = ModelConfig(layers=2, width=16, heads=2, context=8)


class FakeRecorder:
    """Records a function and executes nothing, as CUDA does; a replay calls it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.warm_ups = self.recordings = self.replays = 0
        self.pools = []
        self.finished = 0
        self.bytes = 1000

    def warm_up(self, function):
        self.warm_ups += 1
        return function()

    def record(self, function, pool=None):
        self.recordings += 1
        self.pools.append(pool)
        if self.error is not None:
            raise self.error
        result = torch.full((), float("nan"))

        def replay():
            self.replays += 1
            result.copy_(function())

        self.bytes += 100 if pool is None else 10
        return replay, result, pool or object()

    def finish(self):
        self.finished += 1

    def held(self):
        return self.bytes


def make(recorder: FakeRecorder | None, micro_batch: int = 2) -> tuple[TrainStep, Notices]:
    model, news = build_model(SMALL, VOCAB, seed=1), Notices()
    step = TrainStep(
        model,
        made_optimizers(model, OptimConfig(learning_rate=1e-2)),
        clip=1.0,
        micro_batch=micro_batch,
        graph=None if recorder is None else MicroBatchGraph(model, news, recorder),
    )
    return step, news


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 8, 8), generator=generator)
    targets[0, seed % 8 :] = -100  # the number of labels differs from step to step
    return tokens, targets


def test_replays_give_the_step_without_graphs_exactly():
    recorder = FakeRecorder()
    step, news = make(recorder)
    plain, _ = make(None)
    for seed in range(5):
        assert torch.equal(step(*batch(seed)), plain(*batch(seed)))
    assert (recorder.warm_ups, recorder.recordings) == (WARM_UPS, 1)
    assert recorder.replays == 5 * 4 - WARM_UPS
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True))
    assert news.take() == []


def test_what_recordings_hold_is_known_until_they_are_forgotten():
    recorder = FakeRecorder()
    step, _ = make(recorder)
    graph = step.graph
    assert graph is not None
    assert graph.held_bytes == 0
    for seed in range(2):
        step(*batch(seed))
    assert graph.held_bytes == 100
    assert recorder.finished == 0
    step.use_micro_batch(step.micro_batch)
    assert graph.held_bytes == 0
    assert recorder.finished == 1, "a replay may still be running in the memory that goes"


def test_gradients_stay_in_place_and_start_from_zero():
    step, _ = make(FakeRecorder())
    step(*batch(0))
    gradients = [p.grad for p in step.model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)
    step(*batch(1))
    assert all(p.grad is g for p, g in zip(step.model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("what", ["shape", "gradients", "micro-batch"])
def test_another_shape_or_dropped_gradients_mean_another_recording(what):
    recorder = FakeRecorder()
    step, _ = make(recorder)
    plain, _ = make(None)
    for seed in range(2):
        assert torch.equal(step(*batch(seed)), plain(*batch(seed)))
    if what == "shape":
        step.micro_batch = plain.micro_batch = 1
    elif what == "micro-batch":
        step.use_micro_batch(4)
        plain.use_micro_batch(4)
    else:
        clear_gradients(step.optimizer.parameters, drop=True)
    for seed in range(2, 5):
        assert torch.equal(step(*batch(seed)), plain(*batch(seed)))
    assert recorder.recordings == 2


def test_a_recording_that_fails_is_told_once_and_costs_nothing():
    recorder = FakeRecorder(RuntimeError("operation not permitted when stream is capturing\nmore"))
    step, news = make(recorder)
    plain, _ = make(None)
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), plain(*batch(seed)))
    assert recorder.recordings == 1
    told = news.take()
    assert told == [
        "cuda_graphs became off: recording failed: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert news.take() == []


def test_running_out_of_memory_while_recording_is_for_the_loop_to_handle():
    recorder = FakeRecorder(torch.OutOfMemoryError("no memory"))
    step, news = make(recorder)
    with pytest.raises(torch.OutOfMemoryError):
        step(*batch(0))
    recorder.error = None
    step.use_micro_batch(1)
    plain, _ = make(None, micro_batch=1)
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), plain(*batch(seed)))
    assert news.take() == []


# --- packed samples ---------------------------------------------------------------------------------------------------

WIDE = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, context=300, tied=False)
MOST = 32  # documents of a step


def make_adapted(
    recorder: FakeRecorder | None, *, dora: bool = False, micro_batch: int = 2
) -> tuple[TrainStep, Notices]:
    model = build_model(WIDE, VOCAB, seed=1)
    adapters, news = attach(model, AdapterPlan(rank=2, alpha=4.0, dora=dora), seed=0), Notices()
    step = TrainStep(
        model,
        made_optimizers(only_adapters(adapters), OptimConfig(learning_rate=1e-2)),
        clip=1.0,
        micro_batch=micro_batch,
        graph=None if recorder is None else MicroBatchGraph(model, news, recorder, adapters),
        adapters=adapters,
    )
    return step, news


def packed_batch(seed: int, *, joined: bool, rows: int = 3, length: int = 300) -> tuple:
    rng = np.random.default_rng(seed)
    documents = np.full((rows, length), -1, dtype=np.int32)
    for row in documents:
        ends = np.sort(rng.integers(1, length, 4))
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            row[start:end] = number
    tokens = np.where(documents >= 0, rng.integers(0, VOCAB, documents.shape), 0)
    share = rng.random()  # the number of labels differs from step to step
    targets = np.where((documents >= 0) & (rng.random(documents.shape) < share), tokens, IGNORED)
    for row, part in zip(documents, np.split(documents.copy(), rows), strict=True):
        row[part[0] >= 0] = np.unique(part[0][part[0] >= 0], return_inverse=True)[1]  # no number is left out
    packed = PackedRows(tokens, documents, targets, Room(MOST, length, joined))
    return torch.from_numpy(tokens), torch.from_numpy(targets), packed


@pytest.mark.grid
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_a_recording_is_replayed_with_other_documents(joined, dora):
    recorder = FakeRecorder()
    step, news = make_adapted(recorder, dora=dora)
    plain, _ = make_adapted(None, dora=dora)
    shapes, micro_batches = set(), 0
    for seed in range(12):
        batch = packed_batch(seed, joined=joined)
        for cut in batch[2].cuts(2):
            tokens, _, layout = batch[2].part(cut, torch.device("cpu"))
            shapes.add((tokens.shape, layout.sizes))
            micro_batches += 1
        assert torch.equal(step(*batch), plain(*batch)), seed
    for mine, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert 2 < len(shapes) < micro_batches / 2, "the test is about shapes that come again"
    assert recorder.recordings <= len(shapes)
    assert recorder.warm_ups <= len(shapes) + WARM_UPS
    assert recorder.replays == micro_batches - recorder.warm_ups
    assert news.take() == []
    # All after the first record into its memory.
    assert recorder.pools[0] is None
    assert len({id(pool) for pool in recorder.pools[1:]}) == 1
    assert recorder.pools[1] is not None


def test_a_recorded_layout_makes_its_mask_anew(monkeypatch):
    """What a layout keeps for all layers must not be that of the documents which were recorded."""
    recorder = FakeRecorder()
    step, _ = make_adapted(recorder, micro_batch=3)
    plain, _ = make_adapted(None, micro_batch=3)
    for seed in (0, 0, 0, 5, 0, 5):
        batch = packed_batch(seed, joined=False)
        assert torch.equal(step(*batch), plain(*batch))
    assert recorder.replays > 0


def test_packed_rows_that_leave_no_memory_to_record_run_without():
    recorder = FakeRecorder(torch.OutOfMemoryError("CUDA out of memory"))
    step, news = make_adapted(recorder)
    plain, _ = make_adapted(None)
    for seed in range(3):
        batch = packed_batch(seed, joined=True)
        assert torch.equal(step(*batch), plain(*batch))
    assert recorder.recordings == 1
    assert news.take() == ["cuda_graphs became off: recording failed: OutOfMemoryError: CUDA out of memory"]


def test_recordings_are_few_and_that_is_told_once(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_RECORDINGS", 2)
    recorder = FakeRecorder()
    step, news = make_adapted(recorder)
    plain, _ = make_adapted(None)
    for seed in range(10):
        batch = packed_batch(seed, joined=True)
        assert torch.equal(step(*batch), plain(*batch))
    assert recorder.recordings == 2
    assert news.take() == ["cuda_graphs: more than 2 shapes of micro-batches, the others run without"]


def test_micro_batches_of_packed_samples_do_not_change_the_step():
    """One of eight, eight of one, with and without recordings: unequal numbers of labels, and the same mean."""
    reports = []
    for micro_batch, joined, recorder in [
        (8, False, None),
        (1, False, None),
        (8, True, None),
        (1, True, FakeRecorder()),
    ]:
        step, _ = make_adapted(recorder, micro_batch=micro_batch)
        reports.append([step(*packed_batch(seed, joined=joined, rows=8)) for seed in range(2)])
    for other in reports[1:]:
        for mine, theirs in zip(reports[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)
