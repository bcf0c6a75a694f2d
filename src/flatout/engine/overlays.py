"""Memory overlays (`--hardware 12gb`): micro-batch and checkpointing with which a model fits a card, by the estimate.

Idea: what fits depends on the model, so an overlay is a size of memory and not a list of values. Of the micro-batches
that divide the batch, the largest with which a step fits is taken; recomputation only where a single sequence does not
fit without.

Contract: nothing that is learned changes, nothing is raised above what the config has, and what the user wrote stays.
The card may be elsewhere: switches are decided as on a card where everything works, and a run on one where something
does not finds out by itself (`recovery.py`). Where nothing fits, the least is taken, and the run says what would.
Fine-tuning configs stay as they are, and say so: their model is not known before it is read.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from flatout.config.catalogue import gigabytes
from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import RunConfig, micro_batch_of, windows_of_steps
from flatout.config.sizes import usual_vocab
from flatout.config.source import DEFAULT, Source
from flatout.device import Device
from flatout.engine.case import Probes
from flatout.engine.features import resolve_speed
from flatout.engine.memory import memory_of

ROOM = 0.85  # of the card: CUDA itself, fragmentation and evaluation want the rest
_ALL_WORKS = Probes(
    attention=lambda *_, **__: None,
    picked=lambda *_, **__: None,
    documents=lambda *_, **__: None,
    compiler=lambda _: None,
    products=lambda: None,
    triton=lambda: True,
)


def fitted(loaded: LoadedConfig) -> LoadedConfig:
    """A config with the overlay that it names, if it names one."""
    return loaded if loaded.hardware is None else fitted_to(loaded, loaded.hardware)


def fitted_to(loaded: LoadedConfig, name: str) -> LoadedConfig:
    """A config with the overlay of that name."""
    loaded = dataclasses.replace(loaded, hardware=None)
    config, have = loaded.config, int(gigabytes(name) * 1e9)
    if config.chat.source is not None:
        said = (
            f"hardware {name} changes nothing in fine-tuning, whose model is not known before it is read: `flatout "
            "estimate` says what a step needs, `flatout tune` finds a micro-batch that fits"
        )
        return dataclasses.replace(loaded, notices=(*loaded.notices, said))
    changes: dict[str, Any] = {}
    for changes in _changes(loaded):
        changed = with_values(loaded, changes, Source("hardware", f"hardware {name}"))
        if _need(changed.config, have) <= ROOM * have:
            break
    return with_values(loaded, changes, Source("hardware", f"hardware {name}"))


def fits(loaded: LoadedConfig, name: str) -> bool:
    """Whether a step of a config fits a card of that overlay, by the estimate, with all that the overlay may change."""
    have = int(gigabytes(name) * 1e9)
    return _need(fitted_to(loaded, name).config, have) <= ROOM * have


def _changes(loaded: LoadedConfig) -> Iterator[dict[str, Any]]:
    """What may be changed, from nothing to all of it."""
    config, sources = loaded.config, loaded.sources
    own, _ = micro_batch_of(config)
    sequences = math.gcd(*windows_of_steps(config))
    sizes = [size for size in range(own, 0, -1) if sequences % size == 0]
    if any(sources[f"speed.{name}"].by_user for name in ("micro_batch", "accumulation")):
        sizes = [own]
    ways: list[dict[str, Any]] = [{}]
    if config.speed.checkpointing != "full" and not sources["speed.checkpointing"].by_user:
        ways.append({"speed.checkpointing": "full"})
    for way in ways:
        for size in sizes:
            yield way if size == own else {**way, "speed.micro_batch": size, "speed.accumulation": None}


def _need(config: RunConfig, have: int) -> int:
    """Bytes of a step on a card of this memory, by the estimate."""
    card = Device(torch_device=torch.device("cuda", 0), name="the overlay's card", memory_bytes=have, capability=(8, 0))
    spec = config.data.tokenizer
    vocab = config.model.vocab or usual_vocab(spec)
    plain = config.model_copy(update={"speed": config.speed.model_copy(update={"device": "auto"})})
    speed = resolve_speed(plain, card, None, lambda _: DEFAULT, vocab=vocab, probes=_ALL_WORKS)
    return memory_of(plain, vocab, speed).total
