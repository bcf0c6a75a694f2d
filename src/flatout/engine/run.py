"""The parts of a run, as setup has put them together and the loop uses them."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flatout.checkpoints.adapter_folder import files_beside
from flatout.checkpoints.base_model import Base
from flatout.data.batch import Batch, BatchLoader, Span
from flatout.data.positions import Schedule
from flatout.data.training_data import TrainingData
from flatout.device import ONE_AT_A_TIME, peak_memory_bytes
from flatout.engine import full_disk
from flatout.engine.custom import Given
from flatout.engine.deadline import FAR, Deadline
from flatout.engine.notices import Notices
from flatout.engine.step import TrainStep
from flatout.engine.trained import Trained
from flatout.model.adapters import Adapters
from flatout.model.count import flops_per_token
from flatout.model.protocol import LanguageModel
from flatout.resolve.case import Speed
from flatout.resolve.plan import RunPlan
from flatout.world import World


class RandomStream:
    """The run's own random stream, apart from everyone else's. Each of several processes draws numbers of its own.

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
            outside_cpu, outside_device = torch.get_rng_state(), self._get_device_state()
            torch.set_rng_state(self.cpu_state)
            self._set_device_state(self.device_state)
            try:
                yield
            finally:
                self.cpu_state, self.device_state = torch.get_rng_state(), self._get_device_state()
                torch.set_rng_state(outside_cpu)
                self._set_device_state(outside_device)

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

    def _get_device_state(self) -> Tensor | None:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.mps.get_rng_state() if self.device.type == "mps" else None

    def _set_device_state(self, state: Tensor | None) -> None:
        if state is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.mps.set_rng_state(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the loop needs: a plan and what was built of it. Tensors inside change as training goes on."""

    plan: RunPlan
    model: LanguageModel
    trained: Trained
    adapters: Adapters | None
    step: TrainStep
    random: RandomStream
    notices: tuple[str, ...]  # known before the first step
    new_notices: Notices  # those that come up later
    given: Given = dataclasses.field(default_factory=Given)  # what a program put in the place of the config's parts
    deadline: Deadline | None = None  # of a run whose length is told in minutes
    base_hash: str | None = None  # of its frozen weights, under adapters

    def replanned(self, **changes: Any) -> "Run":
        """The same parts with other numbers of the plan."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **changes))

    @property
    def speed(self) -> Speed:
        return self.plan.speed

    @property
    def data(self) -> TrainingData:
        return self.plan.data

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def base(self) -> Base | None:
        return self.plan.base

    @property
    def world(self) -> World:
        return self.step.world

    @property
    def last_step(self) -> int:
        """The step that ends the run; with a deadline, as it is planned now."""
        return self.steps if self.deadline is None else self.deadline.last_step

    @property
    def step_tokens(self) -> int:
        """Tokens of a step; of samples and of stages, which differ, on average."""
        mean = self.data.facts.step_tokens
        if mean is None and self.plan.train.batch_stages and self.steps:
            mean = self.schedule.at(self.steps).start * self.plan.model.context / self.steps
        return self.plan.train.batch_tokens if mean is None else round(mean)

    @property
    def full_disk_wait(self) -> float:
        """How many seconds a file of the run may wait for space. Other ranks wait meanwhile, and not forever."""
        return full_disk.WAIT if self.world.size == 1 else min(full_disk.WAIT, self.plan.parallel.timeout / 2)

    @functools.cached_property
    def files_beside(self) -> dict[str, bytes]:
        """What goes beside adapters in PEFT's folder. Read once: a tokenizer may be large, and the base may change."""
        assert self.base is not None, "only a base gets adapters"
        given = {"description": self.base.description, "template": self.base.template, "stops": self.data.stops}
        return files_beside(self.data.tokenizer, context=self.plan.model.context, chat=True, **given)[0]

    @functools.cached_property
    def given_state(self) -> dict[str, str]:
        """What a checkpoint says of parts that came from Python."""
        rules = ", ".join(group.rule.name for group in self.step.optimizer.groups)
        return self.given.saved(self.model, rules)

    def peak_memory_bytes(self) -> int | None:
        """Most memory held at once so far. What recordings hold is in no peak of torch's, and is there all the time."""
        device, graph = self.speed.device.torch_device, self.step.graph
        peak = peak_memory_bytes(device)
        held = sum(update.held_bytes for update in self.step.optimizer.recorded.values())
        if graph is not None:
            held += graph.held_bytes
        if held:
            peak = max(peak or 0, torch.cuda.memory_allocated(device) + held)
        return peak

    def batches(self, first_step: int, position: dict[str, Any] | None = None) -> BatchLoader:
        """The training batches from `first_step` to the end; `position` is what the checkpoint of that step says."""
        delivery = self.speed.delivery(self.step.micro_batch, self.world)
        # Sooner than the other ranks give up waiting for this one.
        delivery = dataclasses.replace(delivery, patience=self.plan.parallel.timeout / 2)
        last = self.steps if self.deadline is None else FAR
        span = Span(schedule=self.schedule, first_step=first_step, last_step=last, position=position)
        return self.data.batches(delivery, span)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """This process's share of the validation set, in batches of a micro-batch unless told otherwise."""
        size = batch_size or self.step.micro_batch
        return self.data.evaluation(size, self.speed.delivery(size, self.world))

    def take_step(self, batch: Batch) -> Tensor:
        """One optimizer step; its report stays on the device."""
        with self.random.active():
            report = self.step(batch.tokens, batch.targets, batch.packed, batch.pieces, batch.attention_window)
        self.given.share_buffers(self.model, self.world)
        return report

    def flops_at(self, step: int) -> float:
        """FLOPs of a training token of a step, counted from 1: in a stage it may attend to less than the model can."""
        reading = self.schedule.at(step - 1)
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

    @functools.cached_property
    def _stage_flops(self) -> dict[tuple[int, int | None], float]:
        return {}

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
        return None if windows is None else self.schedule.at(step).start // windows

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether an epoch ends with this step, of which every so many count; 0 counts none."""
        before, now = self.epochs_before(step - 1), self.epochs_before(step)
        return bool(every) and before is not None and now is not None and before // every != now // every

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return self.step.active()
