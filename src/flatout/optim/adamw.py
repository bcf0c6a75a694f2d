"""AdamW whose moments take less of the device's memory: in 8 bits, or on the host.

Both take the place of torch's fused AdamW as the training step uses it: the rate is a tensor on the device
(`group["lr"]`), gradients are divided by `grad_scale`, and where `found_inf` is 1 nothing changes at all. Without
`fused` the rate is a number and the step has divided gradients already.

Contract: all moments are made before the first of them is used (`create_moments`), so that a device that runs out of
memory there leaves a consistent state. Moments by name and their way to disk and back: optim/optimizers.py.
"""

import abc
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from flatout.ops.adam8 import BLOCK, NO_SCALE, adam8_reference, blocks_of, decode, encode

FP32_BELOW = 4096  # elements: smaller tensors are not worth quantising, and norms and biases are sensitive


class OurAdamW(torch.optim.AdamW, abc.ABC):
    """What the two have in common."""

    def create_moments(self) -> None:
        """Makes the state of every parameter that has none: all of it, or none where memory runs out."""
        made = {p: self.fresh_moments(p) for p in self.parameters() if not self.state[p]}
        self.state.update(made)

    def parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @abc.abstractmethod
    def fresh_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has never been updated."""

    @abc.abstractmethod
    def place_moments(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Takes over saved state in fp32, as torch's AdamW has it."""

    def _scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """What the training step left: a divisor of the gradients, and whether to skip the update."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _torch_update(self, group: dict[str, Any], chosen: list[Tensor], rate: float | Tensor) -> None:
        """torch's own update of some parameters of a group whose moments are fp32 and on the parameter's device."""
        if not chosen:
            return
        states = [self.state[p] for p in chosen]
        divisor, skip = self._scaling() if group["fused"] else (None, None)
        _adamw(group, chosen, [_gradient(p) for p in chosen], states, rate, divisor, skip)


def _adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    rate: float | Tensor,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=False if not group["fused"] else None,
        fused=group["fused"],
        grad_scale=divisor,
        found_inf=skip,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=rate,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only parameters with a gradient are updated"
    return parameter.grad


def _fp32_moments(parameter: Tensor, place: torch.device, pinned: bool = False) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=place),
        "exp_avg": torch.zeros(parameter.shape, dtype=parameter.dtype, device=place, pin_memory=pinned),
        "exp_avg_sq": torch.zeros(parameter.shape, dtype=parameter.dtype, device=place, pin_memory=pinned),
    }


# --- 8 bits -----------------------------------------------------------------------------------------------------------


class EightBitAdamW(OurAdamW):
    """Moments in 8 bits, blocks of 256 (ops/adam8.py); tensors of fewer than 4,096 elements keep fp32."""

    def quantised(self, parameter: Tensor) -> bool:
        return parameter.numel() >= FP32_BELOW

    def fresh_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        device = parameter.device
        place = device if self.defaults["fused"] else torch.device("cpu")
        if not self.quantised(parameter):
            return _fp32_moments(parameter, device) | {"step": torch.zeros((), device=place)}
        blocks = blocks_of(parameter.numel())
        codes = [torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.full((blocks,), NO_SCALE, dtype=torch.int16, device=device) for _ in range(2)]
        return {
            "step": torch.zeros((), dtype=torch.float32, device=place),
            "exp_avg": codes[0],
            "exp_avg_scale": scales[0],
            "exp_avg_sq": codes[1],
            "exp_avg_sq_scale": scales[1],
        }

    def place_moments(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        state = self.fresh_moments(parameter)
        for key, value in moments.items():
            if key != "step" and self.quantised(parameter):
                flat = value.to(parameter.device, torch.float32).reshape(-1)
                state[key], state[f"{key}_scale"] = encode(flat, signed=key == "exp_avg")
            else:
                state[key].copy_(value)
        self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "the training step computes gradients itself"
        self.create_moments()
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            self._torch_update(group, [p for p in chosen if not self.quantised(p)], group["lr"])
            self._update_quantised(group, [p for p in chosen if self.quantised(p)])

    def _update_quantised(self, group: dict[str, Any], chosen: list[Tensor]) -> None:
        if not chosen:
            return
        scalars = self._scalars(group, chosen)
        beta1, beta2 = group["betas"]
        settings = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        update = _update_for(chosen[0].device, bool(group["fused"]))
        for p in chosen:
            state = self.state[p]
            codes = (state["exp_avg"], state["exp_avg_scale"], state["exp_avg_sq"], state["exp_avg_sq_scale"])
            update(p, _gradient(p), *codes, scalars, **settings)

    def _scalars(self, group: dict[str, Any], chosen: list[Tensor]) -> Tensor:
        """Advances the counts of steps and gives the six numbers of the update, without a word to the host."""
        device = chosen[0].device
        divisor, skip = self._scaling() if group["fused"] else (None, None)
        zero, one = torch.zeros((), device=device), torch.ones((), device=device)
        skip = zero if skip is None else skip.to(device, torch.float32).reshape(())
        divisor = one if divisor is None else divisor.to(device, torch.float32).reshape(())
        steps = [self.state[p]["step"] for p in chosen]
        advance = (1 - skip).to(steps[0].device)
        # A list, because torch asks the host for the value of a single tensor.
        torch._foreach_add_(steps, [advance] * len(steps))  # pyright: ignore[reportPrivateImportUsage]
        beta1, beta2 = group["betas"]
        count = steps[0].to(device, torch.float64)  # all parameters are updated together, so they share a count
        rate = group["lr"]
        rate = rate.to(device, torch.float32) if isinstance(rate, Tensor) else torch.full((), rate, device=device)
        corrections = [1 - beta1**count, (1 - beta2**count).sqrt()]
        return torch.stack([rate, *(c.to(torch.float32) for c in corrections), divisor, skip, count.to(torch.float32)])


@functools.cache
def _update_for(device: torch.device, fused: bool) -> Callable[..., None]:
    if device.type == "cuda" and fused and importlib.util.find_spec("triton") is not None:
        from flatout.ops.kernels.adam8 import adam8

        return adam8
    return adam8_reference


def dequantised(moments: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Saved 8-bit state as torch's AdamW has it."""
    shape, count = parameter.shape, parameter.numel()
    first = decode(moments["exp_avg"], moments["exp_avg_scale"], count, signed=True)
    second = decode(moments["exp_avg_sq"], moments["exp_avg_sq_scale"], count, signed=False)
    return {"step": moments["step"], "exp_avg": first.view(shape), "exp_avg_sq": second.view(shape)}


