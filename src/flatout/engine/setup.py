"""The one reader of the whole config: turns it into the parts of a run, each built in order.

device -> dataset -> switches -> model -> optimizer -> step -> loaders. Nothing below this file sees a `RunConfig`.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config.load import LoadedConfig
from flatout.config.schema import LoraConfig, RunConfig
from flatout.config.source import IN_PYTHON, Source
from flatout.config.unused import check_used, cut_pattern, wide_window
from flatout.corpus.sources import told_by_type
from flatout.data.best_fit import Packing
from flatout.data.inspect import read_report
from flatout.data.loader import Batch, DeviceLoader, HostLoader, evaluation_batches, pack_documents, window_order
from flatout.data.manifest import read_manifest
from flatout.data.pack import Progress
from flatout.data.prepare import check_complete, prepare_data
from flatout.data.sample_loader import (
    LargestRows,
    SampleLoader,
    SampleOrder,
    count_padding,
    largest_rows,
    sample_batches,
)
from flatout.data.sampler import WindowOrder
from flatout.data.samples import Samples
from flatout.data.shards import Dataset, Tokens, Verify, open_dataset
from flatout.data.stream import StreamDataset, open_stream
from flatout.data.stream_loader import StreamLoader, block_windows
from flatout.data.stream_parts import Position
from flatout.device import (
    Device,
    arithmetic,
    detect_device,
    is_out_of_memory,
    limit_memory,
    memory_limit,
    peak_memory_bytes,
    use_expandable_segments,
)
from flatout.engine.adapter_folder import adapter_at, files_beside, stored_base, stored_quantize, with_adapter
from flatout.engine.base_model import base_fingerprint
from flatout.engine.compiling import CompileWatch, compile_model, graphs_of_its_own
from flatout.engine.evaluate import tokens_per_byte
from flatout.engine.features import Speed, resolve_speed
from flatout.engine.fine_tuning import (
    SampleData,
    adapter_plan,
    build_described,
    open_sample_data,
    remarks_on_samples,
    with_described_model,
)
from flatout.engine.fitting import amount, ways_to_fit
from flatout.engine.graphs import MicroBatchGraph, Recorder
from flatout.engine.news import News
from flatout.engine.randomness import RandomStream
from flatout.engine.starting import Start, open_start
from flatout.engine.step import LossScale, TrainStep
from flatout.engine.trained import Trained, all_weights, only_adapters
from flatout.errors import CheckpointError, ConfigError, DoesNotFitError, ResourceError
from flatout.files import readable_sizes
from flatout.model.adapter_files import load_into
from flatout.model.adapter_targets import needless_rank
from flatout.model.adapters import Adapters, attach
from flatout.model.count import FrozenModel, MemoryEstimate, estimate_memory, flops_per_token
from flatout.model.gpt import GPT, build_model
from flatout.model.hub import Description
from flatout.model.quantize import check_quantizing, quantize_linears, quantized_base
from flatout.ops.attention import install_flash
from flatout.ops.documents import BY_BOUNDS
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of, state_bytes
from flatout.world import World

LARGE_CORPUS = 4 * 2**30  # bytes
MOST_STEPS = 20_000_000  # the schedule is a table with one entry per step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the loop needs. Tensors inside change as training goes on; the parts do not."""

    config: RunConfig
    speed: Speed
    dataset: Dataset | StreamDataset | SampleData
    model: GPT
    trained: Trained
    adapters: Adapters | None
    step: TrainStep
    random: RandomStream
    steps: int
    sequences: int
    order: WindowOrder | SampleOrder
    packing: Packing | None  # of the training documents, when data.packing is best_fit
    flops_per_token: float
    memory: MemoryEstimate
    notices: tuple[str, ...]
    news: News
    base: str | None = None  # hash of the frozen weights under adapters

    @property
    def world(self) -> World:
        return self.step.world

    @property
    def windows(self) -> int | None:
        """Training windows, each seen once per epoch; None where nobody has counted them, in a stream.

        Of samples it is what whole batches would hold, since the last batch of an epoch takes what is left.
        """
        if isinstance(self.order, SampleOrder):
            return self.order.steps_per_epoch * self.order.batch_samples
        return None if isinstance(self.dataset, StreamDataset) else self.order.windows

    @property
    def val(self) -> Tokens:
        return self.dataset.val

    @functools.cached_property
    def tokens_per_byte(self) -> float | None:
        """Of what evaluation foretells; None where bytes are not known, of samples."""
        return tokens_per_byte(self.val, self.dataset.tokenizer, apart=self.config.documents_apart)

    @functools.cached_property
    def files_beside(self) -> dict[str, bytes]:
        """What goes beside adapters in PEFT's folder. Read once: a tokenizer may be large, and the base may change."""
        data = self.dataset
        assert isinstance(data, SampleData)
        given = {"description": data.description, "template": data.template, "stops": data.stops}
        return files_beside(data.tokenizer, context=self.config.model.context, chat=True, **given)[0]

    def peak_memory_bytes(self) -> int:
        """Most memory held at once so far. What recordings hold is in no peak of torch's, and is there all the time."""
        device, graph = self.speed.device.torch_device, self.step.run_micro_batch
        peak = peak_memory_bytes(device)
        if isinstance(graph, MicroBatchGraph) and graph.held_bytes:
            peak = max(peak, torch.cuda.memory_allocated(device) + graph.held_bytes)
        return peak

    def batches(
        self, first_step: int, position: dict[str, Any] | None = None
    ) -> HostLoader | DeviceLoader | StreamLoader | SampleLoader:
        """The training batches from `first_step` to the end: a pure function of seed and step.

        `position` is what the checkpoint of that step says of a stream.
        """
        device = self.speed.device.torch_device
        span = {"first_step": first_step, "last_step": self.steps, "device": device}
        if isinstance(self.dataset, StreamDataset):
            context, seed = self.config.model.context, self.config.train.seed
            start = None if position is None else Position(**position)
            shape = {"batch_size": self.sequences, "context": context, "seed": seed}
            return StreamLoader(self.dataset.train, position=start, **shape, **span)
        if isinstance(self.dataset, SampleData):
            assert isinstance(self.order, SampleOrder)
            rows = {**rows_of(self.config, self.speed), "micro_batch": self.step.micro_batch}
            return SampleLoader(self.dataset.train.samples, self.order, workers=self.speed.workers, **rows, **span)
        assert isinstance(self.order, WindowOrder)
        shape = {"batch_size": self.sequences, "context": self.config.model.context, "stride": stride_of(self.config)}
        plan = {"packing": self.packing, **shape, **span}
        if self.config.documents_apart:
            plan |= {"apart": True, "micro_batch": self.step.micro_batch}
        if self.speed.loader == "device":
            return DeviceLoader(self.dataset.train, self.order, **plan)
        return HostLoader(self.dataset.train, self.order, workers=self.speed.workers, **plan)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """The validation set, in batches of a micro-batch unless told otherwise."""
        if isinstance(self.dataset, SampleData):
            return sample_batches(
                first_samples(self.dataset.val.samples, self.config.eval.tokens),
                batch_samples=batch_size or self.step.micro_batch,
                device=self.speed.device.torch_device,
                **rows_of(self.config, self.speed),
            )
        return evaluation_batches(
            self.val,
            context=self.config.model.context,
            batch_size=batch_size or self.step.micro_batch,
            device=self.speed.device.torch_device,
            most_tokens=self.config.eval.tokens,
            apart=self.config.documents_apart,
        )

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return device_scope(self.speed, self.config.train.deterministic)


