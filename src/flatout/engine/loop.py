"""The loop: a generator of records. Who reads them, prints them or draws them is not its business.

Order at a boundary (a step after which something is due): read all reports, write the checkpoint, evaluate, sample,
write the verdict into the checkpoint, remove older ones. DO NOT change it:
- an evaluation that fails costs nothing, because the weights are on disk already;
- a checkpoint without a verdict is evaluated when it is resumed from, so an evaluation is neither repeated nor skipped;
- nothing is removed before the newest checkpoint is known to have a finite loss.
Nothing is saved while non-finite steps are being counted, except at the end of the run.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.data.loader import Batch
from flatout.data.sample_loader import SampleOrder
from flatout.data.stream import TOLD_PROBLEMS
from flatout.data.stream_loader import StreamLoader
from flatout.device import reserved_memory_bytes
from flatout.engine.adapter_folder import ADAPTER, IN_4_BITS, step_of, who_loads, write_adapter
from flatout.engine.checkpoint import (
    Checkpoint,
    Verdict,
    checkpoint_bytes,
    checkpoint_path,
    keep_newest,
    list_checkpoints,
    read_checkpoint,
    read_verdict,
    write_checkpoint,
    write_json_atomically,
    write_verdict,
)
from flatout.engine.eigenstates import look_at_eigenstates
from flatout.engine.evaluate import bits_per_byte, evaluate, perplexity
from flatout.engine.fine_tuning import SampleData, facts_of_samples
from flatout.engine.machine import MachineWatch
from flatout.engine.pending import PendingReports, StepReport
from flatout.engine.recovery import attempt_step, first_fitting, use_less_memory
from flatout.engine.run_folder import checkpoint_to_load, checkpoints_of, read_best
from flatout.engine.setup import Run, out_of_memory
from flatout.engine.spans import SpanTotals
from flatout.errors import CheckpointError, DataError, DivergedError
from flatout.generation.decode import generate_tokens
from flatout.model.adapter_files import OccupiedError
from flatout.model.count import parameter_count
from flatout.records import (
    CheckpointRecord,
    EndRecord,
    EpochRecord,
    EvalRecord,
    NoticeRecord,
    PreviewRecord,
    Record,
    RunInfo,
    SampleRecord,
    StepRecord,
)

MOST_BAD_STEPS = 3
JUDGED = {"val_loss", "best_loss", "best_step", "patience_loss", "worse_evaluations"}
PARAMETER_NORM_EVERY = 10  # steps: it reads all weights once more
SPANS_EVERY = 500  # steps, where nothing else makes a boundary


@dataclasses.dataclass
class Progress:
    """What the host remembers between steps; saved whole in every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    val_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    patience_loss: float | None = None
    worse_evaluations: int = 0
    bad_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    epoch_seconds: float = 0.0
    epoch_tokens: int = 0

    def judged(self) -> dict[str, Any]:
        """What an evaluation changes. A checkpoint is written before it, so its verdict holds these."""
        return {name: getattr(self, name) for name in JUDGED}


@dataclasses.dataclass(frozen=True)
class Due:
    """What is due at a boundary besides saving. It is saved too: a resume without a verdict does it then."""

    evaluate: str | None = None  # the reason: step, epoch or end
    sample: bool = False


