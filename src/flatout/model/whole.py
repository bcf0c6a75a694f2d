"""Weights of the base that are trained whole beside adapters: the embedding, the head, biases.

Idea: such a weight is taken over by a parameter in fp32, which lies in the flat tensor of the adapters with A and B, so
that optimizers, checkpoints, reducers and clipping know nothing of it. The frozen weight waits, and comes back when the
adapters are taken off.

Contract: files are PEFT's. The embedding and the head are its `modules_to_save`, biases its `bias=all`. A tied head is
the embedding's own table: training one trains both, and files hold the table under both names, because PEFT makes two
modules of them. Files that hold two different ones are refused.
"""

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.errors import AdapterError
from flatout.model.adapter_targets import Choice
from flatout.model.gpt import GPT
from flatout.model.hub_weights import pieces_of

EMBEDDING, HEAD, BIASES = "embedding", "head", "biases"
_TABLES = {EMBEDDING: "embedding.weight", HEAD: "head.weight"}
HEAD_MODULE = "lm_head"
# PEFT's names of modules that are trained whole.
MODULES: Mapping[str, str] = {"embed_tokens": EMBEDDING, "wte": EMBEDDING, HEAD_MODULE: HEAD}


@final
class Whole:
    """One weight that is trained whole, in the place of the frozen one."""

    def __init__(self, owner: nn.Module, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.frozen: nn.Parameter = getattr(owner, attribute)
        self.put(attribute, nn.Parameter(self.frozen.detach().to(torch.float32, copy=True)))

    def own(self) -> dict[str, nn.Parameter]:
        """What is trained, by its name in its module."""
        return {self.attribute: getattr(self.owner, self.attribute)}

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Takes another parameter for it."""
        setattr(self.owner, name, parameter)

    def start(self) -> None:
        """The frozen weight's values."""
        self.own()[self.attribute].copy_(self.frozen.detach())

    def merge(self, dtype: torch.dtype) -> None:
        """Gives the frozen weight today's values."""
        self.frozen.data = self.own()[self.attribute].detach().to(dtype, copy=True)

    def restore(self) -> None:
        """Puts the frozen weight back, where the trained one is now."""
        self.frozen.data = self.frozen.data.to(self.own()[self.attribute].device)
        self.put(self.attribute, self.frozen)


def settled(also: Iterable[str], config: ModelConfig) -> tuple[str, ...]:
    """What is trained whole, each once and in order; of a tied model the embedding stands for the head as well."""
    named = set(also)
    if config.tied and HEAD in named:
        if EMBEDDING not in named:
            raise AdapterError(
                "the output head is the embedding's own table in this model, and cannot be trained alone",
                "train both: lora.also=[embedding]",
                "lora.also",
            )
        named.discard(HEAD)
    if config.embedding_norm and EMBEDDING in named:
        raise AdapterError(
            "this model norms its embedding (model.embedding_norm), and no format of adapters can say so of a table",
            "leave embedding out of lora.also",
            "lora.also",
        )
    return tuple(name for name in (EMBEDDING, HEAD, BIASES) if name in named)


def weights_of(model: GPT, also: Iterable[str], *, strict: bool = True) -> list[str]:
    """The parameters that are trained whole, by their names in the model. `strict` refuses biases where are none."""
    named = settled(also, model.config)
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    if BIASES in named and not biases and strict:
        raise AdapterError("the model has no biases to train", "leave biases out of lora.also", "lora.also")
    return [*(_TABLES[name] for name in named if name != BIASES), *(biases if BIASES in named else ())]


def taken_over(model: GPT, names: Iterable[str]) -> dict[str, Whole]:
    """The trained weights of these names, each in the place of its frozen one."""
    pairs = ((name, name.rpartition(".")) for name in names)
    return {name: Whole(model.get_submodule(owner), attribute) for name, (owner, _, attribute) in pairs}


def stored_as(config: ModelConfig, parameters: Mapping[str, Tensor], choices: Iterable[Choice]) -> dict[str, Tensor]:
    """Where weights that are trained whole lie, by PEFT's names. A layer with an adapter is called `base_layer`."""
    adapted = {choice.target.path for choice in choices}
    prefix = "transformer." if config.family == "gpt2" else "model."
    stored: dict[str, Tensor] = {}
    for name, piece in pieces_of(config).items():
        if piece.name not in parameters:
            continue
        module, _, kind = (name if name.startswith(f"{HEAD_MODULE}.") else prefix + name).rpartition(".")
        stored[f"{module}{'.base_layer' if module in adapted else ''}.{kind}"] = piece.of(parameters[piece.name])
        if config.tied and piece.name == _TABLES[EMBEDDING]:
            stored[f"{HEAD_MODULE}.{kind}"] = stored[f"{module}.{kind}"]
    return stored


def module_names(config: ModelConfig, also: Iterable[str]) -> list[str]:
    """PEFT's `modules_to_save`."""
    named = settled(also, config)
    table = "wte" if config.family == "gpt2" else "embed_tokens"
    head = HEAD in named or (EMBEDDING in named and config.tied)
    return [*([table] if EMBEDDING in named else []), *([HEAD_MODULE] if head else [])]
