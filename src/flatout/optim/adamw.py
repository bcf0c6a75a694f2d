"""AdamW in four forms: torch's, fused or plain; with moments in 8 bits; with moments on the host.

Contract: all of them update as torch's AdamW does. Groups may differ in rate, decay, betas and eps; rate and decay may
follow schedules.
"""

import abc
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from flatout.ops.adam8 import BLOCK, NO_SCALE, Settings, adam8_reference, blocks_of
from flatout.optim.optimizers import Group, Optimizer, StateBytes, gradient_of, numbers_of, read_numbers

State = dict[str, Tensor]  # of one parameter
Scaling = tuple[Tensor | None, Tensor | None]  # a divisor of gradients, and 1 where nothing may change; for kernels
FP32_BELOW = 4096  # elements: smaller tensors are not worth quantising, and norms and biases are sensitive


class _Form(Optimizer, abc.ABC):
    """The common part of all forms."""

    def __init__(self, groups: Sequence[Group], *, fused: bool) -> None:
        super().__init__(groups)
        self.fused = fused

    def _torch_update(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor], states: list[State], scaling: Scaling
    ) -> None:
        """torch's own update of tensors with moments in fp32 that lie beside them."""
        divisor, skip = scaling
        decay = _decay_of(group, weights, skip)
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=None if self.fused else False,
            fused=self.fused,
            grad_scale=divisor,
            found_inf=skip,
            amsgrad=False,
            beta1=group.fixed("beta1"),
            beta2=group.fixed("beta2"),
            lr=group.numbers["rate"],
            weight_decay=decay,
            eps=group.fixed("eps"),
            maximize=False,
        )


def _decay_of(group: Group, weights: list[Tensor], skip: Tensor | None) -> float:
    """The decay as kernels take it, a number. One that follows a schedule is applied here, in a pass of its own."""
    decay = group.numbers["decay"]
    if not isinstance(decay, Tensor):
        return decay
    factor = 1 - group.numbers["rate"] * decay * (1 if skip is None else 1 - skip)
    torch._foreach_mul_(weights, factor)  # pyright: ignore[reportPrivateImportUsage]
    return 0.0


class _OnDevice(_Form, abc.ABC):
    """Weights are updated where they lie. Without `fused` the host reads all numbers first, and waits for them."""

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": self._count(parameter), **moments}

    def _count(self, parameter: Tensor) -> Tensor:
        """The count of updates: on the device for the fused kernel, on the host for the plain one."""
        return torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")

    @torch.no_grad()
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        if self.fused:
            skip = (~finite).to(torch.float32)
            for group in self.groups:
                self._update_group(group, group.updated(), (None if self.undivided else divisor, skip))
        else:
            _, applied, groups = read_numbers(self.groups, numbers_of(self.groups, divisor, finite).tolist())
            if not applied:
                return
            for group in groups:
                for parameter in group.updated():
                    gradient_of(parameter).div_(divisor)
                self._update_group(group, group.updated(), (None, None))
        # torch's fused kernels and ours write weights without moving their versions, by which copies of weights in
        # narrower types are kept fresh.
        increment_version(self.parameters)

    def _update_group(self, group: Group, chosen: Sequence[Tensor], scaling: Scaling) -> None:
        if chosen:
            states = [self.state[p] for p in chosen]
            self._torch_update(group, list(chosen), [gradient_of(p) for p in chosen], states, scaling)


class AdamW(_OnDevice):
    """torch's own, with everything in fp32 on the device."""

    BYTES = StateBytes(device=8, host=0, checkpoint=8)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


class EightBitAdamW(_OnDevice):
    """Moments in 8 bits, blocks of 256 (ops/adam8.py); tensors of fewer than 4,096 elements keep fp32."""

    # Two moments of a byte, and two bytes of scale for each in every block.
    BYTES = StateBytes(device=2 + 4 / BLOCK, host=0, checkpoint=2 + 4 / BLOCK)

    def quantised(self, parameter: Tensor) -> bool:
        return parameter.numel() >= FP32_BELOW

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if not self.quantised(parameter):
            return super().fresh_state(parameter)
        device, blocks = parameter.device, blocks_of(parameter.numel())
        codes = [torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.full((blocks,), NO_SCALE, dtype=torch.int16, device=device) for _ in range(2)]
        return {
            "step": self._count(parameter),
            "exp_avg": codes[0],
            "exp_avg_scale": scales[0],
            "exp_avg_sq": codes[1],
            "exp_avg_sq_scale": scales[1],
        }

    def _update_group(self, group: Group, chosen: Sequence[Tensor], scaling: Scaling) -> None:
        super()._update_group(group, [p for p in chosen if not self.quantised(p)], scaling)
        large = [p for p in chosen if self.quantised(p)]
        if not large:
            return
        scalars = self._scalars(group, large, scaling)
        decay = _decay_of(group, large, scaling[1])
        settings = Settings(group.fixed("beta1"), group.fixed("beta2"), group.fixed("eps"), decay)
        update = _update_for(large[0].device, self.fused)
        for p in large:
            state = self.state[p]
            moments = (state["exp_avg"], state["exp_avg_scale"], state["exp_avg_sq"], state["exp_avg_sq_scale"])
            update(p, gradient_of(p), moments, scalars, settings)

    def _scalars(self, group: Group, chosen: list[Tensor], scaling: Scaling) -> Tensor:
        """Advances the counts of steps and gives the six numbers of the update, without a word to the host."""
        device, (divisor, skip) = chosen[0].device, scaling
        skip = torch.zeros((), device=device) if skip is None else skip
        divisor = torch.ones((), device=device) if divisor is None else divisor
        steps = [self.state[p]["step"] for p in chosen]
        advance = (1 - skip).to(steps[0].device)
        # A list, because torch asks the host for the value of a single tensor.
        torch._foreach_add_(steps, [advance] * len(steps))  # pyright: ignore[reportPrivateImportUsage]
        count = steps[0].to(device, torch.float64)  # all parameters are updated together, so they share a count
        rate = torch.as_tensor(group.numbers["rate"], dtype=torch.float32, device=device)
        corrections = [1 - group.fixed("beta1") ** count, (1 - group.fixed("beta2") ** count).sqrt()]
        return torch.stack([rate, *(c.to(torch.float32) for c in corrections), divisor, skip, count.to(torch.float32)])


