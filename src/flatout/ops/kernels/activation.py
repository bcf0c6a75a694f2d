"""The MLP's non-linearity with its bias, forward and backward, and the down-projection that follows it.

    g = act(pre + bias)          gelu (tanh form), relu², or silu(gate)·value with pre = [gate, value]

Backward computes the gradient of `pre`, the column sums (the gradient of the bias), and g again if it was not saved, in
one pass. For 8-bit products the same passes also write g and the gradient of `pre` in 8 bits (ops/scales.py).

Shape legend: N rows (tokens), M hidden size, C columns of pre (M, or 2M for swiglu).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.cublaslt import multiply, multiply_gelu
from flatout.ops.kernels.fp8 import record, rounding_of, store_narrow
from flatout.ops.kernels.launch import fold, multiprocessors, share_of
from flatout.ops.kernels.linear import LinearProduct, Weight
from flatout.ops.scales import NarrowLinear, Slot

GELU, RELU2, SWIGLU = 0, 1, 2
KINDS = {"gelu": GELU, "relu2": RELU2, "swiglu": SWIGLU}


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _forward(
    pre_ptr, bias_ptr, out_ptr, narrow_ptr, scale_ptr, seen_ptr, top, rows, hidden, columns, out_stride,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(pre_ptr + place, mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)[None, :]
    if KIND == 0:
        y = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == 1:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        value = tl.load(pre_ptr + place + hidden, mask, 0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias_ptr + hidden + column, inside, 0.0).to(tl.float32)[None, :]
        y = x * tl.sigmoid(x) * value
    out = row.to(tl.int64)[:, None] * hidden + column[None, :]
    stored = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :], stored, mask)
    if NARROW:
        store_narrow(narrow_ptr, out, stored, tl.load(scale_ptr), top, mask)
    if RECORD:
        record(seen_ptr, tl.where(mask, tl.abs(stored.to(tl.float32)), 0.0))


@triton.jit
def _backward(
    dout_ptr, pre_ptr, bias_ptr, dpre_ptr, out_ptr, sums_ptr, narrow_ptr, scale_ptr, seen_ptr, top, rows, hidden,
    columns, share, dpre_stride,
    HAS_BIAS: tl.constexpr, HAS_SUMS: tl.constexpr, ADDED: tl.constexpr, KIND: tl.constexpr, AGAIN: tl.constexpr,
    NARROW: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    first_sum = tl.zeros((ROWS, BLOCK), tl.float32)  # rows are added up once, at the end
    second_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    scale = tl.load(scale_ptr) if NARROW else 1.0
    highest = tl.zeros((ROWS, BLOCK), tl.float32)
    first_bias = tl.zeros((1, BLOCK), tl.float32)
    second_bias = tl.zeros((1, BLOCK), tl.float32)
    if HAS_BIAS and not ADDED:
        first_bias += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)[None, :]
        if KIND == 2:
            second_bias += tl.load(bias_ptr + hidden + column, inside, 0.0).to(tl.float32)[None, :]
    end = tl.minimum(program * share + share, rows)
    for start in tl.range(program * share, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        out = row.to(tl.int64)[:, None] * hidden + column[None, :]
        dy = tl.load(dout_ptr + out, mask, 0.0).to(tl.float32)
        x = tl.load(pre_ptr + place, mask, 0.0).to(tl.float32) + first_bias
        if KIND == 0:
            t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
            y = 0.5 * x * (1.0 + t)
            inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
            dx = dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
        elif KIND == 1:
            y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
            dx = dy * 2.0 * tl.maximum(x, 0.0)
        else:
            value = tl.load(pre_ptr + place + hidden, mask, 0.0).to(tl.float32) + second_bias
            s = tl.sigmoid(x)
            y = x * s * value
            dvalue = dy * x * s
            dx = dy * value * s * (1.0 + x * (1.0 - s))
            second = dvalue.to(dpre_ptr.dtype.element_ty)
            tl.store(dpre_ptr + row.to(tl.int64)[:, None] * dpre_stride + hidden + column[None, :], second, mask)
            if NARROW:
                store_narrow(narrow_ptr, place + hidden, second, scale, top, mask)
            if RECORD:
                highest = tl.maximum(highest, tl.where(mask, tl.abs(second.to(tl.float32)), 0.0))
            if HAS_SUMS:
                second_sum += tl.where(mask, dvalue, 0.0)
        first = dx.to(dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + row.to(tl.int64)[:, None] * dpre_stride + column[None, :], first, mask)
        if NARROW:
            store_narrow(narrow_ptr, place, first, scale, top, mask)
        if RECORD:
            highest = tl.maximum(highest, tl.where(mask, tl.abs(first.to(tl.float32)), 0.0))
        if AGAIN:
            tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask)
        if HAS_SUMS:
            first_sum += tl.where(mask, dx, 0.0)
    if RECORD:
        record(seen_ptr, highest)
    if HAS_SUMS:
        tl.store(sums_ptr + program.to(tl.int64) * columns + column, tl.sum(first_sum, 0), inside)
        if KIND == 2:
            tl.store(sums_ptr + program.to(tl.int64) * columns + hidden + column, tl.sum(second_sum, 0), inside)


# Measured on an H200: forward in tiles, backward with one row per warp, so that no warp waits for another.
_ROWS, _BLOCK, _WARPS = 4, 512, 4
_ROWS_BACK, _BLOCK_BACK, _WARPS_BACK, _PROGRAMS_BACK, _STAGES_BACK = 1, 256, 1, 16, 4


def _sizes(pre: Tensor, kind: int) -> tuple[int, int, int]:
    columns = pre.shape[-1]
    return pre.numel() // columns, columns // 2 if kind == SWIGLU else columns, columns


def activate(
    pre: Tensor, bias: Tensor | None, kind: int, slot: Slot | None = None, out: Tensor | None = None
) -> Tensor:
    """act(pre + bias), written to `out` if given, whose rows may be strided; `slot` gets it in 8 bits too."""
    rows, hidden, columns = _sizes(pre, kind)
    if out is None:
        out = torch.empty((*pre.shape[:-1], hidden), dtype=pre.dtype, device=pre.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(hidden, _BLOCK))
    rounding = rounding_of(slot, out.shape, out.device)
    _forward[grid](
        pre, bias, out, *rounding.pointers, rows, hidden, columns, out.stride(-2), HAS_BIAS=bias is not None, KIND=kind,
        NARROW=rounding.narrow, RECORD=rounding.record, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    rounding.hand_over(out)
    return out


def activate_backward(
    dout: Tensor,
    pre: Tensor,
    bias: Tensor | None,
    kind: int,
    *,
    again: bool,
    added: bool = False,
    slot: Slot | None = None,
    frozen: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of pre, gradient of bias, the activation if `again`); `added`: pre includes the bias.

    `slot` gets the gradient of pre in 8 bits too. `frozen`: rows of pre may be strided, a bias has no gradient, and the
    activation overwrites `dout`. `into`: where to write the gradient of pre, in rows that may be strided; it may be
    `pre` itself.
    """
    rows, hidden, columns = _sizes(pre, kind)
    dpre = torch.empty_like(pre) if into is None else into
    out = None if not again else dout if frozen else torch.empty_like(dout)
    strips = triton.cdiv(hidden, _BLOCK_BACK)
    wanted = triton.cdiv(_PROGRAMS_BACK * multiprocessors(pre.device), strips)
    programs = max(1, min(triton.cdiv(rows, _ROWS_BACK), wanted))
    share = share_of(rows, programs, _ROWS_BACK)
    has_sums = bias is not None and not frozen
    columns = pre.stride(-2) if frozen else columns
    sums = torch.empty(programs, columns, dtype=torch.float32, device=pre.device) if has_sums else None
    rounding = rounding_of(slot, dpre.shape, dpre.device)
    _backward[(programs, strips)](
        dout, pre, bias, dpre, out, sums, *rounding.pointers, rows, hidden, columns, share, dpre.stride(-2),
        HAS_BIAS=bias is not None, HAS_SUMS=has_sums, ADDED=added, KIND=kind, AGAIN=again, NARROW=rounding.narrow,
        RECORD=rounding.record, ROWS=_ROWS_BACK, BLOCK=_BLOCK_BACK, STAGES=_STAGES_BACK, num_warps=_WARPS_BACK,
    )  # fmt: skip
    rounding.hand_over(dpre)
    return dpre, None if sums is None else fold(sums), out


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pre, bias, weight, kind, keep, narrow, slot, tuned, active):
        pre = pre.contiguous()
        ctx.added = active is not None
        if active is None:
            active = activate(pre, bias, kind, None if narrow is None else narrow.x)
        ctx.save_for_backward(pre, bias, active if keep else None)
        ctx.kind, ctx.slot, ctx.weight, ctx.tuned = kind, slot, Weight(weight, narrow), tuned
        return ctx.weight.forward(active, tuned=tuned)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        pre, bias, active = ctx.saved_tensors
        dy = dy.contiguous()
        dactive = ctx.weight.input_gradient(dy, tuned=ctx.tuned)
        dpre, dbias, again = activate_backward(
            dactive, pre, bias, ctx.kind, again=active is None, added=ctx.added, slot=ctx.slot
        )
        del dactive
        dweight = None
        if ctx.needs_input_grad[2]:
            dweight = ctx.weight.gradient(dy, active if again is None else again, tuned=ctx.tuned)
        return dpre, dbias, dweight, *([None] * 6)


