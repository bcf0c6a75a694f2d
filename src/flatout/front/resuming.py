"""What a run resumes from: refusals where it cannot be the same run, notices where a setting has changed."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from flatout.checkpoints.checkpoint import Checkpoint, Unusable, checkpoint_path, read_checkpoint
from flatout.checkpoints.checkpoint_files import check_own
from flatout.checkpoints.run_folder import RunLock, checkpoint_to_load, choose_folder, find_resume_point, run_lock
from flatout.config.load import LoadedConfig, resolve_from_mapping
from flatout.config.sections import LENGTHS
from flatout.config.yaml_loader import format_value
from flatout.data.part import LIMITS
from flatout.data.plan import DECISIVE
from flatout.engine.custom import check_same_parts
from flatout.engine.run import Run
from flatout.engine.state import as_word, differences
from flatout.errors import CheckpointError, ConfigError, UsageError
from flatout.observe.trackers import check_trackers
from flatout.optim.rules import rate_factors
from flatout.resolve.length import optim_of, pace_of, steps_of, stored_schedule
from flatout.resolve.sizing import as_before
from flatout.world import World

_MOST_WORDS = 8  # of a hint, which is one line
_FREE_LORA = ("dropout", "init_from", "quantize")  # may change in a run; all others say what its adapters are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run begins from: its folder, and the checkpoint to resume, if there is one.

    `asked` is `train`'s `resume`; `unusable` are newer checkpoints that are damaged or diverged.
    """

    folder: Path
    asked: str | None
    unusable: Sequence[Unusable]
    checkpoint: Checkpoint | None

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def resumable(self) -> Path:
        """The path that a refusal names to resume: the folder would mean its newest checkpoint, damaged or not."""
        point = None if self.checkpoint is None else self.checkpoint.path
        return point if point is not None and self.unusable else self.folder


@final
class HeldFolder(contextlib.ExitStack):
    """The folder of a run that is about to train, which the first of its processes holds for the length of a block.

    `chosen` is the folder that an earlier attempt of the launcher has chosen.
    """

    def __init__(self, asked: LoadedConfig, resume: str | None, world: World, chosen: Path | None = None) -> None:
        super().__init__()
        self._asked, self._resume, self._world, self._chosen = asked, resume, world, chosen

    def locked(self) -> tuple[Origin, RunLock | None]:
        """What the run begins from, and the lock; other processes have none."""
        world, resume, output = self._world, self._resume, self._asked.config.output
        lock = origin = point = None
        with world.fail_together():
            check_trackers(output.trackers)
            if world.first:
                by_path = resume not in (None, "auto")
                folder = self._chosen or choose_folder(output, resume)
                if by_path:
                    _check_stays(self._asked, folder)
                lock = self.enter_context(run_lock(folder, movable=not by_path))
                check_own(folder)
                point, unusable = find_resume_point(folder, resume)
                origin = _origin(folder, resume, point, unusable)
        place, point = world.broadcast(
            ["" if origin is None else str(origin.folder), None if point is None else str(point)]
        )
        world.pulse.note_run(Path(place), accepted=False)
        with world.fail_together():
            if origin is None:
                _check_seen(place, point)
                origin = _origin(Path(place), resume, None if point is None else Path(point), ())
        return origin, lock


def _origin(folder: Path, resume: str | None, point: Path | None, unusable: Sequence[Unusable]) -> Origin:
    checkpoint = None if point is None else read_checkpoint(point, verified=True)
    return Origin(folder=folder, asked=resume, unusable=unusable, checkpoint=checkpoint)


def _check_seen(folder: str, point: str | None) -> None:
    """Refuses a host that does not see the run folder of the others."""
    missing = next((path for path in (folder, point) if path is not None and not Path(path).exists()), None)
    if missing is not None:
        raise UsageError(f"{missing} is not there", "use a folder that all hosts share, under the same path on each")


def _check_stays(asked: LoadedConfig, folder: Path) -> None:
    """Refuses a command that resumes the run in `folder` and names another folder for it.

    A config file may name one: it may be that of a run which was moved.
    """
    typed = {path for path, source in asked.sources.items() if source.kind == "override"}
    output = asked.config.output
    elsewhere = output.folder is not None and Path(output.folder).resolve() != folder.resolve()
    renamed = "output.folder" not in typed and folder.resolve().name.partition("+")[0] != output.name
    for path, other in {"output.folder": elsewhere, "output.name": renamed}.items():
        if path in typed and other:
            raise UsageError(
                f"{path}={getattr(output, path.partition('.')[2])} is not the run that is resumed, {folder}",
                f"a resumed run stays in its folder: leave {path} out; to branch off, start a new run with "
                f"model.init_from={shlex.quote(str(folder))}",
            )


