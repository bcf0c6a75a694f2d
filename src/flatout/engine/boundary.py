"""What happens at a boundary, a step after which something is due: saving, evaluating, sampling, judging.

Order: read all reports (done by the loop), write the checkpoint, evaluate, sample, write the verdict into the
checkpoint, remove older ones. DO NOT change it:
- an evaluation that fails costs nothing, because the weights are on disk already;
- a checkpoint without a verdict is evaluated when it is resumed from, so an evaluation is neither repeated nor skipped;
- nothing is removed before the newest checkpoint is known to have a finite loss.
Nothing is saved while non-finite steps are being counted, except at the end of the run.
"""

import dataclasses
import math
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from flatout.engine.books import Progress, notices_at
from flatout.engine.checkpoint import (
    Verdict,
    checkpoint_bytes,
    checkpoint_path,
    keep_newest,
    write_checkpoint,
    write_json_atomically,
    write_verdict,
)
from flatout.engine.eigenstates import look_at_eigenstates
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.fit_check import out_of_memory
from flatout.engine.full_disk import when_there_is_room
from flatout.engine.recovery import fitting_evaluation
from flatout.engine.run import Run
from flatout.engine.run_folder import checkpoints_of
from flatout.engine.saving import Due, capture, save_run_adapter
from flatout.engine.spans import SpanTotals
from flatout.generation.decode import generate_tokens
from flatout.records import CheckpointRecord, EvalRecord, Record, SampleRecord


@dataclasses.dataclass
class Boundary:
    """What happens at boundaries, and what they leave for the next one."""

    run: Run
    progress: Progress
    folder: Path
    totals: SpanTotals
    evaluation_batch: int
    checkpoint: str | None  # the last one written
    eigenstates_seen_at: int  # the last step at which `look_at_eigenstates` was called
    saves: bool = True
    # checkpoints that could not be removed and that a notice has already named
    kept: set[Path] = dataclasses.field(default_factory=set)
    exhausted: bool = False

    def pass_through(
        self, due: Due, *, saving: bool, position: dict[str, Any] | None = None, saved: Path | None = None
    ) -> Iterator[Record]:
        """Saves, evaluates, samples and judges, in the order that the module's docstring says.

        `saved` is a checkpoint of this step that is there already and only lacks its verdict.
        """
        run, step = self.run, self.progress.step
        run.step.use_window(None)  # evaluation and samples see what the trained model will see
        size, loss, began = 0, None, time.perf_counter()
        if saving and saved is None:
            saved, size = yield from self._write(position, due)
        seconds = time.perf_counter() - began
        if due.evaluate is not None:
            record, notices = self._evaluate(due.evaluate)
            yield from notices_at(step, notices)
            yield record
            yield from look_at_eigenstates(run.model, step)
            self.eigenstates_seen_at, loss = step, record.loss
        improved = self.progress.best_step == step
        self.exhausted = out_of_patience(run, self.progress) and not self.progress.bad_steps
        if (due.sample or self.exhausted) and run.config.eval.sample_tokens:
            yield self._sample()
        wanted = self.exhausted or (improved and loss is not None and run.config.checkpoint.best)
        began = time.perf_counter()
        if saved is None and wanted and self.saves and not self.progress.bad_steps:
            # Due(): the evaluation and the sample of this step are done, so a resume has none of them to make up for
            saved, size = yield from self._write(position, Due())
        if saved is None:
            return
        notices = self._judge(saved, loss, improved)
        seconds += time.perf_counter() - began
        self.totals.add("checkpoint", seconds)
        yield from notices_at(step, notices)
        self.checkpoint = str(saved)
        yield CheckpointRecord(
            step=step, path=str(saved), bytes=size or checkpoint_bytes(saved), seconds=seconds, best=improved
        )

    def _write(self, position: dict[str, Any] | None, due: Due) -> Generator[Record, None, tuple[Path, int]]:
        """The checkpoint of this step and its size. One process writes it: all have the same."""
        checkpoint, folder = capture(self.run, self.progress, position, due), checkpoints_of(self.folder)
        if self.run.world.first:
            wait = self.run.config.checkpoint.full_disk_wait
            if self.run.world.size > 1:  # the others wait for this one, and not forever
                wait = min(wait, self.run.config.parallel.timeout / 2)
            return (yield from when_there_is_room(lambda: write_checkpoint(folder, checkpoint), checkpoint.step, wait))
        return checkpoint_path(folder, checkpoint.step), 1

    def _evaluate(self, reason: str) -> tuple[EvalRecord, list[str]]:
        """The evaluation, and notices on a batch that had to become smaller for it."""
        run, progress, began = self.run, self.progress, time.perf_counter()
        size = min(self.evaluation_batch, run.step.micro_batch)
        (loss, tokens), self.evaluation_batch, notices = fitting_evaluation(run, size)
        best = _note_loss(progress, loss, run.config.eval.min_delta)
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

    def _sample(self) -> SampleRecord:
        run, settings, began = self.run, self.run.config.eval, time.perf_counter()
        tokenizer = run.data.tokenizer
        prompt = run.data.prompt(settings.sample_prompt)[-run.config.model.context :]
        with run.scope(), out_of_memory():
            ids = list(
                generate_tokens(
                    run.model,
                    prompt,
                    count=settings.sample_tokens,
                    seed=run.config.train.seed,
                    stops=run.data.stops,
                    vocab=tokenizer.vocab,
                )
            )
        record = SampleRecord(step=self.progress.step, prompt=tokenizer.decode(prompt), text=tokenizer.decode(ids))
        self.totals.add("sample", time.perf_counter() - began)
        return record

    def _judge(self, saved: Path, loss: float | None, improved: bool) -> list[str]:
        """Writes the verdict on a checkpoint, and only then removes older ones; returns notices on that."""
        run, progress, folder, notices = self.run, self.progress, self.folder, []
        if loss is None:
            size = min(self.evaluation_batch, run.step.micro_batch)
            loss, self.evaluation_batch, notices = quick_loss(run, size)
        if not run.world.first:
            return notices
        write_verdict(saved, Verdict(loss=loss, progress=progress.judged()))
        if not math.isfinite(loss):
            notices.append(
                f"the checkpoint of step {progress.step} has validation loss {loss}; the newest one with a finite loss "
                "is kept beside it"
            )
        if improved:
            write_best(folder, progress)
        best = progress.best_step if run.config.checkpoint.best else None
        left = set(keep_newest(checkpoints_of(folder), run.config.checkpoint.keep, best)) - self.kept
        self.kept |= left
        notices += [
            f"{path} is kept: it is a link, its manifest is damaged, or it holds files that are not the run's"
            for path in sorted(left)
        ]
        return [*notices, *save_run_adapter(run, folder, progress.step)]


