"""What a block is made of: norms, rotary positions, and its operations, in torch's form and in a form of our kernels.

A block's forward pass is written once (model/layers.py), over `Operations`. The residual stream is a `Stream`: its
value so far, and a branch that has not been added yet. The next norm adds the branch with its bias, dropout and learned
scale, which our kernels do in one pass over memory.

    x_new = x + dropout(branch + bias) * scale          h = norm(x_new)

With `model.first_mix` the first norm of a block also mixes the first stream in: x_new = a·(x + ...) + b·first.

Only our kernels leave a branch waiting between blocks. torch's form adds it before the next block (`hand_on`): the
first block then is the same code to a compiler as the others, and a recomputed block keeps one tensor.

Three forms: `Operations` is torch's: any device, any type, and open to a compiler. `KernelOperations` uses our kernels.
With `FrozenOperations` a block in which only adapters are trained is one step of autograd.

Shape legend: B batch, T positions of this call, H query heads, G key/value heads, D head size, W width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatout.config.schema import ModelConfig
from flatout.model.adapted import AdaptedLinear
from flatout.model.cache import Decoding
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock
from flatout.ops.documents import DocumentLayout
from flatout.ops.scales import NarrowLinear, Slot


class Norm(nn.Module):
    """Base of both norms. Without weights (`model.norm=plain-rmsnorm`) it only rescales its input."""

    centred: bool
    start = 1.0  # of the weights

    def __init__(self, width: int, *, weight: bool, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class _CpuRms(torch.autograd.Function):
    """RMS norm times `scale`, without weights. torch has no CPU kernel for it; this takes half the time."""

    @staticmethod
    def forward(ctx, x, eps, scale):
        factor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = factor.square_().div_(x.shape[-1]).add_(eps).rsqrt_().mul_(scale)
        ctx.save_for_backward(x, factor)
        ctx.share = -1.0 / (x.shape[-1] * scale**2)
        return x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, factor = ctx.saved_tensors
        along = (dy * x).sum(dim=-1, keepdim=True).mul_(factor**3).mul_(ctx.share)
        return (dy * factor).addcmul_(x, along), None, None


class RMSNorm(Norm):
    """`scale` multiplies the result. With `offset` weights are how much a factor is more than 1."""

    centred = False

    def __init__(
        self, width: int, eps: float = 1e-5, *, weight: bool = True, scale: float = 1.0, offset: bool = False
    ) -> None:
        super().__init__(width, weight=weight, bias=False, eps=eps)
        self.scale, self.offset = scale, offset
        self.start = 0.0 if offset else 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None and x.device.type == "cpu" and x.itemsize >= 4 and not torch.compiler.is_compiling():
            return _CpuRms.apply(x, self.eps, self.scale)
        if self.offset and self.weight is not None:  # 1 + weight has too few digits in 16 bits
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            normed = F.rms_norm(wide, (x.shape[-1],), 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)
            return normed if self.scale == 1.0 else normed * self.scale
        weight = None if self.weight is None else self.weight.to(x.dtype)
        normed = F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return normed if self.scale == 1.0 else normed * self.scale


class LayerNorm(Norm):
    centred = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class JoinedNorm(RMSNorm):
    """Of queries or keys: over all heads of a position together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


