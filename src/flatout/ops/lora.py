"""Low-rank adapters on a frozen linear layer: y = x Wᵀ + bias + s · (x Aᵀ) Bᵀ.

Several projections share one input and one matrix (queries, keys and values; gate and up), so their adapters share one
product too. The A of all parts are stacked to [R, I]; the B of part p maps its own columns of x Aᵀ to its own rows of
y, so B as one matrix is [O, R] with zeros outside those blocks. Parts may be missing and ranks may differ. The scale s
is multiplied into A before A is rounded to the type of the product, so it adds no rounding.

Two forms with the same result:
- `lora_reference`, the plain one, differentiated by autograd.
- `lora_product`: the base product, to which the thin one is added in place. Backward saves only x and the thin x Aᵀ. It
  computes no gradient of the frozen weight; gradients of A and B are fp32. With B = 0 it equals the base product, bit
  for bit.

A third form in ops/kernels/frozen.py uses a `JoinedWeight`: [x, u] @ [W, B]ᵀ with u = s · x Aᵀ is ONE product, so the
addition takes no pass over y and no rounding. W is part of a larger buffer, with B to its right and A below it:

        [ W  B ]      forward reads the upper rows:   [x, u]  @ [W, B]ᵀ
        [ A  · ]      backward the left columns:      [dy, g] @ [W; A]

The corner is never read. Both products share one copy of W.

DoRA: y = f · (x Wᵀ + s (x Aᵀ) Bᵀ) + bias with f = magnitude / ‖W + s B A‖ per row of an adapted part; the norm counts
as a constant. Rows without an adapter have f = 1. Backward also saves y before the factor.

Contract: products are in the type of the weight (under autocast in autocast's), with sums in fp32. The result has that
type; x may have another one. The weight must be frozen; a bias may be trained.
Trap: `JoinedWeight` holds copies of A and B: call `refresh` after changing them, but not between a forward pass and its
backward pass. The buffer's version is checked for that, except for kernels that write without increasing it.

Shape legend: N tokens, I inputs, O outputs, R ranks of all parts together, K = I + R, P adapted rows.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_AT_ONCE = 4096  # of a matrix in fp32
ALIGNMENT_BYTES = 16  # rows of a joined buffer start where matrix units like to read


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """The adapter of some consecutive output rows."""

    first: int
    rows: int
    rank: int
    scale: float

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.rows)


@dataclasses.dataclass(frozen=True)
class LoraLayout:
    """The adapters of a matrix, in the order of its rows."""

    outputs: int
    parts: tuple[LoraPart, ...]

    def __post_init__(self) -> None:
        end = 0
        for part in self.parts:
            if part.first < end or part.rank < 1 or part.rows < 1:
                raise ValueError(f"parts must lie in order, without overlap, with a rank of at least 1: {self.parts}")
            end = part.first + part.rows
        if not self.parts or end > self.outputs:
            raise ValueError(f"parts must lie within the {self.outputs} rows of the matrix: {self.parts}")

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows with an adapter."""
        return sum(part.rows for part in self.parts)

    @property
    def spans(self) -> list[slice]:
        """Each part's slice of the stacked ranks."""
        ends, end = [], 0
        for part in self.parts:
            ends.append(slice(end, end + part.rank))
            end += part.rank
        return ends

    @property
    def whole(self) -> bool:
        """Whether a single part covers all rows, so that B has no zero blocks."""
        return len(self.parts) == 1 and self.parts[0].rows == self.outputs

    def adapted(self, x: Tensor) -> Tensor:
        """The adapted rows of `x`, which are on its last axis, part after part."""
        if self.rows == self.outputs:
            return x
        return torch.cat([x[..., part.span] for part in self.parts], dim=-1)

    def spread(self, x_P: Tensor, fill: float) -> Tensor:
        """The inverse of `adapted`, with `fill` in all other rows."""
        if self.rows == self.outputs:
            return x_P
        x_O = torch.full((self.outputs,), fill, dtype=x_P.dtype, device=x_P.device)
        for part, values in zip(self.parts, x_P.split([part.rows for part in self.parts]), strict=True):
            x_O[part.span] = values
        return x_O


# --- the plain form ---------------------------------------------------------------------------------------------------


