"""Matrix products of 8-bit floats: twice the rate of bf16 where the chip has them, for three or two bits of mantissa.

    y  = (x₈ · u_x) @ (w₈ · u_w).T          x and w as E4M3, one scale per tensor, found anew for every call
    dx = (dy₈ · u_dy) @ (w₈ · u_w)          dy as E5M2: gradients span more powers of two than E4M3 holds
    dw = dy.T @ x                           in bf16 unless asked for: here errors add up over thousands of tokens

The largest magnitude never visits the host: a first kernel leaves partial maxima, and the kernel that rounds reduces
them itself. The unit multiplies every 8-bit value back to its size, inside the matrix product.

The traps. The matrix unit wants both operands dense along the summed axis, so backward needs the transpose of the
weights in memory. Sizes must be multiples of 16. Nothing is clamped: a
value of exactly the maximum rounds to the maximum, and a NaN or an infinity must come out as NaN, so that training
notices. On a CPU torch rounds instead of our kernels (Triton's interpreter drops carries when it makes 8-bit floats).

Shape legend: N rows (tokens), K columns of x, M columns of y, R and C rows and columns of any matrix.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.launch import multiprocessors

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every size of an 8-bit product
SMALLEST = 1e-30  # a tensor below this is nothing, and its scale would overflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    """A matrix of 8-bit floats, as it is and transposed, as far as asked for. `unit` is what a stored 1.0 is worth."""

    values_RC: Tensor | None
    turned_CR: Tensor | None
    unit: Tensor


@triton.jit
def _maxima(x_ptr, partial_ptr, count, share, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    highest = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum(program * share + share, count)
    for start in range(program * share, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.abs(tl.load(x_ptr + place, place < end, 0.0).to(tl.float32)))
    tl.store(partial_ptr + program, tl.max(highest, 0))


@triton.jit
def _scale(partial_ptr, partials, top, FOLD: tl.constexpr):
    lane = tl.arange(0, FOLD)
    highest = tl.max(tl.load(partial_ptr + lane, lane < partials, 0.0), 0)
    return tl.where(highest > 1e-30, tl.div_rn(top, highest), 1.0)  # as torch divides


@triton.jit
def _round(
    x_ptr, partial_ptr, values_ptr, unit_ptr, count, partials, top, FOLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    scale = _scale(partial_ptr, partials, top, FOLD)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < count, 0.0).to(tl.float32) * scale
    tl.store(values_ptr + place, x.to(values_ptr.dtype.element_ty), place < count)
    if tl.program_id(0) == 0:
        tl.store(unit_ptr, tl.div_rn(1.0, scale))


def _launch(x_RC: Tensor, values_RC: Tensor, unit: Tensor, top: float) -> None:
    """Fills `values` and `unit` from a dense matrix."""
    count, device = x_RC.numel(), x_RC.device
    block = 4096
    programs = max(1, min(triton.cdiv(count, block), 6 * multiprocessors(device)))
    partial = torch.empty(programs, dtype=torch.float32, device=device)
    share = triton.cdiv(triton.cdiv(count, programs), block) * block
    _maxima[(programs,)](x_RC, partial, count, share, BLOCK=block, num_warps=8)
    fold = triton.next_power_of_2(programs)
    _round[(triton.cdiv(count, block),)](
        x_RC, partial, values_RC, unit, count, programs, top, FOLD=fold, BLOCK=block, num_warps=8
    )


def quantise(x_RC: Tensor, kind: torch.dtype, *, values: bool = True, turned: bool = False) -> Narrow:
    """x in 8 bits with one scale for the whole tensor, chosen so that its largest magnitude is the type's largest."""
    x_RC = x_RC.contiguous()
    top = torch.finfo(kind).max
    if x_RC.device.type != "cuda":
        highest = x_RC.abs().max().float()
        scale = torch.where(highest > SMALLEST, top / highest, 1.0)
        rounded_RC = (x_RC.float() * scale).to(kind)
        return Narrow(
            values_RC=rounded_RC if values else None,
            turned_CR=rounded_RC.t().contiguous() if turned else None,
            unit=1.0 / scale,
        )
    values_RC = torch.empty_like(x_RC, dtype=kind)
    unit = torch.empty((), dtype=torch.float32, device=x_RC.device)
    _launch(x_RC, values_RC, unit, top)
    # torch turns it: what Triton 3.6 made of a tile of 8-bit values turned round was wrong on an H200.
    turned_CR = values_RC.view(torch.uint8).t().contiguous().view(kind) if turned else None
    return Narrow(values_RC=values_RC if values else None, turned_CR=turned_CR, unit=unit)


