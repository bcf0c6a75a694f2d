"""What a config leaves open until a run begins: the size of a preset, and the steps of a length in minutes."""

from dataclasses import replace

from flatout.api.configs import Config
from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, with_values
from flatout.config.sizes import AUTO, Known, usual_vocab
from flatout.config.source import Source
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.device import Device, detect_device, limit_memory
from flatout.engine.checkpoint import Checkpoint
from flatout.engine.overlays import fitted_to
from flatout.engine.sizing import Decision, applied, as_before, data_facts, decide, shape_named
from flatout.world import World

CPU_TOKENIZER = "bpe-1024"
CPU_MICRO_BATCH_TOKENS = 8192  # more are no faster there, and take memory


def settled(
    config: Config, resumed: Checkpoint | None, progress: Progress | None, arrays: Arrays | None, world: World
) -> Config:
    """A config with all that it leaves open decided: by data and device, by a measurement, or by the run it resumes.

    The first of several processes decides for all.
    """
    if not isinstance(config, LoadedConfig):
        return config
    train = config.config.train
    plans = train.minutes is not None and train.steps is None
    if (config.size is None and not plans) or config.config.chat.source is not None:  # a model that has a shape
        return config
    if resumed is not None:
        with world.together():
            return as_before(config, resumed.config)
    speed = config.config.speed
    with world.together():
        device = limit_memory(detect_device(speed.device, world.local), speed.memory_limit)
    config = config if arrays is not None else with_tokenizer(config, device)
    with world.together(), world.in_turns():
        known = replace(_known(config, progress, arrays), ranks=world.size)
    decision = Decision()
    with world.together():
        if world.first:
            decision = _decided(config, known, device, arrays)
    told = world.told(decision.told())
    with world.together():
        return on_device(applied(config, told), device, sized=config.size is not None)


def with_tokenizer(config: LoadedConfig, device: Device) -> LoadedConfig:
    """On a CPU a size that is chosen has a small vocabulary: a head of GPT-2's would take nearly all of the time."""
    data, path = config.config.data, "data.tokenizer"
    chosen = config.size is not None and config.size.name == AUTO and device.kind == "cpu"
    theirs = any(config.sources[name].by_user for name in (path, "data.folder", "model.vocab"))
    if not chosen or theirs or data.source is None or data.streaming or data.format == "tokens":
        return config
    notice = f"{data.tokenizer}'s vocabulary is large for a CPU: {path}={CPU_TOKENIZER}, learned from the text"
    config = with_values(config, {path: CPU_TOKENIZER}, Source("size", device.name))
    return replace(config, notices=(*config.notices, notice))


def _known(config: LoadedConfig, progress: Progress | None, arrays: Arrays | None) -> Known:
    if arrays is not None:
        return Known(vocab=config.config.model.vocab or usual_vocab(config.config.data.tokenizer))
    return data_facts(config, progress)


def _decided(config: LoadedConfig, known: Known, device: Device, arrays: Arrays | None) -> Decision:
    if config.config.train.minutes is not None and arrays is None:
        from flatout.tuning.minutes_probe import plan  # here: other runs measure nothing

        return plan(config, known, device)
    return Decision() if config.size is None else decide(config, shape_named(config.size), known, device)


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
