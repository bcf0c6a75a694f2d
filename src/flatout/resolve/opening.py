"""The data that settings name, behind one protocol, and the model that comes with it where a run is fine-tuned.

Each kind of data is a row of `KINDS`; nothing else asks how a kind is opened.

A fine-tuning run is made of a model from elsewhere, and samples in its own language. The model section of the config
gives way to what the model's folder says; only the context is the run's own, since it is how much of a sample is read.
Everything after that (step, loop, checkpoints, records) is what pretraining has.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from flatout.checkpoints.base_and_adapter import Base, Start, open_base, open_start, with_adapter
from flatout.checkpoints.checkpoint import Checkpoint
from flatout.config.load import LoadedConfig, resolve_from_mapping, with_values
from flatout.config.schema import LoraConfig, RunConfig
from flatout.config.sizes import AUTO, LADDER, Known
from flatout.config.source import IN_PYTHON, Source
from flatout.config.unused import check_used
from flatout.data.array_data import Arrays, open_arrays
from flatout.data.batch import TrainingData, check_evaluable
from flatout.data.chat_template import ChatTemplate, stops_of
from flatout.data.pack import Progress
from flatout.data.plan import limits_of
from flatout.data.prepare import as_prepared, has_dataset
from flatout.data.sample_data import SampleData
from flatout.data.samples import SampleRequest, prepare_samples, why_made
from flatout.data.shard_data import PreparedShards, ShardData, check_length, prepared_shards, windows_of
from flatout.data.stream import StreamData, open_stream
from flatout.device import Device
from flatout.errors import CheckpointError, ConfigError, DataError, UnevenError, UsageError
from flatout.finding import Check, Finding
from flatout.model.hub import Description
from flatout.resolve.length import asked_schedule
from flatout.resolve.sizing import uncounted, written
from flatout.world import World

CPU_TOKENIZER = "bpe-1024"


@dataclasses.dataclass(frozen=True)
class Opened:
    """What was opened. `settings` have the shape of the model, which is that of `base` where there is one."""

    settings: LoadedConfig
    data: TrainingData
    base: Base | None = None


class DataSource:
    """What a run is asked for: settings, the data that they name, and the device on which it is read.

    Text is prepared and opened when it is first asked for. `asked` are the settings with those that the data brings: a
    folder of shards keeps what it was prepared with. Settings that a user wrote for another kind of run are refused
    first. `arrays` take the place of the config's data, `resumed` is the checkpoint that the run goes on from. `again`
    is for the data of a run that has ended, to evaluate on it: text is not prepared anew then.
    """

    def __init__(
        self,
        asked: LoadedConfig,
        device: Device,
        progress: Progress | None = None,
        *,
        arrays: Arrays | None = None,
        resumed: Checkpoint | None = None,
        again: bool = False,
    ) -> None:
        check_used(asked)
        if arrays is None and resumed is None:
            asked = with_tokenizer(asked, device)
        self.asked = asked if arrays is not None or again else as_prepared(asked)
        self.device, self.arrays, self.resumed, self.progress, self.again = device, arrays, resumed, progress, again

    @property
    def kind(self) -> "Kind":
        return KINDS["arrays" if self.arrays is not None else self.asked.config.data_kind]

    @functools.cached_property
    def shards(self) -> PreparedShards:
        """The dataset of text that is prepared."""
        config = self.asked.config
        return prepared_shards(config.data, config.clean, self.progress, again=self.again)

    def from_start(self) -> Self:
        """The same for a run that begins anew."""
        other = copy.copy(self)
        other.resumed = None
        return other

    def with_settings(self, asked: LoadedConfig) -> Self:
        """The same data and device under other settings."""
        other = copy.copy(self)
        other.asked = asked
        return other

    def known(self) -> Known:
        """What size rules know of it."""
        return self.kind.known(self)

    def open(self, settings: LoadedConfig) -> Opened:
        """The data as these settings have it read."""
        return self.kind.open(self, settings)

    def start(self, opened: Opened, vocab: int) -> Start | None:
        """The weights that pretraining begins with; a checkpoint that is resumed brings its own."""
        if opened.base is not None or self.resumed is not None:
            return None
        return open_start(opened.settings.config.model, vocab, opened.data.tokenizer)


def with_tokenizer(asked: LoadedConfig, device: Device) -> LoadedConfig:
    """On a CPU a run of some minutes has a small vocabulary: a head of GPT-2's would take nearly all of the time."""
    data, path = asked.config.data, "data.tokenizer"
    chosen = asked.size is not None and asked.config.train.minutes is not None and device.kind == "cpu"
    theirs = any(asked.sources[name].by_user for name in (path, "model.vocab"))
    if not chosen or theirs or data.source is None or asked.config.data_kind != "text" or data.format == "tokens":
        return asked
    if data.folder is not None and has_dataset(Path(data.folder)):  # which has its own tokenizer
        return asked
    notice = f"{path}={CPU_TOKENIZER}, learned from the text: {data.tokenizer}'s vocabulary is large for a CPU"
    asked = with_values(asked, {path: CPU_TOKENIZER}, Source("size", device.name))
    return dataclasses.replace(asked, notices=(*asked.notices, notice))


