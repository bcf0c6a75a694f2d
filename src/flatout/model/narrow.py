"""Copies of weights in narrower types for products, and scales of 8-bit tensors.

Weights change once per optimizer step and every micro-batch reads them, so they are rounded once per step. A copy is
updated in place when its weight has another version or address, so a recorded micro-batch (engine/graphs.py) always
reads current values.

Contract: call `begin` before every pass, `prepare` before a replay, `settle` after every update. Copies are up to date
if all writes to a weight increase its version, as torch's in-place operations do. torch's fused optimizers and our
kernels do not, so optim/adamw.py increases it. After a write through `weight.data`, call
`torch.autograd.graph.increment_version`.
Trap: bf16 copies live through the step. With full checkpointing or activation offloading, where memory is short, each
layer casts its weight when it is used instead. 8-bit copies are always kept: making them takes too long.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.model.execution import Execution
from flatout.ops.scales import ACTIVATION, E4M3, GRADIENT, NarrowLinear, Scales, Slot, WeightCopy, version_of

LAYERS = ("qkv", "out", "up", "down")  # of a block; two slots each, for input and gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowBlock:
    """Narrow copies for the linear layers of a block; None for a layer without one."""

    qkv: NarrowLinear | None = None
    out: NarrowLinear | None = None
    up: NarrowLinear | None = None
    down: NarrowLinear | None = None


def input_slot(layer: NarrowLinear | None) -> Slot | None:
    return None if layer is None else layer.x


def gradient_slot(layer: NarrowLinear | None) -> Slot | None:
    return None if layer is None else layer.dy


class NarrowWeights:
    """Copies of weights, updated when their weights change."""

    def __init__(self) -> None:
        self.copies: dict[Tensor, WeightCopy] = {}
        self.made_from: dict[Tensor, tuple[int, int]] = {}
        self.allocations = 0

    def copy_of(self, weight: Tensor, dtype: torch.dtype, multiple: int = 1) -> WeightCopy:
        """The copy of a weight in `dtype`, updated if the weight has changed. E4M3 has a scale and a transpose too.

        `multiple`: zeros are added up to such a number of rows.
        """
        copy = self.copies.get(weight)
        if copy is None or copy.values_MK.dtype != dtype or copy.values_MK.device != weight.device:
            copy = self.copies[weight] = self._allocate(weight, dtype, multiple)
            self.made_from.pop(weight, None)
        state = (version_of(weight), weight.data_ptr())
        if self.made_from.get(weight) != state:
            self._fill(copy, weight.detach())
            self.made_from[weight] = state
        return copy

    def _allocate(self, weight: Tensor, dtype: torch.dtype, multiple: int) -> WeightCopy:
        self.allocations += 1
        (rows, columns), device = weight.shape, weight.device
        with torch.inference_mode(False):  # a copy made while sampling must be writable in training
            values_MK = torch.zeros(rows + -rows % multiple, columns, dtype=dtype, device=device)
            if dtype != E4M3:
                return WeightCopy(values_MK)
            turned_KM = torch.empty(columns, rows, dtype=dtype, device=device)
            return WeightCopy(values_MK, turned_KM, torch.empty((), device=device))

    @torch.no_grad()
    def _fill(self, copy: WeightCopy, weight: Tensor) -> None:
        with torch.inference_mode(False):
            if copy.unit is None:
                copy.values_MK[: len(weight)] = weight
            else:
                from flatout.ops.kernels.fp8 import Narrow, quantise

                quantise(weight, E4M3, into=Narrow(values_RC=copy.values_MK, turned_CR=copy.turned_KM, unit=copy.unit))
        copy.generation += 1

    def keep_only(self, weights: Iterable[Tensor]) -> None:
        """Frees the copies of all other weights."""
        for weight in set(self.copies).difference(weights):
            del self.copies[weight]
            self.made_from.pop(weight, None)


class ModelNarrow:
    """All narrow copies and scales of one model."""

    def __init__(self, blocks: Sequence[Mapping[str, nn.Linear]], execution: Execution) -> None:
        """`blocks` has the linear layers of every block by their names in LAYERS."""
        self.blocks = blocks
        self.beginnings = 0
        self.use(execution)

    def use(self, execution: Execution) -> None:
        """Starts again with another execution."""
        self.execution = execution
        self.rounded = [name for name in LAYERS if name in execution.fp8 and execution.kernels == "triton"]
        self.forget()

    def forget(self) -> None:
        """Frees all memory. Copies are made again when needed, and scales are measured again."""
        self.beginnings += 1
        self.weights = NarrowWeights()
        self.ready: list[NarrowBlock] = []
        self.ready_for: Hashable = None
        self._scales: Scales | None = None

    @property
    def scales(self) -> Scales | None:
        """The slots, made at the first use, when the model is on its device."""
        if not self.rounded:
            return None
        device = self.blocks[0]["qkv"].weight.device
        if self._scales is None or self._scales.scale_S.device != device:
            pair = {name: (ACTIVATION, GRADIENT) if name in self.rounded else (None, None) for name in LAYERS}
            # Unused layers have slots too, so a checkpoint fits a run with another `speed.fp8`.
            self._scales = Scales([kind for _ in self.blocks for name in LAYERS for kind in pair[name]], device)
        return self._scales

    def begin(self, dtype: torch.dtype, *, recording: bool) -> list[NarrowBlock]:
        """Updates everything for a pass with products in `dtype`; `recording`: it is a training pass."""
        scales = self.scales
        if scales is not None:
            scales.recording = recording
            scales.drop()
        weights = [layer.weight for block in self.blocks for layer in block.values()]
        state = (dtype, *((version_of(weight), weight.data_ptr()) for weight in weights))
        if self.ready_for != state:
            staying = self.execution.checkpointing != "full"
            self.ready = [
                NarrowBlock(
                    **{name: self._layer(index, name, layer.weight, dtype, staying) for name, layer in block.items()}
                )
                for index, block in enumerate(self.blocks)
            ]
            self.ready_for = state
            self.weights.keep_only(weights)
        return self.ready

    def _layer(self, block: int, name: str, weight: Tensor, dtype: torch.dtype, staying: bool) -> NarrowLinear | None:
        if name in self.rounded:
            scales = self.scales
            assert scales is not None
            first = 2 * (block * len(LAYERS) + LAYERS.index(name))
            copy = self.weights.copy_of(weight, E4M3)
            x, dy = scales.slots[first : first + 2]
            return NarrowLinear(copy=copy, generation=copy.generation, x=x, dy=dy)
        if staying and weight.dtype != dtype:
            copy = self.weights.copy_of(weight, dtype)
            return NarrowLinear(copy=copy, generation=copy.generation)
        return None

    def prepare(self, dtype: torch.dtype) -> Hashable:
        """Updates what a recorded pass reads. If the returned value has changed, the recording cannot be used any more.

        False while scales are measured, because later steps take other code paths.
        """
        self.begin(dtype, recording=True)
        measuring = self.scales is not None and not self.scales.rounding
        return False if measuring else (self.weights.allocations, self.beginnings)

    def update_scales(self) -> None:
        """After an update: computes the next step's scales."""
        if self.scales is not None:
            self.scales.update()

    def drop(self) -> None:
        """After a failed pass: drops its 8-bit values and its records."""
        if self._scales is not None:
            self._scales.drop()
            self._scales.forget_records()

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.scales is None else self.scales.tensors()

    def assign(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Restores `tensors` of a checkpoint; returns a notice if some are missing."""
        return None if self.scales is None else self.scales.assign(tensors)
