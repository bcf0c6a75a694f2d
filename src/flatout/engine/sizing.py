"""The size of a preset with data and device at hand: how long, how often the data is read, whether tables fit.

Idea: a config is derived from its size before anything is open (`config/sizes.py`). Once the data has been counted and
the device is known, the same rules are asked again. What they say is a `Decision`: plain values, so that one process
can tell it to the others, and so that a run keeps it in its config: a resume decides nothing anew.

Contract: what the user wrote stays. Every value says where it comes from.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flatout.config.catalogue import hardware_for
from flatout.config.facts import field_facts, value_at
from flatout.config.load import ALTERNATIVES, LoadedConfig, with_layer, with_values
from flatout.config.schema import RunConfig
from flatout.config.sizes import (
    AUTO,
    DEFAULT_SIZE,
    FRESH_EPOCHS,
    LADDER,
    SMALL_VOCAB,
    Known,
    Shape,
    Sized,
    derive,
    reckoned,
    shape_of,
    usual_vocab,
)
from flatout.config.source import Setting, Source
from flatout.config.yaml_loader import format_value
from flatout.data.loader import check_length
from flatout.data.pack import Progress
from flatout.data.shard_data import shards_for
from flatout.device import Device
from flatout.engine.overlays import fitted_to

SMALL_CARD = 12e9  # bytes: below, value and bigram tables of a large vocabulary take too much of a card
CPU_MICRO_BATCH_TOKENS = 8192  # more are no faster there, and take memory
TABLES = ("model.value_tables", "model.bigram_rows")


@dataclass(frozen=True)
class Decision:
    """Settings by path, each with the words that say where it comes from, and lines for the user."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """As one process tells it to others."""
        return asdict(self)


def data_facts(loaded: LoadedConfig, progress: Progress | None) -> Known:
    """What is known of the data of a config, which is prepared now where it is not there yet."""
    config = loaded.config
    if config.data.streaming:
        return uncounted(config)
    context = config.model.context
    if loaded.size is not None and loaded.size.name == AUTO:  # a small shape may be chosen, with a short context
        context = written(loaded).get("model.context", LADDER[0].context)
    with shards_for(config.data, config.clean, progress) as dataset:
        if config.data.packing != "best_fit":
            check_length(dataset.train, context)
    return Known(vocab=config.model.vocab or dataset.tokenizer.vocab, unique=dataset.train.tokens)


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
    impossible = _impossible(loaded.config)
    values = {path: (value, where) for path, value in derived.size.items() if path not in impossible}
    notices: list[str] = []
    if derived.repeated:
        times = f"{derived.epochs:.1f} epochs"
        repeated = {path: value for path, value in derived.repeated.items() if path not in impossible}
        values |= {path: (value, times) for path, value in repeated.items()}
        told = ", ".join(
            f"{path}={format_value(value)}"
            for path, value in repeated.items()
            if not _by_user(loaded, path) and value_at(loaded.config, path) != value
        )
        notices.append(
            f"the data is read {derived.epochs:.1f} times, more than {FRESH_EPOCHS}: settings are those for repeated "
            f"data{told and f' ({told})'}"
        )
    left = [path for path in TABLES if values.get(path, (0, ""))[0] and not _by_user(loaded, path)]
    if left and is_small(device) and known.vocab > SMALL_VOCAB:
        values |= dict.fromkeys(left, (0, "small device"))
        notices.append(f"{device.name} is small for embedding tables: {', '.join(left)} left out")
    kept = {path: found for path, found in values.items() if not _by_user(loaded, path)}
    return Decision(kept, tuple(notices))


def _impossible(config: RunConfig) -> set[str]:
    """What would help with text that is read again, and does not go together with what the config has."""
    found = {"data.reshuffle": config.data.packing == "best_fit", "optim.head_decay": config.model.tied}
    return {path for path, cannot in found.items() if cannot}


def is_small(device: Device) -> bool:
    return device.kind != "cuda" or device.memory_bytes is None or device.memory_bytes < SMALL_CARD


def written(loaded: LoadedConfig) -> dict[str, Any]:
    """What the user wrote and rules reckon with, by path."""
    return reckoned({path: value_at(loaded.config, path) for path, source in loaded.sources.items() if source.by_user})


def sized(loaded: LoadedConfig, known: Known, device: Device) -> LoadedConfig:
    """A config as a run would have it with this data on this device, which may be elsewhere.

    What `train.minutes` leaves open waits for a measurement.
    """
    if loaded.size is None or loaded.config.train.minutes is not None:
        return loaded
    decision = decide(loaded, shape_named(loaded.size), known, device)
    return on_device(applied(loaded, decision.told()), device, sized=True)


def applied(loaded: LoadedConfig, decision: Mapping[str, Any]) -> LoadedConfig:
    """A config with a decision, as it was `told`; its size is settled then."""
    layer = {path: Setting(value, Source("size", where)) for path, (value, where) in decision["values"].items()}
    loaded = with_layer(loaded, layer, "size")
    return replace(loaded, size=None, notices=(*loaded.notices, *decision["notices"]))


def on_device(config: LoadedConfig, device: Device, *, sized: bool) -> LoadedConfig:
    """A preset with sizes fits the device by itself: micro-batch and checkpointing are those of the card's overlay."""
    if not sized:
        return config
    if device.kind == "cuda" and device.memory_bytes is not None:
        return fitted_to(config, hardware_for(device.memory_bytes))
    context, asked = config.config.model.context, ("speed.micro_batch", "speed.accumulation")
    few = max(1, CPU_MICRO_BATCH_TOKENS // context)
    if config.config.train.batch_tokens <= few * context or any(config.sources[path].by_user for path in asked):
        return config
    return with_values(config, {"speed.micro_batch": few, "speed.accumulation": None}, Source("size", device.name))


def as_before(loaded: LoadedConfig, stored: Mapping[str, Any]) -> LoadedConfig:
    """A config as it was decided when the run began that it resumes; what the user wrote stays.

    Without a size, that is the number of planned steps alone.
    """
    paths = ["train.steps"] if loaded.size is None else list(field_facts())
    values = {
        path: stored[section][name]
        for path in paths
        for section, name in [path.split(".", 1)]
        if not _is_replaced(loaded, path) and section != "output" and name in stored.get(section, {})
    }
    return replace(with_values(loaded, values, Source("size", "the run")), size=None)


def _is_replaced(loaded: LoadedConfig, path: str) -> bool:
    """Whether the user wrote this setting or one that takes its place. Steps are the plan of minutes, and stay."""
    group = next((group for group in ALTERNATIVES if path in group), ())
    given = [one for one in group if _by_user(loaded, one) and value_at(loaded.config, one) is not None]
    if path == "train.steps" and given == ["train.minutes"]:
        return False
    return bool(given) or _by_user(loaded, path)


def _by_user(loaded: LoadedConfig, path: str) -> bool:
    return loaded.sources[path].by_user
