"""The model that a fine-tuning run starts from: a Hugging Face folder, or a checkpoint of our own.

Both become one `Base`: a description, a tokenizer for chat templates, and the template that comes with it. A checkpoint
of ours is described as if it lay in a folder of theirs; whether transformers has the same model does not matter here.

Contract: a run of ours is pinned to the checkpoint that it means today, the best or else the newest. A run that was
itself trained with adapters is no base until it is merged. What adapters were trained on is told by a hash of its
weights, and another model in its place is refused.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.config.load import resolve_from_mapping
from flatout.config.schema import RunConfig
from flatout.config.source import Source
from flatout.data.chat_template import BUILT_IN, MODEL, ChatTemplate, load_template, template_from_json
from flatout.data.model_folder import read_model_tokenizer
from flatout.data.portable import as_model_tokenizer
from flatout.data.tokenizer import ModelTokenizer, tokenizer_from_json
from flatout.engine.checkpoint import verify_checkpoint
from flatout.engine.run_folder import checkpoint_to_load, is_checkpoint
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.files import parse_json
from flatout.model.execution import Execution
from flatout.model.fingerprint import own_fingerprint, weights_fingerprint
from flatout.model.gpt import GPT, empty_model
from flatout.model.hub import Description, check_same_model, describe, description_of, read_description
from flatout.model.hub_find import find_model
from flatout.model.hub_weights import load_described
from flatout.model.quantize import check_quantizing, round_linears
from flatout.model.weights import assign_weights, read_safetensors


@dataclasses.dataclass(frozen=True)
class Base:
    """What is known of a model before its weights are read. `name` finds it again."""

    name: str
    description: Description
    tokenizer: ModelTokenizer
    template: ChatTemplate | None  # of a run that was fine-tuned; that of a Hugging Face folder is read where asked for

    def template_for(self, spec: str) -> tuple[ChatTemplate | None, str]:
        """The chat template that a config asks for, and what there is to say of it.

        A model of ours that was never taught to chat has none: it gets chatml if it has its tokens, else plain.
        """
        folder = self.description.folder
        if spec != MODEL or not is_checkpoint(folder):
            return load_template(spec, folder, self.tokenizer), ""
        if self.template is not None:
            return self.template, ""
        tokens = BUILT_IN["chatml"][1]
        chosen = "plain" if any(self.tokenizer.token_id(token) is None for token in tokens) else "chatml"
        said = f"{self.name} was never taught a chat template: samples are written by `{chosen}` (chat.template)"
        return load_template(chosen, None, self.tokenizer), said

    def fit(self, config: RunConfig, written: Source) -> tuple[RunConfig, str]:
        """The config with no more context than there are positions, and what there is to say of it.

        `written` is where the context was asked for: a value of the user's is refused instead of cut.
        """
        asked, has = config.model.context, self.description.config.context
        if asked <= has:
            return config, ""
        if written.by_user:
            raise ConfigError(
                f"{written.prefix}model.context is {asked:,}, but {self.name} has {has:,} positions",
                f"set model.context to at most {has}, or leave it out",
            )
        cut = config.model_copy(update={"model": config.model.model_copy(update={"context": has})})
        return cut, f"model.context is cut from {asked:,} to {has:,}: {self.name} has no more positions"


def open_base(name: str, context: int | None, *, ignore_code: bool = False) -> Base:
    """What `name` means, with as much context as a sample may have, or with all it has where that is less."""
    found = find_model(name)
    if found.kind != "huggingface":
        return _own(name, checkpoint_to_load(found.path, best=True), context)
    description = read_description(found.path, context=context, cut=True, ignore_code=ignore_code)
    tokenizer = read_model_tokenizer(found.path, ignore_code=ignore_code)
    if tokenizer.vocab > description.vocab:
        raise CheckpointError(
            f"the tokenizer of {name} has {tokenizer.vocab:,} ids, the model {description.vocab:,}",
            "fetch the folder again: its files do not belong together",
        )
    return Base(name, description, tokenizer, None)


def describe_base(name: str, context: int | None, *, ignore_code: bool = False) -> Description:
    """The description alone: who has a tokenizer already needs none of the model's."""
    found = find_model(name)
    if found.kind == "huggingface":
        return read_description(found.path, context=context, ignore_code=ignore_code)
    checkpoint = checkpoint_to_load(found.path, best=True)
    config, state, language = read_own(name, checkpoint, training=False)
    return described_checkpoint(config, state, checkpoint, tokenizer_from_json(language).end_of_text, context)


def _own(name: str, checkpoint: Path, context: int | None) -> Base:
    config, state, language = read_own(name, checkpoint, training=True)
    try:
        tokenizer = as_model_tokenizer(tokenizer_from_json(language))
    except DataError as error:
        raise DataError(f"{name}: {error.message}", error.hint) from error
    template = state.get("template")
    return Base(
        str(checkpoint),
        described_checkpoint(config, state, checkpoint, tokenizer.end_of_text, context, cut=True),
        tokenizer,
        None if template is None else template_from_json(template),
    )


