"""The average of weights: its formula, updates that were nothing, and the exchange with the weights."""

import pytest
import torch
from torch import nn

from flatout.config.schema import OptimConfig
from flatout.errors import ConfigError
from flatout.optim import optimizers
from flatout.optim.optimizers import Average, Trainable, trainables
from flatout.optim.rules import state_bytes


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Trainable]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    return model, trainables(model)


@pytest.mark.parametrize("at_once", [1, 40, 2**26])
def test_it_follows_the_formula_and_ignores_updates_that_were_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr(optimizers, "AT_ONCE", at_once)
    model, trained = made()
    kept = Average(trained, 0.3)
    expected = {name: weight.detach().double() for name, weight in model.named_parameters()}
    count = 0
    for step in range(12):
        finite = step != 4
        count += finite
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        kept.update(torch.tensor(count), torch.tensor(finite))
        share = 1 - min(0.3, (1 + count) / (10 + count)) if finite else 0.0
        for name, weight in model.named_parameters():
            expected[name] = expected[name] + share * (weight.detach().double() - expected[name])
    for name, value in kept.values.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-6)


def test_it_changes_places_with_the_weights_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizers, "PIECE", 4)
    model, trained = made()
    kept = Average(trained, 0.9)
    for weight in model.parameters():
        nn.init.normal_(weight)
    before = [[tensor.clone() for tensor in held] for held in (kept.values.values(), model.parameters())]
    versions = [weight._version for weight in model.parameters()]
    kept.swap()
    after = list(model.parameters()), list(kept.values.values())
    for held, found in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(held, found, strict=True))
    assert all(weight._version > version for weight, version in zip(model.parameters(), versions, strict=True))
    kept.swap()
    assert all(torch.equal(a, b) for a, b in zip(before[0], kept.values.values(), strict=True))


def test_it_is_counted_and_wants_weights_in_fp32():
    plain, averaged = (state_bytes(OptimConfig(ema=ema), state="fp32", offload=False) for ema in (0.0, 0.99))
    assert (averaged.device - plain.device, averaged.checkpoint - plain.checkpoint) == (4, 4)
    with pytest.raises(ConfigError, match=r"optim.ema needs weights in fp32, and 0.weight is in bfloat16"):
        Average(made(torch.bfloat16)[1], 0.9)
