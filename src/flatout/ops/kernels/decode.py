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
    total, value, n, unit, w_scale_ptr, bias_ptr, cap, N: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Sums of a product [..., outputs] with scales, bias, activation and cap; `value` is swiglu's second half."""
    if INT8:
        total *= tl.load(w_scale_ptr + n, n < N, 0.0) * unit
        if ACT == 3:
            value *= tl.load(w_scale_ptr + N + n, n < N, 0.0) * unit
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
def _sums(w, h, INT8: tl.constexpr, INLINE: tl.constexpr):
    """Products of each row of weights with `h`, summed; `h` is a row, or the digits of one."""
    if INT8:
        total = _of_fours(_times_four(w, h[0][None, :], INLINE))
        total += 256.0 * _of_fours(_times_four(w, h[1][None, :], INLINE))
        if len(h) > 2:
            total += 65536.0 * _of_fours(_times_four(w, h[2][None, :], INLINE))
        return tl.sum(total, 1)
    else:
        return tl.sum(w.to(tl.float32) * h[None, :], 1)


@triton.jit
def _times_four(a, b, INLINE: tl.constexpr):
    """Sums of the products of four bytes, which one instruction makes; Triton's interpreter does not have it."""
    if INLINE:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    total = ((a << 24) >> 24) * ((b << 24) >> 24)
    for shift in tl.static_range(0, 24, 8):  # pyright: ignore[reportGeneralTypeIssues]
        total += ((a << shift) >> 24) * ((b << shift) >> 24)
    return total


