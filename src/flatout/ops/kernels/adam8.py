"""AdamW with 8-bit moments in one pass: the Triton form of ops/adam8.py, which explains the number format.

A program takes a few blocks of 256 values, reads their codes, updates weights and moments in registers, and stores new
codes. Where `skip` is 1 nothing is written at all.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flatout.ops import adam8 as format8

_BLOCKS, _WARPS = 4, 4


@triton.jit
def _place(x, live, lot, STEP: tl.constexpr, SMALLEST: tl.constexpr, NO_SCALE: tl.constexpr):
    """Where a positive value lies on the logarithmic grid, rounded up or down by lot."""
    place = tl.floor(tl.log2(tl.maximum(x, SMALLEST)) / STEP)
    below = tl.exp2(place * STEP)
    above = tl.exp2((place + 1.0) * STEP)
    place += tl.where((x - below) / (above - below) > lot, 1.0, 0.0)
    return tl.where(live, place, NO_SCALE)


@triton.jit
def _update(
    weight_ptr, gradient_ptr, code1_ptr, scale1_ptr, code2_ptr, scale2_ptr, scalars_ptr, values, blocks,
    beta1, beta2, eps, weight_decay, STEP1: tl.constexpr, CODES1: tl.constexpr, STEP2: tl.constexpr,
    CODES2: tl.constexpr, SMALLEST: tl.constexpr, NO_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars_ptr + 4) == 0.0:
        rate = tl.load(scalars_ptr)
        correction1 = tl.load(scalars_ptr + 1)
        correction2 = tl.load(scalars_ptr + 2)
        divisor = tl.load(scalars_ptr + 3)
        step = tl.load(scalars_ptr + 5)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        here = row < blocks
        place = row.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = place < values
        stored = here[:, None] & (place >= 0)  # codes exist for whole blocks

        code1 = tl.load(code1_ptr + place, stored, 0).to(tl.int32)
        scale1 = tl.load(scale1_ptr + row, here, 0).to(tl.float32)
        size1 = (code1 & 127).to(tl.float32)
        m = tl.exp2((scale1[:, None] - CODES1 + size1) * STEP1)
        m = tl.where(size1 > 0.0, m, 0.0)
        m = tl.where(code1 >= 128, -m, m)
        size2 = tl.load(code2_ptr + place, stored, 0).to(tl.float32)
        scale2 = tl.load(scale2_ptr + row, here, 0).to(tl.float32)
        v = tl.exp2((scale2[:, None] - CODES2 + size2) * STEP2)
        v = tl.where(size2 > 0.0, v, 0.0)

        g = tl.load(gradient_ptr + place, inside, 0.0).to(tl.float32) / divisor
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        w = tl.load(weight_ptr + place, inside, 0.0).to(tl.float32)
        w = w * (1.0 - rate * weight_decay)
        w -= rate / correction1 * m / (tl.sqrt(v) / correction2 + eps)
        tl.store(weight_ptr + place, w.to(weight_ptr.dtype.element_ty), inside)

        # unsigned 32-bit arithmetic wraps around, which is what a hash wants
        h = place.to(tl.uint32) * 0x9E3779B1 + (step.to(tl.int32) + place * 0).to(tl.uint32) * 0x85EBCA77
        h = h ^ (h >> 16)
        h = h * 0x7FEB352D
        h = h ^ (h >> 15)
        h = h * 0x846CA68B
        h = h ^ (h >> 16)
        lot1 = (h & 0xFFFF).to(tl.float32) / 65536.0
        lot2 = (h >> 16).to(tl.float32) / 65536.0

        live = (tl.abs(m) >= SMALLEST) & inside
        at = _place(tl.abs(m), live, lot1, STEP1, SMALLEST, NO_SCALE)
        top = tl.max(at, 1)
        code = tl.where(live, tl.maximum(at - top[:, None] + CODES1, 0.0), 0.0).to(tl.int32)
        code += tl.where((m < 0.0) & inside, 128, 0)
        tl.store(code1_ptr + place, code.to(tl.uint8), stored)
        tl.store(scale1_ptr + row, top.to(tl.int16), here)

        live = (v >= SMALLEST) & inside
        at = _place(v, live, lot2, STEP2, SMALLEST, NO_SCALE)
        top = tl.max(at, 1)
        code = tl.where(live, tl.maximum(at - top[:, None] + CODES2, 1.0), 0.0).to(tl.int32)
        tl.store(code2_ptr + place, code.to(tl.uint8), stored)
        tl.store(scale2_ptr + row, top.to(tl.int16), here)


def adam8(
    weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], scalars: Tensor, settings: format8.Settings
) -> None:
    """As `ops.adam8.adam8_reference`, up to the rounding of logarithms."""
    assert weight.is_contiguous()
    blocks = moments[1].numel()
    _update[(triton.cdiv(blocks, _BLOCKS),)](
        weight, gradient.contiguous(), *moments, scalars, weight.numel(), blocks, settings.beta1, settings.beta2,
        settings.eps, settings.weight_decay, STEP1=format8.SIGNED_STEP, CODES1=format8.SIGNED_CODES,
        STEP2=format8.UNSIGNED_STEP, CODES2=format8.UNSIGNED_CODES, SMALLEST=format8.SMALLEST,
        NO_SCALE=float(format8.NO_SCALE), ROWS=_BLOCKS, BLOCK=format8.BLOCK, num_warps=_WARPS,
    )  # fmt: skip
