"""Linear layers over fp32 weights with products in a narrower type, and weight gradients that leave in fp32.

torch's autocast rounds every weight gradient to the narrow type before it is added up over micro-batches. Here the
matrix unit's fp32 sums are kept: as fast, and more exact.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over the last axis of `a`, in their own type whatever autocast says."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.reshape(-1, a.shape[-1]) @ b).view(*a.shape[:-1], b.shape[1])


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x summed over all rows, in `dtype`, without rounding to the inputs' type on the way."""
    dy_MN, x_NK = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    with torch.autocast(dy.device.type, enabled=False):
        if dy.dtype == dtype:
            return dy_MN @ x_NK
        if dy.device.type == "cuda" and dtype == torch.float32:
            return torch.mm(dy_MN, x_NK, out_dtype=torch.float32)
        return dy_MN.to(dtype) @ x_NK.to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.weight_dtype = weight.dtype
        return product(x, narrow.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, narrow = ctx.saved_tensors
        dy = dy.contiguous()
        dx = product(dy, narrow) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(dy, x, ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's type. There is no bias: the kernel that reads the result next adds it."""
    return _Linear.apply(x, weight)  # pyright: ignore