@contextlib.contextmanager
def device_scope(speed: Speed, deterministic: bool) -> Iterator[None]:
    """torch's process-wide switches as a run wants them, for one piece of its work: arithmetic and memory limit."""
    with memory_limit(speed.device), arithmetic(speed.precision, deterministic, speed.device.torch_device):
        yield


def rows_of(config: RunConfig, speed: Speed) -> dict[str, Any]:
    """How samples share rows: for attention that goes by bounds, and for our kernels, there need be none."""
    joined = speed.execution.document_attention in BY_BOUNDS or speed.execution.kernels == "triton"
    return {"row_tokens": config.model.context, "packing": config.chat.packing, "joined": joined}


def step_tokens_of(dataset: Dataset | StreamDataset | SampleData, order: WindowOrder | SampleOrder) -> float | None:
    if isinstance(dataset, SampleData) and isinstance(order, SampleOrder):
        return dataset.train.tokens / order.steps_per_epoch
    return None


def stride_of(config: RunConfig) -> int:
    return config.data.stride or config.model.context


def setup_run(
    loaded: LoadedConfig | RunConfig,
    progress: Progress | None = None,
    *,
    begun: LoraConfig | None = None,
) -> Run:
    """Builds a run with fresh weights. Resuming overwrites its state afterwards.

    `begun` is what the checkpoint to go on from says of adapters. Weights that `model.init_from` names are then not
    read where the checkpoint brings all of them.
    """
    weights = begun is None
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    sources = {} if isinstance(loaded, RunConfig) else loaded.sources
    if isinstance(loaded, LoadedConfig):
        check_used(loaded)
    if config.train.deterministic:  # cuBLAS reads this when it starts, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = limit_memory(detect_device(config.speed.device), config.speed.memory_limit)
    dataset, remarks = _open_data(config, progress, sources, resumed=begun is not None)
    context, stride = config.model.context, stride_of(config)
    if isinstance(dataset, SampleData):
        config = described_config(config, dataset, sources, begun=begun)
        packing, corpus_bytes = None, None
        order = order_of(config, dataset)
    elif isinstance(dataset, StreamDataset):
        packing, corpus_bytes = None, None
        order = WindowOrder(block_windows(context), config.train.seed)
    else:
        packing = pack_documents(dataset.train, context) if config.data.packing == "best_fit" else None
        order = window_order(dataset.train, context=context, stride=stride, seed=config.train.seed, packing=packing)
        corpus_bytes = dataset.train.tokens * dataset.train.dtype.itemsize
    vocab = _vocabulary(config, dataset)
    fresh = weights and not isinstance(dataset, SampleData)
    start = open_start(config.model, vocab, dataset.tokenizer) if fresh else None
    speed = resolve_speed(
        config,
        device,
        corpus_bytes,
        lambda path: sources.get(path, IN_PYTHON),
        vocab=vocab,
        step_tokens=step_tokens_of(dataset, order),
    )
    if isinstance(dataset, SampleData):
        assert isinstance(order, SampleOrder)
        memory = memory_of_samples(config, dataset, order, speed)
        check_samples_fit(config, dataset, order, speed, memory)
    else:
        memory = memory_of(config, vocab, speed)
        check_fits(memory, device, lambda: ways(loaded, vocab, speed, resumed=begun is not None))
    steps = steps_of(config, order)
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch_device)  # the peak shown is this run's own
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    news = News()
    if isinstance(dataset, SampleData):
        model = _build_described(config, dataset.description, speed, news, weights=weights)
    else:
        model = _build(config, vocab, speed, news, start)
    adapters = _attach(model, config) if config.lora.rank else None
    base = None
    if adapters is not None and isinstance(dataset, SampleData):
        base = base_fingerprint(dataset.description)
        if config.lora.init_from is not None and weights:
            _take_over(adapters, config.lora.init_from, config.model.init_from or "", base)
    trained = all_weights(model) if adapters is None else only_adapters(adapters)
    step = _build_step(config, model, trained, speed, steps, news, adapters)
    run = Run(
        config=config,
        speed=speed,
        dataset=dataset,
        model=model,
        trained=trained,
        adapters=adapters,
        step=step,
        random=RandomStream(config.train.seed, device.torch_device),
        steps=steps,
        sequences=order.batch_samples if isinstance(order, SampleOrder) else config.train.batch_tokens // context,
        order=order,
        packing=packing,
        flops_per_token=_flops(config, dataset, vocab, trained),
        memory=memory,
        notices=(
            *(loaded.notices if isinstance(loaded, LoadedConfig) else ()),
            *_remarks(config, steps),
            *_remarks_on_intervals(config, steps, lambda path: sources.get(path, IN_PYTHON).by_user),
            *_remarks_on_batch(config, order),
            *remarks,
            *((start.remark,) if start is not None else ()),
            *_remarks_on_packing(packing),
            *_remarks_on_padding(config, dataset, order, speed),
            *_remarks_on_base(model),
            *(_remarks_on_adapter(config) if weights else ()),
            *(needless_rank(adapters.choices) if adapters is not None else ()),
        ),
        news=news,
        base=base,
    )
    run.evaluation()  # a validation split without a single target is told now, not after the first steps
    return run


