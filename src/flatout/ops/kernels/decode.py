"""Kernels for decoding: one new token of every row, about five kernels a layer.

    product:   out = act(input @ weight.T + bias), where the input is one of
               values    as they are
               normed    norm of the residual stream, whose waiting branch is added (and stored) on the way
               combined  the parts that `attend` left, joined and gated
    attend:    norms and positions of queries and keys, the cache's new entry, and attention over a part of the cache
    advance:   the states of an eigenstate mixer, one position further

One row is multiplied element by element, more rows by matrix units. Nothing depends on a length that the host knows, so
a whole pass can be recorded. A row's result does not depend on the other rows.

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
def _stream(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, at, k, mask, inside,
    BRANCH: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """The residual stream with its branch added and the first stream mixed in."""
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    if BRANCH:
        branch = tl.load(branch_ptr + at, mask, 0.0).to(tl.float32)
        if SCALED:
            branch *= tl.load(scale_ptr + k, inside, 0.0).to(tl.float32)[None, :]
        x += branch
    if MIXED:
        first = tl.load(first_ptr + at, mask, 0.0).to(tl.float32)
        x = tl.load(mix_ptr).to(tl.float32) * x + tl.load(mix_ptr + 1).to(tl.float32) * first
    return x


@triton.jit
def _combined(
    parts_ptr, sums_ptr, gates_ptr, row, k, mask, gate_stride, gate_start,
    H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Attention's result from those of its parts: each has its largest score and its sum of weights."""
    head = row.to(tl.int64)[:, None] * H + (k // D)[None, :]
    top = tl.full(mask.shape, -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(sums_ptr + (head * PARTS + part) * 2, mask, 0.0))
    total = tl.zeros(mask.shape, tl.float32)
    y = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        place = head * PARTS + part
        factor = tl.exp2(tl.load(sums_ptr + place * 2, mask, 0.0) - top)
        total += factor * tl.load(sums_ptr + place * 2 + 1, mask, 1.0)
        y += factor * tl.load(parts_ptr + place * D + (k % D)[None, :], mask, 0.0)
    y = y / total
    if GATED:
        y *= tl.load(gates_ptr + row[:, None] * gate_stride + gate_start + (k // D)[None, :], mask, 0.0)
    return tl.where(mask, y, 0.0)


@triton.jit
def _weights(w_ptr, n, k, mask, K: tl.constexpr):
    return tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask, 0.0)


@triton.jit
def _times(h, w, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """[ROWS, outputs] of inputs [ROWS, k] and weights [outputs, k]. Inputs are rounded to the type of products."""
    if ROWS == 1:
        return tl.sum(w.to(tl.float32) * h.to(tl.float32), 1)[None, :]
    elif EXACT:
        return tl.dot(h.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(h, tl.trans(w.to(h.dtype)))


@triton.jit
def _product(
    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, new_ptr, norm_weight_ptr, norm_bias_ptr, parts_ptr, sums_ptr,
    gates_ptr, gate_weight_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, eps, cap, gate_stride, gate_start, counted,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BRANCH: tl.constexpr, SCALED: tl.constexpr,
    MIXED: tl.constexpr, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, NORM_BIAS: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, GATES: tl.constexpr, GATE_INPUTS: tl.constexpr,
    INT8: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, CAPPED: tl.constexpr, TYPE: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # What is read before the wait: weights, and values of the norm.
    w = _weights(w_ptr, n, k, (n < N)[:, None] & (k < K)[None, :], K)
    if ACT == 3:
        value_w = _weights(w_ptr, n + N, k, (n < N)[:, None] & (k < K)[None, :], K)
    _wait(EARLY)

    # KIND 0: values; 1: normed; 2: combined
    mean = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    if KIND == 1:
        for start in tl.static_range(0, K, BLOCK_K):
            at_k = start + k
            mask = alive[:, None] & (at_k < K)[None, :]
            at = row.to(tl.int64)[:, None] * K + at_k[None, :]
            x = _stream(
                x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, at, at_k, mask, at_k < K, BRANCH, SCALED, MIXED
            )
            if tl.program_id(0) == 0 and (BRANCH or MIXED):
                tl.store(new_ptr + at, x, mask)
            if CENTRED:
                mean += tl.sum(x, 1)
            else:
                spread += tl.sum(x * x, 1)
        mean = mean / K
        if CENTRED:
            for start in tl.static_range(0, K, BLOCK_K):
                at_k = start + k
                mask = alive[:, None] & (at_k < K)[None, :]
                at = row.to(tl.int64)[:, None] * K + at_k[None, :]
                x = _stream(
                    x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, at, at_k, mask, at_k < K, BRANCH, SCALED, MIXED
                )
                x = tl.where(mask, x - mean[:, None], 0.0)
                spread += tl.sum(x * x, 1)
        spread = tl.rsqrt(spread / K + eps)

    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    value = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at_k = start + k
        inside = at_k < K
        mask = alive[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * K + at_k[None, :]
        if KIND == 0:
            h = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        elif KIND == 1:
            x = _stream(
                x_ptr, branch_ptr, scale_ptr, mix_ptr, first_ptr, at, at_k, mask, inside, BRANCH, SCALED, MIXED
            )
            h = (x - mean[:, None]) * spread[:, None]
            if WEIGHTED:
                h *= tl.load(norm_weight_ptr + at_k, inside, 0.0).to(tl.float32)[None, :]
            if NORM_BIAS:
                h += tl.load(norm_bias_ptr + at_k, inside, 0.0).to(tl.float32)[None, :]
            h = tl.where(mask, h, 0.0)
        else:
            h = _combined(
                parts_ptr, sums_ptr, gates_ptr, row, at_k, mask, gate_stride, gate_start, H, D, PARTS, GATED
            )
        if start == 0 and GATES > 0:
            # The gates read the first channels, which are all in the first block.
            if tl.program_id(0) == 0:
                for gate in range(0, counted):
                    read = tl.load(gate_weight_ptr + gate * GATE_INPUTS + k, k < GATE_INPUTS, 0.0).to(tl.float32)
                    made = 2.0 * tl.sigmoid(tl.sum(h.to(TYPE).to(tl.float32) * read[None, :], 1))
                    tl.store(gates_ptr + row * gate_stride + gate, made, alive)
        if start > 0:
            w = _weights(w_ptr, n, at_k, (n < N)[:, None] & inside[None, :], K)
            if ACT == 3:
                value_w = _weights(w_ptr, n + N, at_k, (n < N)[:, None] & inside[None, :], K)
        total += _times(h.to(TYPE), w, ROWS, EXACT)
        if ACT == 3:
            value += _times(h.to(TYPE), value_w, ROWS, EXACT)

    if INT8:
        total *= tl.load(w_scale_ptr + n, n < N, 0.0)[None, :]
        if ACT == 3:
            value *= tl.load(w_scale_ptr + N + n, n < N, 0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
        if ACT == 3:
            value += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[None, :]
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
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), alive[:, None] & (n < N)[None, :])


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


def _blocks(rows: int, outputs: int, inputs: int, doubled: bool, device: torch.device) -> dict[str, int]:
    """Sizes of blocks, measured on an H200. One row: several programs per multiprocessor, each with a few outputs."""
    whole = int(triton.next_power_of_2(inputs))
    if rows == 1:
        wide = min(whole, 1024)
        few = max(1, outputs // (3 * multiprocessors(device)))
        block = min(16, int(triton.next_power_of_2(few)), max(1, 16_384 // wide))
        return {"ROWS": 1, "BLOCK_N": max(2, block // 2 if doubled else block), "BLOCK_K": wide, "num_warps": 4}
    block = 16 if outputs < 16 * 2 * multiprocessors(device) else 32 if outputs < 128 * multiprocessors(device) else 64
    return {
        "ROWS": 16 if rows <= 16 else 32 if rows <= 32 else 64,
        "BLOCK_N": block,
        "BLOCK_K": max(16, min(whole, 128)),
        "num_warps": 4,
    }


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    out_RN = torch.empty(rows, outputs, dtype=out_dtype, device=matrix.device)
    nothing = out_RN
    values: dict[str, Any] = dict.fromkeys(("x", "branch", "scale", "mix", "first", "new", "norm_weight"), nothing)
    values |= dict.fromkeys(("norm_bias", "parts", "sums", "gates", "gate_weight"), nothing)
    flags: dict[str, Any] = {"KIND": 0, "BRANCH": False, "SCALED": False, "MIXED": False, "CENTRED": False}
    flags |= {"WEIGHTED": False, "NORM_BIAS": False, "H": 1, "D": 1, "PARTS": 1, "GATED": False, "GATES": 0}
    flags |= {"GATE_INPUTS": 1}
    eps, gate_stride, gate_start, counted = 0.0, 0, 0, 0
    if isinstance(source, Normed):
        found = {"x": source.x_RW, "branch": source.branch_RW, "scale": source.scale_W, "mix": source.mix_2}
        found |= {"first": source.first_RW, "new": source.new_RW, "norm_weight": source.weight_W}
        found |= {"norm_bias": source.bias_W}
        values |= {name: value for name, value in found.items() if value is not None}
        flags |= {"KIND": 1, "BRANCH": source.branch_RW is not None, "SCALED": source.scale_W is not None}
        flags |= {"MIXED": source.mix_2 is not None, "CENTRED": source.centred}
        flags |= {"WEIGHTED": source.weight_W is not None, "NORM_BIAS": source.bias_W is not None}
        eps = source.eps
    elif isinstance(source, Combined):
        heads, parts, size = source.parts_RHPD.shape[1:]
        values |= {"parts": source.parts_RHPD, "sums": source.sums_RHP2}
        flags |= {"KIND": 2, "H": heads, "D": size, "PARTS": parts, "GATED": source.gates_RC is not None}
        if source.gates_RC is not None:
            values["gates"] = source.gates_RC
            gate_stride, gate_start = source.gates_RC.stride(0), source.gate_start
    else:
        values["x"] = source
    if gates is not None:
        counted, width = gates.weight_CI.shape
        values |= {"gates": gates.gates_RC, "gate_weight": gates.weight_CI}
        flags |= {"GATES": 1, "GATE_INPUTS": width}
        gate_stride = gates.gates_RC.stride(0)
    sizes = _blocks(rows, outputs, inputs, activation == "swiglu", matrix.device)
    early = starts_early(matrix.device)
    _product[(triton.cdiv(outputs, sizes["BLOCK_N"]), triton.cdiv(rows, sizes["ROWS"]))](
        *(values[name] for name in ("x", "branch", "scale", "mix", "first", "new", "norm_weight", "norm_bias", "parts")),
        values["sums"], values["gates"], values["gate_weight"], matrix,
        nothing if weights.scale_N is None else weights.scale_N, nothing if bias is None else bias, out_RN, rows, eps,
        cap, gate_stride, gate_start, counted, N=outputs, K=inputs, INT8=weights.scale_N is not None,
        BIAS=bias is not None, ACT=ACTIVATIONS[activation], CAPPED=cap > 0.0, TYPE=_TYPES[dtype],
        EXACT=dtype == torch.float32 or not matrix.is_cuda, EARLY=early, **flags, **sizes,
        **({"launch_pdl": True} if early else {}),
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