@dataclasses.dataclass
class Boundary:
    """What happens at boundaries, and what they leave for the next one."""

    run: Run
    progress: Progress
    folder: Path
    totals: SpanTotals
    evaluation_batch: int
    checkpoint: str | None  # the last one written
    looked: int  # the step at which eigenstates were looked at last
    saves: bool = True
    kept: set[Path] = dataclasses.field(default_factory=set)  # checkpoints with somebody's files, told once
    exhausted: bool = False

    def pass_through(
        self, due: Due, *, saving: bool, position: dict[str, Any] | None = None, saved: Path | None = None
    ) -> Iterator[Record]:
        """Saves, evaluates, samples and judges, in the order that the module's docstring says.

        `saved` is a checkpoint of this step that is there already and only lacks its verdict.
        """
        run, step = self.run, self.progress.step
        size, loss, began = 0, None, time.perf_counter()
        if saving and saved is None:
            saved, size = write_checkpoint(checkpoints_of(self.folder), capture(run, self.progress, position, due))
        seconds = time.perf_counter() - began
        if due.evaluate is not None:
            record, messages = self._evaluate(due.evaluate)
            yield from (NoticeRecord(step=step, message=message) for message in messages)
            yield record
            yield from look_at_eigenstates(run.model, step)
            self.looked, loss = step, record.loss
        improved = self.progress.best_step == step
        self.exhausted = _out_of_patience(run, self.progress) and not self.progress.bad_steps
        if (due.sample or self.exhausted) and run.config.eval.sample_tokens:
            began = time.perf_counter()
            record = _sample(run, step)
            self.totals.add("sample", time.perf_counter() - began)
            yield record
        wanted = self.exhausted or (improved and loss is not None and run.config.checkpoint.best)
        began = time.perf_counter()
        if saved is None and wanted and self.saves and not self.progress.bad_steps:
            saved, size = write_checkpoint(checkpoints_of(self.folder), capture(run, self.progress, position, Due()))
        if saved is None:
            return
        messages = self._judge(saved, loss, improved)
        seconds += time.perf_counter() - began
        self.totals.add("checkpoint", seconds)
        yield from (NoticeRecord(step=step, message=message) for message in messages)
        self.checkpoint = str(saved)
        yield CheckpointRecord(
            step=step, path=str(saved), bytes=size or checkpoint_bytes(saved), seconds=seconds, best=improved
        )

    def _evaluate(self, reason: str) -> tuple[EvalRecord, list[str]]:
        size = min(self.evaluation_batch, self.run.step.micro_batch)
        record, self.evaluation_batch, messages = _evaluate(self.run, self.progress, reason, size)
        self.totals.add("evaluation", record.seconds)
        return record, messages

    def _judge(self, saved: Path, loss: float | None, improved: bool) -> list[str]:
        """Writes the verdict on a checkpoint, and only then removes older ones; what there is to say of that."""
        run, progress, folder, messages = self.run, self.progress, self.folder, []
        if loss is None:
            size = min(self.evaluation_batch, run.step.micro_batch)
            loss, self.evaluation_batch, messages = quick_loss(run, size)
        write_verdict(saved, Verdict(loss=loss, progress=progress.judged()))
        if not math.isfinite(loss):
            messages.append(
                f"the checkpoint of step {progress.step} has validation loss {loss}; the newest one with a finite loss "
                "is kept beside it"
            )
        if improved:
            write_json_atomically(folder / "best.json", {"step": progress.step, "loss": progress.best_loss})
        best = progress.best_step if run.config.checkpoint.best else None
        left = set(keep_newest(checkpoints_of(folder), run.config.checkpoint.keep, best)) - self.kept
        self.kept |= left
        messages += [
            f"{path} is kept: it is a link, its manifest is damaged, or it holds files that are not the run's"
            for path in sorted(left)
        ]
        return [*messages, *save_run_adapter(run, folder, progress.step)]


def quick_loss(run: Run, batch_size: int) -> tuple[float, int, list[str]]:
    """The loss on one fixed micro-batch of validation text: the verdict where no evaluation was due.

    Also the batch size that fitted, and what there is to say of it.
    """
    (loss, _), size, messages = first_fitting(
        lambda size: evaluate(run.model, itertools.islice(run.evaluation(size), 1), run.scope, run.world),
        batch_size,
        run.speed.device.torch_device,
    )
    return loss, size, messages


