"""The training step against plain torch: loss, clipping, guards, scaling, schedule."""

import contextlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.data.batch import Batch
from flatout.engine.evaluate import evaluate
from flatout.engine.step import LossScale, TrainStep
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED
from flatout.optim import adamw as adamw_module
from flatout.optim.optimizers import Optimizers
from flatout.world import World
from tests.made_optimizers import made_optimizers

VOCAB = 19
SMALL = ModelConfig(layers=2, width=16, heads=2, context=8)


def make_step(model: GPT, *, fused: bool = True, micro_batch: int = 8, clip: float = 1.0, **more) -> TrainStep:
    optimizer = made_optimizers(model, OptimConfig(), rates=more.pop("rates", [1e-2] * 10), fused=fused)
    return TrainStep(model, optimizer, clip=clip, micro_batch=micro_batch, **more)


def state_of(optimizer: Optimizers) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in optimizer.tensors().items()}


def batch(seed: int = 0, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, 8), generator=generator)
    return tokens, torch.randint(VOCAB, (rows, 8), generator=generator)


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_splits_of_a_batch_give_the_same_loss_and_gradients(family, smoothing):
    tokens, targets = batch()
    for row in range(8):  # unequal numbers of labels: row r keeps r+1 of 8
        targets[row, row + 1 :] = IGNORED
    results = []
    for micro_batch in (8, 4, 2, 1):
        model = build_model(ModelConfig(family=family, layers=2, width=16, heads=2, context=8), VOCAB, seed=1).double()
        step = make_step(model, micro_batch=micro_batch, label_smoothing=smoothing)
        loss = step.accumulate(tokens, targets)
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    whole_loss, whole_grads = results[0]
    for loss, grads in results[1:]:
        assert abs(loss - whole_loss) < 1e-9
        for name, grad in grads.items():
            assert (grad - whole_grads[name]).abs().max() < 1e-9, name


def test_the_loss_is_the_mean_over_labelled_tokens():
    tokens, targets = batch()
    targets[:, 3:] = IGNORED
    model = build_model(SMALL, VOCAB, seed=1)
    loss = make_step(model, micro_batch=2).accumulate(tokens, targets)
    logits = model.logits(tokens)[:, :3].reshape(-1, VOCAB)
    expected = torch.nn.functional.cross_entropy(logits, targets[:, :3].reshape(-1))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
def test_update_equals_torchs_clip_and_adamw(fused, clip):
    model = build_model(SMALL, VOCAB, seed=1)
    twin = build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, fused=fused, clip=clip)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.ndim >= 2], "weight_decay": OptimConfig().weight_decay},
            {"params": [p for p in twin.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=tuple(OptimConfig().betas),
        eps=OptimConfig().kind.eps,
        foreach=False,
    )
    for seed in range(5):
        tokens, targets = batch(seed)
        report = step(tokens, targets)
        (twin(tokens, targets) / targets.numel()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip or math.inf)
        plain.step()
        plain.zero_grad()
        # From the second update on weights differ by rounding, which AdamW makes larger where gradients are small.
        message = "the reported norm is the one before clipping"
        torch.testing.assert_close(report[1], norm, rtol=1e-4, atol=0.0, msg=message)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_nothing_moves_on_a_non_finite_value(fused, where, clip):
    model = build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, fused=fused, clip=clip, rates=[0.01, 0.02, 0.03])
    step(*batch())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = state_of(step.optimizer)
    handle = None
    if where == "loss":
        real = model.forward
        model.forward = lambda *a: real(*a) * float("inf")  # type: ignore[method-assign]
    else:
        handle = model.get_parameter("norm.weight").register_hook(lambda grad: grad * float("nan"))
    report = step(*batch(1))
    assert report[2] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, moments[name]) for name, value in step.optimizer.tensors().items())
    if where == "loss":
        model.forward = real  # type: ignore[method-assign]
    elif handle is not None:
        handle.remove()
    report = step(*batch(1))
    assert report[2] == 1.0
    assert report[3] == pytest.approx(0.02), "the skipped step did not advance the schedule"
    assert int(step.updates) == 2


def test_gradients_that_nothing_divides_are_not_written_back(monkeypatch):
    """torch's fused kernel stores divided gradients: a pass over all of them for nothing."""
    divisors: list[torch.Tensor | None] = []
    real = adamw_module.adamw
    monkeypatch.setattr(adamw_module, "adamw", lambda *a, **b: (divisors.append(b["grad_scale"]), real(*a, **b)))
    model = build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, clip=0.0)
    step(*batch())
    assert divisors == [None, None]
    step.loss_scale = LossScale.start(torch.device("cpu"))
    step(*batch())
    assert divisors[2:] == [2.0**16] * 2


def test_loss_scale_halves_on_overflow_doubles_after_good_updates_and_cancels_out():
    plain, scaled = build_model(SMALL, VOCAB, seed=1), build_model(SMALL, VOCAB, seed=1)
    scale = LossScale.start(torch.device("cpu"))
    scale.interval = 3
    step, reference = make_step(scaled, loss_scale=scale), make_step(plain)
    seen = []
    for seed in range(4):
        tokens, targets = batch(seed)
        report, expected = step(tokens, targets), reference(tokens, targets)
        torch.testing.assert_close(report[:4], expected[:4], rtol=1e-4, atol=1e-6)
        seen.append(float(report[4]))
    assert seen == [2.0**16, 2.0**16, 2.0**16, 2.0**17]
    handle = scaled.get_parameter("norm.weight").register_hook(lambda grad: grad * float("inf"))
    step(*batch())
    handle.remove()
    assert float(scale.scale) == 2.0**16
    assert int(scale.good_updates) == 0
    assert int(step.updates) == 4


