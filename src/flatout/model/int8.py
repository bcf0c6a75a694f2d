"""Linear layers in 8 bits, for inference: whole numbers with a scale for every output, without gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.model.operations import product_type


class Int8Linear(nn.Linear):
    """A linear layer for inference, whose weight is in whole numbers of 8 bits, each output's with a scale."""

    def __init__(self, weight_NK: Tensor, bias_N: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_NK.shape
        wide_NK = weight_NK.detach().float()
        scale_N = wide_NK.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.weight = nn.Parameter((wide_NK / scale_N[:, None]).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale_N", scale_N)
        self.scale_N: Tensor
        self.bias = bias_N

    def widened(self) -> Tensor:
        return self.weight * self.scale_N[:, None]

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = product_type(x)  # which holds whole numbers of 8 bits exactly: scales come after the product
        y = (F.linear(x.to(dtype), self.weight.to(dtype)) * self.scale_N).to(dtype)
        return y if self.bias is None else y + self.bias.to(dtype)
