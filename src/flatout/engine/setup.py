"""A config becomes the parts of a run, each built in order.

device -> data -> switches -> model -> optimizer -> step. Step, model, optimizer and kernels below see no `RunConfig`:
they get their own section or plain values.
"""

import dataclasses
import os

import torch

from flatout.config.load import LoadedConfig
from flatout.config.schema import LoraConfig, RunConfig
from flatout.config.unused import check_used
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.device import detect_device, limit_memory, use_expandable_segments
from flatout.engine.adapter_folder import adapter_at, stored_base
from flatout.engine.base_model import base_fingerprint
from flatout.engine.compiling import CompileWatch, compile_model, graphs_of_its_own
from flatout.engine.features import Speed, resolve_speed
from flatout.engine.fine_tuning import adapter_plan, build_described
from flatout.engine.first_notices import notices_on_config, notices_on_weights
from flatout.engine.fit_check import check_fits, check_samples_fit, memory_on, out_of_memory, ways
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.notices import Notices
from flatout.engine.opening import Opened, open_data, sources_of, steps_of, vocabulary_of
from flatout.engine.randomness import RandomStream
from flatout.engine.run import Run, delivery_of, device_scope
from flatout.engine.starting import Start, open_start
from flatout.engine.step import LossScale, TrainStep
from flatout.engine.trained import Trained, all_weights, only_adapters
from flatout.errors import CheckpointError, ConfigError
from flatout.model.adapter_files import load_into
from flatout.model.adapters import Adapters, attach
from flatout.model.count import MemoryEstimate, flops_per_token
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import Description
from flatout.model.quantize import check_quantizing, quantize_linears
from flatout.ops.attention import install_flash
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of


def setup_run(
    loaded: LoadedConfig | RunConfig,
    progress: Progress | None = None,
    *,
    begun: LoraConfig | None = None,
    arrays: Arrays | None = None,
) -> Run:
    """Builds a run with fresh weights. Resuming overwrites its state afterwards.

    `begun` is what the checkpoint to resume from says of adapters. Weights that `model.init_from` names are then not
    read where the checkpoint brings all of them. `arrays` are token arrays from Python instead of the config's data.
    """
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    sources = {} if isinstance(loaded, RunConfig) else loaded.sources
    if isinstance(loaded, LoadedConfig):
        check_used(loaded)
    if config.train.deterministic:  # cuBLAS reads this when it starts, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = limit_memory(detect_device(config.speed.device), config.speed.memory_limit)
    opened = open_data(config, sources, progress, begun=begun, arrays=arrays)
    config, data, vocab = opened.config, opened.data, vocabulary_of(opened)
    start = open_start(config.model, vocab, data.tokenizer) if begun is None and opened.base is None else None
    facts, source_of = data.facts, sources_of(sources)
    speed = resolve_speed(config, device, facts.corpus_bytes, source_of, vocab=vocab, step_tokens=facts.step_tokens)
    memory = _checked_memory(opened, loaded, vocab, speed, resumed=begun is not None)
    steps = steps_of(config, facts)
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch_device)  # the peak shown is this run's own
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    later = Notices()
    model = _build(opened, vocab, speed, later, start, weights=begun is None)
    adapters = _attach(model, config) if config.lora.rank else None
    base = None if adapters is None else _base_of(adapters, opened, weights=begun is None)
    trained = all_weights(model) if adapters is None else only_adapters(adapters)
    adapted = None if adapters is None else trained.count
    run = Run(
        config=config,
        speed=speed,
        data=data,
        schedule=data.schedule,
        model=model,
        trained=trained,
        adapters=adapters,
        step=_build_step(config, model, trained, speed, steps, later, adapters),
        random=RandomStream(config.train.seed, device.torch_device),
        steps=steps,
        flops_per_token=flops_per_token(config.model, vocab, facts.attended, adapters=adapted),
        memory=memory,
        notices=(
            *(loaded.notices if isinstance(loaded, LoadedConfig) else ()),
            *notices_on_config(config, steps, lambda path: source_of(path).by_user),
            *data.notices(delivery_of(speed, speed.micro_batch)),
            *notices_on_weights(config, model, adapters, start, weights=begun is None),
        ),
        new_notices=later,
        origin=opened.base,
        base=base,
    )
    run.evaluation()  # a validation split without a single target is an error now, not after the first steps
    return run


def with_speed(run: Run, config: RunConfig, speed: Speed) -> Run:
    """The same model and data under other switches, with a new optimizer; what was compiled stays compiled as it was.

    `config` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
    """
    if speed.compile != run.speed.compile or speed.device != run.speed.device:
        raise ValueError("another device or way of compiling needs another model")
    run.model.use(speed.execution)
    return dataclasses.replace(
        run,
        config=config,
        speed=speed,
        step=_build_step(config, run.model, run.trained, speed, run.steps, run.new_notices, run.adapters),
        memory=memory_on(run.data, config, run.model.vocab, speed),
    )


