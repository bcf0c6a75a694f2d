"""One optimizer step: micro-batches in, an update out.

Contract:
- The loss is the mean over the labelled tokens of the WHOLE step. Micro-batches add their summed losses; nothing
  depends on how the batch is cut.
- A non-finite loss or gradient norm never reaches the weights: the device itself turns the update into nothing, and
  neither the moments, nor the schedule, nor the count of updates move.
- Nothing here waits for the device. Of the optimizers only those do that live on the host or have no fused kernel.
- Order: backward of all micro-batches, norm, update. Loss scale and clipping are one divisor of the gradients, which
  optimizers get together with the flag that says whether all is finite.
- A step that runs out of memory before `updating` has changed nothing but gradients: after `use_micro_batch` with a
  smaller one it can be taken again. All of the optimizers' state is made before the first update: made parameter by
  parameter between updates, a failure there would leave half of the weights moved.
- Numbers that depend on the data of all processes go through `world`.
- The attention window of a step is an argument all the way down: nothing of the model changes with it.
Trap: reading any of the returned tensors stalls the device. The loop reads them late.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.device import Scope
from flatout.engine.graphs import MicroBatchGraph, Recorder, record_updates
from flatout.engine.monitor import Notices
from flatout.engine.setup import Trained
from flatout.engine.spans import StepClock
from flatout.model.adapters import Adapters
from flatout.model.compiling import graphs_of_its_own
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel
from flatout.ops.documents import DocumentLayout, PackedRows
from flatout.ops.gradients import clear_gradients, hold_gradients
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import Average, Optimizers
from flatout.parallel.reducer import reducer_of
from flatout.resolve.plan import RunPlan
from flatout.world import Reducer, World

CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


@dataclasses.dataclass
class LossScale:
    """fp16's loss scale, on the device: halved by an overflow, doubled after `interval` updates without one."""

    scale: Tensor
    good_updates: Tensor
    interval: int = 2000

    @classmethod
    def start(cls, device: torch.device) -> "LossScale":
        return cls(torch.tensor(2.0**16, device=device), torch.tensor(0, dtype=torch.int64, device=device))

    def update(self, finite: Tensor) -> None:
        good = torch.where(finite, self.good_updates + 1, torch.zeros_like(self.good_updates))
        grow = good >= self.interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.mul_(factor)
        self.good_updates.copy_(torch.where(grow, torch.zeros_like(good), good))


