"""How a diverged run goes on: from its newest sound checkpoint, at a lower learning rate.

A checkpoint is sound if its loss is not above that of the starting weights and no weight has outgrown them. The loss
alone is not enough: norms hide exploded weights from it, and at a sane rate such weights never move again. Starting
weights follow from config and seed, so they are built again to compare with. Where nothing is sound they are saved as
step 0: there is always something to resume from.

Hints cannot go round in circles: each one lowers the rates. At the floor there is one last fresh start at safe rates,
which is recognised by its clip.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.checkpoints.checkpoint import (
    Checkpoint,
    Verdict,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    read_part,
    read_verdict,
    write_checkpoint,
    write_verdict,
)
from flatout.checkpoints.run_folder import checkpoints_of
from flatout.config.load import resolve_from_mapping
from flatout.config.optimizers import SMALL_BASE, usual_tuning_rate
from flatout.config.schema import OptimConfig
from flatout.config.unused import unused_paths
from flatout.data.array_data import Arrays
from flatout.engine.custom import CustomParts
from flatout.engine.run import Run
from flatout.engine.saving import quick_loss
from flatout.engine.state import TRAINED, Progress, as_word, capture, differences, restore_weights
from flatout.errors import CheckpointError, DivergedError, UserError
from flatout.optim.rules import role_of
from flatout.resolve.opening import DataSource
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import resolve
from flatout.world import World

SAFE_RATE = 1e-3  # AdamW trains GPTs of any size at this rate or a lower one
_SAFE = {"embedding_rate": 10 * SAFE_RATE, "table_rate": 10 * SAFE_RATE}
_LOWER, _FLOOR = 0.1, 1e-3  # each hint's rates over those that diverged; the lowest ones over safe ones
_LAST_CLIP = 0.1  # of the last fresh start
_MOST_DECAY = 0.01  # rate times decay: the share of a weight that one step takes
# RMS of a tensor over that at the start, or over what is usual where it starts lower (zeros). In 600 steps of presets
# (record, modern, shakespeare, shakespeare-char; 64 wide) matrices came to 3.6 times, embeddings to 7 times.
_MOST_GROWTH = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that diverged: its plan, and the data and the checkpoint that it began with.

    `first_loss` is that of its first step, by which checkpoints are judged where its start cannot be built again.
    """

    plan: RunPlan
    source: DataSource
    folder: Path
    first_loss: float | None = None
    custom: CustomParts | None = None

    @property
    def resumed(self) -> Checkpoint | None:
        return self.source.resumed

    @property
    def arrays(self) -> Arrays | None:
        return self.source.arrays


def with_way_back(error: DivergedError, ended: Ended) -> DivergedError:
    """The error with the command that trains on. Let go of the run first: it has to be built again."""
    lower = gentler(ended.plan)
    last = lower is None  # a fresh start at safe rates, which is known by its clip
    if last and 0 < ended.plan.optim.clip <= _LAST_CLIP:
        hint = (
            "the rates are low already and not the cause: look at the data, or try speed.precision=fp32 from the start"
        )
        return DivergedError(error.message, hint)
    settings = lower or _settings(ended.plan, _safe_rates(ended.plan), clip=_LAST_CLIP)
    gentle = " ".join(f"{path}={value}" for path, value in settings.items())
    try:
        point, where = _point(ended, fresh=last)
    except UserError as failed:  # of the disk or the memory: the divergence comes first
        return DivergedError(error.message, f"start again with {gentle} ({failed.message})")
    if point is None:
        return DivergedError(error.message, f"start again with {gentle}")
    names = [*([] if ended.arrays is None else ["data="]), *ended.plan.custom.names]
    if names:
        gentle = "a lower lr in it" if ended.plan.custom.torch_optimizer else f"{gentle} in its config"
        again = f"flatout.train with the same {', '.join(names)}, resume={str(point)!r} and {gentle}"
        return DivergedError(error.message, f"resume from {where} in Python: {again}")
    verb = "finetune" if ended.plan.fine_tunes else "train"
    words = [as_word(path, value) for path, value in {**dict(_changed(ended, point)), **settings}.items()]
    command = " ".join(["flatout", verb, "--resume", shlex.quote(str(point)), *words])
    return DivergedError(
        error.message, f"resume from {where} at a {'safe' if last else 'lower'} learning rate: {command}"
    )