def more_minutes(path: str | Path, minutes: float) -> tuple[Path, list[str]]:
    """The checkpoint from which a run resumes for more minutes, and the settings of its new length.

    That is the one at the start of its cool-down, or the newest where it has not come so far.
    """
    newest = read_checkpoint(checkpoint_to_load(Path(path)))
    plan, train = newest.state.get("deadline"), newest.config.get("train", {})
    if not isinstance(plan, dict) or not isinstance(train, dict) or newest.path is None:
        raise UsageError(
            f"{path} is no run whose length is in minutes", "resume it with a length in steps: train.steps=N"
        )
    step = plan.get("cooldown_step")
    chosen = newest
    if isinstance(step, int) and step < newest.step:
        place = checkpoint_path(newest.path.parent, step)
        if not place.is_dir():
            raise CheckpointError(
                f"the checkpoint at the start of the cool-down, {place}, is gone",
                "start a new run with --minutes, or resume this one with train.steps=N",
            )
        chosen = read_checkpoint(place)
    spent = float(chosen.state["deadline"]["spent"])
    seconds = spent + 60 * minutes
    steps = max(chosen.step + 1, round(chosen.step * seconds / max(spent, 1e-9)))
    assert chosen.path is not None, "it was read from there"
    return chosen.path, [f"train.minutes={seconds / 60!r}", f"train.steps={steps}"]


def as_begun(asked: LoadedConfig, origin: Origin) -> LoadedConfig:
    """Settings with which a run goes on from where it came: what had been decided when it began stays decided."""
    resumed = origin.checkpoint
    if resumed is None:
        return asked
    settings = as_before(asked, resumed.config)
    if not settings.config.fine_tunes:  # else the shape is the base's, read later
        check_shape(settings.config.model_dump(), resumed, origin.resumable)
    return settings


def check_resumed(run: Run, origin: Origin) -> list[str]:
    """Refuses a checkpoint that this run cannot resume; returns a notice for each thing that is not as it was."""
    checkpoint = origin.checkpoint
    if checkpoint is None:
        return []
    if run.last_step < checkpoint.step:
        train = run.plan.train
        length = next(name for name in LENGTHS if getattr(train, name) is not None)
        more = f"set train.steps above {checkpoint.step}" if length == "steps" else f"raise train.{length}"
        raise ConfigError(
            f"the run is at step {checkpoint.step:,} already, and train.{length}={getattr(train, length)} ends it at "
            f"step {run.steps:,}",
            f"{more}, or start a new run without --resume",
        )
    check_same_parts(run.custom_state, checkpoint.state)
    notices = [
        *_changes(run, checkpoint, origin.resumable),
        *_about_rate(run, checkpoint),
        *_about_threads(run, checkpoint),
    ]
    if origin.asked == "auto" and any(
        _perhaps_forgotten(path) for path, _, _ in differences(run.plan.stored, checkpoint.config)
    ):
        notices.append(f"to resume with the settings that the run had: {_resume_words(checkpoint, origin.folder)}")
    return notices


def _other_data(run: Run, checkpoint: Checkpoint) -> str:
    """That a checkpoint was trained on other data, with the setting that differs."""
    changed = {path: (before, after) for path, before, after in differences(run.plan.stored, checkpoint.config)}
    deciding = ("chat.source", *(f"data.{name}" for name in ("source", "folder", "tokenizer", *DECISIVE, *LIMITS)))
    rules = (path for path in changed if path.startswith(("clean.", "chat.")))
    path = next((path for path in (*deciding, *rules) if path in changed), None)
    if path is None:
        return f"the checkpoint was trained on other data than that of {run.data.facts.place} now"
    before, after = changed[path]
    return f"the checkpoint was trained with {as_word(path, before)}, this run has {as_word(path, after)}"


