"""The books of a run: what the host remembers between steps, and the records that are made of it."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.device import reserved_memory_bytes
from flatout.engine.custom import count_of
from flatout.engine.run import Run
from flatout.engine.spans import SpanTotals, StepReport
from flatout.errors import DivergedError
from flatout.model.count import parameter_count, table_count
from flatout.records import EpochRecord, NoticeRecord, Record, RunInfo, StepRecord

MOST_BAD_STEPS = 3
JUDGED = {"val_loss", "best_loss", "best_step", "worse_evaluations"}


@dataclasses.dataclass
class Progress:
    """What the host remembers between steps; saved whole in every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    val_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    worse_evaluations: int = 0
    bad_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    epoch_seconds: float = 0.0
    epoch_tokens: int = 0

    def judged(self) -> dict[str, Any]:
        """What an evaluation changes. A checkpoint is written before it, so its verdict holds these."""
        return {name: getattr(self, name) for name in JUDGED}


def notices_at(step: int, notices: Iterable[str]) -> Iterator[NoticeRecord]:
    return (NoticeRecord(step=step, message=notice) for notice in notices)


def settle(run: Run, progress: Progress, totals: SpanTotals, reports: Iterable[StepReport]) -> Iterator[Record]:
    """Turns reports that have arrived into records and keeps the books; ends the run after three bad steps."""
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
        update_ratio=_update_ratio(run, report),
        data_seconds=report.data_seconds,
        reserved_bytes=reserved_memory_bytes(run.speed.device.torch_device),
    )


def _update_ratio(run: Run, report: StepReport) -> dict[str, float] | None:
    """By the names of rules; weights that are all zero have none."""
    names = [group.rule.name for group in run.step.optimizer.groups]
    ratios = dict(zip(names, report.update_ratios, strict=False))
    return {name: ratio for name, ratio in ratios.items() if math.isfinite(ratio)} or None


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
        parameters=parameter_count(plan.model, run.model.vocab) if run.given.model is None else count_of(run.model),
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
        table_parameters=table_count(plan.model, run.model.vocab) if run.given.model is None else 0,
        base=run.base_hash,
        samples=facts.samples,
        ranks=run.world.size,
    )
