"""A config becomes the parts of a run, each built in order.

device -> data -> switches -> model -> optimizer -> step. Step, model, optimizer and kernels below see no `RunConfig`:
they get their own section or plain values.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.config.load import LoadedConfig
from flatout.config.schema import OptimConfig, RunConfig
from flatout.config.source import Source
from flatout.config.unused import check_used, cut_pattern, wide_window
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.data.positions import Schedule
from flatout.device import detect_device, limit_memory, use_device, use_expandable_segments
from flatout.engine.adapter_folder import adapter_at, stored_base, stored_quantize
from flatout.engine.base_model import Start, base_fingerprint, build_base, open_start
from flatout.engine.case import product_type
from flatout.engine.checkpoint import Checkpoint
from flatout.engine.compiling import CompileWatch, compile_model, graphs_of_its_own
from flatout.engine.exportable import who_loads_it
from flatout.engine.features import Speed
from flatout.engine.fit_check import check_fits, check_samples_fit, memory_on, out_of_memory, ways
from flatout.engine.form import check_decided, in_slices, resolve_form
from flatout.engine.given import Given
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.length import deadline_of, optim_of, pace_of, schedule_of, steps_of, too_few_steps
from flatout.engine.notices import Notices
from flatout.engine.opening import Opened, check_shares, open_data, sources_of, vocabulary_of
from flatout.engine.randomness import RandomStream
from flatout.engine.run import Run, delivery_of, device_scope
from flatout.engine.step import LossScale, TrainStep
from flatout.engine.trained import Trained, adapter_plan, all_weights, only_adapters, training_flops
from flatout.engine.update_graph import record_updates
from flatout.errors import CheckpointError, ConfigError, many
from flatout.model.adapter_files import load_into
from flatout.model.adapter_targets import needless_rank
from flatout.model.adapters import Adapters, attach
from flatout.model.count import MemoryEstimate
from flatout.model.gpt import GPT, build_model, empty_model
from flatout.model.hub import Description
from flatout.model.quantize import check_quantizing, quantize_linears, quantized_base
from flatout.ops.attention import install_flash
from flatout.optim.average import Average
from flatout.optim.given import rules_with
from flatout.optim.optimizers import Optimizers, check_slices
from flatout.optim.rules import rules_of
from flatout.optim.schedule import Pace, rate_factors
from flatout.parallel.matrices import exchange_of
from flatout.parallel.reducer import reducer_of
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding


def setup_run(
    loaded: LoadedConfig | RunConfig,
    progress: Progress | None = None,
    *,
    resumed: Checkpoint | None = None,
    arrays: Arrays | None = None,
    given: Given | None = None,
    world: World | None = None,
) -> Run:
    """Builds a run with fresh weights, in one of the processes of `world`. Resuming overwrites its state afterwards.

    `resumed` is the checkpoint to resume from. Weights that `model.init_from` names are then not read where it brings
    all of them, and steps are counted from what it has read. `arrays` are token arrays from Python instead of the
    config's data, `given` other parts that come from there.
    """
    world, given = world or World(), given or Given()
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    sources = {} if isinstance(loaded, RunConfig) else loaded.sources
    with world.together():
        if isinstance(loaded, LoadedConfig):
            check_used(loaded)
        given.check(config)
        if config.train.deterministic:  # cuBLAS reads this when it starts, and torch insists on it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = limit_memory(detect_device(config.speed.device, world.local), config.speed.memory_limit)
        use_device(device.torch_device)
    with world.together(), world.in_turns():  # the first one prepares the data, and the others find it
        opened = open_data(config, sources, progress, resumed=resumed, arrays=arrays)
    check_shares(opened.data, world)
    before = None if resumed is None else resumed.state.get("threads")
    speed, memory = resolve_form(opened, sources_of(sources), device, world, given, before)
    check_decided(opened, speed, world, given, resumed)
    with world.together():
        prepared = _prepared(loaded, opened, speed, memory, given, fresh=resumed is None)
    sharding = None if not speed.sharded else in_slices(prepared.model, speed, world)
    with world.together():
        return _assembled(loaded, opened, sources, prepared, resumed, world, given, sharding)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A model whose weights are all there, and what was decided for it."""

    model: GPT
    speed: Speed
    memory: MemoryEstimate
    start: Start | None
    notices: Notices