def _changed(ended: Ended, point: Path) -> Iterator[tuple[str, Any]]:
    """Settings of the run that the checkpoint has otherwise, and that a command may name."""
    plan = ended.plan
    stored, unread = read_part(point, "config"), unused_paths(plan.settings.config)
    for path, _, now in differences(plan.stored, stored):
        # A switch that a preset asked for gives way where the machine lacks it; one of a command is refused.
        ours = path.startswith("speed.") and not plan.settings.sources[path].by_user
        if not path.startswith("output.") and path not in unread and not ours:
            yield path, now
    base = plan.model.init_from
    if plan.fine_tunes and base != stored["model"].get("init_from"):
        yield "model.init_from", base


# --- settings ---------------------------------------------------------------------------------------------------------


def gentler(plan: RunPlan) -> dict[str, str] | None:
    """Settings that hold where these did not; None where the rates are at the floor."""
    before, safe = plan.optim.rates, _safe_rates(plan)
    lower = {name: max(_FLOOR * safe[name], min(_LOWER * rate, safe[name])) for name, rate in before.items()}
    rates = {name: min(rate, lower[name]) for name, rate in before.items()}
    # Compared as a command would have them: 2e-07 may be a bit above the floor's own value, again and again.
    return None if _words(rates) == _words(before) else _settings(plan, rates, clip=1.0)


def _safe_rates(plan: RunPlan) -> dict[str, float]:
    """Of every rate that is set, one at which training is stable. A model that has learned before moves less."""
    tunes, adapters, kind = plan.fine_tunes, plan.lora.rank > 0, plan.optim.kind
    share = usual_tuning_rate(SMALL_BASE, adapters=adapters) / SAFE_RATE if tunes else 1.0
    safe = _SAFE | {kind.rate: kind.usual or SAFE_RATE}
    return {name: share * kind.share * safe.get(name, SAFE_RATE) for name in plan.optim.rates}


def _settings(plan: RunPlan, rates: Mapping[str, float], *, clip: float) -> dict[str, str]:
    optim, unread = plan.optim, unused_paths(plan.settings.config)
    values = {**rates, **dict(_decays(optim, rates))}
    if not 0 < optim.clip <= clip:
        values["clip"] = clip
    words, (first, second) = _words(values), optim.betas
    # The rate bounds AdamW's steps only where the second moment remembers as long.
    if optim.kind.adamw and first**2 >= second:
        words["optim.betas"] = f"[{first:g}, {0.95 if first < 0.95 else 0.999}]"
    return {path: value for path, value in words.items() if path not in unread}


def _words(values: Mapping[str, float]) -> dict[str, str]:
    return {f"optim.{name}": f"{value:g}" for name, value in values.items()}


