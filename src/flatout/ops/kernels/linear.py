"""Linear layers over fp32 weights with products in a narrower type, and weight gradients that leave in fp32.

torch's autocast rounds every weight gradient to the narrow type before it is added up over micro-batches. Here the
matrix unit's fp32 sums are kept: as fast, and more exact.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.cublaslt import by_torch, multiply
from flatout.ops.kernels.fp8 import narrow_backward, narrow_forward, narrow_weight, narrow_weight_gradient


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, tuned: bool) -> Tensor:
    """a @ b + bias over the last axis of `a`, in their own type whatever autocast says."""
    flat = a.reshape(-1, a.shape[-1])
    with torch.autocast(a.device.type, enabled=False):
        if tuned:
            out = multiply(flat, b, bias_N=bias)
        else:
            out = flat @ b if bias is None else torch.addmm(bias, flat, b)
    return out.view(*a.shape[:-1], b.shape[1])


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, *, tuned: bool) -> Tensor | None:
    """dy.T @ x summed over all rows, in the weight's type, without rounding to the inputs' type on the way.

    From the second micro-batch on the product adds to `weight.grad` itself and nothing is returned: that saves autograd
    a pass over every gradient.
    """
    dy_MN, x_NK = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    with torch.autocast(dy.device.type, enabled=False):
        if dy.dtype == weight.dtype:
            return dy_MN @ x_NK
        if dy.device.type != "cuda" or weight.dtype != torch.float32:
            return dy_MN.to(weight.dtype) @ x_NK.to(weight.dtype)
        adding = weight.is_leaf and weight.grad is not None
        into = weight.grad if adding else torch.empty_like(weight, requires_grad=False)
        assert into is not None
        if tuned:
            multiply(dy_MN, x_NK, out=into, add=adding)
        else:
            by_torch(dy_MN, x_NK, into, None, add=adding)
        return None if adding else into


def forward_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, fp8: bool, tuned: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x @ weight.T + bias in x's type, and what `input_gradient` wants to know: the narrow weights and their unit."""
    if fp8:
        weight_8 = narrow_weight(weight, backward=True)
        return narrow_forward(x, weight_8, bias), weight_8.turned_CR, weight_8.unit
    narrow = weight.to(x.dtype)
    return product(x, narrow.t(), None if bias is None else bias.to(x.dtype), tuned=tuned), narrow, None


def input_gradient(dy: Tensor, narrow: Tensor, unit: Tensor | None, *, tuned: bool) -> Tensor:
    """dy @ weight. A unit marks weights of 8 bits, which lie transposed."""
    return product(dy, narrow, tuned=tuned) if unit is None else narrow_backward(dy, narrow, unit)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fp8, dw, tuned):
        y, narrow, unit = forward_product(x, weight, None, fp8=fp8, tuned=tuned)
        ctx.save_for_backward(x, narrow, unit)
        ctx.weight, ctx.narrow_gradient, ctx.tuned = weight, fp8 and dw == "fp8", tuned
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, narrow, unit = ctx.saved_tensors
        dy = dy.contiguous()
        dx = input_gradient(dy, narrow, unit, tuned=ctx.tuned) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1] and ctx.narrow_gradient:
            dweight = narrow_weight_gradient(dy, x, ctx.weight.dtype)
        elif ctx.needs_input_grad[1]:
            dweight = weight_gradient(dy, x, ctx.weight, tuned=ctx.tuned)
        return dx, dweight, None, None, None


def linear(x: Tensor, weight: Tensor, *, fp8: bool = False, dw: str = "bf16", tuned: bool = False) -> Tensor:
    """x @ weight.T in x's type. There is no bias: the kernel that reads the result next adds it.

    `fp8` takes 8-bit operands forward and towards x; `dw` says whether the weights' gradient does too.
    `tuned` products come from the fastest of cuBLASLt's kernels.
    """
    return _Linear.apply(x, weight, fp8, dw, tuned)  # pyright: ignore
