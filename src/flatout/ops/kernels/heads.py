"""Queries, keys and values from one product, as views of its result, and the gates of attention.

    gates[n] = 2 · sigmoid(weight @ h[n, :I])               (I: a few channels of the normed input; fp32)
    v[n, g] += gates[n, g] · table[token[n], g]             (in place: the product that made v does not need it)
    y'[n, h] = y[n, h] · gates[n, h]

Backward: attention returns three gradients, packed side by side already or in layouts of their own. One pass packs them
and sums the columns, which are the gradient of the bias; for 8-bit products it also writes them in 8 bits
(ops/scales.py). The gradient of the gates' input is added to the first channels of dh: a tensor of its own would be as
large as the stream and almost all zero.

Value tables: backward looks the rows up again and adds gradient rows atomically in fp32, or by torch's sorting path in
deterministic runs, as in stream.py. A table serves several blocks, which all add to one gradient. A token id outside
the table gives NaN and no gradient.

Shape legend: B batch, T positions, N = B·T rows, H query heads, G key/value heads, D head size, W width, C columns of
the product or gates of a token, I channels that gates read, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.attention import packed
from flatout.ops.gradients import accumulated, gradient_type
from flatout.ops.kernels.fp8 import record, rounding_of, store_narrow
from flatout.ops.kernels.launch import dense, fold, multiprocessors, programs_for, share_of, strides
from flatout.ops.kernels.linear import Weight
from flatout.ops.scales import NarrowLinear, Slot

_ROWS = 64  # rows at once; rows of gates are short


@triton.jit
def _make(
    h_ptr, weight_ptr, gates_ptr, rows, h_stride, count, inputs,
    ROWS: tl.constexpr, COUNT: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate, channel = tl.arange(0, COUNT), tl.arange(0, INPUTS)
    h_mask = (row < rows)[:, None] & (channel < inputs)[None, :]
    h = tl.load(h_ptr + row.to(tl.int64)[:, None] * h_stride + channel[None, :], h_mask, 0.0).to(tl.float32)
    weight_mask = (channel < inputs)[:, None] & (gate < count)[None, :]
    weight = tl.load(weight_ptr + gate[None, :] * inputs + channel[:, None], weight_mask, 0.0).to(tl.float32)
    gates = 2.0 * tl.sigmoid(tl.dot(h, weight, input_precision="ieee"))
    mask = (row < rows)[:, None] & (gate < count)[None, :]
    tl.store(gates_ptr + row.to(tl.int64)[:, None] * count + gate[None, :], gates, mask)


@triton.jit
def _back(
    dvalues_ptr, dheads_ptr, gates_ptr, h_ptr, weight_ptr, dh_ptr, sums_ptr, rows, share, h_stride, dh_stride, values,
    heads, inputs, ROWS: tl.constexpr, COUNT: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    gate, channel = tl.arange(0, COUNT), tl.arange(0, INPUTS)
    count = values + heads
    weight_mask = (gate < count)[:, None] & (channel < inputs)[None, :]
    weight = tl.load(weight_ptr + gate[:, None] * inputs + channel[None, :], weight_mask, 0.0).to(tl.float32)
    total = tl.zeros((COUNT, INPUTS), tl.float32)
    end = tl.minimum(program * share + share, rows)
    for start in range(program * share, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at, alive = row.to(tl.int64)[:, None], (row < end)[:, None]
        mask = alive & (gate < count)[None, :]
        of_values = alive & (gate < values)[None, :]
        of_heads = mask & (gate >= values)[None, :]
        upper = tl.load(dvalues_ptr + at * values + gate[None, :], of_values, 0.0)
        upper += tl.load(dheads_ptr + at * heads + (gate - values)[None, :], of_heads, 0.0)
        gates = tl.load(gates_ptr + at * count + gate[None, :], mask, 0.0)
        upper *= gates * (1.0 - 0.5 * gates)  # the sigmoid's slope, of twice the sigmoid
        h_mask = alive & (channel < inputs)[None, :]
        h = tl.load(h_ptr + at * h_stride + channel[None, :], h_mask, 0.0).to(tl.float32)
        total += tl.dot(tl.trans(upper), h, input_precision="ieee")
        place = dh_ptr + at * dh_stride + channel[None, :]
        dh = tl.load(place, h_mask, 0.0).to(tl.float32) + tl.dot(upper, weight, input_precision="ieee")
        tl.store(place, dh.to(dh_ptr.dtype.element_ty), h_mask)
    sums = sums_ptr + program * count * inputs + gate[:, None] * inputs + channel[None, :]
    tl.store(sums, total, weight_mask)


def _blocks(count: int, inputs: int) -> dict[str, int]:
    """Sizes for a product in Triton: powers of two, at least 16."""
    return {name: max(16, int(triton.next_power_of_2(size))) for name, size in (("COUNT", count), ("INPUTS", inputs))}


def make_gates(h_NW: Tensor, weight_CI: Tensor) -> Tensor:
    """Gates [N, C] in fp32; rows of `h_NW` may be strided."""
    (rows, _), (count, inputs) = h_NW.shape, weight_CI.shape
    gates_NC = torch.empty(rows, count, dtype=torch.float32, device=h_NW.device)
    _make[(triton.cdiv(rows, _ROWS),)](
        h_NW, weight_CI, gates_NC, rows, h_NW.stride(0), count, inputs, ROWS=_ROWS, **_blocks(count, inputs)
    )
    return gates_NC


def gates_back(
    dvalues_NG: Tensor | None,
    dheads_NH: Tensor | None,
    gates_NC: Tensor,
    h_NW: Tensor,
    weight_CI: Tensor,
    dh_NW: Tensor,
) -> Tensor:
    """Returns the gradient [C, I] of the weights, and adds that of the input to `dh_NW`."""
    rows, (count, inputs) = len(h_NW), weight_CI.shape
    values = 0 if dvalues_NG is None else dvalues_NG.shape[1]
    programs = min(programs_for(rows, h_NW.device), triton.cdiv(rows, _ROWS))
    share = share_of(rows, programs, _ROWS)
    sums = torch.empty(programs, count, inputs, dtype=torch.float32, device=h_NW.device)
    _back[(programs,)](
        gates_NC if dvalues_NG is None else dvalues_NG, gates_NC if dheads_NH is None else dheads_NH, gates_NC, h_NW,
        weight_CI, dh_NW, sums, rows, share, h_NW.stride(0), dh_NW.stride(0), values, count - values, inputs,
        ROWS=_ROWS, **_blocks(count, inputs), num_stages=1,
    )  # fmt: skip
    return fold(sums)


# --- values from a table ----------------------------------------------------------------------------------------------


class Rows:
    """Rows of a value table [V, G·D] for the values of `blocks` blocks, and the table's accumulated gradient.

    Not a dataclass, because FSDP would pass copies of it to the blocks, with a table that is not a leaf.
    """

    def __init__(self, tokens_BT: Tensor, table_VC: Tensor, blocks: int) -> None:
        self.tokens_BT = tokens_BT
        self.table_VC = table_VC
        self.blocks = blocks  # whose backward pass is still to come
        self.gradient: Tensor | None = None

    def room(self) -> tuple[Tensor, Tensor | None]:
        """(tensor to which a block adds the table's gradient, the gradient to return to autograd).

        Only the last block returns one. Autograd uses a tensor without a copy if there is no other reference to it.
        """
        self.blocks -= 1
        there = accumulated(self.table_VC)
        if there is not None and there.dtype == torch.float32 and there.is_contiguous():
            return there, None
        room, self.gradient = self.gradient, None
        if room is None:
            room = torch.zeros(self.table_VC.shape, dtype=torch.float32, device=self.table_VC.device)
        if self.blocks > 0:
            self.gradient = room
            return room, None
        return room, room


@triton.jit
def _add(
    v_ptr, gates_ptr, tokens_ptr, table_ptr, rows, positions, vocab, groups, gates_stride, stride_b, stride_g, stride_t,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups  # neighbouring programs read the same rows
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    token = tl.load(tokens_ptr + row, row < rows, -1).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    place = token[:, None] * (groups * SIZE) + group * SIZE + column[None, :]
    value = tl.load(table_ptr + place, mask & known[:, None], float("nan")).to(tl.float32)
    gate = tl.load(gates_ptr + row.to(tl.int64) * gates_stride + group, row < rows, 0.0)[:, None]
    origin = (row // positions).to(tl.int64) * stride_b + (row % positions).to(tl.int64) * stride_t + group * stride_g
    at = v_ptr + origin[:, None] + column[None, :]
    v = tl.load(at, mask, 0.0).to(tl.float32) + gate * value
    tl.store(at, v.to(v_ptr.dtype.element_ty), mask)


@triton.jit
def _add_back(
    dv_ptr, gates_ptr, tokens_ptr, table_ptr, dgates_ptr, dtable_ptr, rows, positions, vocab, groups, gates_stride,
    stride_b, stride_g, stride_t,
    HAS_TABLE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    token = tl.load(tokens_ptr + row, row < rows, -1).to(tl.int64)
    mask &= ((token >= 0) & (token < vocab))[:, None]
    place = token[:, None] * (groups * SIZE) + group * SIZE + column[None, :]
    origin = (row // positions).to(tl.int64) * stride_b + (row % positions).to(tl.int64) * stride_t + group * stride_g
    dv = tl.load(dv_ptr + origin[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    value = tl.load(table_ptr + place, mask, 0.0).to(tl.float32)
    tl.store(dgates_ptr + row.to(tl.int64) * groups + group, tl.sum(dv * value, 1), row < rows)
    if HAS_TABLE:
        gate = tl.load(gates_ptr + row.to(tl.int64) * gates_stride + group, row < rows, 0.0)[:, None]
        tl.atomic_add(dtable_ptr + place, gate * dv, mask, sem="relaxed")


def _tiles(size: int) -> dict[str, int]:
    block = int(triton.next_power_of_2(size))
    return {"SIZE": size, "BLOCK": block, "ROWS": max(1, 2048 // block), "num_warps": 4}


class _AddValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, gates, table, rows):
        batch, groups, positions, size = v.shape
        assert v.stride(3) == 1
        assert table.is_contiguous()
        tokens, tiles = rows.tokens_BT.contiguous(), _tiles(size)
        count = batch * positions
        _add[(triton.cdiv(count, tiles["ROWS"]) * groups,)](
            v, gates, tokens, table, count, positions, len(table), groups, gates.stride(1), *strides(v), **tiles
        )
        ctx.save_for_backward(gates, tokens)
        ctx.rows, ctx.table = rows, table
        return v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx, dv):
        (gates, tokens), table = ctx.saved_tensors, ctx.table
        batch, groups, positions, size = dv.shape
        taken = dense(dv)
        dgates = torch.empty(batch, positions, groups, dtype=torch.float32, device=dv.device)
        wants, exact = ctx.needs_input_grad[2], torch.are_deterministic_algorithms_enabled()
        dtable = back = None
        if wants and exact:
            drows = (taken.transpose(1, 2).float() * gates[..., None]).flatten(2)
            back = torch.ops.aten.embedding_dense_backward(drows, tokens, len(table), -1, False)
        elif wants:
            dtable, back = ctx.rows.room()
        tiles, count = _tiles(size), batch * positions
        _add_back[(triton.cdiv(count, tiles["ROWS"]) * groups,)](
            taken, gates, tokens, table, dgates, dgates if dtable is None else dtable, count, positions, len(table),
            groups, gates.stride(1), *strides(taken), HAS_TABLE=dtable is not None, **tiles,
        )  # fmt: skip
        return dv, dgates, None if back is None else back.to(gradient_type(table)), None


def add_values(v_BGTD: Tensor, gates_BTG: Tensor, rows: Rows) -> Tensor:
    """v plus gated rows of a table, in place: the old values must not be needed any more."""
    return _AddValues.apply(v_BGTD, gates_BTG, rows.table_VC, rows)  # pyright: ignore


# --- heads ------------------------------------------------------------------------------------------------------------


@triton.jit
def _weigh(
    y_ptr, gates_ptr, out_ptr, dy_ptr, dgates_ptr, rows, positions, heads, gates_stride, y_stride_b, y_stride_h,
    y_stride_t, dy_stride_b, dy_stride_h, dy_stride_t,
    BACK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = y · gate; or, with `BACK`, out = dy · gate and the gradient of the gate."""
    head = tl.program_id(0) % heads
    row = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    batch, position = (row // positions).to(tl.int64), (row % positions).to(tl.int64)
    y_place = (batch * y_stride_b + position * y_stride_t + head * y_stride_h)[:, None] + column[None, :]
    y = tl.load(y_ptr + y_place, mask, 0.0).to(tl.float32)
    if BACK:
        dy_place = (batch * dy_stride_b + position * dy_stride_t + head * dy_stride_h)[:, None] + column[None, :]
        dy = tl.load(dy_ptr + dy_place, mask, 0.0).to(tl.float32)
        tl.store(dgates_ptr + row.to(tl.int64) * heads + head, tl.sum(y * dy, 1), row < rows)
        y = dy
    gate = tl.load(gates_ptr + row.to(tl.int64) * gates_stride + head, row < rows, 0.0)[:, None]
    out = (row.to(tl.int64) * heads + head)[:, None] * SIZE + column[None, :]
    tl.store(out_ptr + out, (y * gate).to(out_ptr.dtype.element_ty), mask)


def _weighed(y: Tensor, gates: Tensor, dy: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, positions, size = y.shape
    out = torch.empty(batch, positions, heads, size, dtype=y.dtype, device=y.device).transpose(1, 2)
    shape = (batch, positions, heads) if dy is not None else (0,)
    dgates = torch.empty(shape, dtype=torch.float32, device=y.device)
    count, tiles, back = batch * positions, _tiles(size), y if dy is None else dy
    _weigh[(triton.cdiv(count, tiles["ROWS"]) * heads,)](
        y, gates, out, back, dgates, count, positions, heads, gates.stride(1), *strides(y), *strides(back),
        BACK=dy is not None, **tiles,
    )  # fmt: skip
    return out, dgates


class _GateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gates):
        y = dense(y)
        ctx.save_for_backward(y, gates)
        return _weighed(y, gates, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        y, gates = ctx.saved_tensors
        return _weighed(y, gates, dense(dout))


def gate_heads(y_BHTD: Tensor, gates_BTH: Tensor) -> Tensor:
    """y with each head times its gate, in memory as [B, T, H, D]."""
    return _GateHeads.apply(y_BHTD, gates_BTH)  # pyright: ignore


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
_PACKED_SIZES = (4, 256, 1, 32, 1)  # if nothing is copied


def pack_heads(parts: list[Tensor], *, sums: bool, slot: Slot | None = None) -> tuple[Tensor, Tensor | None]:
    """(gradients [B, heads, T, D] packed side by side as [B·T, C], their column sums if `sums`).

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
    share = share_of(rows, programs, at_once)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=device) if sums else None
    rounding = rounding_of(slot, out.shape, device)
    first = 0
    for part in parts:
        part = dense(part)
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

    `counts`: how many rows of `gates` are for values, and how many for heads.
    """
    return _ProjectHeads.apply(h_BTW, weight_CW, bias_C, heads, groups, narrow, tuned, gates, counts)  # pyright: ignore