def described_config(
    config: RunConfig, dataset: SampleData, sources: Mapping[str, Source], *, begun: LoraConfig | None = None
) -> RunConfig:
    """The config of a fine-tuning run with the shape of its model, and that of the adapter it goes on from."""
    _check_no_shape(config, dataset.description, sources)
    config = with_described_model(config, dataset.base)
    config = with_adapter(config, dataset.description, lambda path: sources.get(path, IN_PYTHON), begun=begun)
    if not config.lora.rank:  # nothing of it is read, and what a preset says of it is not the run's
        config = config.model_copy(update={"lora": LoraConfig()})
    return config


def order_of(config: RunConfig, dataset: SampleData) -> SampleOrder:
    samples = len(dataset.train.samples)
    return SampleOrder(samples, min(config.chat.batch_samples, samples), config.train.seed)  # a step has each once


def _flops(config: RunConfig, dataset: Dataset | StreamDataset | SampleData, vocab: int, trained: Trained) -> float:
    if isinstance(dataset, Dataset) and config.documents_apart:
        # As of samples below; a document that is longer than a window counts as pieces of a window and a rest.
        lengths = np.diff(dataset.train.document_starts().astype(np.int64), append=dataset.train.tokens)
        whole, rest = np.divmod(lengths, config.model.context)
        squares = whole.sum() * float(config.model.context) ** 2 + (rest.astype(float) ** 2).sum()
        return flops_per_token(config.model, vocab, float(squares / dataset.train.tokens))
    if not isinstance(dataset, SampleData):
        return flops_per_token(config.model, vocab)
    # A token attends inside its own sample: the mean length that a token finds itself in, not that of a row.
    lengths = dataset.train.samples.lengths.astype(float)
    context = float((lengths**2).sum() / lengths.sum())
    return flops_per_token(config.model, vocab, context, adapters=trained.count if config.lora.rank else None)


