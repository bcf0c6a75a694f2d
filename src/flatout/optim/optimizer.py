"""What an optimizer is: a rule that says which parameters it takes, and a class that updates them.

Contract of `update(divisor, finite)`, which every optimizer keeps:
- gradients count as divided by `divisor` (loss scale and clipping in one number);
- where `finite` is false nothing changes: no weight, no state, no count;
- both are tensors on the device. Only an optimizer that lives on the host, or has no fused kernel, reads them there.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError

Table = Sequence[float]  # a value for every applied update; the last one stays


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A tensor that an optimizer updates, as rules see it."""

    name: str
    parameter: nn.Parameter
    module: object  # that holds it under the last part of its name
    matrix: bool  # or many of them, laid out flat


def trainables(model: nn.Module) -> list[Trainable]:
    """What a model trains, in its own order; a tied weight comes once."""
    modules = dict(model.named_modules())
    return [
        Trainable(name, parameter, modules[name.rpartition(".")[0]], parameter.ndim >= 2)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of state for each parameter."""

    device: float
    host: float
    checkpoint: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """Which parameters one optimizer takes, and by which numbers it updates them.

    `rate` is a schedule. `decay`, and what `settings` has under names of the optimizer's own, are numbers or schedules.
    """

    name: str
    takes: Callable[[Trainable], bool]
    optimizer: "Callable[[Sequence[Group]], Optimizer]"  # rules with the same one share one instance
    bytes: StateBytes
    rate: Table
    decay: float | Table = 0.0
    settings: Mapping[str, float | Table] = dataclasses.field(default_factory=dict)
    whole: bool = False  # it looks at a matrix as a whole, and cannot have its state and work dealt out in slices

    @property
    def numbers(self) -> dict[str, float | Table]:
        return {"rate": self.rate, "decay": self.decay, **self.settings}


@dataclasses.dataclass(frozen=True)
class Group:
    """The parameters that a rule took. `numbers` are the rule's; one with a schedule is a tensor on the device."""

    rule: Rule
    parameters: Sequence[nn.Parameter]
    numbers: Mapping[str, float | Tensor]

    def updated(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    def fixed(self, name: str) -> float:
        """A number that must not follow a schedule."""
        number = self.numbers[name]
        assert not isinstance(number, Tensor), f"{self.rule.name}: {name} takes a number, not a schedule"
        return number


class Optimizer(abc.ABC):
    """Updates the parameters of its groups, and holds their state by parameter."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group.parameters]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @abc.abstractmethod
    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has never been updated. A checkpoint holds these tensors under these names."""

    @abc.abstractmethod
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        """Updates all parameters that have a gradient, or changes nothing at all."""

    def create_state(self) -> None:
        """Makes the state of every parameter that has none: all of it, or none where memory runs out."""
        made = {p: self.fresh_state(p) for p in self.parameters if p not in self.state}
        self.state.update(made)

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter as a checkpoint holds it; empty before the first update."""
        return self.state.get(parameter, {})

    def take_over(self, parameter: Tensor, saved: Mapping[str, Tensor]) -> str:
        """Puts saved state back. Returns how it had to be converted, or nothing where it is as it was."""
        state = self.fresh_state(parameter)
        if saved.keys() != state.keys():
            raise CheckpointError(
                f"the optimizer's state is {', '.join(sorted(saved))}, this optimizer needs {', '.join(sorted(state))}",
                "it was saved by another optimizer: resume with the one that the run had",
            )
        for key, value in saved.items():
            state[key].copy_(value)
        self.state[parameter] = state
        return ""

    def forget(self) -> None:
        """Drops all state, as before the first update."""
        self.state.clear()


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only parameters with a gradient are updated"
    return parameter.grad


def numbers_of(groups: Sequence[Group], divisor: Tensor, finite: Tensor) -> Tensor:
    """Divisor, finite and all scheduled numbers in one tensor, so that the host reads them in one copy."""
    scheduled = [number for group in groups for number in group.numbers.values() if isinstance(number, Tensor)]
    return torch.stack([divisor, finite.to(divisor.dtype), *scheduled])


def read_numbers(groups: Sequence[Group], values: list[float]) -> tuple[float, bool, list[Group]]:
    """What `numbers_of` has put together: divisor, finite, and the groups with numbers of the host."""
    divisor, finite, *scheduled = values
    following = iter(scheduled)
    read = [
        dataclasses.replace(
            group,
            numbers={k: next(following) if isinstance(v, Tensor) else v for k, v in group.numbers.items()},
        )
        for group in groups
    ]
    return divisor, finite > 0, read