@triton.jit
def _of_fours(x):
    """Sums of four neighbours in fp32. They are below 2^22, so bits make the number: a conversion takes longer."""
    sums = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), 2)
    return (sums + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _digits(h, TYPE: tl.constexpr, BLOCK_K: tl.constexpr):
    """A row as whole numbers of 24 bits, or 16 for narrow types: (digits of 8 bits, four channels in each value), unit.

    16 bits round to a 65,000th of the row's largest value, bf16 to a 256th of each.
    """
    most: tl.constexpr = 8323072.0 if tl.float32 == TYPE else 32512.0
    largest = tl.maximum(tl.reduce(tl.abs(h), 0, _larger), 1e-30, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(h * tl.div_rn(most, largest) + 0.5).to(tl.int32)
    above = (whole + 128) >> 8
    unit = tl.div_rn(largest, most)
    if tl.float32 == TYPE:
        return (_packed(whole, BLOCK_K), _packed(above, BLOCK_K), _packed((above + 128) >> 8, BLOCK_K)), unit
    else:
        return (_packed(whole, BLOCK_K), _packed(above, BLOCK_K)), unit


@triton.jit
def _packed(x, BLOCK_K: tl.constexpr):
    """The lowest bytes of four neighbours side by side."""
    return tl.sum(tl.reshape(x & 0xFF, (BLOCK_K // 4, 4)) << (8 * tl.arange(0, 4))[None, :], 1)


@triton.jit
def _of_one_row(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, gates_ptr,
    gate_weight_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, eps, cap, gate_stride, counted, stride,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, BRANCH: tl.constexpr, SCALED: tl.constexpr,
    MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, NORM_BIAS: tl.constexpr, GATES: tl.constexpr,
    GATE_INPUTS: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr,
    TYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, INLINE: tl.constexpr,
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
    unit = 1.0
    if INT8:
        h, unit = _digits(h, TYPE, BLOCK_K)
    for start in range(first, N, stride):  # the next block is fetched before this one is used
        next_w, next_value_w = _weights(w_ptr, start + stride + block, N, K, INT8, ACT, BLOCK_K)
        n = start + block
        total = _sums(w, h, INT8, INLINE)
        value = total
        if ACT == 3:
            value = _sums(value_w, h, INT8, INLINE)
        total = _finished(total, value, n, unit, w_scale_ptr, bias_ptr, cap, N, INT8, BIAS, ACT, CAPPED)
        tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), n < N)
        w, value_w = next_w, next_value_w


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


@triton.jit
def _int8_rows(
    x_ptr, w_ptr, scale_ptr, out_ptr, rows, N: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of several rows by 8-bit weights, which become the inputs' type on the way."""
    n, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    _wait(EARLY)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], 0)
        x = tl.load(x_ptr + r[None, :] * K + k[:, None], (r < rows)[None, :] & (k < K)[:, None], 0.0)
        total = tl.dot(w.to(x.dtype), x, total)
    total *= tl.load(scale_ptr + n, n < N, 0.0)[:, None]
    made = tl.trans(total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * N + n[None, :], made, (r < rows)[:, None] & (n < N)[None, :])


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
    block, programs, warps = _blocks(outputs, whole, int8=int8, doubled=doubled)
    _of_one_row[(programs, 1)](
        *tensors, matrix.view(torch.int32) if int8 else matrix, scale_N, out_RN if bias is None else bias, out_RN,
        **numbers, **flags, cap=cap, stride=programs * block, N=outputs, K=inputs, INT8=int8, BIAS=bias is not None,
        ACT=ACTIVATIONS[activation], CAPPED=cap > 0.0, TYPE=_TYPES[dtype], BLOCK_N=block, BLOCK_K=whole,
        INLINE=matrix.is_cuda, num_warps=warps, **launch,
    )  # fmt: skip
    return out_RN


def _blocks(outputs: int, inputs: int, *, int8: bool, doubled: bool) -> tuple[int, int, int]:
    """(outputs at once, programs, warps) of a product of one row: the fastest on an H200 (`lab/products.jsonl`)."""
    width = inputs * (1 if int8 else 2) * (2 if doubled else 1)  # bytes
    if outputs >= 16_384 or (int8 and doubled):
        tile, most, warps = 16_384, 528, 8
    elif int8 or (inputs > 4096 and not doubled):
        tile, most, warps = 32_768, 264, 8
    else:
        tile, most, warps = 32_768, 1056, 4
    few = 1 << max(0, (outputs // 192).bit_length() - 1)
    block = min(16, few, max(1, tile // width))
    return block, min(int(triton.cdiv(outputs, block)), most), warps


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
    elif dtype == torch.float32:  # its matrix units would add up in one long sum
        y_RN = F.linear(x_RK, weights.matrix_NK.to(dtype)) * weights.scale_N
        y_RN = y_RN if bias is None else y_RN + bias
    else:
        y_RN = _int8_product(x_RK.to(dtype), weights.matrix_NK, weights.scale_N, launch)
        y_RN = y_RN if bias is None else y_RN + bias
    if activation == "gelu":
        y_RN = F.gelu(y_RN, approximate="tanh")
    elif activation == "relu2":
        y_RN = F.relu(y_RN).square()
    elif activation == "swiglu":
        gate_RN, value_RN = y_RN.chunk(2, dim=1)
        y_RN = F.silu(gate_RN) * value_RN
    return y_RN if not cap else cap * torch.tanh(y_RN.float() / cap)


def _int8_product(x_RK: Tensor, matrix_NK: Tensor, scale_N: Tensor, launch: dict[str, Any]) -> Tensor:
    (rows, inputs), outputs = x_RK.shape, len(matrix_NK)
    y_RN = torch.empty(rows, outputs, dtype=x_RK.dtype, device=x_RK.device)
    at_once = min(64, max(16, int(triton.next_power_of_2(rows))))
    block = min(64, max(16, 1 << max(0, (outputs // 128).bit_length() - 1)))
    _int8_rows[(triton.cdiv(outputs, block), triton.cdiv(rows, at_once))](
        x_RK, matrix_NK, scale_N, y_RN, rows, N=outputs, K=inputs, BLOCK_R=at_once,
        BLOCK_N=block, BLOCK_K=128, num_warps=4, num_stages=4, **launch,
    )  # fmt: skip
    return y_RN


# --- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _turned(x, other, cos, sin, ROPE: tl.constexpr):
    if ROPE:
        return x * cos + other * sin
    else:
        return x


@triton.jit
def _entries(k_ptr, v_ptr, at, end, place, places, window, D: tl.constexpr, SIZE: tl.constexpr):
    """Keys and values [BLOCK, SIZE] of these places, and which of them are seen."""
    back = (place - at + places) % places  # tokens ago
    seen = (at < end) & (back > 0) & (back < window)
    d = tl.arange(0, SIZE)
    mask = seen[:, None] & (d < D)[None, :]
    entry = at.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(k_ptr + entry, mask, 0.0), tl.load(v_ptr + entry, mask, 0.0), seen


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

    # Places of earlier tokens, without the place of the new one. The first block of them is fetched before the wait:
    # they and the position were written before the kernel ahead of this one began.
    position = tl.load(pos_ptr + row)
    k_ptr += (row * G + group) * places * D
    v_ptr += (row * G + group) * places * D
    place = position % places
    filled = tl.minimum(position, places).to(tl.int32)
    share = tl.cdiv(tl.cdiv(filled, PARTS), BLOCK) * BLOCK
    end = tl.minimum(part * share + share, filled)
    at = part * share + tl.arange(0, BLOCK)
    keys, values, seen = _entries(k_ptr, v_ptr, at, end, place, places, window, D, SIZE)
    _wait(EARLY)

    # Queries of the group's heads, the new key and the new value.
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
    if part == 0:
        tl.store(k_ptr + place * D + d, key, inside)
        tl.store(v_ptr + place * D + d, value, inside)
    if HEADS == 1:
        # Each place of a block has sums of its own, so warps exchange nothing until the end.
        q = tl.sum(q, 0)
        mine_S = (tl.arange(0, BLOCK) == 0) & (part == 0)
        top = tl.where(mine_S, tl.sum(q * key.to(tl.float32), 0) * scale, -1e30)
        total = tl.where(mine_S, 1.0, 0.0)
        result = tl.where(mine_S[:, None], value.to(tl.float32)[None, :], 0.0)
        for _ in range(part * share, end, BLOCK):
            scores = tl.where(seen, tl.sum(keys.to(tl.float32) * q[None, :], 1) * scale, -1e30)
            higher = tl.maximum(top, scores)
            weight = tl.where(seen, tl.exp2(scores - higher), 0.0)
            kept = tl.exp2(top - higher)
            total = total * kept + weight
            result = result * kept[:, None] + values.to(tl.float32) * weight[:, None]
            top = higher
            at += BLOCK
            keys, values, seen = _entries(k_ptr, v_ptr, at, end, place, places, window, D, SIZE)
        highest = tl.max(top, 0)
        kept = tl.exp2(top - highest)
        total = tl.sum(total * kept, 0) + tl.zeros((HEADS,), tl.float32)
        result = tl.sum(result * kept[:, None], 0)[None, :]
        top = highest + tl.zeros((HEADS,), tl.float32)
    else:
        alone = part == 0
        top = tl.where(alone, tl.sum(q * key.to(tl.float32)[None, :], 1) * scale, -1e30)
        total = tl.zeros((HEADS,), tl.float32) + tl.where(alone, 1.0, 0.0)
        result = tl.zeros((HEADS, SIZE), tl.float32) + tl.where(alone, value.to(tl.float32), 0.0)[None, :]
        for _ in range(part * share, end, BLOCK):
            if EXACT:
                scores = tl.dot(q, tl.trans(keys.to(tl.float32)), input_precision="ieee")
            else:
                scores = tl.dot(q.to(keys.dtype), tl.trans(keys))
            scores = tl.where(seen[None, :], scores * scale, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            weight = tl.where(seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            kept = tl.exp2(top - higher)
            total = total * kept + tl.sum(weight, 1)
            if EXACT:
                added = tl.dot(weight, values.to(tl.float32), input_precision="ieee")
            else:
                added = tl.dot(weight.to(values.dtype), values)
            result = result * kept[:, None] + added
            top = higher
            at += BLOCK
            keys, values, seen = _entries(k_ptr, v_ptr, at, end, place, places, window, D, SIZE)  # pyright: ignore[reportGeneralTypeIssues]
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
            largest = tl.max(tops, 1)
            sums = tl.load(sums_ptr + each * 2 + 1, alive, 1.0, cache_modifier=".cg")
            total = tl.sum(tl.exp2(tops - largest[:, None]) * sums, 1)
            result = tl.zeros((HEADS, SIZE), tl.float32)
            for one in tl.static_range(PARTS):
                where = wanted * PARTS + one
                factor = tl.exp2(tl.load(sums_ptr + where * 2, head < SHARE, -1e30, cache_modifier=".cg") - largest)
                made = tl.load(parts_ptr + where[:, None] * D + d[None, :], mine, 0.0, cache_modifier=".cg")
                result += made * factor[:, None]
            result = result / total[:, None]
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
    parts, whole = _parts(rows * groups, places, device), max(16, int(triton.next_power_of_2(size)))
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
        SIZE=whole, PARTS=parts, BLOCK=32 if share == 1 else 64, ROPE=turn is not None,
        NORMED=norms is not None, WEIGHTED=q_weight is not None, VALUES=values is not None,
        GATED=gates_RC is not None and gates_RC.shape[1] > value_gates,
        EXACT=k_RGSD.dtype == torch.float32 or not k_RGSD.is_cuda, EARLY=early, num_warps=4 if share == 1 else 8,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y_RC


def _parts(programs: int, places: int, device: torch.device) -> int:
    """Parts of the cache, of 64 places at least: enough to fill the device, more of a long one."""
    wanted, room = max(1, 8 * multiprocessors(device) // programs), int(triton.next_power_of_2(places))
    return max(1, min(1 << (wanted.bit_length() - 1), max(8, room // 128), room // 64))


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
