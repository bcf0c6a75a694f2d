"""Optimizer updates in Triton: AdamW with 8-bit moments, and Muon. The plain forms are ops/adam8.py and ops/muon.py.

AdamW: a program takes a few blocks of 256 values, decodes their moments, updates weights and moments in registers, and
stores new codes, all in one pass. Where `skip` is 1 it writes nothing.

Muon: momentum and weights take one pass each. NorMuon reads updates once for the sizes of their rows, and once to scale
them. Products of a matrix with itself are symmetric: only tiles on and below the diagonal are computed (21 of 36 at 768
rows) and mirrored. The terms that a polynomial adds to its square are added in the same pass.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops import adam8 as format8
from flatout.ops.muon import NORMUON_BETA, SMALLEST, Numbers

_ADAM_BLOCKS, _ADAM_WARPS = 4, 4


@triton.jit
def _place(x, live, lot, STEP: tl.constexpr, SMALLEST: tl.constexpr, NO_SCALE: tl.constexpr):
    """The index of a positive value on the logarithmic grid, rounded stochastically by `lot`."""
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

        # a hash: unsigned 32-bit arithmetic wraps around
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
    _update[(triton.cdiv(blocks, _ADAM_BLOCKS),)](
        weight, gradient.contiguous(), *moments, scalars, weight.numel(), blocks, settings.beta1, settings.beta2,
        settings.eps, settings.weight_decay, STEP1=format8.SIGNED_STEP, CODES1=format8.SIGNED_CODES,
        STEP2=format8.UNSIGNED_STEP, CODES2=format8.UNSIGNED_CODES, SMALLEST=format8.SMALLEST,
        NO_SCALE=float(format8.NO_SCALE), ROWS=_ADAM_BLOCKS, BLOCK=format8.BLOCK, num_warps=_ADAM_WARPS,
    )  # fmt: skip


_BLOCK, _WARPS = 2048, 4
_TILE, _INNER = 128, 64


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


@triton.jit
def _symmetric(
    x_ptr, out_ptr, scale_ptr, rows, inner, stride_n, stride_r, stride_i, times, itself, diagonal,
    ADDS: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)  # of tiles: 0 0, 1 0, 1 1, 2 0, ...
    high = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    low = pair - high * (high + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * stride_n
    row = high * TILE + tl.arange(0, TILE)
    column = low * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, inner, INNER):
        place = start + tl.arange(0, INNER)
        inside = (place < inner)[None, :]
        left = tl.load(x_ptr + row[:, None] * stride_r + place[None, :] * stride_i, (row < rows)[:, None] & inside, 0.0)
        right = tl.load(
            x_ptr + column[:, None] * stride_r + place[None, :] * stride_i, (column < rows)[:, None] & inside, 0.0
        )
        total = tl.dot(left, tl.trans(right), total)
    total *= times
    mask = (row < rows)[:, None] & (column < rows)[None, :]
    if ADDS:
        own = tl.load(x_ptr + row[:, None] * stride_r + column[None, :] * stride_i, mask, 0.0)
        total += itself * own.to(tl.float32) + tl.where(row[:, None] == column[None, :], diagonal, 0.0)
    if SCALED:
        total *= tl.load(scale_ptr + matrix)
    out_ptr += matrix * rows * rows
    value = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * rows + column[None, :], value, mask)
    if high != low:
        tl.store(out_ptr + column[:, None] * rows + row[None, :], tl.trans(value), tl.trans(mask))


@triton.jit
def _mean_squares(
    x_ptr, mean_ptr, kept, summed, stride_n, stride_k, stride_s, KEPT: tl.constexpr, SUMMED: tl.constexpr
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * KEPT + tl.arange(0, KEPT)
    total = tl.zeros((KEPT, SUMMED), tl.float32)
    for start in range(0, summed, SUMMED):
        column = start + tl.arange(0, SUMMED)
        place = matrix * stride_n + row[:, None] * stride_k + column[None, :] * stride_s
        x = tl.load(x_ptr + place, (row < kept)[:, None] & (column < summed)[None, :], 0.0).to(tl.float32)
        total += x * x
    tl.store(mean_ptr + matrix * kept + row, tl.sum(total, 1) / summed, row < kept)


@triton.jit
def _second_moment(
    mean_ptr, second_ptr, moved_ptr, factor_ptr, finite_ptr, kept, share, smallest, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < kept
    place = tl.program_id(0).to(tl.int64) * kept + column
    mean, second = tl.load(mean_ptr + place, inside, 0.0), tl.load(second_ptr + place, inside, 0.0)
    moved = second + share * (mean - second)
    factor = 1.0 / tl.sqrt(tl.maximum(moved, smallest))
    before, after = tl.sqrt(tl.sum(mean)), tl.sqrt(tl.sum(mean * factor * factor))
    tl.store(factor_ptr + place, factor * (before / tl.maximum(after, smallest)), inside)
    tl.store(moved_ptr + place, tl.where(tl.load(finite_ptr) != 0, moved, second), inside)


@triton.jit
def _scale_matrices(
    x_ptr, factor_ptr, rows, columns, kept, stride_n, BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = x_ptr + matrix * stride_n + row[:, None] * columns + column[None, :]
    factor_ptr += matrix * kept
    if BY_ROW:
        factor = tl.load(factor_ptr + row, row < rows, 0.0)[:, None]
    else:
        factor = tl.load(factor_ptr + column, column < columns, 0.0)[None, :]
    tl.store(place, (tl.load(place, mask, 0.0).to(tl.float32) * factor).to(x_ptr.dtype.element_ty), mask)


def normalise(update_NRC: Tensor, second_NK: Tensor, finite: Tensor) -> Tensor:
    """As `ops.muon.normalise_reference`, up to rounding."""
    (count, rows, columns), kept = update_NRC.shape, second_NK.shape[1]
    stride, *inside = update_NRC.stride()
    assert inside == [columns, 1]
    by_row = rows >= columns
    # tiles of 2,048 values, longer along the contiguous axis
    sizes, strides, tile = (rows, columns), (columns, 1), (16, 128)
    if not by_row:
        sizes, strides, tile = (columns, rows), (1, columns), (32, 64)
    mean, factor, moved = torch.empty(3, *second_NK.shape, dtype=torch.float32, device=second_NK.device)
    _mean_squares[(triton.cdiv(kept, tile[0]), count)](
        update_NRC, mean, *sizes, stride, *strides, KEPT=tile[0], SUMMED=tile[1], num_warps=_WARPS
    )
    _second_moment[(count,)](
        mean, second_NK, moved, factor, finite.view(torch.uint8), kept, 1.0 - NORMUON_BETA, SMALLEST,
        BLOCK=triton.next_power_of_2(kept), num_warps=8,
    )  # fmt: skip
    _scale_matrices[(triton.cdiv(columns, 256), triton.cdiv(rows, 16), count)](
        update_NRC, factor, rows, columns, kept, stride, BY_ROW=by_row, ROWS=16, COLUMNS=256, num_warps=_WARPS
    )
    return moved


def gram(x_NRC: Tensor, scale_N11: Tensor | None = None) -> Tensor:
    """As `ops.muon.gram_reference`, up to rounding."""
    if x_NRC.shape[-2] >= x_NRC.shape[-1]:
        x_NRC = x_NRC.mT
    return _launch(x_NRC, 1.0, None, scale_N11)


def polynomial(square_NSS: Tensor, a: float, b: float, c: float, scale_N11: Tensor | None = None) -> Tensor:
    """As `ops.muon.polynomial_reference`, up to rounding."""
    return _launch(square_NSS, c, (b, a), scale_N11)


def _launch(x_NRI: Tensor, times: float, added: tuple[float, float] | None, scale_N11: Tensor | None) -> Tensor:
    """(times · X X' + added[0] · X + added[1] · identity) · scale."""
    count, rows, inner = x_NRI.shape
    out = torch.empty(count, rows, rows, dtype=x_NRI.dtype, device=x_NRI.device)
    tiles = triton.cdiv(rows, _TILE)
    _symmetric[(tiles * (tiles + 1) // 2, count)](
        x_NRI, out, scale_N11, rows, inner, *x_NRI.stride(), times, *(added or (0.0, 0.0)), ADDS=added is not None,
        SCALED=scale_N11 is not None, TILE=_TILE, INNER=_INNER, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def advance(gradient: Tensor, moving: Tensor, out: Tensor | None, numbers: Numbers) -> None:
    """As `ops.muon.advance_reference`, up to rounding, for fp32 weights. If the step is skipped `out` is undefined."""
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
