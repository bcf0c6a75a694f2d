"""Softmax cross-entropy over rows of logits; the gradient overwrites the logits.

The first pass over a row computes maximum and sum (online, in fp32), the second writes the gradient. The row stays in
the cache between them, so memory is read once and written once.

Shape legend: N rows (tokens), V vocabulary, P columns of the logits (V rounded up); padding gets gradient zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.fp8 import GRADIENT_SCALE
from flatout.ops.reference import IGNORED


@triton.jit
def _soft(x, cap, CAPPED: tl.constexpr):
    """cap·tanh(x / cap)."""
    if CAPPED:
        x = cap * (2.0 / (1.0 + tl.exp(-2.0 * x / cap)) - 1.0)
    return x


@triton.jit
def _slope(x, cap, CAPPED: tl.constexpr):
    """The derivative of the cap, from its result."""
    return 1.0 - (x / cap) * (x / cap) if CAPPED else 1.0


@triton.jit
def _rows(
    logits_ptr, targets_ptr, losses_ptr, narrow_ptr, vocab, columns, smoothing, ignored, narrow_scale, cap,
    CAPPED: tl.constexpr, SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * columns
    narrow_row_ptr = narrow_ptr
    if NARROW:  # also write the gradient in 8 bits
        narrow_row_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    if target == ignored:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(row_ptr + start + lane, zero, start + lane < columns)
                if NARROW:
                    nothing = tl.zeros((BLOCK,), tl.float32).to(narrow_ptr.dtype.element_ty)
                    tl.store(narrow_row_ptr + start + lane, nothing, start + lane < columns)
    else:
        # Bound by instructions, not by memory. So exponentials are powers of two, four blocks share one update of the
        # maximum, only the last blocks are masked, and the target's column is corrected at the end.
        highest = tl.full((BLOCK,), -1e38, tl.float32)  # per lane; lanes are reduced once, after the loop
        total = tl.zeros((BLOCK,), tl.float32)
        plain_sum = tl.zeros((BLOCK,), tl.float32)
        whole = vocab // (4 * BLOCK) * (4 * BLOCK)
        for start in range(0, whole, 4 * BLOCK):
            x0 = _soft(tl.load(row_ptr + start + lane).to(tl.float32), cap, CAPPED) * LOG2E
            x1 = _soft(tl.load(row_ptr + start + BLOCK + lane).to(tl.float32), cap, CAPPED) * LOG2E
            x2 = _soft(tl.load(row_ptr + start + 2 * BLOCK + lane).to(tl.float32), cap, CAPPED) * LOG2E
            x3 = _soft(tl.load(row_ptr + start + 3 * BLOCK + lane).to(tl.float32), cap, CAPPED) * LOG2E
            if SMOOTH:
                plain_sum += (x0 + x1) + (x2 + x3)
            higher = tl.maximum(highest, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
            added = (tl.exp2(x0 - higher) + tl.exp2(x1 - higher)) + (tl.exp2(x2 - higher) + tl.exp2(x3 - higher))
            total = total * tl.exp2(highest - higher) + added
            highest = higher
        for start in range(whole, vocab, BLOCK):
            inside = start + lane < vocab
            x = _soft(tl.load(row_ptr + start + lane, inside, -float("inf")).to(tl.float32), cap, CAPPED) * LOG2E
            if CAPPED:
                x = tl.where(inside, x, -float("inf"))
            if SMOOTH:
                plain_sum += tl.where(inside, x, 0.0)
            higher = tl.maximum(highest, x)
            total = total * tl.exp2(highest - higher) + tl.exp2(x - higher)
            highest = higher
        top = tl.max(highest, 0)
        lse = top + tl.log2(tl.sum(total * tl.exp2(highest - top), 0))  # in base 2, as everything here
        at_target = _soft(tl.load(row_ptr + target).to(tl.float32), cap, CAPPED) * LOG2E
        loss = (1.0 - smoothing) * (lse - at_target)
        if SMOOTH:
            loss += smoothing * (lse - tl.sum(plain_sum, 0) / vocab)
        tl.store(losses_ptr + row, loss / LOG2E)
        if GRADIENT:
            even = smoothing / vocab
            for start in range(0, whole, 4 * BLOCK):
                x0 = _soft(tl.load(row_ptr + start + lane).to(tl.float32), cap, CAPPED)
                x1 = _soft(tl.load(row_ptr + start + BLOCK + lane).to(tl.float32), cap, CAPPED)
                x2 = _soft(tl.load(row_ptr + start + 2 * BLOCK + lane).to(tl.float32), cap, CAPPED)
                x3 = _soft(tl.load(row_ptr + start + 3 * BLOCK + lane).to(tl.float32), cap, CAPPED)
                kind: tl.constexpr = logits_ptr.dtype.element_ty
                x0 = (tl.exp2(x0 * LOG2E - lse) - even) * _slope(x0, cap, CAPPED)
                x1 = (tl.exp2(x1 * LOG2E - lse) - even) * _slope(x1, cap, CAPPED)
                x2 = (tl.exp2(x2 * LOG2E - lse) - even) * _slope(x2, cap, CAPPED)
                x3 = (tl.exp2(x3 * LOG2E - lse) - even) * _slope(x3, cap, CAPPED)
                tl.store(row_ptr + start + lane, x0.to(kind))
                tl.store(row_ptr + start + BLOCK + lane, x1.to(kind))
                tl.store(row_ptr + start + 2 * BLOCK + lane, x2.to(kind))
                tl.store(row_ptr + start + 3 * BLOCK + lane, x3.to(kind))
                if NARROW:
                    small: tl.constexpr = narrow_ptr.dtype.element_ty
                    tl.store(narrow_row_ptr + start + lane, (x0 * narrow_scale).to(small))
                    tl.store(narrow_row_ptr + start + BLOCK + lane, (x1 * narrow_scale).to(small))
                    tl.store(narrow_row_ptr + start + 2 * BLOCK + lane, (x2 * narrow_scale).to(small))
                    tl.store(narrow_row_ptr + start + 3 * BLOCK + lane, (x3 * narrow_scale).to(small))
            for start in range(whole, columns, BLOCK):
                column = start + lane
                x = _soft(tl.load(row_ptr + column, column < vocab, 0.0).to(tl.float32), cap, CAPPED)
                gradient = (tl.exp2(x * LOG2E - lse) - even) * _slope(x, cap, CAPPED)
                gradient = tl.where(column < vocab, gradient, 0.0)
                tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < columns)
                if NARROW:
                    small_gradient = (gradient * narrow_scale).to(narrow_ptr.dtype.element_ty)
                    tl.store(narrow_row_ptr + column, small_gradient, column < columns)
            tl.debug_barrier()  # another warp wrote the target's column
            mended = tl.exp2(at_target - lse) - even - (1.0 - smoothing)
            mended *= _slope(at_target / LOG2E, cap, CAPPED)
            tl.store(row_ptr + target, mended.to(logits_ptr.dtype.element_ty))
            if NARROW:
                tl.store(narrow_row_ptr + target, (mended * narrow_scale).to(narrow_ptr.dtype.element_ty))


_BLOCK, _WARPS = 4096, 16  # measured on an H200


def cross_entropy_rows(
    logits_NP: Tensor,
    targets_N: Tensor,
    vocab: int,
    label_smoothing: float,
    gradient: bool,
    cap: float = 0.0,
    narrow_NP: Tensor | None = None,
) -> Tensor:
    """Loss of every row in fp32, zero if the target is IGNORED. `gradient`: overwrites the logits with their gradient.

    `narrow_NP` gets that gradient times GRADIENT_SCALE in its own type. With a `cap` above 0 the loss is that of
    cap·tanh(logits / cap).
    """
    assert logits_NP.is_contiguous()
    assert targets_N.is_contiguous()
    rows, columns = logits_NP.shape
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NP.device)
    _rows[(rows,)](
        logits_NP, targets_N, losses_N, narrow_NP, vocab, columns, label_smoothing, IGNORED, GRADIENT_SCALE, cap,
        CAPPED=cap > 0.0, SMOOTH=label_smoothing > 0.0, GRADIENT=gradient, NARROW=gradient and narrow_NP is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(columns)), num_warps=_WARPS,
    )  # fmt: skip
    return losses_N
