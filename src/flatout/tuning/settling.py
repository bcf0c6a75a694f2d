"""What a config leaves open until a run begins: the size of a preset, and the steps of a length in minutes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import RunConfig
from flatout.config.sizes import Known
from flatout.config.source import Source
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.data.prepare import as_prepared, has_dataset
from flatout.device import Device, detect_device, limit_memory
from flatout.engine.checkpoint import Checkpoint
from flatout.engine.sizing import Decision, applied, as_before, data_facts, decide, on_device, shape_named, uncounted
from flatout.world import World

CPU_TOKENIZER = "bpe-1024"


def settled(
    config: LoadedConfig | RunConfig,
    resumed: Checkpoint | None,
    progress: Progress | None,
    arrays: Arrays | None,
    world: World,
) -> LoadedConfig | RunConfig:
    """A config with all that it leaves open decided: by data and device, by a measurement, or by the run it resumes.

    The first of several processes decides for all.
    """
    if not isinstance(config, LoadedConfig):
        return config
    train = config.config.train
    plans = train.minutes is not None and train.steps is None
    if config.config.chat.source is not None:  # a model that has a shape
        return config
    if resumed is not None or (config.size is None and not plans):
        with world.together():
            if resumed is not None and (config.size is not None or plans):
                config = as_before(config, resumed.config)
            return config if arrays is not None else as_prepared(config)
    with world.together():
        device = device_of(config, world)
        config = config if arrays is not None else as_prepared(with_tokenizer(config, device))
    with world.together(), world.in_turns():
        known = _known(config, progress, arrays)
    return settled_with(config, known, device, world, arrays, progress)


def settled_for_runs(loaded: LoadedConfig, notice: Callable[[str], None]) -> LoadedConfig:
    """A config of a preset with sizes as a run would have it, for several runs; `notice` is told what was settled."""
    before, config = len(loaded.notices), settled(loaded, None, None, None, World())
    assert isinstance(config, LoadedConfig)
    for message in config.notices[before:]:
        notice(message)
    return config


def device_of(config: LoadedConfig, world: World) -> Device:
    """What a process of a run trains on."""
    speed = config.config.speed
    return limit_memory(detect_device(speed.device, world.local), speed.memory_limit)


def settled_with(
    config: LoadedConfig,
    known: Known,
    device: Device,
    world: World,
    arrays: Arrays | None = None,
    progress: Progress | None = None,
) -> LoadedConfig:
    """The same where the data is known already."""
    known, decision = replace(known, ranks=world.size), Decision()
    with world.together():
        if world.first:
            decision = _decided(config, known, device, arrays, progress)
    told = world.told(decision.told())
    with world.together():
        return on_device(applied(config, told), device, sized=config.size is not None)


def with_tokenizer(config: LoadedConfig, device: Device) -> LoadedConfig:
    """On a CPU a run of some minutes has a small vocabulary: a head of GPT-2's would take nearly all of the time."""
    data, path = config.config.data, "data.tokenizer"
    chosen = config.size is not None and config.config.train.minutes is not None and device.kind == "cpu"
    theirs = any(config.sources[name].by_user for name in (path, "model.vocab"))
    if not chosen or theirs or data.source is None or data.streaming or data.format == "tokens":
        return config
    if data.folder is not None and has_dataset(Path(data.folder)):  # of a tokenizer that somebody has chosen
        return config
    notice = f"{data.tokenizer}'s vocabulary is large for a CPU: {path}={CPU_TOKENIZER}, learned from the text"
    config = with_values(config, {path: CPU_TOKENIZER}, Source("size", device.name))
    return replace(config, notices=(*config.notices, notice))


def _known(config: LoadedConfig, progress: Progress | None, arrays: Arrays | None) -> Known:
    if arrays is not None:
        return uncounted(config.config)
    return data_facts(config, progress)


def _decided(
    config: LoadedConfig, known: Known, device: Device, arrays: Arrays | None, progress: Progress | None
) -> Decision:
    if config.config.train.minutes is not None and arrays is None:
        from flatout.tuning.minutes_probe import plan  # here: other runs measure nothing

        return plan(config, known, device, progress)
    return Decision() if config.size is None else decide(config, shape_named(config.size), known, device)
