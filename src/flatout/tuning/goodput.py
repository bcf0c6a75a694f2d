"""Checkpoints and interruptions: what a save costs, how often a run is interrupted, and how often to save.

Interruptions come at random, at a rate that grows with the number of GPUs. Each costs a restart and the steps since the
last save. In data parallel one rank copies the state to its host and training goes on while it is written; the next
save waits for that. Slices are written by all ranks of one copy of the model while training stands still.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.tuning.spread import Layout

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4).
FAILURE_HOURS = 54 * 24 * 16_384 / 419
FAILURE_SOURCE = "Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783)"
INTERVALS = (60, 300, 1800, 7200)  # seconds
SHORTEST = 60.0  # seconds between saves: below, evaluation and deletion of older checkpoints are in the way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """Checkpoint and interruptions of one form and number of GPUs. Shares are of the time that steps themselves take.

    `pause_seconds` is how long training stands still for a save, `write_seconds` until it is on the disk.
    """

    form: str
    checkpoint_bytes: int
    pause_seconds: float
    write_seconds: float
    restart_seconds: float
    interruptions_per_day: float
    best_interval: float
    best: float
    by_interval: dict[int, float]


def goodput(interval: float, *, save: float, restart: float, between: float) -> float:
    """The share of time that goes into steps which are kept, with interruptions every `between` seconds on average.

    Exact for interruptions that come independently of each other: an interval and its save begin again until they pass
    without one (Daly, "A higher order estimate of the optimum checkpoint interval", 2006).
    """
    tried = (interval + save) / between
    return 0.0 if tried > 700 else interval / ((between + restart) * math.expm1(tried))


def plan_saves(
    checkpoint: int,
    layout: "Layout",
    *,
    to_host: float,
    disk: float,
    restart: float,
    failure_hours: float,
) -> Goodput:
    """Saves of `checkpoint` bytes by the first copy of the model; rates in bytes per second, `disk` for each host."""
    write = checkpoint / layout.hosts / disk
    pause = write if layout.shards > 1 else checkpoint / to_host
    gpus = layout.shards * layout.replicas
    between = failure_hours * 3600 / gpus
    # After a restart every host reads all of it, to check the hashes.
    costs = {"save": pause, "restart": restart + checkpoint / disk, "between": between}
    best = max(SHORTEST, write, math.sqrt(2 * pause * between))  # Young's first-order optimum
    return Goodput(
        form=layout.form,
        checkpoint_bytes=checkpoint,
        pause_seconds=pause,
        write_seconds=write,
        restart_seconds=costs["restart"],
        interruptions_per_day=86_400 / between,
        best_interval=best,
        best=goodput(best, **costs),
        by_interval={interval: goodput(interval, **costs) for interval in INTERVALS if interval >= write},
    )
