"""Whether a run fits its device and its disk: what a step needs, refusals with a way out.

Ways out are words for the command line, each checked by the same estimate: switches that leave what is learned as it
is, and a shorter context.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig, windows_of_steps
from flatout.data.batch import TrainingData
from flatout.device import Device
from flatout.errors import DoesNotFitError, ResourceError, in_gib
from flatout.finding import Status
from flatout.model.count import MemoryEstimate
from flatout.resolve.memory import memory_of
from flatout.resolve.plan import RunPlan
from flatout.resolve.switches import Speed
from flatout.rows import human_bytes

ROOM = 0.92  # of the memory may be taken: fragmentation and evaluation want the rest
_SLACK = 1.15  # times the device is refused: the estimate may be that far off, and a wrong refusal is worse
_SMALLER = "take a smaller model{}, a lower model.context or a device with more memory"
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
    return memory_of(config, vocab, speed, data.largest(speed.delivery(micro_batch)))


def check_fits(
    memory: MemoryEstimate, device: Device, ways: Callable[[], Iterable[str]] = lambda: (), *, shaped: bool = True
) -> None:
    """Refuses a step that cannot fit; `ways` are words with which it would. `shaped`: settings say the model's size."""
    if device.memory_bytes is None or fit_of(memory.total / _SLACK, device.memory_bytes) != "bad":
        return
    found, limited = list(ways()), "" if device.limit_bytes is None else " by speed.memory_limit"
    raise DoesNotFitError(
        f"a step needs about {in_gib(memory.total)}, {device.name} has {in_gib(device.memory_bytes)}{limited}",
        f"what fits: {'; or '.join(found)}; `flatout tune` finds the fastest" if found else smaller(shaped=shaped),
    )


def smaller(*, shaped: bool) -> str:
    """What is left to do where no switch makes a step fit."""
    return _SMALLER.format(" (model.layers, model.width)" if shaped else "")


def fit_of(need: float, have: float) -> Status:
    """How the bytes that a step needs fit the memory that it has."""
    return "ok" if need <= ROOM * have else "warn" if need <= have else "bad"


def fits_well(memory: MemoryEstimate, device: Device) -> bool:
    """Whether a step fits with room to spare."""
    return device.memory_bytes is None or fit_of(memory.total, device.memory_bytes) == "ok"


def why_not(memory: MemoryEstimate, device: Device) -> str:
    """What a step needs and has, in short."""
    return f"a step needs about {in_gib(memory.total)}, and {in_gib(device.memory_bytes or 0)} are there"


def check_disk(folder: Path, checkpoint: int, checkpoints: int, *, beside: int = 0, free: int | None = None) -> None:
    """Refuses to start where the checkpoints that will be on the disk at once cannot fit.

    `beside` are bytes of other files of the run, `free` what is known to be there.
    """
    need = checkpoints * checkpoint + beside
    free = shutil.disk_usage(folder).free if free is None else free
    if free < need:
        fewer = (free - beside) // checkpoint - BESIDE_KEPT
        keep = f", or set checkpoint.keep={fewer}" if fewer >= 1 else ""
        raise ResourceError(
            f"{folder} has {human_bytes(free)} free, {checkpoints} checkpoints need {human_bytes(need)}",
            f"free some space, or set output.folder to another disk{keep}",
        )


BESIDE_KEPT = 2  # checkpoints beside those that are kept: the best one, and the one that is being written


# --- ways out ---------------------------------------------------------------------------------------------------------

Change = tuple[RunConfig, dict[str, Any], list[str]]  # config, other switches, and both as words


def ways(plan: RunPlan, have: int, *, resumed: bool = False) -> Iterator[str]:
    """What would make a step fit the given bytes. A `resumed` run keeps its context, and so does a fine-tuned model."""
    config, text = plan.settings.config, plan.base is None
    kept = [(config, saving, [f"speed.{name}={value}" for name, value in saving.items()]) for saving in _SAVINGS]
    yield from _first_fitting(kept, plan, have)
    if text and not resumed:
        yield from _first_fitting(_shorter(config), plan, have)


def _first_fitting(changes: Iterable[Change], plan: RunPlan, have: int) -> Iterator[str]:
    """The first change with which a step fits, in micro-batches that are as large as can be."""
    room = ROOM if plan.base is None else 1.0  # samples are known one by one
    for config, saving, words in changes:
        sequences, size = _sequences(config), plan.speed.micro_batch
        while size >= 1:
            if sequences % size == 0 or config.fine_tunes:
                speed = _switched(config, plan.speed, size, saving)
                need = memory_on(plan.data, config, plan.vocab, speed).total
                if need <= room * have:
                    yield f"{' '.join([*words, *_words_for(plan, sequences, size)])} (about {in_gib(need)})"
                    return
            size //= 2


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


def _words_for(plan: RunPlan, sequences: int, size: int) -> list[str]:
    """What to write for micro-batches of `size`, of the `sequences` of a step."""
    words = [f"speed.micro_batch={size}"]
    if plan.settings.config.speed.accumulation is not None:
        words.append(f"speed.accumulation={sequences // size}")
    return words


def _sequences(config: RunConfig) -> int:
    """Sequences of a step, which every micro-batch has to divide; of samples as many as a step takes."""
    if config.fine_tunes:
        return config.chat.batch_samples
    context = config.model.context
    return math.gcd(*(batch // context for batch, _, _ in config.train.stages(context)))


def _switched(config: RunConfig, speed: Speed, micro_batch: int, saving: dict[str, Any]) -> Speed:
    accumulation = (config.chat.batch_samples if config.fine_tunes else max(windows_of_steps(config))) // micro_batch
    return dataclasses.replace(speed, micro_batch=micro_batch, accumulation=accumulation, **saving)