def _changes(run: Run, checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Refuses a checkpoint of another model or other data; returns a line for each other setting that changed."""
    facts = run.data.facts
    if checkpoint.dataset != facts.fingerprint:
        way = own_settings(run.plan.stored, checkpoint, folder, ("data", "clean", "chat"))
        raise CheckpointError(
            _other_data(run, checkpoint),
            f"{way or 'restore the data it was trained on'}, or start a new run",
        )
    if run.base_hash is not None and checkpoint.state.get("base", run.base_hash) != run.base_hash:
        raise CheckpointError(
            f"{run.plan.model.init_from} holds other weights than those that the run's adapters were trained on",
            "put the model that they were trained on back in its place, or start a new run",
        )
    check_shape(run.plan.stored, checkpoint, folder)
    changed: list[str] = []
    if run.plan.model.dropout > 0 and not run.random.tensors().keys() <= checkpoint.run.keys():
        changed.append(f"the checkpoint was not saved on {run.speed.device.kind}: dropout draws start anew there")
    for path, before, after in differences(run.plan.stored, checkpoint.config):
        section, _, name = path.partition(".")
        if section == "lora" and name != "rank" and not run.plan.lora.rank:
            continue  # it is not read without adapters
        if section == "lora" and name not in _FREE_LORA:
            raise CheckpointError(
                f"the checkpoint has {path} {format_value(before)}, the config says {format_value(after)}",
                f"set {as_word(path, before)}, or resume without a config: {_resume_words(checkpoint, folder)}",
            )
        changed.append(_change(path, before, after))
    base = checkpoint.config["model"].get("init_from")
    if run.plan.fine_tunes and base != run.plan.model.init_from:
        changed.append(_change("model.init_from", base, run.plan.model.init_from))
    return changed


def _change(path: str, before: Any, after: Any) -> str:
    if path == "train.minutes":  # a sum of measured times and what was asked for, as --minutes makes it
        before, after = (_rounded(minutes) for minutes in (before, after))
    return f"{path} was {format_value(before)}, is now {format_value(after)}"


def _rounded(minutes: Any) -> Any:
    is_long = isinstance(minutes, float) and len(repr(minutes)) > 8
    return float(f"{minutes:.3g}") if is_long else minutes


def check_shape(settings: Mapping[str, Any], checkpoint: Checkpoint, folder: Path) -> None:
    """Refuses a checkpoint of another model, with the command that resumes it."""
    for path, before, after in differences(settings, checkpoint.config):
        if path.startswith("model.") and path != "model.dropout":
            way = own_settings(settings, checkpoint, folder, ("model",))
            raise CheckpointError(
                f"the checkpoint has {path} {format_value(before)}, the config says {format_value(after)}",
                f"a trained model keeps its shape: {way}, or start a new run without --resume",
            )


def _perhaps_forgotten(path: str) -> bool:
    """Whether a setting that differs may be one that was not typed again: runs are made longer on purpose."""
    lengths = [f"train.{name}" for name in LENGTHS]
    return path.partition(".")[0] in ("data", "clean", "optim", "train", "model") and path not in lengths


def _resume_words(checkpoint: Checkpoint, folder: Path) -> str:
    verb = "finetune" if resolve_from_mapping(checkpoint.config).fine_tunes else "train"
    return f"`flatout {verb} --resume {shlex.quote(str(folder))}`"


def own_settings(
    settings: Mapping[str, Any], checkpoint: Checkpoint, folder: Path, sections: Sequence[str]
) -> str | None:
    """How to resume a run as it was, where `settings` differ from it in these sections; None where it does not.

    The command without a config takes every setting from the checkpoint, so nothing has to be typed again.
    """
    words = [
        as_word(path, before)
        for path, before, _ in differences(settings, checkpoint.config)
        if path.partition(".")[0] in sections and path != "model.dropout"
    ]
    if not words:
        return None
    shown = " ".join(words[:_MOST_WORDS])
    more = f" and {len(words) - _MOST_WORDS} more" if len(words) > _MOST_WORDS else ""
    return f"{_resume_words(checkpoint, folder)} takes all settings from the run; with a config, add {shown}{more}"


def _about_rate(run: Run, checkpoint: Checkpoint) -> Iterator[str]:
    """A run that is made longer or shorter gets the schedule of its new length, which may be a jump from the old."""
    before = resolve_from_mapping(checkpoint.config)
    if before.train.minutes is not None or run.deadline is not None:  # the clock bends it, and it never jumps
        return
    schedule = stored_schedule(run.data, checkpoint)
    steps = steps_of(before, run.data.facts, schedule)
    done = int(checkpoint.run["updates"])
    if steps == run.steps or not 0 < done < min(steps + 1, run.steps):
        return
    earlier = pace_of(before, schedule or run.plan.schedule, steps)
    optim = optim_of(before, run.data.facts, schedule or run.plan.schedule, steps)
    peak, peak_now = (next(iter(one.rates.values())) for one in (optim, run.plan.optim))  # as steps report it
    last = peak * rate_factors(optim, steps, earlier)[done - 1]
    following = peak_now * rate_factors(run.plan.optim, run.steps, run.plan.pace)[done]
    if abs(following - last) > 0.1 * last:
        yield (
            f"the schedule was over {steps:,} steps and is now over {run.steps:,}: the learning rate goes from "
            f"{last:.2e} in step {checkpoint.step:,} to {following:.2e} in the next"
        )


def _about_threads(run: Run, checkpoint: Checkpoint) -> Iterator[str]:
    """On a CPU, sums are split over threads: another number of threads changes the last bits."""
    before, now = checkpoint.state.get("threads"), run.speed.threads
    if before is not None and before != now and run.speed.device.kind == "cpu":
        yield (
            f"the run had {before} CPU threads and now has {now}: results will differ in the last bits; set "
            f"speed.threads={before} for a bit-identical resume"
        )
