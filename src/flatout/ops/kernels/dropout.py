"""Dropout by counting: whether a value stays follows from a seed on the device and from its place.

No mask is kept: backward, and a block that is computed again, find the same numbers. A seed is a tensor, so that a
replayed recording, which draws it anew, drops other values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def kept(seed, place, rate):
    """1/(1 - rate) where the value at a place stays, 0 where it goes. Seven rounds pass all tests of randomness."""
    return tl.where(tl.rand(seed, place, n_rounds=7) >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _drop(x_ptr, y_ptr, seed_ptr, rate, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < count, 0.0).to(tl.float32) * kept(tl.load(seed_ptr), place, rate)
    tl.store(y_ptr + place, x.to(y_ptr.dtype.element_ty), place < count)


def _dropped(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    x = x.contiguous()
    y, block = torch.empty_like(x), 1024
    _drop[(triton.cdiv(x.numel(), block),)](x, y, seed, rate, x.numel(), BLOCK=block, num_warps=4)
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, rate):
        ctx.save_for_backward(seed)
        ctx.rate = rate
        return _dropped(x, seed, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _dropped(dy, ctx.saved_tensors[0], ctx.rate), None, None


def dropout(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    """x with a share of `rate` of its values gone and the others larger. `seed` is an int64 on the device."""
    return _Dropout.apply(x, seed, rate)  # pyright: ignore
