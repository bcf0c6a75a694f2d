"""Kernels for decoding: one new token of every row, about five kernels a layer.

    product:   out = act(input @ weight.T + bias), where the input is one of
               values    as they are
               normed    norm of the residual stream, whose waiting branch is added (and stored) on the way
               combined  the parts that `attend` left, joined and gated
    attend:    norms and positions of queries and keys, the cache's new entry, and attention over a part of the cache
    advance:   the states of an eigenstate mixer, one position further

One row is multiplied element by element, and norms are computed where they are needed. Norms of more rows are written
out first, and matrix units multiply. Nothing depends on a length that the host knows, so a whole pass can be recorded.

On Hopper and later a kernel starts before the one ahead of it has ended (programmatic dependent launch): it fetches
its weights, which nobody writes, then waits (`_wait`), and only then reads what other kernels made.

Shape legend: R rows, W width, N outputs, K inputs, H query heads, G key/value heads, D head size, S places of a cache,
P parts of the cache that are attended to side by side.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.launch import multiprocessors

ACTIVATIONS = {None: 0, "gelu": 1, "relu2": 2, "swiglu": 3}


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Until the kernels before this one are done; lets the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _normed(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, weight_ptr, bias_ptr, row, k, eps, first_program,
    K: tl.constexpr, BRANCH: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr, CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """A row of the stream [BLOCK] with its branch, stored by one program, and its norm."""
    inside = k < K
    at = row.to(tl.int64) * K + k
    # Values of the norm are fetched together with the row, not after it.
    weight, bias = 1.0, 0.0
    if WEIGHTED:
        weight = tl.load(weight_ptr + k, inside, 0.0).to(tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + k, inside, 0.0).to(tl.float32)
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    if BRANCH:
        branch = tl.load(branch_ptr + at, inside, 0.0).to(tl.float32)
        if SCALED:
            branch *= tl.load(scale_ptr + k, inside, 0.0).to(tl.float32)
        x += branch
    if MIXED:
        first = tl.load(first_ptr + at, inside, 0.0).to(tl.float32)
        x = tl.load(mix_ptr).to(tl.float32) * x + tl.load(mix_ptr + 1).to(tl.float32) * first
    if BRANCH or MIXED:  # noqa: SIM102 - known when it is compiled
        if first_program:
            tl.store(new_ptr + at, x, inside)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    return x * weight + bias


@triton.jit
def _combined(
    parts_ptr, sums_ptr, gates_ptr, row, k, gate_stride, gate_start,
    K: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A row of attention's result [BLOCK], from parts with their largest scores and sums of weights."""
    inside = k < K
    head = row.to(tl.int64) * (K // D) + k // D
    top = tl.full(k.shape, -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(sums_ptr + (head * PARTS + part) * 2, inside, 0.0))
    total = tl.zeros(k.shape, tl.float32)
    y = tl.zeros(k.shape, tl.float32)
    for part in tl.static_range(PARTS):
        place = head * PARTS + part
        factor = tl.exp2(tl.load(sums_ptr + place * 2, inside, 0.0) - top)
        total += factor * tl.load(sums_ptr + place * 2 + 1, inside, 1.0)
        y += factor * tl.load(parts_ptr + place * D + k % D, inside, 0.0)
    y = y / total
    if GATED:
        y *= tl.load(gates_ptr + row * gate_stride + gate_start + k // D, inside, 0.0)
    return tl.where(inside, y, 0.0)


@triton.jit
def _store_gates(h, weight_ptr, gates_ptr, row, k, count, stride, INPUTS: tl.constexpr, COUNT: tl.constexpr):
    """2·sigmoid of products with the first channels of a normed row."""
    gate = tl.arange(0, COUNT)
    mask = (gate < count)[:, None] & (k < INPUTS)[None, :]
    weight = tl.load(weight_ptr + gate[:, None] * INPUTS + k[None, :], mask, 0.0).to(tl.float32)
    made = 2.0 * tl.sigmoid(tl.sum(weight * h[None, :], 1))
    tl.store(gates_ptr + row * stride + gate, made, gate < count)


@triton.jit
def _finished(
    total, value, n, w_scale_ptr, bias_ptr, cap, N: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Sums of a product [..., outputs] with scale, bias, activation and cap; `value` is swiglu's second half."""
    if INT8:
        total *= tl.load(w_scale_ptr + n, n < N, 0.0)
        if ACT == 3:
            value *= tl.load(w_scale_ptr + N + n, n < N, 0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        if ACT == 3:
            value += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)
    if ACT == 1:
        inner = 0.7978845608028654 * (total + 0.044715 * total * total * total)
        total = total * tl.sigmoid(2.0 * inner)
    elif ACT == 2:
        total = tl.maximum(total, 0.0)
        total = total * total
    elif ACT == 3:
        total = total * tl.sigmoid(total) * value
    if CAPPED:
        total = cap * (2.0 * tl.sigmoid(2.0 * total / cap) - 1.0)
    return total


@triton.jit
def _of_one_row(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, parts_ptr, sums_ptr,
    gates_ptr, gate_weight_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, eps, cap, gate_stride, gate_start, counted,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BRANCH: tl.constexpr, SCALED: tl.constexpr,
    MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, NORM_BIAS: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, GATES: tl.constexpr, GATE_INPUTS: tl.constexpr, INT8: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr, TYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of one row, element by element. A norm or attention is computed by every program for itself."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + n.to(tl.int64)[:, None] * K
    alive = (n < N)[:, None]
    # Weights are fetched before the wait.
    w = tl.load(w_row + k[None, :], alive & (k < K)[None, :], 0.0)
    value_w = w
    if ACT == 3:
        value_w = tl.load(w_row + N * K + k[None, :], alive & (k < K)[None, :], 0.0)
    _wait(EARLY)
    row = tl.program_id(1)
    if KIND == 1:
        h = _normed(
            x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, row, k, eps,
            tl.program_id(0) == 0, K, BRANCH, SCALED, MIXED, CENTRED, WEIGHTED, NORM_BIAS,
        )  # fmt: skip
    elif KIND == 2:
        h = _combined(parts_ptr, sums_ptr, gates_ptr, row, k, gate_stride, gate_start, K, D, PARTS, GATED)
    else:
        h = tl.load(x_ptr + row * K + k, k < K, 0.0).to(tl.float32)
    h = h.to(TYPE).to(tl.float32)
    if GATES > 0:  # noqa: SIM102 - known when it is compiled
        if tl.program_id(0) == 0:
            _store_gates(h, gate_weight_ptr, gates_ptr, row, k, counted, gate_stride, GATE_INPUTS, GATES)
    total = tl.sum(w.to(tl.float32) * h[None, :], 1)
    value = total
    if ACT == 3:
        value = tl.sum(value_w.to(tl.float32) * h[None, :], 1)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):  # of values only: norms and attention are in one block
        at_k = start + k
        mask = alive & (at_k < K)[None, :]
        h = tl.load(x_ptr + row * K + at_k, at_k < K, 0.0).to(tl.float32).to(TYPE).to(tl.float32)
        total += tl.sum(tl.load(w_row + at_k[None, :], mask, 0.0).to(tl.float32) * h[None, :], 1)
        if ACT == 3:
            value += tl.sum(tl.load(w_row + N * K + at_k[None, :], mask, 0.0).to(tl.float32) * h[None, :], 1)
    total = _finished(total, value, n, w_scale_ptr, bias_ptr, cap, N, INT8, BIAS, ACT, CAPPED)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), n < N)


@triton.jit
def _of_rows(
    x_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, cap, N: tl.constexpr, K: tl.constexpr, INT8: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of several rows, by matrix units."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x_ptr + row.to(tl.int64)[:, None] * K
    w_row = w_ptr + n.to(tl.int64)[None, :] * K
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    value = tl.zeros((ROWS, BLOCK_N), tl.float32)
    _wait(EARLY)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_row + k[None, :], (row < rows)[:, None] & (k < K)[None, :], 0.0)
        w = tl.load(w_row + k[:, None], mask, 0.0)
        if EXACT:
            total = tl.dot(x.to(tl.float32), w.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(x, w.to(x.dtype), total)
        if ACT == 3:
            w = tl.load(w_row + N * K + k[:, None], mask, 0.0)
            if EXACT:
                value = tl.dot(x.to(tl.float32), w.to(tl.float32), value, input_precision="ieee")
            else:
                value = tl.dot(x, w.to(x.dtype), value)
    total = _finished(total, value, n, w_scale_ptr, bias_ptr, cap, N, INT8, BIAS, ACT, CAPPED)
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), (row < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _settle(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, parts_ptr, sums_ptr,
    gates_ptr, gate_weight_ptr, h_ptr, eps, gate_stride, gate_start, counted, K: tl.constexpr, KIND: tl.constexpr,
    BRANCH: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr,
    NORM_BIAS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, GATES: tl.constexpr,
    GATE_INPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A norm or attention of several rows, written out: each program has a row."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    _wait(EARLY)
    if KIND == 1:
        h = _normed(
            x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, row, k, eps,
            row >= 0, K, BRANCH, SCALED, MIXED, CENTRED, WEIGHTED, NORM_BIAS,
        )  # fmt: skip
    else:
        h = _combined(parts_ptr, sums_ptr, gates_ptr, row, k, gate_stride, gate_start, K, D, PARTS, GATED)
    h = h.to(h_ptr.dtype.element_ty)
    if GATES > 0:
        _store_gates(h.to(tl.float32), gate_weight_ptr, gates_ptr, row, k, counted, gate_stride, GATE_INPUTS, GATES)
    tl.store(h_ptr + row.to(tl.int64) * K + k, h, k < K)


class Weights(NamedTuple):
    """A matrix as the kernels read it: in the type of products, or in 8 bits with a scale for every row."""

    matrix_NK: Tensor
    scale_N: Tensor | None = None


class Normed(NamedTuple):
    """A norm that is not computed yet: of the stream with its branch added, mixed with the first stream."""

    x_RW: Tensor
    branch_RW: Tensor | None
    scale_W: Tensor | None
    mix_2: Tensor | None
    first_RW: Tensor | None
    new_RW: Tensor  # takes the stream, with the first kernel that uses this
    weight_W: Tensor | None
    bias_W: Tensor | None
    eps: float
    centred: bool


class Combined(NamedTuple):
    """Attention that is not joined yet: results, and (largest score, sum of weights), of every part of the cache."""

    parts_RHPD: Tensor
    sums_RHP2: Tensor
    gates_RC: Tensor | None = None
    gate_start: int = 0  # of the head gates among the row's gates


class GateWeights(NamedTuple):
    weight_CI: Tensor
    gates_RC: Tensor  # takes the gates


@functools.cache
def starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WAITING = ("x", "branch", "scale", "mix", "first", "new", "norm_weight", "norm_bias", "parts", "sums")


def _source(
    source: Tensor | Normed | Combined, gates: GateWeights | None, nothing: Tensor
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """What kernels take for an input: tensors, numbers, and constants that say what there is."""
    values: dict[str, Tensor | None] = dict.fromkeys(_WAITING)
    numbers: dict[str, Any] = {"eps": 0.0, "gate_stride": 0, "gate_start": 0, "counted": 0}
    read_gates = gate_weight = None
    flags: dict[str, Any] = {"KIND": 0, "CENTRED": False, "D": 1, "PARTS": 1, "GATES": 0, "GATE_INPUTS": 1}
    if isinstance(source, Normed):
        values |= zip(_WAITING, (*source[:8], None, None), strict=True)
        flags |= {"KIND": 1, "CENTRED": source.centred}
        numbers["eps"] = source.eps
    elif isinstance(source, Combined):
        values |= {"parts": source.parts_RHPD, "sums": source.sums_RHP2}
        flags |= {"KIND": 2, "D": source.parts_RHPD.shape[3], "PARTS": source.parts_RHPD.shape[2]}
        read_gates, numbers["gate_start"] = source.gates_RC, source.gate_start
    else:
        values["x"] = source
    flags |= {"BRANCH": values["branch"] is not None, "SCALED": values["scale"] is not None}
    flags |= {"MIXED": values["mix"] is not None, "WEIGHTED": values["norm_weight"] is not None}
    flags |= {"NORM_BIAS": values["norm_bias"] is not None, "GATED": read_gates is not None}
    if gates is not None:
        read_gates, gate_weight = gates.gates_RC, gates.weight_CI
        numbers["counted"], flags["GATE_INPUTS"] = gate_weight.shape
        flags["GATES"] = max(2, int(triton.next_power_of_2(numbers["counted"])))
    if read_gates is not None:
        numbers["gate_stride"] = read_gates.stride(0)
    found = [*values.values(), read_gates, gate_weight]
    return [nothing if x is None else x for x in found], numbers, flags


def product(
    source: Tensor | Normed | Combined,
    weights: Weights,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    activation: str | None = None,
    cap: float = 0.0,
    gates: GateWeights | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`act(source @ weight.T + bias)` [R, N], with inputs rounded to `dtype`. swiglu halves the outputs."""
    matrix = weights.matrix_NK
    outputs, inputs = matrix.shape
    outputs = outputs // 2 if activation == "swiglu" else outputs
    rows = len(source) if isinstance(source, Tensor) else len(source[0])
    device, early = matrix.device, starts_early(matrix.device)
    out_RN = torch.empty(rows, outputs, dtype=out_dtype, device=device)
    tensors, numbers, flags = _source(source, gates, out_RN)
    launch = {"EARLY": early, "num_warps": 4} | ({"launch_pdl": True} if early else {})
    whole = int(triton.next_power_of_2(inputs))
    ends = [matrix, out_RN if weights.scale_N is None else weights.scale_N, out_RN if bias is None else bias, out_RN]
    how = {"N": outputs, "K": inputs, "INT8": weights.scale_N is not None, "BIAS": bias is not None}
    how |= {"ACT": ACTIVATIONS[activation], "CAPPED": cap > 0.0, "cap": cap}
    if rows == 1:
        block_k = whole if flags["KIND"] else min(whole, 1024)
        # A few programs for each multiprocessor, and not more weights than registers hold.
        few = int(triton.next_power_of_2(max(1, outputs // (3 * multiprocessors(device)))))
        most = max(1, (8192 if activation == "swiglu" else 16_384) // block_k)
        block_n = max(1, min(16, few, most))
        _of_one_row[(triton.cdiv(outputs, block_n), 1)](
            *tensors, *ends, **numbers, **flags, **how, TYPE=_TYPES[dtype], BLOCK_N=block_n, BLOCK_K=block_k, **launch
        )
        return out_RN
    x_RK = source
    if not isinstance(x_RK, Tensor):
        x_RK = torch.empty(rows, inputs, dtype=dtype, device=device)
        _settle[(rows,)](*tensors, x_RK, **numbers, **flags, K=inputs, BLOCK=whole, **launch)
    exact = dtype == torch.float32 or not matrix.is_cuda
    x_RK = x_RK.to(dtype)
    tall = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide = next((size for size in (128, 64, 32) if outputs // size >= multiprocessors(device)), 16)
    _of_rows[(triton.cdiv(outputs, wide), triton.cdiv(rows, tall))](
        x_RK, *ends, rows, **how, EXACT=exact, ROWS=tall, BLOCK_N=wide,
        BLOCK_K=max(16, min(whole, 32 if exact else 128)), **launch,
    )  # fmt: skip
    return out_RN


# --- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _turned(x, other, cos, sin, ROPE: tl.constexpr):
    if ROPE:
        return x * cos + other * sin
    else:
        return x


@triton.jit
def _attend(
    qkv_ptr, k_ptr, v_ptr, pos_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rows_ptr, gates_ptr, parts_ptr,
    sums_ptr, scale, eps, qk_scale, places, window, turn_stride, value_stride, gate_stride,
    H: tl.constexpr, G: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, NORMED: tl.constexpr, WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, SIZE)
    inside = d < D
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)
    head = tl.arange(0, HEADS)  # of this group
    mine = (head < SHARE)[:, None] & inside[None, :]
    _wait(EARLY)

    # Queries of the group's heads, the new key and the new value.
    position = tl.load(pos_ptr + row)
    base = qkv_ptr + row * (H + 2 * G) * D
    q_at = base + (group * SHARE + head)[:, None] * D
    k_at = base + (H + group) * D
    q = tl.load(q_at + d[None, :], mine, 0.0).to(tl.float32)
    key = tl.load(k_at + d, inside, 0.0).to(tl.float32)
    value = tl.load(base + (H + G + group) * D + d, inside, 0.0).to(tl.float32)
    other_q = tl.zeros((HEADS, SIZE), tl.float32)
    other_key = tl.zeros((SIZE,), tl.float32)
    cos = tl.zeros((SIZE,), tl.float32)
    sin = tl.zeros((SIZE,), tl.float32)
    if ROPE:
        other_q = tl.load(q_at + other[None, :], mine, 0.0).to(tl.float32)
        other_key = tl.load(k_at + other, inside, 0.0).to(tl.float32)
        cos = tl.load(cos_ptr + row * turn_stride + d % half, inside, 0.0)
        sin = tl.load(sin_ptr + row * turn_stride + d % half, inside, 0.0) * tl.where(d < half, -1.0, 1.0)
    if NORMED:
        q_factor = tl.rsqrt(tl.sum(q * q, 1) / D + eps)[:, None] * qk_scale
        k_factor = tl.rsqrt(tl.sum(key * key, 0) / D + eps) * qk_scale
        q, other_q, key, other_key = q * q_factor, other_q * q_factor, key * k_factor, other_key * k_factor
        if WEIGHTED:
            q *= tl.load(q_weight_ptr + d, inside, 0.0).to(tl.float32)[None, :]
            other_q *= tl.load(q_weight_ptr + other, inside, 0.0).to(tl.float32)[None, :]
            key *= tl.load(k_weight_ptr + d, inside, 0.0).to(tl.float32)
            other_key *= tl.load(k_weight_ptr + other, inside, 0.0).to(tl.float32)
    q = _turned(q, other_q, cos[None, :], sin[None, :], ROPE)
    key = _turned(key, other_key, cos, sin, ROPE).to(k_ptr.dtype.element_ty)
    if VALUES:
        rows = tl.load(rows_ptr + row * value_stride + group * D + d, inside, 0.0).to(tl.float32)
        value += tl.load(gates_ptr + row * gate_stride + group) * rows
    value = value.to(v_ptr.dtype.element_ty)

    # The first part begins with the new token, which it also writes.
    cache = (row * G + group) * places * D
    place = position % places
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, SIZE), tl.float32)
    if part == 0:
        tl.store(k_ptr + cache + place * D + d, key, inside)
        tl.store(v_ptr + cache + place * D + d, value, inside)
        top = tl.sum(q * key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        result += value.to(tl.float32)[None, :]

    # Places of earlier tokens, without the place of the new one.
    filled = tl.minimum(position, places).to(tl.int32)
    share = tl.cdiv(tl.cdiv(filled, PARTS), BLOCK) * BLOCK
    end = tl.minimum(part * share + share, filled)
    step = tl.arange(0, BLOCK)
    for start in range(part * share, end, BLOCK):
        at = start + step
        back = (place - at + places) % places  # tokens ago
        seen = (at < end) & (back > 0) & (back < window)
        from_cache = cache + at[:, None] * D + d[None, :]
        keys = tl.load(k_ptr + from_cache, seen[:, None] & inside[None, :], 0.0)
        values = tl.load(v_ptr + from_cache, seen[:, None] & inside[None, :], 0.0)
        if HEADS == 1:
            scores = tl.sum(keys.to(tl.float32) * q, 1)[None, :]
        elif EXACT:
            scores = tl.dot(q, tl.trans(keys.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(q.to(keys.dtype), tl.trans(keys))
        scores = tl.where(seen[None, :], scores * scale, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.where(seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.sum(weight, 1)
        if HEADS == 1:
            added = tl.sum(values.to(tl.float32) * tl.trans(weight), 0)[None, :]
        elif EXACT:
            added = tl.dot(weight, values.to(tl.float32), input_precision="ieee")
        else:
            added = tl.dot(weight.to(values.dtype), values)
        result = result * kept[:, None] + added
        top = higher
    out = ((row * H + group * SHARE + head) * PARTS + part).to(tl.int64)
    tl.store(parts_ptr + out[:, None] * D + d[None, :], result, mine)
    tl.store(sums_ptr + out * 2, top, head < SHARE)
    tl.store(sums_ptr + out * 2 + 1, total, head < SHARE)


def attend(
    qkv_RC: Tensor,
    k_RGSD: Tensor,
    v_RGSD: Tensor,
    positions_R: Tensor,
    *,
    heads: int,
    window: int | None,
    turn: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor | None, Tensor | None, float, float] | None,
    values: Tensor | None,
    gates_RC: Tensor | None,
) -> Combined:
    """Attention of one new token a row; its key and value are written to the cache.

    `turn`: cosines and sines [R, D/2]. `norms`: weights of queries and keys, eps, and a scale. `values`: rows of a
    value table, gated by the first of `gates_RC`.
    """
    rows, groups, places, size = k_RGSD.shape
    share = heads // groups
    parts = _parts(rows * groups, places, qkv_RC.device)
    parts_RHPD = torch.empty(rows, heads, parts, size, dtype=torch.float32, device=qkv_RC.device)
    sums_RHP2 = torch.empty(rows, heads, parts, 2, dtype=torch.float32, device=qkv_RC.device)
    nothing = sums_RHP2
    cos, sin = (nothing, nothing) if turn is None else turn
    q_weight, k_weight, eps, qk_scale = (None, None, 0.0, 1.0) if norms is None else norms
    early = starts_early(qkv_RC.device)
    _attend[(rows, groups, parts)](
        qkv_RC, k_RGSD, v_RGSD, positions_R, cos, sin, nothing if q_weight is None else q_weight,
        nothing if k_weight is None else k_weight, nothing if values is None else values,
        nothing if gates_RC is None else gates_RC, parts_RHPD, sums_RHP2, size**-0.5 * 1.4426950408889634, eps,
        qk_scale, places, window or 2**30, cos.stride(0), 0 if values is None else values.stride(0),
        0 if gates_RC is None else gates_RC.stride(0), H=heads, G=groups, SHARE=share,
        HEADS=1 if share == 1 else max(16, int(triton.next_power_of_2(share))), D=size,
        SIZE=max(16, int(triton.next_power_of_2(size))), PARTS=parts, BLOCK=32, ROPE=turn is not None,
        NORMED=norms is not None, WEIGHTED=q_weight is not None, VALUES=values is not None,
        EXACT=k_RGSD.dtype == torch.float32 or not k_RGSD.is_cuda, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return Combined(parts_RHPD, sums_RHP2)


def _parts(programs: int, places: int, device: torch.device) -> int:
    """Parts of the cache: enough to fill the device, of 64 places at least, and few for the kernel that joins them."""
    wanted = max(1, 2 * multiprocessors(device) // programs)
    return min(int(triton.next_power_of_2(wanted)), 8, max(1, int(triton.next_power_of_2(places)) // 64))


# --- eigenstates ------------------------------------------------------------------------------------------------------


@triton.jit
def _advance(
    both_ptr, state_ptr, decay_ptr, detuning_ptr, angle_ptr, out_ptr, states, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < states
    rate = tl.exp(tl.load(decay_ptr + k, inside, 0.0).to(tl.float32))
    phase = tl.load(angle_ptr + k, inside, 0.0) + tl.load(detuning_ptr + k, inside, 0.0).to(tl.float32) * rate
    size = tl.exp(-rate)
    # 1 - |λ|² by its series where it would lose its digits
    twice = 2.0 * rate
    gain = tl.sqrt(tl.where(twice < 0.01, twice * (1.0 - twice * (0.5 - twice / 6.0)), 1.0 - tl.exp(-twice)))
    along, across = size * tl.cos(phase), size * tl.sin(phase)
    _wait(EARLY)
    both = both_ptr + row * 4 * states + k
    real = tl.load(state_ptr + row * 2 * states + k, inside, 0.0)
    imaginary = tl.load(state_ptr + row * 2 * states + states + k, inside, 0.0)
    new_real = along * real - across * imaginary + gain * tl.load(both, inside, 0.0).to(tl.float32)
    new_imaginary = along * imaginary + across * real + gain * tl.load(both + states, inside, 0.0).to(tl.float32)
    tl.store(state_ptr + row * 2 * states + k, new_real, inside)
    tl.store(state_ptr + row * 2 * states + states + k, new_imaginary, inside)
    gate = tl.load(both + 2 * states, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * 2 * states + k, gate * tl.sigmoid(gate) * new_real, inside)
    gate = tl.load(both + 3 * states, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * 2 * states + states + k, gate * tl.sigmoid(gate) * new_imaginary, inside)


def advance(both_RC: Tensor, state_RC: Tensor, decay_K: Tensor, detuning_K: Tensor, angle_K: Tensor) -> Tensor:
    """Gated states [R, 2K] after one more input; `state_RC` is moved on in its place.

    `both_RC`: the input's real and imaginary parts, then the gate's.
    """
    rows, states = len(both_RC), decay_K.numel()
    out_RC = torch.empty(rows, 2 * states, dtype=torch.float32, device=both_RC.device)
    early = starts_early(both_RC.device)
    _advance[(rows, triton.cdiv(states, 256))](
        both_RC, state_RC, decay_K, detuning_K, angle_K, out_RC, states, BLOCK=256, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out_RC
