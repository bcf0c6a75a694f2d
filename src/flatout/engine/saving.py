"""Boundaries, the steps after which something is due: saving, evaluating, sampling and judging, in a fixed order.

`Boundary` does it in this order. DO NOT change it:
1. `begin_save`: the run's state is written, or copied for the thread that writes it while training goes on (`Saver`).
2. `evaluate_and_sample`, where that is due. An evaluation that fails costs nothing, since the state is safe by then.
3. `evaluate_checkpoint`: the loss of this step becomes the checkpoint's verdict.
4. `_judge`: the verdict is written into the checkpoint, and only then are older checkpoints removed, so nothing is
   removed before the newest checkpoint is on the disk and known to have a finite loss.
5. `conclude`: the record of the save.

From 1 to 5 the checkpoint is `pending_save`. Of one that is written beside training, 4 happens in the saver's thread,
and 5 some steps later; the next save, the end of the run and an error wait for it. All else happens at once.

A crash at any point leaves the checkpoint before this one, or this one whole. If it has no verdict, resuming from it
evaluates it first (`judge`), so no evaluation is repeated or skipped.
Nothing is saved while non-finite steps are being counted, except at the end of the run.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.checkpoints.base_and_adapter import ADAPTER
from flatout.checkpoints.checkpoint import (
    Verdict,
    checkpoint_bytes,
    checkpoint_path,
    keep_newest,
    write_json_atomically,
    write_verdict,
)
from flatout.checkpoints.checkpoint_files import BEST, sealed
from flatout.checkpoints.run_folder import checkpoints_of
from flatout.config.sections import keeps_best
from flatout.device import out_of_memory
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.monitor import look_at_eigenstates, notices_at
from flatout.engine.recovery import fitting_evaluation
from flatout.engine.run import Run
from flatout.engine.saver import Saved, Saver, finished
from flatout.engine.spans import SpanTotals
from flatout.engine.state import Due, Progress, capture, save_run_adapter, write_sharded
from flatout.errors import CheckpointError, ConfigError, quoted
from flatout.files import disk_errors
from flatout.generation.engine import generate_tokens
from flatout.generation.sampling import Sampling
from flatout.model.adapter_files import adapter_tensors
from flatout.records import CheckpointRecord, EvalRecord, Record, SampleRecord
from flatout.tasks.files import find_tasks
from flatout.tasks.likelihood import Subject
from flatout.tasks.scores import ask, encoded


@dataclasses.dataclass(kw_only=True)
class PendingSave:
    """A checkpoint that has no record yet, as it was at its step. Training may have gone on since."""

    step: int
    seconds: float  # that training stood still
    written: Future[Saved]
    beside: bool = False  # whether it is written while training goes on
    best: bool = False
    notices: list[str] = dataclasses.field(default_factory=list)
    adapter: Mapping[str, Tensor] | None = None


@dataclasses.dataclass
class Boundary:
    """Saves, evaluates and samples after steps of a run, and remembers what the next boundary needs."""

    run: Run
    progress: Progress
    folder: Path
    totals: SpanTotals
    evaluation_batch: int
    last_save: str | None  # the path of the last checkpoint that is on the disk and judged
    eigenstates_seen_at: int  # the last step at which `look_at_eigenstates` was called
    saves: bool = True
    # checkpoints that could not be removed and that a notice has already named
    kept: set[Path] = dataclasses.field(default_factory=set)
    exhausted: bool = False  # the patience of `eval.patience`
    pending_save: PendingSave | None = None

    def __post_init__(self) -> None:
        run, device = self.run, self.run.speed.device.torch_device
        self.saver = Saver(checkpoints_of(self.folder), device, run.step, run.new_notices.add)
        self.keeps_best = keeps_best(run.plan.eval, run.plan.checkpoint)
        self.saved_at = time.monotonic()  # the clock of the wall may jump
        self.subject = Subject(model=run.model, tokenizer=run.data.tokenizer, scope=run.scope)
        with run.world.fail_together():  # a task that cannot be asked is refused before the first step
            self.tasks, unknown = find_tasks(run.plan.eval.tasks, limit=run.plan.eval.tasks_rows)
            if unknown:
                raise ConfigError(
                    f"eval.tasks names {quoted(unknown[0])}, which is no file",
                    "name files that end in .jsonl or .jsonl.gz",
                )
            self.asked = encoded(self.subject, self.tasks)

    def pass_through(
        self, due: Due, *, saving: bool, last: bool = False, position: dict[str, Any] | None = None
    ) -> Iterator[Record]:
        """Saves, evaluates, samples and judges; `last`: the run ends here, so the checkpoint is waited for."""
        if saving:
            yield from self.begin_save(due, position)
        loss = yield from self.evaluate_and_sample(due)
        improved = loss is not None and self.progress.best_step == self.progress.step
        wanted = self.exhausted or (improved and self.keeps_best)
        if not saving and wanted and self.saves and not self.progress.bad_steps:
            # Due(): the evaluation and the sample of this step are done, so a resume has none of them to make up for
            yield from self.begin_save(Due(), position)
            saving = True
        if saving:
            self.evaluate_checkpoint(loss)
        if last or self.exhausted or self.save_is_done:
            yield from self.conclude()

    def judge(self, due: Due, path: Path) -> Iterator[Record]:
        """Finishes a checkpoint of this step that a kill has left without a verdict: all but saving it."""
        loss = yield from self.evaluate_and_sample(due)
        saved = Saved(path=path, bytes=checkpoint_bytes(path))
        self.pending_save = PendingSave(step=self.progress.step, seconds=0.0, written=finished(saved))
        self.evaluate_checkpoint(loss)
        yield from self.conclude()

    @property
    def save_is_done(self) -> bool:
        """Whether a save is on the disk and judged, and has no record yet."""
        return self.pending_save is not None and self.pending_save.written.done()

    def begin_save(self, due: Due, position: dict[str, Any] | None) -> Iterator[Record]:
        """Waits for the save before, and writes or copies the state of the run."""
        yield from self.conclude()
        began, run = time.perf_counter(), self.run
        checkpoint = capture(run, self.progress, position, due)
        folder, sharding, beside = checkpoints_of(self.folder), run.trained.sharding, False
        if sharding is not None:
            path, size = write_sharded(folder, checkpoint, sharding, run.world)
            written = finished(Saved(path=path, bytes=size))
        elif run.world.first:  # of several ranks one writes, since all have the same
            written = self.saver.begin(checkpoint)
            beside = self.saver.beside
        else:
            written = finished(Saved(path=checkpoint_path(folder, checkpoint.step), bytes=0))
        self.saved_at = time.monotonic()
        seconds = time.perf_counter() - began
        self.pending_save = PendingSave(step=checkpoint.step, seconds=seconds, written=written, beside=beside)

    def evaluate_and_sample(self, due: Due) -> Generator[Record, None, float | None]:
        """Evaluates and samples where that is due; returns the loss where it was evaluated."""
        run, step, loss = self.run, self.progress.step, None
        if due.evaluate is not None:
            record, notices = self._evaluate(due.evaluate)
            yield from notices_at(step, notices)
            yield record
            yield from look_at_eigenstates(run.model, step)
            self.eigenstates_seen_at, loss = step, record.loss
        self.exhausted = out_of_patience(run, self.progress) and not self.progress.bad_steps
        if due.tasks or (self.exhausted and self.tasks):
            yield from self._ask_tasks()
        if (due.sample or self.exhausted) and run.plan.eval.sample_tokens:
            yield from self._sample()
        return loss

    def evaluate_checkpoint(self, loss: float | None) -> None:
        """Gives the pending save its verdict: the loss of its step, or a quick one where no evaluation was due."""
        run, progress, save, began = self.run, self.progress, self.pending_save, time.perf_counter()
        assert save is not None, "a save was begun"
        if loss is None:
            size = min(self.evaluation_batch, run.step.micro_batch)
            loss, self.evaluation_batch, save.notices = quick_loss(run, size)
        verdict = Verdict(loss=loss, progress=progress.judged())
        save.best = progress.best_step == progress.step
        if not run.world.first:
            return
        if save.beside:
            save.adapter = None if run.adapters is None else adapter_tensors(run.adapters)
            save.written = self.saver.then(functools.partial(self._judge, save, verdict))
        else:
            self._judge(save, verdict, save.written.result())
        save.seconds += time.perf_counter() - began

    def _judge(self, save: PendingSave, verdict: Verdict, saved: Saved) -> None:
        """Writes the verdict on a checkpoint, and only then removes older ones. Training may have gone on since."""
        run, folder, loss = self.run, self.folder, verdict.loss
        best_step, best_loss = verdict.progress["best_step"], verdict.progress["best_loss"]
        write_verdict(saved.path, verdict)
        if not math.isfinite(loss):
            save.notices.append(
                f"the checkpoint of step {save.step} has validation loss {loss}; the newest one with a finite loss "
                "is kept beside it"
            )
        if save.best:
            write_best(folder, best_step, best_loss)
        cooldown = None if run.deadline is None else run.deadline.cooldown_step
        with disk_errors("the run's files"):
            left = set(keep_newest(checkpoints_of(folder), run.plan.checkpoint.keep, best_step, cooldown)) - self.kept
        save.notices += [
            f"{path} is kept: it is a link, its manifest is damaged, or it holds files that are not the run's"
            for path in sorted(left)
        ]
        self.kept |= left
        with disk_errors(str(folder / ADAPTER)):
            save.notices += save_run_adapter(run, folder, save.step, save.adapter)

    def conclude(self) -> Iterator[Record]:
        """Waits until the pending save is on the disk and judged; yields its record."""
        save, self.pending_save, began = self.pending_save, None, time.perf_counter()
        if save is None:
            return
        saved = save.written.result()
        seconds = save.seconds + time.perf_counter() - began
        self.totals.add("checkpoint", seconds)
        yield from notices_at(save.step, save.notices)
        self.last_save = str(saved.path)
        yield CheckpointRecord(
            step=save.step,
            path=str(saved.path),
            bytes=saved.bytes,
            seconds=seconds,
            best=save.best,
            background_seconds=saved.background_seconds,
        )

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Waits for the last save also where the run ends by an error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the error that ended the run is raised
                for _ in self.conclude():
                    pass
            raise
        finally:
            self.saver.close()

    def _evaluate(self, reason: str) -> tuple[EvalRecord, list[str]]:
        """The evaluation, and notices on a batch that had to become smaller for it."""
        run, progress, began = self.run, self.progress, time.perf_counter()
        size = min(self.evaluation_batch, run.step.micro_batch)
        (loss, tokens), self.evaluation_batch, notices = fitting_evaluation(run, size)
        best = _note_loss(progress, loss)
        record = EvalRecord(
            step=progress.step,
            loss=loss,
            perplexity=perplexity(loss),
            bits_per_byte=bits_per_byte(loss, run.data.tokens_per_byte),
            tokens=tokens,
            seconds=time.perf_counter() - began,
            best=best,
            reason=reason,
        )
        self.totals.add("evaluation", record.seconds)
        return record, notices

    def _ask_tasks(self) -> Iterator[Record]:
        run, began = self.run, time.perf_counter()
        try:
            with run.averaged(), gathered(run):
                scores, _ = ask(self.subject, self.tasks, self.asked, world=run.world)
        except CheckpointError as error:
            yield from notices_at(self.progress.step, [f"there are no scores of tasks: {error.message}"])
            return
        self.totals.add("evaluation", time.perf_counter() - began)
        yield from (score.record(self.progress.step) for score in scores)

    def _sample(self) -> Iterator[Record]:
        run, tokenizer, began = self.run, self.run.data.tokenizer, time.perf_counter()
        try:
            prompt, ids = sample_ids(run, run.plan.eval.sample_tokens)
        except CheckpointError as error:  # whether the run has diverged is for its steps to say
            yield from notices_at(self.progress.step, [f"there is no sample: {error.message}"])
            return
        record = SampleRecord(step=self.progress.step, prompt=tokenizer.decode(prompt), text=tokenizer.decode(ids))
        self.totals.add("sample", time.perf_counter() - began)
        yield record


def _note_loss(progress: Progress, loss: float) -> bool:
    """Records a validation loss in `progress`; returns whether it is the best so far."""
    progress.val_loss = loss
    # Comparisons with NaN are false, so a NaN is never the best, and later losses are never compared with it.
    best = loss < (math.inf if progress.best_loss is None else progress.best_loss)
    if best:
        progress.best_loss, progress.best_step, progress.worse_evaluations = loss, progress.step, 0
    else:
        progress.worse_evaluations += 1
    return best


def write_best(folder: Path, step: int | None, loss: float | None) -> None:
    """Makes `best.json` name this step, or none."""
    path, content = folder / BEST, {"step": step, "loss": loss}
    known = path.read_bytes() if path.is_file() else None
    if known != sealed(content) and not (known is None and step is None):
        write_json_atomically(path, content)


def quick_loss(run: Run, batch_size: int) -> tuple[float, int, list[str]]:
    """The loss on one fixed micro-batch of validation text: the verdict where no evaluation was due.

    Also the batch size that fitted, and notices on that.
    """
    (loss, _), size, notices = fitting_evaluation(run, batch_size, batches=1)
    return loss, size, notices


def sample_ids(run: Run, count: int) -> tuple[Sequence[int], list[int]]:
    """The prompt of a run's samples, and up to `count` tokens after it."""
    settings = run.plan.eval
    prompt = run.data.prompt(settings.sample_prompt)[-run.plan.model.context :]
    with run.averaged(), run.scope(), gathered(run):
        found = generate_tokens(
            run.model,
            prompt,
            count=count,
            sampling=Sampling(temperature=settings.sample_temperature, seed=run.plan.train.seed),
            stops=run.data.stops,
            vocab=run.data.tokenizer.vocab,
        )
        return prompt, list(found)


@contextlib.contextmanager
def gathered(run: Run) -> Iterator[None]:
    """Inside, every process has the whole model."""
    sharding = run.trained.sharding
    with out_of_memory(), contextlib.nullcontext() if sharding is None else sharding.gathered():
        yield


def due_after(run: Run, step: int) -> Due:
    ending, settings = step == run.last_step, run.plan.eval
    at_step = is_due(step, settings.steps)
    evaluating = ending or at_step or run.ends_epoch(step, settings.epochs)
    reason = "end" if ending else "step" if at_step else "epoch"
    asking = bool(settings.tasks) and (ending or is_due(step, settings.tasks_every))
    return Due(reason if evaluating else None, ending or is_due(step, settings.sample_every), asking)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def out_of_patience(run: Run, progress: Progress) -> bool:
    return 0 < run.plan.eval.patience <= progress.worse_evaluations
