"""The loop: a generator of records. Who reads them, prints them or draws them is not its business.

A step is taken, its numbers are read when they have arrived, and at a boundary `boundary.py` saves and evaluates.
Of a run whose length is told in minutes it keeps the time, and stretches the schedules.

A run in stages meets every shape of its micro-batches before the first step, so that no later step pays for it.

What goes by shape is compiled (torch.compile, Triton), tuned (products of `ops/kernels/cublaslt.py`) or recorded
(`engine/graphs.py`) when it is first met, which takes seconds. So each stage's micro-batch, with its length and its
attention window, goes through forward and backward as often as a recording takes.

Contract: nothing that is learned changes. There is no update; gradients are let go, the random stream and the scales of
8-bit tensors are put back, and the tokens are made up, so no loader is asked. A run without stages is not
warmed up, unless its length is told in minutes: its clock begins with the first step.
What fails for lack of memory, or in the compiler, is left to the step itself, which knows what to do about it.
8-bit scales that are not known yet are measured here for the length of the warm-up, so that 8-bit products are tuned
and recorded too; the first step measures them itself, and recordings wait for the second.

Ranks that hold the same weights hold them bit for bit. Now and then they compare.

Those are all ranks, or of a sharded model the ranks with the same slices: none under FSDP2, one of every host under
hybrid. What makes them differ is a fault of memory, of a device or of ours; nothing in the loss tells it for a long
time.
"""

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_bytes
from flatout.data.batch import Batch, BatchLoader, Reading
from flatout.device import free_memory, is_out_of_memory
from flatout.engine.books import Progress, notices_at, run_info, settle
from flatout.engine.boundary import Boundary, due_after, is_due, out_of_patience, sample_ids, write_best
from flatout.engine.eigenstates import look_at_eigenstates
from flatout.engine.full_disk import when_there_is_room
from flatout.engine.graphs import WARM_UPS
from flatout.engine.machine import MachineWatch
from flatout.engine.recovery import (
    CompileFailure,
    attempt_step,
    fitting_evaluation,
    for_all_ranks,
    needs_a_restart,
    use_less_memory,
    use_no_compiler,
)
from flatout.engine.run import Run
from flatout.engine.saving import due_of, lacks_verdict, mend_run_adapter, notice_on_adapter, restore
from flatout.engine.spans import PendingReports, SpanTotals
from flatout.errors import DriftError, UsageError
from flatout.launch import OtherProcessError
from flatout.model.compiling import is_compile_error
from flatout.ops.documents import PackedRows
from flatout.records import CheckpointRecord, EndRecord, NoticeRecord, PreviewRecord, Record
from flatout.resolve.memory import checkpoint_size


def shapes_of(run: Run, first_step: int) -> list[Reading]:
    """One step of each form of micro-batch that is still to come; nothing where no other stage follows.

    A run whose length is told in minutes is warmed up in any case.
    """
    later = [stage.first_step for stage in run.plan.schedule.stages if first_step < stage.first_step < run.steps]
    met = bool(later) or run.deadline is not None  # a run that ends on time pays for no first step either
    readings = [run.plan.schedule.at(step) for step in (first_step, *later)] if met else []
    return list({(reading.pieces, reading.attention_window): reading for reading in readings}.values())


def warm_up(run: Run, first_step: int) -> str | None:
    """Warms a run up before `first_step`, where that is worth it; returns a notice."""
    made_for_shapes = run.step.graph is not None or run.speed.compile != "off"
    shapes = shapes_of(run, first_step)
    if not shapes or run.given.model is not None or not (made_for_shapes or run.speed.device.kind == "cuda"):
        return None
    began, scales = time.perf_counter(), run.model.narrow.scales
    measuring = scales is not None and not scales.rounding
    random = run.random.tensors()
    known = {name: tensor.clone() for name, tensor in run.model.narrow.tensors().items()}
    failure = _attempt(run, shapes)
    if measuring and failure is None:
        run.model.narrow.settle()
        failure = _attempt(run, shapes)
    run.random.assign(random)
    run.model.narrow.assign(known)
    if failure is not None:  # it may have left anything half done
        run.step.use_micro_batch(run.step.micro_batch)
        free_memory(run.speed.device.torch_device)
        return f"the warm-up of stages ended early: {failure}"
    forms = "1 form" if len(shapes) == 1 else f"{len(shapes)} forms"
    name = "stages" if len(run.plan.schedule.stages) > 1 else "minutes"
    return f"{name}: {forms} of micro-batches warmed up in {time.perf_counter() - began:.1f} s"


