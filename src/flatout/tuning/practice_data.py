"""Data to measure on: the config's own, or where that is text which is not prepared, a dataset made for the occasion.

Idea: how fast a step is does not depend on what the text says, so a benchmark must not ask for ten billion prepared
tokens first. Ids are drawn by a falling law as in text (the n-th commonest about 1/n): a uniform draw has nothing to
learn, so the losses would hardly tell a wrong gradient from a right one, and rare ids in equal number are kinder to
the embedding's gradient than text is.

Contract: the user's folders are read and never written. What is made lies in a folder that the caller throws away.

What a config is measured on: text, or the samples of a fine-tuning run, and which of its steps.

`practice_config` is the one door of verbs that measure steps: the data is opened there, and with it a preset's size is
settled, by what `flatout train` settles it with.

Idea: the steps of a run over samples differ. The fullest of them decides whether a setting fits, so it is taken first;
speed is that of some steps spread over an epoch, the same ones for every setting. They are whole steps of the run
itself: its samples, its order, its loader.

Contract: the user's folders are read and never written. Samples that are not there, or were made of something else, are
made in a folder that the caller throws away; what `flatout finetune` would refuse is refused.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from flatout.config.load import LoadedConfig
from flatout.config.schema import DataConfig, at_last_stage
from flatout.config.sizes import learned_vocab
from flatout.config.unused import check_used
from flatout.data.batch import Delivery, LargestRows
from flatout.data.pack import pack_corpus
from flatout.data.part import LIMITS
from flatout.data.plan import request_of
from flatout.data.prepare import as_prepared, data_folder
from flatout.data.sample_data import SampleData, fullest_steps
from flatout.data.samples import NONE_YET
from flatout.data.shards import MANIFEST, OFFSET_DTYPE, TOKENIZER, VERSION, FileInfo, Manifest, SplitInfo
from flatout.data.tokenizer import (
    ByteTokenizer,
    Ids,
    IdTokenizer,
    Tokenizer,
    load_tokenizer,
    token_dtype,
)
from flatout.errors import ResourceError
from flatout.files import disk_errors
from flatout.resolve.length import steps_of
from flatout.resolve.opening import (
    DataSource,
    described,
    open_sample_data,
    why_samples_are_made,
    with_tokenizer,
)
from flatout.resolve.resolve import take_device
from flatout.resolve.sizing import sized, uncounted
from flatout.resolve.switches import Speed
from flatout.tuning.minutes import in_minutes
from flatout.world import World

TRAIN_TOKENS = 2**22
VAL_TOKENS = 2**14
_DOCUMENT = 1024  # tokens
_MORE_SPACE = "free some space, or set TMPDIR to a folder with some"
_RANDOM = "random"
_SMALL_BYTES = 2**24  # a text up to this size is prepared in a second or two


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder for what has to be made, gone at the end of the block."""
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ResourceError("no folder for temporary files can be written", _MORE_SPACE) from error
    with made as name:
        yield Path(name)


def practice_data(loaded: LoadedConfig, scratch: Path) -> tuple[DataConfig, str]:
    """The `data` section to measure with, and in words what it is. `scratch` is a folder for what has to be made."""
    config, data = loaded.config, loaded.config.data
    if not config.reads_text:
        return data, f"{config.data_kind} data, as it is"
    if data.folder is not None or data.source is not None:
        folder = data_folder(data)
        if (folder / MANIFEST).exists():
            return _prepared(data, folder), f"the prepared data in {folder}"
    if isinstance(data.source, str) and _small(data.source):
        folder = scratch / "text"
        try:
            pack_corpus(request_of(data, config.clean), folder)
        except ResourceError as error:  # its hint is to go on later, but this folder is thrown away
            raise ResourceError(error.message, _MORE_SPACE) from error
        return _prepared(data, folder), data.source
    # The characters of `char` are those of a text that is not here: bytes take their place.
    learned = learned_vocab(data.tokenizer)
    if learned is not None:
        tokenizer = IdTokenizer(learned)
    else:
        tokenizer = ByteTokenizer() if data.tokenizer == "char" else load_tokenizer(data.tokenizer, None)
    vocab = min(config.model.vocab or tokenizer.vocab, tokenizer.vocab)
    windows = (TRAIN_TOKENS - 1) // config.model.context
    tokens = TRAIN_TOKENS if windows >= 64 else 64 * config.model.context + 1
    with disk_errors(f"random tokens to {scratch}", safe=", or set TMPDIR to a folder with some"):
        folder = write_random(scratch / _RANDOM, tokenizer, vocab=vocab, train_tokens=tokens, seed=config.train.seed)
    return _prepared(data, folder), f"random tokens of a vocabulary of {vocab:,}, because the config's data is not here"


