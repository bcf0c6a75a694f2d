"""The public names, in the order of docs/reference/api.md; `__init__.py` loads each from its module on first use."""

from flatout.config.load import (
    load_config as load_config,
    LoadedConfig as LoadedConfig,
)
from flatout.config.schema import (
    RunConfig as RunConfig,
)
from flatout.front.configs import (
    stored_config as stored_config,
)
from flatout.front.training import (
    prepare as prepare,
    train as train,
    finetune as finetune,
)
from flatout.front.resuming import (
    more_minutes as more_minutes,
)
from flatout.observe.notebook import (
    RunResult as RunResult,
    Chart as Chart,
)
from flatout.engine.spans import (
    span as span,
)
from flatout.optim.optimizers import (
    Rule as Rule,
    StateBytes as StateBytes,
    Optimizer as Optimizer,
    Trainable as Trainable,
    Group as Group,
)
from flatout.front.models import (
    load_model as load_model,
    LoadedModel as LoadedModel,
)
from flatout.front.exporting import (
    export as export,
    merge as merge,
    Merged as Merged,
    consolidate as consolidate,
)
from flatout.front.scoring import (
    evaluate as evaluate,
    Evaluation as Evaluation,
    score as score,
)
from flatout.tasks.scores import (
    ModelScores as ModelScores,
    TaskScore as TaskScore,
)
from flatout.front.texts import (
    generate as generate,
    chat as chat,
    chat_prompt as chat_prompt,
    is_untaught as is_untaught,
)
from flatout.serving.server import (
    serve as serve,
)
from flatout.front.measuring import (
    estimate as estimate,
    plan as plan,
    bench as bench,
    ablate as ablate,
    tune as tune,
    tune_lr as tune_lr,
    search as search,
    profile as profile,
    Profile as Profile,
)
from flatout.front.looking import (
    doctor as doctor,
    runs as runs,
    watch as watch,
    plot as plot,
    report as report,
    bundle as bundle,
)
from flatout.front.commands import (
    completion as completion,
)
from flatout.finding import (
    Finding as Finding,
)
from flatout.tuning.ablation import (
    AblateResult as AblateResult,
    FieldEffect as FieldEffect,
)
from flatout.tuning.estimate import (
    EstimateResult as EstimateResult,
)
from flatout.tuning.many_gpus import (
    PlanResult as PlanResult,
    PlanRow as PlanRow,
)
from flatout.tuning.lr_range import (
    LrResult as LrResult,
)
from flatout.tuning.study import (
    StudyResult as StudyResult,
    TrialRow as TrialRow,
)
from flatout.observe.runs import (
    RunRow as RunRow,
)
from flatout.errors import (
    UserError as UserError,
)
from flatout.records import (
    Record as Record,
    RunInfo as RunInfo,
    StepRecord as StepRecord,
    EvalRecord as EvalRecord,
    SampleRecord as SampleRecord,
    PreviewRecord as PreviewRecord,
    CheckpointRecord as CheckpointRecord,
    NoticeRecord as NoticeRecord,
    EpochRecord as EpochRecord,
    EndRecord as EndRecord,
    SpanRecord as SpanRecord,
    MachineRecord as MachineRecord,
    EigenstateRecord as EigenstateRecord,
    PrepareProgress as PrepareProgress,
    BenchRow as BenchRow,
    BenchProgress as BenchProgress,
    AblateRow as AblateRow,
    TuneRow as TuneRow,
    TuneResult as TuneResult,
    TuneProgress as TuneProgress,
)

__version__: str
HOMES: dict[str, tuple[str, ...]]
