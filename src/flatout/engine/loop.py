"""The loop: a generator of records. Who reads them, prints them or draws them is not its business.

A step is taken, its numbers are read when they have arrived, and at a boundary `Boundary` (engine/saving.py) saves and
evaluates. Of a run whose length is set in minutes the loop keeps the time, and stretches the schedules.
"""

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flatout
from flatout.checkpoints.checkpoint import Checkpoint, checkpoint_bytes
from flatout.data.batch import Batch, BatchLoader, StepReading
from flatout.device import free_memory, is_out_of_memory, reserved_memory_bytes
from flatout.engine.custom import count_of
from flatout.engine.graphs import WARM_UPS
from flatout.engine.monitor import MachineWatch, look_at_eigenstates, notices_at
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
from flatout.engine.saving import Boundary, due_after, is_due, out_of_patience, sample_ids, write_best
from flatout.engine.spans import PendingReports, SpanTotals, StepReport
from flatout.engine.state import Progress, due_of, lacks_verdict, mend_run_adapter, notice_on_adapter, restore
from flatout.errors import DivergedError, DriftError, UsageError
from flatout.files import disk_errors
from flatout.launch import OtherProcessError
from flatout.model.compiling import is_compile_error
from flatout.model.count import parameter_count, table_count
from flatout.ops.documents import PackedRows
from flatout.records import (
    CheckpointRecord,
    EndRecord,
    EpochRecord,
    NoticeRecord,
    PreviewRecord,
    Record,
    RunInfo,
    StepRecord,
)
from flatout.resolve.memory import checkpoint_size

PARAMETER_NORM_EVERY = 10  # steps: it reads all weights once more
LAG = 2  # steps after which several processes read a report: all of them then see the same of the run
SPANS_EVERY = 500  # steps, where nothing else makes a boundary
FEW = 8  # tokens of a sample that are timed
DISK = 1e9  # bytes per second that a checkpoint is taken to be written with, before one was
MOST_BAD_STEPS = 3
COMPARED_EVERY = 1000  # steps between comparisons of weights
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    with disk_errors("the run's files"):
        mended = _mend_files(run, progress, folder, resumed)
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
        checkpoint=boundary.last_save,
    )


def _start(run: Run, resumed: Checkpoint | None) -> tuple[Progress, bool]:
    """The progress that the checkpoint holds, and whether it lacks its verdict.

    Both as the first process reads them: other hosts may see a file in a shared folder later, and all must act alike.
    """
    if resumed is None:
        return Progress(), False
    with run.world.fail_together():
        progress = restore(run, resumed)
    numbers, unjudged = run.world.broadcast([dataclasses.asdict(progress), lacks_verdict(resumed)])
    return Progress(**numbers), unjudged


def _mend_files(run: Run, progress: Progress, folder: Path, resumed: Checkpoint | None) -> list[str]:
    """Brings best.json and the adapter's folder to the step that the run resumes from; returns notices."""
    if not run.world.first:
        return []
    write_best(folder, progress.best_step, progress.best_loss)  # a run taken back forgets a later best
    return [] if resumed is None else list(mend_run_adapter(run, folder))