def _checked_memory(
    opened: Opened, loaded: LoadedConfig | RunConfig, vocab: int, speed: Speed, *, resumed: bool
) -> MemoryEstimate:
    """What a step needs; refused where the device cannot have it."""
    memory = memory_on(opened.data, opened.config, vocab, speed)
    if opened.base is None:
        check_fits(memory, speed.device, lambda: ways(loaded, vocab, speed, resumed=resumed))
    else:
        check_samples_fit(opened.data, opened.config, vocab, speed, memory)
    return memory


# --- the model --------------------------------------------------------------------------------------------------------


def _build(opened: Opened, vocab: int, speed: Speed, notices: Notices, start: Start | None, *, weights: bool) -> GPT:
    config, base = opened.config, opened.base
    if base is None:
        model = build_model(config.model, vocab, seed=config.train.seed, execution=speed.execution)
        if start is not None:
            start.fill(model)
        with out_of_memory():
            model.to(speed.device.torch_device)
    else:
        model = _build_described(config, base.description, speed, weights=weights)
    if speed.device.kind == "cuda":
        install_flash(speed.execution.attention)
    if speed.compile != "off":
        notices.follow(CompileWatch(speed.compile).notices)
        any_shape = base is not None or config.documents_apart
        compile_model(model, speed.compile, our_graphs=speed.cuda_graphs, any_shape=any_shape)
    return model


def _build_described(config: RunConfig, description: Description, speed: Speed, *, weights: bool) -> GPT:
    """A frozen model is held in the type of its products; one that is trained in fp32."""
    frozen = config.lora.rank > 0
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(speed.precision, torch.float32)
    description = dataclasses.replace(description, config=config.model)
    device, quantize = speed.device.torch_device, config.lora.quantize != "none"
    if quantize:
        check_quantizing(device)
    with out_of_memory():
        model = build_described(
            description,
            dtype=narrow if frozen else torch.float32,
            device=torch.device("cpu") if quantize else device,
            execution=speed.execution,
            weights=weights or frozen,
        )
        if quantize:
            quantize_linears(model, device)
    return model


def _attach(model: GPT, config: RunConfig) -> Adapters:
    try:
        return attach(model, adapter_plan(config.lora), config.train.seed)
    except ConfigError as error:
        raise ConfigError(f"lora.targets: {error.message}", error.hint) from error


def _base_of(adapters: Adapters, opened: Opened, *, weights: bool) -> str:
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


def _build_step(
    config: RunConfig,
    model: GPT,
    trained: Trained,
    speed: Speed,
    steps: int,
    notices: Notices,
    adapters: Adapters | None,
) -> TrainStep:
    device = speed.device.torch_device
    form = {"state": speed.optimizer_state, "offload": speed.optimizer_offload}
    rules = rules_of(config.optim, steps, fused=speed.fused_optimizer, **form)
    step = TrainStep(
        model,
        Optimizers(rules, trained.updated),
        clip=config.optim.clip,
        micro_batch=speed.micro_batch,
        label_smoothing=config.train.label_smoothing,
        loss_scale=LossScale.start(device) if speed.precision == "fp16" else None,
        keep_gradients=speed.cuda_graphs or graphs_of_its_own(speed.compile, our_graphs=speed.cuda_graphs),
        after_update=model.narrow.settle,
        clear_gradients=trained.clear_gradients,
        scope=lambda: device_scope(speed, config.train.deterministic),
    )
    _make_shapes_anew(step, model, speed, _recorded(step, model, speed, notices, adapters))
    return step


def _recorded(
    step: TrainStep, model: GPT, speed: Speed, notices: Notices, adapters: Adapters | None
) -> MicroBatchGraph | None:
    if not speed.cuda_graphs:
        return None
    derived = () if adapters is None else (adapters.forget,)
    recorder = Recorder(speed.device.torch_device)
    graph = MicroBatchGraph(step.forward_backward, model, notices, recorder, model.prepare, *derived)
    step.run_micro_batch = graph
    return graph


def _make_shapes_anew(step: TrainStep, model: GPT, speed: Speed, graph: MicroBatchGraph | None) -> None:
    """Tells a step what to do with what was made for one shape, or for one attention window."""

    def rebuild() -> None:
        model.narrow.drop()
        model.offload.drop()
        if graph is not None:
            graph.reset()
        if speed.compile != "off":
            torch._dynamo.reset()  # code for a shape that never comes again only holds memory

    current: int | None = None

    def use_window(window: int | None) -> None:
        nonlocal current
        if window != current:
            model.use_window(window)
            current = window
        if graph is not None:
            graph.window = window  # each window has recordings of its own

    step.rebuild, step.use_window = rebuild, use_window
