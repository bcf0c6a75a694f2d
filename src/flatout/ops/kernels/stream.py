"""The residual stream: its first values, dropout, and residual addition with normalisation, one pass over memory each.

    x[b, t] = table[tokens[b, t]] + positions[t]            (added in fp32, stored in the precision of the stream)
    x_new = x + dropout(branch + branch_bias) * scale       (in the precision of the stream)
    x_new = mix[0] * x_new + mix[1] * first                 (where the first stream is mixed in)
    h     = norm(x_new)                                     (in the precision of the products)

Norm: the gradients of the branch's bias, of the scale and of the norm's weights are column sums, computed in the same
backward pass. 8-bit copies of h and of the branch's gradient are written there too (ops/scales.py). Statistics are in
fp32, of x_new as stored. Kept for backward: the branch if it has a learned scale; nothing for dropout; with a mix the
stream before it, because the gradient of mix[0] needs it and mix[0] may be too small to divide by. Under frozen weights
(ops/kernels/frozen.py) nothing is summed; rows of h and of the gradient may be wider, with room for a low-rank product,
and backward can write h again.

Embedding: backward reads the gradient once. A program walks through the batch at one position, sums the gradient of
that position and adds each row to its token's row in fp32. Atomic additions come in any order, so the result repeats
only up to rounding; deterministic runs use torch's sorting path.

Dropout: whether a value is kept follows from a seed on the device and the value's index, so no mask is stored:
backward and recomputation find the same numbers. The seed is a tensor, so a replayed CUDA graph that draws it anew
drops other values.

First stream: every block has a gradient for it. Through autograd each would be a tensor of its own and one more
addition. Here each block adds to what later blocks have left, and `begin`, whose backward comes last, takes the sum.

Trap: a token id outside the table gives NaN, which training reports, and no gradient. It never reads other memory.

Shape legend: B batch, T positions, N = B·T rows, W width, V vocabulary, P programs that each sum a share of the rows.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.gradients import accumulated, for_autograd, gradient_type
from flatout.ops.kernels.fp8 import record, rounding_of, store_narrow
from flatout.ops.kernels.launch import columns_of, fold, programs_for
from flatout.ops.scales import Slot


@triton.jit
def kept(seed, place, rate):
    """1/(1 - rate) for kept values, 0 for dropped ones. Seven rounds pass all statistical tests of randomness."""
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
    """Dropout: drops a share `rate` of x and scales up the rest. `seed` is an int64 on the device."""
    return _Dropout.apply(x, seed, rate)  # pyright: ignore


@triton.jit
def _embed(
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
def _embed_back(
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
        _embed[(triton.cdiv(batch * length, at_once),)](
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
            # From the second micro-batch on, add to the existing gradient.
            dtable = accumulated(ctx.table) if wants_table else None
            if dtable is None or dtable.dtype != torch.float32 or not dtable.is_contiguous():
                dtable = torch.zeros(ctx.vocab if wants_table else 0, width, dtype=torch.float32, device=dx.device)
            dpositions = torch.empty(length if wants_positions else 0, width, dtype=torch.float32, device=dx.device)
            block, at_once = min(256, triton.next_power_of_2(width)), 4
            _embed_back[(length, triton.cdiv(width, block))](
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
    """table[tokens] + positions as [B, T, W] in `dtype`. `positions_TW` has exactly T rows."""
    assert positions_TW is None or positions_TW.shape[0] == tokens_BT.shape[1]
    return _Embed.apply(tokens_BT, table_VW, positions_TW, dtype)  # pyright: ignore


class First:
    """The first stream [B, T, W] and its gradient, as accumulated so far in this backward pass.

    Not a dataclass, because FSDP would pass copies of it to the blocks.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.gradient: Tensor | None = None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first):
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        gradient, ctx.first.gradient = ctx.first.gradient, None
        return dx if gradient is None else dx + gradient, None


def begin(x: Tensor) -> tuple[Tensor, First]:
    """(x, the first stream for `add_norm`). Only streams computed from the returned x may mix it in."""
    first = First(x.detach().contiguous())
    return _Begin.apply(x, first), first  # pyright: ignore


@triton.jit
def _by_column(ptr, column, inside):
    """One value per column, as a row."""
    return tl.load(ptr + column, inside, 0.0).to(tl.float32)[None, :]


