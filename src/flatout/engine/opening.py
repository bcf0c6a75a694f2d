"""The data that a config names, behind one protocol, and the model that comes with it where a run is fine-tuned."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from flatout.config.schema import LoraConfig, RunConfig
from flatout.config.source import IN_PYTHON, Source
from flatout.data.array_data import Arrays, open_arrays
from flatout.data.loader import windows_of
from flatout.data.pack import Progress
from flatout.data.positions import Schedule
from flatout.data.shard_data import ShardData, open_shards
from flatout.data.stream import open_stream
from flatout.data.stream_loader import StreamData
from flatout.data.training_data import DataFacts, TrainingData
from flatout.engine.adapter_folder import with_adapter
from flatout.engine.base_model import Base
from flatout.engine.fine_tuning import open_sample_data, with_described_model
from flatout.errors import ConfigError
from flatout.model.hub import Description

MOST_STEPS = 20_000_000  # the schedule is a table with one entry per step


@dataclasses.dataclass(frozen=True)
class Opened:
    """What was opened. `config` has the shape of the model, which is that of `base` where there is one."""

    config: RunConfig
    data: TrainingData
    base: Base | None = None


def open_data(
    config: RunConfig,
    sources: Mapping[str, Source],
    progress: Progress | None,
    *,
    begun: LoraConfig | None = None,
    arrays: Arrays | None = None,
) -> Opened:
    """`begun` is what the checkpoint of a resumed run says of adapters; `arrays` take the place of the data section."""
    if config.chat.source is not None and arrays is None:
        written = sources_of(sources)("model.context")
        base, samples = open_sample_data(config, progress, written=written, resumed=begun is not None)
        return Opened(described_config(config, base, sources, begun=begun), samples, base)
    schedule, seed, val_tokens = _schedule_of(config), config.train.seed, config.eval.tokens
    if arrays is not None:
        # Its own source is not what the run was trained on, and must not be what is resumed with.
        own = config.data.model_copy(update={"source": None, "folder": None})
        return Opened(config.model_copy(update={"data": own}), _open_arrays(config, sources, arrays))
    if config.data.streaming:
        _check_no_epoch_end(config, "a stream")
        stream = open_stream(config.data, config.clean, val_tokens=val_tokens, progress=progress)
        return Opened(config, StreamData(stream, schedule, seed=seed, val_tokens=val_tokens))
    dataset = open_shards(config.data, config.clean, progress)
    how = {"seed": seed, "best_fit": config.data.packing == "best_fit", "apart": config.documents_apart}
    context, stride = schedule.longest, config.data.stride or schedule.longest
    windows = windows_of(dataset.train, context=context, stride=stride, **how)
    return Opened(config, ShardData(dataset, windows, schedule, val_tokens))


def _open_arrays(config: RunConfig, sources: Mapping[str, Source], arrays: Arrays) -> TrainingData:
    """Refuses first what a config asks of text that is read from files."""
    data, source_of = config.data, sources_of(sources)
    asked = {"data.source": data.source, "data.folder": data.folder, "chat.source": config.chat.source}
    wrote = {path for path in asked if source_of(path).by_user and source_of(path).where} | {"chat.source"}
    named = next((path for path, value in asked.items() if value is not None and path in wrote), None)
    if named is not None:
        raise ConfigError(f"{named} is set, and train was given data=", f"leave out {named}, or data=")
    if data.streaming or (data.packing, data.stride, data.documents) != ("concat", None, "joined"):
        raise ConfigError(
            "arrays that are given to train are joined as they come",
            "set data.packing=concat, data.stride=null, data.documents=joined and data.streaming=false",
        )
    if config.train.epochs is not None:
        raise ConfigError("train.epochs is set, but how long an epoch of data= is, is not known", "set train.steps")
    _check_no_epoch_end(config, "data=")
    how = {"vocab": config.model.vocab, "seed": config.train.seed, "val_tokens": config.eval.tokens}
    return open_arrays(arrays, _schedule_of(config), data, **how)


def _check_no_epoch_end(config: RunConfig, what: str) -> None:
    if config.eval.epoch_end:
        raise ConfigError(f"eval.epoch_end is set, but where an epoch of {what} ends is not known", "set eval.every")


def _schedule_of(config: RunConfig) -> Schedule:
    """The table that a config asks for: one stage, for all presets today."""
    return Schedule.constant(config.train.batch_tokens // config.model.context, config.model.context)


def sources_of(sources: Mapping[str, Source]) -> Callable[[str], Source]:
    """Where the value of a field comes from; a config without sources was made in Python."""
    return lambda path: sources.get(path, IN_PYTHON)


def described_config(
    config: RunConfig, base: Base, sources: Mapping[str, Source], *, begun: LoraConfig | None = None
) -> RunConfig:
    """The config of a fine-tuning run with the shape of its model, and that of the adapter it resumes from."""
    _check_no_shape(config, base.description, sources)
    config = with_described_model(config, base)
    config = with_adapter(config, base.description, sources_of(sources), begun=begun)
    if not config.lora.rank:  # nothing of it is read, and what a preset says of it is not the run's
        config = config.model_copy(update={"lora": LoraConfig()})
    return config


def _check_no_shape(config: RunConfig, description: Description, sources: Mapping[str, Source]) -> None:
    """The shape of a model that is fine-tuned is its own: what a user wrote about it would go unread."""
    for path, source in sources.items():
        section, _, field = path.partition(".")
        if section != "model" or field in ("init_from", "context", "dropout") or not source.by_user:
            continue
        if getattr(config.model, field) != getattr(description.config, field):
            raise ConfigError(
                f"{source.prefix}{path} is set, but the model is that of {config.model.init_from}",
                f"leave {path} out; model.context is how much of a sample is read",
            )


def vocabulary_of(opened: Opened) -> int:
    """The ids that the model knows: those of its base, or at least those of the data's tokenizer."""
    if opened.base is not None:
        return opened.base.description.vocab
    asked, known = opened.config.model.vocab, opened.data.tokenizer.vocab
    if asked is not None and asked < known:
        raise ConfigError(
            f"model.vocab is {asked}, but the tokenizer of {opened.data.facts.place} has {known} ids",
            "leave model.vocab at null, or raise it",
        )
    return asked or known


def steps_of(config: RunConfig, facts: DataFacts) -> int:
    train = config.train
    if train.steps is not None:
        steps = train.steps
    elif facts.steps_per_epoch is not None:
        steps = math.ceil((train.epochs or 0) * facts.steps_per_epoch)
    elif train.tokens is not None:
        steps = _schedule_of(config).steps_until(-(-train.tokens // config.model.context))
    else:
        steps = _schedule_of(config).steps_until((train.epochs or 0) * (facts.windows or 0))
    if steps > MOST_STEPS:
        size = "train.batch_tokens" if facts.batch_samples is None else "chat.batch_samples"
        raise ConfigError(f"the run would have {steps:,} steps, more than {MOST_STEPS:,}", f"raise {size}")
    return steps