@dataclasses.dataclass(eq=False)
class TrainStep:
    """The parts of a step. `keep_gradients` zeroes gradients where they lie instead of dropping them."""

    model: LanguageModel
    optimizer: Optimizers
    _: dataclasses.KW_ONLY
    clip: float
    micro_batch: int
    label_smoothing: float = 0.0
    loss_scale: LossScale | None = None
    keep_gradients: bool = False
    compiled: bool = False  # whether torch.compile made code for the model
    graph: MicroBatchGraph | None = None  # recordings of micro-batches
    adapters: Adapters | None = None  # where these alone are trained: their gradients stay in their places
    average: Average | None = None  # of the weights, for evaluation
    scope: Scope | None = None  # torch's switches during a step
    world: World = dataclasses.field(default_factory=World)
    reducer: Reducer | None = None  # adds up the gradients of several processes
    hold_back: Callable[[], None] | None = None  # makes the next update wait for a checkpoint's copy of the state
    updating: bool = False  # weights may be half moved: there is no way back to before the step
    with_parameter_norm: bool = False  # whether the next report has it, and ratios: it reads all weights once more

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        in_place = self.adapters is not None or (self.reducer is not None and self.reducer.in_place)
        self.keep_gradients = self.keep_gradients or self.graph is not None or in_place
        self.clock = StepClock(device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)

    def __call__(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        packed: PackedRows | None = None,
        pieces: int = 1,
        window: int | None = None,
    ) -> Tensor:
        """Six numbers on the device: loss, gradient norm before clipping, applied (0 or 1), rate, loss scale, norm of
        the parameters (-1 where it was not asked for; where it was, the norm of the update of every group follows, as a
        share of its weights). Each window of a micro-batch is cut into `pieces` rows. `window` is that of attention
        in blocks of kind W, where it is not the model's own."""
        self.model.train()
        self.clock.begin()
        with self.active():
            loss = self.accumulate(tokens_BT, targets_BT, packed, pieces, window)
            report = self._update(loss)
        self.clock.mark("optimizer")
        return report

    def rehearse(self, *batch: Any) -> None:
        """The passes of a step, of the same arguments, without its update; gradients are let go."""
        self.model.train()
        with self.active():
            self.accumulate(*batch)
            if self.reducer is not None:
                self.reducer.finish()
            self._clear(drop=not self.keep_gradients)
        self.clock.take()

    def use_micro_batch(self, size: int) -> None:
        """Cuts the batch into other micro-batches from now on: the one place where their size changes.

        Gradients of a step that was not finished are dropped, and code and recordings for the old shape go.
        """
        self._clear(drop=True)
        self.micro_batch = size
        self.model.drop()
        if self.graph is not None:
            self.graph.reset()
        for update in self.optimizer.recorded.values():
            update.reset()
        if self.compiled:
            torch._dynamo.reset()  # code for a shape that never comes again only holds memory

    def before_update(self) -> None:
        """Called before anything that a checkpoint holds changes: the device waits for a copy that is under way."""
        if self.hold_back is not None:
            self.hold_back()
            self.hold_back = None

    def accumulate(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        packed: PackedRows | None = None,
        pieces: int = 1,
        window: int | None = None,
    ) -> Tensor:
        """Adds the gradients of the whole batch and returns its mean loss.

        Where others have more micro-batches, and all must take as many passes, the last one comes again unlabelled.
        """
        if self.keep_gradients:
            hold_gradients(self.model.parameters())
        labelled = self.world.sum((targets_BT != IGNORED).sum()).clamp(min=1)
        size, rows = pieces * self.micro_batch, tokens_BT.shape[0]
        cuts = [slice(at, at + size) for at in range(0, rows, size)] if packed is None else list(packed.cuts(size))
        # Windows are shared evenly, so that only ranks with packed rows have to ask each other.
        passes = len(cuts) if self.reducer is None or packed is None else self.reducer.passes(len(cuts))
        tokens, targets, layout, total = tokens_BT, targets_BT, None, None
        for number in range(passes):
            if number >= len(cuts):
                targets = torch.full_like(targets, IGNORED)
            elif packed is None:
                tokens, targets, layout = tokens_BT[cuts[number]], targets_BT[cuts[number]], None
            else:
                tokens, targets, layout = packed.part(cuts[number], tokens_BT.device)
            if number == passes - 1 and self.reducer is not None:
                self.reducer.last_micro_batch()
            mean = self.run_micro_batch(tokens, targets, labelled, layout, window)
            total = mean if total is None else total + mean
        assert total is not None, "a batch has at least one sequence"
        return self.world.sum(total)

    def run_micro_batch(
        self, tokens_BT: Tensor, targets_BT: Tensor, labelled: Tensor, layout: DocumentLayout | None, window: int | None
    ) -> Tensor:
        """`forward_backward`, or a replay of it."""
        if self.graph is None:
            return self.forward_backward(tokens_BT, targets_BT, labelled, layout, window)
        mean = self.graph(self.forward_backward, (tokens_BT, targets_BT, labelled), layout, window)
        self.clock.mark("micro-batch")  # nothing can be marked in a replay
        return mean

    def forward_backward(
        self, tokens_BT: Tensor, targets_BT: Tensor, labelled: Tensor, layout: DocumentLayout | None, window: int | None
    ) -> Tensor:
        """Adds one micro-batch's gradients and returns its share of the step's mean loss."""
        mean = self.model(tokens_BT, targets_BT, self.label_smoothing, layout, window) / labelled
        self.clock.mark("forward")
        (mean if self.loss_scale is None else mean * self.loss_scale.scale).backward()
        self.clock.mark("backward")
        return mean.detach()

    @torch.no_grad()
    def _update(self, loss: Tensor) -> Tensor:
        if self.reducer is not None:
            self.reducer.finish()
            self.clock.mark("reduction")
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        scale = self.one if self.loss_scale is None else self.loss_scale.scale
        norm = self._norm(gradients) / scale
        finite = torch.isfinite(loss) & torch.isfinite(norm)  # of sums over all processes: the same in each
        excess = ((norm + CLIP_EPS) / self.clip).clamp(min=1.0) if self.clip > 0 else self.one
        rate = self.optimizer.look_up(self.updates)
        numbers = [loss, norm, finite, rate, scale, self._parameter_norm()]
        report = torch.stack([number.to(rate.dtype) for number in numbers])
        self.optimizer.create_state()
        seen = (
            [[x.clone() for x in group] for group in self.optimizer.some_weights()] if self.with_parameter_norm else []
        )
        self.before_update()
        self.updating = True
        divides = self.clip > 0 or self.loss_scale is not None
        self.optimizer.update((scale * excess).float() if divides else None, finite)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self.updates.add_(finite)
        if self.average is not None:
            self.average.update(self.updates, finite)
        self.model.narrow.update_scales()
        self.updating = False
        self._clear(drop=not self.keep_gradients)
        return torch.cat([report, *self._update_ratios(seen)]) if seen else report

    def active(self) -> contextlib.AbstractContextManager[None]:
        """torch's switches as they are during a step."""
        return contextlib.nullcontext() if self.scope is None else self.scope.active()

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors) if self.reducer is None else self.reducer.norm(tensors)

    def _clear(self, *, drop: bool) -> None:
        if self.adapters is not None:
            self.adapters.zero_gradients()
        elif self.reducer is not None:
            self.reducer.clear()
        else:
            clear_gradients(self.optimizer.parameters, drop=drop)

    def _parameter_norm(self) -> Tensor:
        if not self.with_parameter_norm:
            return -self.one
        return self._norm([parameter.detach() for parameter in self.optimizer.parameters])

    def _update_ratios(self, before: list[list[Tensor]]) -> Iterator[Tensor]:
        for old, new in zip(before, self.optimizer.some_weights(), strict=True):
            moved = [b - a for a, b in zip(old, new, strict=True)]
            yield (self._norm(moved) / self._norm(old)).to(torch.float32).view(1)


