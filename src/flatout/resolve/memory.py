"""What a step of a config needs on a device, by the estimate of `flatout.model.count`."""

from flatout.checkpoints.base_and_adapter import adapter_plan
from flatout.config.schema import ModelConfig, OptimConfig, RunConfig, SpeedConfig
from flatout.data.batch import LargestRows
from flatout.errors import AdapterError, ConfigError
from flatout.model.adapter_targets import choose, targets_of
from flatout.model.count import (
    FrozenModel,
    LayerRow,
    MemoryEstimate,
    estimate_memory,
    flops_per_token,
    layer_rows,
    matrix_count,
    parameter_count,
)
from flatout.model.execution import Form
from flatout.model.gpt import empty_model
from flatout.optim.optimizers import StateBytes
from flatout.optim.rules import state_bytes
from flatout.resolve.switches import Speed

SMALL = 2**26  # bytes: such a checkpoint is on the disk sooner than a process has started


def memory_of(config: RunConfig, vocab: int, speed: Speed, rows: LargestRows | None = None) -> MemoryEstimate:
    """What a step of this config needs with these switches; `rows` is the most that packed samples fill."""
    lora = config.lora
    rank = max(lora.rank, *(rank for _, rank in lora.named_ranks), 0)
    kind = {"dora": lora.dora, "dropout": lora.dropout > 0, "quantized": lora.quantize != "none"}
    frozen = FrozenModel(rank=rank, **kind)
    row_tokens = config.model.context if config.documents_apart and config.model.attends else None
    return estimate_memory(
        config.model,
        vocab,
        micro_batch=speed.micro_batch if rows is None else rows.rows,
        half=speed.precision in ("bf16", "fp16"),
        compiled=speed.compile != "off",
        execution=speed.execution,
        state_bytes=state_of(config.model, config.optim, speed, parameter_count(config.model, vocab)).device,
        accumulated=speed.accumulation > 1 or speed.parallel == "data",  # whose gradients stay in their buckets
        graphs=speed.cuda_graphs,
        frozen=frozen if lora.rank else None,
        row_tokens=row_tokens if rows is None else rows.row_tokens,
        labels=None if rows is None else rows.labels,
        shards=speed.shards,
    )


def layers_of(model: ModelConfig, vocab: int, speed: Speed) -> tuple[LayerRow, ...]:
    """The model of a pretraining run by its layers, in a micro-batch under these switches."""
    half, compiled = speed.precision in ("bf16", "fp16"), speed.compile != "off"
    form = Form(half=half, compiled=compiled, execution=speed.execution, frozen=False)
    return layer_rows(model, vocab, speed.micro_batch * model.context, form)


def trained_count(config: RunConfig, vocab: int) -> int:
    """The values that a run trains: all of its model, or its adapters."""
    if not config.lora.rank:
        return parameter_count(config.model, vocab)
    try:
        plan, model = adapter_plan(config.lora), empty_model(config.model, vocab, device="meta")
        choices = choose(plan, targets_of(model))
    except AdapterError as error:
        raise ConfigError(error.what, error.hint, where=error.setting, setting=error.setting) from error
    adapters = sum(choice.rank * (choice.target.rows + choice.target.inputs) for choice in choices)
    magnitudes = sum(choice.target.rows for choice in choices) if plan.dora else 0
    return adapters + magnitudes


def training_flops(config: RunConfig, vocab: int, attended: float | None) -> float:
    """FLOPs of one training token, by what the run trains. `attended` is the length that a token attends to."""
    if not config.lora.rank:
        return flops_per_token(config.model, vocab, attended)
    return flops_per_token(config.model, vocab, attended, adapters=trained_count(config, vocab))


def checkpoint_size(parameters: int, model: ModelConfig, optim: OptimConfig, speed: Speed | SpeedConfig) -> int:
    """Bytes of a checkpoint with this number of trained parameters: fp32 weights, and what optimizers keep of them."""
    return int((4 + state_of(model, optim, speed, parameters).checkpoint) * parameters)


def state_of(model: ModelConfig, optim: OptimConfig, speed: Speed | SpeedConfig, parameters: int) -> StateBytes:
    """Bytes of optimizer state per trained parameter."""
    matrices = min(1.0, matrix_count(model) / parameters)
    how = {"state": speed.optimizer_state, "offload": speed.optimizer_offload}
    return state_bytes(optim, matrices=matrices, **how)
