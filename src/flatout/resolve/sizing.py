"""Settings that wait for data and device: what follows from the size of a preset, and what fits a card's memory.

Sizes: a config is derived from its size before anything is open (`config/sizes.py`). Once the data has been counted and
the device is known, the same rules are applied again. The result is a `Decision` of plain values: one process
broadcasts it to the others, and the run keeps it in its config, so that a resume decides nothing anew.

Overlays (`--hardware 12gb`): what fits depends on the model, so an overlay is a size of memory and not a list of
values. Of the micro-batches that divide the batch, the largest with which a step fits is taken; recomputation only
where a single sequence does not fit without. The card may be elsewhere: switches are decided as on a card where
everything works, and a run on one where something does not finds out by itself (`engine/recovery.py`). Where nothing
fits, the least is taken, and the run says what would. Fine-tuning configs stay as they are, and say so: their model is
not known before it is read.

Contract: what the user wrote stays, an overlay changes nothing that is learned, and every value says where it comes
from.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from flatout.config.catalogue import gigabytes, hardware_for
from flatout.config.facts import field_facts, value_at
from flatout.config.load import ALTERNATIVES, LoadedConfig, with_layer, with_values
from flatout.config.schema import RunConfig, micro_batch_of, windows_of_steps
from flatout.config.sizes import (
    AUTO,
    DEFAULT_SIZE,
    FRESH_EPOCHS,
    SMALL_VOCAB,
    Known,
    Shape,
    Sized,
    derive,
    rule_inputs,
    shape_of,
    usual_vocab,
)
from flatout.config.source import DEFAULT, Setting, Source
from flatout.device import Device
from flatout.resolve.case import Probes
from flatout.resolve.memory import memory_of
from flatout.resolve.switches import resolve_speed
from flatout.world import World

SMALL_CARD = 12e9  # bytes: below, value and bigram tables of a large vocabulary take too much of a card
CPU_MICRO_BATCH_TOKENS = 8192  # more are no faster there, and take memory
TABLES = ("model.value_tables", "model.bigram_rows")


@dataclass(frozen=True)
class Decision:
    """Settings by path, each with the words that say where it comes from, and lines for the user."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The decision as JSON values, to broadcast to other processes."""
        return asdict(self)


def uncounted(config: RunConfig) -> Known:
    """What is known without the data."""
    return Known(vocab=config.model.vocab or usual_vocab(config.data.tokenizer))


def shape_named(size: Sized) -> Shape:
    return shape_of(DEFAULT_SIZE if size.name == AUTO else size.name, "size")


def decide(loaded: LoadedConfig, shape: Shape, known: Known, device: Device) -> Decision:
    """What follows from a size for this data on this device."""
    size = loaded.size
    assert size is not None, "a config without a size has nothing to decide"
    derived = derive(size.preset, shape, written(loaded), known)
    where = f"size {shape.name}"
    impossible = {"optim.head_decay"} if loaded.config.model.tied else set[str]()
    values = {path: (value, where) for path, value in derived.size.items() if path not in impossible}
    notices: list[str] = []
    if derived.repeated:
        times = f"{derived.epochs:.1f} epochs"
        repeated = {path: value for path, value in derived.repeated.items() if path not in impossible}
        values |= {path: (value, times) for path, value in repeated.items()}
        notices.append(
            f"the data is read {derived.epochs:.1f} times, more than {FRESH_EPOCHS}: settings for repeated data"
        )
    left = [path for path in TABLES if values.get(path, (0, ""))[0] and not _by_user(loaded, path)]
    if left and is_small(device) and known.vocab > SMALL_VOCAB:
        values |= dict.fromkeys(left, (0, "small device"))
        notices.append(f"{device.name} is small for embedding tables: {', '.join(left)} left out")
    kept = {path: found for path, found in values.items() if not _by_user(loaded, path)}
    return Decision(kept, tuple(notices))


def is_small(device: Device) -> bool:
    return device.kind != "cuda" or device.memory_bytes is None or device.memory_bytes < SMALL_CARD


