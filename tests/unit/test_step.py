"""The training step against plain torch: loss, clipping, guards, scaling, schedule."""

import contextlib
import math

import pytest
import torch

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.step import LossScale, TrainStep
from flatout.model.gpt import GPT, build_model
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import build_adamw

VOCAB = 19
SMALL = ModelConfig(layers=2, width=16, heads=2, context=8)


def make_step(model: GPT, *, fused: bool = True, micro_batch: int = 8, clip: float = 1.0, **more) -> TrainStep:
    optimizer = build_adamw(model, OptimConfig(learning_rate=1e-2), fused=fused)
    rates = more.pop("rates", [1e-2] * 10)
    return TrainStep(
        model, optimizer, rates=rates, clip=clip, micro_batch=micro_batch, scope=contextlib.nullcontext, **more
    )


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
    plain = build_adamw(twin, OptimConfig(learning_rate=1e-2), fused=False)
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
def test_nothing_moves_on_a_non_finite_value(fused, where):
    model = build_model(SMALL, VOCAB, seed=1)
    step = make_step(model, fused=fused, rates=[0.01, 0.02, 0.03])
    step(*batch())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {p: {key: value.clone() for key, value in state.items()} for p, state in step.optimizer.state.items()}
    handle = None
    if where == "loss":
        real = model.forward
        model.forward = lambda *a: real(*a) * float("inf")  # type: ignore[method-assign]
    else:
        handle = model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    report = step(*batch(1))
    assert report[2] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for p, state in step.optimizer.state.items():
        assert all(torch.equal(value, moments[p][key]) for key, value in state.items())
    if where == "loss":
        model.forward = real  # type: ignore[method-assign]
    elif handle is not None:
        handle.remove()
    report = step(*batch(1))
    assert report[2] == 1.0
    assert report[3] == pytest.approx(0.02), "the skipped step did not advance the schedule"
    assert int(step.updates) == 2


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
    handle = scaled.norm.weight.register_hook(lambda grad: grad * float("inf"))
    step(*batch())
    handle.remove()
    assert float(scale.scale) == 2.0**16
    assert int(scale.good_updates) == 0
    assert int(step.updates) == 4


def test_decay_reaches_matrices_only():
    config = ModelConfig(layers=1, width=16, heads=2, context=8, norm="layernorm", bias=True, residual_scale=0.1)
    model = build_model(config, VOCAB)
    optimizer = build_adamw(model, OptimConfig(weight_decay=0.1), fused=True)
    names = {p: name for name, p in model.named_parameters()}
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed == {
        "embedding.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.out.weight",
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names), "tied weights appear once"