def _with_section(settings: LoadedConfig, **sections: Any) -> LoadedConfig:
    return dataclasses.replace(settings, config=settings.config.model_copy(update=sections))


# --- the kinds --------------------------------------------------------------------------------------------------------


def _open_text(source: DataSource, settings: LoadedConfig) -> Opened:
    config, dataset, context = settings.config, source.shards.dataset, settings.config.model.context
    apart = config.documents_apart
    if source.again:
        return Opened(settings, ShardData(dataset, None, asked_schedule(config), apart=apart))
    with source.shards.kept_if_used():
        check_evaluable(dataset.val)
        windows = windows_of(
            dataset.train,
            context=context,
            stride=config.data.stride or context,
            seed=config.train.seed,
            best_fit=config.data.packing == "best_fit",
            apart=apart,
            reshuffle=config.data.packing == "reshuffle",
        )
    return Opened(settings, ShardData(dataset, windows, asked_schedule(config, windows.order.windows), apart=apart))


def _known_text(source: DataSource) -> Known:
    config, dataset = source.asked.config, source.shards.dataset
    context = config.model.context
    if source.asked.size is not None and source.asked.size.name == AUTO:  # a small shape may come, with a short context
        context = written(source.asked).get("model.context", LADDER[0].context)
    with source.shards.kept_if_used():
        if config.data.packing != "best_fit":
            check_length(dataset.train, context)
    return Known(vocab=config.model.vocab or dataset.tokenizer.vocab, unique=dataset.train.tokens)


def _open_stream(source: DataSource, settings: LoadedConfig) -> Opened:
    config = settings.config
    _check_no_epoch_end(config, "a stream")
    stream = open_stream(config.data, config.clean, val_tokens=config.eval.tokens, progress=source.progress)
    return Opened(settings, StreamData(stream, asked_schedule(config), seed=config.train.seed))


def _open_samples(source: DataSource, settings: LoadedConfig) -> Opened:
    config, at, resumed = settings.config, settings.sources["model.context"], source.resumed
    try:
        base, samples = open_sample_data(config, source.progress, written=at, resumed=resumed is not None)
    except (DataError, CheckpointError) as error:
        named = [name for name in (config.chat.source, config.chat.val_source) if name is not None]
        if not source.again or (isinstance(error, DataError) and all(Path(name).exists() for name in named)):
            raise
        raise DataError(
            f"the samples of the run cannot be made here: {error.message}",
            "call this from the folder that the run was trained in, or name its samples with --data FOLDER: "
            f"they are in {samples_folder(config)} there",
        ) from error
    if source.again:
        return Opened(settings, samples, base)
    begun = None if resumed is None else resolve_from_mapping(resumed.config).lora
    return Opened(described(settings, base, begun=begun), samples, base)


