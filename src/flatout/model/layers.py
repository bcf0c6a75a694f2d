"""The parts of a decoder block. Each takes plain values, none has heard of a config file.

Shape legend: B batch, T positions of this call, S positions with the cache, H query heads, G key/value heads,
D head size, W width, M MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.model.execution import Execution
from flatout.model.narrow import NarrowBlock, gradient_slot, input_slot
from flatout.ops.attention import causal_attention
from flatout.ops.scales import Slot

NORM_EPS = 1e-5


class Norm(nn.Module):
    """What both norms share: the path through our kernel, which adds a branch to the residual stream first."""

    centred: bool

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
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

        how = {"centred": self.centred, "eps": NORM_EPS, "dtype": product_type(x)}
        values = (x, branch, branch_bias, self.weight, self.bias)
        return add_norm(*values, **how, slot=slot, branch_slot=branch_slot)


class RMSNorm(Norm):
    centred = False

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), NORM_EPS)


class LayerNorm(Norm):
    centred = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, NORM_EPS)


def product_type(x: Tensor) -> torch.dtype:
    """The type of matrix products: autocast's where it is on, else that of the weights, which is never narrow."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, torch.float32)


def build_norm(config: ModelConfig, width: int) -> Norm:
    return RMSNorm(width) if config.norm == "rmsnorm" else LayerNorm(width, config.bias)


