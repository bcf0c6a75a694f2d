"""What was decided for a run, in one value: every setting, and every number that follows from settings and machine.

`resolve` makes it; whoever builds, measures, estimates or examines a run begins with it. A part of a run takes its own
share: the model its shape, the optimizers their rates, the saver its intervals.
"""

import dataclasses
from typing import Any

from flatout.checkpoints.base_and_adapter import Base, Start
from flatout.config.load import LoadedConfig, show
from flatout.config.schema import (
    ChatConfig,
    CheckpointConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    ParallelConfig,
    TrainConfig,
)
from flatout.data.batch import Schedule, TrainingData
from flatout.finding import Finding
from flatout.model.count import MemoryEstimate
from flatout.optim.rules import Pace
from flatout.resolve.case import Speed
from flatout.shown import ShortlyShown


@dataclasses.dataclass(frozen=True)
class Custom:
    """Which parts of a run come from Python instead of its config."""

    model: bool = False
    optimizer: bool = False  # rules beside the config's, or an optimizer of torch's
    torch_optimizer: bool = False

    @property
    def names(self) -> list[str]:
        return [f"{name}=" for name in ("model", "optimizer") if getattr(self, name)]

    def not_in_slices(self) -> str | None:
        """Why a run with these parts cannot be sharded, or None."""
        if self.model:
            return "a model from Python (model=) is not sharded"
        return "an optimizer from Python (optimizer=) is not sharded" if self.torch_optimizer else None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunPlan(ShortlyShown):
    """A run before anything of it is built.

    `settings` has every setting with its source; sections of it follow under their own names. `optim` has the warm-up
    in steps, `schedule` says where each step reads, `pace` how steps of different sizes share the schedule of rates.
    `speed` holds switches, micro-batch and form of parallelism, each with the reason where it is not what was asked
    for. `data` was opened for these settings, `base` is the model that is fine-tuned, `start` has the weights that
    pretraining begins with where they are not random.
    """

    settings: LoadedConfig
    model: ModelConfig
    chat: ChatConfig
    lora: LoraConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    output: OutputConfig
    parallel: ParallelConfig
    speed: Speed
    vocab: int
    steps: int
    schedule: Schedule
    pace: Pace | None
    memory: MemoryEstimate
    flops_per_token: float
    data: TrainingData
    base: Base | None = None
    start: Start | None = None
    custom: Custom = Custom()
    checks: tuple[Finding, ...] = ()  # what there is to say of it before the first step

    def _shown_rows(self) -> dict[str, Any]:
        switches = {feature.name: feature.used for feature in self.speed.features}
        memory = f"{self.memory.total / 2**30:.1f} GiB"
        return {"steps": self.steps, "device": self.speed.device.name, "memory": memory, **switches}

    @property
    def notices(self) -> tuple[str, ...]:
        """Its checks as lines for whoever trains it."""
        return tuple(check.found for check in self.checks)

    @property
    def fine_tunes(self) -> bool:
        return self.settings.config.fine_tunes

    @property
    def documents_apart(self) -> bool:
        """Whether documents of plain text must not see each other."""
        return self.settings.config.documents_apart

    @property
    def stored(self) -> dict[str, Any]:
        """Every setting by section, as a checkpoint keeps them."""
        return self.settings.config.model_dump()

    @property
    def yaml(self) -> str:
        """Every setting as a config file that loads back to the same."""
        return show(self.settings.config)