def _note_loss(progress: Progress, loss: float, min_delta: float) -> bool:
    """Records a validation loss in `progress`; returns whether it is the best so far."""
    progress.val_loss = loss
    # Comparisons with NaN are false, so a NaN is never the best, and later losses are never compared with it.
    best = loss < (math.inf if progress.best_loss is None else progress.best_loss)
    if best:
        progress.best_loss, progress.best_step = loss, progress.step
    limit = math.inf if progress.patience_loss is None else progress.patience_loss - min_delta
    if loss < limit:
        progress.patience_loss, progress.worse_evaluations = loss, 0
    else:
        progress.worse_evaluations += 1
    return best


def write_best(folder: Path, progress: Progress) -> None:
    write_json_atomically(folder / "best.json", {"step": progress.best_step, "loss": progress.best_loss})


def quick_loss(run: Run, batch_size: int) -> tuple[float, int, list[str]]:
    """The loss on one fixed micro-batch of validation text: the verdict where no evaluation was due.

    Also the batch size that fitted, and notices on that.
    """
    (loss, _), size, notices = fitting_evaluation(run, batch_size, batches=1)
    return loss, size, notices


def due_after(run: Run, step: int) -> Due:
    ending, settings = step == run.steps, run.config.eval
    at_step = is_due(step, settings.every)
    evaluating = ending or at_step or (settings.epoch_end and run.ends_epoch(step))
    reason = "end" if ending else "step" if at_step else "epoch"
    return Due(reason if evaluating else None, ending or is_due(step, settings.sample_every))


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def out_of_patience(run: Run, progress: Progress) -> bool:
    return 0 < run.config.eval.patience <= progress.worse_evaluations