class NoNorm(Norm):
    """In the place of a norm where `model.norm_place` has none."""

    centred = False

    def __init__(self) -> None:
        super().__init__(0, weight=False, bias=False, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x


def build_norm(config: ModelConfig, width: int) -> Norm:
    if config.norm == "layernorm":
        return LayerNorm(width, weight=True, bias=config.bias, eps=config.norm_eps)
    return RMSNorm(width, **norm_settings(config))


def norm_settings(config: ModelConfig) -> dict[str, Any]:
    """Of all RMS norms of a model, those of queries and keys too."""
    return {"eps": config.norm_eps, "weight": config.norm_weights, "offset": config.norm == "offset-rmsnorm"}


Turn = tuple[Tensor, Tensor]  # cosines and sines of rotary positions: [T, D/2], or [B, 1, T, D/2] where rows differ


def scaled_rates(rates_D: Tensor, config: ModelConfig) -> Tensor:
    """Radians per position of every channel pair, scaled down for a longer context: `linear` scales all pairs alike.

    `llama3` scales by a pair's number of turns within the original context: up to `rope_low` turns by the whole factor,
    from `rope_high` on not at all, and in between by a linear blend. `longrope` has a number for each pair.
    """
    if config.rope_scaling is None:
        return rates_D
    if config.rope_scaling == "longrope":
        return rates_D / torch.tensor(config.rope_factors, dtype=rates_D.dtype)
    slow_D = rates_D / config.rope_factor
    if config.rope_scaling == "linear":
        return slow_D
    turns_D = config.rope_original_context * rates_D / (2 * math.pi)
    kept_D = ((turns_D - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0.0, 1.0)
    return slow_D + kept_D * (rates_D - slow_D)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions in fp32, derived from the config and never saved."""

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        """`local`: those of W blocks, where they have a base of their own."""
        super().__init__()
        if local:
            config = config.model_copy(update={"rope_base": config.rope_local_base, "rope_scaling": None})
        self.config = config
        self.register_buffer("cos_TD", torch.empty(config.context, config.turned // 2), persistent=False)
        self.register_buffer("sin_TD", torch.empty(config.context, config.turned // 2), persistent=False)
        self.cos_TD: Tensor
        self.sin_TD: Tensor

    @torch.no_grad()
    def fill(self) -> None:
        """Computes the table in float64: fp32 angles lose digits at large positions."""
        config = self.config
        rates_D = config.rope_base ** (-torch.arange(0, config.turned, 2, dtype=torch.float64) / config.turned)
        places_T = torch.arange(config.context, dtype=torch.float64)
        angles_TD = places_T[:, None] * scaled_rates(rates_D, config)
        gain = config.rope_gain if config.rope_scaling == "longrope" else 1.0
        self.cos_TD.copy_(gain * angles_TD.cos())
        self.sin_TD.copy_(gain * angles_TD.sin())

    def forward(self, places: slice | Tensor) -> Turn:
        """Cosines and sines of these positions, the same for all layers."""
        cos, sin = self.cos_TD[places], self.sin_TD[places]
        return (cos, sin) if isinstance(places, slice) else (cos[:, None], sin[:, None])


def turned(x_BHTD: Tensor, turn: Turn) -> Tensor:
    """Queries or keys, rotated by their positions; channels beyond the table stay as they are."""
    cos, sin = turn
    half, size = cos.shape[-1], x_BHTD.shape[-1]
    first, second, *rest = x_BHTD.split([half, half] + [size - 2 * half] * (size > 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, *rest], dim=-1).to(x_BHTD.dtype)


class Branch(NamedTuple):
    """The output of a mixer or an MLP, to be added to the residual stream."""

    value_BTW: Tensor
    bias_W: Tensor | None = None  # added together with the branch
    slot: Any = None  # takes the branch's gradient: a `Slot` for 8 bits, a `GradientRoom` under frozen weights


class Stream(NamedTuple):
    """The residual stream between two blocks, and a branch that is not added yet. A flat tuple, so that activation
    checkpointing and FSDP see its tensors."""

    x_BTW: Tensor
    branch_BTW: Tensor | None = None
    bias_W: Tensor | None = None
    slot: Any = None
    scale_W: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None  # of the dropout, in our kernels


class Mix(NamedTuple):
    """A block's input x becomes weights[0]·x + weights[1]·first."""

    weights_2: Tensor
    first: Any  # from `Operations.first`


class Gates(NamedTuple):
    """2·sigmoid of products with the first channels of a block's normed input: from 0 to 2, and 1 at zero weights."""

    weight_CI: Tensor | None = None  # rows of value gates, then of head gates
    values: int = 0  # number of rows
    heads: int = 0


class Heads(NamedTuple):
    """Queries, keys and values of a block's attention, and its gates."""

    q_BHTD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor
    value_gates_BTG: Tensor | None = None
    head_gates_BTH: Tensor | None = None


class Own(NamedTuple):
    """Arguments of one block in a pass."""

    narrow: NarrowBlock = NarrowBlock()
    cache: Any = None  # of its mixer
    seeds: Sequence[Tensor | None] = (None, None)  # of the dropout on its two branches
    values: Any = None  # rows of its value table, from `Operations.look_up`


@dataclasses.dataclass(frozen=True)
class Shared:
    """Arguments that all blocks of a pass share."""

    operations: "Operations"
    turn: Turn | None = None  # `Attention.turn_in` has that of a block
    local_turn: Turn | None = None
    layout: DocumentLayout | None = None
    decoding: Decoding | None = None
    first: Any = None  # the first stream, if blocks mix it in
    window: int | None = None  # of blocks of kind W, in place of `model.window`


def product_type(x: Tensor) -> torch.dtype:
    """The type of matrix products: autocast's where it is on, else that of the weights, at least fp32."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, torch.float32)


class Operations:
    """All operations of a forward pass, in torch's form. Other forms are subclasses."""

    recomputes: tuple[str, ...] = ("selective", "full")  # modes of checkpointing that the caller applies to a block
    kernels = False  # whether these are our kernels; decoding never uses them, whatever `execution.kernels` says

    def __init__(self, execution: Execution) -> None:
        self.execution = execution

    def arrange(
        self, tokens_BT: Tensor, layout: DocumentLayout | None, context: int
    ) -> tuple[Tensor, DocumentLayout | None]:
        """Tokens and documents in the rows that this form works on."""
        return tokens_BT, layout

    def seeds(self, count: int, device: torch.device) -> Sequence[Tensor | None]:
        """Seeds for `count` places of dropout, drawn from torch's random state; None if the form needs none."""
        return [None] * count

    def at(self, table: Callable[[Any], Any], places: slice | Tensor) -> Any:
        """What a table has for these positions."""
        return table(places)

    def embed(self, tokens_BT: Tensor, table_VW: Tensor, positions_TW: Tensor | None) -> Tensor:
        """First values of the residual stream; positions are [T, W], or [B, T, W] where rows differ."""
        x_BTW = F.embedding(tokens_BT, table_VW)
        return x_BTW if positions_TW is None else x_BTW + positions_TW

    def add_rows(self, x_BTW: Tensor, ids_BT: Tensor, table_RW: Tensor) -> Tensor:
        """Adds rows of another table to the stream."""
        return x_BTW + F.embedding(ids_BT, table_RW)

    def first(self, x_BTW: Tensor) -> tuple[Tensor, Any]:
        """(the first stream, the same in the form in which blocks mix it in)."""
        return x_BTW, x_BTW

    def look_up(self, tokens_BT: Tensor, table_VC: Tensor) -> Any:
        """Rows of a value table, for both blocks that use it."""
        return F.embedding(tokens_BT, table_VC).to(product_type(table_VC))

    def unit_norm(self, x_BTW: Tensor, eps: float) -> Tensor:
        """RMS norm without weights, in the type of the stream."""
        return F.rms_norm(x_BTW, (x_BTW.shape[-1],), None, eps)

    def scaled(self, x_BTW: Tensor, factor: float) -> Tensor:
        return x_BTW * factor

    def drop(self, x_BTW: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
        """Dropout on the stream itself."""
        return F.dropout(x_BTW, dropout)

    def whole(self, block: nn.Module, stream: Stream, shared: Shared) -> Stream | None:
        """The whole block as one operation; None if this form has no such operation."""
        return None

    def add_norm(
        self, stream: Stream, norm: Norm, slot: Slot | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the stream with its branch added and mixed, the norm of that). `slot` takes the norm in 8 bits."""
        x_BTW = self.hand_on(stream).x_BTW
        if mix is not None:
            x_BTW = mix.weights_2[0] * x_BTW + mix.weights_2[1] * mix.first
        return x_BTW, norm(x_BTW)

    def project_heads(
        self, h_BTW: Tensor, layer: nn.Linear, heads: int, groups: int, narrow: NarrowLinear | None, gates: Gates
    ) -> Heads:
        """Queries, keys and values, and the gates that `gates` asks for."""
        counts = (heads, groups, groups)
        size = layer.out_features // sum(counts)
        parts = self._parts(h_BTW, layer, [count * size for count in counts])
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        if gates.weight_CI is None:
            return Heads(q, k, v)
        read_BTI = h_BTW[..., : gates.weight_CI.shape[1]]
        all_BTC = 2 * torch.sigmoid(F.linear(read_BTI, gates.weight_CI))
        for_values, for_heads = all_BTC.split([gates.values, gates.heads], dim=-1)
        return Heads(q, k, v, for_values if gates.values else None, for_heads if gates.heads else None)

    def _parts(self, h_BTW: Tensor, layer: nn.Linear, sizes: list[int]) -> tuple[Tensor, ...]:
        if self.execution.fused_qkv:
            return layer(h_BTW).split(sizes, dim=-1)
        if isinstance(layer, AdaptedLinear):
            return layer.separately(h_BTW, sizes)
        weights = layer.weight.split(sizes)
        biases = (None, None, None) if layer.bias is None else layer.bias.split(sizes)
        return tuple(F.linear(h_BTW, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def attention(self, mixer: Any, made: Heads, shared: Shared, own: Own) -> Tensor:
        """The heads' results side by side [B, T, H·D]. `mixer` is an `Attention`, which chooses the kernel."""
        qkv = (made.q_BHTD, made.k_BGTD, made.v_BGTD)
        q_BHTD, k_BGTD, v_BGTD = self.prepare_heads(*qkv, mixer.norms, mixer.turn_in(shared))
        if made.value_gates_BTG is not None:
            v_BGTD = self.add_values(v_BGTD, made.value_gates_BTG, own.values)
        if mixer.query_scale != 1.0:
            q_BHTD = q_BHTD * mixer.query_scale
        y_BHTD = mixer.attend(q_BHTD, k_BGTD, v_BGTD, shared, own.cache)
        if made.head_gates_BTH is not None:
            y_BHTD = self.gate_heads(y_BHTD, made.head_gates_BTH)
        return y_BHTD.transpose(1, 2).flatten(2)

    def advance_states(self, mixer: Any, h_BTW: Tensor, shared: Shared, own: Own) -> Tensor | None:
        """The gated states of an `Eigenstate` in one operation; None if this form has no such operation."""
        return None

    def add_values(self, v_BGTD: Tensor, gates_BTG: Tensor, values: Any) -> Tensor:
        """Attention's values plus gated rows of a table; `v_BGTD` may be overwritten."""
        rows_BGTD = values.to(v_BGTD.dtype).unflatten(-1, (v_BGTD.shape[1], -1)).transpose(1, 2)
        return v_BGTD + gates_BTG.transpose(1, 2)[..., None] * rows_BGTD

    def gate_heads(self, y_BHTD: Tensor, gates_BTH: Tensor) -> Tensor:
        """Attention's output, each head times its gate."""
        return y_BHTD * gates_BTH.transpose(1, 2)[..., None]

    def prepare_heads(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their norms and positions; values as they are."""
        if norms is not None:
            q_BHTD, k_BGTD = norms[0](q_BHTD), norms[1](k_BGTD)
        if turn is not None:
            q_BHTD, k_BGTD = turned(q_BHTD, turn), turned(k_BGTD, turn)
        return q_BHTD, k_BGTD, v_BGTD

    def scales_weights(self, layer: nn.Linear, narrow: NarrowLinear | None) -> bool:
        """Whether `product` accepts another weight in place of the layer's: not if the layer adds to its product."""
        return type(layer) is nn.Linear

    def product(self, x: Tensor, layer: nn.Linear, narrow: NarrowLinear | None, weight: Tensor | None = None) -> Branch:
        """The layer's result, or that of another `weight` if `scales_weights`.

        The layer's bias is added in either case: here, or together with the branch (`Branch.bias_W`).
        """
        return Branch(layer(x) if weight is None else F.linear(x, weight, layer.bias))

    def activated_product(
        self, h_BTW: Tensor, up: nn.Linear, down: nn.Linear, kind: str, narrow: NarrowBlock
    ) -> Branch:
        """An MLP: `up`, the activation `kind`, `down`."""
        h = up(h_BTW)
        if kind in ("swiglu", "geglu"):
            gate, value = h.chunk(2, dim=-1)
            h = (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * value
        elif kind == "relu2":
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate="tanh")
        return Branch(down(h))

    def logits(
        self, stream: Stream, norm: Norm, head: nn.Module, table_VW: Tensor | None, last: bool | Tensor
    ) -> Tensor | None:
        """Norm and head in one operation, of all or the `last` positions; None if this form has no such operation."""
        return None

    def hand_on(self, stream: Stream) -> Stream:
        """The stream as the next block gets it: here with its branch added."""
        branch_BTW = stream.branch_BTW
        if branch_BTW is None:
            return stream
        if stream.dropout > 0.0:
            branch_BTW = F.dropout(branch_BTW, stream.dropout)
        return Stream(stream.x_BTW + (branch_BTW if stream.scale_W is None else branch_BTW * stream.scale_W))
