"""Models from Python: a decoder of ours with other parts in it, or a module of somebody else's.

Contract: a part is an ordinary torch module. A block takes the residual stream [B, T, W] and returns it; what stands in
the place of `attention` or `mlp` takes the norm's output [B, T, W] and returns what is added to the stream. A whole
module takes token ids [B, T] and returns logits [B, T, V], or an object that has them as `logits`.
Trap: kernels, decoding caches and packed documents know nothing of such parts. The engine has torch's operations under
them, `cacheable` is off, and configs with packed documents are refused.

Shape legend: B batch, T positions, W width, V vocabulary.
"""

import hashlib
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config.schema import ModelConfig
from flatout.errors import ConfigError
from flatout.files import canonical_json
from flatout.model.activations import ActivationOffload
from flatout.model.cache import Cache
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.gpt import GPT
from flatout.model.layers import MLP, Attention, Block
from flatout.model.narrow import ModelNarrow
from flatout.model.operations import Branch, Own, Shared, Stream
from flatout.ops.documents import Layout
from flatout.ops.reference import IGNORED

ModelGiven = nn.Module | Callable[[GPT], nn.Module | None]


@final
class PlainBlock(nn.Module):
    """A block of the user's."""

    attention = None  # that we know of

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, stream: Stream, shared: Shared, own: Own) -> Stream:
        return Stream(self.module(shared.operations.hand_on(stream).x_BTW))


@final
class PlainBranch(nn.Module):
    """A mixer or an MLP of the user's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, h_BTW: Tensor, shared: Shared, own: Own) -> Branch:
        return Branch(self.module(h_BTW))


@final
class GivenModel(GPT):
    """A module of the user's in the place of our decoder."""

    def __init__(self, module: nn.Module, config: ModelConfig, vocab: int) -> None:
        nn.Module.__init__(self)
        self.config, self.vocab, self.execution = config, vocab, Execution()
        self.module = module
        self.blocks = nn.ModuleList()
        self.offload = ActivationOffload(self)
        self.narrow = ModelNarrow([], self.execution)
        self.freshen = None
        self.compiled_apart, self.cacheable = False, False

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, label_smoothing: float = 0.0, layout: Layout | None = None
    ) -> Tensor:
        logits_BTV = self.logits(tokens_BT, layout=layout)
        how = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": label_smoothing}
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), **how)

    def logits(
        self, tokens_BT: Tensor, cache: Cache | None = None, *, last: bool = False, layout: Layout | None = None
    ) -> Tensor:
        assert cache is None, "it is not cacheable"
        assert layout is None, "refused with model="
        logits_BTV = _logits_of(self.module(tokens_BT)).float()
        return logits_BTV[:, -1:] if last else logits_BTV

    def use_window(self, window: int | None) -> None:
        pass


def check_model_given(given: object) -> None:
    if not callable(given):  # a module is, too
        raise ConfigError(
            f"a {type(given).__name__} was given as model=",
            "give a function that changes the built model, or a torch module",
        )


def adopt(built: GPT, given: ModelGiven, *, seed: int) -> GPT:
    """The model that a program gave: `built` after its function has changed it, or a module in its place.

    What the function draws comes from `seed`, and the random streams of the process stay as they were.
    """
    check_model_given(given)
    places = {name: type(module) for name, module in built.named_modules()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = given if isinstance(given, nn.Module) else given(built)
        found = built if found is None else found
        if not isinstance(found, nn.Module):
            raise ConfigError(
                f"the function given as model= returned a {type(found).__name__}",
                "return a torch module, or nothing where the model was changed in its place",
            )
        if not any(parameter.requires_grad for parameter in found.parameters()):
            raise ConfigError(
                "the model given as model= has nothing to train", "let some of its parameters require gradients"
            )
        if isinstance(found, GPT):
            return _with_parts(found, built, places)
        model = GivenModel(found, built.config, built.vocab)
        _check_logits(model)
        return model


def _with_parts(model: GPT, built: GPT, places: dict[str, type]) -> GPT:
    """A decoder of ours whose foreign parts can be called as its own."""
    if (model.config, model.vocab) != (built.config, built.vocab):
        raise ConfigError(
            "the model given as model= is of another shape than the config's", "give it the model section of that model"
        )
    if len(model.blocks) != built.config.layers:
        raise ConfigError(
            f"the model given as model= has {len(model.blocks)} blocks, and model.layers is {built.config.layers}",
            f"set model.layers={len(model.blocks)}",
        )
    for place, block in enumerate(model.blocks):
        if isinstance(block, Block):
            if not isinstance(block.attention, Attention | Eigenstate | PlainBranch):
                block.add_module("attention", PlainBranch(block.attention))
            if not isinstance(block.mlp, MLP | PlainBranch):
                block.add_module("mlp", PlainBranch(block.mlp))
        elif not isinstance(block, PlainBlock):
            model.blocks[place] = PlainBlock(block)
    _check_places(model, places)
    model.narrow = ModelNarrow([], model.execution)  # it had layers that may be gone, and is for kernels
    model.random = True  # a part may draw random numbers: where it is recomputed, the same ones
    model.cacheable = False
    return model


def _check_places(module: nn.Module, places: dict[str, type], inside: str = "") -> None:
    """Refuses a change that our own modules would not notice, as they use the weights of their parts directly."""
    for last, child in module.named_children():
        name = f"{inside}.{last}" if inside else last
        if name not in places or last in ("attention", "mlp") or inside == "blocks":
            called = True  # as a module, with nothing asked of it but its forward pass
        else:
            called = type(child) is places[name] and not (child._forward_hooks or child._forward_pre_hooks)
        if not called or (not isinstance(child, PlainBlock | PlainBranch) and "forward" in vars(child)):
            raise ConfigError(
                f"model= changes {name}, which our own modules compute with and would not notice",
                "replace a whole block, its attention or its mlp, or give a module of your own",
            )
        if type(child) is places.get(name):
            _check_places(child, places, name)


def structure_of(model: nn.Module) -> str:
    """A hash of what a model is made of: names, classes, shapes. Weights of one structure fit another of the same."""
    classes = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    shapes = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(canonical_json({"classes": classes, "shapes": shapes})).hexdigest()


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What parts remember besides their parameters, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def _logits_of(answer: Any) -> Tensor:
    return getattr(answer, "logits", answer)


@torch.no_grad()
def _check_logits(model: GivenModel) -> None:
    """Asks a module for the logits of two tokens."""
    module, was_training = model.module, model.module.training
    device = next(module.parameters()).device
    try:
        answer = _logits_of(module.eval()(torch.zeros((1, 2), dtype=torch.int64, device=device)))
    finally:
        module.train(was_training)
    shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if shape != (1, 2, model.vocab):
        raise ConfigError(
            f"the module given as model= answers ids of shape (1, 2) with {shape}",
            f"it must return logits of shape (1, 2, {model.vocab}), or an object with such `logits`",
        )
