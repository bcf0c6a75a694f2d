"""A linear layer of a block with adapters on some or all of its rows.

It replaces a linear layer and keeps the same `weight` and `bias` parameters, so code that reads them still works. It
adds A (all parts stacked), B of every part, and DoRA's magnitudes.
Trap: code that multiplies by `weight` directly leaves the adapter out, so it must check for an AdaptedLinear first, as
`Operations` and `FrozenOperations` do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.model.execution import Execution
from flatout.ops.lora import JoinedWeight, LoraLayout, LoraPart, dora_norm, lora_product
from flatout.ops.scales import version_of


class AdaptedLinear(nn.Linear):
    def __init__(
        self, base: nn.Linear, layout: LoraLayout, names: Sequence[str], *, dropout: float, dora: bool
    ) -> None:
        """`names`: one for each part of the layout. A, B and magnitudes are uninitialised."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.base = (base,)  # in a tuple, so that torch does not register it as a submodule
        self.layout, self.names = layout, tuple(names)
        self.dropout = dropout
        device = base.weight.device

        def room(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))

        self.lora_a = room(layout.rank, base.in_features)
        self.lora_b = nn.ParameterDict(
            {name: room(part.rows, part.rank) for name, part in zip(names, layout.parts, strict=True)}
        )
        self.magnitude = room(layout.rows) if dora else None
        self.in_place = True
        self.joined: JoinedWeight | None = None
        self._joined_state: object = None
        self._norm: Tensor | None = None
        self._norm_state: object = None

    def own(self) -> dict[str, nn.Parameter]:
        """Trained parameters by their names in this module."""
        magnitude = {} if self.magnitude is None else {"magnitude": self.magnitude}
        return {"lora_a": self.lora_a, **{f"lora_b.{name}": self.lora_b[name] for name in self.names}, **magnitude}

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces one of `own`."""
        if name.startswith("lora_b."):
            self.lora_b[name.removeprefix("lora_b.")] = parameter
        else:
            setattr(self, name, parameter)
        self.forget()

    @property
    def b(self) -> list[Tensor]:
        return [self.lora_b[name] for name in self.names]

    def use(self, execution: Execution) -> None:
        """Changes the execution; a ConfigError if adapters do not support it."""
        reason = unsupported(execution, dora=self.magnitude is not None, dropout=self.dropout)
        if reason is not None:
            raise ConfigError(reason, "set speed.kernels=torch")
        # Selective checkpointing saves results of products, which must not be changed in place then.
        self.in_place = execution.checkpointing != "selective"

    def train(self, mode: bool = True) -> "AdaptedLinear":
        """Also drops everything derived from A and B, which is then made again: steps and evaluations begin here."""
        self.forget()
        return super().train(mode)

    def forget(self) -> None:
        self._joined_state = self._norm_state = self._norm = None

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = (x, self.weight, self.bias, self.lora_a, self.b, self.layout)
        return lora_product(*values, magnitude_P=self.magnitude, norm_P=self.norm(), **self._how())

    def _how(self) -> dict[str, Any]:
        return {"dropout": self.dropout if self.training else 0.0, "in_place": self.in_place}

    def separately(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Groups of rows of these `sizes`, each by its own product (`speed.fused_qkv=false`)."""
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return tuple(self._rows(x, end - size, end) for end, size in zip(ends, sizes, strict=True))

    def _rows(self, x: Tensor, first: int, end: int) -> Tensor:
        weight, bias = self.weight[first:end], None if self.bias is None else self.bias[first:end]
        parts, a, b, adapted = [], [], [], []
        place = 0  # of the part's first row among all adapted rows
        for part, span, b_p in zip(self.layout.parts, self.layout.spans, self.b, strict=True):
            low, high = max(part.first, first), min(part.first + part.rows, end)
            if low < high:
                parts.append(LoraPart(low - first, high - low, part.rank, part.scale))
                a.append(self.lora_a[span])
                b.append(b_p[low - part.first : high - part.first])
                adapted.append(slice(place + low - part.first, place + high - part.first))
            place += part.rows
        if not parts:
            return F.linear(x, weight, bias)
        magnitude, norm = self.magnitude, self.norm()
        if magnitude is not None and norm is not None:
            magnitude = torch.cat([magnitude[rows] for rows in adapted])
            norm = torch.cat([norm[rows] for rows in adapted])
        values = (x, weight, bias, torch.cat(a), b, LoraLayout(end - first, tuple(parts)))
        return lora_product(*values, magnitude_P=magnitude, norm_P=norm, **self._how())

    # --- what is derived from A and B ---------------------------------------------------------------------------------

    def norm(self) -> Tensor | None:
        """DoRA's norms, cached while nothing changes, so that decoding does not compute them for every token."""
        if self.magnitude is None:
            return None
        if torch.compiler.is_compiling() or self.training:
            return dora_norm(self.weight, self.lora_a, self.b, self.layout)
        state = (*self._state(), version_of(self.weight), self.weight.data_ptr())
        if self._norm is None or self._norm_state != state:
            with torch.inference_mode(False):  # made while sampling, it may be used in training
                self._norm = dora_norm(self.weight, self.lora_a, self.b, self.layout)
            self._norm_state = state
        return self._norm

    def unfold(self) -> None:
        """Undoes `join`."""
        if self.joined is not None and self.joined.dtype == self.weight.dtype:
            self.weight.data = self.weight.data.contiguous()
        self.joined = None

    def fresh(self) -> None:
        """Updates the joined weight if A or B have changed."""
        if self.joined is not None and self._joined_state != self._state():
            with torch.inference_mode(False):
                self.joined.refresh(self.lora_a, self.b)
            self.is_fresh()

    def is_fresh(self) -> None:
        """Records that the joined weight is up to date."""
        self._joined_state = self._state()

    @property
    def claims_fresh(self) -> bool:
        """Whether the joined weight was up to date at the last check and `forget` was not called since."""
        return self._joined_state is not None

    def join(self, dtype: torch.dtype) -> bool:
        """Makes a joined weight for our kernels' products in `dtype`; False if there is one already.

        If the types are equal, the weight itself moves into the joined buffer. Moving or copying the model undoes that.
        """
        joined, weight = self.joined, self.weight
        there = joined is not None and joined.dtype == dtype and joined.buffer.device == weight.device
        if joined is not None and there and (dtype != weight.dtype or joined.weight_OI.data_ptr() == weight.data_ptr()):
            return False
        with torch.inference_mode(False):  # made while sampling, it may be used in training
            self.joined = JoinedWeight(weight, self.layout, dtype)
            if dtype == weight.dtype:
                weight.data = self.joined.weight_OI
        self.forget()
        return True

    def _state(self) -> tuple[tuple[int, int], ...]:
        return tuple((version_of(value), value.data_ptr()) for value in (self.lora_a, *self.b))


def unsupported(execution: Execution, *, dora: bool = False, dropout: float = 0.0) -> str | None:
    """Why adapters do not work with this execution, or None."""
    if execution.kernels == "torch":
        return None
    reason = kernels_missing(dora=dora, dropout=dropout, fp8=execution.fp8)
    return None if reason is None else f"adapters do not go with speed.kernels={execution.kernels}: {reason}"


def kernels_missing(*, dora: bool, dropout: float, fp8: Sequence[str]) -> str | None:
    """Why our kernels do not support such adapters, or None."""
    if dora:
        return "they have no DoRA"
    if dropout > 0:
        return "they have no dropout on adapters"
    if fp8:
        return "under adapters they have no 8-bit products"
    return None
