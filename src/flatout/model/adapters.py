"""Adapters on a frozen model: attached, detached, and stored in one flat tensor.

`attach` freezes all weights of the model and replaces each chosen linear layer by an AdaptedLinear. A is drawn as PEFT
draws it (uniform within 1/√inputs), on the CPU from a generator of its own for each (seed, layer, target), so it does
not depend on the device or on other targets. B is zero: the first pass equals that of the base, bit for bit.

All A, B and magnitudes are views of one flat fp32 tensor, their gradients views of another. So the optimizer, the
gradient norm and zeroing take one kernel each, and autograd accumulates into the views in place.

Contract: `flat.grad` stays the same tensor: zero it with `zero_gradients`, never with set_to_none. After
`model.to(device)` call `gather`, which makes the flat tensor on the new device, before building an optimizer on it.
Trap: torch's fused optimizers change `flat` without increasing its version. Derived tensors still stay up to date if
steps begin with `model.train()` and evaluations with `model.eval()`, as in the engine; otherwise call `forget`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flatout.errors import ConfigError
from flatout.model.adapted import AdaptedLinear, unsupported
from flatout.model.adapter_targets import AdapterPlan, Choice, choose, targets_of
from flatout.model.gpt import GPT
from flatout.model.layers import Block
from flatout.ops.lora import LoraLayout, LoraPart, dora_norm
from flatout.ops.scales import version_of

if TYPE_CHECKING:
    from flatout.ops.kernels.adapters import Spreading

ALIGNED = 32  # elements: each tensor starts at a multiple of 128 bytes in the flat one


@dataclasses.dataclass(frozen=True)
class AdapterTensors:
    """The adapter of one target, as views: A [r, I], B [rows, r], and DoRA's magnitudes [rows]."""

    choice: Choice
    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def attach(model: GPT, plan: AdapterPlan, seed: int, *, strict: bool = True) -> "Adapters":
    """Freezes the model and gives it adapters."""
    reason = unsupported(model.execution, dora=plan.dora, dropout=plan.dropout)
    if reason is not None:
        raise ConfigError(reason, "set speed.kernels=torch")
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise RuntimeError("the model has adapters already: detach those first")
    return Adapters(model, plan, choose(plan, targets_of(model), strict=strict), seed)


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: GPT, plan: AdapterPlan, choices: list[Choice], seed: int) -> None:
        self.model, self.plan, self.choices = model, plan, choices
        self.detached = False
        self._trained_before = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._random_before = model.random
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        model.random = model.random or plan.dropout > 0
        model.freshen = _Ready(self)
        self._spreading: Spreading | None = None
        self._spread_state: tuple[int, int] = (-1, -1)
        self._joins = 0
        self._linked: list[tuple[nn.Parameter, Tensor]] = []
        self.layers: dict[tuple[int, str], AdaptedLinear] = {}
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            for linear, module in block.linears().items():
                if here := self.choices_of(layer, linear):
                    self.layers[layer, linear] = self._replace(block, linear, module, here)
        self.flat: nn.Parameter
        self.optimizer_parameters: list[nn.Parameter]
        self.gather()
        self.reset(seed)

    def _replace(self, block: Block, linear: str, module: nn.Linear, here: list[Choice]) -> AdaptedLinear:
        parts = tuple(LoraPart(c.target.first, c.target.rows, c.rank, c.scale) for c in here)
        layout = LoraLayout(module.out_features, parts)
        names = [c.target.name for c in here]
        adapted = AdaptedLinear(module, layout, names, dropout=self.plan.dropout, dora=self.plan.dora)
        adapted.train(module.training)
        adapted.use(self.model.execution)
        block.set_linear(linear, adapted)
        return adapted

    # --- tensors ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters, under their names in the model."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for layer in self.layers.values():
            for name, parameter in layer.own().items():
                yield f"{names[id(layer)]}.{name}", parameter

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def count(self) -> int:
        """Number of trained values. The flat tensor may be longer, since its parts are aligned."""
        return sum(parameter.numel() for parameter in self.parameters())

    def choices_of(self, layer: int, linear: str) -> list[Choice]:
        """The targets in one linear layer, in the order of rows."""
        return [one for one in self.choices if (one.target.layer, one.target.linear) == (layer, linear)]

    def tensors(self) -> Iterator[AdapterTensors]:
        """The adapter of every target, in order."""
        for (layer, linear), module in self.layers.items():
            here = self.choices_of(layer, linear)
            sizes = [part.rows for part in module.layout.parts]
            magnitudes = [None] * len(here) if module.magnitude is None else module.magnitude.detach().split(sizes)
            for choice, span, b, magnitude in zip(here, module.layout.spans, module.b, magnitudes, strict=True):
                yield AdapterTensors(choice, module.lora_a.detach()[span], b.detach(), magnitude)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Initial values: A drawn, B zero, magnitudes the norms of the weights. Does nothing on the meta device."""
        if self.flat.device.type == "meta":
            return
        for part in self.tensors():
            part.b.zero_()
            rank, inputs = part.a.shape
            bound = 1 / math.sqrt(inputs)
            generator = torch.Generator().manual_seed(_seed_of(seed, part.choice.target.layer, part.choice.target.path))
            part.a.copy_(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        for layer in self.layers.values():
            if layer.magnitude is not None:
                layer.magnitude.copy_(dora_norm(layer.weight, layer.lora_a, layer.b, layer.layout))
        self.forget()

    @torch.no_grad()
    def gather(self) -> None:
        """Moves all adapters into one flat tensor on their device; does nothing if they are in it already.

        Matrices come first, magnitudes last. `optimizer_parameters` has one tensor for each of the two,
        because weight decay is for matrices only. Without magnitudes it is `flat` alone.
        """
        if self._gathered():
            return
        # Without references to old parameters, so that each is freed when it has been replaced.
        slots = [(layer, name) for layer in self.layers.values() for name in layer.own()]
        slots.sort(key=lambda slot: slot[0].own()[slot[1]].dim() < 2)
        places, end, matrices_end = [], 0, 0
        for layer, name in slots:
            places.append(end)
            end += -(-layer.own()[name].numel() // ALIGNED) * ALIGNED
            matrices_end = end if layer.own()[name].dim() > 1 else matrices_end
        device = self.layers[next(iter(self.layers))].lora_a.device
        self.flat = nn.Parameter(torch.zeros(end, dtype=torch.float32, device=device))
        self._placed: list[tuple[nn.Parameter, int]] = []
        for (layer, name), place in zip(slots, places, strict=True):
            old = layer.own()[name]
            # A new parameter: with its `data` set, the old one would keep its own version and miss updates of `flat`.
            new = nn.Parameter(self.flat.detach()[place : place + old.numel()].view(old.shape))
            new.copy_(old)
            layer.put(name, new)
            self._placed.append((new, place))
        self.optimizer_parameters = [self.flat]
        if matrices_end < end:
            pieces = (slice(0, matrices_end), slice(matrices_end, end))
            self.optimizer_parameters = [nn.Parameter(self.flat.detach()[piece]) for piece in pieces]
        self._link(torch.zeros_like(self.flat, requires_grad=False))

    def _gathered(self) -> bool:
        flat = getattr(self, "flat", None)
        if flat is None or flat.device.type == "meta":
            return False
        first, size = flat.data_ptr(), flat.element_size()
        now = {id(parameter) for parameter in self.parameters()}
        return all(
            id(parameter) in now and parameter.device == flat.device and parameter.data_ptr() == first + size * place
            for parameter, place in self._placed
        )

    def _link(self, gradient: Tensor) -> None:
        self.flat.grad = gradient
        self._linked = [
            (parameter, gradient[place : place + parameter.numel()].view(parameter.shape))
            for parameter, place in self._placed
        ]
        start = 0
        for parameter in self.optimizer_parameters:
            if parameter is not self.flat:
                self._linked.append((parameter, gradient[start : start + parameter.numel()]))
                start += parameter.numel()
        self._relink()

    def _relink(self) -> None:
        """Sets gradients to the same views again: a recorded pass (engine/graphs.py) writes to these tensors."""
        for parameter, view in self._linked:
            if parameter.grad is not view:
                parameter.grad = view

    def zero_gradients(self) -> None:
        """Zeroes all gradients with one kernel, and links those set to None to the flat gradient again."""
        gradient = self.flat.grad
        if gradient is None:
            self._link(torch.zeros_like(self.flat, requires_grad=False))
            return
        gradient.zero_()
        self._relink()

    # --- ways ---------------------------------------------------------------------------------------------------------

    def unfold(self) -> None:
        for layer in self.layers.values():
            layer.unfold()

    def ready(self, dtype: torch.dtype) -> Hashable:
        """Updates all joined weights for products in `dtype`, before a pass in our kernels. Cheap if nothing changed.

        The returned value stays the same while joined weights stay at their addresses.
        """
        fresh = True
        for layer in self.layers.values():
            if layer.join(dtype):
                self._spreading, fresh = None, False
            fresh = fresh and layer.claims_fresh
        state = (version_of(self.flat), self.flat.data_ptr())
        if fresh and self._spread_state == state and self._spreading is not None:
            return self._joins
        if self._spreading is None or self._spread_state[1] != state[1]:
            self._spreading = self._parts()
            self._joins += 1
        self._spreading(self.flat.detach())
        joined = [layer.joined.buffer for layer in self.layers.values() if layer.joined is not None]
        increment_version([buffer for buffer in joined if not buffer.is_inference()])
        for layer in self.layers.values():
            layer.is_fresh()
        self._spread_state = state
        return self._joins

    def _parts(self) -> "Spreading":
        from flatout.ops.kernels.adapters import Spreading, SpreadPart

        first, size = self.flat.data_ptr(), self.flat.element_size()
        parts = []
        for layer in self.layers.values():
            layout, joined = layer.layout, layer.joined
            assert joined is not None
            for part, span, b in zip(layout.parts, layout.spans, layer.b, strict=True):
                a = layer.lora_a.detach()[span]
                parts.append(SpreadPart((a.data_ptr() - first) // size, joined.a_RI[span], part.scale))
                parts.append(SpreadPart((b.data_ptr() - first) // size, joined.b_OR[part.span, span], 1.0))
        return Spreading(self.flat, parts)

    def forget(self) -> None:
        """Drops everything derived from A and B. Call it after changing them."""
        for layer in self.layers.values():
            layer.forget()

    def let_go(self) -> None:
        """Frees the flat tensors and joined weights. These adapters cannot be used afterwards."""
        self._placed, self._linked, self._spreading = [], [], None
        for layer in self.layers.values():
            layer.forget()
            layer.joined = None
        for parameter in (self.flat, *self.optimizer_parameters):
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def detach(self) -> None:
        """Removes the adapters: the model is the base again, with `requires_grad` as before."""
        self.unfold()
        for (layer, linear), module in self.layers.items():
            block = self.model.blocks[layer]
            assert isinstance(block, Block)
            block.set_linear(linear, module.base[0])
        for parameter in self._trained_before:
            parameter.requires_grad_(True)
        self.model.random = self._random_before
        self.model.freshen = None
        self.detached = True


class _Ready:
    """`Adapters.ready` as a callable that a deep copy of the model does not keep: its layers update themselves."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters

    def __call__(self, dtype: torch.dtype) -> Hashable:
        return self.adapters.ready(dtype)

    def __deepcopy__(self, _: object) -> None:
        return None


def _seed_of(seed: int, layer: int, path: str) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
