"""Muon: orthogonal updates against SVD and torch's own, fused weights part by part, rates of groups."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.diverged import gentler
from flatout.engine.graphs import UpdateGraph, record_updates
from flatout.engine.monitor import Notices
from flatout.engine.setup import all_weights
from flatout.engine.step import TrainStep
from flatout.errors import CheckpointError, ConfigError
from flatout.model.count import parameter_count
from flatout.model.gpt import GPT, build_model
from flatout.ops import muon as ops
from flatout.ops.muon import (
    Numbers,
    Products,
    advance_reference,
    apply_reference,
    gram_reference,
    normalise_reference,
    orthogonalise,
    polynomial_reference,
)
from flatout.optim import muon as module
from flatout.optim import rules
from flatout.optim.optimizers import Optimizers, Trainable, trainables
from flatout.optim.rules import momenta, rules_of
from flatout.resolve.advice import advice_on
from flatout.resolve.memory import state_of
from tests.conftest import TINY
from tests.set_up import planned

VOCAB = 71
# Queries have more rows than keys and values.
MODEL = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, context=8, tied=False, mlp="swiglu", mlp_width=42)
MUON = OptimConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.5)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar(matrices: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    return u @ v


def make(config: OptimConfig = MUON, *, double: bool = False, clip: float = 0.05, **how: Any) -> tuple[GPT, TrainStep]:
    model = build_model(MODEL, VOCAB, seed=1)
    model = model.double() if double else model
    optimizer = Optimizers(rules_of(config, 8), all_weights(model).updated)
    return model, TrainStep(model, optimizer, clip=clip, micro_batch=how.get("micro_batch", 8))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(VOCAB, (2, 8, 8), generator=torch.Generator().manual_seed(seed))
    return tokens, targets


def everything(model: GPT, optimizer: Optimizers) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in {**dict(model.named_parameters()), **optimizer.tensors()}.items()}


def alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 48, 48), (3, 96, 24), (3, 24, 96), (1, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_orthogonal_update_is_near_that_of_the_svd(shape: tuple[int, ...], dtype: torch.dtype):
    gradient = drawn(*shape) * 1e-3
    update = orthogonalise(gradient.to(dtype)).double()
    values = torch.linalg.svdvals(update)
    assert 0.75 < values.min() <= values.max() < 1.2
    exact = polar(gradient)
    angle = (update * exact).sum((-2, -1)) / (update.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1)))
    assert angle.min() > 0.98
    torch.testing.assert_close(orthogonalise(gradient.to(dtype), 3.0).double(), 3 * update, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e5, 1e15])
@pytest.mark.parametrize("shape", [(2, 12, 40), (2, 40, 12)])
def test_the_size_of_a_gradient_does_not_matter(shape: tuple[int, ...], size: float):
    gradient = drawn(*shape, dtype=torch.float32)
    expected = orthogonalise(gradient) if size else torch.zeros_like(gradient)
    torch.testing.assert_close(orthogonalise(gradient * size), expected, rtol=1e-3, atol=1e-3)


def test_the_update_is_torchs_where_the_polynomial_is(monkeypatch: pytest.MonkeyPatch):
    """torch's works in bf16, which is as near as two of them come."""
    newton = ((3.4445, -4.7750, 2.0315),) * 5
    monkeypatch.setattr(module, "orthogonalise", functools.partial(orthogonalise, iterations=newton))
    monkeypatch.setattr(ops, "SAFETY", 1.0)
    monkeypatch.setattr(rules, "_MOMENTUM_START", 0.95)
    for shape in ((64, 16), (16, 64), (32, 32)):
        weights = [nn.Parameter(drawn(*shape, dtype=torch.float32)) for _ in range(2)]
        theirs = torch.optim.Muon([weights[0]], lr=0.02, momentum=0.95, weight_decay=0.1)
        config = OptimConfig(optimizer="muon", schedule="constant", warmup=0)
        one = Trainable("blocks.0.weight", weights[1], nn.Linear(1, 1), matrix=True, parts=(shape,))
        ours = Optimizers(rules_of(config, 9), [one])
        start = weights[0].detach().clone()
        for seed in range(3):
            for weight in weights:
                weight.grad = drawn(*shape, seed=seed, dtype=torch.float32)
            theirs.step()
            ours.look_up(torch.tensor(seed))
            ours.create_state()
            ours.update(torch.tensor(1.0), torch.tensor(True))
        moved = weights[0] - start
        assert (weights[1] - weights[0]).norm() < 0.02 * moved.norm()