def lora_reference(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b: Sequence[Tensor],
    layout: LoraLayout,
    *,
    keep: Tensor | None = None,
    magnitude_P: Tensor | None = None,
    norm_P: Tensor | None = None,
) -> Tensor:
    """The definition, in x's type. `keep`: dropout factors (0 or 1/(1-p)).

    DoRA with dropout has two base products: that of x, and that of dropped x, which the factor scales.
    """
    weight_OI = weight_OI.to(x.dtype)
    base = x @ weight_OI.T
    dropped = x if keep is None else x * keep
    low = torch.zeros_like(base)
    for part, span, b_p in zip(layout.parts, layout.spans, b, strict=True):
        thin = dropped @ a_RI[span].to(x.dtype).T
        low[..., part.span] = (thin @ b_p.to(x.dtype).T) * part.scale
    if magnitude_P is None:
        y = base + low
    else:
        assert norm_P is not None
        factor_O = layout.spread(magnitude_P / norm_P.detach(), 1.0).to(x.dtype)
        scaled = base if keep is None else dropped @ weight_OI.T
        y = base + (factor_O - 1) * scaled + factor_O * low
    return y if bias_O is None else y + bias_O.to(x.dtype)


def adapted_weight(
    weight_OI: Tensor, a_RI: Tensor, b: Sequence[Tensor], layout: LoraLayout, index: int, rows: slice = slice(None)
) -> Tensor:
    """W + s B A for `rows` of part `index`, in fp32 or wider."""
    part = layout.parts[index]
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    a_p = a_RI[layout.spans[index]].to(wide) * part.scale
    return torch.addmm(weight_OI[part.span][rows].to(wide), b[index][rows].to(wide), a_p)


@torch.no_grad()
def dora_norm(weight_OI: Tensor, a_RI: Tensor, b: Sequence[Tensor], layout: LoraLayout) -> Tensor:
    """‖W + s B A‖ of every adapted row, in fp32 or wider; some rows at a time, to save memory."""
    norms = []
    for index, part in enumerate(layout.parts):
        for start in range(0, part.rows, ROWS_AT_ONCE):
            whole = adapted_weight(weight_OI, a_RI, b, layout, index, slice(start, start + ROWS_AT_ONCE))
            norms.append(torch.linalg.vector_norm(whole, dim=1))
    return torch.cat(norms)


# --- operands of the fast forms ---------------------------------------------------------------------------------------


@torch.no_grad()
def fill_operands(a_out_RI: Tensor, b_out_OR: Tensor, a_RI: Tensor, b: Sequence[Tensor], layout: LoraLayout) -> None:
    """Writes s · A and the blocks of B, each rounded once. The space between the blocks must be zero already."""
    for part, span, b_p in zip(layout.parts, layout.spans, b, strict=True):
        torch.mul(a_RI[span], part.scale, out=a_out_RI[span])
        b_out_OR[part.span, span].copy_(b_p)


