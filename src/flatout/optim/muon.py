"""Muon: momentum whose matrices are made orthogonal before they are subtracted (Jordan et al., 2024).

Matrices of the same form are taken together, some at a time (`Unit`). Fused weights are orthogonalised part by part.

Several processes: units are dealt in turn, largest first. Every process moves the momentum of what it holds, the owner
of a unit orthogonalises it, and the result goes to all. Units are the same for any number of processes, so the same
gradients make the same update, bit for bit.

Contract: as in optim/optimizers.py. State is `momentum`, of the parameter's shape, and with NorMuon `second`, a vector
that is the same in all processes.
"""

import collections
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flatout.ops.muon import (
    Numbers,
    Products,
    advance_reference,
    apply_reference,
    normalise_reference,
    orthogonalise,
    product_type,
)
from flatout.optim.optimizers import Group, Optimizer, StateBytes, Trainable, gradient_of

TOGETHER = 16  # parameters of a unit: enough to fill a GPU, few enough to be dealt out


class Exchange(Protocol):
    """How a unit's matrices, or the slices of them that processes hold, come to its owner, and the result back."""

    number: int  # of this process
    count: int

    def room(self, rows: int) -> int:
        """Rows that a process has place for, of a matrix with `rows`."""
        ...

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        """The whole matrices, with `rows` each, where this is the owner."""
        ...

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        """This process's part of the owner's matrices, with the shape of `held_NRC`, which may be written over."""
        ...

    def follow(self, values: Tensor, owner: int) -> None:
        """Puts the owner's values in the place of this process's."""
        ...


