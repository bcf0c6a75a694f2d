"""The parts of a decoder block. Each takes plain values, none has heard of a config file.

Shape legend: B batch, T positions of this call, S positions with the cache, H query heads, G key/value heads,
D head size, W width, M MLP width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.adapted import AdaptedLinear
from flatout.model.eigenstate import Eigenstate, EigenstateCache, EigenstateShape
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock, gradient_slot, input_slot
from flatout.ops.attention import causal_attention
from flatout.ops.documents import Layout, document_attention
from flatout.ops.scales import Slot

if TYPE_CHECKING:  # who does not ask for our kernels need not have triton
    from flatout.ops.kernels.frozen import FrozenLinear, GradientRoom
    from flatout.ops.kernels.norm import FrozenNorm

Turn = tuple[Tensor, Tensor]  # cosines and sines of rotary positions: [T, D/2], or [B, T, D/2] of packed rows


class Norm(nn.Module):
    """What both norms share: the path through our kernel, which adds a branch to the residual stream first."""

    centred: bool

    def __init__(self, width: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def after_adding(
        self,
        x: Tensor,
        branch: Tensor | None,
        branch_bias: Tensor | None,
        slot: Slot | None = None,
        branch_slot: Slot | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x + branch + branch_bias, its norm), by our kernel; the slots get the norm and the branch's gradient."""
        from flatout.ops.kernels.norm import add_norm

        how = {"centred": self.centred, "eps": self.eps, "dtype": product_type(x)}
        values = (x, branch, branch_bias, self.weight, self.bias)
        return add_norm(*values, **how, slot=slot, branch_slot=branch_slot)

    def frozen(self) -> "FrozenNorm":
        from flatout.ops.kernels.norm import FrozenNorm

        return FrozenNorm(self.weight, self.bias, self.centred, self.eps)


class RMSNorm(Norm):
    centred = False

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, bias=False, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class LayerNorm(Norm):
    centred = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def product_type(x: Tensor) -> torch.dtype:
    """The type of matrix products: autocast's where it is on, else that of the weights, which is never narrow."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, torch.float32)


def _frozen_linear(layer: nn.Linear, *, tuned: bool) -> "FrozenLinear":
    """The layer as the kernels for frozen blocks take it. Its joined weight is fresh: `Adapters.ready` came before."""
    from flatout.ops.kernels.frozen import FrozenLinear

    weight, bias = layer.weight, layer.bias
    if not isinstance(layer, AdaptedLinear) or not layer.enabled:
        return FrozenLinear(weight, bias, tuned=tuned)
    return FrozenLinear(weight, bias, layer.joined, layer.lora_a, tuple(layer.b), tuned=tuned)


def build_norm(config: ModelConfig, width: int) -> Norm:
    eps = config.norm_eps
    return RMSNorm(width, eps) if config.norm == "rmsnorm" else LayerNorm(width, config.bias, eps)


class LayerCache:
    """Keys and values of one layer, written in place."""

    def __init__(
        self, batch: int, groups: int, positions: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k_BGSD = torch.zeros(batch, groups, positions, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)

    def append(self, position: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        end = position + k_BGTD.shape[2]
        self.k_BGSD[:, :, position:end] = k_BGTD
        self.v_BGSD[:, :, position:end] = v_BGTD
        return self.k_BGSD[:, :, :end], self.v_BGSD[:, :, :end]


class WindowCache:
    """Keys and values of a layer that looks back over a window: room for two windows, however long the text.

    When it is full, what is still seen moves to its front, so that a token costs the same anywhere.
    """

    def __init__(
        self, batch: int, groups: int, window: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.seen = window - 1  # positions before a token that it looks at
        self.filled = 0
        self.k_BGSD = torch.zeros(batch, groups, 2 * window, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)

    def append(self, position: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the new positions and of those before them that they may look at, or some more."""
        new, room = k_BGTD.shape[2], self.k_BGSD.shape[2]
        kept = min(self.seen, self.filled)
        if self.filled + new <= room:
            end = self.filled + new
            self.k_BGSD[:, :, self.filled : end] = k_BGTD
            self.v_BGSD[:, :, self.filled : end] = v_BGTD
            self.filled = end
            return self.k_BGSD[:, :, end - new - kept : end], self.v_BGSD[:, :, end - new - kept : end]
        first = self.filled - kept
        k_BGSD = torch.cat([self.k_BGSD[:, :, first : self.filled], k_BGTD], dim=2)
        v_BGSD = torch.cat([self.v_BGSD[:, :, first : self.filled], v_BGTD], dim=2)
        self.filled = min(self.seen, k_BGSD.shape[2])
        self.k_BGSD[:, :, : self.filled] = k_BGSD[:, :, k_BGSD.shape[2] - self.filled :]
        self.v_BGSD[:, :, : self.filled] = v_BGSD[:, :, v_BGSD.shape[2] - self.filled :]
        return k_BGSD, v_BGSD


