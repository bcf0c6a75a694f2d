"""The two norms of a model, as torch computes them. Our kernels read their weights (model/kernel_operations.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig


class Norm(nn.Module):
    """What both norms share."""

    centred: bool

    def __init__(self, width: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class RMSNorm(Norm):
    centred = False

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, bias=False, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class LayerNorm(Norm):
    centred = True

    def forward(self, x: Tensor) -> Tensor:
        # A bias that is trained beside adapters is wider than the frozen weight.
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.layer_norm(x, (x.shape[-1],), self.weight, bias, self.eps)


def build_norm(config: ModelConfig, width: int) -> Norm:
    eps = config.norm_eps
    return RMSNorm(width, eps) if config.norm == "rmsnorm" else LayerNorm(width, config.bias, eps)