@final
class Alone:
    """One process, which owns everything."""

    number, count = 0, 1

    def room(self, rows: int) -> int:
        return rows

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        return held_NRC

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        assert whole_NRC is not None, "one process owns everything"
        return whole_NRC

    def follow(self, values: Tensor, owner: int) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters of one form that are updated together."""

    trained: tuple[Trainable, ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        return self.trained[0].parts

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.parts)

    @property
    def work(self) -> int:
        """Multiplications of one iteration, about."""
        return len(self.trained) * sum(2 * r * c * min(r, c) + min(r, c) ** 3 for r, c in self.parts)

    def with_gradients(self) -> "Unit":
        return Unit(tuple(one for one in self.trained if one.parameter.grad is not None))

    def stacks(self) -> Iterator[tuple[int, int, int]]:
        """(how many in a row, rows, columns) of the parts, in order: all in a row if they have one shape."""
        count = len(self.parts) if len(set(self.parts)) == 1 else 1
        return ((count, rows, columns) for rows, columns in self.parts[::count])


class Muon(Optimizer):
    """`normuon` scales rows of updates to equal size, and decays a weight only where the update makes it smaller.

    `fused` takes our kernels where there are some; `exchange` is how several processes share the work.
    """

    BYTES = StateBytes(device=4, host=0, checkpoint=4)

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        normuon: bool,
        fused: bool = True,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(groups)
        self.normuon = normuon
        self.exchange = exchange or Alone()
        self.rounds = [list(self._rounds(group)) for group in groups]
        self._parts: dict[Tensor, Sequence[tuple[int, int]]] = {
            one.parameter: one.parts for group in groups for one in group.trained
        }
        device = self.parameters[0].device
        wide = any(parameter.dtype != torch.float32 for parameter in self.parameters)
        self._forms = _forms(device, fused and not wide)
        # torch.full fills them on the device; a number that is copied there would make the host wait
        self._numbers = [
            {k: n if isinstance(n, Tensor) else torch.full((), n, device=device) for k, n in group.numbers.items()}
            for group in groups
        ]

    def _rounds(self, group: Group) -> Iterator[list[Unit]]:
        """Units of about the same size, one for each process at a time."""
        alike: dict[object, list[Trainable]] = collections.defaultdict(list)
        for one in group.trained:
            alike[one.parts, one.parameter.dtype].append(one)
        units: list[Unit] = []
        for same in alike.values():
            count = -(-len(same) // TOGETHER)
            cuts = [number * len(same) // count for number in range(count + 1)]
            units += [Unit(tuple(same[a:b])) for a, b in itertools.pairwise(cuts)]
        units.sort(key=lambda unit: -unit.work)
        for start in range(0, len(units), self.exchange.count):
            yield units[start : start + self.exchange.count]

    def fresh_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"momentum": torch.zeros_like(parameter)}
        if self.normuon:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            size = sum(max(part) for part in self._parts[parameter])
            state["second"] = torch.zeros(size, dtype=wide, device=parameter.device)
        return state

    @torch.no_grad()
    def update(self, divisor: Tensor, finite: Tensor) -> None:
        with torch.autocast(divisor.device.type, enabled=False):
            self._update(divisor, finite)
        increment_version(self.parameters)  # kernels write weights without moving their versions

    def _update(self, divisor: Tensor, finite: Tensor) -> None:
        for group, rounds, given in zip(self.groups, self.rounds, self._numbers, strict=True):
            numbers = Numbers(given["rate"], given["decay"], given["momentum"], divisor, finite)
            decay = group.numbers["decay"]
            for units in rounds:
                live = [unit for unit in (unit.with_gradients() for unit in units) if unit.trained]
                self._update_round(live, numbers, decays=isinstance(decay, Tensor) or decay > 0.0)

    def _update_round(self, units: Sequence[Unit], numbers: Numbers, *, decays: bool) -> None:
        held = [self._ahead(unit, numbers) for unit in units]
        whole = [
            self.exchange.gather(own, unit.rows, owner)
            for owner, (unit, own) in enumerate(zip(units, held, strict=True))
        ]
        mine = self.exchange.number
        if mine < len(units):
            gathered = whole[mine]
            assert gathered is not None, "the owner has all of it"
            whole[mine] = self._orthogonal(units[mine], gathered, numbers.finite)
        for owner, (unit, own) in enumerate(zip(units, held, strict=True)):
            update_NRC = self.exchange.share(whole[owner], own, owner)
            for one, update in zip(unit.trained, update_NRC, strict=True):
                weight = one.parameter
                self._forms.apply(weight, update[: len(weight)], numbers, decays=decays, cautious=self.normuon)
            for one in unit.trained if self.normuon else ():
                self.exchange.follow(self.state[one.parameter]["second"], owner)

    def _ahead(self, unit: Unit, numbers: Numbers) -> Tensor:
        """Moves the momentum of this process's part; returns matrices to orthogonalise, one parameter after another."""
        first = unit.trained[0].parameter
        shape = (len(unit.trained), self.exchange.room(unit.rows), unit.parts[0][1])
        held_NRC = torch.empty(shape, dtype=product_type(first), device=first.device)
        for one, out in zip(unit.trained, held_NRC, strict=True):
            moving = self.state[one.parameter]["momentum"]
            self._forms.advance(gradient_of(one.parameter), moving, out[: len(moving)], numbers)
        return held_NRC

    def _orthogonal(self, unit: Unit, whole_NRC: Tensor, finite: Tensor) -> Tensor:
        """The updates of a unit: every part made orthogonal by itself, tall ones longer by the root of their aspect."""
        made_NRC = torch.empty_like(whole_NRC, memory_format=torch.contiguous_format)
        top = place = 0
        for count, rows, columns in unit.stacks():
            cut = slice(top, top + count * rows)
            made = made_NRC[:, cut].view(-1, rows, columns)
            scale = max(1.0, rows / columns) ** 0.5
            orthogonalise(whole_NRC[:, cut].reshape(-1, rows, columns), scale, made, products=self._forms.products)
            if self.normuon:
                size = count * max(rows, columns)
                states = [self.state[one.parameter]["second"][place : place + size] for one in unit.trained]
                before = torch.stack(states).view(-1, max(rows, columns))
                after = self._forms.normalise(made, before, finite).view(-1, size)
                torch._foreach_copy_(states, list(after))  # pyright: ignore[reportPrivateImportUsage]
                place += size
            top += count * rows
        return made_NRC


class Forms(NamedTuple):
    """The operations on matrices, by torch or by our kernels."""

    advance: Callable[..., None] = advance_reference
    apply: Callable[..., None] = apply_reference
    normalise: Callable[[Tensor, Tensor, Tensor], Tensor] = normalise_reference
    products: Products = Products()


def _forms(device: torch.device, fused: bool) -> Forms:
    if fused and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from flatout.ops.kernels.updates import advance, apply, gram, normalise, polynomial

        return Forms(advance, apply, normalise, Products(gram, polynomial))
    return Forms()
