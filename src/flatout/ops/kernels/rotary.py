"""RMS norm per head and rotary positions for queries and keys, one pass forward and one backward.

    n = x / sqrt(mean(x²) + eps) · weight · scale                        (if the model norms queries and keys)
    y = [n₁·cos − n₂·sin, n₁·sin + n₂·cos],  n = [n₁, n₂]                (if positions are rotary)

Queries and keys are read from the buffer of the fused projection and written as [B, T, heads, D], which attention takes
without a copy. Backward reads x again and recomputes its statistics, which is cheaper than saving them. Intermediate
values are fp32; torch's form rounds between norm and rotation, so the two differ by one rounding. Norms may have no
weights; both norms of a model have the same scale.

Values are returned unchanged. The gradients of queries, keys and values are written side by side in one buffer, so that
the projection's backward pass (ops/kernels/heads.py) need not copy them.

Trap: inputs are strided views; only the last axis has to be dense.

`turn_packed` and `turn_back_packed` do the same for blocks with frozen weights (ops/kernels/frozen.py); a rotation
without norms is done in place.

Shape legend: B batch, T positions, H query heads, G key/value heads, D head size, A = H + 2G heads in all, S shares of
rows, N = B·T.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.launch import dense, multiprocessors, share_of, strides

HeadWeights = tuple[Tensor | None, Tensor | None]  # of the norms of queries and keys, which may have none


@triton.jit
def _turn(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, head, out_stride, row, alive, positions, stride_b, stride_h, stride_t,
    eps, scale, SIZE: tl.constexpr, HAS_NORM: tl.constexpr, WEIGHTED: tl.constexpr, HAS_ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = (SIZE + 1) // 2
    column = tl.arange(0, BLOCK)
    in_first, in_second = column < half, column + half < SIZE
    first_mask = alive[:, None] & in_first[None, :]
    second_mask = alive[:, None] & in_second[None, :]
    origin = (row // positions).to(tl.int64) * stride_b + (row % positions).to(tl.int64) * stride_t + head * stride_h
    place = origin[:, None] + column[None, :]
    first = tl.load(x_ptr + place, first_mask, 0.0).to(tl.float32)
    second = tl.load(x_ptr + place + half, second_mask, 0.0).to(tl.float32)
    if HAS_NORM:
        rstd = (scale / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps))[:, None]
        if WEIGHTED:
            first *= rstd * tl.load(weight_ptr + column, in_first, 0.0).to(tl.float32)[None, :]
            second *= rstd * tl.load(weight_ptr + half + column, in_second, 0.0).to(tl.float32)[None, :]
        else:
            first *= rstd
            second *= rstd
    if HAS_ROPE:
        angle = (row % positions)[:, None] * half + column[None, :]
        cos = tl.load(cos_ptr + angle, first_mask, 0.0)
        sin = tl.load(sin_ptr + angle, first_mask, 0.0)
        turned = first * cos - second * sin
        second = first * sin + second * cos
        first = turned
    out = (row.to(tl.int64) * out_stride + head * SIZE)[:, None] + column[None, :]
    tl.store(y_ptr + out, first.to(y_ptr.dtype.element_ty), first_mask)
    tl.store(y_ptr + out + half, second.to(y_ptr.dtype.element_ty), second_mask)


@triton.jit
def _forward(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, rows, positions, heads, groups,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, q_out_stride, k_out_stride, eps, scale,
    SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_WEIGHTED: tl.constexpr, K_WEIGHTED: tl.constexpr,
    HAS_ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs take neighbouring heads of the same rows, so they read contiguous memory.
    head = tl.program_id(0) % (heads + groups)
    row = tl.program_id(0) // (heads + groups) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    if head < heads:
        _turn(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, head, q_out_stride, row, alive, positions, q_stride_b,
            q_stride_h, q_stride_t, eps, scale, SIZE, Q_NORM, Q_WEIGHTED, HAS_ROPE, BLOCK,
        )  # fmt: skip
    else:
        _turn(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, head - heads, k_out_stride, row, alive, positions,
            k_stride_b, k_stride_h, k_stride_t, eps, scale, SIZE, K_NORM, K_WEIGHTED, HAS_ROPE, BLOCK,
        )  # fmt: skip


@triton.jit
def _turn_back(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, sums_ptr, head, out_stride, start, end, positions,
    dy_stride_b, dy_stride_h, dy_stride_t, stride_b, stride_h, stride_t, eps, scale,
    SIZE: tl.constexpr, HAS_NORM: tl.constexpr, WEIGHTED: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_ROPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = (SIZE + 1) // 2
    column = tl.arange(0, BLOCK)
    in_first, in_second = column < half, column + half < SIZE
    first_sum = tl.zeros((ROWS, BLOCK), tl.float32)  # rows are added up once, at the end
    second_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(start, end, ROWS):
        row = at + tl.arange(0, ROWS)
        alive = row < end
        first_mask = alive[:, None] & in_first[None, :]
        second_mask = alive[:, None] & in_second[None, :]
        batch, position = (row // positions).to(tl.int64), row % positions
        origin = batch * dy_stride_b + position.to(tl.int64) * dy_stride_t + head * dy_stride_h
        place = origin[:, None] + column[None, :]
        first = tl.load(dy_ptr + place, first_mask, 0.0).to(tl.float32)
        second = tl.load(dy_ptr + place + half, second_mask, 0.0).to(tl.float32)
        if HAS_ROPE:
            angle = position[:, None] * half + column[None, :]
            cos = tl.load(cos_ptr + angle, first_mask, 0.0)
            sin = tl.load(sin_ptr + angle, first_mask, 0.0)
            turned = first * cos + second * sin
            second = second * cos - first * sin
            first = turned
        if HAS_NORM:
            origin = batch * stride_b + position.to(tl.int64) * stride_t + head * stride_h
            place = origin[:, None] + column[None, :]
            x_first = tl.load(x_ptr + place, first_mask, 0.0).to(tl.float32)
            x_second = tl.load(x_ptr + place + half, second_mask, 0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)
            rstd = (1.0 / tl.sqrt(squares / SIZE + eps))[:, None]
            x_first *= rstd
            x_second *= rstd
            first *= scale
            second *= scale
            if HAS_SUMS:
                first_sum += first * x_first
                second_sum += second * x_second
            if WEIGHTED:
                first *= tl.load(weight_ptr + column, in_first, 0.0).to(tl.float32)[None, :]
                second *= tl.load(weight_ptr + half + column, in_second, 0.0).to(tl.float32)[None, :]
            along = ((tl.sum(first * x_first, 1) + tl.sum(second * x_second, 1)) / SIZE)[:, None]
            first = (first - x_first * along) * rstd
            second = (second - x_second * along) * rstd
        out = (row.to(tl.int64) * out_stride + head * SIZE)[:, None] + column[None, :]
        tl.store(dx_ptr + out, first.to(dx_ptr.dtype.element_ty), first_mask)
        tl.store(dx_ptr + out + half, second.to(dx_ptr.dtype.element_ty), second_mask)
    if HAS_SUMS:
        tl.store(sums_ptr + column, tl.sum(first_sum, 0), in_first)
        tl.store(sums_ptr + half + column, tl.sum(second_sum, 0), in_second)


@triton.jit
def _backward(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, rows,
    positions, heads, groups, share, out_stride, dq_stride_b, dq_stride_h, dq_stride_t, dk_stride_b, dk_stride_h,
    dk_stride_t, dv_stride_b, dv_stride_h, dv_stride_t, q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h,
    k_stride_t, eps, scale,
    SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_WEIGHTED: tl.constexpr, K_WEIGHTED: tl.constexpr,
    HAS_SUMS: tl.constexpr, HAS_ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % (heads + 2 * groups)
    start = tl.program_id(0) // (heads + 2 * groups) * share
    end = tl.minimum(start + share, rows)
    sums_ptr += tl.program_id(0).to(tl.int64) * SIZE
    if head < heads:
        _turn_back(
            dq_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, out_ptr, sums_ptr, head, out_stride, start, end, positions,
            dq_stride_b, dq_stride_h, dq_stride_t, q_stride_b, q_stride_h, q_stride_t, eps, scale, SIZE, Q_NORM,
            Q_WEIGHTED, HAS_SUMS and Q_WEIGHTED, HAS_ROPE, ROWS, BLOCK,
        )  # fmt: skip
    elif head < heads + groups:
        _turn_back(
            dk_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, out_ptr + heads * SIZE, sums_ptr, head - heads, out_stride,
            start, end, positions, dk_stride_b, dk_stride_h, dk_stride_t, k_stride_b, k_stride_h, k_stride_t, eps,
            scale, SIZE, K_NORM, K_WEIGHTED, HAS_SUMS and K_WEIGHTED, HAS_ROPE, ROWS, BLOCK,
        )  # fmt: skip
    else:
        _turn_back(
            dv_ptr, dv_ptr, q_weight_ptr, cos_ptr, sin_ptr, out_ptr + (heads + groups) * SIZE, sums_ptr,
            head - heads - groups, out_stride, start, end, positions, dv_stride_b, dv_stride_h, dv_stride_t, 0, 0, 0,
            eps, scale, SIZE, False, False, False, False, ROWS, BLOCK,
        )  # fmt: skip


def _block_and_rows(size: int) -> tuple[int, int]:
    """(columns of half a head, rows at once): about 2,048 values in registers."""
    block = int(triton.next_power_of_2((size + 1) // 2))
    return block, max(1, 1024 // block)


def _norm_flags(normed: bool, q_weight: Tensor | None, k_weight: Tensor | None) -> dict[str, bool]:
    q_weighted, k_weighted = q_weight is not None, k_weight is not None
    flags = {"Q_WEIGHTED": q_weighted, "K_WEIGHTED": k_weighted}
    return {"Q_NORM": normed or q_weighted, "K_NORM": normed or k_weighted, **flags}


def _turned_back(
    gradients: tuple[Tensor, Tensor, Tensor],
    before: tuple[Tensor | None, Tensor | None],
    weights: HeadWeights,
    turn: tuple[Tensor | None, Tensor | None],
    eps: float,
    scale: float,
    out_NC: Tensor,
    *,
    normed: bool,
    sums: bool,
) -> Tensor:
    """Writes the gradients side by side; with `sums` returns partial sums [S, A, D] of the norms' weight gradients."""
    dq, dk, dv = (dense(gradient) for gradient in gradients)
    (batch, heads, positions, size), groups = dq.shape, dk.shape[1]
    rows, every, device = batch * positions, heads + 2 * groups, dq.device
    block, at_once = _block_and_rows(size)
    strips = triton.cdiv(rows, at_once)
    if sums:  # few long shares, so that few sums are left to add
        strips = max(1, min(strips, triton.cdiv(16 * multiprocessors(device), every)))
    share = share_of(rows, strips, at_once)
    shares = triton.cdiv(rows, share)
    sums_SAD = torch.empty(shares if sums else 0, every, size, dtype=torch.float32, device=device)
    _backward[(shares * every,)](
        dq, dk, dv, *before, *weights, *turn, out_NC, sums_SAD, rows, positions, heads, groups, share, out_NC.stride(0),
        *strides(dq), *strides(dk), *strides(dv), *strides(before[0]), *strides(before[1]), eps, scale, SIZE=size,
        **_norm_flags(normed, *weights), HAS_SUMS=sums, HAS_ROPE=turn[0] is not None, ROWS=at_once, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return sums_SAD


def _turned(
    q: Tensor,
    k: Tensor,
    weights: HeadWeights,
    turn: tuple[Tensor | None, Tensor | None],
    eps: float,
    scale: float,
    *,
    normed: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Normed and turned queries and keys, in place or in memory as [B, T, heads, D]."""
    (batch, heads, positions, size), groups = q.shape, k.shape[1]
    rows, q_out, k_out = batch * positions, q, k
    if not in_place:
        made = {"dtype": q.dtype, "device": q.device}
        q_out = torch.empty(batch, positions, heads, size, **made).transpose(1, 2)
        k_out = torch.empty(batch, positions, groups, size, **made).transpose(1, 2)
    block, at_once = _block_and_rows(size)
    _forward[(triton.cdiv(rows, at_once) * (heads + groups),)](
        q, k, *weights, *turn, q_out, k_out, rows, positions, heads, groups, *strides(q), *strides(k),
        q_out.stride(2), k_out.stride(2), eps, scale, SIZE=size, **_norm_flags(normed, *weights),
        HAS_ROPE=turn[0] is not None, ROWS=at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


class _PrepareHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_weight, k_weight, cos, sin, eps, scale, normed):
        q, k = dense(q), dense(k)
        weights, turn = (q_weight, k_weight), (cos, sin)
        q_out, k_out = _turned(q, k, weights, turn, eps, scale, normed=normed, in_place=False)
        # The backward pass of a rotation without norms does not need its input.
        keep_q = None if q_weight is None and not normed else q
        keep_k = None if k_weight is None and not normed else k
        ctx.save_for_backward(keep_q, keep_k, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.scale, ctx.normed = eps, scale, normed
        return q_out, k_out, v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        (batch, heads, positions, size), groups = dq.shape, dk.shape[1]
        out_BTAD = torch.empty(batch, positions, heads + 2 * groups, size, dtype=dq.dtype, device=dq.device)
        weighted = q_weight is not None or k_weight is not None
        sums_SAD = _turned_back(
            (dq, dk, dv), (q, k), (q_weight, k_weight), (cos, sin), ctx.eps, ctx.scale,
            out_BTAD.view(batch * positions, -1), normed=ctx.normed, sums=weighted,
        )  # fmt: skip
        after = heads + groups
        dq_weight = None if q_weight is None else sums_SAD[:, :heads].sum((0, 1)).to(q_weight.dtype)
        dk_weight = None if k_weight is None else sums_SAD[:, heads:after].sum((0, 1)).to(k_weight.dtype)
        out_BATD = out_BTAD.transpose(1, 2)
        return out_BATD[:, :heads], out_BATD[:, heads:after], out_BATD[:, after:], dq_weight, dk_weight, *([None] * 5)


def prepare_heads(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    *,
    scale: float = 1.0,
    normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed per head (if weights are given) and rotated (by `cos` and `sin`, fp32 [T or more, D/2]).

    `normed`: norm both, with or without weights; `scale` multiplies the norm's result. Results have the shape of the
    inputs and are in memory as [B, T, heads, D]. Values are returned unchanged.
    """
    if q_weight_D is None and k_weight_D is None and cos is None and not normed:
        return q_BHTD, k_BGTD, v_BGTD
    if cos is not None:
        assert sin is not None
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert cos.shape[0] >= q_BHTD.shape[2]
        assert cos.shape[1] * 2 == q_BHTD.shape[3]
    how = (q_weight_D, k_weight_D, cos, sin, eps, scale, normed)
    return _PrepareHeads.apply(q_BHTD, k_BGTD, v_BGTD, *how)  # pyright: ignore


# --- under frozen weights ---------------------------------------------------------------------------------------------


def turn_packed(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    norms: HeadWeights | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Queries and keys as from `prepare_heads`, without autograd. Without norms they are rotated in place."""
    if norms is None and cos is None:
        return q_BHTD, k_BGTD
    weights = (None, None) if norms is None else norms
    how = {"normed": norms is not None, "in_place": norms is None}  # backward needs what the norms took
    return _turned(q_BHTD, k_BGTD, weights, (cos, sin), eps, scale, **how)


def turn_back_packed(
    gradients: tuple[Tensor, Tensor, Tensor],
    before: tuple[Tensor, Tensor] | None,
    norms: HeadWeights | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    scale: float,
    out_NC: Tensor,
) -> None:
    """Writes gradients of queries, keys (before `turn_packed`) and values to `out_NC`, whose rows may be strided.

    `before`: queries and keys before `turn_packed`, needed with norms only.
    """
    weights = (None, None) if norms is None else norms
    values = (None, None) if before is None else before
    how = {"normed": norms is not None, "sums": False}
    _turned_back(gradients, values, weights, (cos, sin), eps, scale, out_NC, **how)