def train_loop(
    run: Run,
    folder: Path,
    *,
    resumed: Checkpoint | None,
    resumed_from: str | None,
    stop: Callable[[], bool],
    save: Callable[[], bool] = lambda: False,
    recorded: bool = True,
    saves: bool = True,
) -> Generator[Record]:
    """Trains `run` to its end, or until `stop()` says so at a step boundary; saves into `folder`, where it `saves`.

    `save()` is asked after every step, too: where it is true, the run saves and goes on. `recorded` is whether the
    checkpoint that is resumed from was told of: a kill may come between the two.
    """
    progress = Progress() if resumed is None else restore(run, resumed)
    origin = None if resumed_from is None else Path(resumed_from)
    verdict = None if origin is None else read_verdict(origin)
    if verdict is not None:
        for name in JUDGED & verdict.progress.keys():
            setattr(progress, name, verdict.progress[name])
    if read_best(folder) != progress.best_step:  # a run taken back to an older checkpoint forgets a later best
        write_json_atomically(folder / "best.json", {"step": progress.best_step, "loss": progress.best_loss})
    mended = [] if resumed is None else list(mend_run_adapter(run, folder))
    pending = PendingReports(run.speed.device.torch_device)
    yield run_info(run, folder, progress.step, resumed_from)
    for message in (*run.notices, *mended) if progress.step < run.steps else ():
        yield NoticeRecord(step=progress.step, message=message)
    if isinstance(run.dataset, SampleData) and progress.step == 0:
        yield PreviewRecord(step=0, pieces=run.dataset.preview())
    yield from look_at_eigenstates(run.model, progress.step)
    position = None if resumed is None else resumed.state.get("stream")
    totals, machine = SpanTotals(), MachineWatch(run.speed.device)
    boundary = Boundary(run, progress, folder, totals, run.step.micro_batch, resumed_from, progress.step, saves)
    if resumed is not None and origin is not None and lacks_verdict(resumed, origin):
        yield from boundary.pass_through(due_of(resumed), saving=True, saved=origin)
    elif origin is not None and not recorded:
        size, best = checkpoint_bytes(origin), progress.best_step == progress.step
        yield CheckpointRecord(step=progress.step, path=str(origin), bytes=size, seconds=0.0, best=best)
    spent = _out_of_patience(run, progress)  # resuming a run that stopped early, with the patience it had
    reason = "early_stop" if spent else "finished"
    owed = False  # a save that came due while non-finite steps were being counted
    with contextlib.closing(machine), run.batches(run.steps if spent else progress.step, position) as loader:
        pending.restart()
        for batch, data_seconds in timed(loader):
            step = batch.step + 1
            run.step.with_parameter_norm = step == 1 or step % PARAMETER_NORM_EVERY == 0 or step == run.steps
            report = attempt_step(run, batch)
            while isinstance(report, str):  # out of memory, and nothing has changed: again, in smaller pieces
                yield from settle(run, progress, totals, pending.drain())
                yield NoticeRecord(step=step, message=use_less_memory(run, batch.tokens.shape[0], report))
                pending.restart()
                report = attempt_step(run, batch)
            tokens = run.world.total(batch.count)
            pending.push(step, report, marks=run.step.clock.take(), tokens=tokens, data_seconds=data_seconds)
            yield from (NoticeRecord(step=step, message=message) for message in run.news.take())
            if isinstance(loader, StreamLoader):
                position = loader.position().to_json()
                yield from (NoticeRecord(step=step, message=message) for message in loader.news())
            yield from settle(run, progress, totals, pending.ready())
            if totals.steps >= SPANS_EVERY:
                yield totals.take(progress.step)
            if (state := machine.poll(step)) is not None:
                yield state
            stopping, asked, ending = run.world.any(stop()), run.world.any(save()), step == run.steps
            due = due_after(run, step)
            saving = saves and (ending or stopping or owed or asked or _due(step, run.config.checkpoint.every))
            if not (due.evaluate or due.sample or saving):
                continue

            yield from settle(run, progress, totals, pending.drain())
            if progress.bad_steps and not ending:  # it ends in a good step or, very soon, in an error
                owed, saving, stopping = saving, False, False
            else:
                owed = False
            yield from boundary.pass_through(due, saving=saving, position=position)
            yield totals.take(step)
            if boundary.exhausted or (stopping and not ending):
                reason = "early_stop" if boundary.exhausted else "interrupted"
                break
            pending.restart()
    if position is not None and position["problems"] > TOLD_PROBLEMS and not spent:
        yield NoticeRecord(step=progress.step, message=f"{position['problems']:,} problems in the source in all")
    yield from (NoticeRecord(step=progress.step, message=message) for message in run.news.take())
    idle = resumed is not None and resumed.step == run.steps
    if (step := step_of(folder / ADAPTER)) is not None and run.adapters is not None and not idle:
        yield NoticeRecord(step=progress.step, message=_about_adapter(run, folder / ADAPTER, step))
    if boundary.looked != progress.step:
        yield from look_at_eigenstates(run.model, progress.step)
    yield EndRecord(
        step=progress.step,
        reason=reason,
        seconds=progress.seconds,
        val_loss=progress.val_loss,
        best_loss=progress.best_loss,
        best_step=progress.best_step,
        checkpoint=boundary.checkpoint,
    )


def due_after(run: Run, step: int) -> Due:
    ending, settings = step == run.steps, run.config.eval
    at_step = _due(step, settings.every)
    evaluating = ending or at_step or (settings.epoch_end and _ends_epoch(run, step))
    reason = "end" if ending else "step" if at_step else "epoch"
    return Due(reason if evaluating else None, ending or _due(step, settings.sample_every))


def timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Each batch, with the seconds that the host waited for it."""
    began = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - began
        began = time.perf_counter()


def settle(run: Run, progress: Progress, totals: SpanTotals, reports: Iterable[StepReport]) -> Iterator[Record]:
    """Turns reports that have arrived into records and keeps the books; ends the run after three bad steps."""
    for report in reports:
        totals.add_step(report.spans)
        totals.add("data", report.data_seconds)
        progress.step = report.step
        progress.seconds += report.seconds
        progress.tokens += report.tokens
        rate = report.tokens / report.seconds if report.seconds > 0 else None
        peak = run.speed.device.peak_flops
        yield StepRecord(
            step=report.step,
            epoch=None if run.windows is None else report.step * run.sequences / run.windows,
            loss=report.loss,
            learning_rate=report.learning_rate,
            grad_norm=report.grad_norm,
            applied=report.applied,
            tokens=progress.tokens,
            seconds=report.seconds,
            tokens_per_second=rate,
            mfu=rate * run.flops_per_token / peak if rate and peak else None,
            memory_bytes=run.peak_memory_bytes(),
            loss_scale=None if run.step.loss_scale is None else report.loss_scale,
            micro_batch=run.step.micro_batch,
            parameter_norm=report.parameter_norm,
            data_seconds=report.data_seconds,
            reserved_bytes=reserved_memory_bytes(run.speed.device.torch_device),
        )
        if not report.applied:
            yield from _bad_step(run, progress, report)
        else:
            progress.bad_steps = 0
        progress.epoch_loss += report.loss
        progress.epoch_steps += 1
        progress.epoch_seconds += report.seconds
        progress.epoch_tokens += report.tokens
        if _ends_epoch(run, report.step):
            yield _end_epoch(run, progress)


def _bad_step(run: Run, progress: Progress, report: StepReport) -> Iterator[Record]:
    overflow = run.step.loss_scale is not None and report.loss == report.loss and report.loss_scale > 1.0
    batch = f"batch {report.step - 1} of seed {run.config.train.seed}"
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
            "lower optim.learning_rate",
        )


def _end_epoch(run: Run, progress: Progress) -> EpochRecord:
    assert run.windows is not None, "only an epoch that has been counted can end"
    seconds = max(progress.epoch_seconds, 1e-9)
    windows = progress.epoch_steps * run.sequences
    if isinstance(run.order, SampleOrder):
        windows = min(windows, run.order.samples)  # the last batch takes what is left
    tokens = progress.epoch_tokens or windows * run.config.model.context
    record = EpochRecord(
        step=progress.step,
        epoch=progress.step * run.sequences // run.windows,
        mean_loss=progress.epoch_loss / max(progress.epoch_steps, 1),
        seconds=progress.epoch_seconds,
        windows_per_second=windows / seconds,
        tokens_per_second=tokens / seconds,
    )
    progress.epoch_loss, progress.epoch_steps, progress.epoch_seconds, progress.epoch_tokens = 0.0, 0, 0.0, 0
    return record


def _ends_epoch(run: Run, step: int) -> bool:
    if run.windows is None:
        return False
    return step * run.sequences // run.windows > (step - 1) * run.sequences // run.windows


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: Run, progress: Progress, reason: str, batch_size: int) -> tuple[EvalRecord, int, list[str]]:
    """The evaluation, the batch size that fitted, and what there is to say of it."""
    began = time.perf_counter()
    (loss, tokens), batch_size, messages = first_fitting(
        lambda size: evaluate(run.model, run.evaluation(size), run.scope, run.world),
        batch_size,
        run.speed.device.torch_device,
    )
    progress.val_loss = loss
    # Comparisons with NaN are false, so a NaN is never the best, and later losses are never compared with it.
    best = loss < (math.inf if progress.best_loss is None else progress.best_loss)
    if best:
        progress.best_loss, progress.best_step = loss, progress.step
    limit = math.inf if progress.patience_loss is None else progress.patience_loss - run.config.eval.min_delta
    if loss < limit:
        progress.patience_loss, progress.worse_evaluations = loss, 0
    else:
        progress.worse_evaluations += 1
    record = EvalRecord(
        step=progress.step,
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=bits_per_byte(loss, run.tokens_per_byte),
        tokens=tokens,
        seconds=time.perf_counter() - began,
        best=best,
        reason=reason,
    )
    return record, batch_size, messages


def _out_of_patience(run: Run, progress: Progress) -> bool:
    return 0 < run.config.eval.patience <= progress.worse_evaluations


def _sample(run: Run, step: int) -> SampleRecord:
    tokenizer, settings = run.dataset.tokenizer, run.config.eval
    try:
        prompt = tokenizer.encode(settings.sample_prompt).tolist()
    except DataError:  # a prompt the vocabulary cannot spell must not end the run
        prompt = []
    if isinstance(run.dataset, SampleData):
        prompt = run.dataset.prompt()
    if not prompt:
        prompt = run.dataset.val.read(0, 1).tolist()
    prompt = prompt[-run.config.model.context :]
    with run.scope(), out_of_memory():
        stops = run.dataset.stops if isinstance(run.dataset, SampleData) else ()
        stream = generate_tokens(
            run.model,
            prompt,
            count=settings.sample_tokens,
            seed=run.config.train.seed,
            stops=stops,
            vocab=tokenizer.vocab,
        )
        ids = list(stream)
    return SampleRecord(step=step, prompt=tokenizer.decode(prompt), text=tokenizer.decode(ids))


# --- saving and restoring ---------------------------------------------------------------------------------------------


def save_run_adapter(run: Run, folder: Path, step: int) -> Iterator[str]:
    """Adapters as PEFT's folder in the run's, if the checkpoint of this step is the one that others would load.

    Somebody's files in that folder are left alone, and told: the checkpoint has the adapters all the same.
    """
    name = run.config.model.init_from
    if run.adapters is None or name is None or not isinstance(run.dataset, SampleData):
        return
    if checkpoint_to_load(folder, best=True) != checkpoint_path(checkpoints_of(folder), step):
        return
    facts = {"fingerprint": run.base, "quantize": run.config.lora.quantize, "step": step}
    try:
        write_adapter(run.adapters, folder / ADAPTER, base=name, files=run.files_beside, **facts)
    except OccupiedError as error:
        yield f"the adapter of step {step} was not written: {error.message}"


def _about_adapter(run: Run, place: Path, step: int) -> str:
    data, name = run.dataset, run.config.model.init_from
    remark = who_loads(name, data.description) if isinstance(data, SampleData) and name is not None else None
    remarks = [remark or "", IN_4_BITS if run.config.lora.quantize != "none" else ""]
    known = f"adapter{' for PEFT and vLLM' if remark is None else ''}: {place}, of step {step}"
    return "; ".join([known, *filter(None, remarks)])


def mend_run_adapter(run: Run, folder: Path) -> Iterator[str]:
    """Writes the adapter's folder anew where it is not that of the checkpoint it should be of: after a kill between the
    two, or a step back to an older checkpoint."""
    found = dict(list_checkpoints(checkpoints_of(folder)))
    if run.adapters is None or not found:
        return
    chosen = checkpoint_to_load(folder, best=True)
    step = next((step for step, path in found.items() if path == chosen), None)
    if step is None or step_of(folder / ADAPTER) == step:
        return
    now = {name: tensor.clone() for name, tensor in run.trained.tensors().items()}
    run.trained.assign(read_checkpoint(chosen).model, str(chosen))
    yield from save_run_adapter(run, folder, step)
    run.trained.assign(now, "the run")
    run.adapters.refresh()


def lacks_verdict(checkpoint: Checkpoint, path: Path) -> bool:
    """Whether a run was killed between writing a checkpoint and judging it. Old ones were written after evaluation."""
    return "due" in checkpoint.state and read_verdict(path) is None


def due_of(checkpoint: Checkpoint) -> Due:
    """What was due after the step of a checkpoint, besides saving it."""
    due = checkpoint.state.get("due")
    found = due if isinstance(due, dict) else {}
    reason = found.get("evaluate")
    return Due(reason if reason in ("step", "epoch", "end") else None, found.get("sample") is True)


def said_again(checkpoint: Checkpoint, path: Path) -> tuple[str, ...]:
    """The types of records of a checkpoint's step that resuming from it brings once more."""
    if not lacks_verdict(checkpoint, path):
        return ()
    due = due_of(checkpoint)
    evaluated = ("eval", "eigenstates", "sample") if due.evaluate else ("sample",) if due.sample else ()
    return ("checkpoint", "spans", *evaluated)


