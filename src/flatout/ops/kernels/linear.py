"""Linear layers with fp32 weights, products in a narrower type, and weight gradients in fp32.

torch's autocast rounds weight gradients to the narrow type before it accumulates them over micro-batches. Here the
matrix unit's fp32 sums are accumulated: as fast, and more exact.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.gradients import accumulated, for_autograd, gradient_type
from flatout.ops.kernels.cublaslt import multiply
from flatout.ops.kernels.fp8 import narrow_product, narrow_values
from flatout.ops.scales import NarrowLinear, version_of


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, tuned: bool) -> Tensor:
    """a @ b + bias over the last axis of `a`, in the inputs' type, without autocast."""
    flat = a.reshape(-1, a.shape[-1])
    with torch.autocast(a.device.type, enabled=False):
        out = multiply(flat, b, bias_N=bias, tuned=tuned)
    return out.view(*a.shape[:-1], b.shape[1])


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, *, tuned: bool) -> Tensor | None:
    """dy.T @ x over all rows, in the type of the weight's gradient, not rounded to the inputs' type.

    From the second micro-batch on the product adds to the gradient itself and returns None (ops/gradients.py).
    """
    dy_MN, x_NK = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    dtype = gradient_type(weight)
    with torch.autocast(dy.device.type, enabled=False):
        if dy.dtype == dtype:
            return dy_MN @ x_NK
        if dy.device.type != "cuda" or dtype != torch.float32:
            return dy_MN.to(dtype) @ x_NK.to(dtype)
        total = accumulated(weight)
        into = torch.empty_like(weight, dtype=dtype, requires_grad=False) if total is None else total
        multiply(dy_MN, x_NK, out=into, add=total is not None, tuned=tuned)
        return for_autograd(weight, into)


class Weight:
    """A weight in one pass: the operands of its products, and a check that it does not change until backward.

    A narrow copy that is made for one product is freed after it, and backward makes another one: saved copies of all
    layers would take too much memory.
    """

    def __init__(self, weight: Tensor, narrow: NarrowLinear | None) -> None:
        self.weight, self.narrow = weight, narrow
        self.version = version_of(weight)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight in the type of the product: the narrow copy, if there is one."""
        if self.narrow is not None and self.narrow.copy.unit is None and self.narrow.copy.values_MK.dtype == dtype:
            return self.narrow.copy.values_MK
        return self.weight.to(dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None, *, tuned: bool) -> Tensor:
        """x @ weight.T + bias in x's type."""
        narrow = self.narrow
        if narrow is not None and narrow.x is not None:
            x_8 = narrow_values(narrow.x, x)
            if x_8 is not None:
                copy, unit = narrow.copy, narrow.copy.unit
                assert unit is not None, "a layer with slots has weights of 8 bits"
                flat = x_8.view(-1, x.shape[-1])
                y = narrow_product(flat, narrow.x.unit, copy.values_MK, unit, x.dtype, bias_M=bias, fast=True)
                return y.view(*x.shape[:-1], y.shape[1])
        return product(x, self.wide(x.dtype).t(), None if bias is None else bias.to(x.dtype), tuned=tuned)

    def input_gradient(self, dy: Tensor, *, tuned: bool) -> Tensor:
        """dy @ weight in dy's type."""
        narrow = self.narrow
        remade = narrow is not None and narrow.copy.generation != narrow.generation
        if remade or version_of(self.weight) != self.version:
            raise RuntimeError("the weights were updated between this forward pass and its backward pass")
        if narrow is not None and narrow.dy is not None:
            dy_8 = narrow_values(narrow.dy, dy)
            if dy_8 is not None:
                turned_KM, unit = narrow.copy.turned_KM, narrow.copy.unit
                assert turned_KM is not None, "8-bit products have a transpose of their own for backward"
                assert unit is not None
                dx = narrow_product(dy_8.view(-1, dy.shape[-1]), narrow.dy.unit, turned_KM, unit, dy.dtype)
                return dx.view(*dy.shape[:-1], dx.shape[1])
        return product(dy, self.wide(dy.dtype), tuned=tuned)

    def gradient(self, dy: Tensor, x: Tensor, *, tuned: bool) -> Tensor | None:
        return weight_gradient(dy, x, self.weight, tuned=tuned)


class LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, narrow, tuned):
        ctx.save_for_backward(x)
        ctx.weight, ctx.tuned = Weight(weight, narrow), tuned
        return ctx.weight.forward(x, tuned=tuned)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *_):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = ctx.weight.input_gradient(dy, tuned=ctx.tuned) if ctx.needs_input_grad[0] else None
        dweight = ctx.weight.gradient(dy, x, tuned=ctx.tuned) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None


def linear(x: Tensor, weight: Tensor, narrow: NarrowLinear | None = None, *, tuned: bool = False) -> Tensor:
    """x @ weight.T in x's type. The bias is added by the next kernel that reads the result.

    `narrow`: the weight's copy in a narrower type, and the slots for 8-bit products. `tuned`: products by the fastest
    of cuBLASLt's kernels.
    """
    return LinearProduct.apply(x, weight, narrow, tuned)  # pyright: ignore
