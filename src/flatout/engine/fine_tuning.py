"""What a fine-tuning run is made of: a model from elsewhere, and samples in its own language.

The model section of the config gives way to what the model's folder says; only the context is the run's own, since it
is how much of a sample is read. Everything after that (step, loop, checkpoints, records) is what pretraining has.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.config.schema import LoraConfig, RunConfig
from flatout.config.source import IN_PYTHON, Source
from flatout.data.chat_template import ChatTemplate
from flatout.data.make_samples import Progress, SampleRequest, count_told, prepare_samples, why_made
from flatout.data.masking import preview, stops_of
from flatout.data.samples import Samples, SampleSet
from flatout.data.tokenizer import Ids, ModelTokenizer
from flatout.engine.base_model import Base, build_base, open_base
from flatout.errors import CheckpointError, DataError
from flatout.model.adapter_targets import ALL_LINEAR, AdapterPlan
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, empty_model
from flatout.model.hub import Description


@dataclasses.dataclass
class SampleSplit:
    """Samples, answering to what others ask of the tokens of a split."""

    samples: Samples
    split: str
    tokens: int
    folder: Path
    dtype: np.dtype[Any]
    text_bytes: int = 0  # not known: loss per byte is not told

    def read(self, start: int, length: int) -> Ids:
        return self.samples.tokens[start : start + length]


@dataclasses.dataclass(frozen=True)
class SampleData:
    """The samples of a run, in the place of a dataset."""

    manifest: SampleSet
    base: Base
    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    description: Description
    train: SampleSplit
    val: SampleSplit
    stops: tuple[int, ...]  # tokens that end an answer
    remarks: tuple[str, ...] = ()

    def preview(self) -> tuple[tuple[str, bool], ...]:
        """The first sample in pieces that are learned or not, as people should see it before they train on it."""
        return tuple((piece.text, piece.labelled) for piece in preview(*self.train.samples.sample(0), self.tokenizer))

    def prompt(self) -> list[int]:
        """The first held-out sample up to its first label: something to answer, as the model will be asked."""
        ids, labelled = self.val.samples.sample(0)
        first = int(labelled.argmax()) if labelled.any() else len(ids)
        return ids[: max(1, first)].tolist()


def open_sample_data(
    config: RunConfig, progress: Progress | None, *, written: Source = IN_PYTHON, resumed: bool = False
) -> SampleData:
    """The samples that a config asks for, made now unless they are there, and what is known of the model.

    `written` is where model.context was written, as `Base.fit` has it. Of a `resumed` run a missing base is its own.
    """
    base, template, said, request, folder = _asked(config, written, resumed=resumed)
    tokenizer, description = base.tokenizer, base.description
    samples = prepare_samples(request, tokenizer, template, folder, progress)
    if samples.val is None:
        raise DataError(
            f"nothing of {request.source} is held out to evaluate on",
            "set chat.val_fraction, or name chat.val_source",
        )
    train, val = (
        SampleSplit(part, split, len(part.tokens), samples.folder, part.tokens.dtype)
        for split, part in (("train", samples.train), ("val", samples.val))
    )
    stops = stops_of(tokenizer, template, description.end_of_text)
    return SampleData(samples, base, tokenizer, template, description, train, val, stops, said)


def why_samples_are_made(config: RunConfig, *, written: Source = IN_PYTHON) -> tuple[Path, str]:
    """The folder of a config's samples, and why `open_sample_data` would make them now; nothing if they are there."""
    base, template, _, request, folder = _asked(config, written)
    return folder, why_made(request, base.tokenizer, template, folder)


