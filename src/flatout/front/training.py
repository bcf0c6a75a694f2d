"""Training as a generator of records, which also writes them to the run folder; data preparation as a function.

Fine-tuning: training on conversations or instructions.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

from flatout.checkpoints.checkpoint import mark_as_base
from flatout.checkpoints.run_folder import RunLock, is_checkpoint, set_later_aside, set_unusable_aside
from flatout.config.alike import shared_settings
from flatout.config.load import Config, LoadedConfig, as_loaded, load_config
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.data.prepare import as_prepared, check_text, prepare_data
from flatout.device import free_memory
from flatout.engine.custom import CustomParts, ModelFromPython, OptimizerFromPython
from flatout.engine.diverged import Ended, with_way_back
from flatout.engine.loop import train_loop
from flatout.engine.monitor import notices_at
from flatout.engine.recovery import use_at_most
from flatout.engine.run import Run
from flatout.engine.state import lacks_verdict, recorded_again
from flatout.errors import DataError, DivergedError, UsageError
from flatout.files import disk_errors, write_whole
from flatout.front.configs import check_rows_named, stored_config, with_sources
from flatout.front.resuming import HeldFolder, Origin, as_begun, check_resumed, own_settings
from flatout.launch import OtherProcessError, launch
from flatout.observe.alerts import Alerts
from flatout.observe.notebook import Chart, RunResult, warn
from flatout.observe.sinks import MetricsFile, ends_at, read_metrics
from flatout.observe.trackers import Trackers, open_trackers
from flatout.parallel.ranks import joined
from flatout.records import Record, RunInfo
from flatout.resolve.case import try_threads
from flatout.resolve.fit_check import check_disk
from flatout.resolve.memory import checkpoint_size
from flatout.resolve.opening import DataSource
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import resolve, take_device
from flatout.tuning.minutes import in_minutes
from flatout.world import World

Result = TypeVar("Result")


def prepare(
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    workers: int | None = None,
) -> Path:
    """Tokenizes the config's text into shards and returns their folder; does nothing when they are there.

    Input that cannot be used is left out and listed in problems.jsonl there.
    """
    loaded = as_loaded(config or load_config(), all_written=True)
    check_text(loaded, "prepare")
    if not overwrite:
        before, loaded = len(loaded.notices), as_prepared(loaded)
        for notice in loaded.notices[before:]:
            warn(notice)
    wanted = loaded.config
    return prepare_data(wanted.data, wanted.clean, progress, overwrite=overwrite, workers=workers)[0]


class TuneOptions(TypedDict, total=False):
    """What `finetune` takes beside its config; see `train`."""

    optimizer: OptimizerFromPython | None
    resume: str | Path | None
    stop: Callable[[], bool]
    save: Callable[[], bool]
    progress: Progress | None
    alerts: bool


class TrainOptions(TuneOptions, total=False):
    """What `train` takes beside its config."""

    data: Any
    val: Any
    model: ModelFromPython | None


@overload
def train(
    config: Config | None = None, *, on_record: None = None, **options: Unpack[TrainOptions]
) -> Generator[Record]: ...


@overload
def train(
    config: Config | None = None, *, on_record: Callable[[Record], object], **options: Unpack[TrainOptions]
) -> RunResult: ...


def train(
    config: Config | None = None,
    *,
    data: Any = None,
    val: Any = None,
    model: ModelFromPython | None = None,
    optimizer: OptimizerFromPython | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    alerts: bool = True,
    on_record: Callable[[Record], object] | None = None,
) -> Generator[Record] | RunResult:
    """Trains and yields records; also writes them to metrics.jsonl in the run folder.

    With `on_record`, a function that is called with each record, it trains to the end and returns a `RunResult`.
    Alerts (docs/guides/watching.md) are warnings of the logger `flatout`; in a notebook without logging handlers they
    are printed as `note:` lines. `alerts=False` turns them off.

    `data` takes the place of the config's text: an iterable of token arrays or texts, a function that returns one, or a
    torch Dataset of them; `val` is the same to evaluate on. `model` is a function that changes the built model, or a
    torch module in its place; `optimizer` a `Rule`, several, or a function that builds a torch optimizer from named
    parameters (docs/guides/python.md). Give them again to resume.

    `resume` is None (a new run), "auto" (go on if there is something, else start) or a run or checkpoint folder.
    `stop()` is asked after every step; when true, the run saves and ends with an `interrupted` EndRecord. So is
    `save()`; when true, the run saves and goes on. With a resume path and no config, the checkpoint's own config is
    used.
    """
    for name, function in {"stop": stop, "save": save, "progress": progress, "on_record": on_record}.items():
        if function is not None and not callable(function):
            raise UsageError(f"a {type(function).__name__} was given as {name}=", "give a function")
    custom = CustomParts(model, optimizer)
    progress = on_record if progress is None and isinstance(on_record, Chart) else progress
    records = _train(config, _arrays(data, val), custom, None if resume is None else str(resume), stop, save, progress)
    records = _watched(records) if alerts else records
    return records if on_record is None else _to_the_end(records, on_record)


def _watched(records: Generator[Record]) -> Generator[Record]:
    """The same records; alerts that they raise are logged."""
    alerts = Alerts()
    with contextlib.closing(records):
        for record in records:
            for alert in alerts.see(record):
                warn(f"step {alert.step} {alert.kind}: {alert.message}")
            yield record


def _to_the_end(records: Generator[Record], on_record: Callable[[Record], object]) -> RunResult:
    chart = Chart(shown=False)  # not the caller's, which may go on to another run
    with contextlib.closing(records):
        for record in records:
            chart(record)
            on_record(record)
    assert chart.info is not None, "the first record of every run"
    shown = isinstance(on_record, Chart) and on_record.is_shown
    return RunResult(Path(chart.info.folder), chart.info, chart.end, chart, shown)


def _train(
    config: Config | None,
    arrays: Arrays | None,
    custom: CustomParts,
    resume: str | None,
    stop: Callable[[], bool],
    save: Callable[[], bool],
    progress: Progress | None,
) -> Generator[Record]:
    found = launch()
    resume = resume if found is None else found.resumed(resume)
    if config is None:
        asked = load_config() if resume in (None, "auto") else stored_config(resume)
    else:
        asked = as_loaded(config, all_written=True)
    custom.check()
    try_threads.cache_clear()  # who uses the cores may have changed since the last run of this process
    timeout, alike = asked.config.parallel.timeout, shared_settings(asked)
    meeting = joined(found, asked.config.speed.device, timeout=timeout, settings=alike)
    chosen = None if found is None else found.folder
    with meeting as world, HeldFolder(asked, resume, world, chosen) as folder:
        origin, lock = folder.locked()
        source, plan = _planned(asked, origin, progress, arrays, custom, world)
        run = Run(plan, world, resumed=origin.checkpoint, custom=custom)
        limit = None if found is None or found.attempt is None else found.attempt.micro_batch
        less = [] if limit is None else use_at_most(run, limit)
        with world.fail_together():
            judged = origin.checkpoint is not None and not lacks_verdict(origin.checkpoint)
            ended = judged and origin.step == run.last_step and ends_at(origin.metrics, origin.step)
            done = lock is not None and ended  # judged and recorded
            notices = [] if lock is None else [*less, *_accepted(run, origin, lock, done=done)]
        world.pulse.note_run(origin.folder, accepted=True)
        saves = (row for row in read_metrics(origin.metrics) if row["type"] == "checkpoint")
        recorded = any(row.get("step") == origin.step for row in saves)
        how = {"resumed": origin.checkpoint, "stop": stop, "save": save, "recorded": recorded}
        records = train_loop(run, origin.folder, **how)
        if origin.checkpoint is not None:
            origin = dataclasses.replace(origin, checkpoint=origin.checkpoint.without_tensors())
            source.resumed = origin.checkpoint
        if world.broadcast(done):  # a notice says so, and the run's files stay as they are
            yield from notices_at(origin.step, notices)
            yield from records
            return
        device = plan.speed.device.torch_device
        try:
            yield from records if lock is None else _recorded(notices, records, run, origin, lock)
        except DivergedError as error:
            del run, records
            traceback.clear_frames(error.__traceback__)  # they hold the run, which may have to be built again
            free_memory(device)
            with world.fail_together():
                if lock is None:
                    raise OtherProcessError(error.exit_code) from error
                first = _first_loss(origin.metrics)
                ended = Ended(plan=plan, source=source, folder=origin.folder, first_loss=first, custom=custom)
                raise with_way_back(error, ended) from error


def _planned(
    asked: LoadedConfig,
    origin: Origin,
    progress: Progress | None,
    arrays: Arrays | None,
    custom: CustomParts,
    world: World,
) -> tuple[DataSource, RunPlan]:
    """Decides the run; where its data cannot be had, the hint also names the data it was trained on."""
    resumed = origin.checkpoint
    with world.fail_together():
        asked = as_begun(asked, origin)
        device = take_device(asked, world)
    try:
        with world.fail_together():
            source = DataSource(asked, device, progress, arrays=arrays, resumed=resumed)
        source = in_minutes(source, world)
        return source, resolve(source, world, custom=custom.facts)
    except DataError as error:
        settings = asked.config.model_dump()
        way = None if resumed is None else own_settings(settings, resumed, origin.resumable, ("data", "clean", "chat"))
        if way is None:
            raise
        raise DataError(error.message, f"{error.hint}; {way}") from error


def _first_loss(metrics: Path) -> float | None:
    """The loss of a run's first step, which is that of its starting weights."""
    losses = (row.get("loss") for row in read_metrics(metrics) if row["type"] == "step")
    return next((loss for loss in losses if isinstance(loss, float)), None)


