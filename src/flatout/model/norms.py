"""The two norms of a model, as torch computes them. Our kernels read their weights (model/kernel_operations.py).

`model.norm_weights=false` leaves weights and biases out: a norm's result is then its input in another length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig


class Norm(nn.Module):
    """What both norms share."""

    centred: bool

    def __init__(self, width: int, *, weight: bool, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class RMSNorm(Norm):
    """`scale` multiplies the result."""

    centred = False

    def __init__(self, width: int, eps: float = 1e-5, *, weight: bool = True, scale: float = 1.0) -> None:
        super().__init__(width, weight=weight, bias=False, eps=eps)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        normed = F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return normed if self.scale == 1.0 else normed * self.scale


class LayerNorm(Norm):
    centred = True

    def forward(self, x: Tensor) -> Tensor:
        # A bias that is trained beside adapters is wider than the frozen weight.
        bias = None if self.bias is None or self.weight is None else self.bias.to(self.weight.dtype)
        return F.layer_norm(x, (x.shape[-1],), self.weight, bias, self.eps)


def build_norm(config: ModelConfig, width: int) -> Norm:
    eps, weight = config.norm_eps, config.norm_weights
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps, weight=weight)
    return LayerNorm(width, weight=weight, bias=config.bias and weight, eps=eps)
