"""Groups with rates, decays and betas of their own, in every form of AdamW, against the update written out."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine.setup import all_weights, only_adapters
from flatout.engine.step import CLIP_EPS, TrainStep
from flatout.errors import CheckpointError, ConfigError
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.gpt import GPT, build_model
from flatout.optim.adamw import AdamW, EightBitAdamW, HostAdamW
from flatout.optim.optimizers import Group, Optimizer, Optimizers, Rule, StateBytes, trainables
from flatout.optim.rules import decays, rules_of, state_bytes
from flatout.resolve.memory import checkpoint_size

VOCAB = 71
MODEL = ModelConfig(layers=1, width=64, heads=2, context=8, bias=True, tied=False)
CLIP = 0.05
FORMS = {
    "fused": functools.partial(AdamW, fused=True),
    "plain": functools.partial(AdamW, fused=False),
    "8bit": functools.partial(EightBitAdamW, fused=True),
    "8bit plain": functools.partial(EightBitAdamW, fused=False),
    "host": functools.partial(HostAdamW, fused=True),
    "host plain": functools.partial(HostAdamW, fused=False),
}
EXACT = [name for name in FORMS if "8bit" not in name]
RATES = {
    "embedding": [3e-2, 1e-3, 2e-2, 5e-3],
    "matrices": [1e-3, 2e-2, 4e-3],
    "left": [7e-3],
}
DECAYS = {"embedding": 0.5, "matrices": [0.3, 0.0, 2.0], "left": 0.0}
BETAS = {"embedding": (0.5, 0.8), "matrices": (0.9, 0.95), "left": (0.8, 0.99)}


def rules(form: str, **changes) -> list[Rule]:
    """Three rules that differ in everything; the decay of the matrices follows a schedule."""
    takes = {"embedding": lambda one: one.name.startswith("embedding"), "matrices": decays, "left": lambda _: True}
    made = []
    for name, chosen in takes.items():
        beta1, beta2 = BETAS[name]
        settings = {"beta1": beta1, "beta2": beta2, "eps": 1e-8}
        common = {"optimizer": FORMS[form], "bytes": AdamW.BYTES, "settings": settings, **changes}
        made.append(Rule(name=name, takes=chosen, rate=RATES[name], decay=DECAYS[name], **common))
    return made


def make(form: str, seed: int = 1) -> tuple[GPT, TrainStep]:
    model = build_model(MODEL, VOCAB, seed=seed)
    optimizer = Optimizers(rules(form), all_weights(model).updated)
    return model, TrainStep(model, optimizer, clip=CLIP, micro_batch=4)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(VOCAB, (2, 8, 8), generator=torch.Generator().manual_seed(seed))
    return tokens, targets


def at(schedule: float | Sequence[float], update: int) -> float:
    return schedule if isinstance(schedule, int | float) else schedule[min(update, len(schedule) - 1)]


class Written:
    """AdamW over named parameters, one line of the paper after the other, in double precision."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.updates = 0

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        self.model.load_state_dict({name: w.float() for name, w in self.weights.items()}, strict=False)
        self.model.zero_grad()
        (self.model(tokens, targets) / targets.numel()).backward()
        gradients = {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}
        norm = sum(g.square().sum() for g in gradients.values()) ** 0.5
        divisor = max(1.0, float(norm + CLIP_EPS) / CLIP)
        self.updates += 1
        for name, w in self.weights.items():
            rule = "embedding" if name.startswith("embedding") else "matrices" if w.ndim >= 2 else "left"
            rate, decay = at(RATES[rule], self.updates - 1), at(DECAYS[rule], self.updates - 1)
            (beta1, beta2), g = BETAS[rule], gradients[name] / divisor
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * g * g
            mean = self.first[name] / (1 - beta1**self.updates)
            spread = (self.second[name] / (1 - beta2**self.updates)).sqrt()
            self.weights[name] = w * (1 - rate * decay) - rate * mean / (spread + 1e-8)


def spoiled(model: GPT, step: TrainStep, seed: int) -> Tensor:
    """A step with a gradient that is not finite."""
    handle = model.get_parameter("norm.weight").register_hook(lambda gradient: gradient * float("nan"))
    report = step(*batch(seed))
    handle.remove()
    return report