@dataclasses.dataclass
class _Steps:
    """The steps of a run, one after the other, from its loader through `TrainStep` to their records."""

    boundary: Boundary
    stop: Callable[[], bool]
    save: Callable[[], bool]
    position: dict[str, Any] | None  # of the loader, after the last step
    reason: str  # why the run ends
    save_put_off: bool = False  # a save that came due while non-finite steps were being counted
    stopping: bool = False  # by the last step, in any process
    save_asked: bool = False  # to save, likewise

    def __post_init__(self) -> None:
        self.training, self.progress, self.totals = self.boundary.run, self.boundary.progress, self.boundary.totals
        lag = LAG if self.training.world.size > 1 else None
        self.pending = PendingReports(self.training.speed.device.torch_device, lag)

    def run(self, first_step: int) -> Iterator[Record]:
        run, progress, deadline = self.training, self.progress, self.training.deadline
        machine = MachineWatch(run.speed.device)
        with contextlib.closing(machine), run.batches(first_step, self.position) as loader:
            yield from notices_at(first_step, filter(None, [warm_up(run, first_step)]))
            begin(run)
            self.pending.restart()
            for batch, data_seconds in timed(loader):
                yield from self._take(batch, data_seconds, loader)
                if self.boundary.save_is_done:
                    yield from noted(run, self.boundary.conclude())
                    self.pending.restart()
                if deadline is not None and deadline.look(batch.step + 1, progress.step, progress.seconds, run.world):
                    run.step.optimizer.stretch(*deadline.stretch)
                if self.totals.steps >= SPANS_EVERY:
                    yield self.totals.take(progress.step, run.world)
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
            yield from record_steps(run, self.progress, self.totals, self.pending.drain())
            if isinstance(report, CompileFailure):
                message = use_no_compiler(run, report)
            else:
                message = use_less_memory(run, batch, report)
            yield NoticeRecord(step=step, message=message)
            self.pending.restart()
            report = attempt_step(run, batch)
        tokens, stopping, asked = run.world.totals([batch.count, self.stop(), self.save() or self._late()])
        self.stopping, self.save_asked = stopping > 0, asked > 0
        self.pending.push(step, report, marks=run.step.clock.take(), tokens=tokens, data_seconds=data_seconds)
        yield from notices_at(step, run.new_notices.take())
        self.position = loader.position()
        yield from notices_at(step, loader.notices())
        yield from record_steps(run, self.progress, self.totals, self.pending.ready())
        check_alike(run, step)

    def _at_boundary(self, step: int) -> Generator[Record, None, bool]:
        """Saves and evaluates where that is due; whether the run ends here."""
        run, progress = self.training, self.progress
        stopping, ending = self.stopping, step == run.last_step
        due = due_after(run, step)
        settings = run.plan.checkpoint
        every = is_due(step, settings.steps) or run.ends_epoch(step, settings.epochs)
        cooling = run.deadline is not None and run.deadline.cools_down(step)
        saving = self.boundary.saves and (
            ending or stopping or self.save_put_off or self.save_asked or every or cooling
        )
        if not (due.evaluate or due.sample or due.tasks or saving):
            return False
        yield from record_steps(run, progress, self.totals, self.pending.drain())
        if progress.bad_steps and not ending:  # wait: a good step ends the count, or the third bad one ends the run
            self.save_put_off, saving, stopping = saving, False, False
            if cooling and run.deadline is not None:
                run.deadline.put_off()
        else:
            self.save_put_off = False
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


# --- records of steps -------------------------------------------------------------------------------------------------


def record_steps(run: Run, progress: Progress, totals: SpanTotals, reports: Iterable[StepReport]) -> Iterator[Record]:
    """The records of reports that have arrived, added to `progress`; ends the run after three bad steps."""
    for report in reports:
        totals.add_step(report.spans)
        totals.add("data", report.data_seconds)
        progress.step = report.step
        progress.seconds += report.seconds
        progress.tokens += report.tokens
        yield _step_record(run, progress, report)
        if not report.applied:
            yield from _bad_step(run, progress, report)
        else:
            progress.bad_steps = 0
        progress.epoch_loss += report.loss
        progress.epoch_steps += 1
        progress.epoch_seconds += report.seconds
        progress.epoch_tokens += report.tokens
        if run.ends_epoch(report.step):
            yield _end_epoch(run, progress)


def _step_record(run: Run, progress: Progress, report: StepReport) -> StepRecord:
    rate = report.tokens / report.seconds if report.seconds > 0 else None
    peak, windows = run.speed.device.peak_flops, run.data.facts.windows
    # By the names of rules; weights that are all zero have no ratio.
    rules = (group.rule.name for group in run.step.optimizer.groups)
    ratios = {name: ratio for name, ratio in zip(rules, report.update_ratios, strict=False) if math.isfinite(ratio)}
    return StepRecord(
        step=report.step,
        epoch=None if windows is None else run.plan.schedule.at(report.step).start / windows,
        loss=report.loss,
        learning_rate=report.learning_rate,
        grad_norm=report.grad_norm,
        applied=report.applied,
        tokens=progress.tokens,
        seconds=report.seconds,
        tokens_per_second=rate,
        mfu=rate * run.flops_at(report.step) / (peak * run.world.size) if rate and peak else None,
        memory_bytes=run.peak_memory_bytes(),
        loss_scale=None if run.step.loss_scale is None else report.loss_scale,
        micro_batch=run.step.micro_batch,
        parameter_norm=report.parameter_norm,
        update_ratio=ratios or None,
        data_seconds=report.data_seconds,
        reserved_bytes=reserved_memory_bytes(run.speed.device.torch_device),
    )