def _decays(optim: OptimConfig, rates: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Decays that take too much of a weight in a step at these rates, lowered."""
    first, usual = next(iter(rates)), rates["learning_rate"]
    table = rates.get("table_rate", rates.get("embedding_rate", usual))
    rate_of = {"weight_decay": rates[first], "table_decay": table}
    rate_of |= {f"{role}_decay": rates.get(f"{role}_rate", usual) for role in ("embedding", "head")}
    for name, rate in rate_of.items():
        decay = getattr(optim, name)
        if decay is not None and decay * rate > _MOST_DECAY:
            yield name, _MOST_DECAY / rate


# --- where to resume --------------------------------------------------------------------------------------------------


def _point(ended: Ended, *, fresh: bool) -> tuple[Path | None, str]:
    """The checkpoint to resume from, and what it is; None where there is none and none can be made.

    A `fresh` start is one from the starting weights.
    """
    checkpoints = checkpoints_of(ended.folder)
    once = ended.arrays is not None and ended.arrays.once  # what it gave is gone, and with it the held-out arrays
    start, failed = None, None
    try:
        if not once:
            plan = resolve(ended.source.from_start(), World(), custom=ended.plan.custom)
            start = _Start(Run(plan, custom=ended.custom))
    except UserError as error:
        failed = error
    found = None if fresh else _newest_sound(ended, start)
    if found is not None:
        return found, "a sound checkpoint"
    if failed is not None:
        raise failed
    if start is None:
        return None, ""
    begun = checkpoint_path(checkpoints, 0)
    try:
        read_checkpoint(begun)
    except CheckpointError:
        begun = start.save(checkpoints)
    return begun, "the starting weights"


def _newest_sound(ended: Ended, start: "_Start | None") -> Path | None:
    """The newest sound checkpoint. If the run was itself resumed at lower rates, one that is older than where it was
    resumed from, or that has a lower loss than that: else the same hint would come again."""
    again = ended.resumed is not None and _is_lower(ended.plan.optim, ended.resumed)
    resumed = ended.resumed.step if again and ended.resumed is not None else None
    found = dict(list_checkpoints(checkpoints_of(ended.folder)))
    limit = None if resumed not in found else _loss_of(found[resumed], start, ended.first_loss)
    for step in sorted(found, reverse=True):
        if step == resumed:
            continue
        loss = _loss_of(found[step], start, ended.first_loss)
        if loss is None or (resumed is not None and step > resumed and limit is not None and loss >= limit):
            continue
        return found[step]
    return None


def _is_lower(optim: OptimConfig, resumed: Checkpoint) -> bool:
    before = resolve_from_mapping(resumed.config).optim.rates
    return any(rate < before.get(name, 0.0) for name, rate in optim.rates.items())


def _loss_of(path: Path, start: "_Start | None", first_loss: float | None) -> float | None:
    """The loss of a sound checkpoint; None for another."""
    verdict = read_verdict(path)
    if verdict is not None and not verdict.finite:
        return None
    if start is not None:
        return start.loss_of(path)
    if verdict is None:
        return None
    return verdict.loss if first_loss is None or verdict.loss <= first_loss else None


class _Start:
    """The starting weights, and a run to measure the loss of others in."""

    def __init__(self, run: Run) -> None:
        self.run, self.checkpoint = run, capture(run, Progress())
        self.sizes = {name: _size(tensor) for name, tensor in self.checkpoint.model.items()}
        # Embeddings that nothing multiplies with a head are normed or gated, and grow large in healthy runs.
        roles = {one.name: role_of(one) for one in run.trained.updated}
        tables = {"table", *([] if run.plan.model.tied else ["embedding"])}
        self.tables = {name for name, role in roles.items() if role in tables}
        self.loss = self._measured()
        self.kept = False  # copies of the weights, before others take their places in the run

    def _measured(self) -> float:
        return quick_loss(self.run, self.run.step.micro_batch)[0]

    def loss_of(self, path: Path) -> float | None:
        """The loss of a sound checkpoint; None for another. The same validation text for all."""
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:
            return None
        if not all(self._is_bounded(name, tensor) for name, tensor in _trained(checkpoint)):
            return None
        if not self.kept:
            model, optimizer = (
                {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
                for tensors in (self.checkpoint.model, self.checkpoint.optimizer)
            )
            self.checkpoint = dataclasses.replace(self.checkpoint, model=model, optimizer=optimizer)
            self.kept = True
        restore_weights(self.run, checkpoint)
        loss = self._measured()
        return loss if loss <= self.loss else None

    def _is_bounded(self, name: str, tensor: Tensor) -> bool:
        usual = 1.0 if tensor.ndim < 2 or name in self.tables else 1.0 / math.sqrt(max(tensor.shape))
        return _size(tensor) <= _MOST_GROWTH * max(self.sizes.get(name, 0.0), usual)  # False for NaN

    def save(self, checkpoints: Path) -> Path:
        path, _ = write_checkpoint(checkpoints, self.checkpoint)
        write_verdict(path, Verdict(loss=self.loss, progress=Progress().judged()))
        return path


def _trained(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """All weights, by name: where they are averaged, the averages and those that training resumes with."""
    yield from checkpoint.model.items()
    for name, tensor in checkpoint.optimizer.items():
        if name.endswith(f".{TRAINED}"):
            yield name.removesuffix(f".{TRAINED}"), tensor


def _size(tensor: Tensor) -> float:
    """The root of the mean square."""
    return float(torch.linalg.vector_norm(tensor.detach().float())) / math.sqrt(max(tensor.numel(), 1))
