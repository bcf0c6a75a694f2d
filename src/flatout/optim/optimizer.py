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

from flatout.errors import CheckpointError, ConfigError

Table = Sequence[float]  # a value for every applied update; the last one stays
MATRICES = "matrices"  # the rule for matrices of blocks, whose rate decides whether a run is stable


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A tensor that an optimizer updates, as rules see it."""

    name: str
    parameter: nn.Parameter  # or, where every process holds slices, this one's
    module: object  # that holds it under the last part of its name
    matrix: bool  # or many of them, laid out flat
    parts: tuple[tuple[int, int], ...] = ()  # rows and columns of the matrices that lie in it one below the other


def trainables(model: nn.Module) -> list[Trainable]:
    """What a model trains, in its own order; a tied weight comes once.

    A module whose matrix is several in one, such as those of queries, keys and values, says so in `parts`: the rows of
    each by the name of the parameter, seen from this module (`{"qkv.weight": (64, 16, 16)}`).
    """
    modules = dict(model.named_modules())
    rows: dict[str, Sequence[int]] = {}
    for name, module in modules.items():
        told = getattr(module, "parts", None)
        if isinstance(told, Mapping):
            rows |= {f"{name}.{inner}".lstrip("."): each for inner, each in told.items()}
    return [
        Trainable(name, p, modules[name.rpartition(".")[0]], p.ndim >= 2, _parts(name, p, rows.get(name)))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def _parts(name: str, parameter: Tensor, rows: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    if parameter.ndim != 2:
        return ()
    whole, columns = parameter.shape
    if rows is not None and sum(rows) != whole:
        raise ConfigError(
            f"the parts of {name} have {' + '.join(map(str, rows))} rows, and it has {whole}",
            "correct `parts` of the module that says so",
        )
    return tuple((each, columns) for each in rows or [whole])


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
    trained: Sequence[Trainable]
    numbers: Mapping[str, float | Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one.parameter for one in self.trained]

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

    undivided = False  # whether the next divisor is one: torch's fused AdamW would write all gradients back divided

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
