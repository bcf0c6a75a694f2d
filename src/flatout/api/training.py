"""Training as a generator of records, which also writes them to the run folder; data preparation as a function."""

import contextlib
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.api.configs import Config, plain, stored_config
from flatout.api.resuming import Origin, check_resumed, check_shape, find_origin, own_settings
from flatout.config.load import load_config, show
from flatout.data.array_data import Arrays
from flatout.data.pack import Progress
from flatout.data.prepare import prepare_data
from flatout.data.workers import EngineName
from flatout.device import free_memory
from flatout.engine.checkpoint import mark_as_base
from flatout.engine.diverged import with_way_back
from flatout.engine.fit_check import check_disk
from flatout.engine.loop import train_loop
from flatout.engine.run import Run
from flatout.engine.run_files import check_own
from flatout.engine.run_folder import (
    RunLock,
    choose_folder,
    is_checkpoint,
    run_lock,
    set_later_aside,
    set_unusable_aside,
)
from flatout.engine.saving import lacks_verdict, recorded_again
from flatout.engine.setup import setup_run
from flatout.engine.trained import checkpoint_size
from flatout.errors import DataError, DivergedError, UsageError
from flatout.files import disk_errors, write_whole
from flatout.launch import check_one_process
from flatout.observe.sinks import MetricsFile, ends_at, read_metrics
from flatout.observe.track.trackers import Trackers, check_trackers, open_trackers
from flatout.records import NoticeRecord, Record, RunInfo


def prepare(
    config: Config | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    engine: EngineName = "local",
) -> Path:
    """Tokenizes the config's text into shards and returns their folder; does nothing when they are there.

    Input that cannot be used is left out and listed in problems.jsonl there.
    """
    wanted = plain(config or load_config())
    return prepare_data(wanted.data, wanted.clean, progress, overwrite=overwrite, workers=workers, engine=engine)[0]


