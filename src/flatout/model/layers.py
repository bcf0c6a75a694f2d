"""The parts of a decoder block. Each takes plain values, none has heard of a config file.

Shape legend: B batch, T positions of this call, S positions with the cache, H query heads, G key/value heads,
D head size, W width, M MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.ops.attention import causal_attention

NORM_EPS = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), NORM_EPS)


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, NORM_EPS)


def build_norm(config: ModelConfig, width: int) -> nn.Module:
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

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.heads = config.heads
        self.groups = config.kv_heads or config.heads
        self.size = config.width // config.heads
        self.backend = backend
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.groups) * self.size, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.q_norm = RMSNorm(self.size) if config.qk_norm else None
        self.k_norm = RMSNorm(self.size) if config.qk_norm else None

    def forward(self, x_BTW: Tensor, rotary: Rotary | None, cache: LayerCache | None, position: int) -> Tensor:
        batch, positions, width = x_BTW.shape
        counts = [self.heads, self.groups, self.groups]
        q, k, v = self.qkv(x_BTW).split([n * self.size for n in counts], dim=-1)
        q_BHTD = q.view(batch, positions, self.heads, self.size).transpose(1, 2)
        k_BGTD = k.view(batch, positions, self.groups, self.size).transpose(1, 2)
        v_BGTD = v.view(batch, positions, self.groups, self.size).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTD, k_BGTD = self.q_norm(q_BHTD), self.k_norm(k_BGTD)
        if rotary is not None:
            q_BHTD, k_BGTD = rotary(q_BHTD, position), rotary(k_BGTD, position)
        if cache is not None:
            k_BGTD, v_BGTD = cache.append(position, k_BGTD, v_BGTD)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = causal_attention(q_BHTD, k_BGTD, v_BGTD, backend=self.backend, dropout=dropout)
        return self.out(y_BHTD.transpose(1, 2).reshape(batch, positions, width))


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


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); the branches may carry learned scales."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.width)
        self.attention = Attention(config, backend)
        self.mlp_norm = build_norm(config, config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        scaled = config.residual_scale is not None
        self.attention_scale = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.empty(config.width)) if scaled else None

    def forward(self, x_BTW: Tensor, rotary: Rotary | None, cache: LayerCache | None, position: int) -> Tensor:
        branch = self.dropout(self.attention(self.attention_norm(x_BTW), rotary, cache, position))
        x_BTW = x_BTW + (branch if self.attention_scale is None else branch * self.attention_scale)
        branch = self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return x_BTW + (branch if self.mlp_scale is None else branch * self.mlp_scale)