def _recorded(
    notices: Sequence[str], records: Generator[Record], run: Run, origin: Origin, lock: RunLock
) -> Generator[Record]:
    """Passes records on, with the files of a run written."""
    # A loop whose reader is gone may have a save to wait for, and the folder is locked only until then.
    with _undone_before_the_first_step(lock, origin), contextlib.closing(records):
        path, step, again = origin.folder / "config.yaml", origin.step, recorded_again(origin.checkpoint)
        with disk_errors(str(path)):
            write_whole(path, run.plan.yaml.encode("utf-8"))
            metrics_file = MetricsFile(origin.metrics, keep_to_step=step, again=again)
        with metrics_file as metrics:
            yield from _written(notices, records, run, metrics, step)


def _accepted(run: Run, origin: Origin, lock: RunLock, *, done: bool) -> list[str]:
    """Refuses what can still be refused, then puts the folder in order for the run; returns notices on both.

    A finished run is left as it is, like one that was refused.
    """
    notices = check_resumed(run, origin)
    if done:
        notices.clear()  # settings that are other than the run's change nothing any more
    size = checkpoint_size(run.trained.count, run.plan.model, run.plan.optim, run.speed)
    check_disk(origin.folder, size, run.plan.checkpoint.keep + 2)
    place, checkpoint = origin.folder, origin.checkpoint
    with _undone_before_the_first_step(lock, origin), disk_errors(f"files of {place}"):
        if not done or origin.unusable:
            lock.accept()
        notices = [*map(set_unusable_aside, origin.unusable), *notices]
        if checkpoint is not None and origin.asked != "auto" and not done:
            set_later_aside(place, checkpoint, notices.append)
        return [*notices, *_mark_base(run, place)]