def activated_linear(
    pre: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    *,
    kind: str,
    keep: bool,
    narrow: NarrowLinear | None = None,
    slot: Slot | None = None,
    tuned: bool = False,
    active: Tensor | None = None,
) -> Tensor:
    """act(pre + bias) @ weight.T. `keep`: save the activation for backward instead of recomputing it.

    `active`: the activation, if the previous product has computed it; `pre` then includes the bias. `slot` gets the
    gradient of pre in 8 bits too.
    """
    return _ActivatedLinear.apply(pre, bias, weight, KINDS[kind], keep, narrow, slot, tuned, active)  # pyright: ignore


class _LinearGelu(LinearProduct):
    """Backward is that of the product only: `activated_linear` differentiates the bias and gelu."""

    @staticmethod
    def forward(ctx, x, weight, narrow, bias):  # pyright: ignore
        ctx.save_for_backward(x)
        ctx.weight, ctx.tuned = Weight(weight, narrow), True
        wide, narrow_bias = ctx.weight.wide(x.dtype), bias.to(x.dtype)
        flat = x.reshape(-1, x.shape[-1])

        def in_two_passes() -> Tensor:
            return activate(multiply(flat, wide.t()), bias, GELU)

        with torch.autocast(x.device.type, enabled=False):
            both = multiply_gelu(flat, wide.t(), narrow_bias, in_two_passes)
            pre, active = both if both is not None else (multiply(flat, wide.t()), None)
        shape = (*x.shape[:-1], weight.shape[0])
        if active is None:
            return pre.view(shape), None
        active = active.view(shape)
        ctx.mark_non_differentiable(active)
        ctx.set_materialize_grads(False)  # otherwise autograd would make a tensor of zeros for it
        return pre.view(shape), active


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, narrow: NarrowLinear | None = None
) -> tuple[Tensor, Tensor | None]:
    """(pre, active) for `activated_linear`: x @ weight.T + bias and its gelu, if one kernel can compute both.

    Otherwise (x @ weight.T without the bias, None). `activated_linear` computes the gradient of the bias.
    """
    return _LinearGelu.apply(x, weight, narrow, bias)  # pyright: ignore
