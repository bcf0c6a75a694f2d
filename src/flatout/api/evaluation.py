"""The loss of a trained model on what it was trained on, opened again, or on a folder that somebody names."""

import dataclasses
from pathlib import Path

from flatout.api.models import LoadedModel, load_model
from flatout.data.batch import Delivery, Schedule, TrainingData, tokens_per_byte
from flatout.data.sample_data import SampleData
from flatout.data.samples import holds_samples, open_samples
from flatout.data.shard_data import ShardData
from flatout.data.shards import open_dataset
from flatout.device import arithmetic
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.evaluate import evaluate as evaluate_model
from flatout.errors import DataError, UsageError
from flatout.resolve.fit_check import out_of_memory
from flatout.resolve.opening import DataSource, samples_folder


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
    device = loaded.device.torch_device
    source = _trained_on(loaded) if data is None else _in_folder(Path(data), loaded)
    batches = source.evaluation(batch_size, Delivery(device=device), tokens, split)
    rate = tokens_per_byte(source.split(split), source.tokenizer, apart=source.apart)
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


def _trained_on(loaded: LoadedModel) -> TrainingData:
    """The data of a run, whatever its kind."""
    assert loaded.settings is not None, "checked by the caller"
    data = DataSource(loaded.settings, loaded.device, again=True).open(loaded.settings).data
    if data.facts.fingerprint != loaded.dataset:
        raise DataError(
            f"{data.facts.place} is no longer what {loaded.origin} was trained on",
            "restore what it was made of, or name prepared shards with --data to measure on those all the same",
        )
    return data


def _in_folder(folder: Path, loaded: LoadedModel) -> TrainingData:
    """Any prepared shards, or the samples that a run made."""
    config, context = loaded.config, loaded.model.config.context
    if config is None or not (config.fine_tunes and holds_samples(folder)):
        dataset = open_dataset(folder, wanted=loaded.tokenizer, verify="full")
        apart = config is not None and config.documents_apart
        return ShardData(dataset, None, Schedule.constant(1, context), apart=apart)
    samples = open_samples(folder)
    if samples.fingerprint != loaded.dataset:
        raise DataError(
            f"{folder} does not hold the samples that {loaded.origin} was trained on",
            f"name the folder that the run made, {samples_folder(config)} in the place where it began",
        )
    how = {"row_tokens": config.model.context, "packing": config.chat.packing, "seed": config.train.seed}
    return SampleData(sample_set=samples, tokenizer=loaded.tokenizer, batch_samples=config.chat.batch_samples, **how)