def _bad_step(run: Run, progress: Progress, report: StepReport) -> Iterator[Record]:
    overflow = run.step.loss_scale is not None and report.loss == report.loss and report.loss_scale > 1.0
    batch = f"batch {report.step - 1} of seed {run.plan.train.seed}"
    if overflow:  # fp16 looking for its scale: expected now and then, and not counted
        yield NoticeRecord(
            step=report.step, message=f"fp16 overflow at loss scale {report.loss_scale:g}: {batch} was skipped"
        )
        return
    progress.bad_steps += 1
    yield NoticeRecord(
        step=report.step,
        message=f"loss {report.loss} and gradient norm {report.grad_norm}: {batch} did not change the weights",
    )
    if progress.bad_steps >= MOST_BAD_STEPS:
        raise DivergedError(
            f"{MOST_BAD_STEPS} steps in a row had a non-finite loss or gradient; step {report.step}: {batch}",
            f"lower optim.{next(iter(run.plan.optim.rates))}",
        )


def _end_epoch(run: Run, progress: Progress) -> EpochRecord:
    facts, at = run.data.facts, run.plan.schedule.at
    seconds = max(progress.epoch_seconds, 1e-9)
    windows = at(progress.step).start - at(progress.step - progress.epoch_steps).start
    if facts.epoch_samples is not None:
        windows = min(windows, facts.epoch_samples)  # the last batch takes what is left
    tokens = progress.epoch_tokens or windows * run.plan.model.context
    record = EpochRecord(
        step=progress.step,
        epoch=run.epochs_before(progress.step) or 0,
        mean_loss=progress.epoch_loss / max(progress.epoch_steps, 1),
        seconds=progress.epoch_seconds,
        windows_per_second=windows / seconds,
        tokens_per_second=tokens / seconds,
    )
    progress.epoch_loss, progress.epoch_steps, progress.epoch_seconds, progress.epoch_tokens = 0.0, 0, 0.0, 0
    return record


def run_info(run: Run, folder: Path, start_step: int, resumed_from: str | None) -> RunInfo:
    plan, data, facts = run.plan, run.data, run.data.facts
    return RunInfo(
        flatout=flatout.__version__,
        torch=torch.__version__,
        device=run.speed.device.name,
        folder=str(folder),
        family=plan.model.family,
        parameters=parameter_count(plan.model, run.model.vocab) if run.custom.model is None else count_of(run.model),
        flops_per_token=plan.flops_per_token,
        memory_estimate_bytes=plan.memory.total,
        steps=run.last_step,
        batch_tokens=run.step_tokens,
        micro_batch=run.speed.micro_batch,
        accumulation=run.speed.accumulation,
        context=plan.model.context,
        vocab=run.model.vocab,
        train_tokens=facts.train_tokens,
        val_tokens=data.val.tokens,
        windows=facts.windows,
        dataset=facts.fingerprint,
        tokenizer=data.tokenizer.kind,
        start_step=start_step,
        resumed_from=resumed_from,
        features=run.speed.features,
        config=plan.stored,
        batch_samples=facts.batch_samples,
        trained_parameters=run.trained.count if plan.lora.rank else None,
        table_parameters=table_count(plan.model, run.model.vocab) if run.custom.model is None else 0,
        base=run.base_hash,
        samples=facts.samples,
        ranks=run.world.size,
    )


# --- a length in minutes ----------------------------------------------------------------------------------------------


def begin(run: Run) -> None:
    """Starts the clock before the first step, once it is known how long evaluation and sample at the end will take.

    Both are estimated from a part, which is measured the second time: the first one warms up.
    """
    deadline, settings, size = run.deadline, run.plan.eval, run.step.micro_batch
    if deadline is None:
        return
    _, size, notices = fitting_evaluation(run, size, batches=1)
    for notice in notices:
        run.new_notices.add(notice)
    began = time.perf_counter()
    (_, tokens), _, _ = fitting_evaluation(run, size, batches=1)
    share = min(run.data.val.tokens, settings.tokens or run.data.val.tokens) / max(tokens, 1)
    deadline.evaluation = (time.perf_counter() - began) * share
    few = min(settings.sample_tokens, FEW)
    if few:
        sample_ids(run, few)
        began = time.perf_counter()
        _, ids = sample_ids(run, few)
        deadline.sample = (time.perf_counter() - began) * settings.sample_tokens / max(len(ids), 1)
    deadline.checkpoint = checkpoint_size(run.trained.count, run.plan.model, run.plan.optim, run.speed) / DISK
    run.step.optimizer.stretch(*deadline.stretch)
    deadline.start()


