"""The loss of models on text, and their scores on tasks: files of one's own, and those of lm-evaluation-harness."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.checkpoints.run_folder import run_of
from flatout.device import out_of_memory
from flatout.errors import DataError, UsageError
from flatout.front.models import LoadedModel, load_model
from flatout.generation.engine import fitting_rows
from flatout.model.gpt import GPT
from flatout.shown import Shown
from flatout.tasks.files import find_tasks
from flatout.tasks.harness import harness_model, harness_scores
from flatout.tasks.likelihood import Subject, log_likelihoods, windows
from flatout.tasks.scores import ModelScores, ask, encoded

if TYPE_CHECKING:
    from flatout.data.batch import TrainingData

_WINDOWS = 512  # held at once

# --- loss -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation(Shown):
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    split: str
    origin: str
    stride: int | None = None


def evaluate(
    model: LoadedModel | str | Path | None = None,
    *,
    data: str | Path | None = None,
    split: str = "val",
    tokens: int | None = None,
    batch_size: int = 16,
    stride: int | None = None,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a trained model on its own validation split, on other shards or on a text.

    Of a fine-tuned run `data` may also be the folder of its samples, where its source or its base is not to be found.
    With a `stride` windows of a whole context overlap, each that many tokens after the one before, and a token is
    predicted from at least the context without the stride: perplexity by sliding window. Texts are read so, with a
    stride of the context by default.
    """
    from flatout.data.batch import Delivery, tokens_per_byte
    from flatout.engine.evaluate import bits_per_byte, perplexity
    from flatout.engine.evaluate import evaluate as evaluate_model

    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    context = loaded.model.config.context
    if stride is not None and not 1 <= stride <= context:
        raise UsageError(f"a stride of {stride:,} is not from 1 to the context of {context:,}", "use half the context")
    if data is None and loaded.config is None:
        raise UsageError(
            f"{loaded.origin} does not say what it was trained on",
            "name prepared shards or a text with --data, or measure the run it was written from: `flatout eval RUN`",
        )
    found = {"origin": str(loaded.origin), "stride": stride}
    if data is not None and Path(data).is_file():
        ids, size = _text_in(Path(data), loaded)
        loss, count = _sliding(loaded, ids[:tokens], stride or context)
        rate = (len(ids) - 1) / size
        found |= {"split": Path(data).name, "stride": stride or context}
    else:
        source = _trained_on(loaded) if data is None else _in_folder(Path(data), loaded)
        rate = tokens_per_byte(source.split(split), source.tokenizer, apart=source.apart)
        found["split"] = split
        if stride is None:
            batches = source.evaluation(batch_size, Delivery(device=loaded.device.torch_device), tokens, split)
            with out_of_memory():
                loss, count = evaluate_model(loaded.model, batches, loaded.scope)
        elif loaded.config is not None and loaded.config.fine_tunes:
            raise UsageError("samples are no text for windows to slide over", "name a text with --data FILE")
        else:
            shards = source.split(split)
            ids = shards.read(0, min(shards.tokens, tokens or shards.tokens)).tolist()
            loss, count = _sliding(loaded, ids, stride)
    measured = {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": bits_per_byte(loss, rate)}
    return Evaluation(tokens=count, **measured, **found)


def _text_in(path: Path, loaded: LoadedModel) -> tuple[list[int], int]:
    """The ids of a text file, and its size in bytes."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}", "name a text file in UTF-8") from error
    ids = subject_of(loaded).encode([text])[0]
    if len(ids) < 2:
        raise DataError(f"{path} has no token to be predicted", "name a text file")
    return ids, len(text.encode("utf-8"))


def _sliding(loaded: LoadedModel, ids: list[int], stride: int) -> tuple[float, int]:
    """(mean loss per token, tokens) of a text but for its first token."""
    subject, total = subject_of(loaded), 0.0
    pairs = windows(ids, loaded.model.config.context, stride)
    with out_of_memory():
        while some := list(itertools.islice(pairs, _WINDOWS)):
            total += math.fsum(value for value, _ in log_likelihoods(subject, some))
    return -total / max(len(ids) - 1, 1), len(ids) - 1


def _trained_on(loaded: LoadedModel) -> "TrainingData":
    """The data of a run, whatever its kind."""
    from flatout.resolve.opening import DataSource

    assert loaded.settings is not None, "checked by the caller"
    data = DataSource(loaded.settings, loaded.device, again=True).open(loaded.settings).data
    if data.facts.fingerprint != loaded.dataset:
        raise DataError(
            f"{data.facts.place} is no longer what {loaded.origin} was trained on",
            "restore what it was made of, or name prepared shards with --data to measure on those all the same",
        )
    return data


def _in_folder(folder: Path, loaded: LoadedModel) -> "TrainingData":
    """Any prepared shards, or the samples that a run made."""
    from flatout.data.batch import Schedule
    from flatout.data.sample_data import SampleData
    from flatout.data.samples import holds_samples, open_samples
    from flatout.data.shard_data import ShardData
    from flatout.data.shards import open_dataset
    from flatout.resolve.opening import samples_folder

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


# --- tasks ------------------------------------------------------------------------------------------------------------


def score(
    model: LoadedModel | str | Path | None = None,
    tasks: Sequence[str | Path] = (),
    *,
    folder: str | Path | None = None,
    shots: int = 0,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> ModelScores:
    """Scores of a model on tasks: accuracies and perplexities with their standard errors, and every answer.

    A task is a file of JSON lines (docs/guides/after-training.md), a folder of such files, the name of a file in
    `folder`, or a task of lm-evaluation-harness, also of a YAML file in `folder`. Each question stands after `shots`
    solved ones, drawn by `seed`; `limit` takes the first questions of each task. `progress` counts answers.
    """
    words = [str(task) for task in ([tasks] if isinstance(tasks, str | Path) else tasks)]
    if not all(words) or not words:
        raise UsageError("no task was named", "name files of tasks, or tasks of lm-evaluation-harness")
    place = None if folder is None else Path(folder)
    files, names = find_tasks(words, place, shots=shots, limit=limit, seed=seed)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, weights="auto")
    began, done = time.perf_counter(), 0

    def seen(count: int) -> None:
        nonlocal done
        done += count
        progress(done)

    subject = subject_of(loaded)
    with out_of_memory():
        scores, samples = ask(subject, files, encoded(subject, files), seen=seen)
        if names:
            rows = fitting_rows(loaded.model, loaded.device) if isinstance(loaded.model, GPT) else 1
            lm = harness_model(subject, rows=rows, seen=seen)
            more = harness_scores(lm, names, folder=place, shots=shots or None, limit=limit, seed=seed)
            scores, samples = scores + more[0], samples + more[1]
    return ModelScores(
        name=run_of(loaded.origin).resolve().name,
        origin=str(loaded.origin),
        step=loaded.step,
        scores=tuple(scores),
        samples=tuple(samples),
        seconds=time.perf_counter() - began,
    )


def subject_of(loaded: LoadedModel) -> Subject:
    """A model that is ready, to be asked."""
    how = {"scope": loaded.scope, "stops": loaded.stops, "kernels": loaded.kernels}
    return Subject(model=loaded.model, tokenizer=loaded.tokenizer, **how)