def capture(run: Run, progress: Progress, position: dict[str, Any] | None = None, due: Due | None = None) -> Checkpoint:
    """The whole state of a run at a step boundary; `position` is where a stream goes on from there."""
    tensors = {**run.random.tensors(), **run.model.narrow.tensors(), "updates": run.step.updates}
    if run.step.loss_scale is not None:
        tensors |= {"scale": run.step.loss_scale.scale, "good_updates": run.step.loss_scale.good_updates}
    state: dict[str, Any] = {
        **dataclasses.asdict(progress),
        "flatout": flatout.__version__,
        "torch": torch.__version__,
        "dataset": run.dataset.manifest.fingerprint,
        "vocab": run.model.vocab,
        "due": dataclasses.asdict(due or Due()),
        "threads": torch.get_num_threads(),
        **({} if position is None else {"stream": position}),
    }
    if isinstance(run.dataset, SampleData):  # who talks to the model later must speak as it was taught
        template = run.dataset.template
        state |= {} if template is None else {"template": template.to_json()}
        state |= {"stops": list(run.dataset.stops), "described": run.dataset.description.values}
        state |= {} if run.base is None else {"base": run.base}
    return Checkpoint(
        model=run.trained.tensors(),
        optimizer=run.step.optimizer.tensors(),
        run=tensors,
        state=state,
        config=run.config.model_dump(),
        tokenizer=run.dataset.tokenizer.to_json(),
    )