def _attach(model: GPT, config: RunConfig) -> Adapters:
    try:
        return attach(model, adapter_plan(config.lora), config.train.seed)
    except ConfigError as error:
        raise ConfigError(f"lora.targets: {error.message}", error.hint) from error


def _take_over(adapters: Adapters, name: str, model: str, base: str) -> None:
    folder = adapter_at(name)
    if stored_base(folder) not in (None, base):
        raise CheckpointError(
            f"the adapter in {folder} was trained on other weights than those of {model}",
            "set model.init_from to the model that it was trained on",
        )
    load_into(adapters, folder)


def with_speed(run: Run, config: RunConfig, speed: Speed) -> Run:
    """The same model and data under other switches, with a new optimizer; what was compiled stays compiled as it was.

    `config` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
    """
    if speed.compile != run.speed.compile or speed.device != run.speed.device:
        raise ValueError("another device or way of compiling needs another model")
    run.model.use(speed.execution)
    if isinstance(run.dataset, SampleData):
        assert isinstance(run.order, SampleOrder)
        memory = memory_of_samples(config, run.dataset, run.order, speed)
    else:
        memory = memory_of(config, run.model.vocab, speed)
    return dataclasses.replace(
        run,
        config=config,
        speed=speed,
        step=_build_step(config, run.model, run.trained, speed, run.steps, run.news, run.adapters),
        memory=memory,
    )