def noted(run: Run, records: Iterator[Record]) -> Iterator[Record]:
    """Passes records on, after the deadline has seen how long evaluations and saves take."""
    for record in records:
        if run.deadline is not None:
            run.deadline.see(record)
        yield record


# --- a warm-up of shapes ----------------------------------------------------------------------------------------------

# A run in stages meets every shape of its micro-batches before the first step, so that no later step pays for it.
#
# Code for a shape is compiled (torch.compile, Triton), tuned (products of `ops/kernels/cublaslt.py`) or recorded
# (`engine/graphs.py`) when that shape comes first, which takes seconds. So each stage's micro-batch, with its length
# and its attention window, goes through forward and backward as often as a recording takes.
#
# Contract: nothing that is learned changes. There is no update; gradients are let go, the random stream and the scales
# of 8-bit tensors are put back, and the tokens are made up, so no loader is asked. A run without stages is not warmed
# up, unless its length is set in minutes: its clock begins with the first step.
# An error for lack of memory, or of the compiler, is left to the step itself, which has a way to go on.
# 8-bit scales that are not known yet are measured here for the length of the warm-up, so that 8-bit products are tuned
# and recorded too; the first step measures them itself, and recordings wait for the second.


def warm_up(run: Run, first_step: int) -> str | None:
    """Warms a run up before `first_step`, where that is worth it; returns a notice.

    It needs one step of each form of micro-batch that is still to come, unless there is one form alone. A run whose
    length is set in minutes is warmed up in any case, since its time does not include the first step.
    """
    made_for_shapes = run.step.graph is not None or run.speed.compile != "off"
    schedule = run.plan.schedule
    later = [stage.first_step for stage in schedule.stages if first_step < stage.first_step < run.steps]
    readings = [schedule.at(step) for step in (first_step, *later)] if later or run.deadline is not None else []
    shapes = list({(reading.pieces, reading.attention_window): reading for reading in readings}.values())
    if not shapes or run.custom.model is not None or not (made_for_shapes or run.speed.device.kind == "cuda"):
        return None
    began, scales = time.perf_counter(), run.model.narrow.scales
    measuring = scales is not None and not scales.rounding
    random = run.random.tensors()
    known = {name: tensor.clone() for name, tensor in run.model.narrow.tensors().items()}
    failure = _attempt(run, shapes)
    if measuring and failure is None:
        run.model.narrow.update_scales()
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


def _attempt(run: Run, shapes: list[StepReading]) -> str | None:
    """Takes the passes; returns the error as a sentence if a step can go on from it."""
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


def _made_up(run: Run, reading: StepReading) -> Batch:
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


# --- checks between ranks ---------------------------------------------------------------------------------------------

# Ranks that hold the same weights hold them bit for bit, and compare them now and then. Those are all ranks, or of a
# sharded model the ranks with the same slices: none under FSDP2, one of every host under hybrid. Weights differ by a
# fault of memory, of a device or of ours, and for a long time nothing in the loss shows it.


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """A sum over the bits of all values, read as whole numbers: one pass on the device, one number to the host."""
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return int(torch.stack([place * total for place, total in enumerate(sums, 1)]).sum())


def check_alike(run: Run, step: int) -> None:
    """Compares the weights of ranks where that is due; an error names the ranks that differ from most others."""
    wrong = [] if step % COMPARED_EVERY else _differing(run)
    if not wrong:
        return
    if not run.world.first:
        raise OtherProcessError(DriftError.exit_code)
    raise DriftError(
        f"after step {step:,} the weights of rank {', '.join(wrong)} are not those of the others; {COMPARED_EVERY:,} "
        "steps ago they were",
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
    wrong: list[int] = []
    for held in {place for place, _ in everywhere}:
        found = {rank: bits for rank, (place, bits) in enumerate(everywhere) if place == held}
        most, count = Counter(found.values()).most_common(1)[0]
        # Of two that differ either may be wrong; the first, which writes the checkpoints, is not the one named.
        usual = most if count > 1 else next(iter(found.values()))
        wrong += [rank for rank, bits in found.items() if bits != usual]
    return [str(rank) for rank in sorted(wrong)]