def _prepared(
    loaded: LoadedConfig | RunConfig, opened: Opened, speed: Speed, memory: MemoryEstimate, given: Given, *, fresh: bool
) -> _Prepared:
    """The model on its device, or on the host where it is to be sharded."""
    config, vocab, device = opened.config, vocabulary_of(opened), speed.device
    start = open_start(config.model, vocab, opened.data.tokenizer) if fresh and opened.base is None else None
    if given.model is None:  # what another one needs nobody knows
        _check_memory(opened, loaded, vocab, speed, memory, resumed=not fresh)
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch_device)  # the peak shown is this run's own
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    notices = Notices()
    return _Prepared(_build(opened, vocab, speed, notices, start, given, weights=fresh), speed, memory, start, notices)


def _assembled(
    loaded: LoadedConfig | RunConfig,
    opened: Opened,
    sources: Mapping[str, Source],
    prepared: _Prepared,
    resumed: Checkpoint | None,
    world: World,
    given: Given,
    sharding: "Sharding | None",
) -> Run:
    """The run on data that is open, with a model that is built."""
    config, data, vocab, fresh = opened.config, opened.data, vocabulary_of(opened), resumed is None
    model, speed, memory, later = prepared.model, prepared.speed, prepared.memory, prepared.notices
    facts, source_of, device = data.facts, sources_of(sources), speed.device
    schedule = schedule_of(data, resumed)
    steps = steps_of(config, facts, schedule)
    optim = optim_of(config, facts, schedule, steps)
    deadline = deadline_of(config, optim, schedule, steps, resumed)
    adapters = _attach(model, config) if config.lora.rank else None
    base_hash = None if adapters is None else _base_hash(adapters, opened, weights=fresh)
    trained = all_weights(model, sharding) if adapters is None else only_adapters(adapters)
    run = Run(
        config=config,
        speed=speed,
        data=data,
        schedule=schedule,
        model=model,
        trained=trained,
        adapters=adapters,
        given=given,
        step=_build_step(
            config,
            model,
            trained,
            speed,
            _optimizers(optim, trained, speed, steps, pace_of(config, schedule, steps), given, world),
            later,
            world,
        ),
        random=RandomStream(config.train.seed, device.torch_device, world.rank),
        steps=steps,
        optim=optim,
        flops_per_token=given.flops(model, training_flops(config, vocab, facts.attended)),
        memory=memory,
        notices=(),
        new_notices=later,
        deadline=deadline,
        base=opened.base,
        base_hash=base_hash,
    )
    run.evaluation()  # a validation split without a single target is an error now, not after the first steps
    told = _notices(run, prepared.start, lambda path: source_of(path).by_user, weights=fresh)
    return dataclasses.replace(run, notices=(*(loaded.notices if isinstance(loaded, LoadedConfig) else ()), *told))


def with_speed(run: Run, config: RunConfig, speed: Speed) -> Run:
    """The same model and data under other switches, with a new optimizer; what was compiled stays compiled as it was.

    `config` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
    """
    if speed.compile != run.speed.compile or speed.device != run.speed.device:
        raise ValueError("another device or way of compiling needs another model")
    run.model.use(speed.execution)
    pace = pace_of(config, run.schedule, run.steps)
    optimizers = _optimizers(run.optim, run.trained, speed, run.steps, pace, run.given, run.world)
    return dataclasses.replace(
        run,
        config=config,
        speed=speed,
        step=_build_step(config, run.model, run.trained, speed, optimizers, run.new_notices, run.world),
        memory=memory_on(run.data, config, run.model.vocab, speed),
    )


def _check_memory(
    opened: Opened,
    loaded: LoadedConfig | RunConfig,
    vocab: int,
    speed: Speed,
    memory: MemoryEstimate,
    *,
    resumed: bool,
) -> None:
    """Refuses a step that the device cannot have."""
    if opened.base is None:
        check_fits(memory, speed.device, lambda: ways(loaded, vocab, speed, resumed=resumed))
    else:
        check_samples_fit(opened.data, opened.config, vocab, speed, memory)


# --- the model --------------------------------------------------------------------------------------------------------


def _build(
    opened: Opened, vocab: int, speed: Speed, notices: Notices, start: Start | None, given: Given, *, weights: bool
) -> GPT:
    config, base = opened.config, opened.base
    if base is None:
        model = build_model(config.model, vocab, seed=config.train.seed, execution=speed.execution)
        if start is not None:
            start.fill(model)
        model = given.adopted(model, speed, config.train.seed)
        with out_of_memory():
            model.to(_place_of(speed))
    else:
        model = _build_described(config, base.description, speed, weights=weights)
    if speed.device.kind == "cuda":
        install_flash(speed.execution.attention)
    if speed.compile != "off":
        notices.follow(CompileWatch(speed.compile).notices)
        any_shape = base is not None or config.documents_apart
        stages = len(config.train.stages(config.model.context))
        compile_model(model, speed.compile, our_graphs=speed.cuda_graphs, any_shape=any_shape, stages=stages)
    return model