@torch.no_grad()
def operands(a_RI: Tensor, b: Sequence[Tensor], layout: LoraLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(s · A [R, I], B as one matrix [O, R]) in the type of the product."""
    if layout.whole:
        scale = layout.parts[0].scale
        return (a_RI if scale == 1.0 else a_RI * scale).to(dtype), b[0].to(dtype)
    made_RI = torch.empty(a_RI.shape, dtype=dtype, device=a_RI.device)
    made_OR = torch.zeros(layout.outputs, layout.rank, dtype=dtype, device=a_RI.device)
    fill_operands(made_RI, made_OR, a_RI, b, layout)
    return made_RI, made_OR


class JoinedWeight:
    """W with B to its right and A below it, in one buffer; see the top of this file."""

    def __init__(self, weight_OI: Tensor, layout: LoraLayout, dtype: torch.dtype | None = None) -> None:
        """Copies the weight. `dtype`: the type of the products; None: that of the weight."""
        self.layout, self.dtype = layout, dtype or weight_OI.dtype
        outputs, inputs = weight_OI.shape
        step = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        columns = -(-(inputs + layout.rank) // step) * step
        self.buffer = torch.zeros(outputs + layout.rank, columns, dtype=self.dtype, device=weight_OI.device)
        self.weight_OI = self.buffer[:outputs, :inputs]
        self.weight_OI.copy_(weight_OI.detach())
        self.b_OR = self.buffer[:outputs, inputs : inputs + layout.rank]
        self.a_RI = self.buffer[outputs:, :inputs]
        self.forward_OK = self.buffer[:outputs, : inputs + layout.rank]
        self.backward_JI = self.buffer[:, :inputs]  # J = O + R

    @torch.no_grad()
    def refresh(self, a_RI: Tensor, b: Sequence[Tensor]) -> None:
        """Copies new values of the adapter; call it after every update."""
        fill_operands(self.a_RI, self.b_OR, a_RI, b, self.layout)


# --- the steps of the fast forms, also for kernels that call them one by one ------------------------------------------


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with an fp32 (or wider) result that is not rounded to the inputs' type."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def adapter_gradients(
    dy_NO: Tensor, g_NR: Tensor, x_NI: Tensor, u_NR: Tensor, layout: LoraLayout
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of A and of the parts of B, in fp32 or wider. u is s · x Aᵀ, g is dy B."""
    da_RI = wide_product(g_NR.t(), x_NI)
    db = []
    for part, span in zip(layout.parts, layout.spans, strict=True):
        if part.scale != 1.0:
            da_RI[span].mul_(part.scale)
        db.append(wide_product(dy_NO[:, part.span].t(), u_NR[:, span]))
    return da_RI, db


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *values):
        # No named parameters: without gradients torch's compiler counts them, `*b` as one, and mistakes a call with two
        # parts of B for one without `ctx`.
        x, weight, bias, a, magnitude, norm, layout, dropout, in_place, dtype, *b = values
        ctx.layout, ctx.dropout, ctx.x_dtype = layout, dropout, x.dtype
        shape = x.shape
        x = x.reshape(-1, shape[-1]).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            a_RI, b_OR = operands(a, b, layout, dtype)
            seen, mask = (x, None) if dropout == 0 else torch.native_dropout(x, dropout, True)
            u = seen @ a_RI.t()
            del seen
            y = x @ weight.to(dtype).t() if bias is None else torch.addmm(bias.to(dtype), x, weight.to(dtype).t())
            y = y.addmm_(u, b_OR.t()) if in_place else torch.addmm(y, u, b_OR.t())
            plain = factor = None
            if magnitude is not None:
                factor = layout.spread(magnitude / norm, 1.0)
                # f (y - bias) + bias, in a form that is exactly y for f = 1
                rest = torch.zeros_like(factor) if bias is None else (1 - factor) * bias
                plain, y = y, torch.addcmul(rest, y, factor, out=torch.empty_like(y))
        # Save the weight itself: casts of all layers, saved until backward, would be a second copy of the model.
        ctx.save_for_backward(x, u, mask, weight, a_RI, b_OR, plain, factor, norm, None if factor is None else bias)
        return y.view(*shape[:-1], layout.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, u, mask, weight, a_RI, b_OR, plain, factor, norm, bias = ctx.saved_tensors
        layout, needed = ctx.layout, ctx.needs_input_grad
        shape = dy.shape
        dy = dy.reshape(-1, shape[-1]).to(x.dtype)
        dx = da = dmagnitude = None
        db: list[Tensor | None] = [None] * len(layout.parts)
        with torch.autocast(dy.device.type, enabled=False):
            if factor is not None:
                along = (dy.to(factor.dtype) * plain).sum(dim=0)
                if bias is not None:
                    along -= bias * dy.sum(dim=0, dtype=factor.dtype)
                dmagnitude = layout.adapted(along) / norm
                dy = torch.mul(dy, factor, out=torch.empty_like(dy))
            g = dy @ b_OR
            if needed[0]:
                if mask is not None:  # dropped inputs get no gradient from the adapter
                    dx = torch.addcmul(dy @ weight.to(dy.dtype), g @ a_RI, mask, value=1 / (1 - ctx.dropout))
                else:
                    dx = (dy @ weight.to(dy.dtype)).addmm_(g, a_RI)
                dx = dx.view(*shape[:-1], x.shape[1]).to(ctx.x_dtype)
            if needed[3] or any(needed[10:]):
                seen = x if mask is None else x * mask * (1 / (1 - ctx.dropout))
                da, db[:] = adapter_gradients(dy, g, seen, u, layout)
        return dx, None, None, da, dmagnitude, *([None] * 5), *db


def lora_product(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b: Sequence[Tensor],
    layout: LoraLayout,
    *,
    magnitude_P: Tensor | None = None,
    norm_P: Tensor | None = None,
    dropout: float = 0.0,
    in_place: bool = True,
) -> Tensor:
    """x Wᵀ + bias + s (x Aᵀ) Bᵀ, with gradients for all but W and bias. `norm_P`: `dora_norm`, for DoRA.

    `dropout` is on the adapter's input only. `in_place=False` is for selective checkpointing, which saves the base
    product's result.
    """
    if weight_OI.requires_grad or (bias_O is not None and bias_O.requires_grad):
        raise ValueError("weight and bias under an adapter must be frozen: they get no gradient here")
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_OI.dtype
    if magnitude_P is not None and dropout > 0:
        # Two base products with different inputs: there is no fast form.
        with torch.autocast(kind, enabled=False):
            keep = F.dropout(torch.ones_like(x, dtype=dtype), dropout)
            values = (x.to(dtype), weight_OI, bias_O, a_RI, b, layout)
            return lora_reference(*values, keep=keep, magnitude_P=magnitude_P, norm_P=norm_P)
    values = (x, weight_OI, bias_O, a_RI, magnitude_P, norm_P, layout, dropout, in_place, dtype, *b)
    return _LoraProduct.apply(*values)  # pyright: ignore
