"""A model or an optimizer from Python, in the place of those that the config describes.

A model is our decoder with other parts in it, or a module of the user's. A part is an ordinary torch module. A block
takes the residual stream [B, T, W] and returns it; what stands in the place of `attention` or `mlp` takes the norm's
output [B, T, W] and returns what is added to the stream. A whole module takes token ids [B, T] and returns logits
[B, T, V], or an object that has them as `logits`.

An optimizer is rules beside the config's own, or a torch optimizer that a function builds. That keeps the contract of
ours: gradients are divided first, an update with non-finite gradients is left out, and the schedule of `optim` scales
the rates that it was built with. Its state goes to checkpoints by parameter and comes back bit for bit: tensors as they
are, numbers as tensors of no dimensions with their type in the name (`step:int`), numbers of a group that have moved
with its first parameter (`group:k:int`). Other state is refused after the first update.

Contract: what cannot be had together with them is refused by name. A checkpoint says so, since its
files alone do not make such a run again.
Traps:
- Kernels, recordings, caches and packed documents know nothing of such models, which run by torch's operations.
- A torch optimizer's `step` has to know whether to update, so the host waits for the device once a step. What it keeps
  elsewhere than in `state` and `param_groups` is not saved.

Shape legend: B batch, T positions, W width, V vocabulary.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flatout.config.schema import ModelConfig
from flatout.device import ONE_AT_A_TIME
from flatout.errors import CheckpointError, ConfigError
from flatout.files import canonical_json
from flatout.model.cache import Cache
from flatout.model.count import parameter_count
from flatout.model.eigenstate import Eigenstate
from flatout.model.execution import Execution
from flatout.model.gpt import GPT
from flatout.model.layers import MLP, Attention, Block
from flatout.model.narrow import ModelNarrow
from flatout.model.operations import Branch, Own, Shared, Stream
from flatout.model.protocol import LanguageModel
from flatout.ops.documents import DocumentLayout
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import Group, Optimizer, Rule, StateBytes, Table, Trainable, numbers_of, read_numbers
from flatout.resolve.case import Speed
from flatout.resolve.plan import Custom
from flatout.world import World

ModelFromPython = nn.Module | Callable[[GPT], nn.Module | None]
Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
OptimizerFromPython = Rule | Sequence[Rule] | Build
BUFFER = "buffer."  # before the names of buffers in a checkpoint
_TYPES: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}


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
class CustomModel(nn.Module):
    """A module of the user's as a `LanguageModel`."""

    def __init__(self, module: nn.Module, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.module, self.config, self.vocab = module, config, vocab
        self.narrow = ModelNarrow([], Execution())

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        label_smoothing: float = 0.0,
        layout: DocumentLayout | None = None,
        window: int | None = None,
    ) -> Tensor:
        logits_BTV = self.logits(tokens_BT, layout=layout)
        how = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": label_smoothing}
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), **how)

    def logits(
        self, tokens_BT: Tensor, cache: Cache | None = None, *, last: bool = False, layout: DocumentLayout | None = None
    ) -> Tensor:
        assert cache is None, "only a GPT makes one"
        assert layout is None, "refused with model="
        answer = self.module(tokens_BT)
        logits_BTV = getattr(answer, "logits", answer).float()
        return logits_BTV[:, -1:] if last else logits_BTV

    def drop(self) -> None:
        """Nothing is left behind."""


def check_model(model: object) -> None:
    if not callable(model):  # a module is, too
        raise ConfigError(
            f"model= is a {type(model).__name__}", "give a function that changes the built model, or a torch module"
        )


