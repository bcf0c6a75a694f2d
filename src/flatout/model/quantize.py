"""The linear layers of a frozen model in 4 bits: for training adapters beside them, or rounded to what that gives.

Embeddings, head, norms and biases stay as they are. Contract: both ways give the same weights, and the same as whoever
quantizes queries, keys, values, gate and up as matrices of their own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.model.adapter_targets import targets_of
from flatout.model.gpt import GPT
from flatout.model.layers import Block
from flatout.model.protocol import LanguageModel
from flatout.ops.quantized import QuantizedWeight, frozen_product, quantized, quantizing_missing


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is in 4 bits."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.weight
        assert isinstance(weight, QuantizedWeight)
        return frozen_product(x, weight, self.bias)


def check_quantizing(device: torch.device) -> None:
    """Refuses where weights cannot be held in 4 bits."""
    missing = quantizing_missing(device)
    if missing is not None:
        raise ConfigError(f"lora.quantize is nf4, but {missing[0]}", missing[1])


def quantize_linears(model: GPT, device: torch.device) -> None:
    """Puts the model onto the device, its linear layers in 4 bits: matrix by matrix, so that it need not fit whole."""
    for block, name, parts in _linears(model):
        weight = quantized([part.to(device) for part in parts])
        block.set_linear(name, QuantizedLinear(weight, block.linears()[name].bias))
    for parameter in model.parameters():
        if not isinstance(parameter, QuantizedWeight):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, table.to(device))


@torch.no_grad()
def round_linears(model: GPT) -> None:
    """Gives linear layers the values that they have in 4 bits, in their own type: what adapters were trained beside."""
    for block, name, parts in _linears(model):
        block.linears()[name].weight.copy_(quantized(parts).widened())


def quantized_base(model: LanguageModel) -> tuple[int, int, int]:
    """(weights that were quantized, bytes that they take, bytes that they would take in their own type)."""
    found = [parameter for parameter in model.parameters() if isinstance(parameter, QuantizedWeight)]
    wide = sum(weight.numel() * weight.element_size() for weight in found)
    return sum(weight.numel() for weight in found), sum(weight.bytes for weight in found), wide


def notice_of(model: LanguageModel) -> str | None:
    """What there is to say of a model with weights in 4 bits."""
    count, small, wide = quantized_base(model)
    sizes = f"{small / 2**20:,.1f} MiB instead of {wide / 2**20:,.1f}"
    return f"base: {count:,} weights of linear layers in 4 bits, {sizes}" if count else None


def _linears(model: GPT) -> Iterator[tuple[Block, str, list[Tensor]]]:
    """Every linear layer of the blocks by its name, with the parts of its weight."""
    targets = targets_of(model)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, linear in block.linears().items():
            here = [target for target in targets if (target.layer, target.linear) == (number, name)]
            yield block, name, list(linear.weight.detach().split([target.rows for target in here]))