def build_step(
    plan: RunPlan, model: LanguageModel, trained: Trained, optimizers: Optimizers, notices: Notices, world: World
) -> TrainStep:
    """The step that a plan asks for, over what it trains."""
    speed = plan.speed
    device, graph = speed.device.torch_device, None
    if speed.cuda_graphs:
        assert isinstance(model, GPT), "recordings are off with model="
        graph = MicroBatchGraph(model, notices, Recorder(device), trained.adapters)
        if world.size == 1:
            record_updates(optimizers, notices, graph.recorder)
    return TrainStep(
        model,
        optimizers,
        clip=plan.optim.clip,
        micro_batch=speed.micro_batch,
        label_smoothing=plan.train.label_smoothing,
        loss_scale=LossScale.start(device) if speed.precision == "fp16" else None,
        keep_gradients=graphs_of_its_own(speed.compile, our_graphs=speed.cuda_graphs),
        compiled=speed.compile != "off",
        graph=graph,
        adapters=trained.adapters,
        average=Average(trained.updated, plan.optim.ema) if plan.optim.ema else None,
        scope=Scope(speed.device, speed.precision, plan.train.deterministic, speed.threads, not speed.sharded),
        world=world,
        reducer=trained.sharding
        or reducer_of(
            world,
            [one.parameter for one in trained.updated],
            in_place=trained.adapters is not None,
            bf16=plan.parallel.reduce == "bf16",
            replayed=speed.cuda_graphs,
        ),
    )