def is_made_up(data: DataConfig, scratch: Path) -> bool:
    """Whether `practice_data` had to take random tokens."""
    return data.folder == str(scratch / _RANDOM)


def _prepared(data: DataConfig, folder: Path) -> DataConfig:
    # The limits are in the dataset already, and are refused beside a folder alone.
    without = {"source": None, "streaming": False, **dict.fromkeys(LIMITS)}
    return data.model_copy(update={"folder": str(folder), **without})


def _small(source: str) -> bool:
    return source == "shakespeare" or (Path(source).is_file() and Path(source).stat().st_size <= _SMALL_BYTES)


def write_random(
    folder: Path, tokenizer: Tokenizer, *, vocab: int, train_tokens: int, seed: int, val_tokens: int = VAL_TOKENS
) -> Path:
    """A dataset of random ids below `vocab` that opens as any other does; the same arguments give the same bytes."""
    folder.mkdir(parents=True)
    dtype = token_dtype(tokenizer.vocab)
    generator = np.random.default_rng(seed)
    names = generator.permutation(vocab)
    weights = np.cumsum(1.0 / np.arange(1, vocab + 1))

    def store(name: str, content: bytes) -> FileInfo:
        (folder / name).write_bytes(content)
        return FileInfo(name, len(content), hashlib.sha256(content).hexdigest())

    def split(name: str, count: int) -> SplitInfo:
        ranks = np.searchsorted(weights, generator.random(count) * weights[-1], side="right")
        ids: Ids = names[np.minimum(ranks, vocab - 1)].astype(dtype)
        starts = np.arange(0, count, _DOCUMENT).astype(OFFSET_DTYPE)
        shard, offsets = store(f"{name}-00000.bin", ids.tobytes()), store(f"{name}.offsets.bin", starts.tobytes())
        return SplitInfo(count, len(starts), 4 * count, (shard,), offsets)

    manifest = Manifest(
        version=VERSION,
        dtype=dtype.name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(TOKENIZER, json.dumps(tokenizer.to_json()).encode("utf-8")),
        splits={"train": split("train", train_tokens), "val": split("val", val_tokens)},
        settings={"source": "random", "source_bytes": 0, "seed": seed},
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


@dataclasses.dataclass(frozen=True)
class PracticeSamples:
    """What a run over samples takes its steps from. `settings` have the shape of the model, `fullest` are steps of the
    whole run that may have its largest micro-batch."""

    settings: LoadedConfig
    data: SampleData
    vocab: int
    fullest: tuple[int, ...]
    described: str

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on average."""
        return self.data.facts.step_tokens or 0.0

    def tokens(self, step: int) -> int:
        """Tokens of a step that something is predicted from, as a run counts them."""
        numbers = self.data.order.indices(step)
        return int((self.data.train.lengths[numbers] - 1).sum())

    @functools.cached_property
    def rows(self) -> int:
        """The most rows of a step."""
        rows = self.data.rows(Delivery(device=torch.device("cpu")))
        return rows.most_rows(self.data.order, self.fullest)

    def spread(self, count: int, steps: int | None = None) -> tuple[int, ...]:
        """`count` of the first `steps`, which are an epoch if nothing is said, far apart from each other."""
        steps = steps or self.data.order.steps_per_epoch
        places = (np.arange(count) + 0.5) * steps / max(count, 1)
        return tuple(dict.fromkeys(int(place) for place in places))

    def largest(self, speed: Speed) -> dict[int, LargestRows]:
        """By their steps, the micro-batch with the most tokens and the one with the most labels; often they are one.

        Activations grow with the tokens, the loss with the labels.
        """
        rows = self.data.rows(speed.delivery())
        found = list(rows.micro_batches(self.data.order, self.fullest, speed.micro_batch))
        ways = (LargestRows.by_tokens, LargestRows.by_labels)
        return dict(max(found, key=lambda one, way=way: way(one[1])) for way in reversed(ways))


def practice_config(
    loaded: LoadedConfig,
    scratch: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    world: World | None = None,
    streams: bool = False,
) -> tuple[LoadedConfig, str]:
    """The config on data to measure on, text or samples, and in words what data that is.

    What a preset leaves open until its data is known is settled as in a run, and steps in stages are all like the last
    ones. `scratch` is a folder for what has to be made; `say` gets a notice of that, and of what was settled.
    With `streams`, text that is streamed is read as a run reads it.
    """
    if loaded.config.fine_tunes:
        data, described = _sample_folder(loaded, scratch, say)
        return _with_data(loaded, data), described
    world, before = world or World(), len(loaded.notices)
    device = take_device(loaded, world)
    practice = with_tokenizer(loaded, device)
    described = str(loaded.config.data.source)
    if not (streams and loaded.config.data_kind == "stream"):
        data, described = practice_data(practice, scratch)
        practice = _with_data(practice, data)
    if practice.size is not None:
        once = loaded.config.data_kind == "stream" or is_made_up(practice.config.data, scratch)
        described += f"; size {practice.size.name} is settled as for text that is read once" if once else ""
        source = DataSource(practice, device)
        known = uncounted(practice.config) if once else source.known()
        practice = sized(in_minutes(source, world, uncounted=known).asked, known, device, world)
    for message in practice.notices[before:]:
        say(message)
    return _at_last_stage(practice, say), described


def settled_for_runs(loaded: LoadedConfig, notice: Callable[[str], None]) -> LoadedConfig:
    """A config as a run would have it, for several runs; `notice` gets what was settled."""
    train, before = loaded.config.train, len(loaded.notices)
    if loaded.config.fine_tunes:  # a model that has a shape
        return loaded
    if loaded.size is None and (train.minutes is None or train.steps is not None):
        settings = as_prepared(loaded)
    else:
        world = World()
        source = in_minutes(DataSource(loaded, take_device(loaded, world)), world)
        settings = sized(source.asked, source.known(), source.device)
    for message in settings.notices[before:]:
        notice(message)
    return settings


def _with_data(loaded: LoadedConfig, data: DataConfig) -> LoadedConfig:
    return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))


def _at_last_stage(loaded: LoadedConfig, say: Callable[[str], None]) -> LoadedConfig:
    if not loaded.config.train.staged:
        return loaded
    last = at_last_stage(loaded.config)
    say(f"stages: steps are measured as in the last one, with {last.train.batch_tokens:,} tokens each")
    return dataclasses.replace(loaded, config=last)


def practice_samples(loaded: LoadedConfig, scratch: Path, say: Callable[[str], None]) -> PracticeSamples:
    """The samples that a config names. `scratch` is a folder for what has to be made; `say` gets a notice."""
    fitted, text = practice_config(loaded, scratch, say)
    base, data = open_sample_data(fitted.config, None, written=loaded.sources["model.context"])
    settings = described(fitted, base)
    fullest = fullest_steps(data.train, data.order, steps_of(settings.config, data.facts))
    vocab = base.description.vocab
    return PracticeSamples(settings=settings, data=data, vocab=vocab, fullest=fullest, described=text)


def _sample_folder(loaded: LoadedConfig, scratch: Path, say: Callable[[str], None]) -> tuple[DataConfig, str]:
    check_used(loaded)
    config, written = loaded.config, loaded.sources["model.context"]
    folder, why = why_samples_are_made(config, written=written)
    described = f"the samples in {folder}"
    if why:
        described = f"samples made for the occasion, since those in {folder} cannot be used as they are: {why}"
        if why == NONE_YET:
            described = f"samples made for the occasion, since there are none in {folder} yet"
        say(f"making the samples of {config.chat.source}, in a folder for the occasion")
        folder = scratch / "samples"
    return config.data.model_copy(update={"folder": str(folder)}), described
