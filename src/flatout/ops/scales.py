"""Delayed scaling of 8-bit tensors: a tensor's scale in this step comes from its largest magnitude in the last step.

Finding the largest magnitude before rounding would take another pass over memory, which costs as much as the 8-bit
product saves. So the kernel that writes a tensor also rounds it, with the scale in the tensor's slot, and records the
largest magnitude there. After the update `Scales.settle` computes the next scales from these records.

The rule: a scale is the largest power of two that maps the recorded magnitude to at most half of the type's range. The
other half is headroom for growth until the next step; larger values are clamped for one step. Multiplying by a power of
two is exact, so a value is rounded once. A scale falls at once and rises by at most a factor of two per step, so that a
tensor that is small for a few steps is not clamped when it grows again. A slot that recorded nothing, or a value that
is not finite, keeps its scale.

Until every slot has a scale, tensors are recorded but not rounded, and products use the wide values: in the first step
of a run, and longer if a slot has recorded nothing finite. Only in these steps the host waits for the device.

Contract: a backward pass directly follows its forward pass. An evaluation between them would end the recording.

Trap: a slot also passes the 8-bit values from the kernel that made them to the product, which may be two steps of
autograd later. The product presents the wide tensor and gets the values only if they belong to it: same memory, not
written to since.

Shape legend: S slots, 3 numbers of each in 4 places (the first is used), M rows and K columns of a weight.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ACTIVATION, GRADIENT = E4M3, E4M3  # why not E5M2 for gradients: ops/kernels/fp8.py
SMALLEST = 1e-30  # of magnitudes: below it a scale would overflow
_POWER_OF_TWO = 0x7F800000  # the exponent bits of a positive fp32


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


class Scales:
    """The slots of a model, as a few short tensors on its device."""

    @torch.inference_mode(False)  # made while sampling, they must be writable in training
    def __init__(self, kinds: Sequence[torch.dtype | None], device: torch.device) -> None:
        """One slot per entry; None: an unused slot."""
        tops = [0.0 if kind is None else torch.finfo(kind).max for kind in kinds]
        self.half_top_S = torch.tensor(tops, device=device) / 2
        self.used_S = self.half_top_S > 0
        # 16 bytes apart, because Triton compiles a kernel again for pointers of another alignment.
        numbers_3S4 = torch.zeros(3, len(tops), 4, device=device)
        self.scale_S, self.unit_S = numbers_3S4[0, :, 0], numbers_3S4[1, :, 0]  # 0: not known yet
        self.seen_S = numbers_3S4[2, :, 0].view(torch.int32)  # the bits of a non-negative fp32
        self.rounding = False  # scales are known, kernels round
        self.recording = False  # a training pass, kernels record
        self.slots = [None if kind is None else Slot(self, index, kind) for index, kind in enumerate(kinds)]

    @torch.no_grad()
    def update(self) -> None:
        """Computes the next scales from the records. The host waits only until all scales are known."""
        highest_S = self.seen_S.view(torch.float32)
        usable_S = torch.isfinite(highest_S) & (highest_S > SMALLEST) & self.used_S
        ratio_S = torch.where(usable_S, self.half_top_S / highest_S, 1.0)
        next_S = (ratio_S.view(torch.int32) & _POWER_OF_TWO).view(torch.float32)
        next_S = torch.where(self.scale_S > 0, torch.minimum(next_S, 2 * self.scale_S), next_S)
        self._set(torch.where(usable_S, next_S, self.scale_S))
        self.seen_S.zero_()
        self.rounding = self.rounding or self._all_known()

    def _all_known(self) -> bool:
        return bool((self.scale_S > 0)[self.used_S].all())

    def _set(self, scale_S: Tensor) -> None:
        self.scale_S.copy_(scale_S)
        self.unit_S.copy_(torch.where(scale_S > 0, 1.0 / scale_S, 0.0))

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return {"fp8.scales": self.scale_S}

    def assign(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Restores saved scales; returns a notice if they are missing."""
        self.forget_records()
        saved_S = tensors.get("fp8.scales")
        known = saved_S is not None and saved_S.shape == self.scale_S.shape
        saved_S = saved_S.to(self.scale_S.device) if saved_S is not None and known else torch.zeros_like(self.scale_S)
        self._set(torch.where(self.used_S, saved_S, 0.0))
        self.rounding = self._all_known()
        if self.rounding:
            return None
        return "the checkpoint has no 8-bit scales of these layers: they are measured anew in the first step"

    def drop(self) -> None:
        """Drops 8-bit values that were not used because a pass failed."""
        for slot in self.slots:
            if slot is not None:
                slot.wide = slot.values = None

    def forget_records(self) -> None:
        """Clears the records, to repeat a step."""
        self.seen_S.zero_()


class Slot:
    """One rounded tensor of the model: its scale, its record, and 8-bit values for the next product."""

    def __init__(self, scales: Scales, index: int, kind: torch.dtype) -> None:
        self.scales = scales
        self.kind = kind
        self.top = torch.finfo(kind).max
        self.scale, self.unit = scales.scale_S[index], scales.unit_S[index]
        self.seen = scales.seen_S[index]
        self.wide: Tensor | None = None
        self.values: Tensor | None = None
        self.version = 0

    def hand_over(self, wide: Tensor, values: Tensor | None) -> None:
        """Stores `values`, the rounded form of `wide`; None while scales are not known."""
        self.wide, self.values, self.version = wide, values, version_of(wide)

    def take(self, wide: Tensor) -> tuple[bool, Tensor | None]:
        """(whether `wide` is the tensor handed over last, its 8-bit values). Clears the slot."""
        mine, values = self.wide, self.values
        self.wide = self.values = None
        same = (
            mine is not None
            and (mine.data_ptr(), mine.numel(), mine.dtype) == (wide.data_ptr(), wide.numel(), wide.dtype)
            and version_of(wide) == self.version
            and wide.is_contiguous()
        )
        return (True, values) if same else (False, None)


@dataclasses.dataclass
class WeightCopy:
    """A weight in the type of its products, at a fixed address. `unit` is the value of a stored 1.0.

    8-bit products need both operands dense along the summed axis, so backward uses a transposed copy.
    """

    values_MK: Tensor
    turned_KM: Tensor | None = None
    unit: Tensor | None = None
    generation: int = 0  # number of updates


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowLinear:
    """A linear layer's narrow weight copy and the slots of its input and gradient, for one pass."""

    copy: WeightCopy
    generation: int  # of the copy, in this pass
    x: Slot | None = None  # None: the layer's products are not in 8 bits
    dy: Slot | None = None
