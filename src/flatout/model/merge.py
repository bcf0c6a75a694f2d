"""Merging adapters into the weights, and how much of the update survives rounding.

W + s B A (with DoRA: scaled row by row) is computed in fp32, matrix by matrix, and rounded once to the requested type.
A bf16 weight moves in steps of 1/256 to 1/128 of itself, so an update of less than half a step is lost: with an update
of 5e-4 of the weights' size, 88% of bf16 weights do not change. So every merge reports
- `kept`: how far the weights moved along the update, as a share of it. 1 is all of it; 0.29 in that example.
- `lost`: the size of the error, as a share of the update. 0 is none; 0.90 in that example.
- `unchanged`: the share of weights that did not change.
The base is rounded to the requested type before the comparison, so its own rounding does not count as a loss.
"""

import dataclasses

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.model.adapted import AdaptedLinear
from flatout.model.adapters import Adapters
from flatout.ops.lora import adapted_weight, dora_norm

ROWS_AT_ONCE = 2048  # of a matrix in fp32 and wider
MERGED_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """How much of an update survived rounding."""

    relative_update: float  # the update's size divided by that of the adapted rows
    kept: float
    lost: float
    unchanged: float


@dataclasses.dataclass
class _Sums:
    """Sums in float64, since they add billions of squares."""

    weights: int = 0
    unchanged: int = 0
    along: float = 0.0
    wrong: float = 0.0
    update: float = 0.0
    base: float = 0.0

    def add(self, other: "_Sums") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def rounded(self, base: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights in `dtype`; adds their difference to the base to the sums."""
        rounded, before = whole.to(dtype), base.to(dtype)
        update = (whole - base).double()
        moved = rounded.double() - before.double()
        self.weights += update.numel()
        self.unchanged += int((rounded == before).sum())
        self.along += float((moved * update).sum())
        self.wrong += float((moved - update).square().sum())
        self.update += float(update.square().sum())
        self.base += float(base.double().square().sum())
        return rounded

    def retention(self) -> Retention:
        return Retention(
            relative_update=(self.update / self.base) ** 0.5 if self.base > 0 else 0.0,
            kept=self.along / self.update if self.update > 0 else 1.0,  # no update, nothing lost
            lost=(self.wrong / self.update) ** 0.5 if self.update > 0 else 0.0,
            unchanged=self.unchanged / self.weights,
        )


@torch.no_grad()
def merged_matrix(layer: AdaptedLinear, dtype: torch.dtype) -> tuple[Tensor, _Sums]:
    """The layer's merged weight in `dtype`, and its sums; some rows at a time, to save memory."""
    weight, a, b, layout = layer.weight.detach(), layer.lora_a.detach(), [x.detach() for x in layer.b], layer.layout
    merged = weight.to(dtype, copy=True).contiguous()
    factors = None
    if layer.magnitude is not None:
        factor_P = layer.magnitude.detach() / dora_norm(weight, a, b, layout)
        factors = factor_P.split([part.rows for part in layout.parts])
    sums = _Sums()
    for index, part in enumerate(layout.parts):
        for start in range(0, part.rows, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, part.rows))
            whole = adapted_weight(weight, a, b, layout, index, rows)
            if factors is not None:
                whole *= factors[index][rows, None]
            merged[part.span][rows] = sums.rounded(weight[part.span][rows].to(whole.dtype), whole, dtype)
    return merged, sums


def merge(adapters: Adapters, dtype: torch.dtype) -> Retention:
    """Merges the adapters into their model's weights, detaches them, and casts the model to `dtype`.

    If an adapter is not finite, or a weight exceeds fp16's range, it is refused and nothing is changed.
    """
    if dtype not in MERGED_TYPES:
        raise ValueError(f"merged weights are bf16, fp16 or fp32, not {dtype}")
    _refuse_broken(adapters)
    if dtype == torch.float16:  # the other types have the range of fp32
        _refuse_overflow(adapters)
    total = _Sums()
    adapters.unfold()
    for layer in adapters.layers.values():  # one by one: only one matrix is in memory twice
        layer.weight.data, sums = merged_matrix(layer, dtype)
        total.add(sums)
    adapters.detach()
    for parameter in adapters.model.parameters():  # not the buffers: position tables stay in fp32
        parameter.data = parameter.data.to(dtype)
    return total.retention()


def _refuse_broken(adapters: Adapters) -> None:
    for part in adapters.tensors():
        for value in (part.a, part.b, part.magnitude):
            if value is not None and not bool(torch.isfinite(value).all()):
                raise CheckpointError(
                    f"the adapter of {part.choice.target.path} holds values that are not finite",
                    "take an earlier checkpoint: merged, it would spoil the base",
                )


def _refuse_overflow(adapters: Adapters) -> None:
    """Checks that every weight fits fp16, before the first one is changed."""
    hint = "merge it as bf16 or fp32, which have a wider range"
    for (number, linear), layer in adapters.layers.items():
        if not bool(torch.isfinite(merged_matrix(layer, torch.float16)[0]).all()):
            path = adapters.choices_of(number, linear)[0].target.path
            raise CheckpointError(f"with its adapter, the matrix of {path} leaves fp16's range", hint)
    inside = {id(layer.weight) for layer in adapters.layers.values()}
    for name, parameter in adapters.model.named_parameters():
        if id(parameter) not in inside and not bool(torch.isfinite(parameter.detach().half()).all()):
            raise CheckpointError(f"{name} holds values beyond the range of fp16", hint)
