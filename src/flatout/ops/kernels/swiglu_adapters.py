"""SwiGLU's backward pass under frozen weights, with the gradients of adapters that hang on its inputs and outputs.

    y = silu(gate) · value        dgate, dvalue from dy
    dA_down += s · gᵀ y           [R, M]          g = dout B_down, in front of the product that made dy
    dB_gate += dgateᵀ u_gate      [M, R]          u = s · x Aᵀ
    dB_value += dvalueᵀ u_value   [M, R]

Apart, y is written once more and read back, and dgate and dvalue are read back, for three thin products: two thirds
more bytes than the pass itself moves. Here each tile is multiplied where it is, and its share is added atomically, in
any order; so where torch is told to be deterministic, this is not for you.

The trap: registers. There are as many programs as multiprocessors have room for if each takes four; with more than 128
registers they take three, and the rest is a second round. On an H200, with 16,384 rows, a hidden size of 5,632 and
ranks of 16 in bf16, this took 0.28 ms with 126 registers, and 0.43 in a step with 145; the way apart takes 0.44, and
the same loop without products 0.26. How many a kernel wants can be seen without a GPU (lab/log.md).

Shape legend: N rows (tokens), M hidden size, R ranks of a part; rows may be apart.
"""

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.activation import SWIGLU, activate_backward
from flatout.ops.kernels.launch import multiprocessors
from flatout.ops.kernels.thin import add_adapter_gradients
from flatout.ops.lora import LoraLayout

_ROWS, _COLUMNS, _WARPS, _STAGES = 32, 64, 4, 3  # of a tile, and of the loop over tiles
_REGISTERS = 128  # of a thread: four programs of four warps are on a multiprocessor then
_MOST_RANKS = 32  # their sums are in registers


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
    """The pass in a block, and what adapters want of it: those of `up`, before the activation, and of `down`, after."""

    dout_NM: Tensor  # gone afterwards
    pre_NC: Tensor
    into_NC: Tensor  # for the gradient of pre; it may be pre, which is then gone
    dy_NJ: Tensor  # of down, with g in the columns after it
    u_NR: Tensor  # of up
    down: LoraLayout
    up: LoraLayout
    down_places: Sequence[Tensor]  # of gradients: A's, then those of the parts of B
    up_places: Sequence[Tensor]

    def run(self) -> None:
        """Leaves the gradient of pre in its place, and adds those of down's A and up's B to theirs."""
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
        strips = triton.cdiv(hidden, _COLUMNS)
        shares = triton.cdiv(4 * multiprocessors(dout.device), strips)
        shares = max(1, min(triton.cdiv(rows, 4 * _ROWS), shares))
        share = triton.cdiv(triton.cdiv(rows, shares), _ROWS) * _ROWS
        exact = dout.dtype == torch.float32 or not dout.is_cuda  # Triton's interpreter multiplies nothing narrower
        _swiglu_backward[(strips, triton.cdiv(rows, share))](
            dout, pre, into, g, self.u_NR, self.down_places[0], *self.up_places[1:], rows, hidden, share,
            dout.stride(0), pre.stride(0), into.stride(0), g.stride(0), self.u_NR.stride(0), *ranks,
            self.down.parts[0].scale, EXACT=exact, ROWS=_ROWS, BLOCK=_COLUMNS,
            RANKS=max(16, triton.next_power_of_2(max(ranks))), STAGES=_STAGES, num_warps=_WARPS, maxnreg=_REGISTERS,
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
            and max(part.rank for part in (*self.down.parts, *self.up.parts)) <= _MOST_RANKS
            and all(place.is_contiguous() and place.dtype == torch.float32 for place in places)
        )
