"""The loss of a trained model on its own validation text, its samples, or other shards."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from flatout.api.models import LoadedModel, load_model
from flatout.config.load import LoadedConfig
from flatout.data.batch import Batch
from flatout.data.loader import evaluation_batches
from flatout.data.prepare import data_folder
from flatout.data.sample_data import first_samples
from flatout.data.sample_loader import SampleRows
from flatout.data.samples import SampleSet, holds_samples, open_samples
from flatout.data.shards import Tokens, open_dataset
from flatout.data.stream import open_stream
from flatout.data.training_data import tokens_per_byte
from flatout.device import arithmetic
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.evaluate import evaluate as evaluate_model
from flatout.errors import CheckpointError, DataError, UsageError
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.opening import open_sample_data, samples_folder


@dataclasses.dataclass(frozen=True)
class Evaluation:
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    split: str
    origin: str


def evaluate(
    model: LoadedModel | str | Path | None = None,
    *,
    data: str | Path | None = None,
    split: str = "val",
    tokens: int | None = None,
    batch_size: int = 16,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a trained model on its own validation split, or on other shards.

    Of a fine-tuned run `data` may also be the folder of its samples, where its source or its base is not to be found.
    """
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    if data is None and loaded.config is None:
        raise UsageError(
            f"{loaded.origin} does not say what it was trained on",
            "name prepared shards with --data, or measure the run that it was written from: `flatout eval RUN`",
        )
    tuned = loaded.config is not None and loaded.config.chat.source is not None
    device = loaded.device.torch_device
    if tuned and (data is None or holds_samples(Path(data))):
        samples = _samples_again(loaded) if data is None else _samples_in(Path(data), loaded)
        batches, rate = _sample_batches(loaded, samples, split, tokens, batch_size), None
    else:
        streamed = data is None and _known(loaded).config.data.streaming
        shards = _streamed_validation(loaded, split) if streamed else _shards(loaded, data, split)
        how = {"context": loaded.model.config.context, "batch_size": batch_size, "device": device}
        apart = loaded.config is not None and loaded.config.documents_apart
        batches = evaluation_batches(shards, most_tokens=tokens, apart=apart, **how)
        rate = tokens_per_byte(shards, loaded.tokenizer, apart=apart)
    with out_of_memory():
        loss, count = evaluate_model(loaded.model, batches, lambda: arithmetic("fp32", False, device))
    return Evaluation(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=bits_per_byte(loss, rate),
        tokens=count,
        split=split,
        origin=str(loaded.origin),
    )


def _samples_again(loaded: LoadedModel) -> SampleSet:
    """The samples of a fine-tuned run from its source, made now unless they are there."""
    config = _known(loaded).config
    chat = config.chat
    try:
        samples = open_sample_data(config, None)[1].sample_set
    except (DataError, CheckpointError) as error:
        named = [name for name in (chat.source, chat.val_source) if name is not None]
        if isinstance(error, DataError) and all(Path(name).exists() for name in named):
            raise
        raise DataError(
            f"the samples of {loaded.origin} cannot be made here: {error.message}",
            "call this from the folder that the run was trained in, or name its samples with --data FOLDER: "
            f"they are in {samples_folder(config)} there",
        ) from error
    if samples.fingerprint != loaded.dataset:
        raise DataError(
            f"{chat.source} no longer gives the samples that {loaded.origin} was trained on",
            "put the file and the model's folder back as they were",
        )
    return samples


def _samples_in(folder: Path, loaded: LoadedModel) -> SampleSet:
    """The samples in a folder, which must be those of the run."""
    samples = open_samples(folder)
    if samples.fingerprint != loaded.dataset:
        raise DataError(
            f"{folder} does not hold the samples that {loaded.origin} was trained on",
            f"name the folder that the run made, {samples_folder(_known(loaded).config)} in the place where it began",
        )
    return samples


def _sample_batches(
    loaded: LoadedModel, samples: SampleSet, split: str, tokens: int | None, batch_size: int
) -> Iterator[Batch]:
    """Of a fine-tuned run: its samples, whose learned tokens are what the mean is over."""
    config = _known(loaded).config
    part = samples.val if split == "val" else samples.train
    assert part is not None, "a run holds some out"
    how = {"batch_samples": batch_size, "row_tokens": config.model.context, "packing": config.chat.packing}
    return SampleRows(first_samples(part, tokens), **how).in_order(loaded.device.torch_device)


def _shards(loaded: LoadedModel, data: str | Path | None, split: str) -> Tokens:
    folder = Path(data) if data is not None else data_folder(_known(loaded).config.data)
    if data is None and not folder.is_dir():
        raise DataError(
            f"the run's data folder {folder} is not here",
            "call this from the folder the run was trained in, or name the shards with --data",
        )
    dataset = open_dataset(folder, wanted=loaded.tokenizer, verify="full")
    if data is None and dataset.manifest.fingerprint != loaded.dataset:
        raise DataError(
            f"{folder} is no longer what {loaded.origin} was trained on",
            "prepare that text again, or name these shards with --data to measure on them all the same",
        )
    return dataset.val if split == "val" else dataset.train


def _streamed_validation(loaded: LoadedModel, split: str) -> Tokens:
    """The validation text of a run that streamed, read from its source again."""
    config = _known(loaded).config
    if split != "val":
        raise UsageError(
            f"{loaded.origin} was trained on a stream, of which only validation text is held",
            "measure on --split val, or name prepared shards with --data",
        )
    dataset = open_stream(config.data, config.clean, val_tokens=config.eval.tokens)
    if dataset.train.fingerprint != loaded.dataset:
        raise DataError(
            f"{dataset.train.folder} is no longer what {loaded.origin} was trained on",
            "restore the source, or name prepared shards with --data",
        )
    return dataset.val


def _known(loaded: LoadedModel) -> LoadedConfig:
    assert loaded.settings is not None, "checked by the caller"
    return loaded.settings