def narrow_product(
    a_NK: Tensor,
    a_unit: Tensor,
    b_MK: Tensor,
    b_unit: Tensor,
    dtype: torch.dtype,
    *,
    bias_M: Tensor | None = None,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """(a · a_unit) @ (b · b_unit).T + bias as [N, M] in `dtype`. Both operands are dense along K, the summed axis.

    `fast` adds up with fewer bits on the way: good enough for activations, not for gradients.
    """
    if a_NK.device.type != "cuda":
        with torch.autocast(a_NK.device.type, enabled=False):
            y_NM = (a_NK.float() @ b_MK.float().t()) * (a_unit * b_unit)
        y_NM = (y_NM if bias_M is None else y_NM + bias_M.float()).to(dtype)
        return y_NM if out is None else out.copy_(y_NM)
    for size in (a_NK.shape[1], b_MK.shape[0]):
        assert size % MULTIPLE == 0, f"8-bit products need multiples of {MULTIPLE}, not {size}"
    # The library adds a bias to half-precision results only.
    inside = bias_M is not None and dtype != torch.float32
    bias = bias_M.to(dtype) if bias_M is not None and inside else None
    given = {} if out is None else {"out": out}
    scaled_product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    y_NM = scaled_product(a_NK, b_MK.t(), a_unit, b_unit, bias=bias, out_dtype=dtype, use_fast_accum=fast, **given)
    return y_NM if bias_M is None or inside else y_NM.add_(bias_M)


# A linear layer in three steps, for the operations that have one inside: the weights, the product, the way back.


def narrow_weight(weight_MK: Tensor, *, backward: bool) -> Narrow:
    return quantise(weight_MK, E4M3, turned=backward)


def narrow_forward(x: Tensor, weight: Narrow, bias_M: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias over the last axis, in x's type."""
    assert weight.values_RC is not None
    x_8 = quantise(x.reshape(-1, x.shape[-1]), E4M3)
    assert x_8.values_RC is not None
    y_NM = narrow_product(x_8.values_RC, x_8.unit, weight.values_RC, weight.unit, x.dtype, bias_M=bias_M, fast=True)
    return y_NM.view(*x.shape[:-1], y_NM.shape[1])


def narrow_backward(dy: Tensor, turned_KM: Tensor, unit: Tensor, kind: torch.dtype = E5M2) -> Tensor:
    """dy @ weight over the last axis, in dy's type, from the transposed weights that forward left."""
    dy_8 = quantise(dy.reshape(-1, dy.shape[-1]), kind)
    assert dy_8.values_RC is not None
    dx_NK = narrow_product(dy_8.values_RC, dy_8.unit, turned_KM, unit, dy.dtype)
    return dx_NK.view(*dy.shape[:-1], dx_NK.shape[1])


def narrow_weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x summed over all rows, from 8-bit operands. The number of rows must be a multiple of 16."""
    dy_8 = quantise(dy.reshape(-1, dy.shape[-1]), E5M2, values=False, turned=True)
    x_8 = quantise(x.reshape(-1, x.shape[-1]), E4M3, values=False, turned=True)
    assert dy_8.turned_CR is not None
    assert x_8.turned_CR is not None
    return narrow_product(dy_8.turned_CR, dy_8.unit, x_8.turned_CR, x_8.unit, dtype)


# The head: softmax gradients lie between -1 and 1 by their nature, so their scale is known before they are. E4M3 is
# the more exact type for them: what counts are the label and the likely tokens, where it has a bit more than E5M2.
# What it rounds to zero are probabilities below 1e-6.
GRADIENT_SCALE = 448.0


def narrow_gradient(dlogits_CP: Tensor) -> Tensor:
    """Gradients of logits as 8-bit floats of unit 1/GRADIENT_SCALE. On a GPU the loss kernel writes them itself."""
    return (dlogits_CP.float() * GRADIENT_SCALE).to(E4M3)
