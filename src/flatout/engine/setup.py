"""A plan becomes the parts of a run, each built in order: model -> adapters -> optimizers -> step.

Whatever is decided, was decided by `resolve`. Parts below see no settings but their own.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from flatout.checkpoints.adapter_folder import adapter_at, stored_base
from flatout.checkpoints.base_model import Start, base_fingerprint, build_base, open_start
from flatout.checkpoints.checkpoint import Checkpoint
from flatout.device import Scope, use_expandable_segments
from flatout.engine.custom import CustomModel, Given, rules_with
from flatout.engine.deadline import Deadline
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.notices import Notices
from flatout.engine.randomness import RandomStream
from flatout.engine.run import Run
from flatout.engine.step import LossScale, TrainStep
from flatout.engine.trained import Trained, all_weights, only_adapters
from flatout.engine.update_graph import record_updates
from flatout.errors import CheckpointError
from flatout.model.adapter_files import load_into
from flatout.model.adapter_targets import needless_rank
from flatout.model.adapters import Adapters, attach
from flatout.model.compiling import CompileWatch, compile_model, graphs_of_its_own
from flatout.model.count import blocks_gathered
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.model.hub import Description
from flatout.model.protocol import LanguageModel
from flatout.model.quantize import check_quantizing, quantize_linears, quantized_base
from flatout.ops.attention import install_flash
from flatout.optim.average import Average
from flatout.optim.optimizers import Optimizers, check_slices
from flatout.optim.rules import rules_of
from flatout.optim.schedule import cooling_from, rate_factors
from flatout.parallel.matrices import exchange_of
from flatout.parallel.ranks import Ranks
from flatout.parallel.reducer import reducer_of
from flatout.resolve.case import Speed, product_type
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.memory import adapter_plan
from flatout.resolve.plan import RunPlan
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


def setup_run(
    plan: RunPlan, world: World | None = None, *, resumed: Checkpoint | None = None, given: Given | None = None
) -> Run:
    """Builds a run with fresh weights, in one of the processes of `world`. Resuming overwrites its state afterwards.

    Weights that `model.init_from` names are not read where the checkpoint that is `resumed` brings all of them. `given`
    are parts that come from Python.
    """
    world, given, later, fresh = world or World(), given or Given(), Notices(), resumed is None
    device = plan.speed.device
    with world.together():
        start = open_start(plan.model, plan.vocab, plan.data.tokenizer) if fresh and plan.base is None else None
        if device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(device.torch_device)  # the peak shown is this run's own
        use_expandable_segments(device.torch_device, on=plan.speed.expandable_segments)
        model = _build(plan, later, start, given, weights=fresh)
    sharding = in_slices(model, plan.speed, world) if plan.speed.sharded else None
    with world.together():
        adapters = None
        if plan.lora.rank:
            assert isinstance(model, GPT), "refused with model="
            adapters = attach(model, adapter_plan(plan.lora), plan.train.seed)
        trained = all_weights(model, sharding) if adapters is None else only_adapters(adapters)
        run = Run(
            plan=dataclasses.replace(plan, flops_per_token=given.flops(model, plan.flops_per_token)),
            model=model,
            trained=trained,
            adapters=adapters,
            given=given,
            step=_build_step(plan, model, trained, _optimizers(plan, trained, given, world), later, world),
            random=RandomStream(plan.train.seed, device.torch_device, world.rank),
            notices=(*plan.notices, *_notices(model, adapters, given, start)),
            new_notices=later,
            deadline=deadline_of(plan, resumed),
            base_hash=None if adapters is None else _base_hash(adapters, plan, weights=fresh),
        )
        run.evaluation()  # a validation split without a single target is an error now, not after the first steps
        return run


def deadline_of(plan: RunPlan, resumed: Checkpoint | None) -> Deadline | None:
    """When a run ends whose length is told in minutes."""
    if plan.train.minutes is None:
        return None
    cooling = cooling_from(plan.optim, plan.steps)
    deadline = Deadline(60 * plan.train.minutes, plan.steps, cooling, plan.schedule)
    if resumed is not None:
        deadline.resume(resumed.state.get("deadline"), resumed.step)
    return deadline


def with_plan(run: Run, plan: RunPlan) -> Run:
    """The same model and data under other switches, with a new optimizer; what was compiled stays compiled as it was.

    `plan` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
    """
    if plan.speed.compile != run.speed.compile or plan.speed.device != run.speed.device:
        raise ValueError("another device or way of compiling needs another model")
    assert isinstance(run.model, GPT), "only models of a config are measured"
    run.model.use(plan.speed.execution)
    optimizers = _optimizers(plan, run.trained, run.given, run.world)
    step = _build_step(plan, run.model, run.trained, optimizers, run.new_notices, run.world)
    return dataclasses.replace(run, plan=plan, step=step)


# --- the model --------------------------------------------------------------------------------------------------------


def _build(plan: RunPlan, notices: Notices, start: Start | None, given: Given, *, weights: bool) -> GPT | CustomModel:
    speed = plan.speed
    if plan.base is None:
        model = build_model(plan.model, plan.vocab, seed=plan.train.seed, execution=speed.execution)
        if start is not None:
            start.fill(model)
        model = given.adopted(model, speed, plan.train.seed)
        with out_of_memory():
            model.to(_place_of(speed))
    else:
        model = _build_described(plan, plan.base.description, weights=weights)
    if speed.device.kind == "cuda":
        install_flash(speed.execution.attention)
    if speed.compile != "off":
        notices.follow(CompileWatch(speed.compile).notices)
        any_shape = plan.base is not None or plan.documents_apart
        stages = len(plan.train.stages(plan.model.context))
        compile_model(model, speed.compile, our_graphs=speed.cuda_graphs, any_shape=any_shape, stages=stages)
    return model


def _place_of(speed: Speed) -> torch.device:
    """Where a model is built: where it stays, or on the host if every device is to have only a slice of it."""
    return torch.device("cpu") if speed.sharded else speed.device.torch_device


def _build_described(plan: RunPlan, description: Description, *, weights: bool) -> GPT:
    """A frozen model is held in the type of its products; one that is trained in fp32."""
    frozen = plan.lora.rank > 0
    narrow = product_type(plan.speed.precision)
    description = dataclasses.replace(description, config=plan.model)
    device, quantize = _place_of(plan.speed), plan.lora.quantize != "none"
    if quantize:
        check_quantizing(device)
    how: dict[str, Any] = {"dtype": narrow if frozen else torch.float32, "execution": plan.speed.execution}
    how["device"] = torch.device("cpu") if quantize else device
    with out_of_memory():
        if weights or frozen:
            model = build_base(description, **how)
        else:  # a checkpoint brings all of them
            model = empty_model(description.config, description.vocab, **how)
        if quantize:
            quantize_linears(model, device)
    return model


def _base_hash(adapters: Adapters, plan: RunPlan, *, weights: bool) -> str:
    """The hash of the weights under adapters, which get the values that `lora.init_from` names."""
    assert plan.base is not None, "adapters are for a model from elsewhere: checked by the config"
    base = base_fingerprint(plan.base.description)
    if plan.lora.init_from is not None and weights:
        folder = adapter_at(plan.lora.init_from)
        if stored_base(folder) not in (None, base):
            raise CheckpointError(
                f"the adapter in {folder} was trained on other weights than those of {plan.model.init_from}",
                "set model.init_from to the model that it was trained on",
            )
        load_into(adapters, folder)
    return base


def in_slices(model: LanguageModel, speed: Speed, world: World) -> "Sharding":
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
            gathered=product_type(speed.precision) if kernels and speed.precision in ("bf16", "fp16") else None,
            entries=("logits",),
        )


# --- the step ---------------------------------------------------------------------------------------------------------


def _optimizers(plan: RunPlan, trained: Trained, given: Given, world: World) -> Optimizers:
    speed = plan.speed
    rules = rules_of(
        plan.optim,
        plan.steps,
        plan.pace,
        fused=speed.fused_optimizer,
        exchange=exchange_of(world, trained.sharding),
        state=speed.optimizer_state,
        offload=speed.optimizer_offload,
    )
    rules = rules_with(given.optimizer, rules, trained.updated, rate_factors(plan.optim, plan.steps, plan.pace))
    if speed.sharded:
        check_slices(rules)
    return Optimizers(rules, trained.updated)


def _build_step(
    plan: RunPlan, model: LanguageModel, trained: Trained, optimizers: Optimizers, notices: Notices, world: World
) -> TrainStep:
    speed, deterministic = plan.speed, plan.train.deterministic
    device, graph = speed.device.torch_device, None
    if speed.cuda_graphs:
        assert isinstance(model, GPT), "recordings are off with model="
        graph = MicroBatchGraph(model, notices, Recorder(device), trained.adapters)
        if world.size == 1:
            record_updates(optimizers, notices, graph.recorder)
    return TrainStep(
        model,
        optimizers,
        clip=plan.optim.clip,
        micro_batch=speed.micro_batch,
        label_smoothing=plan.train.label_smoothing,
        loss_scale=LossScale.start(device) if speed.precision == "fp16" else None,
        keep_gradients=graphs_of_its_own(speed.compile, our_graphs=speed.cuda_graphs),
        compiled=speed.compile != "off",
        graph=graph,
        adapters=trained.adapters,
        average=Average(trained.updated, plan.optim.ema) if plan.optim.ema else None,
        scope=Scope(speed.device, speed.precision, deterministic, speed.threads, not speed.sharded),
        world=world,
        reducer=trained.sharding
        or reducer_of(
            world,
            [one.parameter for one in trained.updated],
            in_place=trained.adapters is not None,
            bf16=plan.parallel.reduce == "bf16",
            replayed=speed.cuda_graphs,
        ),
    )


def _notices(model: LanguageModel, adapters: Adapters | None, given: Given, start: Start | None) -> Iterator[str]:
    """What is known of weights and adapters once they are there."""
    if start is not None:
        yield start.notice
    yield from given.notices(model)
    count, small, wide = quantized_base(model)
    if count:
        sizes = f"{small / 2**20:,.1f} MiB instead of {wide / 2**20:,.1f}"
        yield f"base: {count:,} weights of linear layers in 4 bits, {sizes}"
    if adapters is not None:
        yield from needless_rank(adapters.choices)
