"""A plan becomes the parts of a run, each built in order: model -> adapters -> optimizers -> step.

Whatever is decided, was decided by `resolve`. Parts below see no settings but their own.
"""

import dataclasses
from collections.abc import Iterator

import torch

from flatout.checkpoints.adapter_folder import continue_from
from flatout.checkpoints.base_model import Start, base_fingerprint, build_base, open_start
from flatout.checkpoints.checkpoint import Checkpoint
from flatout.device import use_expandable_segments
from flatout.engine.custom import CustomModel, Given
from flatout.engine.deadline import deadline_of
from flatout.engine.notices import Notices
from flatout.engine.run import RandomStream, Run
from flatout.engine.step import build_step
from flatout.engine.trained import Trained, trained_of
from flatout.model.adapter_targets import needless_rank
from flatout.model.compiling import CompileWatch, compile_model
from flatout.model.gpt import GPT, build_model
from flatout.model.quantize import check_quantizing, notice_of, quantize_linears
from flatout.ops.attention import install_flash
from flatout.optim.optimizers import Optimizers, check_slices
from flatout.optim.rules import rate_factors, rules_of
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.plan import RunPlan
from flatout.world import World


def setup_run(
    plan: RunPlan, world: World | None = None, *, resumed: Checkpoint | None = None, given: Given | None = None
) -> Run:
    """Builds a run with fresh weights, in one of the processes of `world`. Resuming overwrites its state afterwards.

    Weights that `model.init_from` names are not read where the checkpoint that is `resumed` brings all of them. `given`
    are parts that come from Python.
    """
    world, given, later, fresh = world or World(), given or Given(), Notices(), resumed is None
    device = plan.speed.device.torch_device
    with world.together():
        start = open_start(plan.model, plan.vocab, plan.data.tokenizer) if fresh and plan.base is None else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the peak shown is this run's own
        use_expandable_segments(device, on=plan.speed.expandable_segments)
        model = _build(plan, start, given, weights=fresh)
        if device.type == "cuda":
            install_flash(plan.speed.execution.attention)
        _compile(plan, model, later)
    trained = trained_of(plan, model, world)
    with world.together():
        base_hash = _base_hash(plan, trained, weights=fresh)  # first: an average of adapters begins with these values
        run = Run(
            plan=dataclasses.replace(plan, flops_per_token=given.flops(model, plan.flops_per_token)),
            model=model,
            trained=trained,
            adapters=trained.adapters,
            given=given,
            step=build_step(plan, model, trained, _optimizers(plan, trained, given, world), later, world),
            random=RandomStream(plan.train.seed, device, world.rank),
            notices=(*plan.notices, *_notices(model, trained, given, start)),
            new_notices=later,
            deadline=deadline_of(plan, resumed),
            base_hash=base_hash,
        )
        run.evaluation()  # a validation split without a single target is an error now, not after the first steps
        return run


def with_plan(run: Run, plan: RunPlan) -> Run:
    """The same model and data under other switches, with a new optimizer; what was compiled stays compiled as it was.

    `plan` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
    """
    if plan.speed.compile != run.speed.compile or plan.speed.device != run.speed.device:
        raise ValueError("another device or way of compiling needs another model")
    assert isinstance(run.model, GPT), "only models of a config are measured"
    run.model.use(plan.speed.execution)
    optimizers = _optimizers(plan, run.trained, run.given, run.world)
    step = build_step(plan, run.model, run.trained, optimizers, run.new_notices, run.world)
    return dataclasses.replace(run, plan=plan, step=step)


def _build(plan: RunPlan, start: Start | None, given: Given, *, weights: bool) -> GPT | CustomModel:
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
    if start is not None:
        start.fill(model)
    model = given.adopted(model, speed, plan.train.seed)
    with out_of_memory():
        return model.to(place)


def _compile(plan: RunPlan, model: GPT | CustomModel, notices: Notices) -> None:
    mode = plan.speed.compile
    if mode != "off":
        notices.follow(CompileWatch(mode).notices)
        any_shape = plan.base is not None or plan.documents_apart
        stages = len(plan.train.stages(plan.model.context))
        compile_model(model, mode, our_graphs=plan.speed.cuda_graphs, any_shape=any_shape, stages=stages)


def _optimizers(plan: RunPlan, trained: Trained, given: Given, world: World) -> Optimizers:
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
    rules = given.rules(own, trained.updated, rate_factors(plan.optim, plan.steps, plan.pace))
    if speed.sharded:
        check_slices(rules)
    return Optimizers(rules, trained.updated)


def _base_hash(plan: RunPlan, trained: Trained, *, weights: bool) -> str | None:
    """The hash of the weights under adapters, which get the values that `lora.init_from` names."""
    if trained.adapters is None:
        return None
    assert plan.base is not None, "adapters are for a model from elsewhere: checked by the config"
    base = base_fingerprint(plan.base.description)
    if plan.lora.init_from is not None and weights:
        continue_from(plan.lora.init_from, trained.adapters, base, plan.model.init_from)
    return base


def _notices(model: GPT | CustomModel, trained: Trained, given: Given, start: Start | None) -> Iterator[str]:
    """What is known of weights and adapters once they are there."""
    if start is not None:
        yield start.notice
    yield from given.notices(model)
    if (quantized := notice_of(model)) is not None:
        yield quantized
    if trained.adapters is not None:
        yield from needless_rank(trained.adapters.choices)
