"""Linear layers of a frozen model in 4 bits: NF4 of bitsandbytes with double quantization.

Each run of 64 weights shares a scale, and each weight is the nearest of 16 values that suit a normal distribution. The
scales are 8-bit numbers themselves: 0.516 bytes per weight. `QuantizedWeight` is a tensor that looks like the wide one
(shape, type, device). Every operation on it gets the dequantized weight, made for that operation and freed after it;
autograd saves the small one. So code that multiplies by weights need not know. `quantize_linears` is for training
adapters beside such weights, `round_linears` gives plain weights the same values. Embeddings, head, norms and biases
stay as they are.

Contract: the dequantized weight is the same at every use, bit for bit, and never written to. Parts of a matrix (queries
to values; gate and up) are quantized separately, so the values are those of a model with separate matrices.
Trap: dequantizing costs a pass over the weight per product: slower steps for less memory. Each operation dequantizes
all of the weight, `weight[a:b]` too.
"""

import functools
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from flatout.errors import ConfigError
from flatout.model.adapter_targets import targets_of
from flatout.model.gpt import GPT
from flatout.model.int8 import Int8Linear
from flatout.model.layers import Block

BLOCK = 64  # weights that share a scale
BYTES = 0.5 + (1 + 4 / 256) / BLOCK  # per weight: 4 bits, an 8-bit scale for 64 weights, an fp32 one for 256 scales


@functools.cache
def _bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about inference kernels, which we do not use
    import bitsandbytes.functional

    return bitsandbytes.functional


def quantizing_missing(device: torch.device) -> tuple[str, str] | None:
    """(why 4-bit weights do not work on this device, a hint), or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed", "pip install 'flatout[qlora]', or set lora.quantize=none"
    if device.type not in ("cpu", "cuda"):
        return f"bitsandbytes has no kernels for {device.type}", "set lora.quantize=none, or speed.device=cpu"
    try:
        trial = torch.linspace(-1, 1, 2 * BLOCK, device=device).view(2, BLOCK)
        error = float((quantized([trial]).widened() - trial).abs().max())
    except Exception as error:  # noqa: BLE001 - any failure of the library is a reason not to use it
        reason = str(error).strip().partition("\n")[0][:160]
        return f"bitsandbytes does not work on {device}: {type(error).__name__}: {reason}", "set lora.quantize=none"
    if not error < 0.2:
        return f"bitsandbytes gives wrong values on {device}", "set lora.quantize=none"
    return None


class QuantizedWeight(Tensor):
    """A weight in 4 bits, in parts of rows. Made by `quantized`."""

    parts: tuple[tuple[Tensor, Any], ...]  # packed weights, and the state with which bitsandbytes unpacks them

    @staticmethod
    def __new__(cls, parts: tuple[tuple[Tensor, Any], ...]) -> "QuantizedWeight":
        rows = sum(state.shape[0] for _, state in parts)
        packed, state = parts[0]
        made = Tensor._make_wrapper_subclass(
            cls, (rows, state.shape[1]), dtype=state.dtype, device=packed.device, requires_grad=False
        )
        made.parts = parts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return QuantizedWeight(args[0].parts)
        if func._schema.is_mutable and isinstance(args[0], QuantizedWeight):
            raise RuntimeError(f"a weight in 4 bits is frozen, and {func} would write to it")
        args, kwargs = tree_map_only(QuantizedWeight, QuantizedWeight.widened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    def widened(self) -> Tensor:
        """The dequantized weight."""
        widen = _bitsandbytes().dequantize_4bit
        if len(self.parts) == 1:
            return widen(*self.parts[0])
        if self.device.type != "cuda":  # only on CUDA it takes `out`
            return torch.cat([widen(packed, state) for packed, state in self.parts])
        whole, first = torch.empty(self.shape, dtype=self.dtype, device=self.device), 0
        for packed, state in self.parts:
            widen(packed, state, out=whole[first : first + state.shape[0]])
            first += state.shape[0]
        return whole


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return (dy @ weight.to(dy.dtype)).to(ctx.dtype), None, None


def frozen_product(x: Tensor, weight_OI: QuantizedWeight, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + bias. F.linear would transpose the weight first and save the dequantized one for backward."""
    return _FrozenProduct.apply(x, weight_OI, bias_O)  # pyright: ignore


@torch.no_grad()
def quantized(parts_OI: Sequence[Tensor]) -> QuantizedWeight:
    """The rows of all parts in 4 bits, each part quantized separately."""
    quantize = _bitsandbytes().quantize_4bit
    how = {"blocksize": BLOCK, "quant_type": "nf4", "compress_statistics": True}
    return QuantizedWeight(tuple(quantize(part.contiguous(), **how) for part in parts_OI))


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


def narrow_linears(model: GPT, weights: str) -> None:
    """Puts the linear layers, but those with adapters or in 4 bits, into `bf16` or `int8`.

    The head too in 8 bits; in bf16 it is rounded where it is used.
    """
    if weights == "int8" and model.config.width % 4 == 0:  # kernels read four numbers at once
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        model.head.int8 = Int8Linear(head, None)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name, linear in block.linears().items():
            if type(linear) is not nn.Linear:
                continue
            if weights == "int8" and linear.in_features % 4 == 0:
                block.set_linear(name, Int8Linear(linear.weight, linear.bias))
            else:
                linear.weight.data = linear.weight.data.to(torch.bfloat16)


def check_quantizing(device: torch.device) -> None:
    """Raises a ConfigError if 4-bit weights do not work on this device."""
    missing = quantizing_missing(device)
    if missing is not None:
        raise ConfigError(f"lora.quantize is nf4, but {missing[0]}", missing[1])


def quantize_linears(model: GPT, device: torch.device) -> None:
    """Moves the model to the device with its linear layers in 4 bits, one matrix at a time to save memory."""
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
    """Sets linear layers to their dequantized 4-bit values: the base that adapters were trained with."""
    for block, name, parts in _linears(model):
        block.linears()[name].weight.copy_(quantized(parts).widened())


def _linears(model: GPT) -> Iterator[tuple[Block, str, list[Tensor]]]:
    """Every linear layer of the blocks: block, name, and the parts of its weight."""
    targets = targets_of(model)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, linear in block.linears().items():
            here = [target for target in targets if (target.layer, target.linear) == (number, name)]
            yield block, name, list(linear.weight.detach().split([target.rows for target in here]))