@pytest.mark.parametrize("form", FORMS)
def test_groups_follow_rates_decays_and_betas_of_their_own(form):
    model, step = make(form)
    written = Written(build_model(MODEL, VOCAB, seed=1))
    for seed in range(1 if "8bit" in form else 6):  # moments in 8 bits are rounded from the second update on
        if seed in (0, 2):
            assert spoiled(model, step, 9)[2] == 0.0
        report = step(*batch(seed))
        now = [float(group.numbers["rate"]) for group in step.optimizer.groups]
        assert now == pytest.approx([at(RATES[name], seed) for name in RATES]), "skipped steps move no schedule"
        assert report[3] == pytest.approx(at(RATES["matrices"], seed)), "the rate that is told"
        written.step(*batch(seed))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), written.weights[name], rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("fused", ["", " plain"])
def test_moments_in_8_bits_stay_near_in_every_group(fused):
    model, step = make(f"8bit{fused}")
    exact, reference = make(f"fused{fused}".replace("fused plain", "plain"))
    for seed in range(4):
        step(*batch(seed))
        reference(*batch(seed))
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        rule = "embedding" if name.startswith("embedding") else "matrices" if a.ndim >= 2 else "left"
        assert (a - b).abs().mean() < 0.05 * sum(at(RATES[rule], update) for update in range(4)), name


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_goes_on_bit_for_bit(form):
    model, step = make(form)
    for seed in range(2):
        step(*batch(seed))
    spoiled(model, step, 2)
    other, fresh = make(form, seed=7)
    other.load_state_dict(model.state_dict())
    saved = {name: value.clone() for name, value in step.optimizer.tensors().items()}
    fresh.optimizer.assign(saved, "a file")
    fresh.updates.copy_(step.updates)
    for seed in range(2, 5):
        assert torch.equal(step(*batch(seed)), fresh(*batch(seed)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    now, theirs = step.optimizer.tensors(), fresh.optimizer.tensors()
    assert all(torch.equal(now[name], theirs[name]) for name in now)


def test_the_host_asks_for_all_gradients_before_it_updates_the_first(monkeypatch: pytest.MonkeyPatch):
    """So copies of later groups arrive while earlier ones are updated."""
    _, step = make("host")
    (host,) = step.optimizer.optimizers
    assert isinstance(host, HostAdamW), "one for all rules"
    order: list[str] = []
    fetch, update = host._fetch, host._update_one
    monkeypatch.setattr(host, "_fetch", lambda *given: (order.append("fetch"), fetch(*given))[1])
    monkeypatch.setattr(host, "_update_one", lambda *given: (order.append("update"), update(*given))[1])
    step(*batch(0))
    count = len(step.optimizer.parameters)
    assert order == ["fetch"] * count + ["update"] * count


# --- which rule takes what --------------------------------------------------------------------------------------------


def test_the_first_rule_that_takes_a_parameter_gets_it():
    model = build_model(MODEL, VOCAB)
    optimizer = Optimizers(rules("fused"), trainables(model))
    names = {p: name for name, p in model.named_parameters()}
    taken = {group.rule.name: {names[p] for p in group.parameters} for group in optimizer.groups}
    assert taken["embedding"] == {"embedding.weight"}
    assert all(name.endswith("weight") and "norm" not in name for name in taken["matrices"])
    assert sorted(name for group in taken.values() for name in group) == sorted(names.values())
    assert optimizer.parameters == list(model.parameters()), "in the model's order, by which norms are added up"


def test_a_parameter_that_no_rule_takes_is_refused():
    model = build_model(MODEL, VOCAB)
    with pytest.raises(
        ConfigError, match=r"no optimizer takes blocks\.0\.attention_norm\.weight; there are rules for embedding, matr"
    ):
        Optimizers(rules("fused")[:2], trainables(model))


def test_adapters_decay_and_their_magnitudes_do_not():
    adapters = attach(build_model(MODEL, VOCAB), AdapterPlan(rank=2, alpha=4.0, dora=True), seed=0)
    optimizer = Optimizers(rules_of(OptimConfig(weight_decay=0.25), 1), only_adapters(adapters).updated)
    assert [group.fixed("decay") for group in optimizer.groups] == [0.25, 0.0]
    assert list(optimizer.named) == ["adapters", "magnitudes"]


class Halving(Optimizer):
    """Not an optimizer anybody wants: halves weights, and counts."""

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"count": torch.zeros((), device=parameter.device)}

    @torch.no_grad()
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        for group in self.groups:
            for parameter in group.updated():
                parameter.mul_(1 - 0.5 * finite)
                self.state[parameter]["count"].add_(finite)


def with_halving(model: GPT) -> Optimizers:
    first, *others = rules("fused")
    own = dataclasses.replace(first, optimizer=Halving, bytes=StateBytes(device=0, host=0, checkpoint=0))
    return Optimizers([own, *others], trainables(model))


def test_two_optimizers_share_a_run():
    model, twin = build_model(MODEL, VOCAB, seed=1), build_model(MODEL, VOCAB, seed=1)
    step = TrainStep(model, with_halving(model), clip=0.0, micro_batch=8)
    plain = Optimizers(rules("fused"), trainables(twin))
    reference = TrainStep(twin, plain, clip=0.0, micro_batch=8)
    before = model.embedding.weight.detach().clone()
    step(*batch(0))
    reference(*batch(0))
    assert torch.equal(model.embedding.weight, 0.5 * before)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) or name.startswith("embedding"), name
    saved = step.optimizer.tensors()
    assert saved["embedding.weight.count"] == 1
    assert "embedding.weight.exp_avg" not in saved
    assert with_halving(build_model(MODEL, VOCAB)).assign(saved, "a file") is None
    with pytest.raises(CheckpointError, match="state is count, this optimizer needs exp_avg, exp_avg_sq, step"):
        plain.assign(saved, "a file")


