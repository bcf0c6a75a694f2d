"""The first residual stream, which blocks mix into their own (ops/kernels/norm.py), and its gradient.

Every block has a gradient for it. Handed to autograd, each would be a tensor of its own and one more pass to add it up.
Here the pass that makes it adds it to what later blocks have left, and the beginning of the stream, whose backward
comes last, takes the sum.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class First:
    """The first stream [B, T, W], and what its gradient has come to in this backward pass.

    No dataclass: sharding would hand blocks a copy of it.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.gradient: Tensor | None = None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first):
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        gradient, ctx.first.gradient = ctx.first.gradient, None
        return dx if gradient is None else dx + gradient, None


def begin(x: Tensor) -> tuple[Tensor, First]:
    """(x, the same for `add_norm` to mix in). Only what is computed from the returned x may mix it in."""
    first = First(x.detach().contiguous())
    return _Begin.apply(x, first), first  # pyright: ignore
