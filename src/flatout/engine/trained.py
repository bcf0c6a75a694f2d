"""What a run learns: all weights of its model, or adapters beside frozen ones. Steps and checkpoints go by this."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.model.adapters import Adapters
from flatout.model.weights import assign_tensors, check_tensors
from flatout.optim.optimizer import Trainable, trainables

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Trained:
    saved: Mapping[str, nn.Parameter]  # what a checkpoint holds, by name
    updated: Sequence[Trainable]  # what optimizers update: the same, or one tensor that holds them all
    adapters: Adapters | None = None  # where these alone are trained
    sharding: "Sharding | None" = None  # where `saved` and `updated` are this process's slices

    @property
    def count(self) -> int:
        """The values of the whole model, or of all adapters."""
        return sum(math.prod(shape) for shape in self._shapes().values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.saved.items()}

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this process holds of a checkpoint's tensors, those of optimizers among them."""
        return tensors if self.sharding is None else self.sharding.own(tensors)

    def assign(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Puts a checkpoint's values back: all of them, or none."""
        check_tensors(self._shapes(), tensors, origin, "model and lora sections")
        assign_tensors(self.saved, self.own(tensors), origin, "model and lora sections")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of whole tensors."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.saved.items()}
        return shapes | (
            {} if self.sharding is None else {name: one.shape for name, one in self.sharding.slices.items()}
        )


def all_weights(model: nn.Module, sharding: "Sharding | None" = None) -> Trained:
    if sharding is None:
        return Trained(dict(model.named_parameters()), trainables(model))
    updated = [dataclasses.replace(one, parameter=sharding.parameters[one.name]) for one in trainables(model)]
    return Trained(sharding.parameters, updated, sharding=sharding)


def only_adapters(adapters: Adapters) -> Trained:
    """Adapters lie in one tensor, matrices first; with DoRA the magnitudes follow, which do not decay."""
    names = ("adapters", "magnitudes")
    flat = zip(names, adapters.optimizer_parameters, strict=False)
    updated = [Trainable(name, parameter, adapters, matrix=name == "adapters") for name, parameter in flat]
    return Trained(dict(adapters.named_parameters()), updated, adapters)