def _place_of(speed: Speed) -> torch.device:
    """Where a model is built: where it stays, or on the host if every device is to have only a slice of it."""
    return torch.device("cpu") if speed.sharded else speed.device.torch_device


def _build_described(config: RunConfig, description: Description, speed: Speed, *, weights: bool) -> GPT:
    """A frozen model is held in the type of its products; one that is trained in fp32."""
    frozen = config.lora.rank > 0
    narrow = product_type(speed.precision)
    description = dataclasses.replace(description, config=config.model)
    device, quantize = _place_of(speed), config.lora.quantize != "none"
    if quantize:
        check_quantizing(device)
    how: dict[str, Any] = {"dtype": narrow if frozen else torch.float32, "execution": speed.execution}
    how["device"] = torch.device("cpu") if quantize else device
    with out_of_memory():
        if weights or frozen:
            model = build_base(description, **how)
        else:  # a checkpoint brings all of them
            model = empty_model(description.config, description.vocab, **how)
        if quantize:
            quantize_linears(model, device)
    return model


def _attach(model: GPT, config: RunConfig) -> Adapters:
    try:
        return attach(model, adapter_plan(config.lora), config.train.seed)
    except ConfigError as error:
        named = {"lora.ranks": config.lora.named_ranks, "lora.alphas": config.lora.named_alphas}
        words = set(error.message.split())
        where = next(
            (field for field, pairs in named.items() for name, _ in pairs if words & {name, repr(name)}),
            "lora.also" if "train" in error.message else "lora.targets",
        )
        raise ConfigError(f"{where}: {error.message}", error.hint) from error


def _base_hash(adapters: Adapters, opened: Opened, *, weights: bool) -> str:
    """The hash of the weights under adapters, which get the values that `lora.init_from` names."""
    assert opened.base is not None, "adapters are for a model from elsewhere: checked by the config"
    config, base = opened.config, base_fingerprint(opened.base.description)
    if config.lora.init_from is not None and weights:
        folder = adapter_at(config.lora.init_from)
        if stored_base(folder) not in (None, base):
            raise CheckpointError(
                f"the adapter in {folder} was trained on other weights than those of {config.model.init_from}",
                "set model.init_from to the model that it was trained on",
            )
        load_into(adapters, folder)
    return base


# --- the step ---------------------------------------------------------------------------------------------------------


def _optimizers(
    optim: OptimConfig, trained: Trained, speed: Speed, steps: int, pace: Pace | None, given: Given, world: World
) -> Optimizers:
    form = {"state": speed.optimizer_state, "offload": speed.optimizer_offload}
    exchange = exchange_of(world, trained.sharding)
    rules = rules_of(optim, steps, pace, fused=speed.fused_optimizer, exchange=exchange, **form)
    rules = rules_with(given.optimizer, rules, trained.updated, rate_factors(optim, steps, pace))
    if speed.sharded:
        check_slices(rules)
    return Optimizers(rules, trained.updated)


def _build_step(
    config: RunConfig,
    model: GPT,
    trained: Trained,
    speed: Speed,
    optimizers: Optimizers,
    notices: Notices,
    world: World,
) -> TrainStep:
    device = speed.device.torch_device
    step = TrainStep(
        model,
        optimizers,
        clip=config.optim.clip,
        micro_batch=speed.micro_batch,
        label_smoothing=config.train.label_smoothing,
        loss_scale=LossScale.start(device) if speed.precision == "fp16" else None,
        keep_gradients=speed.cuda_graphs or graphs_of_its_own(speed.compile, our_graphs=speed.cuda_graphs),
        after_update=model.narrow.settle,
        clear_gradients=trained.clear_gradients,
        average=Average(trained.updated, config.optim.ema) if config.optim.ema else None,
        scope=lambda: device_scope(speed, config.train.deterministic),
        world=world,
        reducer=trained.sharding
        or reducer_of(
            world,
            [one.parameter for one in trained.updated],
            in_place=trained.clear_gradients is not None,
            bf16=config.parallel.reduce == "bf16",
            replayed=speed.cuda_graphs,
        ),
    )
    graph = None
    if speed.cuda_graphs:
        recorder = Recorder(device)
        graph = MicroBatchGraph(step.forward_backward, model, notices, recorder, model.prepare, trained.forget)
        step.run_micro_batch = graph
        if world.size == 1:
            record_updates(optimizers, notices, recorder)

    def rebuild() -> None:
        """What was made for one shape goes."""
        model.narrow.drop()
        model.offload.drop()
        if graph is not None:
            graph.reset()
        for update in optimizers.recorded.values():
            update.reset()
        if speed.compile != "off":
            torch._dynamo.reset()  # code for a shape that never comes again only holds memory

    def use_window(window: int | None) -> None:
        model.use_window(window)
        if graph is not None:
            graph.window = window  # each window has recordings of its own

    step.rebuild, step.use_window = rebuild, use_window
    return step


