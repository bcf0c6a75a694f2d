"""What a step of a config needs on a device, by the estimate of `flatout.model.count`."""

from flatout.config.schema import RunConfig
from flatout.data.sample_loader import LargestRows
from flatout.engine.features import Speed
from flatout.engine.trained import state_of
from flatout.model.count import FrozenModel, LayerRow, MemoryEstimate, estimate_memory, layer_rows, parameter_count
from flatout.model.feature import Form


def memory_of(config: RunConfig, vocab: int, speed: Speed, rows: LargestRows | None = None) -> MemoryEstimate:
    """What a step of this config needs with these switches; `rows` is the most that packed samples fill."""
    lora = config.lora
    rank = max(lora.rank, *(rank for _, rank in lora.named_ranks), 0)
    kind = {"dora": lora.dora, "dropout": lora.dropout > 0, "quantized": lora.quantize != "none"}
    frozen = FrozenModel(rank=rank, also=frozenset(lora.also), **kind)
    row_tokens = config.model.context if config.documents_apart and config.model.attends else None
    return estimate_memory(
        config.model,
        vocab,
        micro_batch=speed.micro_batch if rows is None else rows.rows,
        half=speed.precision in ("bf16", "fp16"),
        compiled=speed.compile != "off",
        execution=speed.execution,
        state_bytes=state_of(config, speed, parameter_count(config.model, vocab)).device,
        accumulated=speed.accumulation > 1 or speed.parallel == "data",  # whose gradients stay in their buckets
        graphs=speed.cuda_graphs,
        frozen=frozen if lora.rank else None,
        row_tokens=row_tokens if rows is None else rows.row_tokens,
        labels=None if rows is None else rows.labels,
        shards=speed.shards,
    )


def layers_of(config: RunConfig, vocab: int, speed: Speed) -> tuple[LayerRow, ...]:
    """The model of a pretraining run by its layers, in a micro-batch under these switches."""
    half, compiled = speed.precision in ("bf16", "fp16"), speed.compile != "off"
    form = Form(half=half, compiled=compiled, execution=speed.execution, frozen=False)
    return layer_rows(config.model, vocab, speed.micro_batch * config.model.context, form)
