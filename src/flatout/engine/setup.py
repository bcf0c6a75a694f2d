"""The parts of a run, each built of its share of the plan: the model, what it learns, the optimizers.

What a run learns is all weights of its model, slices of them, or adapters beside frozen ones. Steps and checkpoints go
by this. Whatever is decided, was decided by `resolve`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flatout.checkpoints.base_and_adapter import adapter_plan, base_fingerprint, build_base, continue_from
from flatout.device import out_of_memory
from flatout.engine.custom import CustomModel, CustomParts
from flatout.engine.monitor import Notices
from flatout.model.adapter_targets import needless_rank
from flatout.model.adapters import Adapters, attach
from flatout.model.compiling import CompileWatch, compile_model
from flatout.model.count import blocks_gathered
from flatout.model.gpt import GPT, build_model
from flatout.model.quantize import check_quantizing, quantize_linears
from flatout.model.weights import assign_tensors, check_tensors
from flatout.optim.optimizers import Optimizers, Trainable, check_slices, trainables
from flatout.optim.rules import rate_factors, rules_of
from flatout.parallel.ranks import Ranks
from flatout.parallel.reducer import Copies, Slices
from flatout.resolve.case import Speed
from flatout.resolve.plan import RunPlan
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


def built_model(plan: RunPlan, custom: CustomParts, *, weights: bool) -> GPT | CustomModel:
    """The model where it stays, or on the host if every device is to have only a slice of it."""
    speed = plan.speed
    place = torch.device("cpu") if speed.sharded else speed.device.torch_device
    if plan.base is not None:
        frozen, quantize = plan.lora.rank > 0, plan.lora.quantize != "none"
        if quantize:
            check_quantizing(place)
        with out_of_memory():
            model = build_base(
                dataclasses.replace(plan.base.description, config=plan.model),
                dtype=speed.product_type if frozen else torch.float32,  # which is what is trained in any case
                device=torch.device("cpu") if quantize else place,
                execution=speed.execution,
                weights=weights or frozen,
            )
            if quantize:
                quantize_linears(model, place)
            return model
    model = build_model(plan.model, plan.vocab, seed=plan.train.seed, execution=speed.execution)
    if plan.start is not None:
        plan.start.fill(model)
    model = custom.model_of(model, speed, plan.train.seed)
    with out_of_memory():
        return model.to(place)


def compile_as_planned(plan: RunPlan, model: GPT | CustomModel, notices: Notices) -> None:
    """Compiles the model; the compiler's notices while training goes on are among `notices`."""
    mode = plan.speed.compile
    if mode != "off":
        notices.follow(CompileWatch(mode).notices)
        any_shape = plan.base is not None or plan.documents_apart
        stages = len(plan.train.stages(plan.model.context))
        compile_model(model, mode, our_graphs=plan.speed.cuda_graphs, any_shape=any_shape, stages=stages)


@dataclasses.dataclass(frozen=True)
class Trained:
    saved: Mapping[str, nn.Parameter]  # the tensors of a checkpoint, by name
    updated: Sequence[Trainable]  # the tensors of optimizers: the same, or one that holds them all
    adapters: Adapters | None = None  # where these alone are trained
    sharding: "Sharding | None" = None  # where `saved` and `updated` are this process's slices

    @property
    def count(self) -> int:
        """The values of the whole model, or of all adapters."""
        return sum(math.prod(shape) for shape in self._shapes().values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.saved.items()}

    def own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This process's part of a checkpoint's tensors, those of optimizers among them."""
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
    """The trained parameters of a model, which gets its adapters here, or is cut into slices."""
    if plan.speed.sharded:
        return all_weights(model, _in_slices(model, plan.speed, world))
    with world.fail_together():
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


def optimizers_of(plan: RunPlan, trained: Trained, custom: CustomParts, world: World) -> Optimizers:
    speed = plan.speed
    own = rules_of(
        plan.optim,
        plan.steps,
        plan.pace,
        fused=speed.fused_optimizer,
        exchange=trained.exchange(world),
        state=speed.optimizer_state,
        offload=speed.optimizer_offload,
    )
    rules = custom.rules(own, trained.updated, rate_factors(plan.optim, plan.steps, plan.pace))
    if speed.sharded:
        check_slices(rules)
    return Optimizers(rules, trained.updated)


def base_hash_of(plan: RunPlan, trained: Trained, *, weights: bool) -> str | None:
    """The hash of the weights under adapters, which get the values that `lora.init_from` names."""
    if trained.adapters is None:
        return None
    assert plan.base is not None, "adapters are for a model from elsewhere: checked by the config"
    base = base_fingerprint(plan.base.description)
    if plan.lora.init_from is not None and weights:
        continue_from(plan.lora.init_from, trained.adapters, base, plan.model.init_from)
    return base


def notices_of(plan: RunPlan, model: GPT | CustomModel, trained: Trained, custom: CustomParts) -> Iterator[str]:
    """Notices on weights and adapters, once they are there."""
    if plan.start is not None:
        yield plan.start.notice
    yield from custom.notices(model)
    if trained.adapters is not None:
        yield from needless_rank(trained.adapters.choices)
        assert plan.base is not None, "adapters are for a model from elsewhere: checked by the config"
        assert isinstance(model, GPT), "refused with model="
        if knows_no_end(model, plan.base.tokenizer.end_of_text):
            yield (
                f"{plan.base.name} was trained on text without an end, and adapters leave its head as it is, so it may "
                "not learn to stop; train all weights by lora.rank=0, or the base on several documents"
            )


@torch.no_grad()
def knows_no_end(model: GPT, end: int | None) -> bool:
    """Whether the end of a text is a token that was never seen: all of those keep nearly the same row of the head."""
    rows = model.head.weight
    if rows is None or end is None or len(rows) > 2**16:  # a large vocabulary is that of a model from elsewhere
        return False
    away = (rows - rows[end]).float().norm(dim=1).sort().values  # itself first; a deterministic run has no kthvalue
    return bool(away[1] < 0.02 * away[len(away) // 2])
