"""Whether a run fits its device and its disk: what a step needs, refusals with a way out, out of memory in words."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flatout.config.load import LoadedConfig
from flatout.config.schema import LoraConfig, RunConfig
from flatout.data.sample_loader import LargestRows
from flatout.data.training_data import TrainingData
from flatout.device import Device, is_out_of_memory
from flatout.engine.features import Speed
from flatout.engine.fitting import amount, ways_to_fit
from flatout.engine.run import delivery_of
from flatout.errors import DoesNotFitError, ResourceError
from flatout.files import readable_sizes
from flatout.model.count import FrozenModel, MemoryEstimate, estimate_memory
from flatout.optim.rules import state_bytes


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


def memory_on(
    data: TrainingData, config: RunConfig, vocab: int, speed: Speed, *, micro_batch: int | None = None
) -> MemoryEstimate:
    """What the largest step on this data needs."""
    return memory_of(config, vocab, speed, data.largest(delivery_of(speed, micro_batch or speed.micro_batch)))


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


def check_samples_fit(data: TrainingData, config: RunConfig, vocab: int, speed: Speed, memory: MemoryEstimate) -> None:
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
        least = memory_on(data, config, vocab, switches, micro_batch=size)
        if device.memory_bytes is not None and least.total <= device.memory_bytes:
            hint = way
            break
    raise _does_not_fit(memory, device, hint)


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
