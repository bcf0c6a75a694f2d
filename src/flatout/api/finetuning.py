"""Fine-tuning: training on conversations or instructions."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import overload

from flatout.api.configs import with_sources
from flatout.api.training import train
from flatout.config.load import Config, load_config
from flatout.data.pack import Progress
from flatout.engine.custom import OptimizerGiven
from flatout.engine.rows_named import check_rows_named
from flatout.observe.notebook import RunResult
from flatout.records import Record


@overload
def finetune(
    config: Config | None = None,
    *,
    optimizer: OptimizerGiven | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    alerts: bool = True,
    on_record: None = None,
) -> Generator[Record]: ...


@overload
def finetune(
    config: Config | None = None,
    *,
    optimizer: OptimizerGiven | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    alerts: bool = True,
    on_record: Callable[[Record], object],
) -> RunResult: ...


def finetune(
    config: Config | None = None,
    *,
    optimizer: OptimizerGiven | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    alerts: bool = True,
    on_record: Callable[[Record], object] | None = None,
) -> Generator[Record] | RunResult:
    """Fine-tunes a model on the rows of `chat.source`, by LoRA unless `lora.rank` is 0; all else is as in `train`.

    Without a config it is the preset `lora`, whose rows and model are an example: set `chat.source` and
    `model.init_from`.
    """
    resume = None if resume is None else str(resume)
    if config is not None or resume in (None, "auto"):
        config = with_sources(config or load_config("lora"))
        check_rows_named(config, resume)
    how = {"optimizer": optimizer, "resume": resume, "stop": stop, "save": save, "progress": progress}
    return train(config, alerts=alerts, on_record=on_record, **how)