def test_normuon_cautious_decay_and_momentum_are_those_of_the_formulas():
    config = MUON.model_copy(update={"optimizer": "normuon"})
    model, step = make(config, double=True, clip=0.0)
    twin = build_model(MODEL, VOCAB, seed=1).double()
    names = [name for name, p in twin.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    cuts = {"qkv": (32, 16, 16), "up": (42, 42)}
    parts = {name: cuts.get(name.split(".")[3], (0,)) for name in names}
    momentum = {name: torch.zeros_like(twin.get_parameter(name)) for name in names}
    second: dict[tuple[str, int], Any] = {}
    for seed in range(3):
        tokens, targets = batch(seed)
        twin.zero_grad()
        (twin(tokens, targets) / targets.numel()).backward()
        mu, rate = torch.tensor([0.85 + 0.001 * seed, 0.02 * (seed + 1) / 8]).tolist()  # both still rising, in fp32
        changed = {}
        for name in names:
            gradient, weight = twin.get_parameter(name).grad, twin.get_parameter(name).detach()
            assert gradient is not None
            momentum[name] = mu * momentum[name] + (1 - mu) * gradient
            ahead, updates = (1 - mu) * gradient + mu * momentum[name], []
            rows = parts[name] if sum(parts[name]) else (len(weight),)
            for number, part in enumerate(ahead.split(rows)):
                made = orthogonalise(part[None].clone())[0]
                axis = 1 if part.shape[0] >= part.shape[1] else 0
                before = second.get((name, number), 0.0)
                second[name, number] = 0.9 * before + 0.1 * made.square().mean(dim=axis, keepdim=True)
                scaled = made / second[name, number].sqrt()
                scaled *= made.norm() / scaled.norm()
                updates.append(scaled * math.sqrt(max(1.0, part.shape[0] / part.shape[1])))
            update = torch.cat(updates)
            agree = (update * weight > 0).double()
            changed[name] = weight - rate * update - rate * 0.5 * weight * agree
        step(tokens, targets)
        for name in names:
            torch.testing.assert_close(model.get_parameter(name).detach(), changed[name], rtol=1e-7, atol=1e-9)
        twin.load_state_dict(model.state_dict())


def test_the_second_moment_leaves_the_size_of_an_update():
    update = drawn(2, 12, 5)
    made = update.clone()
    second = normalise_reference(made, torch.zeros(2, 12, dtype=torch.float64), torch.tensor(True))
    torch.testing.assert_close(made.norm(dim=(1, 2)), update.norm(dim=(1, 2)))
    torch.testing.assert_close(made.norm(dim=2).std(dim=1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(second, 0.1 * update.square().mean(dim=2))


def test_a_fused_weight_is_updated_as_its_parts_would_be():
    shapes = [(24, 16), (8, 16), (8, 16)]
    fused, apart = nn.Parameter(drawn(40, 16)), [nn.Parameter(x.clone()) for x in drawn(40, 16).split([24, 8, 8])]
    config = MUON.model_copy(update={"optimizer": "normuon"})
    linear = nn.Linear(1, 1)
    ones = [Trainable("blocks.0.qkv", fused, linear, matrix=True, parts=tuple(shapes))]
    parts = [
        Trainable(f"blocks.0.{n}", p, linear, matrix=True, parts=(shape,))
        for n, (p, shape) in enumerate(zip(apart, shapes, strict=True))
    ]
    both = [Optimizers(rules_of(config, 4), one) for one in (ones, parts)]
    for seed in range(3):
        fused.grad = drawn(40, 16, seed=seed)
        for part, gradient in zip(apart, drawn(40, 16, seed=seed).split([24, 8, 8]), strict=True):
            part.grad = gradient.clone()
        for optimizer in both:
            optimizer.look_up(torch.tensor(seed))
            optimizer.create_state()
            optimizer.update(torch.tensor(2.0), torch.tensor(True))
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in apart]), rtol=1e-12, atol=1e-12)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_one_micro_batch_or_eight():
    weights = []
    for micro_batch in (8, 1):
        model, step = make(double=True, micro_batch=micro_batch)
        for seed in range(4):
            step(*batch(seed))
        weights.append([p.detach() for p in model.parameters()])
    assert all((a - b).abs().max() < 1e-9 for a, b in zip(*weights, strict=True))


