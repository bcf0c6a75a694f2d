"""What happens at a boundary, a step after which something is due: saving, evaluating, sampling, judging.

Order: read all reports (done by the loop), take the checkpoint, evaluate, sample, write the verdict into the
checkpoint, remove older ones. DO NOT change it:
- an evaluation that fails costs nothing, because the state of the run is written, or copied and about to be;
- a checkpoint without a verdict is evaluated when it is resumed from, so an evaluation is neither repeated nor skipped;
- nothing is removed before the newest checkpoint is on the disk and known to have a finite loss.
Nothing is saved while non-finite steps are being counted, except at the end of the run.

A checkpoint that is written beside training (`Saver`) is on the disk some steps later. What was found of it at its step
waits for that as `_Found`; verdict and removal follow in the saver's thread, in the same order. `conclude` waits for
all of it and yields the record. The next save, the end of the run and an error wait for the last save.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.checkpoints.checkpoint import (
    Verdict,
    checkpoint_bytes,
    checkpoint_path,
    keep_newest,
    write_json_atomically,
    write_verdict,
)
from flatout.checkpoints.checkpoint_files import BEST
from flatout.checkpoints.run_folder import checkpoints_of, named_best, stored_best
from flatout.config.sections import keeps_best
from flatout.engine.books import Progress, notices_at
from flatout.engine.eigenstates import look_at_eigenstates
from flatout.engine.evaluate import bits_per_byte, perplexity
from flatout.engine.full_disk import when_there_is_room
from flatout.engine.recovery import fitting_evaluation
from flatout.engine.run import Run
from flatout.engine.saver import Saved, Saver
from flatout.engine.saving import Due, capture, save_run_adapter, write_sharded
from flatout.engine.spans import SpanTotals
from flatout.errors import CheckpointError
from flatout.generation import generate_tokens
from flatout.model.adapter_files import adapter_tensors
from flatout.records import CheckpointRecord, EvalRecord, NoticeRecord, Record, SampleRecord
from flatout.resolve.fit_check import out_of_memory

_LOOK = 1.0  # seconds between two looks for notices of a save that is waited for


@dataclasses.dataclass(kw_only=True)
class _Found:
    """What was found of a checkpoint at its step. Training may have gone on when it is needed."""

    step: int
    verdict: Verdict
    improved: bool
    seconds: float  # that training stood still
    notices: list[str]
    adapter: Mapping[str, Tensor] | None
    saved: Saved | None  # where it is not this rank's saver that writes it


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
    found: _Found | None = None  # of the last save, while it has no verdict
    there: Saved | None = None  # the last save, where it is not this rank's saver that writes it

    def __post_init__(self) -> None:
        run, device = self.run, self.run.speed.device.torch_device
        self.saver = Saver(checkpoints_of(self.folder), device, run.step, run.new_notices.add, run.full_disk_wait)
        self.keeps_best = keeps_best(run.plan.eval, run.plan.checkpoint)
        self.saved_at = time.monotonic()  # the clock of the wall may jump

    def pass_through(
        self, due: Due, *, saving: bool, last: bool = False, position: dict[str, Any] | None = None
    ) -> Iterator[Record]:
        """Saves, evaluates, samples and judges, in the order that the module's docstring says.

        `last`: the run ends here, so the checkpoint is waited for.
        """
        seconds = 0.0
        if saving:
            yield from self.conclude()
            seconds += yield from self._begin(due, position)
        loss = yield from self._look(due)
        improved = self.progress.best_step == self.progress.step
        wanted = self.exhausted or (improved and loss is not None and self.keeps_best)
        if not saving and wanted and self.saves and not self.progress.bad_steps:
            yield from self.conclude()
            # Due(): the evaluation and the sample of this step are done, so a resume has none of them to make up for
            seconds += yield from self._begin(Due(), position)
            saving = True
        if saving:
            yield from self._find(loss, improved, seconds)
        if last or self.exhausted or self.landed:
            yield from self.conclude()

    def judge(self, due: Due, saved: Path) -> Iterator[Record]:
        """Does what a kill has left undone of a checkpoint of this step: all but saving it."""
        loss = yield from self._look(due)
        there = Saved(path=saved, bytes=checkpoint_bytes(saved))
        yield from self._find(loss, self.progress.best_step == self.progress.step, 0.0, there)
        yield from self.conclude()

    @property
    def landed(self) -> bool:
        """Whether a save has reached the disk and has its verdict, and no record tells of it yet."""
        return self.found is not None and self.saver.done

    def conclude(self) -> Iterator[Record]:
        """Waits until the last save is on the disk and judged, and tells of it."""
        if self.found is None:
            return
        found, self.found, began = self.found, None, time.perf_counter()
        while found.saved is None and not self.saver.done_within(_LOOK):  # it may tell that the disk is full
            yield from notices_at(found.step, self.run.new_notices.take())
        saved = found.saved or self.saver.wait()
        seconds = found.seconds + time.perf_counter() - began
        self.totals.add("checkpoint", seconds)
        yield from notices_at(found.step, [*filter(None, [saved.notice]), *found.notices])
        self.checkpoint = str(saved.path)
        yield CheckpointRecord(
            step=found.step,
            path=str(saved.path),
            bytes=saved.bytes,
            seconds=seconds,
            best=found.improved,
            background_seconds=saved.background_seconds,
        )

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Waits for the last save also where the run ends by an error, and leaves no process behind."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the run is the error to tell
                for _ in self.conclude():
                    pass
            raise
        finally:
            self.saver.close()

    def _begin(self, due: Due, position: dict[str, Any] | None) -> Generator[Record, None, float]:
        """Begins a save; returns the seconds that training stood still for it."""
        began, checkpoint = time.perf_counter(), capture(self.run, self.progress, position, due)
        folder, sharding = checkpoints_of(self.folder), self.run.trained.sharding
        if sharding is not None:
            world, patience = self.run.world, self.saver.patience
            write = functools.partial(write_sharded, folder, checkpoint, sharding, world)
            path, size = yield from when_there_is_room(write, checkpoint.step, patience, world)
            self.there = Saved(path=path, bytes=size)
        elif self.run.world.first:  # of several ranks one writes, since all have the same
            yield from when_there_is_room(lambda: self.saver.begin(checkpoint), checkpoint.step, self.saver.patience)
        else:
            self.there = Saved(path=checkpoint_path(folder, checkpoint.step), bytes=0)
        self.saved_at = time.monotonic()
        return time.perf_counter() - began

    def _look(self, due: Due) -> Generator[Record, None, float | None]:
        """Evaluates and samples where that is due; returns the loss where it was evaluated."""
        run, step, loss = self.run, self.progress.step, None
        if due.evaluate is not None:
            record, notices = self._evaluate(due.evaluate)
            yield from notices_at(step, notices)
            yield record
            yield from look_at_eigenstates(run.model, step)
            self.eigenstates_seen_at, loss = step, record.loss
        self.exhausted = out_of_patience(run, self.progress) and not self.progress.bad_steps
        if (due.sample or self.exhausted) and run.plan.eval.sample_tokens:
            yield from self._sample()
        return loss

    def _find(
        self, loss: float | None, improved: bool, seconds: float, saved: Saved | None = None
    ) -> Iterator[NoticeRecord]:
        """Judges a checkpoint by what is known at its step. Where no evaluation was due, a quick one is made."""
        run, progress, began, notices = self.run, self.progress, time.perf_counter(), []
        if loss is None:
            size = min(self.evaluation_batch, run.step.micro_batch)
            loss, self.evaluation_batch, notices = quick_loss(run, size)
        self.found = found = _Found(
            step=progress.step,
            verdict=Verdict(loss=loss, progress=progress.judged()),
            improved=improved,
            seconds=seconds,
            notices=notices,
            adapter=adapter_tensors(run.adapters) if run.adapters is not None and self.saver.beside else None,
            saved=saved or self.there,
        )
        if not run.world.first:
            return
        if found.saved is None and self.saver.beside:
            self.saver.then(lambda saved: self._judge(saved, found), found.step)
        else:
            saved = found.saved = found.saved or self.saver.wait()
            judge = functools.partial(self._judge, saved, found)
            yield from when_there_is_room(judge, found.step, self.saver.patience)
        found.seconds += time.perf_counter() - began

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

    def _judge(self, saved: Saved, found: _Found) -> None:
        """Writes the verdict on a checkpoint, and only then removes older ones. Training may have gone on since.

        On a full disk all of it is done again, so what it tells is kept only at its end.
        """
        run, folder, loss, notices = self.run, self.folder, found.verdict.loss, []
        best_step, best_loss = found.verdict.progress["best_step"], found.verdict.progress["best_loss"]
        write_verdict(saved.path, found.verdict)
        if not math.isfinite(loss):
            notices.append(
                f"the checkpoint of step {found.step} has validation loss {loss}; the newest one with a finite loss "
                "is kept beside it"
            )
        if found.improved:
            write_best(folder, best_step, best_loss)
        cooldown = None if run.deadline is None else run.deadline.cooldown_step
        left = set(keep_newest(checkpoints_of(folder), run.plan.checkpoint.keep, best_step, cooldown)) - self.kept
        notices += [
            f"{path} is kept: it is a link, its manifest is damaged, or it holds files that are not the run's"
            for path in sorted(left)
        ]
        notices += save_run_adapter(run, folder, found.step, found.adapter)
        self.kept |= left
        found.notices += notices


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
    wanted = None if step is None else (loss, step)
    # One of an older version has no seal, and still names a step to those who read it.
    if stored_best(folder) != wanted or (step is None and named_best(folder) is not None):
        write_json_atomically(folder / BEST, {"step": step, "loss": loss})


def quick_loss(run: Run, batch_size: int) -> tuple[float, int, list[str]]:
    """The loss on one fixed micro-batch of validation text: the verdict where no evaluation was due.

    Also the batch size that fitted, and notices on that.
    """
    (loss, _), size, notices = fitting_evaluation(run, batch_size, batches=1)
    return loss, size, notices


def sample_ids(run: Run, count: int) -> tuple[Sequence[int], list[int]]:
    """The prompt of a run's samples, and up to `count` tokens after it."""
    settings, sharding = run.plan.eval, run.trained.sharding
    prompt = run.data.prompt(settings.sample_prompt)[-run.plan.model.context :]
    with (
        run.averaged(),
        run.scope(),
        out_of_memory(),
        contextlib.nullcontext() if sharding is None else sharding.gathered(),
    ):
        found = generate_tokens(
            run.model,
            prompt,
            count=count,
            temperature=settings.sample_temperature,
            seed=run.plan.train.seed,
            stops=run.data.stops,
            vocab=run.data.tokenizer.vocab,
        )
        return prompt, list(found)


def due_after(run: Run, step: int) -> Due:
    ending, settings = step == run.last_step, run.plan.eval
    at_step = is_due(step, settings.steps)
    evaluating = ending or at_step or run.ends_epoch(step, settings.epochs)
    reason = "end" if ending else "step" if at_step else "epoch"
    return Due(reason if evaluating else None, ending or is_due(step, settings.sample_every))


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def out_of_patience(run: Run, progress: Progress) -> bool:
    return 0 < run.plan.eval.patience <= progress.worse_evaluations