class Cache:
    """What decoding carries from token to token, layer by layer, and how many positions are filled."""

    def __init__(self, layers: list[LayerCache | WindowCache | EigenstateCache]) -> None:
        self.layers = layers
        self.length = 0


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context; the last three are for `llama3` alone."""

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


def scaled_rates(rates_D: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians per position of every channel pair, slowed down: all alike, or by how often a pair turns.

    `llama3` counts a pair's turns within the original context: few are slowed by the whole factor, many are left alone,
    and in between the share that is left alone grows with the turns.
    """
    slow_D = rates_D / scaling.factor
    if scaling.kind == "linear":
        return slow_D
    assert scaling.kind == "llama3", scaling.kind
    turns_D = scaling.original_context * rates_D / (2 * math.pi)
    kept_D = ((turns_D - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return slow_D + kept_D * (rates_D - slow_D)


def build_rotary(config: ModelConfig) -> "Rotary":
    kind, factor, low, high = config.rope_scaling, config.rope_factor, config.rope_low, config.rope_high
    scaling = None if kind is None else RopeScaling(kind, factor, low, high, config.rope_original_context)
    return Rotary(config.size, config.context, config.rope_base, scaling)


class Rotary(nn.Module):
    """Rotary positions from a table in fp32; the table is derived from the config and never saved."""

    def __init__(self, size: int, context: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.size, self.context, self.base, self.scaling = size, context, base, scaling
        self.register_buffer("cos_TD", torch.empty(context, size // 2), persistent=False)
        self.register_buffer("sin_TD", torch.empty(context, size // 2), persistent=False)
        self.cos_TD: Tensor
        self.sin_TD: Tensor

    @torch.no_grad()
    def fill(self) -> None:
        """Computes the table, in float64 first: at large positions fp32 angles lose digits."""
        rates_D = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        if self.scaling is not None:
            rates_D = scaled_rates(rates_D, self.scaling)
        angles_TD = torch.arange(self.context, dtype=torch.float64)[:, None] * rates_D
        self.cos_TD.copy_(angles_TD.cos())
        self.sin_TD.copy_(angles_TD.sin())

    def forward(self, position: int, length: int, layout: Layout | None = None) -> Turn:
        """Cosines and sines, the same for all layers: of `length` positions, or of each token in its document."""
        if layout is None:
            return self.cos_TD[position : position + length], self.sin_TD[position : position + length]
        return self.cos_TD[layout.positions_BT], self.sin_TD[layout.positions_BT]


def turned(x_BHTD: Tensor, turn: Turn) -> Tensor:
    """Queries or keys at their positions."""
    cos, sin = (table if table.dim() == 2 else table[:, None] for table in turn)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, execution: Execution, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.heads = config.heads
        self.groups = config.kv_heads or config.heads
        self.size = config.size
        self.execution = execution
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.groups) * self.size, bias=config.has_qkv_bias)
        self.out = nn.Linear(config.queries, config.width, bias=config.bias)
        self.q_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BTW: Tensor,
        turn: Turn | None,
        cache: LayerCache | WindowCache | None,
        position: int,
        layout: Layout | None = None,
    ) -> Tensor:
        batch, positions, _ = x_BTW.shape
        q, k, v = self._project(x_BTW)
        q_BHTD = q.view(batch, positions, self.heads, self.size).transpose(1, 2)
        k_BGTD = k.view(batch, positions, self.groups, self.size).transpose(1, 2)
        v_BGTD = v.view(batch, positions, self.groups, self.size).transpose(1, 2)
        q_BHTD, k_BGTD = self._prepare(q_BHTD, k_BGTD, turn)
        if cache is not None:
            k_BGTD, v_BGTD = cache.append(position, k_BGTD, v_BGTD)
        how = self.execution
        dropout = self.dropout if self.training else 0.0
        if layout is not None and dropout > 0.0:
            raise ValueError("attention between packed documents has no dropout")
        if layout is None:
            y_BHTD = causal_attention(
                q_BHTD, k_BGTD, v_BGTD, backend=how.attention, dropout=dropout, window=self.window
            )
        else:
            y_BHTD = document_attention(
                q_BHTD, k_BGTD, v_BGTD, layout, backend=how.document_attention, window=self.window
            )
        return self.out(y_BHTD.transpose(1, 2).flatten(2))

    def empty_cache(
        self, batch: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache | WindowCache:
        if self.window is not None and 2 * self.window < positions:
            return WindowCache(batch, self.groups, self.window, self.size, dtype, device)
        return LayerCache(batch, self.groups, positions, self.size, dtype, device)

    def fused(self, h_BTW: Tensor, turn: Turn | None, narrow: NarrowBlock, layout: Layout | None = None) -> Tensor:
        """The same in our kernels, up to the output's bias, which the residual addition brings along."""
        from flatout.ops.kernels.heads import project_heads
        from flatout.ops.kernels.linear import linear
        from flatout.ops.kernels.rotary import prepare_heads

        weight, bias = self.qkv.weight, self.qkv.bias
        tuned = self.execution.products == "tuned"
        q_BHTD, k_BGTD, v_BGTD = project_heads(
            h_BTW, weight, bias, heads=self.heads, groups=self.groups, narrow=narrow.qkv, tuned=tuned
        )
        norms, eps = (None, None), 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        # Packed rows come as one row here, so what has a line for each token serves where each position has one.
        cos, sin = (None, None) if turn is None else (turn[0].flatten(0, -2), turn[1].flatten(0, -2))
        q_BHTD, k_BGTD = prepare_heads(q_BHTD, k_BGTD, *norms, cos, sin, eps)
        how = self.execution
        if layout is None:
            y_BHTD = causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=how.attention, window=self.window)
        else:
            y_BHTD = document_attention(
                q_BHTD, k_BGTD, v_BGTD, layout, backend=how.document_attention, window=self.window
            )
        return linear(y_BHTD.transpose(1, 2).flatten(2), self.out.weight, narrow=narrow.out, tuned=tuned)

    def _project(self, x_BTW: Tensor) -> tuple[Tensor, ...]:
        sizes = [count * self.size for count in (self.heads, self.groups, self.groups)]
        if self.execution.fused_qkv:
            return self.qkv(x_BTW).split(sizes, dim=-1)
        if isinstance(self.qkv, AdaptedLinear):
            return self.qkv.separately(x_BTW, sizes)
        weights = self.qkv.weight.split(sizes)
        biases = (None, None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        return tuple(F.linear(x_BTW, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def _prepare(self, q_BHTD: Tensor, k_BGTD: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTD, k_BGTD = self.q_norm(q_BHTD), self.k_norm(k_BGTD)
        if turn is not None:
            q_BHTD, k_BGTD = turned(q_BHTD, turn), turned(k_BGTD, turn)
        return q_BHTD, k_BGTD


def mlp_width_of(config: ModelConfig) -> int:
    """4·W, or two thirds of it for swiglu so that its three matrices hold as much as two would, in steps of 8."""
    if config.mlp_width is not None:
        return config.mlp_width
    if config.mlp == "swiglu":
        return -(-8 * config.width // 24) * 8
    return 4 * config.width


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = mlp_width_of(config)
        self.kind = config.mlp
        # swiglu keeps gate and value in one matrix: one product instead of two
        self.up = nn.Linear(config.width, 2 * hidden if config.mlp == "swiglu" else hidden, bias=config.bias)
        self.out = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        h = self.up(x_BTW)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        elif self.kind == "relu2":
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate="tanh")
        return self.out(h)

    def fused(self, h_BTW: Tensor, execution: Execution, narrow: NarrowBlock) -> Tensor:
        """The same in our kernels, up to the output's bias, which the residual addition brings along."""
        from flatout.ops.kernels.activation import activated_linear, linear_gelu
        from flatout.ops.kernels.linear import linear

        tuned = execution.products == "tuned"
        keep = execution.checkpointing != "selective"
        up, bias, active = self.up.weight, self.up.bias, None
        slot = gradient_slot(narrow.up)
        if tuned and self.kind == "gelu" and bias is not None and slot is None:
            pre, active = linear_gelu(h_BTW, up, bias, narrow.up)
        else:
            pre = linear(h_BTW, up, narrow=narrow.up, tuned=tuned)
        return activated_linear(
            pre,
            bias,
            self.out.weight,
            kind=self.kind,
            keep=keep,
            narrow=narrow.down,
            slot=slot,
            tuned=tuned,
            active=active,
        )


def build_mixer(config: ModelConfig, execution: Execution, kind: str, place: int) -> Attention | Eigenstate:
    """What `kind`, a letter of `model.pattern`, means in the block at `place`."""
    if kind != "E":
        return Attention(config, execution, config.window if kind == "W" else None)
    shape = EigenstateShape(
        width=config.width,
        states=config.states,
        context=config.context,
        heads=config.state_heads,
        bias=config.bias,
        resonance=config.resonance,
        modulation=config.modulation,
        convolution=config.convolution,
        scales=tuple(config.scales),
        place=place,
    )
    return Eigenstate(shape, execution)


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); the branches may carry learned scales.

    In blocks of kind E eigenstates are in the place of attention, and under its name.
    """

    def __init__(self, config: ModelConfig, execution: Execution, kind: str = "A", place: int = 0) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.width)
        self.attention = build_mixer(config, execution, kind, place)
        self.mlp_norm = build_norm(config, config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        scaled = config.residual_scale is not None
        self.attention_scale = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.empty(config.width)) if scaled else None

    def use(self, execution: Execution) -> None:
        for layer in self.linears().values():
            if isinstance(layer, AdaptedLinear):
                layer.use(execution)
        self.attention.execution = execution

    def forward(
        self,
        x_BTW: Tensor,
        turn: Turn | None,
        cache: LayerCache | WindowCache | EigenstateCache | None,
        position: int,
        layout: Layout | None = None,
    ) -> Tensor:
        branch = self.dropout(self.attention(self.attention_norm(x_BTW), turn, cache, position, layout))
        x_BTW = x_BTW + (branch if self.attention_scale is None else branch * self.attention_scale)
        branch = self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return x_BTW + (branch if self.mlp_scale is None else branch * self.mlp_scale)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing but adapters is trained here."""
        if not isinstance(self.attention, Attention):  # the kernels for such blocks know attention alone
            return False
        norms = (self.attention_norm, self.mlp_norm, self.attention.q_norm, self.attention.k_norm)
        own = [module for module in (*norms, *self.linears().values()) if module is not None]
        return not any(x is not None and x.requires_grad for module in own for x in (module.weight, module.bias))

    def frozen(
        self,
        x_BTW: Tensor,
        branch_BTW: Tensor | None,
        bias_W: Tensor | None,
        turn: Turn | None,
        attend: Callable[..., Tensor],
        above: "GradientRoom",
        below: "GradientRoom | None",
    ) -> tuple[Tensor, Tensor]:
        """`fused` for a block whose weights are frozen, with or without adapters. It sees to checkpointing by itself.

        `above` and `below` carry gradients of branches from block to block.
        """
        from flatout.ops.kernels.frozen import FrozenBlock, frozen_block

        attention, execution = self.attention, self.attention.execution
        assert isinstance(attention, Attention), "there are no adapters in a model with eigenstates"
        cos, sin = (None, None) if turn is None else (turn[0].flatten(0, -2), turn[1].flatten(0, -2))
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        tuned = execution.products == "tuned"
        layers = {name: _frozen_linear(layer, tuned=tuned) for name, layer in self.linears().items()}
        block = FrozenBlock(
            **layers,
            first=self.attention_norm.frozen(),
            second=self.mlp_norm.frozen(),
            heads=attention.heads,
            groups=attention.groups,
            head_norms=norms,
            head_eps=eps,
            cos=cos,
            sin=sin,
            kind=self.mlp.kind,
            attend=functools.partial(attend, window=attention.window),
            checkpointing=execution.checkpointing,
            dtype=product_type(x_BTW),
            above=above,
            below=below,
        )
        return frozen_block(x_BTW, branch_BTW, bias_W, block)

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers by their names in `speed.fp8`."""
        first = self.attention.qkv if isinstance(self.attention, Attention) else self.attention.inward
        return {"qkv": first, "out": self.attention.out, "up": self.mlp.up, "down": self.mlp.out}

    def set_linear(self, name: str, layer: nn.Linear) -> None:
        """Puts another layer in the place of one of `linears`."""
        owner, attribute = {
            "qkv": (self.attention, "qkv" if isinstance(self.attention, Attention) else "inward"),
            "out": (self.attention, "out"),
            "up": (self.mlp, "up"),
            "down": (self.mlp, "out"),
        }[name]
        setattr(owner, attribute, layer)

    def fused(
        self,
        x_BTW: Tensor,
        branch_BTW: Tensor | None,
        bias_W: Tensor | None,
        turn: Turn | None,
        narrow: NarrowBlock,
        slot: Slot | None,
        layout: Layout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same in our kernels. Takes the branch that the block before has not added yet, and leaves its own.

        `slot` gets the gradient of that branch.
        """
        x_BTW, h_BTW = self.attention_norm.after_adding(x_BTW, branch_BTW, bias_W, input_slot(narrow.qkv), slot)
        branch_BTW = self.attention.fused(h_BTW, turn, narrow, layout)
        x_BTW, h_BTW = self.mlp_norm.after_adding(
            x_BTW, branch_BTW, self.attention.out.bias, input_slot(narrow.up), gradient_slot(narrow.out)
        )
        return x_BTW, self.mlp.fused(h_BTW, self.attention.execution, narrow)