def _open_arrays(source: DataSource, settings: LoadedConfig) -> Opened:
    """Refuses first what a config asks of text that is read from files."""
    assert source.arrays is not None, "they came from Python"
    config, source_of = settings.config, settings.sources.__getitem__
    data = config.data
    asked = {"data.source": data.source, "data.folder": data.folder, "chat.source": config.chat.source}
    wrote = {path for path in asked if source_of(path).by_user and source_of(path).where} | {"chat.source"}
    named = next((path for path, value in asked.items() if value is not None and path in wrote), None)
    if named is not None:
        raise ConfigError(f"{named} is set, and train was given data=", f"leave out {named}, or data=")
    of_text = (data.packing, data.stride, data.documents) != ("concat", None, "joined")
    if data.streaming or of_text or limits_of(data) is not None:
        raise ConfigError(
            "data= joins arrays as they come: packing, stride, documents, streaming and limits are for text",
            "leave these settings of data out",
        )
    if config.train.epochs is not None:
        raise ConfigError("train.epochs is set, but how long an epoch of data= is, is not known", "set train.steps")
    _check_no_epoch_end(config, "data=")
    how = {"vocab": config.model.vocab, "seed": config.train.seed, "val_tokens": config.eval.tokens}
    # Its own source is not what the run was trained on, and must not be what is resumed with.
    own = _with_section(settings, data=data.model_copy(update={"source": None, "folder": None}))
    return Opened(own, open_arrays(source.arrays, asked_schedule(config), data, **how))


def _check_no_epoch_end(config: RunConfig, what: str) -> None:
    asked = {
        "eval.every": config.eval.epochs,
        "checkpoint.every": config.checkpoint.epochs,
        "optim.warmup": config.optim.warmup_epochs,
    }
    for path, epochs in asked.items():
        if epochs:
            raise ConfigError(
                f"{path} is in epochs, but where an epoch of {what} ends is not known", f"set {path} in steps"
            )


class Kind(NamedTuple):
    """How a kind of data is opened, and what size rules know of it before."""

    open: Callable[[DataSource, LoadedConfig], Opened]
    known: Callable[[DataSource], Known] = lambda source: uncounted(source.asked.config)


KINDS = {
    "text": Kind(_open_text, _known_text),
    "stream": Kind(_open_stream),
    "samples": Kind(_open_samples),
    "arrays": Kind(_open_arrays),
}


# --- what is asked of opened data -------------------------------------------------------------------------------------


def vocabulary_of(opened: Opened) -> int:
    """The ids that the model knows: those of its base, or at least those of the data's tokenizer."""
    if opened.base is not None:
        return opened.base.description.vocab
    asked, known = opened.settings.config.model.vocab, opened.data.tokenizer.vocab
    if asked is not None and asked < known:
        raise ConfigError(
            f"model.vocab is {asked}, but the tokenizer of {opened.data.facts.place} has {known} ids",
            "leave model.vocab at null, or raise it",
            setting="model.vocab",
        )
    return asked or known


def check_shares(data: TrainingData, world: World) -> None:
    """Refuses processes that cannot share a step evenly, as only samples need not, or that have other data."""
    everywhere = world.gather(data.facts.fingerprint)
    other = next((rank for rank, found in enumerate(everywhere) if found != everywhere[0]), None)
    with world.fail_together():
        if other is not None:
            raise UsageError(
                f"rank {other} has data {everywhere[other][:12]}, rank 0 has {everywhere[0][:12]}",
                "prepare the data once, in a folder that all hosts see, or copy it to each of them",
            )
        check_even(data, world.size)


def check_even(data: TrainingData, size: int) -> None:
    """Refuses steps of text that the processes cannot share evenly."""
    for stage in data.schedule.stages if data.facts.batch_samples is None else ():
        windows, longest = data.schedule.at(stage.first_step).windows, data.schedule.longest
        if windows % size:
            tokens = (round(windows / size) or 1) * size * longest
            several = len(data.schedule.stages) > 1
            way = f"{tokens} in train.batch_stages" if several else f"train.batch_tokens={tokens}"
            raise UnevenError(
                f"a step has {windows} windows of {longest:,} tokens, which {size} processes cannot share evenly",
                f"set {way}, or start as many processes as divide {windows}",
            )


def described(settings: LoadedConfig, base: Base, *, begun: LoraConfig | None = None) -> LoadedConfig:
    """The settings of a fine-tuning run with the shape of its model, and those of the adapter it resumes from."""
    _check_no_shape(settings, base.description)
    config = with_described_model(settings.config, base)
    lora = with_adapter(config.lora, base.description, settings.sources.__getitem__, begun=begun)
    # Without adapters nothing of the section is read, and what a preset says of it is not the run's.
    return _with_section(settings, model=config.model, chat=config.chat, lora=lora if lora.rank else LoraConfig())