def written(loaded: LoadedConfig) -> dict[str, Any]:
    """The user's values that rules depend on, by path."""
    paths = (path for path, source in loaded.sources.items() if source.by_user)
    return rule_inputs({path: value_at(loaded.config, path) for path in paths})


def sized(asked: LoadedConfig, known: Known, device: Device, world: World | None = None) -> LoadedConfig:
    """Settings with what a size or an overlay leaves open until data and device are known, which may be elsewhere.

    The first of several processes decides for all.
    """
    asked = fitted(asked)
    train = asked.config.train
    if asked.size is None or asked.config.fine_tunes:  # a model that is fine-tuned has a shape
        return asked
    if train.minutes is not None and train.steps is None:  # what that leaves open waits for a measurement
        return asked
    world, decision = world or World(), Decision().as_dict()
    with world.fail_together():
        if world.first:
            known = replace(known, ranks=max(known.ranks, world.size))
            decision = decide(asked, shape_named(asked.size), known, device).as_dict()
    decision = world.broadcast(decision)
    with world.fail_together():
        return on_device(applied(asked, decision), device)


def applied(loaded: LoadedConfig, decision: Mapping[str, Any]) -> LoadedConfig:
    """The config with a decision (as `Decision.as_dict` gives it) applied, which no longer waits for its size."""
    layer = {path: Setting(value, Source("size", where)) for path, (value, where) in decision["values"].items()}
    loaded = with_layer(loaded, layer, "size")
    return replace(loaded, size=None, notices=(*loaded.notices, *decision["notices"]))


def on_device(config: LoadedConfig, device: Device) -> LoadedConfig:
    """A preset with sizes fits the device by itself: micro-batch and checkpointing are those of the card's overlay."""
    if device.kind == "cuda" and device.memory_bytes is not None:
        return fitted_to(config, hardware_for(device.memory_bytes))
    context, asked = config.config.model.context, ("speed.micro_batch", "speed.accumulation")
    few = max(1, CPU_MICRO_BATCH_TOKENS // context)
    if config.config.train.batch_tokens <= few * context or any(config.sources[path].by_user for path in asked):
        return config
    return with_values(config, {"speed.micro_batch": few, "speed.accumulation": None}, Source("size", device.name))


def as_before(loaded: LoadedConfig, stored: Mapping[str, Any]) -> LoadedConfig:
    """A config as it was decided when the run began that it resumes; what the user wrote stays.

    Without a size, that is the number of steps planned for a length in minutes.
    """
    train = loaded.config.train
    if loaded.config.fine_tunes or (loaded.size is None and not (train.minutes and train.steps is None)):
        return loaded
    paths = ["train.steps"] if loaded.size is None else list(field_facts())
    values = {
        path: stored[section][name]
        for path in paths
        for section, name in [path.split(".", 1)]
        if not _is_replaced(loaded, path) and section != "output" and name in stored.get(section, {})
    }
    hardware = loaded.hardware if loaded.size is None else None  # the run was made to fit when it began
    return replace(with_values(loaded, values, Source("size", "the run")), size=None, hardware=hardware)


def _is_replaced(loaded: LoadedConfig, path: str) -> bool:
    """Whether the user wrote this setting or one that takes its place. Steps are the plan of minutes, and stay."""
    group = next((group for group in ALTERNATIVES if path in group), ())
    given = [one for one in group if _by_user(loaded, one) and value_at(loaded.config, one) is not None]
    if path == "train.steps" and given == ["train.minutes"]:
        return False
    return bool(given) or _by_user(loaded, path)


def _by_user(loaded: LoadedConfig, path: str) -> bool:
    return loaded.sources[path].by_user


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
    if config.fine_tunes:
        notice = (
            f"hardware {name} changes nothing in fine-tuning, whose model is not known before it is read: `flatout "
            "estimate` says what a step needs, `flatout tune` finds a micro-batch that fits"
        )
        return dataclasses.replace(loaded, notices=(*loaded.notices, notice))
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
