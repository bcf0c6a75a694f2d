"""The loop: a generator of records. Who reads them, prints them or draws them is not its business.

A step is taken, its numbers are read when they have arrived, and at a boundary `boundary.py` saves and evaluates.
Of a run whose length is told in minutes it keeps the time, and stretches the schedules.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_bytes
from flatout.data.batch import Batch, BatchLoader
from flatout.engine.books import Progress, notices_at, run_info, settle
from flatout.engine.boundary import Boundary, due_after, is_due, out_of_patience, sample_ids, write_best
from flatout.engine.drift import check_alike, check_start
from flatout.engine.eigenstates import look_at_eigenstates
from flatout.engine.full_disk import when_there_is_room
from flatout.engine.machine import MachineWatch
from flatout.engine.recovery import CompileFailure, attempt_step, fitting_evaluation, use_less_memory, use_no_compiler
from flatout.engine.run import Run
from flatout.engine.saving import due_of, lacks_verdict, mend_run_adapter, notice_on_adapter, restore
from flatout.engine.spans import PendingReports, SpanTotals
from flatout.engine.warm_up import warm_up
from flatout.records import CheckpointRecord, EndRecord, NoticeRecord, PreviewRecord, Record
from flatout.resolve.memory import checkpoint_size

PARAMETER_NORM_EVERY = 10  # steps: it reads all weights once more
LAG = 2  # steps after which several processes read a report: all of them then see the same of the run
SPANS_EVERY = 500  # steps, where nothing else makes a boundary
FEW = 8  # tokens of a sample that are timed
DISK = 1e9  # bytes per second that a checkpoint is taken to be written with, before one was


def train_loop(
    run: Run,
    folder: Path,
    *,
    resumed: Checkpoint | None,
    stop: Callable[[], bool],
    save: Callable[[], bool] = lambda: False,
    recorded: bool = True,
    saves: bool = True,
) -> Generator[Record]:
    """Trains `run` to its end, or until `stop()` says so at a step boundary; saves into `folder`, where it `saves`.

    `save()` is asked after every step, too: where it is true, the run saves and goes on. `recorded`: metrics.jsonl
    already has the CheckpointRecord of the checkpoint that is resumed from; a kill can come after the save and before
    the record.
    """
    progress, unjudged = _start(run, resumed)
    check_start(run)
    resumed = None if resumed is None else resumed.without_tensors()
    origin = None if resumed is None else resumed.path
    resumed_from = None if origin is None else str(origin)
    mend = functools.partial(_mend_files, run, progress, folder, resumed)
    mended = yield from when_there_is_room(mend, progress.step, run.full_disk_wait)
    yield run_info(run, folder, progress.step, resumed_from)
    yield from notices_at(progress.step, (*run.notices, *mended) if progress.step < run.last_step else ())
    preview = run.data.preview() if progress.step == 0 else ()
    if preview:
        yield PreviewRecord(step=0, pieces=preview)
    yield from look_at_eigenstates(run.model, progress.step)
    totals = SpanTotals()
    boundary = Boundary(run, progress, folder, totals, run.step.micro_batch, resumed_from, progress.step, saves)
    with boundary.closing():
        if origin is not None and resumed is not None and unjudged:
            yield from boundary.judge(due_of(resumed), origin)
        elif origin is not None and not recorded:
            size, best = checkpoint_bytes(origin), progress.best_step == progress.step
            yield CheckpointRecord(step=progress.step, path=str(origin), bytes=size, seconds=0.0, best=best)
        spent = out_of_patience(run, progress)  # resuming a run that stopped early, with the patience it had
        position = None if resumed is None else resumed.state.get("stream")
        steps = _Steps(boundary, stop, save, position, reason="early_stop" if spent else "finished")
        if not spent and progress.step < run.last_step:
            yield from steps.run(progress.step)
        yield from boundary.conclude()
    yield from notices_at(progress.step, () if spent else run.data.last_notices(steps.position))
    yield from notices_at(progress.step, run.new_notices.take())
    if resumed is None or resumed.step != run.last_step:
        yield from notices_at(progress.step, notice_on_adapter(run, folder))
    if boundary.eigenstates_seen_at != progress.step:
        yield from look_at_eigenstates(run.model, progress.step)
    yield EndRecord(
        step=progress.step,
        reason=steps.reason,
        seconds=progress.seconds,
        val_loss=progress.val_loss,
        best_loss=progress.best_loss,
        best_step=progress.best_step,
        checkpoint=boundary.checkpoint,
    )


def _start(run: Run, resumed: Checkpoint | None) -> tuple[Progress, bool]:
    """The books as they are in the checkpoint, and whether that lacks its verdict.

    Both as the first process reads them: other hosts may see a file in a shared folder later, and all must act alike.
    """
    if resumed is None:
        return Progress(), False
    with run.world.together():
        progress = restore(run, resumed)
    books, unjudged = run.world.told([dataclasses.asdict(progress), lacks_verdict(resumed)])
    return Progress(**books), unjudged


def _mend_files(run: Run, progress: Progress, folder: Path, resumed: Checkpoint | None) -> list[str]:
    """Brings best.json and the adapter's folder to the step that the run resumes from; returns notices."""
    if not run.world.first:
        return []
    write_best(folder, progress.best_step, progress.best_loss)  # a run taken back forgets a later best
    return [] if resumed is None else list(mend_run_adapter(run, folder))


