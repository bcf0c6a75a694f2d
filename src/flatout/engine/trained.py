"""What a run learns: all weights of its model, slices of them, or adapters beside frozen ones.

Steps and checkpoints go by this.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.checkpoints.adapter_folder import adapter_plan
from flatout.model.adapters import Adapters, attach
from flatout.model.count import blocks_gathered
from flatout.model.gpt import GPT
from flatout.model.weights import assign_tensors, check_tensors
from flatout.optim.optimizers import Trainable, trainables
from flatout.parallel.ranks import Ranks
from flatout.parallel.reducer import Copies, Slices
from flatout.resolve.case import Speed
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.plan import RunPlan
from flatout.world import World

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

    def exchange(self, world: World) -> Copies | Slices | None:
        """How the processes of `world` share whole matrices; None for one alone."""
        if self.sharding is not None:
            return Slices(self.sharding.number, self.sharding.count, self.sharding.group, world.pulse)
        return Copies(world.rank, world.size, world.pulse) if isinstance(world, Ranks) else None

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


def trained_of(plan: RunPlan, model: nn.Module, world: World) -> Trained:
    """What a plan trains of a model, which gets its adapters here, or is cut into slices."""
    if plan.speed.sharded:
        return all_weights(model, _in_slices(model, plan.speed, world))
    with world.together():
        if not plan.lora.rank:
            return all_weights(model)
        assert isinstance(model, GPT), "refused with model="
        return only_adapters(attach(model, adapter_plan(plan.lora), plan.train.seed))


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


def _in_slices(model: nn.Module, speed: Speed, world: World) -> "Sharding":
    """Slices of the model on the device of each process."""
    from flatout.parallel.sharding import Sharding  # it takes a second to import

    assert isinstance(world, Ranks), "one process has no shards"
    assert isinstance(model, GPT), "refused with model="
    at_once, blocks = blocks_gathered(model.config), list(model.blocks)
    groups = [blocks[first : first + at_once] for first in range(0, len(blocks), at_once)]
    ends = [] if model.config.tied else [[model.embedding], [model.head]]
    kernels = speed.kernels == "triton"  # which take weights in the type of products; torch's own cast for themselves
    with out_of_memory():
        return Sharding(
            model,
            [*groups, *ends],
            world,
            hybrid=speed.parallel == "hybrid",
            device=speed.device.torch_device,
            gathered=speed.product_type if kernels and speed.precision in ("bf16", "fp16") else None,
            entries=("logits",),
        )
