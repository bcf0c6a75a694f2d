"""Low-rank adapters: copied into their joined weights, and their gradients.

`Spreading` copies all adapters of a model into the joined weights (ops/lora.py) by one kernel instead of hundreds of
small copies. Its table of parts is made once and stays on the device. It holds addresses, because every joined weight
is a buffer of its own: after a buffer has moved, make a new table.

`add_adapter_gradients` adds thin products over many tokens to the gradients:

    dA += s · gᵀ x          [R, I]           g = dy B
    dB += dyᵀ u             [O_p, R_p]       u = s · x Aᵀ, for each part p

Either by cuBLAS, with one product for A and one for each part of B, or all by one kernel of ours, which reads x and dy
once, in strips of columns, each by several programs that add their shares atomically. Which is faster depends on how
well the library splits the long sum, so the first call of each shape times both. Deterministic runs use cuBLAS.

`SwigluPass` is the backward pass of SwiGLU together with the gradients of the adapters on its inputs and outputs:

    y = silu(gate) · value        dgate, dvalue from dy
    dA_down += s · gᵀ y           [R, M]          g = dout B_down
    dB_gate += dgateᵀ u_gate      [M, R]          u = s · x Aᵀ
    dB_value += dvalueᵀ u_value   [M, R]

As separate steps, y is written and read again, and dgate and dvalue are read again for three thin products: two thirds
more bytes than the pass itself moves. Here each tile is multiplied while it is in registers.

Trap: registers. With at most 128 registers a multiprocessor runs four programs at once, with more only three, and the
rest becomes a second round. On an H200 (16,384 rows, hidden size 5,632, ranks of 16, bf16) the kernel took 0.28 ms with
126 registers and 0.43 ms with 145; separate steps take 0.44 ms. Registers can be counted without a GPU (lab/log.md).

Shape legend: N tokens, I inputs, O outputs, M hidden size, R ranks of all parts, P parts, T tiles; rows may be apart.
A row of the table of `Spreading` has 5 numbers: place in the flat tensor, rows, columns, address, row stride.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.activation import SWIGLU, activate_backward
from flatout.ops.kernels.cublaslt import milliseconds
from flatout.ops.kernels.launch import exact_products, multiprocessors, share_of
from flatout.ops.lora import LoraLayout, wide_product

_BLOCK = 4096
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@triton.jit
def _spread(flat_ptr, table_ptr, scales_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    table_ptr += part * 5
    first = tl.load(table_ptr)
    rows, columns = tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    address, stride = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    if KIND == 0:
        out_ptr = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        out_ptr = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == 2:
        out_ptr = address.to(tl.pointer_type(tl.float16))
    else:
        out_ptr = address.to(tl.pointer_type(tl.float64))
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < rows * columns
    values = tl.load(flat_ptr + first + place, mask, 0.0) * tl.load(scales_ptr + part)
    out = (place // columns) * stride + place % columns
    tl.store(out_ptr + out, values.to(out_ptr.dtype.element_ty), mask)


@dataclasses.dataclass(frozen=True)
class SpreadPart:
    first: int  # in the flat tensor
    place: Tensor  # [rows, columns], rows may be strided
    scale: float


class Spreading:
    """Copies the parts of a flat fp32 tensor to their places, which all have the same type."""

    def __init__(self, flat: Tensor, parts: Sequence[SpreadPart]) -> None:
        rows = [[p.first, *p.place.shape, p.place.data_ptr(), p.place.stride(0)] for p in parts]
        assert all(p.place.stride(1) == 1 for p in parts)
        self.kind = _KINDS[parts[0].place.dtype]
        self.table_P5 = torch.tensor(rows, dtype=torch.int64, device=flat.device)
        self.scales_P = torch.tensor([p.scale for p in parts], dtype=torch.float32, device=flat.device)
        self.grid = (len(parts), triton.cdiv(max(p.place.numel() for p in parts), _BLOCK))

    def __call__(self, flat: Tensor) -> None:
        _spread[self.grid](flat, self.table_P5, self.scales_P, KIND=self.kind, BLOCK=_BLOCK, num_warps=4)


_COLUMNS, _ROWS, _WARPS, _STAGES = 128, 64, 4, 3
_MOST_RANKS = 64  # of a tile
_TRIALS = 3


@triton.jit
def _gradients(
    x_ptr, g_ptr, dy_ptr, u_ptr, out_ptr, table_ptr, scales_ptr, rows, share, x_stride, dy_stride, u_stride,
    EXACT: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    table_ptr += tile * 8
    of_b = tl.load(table_ptr) == 1
    column, columns = tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    first, rank = tl.load(table_ptr + 3), tl.load(table_ptr + 4)
    if ALIGNED:  # otherwise the compiler knows no alignment of numbers from memory, and loads single values
        column, columns = tl.multiple_of(column, 8), tl.multiple_of(columns, 8)
        first, rank = tl.multiple_of(first, 8), tl.multiple_of(rank, 8)
    # One loop for both, because each loop would have its own shared memory.
    data_ptr, data_stride = tl.where(of_b, dy_ptr, x_ptr), tl.where(of_b, dy_stride, x_stride)
    thin_ptr, thin_stride = tl.where(of_b, u_ptr, g_ptr) + first, tl.where(of_b, u_stride, dy_stride)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    lane, ranks = column + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    total = tl.zeros((COLUMNS, RANKS), tl.float32)
    for at in range(start, end, ROWS):
        row = at + tl.arange(0, ROWS)
        alive, place = (row < end)[:, None], row.to(tl.int64)[:, None]
        data = tl.load(data_ptr + place * data_stride + lane[None, :], alive & (lane < columns)[None, :], 0.0)
        thin = tl.load(thin_ptr + place * thin_stride + ranks[None, :], alive & (ranks < rank)[None, :], 0.0)
        if EXACT:
            total += tl.dot(tl.trans(data.to(tl.float32)), thin.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(tl.trans(data), thin)
    out_ptr += tl.load(table_ptr + 5)
    place = lane[:, None] * tl.load(table_ptr + 6) + ranks[None, :] * tl.load(table_ptr + 7)
    total *= tl.load(scales_ptr + tile)
    tl.atomic_add(out_ptr + place, total, (lane < columns)[:, None] & (ranks < rank)[None, :], sem="relaxed")


@functools.lru_cache(maxsize=4096)
def _tiles(
    layout: LoraLayout, inputs: int, places: tuple[int, ...], device: torch.device, of_b: bool
) -> tuple[Tensor, Tensor, int, int, bool]:
    """(table [T, 8], scales [T], largest number of ranks, T, whether all starts and ends are multiples of 8).

    `places`: offsets of the gradients from that of A, in elements. Without inputs there are no tiles of A.
    """
    rows: list[list[int]] = []
    scales: list[float] = []

    def strips(of_b: int, first: int, end: int, low: int, high: int, place: int, steps: tuple[int, int], scale: float):
        """Columns `first` to `end` of x or dy, with ranks `low` to `high` of g or u."""
        for rank in range(low, high, _MOST_RANKS):
            many = min(_MOST_RANKS, high - rank)
            begin = place + (rank - low) * steps[1] - first * steps[0]
            rows.extend(
                [of_b, column, end, rank, many, begin, *steps] for column in range(first, end, _COLUMNS)
            )  # fmt: skip
            scales.extend([scale] * (len(rows) - len(scales)))

    begin = 0
    spans = layout.spans
    for index, part in enumerate(layout.parts if inputs else ()):  # ranks of equal scale share one read of x
        last = index + 1 == len(layout.parts)
        if last or layout.parts[index + 1].scale != part.scale:
            low, high = spans[begin].start, spans[index].stop
            strips(0, 0, inputs, low, high, places[0] + low * inputs, (1, inputs), part.scale)
            begin = index + 1
    for part, span, place in zip(layout.parts, spans, places[1:], strict=True) if of_b else ():
        strips(1, part.first, part.span.stop, span.start, span.stop, place, (part.rank, 1), 1.0)
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    widest, aligned = max(row[4] for row in rows), not any(number % 8 for row in rows for number in row[1:5])
    return table, torch.tensor(scales, dtype=torch.float32, device=device), widest, len(rows), aligned


def by_our_kernel(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """Adds to gradients, which are dense fp32, by our kernel."""
    size, device, rows = totals[0].element_size(), dy_NJ.device, dy_NJ.shape[0]
    places = tuple((total.data_ptr() - totals[0].data_ptr()) // size for total in totals)
    inputs = 0 if x_NI is None else x_NI.shape[1]
    table, scales, widest, tiles, aligned = _tiles(layout, inputs, places, device, u_NR is not None)
    x_NI, u_NR = dy_NJ if x_NI is None else x_NI, dy_NJ if u_NR is None else u_NR  # a placeholder that is not read
    shares = max(1, min(triton.cdiv(rows, 4 * _ROWS), triton.cdiv(6 * multiprocessors(device), tiles)))
    share = share_of(rows, shares, _ROWS)
    exact = exact_products(dy_NJ)
    _gradients[(tiles, triton.cdiv(rows, share))](
        x_NI, dy_NJ[:, layout.outputs :], dy_NJ, u_NR, totals[0], table, scales, rows, share, x_NI.stride(0),
        dy_NJ.stride(0), u_NR.stride(0), EXACT=exact, ALIGNED=aligned, COLUMNS=_COLUMNS, ROWS=_ROWS,
        RANKS=max(16, triton.next_power_of_2(widest)), num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def by_products(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """Adds to gradients by torch's products."""
    g_RN, (da_RI, *db) = dy_NJ[:, layout.outputs :].t(), totals
    scales = {part.scale for part in layout.parts}
    if x_NI is not None and len(scales) == 1:
        _add(da_RI, g_RN, x_NI, scales.pop())
    elif x_NI is not None:
        for part, span in zip(layout.parts, layout.spans, strict=True):
            _add(da_RI[span], g_RN[span], x_NI, part.scale)
    if u_NR is not None:
        for total, part, span in zip(db, layout.parts, layout.spans, strict=True):
            _add(total, dy_NJ[:, part.span].t(), u_NR[:, span], 1.0)


