"""Queries, keys and values from one product, as views of its result; their gradients packed for one product back.

Attention hands back three gradients, in layouts of its own or packed already. One pass writes them side by side and
sums the columns, which are the gradient of the bias; for 8-bit products it writes them in 8 bits too (ops/scales.py).

Shape legend: B batch, T positions, H query heads, G key/value heads, D head size, W width, C = (H + 2G)·D columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.fp8 import record, rounding_of, store_narrow
from flatout.ops.kernels.gates import gates_back, make_gates
from flatout.ops.kernels.launch import fold, multiprocessors
from flatout.ops.kernels.linear import Weight
from flatout.ops.packing import packed
from flatout.ops.scales import NarrowLinear, Slot


@triton.jit
def _pack(
    part_ptr, packed_ptr, sums_ptr, narrow_ptr, scale_ptr, seen_ptr, top, rows, positions, part_columns, columns, first,
    share, stride_b, stride_h, stride_t,
    SIZE: tl.constexpr, COPY: tl.constexpr, HAS_SUMS: tl.constexpr, NARROW: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < part_columns
    source = (column // SIZE) * stride_h + column % SIZE
    total = tl.zeros((ROWS, BLOCK), tl.float32)  # rows are added up once, at the end
    scale = tl.load(scale_ptr) if NARROW else 1.0
    highest = tl.zeros((ROWS, BLOCK), tl.float32)
    end = tl.minimum(program * share + share, rows)
    for start in tl.range(program * share, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        origin = (row // positions).to(tl.int64) * stride_b + (row % positions).to(tl.int64) * stride_t
        value = tl.load(part_ptr + origin[:, None] + source[None, :], mask, 0.0)
        place = row.to(tl.int64)[:, None] * columns + first + column[None, :]
        if COPY:
            tl.store(packed_ptr + place, value, mask)
        if NARROW:
            store_narrow(narrow_ptr, place, value, scale, top, mask)
        if RECORD:
            highest = tl.maximum(highest, tl.abs(value.to(tl.float32)))
        if HAS_SUMS:
            total += value.to(tl.float32)
    if RECORD:
        record(seen_ptr, highest)
    if HAS_SUMS:
        tl.store(sums_ptr + program.to(tl.int64) * columns + first + column, tl.sum(total, 0), inside)


# Rows at once, columns in a block, warps, programs per multiprocessor, stages; measured on an H200.
_SIZES = (2, 1024, 4, 24, 1)
_PACKED_SIZES = (4, 256, 1, 32, 1)  # where nothing is copied


def pack_heads(parts: list[Tensor], *, sums: bool, slot: Slot | None = None) -> tuple[Tensor, Tensor | None]:
    """[B, heads, T, D] gradients side by side as [B·T, C], and their column sums when asked for.

    `slot` gets the packed gradients in 8 bits too.
    """
    batch, _, positions, size = parts[0].shape
    rows, columns = batch * positions, sum(part.shape[1] for part in parts) * size
    device = parts[0].device
    whole = packed([part.transpose(1, 2) for part in parts])
    if whole is None:
        out = torch.empty(rows, columns, dtype=parts[0].dtype, device=device)
    else:
        out, parts = whole.view(rows, columns), [whole.transpose(1, 2)]
        if not sums and slot is None:
            return out, None
    at_once, block, warps, many, stages = _SIZES if whole is None else _PACKED_SIZES
    strips = triton.cdiv(columns, block)
    programs = max(1, min(triton.cdiv(rows, at_once), triton.cdiv(many * multiprocessors(device), strips)))
    share = triton.cdiv(triton.cdiv(rows, programs), at_once) * at_once
    partial = torch.empty(programs, columns, dtype=torch.float32, device=device) if sums else None
    rounding = rounding_of(slot, out.shape, device)
    first = 0
    for part in parts:
        if part.stride(3) != 1:
            part = part.contiguous()
        width = part.shape[1] * size
        _pack[(programs, triton.cdiv(width, block))](
            part, out, partial, *rounding.pointers, rows, positions, width, columns, first, share, part.stride(0),
            part.stride(1), part.stride(2), SIZE=size, COPY=whole is None, HAS_SUMS=sums, NARROW=rounding.narrow,
            RECORD=rounding.record, ROWS=at_once, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        first += width
    rounding.hand_over(out)
    return out, None if partial is None else fold(partial)


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, bias, heads, groups, narrow, tuned, gates, counts):
        batch, positions, width = h.shape
        ctx.weight, ctx.has_bias, ctx.tuned = Weight(weight, narrow), bias is not None, tuned
        packed = ctx.weight.forward(h, bias, tuned=tuned)
        size = weight.shape[0] // (heads + 2 * groups)
        all_heads = packed.view(batch, positions, heads + 2 * groups, size).transpose(1, 2)
        parts = all_heads[:, :heads], all_heads[:, heads : heads + groups], all_heads[:, heads + groups :]
        made = None if gates is None else make_gates(h.reshape(-1, width), gates)
        ctx.save_for_backward(h, gates, made)
        if made is None:
            return *parts, None, None
        for_values, for_heads = made.view(batch, positions, -1).split(counts, dim=-1)
        return *parts, for_values if counts[0] else None, for_heads if counts[1] else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, dvalues, dheads):
        h, gates, made = ctx.saved_tensors
        narrow = ctx.weight.narrow
        packed, dbias = pack_heads([dq, dk, dv], sums=ctx.has_bias, slot=None if narrow is None else narrow.dy)
        dh = ctx.weight.input_gradient(packed, tuned=ctx.tuned).view(h.shape) if ctx.needs_input_grad[0] else None
        dweight = ctx.weight.gradient(packed, h, tuned=ctx.tuned) if ctx.needs_input_grad[1] else None
        dgates = None
        if made is not None:
            assert dh is not None, "gates are trained, and so is what their input comes from"
            flat = [None if d is None else d.flatten(0, 1).contiguous() for d in (dvalues, dheads)]
            dgates = gates_back(*flat, made, h.reshape(len(made), -1), gates, dh.view(len(made), -1)).to(gates.dtype)
        return dh, dweight, dbias, *([None] * 4), dgates, None


def project_heads(
    h_BTW: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    heads: int,
    groups: int,
    narrow: NarrowLinear | None = None,
    tuned: bool = False,
    gates: Tensor | None = None,
    counts: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries [B, H, T, D], keys and values [B, G, T, D], as views of one product; gates of values and of heads [B, T].

    `counts` says how many of the rows of `gates` are for values, and how many for heads.
    """
    return _ProjectHeads.apply(h_BTW, weight_CW, bias_C, heads, groups, narrow, tuned, gates, counts)  # pyright: ignore