@dataclasses.dataclass
class _Steps:
    """The steps of a run, one after the other, from its loader through `TrainStep` into the books."""

    boundary: Boundary
    stop: Callable[[], bool]
    save: Callable[[], bool]
    position: dict[str, Any] | None  # of the loader, after the last step
    reason: str  # why the run ends
    owed: bool = False  # a save that came due while non-finite steps were being counted
    stopping: bool = False  # by the last step, in any process
    asked: bool = False  # to save, likewise

    def __post_init__(self) -> None:
        self.training, self.progress, self.totals = self.boundary.run, self.boundary.progress, self.boundary.totals
        lag = LAG if self.training.world.size > 1 else None
        self.pending = PendingReports(self.training.speed.device.torch_device, lag)

    def run(self, first_step: int) -> Iterator[Record]:
        run, machine = self.training, MachineWatch(self.training.speed.device)
        with contextlib.closing(machine), run.batches(first_step, self.position) as loader:
            yield from notices_at(first_step, filter(None, [warm_up(run, first_step)]))
            begin(run)
            self.pending.restart()
            for batch, data_seconds in timed(loader):
                yield from self._take(batch, data_seconds, loader)
                if self.boundary.landed:
                    yield from noted(run, self.boundary.conclude())
                    self.pending.restart()
                keep_time(run, self.progress, batch.step + 1)
                if self.totals.steps >= SPANS_EVERY:
                    yield self.totals.take(self.progress.step, run.world)
                if (state := machine.poll(batch.step + 1)) is not None:
                    yield state
                ended = yield from self._at_boundary(batch.step + 1)
                if ended:
                    return

    def _take(self, batch: Batch, data_seconds: float, loader: BatchLoader) -> Iterator[Record]:
        """One step, taken again with less where it fails, and the reports that have arrived by then."""
        run, step = self.training, batch.step + 1
        run.world.pulse.at_step(step)
        run.step.with_parameter_norm = step == 1 or step % PARAMETER_NORM_EVERY == 0 or step == run.last_step
        report = attempt_step(run, batch)
        while not isinstance(report, torch.Tensor):  # it failed, and nothing has changed: again, with less
            yield from settle(run, self.progress, self.totals, self.pending.drain())
            if isinstance(report, CompileFailure):
                message = use_no_compiler(run, report)
            else:
                message = use_less_memory(run, batch, report)
            yield NoticeRecord(step=step, message=message)
            self.pending.restart()
            report = attempt_step(run, batch)
        tokens, stopping, asked = run.world.totals([batch.count, self.stop(), self.save() or self._late()])
        self.stopping, self.asked = stopping > 0, asked > 0
        self.pending.push(step, report, marks=run.step.clock.take(), tokens=tokens, data_seconds=data_seconds)
        yield from notices_at(step, run.new_notices.take())
        self.position = loader.position()
        yield from notices_at(step, loader.notices())
        yield from settle(run, self.progress, self.totals, self.pending.ready())
        check_alike(run, step)

    def _at_boundary(self, step: int) -> Generator[Record, None, bool]:
        """Saves and evaluates where that is due; whether the run ends here."""
        run, progress = self.training, self.progress
        stopping, ending = self.stopping, step == run.last_step
        due = due_after(run, step)
        settings = run.plan.checkpoint
        every = is_due(step, settings.steps) or run.ends_epoch(step, settings.epochs)
        cooling = run.deadline is not None and run.deadline.cools_down(step)
        saving = self.boundary.saves and (ending or stopping or self.owed or self.asked or every or cooling)
        if not (due.evaluate or due.sample or saving):
            return False
        yield from settle(run, progress, self.totals, self.pending.drain())
        if progress.bad_steps and not ending:  # wait: a good step ends the count, or the third bad one ends the run
            self.owed, saving, stopping = saving, False, False
            if cooling and run.deadline is not None:
                run.deadline.put_off()
        else:
            self.owed = False
        last = ending or stopping
        passing = self.boundary.pass_through(due, saving=saving, last=last, position=self.position)
        yield from noted(run, passing)
        yield self.totals.take(step, run.world)
        if self.boundary.exhausted or (stopping and not ending):
            self.reason = "early_stop" if self.boundary.exhausted else "interrupted"
            return True
        self.pending.restart()
        return ending

    def _late(self) -> bool:
        """Whether the last save is longer ago than `checkpoint.every` in minutes."""
        minutes = self.training.plan.checkpoint.minutes
        return 0 < 60 * minutes <= time.monotonic() - self.boundary.saved_at


def timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Each batch, with the seconds that the host waited for it."""
    began = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - began
        began = time.perf_counter()


# --- a length in minutes ----------------------------------------------------------------------------------------------


def begin(run: Run) -> None:
    """Starts the clock before the first step, once it is known how long evaluation and sample at the end will take."""
    deadline = run.deadline
    if deadline is None:
        return
    deadline.evaluation = _evaluation_seconds(run)
    deadline.sample = _sample_seconds(run)
    deadline.checkpoint = checkpoint_size(run.trained.count, run.plan.model, run.plan.optim, run.speed) / DISK
    run.step.optimizer.stretch(*deadline.stretch)
    deadline.start()


def _evaluation_seconds(run: Run) -> float:
    """Seconds of an evaluation, from its first batch. The batch is read twice: the first time warms up."""
    size = run.step.micro_batch
    _, size, notices = fitting_evaluation(run, size, batches=1)
    for notice in notices:
        run.new_notices.add(notice)
    began = time.perf_counter()
    (_, tokens), _, _ = fitting_evaluation(run, size, batches=1)
    seconds = time.perf_counter() - began
    return seconds * min(run.data.val.tokens, run.data.val_tokens or run.data.val.tokens) / max(tokens, 1)


def _sample_seconds(run: Run) -> float:
    """Seconds of a sample, from its first tokens, which are drawn twice as well."""
    tokens = run.plan.eval.sample_tokens
    if not tokens:
        return 0.0
    sample_ids(run, min(tokens, FEW))
    began = time.perf_counter()
    _, ids = sample_ids(run, min(tokens, FEW))
    return (time.perf_counter() - began) * tokens / max(len(ids), 1)


def keep_time(run: Run, progress: Progress, step: int) -> None:
    """Compares the clock with the plan after a step, and stretches what is left of the schedules."""
    deadline = run.deadline
    if deadline is not None and deadline.look(step, progress.step, progress.seconds, run.world):
        run.step.optimizer.stretch(*deadline.stretch)


def noted(run: Run, records: Iterator[Record]) -> Iterator[Record]:
    """Passes records on, after the deadline has seen how long evaluations and saves take.

    A save with a notice before it is not as others are: it has waited for space, or was written twice.
    """
    unusual = False
    for record in records:
        unusual = unusual or isinstance(record, NoticeRecord)
        if run.deadline is not None and not (unusual and isinstance(record, CheckpointRecord)):
            run.deadline.see(record)
        yield record