def test_one_micro_batch_or_eight_in_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "product_type", lambda _: torch.bfloat16)
    moved = []
    for micro_batch in (8, 1):
        model, step = make(micro_batch=micro_batch)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step(*batch(0))
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters() if "blocks" in name})
    for name, update in moved[0].items():
        assert (update - moved[1][name]).norm() < 0.05 * update.norm(), name


@pytest.mark.parametrize("normuon", [False, True])
def test_a_skipped_step_changes_nothing_and_a_resumed_run_goes_on_bit_for_bit(normuon: bool):
    config = MUON.model_copy(update={"optimizer": "normuon" if normuon else "muon"})
    model, step = make(config)
    for seed in range(2):
        step(*batch(seed))
    before = everything(model, step.optimizer)
    handle = model.get_parameter("norm.weight").register_hook(lambda gradient: gradient * float("nan"))
    assert step(*batch(9))[2] == 0.0
    handle.remove()
    assert alike(before, everything(model, step.optimizer))
    assert before["blocks.0.mlp.up.weight.momentum"].shape == (84, 32)
    assert ("blocks.0.mlp.up.weight.second" in before) == normuon

    other, fresh = make(config)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    other.load_state_dict(model.state_dict())
    fresh.optimizer.assign({name: x for name, x in before.items() if name not in model.state_dict()}, "x")
    fresh.updates.copy_(step.updates)
    for seed in range(2, 5):
        assert torch.equal(step(*batch(seed)), fresh(*batch(seed)))
    assert alike(everything(model, step.optimizer), everything(other, fresh.optimizer))


def test_a_report_has_the_ratio_of_update_to_weights_of_every_rule():
    model, step = make()
    step(*batch(0))
    step.with_parameter_norm = True
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    *_, norm, matrices, embedding, head, left = step(*batch(1)).tolist()
    for group, ratio in zip(step.optimizer.groups, (matrices, embedding, head, left), strict=True):
        moved = torch.cat([(one.parameter.detach() - before[one.name]).flatten() for one in group.trained])
        weights = torch.cat([before[one.name].flatten() for one in group.trained])
        assert ratio == pytest.approx(float(moved.norm() / weights.norm()), rel=1e-4), group.rule.name
    step.with_parameter_norm = False
    assert len(step(*batch(2))) == 6
    assert norm > 0


def test_weights_without_a_gradient_stay():
    model, step = make()
    step(*batch(0))
    before = everything(model, step.optimizer)
    model.blocks[1].requires_grad_(False)
    for p in model.parameters():
        p.grad = None
    step(*batch(1))
    after = everything(model, step.optimizer)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if not name.startswith("blocks.1.")
    }


def test_state_of_adamw_is_refused():
    _, step = make()
    model = build_model(MODEL, VOCAB)
    adamw = Optimizers(rules_of(OptimConfig(), 1), trainables(model))
    adamw.create_state()
    with pytest.raises(CheckpointError, match="state is exp_avg, exp_avg_sq, step, this optimizer needs momentum"):
        step.optimizer.assign(adamw.tensors(), "a file")


@pytest.mark.parametrize("kinds", ["A", "EA"])
def test_matrices_have_4_bytes_of_state_and_the_rest_8(kinds: str):
    states = {"pattern": kinds, "states": 16} if "E" in kinds else {}
    shape = ModelConfig.model_validate({**MODEL.model_dump(), **states})
    model = build_model(shape, VOCAB)
    optimizer = Optimizers(rules_of(MUON, 1), trainables(model))
    optimizer.create_state()
    held = sum(x.nbytes for name, x in optimizer.tensors().items() if not name.endswith(".step"))
    count = parameter_count(shape, VOCAB)
    config = load_config("shakespeare-char").config.model_copy(update={"optim": MUON, "model": shape})
    expected = state_of(config.model, config.optim, config.speed, count)
    assert expected.device * count == expected.checkpoint * count == pytest.approx(held)