def restore(run: Run, checkpoint: Checkpoint) -> Progress:
    """Puts a checkpoint's state into a freshly built run; the counterpart of `capture`."""
    run.trained.assign(checkpoint.model, "the checkpoint")
    for message in run.step.optimizer.assign(checkpoint.optimizer, "the checkpoint"):
        run.news.add(message)
    run.step.updates.copy_(checkpoint.run["updates"])
    run.random.assign(checkpoint.run)
    message = run.model.narrow.assign(checkpoint.run)
    if message is not None:
        run.news.add(message)
    if run.step.loss_scale is not None and "scale" in checkpoint.run:
        run.step.loss_scale.scale.copy_(checkpoint.run["scale"])
        run.step.loss_scale.good_updates.copy_(checkpoint.run["good_updates"])
    numbers = {field.name: checkpoint.state.get(field.name, field.default) for field in dataclasses.fields(Progress)}
    for name, value in numbers.items():
        if value is not None and not isinstance(value, int | float):
            raise CheckpointError(f"the checkpoint's state.json has {name} {value!r}", "name another checkpoint")
    progress = Progress(**numbers)
    progress.bad_steps = 0  # nothing is saved while they are counted; older checkpoints may say otherwise
    if "tokens" not in checkpoint.state:  # saved before tokens were counted
        progress.tokens = progress.step * run.config.train.batch_tokens
    return progress


def run_info(run: Run, folder: Path, start_step: int, resumed_from: str | None) -> RunInfo:
    config, dataset = run.config, run.dataset
    tokens, samples = config.train.batch_tokens, None
    if isinstance(run.order, SampleOrder):  # a mean: every step has its own
        tokens, samples = round((dataset.train.tokens or 0) / run.order.steps_per_epoch), run.order.batch_samples
    return RunInfo(
        flatout=flatout.__version__,
        torch=torch.__version__,
        device=run.speed.device.name,
        folder=str(folder),
        family=config.model.family,
        parameters=parameter_count(config.model, run.model.vocab),
        flops_per_token=run.flops_per_token,
        memory_estimate_bytes=run.memory.total,
        steps=run.steps,
        batch_tokens=tokens,
        micro_batch=run.speed.micro_batch,
        accumulation=run.speed.accumulation,
        context=config.model.context,
        vocab=run.model.vocab,
        train_tokens=dataset.train.tokens,
        val_tokens=dataset.val.tokens,
        windows=run.windows,
        dataset=dataset.manifest.fingerprint,
        tokenizer=dataset.tokenizer.kind,
        start_step=start_step,
        resumed_from=resumed_from,
        features=run.speed.features,
        config=config.model_dump(),
        batch_samples=samples,
        trained_parameters=run.trained.count if config.lora.rank else None,
        base=run.base,
        samples=facts_of_samples(dataset) if isinstance(dataset, SampleData) else None,
    )
