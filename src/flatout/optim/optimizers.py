"""Builds the optimizers of a run: each trained tensor goes to the first rule that takes it.

A tensor that no rule takes is refused. Schedules are tables on the device, looked up by the count of applied updates:
an update that was skipped for a non-finite gradient must not advance them, and only the device knows of it. State goes
to checkpoints and back by parameter name.

Shape legend: K schedules, U updates.

What an optimizer is: a rule that says which parameters it takes, and a class that updates them.

Contract of `update(divisor, finite)`, which every optimizer keeps:
- gradients count as divided by `divisor` (loss scale and clipping in one number);
- where `finite` is false nothing changes: no weight, no state, no count;
- both are tensors on the device. Only an optimizer that lives on the host, or has no fused kernel, reads them there.
"""

import abc
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
    """The trained parameters of a model, in its own order; a tied weight comes once.

    A module whose matrix is several in one, such as those of queries, keys and values, says so in `parts`: the rows of
    each by the name of the parameter, seen from this module (`{"qkv.weight": (64, 16, 16)}`).
    """
    modules = dict(model.named_modules())
    rows: dict[str, Sequence[int]] = {}
    for name, module in modules.items():
        parts = getattr(module, "parts", None)
        if isinstance(parts, Mapping):
            rows |= {f"{name}.{inner}".lstrip("."): each for inner, each in parts.items()}
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

    def take_over(self, parameter: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Puts saved state back."""
        state = self.fresh_state(parameter)
        if saved.keys() != state.keys():
            raise CheckpointError(
                f"the optimizer's state is {', '.join(sorted(saved))}, this optimizer needs {', '.join(sorted(state))}",
                "it was saved by another optimizer: resume with the one that the run had",
            )
        for key, value in saved.items():
            state[key].copy_(value)
        self.state[parameter] = state

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
    """The counterpart of `numbers_of`: divisor, finite, and the groups with numbers of the host."""
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


AT_ONCE = 2**26  # elements whose distance to the weights is held while the average moves
PIECE = 2**22  # elements that are exchanged at once: so few that there is room for a copy of them
SEEN = 2**18  # values of a tensor, about: all of them would need as much memory as the weights, once more


class Recorded(Protocol):
    """Takes the place of an optimizer's `update`, and replays it (engine/graphs.py)."""

    held_bytes: int  # by the recording, whether it is replayed or not

    def __call__(self, divisor: Tensor, finite: Tensor) -> None: ...

    def reset(self) -> None:
        """Forgets the recording."""
        ...


class Optimizers:
    """The optimizers of a run. `groups` are in the order of their rules, `parameters` in that of the model."""

    def __init__(self, rules: Sequence[Rule], trained: Sequence[Trainable]) -> None:
        self.named: dict[str, nn.Parameter] = {one.name: one.parameter for one in trained}
        self.parameters = list(self.named.values())
        taken = deal(rules, trained)
        # Keyed by id(): rules that hold the same list share one row of the table.
        numbers = [number for rule in taken for number in rule.numbers.values()]
        self._schedules = {id(number): number for number in numbers if isinstance(number, Sequence)}
        self.schedules_KU = self._as_built_KU = self._tabulate(list(self._schedules.values()))
        self._now_K1 = self.schedules_KU[:, :1].clone()
        now = {key: self._now_K1[row, 0] for row, key in enumerate(self._schedules)}
        self.groups = [
            Group(rule, found, {k: now[id(n)] if isinstance(n, Sequence) else n for k, n in rule.numbers.items()})
            for rule, found in taken.items()
        ]
        built: dict[Callable[..., Optimizer], list[Group]] = collections.defaultdict(list)
        for group in self.groups:
            built[group.rule.optimizer].append(group)
        self.optimizers = [build(groups) for build, groups in built.items()]
        self.recorded: dict[Optimizer, Recorded] = {}
        self._of = {parameter: one for one in self.optimizers for parameter in one.parameters}
        self._complete = False

    def _tabulate(self, schedules: Sequence[Table]) -> Tensor:
        most = max(len(schedule) for schedule in schedules)
        rows = [[*schedule, *[schedule[-1]] * (most - len(schedule))] for schedule in schedules]
        return torch.tensor(rows, dtype=torch.float64).to(self.parameters[0].device, torch.float32)

    @property
    def _leading(self) -> Group:
        """The group whose rate counts as the run's: that of the matrices, or the last one where there are none."""
        return next((group for group in self.groups if group.rule.name == MATRICES), self.groups[-1])

    def follow(self, rates: Table) -> None:
        """Replaces all rates: that of the matrices by `rates`, another by `rates` times the ratio of their peaks."""
        peaks = {id(group.rule.rate): max(group.rule.rate) for group in self.groups}
        first = max(self._leading.rule.rate)
        scaled = {key: [rate * (peak / first) for rate in rates] for key, peak in peaks.items()}
        self.schedules_KU = self._tabulate([scaled.get(key, schedule) for key, schedule in self._schedules.items()])

    def stretch(self, step: int, place: float, end: int) -> None:
        """Stretches the rest of all schedules, from `place` on, to the updates from `step` to `end`."""
        schedules_KU = self._as_built_KU
        length = schedules_KU.shape[1]
        updates = torch.arange(max(end, 1), dtype=torch.float64, device=schedules_KU.device)
        places = place + (updates - step) * ((length - place) / max(1, end - step))
        low = places.floor().clamp(0, length - 1)
        share = (places - low).clamp(0.0, 1.0).float()
        before, after = (schedules_KU[:, at.long()] for at in (low, (low + 1).clamp(max=length - 1)))
        self.schedules_KU = torch.lerp(before, after, share)

    def look_up(self, updates: Tensor) -> Tensor:
        """Looks all scheduled numbers up for the next update, on the device alone. Returns the matrices' rate."""
        # index_select, because plain indexing by a tensor of no dimensions asks the device for its value and waits
        place = updates.clamp(max=self.schedules_KU.shape[1] - 1).view(1)
        torch.index_select(self.schedules_KU, 1, place, out=self._now_K1)
        rate = self._leading.numbers["rate"]
        assert isinstance(rate, Tensor)
        return rate

    def update(self, divisor: Tensor | None, finite: Tensor) -> None:
        """Updates all that has a gradient, with the rates of the last `look_up`; nothing where `finite` is false.

        Without a divisor gradients count as they are.
        """
        given = torch.ones((), device=finite.device) if divisor is None else divisor
        for optimizer in self.optimizers:
            optimizer.undivided = divisor is None
            self.recorded.get(optimizer, optimizer.update)(given, finite)

    def some_weights(self) -> list[list[Tensor]]:
        """Of every group its weights, of large ones evenly spaced rows: enough to see how far an update moves them."""
        return [[_some_rows(p.detach()) for p in group.parameters] for group in self.groups]

    def create_state(self) -> None:
        """Creates missing state tensors before the first update."""
        if not self._complete:
            for optimizer in self.optimizers:
                optimizer.create_state()
            self._complete = True

    def forget(self) -> None:
        """Drops all state, as before the first update, and recordings, which know where it lay."""
        self._complete = False
        for update in self.recorded.values():
            update.reset()
        for optimizer in self.optimizers:
            optimizer.forget()

    def tensors(self) -> dict[str, Tensor]:
        """State under `PARAMETER.exp_avg` and so on; empty before the first update."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.named.items()
            for key, value in self._of[parameter].saved(parameter).items()
        }

    def assign(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Puts saved state back; the counterpart of `tensors`."""
        saved: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            if name not in self.named:
                hint = "it belongs to another model"
                raise CheckpointError(f"{origin} holds optimizer state for unknown {name}", hint)
            saved.setdefault(name, {})[key] = tensor
        self._complete = False
        for name, state in saved.items():
            parameter = self.named[name]
            self._of[parameter].take_over(parameter, state)


def _some_rows(weight: Tensor) -> Tensor:
    return weight[:: max(1, weight.numel() // SEEN)] if weight.ndim else weight


def check_slices(rules: Sequence[Rule]) -> None:
    """Refuses rules that cannot work where every process holds slices of the weights."""
    whole = [rule.name for rule in rules if rule.whole]
    if whole:
        raise ConfigError(
            f"the optimizer of {', '.join(whole)} takes whole matrices, and parallel.form deals out slices",
            "set parallel.form=data",
        )


def deal(rules: Sequence[Rule], trained: Sequence[Trainable]) -> dict[Rule, list[Trainable]]:
    """The parameters of each rule, by the order of rules; those that take nothing are left out."""
    taken: dict[int, list[Trainable]] = {}
    for one in trained:
        number = next((number for number, rule in enumerate(rules) if rule.takes(one)), None)
        if number is None:
            names = ", ".join(rule.name for rule in rules)
            raise ConfigError(
                f"no optimizer takes {one.name}; there are rules for {names}", "add a rule that takes all others"
            )
        taken.setdefault(number, []).append(one)
    return {rules[number]: taken[number] for number in sorted(taken)}


# --- an average of the weights ----------------------------------------------------------------------------------------


class Average:
    """An exponential moving average of all that optimizers update, by name, in fp32 and beside the weights.

    After every applied update the average moves by 1 - min(decay, (1 + n) / (10 + n)) of the way towards the weights,
    where n counts applied updates: the memory is short at first, since a long one would mostly hold the first weights.

    Contract: elementwise and without a host sync, so it serves slices of weights as well; a skipped update does not
    move the average. `swap` exchanges average and weights bit for bit, where both lie.
    """

    @torch.no_grad()
    def __init__(self, trained: Sequence[Trainable], decay: float) -> None:
        self.weights: dict[str, nn.Parameter] = {one.name: one.parameter for one in trained}
        narrow = next((name for name, weight in self.weights.items() if weight.dtype.itemsize < 4), None)
        if narrow is not None:
            kind = str(self.weights[narrow].dtype).removeprefix("torch.")
            raise ConfigError(f"optim.ema needs weights in fp32, and {narrow} is in {kind}", "set optim.ema=0")
        self.values = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.decay = torch.tensor(decay, dtype=torch.float64).to(trained[0].parameter.device, torch.float32)
        self._groups = _groups(self.values)

    @torch.no_grad()
    def update(self, updates: Tensor, finite: Tensor) -> None:
        """Follows the weights after an update; `updates` counts those that were applied, this one included."""
        count = updates.float()
        share = (1 - torch.minimum(self.decay, (1 + count) / (10 + count))) * finite
        for names in self._groups:
            values = [self.values[name] for name in names]
            weights = [self.weights[name].detach() for name in names]
            ways = torch._foreach_sub(weights, values)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(ways, share)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(values, ways)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and average, piece by piece: there is no memory for a third copy of all."""
        for name, weight in self.weights.items():
            pieces = (tensor.view(-1).split(PIECE) for tensor in (weight.detach(), self.values[name]))
            for ours, theirs in zip(*pieces, strict=True):
                held = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(held)

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts a saved average back."""
        for name, value in self.values.items():
            value.copy_(tensors[name])


def _groups(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors that are worked on together; a larger one than `AT_ONCE` is alone."""
    groups: list[list[str]] = []
    size = AT_ONCE
    for name, value in values.items():
        if size + value.numel() > AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += value.numel()
    return groups