def customize(built: GPT, custom: ModelFromPython, *, seed: int) -> GPT | CustomModel:
    """The model of a program: `built` after its function has changed it, or a module in its place.

    What the function draws comes from `seed`, and the random streams of the process stay as they were.
    """
    check_model(custom)
    places = {name: type(module) for name, module in built.named_modules()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = custom if isinstance(custom, nn.Module) else custom(built)
        found = built if found is None else found
        if not isinstance(found, nn.Module):
            raise ConfigError(
                f"the function model= returned a {type(found).__name__}",
                "return a torch module, or nothing where the model was changed in its place",
            )
        if not any(parameter.requires_grad for parameter in found.parameters()):
            raise ConfigError("model= has nothing to train", "let some of its parameters require gradients")
        if isinstance(found, GPT):
            return _with_parts(found, built, places)
        model = CustomModel(found, built.config, built.vocab)
        _check_logits(model)
        return model


def _with_parts(model: GPT, built: GPT, places: dict[str, type]) -> GPT:
    """A decoder of ours whose foreign parts can be called as its own."""
    if (model.config, model.vocab) != (built.config, built.vocab):
        raise ConfigError("model= is of another shape than the config's", "give it the model section of that model")
    if len(model.blocks) != built.config.layers:
        raise ConfigError(
            f"model= has {len(model.blocks)} blocks, and model.layers is {built.config.layers}",
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


def structure_of(model: LanguageModel) -> str:
    """A hash of the parts of a model: names, classes, shapes. Weights of one structure fit another of the same."""
    classes = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    if isinstance(model, CustomModel):  # as it was when the hashes in checkpoints were made
        classes = [("", "GivenModel"), *classes[1:], ("blocks", "ModuleList")]
    shapes = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(canonical_json({"classes": classes, "shapes": shapes})).hexdigest()


@torch.no_grad()
def _check_logits(model: CustomModel) -> None:
    """Asks a module for the logits of two tokens."""
    module, was_training = model.module, model.module.training
    device = next(module.parameters()).device
    try:
        answer = module.eval()(torch.zeros((1, 2), dtype=torch.int64, device=device))
    finally:
        module.train(was_training)
    answer = getattr(answer, "logits", answer)
    shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if shape != (1, 2, model.vocab):
        raise ConfigError(
            f"the module model= answers ids of shape (1, 2) with {shape}",
            f"it must return logits of shape (1, 2, {model.vocab}), or an object with such `logits`",
        )


# --- optimizers -------------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: OptimizerFromPython) -> None:
    """Refuses anything but rules or a function that builds a torch optimizer."""
    rules = [optimizer] if isinstance(optimizer, Rule) else optimizer
    if not isinstance(rules, str) and isinstance(rules, Sequence) and all(isinstance(rule, Rule) for rule in rules):
        return
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer | Optimizer)
    if not callable(optimizer) or is_class:
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise ConfigError(
            f"optimizer= is {what}",
            "give rules, or a function that builds a torch optimizer for the parameters of the run's model, such as "
            "lambda named: torch.optim.SGD(named.values(), lr=0.1)",
        )


def _rule_of(build: Build, trained: Sequence[Trainable], factors: Table) -> Rule:
    named = {one.name: one.parameter for one in trained}
    built = build(dict(named))
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(
            f"the function optimizer= returned a {type(built).__name__}",
            "return a torch.optim.Optimizer over the parameters it is given, by name",
        )
    what = type(built).__name__
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{what} evaluates the loss itself, by a closure", "give an optimizer that takes gradients")
    taken = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    left = next((name for name, parameter in named.items() if id(parameter) not in taken), None)
    if left is not None:
        raise ConfigError(
            f"{what} does not take {left}", "give it all parameters; one that is not to be trained needs no gradient"
        )
    if len(taken) > len(named):
        raise ConfigError(f"{what} takes tensors that the model does not train", "give it the parameters by name alone")
    rates = [group.get("lr") for group in built.param_groups]
    peak = next((float(rate) for rate in rates if rate is not None), 0.0)
    return Rule(
        name=what,
        takes=lambda _: True,
        optimizer=lambda groups: TorchOptimizer(groups, built),
        bytes=StateBytes(device=8, host=0, checkpoint=8),  # of most of them
        rate=[factor * peak for factor in factors],
        settings={"factor": factors},
        whole=True,
    )


@final
class TorchOptimizer(Optimizer):
    """A torch optimizer as one of ours."""

    def __init__(self, groups: Sequence[Group], built: torch.optim.Optimizer) -> None:
        super().__init__(groups)
        self.built = built
        self._began = [{key: value for key, value in group.items() if key != "params"} for group in built.param_groups]
        self._group = {one: number for number, group in enumerate(built.param_groups) for one in group["params"]}
        self._first = {group["params"][0]: number for number, group in enumerate(built.param_groups) if group["params"]}
        self._checked = False

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}  # it makes its own, with the first update

    def create_state(self) -> None:
        pass

    @torch.no_grad()
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        _, applied, groups = read_numbers(self.groups, numbers_of(self.groups, divisor, finite).tolist())
        if not applied:
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        for group, began in zip(self.built.param_groups, self._began, strict=True):
            if "lr" in began:
                group["lr"] = began["lr"] * groups[0].fixed("factor")
        self.built.step()
        increment_version(self.parameters)
        if not self._checked:
            for parameter in self.parameters:
                self.saved(parameter)
            self._checked = True

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        found = dict(_encoded(self.built.state.get(parameter, {}), type(self.built).__name__))
        number = self._first.get(parameter)
        if number is not None:
            began, now = self._began[number], self.built.param_groups[number]
            moved = {key: now[key] for key in now.keys() - {"params", "lr"} if not _same(now[key], began.get(key))}
            found |= {f"group:{key}": value for key, value in _encoded(moved, type(self.built).__name__).items()}
        return found

    def take_over(self, parameter: Tensor, saved: Mapping[str, Tensor]) -> None:
        group = self.built.param_groups[self._group[parameter]]
        state: dict[str, Any] = {}
        on_device = bool(group.get("fused") or group.get("capturable"))  # kernels that never ask the host for counts
        for key, tensor in saved.items():
            name, value = _decoded(key, tensor, parameter, on_device=on_device)
            if name.startswith("group:"):
                group[name.removeprefix("group:")] = value
            else:
                state[name] = value
        if state:
            self.built.state[parameter] = state

    def forget(self) -> None:
        self.built.state.clear()
        for group, began in zip(self.built.param_groups, self._began, strict=True):
            for key in group.keys() - began.keys() - {"params"}:
                del group[key]
            group.update(began)