def read_own(name: str, checkpoint: Path, *, training: bool) -> tuple[RunConfig, dict[str, Any], dict[str, Any]]:
    """(config, state, tokenizer) of a checkpoint of ours that can be a base."""
    verify_checkpoint(checkpoint)
    values, state, language = (_read_part(checkpoint / f"{part}.json") for part in ("config", "state", "tokenizer"))
    config = resolve_from_mapping(values, str(checkpoint))
    if config.lora.rank:
        other = "or go on with its adapters: lora.init_from"
        if not training:
            other = f"or name the model under its adapters: {config.model.init_from}"
        raise CheckpointError(
            f"{name} has adapters beside a frozen model, and cannot be the base of others",
            f"write it as one model with `flatout merge {name} FOLDER`, {other}",
        )
    return config, state, language


def _read_part(path: Path) -> dict[str, Any]:
    """The object in a file of a checkpoint. Its hash is right, so who wrote it wrote no object."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "name another checkpoint") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object", "name another checkpoint")
    return content


def described_checkpoint(
    config: RunConfig,
    state: Mapping[str, Any],
    folder: Path,
    end_of_text: int | None,
    context: int | None = None,
    *,
    cut: bool = False,
) -> Description:
    """A checkpoint of ours as config.json would describe it: as it was when it came from one, or as it can be now."""
    source = describe(state["described"], folder) if state.get("described") else None
    made_for, vocab = (config.model if source is None else source.config).context, int(state["vocab"])
    model = config.model.model_copy(update={"init_from": None, "dropout": 0.0})
    if cut and context is not None:
        context = min(context, made_for)
    if context is not None and context > made_for:
        raise CheckpointError(
            f"{folder}: the model has {made_for:,} positions, and {context:,} are asked for",
            f"set model.context to at most {made_for}",
        )
    # Learned positions are weights, and no scale may be as long as the context: such a model keeps its own.
    if context is not None and model.positions != "learned" and context > max(model.scales, default=0):
        model = model.model_copy(update={"context": context})
    stops = tuple(state.get("stops", () if end_of_text is None else (end_of_text,)))
    if source is not None:
        return dataclasses.replace(source, config=model, vocab=vocab, end_of_text=stops)
    try:
        values = description_of(config.model, vocab, dtype="float32", end_of_text=end_of_text)
    except CheckpointError:  # a shape that transformers has not: ours alone, and it cannot be exported
        values = {}
    return Description(
        folder=folder,
        model_type=values.get("model_type", "flatout"),
        config=model,
        vocab=vocab,
        dtype="float32",
        begin_of_text=None,
        end_of_text=stops,
        padding=None,
        values=values,
    )


def build_base(
    description: Description,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    execution: Execution | None = None,
    quantize: str = "none",
) -> GPT:
    """The model with its weights, wherever they lie. What was quantized is wide again, with the values it had then."""
    if not is_checkpoint(description.folder):
        model = load_described(description, dtype=dtype, device=device, execution=execution)
    else:
        tensors = read_safetensors(description.folder / "model.safetensors")
        config, vocab = description.config, description.vocab
        model = empty_model(config, vocab, execution=execution, dtype=dtype, device=device)
        assign_weights(model, tensors, str(description.folder))
    if quantize != "none":  # adapters know the base as it was beside them
        check_quantizing(torch.device(device))
        round_linears(model)
    return model


def base_fingerprint(description: Description) -> str:
    """A hash of the weights, for adapters to be told from those of another model.

    A checkpoint of ours and the folder that `flatout export` makes of it have the same.
    """
    if not is_checkpoint(description.folder):
        return weights_fingerprint(description)
    weights = description.folder / "model.safetensors"
    return own_fingerprint(weights, description.config, portable=bool(description.values))


def check_base(name: str, description: Description, expected: str | None) -> None:
    """Refuses a model that adapters were not trained on. Checkpoints from before there was a hash say nothing."""
    if expected is not None and base_fingerprint(description) != expected:
        raise CheckpointError(
            f"{name} holds other weights than those that the adapters were trained on",
            "put the model that they were trained on back in its place; on another one they mean nothing",
        )


def base_of(config: RunConfig, expected: str | None = None, *, named: bool = False) -> tuple[GPT, Description]:
    """The frozen model under a run's adapters, read again from where it came from. `expected` is the hash it had.

    `named` says that the user told where it is, so that errors speak of that place alone.
    """
    name = config.model.init_from
    assert name is not None, "checked by the config"
    try:
        description = describe_base(name, config.model.context, ignore_code=config.model.ignore_auto_map)
    except CheckpointError as error:
        if named:
            raise
        raise CheckpointError(
            f"the model that the adapters were trained on cannot be loaded: {error.message}",
            f"name it with --base MODEL, or put {name} back and call this from the folder that the run was trained in",
        ) from error
    check_same_model(config.model, description, "put the model that the adapters were trained on back in its place")
    check_base(name, description, expected)
    description = dataclasses.replace(description, config=config.model)
    return build_base(description, quantize=config.lora.quantize), description


__all__ = [
    "Base",
    "base_fingerprint",
    "base_of",
    "build_base",
    "check_base",
    "describe_base",
    "described_checkpoint",
    "open_base",
]