# --- on the host ------------------------------------------------------------------------------------------------------


class HostAdamW(OurAdamW):
    """Moments and a copy of the weights in the host's pinned memory; gradients go there, weights come back.

    The device's copies run on a stream of their own: while the host updates one tensor, the gradient of the next
    arrives and the weights of the one before leave. The host has to wait for the gradients, once a step.
    Trap: the host's weights are a copy. Whoever writes into a parameter in place (resuming, tuning) is noticed by the
    parameter's version, and the copy is made anew.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        device = next(self.parameters()).device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.weights: dict[Tensor, Tensor] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        self.versions: dict[Tensor, int] = {}

    def fresh_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        return _fp32_moments(parameter, torch.device("cpu"), pinned=self.stream is not None)

    def place_moments(self, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
        state = self.fresh_moments(parameter)
        for key, value in moments.items():
            state[key].copy_(value)
        self.state[parameter] = state

    def create_moments(self) -> None:
        super().create_moments()
        for p in self.parameters():
            if p not in self.gradients:
                for copies in (self.gradients, self.weights):
                    copies[p] = torch.empty(p.shape, dtype=p.dtype, pin_memory=self.stream is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "the training step computes gradients itself"
        self.create_moments()
        chosen = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not chosen:
            return
        with _Copies(self.stream) as copies:
            divisor, skip = self._scaling() if chosen[0][0]["fused"] else (None, None)
            numbers = self._fetch_numbers(chosen[0][0]["lr"], divisor, skip, copies)
            arrived = [self._fetch(p, copies) for _, p in chosen]
            rate, divide_by, skipped = numbers()
            if skipped:
                return
            factor = None if divisor is None else torch.tensor(divide_by)
            for (group, p), wait in zip(chosen, arrived, strict=True):
                wait()
                keep_all = None if divisor is None else torch.zeros(())
                _adamw(group, [self.weights[p]], [self.gradients[p]], [self.state[p]], rate, factor, keep_all)
                copies.copy(p, self.weights[p])
                self.versions[p] = p._version

    def _fetch_numbers(
        self, rate: float | Tensor, divisor: Tensor | None, skip: Tensor | None, copies: "_Copies"
    ) -> Callable[[], tuple[float, float, bool]]:
        """Rate, divisor and whether to skip, in one copy; the returned function waits for it."""
        given = [rate, 1.0 if divisor is None else divisor, 0.0 if skip is None else skip]
        if not any(isinstance(value, Tensor) for value in given):
            return lambda: (float(rate), 1.0, False)
        device = next(value.device for value in given if isinstance(value, Tensor))
        row = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device).reshape(()) for v in given])
        host = torch.empty(3, pin_memory=self.stream is not None)
        wait = copies.copy(host, row)

        def numbers() -> tuple[float, float, bool]:
            wait()
            values = host.tolist()
            return values[0], values[1], values[2] > 0.0

        return numbers

    def _fetch(self, parameter: Tensor, copies: "_Copies") -> Callable[[], None]:
        if self.versions.get(parameter) != parameter._version:
            copies.copy(self.weights[parameter], parameter)
        return copies.copy(self.gradients[parameter], _gradient(parameter))


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
            self.outside.wait_stream(self.stream)  # nobody reads the weights, or frees a gradient, before

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
