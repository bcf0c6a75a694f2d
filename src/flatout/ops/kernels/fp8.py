"""Matrix products of 8-bit floats: twice the rate of bf16 on GPUs that have them, with three bits of mantissa.

    y  = (x₈ · u_x) @ (w₈ · u_w).T          x and w as E4M3, one scale per tensor
    dx = (dy₈ · u_dy) @ (w₈ · u_w)          dy as E4M3 too
    dw = dy.T @ x                           in bf16: here errors add up over thousands of tokens

x and dy have delayed scales (ops/scales.py), and the kernels that write them also round them, in the same pass:
`store_narrow` and `record` are the parts of such a kernel, `rounding_of` makes its arguments. `narrow_values` returns
the 8-bit values; for a tensor that was not written by our kernels it takes one pass. The rounded value is that stored
in the wide type, so both ways give the same bits. Weights are scaled by their current maximum (`quantise`).

E4M3 for gradients: it has one more mantissa bit than E5M2, and a range of 2^17 between the largest and the smallest
value, which is enough if the scale follows the tensor. For gradients of a small model in training it halves the error,
of whole tensors and of single tokens. For gradients with much heavier tails the error of whole tensors is smaller too.
This holds even with a scale off by a factor of eight (`test_gradients_are_better_off_in_e4m3`). E4M3 loses tokens
thousands of times smaller than the largest, which do not affect the sum. `GRADIENT` in ops/scales.py is the one place
to change it.

The matrix product multiplies every 8-bit value by its unit.

Traps:
- Both operands must be dense along the summed axis, so backward needs the transpose of the weights in memory.
- Sizes must be multiples of 16.
- Values beyond the range of a delayed scale become the largest finite value, but NaN and infinity must become NaN, so
  that training notices. The hardware conversion would make an infinity finite.
- On a CPU torch rounds instead of our kernels, because Triton's interpreter drops carries in conversions to 8-bit
  floats. Kernels write scaled and clamped fp32 there.

Shape legend: N rows (tokens), K columns of x, M columns of y, R and C rows and columns of any matrix.
"""

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.ops.kernels.launch import multiprocessors, share_of
from flatout.ops.scales import E4M3, SMALLEST, Slot

MULTIPLE = 16  # of every size of an 8-bit product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    """A matrix of 8-bit floats, and its transpose if requested. `unit` is the value of a stored 1.0."""

    values_RC: Tensor
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
    share = share_of(count, programs, block)
    _maxima[(programs,)](x_RC, partial, count, share, BLOCK=block, num_warps=8)
    fold = triton.next_power_of_2(programs)
    _round[(triton.cdiv(count, block),)](
        x_RC, partial, values_RC, unit, count, programs, top, FOLD=fold, BLOCK=block, num_warps=8
    )


def quantise(x_RC: Tensor, kind: torch.dtype, *, turned: bool = False, into: Narrow | None = None) -> Narrow:
    """x in 8 bits with one scale for the tensor, which maps its largest magnitude to the type's largest value.

    `into`: write the result there.
    """
    x_RC = x_RC.contiguous()
    if into is None:
        values_RC = torch.empty_like(x_RC, dtype=kind)
        turned_CR = torch.empty(x_RC.shape[::-1], dtype=kind, device=x_RC.device) if turned else None
        into = Narrow(values_RC=values_RC, turned_CR=turned_CR, unit=torch.empty((), device=x_RC.device))
    top = torch.finfo(kind).max
    if x_RC.device.type == "cuda":
        _launch(x_RC, into.values_RC, into.unit, top)
    else:
        highest = x_RC.abs().max().float()
        scale = torch.where(highest > SMALLEST, top / highest, 1.0)
        into.values_RC.copy_((x_RC.float() * scale).to(kind))
        into.unit.copy_(1.0 / scale)
    if into.turned_CR is not None:
        # Transposed by torch: Triton 3.6 transposes tiles of 8-bit values wrongly on an H200.
        into.turned_CR.view(torch.uint8).copy_(into.values_RC.view(torch.uint8).t())
    return into


# --- delayed scales, inside the kernels that write the tensor ---------------------------------------------------------


@triton.jit
def store_narrow(narrow_ptr, place, stored, scale, top, mask):
    """Stores a tile in 8 bits: scaled, within the type's range, and NaN for what is not finite."""
    x = stored.to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x * scale, -top), top), float("nan"))
    # Eight at a time, like half-precision values: sixteen would need an exchange through shared memory.
    places = tl.max_contiguous(narrow_ptr + place, (1, 8))
    tl.store(places, x.to(narrow_ptr.dtype.element_ty), mask)


