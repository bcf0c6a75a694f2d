"""The residual stream's first values: a row of the token table plus a row of the position table, in one pass.

    x[b, t] = table[tokens[b, t]] + positions[t]          (added in fp32, stored in the stream's own precision)

Backward reads the gradient once: a program walks through the batch at one position, sums up the position's gradient
and adds each row to its token's, atomically and in fp32. Atomic additions come in any order, so this result repeats
only up to rounding; where torch is told to be deterministic, its own sorting path serves instead.

The trap: a token outside the table must not read a stranger's memory. It gives NaN, which training reports, and no
gradient.

Shape legend: B batch, T positions, W width, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.gradients import accumulated, for_autograd, gradient_type
from flatout.ops.kernels.launch import columns_of


@triton.jit
def _forward(
    tokens_ptr, table_ptr, positions_ptr, x_ptr, rows, length, width, vocab,
    HAS_POSITIONS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    token = tl.load(tokens_ptr + row, row < rows, -1).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    place = token[:, None] * width + column[None, :]
    x = tl.load(table_ptr + place, mask & known[:, None], float("nan")).to(tl.float32)
    if HAS_POSITIONS:
        x += tl.load(positions_ptr + (row % length)[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
    out = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(x_ptr + out, x.to(x_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(
    dx_ptr, tokens_ptr, dtable_ptr, dpositions_ptr, batch, length, width, vocab,
    HAS_TABLE: tl.constexpr, HAS_POSITIONS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((ROWS, BLOCK), tl.float32)  # rows are added up once, at the end
    for start in range(0, batch, ROWS):
        index = start + tl.arange(0, ROWS)
        row = index.to(tl.int64) * length + position
        mask = (index < batch)[:, None] & inside[None, :]
        dx = tl.load(dx_ptr + row[:, None] * width + column[None, :], mask, 0.0).to(tl.float32)
        if HAS_TABLE:
            token = tl.load(tokens_ptr + row, index < batch, -1).to(tl.int64)
            known = (token >= 0) & (token < vocab)
            place = token[:, None] * width + column[None, :]
            tl.atomic_add(dtable_ptr + place, dx, mask & known[:, None], sem="relaxed")
        if HAS_POSITIONS:
            total += dx
    if HAS_POSITIONS:
        tl.store(dpositions_ptr + position * width + column, tl.sum(total, 0), inside)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, table, positions, dtype):
        tokens = tokens.contiguous()
        positions = None if positions is None else positions.contiguous()
        vocab, width = table.shape
        batch, length = tokens.shape
        x = torch.empty(batch, length, width, dtype=dtype, device=table.device)
        block, at_once, warps = columns_of(width)
        _forward[(triton.cdiv(batch * length, at_once),)](
            tokens, table, positions, x, batch * length, length, width, vocab, HAS_POSITIONS=positions is not None,
            ROWS=at_once, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(tokens)
        ctx.vocab, ctx.table = vocab, table
        ctx.positions_dtype = None if positions is None else positions.dtype
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        (tokens,) = ctx.saved_tensors
        dx = dx.contiguous()
        batch, length, width = dx.shape
        wants_table = ctx.needs_input_grad[1]
        wants_positions = ctx.positions_dtype is not None and ctx.needs_input_grad[2]
        if torch.are_deterministic_algorithms_enabled():
            dtable = torch.ops.aten.embedding_dense_backward(dx.float(), tokens, ctx.vocab, -1, False)
            dpositions = dx.sum(0, dtype=torch.float32)
        else:
            # From the second micro-batch on the gradient is there already, and takes the additions itself.
            dtable = accumulated(ctx.table) if wants_table else None
            if dtable is None or dtable.dtype != torch.float32 or not dtable.is_contiguous():
                dtable = torch.zeros(ctx.vocab if wants_table else 0, width, dtype=torch.float32, device=dx.device)
            dpositions = torch.empty(length if wants_positions else 0, width, dtype=torch.float32, device=dx.device)
            block, at_once = min(256, triton.next_power_of_2(width)), 4
            _backward[(length, triton.cdiv(width, block))](
                dx, tokens, dtable, dpositions, batch, length, width, ctx.vocab, HAS_TABLE=wants_table,
                HAS_POSITIONS=wants_positions, ROWS=at_once, BLOCK=block, num_warps=4,
            )  # fmt: skip
        return (
            None,
            for_autograd(ctx.table, dtable.to(gradient_type(ctx.table))) if wants_table else None,
            dpositions.to(ctx.positions_dtype) if wants_positions else None,
            None,
        )


def embed(tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None, dtype: torch.dtype) -> Tensor:
    """table[tokens] + positions as [B, T, W] in `dtype`. `positions_TW` has exactly the T rows of this call."""
    assert positions_TW is None or positions_TW.shape[0] == tokens_BT.shape[1]
    return _Embed.apply(tokens_BT, table_VW, positions_TW, dtype)  # pyright: ignore
