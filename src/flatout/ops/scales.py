"""Delayed scales: what an 8-bit tensor is multiplied by in this step was decided by its largest value in the last.

Idea: finding a tensor's largest magnitude before rounding it takes a pass over memory of its own, which costs what the
8-bit product gains. So whoever writes the tensor rounds it in the same pass, with the scale it finds in the tensor's
slot, and leaves the largest magnitude there. After the update `Scales.settle` turns those into the next step's scales.

The rule: the largest power of two that puts the recorded magnitude at half of the type's range or below. The half is
room for growth from one step to the next; what outgrows it is clamped for one step. A power of two multiplies without
rounding, so a value is rounded once, and a scale that moves does so by whole binary orders only; a floating type
loses nothing by it but reach at its small end. A scale falls at once and rises by one binary order a step, so that a
tensor that is small now and then is not clamped when it is back. A slot that recorded nothing, or something that is not
finite, stays.

Until every slot has a scale they are measured: tensors are recorded and not rounded, and products take the wide values.
That is the first step of a run, and more where some slot saw nothing finite. Only then the host waits.

Contract: a forward pass and its backward pass follow each other. An evaluation between them would end the recording.

Trap: a slot also carries the 8-bit values from the kernel that made them to the product that wants them, which can be
two steps of autograd. The product asks with the wide tensor in its hand and gets them only if they belong to it: the
same memory, which nobody has written into since.

Shape legend: S slots, 3 numbers of each, 4 places of which the first counts, M rows and K columns of a weight.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ACTIVATION, GRADIENT = E4M3, E4M3  # why not E5M2 for gradients: ops/kernels/fp8.py
SMALLEST = 1e-30  # a tensor below this is nothing, and its scale would overflow
_POWER_OF_TWO = 0x7F800000  # the bits of a positive fp32 that are left when its mantissa goes


def version_of(tensor: Tensor) -> int:
    """How often it was written into; always 0 for tensors of inference mode, which nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


class Scales:
    """The slots of a model, as a few short tensors on its device."""

    @torch.inference_mode(False)  # made for sampling, they must still be writable in training
    def __init__(self, kinds: Sequence[torch.dtype | None], device: torch.device) -> None:
        """One slot per entry; None is one that nobody uses."""
        tops = [0.0 if kind is None else torch.finfo(kind).max for kind in kinds]
        self.half_top_S = torch.tensor(tops, device=device) / 2
        self.used_S = self.half_top_S > 0
        # Sixteen bytes apart: Triton compiles a kernel twice if some of its pointers are aligned so and some are not.
        numbers_3S4 = torch.zeros(3, len(tops), 4, device=device)
        self.scale_S, self.unit_S = numbers_3S4[0, :, 0], numbers_3S4[1, :, 0]  # 0: not known yet
        self.seen_S = numbers_3S4[2, :, 0].view(torch.int32)  # the bits of an fp32 that is never negative
        self.rounding = False  # the scales are known: kernels round
        self.recording = False  # this pass is one of training: kernels record
        self.slots = [None if kind is None else Slot(self, index, kind) for index, kind in enumerate(kinds)]

    @torch.no_grad()
    def settle(self) -> None:
        """Turns what was recorded into the next scales. Asks the host for nothing once the scales are known."""
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
        """What goes into a checkpoint."""
        return {"fp8.scales": self.scale_S}

    def assign(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Takes saved scales over; what there is to tell of it."""
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
        """Forgets 8-bit values that nobody came for, which a pass that failed has left behind."""
        for slot in self.slots:
            if slot is not None:
                slot.wide = slot.values = None

    def forget_records(self) -> None:
        """For a step that begins anew."""
        self.seen_S.zero_()


class Slot:
    """One rounded tensor of the model: its scale, its record, and the 8-bit values on their way."""

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
        """`wide` has been recorded, and rounded to `values` where scales are known."""
        self.wide, self.values, self.version = wide, values, version_of(wide)

    def take(self, wide: Tensor) -> tuple[bool, Tensor | None]:
        """(whether `wide` is what was handed over last, its 8-bit values), once."""
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
    """A weight in the type of its products, in memory that stays. `unit` is what a stored 1.0 is worth.

    8-bit products want both operands dense along the summed axis, so backward has a transpose of its own.
    """

    values_MK: Tensor
    turned_KM: Tensor | None = None
    unit: Tensor | None = None
    generation: int = 0  # how often it was made again


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowLinear:
    """What a linear layer of one pass has in narrower types: a copy of its weights, slots of its input and gradient."""

    copy: WeightCopy
    generation: int  # of the copy, in this pass
    x: Slot | None = None  # None: the layer's products are not in 8 bits
    dy: Slot | None = None