def _open_data(
    config: RunConfig, progress: Progress | None, sources: Mapping[str, Source], *, resumed: bool
) -> tuple[Dataset | StreamDataset | SampleData, tuple[str, ...]]:
    """The data that a config names, and what there is to say of it."""
    if config.chat.source is not None:
        written = sources.get("model.context", IN_PYTHON)
        samples = open_sample_data(config, progress, written=written, resumed=resumed)
        return samples, remarks_on_samples(samples)
    if config.data.streaming:
        if config.eval.epoch_end:
            raise ConfigError(
                "eval.epoch_end is set, but where an epoch of a stream ends is not known", "set eval.every"
            )
        stream = open_stream(config.data, config.clean, val_tokens=config.eval.tokens, progress=progress)
        return stream, stream.notices
    folder, fresh = prepare_data(config.data, config.clean, progress)
    if fresh:
        check_complete(folder)  # trained on only when asked again, with the losses known
    return open_dataset(folder, verify=_how_to_verify(folder)), tuple(_remarks_on_data(folder))


def _vocabulary(config: RunConfig, dataset: Dataset | StreamDataset | SampleData) -> int:
    if isinstance(dataset, SampleData):
        return dataset.description.vocab
    known = dataset.tokenizer.vocab
    if config.model.vocab is not None and config.model.vocab < known:
        raise ConfigError(
            f"model.vocab is {config.model.vocab}, but the tokenizer of {dataset.train.folder} has {known} ids",
            "leave model.vocab at null, or raise it",
        )
    return config.model.vocab or known


