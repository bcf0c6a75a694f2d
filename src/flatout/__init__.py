"""Flatout trains GPTs as fast as the machine allows.

    import flatout

    config = flatout.load_config("shakespeare", train={"steps": 100})
    for record in flatout.train(config):
        print(record)

Names are loaded on first use: importing `flatout` costs nothing, and what only reads a run needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flatout import api  # noqa: F401 - `flatout.api` is there for whoever has imported `flatout`

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig, load_config
    from flatout.config.schema import RunConfig
    from flatout.engine.spans import span
    from flatout.errors import UserError
    from flatout.finding import Finding
    from flatout.front.configs import stored_config
    from flatout.front.exporting import Merged, consolidate, export, merge
    from flatout.front.looking import doctor, plot, report
    from flatout.front.measuring import Profile, ablate, bench, estimate, profile, search, tune, tune_lr
    from flatout.front.models import (
        Evaluation,
        LoadedModel,
        chat,
        chat_prompt,
        evaluate,
        generate,
        is_untaught,
        load_model,
    )
    from flatout.front.resuming import more_minutes
    from flatout.front.training import finetune, prepare, train
    from flatout.observe.notebook import Chart, RunResult
    from flatout.optim.optimizers import Group, Optimizer, Rule, StateBytes, Trainable
    from flatout.records import (
        AblateRow,
        BenchProgress,
        BenchRow,
        CheckpointRecord,
        EigenstateRecord,
        EndRecord,
        EpochRecord,
        EvalRecord,
        MachineRecord,
        NoticeRecord,
        PrepareProgress,
        PreviewRecord,
        Record,
        RunInfo,
        SampleRecord,
        SpanRecord,
        StepRecord,
        TuneProgress,
        TuneResult,
        TuneRow,
    )
    from flatout.tuning.ablation import AblateResult, FieldEffect
    from flatout.tuning.estimate import EstimateResult
    from flatout.tuning.lr_range import LrResult
    from flatout.tuning.study import StudyResult, TrialRow

__version__ = "0.1.0"

# Which module has which names; the order of both is that of docs/reference/api.md.
HOMES = {
    "flatout.config.load": ("load_config", "LoadedConfig"),
    "flatout.config.schema": ("RunConfig",),
    "flatout.front.configs": ("stored_config",),
    "flatout.front.training": ("prepare", "train", "finetune"),
    "flatout.front.resuming": ("more_minutes",),
    "flatout.observe.notebook": ("RunResult", "Chart"),
    "flatout.engine.spans": ("span",),
    "flatout.optim.optimizers": ("Rule", "StateBytes", "Optimizer", "Trainable", "Group"),
    "flatout.front.models": (
        "load_model",
        "LoadedModel",
        "generate",
        "chat",
        "chat_prompt",
        "is_untaught",
        "evaluate",
        "Evaluation",
    ),
    "flatout.front.exporting": ("export", "merge", "Merged", "consolidate"),
    "flatout.front.measuring": ("bench", "ablate", "tune", "tune_lr", "search", "estimate", "profile", "Profile"),
    "flatout.front.looking": ("doctor", "plot", "report"),
    "flatout.finding": ("Finding",),
    "flatout.tuning.ablation": ("AblateResult", "FieldEffect"),
    "flatout.tuning.estimate": ("EstimateResult",),
    "flatout.tuning.lr_range": ("LrResult",),
    "flatout.tuning.study": ("StudyResult", "TrialRow"),
    "flatout.errors": ("UserError",),
    "flatout.records": (
        "Record",
        "RunInfo",
        "StepRecord",
        "EvalRecord",
        "SampleRecord",
        "PreviewRecord",
        "CheckpointRecord",
        "NoticeRecord",
        "EpochRecord",
        "EndRecord",
        "SpanRecord",
        "MachineRecord",
        "EigenstateRecord",
        "PrepareProgress",
        "BenchRow",
        "BenchProgress",
        "AblateRow",
        "TuneRow",
        "TuneResult",
        "TuneProgress",
    ),
}
_HOME_OF = {name: module for module, names in HOMES.items() for name in names}
__all__ = [
    "AblateResult",
    "AblateRow",
    "BenchProgress",
    "BenchRow",
    "Chart",
    "CheckpointRecord",
    "EigenstateRecord",
    "EndRecord",
    "EpochRecord",
    "EstimateResult",
    "EvalRecord",
    "Evaluation",
    "FieldEffect",
    "Finding",
    "Group",
    "LoadedConfig",
    "LoadedModel",
    "LrResult",
    "MachineRecord",
    "Merged",
    "NoticeRecord",
    "Optimizer",
    "PrepareProgress",
    "PreviewRecord",
    "Profile",
    "Record",
    "Rule",
    "RunConfig",
    "RunInfo",
    "RunResult",
    "SampleRecord",
    "SpanRecord",
    "StateBytes",
    "StepRecord",
    "StudyResult",
    "Trainable",
    "TrialRow",
    "TuneProgress",
    "TuneResult",
    "TuneRow",
    "UserError",
    "__version__",
    "ablate",
    "bench",
    "chat",
    "chat_prompt",
    "consolidate",
    "doctor",
    "estimate",
    "evaluate",
    "export",
    "finetune",
    "generate",
    "is_untaught",
    "load_config",
    "load_model",
    "merge",
    "more_minutes",
    "plot",
    "prepare",
    "profile",
    "report",
    "search",
    "span",
    "stored_config",
    "train",
    "tune",
    "tune_lr",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