def _same(now: Any, began: Any) -> bool:
    """Tensors are compared by identity: the value of one on the device would be waited for."""
    return now is began or (not isinstance(now, Tensor) and bool(now == began))


def _encoded(state: Mapping[Any, Any], what: str) -> dict[str, Tensor]:
    """State as tensors, with the types of numbers in their names."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        kind = next((name for name, (of, _) in _TYPES.items() if type(value) is of), None)
        if not isinstance(key, str) or "." in key or ":" in key:
            raise ConfigError(f"the state of {what} has the name {key!r}", "a checkpoint needs plain names")
        if isinstance(value, Tensor):
            found[key] = value.detach()
        elif value is None:
            found[f"{key}:none"] = torch.zeros(0)
        elif kind is not None:
            found[f"{key}:{kind}"] = torch.tensor(value, dtype=_TYPES[kind][1])
        else:
            raise ConfigError(
                f"the state of {what} has {key}, a {type(value).__name__}, which a checkpoint cannot hold",
                "give an optimizer whose state is tensors and numbers",
            )
    return found


def _decoded(key: str, tensor: Tensor, parameter: Tensor, *, on_device: bool) -> tuple[str, Any]:
    name, _, kind = key.rpartition(":")
    if kind == "none" and name:
        return name, None
    if kind in _TYPES and name:
        return name, tensor.item()
    if name not in ("", "group"):
        raise CheckpointError(f"the optimizer's state has {key}", "it was saved by another version")
    device = parameter.device if kind != "step" or on_device else torch.device("cpu")
    return key, tensor.to(device, copy=True)


# --- the parts of a run that come from Python, and the entries of its checkpoints about them --------------------------


@dataclasses.dataclass(frozen=True)
class CustomParts:
    """`model` is a module, or a function that changes the built one; `optimizer` is rules, or builds one of torch's."""

    model: ModelFromPython | None = None
    optimizer: OptimizerFromPython | None = None

    @property
    def facts(self) -> Custom:
        """Which of them there are. Rules stand beside the config's; a torch optimizer takes their place."""
        torch_optimizer = self.optimizer is not None and not isinstance(self.optimizer, Rule | Sequence)
        return Custom(self.model is not None, self.optimizer is not None, torch_optimizer)

    def check(self) -> None:
        """Refuses a value that is no model, or no optimizer."""
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        if self.model is not None:
            check_model(self.model)

    def model_of(self, built: GPT, speed: Speed, seed: int) -> GPT | CustomModel:
        """The model to train, on the host."""
        if self.model is None:
            return built
        with ONE_AT_A_TIME:  # it draws from the generators of the process
            model = customize(built, self.model, seed=seed)
        if not isinstance(model, CustomModel):
            return model
        for name, plain in (("checkpointing", "none"), ("loss", "plain")):
            if getattr(speed, name) != plain:
                raise ConfigError(
                    f"model= is a module of your own, and speed.{name} is about the parts of our models",
                    f"set speed.{name}={plain}",
                )
        if speed.compile == "regional":
            raise ConfigError(
                "model= is a module of your own, and has no blocks to compile", "set speed.compile=default"
            )
        return model

    def rules(self, own: Sequence[Rule], trained: Sequence[Trainable], factors: Table) -> tuple[Rule, ...]:
        """The rules of a run: custom ones first and the config's for the rest, or that of a torch optimizer."""
        custom = () if self.optimizer is None else self.optimizer
        first = (custom,) if isinstance(custom, Rule) else custom
        return (*first, *own) if isinstance(first, Sequence) else (_rule_of(first, trained, factors),)

    def notices(self, model: LanguageModel) -> Iterator[str]:
        if self.model is not None:
            kind = "a module of your own" if isinstance(model, CustomModel) else "our decoder, changed"
            yield (
                f"model= is {kind}: our kernels and recorded graphs do not know it, so it runs by torch's operations, "
                "samples are written without a cache, FLOPs are counted by parameters, and the memory estimate is that "
                "of the config's model"
            )
        if self.facts.torch_optimizer:
            yield (
                "optimizer= is torch's: the schedule of optim scales its own rates, learning_rate, betas, eps and "
                "weight_decay of optim are not used, and each update waits for the device"
            )

    def flops(self, model: LanguageModel, described: float) -> float:
        """FLOPs per token, by six for each parameter where the model is not the one that the config describes."""
        if self.model is None:
            return described
        count = count_of(model)
        more = count - parameter_count(model.config, model.vocab)
        return 6.0 * count if isinstance(model, CustomModel) else described + 6.0 * more

    def saved(self, model: LanguageModel, rules: str) -> dict[str, str]:
        """Entries of a checkpoint's state about them; `rules` are the names of all that update weights."""
        structure = {} if self.model is None else {"given_model": structure_of(model)}
        return structure | ({} if self.optimizer is None else {"given_optimizer": rules})

    def _buffers(self, model: LanguageModel) -> dict[str, Tensor]:
        """The buffers of a model from Python, by name."""
        if self.model is None:
            return {}
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}

    def buffers(self, model: LanguageModel) -> dict[str, Tensor]:
        """Those for a checkpoint: copies, as a forward pass may change them while it is still being written."""
        return {f"{BUFFER}{name}": tensor.clone() for name, tensor in self._buffers(model).items()}

    def share_buffers(self, model: LanguageModel, world: World) -> None:
        """Gives all ranks the buffers of the first one: each has seen its own share, and one is saved."""
        for tensor in self._buffers(model).values() if world.size > 1 else ():
            world.follow_first(tensor)

    def restore_buffers(self, model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._buffers(model).items():
            tensor.copy_(tensors[f"{BUFFER}{name}"])


def count_of(model: LanguageModel) -> int:
    """Parameters that a model really has."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_same_parts(current: Mapping[str, str], stored: Mapping[str, Any]) -> None:
    """Refuses to resume a run with another model or optimizer from Python than it was trained with.

    `current` are the entries that this run would save, `stored` is the state of the checkpoint.
    """
    for key, word in (("given_model", "model="), ("given_optimizer", "optimizer=")):
        before, now = stored.get(key), current.get(key)
        if before == now:
            continue
        if now is None:
            name = "" if word == "model=" else f" ({before})"
            raise CheckpointError(
                f"the run was trained with {word} from Python{name}, and none was given",
                f"resume it with flatout.train and the same {word}",
            )
        if before is None:
            raise CheckpointError(f"{word} was given, and the run was trained without", f"leave {word} out")
        if key == "given_optimizer":
            other = f"the run was trained with the optimizer {before}, and {now} was given"
        else:
            other = "model= is made of other parts than the run's"
        raise CheckpointError(other, f"give the same {word} as before, or start a new run")
