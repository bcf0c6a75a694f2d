"""Rotary positions: a table of cosines and sines, and the turning of queries and keys by it.

Shape legend: B batch, T positions of this call, H heads, D head size.
"""

import math

import torch
from torch import Tensor, nn

from flatout.config.schema import ModelConfig

Turn = tuple[Tensor, Tensor]  # cosines and sines of rotary positions: [T, D/2], or [B, 1, T, D/2] where rows differ


def scaled_rates(rates_D: Tensor, config: ModelConfig) -> Tensor:
    """Radians per position of every channel pair, slowed down for a longer context: all alike, or by how often a pair
    turns.

    `llama3` counts a pair's turns within the original context: few are slowed by the whole factor, many are left alone,
    and in between the share that is left alone grows with the turns.
    """
    if config.rope_scaling is None:
        return rates_D
    slow_D = rates_D / config.rope_factor
    if config.rope_scaling == "linear":
        return slow_D
    turns_D = config.rope_original_context * rates_D / (2 * math.pi)
    kept_D = ((turns_D - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0.0, 1.0)
    return slow_D + kept_D * (rates_D - slow_D)


class Rotary(nn.Module):
    """Rotary positions from a table in fp32; the table is derived from the config and never saved."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos_TD", torch.empty(config.context, config.size // 2), persistent=False)
        self.register_buffer("sin_TD", torch.empty(config.context, config.size // 2), persistent=False)
        self.cos_TD: Tensor
        self.sin_TD: Tensor

    @torch.no_grad()
    def fill(self) -> None:
        """Computes the table, in float64 first: at large positions fp32 angles lose digits."""
        config = self.config
        rates_D = config.rope_base ** (-torch.arange(0, config.size, 2, dtype=torch.float64) / config.size)
        places_T = torch.arange(config.context, dtype=torch.float64)
        angles_TD = places_T[:, None] * scaled_rates(rates_D, config)
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
