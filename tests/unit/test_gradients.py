"""The door through which kernels hand over gradients of weights."""

from types import SimpleNamespace

import pytest
import torch

from flatout.ops.gradients import accumulated, clear_gradients, for_autograd, hold_gradients
from flatout.parallel import reducer as reducer_module
from flatout.parallel.reducer import BucketReducer


class Doubling(torch.autograd.Function):
    """2·weight, with a gradient that adds to the earlier ones by itself, as our kernels' do."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return 2 * weight

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        total = accumulated(ctx.weight)
        into = torch.zeros_like(dy) if total is None else total
        into.add_(2 * dy)
        return for_autograd(ctx.weight, into)


def test_the_first_gradient_goes_to_autograd_and_later_ones_are_added_in_place():
    weight = torch.nn.Parameter(torch.ones(3))
    Doubling.apply(weight).sum().backward()  # pyright: ignore
    assert weight.grad is not None
    first = weight.grad
    assert first.tolist() == [2.0] * 3
    Doubling.apply(weight).sum().backward()  # pyright: ignore
    assert weight.grad is first
    assert first.tolist() == [4.0] * 3


def test_what_is_no_parameter_gets_its_gradient_from_autograd():
    leaf = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        Doubling.apply(3 * leaf).sum().backward()  # pyright: ignore
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [12.0] * 3


def test_gradients_are_held_zeroed_or_dropped():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    hold_gradients(parameters)
    held = parameters[0].grad
    assert held is not None
    assert parameters[1].grad is None
    held.fill_(5.0)
    hold_gradients(parameters)
    assert parameters[0].grad is held
    assert held.tolist() == [5.0, 5.0], "what is there already stays"
    clear_gradients(parameters, drop=False)
    assert parameters[0].grad is held
    assert held.tolist() == [0.0, 0.0]
    clear_gradients(parameters, drop=True)
    assert parameters[0].grad is None


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_that_leave_in_the_backward_pass_come_back_as_the_sum_of_all(monkeypatch, bf16):
    """Of two processes that are alike."""

    def all_reduce(values, async_op=False):
        values.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer_module.dist, "all_reduce", all_reduce)
    weight = torch.nn.Parameter(torch.ones(3))
    reducer = BucketReducer([weight], bf16=bf16, replayed=False)
    reducer.last_micro_batch()
    (5 * weight).sum().backward()
    reducer.finish()
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0] * 3