class FakeRecorder:
    """Records a function and executes nothing, as CUDA does; a replay calls it."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error, self.did, self.bytes = error, [], 1000

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        self.did.append("warm-up")
        return function()

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor, None]:
        if self.error is not None:
            raise self.error
        self.did.append("record")
        self.bytes += 100

        def replay() -> None:
            self.did.append("replay")
            function()

        return replay, torch.zeros(()), None

    def finish(self) -> None:
        pass

    def held(self) -> int:
        return self.bytes


def test_a_recorded_update_is_made_anew_where_gradients_or_state_have_moved():
    model, step = make()
    twin, plain = make()
    recorder: Any = FakeRecorder()
    step.keep_gradients = plain.keep_gradients = True
    record_updates(step.optimizer, Notices(), recorder)
    for seed in range(5):
        version = model.blocks[0].mlp.up.weight._version
        step(*batch(seed))
        plain(*batch(seed))
        assert model.blocks[0].mlp.up.weight._version > version
    assert recorder.did == ["warm-up", "warm-up", "record", "replay", "replay", "replay"]
    step.optimizer.assign({name: x.clone() for name, x in step.optimizer.tensors().items()}, "a file")
    model.blocks[2].mlp.up.weight.grad = None
    for seed in range(5, 8):
        step(*batch(seed))
        plain(*batch(seed))
    assert recorder.did[6:] == ["warm-up", "warm-up", "record", "replay"]
    assert alike(everything(model, step.optimizer), everything(twin, plain.optimizer))


def test_state_that_is_dropped_takes_its_recording_along():
    _, step = make()
    recorder: Any = FakeRecorder()
    step.keep_gradients = True
    record_updates(step.optimizer, Notices(), recorder)
    for seed in range(3):
        step(*batch(seed))
    assert recorder.did[-1] == "replay"
    (graph,) = step.optimizer.recorded.values()
    assert isinstance(graph, UpdateGraph)
    assert graph.held_bytes == 100
    step.optimizer.forget()
    assert graph.replay is None, "it holds memory, and writes to state that is gone"
    assert graph.held_bytes == 0
    step(*batch(3))
    assert recorder.did[-1] == "warm-up"


def test_an_update_that_cannot_be_recorded_goes_on_without():
    model, step = make()
    twin, plain = make()
    recorder: Any = FakeRecorder(RuntimeError("no graphs here\nbut a trace"))
    step.keep_gradients, notices = True, Notices()
    record_updates(step.optimizer, notices, recorder)
    for seed in range(4):
        step(*batch(seed))
        plain(*batch(seed))
    assert notices.take() == ["Muon's update is not recorded: RuntimeError: no graphs here"]
    assert alike(everything(model, step.optimizer), everything(twin, plain.optimizer))


# --- the kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2048, 5000])
@pytest.mark.parametrize("finite", [True, False])
def test_the_kernels_equal_the_plain_forms(count: int, finite: bool):
    pytest.importorskip("triton")
    from flatout.ops.kernels.updates import advance, apply

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp32 = functools.partial(drawn, dtype=torch.float32)
    gradient, moving, weight, update = (fp32(count, seed=seed).to(device) for seed in range(4))
    values = [0.02, 0.3, 0.9, 4.0]
    rate, decay, momentum, divisor = (torch.tensor(value, device=device) for value in values)
    numbers = Numbers(rate, decay, momentum, divisor, torch.tensor(finite, device=device))
    if not finite:
        gradient[0] = float("nan")
    pairs = [(moving.clone(), torch.zeros(count, dtype=torch.bfloat16, device=device)) for _ in range(2)]
    for form, (moved, out) in zip((advance, advance_reference), pairs, strict=True):
        form(gradient, moved, out, numbers)
    torch.testing.assert_close(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][0], moving) != finite
    if finite:
        torch.testing.assert_close(pairs[0][1].float(), pairs[1][1].float(), rtol=1e-2, atol=1e-6)
    advance(gradient, pairs[0][0], None, numbers)
    for decays, cautious in ((False, False), (True, False), (True, True)):
        made = [weight.clone() for _ in range(2)]
        for form, one in zip((apply, apply_reference), made, strict=True):
            form(one, update.bfloat16(), numbers, decays=decays, cautious=cautious)
        torch.testing.assert_close(*made)
        assert torch.equal(made[0], weight) != finite


# --- which rule takes what --------------------------------------------------------------------------------------------


def taken(model: nn.Module, config: OptimConfig) -> dict[str, list[str]]:
    groups = Optimizers(rules_of(config, 1), trainables(model)).groups
    return {group.rule.name: [one.name for one in group.trained] for group in groups}


def test_muon_takes_the_matrices_of_blocks_and_groups_have_rates_of_their_own():
    shape = {"layers": 2, "pattern": "EA", "states": 16, "positions": "learned"}
    model = build_model(ModelConfig.model_validate({**MODEL.model_dump(), **shape}), VOCAB)
    names = taken(model, MUON)
    inside = {name.partition(".")[2] for name in names["matrices"]}
    assert inside >= {"0.attention.inward.weight", "1.attention.qkv.weight"}
    assert not any("_K" in name or "bias" in name for name in inside), "what must not decay is AdamW's"
    assert names["embedding"] == ["embedding.weight"]
    assert names["head"] == ["head.weight"]
    assert "positions.weight" in names["other"]
    parts = {one.name: one.parts for one in trainables(model)}
    assert parts["blocks.0.attention.inward.weight"] == ((32, 32), (32, 32))
    assert parts["blocks.1.attention.qkv.weight"] == ((32, 32), (16, 32), (16, 32))
    assert parts["blocks.1.mlp.up.weight"] == ((42, 32), (42, 32))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_of_groups(optimizer: str):
    tied = build_model(MODEL.model_copy(update={"tied": True}), VOCAB)
    tied.add_module("values", nn.Embedding(5, 4))
    given = {"optimizer": optimizer, "learning_rate": 1e-3, "schedule": "constant", "warmup": 0}
    for more, table in (({}, 0.3), ({"table_rate": 0.07}, 0.07)):
        config = OptimConfig.model_validate({**given, "embedding_rate": 0.3, "head_rate": 0.5, **more})
        groups = Optimizers(rules_of(config, 1), trainables(tied)).groups
        rates = {group.rule.name: group.rule.rate[0] for group in groups}
        assert rates["embedding"] == 0.3, "a tied head has the embedding's"
        assert "head" not in rates
        assert rates["table"] == table
        assert rates["matrices"] == (0.02 if optimizer != "adamw" else 1e-3)
        assert rates["other"] == groups[-1].rule.rate[0] == 1e-3
        decay = {group.rule.name: group.rule.decay for group in groups}
        assert decay["embedding"] == decay["table"] == (0.0 if optimizer != "adamw" else 0.1)
    untied = build_model(MODEL.model_copy(update={"tied": False}), VOCAB)
    untied.add_module("values", nn.Embedding(5, 4))
    decays = {"embedding": 0.01, "head": 0.02, "table": 0.03}
    for more in ({}, {"table_rate": 0.07}):
        config = OptimConfig(**given, **{f"{role}_decay": decay for role, decay in decays.items()}, **more)
        rules = {group.rule.name: group.rule for group in Optimizers(rules_of(config, 1), trainables(untied)).groups}
        assert {role: rules[role].decay for role in decays} == decays
        assert rules["table"].rate[0] == more.get("table_rate", 1e-3)


def test_a_model_from_python_says_which_parts_and_roles_it_has():
    rows = [3, 5]

    class Mixer(nn.Module):
        undecayed = ("gate",)

        def __init__(self) -> None:
            super().__init__()
            self.parts = {"both": rows}
            self.both = nn.Parameter(torch.zeros(8, 4))
            self.gate = nn.Parameter(torch.zeros(8, 4))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.layers = nn.ModuleList([Mixer(), nn.Linear(4, 4)])
            self.output = nn.Linear(4, 7)

    names = taken(Whole(), MUON)
    assert names["matrices"] == ["layers.0.both", "layers.1.weight"]
    assert names["table"] == ["tokens.weight"]
    assert "output.weight" in names["other"]
    assert {one.name: one.parts for one in trainables(Whole())}["layers.0.both"] == ((3, 4), (5, 4))
    rows[1] = 4
    with pytest.raises(ConfigError, match=r"the parts of layers\.0\.both have 3 \+ 4 rows, and it has 8"):
        trainables(Whole())


def test_places_that_name_a_rate_name_muons():
    words = [*TINY, "optim.optimizer=muon", "optim.muon_rate=0.5", "optim.embedding_rate=0.3", "optim.clip=1"]
    loaded = load_config("shakespeare-char", words)
    config = loaded.config
    gentle = {"optim.muon_rate": "0.02", "optim.learning_rate": "0.0004", "optim.embedding_rate": "0.01"}
    assert gentler(planned(loaded)) == gentle
    unclipped = load_config("shakespeare-char", [*words[:-1], "optim.clip=0"])
    assert gentler(planned(unclipped)) == {**gentle, "optim.clip": "1"}
    wild = load_config("shakespeare-char", [*words, "optim.betas=[0.8, 0.0]", "optim.weight_decay=10"])
    assert gentler(planned(wild)) == {**gentle, "optim.betas": "[0.8, 0.95]", "optim.weight_decay": "0.5"}
    tied = planned(load_config("shakespeare-char", [*words[:6], "model.tied=true", "data.tokenizer=char"]))
    assert tied.optim.head_rate is not None
    assert "optim.head_rate" not in (gentler(tied) or {}), "a command that names it is refused"
    found = next(one for one in advice_on(planned(loaded)) if one.name == "learning rate")
    assert (found.status, found.found) == ("warn", "0.5; about 0.02 is usual for Muon")
    assert "Set optim.muon_rate=0.02" in found.advice
    scaled = {"optim.muon_rate": 0.02, "optim.learning_rate": 1.6e-4, "optim.embedding_rate": 0.012}
    assert config.optim.scaled_rates(0.04) == pytest.approx(scaled)


def test_momentum_rises_over_a_hundred_updates():
    found = momenta(150)
    assert found[:3] == pytest.approx([0.85, 0.851, 0.852])
    assert found[99] < 0.95 == pytest.approx(found[100])
    assert set(found[100:]) == {found[100]}


def test_adapters_are_adamws():
    words = ["model.init_from=base", "chat.source=rows.json", "lora.rank=4", "optim.optimizer=muon"]
    with pytest.raises(ConfigError, match="muon takes whole matrices, and adapters have none"):
        load_config("lora", words)


@pytest.mark.parametrize("shape", [(3, 40, 70), (2, 300, 30), (1, 33, 33), (2, 1, 5)])
@pytest.mark.parametrize("finite", [True, False])
def test_the_kernels_of_normuon_equal_the_plain_form(shape: tuple[int, int, int], finite: bool):
    pytest.importorskip("triton")
    from flatout.ops.kernels.updates import normalise

    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, rows, columns = shape
    second = drawn(count, max(rows, columns), seed=6, dtype=torch.float32).square().to(device)
    stacked = drawn(count, 3 + rows, columns, seed=5, dtype=torch.bfloat16).to(device)
    made = [stacked.clone()[:, 3:] for _ in range(2)]  # as parts of a fused weight lie
    flag = torch.tensor(finite, device=device)
    ours, theirs = (form(x, second, flag) for form, x in zip((normalise, normalise_reference), made, strict=True))
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, second) != finite
    torch.testing.assert_close(made[0], made[1], rtol=1e-2, atol=1e-6)
    assert torch.equal(made[0]._base[:, :3], stacked[:, :3])  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("shape", [(3, 40, 70), (2, 200, 30), (1, 150, 150)])
def test_the_symmetric_products_equal_the_plain_forms(shape: tuple[int, int, int]):
    pytest.importorskip("triton")
    from flatout.ops.kernels.updates import gram, polynomial

    # the interpreter takes the bits of bf16 for whole numbers in a product
    device, kind = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    matrices = drawn(*shape, seed=5, dtype=torch.float32).to(device, kind)
    exact = gram_reference(matrices.double())
    square = gram(matrices)
    torch.testing.assert_close(square.double(), exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))
    assert torch.equal(square, square.mT)
    unit = square / square.float().norm(dim=(-2, -1), keepdim=True).to(square.dtype)
    wanted = polynomial_reference(unit.double(), 3.4, -4.7, 2.0)
    torch.testing.assert_close(polynomial(unit, 3.4, -4.7, 2.0).double(), wanted, rtol=1e-2, atol=1e-2)
    scale = drawn(len(matrices), 1, 1, seed=6, dtype=torch.float32).to(device)
    scaled = (gram(matrices, scale), polynomial(unit, 3.4, -4.7, 2.0, scale))
    for ours, plain in zip(scaled, (exact, wanted), strict=True):
        largest = 1e-2 * float((plain * scale).abs().max())
        torch.testing.assert_close(ours.double(), plain * scale, rtol=1e-2, atol=largest)
    made = orthogonalise(matrices.clone(), products=Products(gram, polynomial))
    torch.testing.assert_close(made, orthogonalise(matrices.clone()), rtol=0.05, atol=0.05)