@triton.jit
def _forward(
    x_ptr, branch_ptr, branch_bias_ptr, weight_ptr, bias_ptr, x_new_ptr, h_ptr, mean_ptr, rstd_ptr,
    branch_scale_ptr, seed_ptr, first_ptr, mix_ptr, before_ptr, narrow_ptr, scale_ptr, seen_ptr, top, rows, width,
    h_stride, eps, rate,
    HAS_BRANCH: tl.constexpr, HAS_BRANCH_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr,
    SCALED: tl.constexpr, DROPPED: tl.constexpr, MIXED: tl.constexpr, NARROW: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + place, mask, 0.0).to(tl.float32)
        if SCALED or DROPPED:
            if HAS_BRANCH_BIAS:
                branch += _by_column(branch_bias_ptr, column, inside)
            if DROPPED:
                branch *= kept(tl.load(seed_ptr), place, rate)
            if SCALED:
                branch *= _by_column(branch_scale_ptr, column, inside)
            x += branch
        else:
            x += branch
            if HAS_BRANCH_BIAS:
                x += _by_column(branch_bias_ptr, column, inside)
    if MIXED:
        if HAS_BRANCH:
            tl.store(before_ptr + place, x.to(before_ptr.dtype.element_ty), mask)
        x = tl.load(mix_ptr) * x + tl.load(mix_ptr + 1) * tl.load(first_ptr + place, mask, 0.0).to(tl.float32)
    if HAS_BRANCH or MIXED:
        stored = x.to(x_new_ptr.dtype.element_ty)
        tl.store(x_new_ptr + place, stored, mask)
        x = stored.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / width
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, row < rows)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr + row, rstd, row < rows)
    h = x * rstd[:, None]
    if weight_ptr is not None:
        h *= _by_column(weight_ptr, column, inside)
    if HAS_BIAS:
        h += _by_column(bias_ptr, column, inside)
    stored_h = h.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row.to(tl.int64)[:, None] * h_stride + column[None, :], stored_h, mask)
    if NARROW:
        store_narrow(narrow_ptr, place, stored_h, tl.load(scale_ptr), top, mask)
    if RECORD:
        record(seen_ptr, tl.where(mask, tl.abs(stored_h.to(tl.float32)), 0.0))


@triton.jit
def _through_norm(dh, x, rstd, width, CENTRED: tl.constexpr):
    """The gradient of the norm's input; x is the norm's output before weight and bias."""
    dx = dh - x * (tl.sum(dh * x, 1) / width)[:, None]
    if CENTRED:
        dx -= (tl.sum(dh, 1) / width)[:, None]
    return dx * rstd


@triton.jit
def _store_first(dfirst_ptr, place, dfirst, mask, ADD: tl.constexpr):
    """Stores the gradient of the first stream, or adds it to that of later blocks."""
    if ADD:
        dfirst += tl.load(dfirst_ptr + place, mask, 0.0).to(tl.float32)
    tl.store(dfirst_ptr + place, dfirst.to(dfirst_ptr.dtype.element_ty), mask)


@triton.jit
def _store_sums(sums_ptr, width, inside, weight_sum, bias_sum, branch_sum, scale_sum, SCALED: tl.constexpr):
    """Stores all sums, zeros for those not computed: all are folded, and uninitialised memory may hold NaN."""
    tl.store(sums_ptr, tl.sum(weight_sum, 0), inside)
    tl.store(sums_ptr + width, tl.sum(bias_sum, 0), inside)
    tl.store(sums_ptr + 2 * width, tl.sum(branch_sum, 0), inside)
    if SCALED:
        tl.store(sums_ptr + 3 * width, tl.sum(scale_sum, 0), inside)