def steps_of(config: RunConfig, order: WindowOrder | SampleOrder) -> int:
    train, batch = config.train, config.train.batch_tokens // config.model.context
    if train.steps is not None:
        steps = train.steps
    elif isinstance(order, SampleOrder):
        steps = math.ceil((train.epochs or 0) * order.steps_per_epoch)
    elif train.tokens is not None:
        steps = -(-train.tokens // train.batch_tokens)
    else:
        steps = math.ceil((train.epochs or 0) * order.windows / batch)
    if steps > MOST_STEPS:
        size = "chat.batch_samples" if isinstance(order, SampleOrder) else "train.batch_tokens"
        raise ConfigError(f"the run would have {steps:,} steps, more than {MOST_STEPS:,}", f"raise {size}")
    return steps


def _build(config: RunConfig, vocab: int, speed: Speed, news: News, start: Start | None) -> GPT:
    model = build_model(
        config.model,
        vocab,
        seed=config.train.seed,
        execution=speed.execution,
    )
    if start is not None:
        start.fill(model)
    with out_of_memory():
        model.to(speed.device.torch_device)
    if speed.device.kind == "cuda":
        install_flash(speed.execution.attention)
    if speed.compile != "off":
        news.follow(CompileWatch(speed.compile).news)
        compile_model(model, speed.compile, our_graphs=speed.cuda_graphs, any_shape=config.documents_apart)
    return model


def _build_described(config: RunConfig, description: Description, speed: Speed, news: News, *, weights: bool) -> GPT:
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
    if speed.device.kind == "cuda":
        install_flash(speed.execution.attention)
    if speed.compile != "off":
        news.follow(CompileWatch(speed.compile).news)
        compile_model(model, speed.compile, our_graphs=speed.cuda_graphs, any_shape=True)
    return model


def _check_no_shape(config: RunConfig, description: Description, sources: Mapping[str, Source]) -> None:
    """The shape of a model that is fine-tuned is its own: what a user wrote about it would go unread."""
    for path, source in sources.items():
        section, _, field = path.partition(".")
        if section != "model" or field in ("init_from", "context", "dropout") or not source.by_user:
            continue
        if getattr(config.model, field) != getattr(description.config, field):
            raise ConfigError(
                f"{source.prefix}{path} is set, but the model is that of {config.model.init_from}",
                f"leave {path} out; model.context is how much of a sample is read",
            )


def first_samples(samples: Samples, most_tokens: int | None) -> Samples:
    """As many from the start as `most_tokens` hold, and at least one."""
    if most_tokens is None or most_tokens >= len(samples.tokens):
        return samples
    count = max(1, int((samples.offsets <= most_tokens).sum()) - 1)
    end = int(samples.offsets[count])
    return Samples(samples.tokens[:end], samples.labelled[:end], samples.offsets[: count + 1])


def _build_step(
    config: RunConfig,
    model: GPT,
    trained: Trained,
    speed: Speed,
    steps: int,
    news: News,
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
    graph = None
    if speed.cuda_graphs:
        derived = () if adapters is None else (adapters.forget,)
        graph = MicroBatchGraph(step.forward_backward, model, news, Recorder(device), model.prepare, *derived)
        step.run_micro_batch = graph

    def rebuild() -> None:
        model.narrow.drop()
        model.offload.drop()
        if graph is not None:
            graph.reset()
        if speed.compile != "off":
            torch._dynamo.reset()  # code for a shape that never comes again only holds memory

    step.rebuild = rebuild
    return step


def memory_of(config: RunConfig, vocab: int, speed: Speed, rows: LargestRows | None = None) -> MemoryEstimate:
    """What a step of this config needs with these switches; `rows` is the most that packed samples fill."""
    lora = config.lora
    row_tokens = config.model.context if config.documents_apart and config.model.attends else None
    return estimate_memory(
        config.model,
        vocab,
        micro_batch=speed.micro_batch if rows is None else rows.rows,
        half=speed.precision in ("bf16", "fp16"),
        compiled=speed.compile != "off",
        execution=speed.execution,
        state_bytes=state_bytes(config.optim, state=speed.optimizer_state, offload=speed.optimizer_offload).device,
        accumulated=speed.accumulation > 1,
        graphs=speed.cuda_graphs,
        frozen=_frozen(lora) if lora.rank else None,
        row_tokens=row_tokens if rows is None else rows.row_tokens,
        labels=None if rows is None else rows.labels,
    )


def _frozen(lora: LoraConfig) -> FrozenModel:
    return FrozenModel(rank=lora.rank, dora=lora.dora, dropout=lora.dropout > 0, quantized=lora.quantize != "none")


def memory_of_samples(
    config: RunConfig, dataset: SampleData, order: SampleOrder, speed: Speed, *, micro_batch: int | None = None
) -> MemoryEstimate:
    rows = largest_rows(
        dataset.train.samples,
        order,
        micro_batch=micro_batch or speed.micro_batch,
        **rows_of(config, speed),
    )
    return memory_of(config, dataset.description.vocab, speed, rows)


def check_samples_fit(
    config: RunConfig, dataset: SampleData, order: SampleOrder, speed: Speed, memory: MemoryEstimate
) -> None:
    """Refuses samples that do not fit, with the first change that would make them fit."""
    device = speed.device
    if not _too_large(memory, device):
        return
    full = dataclasses.replace(speed, execution=dataclasses.replace(speed.execution, checkpointing="full"))
    sizes = [size for size in (speed.micro_batch >> shift for shift in range(1, 40)) if size >= 1]
    tried = [(size, speed, f"set speed.micro_batch={size}; batch and loss stay the same") for size in sizes]
    tried.append((speed.micro_batch, full, "set speed.checkpointing=full"))
    tried += [(size, full, f"set speed.checkpointing=full and speed.micro_batch={size}") for size in sizes]
    hint = "take a smaller model, a lower model.context or a card with more memory"
    for size, switches, way in tried:
        least = memory_of_samples(config, dataset, order, switches, micro_batch=size)
        if device.memory_bytes is not None and least.total <= device.memory_bytes:
            hint = way
            break
    raise _does_not_fit(memory, device, hint)


def check_fits(memory: MemoryEstimate, device: Device, ways: Callable[[], Iterable[str]] = lambda: ()) -> None:
    """Refuses a step that cannot fit; `ways` are words with which it would."""
    if not _too_large(memory, device):
        return
    found = list(ways())
    hint = "take a smaller model (model.layers, model.width), a lower model.context or a device with more memory"
    if found:
        hint = f"what fits: {'; or '.join(found)}; `flatout tune` finds the fastest"
    raise _does_not_fit(memory, device, hint)


def ways(loaded: LoadedConfig | RunConfig, vocab: int, speed: Speed, *, resumed: bool = False) -> Iterator[str]:
    """What would make a step of pretraining fit."""

    def need(config: RunConfig, switches: Speed) -> int:
        return memory_of(config, vocab, switches).total

    return ways_to_fit(loaded, speed, need, resumed=resumed)


def _too_large(memory: MemoryEstimate, device: Device) -> bool:
    # 15% beyond the card: the estimate may be that far off, and a wrong refusal is worse than a late one.
    return device.memory_bytes is not None and memory.total > 1.15 * device.memory_bytes


def _does_not_fit(memory: MemoryEstimate, device: Device, hint: str) -> DoesNotFitError:
    limited = "" if device.limit_bytes is None else " by speed.memory_limit"
    return DoesNotFitError(
        f"a step needs about {amount(memory.total)}, {device.name} has {amount(device.memory_bytes or 0)}{limited}",
        hint,
    )


def check_disk(folder: Path, checkpoint: int, checkpoints: int) -> None:
    """Refuses to start where the checkpoints, of so many bytes each, that will lie there at once cannot fit."""
    need = checkpoints * checkpoint
    free = shutil.disk_usage(folder).free
    if free < need:
        has, needs = readable_sizes(free, need)
        raise ResourceError(
            f"{folder} has {has} free, {checkpoints} checkpoints need {needs}",
            "free some space, or set output.folder to another disk",
        )


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Turns the device running out of memory into an error with a way out."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise memory_error(error) from error


def memory_error(error: RuntimeError) -> ResourceError:
    return ResourceError(
        f"out of device memory: {first_sentence(error)}",
        "lower speed.micro_batch (the global batch stays), set speed.checkpointing=full, or let `flatout tune` find "
        "what fits",
    )


def first_sentence(error: RuntimeError) -> str:
    """What torch says of the failed allocation, without the advice that follows it."""
    text = re.sub(r"^\[enforce fail [^]]*\][ .]*", "", " ".join(str(error).split()))  # how the CPU's allocator begins
    tried = re.search(r"[Tt]ried to allocate [\d.]+ \w+", text)
    return text.partition(". ")[0].removesuffix(".") + (f", {tried.group().lower()}" if tried else "")


def _how_to_verify(folder: Path) -> Verify:
    """Small corpora are checked byte for byte at every start; hashing large ones would take minutes."""
    return "full" if sum(file.bytes for file in read_manifest(folder).files) <= LARGE_CORPUS else "sizes"


def _remarks_on_data(folder: Path) -> Iterator[str]:
    report = read_report(folder)
    if report is not None and report["passed_over"]:
        total = report["files"] + sum(report["passed_over"].values())
        yield (
            f"{folder} was prepared from {report['files']:,} of {total:,} files; passed over "
            f"{told_by_type(report['passed_over'])}"
        )
    if report is not None and report["problem_count"]:
        yield (
            f"{report['damaged']:,} of {report['records']:,} records of the source could not be used; "
            f"see {folder / 'problems.jsonl'}"
        )
    if _how_to_verify(folder) == "sizes":
        yield f"only the sizes of the shards in {folder} were checked; `flatout data verify` checks every byte"


def _remarks_on_batch(config: RunConfig, order: WindowOrder | SampleOrder) -> Iterator[str]:
    asked = config.chat.batch_samples
    if isinstance(order, SampleOrder) and order.batch_samples < asked:
        yield (
            f"chat.batch_samples is {asked:,} and there are {order.samples:,} samples to train on, so every step takes "
            "all of them once, and is an epoch"
        )


def _remarks_on_packing(packing: Packing | None) -> Iterator[str]:
    if packing is not None:
        share, alone = packing.padding, packing.remainder
        yield f"best fit: {packing.windows:,} windows, {share:.2%} padding, {alone:,} tokens without a pair"


def _remarks_on_base(model: GPT) -> Iterator[str]:
    base = quantized_base(model)
    if base is not None:
        yield (
            f"base: {base.weights:,} weights of linear layers in 4 bits, {base.bytes / 2**20:,.1f} MiB "
            f"instead of {base.wide_bytes / 2**20:,.1f}"
        )


def _remarks_on_adapter(config: RunConfig) -> Iterator[str]:
    """An adapter that is gone on from with its base in other bits still works, and does not start where it was."""
    name, ours = config.lora.init_from, config.lora.quantize
    if config.lora.rank and name is not None and Path(name).is_dir():
        folder = adapter_at(name)
        theirs = stored_quantize(folder)
        if stored_base(folder) is not None and ours != theirs:
            yield (
                f"lora.init_from: the adapter was trained with lora.quantize={theirs}, and here it is {ours}, so the "
                "loss does not start where it ended"
            )


def _remarks_on_padding(
    config: RunConfig,
    dataset: Dataset | StreamDataset | SampleData,
    order: WindowOrder | SampleOrder,
    speed: Speed,
) -> Iterator[str]:
    if isinstance(dataset, SampleData) and isinstance(order, SampleOrder):
        rows = {**rows_of(config, speed), "micro_batch": speed.micro_batch}
        padding = count_padding(dataset.train.samples, order, **rows)
        yield (
            f"samples: {padding.share:.1%} of what the device works on is padding, in {padding.shapes} "
            f"{'shape' if padding.shapes == 1 else 'shapes'} (counted over {padding.steps} "
            f"{'step' if padding.steps == 1 else 'steps'})"
        )


def _remarks(config: RunConfig, steps: int) -> Iterator[str]:
    yield from filter(None, (cut_pattern(config.model), wide_window(config.model)))
    if 0 < steps < config.optim.warmup_steps:
        yield (
            f"optim.warmup_steps is {config.optim.warmup_steps:,} and the run has {steps:,} steps, so the warm-up is "
            f"cut to {steps:,}: the learning rate reaches its peak in the last step and never falls"
        )


def _remarks_on_intervals(config: RunConfig, steps: int, written: Callable[[str], bool]) -> Iterator[str]:
    """Of intervals that a user wrote; those of presets are for their own length, and the doctor tells of them."""
    every, epochs = config.eval.every, config.eval.epoch_end
    if 0 < steps < every and written("eval.every"):
        which = "the ends of epochs and of the run are" if epochs else "the end is"
        yield f"eval.every {every} is never reached in {steps} steps: only {which} evaluated"
    if 0 < steps < config.checkpoint.every and written("checkpoint.every"):
        between = config.checkpoint.best and (0 < every < steps or epochs)
        which = "the end and each best so far are" if between else "the end is"
        yield f"checkpoint.every {config.checkpoint.every} is never reached in {steps} steps: only {which} saved"