@contextlib.contextmanager
def _undone_before_the_first_step(lock: RunLock, origin: Origin) -> Iterator[None]:
    """Takes back the files of a new run that fails before its first step, so that it can be started again."""
    made = [path for path in (origin.folder / "config.yaml", origin.metrics) if not path.exists()]
    try:
        yield
    except BaseException:  # a generator that is closed, or interrupted, fails too
        with contextlib.suppress(OSError):  # a disk that fails here must not hide what went wrong first
            if origin.checkpoint is None and not any(row["type"] == "step" for row in read_metrics(origin.metrics)):
                for path in made:
                    path.unlink(missing_ok=True)
                lock.accepted = False  # leaving it then removes it, too
        raise


def _arrays(data: Any, val: Any) -> Arrays | None:
    if val is not None and data is None:
        raise UsageError(
            "train was given val= without data=", "give data= too, or name a text as data.validation in the config"
        )
    return None if data is None else Arrays(data, val)


def _mark_base(run: Run, folder: Path) -> Iterator[str]:
    """Notes in a checkpoint of ours that the adapters of this run need it."""
    if run.adapters is not None and run.plan.base is not None:
        base = run.plan.base.description.folder
        if is_checkpoint(base) and not mark_as_base(base, folder):
            yield f"{base} cannot be written to, so nothing says there that these adapters need it"


def _written(
    notices: Sequence[str], records: Iterable[Record], run: Run, metrics: MetricsFile, step: int
) -> Generator[Record]:
    """Passes notices and records on, after they were written to metrics.jsonl and to the trackers."""
    trackers: Trackers | None = None
    try:
        for notice in notices_at(step, notices):
            metrics.write(notice)
            yield notice
        for record in records:
            step = record.start_step if isinstance(record, RunInfo) else record.step
            metrics.write(record)
            if isinstance(record, RunInfo):
                trackers = open_trackers(run.plan.output.trackers, Path(record.folder), record)
            yield record
            for notice in notices_at(step, () if trackers is None else trackers.write(record)):
                metrics.write(notice)
                yield notice
    finally:
        for notice in notices_at(step, () if trackers is None else trackers.close()):
            metrics.add(notice)  # which is written when the file is closed


@overload
def finetune(
    config: Config | None = None, *, on_record: None = None, **options: Unpack[TuneOptions]
) -> Generator[Record]: ...


@overload
def finetune(
    config: Config | None = None, *, on_record: Callable[[Record], object], **options: Unpack[TuneOptions]
) -> RunResult: ...


def finetune(
    config: Config | None = None,
    *,
    resume: str | Path | None = None,
    on_record: Callable[[Record], object] | None = None,
    **options: Any,
) -> Generator[Record] | RunResult:
    """Fine-tunes a model on the rows of `chat.source`, by LoRA unless `lora.rank` is 0; all else is as in `train`.

    Without a config it is the preset `lora`, whose rows and model are an example: set `chat.source` and
    `model.init_from`.
    """
    if unknown := options.keys() - TuneOptions.__annotations__.keys():
        raise TypeError(f"finetune() got an unexpected keyword argument {min(unknown)!r}")
    resume = None if resume is None else str(resume)
    if config is not None or resume in (None, "auto"):
        config = with_sources(config or load_config("lora"))
        check_rows_named(config, resume)
    return train(config, resume=resume, on_record=on_record, **options)