# --- schedules and sizes ----------------------------------------------------------------------------------------------


def test_rates_of_a_range_test_keep_the_proportions_of_the_rules():
    optimizer = Optimizers(rules("fused"), trainables(build_model(MODEL, VOCAB)))
    optimizer.follow([0.3, 0.6])
    for update, rate in ((0, 0.3), (1, 0.6), (9, 0.6)):
        assert float(optimizer.look_up(torch.tensor(update))) == pytest.approx(rate)
        rates = [float(group.numbers["rate"]) for group in optimizer.groups]
        assert rates == pytest.approx([rate * max(peaks) / max(RATES["matrices"]) for peaks in RATES.values()])
        assert float(optimizer.groups[1].numbers["decay"]) == pytest.approx(at(DECAYS["matrices"], update))


def test_a_number_that_must_not_change_has_no_schedule():
    group = Group(rules("fused")[0], [], {"beta1": torch.tensor(0.9)})
    with pytest.raises(AssertionError, match="embedding: beta1 takes a number"):
        group.fixed("beta1")


@pytest.mark.parametrize(("form", "kind"), [({}, "fused"), ({"state": "8bit"}, "8bit"), ({"offload": True}, "host")])
def test_the_bytes_of_a_rule_are_those_of_its_state(form, kind):
    wide = MODEL.model_copy(update={"width": 256, "bias": False})  # small tensors stay in fp32
    model = build_model(wide, VOCAB)
    given = {"state": "fp32", "offload": False, **form}
    optimizer = Optimizers(rules_of(OptimConfig(), 1, **given), trainables(model))
    optimizer.create_state()
    count, tensors = sum(p.numel() for p in model.parameters()), optimizer.tensors()
    expected = state_bytes(OptimConfig(), **given)
    held = sum(value.nbytes for value in tensors.values())
    assert held == pytest.approx(expected.checkpoint * count, rel=0.01)
    (one,) = optimizer.optimizers
    if isinstance(one, HostAdamW):
        assert expected.device == 0
        held += sum(value.nbytes for copies in (one.weights, one.gradients) for value in copies.values())
        assert held == pytest.approx(expected.host * count, rel=0.01)
    else:
        assert (expected.device, expected.host) == (expected.checkpoint, 0), kind


def test_a_checkpoint_has_weights_and_state(tiny):
    config = tiny().config
    assert checkpoint_size(1000, config.model, config.optim, config.speed) == 12_000
    narrow = config.speed.model_copy(update={"optimizer_state": "8bit"})
    assert checkpoint_size(1024, config.model, config.optim, narrow) == 6 * 1024 + 16