def _attempt(run: Run, shapes: list[Reading]) -> str | None:
    """Takes the passes; what went wrong, where a step can go on from it."""
    try:
        with run.random.active():
            for reading in shapes:
                batch = _made_up(run, reading)
                run.step.rehearse(batch.tokens, batch.targets, batch.packed, batch.pieces, batch.attention_window)
    except RuntimeError as error:
        lacking = is_out_of_memory(error)
        if not lacking and not is_compile_error(error):
            raise
        if needs_a_restart(run):
            raise (for_all_ranks(run, None, error) if lacking else error) from error
        return str(error).strip().partition("\n")[0][:160]
    return None


def _made_up(run: Run, reading: Reading) -> Batch:
    """Micro-batches of any tokens: one more than a recording waits for."""
    rows, device = run.step.micro_batch * reading.pieces * (WARM_UPS + 1), run.speed.device.torch_device
    ids = torch.arange(rows * reading.length + 1) % run.data.tokenizer.vocab
    tokens_BT, targets_BT = ids[:-1].view(rows, -1), ids[1:].view(rows, -1)
    how = {"pieces": reading.pieces, "attention_window": reading.attention_window}
    if not run.data.apart:
        return Batch(tokens_BT, targets_BT, 0, **how).on(device)
    documents = np.zeros(tokens_BT.shape, dtype=np.int32)
    documents[:, reading.length // 2 :] = 1
    packed = PackedRows(tokens_BT.numpy(), documents, targets_BT.numpy())
    return Batch.of_rows(packed, 0, device, **how).on(device)


EVERY = 1000  # steps between comparisons
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """A sum over the bits of all values, read as whole numbers: one pass on the device, one number to the host."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack([place * total for place, total in enumerate(sums, 1)]).sum())


def check_alike(run: Run, step: int) -> None:
    """Compares the weights of ranks where that is due; an error names the ranks that differ from most others."""
    wrong = [] if step % EVERY else _differing(run)
    if not wrong:
        return
    if not run.world.first:
        raise OtherProcessError(DriftError.exit_code)
    raise DriftError(
        f"after step {step:,} the weights of rank {', '.join(wrong)} are not those of the others; {EVERY:,} steps ago "
        "they were",
        "memory or a GPU may be faulty, see `flatout doctor` there; resume from a checkpoint of before: --resume "
        "RUN/checkpoints/step-N",
    )


def check_start(run: Run) -> None:
    """Refuses ranks that begin with other weights than the others, frozen ones included."""
    bases = run.world.gather(run.base_hash)
    wrong = _differing(run) or [str(rank) for rank, base in enumerate(bases) if base != bases[0]]
    with run.world.fail_together():
        if wrong:
            raise UsageError(
                f"rank {', '.join(wrong)} begins with other weights than the others",
                "model and checkpoint must be the same on all hosts: use folders that all of them see",
            )


def _differing(run: Run) -> list[str]:
    """The ranks whose weights are not those of the others that should have the same."""
    world, sharding = run.world, run.trained.sharding
    copies = world.size if sharding is None else world.size // sharding.count
    if copies == 1:
        return []
    place = 0 if sharding is None else sharding.number
    everywhere = world.gather([place, sum_of_bits(one.parameter.detach() for one in run.trained.updated)])
    held = {place for place, _ in everywhere}
    return [str(rank) for rank in sorted(rank for place in held for rank in _odd_ones(everywhere, place))]


def _odd_ones(everywhere: Sequence[tuple[int, int]], held: int) -> list[int]:
    """The ranks that differ from most others that hold the slices of number `held`."""
    found = {rank: bits for rank, (place, bits) in enumerate(everywhere) if place == held}
    most, count = Counter(found.values()).most_common(1)[0]
    # Of two that differ nobody can say which is right; the first, which writes the checkpoints, is not the one named.
    usual = most if count > 1 else next(iter(found.values()))
    return [rank for rank, bits in found.items() if bits != usual]


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
    with run.world.fail_together():
        progress = restore(run, resumed)
    books, unjudged = run.world.broadcast([dataclasses.asdict(progress), lacks_verdict(resumed)])
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
    return seconds * min(run.data.val.tokens, run.plan.eval.tokens or run.data.val.tokens) / max(tokens, 1)


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