# --- notices before the first step: settings and weights that are not what they may seem ------------------------------


def _notices(run: Run, start: Start | None, written: Callable[[str], bool], *, weights: bool) -> Iterator[str]:
    """`weights` is whether they come from elsewhere, and not from a checkpoint of the run."""
    yield from _notices_on_config(run.config, run.optim, run.steps, written)
    if run.config.train.staged and run.data.facts.batch_samples is None:
        yield _told_stages(run.schedule, run.steps)
    yield from run.data.notices(delivery_of(run.speed, run.speed.micro_batch))
    if weights and (few := too_few_steps(run.config, run.data.facts, run.steps, run.model.vocab)) is not None:
        yield few
    if start is not None:
        yield start.notice
    if weights and run.base is None and run.given.model is None and (limit := who_loads_it(run.config)) is not None:
        yield limit
    yield from run.given.notices(run.model)
    count, small, wide = quantized_base(run.model)
    if count:
        sizes = f"{small / 2**20:,.1f} MiB instead of {wide / 2**20:,.1f}"
        yield f"base: {count:,} weights of linear layers in 4 bits, {sizes}"
    if weights:
        yield from _notices_on_adapter(run.config)
    if run.adapters is not None:
        yield from needless_rank(run.adapters.choices)


def _notices_on_config(
    config: RunConfig, optim: OptimConfig, steps: int, written: Callable[[str], bool]
) -> Iterator[str]:
    """Settings that do not mean what they seem to. An interval of evaluation only where a user wrote it: a preset's is
    for its own length. One of saving always: whoever trusts in it loses the run."""
    yield from filter(None, (cut_pattern(config.model), wide_window(config.model)))
    if 0 < steps < optim.warmup_steps:
        told = "optim.warmup_steps" if config.optim.warmup is None else f"the warm-up of {config.optim.warmup}"
        yield (
            f"{told} is {optim.warmup_steps:,} and the run has {many(steps, 'step')}, so the warm-up is "
            f"cut to {steps:,}: the learning rate reaches its peak in the last step and never falls"
        )
    every, epochs = config.eval.every, config.eval.epoch_end
    if 0 < steps < every and written("eval.every"):
        which = "the ends of epochs and of the run are" if epochs else "the end is"
        yield f"eval.every {every} is never reached in {many(steps, 'step')}: only {which} evaluated"
    if 0 < steps < config.checkpoint.every and not (config.checkpoint.minutes or config.checkpoint.epochs):
        between = config.checkpoint.best and (0 < every < steps or epochs)
        which = "the end and each best so far are" if between else "the end is"
        often = config.checkpoint.every
        yield f"checkpoint.every {often} is never reached in {many(steps, 'step')}: only {which} saved"


def _told_stages(schedule: Schedule, steps: int) -> str:
    """Which steps each stage has, and what they read."""
    firsts = [stage.first_step for stage in schedule.stages]
    told = []
    for stage, end in zip(schedule.stages, [*firsts[1:], steps], strict=True):
        window = "" if stage.attention_window is None else f", window {stage.attention_window:,}"
        told.append(f"{stage.first_step + 1:,} to {end:,} of {stage.sequences:,} x {stage.length:,} tokens{window}")
    return f"stages: steps {'; '.join(told)}"


def _notices_on_adapter(config: RunConfig) -> Iterator[str]:
    """An adapter that training resumes from with its base in other bits works, and does not start where it was."""
    name, ours = config.lora.init_from, config.lora.quantize
    if config.lora.rank and name is not None and Path(name).is_dir():
        folder = adapter_at(name)
        theirs = stored_quantize(folder)
        if stored_base(folder) is not None and ours != theirs:
            yield (
                f"lora.init_from: the adapter was trained with lora.quantize={theirs}, and here it is {ours}, so the "
                "loss does not start where it ended"
            )
