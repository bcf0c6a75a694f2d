"""A block with frozen weights as one step of autograd: only adapters get gradients.

Frozen weights make the backward pass short: there are no weight gradients and no column sums.
- Base and adapter are one product, [x, u] @ [W, B]ᵀ and [dy, g] @ [W; A] (ops/lora.py). Our kernels write x and dy into
  rows with room for u and g, so they are not copied. Only attention's output gets the thin product added.
- Queries and keys are rotated in place, and rotated back while their gradients are packed.
- The products that compute gradients of A and B add them to `.grad` if it exists. For adapters around SwiGLU its
  backward kernel may do that (adapters.py).
- Saved for backward: the residual stream before both norms, both norms, queries to values, attention's result, and the
  MLP before its activation. The kernel that differentiates the activation recomputes it. `selective` does not save the
  norms, which are recomputed in the same way. `full` saves one residual stream and runs the block again.

Contract: the result equals that of the plain form up to rounding. Joined weights must be up to date, and must not
change until backward.
Trap: backward adds to `.grad` even under torch.autograd.grad. It can run only once.

Shape legend: N tokens, W width, I inputs, O outputs, R ranks, K = I + R, J = O + R, C columns of queries to values, B
batch, T positions, H query heads, G key/value heads, D head size. Rows of two-dimensional tensors may be strided.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.gradients import accumulated, for_autograd
from flatout.ops.kernels.activation import KINDS, activate, activate_backward
from flatout.ops.kernels.adapters import SwigluPass, add_adapter_gradients
from flatout.ops.kernels.cublaslt import multiply
from flatout.ops.kernels.rotary import HeadWeights, turn_back_packed, turn_packed
from flatout.ops.kernels.stream import FrozenNorm
from flatout.ops.lora import JoinedWeight
from flatout.ops.scales import version_of

_ALIGNED = 16  # elements: Triton uses vector loads only if row strides are multiples of it
_NO_REUSE = "the block's backward pass has run already: its tensors are gone"


def roomy(rows: int, columns: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns + rank] with aligned rows."""
    stride = -(-(columns + rank) // _ALIGNED) * _ALIGNED if rank else columns
    return torch.empty(rows, stride, dtype=dtype, device=device)[:, : columns + rank]


@dataclasses.dataclass(eq=False)
class GradientRoom:
    """The gradient of a block's branch with room for its thin product, written by the block above."""

    rank: int
    wide_NJ: Tensor | None = None

    def take(self, gradient_NO: Tensor, dtype: torch.dtype) -> Tensor:
        wide_NJ, self.wide_NJ = self.wide_NJ, None
        rows, columns = gradient_NO.shape
        if wide_NJ is not None and wide_NJ.data_ptr() == gradient_NO.data_ptr():
            return wide_NJ
        wide_NJ = roomy(rows, columns, self.rank, dtype, gradient_NO.device)
        wide_NJ[:, :columns].copy_(gradient_NO)
        return wide_NJ


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenLinear:
    """A product with a frozen weight, and optionally an adapter: A, the parts of B, and the joined weight."""

    weight_OI: Tensor
    bias_O: Tensor | None
    joined: JoinedWeight | None = None
    a_RI: Tensor | None = None
    b: tuple[Tensor, ...] = ()
    tuned: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.joined is None else self.joined.layout.rank

    @property
    def adapters(self) -> tuple[Tensor, ...]:
        return () if self.a_RI is None else (self.a_RI, *self.b)

    @property
    def state(self) -> int:
        return 0 if self.joined is None else version_of(self.joined.buffer)

    def input_room(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return roomy(x.shape[0], self.weight_OI.shape[1], self.rank, dtype, x.device)

    def gradient_room(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return roomy(x.shape[0], self.weight_OI.shape[0], self.rank, dtype, x.device)

    def output(self, x_NK: Tensor, bias_O: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """y of x, which is in the first columns of `x_NK`; writes u to the other columns."""
        weight = self._weight(x_NK.dtype)
        if self.joined is not None:
            inputs = self.weight_OI.shape[1]
            torch.mm(x_NK[:, :inputs], self.joined.a_RI.t(), out=x_NK[:, inputs:])
            weight = self.joined.forward_OK
        bias_O = None if bias_O is None else bias_O.to(x_NK.dtype)
        return multiply(x_NK, weight.t(), bias_N=bias_O, out=out, tuned=self.tuned)

    def output_beside(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y, u) of an x without room for u: the thin product is added separately."""
        y_NO = multiply(x_NI, self._weight(x_NI.dtype).t(), tuned=self.tuned)
        if self.joined is None:
            return y_NO, None
        u_NR = x_NI @ self.joined.a_RI.t()
        return y_NO.addmm_(u_NR, self.joined.b_OR.t()), u_NR

    def thin_gradient(self, dy_NJ: Tensor) -> None:
        """Writes g to the columns after dy."""
        if self.joined is not None:
            outputs = self.weight_OI.shape[0]
            torch.mm(dy_NJ[:, :outputs], self.joined.b_OR, out=dy_NJ[:, outputs:])

    def input_gradient(self, dy_NJ: Tensor) -> Tensor:
        """dx of [dy, g]."""
        weight = self._weight(dy_NJ.dtype) if self.joined is None else self.joined.backward_JI
        return multiply(dy_NJ, weight, tuned=self.tuned)

    def places(self) -> list[Tensor]:
        """Tensors to which gradients of `adapters` are added: their `.grad`, or new tensors if one of them has none."""
        there = [accumulated(adapter) for adapter in self.adapters]
        if any(place is None for place in there):
            return [torch.zeros_like(adapter, requires_grad=False) for adapter in self.adapters]
        return [place for place in there if place is not None]

    def gradients(
        self, places: list[Tensor], dy_NJ: Tensor, x_NI: Tensor | None, u_NR: Tensor | None
    ) -> list[Tensor | None]:
        """Adds the gradients to `places` and returns those for autograd. x (for A) or u (for B) is None if done."""
        if self.joined is None or not places:
            return []
        add_adapter_gradients(places, dy_NJ, x_NI, u_NR, self.joined.layout)
        return [for_autograd(adapter, place) for adapter, place in zip(self.adapters, places, strict=True)]

    def _weight(self, dtype: torch.dtype) -> Tensor:
        return self.weight_OI.to(dtype) if self.joined is None else self.joined.weight_OI


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FrozenBlock:
    """A block in one pass."""

    first: FrozenNorm
    qkv: FrozenLinear
    out: FrozenLinear
    second: FrozenNorm
    up: FrozenLinear
    down: FrozenLinear
    heads: int
    groups: int
    head_norms: HeadWeights | None  # of queries and keys
    head_eps: float
    head_scale: float
    cos: Tensor | None
    sin: Tensor | None
    kind: str  # of the MLP
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    checkpointing: str
    dtype: torch.dtype  # of products
    above: GradientRoom  # of this block's branch
    below: GradientRoom | None  # of the previous block's branch

    @property
    def linears(self) -> tuple[FrozenLinear, ...]:
        return self.qkv, self.out, self.up, self.down


@dataclasses.dataclass(eq=False)
class _Attended:
    """Attention with its own autograd graph."""

    y_BHTD: Tensor
    inputs: tuple[Tensor, Tensor, Tensor]
    before: tuple[Tensor, Tensor] | None  # queries and keys before their norms

    def result(self) -> Tensor:
        """[N, H·D]."""
        return self.y_BHTD.detach().transpose(1, 2).flatten(0, 1).flatten(1)

    def gradients(self, dy_NI: Tensor) -> tuple[Tensor, ...]:
        batch, heads, positions, size = self.y_BHTD.shape
        dy_BHTD = dy_NI.view(batch, positions, heads, size).transpose(1, 2)
        return torch.autograd.grad(self.y_BHTD, self.inputs, dy_BHTD)


def _attend(block: FrozenBlock, h_NK: Tensor, batch: int, *, learning: bool) -> _Attended:
    qkv_NC = block.qkv.output(h_NK, block.qkv.bias_O)
    heads, groups = block.heads, block.groups
    whole_BATD = qkv_NC.view(batch, h_NK.shape[0] // batch, heads + 2 * groups, -1).transpose(1, 2)
    q, k, v = whole_BATD.split([heads, groups, groups], dim=1)
    norms = block.head_norms
    turned = turn_packed(q, k, norms, block.cos, block.sin, block.head_eps, block.head_scale)
    inputs = tuple(x.detach().requires_grad_(learning) for x in (*turned, v))
    with torch.set_grad_enabled(learning):
        y_BHTD = block.attend(*inputs)
    return _Attended(y_BHTD, (inputs[0], inputs[1], inputs[2]), None if norms is None else (q, k))


def _thin(x_NK: Tensor, layer: FrozenLinear) -> Tensor | None:
    return x_NK[:, layer.weight_OI.shape[1] :] if layer.rank else None


def _kept(h_NK: Tensor, layer: FrozenLinear, block: FrozenBlock) -> tuple[Tensor | None, Tensor | None]:
    """(the norm or None, u or None) to save for backward."""
    thin = _thin(h_NK, layer)
    if thin is None:
        return None, None
    return (h_NK[:, : layer.weight_OI.shape[1]], thin) if block.checkpointing == "none" else (None, thin.clone())


@dataclasses.dataclass(eq=False)
class _Kept:
    """Tensors saved for backward, which frees them one by one. `u`: thin products, None for a layer without an adapter.
    A norm that is recomputed is None."""

    x1: Tensor  # the residual stream before the first norm
    mean1: Tensor
    rstd1: Tensor
    h1: Tensor | None  # that norm
    u1: Tensor | None  # of queries, keys and values
    u2: Tensor | None  # of attention's output
    x2: Tensor  # the residual stream before the second norm
    mean2: Tensor
    rstd2: Tensor
    h2: Tensor | None
    u3: Tensor | None  # of the MLP's first product
    pre: Tensor  # the result of that product
    u4: Tensor | None  # of the MLP's second product
    attended: _Attended

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but attention, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)[:-1])


def _up_to_pre(
    block: FrozenBlock,
    x1: Tensor,
    first: tuple[Tensor, Tensor],
    h1_NK: Tensor,
    batch: int,
    *,
    again: bool,
    learning: bool,
) -> tuple[_Kept, Tensor]:
    """Runs the block up to the MLP's first product; returns its result too. `again`: recomputation in backward."""
    attended = _attend(block, h1_NK, batch, learning=learning)
    h1, u1 = _kept(h1_NK, block.qkv, block)
    del h1_NK
    branch, u2 = block.out.output_beside(attended.result())
    h2_NK = block.up.input_room(x1, block.dtype)
    h2_NW = h2_NK[:, : x1.shape[1]]
    x2, mean2, rstd2 = block.second.forward(x1, branch, block.out.bias_O, h2_NW)
    # In a recomputation its gradient overwrites it, which needs room for g.
    pre = block.up.gradient_room(x1, block.dtype) if again else None
    hidden = block.up.weight_OI.shape[0]
    pre_NC = block.up.output(h2_NK, None, None if pre is None else pre[:, :hidden])
    h2, u3 = _kept(h2_NK, block.up, block)
    last = pre_NC if pre is None else pre
    return _Kept(x1, *first, h1, u1, u2, x2, mean2, rstd2, h2, u3, last, None, attended), pre_NC


class _FrozenBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, branch_bias, block, learning, *adapters):
        shape = x.shape
        with torch.autocast(x.device.type, enabled=False):
            x_NW = x.reshape(-1, shape[-1]).contiguous()
            branch_NW = None if branch is None else branch.reshape(x_NW.shape).contiguous()
            h1_NK = block.qkv.input_room(x_NW, block.dtype)
            x1, *first = block.first.forward(x_NW, branch_NW, branch_bias, h1_NK[:, : shape[-1]])
            full = block.checkpointing == "full"
            kept, pre = _up_to_pre(
                block, x1, tuple(first), h1_NK, shape[0], again=False, learning=learning and not full
            )
            del h1_NK
            active_NK = block.down.input_room(x1, block.dtype)
            activate(pre, block.up.bias_O, KINDS[block.kind], out=active_NK[:, : block.down.weight_OI.shape[1]])
            branch_out = block.down.output(active_NK)
            u4 = _thin(active_NK, block.down)
        if learning:
            kept.u4 = None if u4 is None else u4.clone()  # a copy, so that the activation can be freed
            ctx.save_for_backward(*((x1, *first, kept.u4) if full else kept.tensors))
            ctx.attended = None if full else kept.attended
            ctx.block, ctx.shape, ctx.full = block, shape, full
            ctx.states = [layer.state for layer in block.linears]
            ctx.branch_dtype = None if branch is None else branch.dtype
        return kept.x2.view(shape), branch_out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx2, dbranch):
        block, shape = ctx.block, ctx.shape
        if block is None:
            raise RuntimeError(_NO_REUSE)
        if ctx.states != [layer.state for layer in block.linears]:
            raise RuntimeError("the adapters were updated between this forward pass and its backward pass")
        with torch.autocast(dx2.device.type, enabled=False):
            if ctx.full:
                x1, *first, u4 = ctx.saved_tensors
                h1_NK = block.qkv.input_room(x1, block.dtype)
                block.first.forward(x1, None, None, h1_NK[:, : shape[-1]])
                kept = _up_to_pre(block, x1, tuple(first), h1_NK, shape[0], again=True, learning=True)[0]
                kept.u4 = u4
                del h1_NK, x1, first
            else:
                kept = _Kept(*ctx.saved_tensors, ctx.attended)
                ctx.attended = None
            needs = ctx.needs_input_grad
            how = {"wanted": bool(needs[0] or needs[1]), "full": ctx.full, "dtype": ctx.branch_dtype}
            dx, dbelow, gradients = _backward(block, kept, _rows(dx2), _rows(dbranch), **how)
        ctx.block = None
        return (
            None if dx is None else dx.unflatten(0, shape[:-1]),
            None if dbelow is None or not needs[1] else dbelow.unflatten(0, shape[:-1]),
            *([None] * 3),
            *gradients,
        )


def _rows(x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _backward(
    block: FrozenBlock,
    kept: _Kept,
    dx2: Tensor,
    dbranch: Tensor,
    *,
    wanted: bool,
    full: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """(dx, gradient of the branch, gradients of adapters). Stops where no gradient is needed further down.

    Frees large tensors as early as possible, also those in `kept`.
    """
    x1, x2, pre, h1, h2 = kept.x1, kept.x2, kept.pre, kept.h1, kept.h2
    attended, u3 = kept.attended, kept.u3
    del kept.x2, kept.pre, kept.h1, kept.h2, kept.attended
    qkv, out, up, down = block.linears
    to_qkv = wanted or qkv.rank > 0
    to_middle = to_qkv or out.rank > 0
    to_pre = to_middle or up.rank > 0
    kind, width, columns = KINDS[block.kind], x1.shape[1], up.weight_OI.shape[0]

    dy_NJ = block.above.take(dbranch, block.dtype)
    down.thin_gradient(dy_NJ)
    dpre_NJ = pre if full else up.gradient_room(x1, block.dtype)
    at_down, at_up = down.places(), up.places()
    together = to_pre and block.kind == "swiglu" and up.bias_O is None and bool(at_down) and bool(at_up)
    active = None
    if together:
        assert down.joined is not None
        assert up.joined is not None
        layouts = {"down": down.joined.layout, "up": up.joined.layout}
        SwigluPass(
            dout_NM=down.input_gradient(dy_NJ), pre_NC=pre[:, :columns], into_NC=dpre_NJ[:, :columns], dy_NJ=dy_NJ,
            u_NR=u3, down_places=at_down, up_places=at_up, **layouts,
        ).run()  # fmt: skip
    elif to_pre:
        dactive = down.input_gradient(dy_NJ)
        how = {"again": down.rank > 0, "frozen": True, "into": dpre_NJ[:, :columns]}
        active = activate_backward(dactive, pre[:, :columns], up.bias_O, kind, **how)[2]
        del dactive
    else:
        active = activate(pre[:, :columns].contiguous(), up.bias_O, kind)
    del pre
    of_down = down.gradients(at_down, dy_NJ, active, kept.u4)
    del active, dy_NJ, dbranch
    if not to_pre:
        return None, None, of_down

    up.thin_gradient(dpre_NJ)
    if h2 is None and up.rank > 0:
        h2 = torch.empty(x2.shape, dtype=block.dtype, device=x2.device)
        again = True
    else:
        again = False
    if not to_middle:
        if again:
            block.second.forward(x2, None, None, h2)
        return None, None, [*up.gradients(at_up, dpre_NJ, h2, None if together else u3), *of_down]
    dh = up.input_gradient(dpre_NJ)
    do_NJ = out.gradient_room(x1, block.dtype)
    dx1 = block.second.backward(dx2, dh, x2, kept.mean2, kept.rstd2, do_NJ[:, :width], h2 if again else None)
    del dh, dx2, x2
    of_up = up.gradients(at_up, dpre_NJ, h2, None if together else u3)
    del dpre_NJ, h2

    out.thin_gradient(do_NJ)
    of_out = out.gradients(out.places(), do_NJ, attended.result() if out.rank else None, kept.u2)
    if not to_qkv:
        return None, None, [*of_out, *of_up, *of_down]
    dqkv = attended.gradients(out.input_gradient(do_NJ))
    before = attended.before
    del attended, do_NJ
    dqkv_NJ = qkv.gradient_room(x1, block.dtype)
    turn_back_packed(
        (dqkv[0], dqkv[1], dqkv[2]), before, block.head_norms, block.cos, block.sin, block.head_eps,
        block.head_scale, dqkv_NJ[:, : qkv.weight_OI.shape[0]],
    )  # fmt: skip
    del dqkv, before
    qkv.thin_gradient(dqkv_NJ)
    again = h1 is None and qkv.rank > 0
    if again:
        h1 = torch.empty(x1.shape, dtype=block.dtype, device=x1.device)
    if not wanted:
        if again:
            block.first.forward(x1, None, None, h1)
        return None, None, [*qkv.gradients(qkv.places(), dqkv_NJ, h1, kept.u1), *of_out, *of_up, *of_down]
    dh = qkv.input_gradient(dqkv_NJ)
    room = 0 if block.below is None else block.below.rank
    dbelow_NJ = roomy(x1.shape[0], width, room, dtype or x1.dtype, x1.device)
    dx = block.first.backward(dx1, dh, x1, kept.mean1, kept.rstd1, dbelow_NJ[:, :width], h1 if again else None)
    if block.below is not None:
        block.below.wide_NJ = dbelow_NJ
    return dx, dbelow_NJ[:, :width], [*qkv.gradients(qkv.places(), dqkv_NJ, h1, kept.u1), *of_out, *of_up, *of_down]


def frozen_block(
    x_BTW: Tensor, branch_BTW: Tensor | None, branch_bias_W: Tensor | None, block: FrozenBlock
) -> tuple[Tensor, Tensor]:
    """The block's output: (the residual stream, a branch to be added to it)."""
    adapters = [adapter for layer in block.linears for adapter in layer.adapters]
    inputs = [x for x in (x_BTW, branch_BTW, *adapters) if x is not None]
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _FrozenBlock.apply(x_BTW, branch_BTW, branch_bias_W, block, learning, *adapters)  # pyright: ignore


class _FrozenEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, branch_bias, norm, dtype, below):
        shape = x.shape
        x_NW, branch_NW = x.reshape(-1, shape[-1]), branch.reshape(-1, shape[-1])
        h_NW = torch.empty(x_NW.shape, dtype=dtype, device=x.device)
        x_new_NW, mean_N, rstd_N = norm.forward(x_NW, branch_NW, branch_bias, h_NW)
        ctx.save_for_backward(x_new_NW, mean_N, rstd_N)
        ctx.norm, ctx.below, ctx.branch_dtype = norm, below, branch.dtype
        return h_NW.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        x_new_NW, mean_N, rstd_N = ctx.saved_tensors
        rows, width = x_new_NW.shape
        dbelow_NJ = roomy(rows, width, ctx.below.rank, ctx.branch_dtype, dh.device)
        dh_NW = dh.reshape(rows, width).contiguous()
        dx = ctx.norm.backward(None, dh_NW, x_new_NW, mean_N, rstd_N, dbelow_NJ[:, :width], None)
        ctx.below.wide_NJ = dbelow_NJ
        return dx.unflatten(0, dh.shape[:-1]), dbelow_NJ[:, :width].unflatten(0, dh.shape[:-1]), *([None] * 4)


def frozen_end(
    x_BTW: Tensor,
    branch_BTW: Tensor,
    branch_bias_W: Tensor | None,
    norm: FrozenNorm,
    dtype: torch.dtype,
    below: GradientRoom,
) -> Tensor:
    """The final norm, in `dtype`, of the residual stream with the last block's branch added."""
    return _FrozenEnd.apply(x_BTW, branch_BTW, branch_bias_W, norm, dtype, below)  # pyright: ignore
