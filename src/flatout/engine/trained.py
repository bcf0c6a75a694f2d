"""What a run learns: all weights of its model, or adapters beside frozen ones. Steps and checkpoints go by this."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.config.schema import LoraConfig, RunConfig, SpeedConfig
from flatout.engine.adapter_folder import plan_targets
from flatout.engine.features import Speed
from flatout.model.adapter_targets import AdapterPlan, choose, targets_of
from flatout.model.adapters import Adapters
from flatout.model.count import flops_per_token, matrix_count, parameter_count, whole_count
from flatout.model.gpt import empty_model
from flatout.model.weights import assign_tensors, check_tensors
from flatout.optim.optimizer import StateBytes, Trainable, trainables
from flatout.optim.rules import state_bytes

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


def adapter_plan(config: LoraConfig) -> AdapterPlan:
    return AdapterPlan(
        rank=config.rank,
        alpha=2.0 * config.rank if config.alpha is None else config.alpha,
        dropout=config.dropout,
        targets=plan_targets(config.targets),
        ranks=config.named_ranks,
        alphas=config.named_alphas,
        also=tuple(config.also),
        rank_stabilised=config.rank_stabilised,
        dora=config.dora,
    )


def trained_count(config: RunConfig, vocab: int) -> int:
    """The values that a run trains: all of its model, or its adapters and what is trained whole beside them."""
    if not config.lora.rank:
        return parameter_count(config.model, vocab)
    plan = adapter_plan(config.lora)
    choices = choose(plan, targets_of(empty_model(config.model, vocab, device="meta")))
    adapters = sum(choice.rank * (choice.target.rows + choice.target.inputs) for choice in choices)
    magnitudes = sum(choice.target.rows for choice in choices) if plan.dora else 0
    return adapters + magnitudes + whole_count(config.model, vocab, plan.also)


def training_flops(config: RunConfig, vocab: int, attended: float | None) -> float:
    """FLOPs of one training token, by what the run trains. `attended` is the length that a token attends to."""
    if not config.lora.rank:
        return flops_per_token(config.model, vocab, attended)
    also = config.lora.also
    adapters = trained_count(config, vocab) - whole_count(config.model, vocab, also)
    head = "head" in also or ("embedding" in also and config.model.tied)
    return flops_per_token(config.model, vocab, attended, adapters=adapters, head=head)


def checkpoint_size(parameters: int, config: RunConfig, speed: Speed | SpeedConfig) -> int:
    """Bytes of one checkpoint of so many trained parameters: fp32 weights, and what optimizers keep of them."""
    return int((4 + state_of(config, speed, parameters).checkpoint) * parameters)


def state_of(config: RunConfig, speed: Speed | SpeedConfig, parameters: int) -> StateBytes:
    """Bytes of optimizer state for each of so many trained parameters."""
    matrices = min(1.0, matrix_count(config.model) / parameters)
    how = {"state": speed.optimizer_state, "offload": speed.optimizer_offload}
    return state_bytes(config.optim, matrices=matrices, **how)


@dataclasses.dataclass(frozen=True)
class Trained:
    saved: Mapping[str, nn.Parameter]  # what a checkpoint holds, by name
    updated: Sequence[Trainable]  # what optimizers update: the same, or one tensor that holds them all
    clear_gradients: Callable[[], None] | None = None  # where gradients must stay in their places
    forget: Callable[[], None] = lambda: None  # lets go of what is derived from the trained values
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
    return Trained(dict(adapters.named_parameters()), updated, adapters.zero_gradients, adapters.forget)