class LayerCache:
    """Keys and values of one layer, written in place up to the context length."""

    def __init__(
        self, batch: int, groups: int, context: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k_BGSD = torch.zeros(batch, groups, context, size, dtype=dtype, device=device)
        self.v_BGSD = torch.zeros_like(self.k_BGSD)

    def append(self, position: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        end = position + k_BGTD.shape[2]
        self.k_BGSD[:, :, position:end] = k_BGTD
        self.v_BGSD[:, :, position:end] = v_BGTD
        return self.k_BGSD[:, :, :end], self.v_BGSD[:, :, :end]


class Cache:
    """What decoding carries from token to token: per-layer keys and values, and how many positions are filled."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.length = 0


class Rotary(nn.Module):
    """Rotary positions from a table in fp32; the table is derived from the config and never saved."""

    def __init__(self, size: int, context: int, base: float) -> None:
        super().__init__()
        self.size, self.context, self.base = size, context, base
        self.register_buffer("cos_TD", torch.empty(context, size // 2), persistent=False)
        self.register_buffer("sin_TD", torch.empty(context, size // 2), persistent=False)
        self.cos_TD: Tensor
        self.sin_TD: Tensor

    @torch.no_grad()
    def fill(self) -> None:
        """Computes the table, in float64 first: at large positions fp32 angles lose digits."""
        rates_D = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles_TD = torch.arange(self.context, dtype=torch.float64)[:, None] * rates_D
        self.cos_TD.copy_(angles_TD.cos())
        self.sin_TD.copy_(angles_TD.sin())

    def forward(self, x_BHTD: Tensor, position: int) -> Tensor:
        cos_TD = self.cos_TD[position : position + x_BHTD.shape[2]]
        sin_TD = self.sin_TD[position : position + x_BHTD.shape[2]]
        first, second = x_BHTD.chunk(2, dim=-1)
        turned = torch.cat([first * cos_TD - second * sin_TD, first * sin_TD + second * cos_TD], dim=-1)
        return turned.to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, execution: Execution) -> None:
        super().__init__()
        self.heads = config.heads
        self.groups = config.kv_heads or config.heads
        self.size = config.width // config.heads
        self.execution = execution
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.q_norm = RMSNorm(self.size) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size) if config.qk_norm else None

    def forward(self, x_BTW: Tensor, rotary: Rotary | None, cache: LayerCache | None, position: int) -> Tensor:
        batch, positions, width = x_BTW.shape
        q, k, v = self._project(x_BTW)
        q_BHTD = q.view(batch, positions, self.heads, self.size).transpose(1, 2)
        k_BGTD = k.view(batch, positions, self.groups, self.size).transpose(1, 2)
        v_BGTD = v.view(batch, positions, self.groups, self.size).transpose(1, 2)
        q_BHTD, k_BGTD = self._prepare(q_BHTD, k_BGTD, rotary, position)
        if cache is not None:
            k_BGTD, v_BGTD = cache.append(position, k_BGTD, v_BGTD)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=self.execution.attention, dropout=dropout)
        return self.out(y_BHTD.transpose(1, 2).reshape(batch, positions, width))

    def fused(self, h_BTW: Tensor, rotary: Rotary | None, narrow: NarrowBlock) -> Tensor:
        """The same in our kernels, up to the output's bias, which the residual addition brings along."""
        from flatout.ops.kernels.heads import project_heads
        from flatout.ops.kernels.linear import linear
        from flatout.ops.kernels.rotary import prepare_heads

        weight, bias = self.qkv.weight, self.qkv.bias
        tuned = self.execution.products == "tuned"
        q_BHTD, k_BGTD, v_BGTD = project_heads(
            h_BTW, weight, bias, heads=self.heads, groups=self.groups, narrow=narrow.qkv, tuned=tuned
        )
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        table = None if rotary is None else (rotary.cos_TD, rotary.sin_TD)
        q_BHTD, k_BGTD = prepare_heads(q_BHTD, k_BGTD, *(norms or (None, None)), *(table or (None, None)), NORM_EPS)
        y_BHTD = causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=self.execution.attention)
        return linear(y_BHTD.transpose(1, 2).reshape(h_BTW.shape), self.out.weight, narrow=narrow.out, tuned=tuned)

    def _project(self, x_BTW: Tensor) -> tuple[Tensor, ...]:
        sizes = [count * self.size for count in (self.heads, self.groups, self.groups)]
        if self.execution.fused_qkv:
            return self.qkv(x_BTW).split(sizes, dim=-1)
        weights = self.qkv.weight.split(sizes)
        biases = (None, None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        return tuple(F.linear(x_BTW, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def _prepare(self, q_BHTD: Tensor, k_BGTD: Tensor, rotary: Rotary | None, position: int) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTD, k_BGTD = self.q_norm(q_BHTD), self.k_norm(k_BGTD)
        if rotary is not None:
            q_BHTD, k_BGTD = rotary(q_BHTD, position), rotary(k_BGTD, position)
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


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); the branches may carry learned scales."""

    def __init__(self, config: ModelConfig, execution: Execution) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.width)
        self.attention = Attention(config, execution)
        self.mlp_norm = build_norm(config, config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        scaled = config.residual_scale is not None
        self.attention_scale = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.empty(config.width)) if scaled else None

    def use(self, execution: Execution) -> None:
        self.attention.execution = execution

    def forward(self, x_BTW: Tensor, rotary: Rotary | None, cache: LayerCache | None, position: int) -> Tensor:
        branch = self.dropout(self.attention(self.attention_norm(x_BTW), rotary, cache, position))
        x_BTW = x_BTW + (branch if self.attention_scale is None else branch * self.attention_scale)
        branch = self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return x_BTW + (branch if self.mlp_scale is None else branch * self.mlp_scale)

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers by their names in `speed.fp8`."""
        return {"qkv": self.attention.qkv, "out": self.attention.out, "up": self.mlp.up, "down": self.mlp.out}

    def fused(
        self,
        x_BTW: Tensor,
        branch_BTW: Tensor | None,
        bias_W: Tensor | None,
        rotary: Rotary | None,
        narrow: NarrowBlock,
        slot: Slot | None,
    ) -> tuple[Tensor, Tensor]:
        """The same in our kernels. Takes the branch that the block before has not added yet, and leaves its own.

        `slot` gets the gradient of that branch.
        """
        x_BTW, h_BTW = self.attention_norm.after_adding(x_BTW, branch_BTW, bias_W, input_slot(narrow.qkv), slot)
        branch_BTW = self.attention.fused(h_BTW, rotary, narrow)
        x_BTW, h_BTW = self.mlp_norm.after_adding(
            x_BTW, branch_BTW, self.attention.out.bias, input_slot(narrow.up), gradient_slot(narrow.out)
        )
        return x_BTW, self.mlp.fused(h_BTW, self.attention.execution, narrow)
