"""Rotary positions: a table of cosines and sines, and the turning of queries and keys by it.

Shape legend: B batch, T positions of this call, H heads, D head size.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from flatout.config.schema import ModelConfig

Turn = tuple[Tensor, Tensor]  # cosines and sines of rotary positions: [T, D/2], or [B, 1, T, D/2] where rows differ


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

    def forward(self, places: slice | Tensor) -> Turn:
        """Cosines and sines of these positions, the same for all layers."""
        cos, sin = self.cos_TD[places], self.sin_TD[places]
        return (cos, sin) if isinstance(places, slice) else (cos[:, None], sin[:, None])


def turned(x_BHTD: Tensor, turn: Turn) -> Tensor:
    """Queries or keys at their positions."""
    cos, sin = turn
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x_BHTD.dtype)
