"""The two norms of a model, as torch computes them. Our kernels read their weights (model/kernel_operations.py).

Without weights (`model.norm=plain-rmsnorm`) a norm's result is its input in another length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatout.config.schema import ModelConfig


class Norm(nn.Module):
    """What both norms share."""

    centred: bool

    def __init__(self, width: int, *, weight: bool, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class _CpuRms(torch.autograd.Function):
    """RMS norm times `scale`, without weights; torch has no kernel for it on a CPU and takes twice as long."""

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
    """`scale` multiplies the result."""

    centred = False

    def __init__(self, width: int, eps: float = 1e-5, *, weight: bool = True, scale: float = 1.0) -> None:
        super().__init__(width, weight=weight, bias=False, eps=eps)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None and x.device.type == "cpu" and x.itemsize >= 4 and not torch.compiler.is_compiling():
            return _CpuRms.apply(x, self.eps, self.scale)
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
    if config.norm == "layernorm":
        return LayerNorm(width, weight=True, bias=config.bias, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, weight=config.norm_weights)