def _asked(
    config: RunConfig, written: Source, *, resumed: bool = False
) -> tuple[Base, ChatTemplate | None, tuple[str, ...], SampleRequest, Path]:
    """(model, chat template, what there is to say of both, what samples are made of, their folder)"""
    chat, name = config.chat, config.model.init_from
    assert chat.source is not None, "checked by the config"
    assert name is not None, "checked by the config"
    try:
        base = open_base(name, config.model.context, ignore_code=config.model.ignore_auto_map)
    except CheckpointError as error:
        if not resumed:
            raise
        raise CheckpointError(
            f"the base of the run cannot be loaded: {error.message}",
            "call this from the folder that the run was trained in, or say where the base is: model.init_from=MODEL",
        ) from error
    config, cut = base.fit(config, written)
    template, said = base.template_for(chat.template)
    request = SampleRequest(
        source=chat.source,
        context=sample_tokens(config),
        val_source=chat.val_source,
        format=chat.format,
        fields=dict(pair.split("=", 1) for pair in chat.fields),
        train_on=chat.train_on,
        too_long=chat.too_long,
        val_fraction=0.0 if chat.val_source is not None else chat.val_fraction,
        seed=0,  # the same rows are held out whatever the seed of the run
        limit=sample_limit(config),
    )
    remarks = tuple(line for line in (said, cut) if line)
    return base, template, remarks, request, samples_folder(config)


def samples_folder(config: RunConfig) -> Path:
    """Where the samples of a run lie."""
    return Path(config.data.folder or f"data/{Path(config.chat.source or '').stem}-samples")


def remarks_on_samples(data: SampleData) -> tuple[str, ...]:
    """What a user should know of the samples before the first step."""
    facts, counts, made = data.train.samples.facts(), data.manifest.manifest["counts"], data.manifest.made
    lines = [
        *data.remarks,
        f"samples: {facts['samples']:,} to train on and {len(data.val.samples):,} held out; "
        f"{facts['labelled_share']:.1%} of {facts['tokens']:,} tokens are learned",
        f"samples: {f'made now, since {made}' if made else 'used again'}, in {data.manifest.folder}",
    ]
    told = ("rows_not_used", "truncated", "labels_cut", "dropped_too_long", "dropped_labels_cut", "dropped_unlabelled",
            "turns_without_end_token", "turns_unlabelled", "special_in_content")  # fmt: skip
    return (*lines, *(f"samples: {count_told(name, counts[name])}" for name in told if counts.get(name)))


def facts_of_samples(data: SampleData) -> dict[str, Any]:
    """What the run's record keeps of them, for reports."""
    manifest, train = data.manifest.manifest, data.train.samples
    readings = manifest.get("reading") or [{}]
    return {
        "files": len(manifest["key"]["source"]),
        "rows": manifest["counts"].get("rows", 0),
        "rows_not_used": manifest["counts"].get("rows_not_used", 0),
        "train": len(train),
        "val": len(data.val.samples),
        "labelled": train.labels,
        "format": readings[0].get("format"),
        "template": None if data.template is None else data.template.name,
    }


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
    kept = {name: getattr(config.model, name) for name in ("dropout", "ignore_auto_map")} | {"init_from": base.name}
    model = base.description.config.model_copy(update=kept)
    shorter = {"max_tokens": sample_tokens(config)} if config.model.context < model.context else {}
    return config.model_copy(update={"model": model, "chat": config.chat.model_copy(update=shorter)})


def build_described(
    description: Description, *, dtype: torch.dtype, device: torch.device, execution: Execution, weights: bool
) -> GPT:
    """The model with its weights, or without them where a checkpoint brings all of them."""
    if weights:
        return build_base(description, dtype=dtype, device=device, execution=execution)
    return empty_model(description.config, description.vocab, execution=execution, dtype=dtype, device=device)


def adapter_plan(config: LoraConfig) -> AdapterPlan:
    return AdapterPlan(
        rank=config.rank,
        alpha=2.0 * config.rank if config.alpha is None else config.alpha,
        dropout=config.dropout,
        targets=ALL_LINEAR if config.targets == [ALL_LINEAR] else tuple(config.targets),
        rank_stabilised=config.rank_stabilised,
        dora=config.dora,
    )
