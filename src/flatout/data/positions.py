"""Where a step reads: a table from the step number to windows, sequences, their length and their attention window.

Idea: the data is a sequence of windows of `longest` tokens; a position is a window's number in reading order. A `Stage`
says what each step takes from its first step on; the position of a step is the sum of what all steps before it took. A
stage with shorter sequences cuts every window into rows, so that an epoch has the same windows in every stage.

Contract: exact integers, a pure function of the step number, so the table and the step are all that a resume needs.
Data follows the step number; learning rates follow applied updates, and are no part of this.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from flatout.world import World

Array = npt.NDArray[np.int64]


@final
@dataclass(frozen=True)
class Stage:
    """What each step takes from `first_step` on; `attention_window` replaces the model's where it is given."""

    first_step: int
    sequences: int
    length: int
    attention_window: int | None = None


@final
@dataclass(frozen=True)
class Reading:
    """What one step reads: `windows` windows from position `start` on, each cut into `pieces` rows of `length`."""

    start: int
    windows: int
    pieces: int
    length: int
    attention_window: int | None

    def share(self, world: World) -> "Reading":
        """What one process of several reads: each has a contiguous share."""
        if not 0 <= world.rank < world.size or self.windows % world.size:
            raise ValueError(f"no share of {self.windows} windows for rank {world.rank} of {world.size}")
        windows = self.windows // world.size
        return replace(self, start=self.start + world.rank * windows, windows=windows)

    def cut(self, windows_BT: torch.Tensor) -> torch.Tensor:
        """Whole windows as rows of this length."""
        return windows_BT if self.pieces == 1 else windows_BT.reshape(-1, self.length)


@final
@dataclass(frozen=True)
class Schedule:
    """Stages over windows of `longest` tokens.

    If `chosen` is given, only these steps are read, in a cycle (`tune` measures fine-tuning with them).
    """

    stages: tuple[Stage, ...]
    longest: int
    chosen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        firsts = [stage.first_step for stage in self.stages]
        if firsts[:1] != [0] or any(after <= before for before, after in itertools.pairwise(firsts)):
            raise ValueError(f"stages begin at step 0 and rise, not {firsts}")
        for stage in self.stages:
            if stage.length < 1 or self.longest % stage.length or stage.sequences < 1:
                raise ValueError(
                    f"{stage.sequences} sequences of {stage.length} tokens: the length must divide the window length "
                    f"{self.longest}, and both must be at least 1"
                )
            if stage.sequences % (self.longest // stage.length):
                raise ValueError(
                    f"{stage.sequences} sequences of {stage.length} do not fill whole windows of {self.longest}"
                )

    @classmethod
    def constant(cls, sequences: int, length: int) -> "Schedule":
        return cls((Stage(0, sequences, length),), length)

    @classmethod
    def in_stages(
        cls, stages: Sequence[Stage], longest: int, *, windows: float | None = None, steps: int | None = None
    ) -> "Schedule":
        """Stages that read equally many windows, as nearly as whole steps allow, in a run of so many windows or steps.

        A stage ends with the step that reaches its share; `first_step` is worked out here. Stages without a step, which
        only a very short run has, are left out.
        """
        each = [stage.sequences * stage.length / longest for stage in stages]
        if steps is None:
            assert windows is not None, "a run has a length"
            ends, position, last = [], 0.0, 0
            for number, taken in enumerate(each, start=1):
                count = max(0, math.ceil((windows * number / len(each) - position) / taken))
                position, last = position + count * taken, last + count
                ends.append(last)
        else:
            parts = list(itertools.accumulate(1 / taken for taken in each))
            ends = [round(steps * part / parts[-1]) for part in parts]
        begun = [replace(stage, first_step=first) for stage, first in zip(stages, [0, *ends[:-1]], strict=True)]
        kept = [stage for stage, end in zip(begun, ends, strict=True) if end > stage.first_step]
        return cls(tuple(kept) or (begun[0],), longest)

    def after(self, earlier: "Schedule", step: int) -> "Schedule":
        """This table from `step` on and `earlier` before it, so that positions read before `step` stay."""
        now = bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1
        following = [replace(self.stages[now], first_step=step), *self.stages[now + 1 :]]
        kept = [stage for stage in earlier.stages if stage.first_step < step]
        if kept and replace(kept[-1], first_step=step) == following[0]:  # the same stage goes on
            del following[0]
        return replace(self, stages=(*kept, *following))

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The position at which each stage begins."""
        steps = (after.first_step - before.first_step for before, after in itertools.pairwise(self.stages))
        taken = (count * self._windows(stage) for count, stage in zip(steps, self.stages, strict=False))
        return list(itertools.accumulate(taken, initial=0))

    def _windows(self, stage: Stage) -> int:
        return stage.sequences * stage.length // self.longest

    def at(self, step: int) -> Reading:
        """What step `step`, counted from 0, reads. The last stage has no end."""
        step = self.chosen[step % len(self.chosen)] if self.chosen else step
        number = bisect.bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1
        stage = self.stages[number]
        windows = self._windows(stage)
        start = self._starts[number] + (step - stage.first_step) * windows
        return Reading(start, windows, self.longest // stage.length, stage.length, stage.attention_window)

    def steps_until(self, position: float) -> int:
        """The steps after which `position` windows have been read; a float, because `train.epochs` may be 1.5."""
        number = max(bisect.bisect_left(self._starts, position) - 1, 0)
        stage = self.stages[number]
        return stage.first_step + math.ceil((position - self._starts[number]) / self._windows(stage))