def _check_no_shape(settings: LoadedConfig, description: Description) -> None:
    """The shape of a model that is fine-tuned is its own: what a user wrote about it would go unread."""
    config = settings.config
    for path, source in settings.sources.items():
        section, _, field = path.partition(".")
        if section != "model" or field in ("init_from", "context", "dropout") or not source.by_user:
            continue
        if getattr(config.model, field) != getattr(description.config, field):
            raise ConfigError(
                f"{path} is set, but the model is that of {config.model.init_from}",
                f"leave {path} out; model.context is how much of a sample is read",
                where=source.where,
                setting=path,
            )


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def open_sample_data(
    config: RunConfig, progress: Progress | None, *, written: Source = IN_PYTHON, resumed: bool = False
) -> tuple[Base, SampleData]:
    """The model to fine-tune, and the samples that a config asks for, made now unless they are there.

    `written` is where model.context was written, as `Base.fit` has it. Of a `resumed` run a missing base is its own.
    """
    base, template, notices, request, folder = _asked(config, written, resumed=resumed)
    if request.val_source is None and not request.val_fraction:
        raise DataError(
            f"nothing of {request.source} is held out to evaluate on",
            "set chat.validation to a share or to a file",
        )
    samples = prepare_samples(request, base.tokenizer, template, folder, progress)
    return dataclasses.replace(base, template=template), SampleData(
        sample_set=samples,
        tokenizer=base.tokenizer,
        template=template,
        described=base.description.values,
        stops=stops_of(base.tokenizer, template, base.description.end_of_text),
        row_tokens=base.description.config.context,
        packing=config.chat.packing,
        batch_samples=config.chat.batch_samples,
        seed=config.train.seed,
        limit=request.limit,
        accumulation=config.speed.accumulation,
        opening_notices=notices,
    )


def why_samples_are_made(config: RunConfig, *, written: Source = IN_PYTHON) -> tuple[Path, str]:
    """The folder of a config's samples, and why `open_sample_data` would make them now; nothing if they are there."""
    base, template, _, request, folder = _asked(config, written)
    return folder, why_made(request, base.tokenizer, template, folder)


def _asked(
    config: RunConfig, written: Source, *, resumed: bool = False
) -> tuple[Base, ChatTemplate | None, tuple[Finding, ...], SampleRequest, Path]:
    """(model, chat template, notices on both, what samples are made of, their folder)"""
    chat, name = config.chat, config.model.init_from
    assert chat.source is not None, "checked by the config"
    assert name is not None, "checked by the config"
    try:
        base = open_base(name, config.model.context)
    except CheckpointError as error:
        if not resumed:
            raise
        raise CheckpointError(
            f"the base of the run cannot be loaded: {error.message}",
            "call this from the folder that the run was trained in, or say where the base is: model.init_from=MODEL",
        ) from error
    context, cut = base.fit(config.model.context, written)
    if cut:
        config = config.model_copy(update={"model": config.model.model_copy(update={"context": context})})
    template, notice = base.template_for(chat.template)
    request = SampleRequest(
        source=chat.source,
        context=sample_tokens(config),
        val_source=chat.val_source,
        fields=dict(pair.split("=", 1) for pair in chat.fields),
        train_on=chat.train_on,
        val_fraction=chat.val_fraction,
        limit=sample_limit(config),
    )
    found = {"template": notice, "context": cut}
    notices = tuple(Check("data", name).note(line) for name, line in found.items() if line)
    return base, template, notices, request, samples_folder(config)


def samples_folder(config: RunConfig) -> Path:
    """Where the samples of a run lie."""
    return Path(config.data.folder or f"data/{Path(config.chat.source or '').stem}-samples")


def sample_tokens(config: RunConfig) -> int:
    """The most that a sample may have."""
    return min(config.chat.max_tokens or config.model.context, config.model.context)


def sample_limit(config: RunConfig) -> str:
    """The setting that says so."""
    return "chat.max_tokens" if sample_tokens(config) < config.model.context else "model.context"


def with_described_model(config: RunConfig, base: Base) -> RunConfig:
    """The config with the model that its folder describes; a run of ours is named by its checkpoint.

    Learned positions cannot be fewer than they are, nor scales of eigenstates longer than the context: what the run
    wants less is then a matter of its samples alone.
    """
    kept = {"dropout": config.model.dropout, "init_from": base.name}
    model = base.description.config.model_copy(update=kept)
    shorter = {"max_tokens": sample_tokens(config)} if config.model.context < model.context else {}
    return config.model_copy(update={"model": model, "chat": config.chat.model_copy(update=shorter)})
