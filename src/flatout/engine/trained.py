"""What a run learns: all weights of its model, or adapters beside frozen ones. Steps and checkpoints go by this."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError
from flatout.model.adapters import Adapters
from flatout.model.weights import why_not_these
from flatout.optim.optimizers import by_decay


@dataclasses.dataclass(frozen=True)
class Trained:
    saved: Mapping[str, nn.Parameter]  # what a checkpoint holds, by name
    moved: Mapping[str, nn.Parameter]  # what the optimizer moves, by name: the same, or one tensor that holds them all
    matrices: Sequence[nn.Parameter]  # of what is moved, that which decays
    vectors: Sequence[nn.Parameter]
    clear_gradients: Callable[[], None] | None = None  # where gradients must stay in their places

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.saved.values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.saved.items()}

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Puts a checkpoint's values back: all of them, or none."""
        hint = why_not_these(tensors, "model and lora sections")
        for name in sorted(self.saved.keys() ^ tensors.keys()):
            what = "has no tensor" if name in self.saved else "holds an unknown tensor"
            raise CheckpointError(f"{origin} {what} {name}", hint)
        for name, parameter in self.saved.items():
            if tensors[name].shape != parameter.shape:
                shapes = f"{tuple(tensors[name].shape)}, the model needs {tuple(parameter.shape)}"
                raise CheckpointError(f"{origin}: {name} has shape {shapes}", hint)
        for name, parameter in self.saved.items():
            parameter.copy_(tensors[name])


def all_weights(model: nn.Module) -> Trained:
    named = dict(model.named_parameters())
    return Trained(named, named, *by_decay(model))


def only_adapters(adapters: Adapters) -> Trained:
    """Adapters lie in one tensor, matrices first; with DoRA the magnitudes follow, which do not decay."""
    matrices, *vectors = adapters.optimizer_parameters
    moved: dict[str, nn.Parameter] = {"adapters": matrices, **({"magnitudes": vectors[0]} if vectors else {})}
    return Trained(dict(adapters.named_parameters()), moved, [matrices], vectors, adapters.zero_gradients)
