"""An optimizer from Python: rules beside the config's own, or a torch optimizer that a function builds.

A torch optimizer keeps the contract of ours: gradients are divided first, an update with non-finite gradients is left
out, and the schedule of `optim` scales the rates that it was built with. Its state goes to checkpoints by parameter and
comes back bit for bit: tensors as they are, numbers as tensors of no dimensions with their type in the name
(`step:int`), and numbers of a group that have moved since it was built with the group's first parameter
(`group:k:int`). State that is neither is refused after the first update, before anything could depend on it.
Trap: `step` has to know whether to update, so the host waits for the device once a step. What an optimizer keeps
elsewhere than in `state` and `param_groups` is not saved.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flatout.errors import CheckpointError, ConfigError
from flatout.optim.optimizer import Group, Optimizer, Rule, StateBytes, Table, Trainable, numbers_of, read_numbers

Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
OptimizerGiven = Rule | Sequence[Rule] | Build
_TYPES: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}


def is_function(given: OptimizerGiven | None) -> bool:
    """Whether a function was given that builds a torch optimizer."""
    return given is not None and not isinstance(given, Rule | Sequence)


def check_optimizer_given(given: OptimizerGiven) -> None:
    """Refuses what is neither rules nor a function that builds a torch optimizer."""
    way = "give a function that builds a torch optimizer, such as lambda named: torch.optim.SGD(named.values(), lr=0.1)"
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer | Optimizer):
        raise ConfigError(f"the class {given.__name__} was given as optimizer=", way)
    if isinstance(given, torch.optim.Optimizer):
        raise ConfigError(f"optimizer= is a {type(given).__name__} over parameters of another model", way)
    if isinstance(given, str) or not (callable(given) or isinstance(given, Rule | Sequence)):
        raise ConfigError(f"a {type(given).__name__} was given as optimizer=", way)
    wrong = next((one for one in given if not isinstance(one, Rule)), None) if isinstance(given, Sequence) else None
    if wrong is not None:
        raise ConfigError(
            f"optimizer= holds a {type(wrong).__name__}", "give rules, or a function that builds a torch optimizer"
        )


def rules_with(
    given: OptimizerGiven | None, own: Sequence[Rule], trained: Sequence[Trainable], factors: Table
) -> tuple[Rule, ...]:
    """The rules of a run: given ones first and the config's for what they leave, or that of a torch optimizer."""
    if given is None:
        return tuple(own)
    if isinstance(given, Rule):
        return (given, *own)
    if isinstance(given, Sequence):
        return (*given, *own)
    return (_rule_of(given, trained, factors),)


def name_of(given: OptimizerGiven | None, rules: Sequence[Rule]) -> str | None:
    """What a checkpoint calls an optimizer that was given; None where it is the config's."""
    if given is None:
        return None
    return rules[0].name if is_function(given) else ", ".join(rule.name for rule in rules)


def _rule_of(build: Build, trained: Sequence[Trainable], factors: Table) -> Rule:
    named = {one.name: one.parameter for one in trained}
    built = build(dict(named))
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(
            f"the function given as optimizer= returned a {type(built).__name__}",
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

    def take_over(self, parameter: Tensor, saved: Mapping[str, Tensor]) -> str:
        group = self.built.param_groups[self._group[parameter]]
        state: dict[str, Any] = {}
        for key, tensor in saved.items():
            name, value = _decoded(key, tensor, parameter, on_device=_counts_on_device(group))
            if name.startswith("group:"):
                group[name.removeprefix("group:")] = value
            else:
                state[name] = value
        if state:
            self.built.state[parameter] = state
        return ""

    def forget(self) -> None:
        self.built.state.clear()
        for group, began in zip(self.built.param_groups, self._began, strict=True):
            for key in group.keys() - began.keys() - {"params"}:
                del group[key]
            group.update(began)


def _same(now: Any, began: Any) -> bool:
    return now is began or (not isinstance(now, Tensor) and bool(now == began))


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether torch has the counts of updates beside the weights: for kernels that never ask the host."""
    return bool(group.get("fused") or group.get("capturable"))


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