def train(
    config: Config | None = None,
    *,
    data: Any = None,
    val: Any = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Generator[Record]:
    """Trains and yields records; also writes them to metrics.jsonl in the run folder.

    `data` takes the place of the config's text: an iterable of token arrays, a function that returns one, or a torch
    Dataset of them; `val` is the same to evaluate on (docs/data.md). Give them again to resume.

    `resume` is None (a new run), "auto" (go on if there is something, else start) or a run or checkpoint folder.
    `stop()` is asked after every step; when true, the run saves and ends with an `interrupted` EndRecord. So is
    `save()`; when true, the run saves and goes on. With a resume path and no config, the checkpoint's own config is
    used.
    """
    check_one_process()
    resume = None if resume is None else str(resume)
    if config is None:
        config = load_config() if resume in (None, "auto") else stored_config(Path(resume))
    arrays = _arrays(data, val)
    check_trackers(plain(config).output.trackers)
    folder = choose_folder(plain(config).output, resume)
    with run_lock(folder) as lock:
        check_own(folder)
        origin = find_origin(folder, resume)
        run = _set_up(config, origin, progress, arrays)
        done = _is_done(run, origin)
        notices = _accepted(run, origin, lock, done=done)
        records = _loop(run, origin, stop, save)
        if done:  # that is told, and the run's files stay as they are
            yield from (NoticeRecord(step=origin.step, message=notice) for notice in notices)
            yield from records
            return
        device, vocab = run.speed.device.torch_device, run.model.vocab
        with _undone_before_the_first_step(lock, origin):
            with disk_errors(f"{folder / 'config.yaml'}"):
                write_whole(folder / "config.yaml", show(run.config).encode("utf-8"))
            with MetricsFile(
                origin.metrics, keep_to_step=origin.step, again=recorded_again(origin.checkpoint)
            ) as metrics:
                try:
                    yield from _written(notices, records, run, metrics, origin.step)
                except DivergedError as error:
                    del run, records
                    traceback.clear_frames(error.__traceback__)  # they hold the run, which may have to be built again
                    free_memory(device)
                    raise with_way_back(error, config, folder, vocab, arrays) from error


def _accepted(run: Run, origin: Origin, lock: RunLock, *, done: bool) -> list[str]:
    """Refuses what can still be refused, then puts the folder in order for the run; returns notices on both.

    A finished run is left as it is, like one that was refused.
    """
    notices = check_resumed(run, origin)
    if done:
        notices.clear()  # settings that are other than the run's change nothing any more
    one = checkpoint_size(run.trained.count, run.config.optim, run.speed)
    check_disk(origin.folder, one, run.config.checkpoint.keep + 2)
    if not done or origin.unusable:
        lock.accept()
    notices[:0] = set_unusable_aside(origin.unusable)
    if origin.checkpoint is not None and origin.asked != "auto" and not done:
        set_later_aside(origin.folder, origin.checkpoint, notices.append)
    return [*notices, *_mark_base(run, origin.folder)]


@contextlib.contextmanager
def _undone_before_the_first_step(lock: RunLock, origin: Origin) -> Iterator[None]:
    """Takes back the files of a new run that fails before its first step, so that it can be started again."""
    made = [path for path in (origin.folder / "config.yaml", origin.metrics) if not path.exists()]
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # a disk that fails here must not hide what went wrong first
            if origin.checkpoint is None and not any(row["type"] == "step" for row in read_metrics(origin.metrics)):
                for path in made:
                    path.unlink(missing_ok=True)
                lock.accepted = False  # leaving it then removes it, too
        raise


def _arrays(data: Any, val: Any) -> Arrays | None:
    if val is not None and data is None:
        raise UsageError("train was given val= without data=", "give data= too, or set data.val_source in the config")
    return None if data is None else Arrays(data, val)


def _set_up(config: Config, origin: Origin, progress: Progress | None, arrays: Arrays | None) -> Run:
    """Builds the run; where its data cannot be had, the way back to what it was trained on is told, too."""
    resumed = origin.checkpoint
    if resumed is None:
        return setup_run(config, progress, arrays=arrays)
    if plain(config).chat.source is None:  # else the shape is the base's, read later
        check_shape(plain(config), resumed, origin.resumable)
    try:
        return setup_run(config, progress, resumed=resumed, arrays=arrays)
    except DataError as error:
        way = own_settings(plain(config), resumed, origin.resumable, ("data", "clean", "chat"))
        if way is None:
            raise
        raise DataError(error.message, f"{error.hint}; {way}") from error


def _is_done(run: Run, origin: Origin) -> bool:
    """Whether the checkpoint is the end of the run, judged and recorded."""
    judged = origin.checkpoint is not None and not lacks_verdict(origin.checkpoint)
    return judged and origin.step == run.steps and ends_at(origin.metrics, origin.step)


def _mark_base(run: Run, folder: Path) -> Iterator[str]:
    """Notes in a checkpoint of ours that the adapters of this run need it."""
    if run.adapters is not None and run.base is not None:
        base = run.base.description.folder
        if is_checkpoint(base) and not mark_as_base(base, folder):
            yield f"{base} cannot be written to, so nothing says there that these adapters need it"


def _loop(run: Run, origin: Origin, stop: Callable[[], bool], save: Callable[[], bool]) -> Generator[Record]:
    rows = read_metrics(origin.metrics)
    return train_loop(
        run,
        origin.folder,
        resumed=origin.checkpoint,
        stop=stop,
        save=save,
        recorded=any(row["type"] == "checkpoint" and row.get("step") == origin.step for row in rows),
    )


def _written(
    notices: Sequence[str], records: Iterable[Record], run: Run, metrics: MetricsFile, step: int
) -> Generator[Record]:
    """Passes notices and records on, after they were written to metrics.jsonl and to the trackers."""
    trackers: Trackers | None = None
    try:
        yield from _written_notices(notices, metrics, step)
        for record in records:
            metrics.write(record)
            if isinstance(record, RunInfo):
                trackers = open_trackers(run.config.output.trackers, Path(record.folder), record)
                step = record.start_step
            else:
                step = record.step
            yield record
            yield from _written_notices(() if trackers is None else trackers.write(record), metrics, step)
    finally:
        for notice in () if trackers is None else trackers.close():
            metrics.write(NoticeRecord(step=step, message=notice))


def _written_notices(notices: Iterable[str], metrics: MetricsFile, step: int) -> Generator[NoticeRecord]:
    for notice in notices:
        record = NoticeRecord(step=step, message=notice)
        metrics.write(record)
        yield record
