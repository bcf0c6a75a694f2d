"""Whole runs that are compared by their losses, for `ablate` and `tune search`: trained, not kept.

Contract: a run goes through the same loop as `flatout train` and writes nothing but to a temporary folder. A run that
diverges, runs out of memory or is no valid config is an answer, not an error. Its seconds are of training steps,
without evaluation, compiling and warm-up.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

from flatout.config.load import LoadedConfig
from flatout.engine.loop import train_loop
from flatout.errors import ConfigError, DeviceMemoryError, DivergedError, HardwareError, ResourceError
from flatout.records import EvalRecord, StepRecord
from flatout.tuning.changes import with_values
from flatout.tuning.measure import WARMUP, borrowed_run

EVALUATIONS = 8  # of a run, unless the config says more; after each it may be cut short


@final
class WholeRun:
    """One run: how it ended, its steps, and its evaluations as (tokens, seconds, loss).

    `status` is done, diverged, out_of_memory, invalid, or interrupted where the evaluations were not all asked for;
    `reason` says why.
    """

    def __init__(self) -> None:
        self.status, self.reason = "interrupted", "stopped from outside"
        self.error: DivergedError | ResourceError | ConfigError | HardwareError | None = None
        self.steps: list[float] = []
        self.tokens = self.step = 0
        self.curve: list[tuple[int, float, float]] = []

    @property
    def loss(self) -> float | None:
        """The last validation loss."""
        return self.curve[-1][2] if self.curve else None

    @property
    def seconds(self) -> float:
        """Of the training steps so far, without what only some of them have."""
        return (steady_seconds(self.steps, WARMUP) or [0.0])[-1]

    def train(self, config: Callable[[], LoadedConfig], folder: Path) -> Iterator[EvalRecord]:
        """Trains to the end and yields the evaluations. `config` may raise a `ConfigError`: then the run is invalid."""
        try:
            yield from self._evaluations(config(), folder)
            self.status, self.reason = "done", ""
        except (DivergedError, ResourceError, ConfigError, HardwareError) as error:
            self.status, self.reason = _status_of(error)
            self.error = error

    def _evaluations(self, loaded: LoadedConfig, folder: Path) -> Iterator[EvalRecord]:
        with borrowed_run(loaded) as run, contextlib.closing(
            train_loop(run, folder, resumed=None, stop=lambda: False, saves=False)
        ) as records:  # fmt: skip
            folder.mkdir(parents=True)
            for record in records:
                if isinstance(record, StepRecord):
                    self.steps.append(record.seconds)
                    self.tokens = record.tokens
                elif isinstance(record, EvalRecord):
                    self.step = record.step
                    if not math.isfinite(record.loss):
                        raise DivergedError(
                            f"the validation loss was {record.loss} at step {record.step}", "lower optim.learning_rate"
                        )
                    self.curve.append((self.tokens, self.seconds, record.loss))
                    yield record


def _status_of(error: DivergedError | ResourceError | ConfigError | HardwareError) -> tuple[str, str]:
    """The status of a run that failed, and why; an error that its config has no part in is raised again."""
    if isinstance(error, DivergedError):
        return "diverged", error.message
    if isinstance(error, ConfigError | HardwareError):
        return "invalid", error.message
    if not isinstance(error, DeviceMemoryError):
        raise error  # a full disk
    return "out_of_memory", error.message


def for_trials(loaded: LoadedConfig, evaluations: int = EVALUATIONS) -> LoadedConfig:
    """The config as a trial trains it: nothing saved, no samples, some evaluations unless the user wrote how many."""
    config, steps = loaded.config, length_of(loaded)
    every = config.eval.every
    if not loaded.sources["eval.every"].by_user and steps is not None:
        every = max(1, steps // evaluations)
    words = {"eval.every": every, "eval.sample_tokens": 0, "eval.patience": 0}
    return with_values(loaded, {**words, "checkpoint.every": 0})


def length_of(loaded: LoadedConfig) -> int | None:
    """The length of a trial, where the config says it without the data."""
    train = loaded.config.train
    return train.steps or (None if train.tokens is None else math.ceil(train.tokens / train.mean_batch))


def steady_seconds(seconds: Sequence[float], warmup: int) -> list[float]:
    """How long training had taken after each step, without what only some steps have: compiling, warming up, a load.

    Each step counts as the lower quartile of the nine around it, since what disturbs a step only makes it longer; the
    steps of the warm-up count as the first ones after it. Steps that become longer or shorter in stages are kept apart.
    """
    late = list(seconds[warmup:]) or list(seconds)
    around = [sorted(late[max(0, index - 4) : index + 5]) for index in range(len(late))]
    steady = [near[len(near) // 4] for near in around]
    return list(itertools.accumulate(steady[:1] * (len(seconds) - len(late)) + steady))
