"""A torch optimizer as one of ours: the same updates, none where gradients are not finite, rates by the schedule."""

import pytest
import torch
from torch import Tensor, nn

from flatout.engine.custom import CustomParts
from flatout.errors import ConfigError
from flatout.optim.optimizers import Optimizers, trainables

FACTORS = [0.5, 1.0, 0.25]


def built(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **how) -> Optimizers:
    given = trainables(model)
    return Optimizers(CustomParts(optimizer=lambda named: kind(named.values(), **how)).rules((), given, FACTORS), given)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def differentiate(net: nn.Module, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    net.zero_grad()
    net(x).square().sum().backward()


def values(net: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in net.parameters()]


def test_updates_are_torchs_own_with_divided_gradients_and_scaled_rates():
    ours, theirs = model(), model()
    optimizer, plain = built(ours, lr=0.1), torch.optim.Adam(theirs.parameters(), lr=0.1)
    for update, factor in enumerate([*FACTORS, FACTORS[-1]]):  # the last value stays
        differentiate(ours, update)
        differentiate(theirs, update)
        for one in theirs.parameters():
            assert one.grad is not None
            one.grad /= 4.0
        plain.param_groups[0]["lr"] = 0.1 * factor
        plain.step()
        rate = optimizer.look_up(torch.tensor(update))
        assert float(rate) == pytest.approx(0.1 * factor)
        optimizer.update(torch.tensor(4.0), torch.tensor(True))
        assert all(torch.equal(a, b) for a, b in zip(values(ours), values(theirs), strict=True))


def test_nothing_changes_where_gradients_are_not_finite():
    net = model()
    optimizer = built(net, lr=0.1)
    differentiate(net, 0)
    optimizer.update(torch.tensor(1.0), torch.tensor(True))
    before, state = values(net), {name: one.clone() for name, one in optimizer.tensors().items()}
    differentiate(net, 1)
    optimizer.update(torch.tensor(1.0), torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(values(net), before, strict=True))
    after = optimizer.tensors()
    assert after.keys() == state.keys() != set()
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_state_goes_over_to_another_bit_for_bit_and_can_be_dropped():
    first, second = model(), model()
    one, other = built(first, torch.optim.NAdam, lr=0.1), built(second, torch.optim.NAdam, lr=0.1)
    for update in range(2):
        differentiate(first, update)
        one.update(torch.tensor(1.0), torch.tensor(True))
    second.load_state_dict(first.state_dict())
    other.assign({name: tensor.clone() for name, tensor in one.tensors().items()}, "a checkpoint")
    for net, optimizer in ((first, one), (second, other)):
        differentiate(net, 2)
        optimizer.update(torch.tensor(1.0), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))
    other.forget()
    assert other.tensors() == {}


def test_numbers_keep_their_types():
    class Counting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().step()
            for one in self.param_groups[0]["params"]:
                self.state[one] |= {"count": 3, "share": 0.1, "done": True, "nothing": None}

    net = model()
    optimizer = built(net, Counting, lr=0.1)
    differentiate(net, 0)
    optimizer.update(torch.tensor(1.0), torch.tensor(True))
    saved = {name: tensor for name, tensor in optimizer.tensors().items() if name.startswith("0.weight.")}
    names = {name.removeprefix("0.weight.") for name in saved}
    assert {"count:int", "share:float", "done:bool", "nothing:none"} <= names
    fresh = built(net, Counting, lr=0.1)
    fresh.assign(saved, "a checkpoint")
    again = {name: tensor for name, tensor in fresh.tensors().items() if name in saved}
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)


def test_tensors_that_the_model_does_not_train_are_refused():
    net, stranger = model(), nn.Parameter(torch.zeros(2))
    custom = CustomParts(optimizer=lambda named: torch.optim.SGD([*named.values(), stranger], lr=1.0))
    with pytest.raises(ConfigError, match="takes tensors that the model does not train"):
        custom.rules((), trainables(net), FACTORS)


def test_a_checkpoint_calls_it_by_its_class():
    assert [group.rule.name for group in built(model(), torch.optim.SGD, lr=1.0).groups] == ["SGD"]
