"""Kernels for decoding: one new token of every row, about five kernels a layer.

    product:   out = act(input @ weight.T + bias), where the input is values, or the norm of the residual stream, whose
               waiting branch is added (and stored) on the way
    attend:    norms and positions of queries and keys, the cache's new entry, and attention: over parts of the cache
               side by side, which the last one to end joins
    advance:   the states of an eigenstate mixer, one position further

One row is multiplied element by element, and norms are computed where they are needed. Of more rows norms are written
out first, and the library multiplies. Nothing depends on a length that the host knows, so a whole pass can be recorded.

On Hopper and later a kernel starts before the one ahead of it has ended (programmatic dependent launch): it fetches
its first weights, which nobody writes, then waits (`_wait`), and only then reads what other kernels made.

Shape legend: R rows, W width, N outputs, K inputs, H query heads, G key/value heads, D head size, S places of a cache,
P parts of the cache.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
def _weights(w_ptr, n, N: tl.constexpr, K: tl.constexpr, INT8: tl.constexpr, ACT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of a matrix [BLOCK_N, BLOCK_K], four 8-bit numbers in each value; of swiglu those of the second half too."""
    EACH: tl.constexpr = 4 if INT8 else 1
    k = tl.arange(0, BLOCK_K // EACH)
    at = w_ptr + n.to(tl.int64)[:, None] * (K // EACH) + k[None, :]
    mask = (n < N)[:, None] & (k < K // EACH)[None, :]
    w = tl.load(at, mask, 0)
    value_w = w
    if ACT == 3:
        value_w = tl.load(at + N * (K // EACH), mask, 0)
    return w, value_w


@triton.jit
def _sums(w, h, INT8: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of each row of weights with `h`, summed."""
    if INT8:
        # Bytes become fp32 by bits: 2^23 + 128 + the number, as conversions take several times as long.
        even, odd = tl.split(tl.reshape(h, (BLOCK_K // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        w = w.to(tl.uint32, bitcast=True) ^ 0x80808080
        made = _byte(w, 0) * first[None, :] + _byte(w, 8) * second[None, :]
        made += _byte(w, 16) * third[None, :] + _byte(w, 24) * fourth[None, :]
        return tl.sum(made, 1)
    else:
        return tl.sum(w.to(tl.float32) * h[None, :], 1)


@triton.jit
def _byte(w, shift: tl.constexpr):
    return (((w >> shift) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _of_one_row(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, gates_ptr,
    gate_weight_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, eps, cap, gate_stride, counted, stride,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, BRANCH: tl.constexpr, SCALED: tl.constexpr,
    MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, NORM_BIAS: tl.constexpr, GATES: tl.constexpr,
    GATE_INPUTS: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr,
    TYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of one row, element by element. Every program computes the norm for itself.

    A program has every `stride`-th block of outputs.
    """
    first = tl.program_id(0) * BLOCK_N
    block = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # The first weights are fetched before the wait.
    w, value_w = _weights(w_ptr, first + block, N, K, INT8, ACT, BLOCK_K)  # pyright: ignore[reportGeneralTypeIssues]
    _wait(EARLY)
    if NORMED:
        h = _normed(
            x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr,
            tl.program_id(1), k, eps, first == 0, K, BRANCH, SCALED, MIXED, CENTRED, WEIGHTED, NORM_BIAS,
        )  # fmt: skip
    else:
        h = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
    h = h.to(TYPE).to(tl.float32)
    if GATES > 0:  # noqa: SIM102 - known when it is compiled
        if first == 0:
            _store_gates(h, gate_weight_ptr, gates_ptr, 0, k, counted, gate_stride, GATE_INPUTS, GATES)
    _store_outputs(
        w, value_w, h, first + block, w_scale_ptr, bias_ptr, out_ptr, cap, N, INT8, BIAS, ACT, CAPPED, BLOCK_K
    )
    for start in tl.range(first + stride, N, stride, num_stages=AHEAD):
        w, value_w = _weights(w_ptr, start + block, N, K, INT8, ACT, BLOCK_K)
        _store_outputs(
            w, value_w, h, start + block, w_scale_ptr, bias_ptr, out_ptr, cap, N, INT8, BIAS, ACT, CAPPED, BLOCK_K
        )


@triton.jit
def _store_outputs(
    w, value_w, h, n, w_scale_ptr, bias_ptr, out_ptr, cap, N: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, CAPPED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    total = _sums(w, h, INT8, BLOCK_K)
    value = total
    if ACT == 3:
        value = _sums(value_w, h, INT8, BLOCK_K)
    total = _finished(total, value, n, w_scale_ptr, bias_ptr, cap, N, INT8, BIAS, ACT, CAPPED)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), n < N)


@triton.jit
def _settle(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, gates_ptr,
    gate_weight_ptr, h_ptr, eps, gate_stride, counted, K: tl.constexpr, NORMED: tl.constexpr, BRANCH: tl.constexpr,
    SCALED: tl.constexpr, MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, NORM_BIAS: tl.constexpr,
    GATES: tl.constexpr, GATE_INPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norms of several rows, written out: each program has a row."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    _wait(EARLY)
    h = _normed(
        x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, row, k, eps,
        row >= 0, K, BRANCH, SCALED, MIXED, CENTRED, WEIGHTED, NORM_BIAS,
    )  # fmt: skip
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


class GateWeights(NamedTuple):
    weight_CI: Tensor
    gates_RC: Tensor  # takes the gates


@functools.cache
def starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WAITING = ("x", "branch", "scale", "mix", "first", "new", "norm_weight", "norm_bias")


def _source(
    source: Tensor | Normed, gates: GateWeights | None, nothing: Tensor
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """What kernels take for an input: tensors, numbers, and constants that say what there is."""
    values: dict[str, Tensor | None] = dict.fromkeys(_WAITING)
    numbers: dict[str, Any] = {"eps": 0.0, "gate_stride": 0, "counted": 0}
    flags: dict[str, Any] = {"NORMED": isinstance(source, Normed), "CENTRED": False, "GATES": 0, "GATE_INPUTS": 1}
    if isinstance(source, Normed):
        values |= zip(_WAITING, source[:8], strict=True)
        flags["CENTRED"], numbers["eps"] = source.centred, source.eps
    else:
        values["x"] = source
    flags |= {"BRANCH": values["branch"] is not None, "SCALED": values["scale"] is not None}
    flags |= {"MIXED": values["mix"] is not None, "WEIGHTED": values["norm_weight"] is not None}
    flags["NORM_BIAS"] = values["norm_bias"] is not None
    if gates is not None:
        numbers["counted"], flags["GATE_INPUTS"] = gates.weight_CI.shape
        numbers["gate_stride"] = gates.gates_RC.stride(0)
        flags["GATES"] = max(2, int(triton.next_power_of_2(numbers["counted"])))
    found = [*values.values(), *((None, None) if gates is None else (gates.gates_RC, gates.weight_CI))]
    return [nothing if x is None else x for x in found], numbers, flags


def product(
    source: Tensor | Normed,
    weights: Weights,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    activation: str | None = None,
    cap: float = 0.0,
    gates: GateWeights | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`act(source @ weight.T + bias)` [R, N], with inputs rounded to `dtype`. swiglu halves the outputs.

    Outputs of one row are in `out_dtype`, of more in what the library makes of them.
    """
    matrix, device = weights.matrix_NK, weights.matrix_NK.device
    outputs, inputs = matrix.shape
    rows = len(source) if isinstance(source, Tensor) else len(source.x_RW)
    early = starts_early(device)
    launch = {"EARLY": early} | ({"launch_pdl": True} if early else {})
    whole = int(triton.next_power_of_2(inputs))
    if rows > 1:
        return _of_rows(source, weights, bias, dtype, activation, cap, gates, launch)
    outputs = outputs // 2 if activation == "swiglu" else outputs
    out_RN = torch.empty(rows, outputs, dtype=out_dtype, device=device)
    tensors, numbers, flags = _source(source, gates, out_RN)
    scale_N = out_RN if weights.scale_N is None else weights.scale_N
    int8, doubled = weights.scale_N is not None, activation == "swiglu"
    block, programs = _blocks(outputs, whole * (2 if doubled else 1), int8=int8)
    _of_one_row[(programs, 1)](
        *tensors, matrix.view(torch.int32) if int8 else matrix, scale_N, out_RN if bias is None else bias, out_RN,
        **numbers, **flags, cap=cap, stride=programs * block, N=outputs, K=inputs, INT8=int8, BIAS=bias is not None,
        ACT=ACTIVATIONS[activation], CAPPED=cap > 0.0, TYPE=_TYPES[dtype], BLOCK_N=block, BLOCK_K=whole,
        AHEAD=3 if int8 else 1, num_warps=4, **launch,
    )  # fmt: skip
    return out_RN


def _blocks(outputs: int, inputs: int, *, int8: bool) -> tuple[int, int]:
    """(outputs at once, programs) for a product of one row: what was fastest on an H200 (`lab/decode.jsonl`)."""
    few = 1 << max(0, (outputs // 288).bit_length() - 1)
    block = min(16, few, max(1, 8192 // inputs))
    programs = int(triton.cdiv(outputs, block))
    return block, min(programs, 528) if int8 or inputs >= 4096 else programs


def _of_rows(
    source: Tensor | Normed,
    weights: Weights,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str | None,
    cap: float,
    gates: GateWeights | None,
    launch: dict[str, Any],
) -> Tensor:
    """`product` of several rows."""
    x_RK = source
    if isinstance(source, Normed):
        x_RK = torch.empty_like(source.x_RW, dtype=dtype)
        (rows, inputs), (tensors, numbers, flags) = x_RK.shape, _source(source, gates, x_RK)
        block = int(triton.next_power_of_2(inputs))
        _settle[(rows,)](*tensors, x_RK, **numbers, **flags, K=inputs, BLOCK=block, num_warps=4, **launch)
    bias = None if bias is None else bias.to(dtype)
    if weights.scale_N is None:
        y_RN = F.linear(x_RK.to(dtype), weights.matrix_NK, bias)
    else:
        y_RN = F.linear(x_RK.to(dtype), weights.matrix_NK.to(dtype)) * weights.scale_N
        y_RN = y_RN if bias is None else y_RN + bias
    if activation == "gelu":
        y_RN = F.gelu(y_RN, approximate="tanh")
    elif activation == "relu2":
        y_RN = F.relu(y_RN).square()
    elif activation == "swiglu":
        gate_RN, value_RN = y_RN.chunk(2, dim=1)
        y_RN = F.silu(gate_RN) * value_RN
    return y_RN if not cap else cap * torch.tanh(y_RN.float() / cap)


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
    sums_ptr, done_ptr, y_ptr, scale, eps, qk_scale, places, window, turn_stride, value_stride, gate_stride, gate_start,
    H: tl.constexpr, G: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, NORMED: tl.constexpr, WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
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
    wanted = row * H + group * SHARE + head
    if PARTS > 1:
        out = wanted * PARTS + part
        tl.store(parts_ptr + out[:, None] * D + d[None, :], result, mine)
        tl.store(sums_ptr + out * 2, top, head < SHARE)
        tl.store(sums_ptr + out * 2 + 1, total, head < SHARE)
        tl.debug_barrier()
        done = tl.atomic_add(done_ptr + row * G + group, 1)  # releases what is written, and acquires
        if done == PARTS - 1:  # the last part to end joins all
            tl.store(done_ptr + row * G + group, 0)
            each = wanted[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
            alive = (head < SHARE)[:, None]
            tops = tl.load(sums_ptr + each * 2, alive, -1e30, cache_modifier=".cg")
            factors = tl.exp2(tops - tl.max(tops, 1)[:, None])
            total = tl.sum(factors * tl.load(sums_ptr + each * 2 + 1, alive, 1.0, cache_modifier=".cg"), 1)
            at = each[:, :, None] * D + d[None, None, :]
            parts = tl.load(parts_ptr + at, alive[:, :, None] & inside[None, None, :], 0.0, cache_modifier=".cg")
            result = tl.sum(factors[:, :, None] * parts, 1) / total[:, None]
            gate_at = gates_ptr + row * gate_stride + gate_start + group * SHARE + head
            _store_heads(result, y_ptr + wanted[:, None] * D + d[None, :], mine, gate_at, head < SHARE, GATED)
    else:
        gate_at = gates_ptr + row * gate_stride + gate_start + group * SHARE + head
        result = result / total[:, None]
        _store_heads(result, y_ptr + wanted[:, None] * D + d[None, :], mine, gate_at, head < SHARE, GATED)


@triton.jit
def _store_heads(result, at, mask, gate_at, alive, GATED: tl.constexpr):
    if GATED:
        result *= tl.load(gate_at, alive, 0.0)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask)


def attend(
    qkv_RC: Tensor,
    k_RGSD: Tensor,
    v_RGSD: Tensor,
    positions_R: Tensor,
    done_RG: Tensor,
    *,
    heads: int,
    window: int | None,
    turn: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor | None, Tensor | None, float, float] | None,
    values: Tensor | None,
    gates_RC: Tensor | None,
    value_gates: int,
    dtype: torch.dtype,
) -> Tensor:
    """Attention of one new token a row [R, H·D]; its key and value are written to the cache.

    `done_RG`: zeros, and zeros again afterwards. `turn`: cosines and sines [R, D/2]. `norms`: weights of queries and
    keys, eps, and a scale. `values`: rows of a value table, gated by the first of `gates_RC`; those after
    `value_gates` are for heads.
    """
    rows, groups, places, size = k_RGSD.shape
    share, device = heads // groups, qkv_RC.device
    parts = _parts(rows * groups, places, device)
    y_RC = torch.empty(rows, heads * size, dtype=dtype, device=device)
    parts_RHPD = torch.empty(rows, heads, parts, size, device=device)
    sums_RHP2 = torch.empty(rows, heads, parts, 2, device=device)
    nothing = sums_RHP2
    cos, sin = (nothing, nothing) if turn is None else turn
    q_weight, k_weight, eps, qk_scale = (None, None, 0.0, 1.0) if norms is None else norms
    early = starts_early(device)
    _attend[(rows, groups, parts)](
        qkv_RC, k_RGSD, v_RGSD, positions_R, cos, sin, nothing if q_weight is None else q_weight,
        nothing if k_weight is None else k_weight, nothing if values is None else values,
        nothing if gates_RC is None else gates_RC, parts_RHPD, sums_RHP2, done_RG, y_RC,
        size**-0.5 * 1.4426950408889634, eps, qk_scale, places, window or 2**30, cos.stride(0),
        0 if values is None else values.stride(0), 0 if gates_RC is None else gates_RC.stride(0), value_gates,
        H=heads, G=groups, SHARE=share, HEADS=1 if share == 1 else max(16, int(triton.next_power_of_2(share))), D=size,
        SIZE=max(16, int(triton.next_power_of_2(size))), PARTS=parts, BLOCK=32, ROPE=turn is not None,
        NORMED=norms is not None, WEIGHTED=q_weight is not None, VALUES=values is not None,
        GATED=gates_RC is not None and gates_RC.shape[1] > value_gates,
        EXACT=k_RGSD.dtype == torch.float32 or not k_RGSD.is_cuda, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y_RC


def _parts(programs: int, places: int, device: torch.device) -> int:
    """Parts of the cache: enough to fill the device, of 64 places at least."""
    wanted = max(1, 2 * multiprocessors(device) // programs)
    return min(int(triton.next_power_of_2(wanted)), 8, max(1, int(triton.next_power_of_2(places)) // 64))


# --- eigenstates ------------------------------------------------------------------------------------------------------


@triton.jit
def _advance_states(
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
    _advance_states[(rows, triton.cdiv(states, 256))](
        both_RC, state_RC, decay_K, detuning_K, angle_K, out_RC, states, BLOCK=256, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out_RC
