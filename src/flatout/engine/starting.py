"""Weights that pretraining starts from: GPT-2's, or those of a run of ours, which may get a longer context.

Contract: everything is checked before a model is built, and weights are copied, so the base may go afterwards. The
shape is the config's own and must be the base's, but for what holds no weights: context, rotary frequencies, windows,
dropout, the term for energy. Nothing else of the base's run is taken over: optimizer, schedule and data begin anew.

Trap: a longer context. Rotary positions beyond those of the base turn by angles it has never seen. That is allowed, and
told. Slowing the frequencies down keeps angles in the range it knows, but changes those of near tokens as well, so it
is for the user to measure (docs/long-context.md).
"""

import dataclasses
import shlex
from pathlib import Path

from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.yaml_loader import format_value
from flatout.data.tokenizer import Tokenizer, tokenizer_from_json
from flatout.engine.base_model import read_own
from flatout.engine.run_folder import checkpoint_to_load
from flatout.errors import CheckpointError, DataError
from flatout.model.gpt import GPT
from flatout.model.hub import read_description
from flatout.model.hub_find import find_model
from flatout.model.hub_weights import load_huggingface
from flatout.model.weights import assign_weights, read_safetensors

_ROPE = ("rope_base", "rope_scaling", "rope_factor", "rope_low", "rope_high", "rope_original_context")
_FREE = {"init_from", "ignore_auto_map", "context", "vocab", "dropout", "window", "energy", *_ROPE}


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the weights are, and what to say of them."""

    folder: Path
    ours: bool
    notice: str

    def fill(self, model: GPT) -> None:
        if self.ours:
            assign_weights(model, read_safetensors(self.folder / "model.safetensors"), str(self.folder))
        else:
            load_huggingface(model, self.folder)


def open_start(config: ModelConfig, vocab: int | None, tokenizer: Tokenizer | None = None) -> Start | None:
    """What `model.init_from` names, if anything; refused unless a model of this config can take its weights.

    What is not known yet of the data is not compared.
    """
    name = config.init_from
    if name is None:
        return None
    found = find_model(name)
    if found.kind == "huggingface":
        return _gpt2(config, vocab, found.path)
    folder = checkpoint_to_load(found.path, best=True)
    run, state, language = read_own(name, folder, training=False)
    _check_shape(config, run.model, name)
    if tokenizer is not None and tokenizer_from_json(language).fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{name} was trained with another tokenizer than the data here",
            f"prepare the data in a data.folder of its own, with {_tokenizer_of(run, folder)}",
        )
    if vocab is not None and vocab != state["vocab"]:
        raise CheckpointError(
            f"{name} has {state['vocab']:,} ids, and here there are {vocab:,}", f"set model.vocab={state['vocab']}"
        )
    return Start(folder, True, f"starts from {folder}{_longer(config, run.model)}")


def _tokenizer_of(run: RunConfig, checkpoint: Path) -> str:
    named = run.data.tokenizer in ("bytes", "gpt2")  # others are made from the data, and are not the same twice
    return f"data.tokenizer={run.data.tokenizer if named else checkpoint / 'tokenizer.json'}"


def _check_shape(config: ModelConfig, base: ModelConfig, name: str) -> None:
    free = _FREE - {"context"} if config.positions == "learned" else _FREE
    for field in sorted(ModelConfig.model_fields.keys() - free):
        here, there = (format_value(getattr(model, field)) for model in (config, base))
        if here != there:
            raise CheckpointError(
                f"{name} has model.{field} {there}, and here it is {here}",
                f"set {shlex.quote(f'model.{field}={there}')}, and begin with the preset that it was trained by",
            )


def _longer(config: ModelConfig, base: ModelConfig) -> str:
    if config.context <= base.context:
        return ""
    told = f", which has learned contexts of {base.context:,} tokens; here they have {config.context:,}"
    if "A" in config.kinds and all(getattr(config, field) == getattr(base, field) for field in _ROPE):
        told += ". Rotary positions beyond are new to it; model.rope_base and model.rope_scaling slow them down"
    return told


def _gpt2(config: ModelConfig, vocab: int | None, folder: Path) -> Start:
    description = read_description(folder, ignore_code=config.ignore_auto_map)
    found = description.config
    if found.family != "gpt2":
        raise CheckpointError(
            f"{folder} holds a {description.model_type} model; pretraining starts from GPT-2 or from a run of ours",
            f"train it on text with `flatout finetune model.init_from={folder} chat.source=FILE chat.format=text`",
        )
    if config.family != "gpt2":
        raise CheckpointError(f"{folder} holds a GPT-2, and the model is of another family", "set model.family=gpt2")
    asked = (config.layers, config.width, config.heads, config.context, vocab or description.vocab)
    stored = (found.layers, found.width, found.heads, found.context, description.vocab)
    if asked != stored:
        raise CheckpointError(
            f"{folder} has (layers, width, heads, context, vocab) {stored}, the model section says {asked}",
            "make the model section equal to the weights",
        )
    return Start(folder, False, f"starts from the GPT-2 of {folder}")
