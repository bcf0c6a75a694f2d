"""Runs whose length is set in minutes: they end on time, with their cool-down complete.

Idea: `train.steps` is the plan, and all tables over updates (rates, momentum, decay) are made for it. While
training goes on, the clock says how many steps there is time for; the rest of the tables is then stretched or squeezed
to end there. What was learned so far keeps the rates that it had, and the rate never jumps.

Contract: the clock runs from the first step to the last checkpoint, the evaluation and the sample before it included;
pauses of a run that is resumed do not count. All of several processes go by the clock of the first one. The plan is in
every checkpoint. The step at which the cool-down begins is saved and kept: a run with more minutes goes on from there.
Trap: on a GPU the host is some steps ahead. Speed is taken from reports that have arrived, by the device's own clock.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from flatout.checkpoints.checkpoint import Checkpoint
from flatout.data.batch import Schedule
from flatout.errors import CheckpointError
from flatout.optim.rules import cooling_from
from flatout.records import CheckpointRecord, EvalRecord, Record
from flatout.resolve.plan import RunPlan
from flatout.world import World

LOOKS = 128  # at the clock, over the run
FIRST_LOOKS = 4  # steps after which it is looked at in any case: a run may have few
WINDOW = 16  # the speed is that of the last sixteenth of the time
FAR = 2**40  # steps: a loader does not know which one will be the last


@dataclasses.dataclass
class Deadline:
    """When a run ends, and which step will be its last."""

    seconds: float
    planned: int  # steps that the tables were made for
    cooling_from: int  # the place in the tables at which the rate begins to fall
    schedule: Schedule
    clock: Callable[[], float] = time.monotonic
    last_step: int = 0
    cooldown_step: int | None = None
    spent: float = 0.0  # before this process
    evaluation: float = 0.0  # seconds, as last measured
    checkpoint: float = 0.0
    sample: float = 0.0

    def __post_init__(self) -> None:
        self.last_step = self.planned
        # A step, and its place in the tables; from there to the last step they are stretched.
        self.anchor: tuple[int, float] = (0, 0.0)
        self.began: float | None = None
        self.looked = 0.0
        self.marks: list[tuple[float, int]] = []  # (seconds of steps, windows read)
        self.fastest = 0.0  # windows per second since the evaluation was measured

    def start(self) -> None:
        """The first step begins."""
        self.began = self.clock()

    @property
    def elapsed(self) -> float:
        return self.spent + (0.0 if self.began is None else self.clock() - self.began)

    @property
    def stretch(self) -> tuple[int, float, int]:
        """The arguments of `Optimizers.stretch`: a step, its place in the tables, and the step at which they end."""
        step, place = self.anchor
        return step, place, self.last_step

    def place(self, step: int) -> float:
        """Where in the tables a step looks its numbers up."""
        since, at = self.anchor
        return at + (step - since) * (self.planned - at) / max(1, self.last_step - since)

    def look(self, step: int, done: int, seconds: float, world: World) -> bool:
        """Looks at the clock after a step, where it is time; whether another step will be the last.

        `done` steps have been reported, which took `seconds` in all.
        """
        late = world.size == 1 and self.elapsed - self.looked > 2 * self.seconds / LOOKS  # much slower than planned
        if step > FIRST_LOOKS and step % max(1, self.last_step // LOOKS) and not late:
            return False
        self.looked = self.elapsed
        rate = self._rate(done, seconds)
        if rate is None:
            return False
        self.fastest = max(self.fastest, rate)
        slower = self.fastest / rate  # a machine that has other work to do is slower at the end, too
        left = self.seconds - self.elapsed - self.checkpoint - slower * (self.evaluation + self.sample)
        left, rate = world.broadcast([left, rate])  # clocks of several processes differ, and all must end alike
        read = self.schedule.at(done).start
        last = max(step, self.schedule.steps_until(read + max(0.0, left) * rate) - 1)
        if last == self.last_step:
            return False
        self.anchor = (step, min(self.place(step), float(self.planned)))
        self.last_step = last
        return True

    def _rate(self, done: int, seconds: float) -> float | None:
        """Windows per second of the last steps, without evaluations and saves; None before there are any."""
        now = (seconds, self.schedule.at(done).start)
        if done < 1 or (self.marks and now[1] <= self.marks[-1][1]):
            return None
        while len(self.marks) > 1 and self.marks[1][0] <= seconds - self.seconds / WINDOW:
            del self.marks[0]
        self.marks.append(now)
        (before, first), (after, last) = self.marks[0], now
        return (last - first) / max(after - before, 1e-9) if last > first else None

    def cools_down(self, step: int) -> bool:
        """Whether the rate begins to fall after this step."""
        if self.cooldown_step is None and self.place(step) >= self.cooling_from and step < self.last_step:
            self.cooldown_step = step
            return True
        return False

    def put_off(self) -> None:
        """The step at which the rate began to fall was not saved; the next one counts."""
        self.cooldown_step = None

    def see(self, record: Record) -> None:
        """Notes how long the last evaluation and the last save took: both come once more at the end."""
        if isinstance(record, EvalRecord):
            self.evaluation, self.fastest = record.seconds, 0.0
        elif isinstance(record, CheckpointRecord):
            self.checkpoint = record.seconds + (record.background_seconds or 0.0)

    def saved(self) -> dict[str, Any]:
        """The entries of a checkpoint's state."""
        return {
            "planned": self.planned,
            "anchor": list(self.anchor),
            "last_step": self.last_step,
            "cooldown_step": self.cooldown_step,
            "spent": self.elapsed,
        }

    def resume(self, saved: object, step: int) -> None:
        """Goes on from the state of a checkpoint. One with another plan begins its cool-down anew."""
        plan = saved if isinstance(saved, Mapping) else {}
        try:
            self.spent = float(plan["spent"])
            if plan["planned"] != self.planned:
                self.anchor = (step, float(min(step, self.cooling_from)))
                self.last_step = max(step, self.planned)
                return
            since, at = plan["anchor"]
            cooling = plan["cooldown_step"]
            self.anchor, self.last_step = (int(since), float(at)), int(plan["last_step"])
            self.cooldown_step = None if cooling is None else int(cooling)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's state.json has no usable plan for train.minutes: {error!r}",
                "give the length of the run in steps: train.steps=N",
            ) from error


def deadline_of(plan: RunPlan, resumed: Checkpoint | None) -> Deadline | None:
    """The deadline of a run whose length is set in minutes; None for others."""
    if plan.train.minutes is None:
        return None
    cooling = cooling_from(plan.optim, plan.steps)
    deadline = Deadline(60 * plan.train.minutes, plan.steps, cooling, plan.schedule)
    if resumed is not None:
        deadline.resume(resumed.state.get("deadline"), resumed.step)
    return deadline
