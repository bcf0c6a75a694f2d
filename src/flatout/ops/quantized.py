"""A frozen weight in 4 bits: NF4 of bitsandbytes with double quantization, widened whenever it is used.

Idea: each 64 weights in a row share a scale, and each weight is the nearest of 16 values that suit a normal
distribution. The scales are 8-bit numbers themselves. That is 0.516 bytes a weight. `QuantizedWeight` is a tensor that
looks like the wide one (shape, type, device); every operation on it gets the wide weight, made for that operation and
gone after it. What autograd keeps for backward is the small one. So code that multiplies by weights need not know.

Contract: the wide weight is the same at every use, bit for bit. It is never written to. Parts of a matrix (queries,
keys and values; gate and up) are quantized apart, as whoever has them in matrices of their own does.
Trap: widening costs a pass over the weight for each product: a slower step for less memory. Operations are counted as
uses one by one, so `weight[a:b]` widens all of it.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

BLOCK = 64  # weights that share a scale
BYTES = 0.5 + (1 + 4 / 256) / BLOCK  # of a weight: 4 bits, an 8-bit scale for 64, an fp32 one for 256 of those


@functools.cache
def _bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels for inference, which we do not use
    import bitsandbytes.functional

    return bitsandbytes.functional


def quantizing_missing(device: torch.device) -> tuple[str, str] | None:
    """(why weights cannot be held in 4 bits on this device, the way out), or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed", "pip install 'flatout[qlora]', or set lora.quantize=none"
    if device.type not in ("cpu", "cuda"):
        return f"bitsandbytes has no kernels for {device.type}", "set lora.quantize=none, or speed.device=cpu"
    try:
        trial = torch.linspace(-1, 1, 2 * BLOCK, device=device).view(2, BLOCK)
        error = float((quantized([trial]).widened() - trial).abs().max())
    except Exception as error:  # noqa: BLE001 - any failure of a foreign library means: not here, and why
        reason = str(error).strip().partition("\n")[0][:160]
        return f"bitsandbytes does not work on {device}: {type(error).__name__}: {reason}", "set lora.quantize=none"
    if not error < 0.2:
        return f"bitsandbytes gives wrong values on {device}", "set lora.quantize=none"
    return None


class QuantizedWeight(Tensor):
    """Rows of weights in 4 bits, part after part. Made by `quantized`."""

    parts: tuple[tuple[Tensor, Any], ...]  # packed weights, and how bitsandbytes unpacks them

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

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(
            tensor.numel() * tensor.element_size()
            for packed, state in self.parts
            for tensor in (packed, state.absmax, state.offset, state.state2.absmax)
        )

    def widened(self) -> Tensor:
        """The weight in its own type."""
        widen = _bitsandbytes().dequantize_4bit
        if len(self.parts) == 1:
            return widen(*self.parts[0])
        if self.device.type != "cuda":  # elsewhere it cannot write to a given place
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
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        return (dy @ weight.to(dy.dtype)).to(ctx.dtype), None, None


def frozen_product(x: Tensor, weight_OI: QuantizedWeight, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + bias. torch's own linear transposes the weight first, and would keep the wide one for backward."""
    return _FrozenProduct.apply(x, weight_OI, bias_O)  # pyright: ignore


@torch.no_grad()
def quantized(parts_OI: Sequence[Tensor]) -> QuantizedWeight:
    """The rows of all parts in 4 bits, each part with scales of its own."""
    quantize = _bitsandbytes().quantize_4bit
    how = {"blocksize": BLOCK, "quant_type": "nf4", "compress_statistics": True}
    return QuantizedWeight(tuple(quantize(part.contiguous(), **how) for part in parts_OI))
