"""What the loop does for a run whose length is told in minutes; nothing for any other."""

import time
from collections.abc import Iterator

from flatout.engine.books import Progress
from flatout.engine.boundary import sample_ids
from flatout.engine.recovery import fitting_evaluation
from flatout.engine.run import Run
from flatout.records import CheckpointRecord, NoticeRecord, Record
from flatout.resolve.memory import checkpoint_size

FEW = 8  # tokens of a sample that are timed
DISK = 1e9  # bytes per second that a checkpoint is taken to be written with, before one was


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
