"""The values of `optim.optimizer`, a row each: what the rest of the code has to know of an optimizer, without torch.

Only this table and `optim/`, which builds them, go by names: what stands for "not the other one" is wrong with a third.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

OptimizerName = Literal["adamw", "muon", "normuon"]


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