def _add(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale · left @ right, with sums in the type of the total, which is fp32 or wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.add_(wide_product(left, right), alpha=scale)


@functools.cache
def _chosen(
    layout: LoraLayout, inputs: int, size: int, dtype: torch.dtype, device: torch.device, of_b: bool
) -> list[Callable[..., None]]:
    """A list that holds the faster way for a layer and a number of rows (by powers of two), once it is known."""
    return []


def add_adapter_gradients(
    totals: Sequence[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None, layout: LoraLayout
) -> None:
    """Adds the gradients of A and of the parts of B to `totals`; g is in the columns of `dy_NJ` after the outputs.

    Without x it skips A, and needs no g; without u it skips B.
    """
    values = (dy_NJ, x_NI, u_NR, layout)
    dense = all(total.is_contiguous() and total.dtype == torch.float32 for total in totals)
    if not dy_NJ.is_cuda or not dense or torch.are_deterministic_algorithms_enabled():
        by_products(totals, *values)
        return
    inputs, size = 0 if x_NI is None else x_NI.shape[1], dy_NJ.shape[0].bit_length()
    chosen = _chosen(layout, inputs, size, dy_NJ.dtype, dy_NJ.device, u_NR is not None)
    if not chosen:
        if torch.cuda.is_current_stream_capturing():  # timing is impossible during a capture
            by_products(totals, *values)
            return
        spare = [torch.zeros_like(total) for total in totals]
        ways = (by_products, by_our_kernel)
        chosen.append(min(ways, key=lambda way: milliseconds(way, (spare, *values), _TRIALS)))
    chosen[0](totals, *values)


_SWIGLU_ROWS, _SWIGLU_COLUMNS, _SWIGLU_WARPS, _SWIGLU_STAGES = 32, 64, 4, 3  # of a tile, and of the loop over tiles
_SWIGLU_REGISTERS = 128  # of a thread: four programs of four warps are on a multiprocessor then
_SWIGLU_MOST_RANKS = 32  # their sums are in registers


@triton.jit
def _swiglu_backward(
    dout_ptr, pre_ptr, dpre_ptr, g_ptr, u_ptr, da_ptr, db_gate_ptr, db_value_ptr, rows, hidden, share,
    dout_stride, pre_stride, dpre_stride, g_stride, u_stride, rank_down, rank_gate, rank_value, scale,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column, ranks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANKS)
    inside = column < hidden
    of_y = tl.zeros((BLOCK, RANKS), tl.float32)
    of_gate = tl.zeros((BLOCK, RANKS), tl.float32)
    of_value = tl.zeros((BLOCK, RANKS), tl.float32)
    end = tl.minimum(tl.program_id(1) * share + share, rows)
    for start in tl.range(tl.program_id(1) * share, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        alive, at = (row < end)[:, None], row.to(tl.int64)[:, None]
        mask = alive & inside[None, :]
        dy = tl.load(dout_ptr + at * dout_stride + column[None, :], mask, 0.0).to(tl.float32)
        gate = tl.load(pre_ptr + at * pre_stride + column[None, :], mask, 0.0).to(tl.float32)
        value = tl.load(pre_ptr + at * pre_stride + hidden + column[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(g_ptr + at * g_stride + ranks[None, :], alive & (ranks < rank_down)[None, :], 0.0)
        u_gate = tl.load(u_ptr + at * u_stride + ranks[None, :], alive & (ranks < rank_gate)[None, :], 0.0)
        u_ptrs = u_ptr + at * u_stride + rank_gate + ranks[None, :]
        u_value = tl.load(u_ptrs, alive & (ranks < rank_value)[None, :], 0.0)
        s = tl.sigmoid(gate)
        silu = gate * s
        y = (silu * value).to(dout_ptr.dtype.element_ty)
        dgate = (dy * value * (s + silu * (1.0 - s))).to(dpre_ptr.dtype.element_ty)
        dvalue = (dy * silu).to(dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + at * dpre_stride + column[None, :], dgate, mask)
        tl.store(dpre_ptr + at * dpre_stride + hidden + column[None, :], dvalue, mask)
        if EXACT:
            of_y += tl.dot(tl.trans(y.to(tl.float32)), g.to(tl.float32), input_precision="ieee")
            of_gate += tl.dot(tl.trans(dgate.to(tl.float32)), u_gate.to(tl.float32), input_precision="ieee")
            of_value += tl.dot(tl.trans(dvalue.to(tl.float32)), u_value.to(tl.float32), input_precision="ieee")
        else:
            of_y += tl.dot(tl.trans(y), g)
            of_gate += tl.dot(tl.trans(dgate), u_gate)
            of_value += tl.dot(tl.trans(dvalue), u_value)
    across, along = column[:, None], ranks[None, :]
    tl.atomic_add(da_ptr + along * hidden + across, of_y * scale, inside[:, None] & (along < rank_down), sem="relaxed")
    places = across * rank_gate + along
    tl.atomic_add(db_gate_ptr + places, of_gate, inside[:, None] & (along < rank_gate), sem="relaxed")
    places = across * rank_value + along
    tl.atomic_add(db_value_ptr + places, of_value, inside[:, None] & (along < rank_value), sem="relaxed")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SwigluPass:
    """The pass in a block, with gradients for the adapters of `up` (before the activation) and `down` (after it)."""

    dout_NM: Tensor  # overwritten
    pre_NC: Tensor
    into_NC: Tensor  # takes the gradient of pre; may be pre itself
    dy_NJ: Tensor  # of down, with g in the columns after it
    u_NR: Tensor  # of up
    down: LoraLayout
    up: LoraLayout
    down_places: Sequence[Tensor]  # gradients of A, then of the parts of B
    up_places: Sequence[Tensor]

    def run(self) -> None:
        """Writes the gradient of pre, and adds those of down's A and up's B to their places."""
        if self._fits():
            self.in_one()
        else:
            self.apart()

    def apart(self) -> None:
        how = {"again": True, "frozen": True, "into": self.into_NC}
        active = activate_backward(self.dout_NM, self.pre_NC, None, SWIGLU, **how)[2]
        add_adapter_gradients(self.down_places, self.dy_NJ, active, None, self.down)
        add_adapter_gradients(self.up_places, self.into_NC, None, self.u_NR, self.up)

    def in_one(self) -> None:
        dout, pre, into = self.dout_NM, self.pre_NC, self.into_NC
        rows, hidden = dout.shape
        g = self.dy_NJ[:, self.down.outputs :]
        ranks = self.down.rank, *(part.rank for part in self.up.parts)
        strips = triton.cdiv(hidden, _SWIGLU_COLUMNS)
        shares = triton.cdiv(4 * multiprocessors(dout.device), strips)
        shares = max(1, min(triton.cdiv(rows, 4 * _SWIGLU_ROWS), shares))
        share = share_of(rows, shares, _SWIGLU_ROWS)
        exact = exact_products(dout)
        _swiglu_backward[(strips, triton.cdiv(rows, share))](
            dout, pre, into, g, self.u_NR, self.down_places[0], *self.up_places[1:], rows, hidden, share,
            dout.stride(0), pre.stride(0), into.stride(0), g.stride(0), self.u_NR.stride(0), *ranks,
            self.down.parts[0].scale, EXACT=exact, ROWS=_SWIGLU_ROWS, BLOCK=_SWIGLU_COLUMNS,
            RANKS=max(16, triton.next_power_of_2(max(ranks))), STAGES=_SWIGLU_STAGES, num_warps=_SWIGLU_WARPS,
            maxnreg=_SWIGLU_REGISTERS,
        )  # fmt: skip

    def _fits(self) -> bool:
        hidden = self.dout_NM.shape[1]
        places = (*self.down_places, *self.up_places)
        return (
            self.dout_NM.is_cuda
            and self.dout_NM.dtype.itemsize == 2  # wider ones were never timed
            and not torch.are_deterministic_algorithms_enabled()
            and self.down.whole
            and [(part.first, part.rows) for part in self.up.parts] == [(0, hidden), (hidden, hidden)]
            and max(part.rank for part in (*self.down.parts, *self.up.parts)) <= _SWIGLU_MOST_RANKS
            and all(place.is_contiguous() and place.dtype == torch.float32 for place in places)
        )
