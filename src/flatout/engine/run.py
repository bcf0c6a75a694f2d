"""A run as it is set up and as the loop uses it."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from flatout.checkpoints.base_and_adapter import files_beside
from flatout.checkpoints.checkpoint import Checkpoint
from flatout.data.batch import Batch, BatchLoader, Span, TrainingData
from flatout.device import ONE_AT_A_TIME, peak_memory_bytes, use_expandable_segments
from flatout.engine.custom import CustomParts
from flatout.engine.deadline import FAR, deadline_of
from flatout.engine.monitor import Notices
from flatout.engine.setup import (
    base_hash_of,
    built_model,
    compile_as_planned,
    notices_of,
    optimizers_of,
    trained_of,
)
from flatout.engine.step import TrainStep, build_step
from flatout.model.adapters import Adapters
from flatout.model.count import flops_per_token
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel
from flatout.resolve.case import Speed
from flatout.resolve.plan import RunPlan
from flatout.world import World


class RandomStream:
    """The run's own random stream, apart from that of the process. Each of several processes draws its own numbers.

    torch draws dropout from process-wide generators. A run swaps its own state in for the length of one step and out
    again, so that code between two steps (a notebook cell, a sample, an evaluation) can draw as it likes without
    changing what is learned, and the state to save is always at hand.
    """

    def __init__(self, seed: int, device: torch.device, rank: int = 0) -> None:
        self.device = device
        if rank:
            digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
        self.cpu_state = torch.Generator().manual_seed(seed).get_state()
        self.device_state: Tensor | None = None
        if device.type in ("cuda", "mps"):
            self.device_state = torch.Generator(device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with ONE_AT_A_TIME:
            outside = self._swapped_in(self.cpu_state, self.device_state)
            try:
                yield
            finally:
                self.cpu_state, self.device_state = self._swapped_in(*outside)

    def tensors(self) -> dict[str, Tensor]:
        states = {"random.cpu": self.cpu_state}
        if self.device_state is not None:
            states[f"random.{self.device.type}"] = self.device_state
        return states

    def assign(self, tensors: dict[str, Tensor]) -> None:
        """Takes over saved states; a run that moved to another kind of device starts that device's stream anew."""
        self.cpu_state = tensors["random.cpu"]
        if self.device_state is not None:
            self.device_state = tensors.get(f"random.{self.device.type}", self.device_state)

    def _swapped_in(self, cpu_state: Tensor, device_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sets the states of the process's generators; returns those that they had."""
        before, device_before = torch.get_rng_state(), None
        torch.set_rng_state(cpu_state)
        if device_state is not None and self.device.type == "cuda":
            device_before = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(device_state, self.device)
        elif device_state is not None:
            device_before = torch.mps.get_rng_state()
            torch.mps.set_rng_state(device_state)
        return before, device_before


class Run:
    """A run with its parts, built of a plan in this order: model, what it learns, optimizers, step.

    A new run has fresh weights; resuming overwrites its state afterwards. Weights that `model.init_from` names are not
    read where the checkpoint that is `resumed` brings all of them. `custom` are parts that come from Python. Tensors
    change as training goes on.
    """

    def __init__(
        self,
        plan: RunPlan,
        world: World | None = None,
        *,
        resumed: Checkpoint | None = None,
        custom: CustomParts | None = None,
    ) -> None:
        self.world, self.custom, self.new_notices = world or World(), custom or CustomParts(), Notices()
        device, fresh = plan.speed.device.torch_device, resumed is None
        with self.world.fail_together():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)  # the peak shown is this run's own
            use_expandable_segments(device, on=plan.speed.expandable_segments)
            model = built_model(plan, self.custom, weights=fresh)
            compile_as_planned(plan, model, self.new_notices)
        self.model: LanguageModel = model
        self.trained = trained_of(plan, model, self.world)
        with self.world.fail_together():
            # First: an average of adapters begins with the values that these get.
            self.base_hash = base_hash_of(plan, self.trained, weights=fresh)  # of the frozen weights, under adapters
            self.plan = dataclasses.replace(plan, flops_per_token=self.custom.flops(model, plan.flops_per_token))
            self.step = self._built_step(plan)
            self.random = RandomStream(plan.train.seed, device, self.world.rank)
            self.notices = (*plan.notices, *notices_of(plan, model, self.trained, self.custom))
            self.deadline = deadline_of(plan, resumed)  # of a run whose length is set in minutes
            self._stage_flops: dict[tuple[int, int | None], float] = {}
            self.evaluation()  # a validation split without a single target is an error now, not after the first steps

    def _built_step(self, plan: RunPlan) -> TrainStep:
        optimizers = optimizers_of(plan, self.trained, self.custom, self.world)
        return build_step(plan, self.model, self.trained, optimizers, self.new_notices, self.world)

    def replanned(self, **changes: Any) -> Self:
        """The same parts with other numbers of the plan."""
        return self._with(dataclasses.replace(self.plan, **changes), self.step)

    def under(self, plan: RunPlan) -> Self:
        """The same model and data under other switches, with a new optimizer; compiled code stays as it was.

        `plan` differs from the run's own in `speed` only. The old run is of no use afterwards: both share the weights.
        """
        if plan.speed.compile != self.speed.compile or plan.speed.device != self.speed.device:
            raise ValueError("another device or way of compiling needs another model")
        assert isinstance(self.model, GPT), "only models of a config are measured"
        self.model.use(plan.speed.execution)
        return self._with(plan, self._built_step(plan))

    def _with(self, plan: RunPlan, step: TrainStep) -> Self:
        other = copy.copy(self)
        for name in ("files_beside", "custom_state"):  # they are computed from plan and step
            vars(other).pop(name, None)
        other.plan, other.step, other._stage_flops = plan, step, {}
        return other

    @property
    def adapters(self) -> Adapters | None:
        return self.trained.adapters

    @property
    def speed(self) -> Speed:
        return self.plan.speed

    @property
    def data(self) -> TrainingData:
        return self.plan.data

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def last_step(self) -> int:
        """The step that ends the run; with a deadline, as it is planned now."""
        return self.steps if self.deadline is None else self.deadline.last_step

    @property
    def step_tokens(self) -> int:
        """Tokens of a step; of samples and of stages, which differ, on average."""
        mean = self.data.facts.step_tokens
        if mean is None and self.plan.train.batch_stages and self.steps:
            mean = self.plan.schedule.at(self.steps).start * self.plan.model.context / self.steps
        return self.plan.train.batch_tokens if mean is None else round(mean)

    @functools.cached_property
    def files_beside(self) -> dict[str, bytes]:
        """The files beside adapters in PEFT's folder. Read once: a tokenizer may be large, and the base may change."""
        base = self.plan.base
        assert base is not None, "only a base gets adapters"
        about = {"description": base.description, "template": base.template, "stops": self.data.stops}
        return files_beside(self.data.tokenizer, context=self.plan.model.context, chat=True, **about)[0]

    @functools.cached_property
    def custom_state(self) -> dict[str, str]:
        """Entries of a checkpoint's state about parts from Python."""
        rules = ", ".join(group.rule.name for group in self.step.optimizer.groups)
        return self.custom.saved(self.model, rules)

    def peak_memory_bytes(self) -> int | None:
        """Most memory held at once so far. The memory of recordings is held all the time, and in no peak of torch's."""
        device, graph = self.speed.device.torch_device, self.step.graph
        peak = peak_memory_bytes(device)
        held = sum(update.held_bytes for update in self.step.optimizer.recorded.values())
        if graph is not None:
            held += graph.held_bytes
        if held:
            peak = max(peak or 0, torch.cuda.memory_allocated(device) + held)
        return peak

    def batches(self, first_step: int, position: dict[str, Any] | None = None) -> BatchLoader:
        """The training batches from `first_step` to the end; `position` comes from the checkpoint of that step."""
        delivery = self.speed.delivery(self.step.micro_batch, self.world)
        # Sooner than the other ranks give up waiting for this one.
        delivery = dataclasses.replace(delivery, patience=self.plan.parallel.timeout / 2)
        last = self.steps if self.deadline is None else FAR
        span = Span(schedule=self.plan.schedule, first_step=first_step, last_step=last, position=position)
        return self.data.batches(delivery, span)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """This process's share of the validation set, in batches of `batch_size`, by default of a micro-batch."""
        size = batch_size or self.step.micro_batch
        return self.data.evaluation(size, self.speed.delivery(size, self.world), self.plan.eval.tokens)

    def take_step(self, batch: Batch) -> Tensor:
        """One optimizer step; its report stays on the device."""
        with self.random.active():
            report = self.step(batch.tokens, batch.targets, batch.packed, batch.pieces, batch.attention_window)
        self.custom.share_buffers(self.model, self.world)
        return report

    def flops_at(self, step: int) -> float:
        """FLOPs of a training token of a step, counted from 1: in a stage it may attend to less than the model can."""
        reading = self.plan.schedule.at(step - 1)
        form = reading.length, reading.attention_window
        if reading.pieces == 1 and reading.attention_window is None:
            return self.plan.flops_per_token
        if form not in self._stage_flops:
            model, vocab, attended = self.plan.model, self.model.vocab, self.data.facts.attended
            window = model.model_copy(update={"window": reading.attention_window or model.window})
            length = min(attended or reading.length, reading.length)
            less = flops_per_token(model, vocab, attended) - flops_per_token(window, vocab, length)
            self._stage_flops[form] = self.plan.flops_per_token - less
        return self._stage_flops[form]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Where a run averages its weights, the model has the average for the length of a block."""
        average, sharding = self.step.average, self.trained.sharding
        if average is None:
            yield
            return
        self.step.before_update()  # a checkpoint may still be copied
        average.swap()
        try:
            yield
        finally:
            average.swap()
            if sharding is not None:
                sharding.reshard()

    def epochs_before(self, step: int) -> int | None:
        """Whole epochs that have been read when `step` steps are done; None where their end is not known."""
        windows = self.data.facts.windows
        return None if windows is None else self.plan.schedule.at(step).start // windows

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether an epoch ends with this step; with `every` only each of that number counts, and 0 counts none."""
        before, now = self.epochs_before(step - 1), self.epochs_before(step)
        return bool(every) and before is not None and now is not None and before // every != now // every

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return self.step.active()
