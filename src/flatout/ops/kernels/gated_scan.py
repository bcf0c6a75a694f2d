"""The recurrence and the gate that reads it, as one step of autograd: silu(gate) ⊙ states.

Inputs and gate come side by side in one buffer, as one product has written them, and so do their gradients: nothing is
cut apart or put together on the way. Kept for backward are that buffer and the states. The gate itself is one pass
forward and one backward; the scan is that of scan.py.

Shape legend: B rows, T positions, C = 2K values of a state (real parts, then imaginary), N = B·T.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.kernels.scan import Passes, as_kernels_take


@triton.jit
def _gate_forward(gate_ptr, h_ptr, y_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gate = tl.load(gate_ptr + row[:, None] * stride + column[None, :], mask, 0.0).to(tl.float32)
    place = row[:, None] * columns + column[None, :]
    h = tl.load(h_ptr + place, mask, 0.0).to(tl.float32)
    tl.store(y_ptr + place, (gate * tl.sigmoid(gate) * h).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _gate_backward(
    dy_ptr, gate_ptr, h_ptr, dgate_ptr, dh_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    apart = row[:, None] * stride + column[None, :]
    place = row[:, None] * columns + column[None, :]
    gate = tl.load(gate_ptr + apart, mask, 0.0).to(tl.float32)
    h = tl.load(h_ptr + place, mask, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(dh_ptr + place, (dy * gate * share).to(dh_ptr.dtype.element_ty), mask)
    dgate = dy * h * share * (1.0 + gate * (1.0 - share))
    tl.store(dgate_ptr + apart, dgate.to(dgate_ptr.dtype.element_ty), mask)


_ROWS, _BLOCK, _WARPS = 4, 256, 4


def _grid(h_BTC: Tensor) -> tuple[int, int]:
    rows, columns = h_BTC.shape[0] * h_BTC.shape[1], h_BTC.shape[2]
    return int(triton.cdiv(rows, _ROWS)), int(triton.cdiv(columns, _BLOCK))


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, log_decay, phase, begins, chunk):
        both = both.contiguous()
        x, gate = both.chunk(2, dim=-1)
        h, _ = Passes(x.shape, log_decay, phase, begins, chunk).states(x, None)
        y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        rows, columns = h.shape[0] * h.shape[1], h.shape[2]
        _gate_forward[_grid(h)](
            gate, h, y, rows, columns, both.shape[2], ROWS=_ROWS, BLOCK=_BLOCK, num_warps=_WARPS
        )  # fmt: skip
        ctx.save_for_backward(both, h, log_decay, phase, begins)
        ctx.chunk = chunk
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        both, h, log_decay, phase, begins = ctx.saved_tensors
        dboth = torch.empty(both.shape, dtype=both.dtype, device=both.device)
        dx, dgate = dboth.chunk(2, dim=-1)
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        rows, columns = h.shape[0] * h.shape[1], h.shape[2]
        _gate_backward[_grid(h)](
            dy.contiguous(), both.chunk(2, dim=-1)[1], h, dgate, dh, rows, columns, both.shape[2],
            ROWS=_ROWS, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        passes = Passes(h.shape, log_decay, phase, begins, ctx.chunk)
        _, dlog, dphase, _ = passes.gradients(dh, h, None, None, into=dx)
        return dboth, dlog, dphase, None, None


def gated_scan(
    both_BTC: Tensor, log_decay: Tensor, phase: Tensor, begins_BT: Tensor | None, chunk: int | None
) -> Tensor:
    """silu(gate) ⊙ states of inputs and gate side by side, [B, T, 2C]; λ as in `ops.scan.scan`, one per channel."""
    log_decay, phase, _, begins_BT = as_kernels_take(both_BTC, log_decay, phase, None, begins_BT, chunk)
    return _GatedScan.apply(both_BTC, log_decay, phase, begins_BT, chunk)  # pyright: ignore
