"""Learning rates that usually do well, by which the doctor judges and `flatout tune lr` explains what it found."""

import re
from pathlib import Path

from flatout.config.optimizers import OptimizerKind
from flatout.config.source import Source

FAR_ABOVE, FAR_BELOW = 8.0, 20.0  # times the usual rate: beyond that a rate needs a reason
TUNED = "# Found by `flatout tune`"  # how a file of the finders begins
RANGE_STEPS = 100  # of the range test that the finder's rule was calibrated with


def usual_rate(kind: OptimizerKind, parameters: int, *, tunes: bool, adapters: bool) -> float | None:
    """A rate of the matrices that usually does well; None where none is known. `tunes` a model that has learned before.

    AdamW's is 6e-4 at 124M parameters, falling with the cube root.
    """
    if tunes:
        return None if kind.usual else kind.share * usual_tuning_rate(parameters, adapters=adapters)
    return kind.usual or kind.share * 6e-4 * (124e6 / parameters) ** (1 / 3)


# Tutorial 2: in 102 steps a base of 270,528 parameters learns 19 samples at 1e-2, and does not at 2e-4.
SMALL_BASE, SMALL_BASE_RATE = 10_000_000, 1e-2


def usual_tuning_rate(parameters: int, *, adapters: bool) -> float:
    """AdamW's, for a model of this size that has learned before; only adapters on a tiny one need more."""
    if adapters and parameters < SMALL_BASE:
        return SMALL_BASE_RATE
    return 2e-4 if adapters else 2e-5


def found_by_range_test(rate: Source) -> bool:
    """Whether a learning rate stands in a file that `flatout tune lr` wrote after enough steps."""
    if rate.kind != "file":
        return False
    try:
        with Path(rate.where.rpartition(":")[0]).open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except (OSError, ValueError):
        return False
    steps = re.match(re.escape(TUNED) + r", learning rate, on .*: a range test of ([1-9]\d{0,8}) steps ", first)
    return steps is not None and int(steps[1]) >= RANGE_STEPS
