"""Muon's elementwise work, each in one pass: the Triton form of two functions of ops/muon.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.muon import Numbers

_BLOCK, _WARPS = 2048, 4


@triton.jit
def _advance(
    gradient_ptr, moving_ptr, out_ptr, momentum_ptr, divisor_ptr, finite_ptr, count,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(finite_ptr) != 0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        momentum = tl.load(momentum_ptr)
        gradient = tl.load(gradient_ptr + place, inside, 0.0).to(tl.float32) / tl.load(divisor_ptr)
        moving = tl.load(moving_ptr + place, inside, 0.0)
        moving += (1.0 - momentum) * (gradient - moving)
        tl.store(moving_ptr + place, moving, inside)
        if WRITES:
            ahead = gradient + momentum * (moving - gradient)
            tl.store(out_ptr + place, ahead.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _apply(
    weight_ptr, update_ptr, rate_ptr, decay_ptr, finite_ptr, count,
    DECAYS: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(finite_ptr) != 0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        weight = tl.load(weight_ptr + place, inside, 0.0)
        update = tl.load(update_ptr + place, inside, 0.0).to(tl.float32)
        if DECAYS:
            kept = tl.where(update * weight > 0.0, weight, 0.0) if CAUTIOUS else weight
            update += tl.load(decay_ptr) * kept
        tl.store(weight_ptr + place, weight - tl.load(rate_ptr) * update, inside)


def advance(gradient: Tensor, moving: Tensor, out: Tensor | None, numbers: Numbers) -> None:
    """As `ops.muon.advance_reference`, up to rounding, for weights in fp32; `out` may be anything after a skip."""
    written = moving if out is None else out
    assert all(tensor.is_contiguous() for tensor in (moving, written))
    _advance[(triton.cdiv(moving.numel(), _BLOCK),)](
        gradient.contiguous(), moving, written, numbers.momentum, numbers.divisor, _flag(numbers),
        moving.numel(), WRITES=out is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def apply(weight: Tensor, update: Tensor, numbers: Numbers, *, decays: bool, cautious: bool) -> None:
    """As `ops.muon.apply_reference`, up to rounding, for weights in fp32."""
    assert all(tensor.is_contiguous() for tensor in (weight, update))
    _apply[(triton.cdiv(weight.numel(), _BLOCK),)](
        weight, update, numbers.rate, numbers.decay, _flag(numbers), weight.numel(),
        DECAYS=decays, CAUTIOUS=cautious, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def _flag(numbers: Numbers) -> Tensor:
    return numbers.finite.view(torch.uint8)