@triton.jit
def _backward(
    dx_new_ptr, dh_ptr, x_new_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr, h_ptr, sums_ptr,
    branch_ptr, branch_bias_ptr, branch_scale_ptr, seed_ptr, first_ptr, mix_ptr, dfirst_ptr, mix_sums_ptr,
    narrow_ptr, scale_ptr, seen_ptr, top, rows, width, share, dx_new_stride, dx_stride, dbranch_stride, rate,
    HAS_DX: tl.constexpr, OWN_BRANCH: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_BRANCH_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, AGAIN: tl.constexpr, SCALED: tl.constexpr, DROPPED: tl.constexpr,
    MIXED: tl.constexpr, ADD_FIRST: tl.constexpr,
    NARROW: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if weight_ptr is not None:
        weight = _by_column(weight_ptr, column, inside)
    # Sums stay apart by row until the end: adding rows up crosses warps, which is too dear inside the loop.
    zeros = tl.zeros((ROWS, BLOCK), tl.float32)
    weight_sum, bias_sum, branch_sum, scale_sum = zeros, zeros, zeros, zeros
    before_sum, first_sum = zeros, zeros
    if SCALED:
        branch_scale = _by_column(branch_scale_ptr, column, inside)
    if MIXED:
        of_before, of_first = tl.load(mix_ptr), tl.load(mix_ptr + 1)
    scale = tl.load(scale_ptr) if NARROW else 1.0
    highest = tl.zeros((ROWS,), tl.float32)  # by row: a fourth array of this width would not fit into registers
    end = tl.minimum(program * share + share, rows)
    for start in tl.range(program * share, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        alive = row < end
        mask = alive[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None]
        place = at * width + column[None, :]
        dh = tl.load(dh_ptr + place, mask, 0.0).to(tl.float32)
        x = tl.load(x_new_ptr + place, mask, 0.0).to(tl.float32)
        if MIXED:  # it was not x_new yet
            before, first = x, tl.load(first_ptr + place, mask, 0.0).to(tl.float32)
            x = (of_before * before + of_first * first).to(x_new_ptr.dtype.element_ty).to(tl.float32)
        dx_new = tl.load(dx_new_ptr + at * dx_new_stride + column[None, :], mask, 0.0) if HAS_DX else None
        rstd = tl.load(rstd_ptr + row, alive, 0.0)[:, None]
        if CENTRED:
            x = tl.where(mask, x - tl.load(mean_ptr + row, alive, 0.0)[:, None], 0.0)
        x *= rstd
        if HAS_SUMS:
            if weight_ptr is not None:
                weight_sum += dh * x
            if HAS_BIAS:
                bias_sum += dh
        if AGAIN:
            h = x * weight if weight_ptr is not None else x
            if HAS_BIAS:
                h += _by_column(bias_ptr, column, inside)
            tl.store(h_ptr + place, h.to(h_ptr.dtype.element_ty), mask)
        if weight_ptr is not None:
            dh *= weight
        dx = _through_norm(dh, x, rstd, width, CENTRED)
        if HAS_DX:
            dx += dx_new.to(tl.float32)
        if MIXED:
            before_sum += dx * before
            first_sum += dx * first
            _store_first(dfirst_ptr, place, dx * of_first, mask, ADD_FIRST)
            dx *= of_before
        tl.store(dx_ptr + at * dx_stride + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask)
        if DROPPED:  # from here on it is the gradient of the branch
            dx *= kept(tl.load(seed_ptr), place, rate)
        if SCALED:
            branch = tl.load(branch_ptr + place, mask, 0.0).to(tl.float32)
            if branch_bias_ptr is not None:
                branch += _by_column(branch_bias_ptr, column, inside)
            scale_sum += tl.where(mask, dx * branch, 0.0)
            dx *= branch_scale
        if OWN_BRANCH:
            branch_place = at * dbranch_stride + column[None, :]
            tl.store(dbranch_ptr + branch_place, dx.to(dbranch_ptr.dtype.element_ty), mask)
        if NARROW or RECORD:  # of the branch's gradient, which is stored in dbranch's type in either case
            stored = dx.to(dbranch_ptr.dtype.element_ty)
            if NARROW:
                store_narrow(narrow_ptr, place, stored, scale, top, mask)
            if RECORD:
                highest = tl.maximum(highest, tl.max(tl.where(mask, tl.abs(stored.to(tl.float32)), 0.0), 1))
        if HAS_BRANCH_BIAS:
            branch_sum += tl.where(mask, dx, 0.0)
    if RECORD:
        record(seen_ptr, highest)
    if MIXED:
        tl.store(mix_sums_ptr + 2 * program, tl.sum(before_sum))
        tl.store(mix_sums_ptr + 2 * program + 1, tl.sum(first_sum))
    if HAS_SUMS:
        place = program.to(tl.int64) * (4 if SCALED else 3) * width + column
        _store_sums(sums_ptr + place, width, inside, weight_sum, bias_sum, branch_sum, scale_sum, SCALED)


_IN_FLIGHT = 64 * 1024  # bytes of rows that a program prefetches into shared memory; a small GPU has 99 KiB


def _sizes_back(width: int, *read: Tensor | None) -> tuple[int, int, int]:
    """(columns in a block, warps, stages): rows one by one, with the next ones prefetched.

    On an H200: 103 us for 65,536 rows of 768 columns, 135 us without prefetching; the memory traffic alone takes 94 us.
    """
    block = int(triton.next_power_of_2(width))
    row_bytes = block * sum(tensor.element_size() for tensor in read if tensor is not None)
    return block, max(1, min(16, block // 512)), max(1, min(6, 1 + _IN_FLIGHT // row_bytes))


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, branch, branch_bias, weight, bias, scale, seed, rate, centred, eps, dtype, slot, branch_slot, mix, first
    ):  # fmt: skip
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        branch = None if branch is None else branch.contiguous()
        own = branch is not None or mix is not None
        x_new = torch.empty_like(x) if own else x
        before = x_new if mix is None else x if branch is None else torch.empty_like(x)
        values = None if first is None else first.values
        h = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean = torch.empty(rows if centred else 0, dtype=torch.float32, device=x.device)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        block, at_once, warps = columns_of(width)
        rounding = rounding_of(slot, h.shape, h.device)
        _forward[(triton.cdiv(rows, at_once),)](
            x, branch, branch_bias, weight, bias, x_new, h, mean, rstd, scale, seed, values, mix, before,
            *rounding.pointers, rows, width, width, eps, rate, HAS_BRANCH=branch is not None,
            HAS_BRANCH_BIAS=branch_bias is not None, HAS_BIAS=bias is not None,
            CENTRED=centred, SCALED=scale is not None, DROPPED=rate > 0.0, MIXED=mix is not None,
            NARROW=rounding.narrow, RECORD=rounding.record, ROWS=at_once, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        rounding.hand_over(h)
        scaled = (None, None, None) if scale is None else (branch, branch_bias, scale)
        ctx.save_for_backward(before, weight, mean, rstd, seed, mix, *scaled)
        ctx.rate, ctx.first = rate, first
        ctx.centred, ctx.has_bias = centred, bias is not None
        ctx.has_sums = any(ctx.needs_input_grad[2:6])
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.branch_bias = branch_bias is not None
        ctx.branch_slot = None if branch is None else branch_slot
        ctx.set_materialize_grads(False)
        return x_new if own else x_new.view_as(x_new), h

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_new, dh):
        x_new, weight, mean, rstd, seed, mix, branch, branch_bias, scale = ctx.saved_tensors
        values, added = (None, None) if mix is None else (ctx.first.values, ctx.first.gradient)
        width = x_new.shape[-1]
        rows, plain = rstd.numel(), scale is None and ctx.rate == 0.0 and mix is None
        if dh is None and not plain:
            dh = torch.zeros_like(x_new)
        if dh is None:  # the norm was not used
            dbranch = None if ctx.branch_dtype is None or dx_new is None else dx_new.to(ctx.branch_dtype)
            dbranch_bias = dx_new.sum(tuple(range(dx_new.ndim - 1))) if ctx.branch_bias and dx_new is not None else None
            return dx_new, dbranch, dbranch_bias, *([None] * 12)
        dh = dh.contiguous()
        dx_new = None if dx_new is None else dx_new.contiguous()
        dx = torch.empty_like(x_new)
        # Branch and stream share one gradient if they have the same type.
        own = ctx.branch_dtype is not None and (ctx.branch_dtype != dx.dtype or scale is not None or ctx.rate > 0.0)
        dbranch = torch.empty(dx.shape, dtype=ctx.branch_dtype, device=dx.device) if own else dx
        dfirst = torch.empty_like(dx) if mix is not None and added is None else added
        block, warps, stages = _sizes_back(width, dx_new, dh, x_new, values, added)
        programs = programs_for(rows, x_new.device)
        mix_sums = None if mix is None else torch.empty(programs, 2, dtype=torch.float32, device=dx.device)
        share = triton.cdiv(rows, programs)
        has_sums = ctx.has_sums
        kinds = 3 if scale is None else 4
        sums = torch.empty(programs if has_sums else 0, kinds, width, dtype=torch.float32, device=dx.device)
        rounding = rounding_of(ctx.branch_slot, dx.shape, dx.device)
        _backward[(programs,)](
            dx_new, dh, x_new, weight, None, mean, rstd, dx, dbranch, None, sums, branch, branch_bias, scale, seed,
            values, mix, dfirst, mix_sums, *rounding.pointers, rows, width, share, width, width, width, ctx.rate,
            HAS_DX=dx_new is not None, OWN_BRANCH=own, HAS_SUMS=has_sums,
            HAS_BRANCH_BIAS=ctx.branch_bias and has_sums, HAS_BIAS=ctx.has_bias, CENTRED=ctx.centred, AGAIN=False,
            SCALED=scale is not None, DROPPED=ctx.rate > 0.0, MIXED=mix is not None, ADD_FIRST=added is not None,
            NARROW=rounding.narrow, RECORD=rounding.record, ROWS=1, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        rounding.hand_over(dbranch)
        dmix = None
        if mix is not None and mix_sums is not None:
            ctx.first.gradient, dmix = dfirst, fold(mix_sums).to(mix.dtype)
        if not has_sums:  # frozen weights
            return dx, None if ctx.branch_dtype is None else dbranch, *([None] * 11), dmix, None
        totals = fold(sums)
        return (
            dx,
            None if ctx.branch_dtype is None else dbranch,
            totals[2] if ctx.branch_bias else None,
            None if weight is None else totals[0].to(weight.dtype),
            totals[1] if ctx.has_bias else None,
            None if scale is None else totals[3].to(scale.dtype),
            *([None] * 7),
            dmix,
            None,
        )


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    centred: bool,
    eps: float,
    dtype: torch.dtype,
    slot: Slot | None = None,
    branch_slot: Slot | None = None,
    scale: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    mix: Tensor | None = None,
    first: First | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + dropout(branch + branch_bias) * scale, its norm in `dtype`). `centred`: LayerNorm, otherwise RMSNorm.

    `slot` gets the norm in 8 bits too, `branch_slot` the gradient of the branch. `mix`: weights with which the sum and
    `first` are mixed before the norm.
    """
    if branch is None:
        scale, dropout, seed = None, 0.0, None
    how = (scale, seed, dropout, centred, eps, dtype, slot, branch_slot, mix, first)
    return _AddNorm.apply(x, branch, branch_bias, weight, bias, *how)  # pyright: ignore


# --- under frozen weights, one step at a time (ops/kernels/frozen.py) -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FrozenNorm:
    """A norm whose weights are frozen."""

    weight_W: Tensor | None
    bias_W: Tensor | None
    centred: bool
    eps: float

    def forward(
        self, x_NW: Tensor, branch_NW: Tensor | None, branch_bias_W: Tensor | None, out_NW: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x + branch + branch_bias, mean, rstd); `out_NW` takes the norm, and only its rows may be strided."""
        rows, width = x_NW.shape
        x_new_NW = x_NW if branch_NW is None else torch.empty_like(x_NW)
        mean_N = torch.empty(rows if self.centred else 0, dtype=torch.float32, device=x_NW.device)
        rstd_N = torch.empty(rows, dtype=torch.float32, device=x_NW.device)
        block, at_once, warps = columns_of(width)
        _forward[(triton.cdiv(rows, at_once),)](
            x_NW, branch_NW, branch_bias_W, self.weight_W, self.bias_W, x_new_NW, out_NW, mean_N, rstd_N, None,
            None, None, None, None, *rounding_of(None, x_NW.shape, x_NW.device).pointers, rows, width,
            out_NW.stride(0), self.eps, 0.0,
            HAS_BRANCH=branch_NW is not None, HAS_BRANCH_BIAS=branch_NW is not None and branch_bias_W is not None,
            HAS_BIAS=self.bias_W is not None, CENTRED=self.centred, SCALED=False, DROPPED=False, MIXED=False,
            NARROW=False, RECORD=False, ROWS=at_once, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return x_new_NW, mean_N, rstd_N

    def backward(
        self,
        dx_new_NW: Tensor | None,
        dh_NW: Tensor,
        x_new_NW: Tensor,
        mean_N: Tensor,
        rstd_N: Tensor,
        dbranch_NW: Tensor,
        again_NW: Tensor | None,
    ) -> Tensor:
        """Returns the stream's gradient and writes the branch's to `dbranch_NW`: one tensor if the types are equal.

        `again_NW` takes the recomputed norm. Rows of `dx_new_NW` and `dbranch_NW` may be strided.
        """
        rows, width = x_new_NW.shape
        own = dbranch_NW.dtype != x_new_NW.dtype
        dx_NW = torch.empty_like(x_new_NW) if own else dbranch_NW
        block, warps, stages = _sizes_back(width, dx_new_NW, dh_NW, x_new_NW)
        programs = programs_for(rows, x_new_NW.device)
        _backward[(programs,)](
            dx_new_NW, dh_NW, x_new_NW, self.weight_W, self.bias_W, mean_N, rstd_N, dx_NW, dbranch_NW, again_NW, None,
            *([None] * 8), *rounding_of(None, x_new_NW.shape, x_new_NW.device).pointers, rows, width,
            triton.cdiv(rows, programs),
            0 if dx_new_NW is None else dx_new_NW.stride(0), dx_NW.stride(0), dbranch_NW.stride(0),
            0.0, HAS_DX=dx_new_NW is not None, OWN_BRANCH=own, HAS_SUMS=False,
            HAS_BRANCH_BIAS=False, HAS_BIAS=self.bias_W is not None, CENTRED=self.centred,
            AGAIN=again_NW is not None, SCALED=False, DROPPED=False, MIXED=False, ADD_FIRST=False, NARROW=False,
            RECORD=False,
            ROWS=1, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return dx_NW