@functools.cache
def _update_for(device: torch.device, fused: bool) -> Callable[..., None]:
    if device.type == "cuda" and fused and importlib.util.find_spec("triton") is not None:
        from flatout.ops.kernels.updates import adam8

        return adam8
    return adam8_reference


# --- on the host ------------------------------------------------------------------------------------------------------


class HostAdamW(_Form):
    """Moments and a copy of the weights in the host's pinned memory; gradients go there, weights come back.

    The device's copies run on a stream of their own: while the host updates one tensor, the gradient of the next
    arrives and the weights of the one before leave. The host has to wait for the gradients, once a step.
    Trap: the host's weights are a copy. Whoever writes into a parameter in place (resuming, tuning) is noticed by the
    parameter's version, and the copy is made anew.
    """

    BYTES = StateBytes(device=0, host=16, checkpoint=8)  # on the host moments, weights and gradients

    def __init__(self, groups: Sequence[Group], *, fused: bool) -> None:
        super().__init__(groups, fused=fused)
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.weights: dict[Tensor, Tensor] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        self.versions: dict[Tensor, int] = {}

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        keys, how = ("exp_avg", "exp_avg_sq"), {"dtype": parameter.dtype, **self._pinned()}
        return {"step": torch.zeros(()), **{key: torch.zeros(parameter.shape, **how) for key in keys}}

    def create_state(self) -> None:
        super().create_state()
        for p in self.parameters:
            if p not in self.gradients:
                for copies in (self.gradients, self.weights):
                    copies[p] = torch.empty(p.shape, dtype=p.dtype, **self._pinned())

    def forget(self) -> None:
        super().forget()
        for held in (self.weights, self.gradients, self.versions):
            held.clear()

    @torch.no_grad()
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        with _Copies(self.stream) as copies:
            sent = numbers_of(self.groups, divisor, finite)
            numbers = torch.empty(len(sent), **self._pinned())
            wait_for_numbers = copies.copy(numbers, sent)
            arrived = {p: self._fetch(p, copies) for group in self.groups for p in group.updated()}
            wait_for_numbers()
            divide_by, applied, groups = read_numbers(self.groups, numbers.tolist())
            if not applied:
                return
            for group in groups:
                for p in group.updated():
                    arrived[p]()
                    self._update_one(group, p, divide_by)
                    copies.copy(p, self.weights[p])
                    self.versions[p] = p._version

    def _update_one(self, group: Group, parameter: Tensor, divide_by: float) -> None:
        scaling = (torch.tensor(divide_by), torch.zeros(())) if self.fused else (None, None)
        if not self.fused:
            self.gradients[parameter].div_(divide_by)
        weights, gradients = [self.weights[parameter]], [self.gradients[parameter]]
        self._torch_update(group, weights, gradients, [self.state[parameter]], scaling)

    def _fetch(self, parameter: Tensor, copies: "_Copies") -> Callable[[], None]:
        if self.versions.get(parameter) != parameter._version:
            copies.copy(self.weights[parameter], parameter)
        return copies.copy(self.gradients[parameter], gradient_of(parameter))

    def _pinned(self) -> dict[str, Any]:
        return {"pin_memory": self.stream is not None}


class _Copies:
    """Copies between device and host in order, on a stream of their own where there are streams."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self.stream = stream
        self.outside: torch.cuda.Stream | None = None

    def __enter__(self) -> "_Copies":
        if self.stream is not None:
            self.outside = torch.cuda.current_stream(self.stream.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not None and self.outside is not None:
            self.outside.wait_stream(self.stream)  # no kernel reads the weights, or frees a gradient, before

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Starts a copy and returns a function that waits for it."""
        if self.stream is None or self.outside is None:
            target.copy_(source)
            return lambda: None
        self.stream.wait_stream(self.outside)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event.synchronize