def test_decay_reaches_matrices_only():
    config = ModelConfig(layers=1, width=16, heads=2, context=8, norm="layernorm", bias=True, residual_scale=0.1)
    model = build_model(config, VOCAB)
    optimizer = made_optimizers(model, OptimConfig(weight_decay=0.1))
    names = {p: name for name, p in model.named_parameters()}
    decayed = {names[p] for group in optimizer.groups if group.fixed("decay") > 0 for p in group.parameters}
    assert decayed == {
        "embedding.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.out.weight",
    }
    assert sum(len(group.parameters) for group in optimizer.groups) == len(names), "tied weights appear once"


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_a_single_label_has_a_loss_of_zero_and_does_no_harm(fused):
    model = build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, fused=fused)
    tokens, targets = batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = step(tokens, torch.full_like(targets, IGNORED))
    assert report[:3].tolist() == [0.0, 0.0, 1.0], "loss and norm are zero, not NaN, and the step counts"
    for name, p in model.named_parameters():
        decay = 1 - 1e-2 * OptimConfig().weight_decay if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * decay, msg=name)
    assert torch.isfinite(step(tokens, targets)[0])


# --- the processes of a run -------------------------------------------------------------------------------------------


class TwoAlike(World):
    """Two processes with the same data, of which this is one: what they add up is twice what is here."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value


class TwiceAsMuch:
    """The reducer of two processes that are alike."""

    in_place = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.lasts = model, 0

    def last_micro_batch(self) -> None:
        self.lasts += 1

    def finish(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def passes(self, count: int) -> int:
        return count

    def norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(tensors)


def test_a_step_of_two_processes_is_that_of_one_with_the_data_of_both():
    tokens, targets = batch(rows=4)
    targets[1:, 3:] = IGNORED
    model, whole = build_model(SMALL, VOCAB, seed=1), build_model(SMALL, VOCAB, seed=1)
    reducer = TwiceAsMuch(model)
    mine = make_step(model, world=TwoAlike(rank=0, size=2), reducer=reducer, micro_batch=1)(tokens, targets)
    assert reducer.lasts == 1, "gradients leave once a step"
    theirs = make_step(whole)(torch.cat([tokens, tokens]), torch.cat([targets, targets]))
    torch.testing.assert_close(mine, theirs)
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_a_micro_batch_that_only_fills_a_pass_is_not_learned(monkeypatch: pytest.MonkeyPatch):
    """Another process has two micro-batches more, and slices of weights are gathered by all."""
    monkeypatch.setattr(TwiceAsMuch, "passes", lambda _self, count: count + 2)
    tokens, targets = batch(rows=2)
    packed = PackedRows(tokens.numpy(), np.zeros((2, 8), np.int32), targets.numpy())
    model, alone = build_model(SMALL, VOCAB, seed=1), build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, reducer=TwiceAsMuch(model), micro_batch=1)
    torch.testing.assert_close(
        step.accumulate(tokens, targets, packed), make_step(alone, micro_batch=1).accumulate(tokens, targets, packed)
    )
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_an_evaluation_of_two_processes_is_over_the_text_of_both():
    tokens, targets = batch(rows=4)
    targets[1:, 3:] = IGNORED
    model, batches = build_model(SMALL, VOCAB, seed=1), [Batch(step=0, tokens=tokens, targets=targets)]
    loss, labelled = evaluate(model, batches, contextlib.nullcontext)
    assert labelled == int((targets != IGNORED).sum())
    assert evaluate(model, batches, contextlib.nullcontext, TwoAlike(rank=1, size=2)) == (loss, 2 * labelled)


def test_what_is_not_finite_elsewhere_stops_the_update_here():
    class Elsewhere(World):
        def sum(self, value: torch.Tensor) -> torch.Tensor:
            return value * torch.nan if value.is_floating_point() else value

    model = build_model(SMALL, VOCAB, seed=1)
    before = [p.detach().clone() for p in model.parameters()]
    assert make_step(model, world=Elsewhere())(*batch())[2] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_world_of_one_hands_back_what_it_was_given():
    world, value = World(), torch.ones(3)
    assert (world.rank, world.size, world.first) == (0, 1, True)
    assert world.sum(value) is value
    assert (world.totals([7, 0]), world.any(True), world.any(False)) == ([7, 0], True, False)
    assert (world.gather({"a": 1}), world.broadcast("b")) == ([{"a": 1}], "b")


@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 5), (3, 7), (4, 2)])
def test_shares_are_all_of_it_and_what_is_dealt_is_as_much_for_everybody(size, count):
    worlds = [World(rank, size) for rank in range(size)]
    assert [one for world in worlds for one in range(count)[world.share(count)]] == list(range(count))
    dealt = [list(world.deal(count)) for world in worlds]
    assert len({len(numbers) for numbers in dealt}) == 1
    assert {number for numbers in dealt for number in numbers} >= set(range(count))