@triton.jit
def record(seen_ptr, highest):
    """Records the largest of a tile of magnitudes. Their bits have the same order as the numbers, NaN above infinity.

    Thousands of programs write to one address, so each reads it first: soon hardly any has a larger value.
    """
    bits = tl.max(highest.to(tl.int32, bitcast=True))
    tl.atomic_max(seen_ptr, bits, mask=bits > tl.load(seen_ptr), sem="relaxed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """The 8-bit output of a kernel: its arguments, and its result."""

    slot: Slot | None
    room: Tensor | None
    narrow: bool  # the kernel writes 8-bit values
    record: bool  # the kernel records the largest magnitude

    @property
    def pointers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
        """8-bit values, scale, record, and the largest value of the type."""
        slot = self.slot
        return (None, None, None, 1.0) if slot is None else (self.room, slot.scale, slot.seen, slot.top)

    def values(self) -> Tensor | None:
        """The 8-bit values, after the launch of the kernel."""
        if self.slot is None or self.room is None:
            return None
        return self.room if self.room.dtype == self.slot.kind else self.room.to(self.slot.kind)

    def hand_over(self, wide: Tensor) -> None:
        if self.slot is not None:
            self.slot.hand_over(wide, self.values())


def rounding_of(slot: Slot | None, shape: Sequence[int], device: torch.device) -> Rounding:
    if slot is None:
        return Rounding(slot=None, room=None, narrow=False, record=False)
    kind = slot.kind if device.type == "cuda" else torch.float32
    room = torch.empty(shape, dtype=kind, device=device) if slot.scales.rounding else None
    return Rounding(slot=slot, room=room, narrow=slot.scales.rounding, record=slot.scales.recording)


@triton.jit
def _round_delayed(
    x_ptr, narrow_ptr, scale_ptr, seen_ptr, top, count, NARROW: tl.constexpr, RECORD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + place, place < count, 0.0)
    if NARROW:
        store_narrow(narrow_ptr, place, x, tl.load(scale_ptr), top, place < count)
    if RECORD:
        record(seen_ptr, tl.abs(x.to(tl.float32)))


def narrow_values(slot: Slot, wide: Tensor) -> Tensor | None:
    """`wide` in 8 bits with the slot's scale; None while scales are measured. It is recorded in either case.

    If a kernel of ours wrote `wide`, the values exist already; otherwise they take a pass over it.
    """
    found, values = slot.take(wide)
    if found or not (slot.scales.rounding or slot.scales.recording):
        return values
    wide = wide.contiguous()
    rounding = rounding_of(slot, wide.shape, wide.device)
    rows, block = 8, 512
    _round_delayed[(triton.cdiv(wide.numel(), rows * block),)](
        wide, *rounding.pointers, wide.numel(), NARROW=rounding.narrow, RECORD=rounding.record, ROWS=rows, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return rounding.values()


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

    `fast`: accumulates with fewer bits, good enough for activations, not for gradients.
    """
    if a_NK.device.type != "cuda":
        with torch.autocast(a_NK.device.type, enabled=False):
            y_NM = (a_NK.float() @ b_MK.float().t()) * (a_unit * b_unit)
        y_NM = (y_NM if bias_M is None else y_NM + bias_M.float()).to(dtype)
        return y_NM if out is None else out.copy_(y_NM)
    for size in (a_NK.shape[1], b_MK.shape[0]):
        assert size % MULTIPLE == 0, f"8-bit products need multiples of {MULTIPLE}, not {size}"
    # cuBLASLt adds a bias to half-precision results only.
    inside = bias_M is not None and dtype != torch.float32
    bias = bias_M.to(dtype) if bias_M is not None and inside else None
    given = {} if out is None else {"out": out}
    scaled_product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    y_NM = scaled_product(a_NK, b_MK.t(), a_unit, b_unit, bias=bias, out_dtype=dtype, use_fast_accum=fast, **given)
    return y_NM if bias_M is None or inside else y_NM.add_(bias_M)


# The head: softmax gradients are between -1 and 1, so their scale is a constant. E4M3 is the more exact type for them:
# the label and the likely tokens matter, for which it has one more bit than E5M2. It rounds probabilities below 1e-6
# to zero.
GRADIENT_SCALE = 448.0


def narrow_gradient(dlogits_CP: Tensor) -> Tensor:
    """Gradients of logits as 8-bit floats with unit 1/GRADIENT_SCALE. On a GPU the loss kernel writes them itself."""
    return (dlogits_CP.float() * GRADIENT_SCALE).to(E4M3)
