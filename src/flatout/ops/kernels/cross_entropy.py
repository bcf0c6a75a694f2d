"""Softmax cross-entropy over rows of logits, with the gradient written over the logits themselves.

The first pass over a row finds maximum and sum (online, in fp32), the second writes the gradient. The row is short
enough to stay in the cache between them, so memory sees one read and one write.

Shape legend: N rows (tokens), V vocabulary, P columns of the logits, V rounded up; the padding gets gradient zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.reference import IGNORED


@triton.jit
def _rows(
    logits_ptr, targets_ptr, losses_ptr, vocab, columns, smoothing, ignored,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    target = tl.load(targets_ptr + row)
    if target == ignored:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zero = tl.zeros((BLOCK,), tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + column, zero, column < columns)
    else:
        # Each lane keeps the maximum and the sum of its own columns; they meet once, at the end.
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        plain_sum = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocab
            x = tl.load(logits_ptr + column, inside, -float("inf")).to(tl.float32)
            if SMOOTH:
                plain_sum += tl.where(inside, x, 0.0)
            higher = tl.maximum(highest, x)
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(highest - safe) + tl.exp(x - safe)
            highest = higher
        top = tl.max(highest, 0)
        total_sum = tl.sum(total * tl.exp(highest - top), 0)
        lse = top + tl.log(total_sum)
        at_target = tl.load(logits_ptr + target).to(tl.float32)
        loss = lse - at_target
        if SMOOTH:
            loss = (1.0 - smoothing) * loss + smoothing * (lse - tl.sum(plain_sum, 0) / vocab)
        tl.store(losses_ptr + row, loss)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + column, column < vocab, -float("inf")).to(tl.float32)
                gradient = tl.exp(x - lse)
                if SMOOTH:
                    gradient -= smoothing / vocab
                gradient -= tl.where(column == target, 1.0 - smoothing, 0.0)
                gradient = tl.where(column < vocab, gradient, 0.0)
                tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < columns)


def cross_entropy_rows(
    logits_NP: Tensor, targets_N: Tensor, *, vocab: int, label_smoothing: float, gradient: bool
) -> Tensor:
    """Loss of every row in fp32, zero where the target is IGNORED. With `gradient` the logits become their gradient."""
    assert logits_NP.is_contiguous()
    assert targets_N.is_contiguous()
    rows, columns = logits_NP.shape
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NP.device)
    block = min(8192, triton.next_power_of_2(columns))
    _rows[(rows,)](
        logits_NP, targets_N, losses_N, vocab, columns, label_smoothing, IGNORED, SMOOTH=label_smoothing > 0.0,
        GRADIENT=gradient, BLOCK=block, num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return losses_N
