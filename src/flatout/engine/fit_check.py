"""Whether a run fits its device and its disk: what a step needs, refusals with a way out, out of memory in words.

Ways out are words for the command line, each reckoned through. Three kinds, at most one of each: switches that leave
what is learned as it is, a shorter context, and a hardware overlay. The doctor's own ways (`diagnose/check_memory.py`)
are for machines that may be elsewhere.
"""

import contextlib
import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flatout.config.catalogue import hardware_for, shipped_names
from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig, micro_batch_of, windows_of_steps
from flatout.data.training_data import TrainingData
from flatout.device import Device, is_out_of_memory
from flatout.engine.features import Speed
from flatout.engine.memory import memory_of
from flatout.engine.overlays import fitted_to
from flatout.engine.run import delivery_of
from flatout.errors import DoesNotFitError, ResourceError
from flatout.files import readable_sizes
from flatout.model.count import MemoryEstimate

ROOM = 0.92  # of the memory may be taken: fragmentation and evaluation want the rest
_SHORTEST = 256  # tokens: a context below is another task
# The cheapest in time first.
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full"},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048, "optimizer_state": "8bit"},
)


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


def check_samples_fit(data: TrainingData, config: RunConfig, vocab: int, speed: Speed, memory: MemoryEstimate) -> None:
    """Refuses samples that do not fit, with the first change that would make them fit."""
    device = speed.device
    if not _too_large(memory, device):
        return
    full = dataclasses.replace(speed, checkpointing="full")
    sizes = [size for size in (speed.micro_batch >> shift for shift in range(1, 40)) if size >= 1]
    tried = [(size, speed, f"set speed.micro_batch={size}; batch and loss stay the same") for size in sizes]
    tried.append((speed.micro_batch, full, "set speed.checkpointing=full"))
    tried += [(size, full, f"set speed.checkpointing=full and speed.micro_batch={size}") for size in sizes]
    for size, switches, way in tried:
        if memory_on(data, config, vocab, switches, micro_batch=size).total <= (device.memory_bytes or 0):
            raise _does_not_fit(memory, device, way)
    raise _does_not_fit(memory, device, "take a smaller model, a lower model.context or a card with more memory")


def fits_well(memory: MemoryEstimate, device: Device) -> bool:
    """Whether a step fits with room to spare."""
    return device.memory_bytes is None or memory.total <= ROOM * device.memory_bytes


def why_not(memory: MemoryEstimate, device: Device) -> str:
    """What a step needs and has, in short."""
    return f"a step needs about {_amount(memory.total)}, and {_amount(device.memory_bytes or 0)} are there"


def _too_large(memory: MemoryEstimate, device: Device) -> bool:
    # 15% beyond the card: the estimate may be that far off, and a wrong refusal is worse than a late one.
    return device.memory_bytes is not None and memory.total > 1.15 * device.memory_bytes


def _does_not_fit(memory: MemoryEstimate, device: Device, hint: str) -> DoesNotFitError:
    limited = "" if device.limit_bytes is None else " by speed.memory_limit"
    return DoesNotFitError(
        f"a step needs about {_amount(memory.total)}, {device.name} has {_amount(device.memory_bytes or 0)}{limited}",
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


# --- ways out ---------------------------------------------------------------------------------------------------------


def ways(loaded: LoadedConfig | RunConfig, vocab: int, speed: Speed, *, resumed: bool = False) -> Iterator[str]:
    """What would make a step of pretraining fit. A `resumed` run keeps its context."""
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    have = speed.device.memory_bytes
    if have is None:
        return

    def fits(config: RunConfig, switches: Speed) -> str:
        """How much it takes, where that fits; nothing where it does not."""
        size = memory_of(config, vocab, switches).total
        return f"about {_amount(size)}" if size <= ROOM * have else ""

    kept = ((config, saving, [f"speed.{name}={value}" for name, value in saving.items()]) for saving in _SAVINGS)
    yield from _first_fitting(kept, config, speed, fits)
    if not resumed:
        yield from _first_fitting(_shorter(config), config, speed, fits)
    if isinstance(loaded, LoadedConfig) and speed.device.kind == "cuda":  # overlays are worked out for cards
        yield from _by_overlay(loaded, speed, fits, have)


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


Fits = Callable[[RunConfig, Speed], str]
Change = tuple[RunConfig, dict[str, Any], list[str]]  # config, other switches, and both as words


def _first_fitting(changes: Iterable[Change], config: RunConfig, speed: Speed, fits: Fits) -> Iterator[str]:
    """The first change with which a step fits, in micro-batches that are as large as can be."""
    for changed, saving, words in changes:
        for size in _sizes(changed, speed.micro_batch):
            if found := fits(changed, _switched(changed, speed, size, saving)):
                yield f"{' '.join([*words, *_words_for(config, changed.model.context, size)])} ({found})"
                return


def _shorter(config: RunConfig) -> Iterator[Change]:
    context = config.model.context
    while context % 2 == 0 and context // 2 >= _SHORTEST:
        context //= 2
        values = config.model_dump()
        values["model"]["context"] = context
        values["speed"] |= {"micro_batch": None, "accumulation": None}  # both are made to fit
        try:
            yield RunConfig.model_validate(values), {}, [f"model.context={context}"]
        except ValueError:  # windows' stride or scales of states that reach beyond it
            return


def _by_overlay(loaded: LoadedConfig, speed: Speed, fits: Fits, have: int) -> Iterator[str]:
    """The largest overlay that is not above the memory, and with which it fits."""
    names = shipped_names("hardware")
    for name in reversed(names[: names.index(hardware_for(have)) + 1]):
        other = fitted_to(loaded, name).config
        size, _ = micro_batch_of(other)
        if found := fits(other, _switched(other, speed, size, {"checkpointing": other.speed.checkpointing})):
            yield f"--hardware {name} ({found})"
            return


def _words_for(config: RunConfig, context: int, size: int) -> list[str]:
    """What to write so that micro-batches have `size` sequences of `context` tokens; nothing where they have anyway."""
    speed, sequences = config.speed, math.gcd(*(batch // context for batch, _, _ in config.train.stages(context)))
    words = []
    if speed.accumulation is not None:
        count = sequences // size
        words += [f"speed.accumulation={count}"] if speed.accumulation != count else []
        words += [f"speed.micro_batch={size}"] if speed.micro_batch not in (None, size) else []
        return words
    most = min(speed.micro_batch or sequences, sequences)
    comes = next(other for other in range(most, 0, -1) if sequences % other == 0)
    return [] if comes == size else [f"speed.micro_batch={size}"]


def _sizes(config: RunConfig, most: int) -> Iterator[int]:
    """Micro-batches from `most` down, each about half of the one before, that divide the batch."""
    sequences = math.gcd(*windows_of_steps(config))
    size = most
    while size >= 1:
        if sequences % size == 0:
            yield size
        size //= 2


def _switched(config: RunConfig, speed: Speed, micro_batch: int, saving: dict[str, Any]) -> Speed:
    accumulation = max(windows_of_steps(config)) // micro_batch
    return dataclasses.replace(speed, micro_batch=micro_batch, accumulation=accumulation, **saving)
