"""The values of `optim.optimizer`, a row each, and learning rates that usually do well; without torch.

Only this table and `optim/`, which builds them, go by names: what stands for "not the other one" is wrong with a third.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flatout.config.source import Source

OptimizerName = Literal["adamw", "muon", "normuon"]
FAR_ABOVE, FAR_BELOW = 8.0, 20.0  # times the usual rate: beyond that a rate needs a reason
TUNED = "# Found by `flatout tune`"  # how a file of the finders begins
RANGE_STEPS = 100  # of the range test that the finder's rule was calibrated with


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    called: str  # in sentences
    reads: tuple[str, ...]  # fields of `optim` that not every optimizer reads
    rate: str = "learning_rate"  # the field with the peak rate of the matrices, which decides whether a run is stable
    matrices_only: bool = False  # it takes matrices of blocks, which adapters do not have, and AdamW has the rest
    adamw: bool = True  # AdamW updates everything or the rest: its switches are for this run, and so are its betas
    bounded: bool = False  # the size of an update does not depend on that of the gradient, which needs no clipping
    usual: float | None = None  # rate of the matrices in models of any size; without one it falls with the size
    normed: bool = False  # Muon scales rows of an update to equal size, and decays cautiously
    eps: float = 1e-8  # AdamW's guard against division by zero
    share: float = 1.0  # of AdamW's rates, usual and safe ones


_ADAMW = ("betas",)
_MUON = OptimizerKind(
    called="Muon", reads=("muon_rate", *_ADAMW), rate="muon_rate", matrices_only=True, bounded=True, usual=0.02
)
OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    "adamw": OptimizerKind(called="AdamW", reads=_ADAMW),
    "muon": _MUON,
    "normuon": replace(_MUON, called="NorMuon", normed=True, eps=1e-10),
}


def kind_of(name: object) -> OptimizerKind:
    """The row of a name that is not checked yet, or that another version wrote; AdamW's if there is none."""
    return next((kind for known, kind in OPTIMIZERS.items() if known == name), OPTIMIZERS["adamw"])


def rate_setting(config: Mapping[str, Any]) -> str:
    """The setting to lower where a run with this stored config is unstable: the peak rate of the matrices."""
    optim = config.get("optim")
    return f"optim.{kind_of(optim.get('optimizer') if isinstance(optim, Mapping) else None).rate}"


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
