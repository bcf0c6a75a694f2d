"""The recording of a micro-batch: when it is made, replayed, made anew, given up. A fake recorder replaces CUDA."""

import contextlib

import pytest
import torch

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.graphs import WARM_UPS, MicroBatchGraph
from flatout.engine.news import News
from flatout.engine.step import TrainStep
from flatout.model.gpt import build_model
from flatout.optim.optimizers import build_adamw

VOCAB = 19
SMALL = ModelConfig(layers=2, width=16, heads=2, context=8)


class FakeRecorder:
    """Records a function and executes nothing, as CUDA does; a replay calls it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.warm_ups = self.recordings = self.replays = 0

    def warm_up(self, function):
        self.warm_ups += 1
        return function()

    def record(self, function):
        self.recordings += 1
        if self.error is not None:
            raise self.error
        result = torch.full((), float("nan"))

        def replay():
            self.replays += 1
            result.copy_(function())

        return replay, result


def make(recorder: FakeRecorder | None, micro_batch: int = 2) -> tuple[TrainStep, News]:
    model = build_model(SMALL, VOCAB, seed=1)
    optimizer = build_adamw(model, OptimConfig(learning_rate=1e-2), fused=True)
    step = TrainStep(
        model,
        optimizer,
        rates=[1e-2],
        clip=1.0,
        micro_batch=micro_batch,
        keep_gradients=recorder is not None,
        scope=contextlib.nullcontext,
    )
    news = News()
    if recorder is not None:
        step.run_micro_batch = MicroBatchGraph(step.forward_backward, model, news, recorder)
        step.rebuild = step.run_micro_batch.reset
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
        step.optimizer.zero_grad(set_to_none=True)
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
