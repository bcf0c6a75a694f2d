"""What would make a step fit that by its estimate does not: words for the command line, each reckoned through.

Three kinds, at most one of each: switches that leave what is learned as it is, a shorter context, and a hardware
overlay. The doctor's own ways (`diagnose/check_memory.py`) are for machines that may be elsewhere.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from flatout.config.catalogue import hardware_for, shipped_names
from flatout.config.load import LoadedConfig, with_hardware
from flatout.config.schema import RunConfig, micro_batch_of
from flatout.engine.features import Speed
from flatout.errors import ConfigError

_ROOM = 0.92  # of the memory may be taken: fragmentation and evaluation want the rest
_SHORTEST = 256  # tokens: a context below is another task
# The cheapest in time first.
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full"},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048, "optimizer_state": "8bit"},
)


def ways_to_fit(
    loaded: LoadedConfig | RunConfig, speed: Speed, need: Callable[[RunConfig, Speed], int], *, resumed: bool = False
) -> Iterator[str]:
    """`need` says how many bytes a step of a config takes with given switches. A `resumed` run keeps its context."""
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    have = speed.device.memory_bytes
    if have is None:
        return

    def fits(config: RunConfig, switches: Speed) -> str:
        """How much it takes, where that fits; nothing where it does not."""
        size = need(config, switches)
        return f"about {amount(size)}" if size <= _ROOM * have else ""

    yield from _by_switches(config, speed, fits)
    if not resumed:
        yield from _by_context(config, speed, fits)
    if isinstance(loaded, LoadedConfig):
        yield from _by_overlay(loaded, speed, fits, have, resumed=resumed)


def amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


Fits = Callable[[RunConfig, Speed], str]


def _by_switches(config: RunConfig, speed: Speed, fits: Fits) -> Iterator[str]:
    for saving in _SAVINGS:
        for size in _sizes(config, speed.micro_batch):
            found = fits(config, _switched(config, speed, size, saving))
            if found:
                words = [f"speed.{name}={value}" for name, value in saving.items()]
                yield f"{' '.join([*words, *_words_for(config, config.model.context, size)])} ({found})"
                return


def _by_context(config: RunConfig, speed: Speed, fits: Fits) -> Iterator[str]:
    context = config.model.context
    while context % 2 == 0 and context // 2 >= _SHORTEST:
        context //= 2
        freely = {"micro_batch": None, "accumulation": None}  # both are made to fit below
        try:
            shorter = _checked(config, {"model": {"context": context}, "speed": freely})
        except ValueError:  # windows' stride or scales of states that reach beyond it
            return
        for size in _sizes(shorter, speed.micro_batch):
            found = fits(shorter, _switched(shorter, speed, size, {}))
            if found:
                yield f"{' '.join([f'model.context={context}', *_words_for(config, context, size)])} ({found})"
                return


def _by_overlay(loaded: LoadedConfig, speed: Speed, fits: Fits, have: int, *, resumed: bool) -> Iterator[str]:
    """The largest overlay that is not above the memory, and with which it fits."""
    names = shipped_names("hardware")
    for name in reversed(names[: names.index(hardware_for(have)) + 1]):
        try:
            other = with_hardware(loaded, name)
        except ConfigError:
            continue
        if resumed and other.model.context != loaded.config.model.context:
            continue
        size, _ = micro_batch_of(other)
        found = fits(other, _switched(other, speed, size, {"checkpointing": other.speed.checkpointing}))
        if found:
            context = other.model.context
            shorter = f"model.context {context:,}, " if context < loaded.config.model.context else ""
            yield f"--hardware {name} ({shorter}{found})"
            return


def _words_for(config: RunConfig, context: int, size: int) -> list[str]:
    """What to write so that micro-batches have `size` sequences of `context` tokens; nothing where they have anyway."""
    speed, sequences = config.speed, config.train.batch_tokens // context
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
    sequences = config.train.batch_tokens // config.model.context
    size = most
    while size >= 1:
        if sequences % size == 0:
            yield size
        size //= 2


def _switched(config: RunConfig, speed: Speed, micro_batch: int, saving: dict[str, Any]) -> Speed:
    saving = dict(saving)
    state = saving.pop("optimizer_state", speed.optimizer_state)
    return dataclasses.replace(
        speed,
        micro_batch=micro_batch,
        accumulation=config.train.batch_tokens // config.model.context // micro_batch,
        execution=dataclasses.replace(speed.execution, **saving),
        optimizer_state=state,
    )


def _checked(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    values = config.model_dump()
    return RunConfig.model_validate({**values, **{name: {**values[name], **some} for name, some in changes.items()}})
