"""What a run learns: all weights of its model, or adapters beside frozen ones. Steps and checkpoints go by this."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from flatout.config.schema import OptimConfig, SpeedConfig
from flatout.engine.features import Speed
from flatout.model.adapters import Adapters
from flatout.model.weights import assign_tensors
from flatout.optim.optimizer import Trainable, trainables
from flatout.optim.rules import state_bytes


def checkpoint_size(parameters: int, optim: OptimConfig, speed: Speed | SpeedConfig) -> int:
    """Bytes of one checkpoint of so many trained parameters: fp32 weights, and what optimizers keep of them."""
    state = state_bytes(optim, state=speed.optimizer_state, offload=speed.optimizer_offload)
    return int((4 + state.checkpoint) * parameters)


@dataclasses.dataclass(frozen=True)
class Trained:
    saved: Mapping[str, nn.Parameter]  # what a checkpoint holds, by name
    updated: Sequence[Trainable]  # what optimizers update: the same, or one tensor that holds them all
    clear_gradients: Callable[[], None] | None = None  # where gradients must stay in their places
    forget: Callable[[], None] = lambda: None  # lets go of what is derived from the trained values

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.saved.values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.saved.items()}

    def assign(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Puts a checkpoint's values back: all of them, or none."""
        assign_tensors(self.saved, tensors, origin, "model and lora sections")


def all_weights(model: nn.Module) -> Trained:
    return Trained(dict(model.named_parameters()), trainables(model))


def only_adapters(adapters: Adapters) -> Trained:
    """Adapters lie in one tensor, matrices first; with DoRA the magnitudes follow, which do not decay."""
    names = ("adapters", "magnitudes")
    flat = zip(names, adapters.optimizer_parameters, strict=False)
    updated = [Trainable(name, parameter, adapters, matrix=name == "adapters") for name, parameter in flat]
    return Trained(dict(adapters.named_parameters()), updated, adapters.zero_gradients, adapters.forget)
