"""A run's state into a checkpoint and back, and its adapters into PEFT's folder beside the checkpoints."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flatout
from flatout.checkpoints.base_and_adapter import ADAPTER, IN_4_BITS, step_of, who_loads, write_adapter
from flatout.checkpoints.checkpoint import (
    SLICED_FILES,
    Checkpoint,
    checkpoint_path,
    entry_of,
    joined_entries,
    list_checkpoints,
    read_checkpoint,
    read_verdict,
    slice_file,
)
from flatout.checkpoints.checkpoint_files import commit, set_aside, write_files
from flatout.checkpoints.run_folder import checkpoint_to_load, checkpoints_of
from flatout.config.yaml_loader import format_value, shorten
from flatout.engine.run import Run
from flatout.errors import CheckpointError
from flatout.files import disk_errors
from flatout.folders import whole_folder
from flatout.model.adapter_files import OccupiedError
from flatout.model.weights import pieces_of
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding

JUDGED = {"val_loss", "best_loss", "best_step", "worse_evaluations"}
TRAINED = "trained"  # the key of a weight in the optimizer's file, where the model's file has its average


@dataclasses.dataclass
class Progress:
    """The host's numbers between steps; saved whole in every checkpoint."""

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
        """The numbers that an evaluation changes. A checkpoint is written before it, so its verdict holds these."""
        return {name: getattr(self, name) for name in JUDGED}


@dataclasses.dataclass(frozen=True)
class Due:
    """Whether a boundary evaluates and samples. A checkpoint holds it: a resume without a verdict does it then."""

    evaluate: str | None = None  # the reason: step, epoch or end
    sample: bool = False
    tasks: bool = False


def capture(run: Run, progress: Progress, position: dict[str, Any] | None = None, due: Due | None = None) -> Checkpoint:
    """The whole state of a run at a step boundary; `position` is where the loader goes on from there."""
    tensors = {**_random_of_all(run), **run.model.narrow.tensors(), "updates": run.step.updates}
    tensors |= run.custom.buffers(run.model)
    if run.step.loss_scale is not None:
        tensors |= {"scale": run.step.loss_scale.scale, "good_updates": run.step.loss_scale.good_updates}
    state: dict[str, Any] = {
        **dataclasses.asdict(progress),
        "flatout": flatout.__version__,
        "torch": torch.__version__,
        "dataset": run.data.facts.fingerprint,
        "vocab": run.model.vocab,
        "due": dataclasses.asdict(due or Due()),
        "threads": run.speed.threads,
        "schedule": [dataclasses.astuple(stage) for stage in run.plan.schedule.stages],
        **({} if position is None else {"stream": position}),
        **run.data.saved(),
        **({} if run.base_hash is None else {"base": run.base_hash}),
        **run.custom_state,
        **({} if run.deadline is None else {"deadline": run.deadline.saved()}),
    }
    model, optimizer, average = run.trained.tensors(), run.step.optimizer.tensors(), run.step.average
    if average is not None:  # which others load; the weights are part of what training alone resumes with
        optimizer |= {f"{name}.{TRAINED}": model[name] for name in average.values}
        model = model | average.values
    return Checkpoint(
        model=model,
        optimizer=optimizer,
        run=tensors,
        state=state,
        config=run.plan.stored,
        tokenizer=run.data.tokenizer.to_json(),
    )


def restore_weights(run: Run, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Puts weights and their average back; returns what is the optimizers' alone. Without a saved average, one begins
    with the weights."""
    state = dict(checkpoint.optimizer)
    averaged = [name for name in checkpoint.model if f"{name}.{TRAINED}" in state]
    weights = {name: state.pop(f"{name}.{TRAINED}") for name in averaged}
    run.trained.assign({**checkpoint.model, **weights}, "the checkpoint")
    if run.step.average is not None:
        run.step.average.assign(run.trained.own(checkpoint.model))
    return state


def _random_of_all(run: Run) -> dict[str, Tensor]:
    """The random streams of all processes; those of the first one under their plain names."""
    own = run.random.tensors()
    if run.world.size == 1:
        return own
    rows = run.world.gather({name: state.tolist() for name, state in own.items()})
    return {
        name if rank == 0 else f"{name}.{rank}": torch.tensor(state, dtype=torch.uint8)
        for rank, row in enumerate(rows)
        for name, state in row.items()
    }


def _random_of(run: Run, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The streams of this process, where the checkpoint is of as many processes; None: they begin anew."""
    names, rank = run.random.tensors(), run.world.rank
    ranks = sum(name.startswith("random.cpu") for name in tensors)
    if rank and ranks != run.world.size:
        return None
    own = {name: f"{name}.{rank}" if rank else name for name in names}
    return {name: tensors[saved] for name, saved in own.items() if saved in tensors}


def restore(run: Run, checkpoint: Checkpoint) -> Progress:
    """Puts a checkpoint's state into a freshly built run; the counterpart of `capture`."""
    state = restore_weights(run, checkpoint)
    try:
        run.step.optimizer.assign(run.trained.own(state), "the checkpoint")
    except CheckpointError as error:
        about = ("optim.", "speed.optimizer_state")
        changed = [row for row in differences(run.plan.stored, checkpoint.config) if row[0].startswith(about)]
        if not changed:
            raise
        what = "; ".join(f"{path} was {format_value(was)}, is now {format_value(now)}" for path, was, now in changed)
        words = " ".join(as_word(path, was) for path, was, _ in changed)
        raise CheckpointError(f"{error.message} ({what})", f"resume with {words}, or start a new run") from error
    run.step.updates.copy_(checkpoint.run["updates"])
    run.custom.restore_buffers(run.model, checkpoint.run)
    random = _random_of(run, checkpoint.run)
    if random is not None:
        run.random.assign(random)
    notice = run.model.narrow.assign(checkpoint.run)
    if notice is not None:
        run.new_notices.add(notice)
    if run.step.loss_scale is not None and "scale" in checkpoint.run:
        run.step.loss_scale.scale.copy_(checkpoint.run["scale"])
        run.step.loss_scale.good_updates.copy_(checkpoint.run["good_updates"])
    verdict = None if checkpoint.path is None else read_verdict(checkpoint.path)  # which was written after it
    judged = {} if verdict is None else {name: verdict.progress[name] for name in JUDGED & verdict.progress.keys()}
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(Progress):
        value = numbers[field.name] = {**checkpoint.state, **judged}.get(field.name, field.default)
        counted = type(value) is int and abs(value) < 2**63
        if not (counted or isinstance(value, float) or (value is None and field.default is None)):
            raise CheckpointError(
                f"the checkpoint has {field.name} {shorten(value)}, which is no number of its kind",
                "it was not written by Flatout: name another checkpoint",
            )
    progress = Progress(**numbers)
    progress.bad_steps = 0  # a run that ended while they were counted may go on
    return progress


def differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(path, stored value, that of now) of every setting that a checkpoint has otherwise, but names of places."""
    for section, values in stored.items():
        for name, before in values.items():
            after, path = now.get(section, {}).get(name), f"{section}.{name}"
            if before != after and path not in ("output.folder", "output.name", "model.init_from"):
                yield path, before, after


def as_word(path: str, value: Any) -> str:
    """A setting as a word of a command line."""
    return shlex.quote(f"{path}={value if isinstance(value, str) else format_value(value)}")


def lacks_verdict(checkpoint: Checkpoint) -> bool:
    """Whether a run was killed between writing a checkpoint and judging it. Old ones were written after evaluation."""
    return "due" in checkpoint.state and checkpoint.path is not None and read_verdict(checkpoint.path) is None


def due_of(checkpoint: Checkpoint) -> Due:
    """The `Due` that a checkpoint holds."""
    due = checkpoint.state.get("due")
    found = due if isinstance(due, dict) else {}
    reason = found.get("evaluate")
    reason = reason if reason in ("step", "epoch", "end") else None
    return Due(reason, found.get("sample") is True, found.get("tasks") is True)


def recorded_again(checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """The types of records of a checkpoint's step that resuming from it brings once more."""
    if checkpoint is None or not lacks_verdict(checkpoint):
        return ()
    due = due_of(checkpoint)
    again = {"sample": due.sample, "task": due.tasks}
    if due.evaluate:  # which may end the run, with a sample and tasks
        again = {"eval": True, "eigenstates": True, "sample": True, "task": True}
    return ("checkpoint", "spans", *(name for name, asked in again.items() if asked))


# --- adapters ---------------------------------------------------------------------------------------------------------


def save_run_adapter(run: Run, folder: Path, step: int, tensors: Mapping[str, Tensor] | None = None) -> Iterator[str]:
    """Adapters as PEFT's folder in the run's, if the checkpoint of this step is the one that others would load.

    `tensors` are the adapters of that step, where training has gone on since. A folder with other files in it is left
    alone, with a notice: the checkpoint has the adapters all the same.
    """
    name = run.plan.model.init_from
    if run.adapters is None or name is None:
        return
    if checkpoint_to_load(folder, best=True) != checkpoint_path(checkpoints_of(folder), step):
        return
    facts = {"base": run.base_hash, "quantize": run.plan.lora.quantize, "step": step}
    try:
        write_adapter(run.adapters, folder / ADAPTER, name, run.files_beside, facts, tensors)
    except OccupiedError as error:
        yield f"the adapter of step {step} was not written: {error.message}"


def notice_on_adapter(run: Run, folder: Path) -> Iterator[str]:
    """Where a run's adapter lies, and who can load it."""
    place, name, base = folder / ADAPTER, run.plan.model.init_from, run.plan.base
    step = step_of(place)
    if run.adapters is None or step is None:
        return
    limit = who_loads(name, base.description) if base is not None and name is not None else None
    lora = run.plan.lora
    # vLLM refuses DoRA, and takes one rank and alpha for all targets whatever the patterns say.
    alone = bool(lora.dora or lora.ranks or lora.alphas)
    who = "" if limit is not None else " for PEFT" if alone else " for PEFT and vLLM"
    known = f"adapter{who}: {place}, of step {step}"
    yield "; ".join(filter(None, [known, limit, IN_4_BITS if run.plan.lora.quantize != "none" else None]))


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
    try:
        yield from save_run_adapter(run, folder, step)
    finally:
        run.trained.assign(now, "the run")
        run.adapters.forget()


# --- slices -----------------------------------------------------------------------------------------------------------


def write_sharded(folder: Path, checkpoint: Checkpoint, sharding: "Sharding", world: World) -> tuple[Path, int]:
    """Writes `folder/step-N` from all processes, of which `checkpoint` holds the slices; returns it and its size.

    The first process makes the temporary folder; all write their files there, hashed and durable; their entries are
    gathered; the first process writes the rest, the manifest last, and renames the folder. A process that fails on the
    way fails them all, and the folder goes. They may try again then, together (engine/recovery.py).
    """
    target, work = checkpoint_path(folder, checkpoint.step), None
    size = 0
    with contextlib.ExitStack() as held:
        with world.fail_together():
            if world.first:
                held.enter_context(disk_errors(f"checkpoint {target}"))
                work = held.enter_context(whole_folder(target))
        place = Path(world.broadcast(str(work)))
        with world.fail_together(), disk_errors(f"checkpoint {target}"):
            own = _write_own(place, checkpoint, sharding)
        written = world.gather(own)
        with world.fail_together():
            if work is not None:
                files = {name: entry for part in written for name, entry in part["files"].items()}
                parts = {name: joined_entries([part["slices"][name] for part in written]) for name in SLICED_FILES}
                files |= write_files(work, {"run.safetensors": pieces_of(checkpoint.run)}, checkpoint.text_files())
                commit(work, checkpoint.step, files, parts)
                size = sum(entry["bytes"] for entry in files.values())
                if target.is_symlink() or target.exists():
                    set_aside(target, "superseded")
                held.close()
    return target, world.broadcast(size)


def _write_own(folder: Path, checkpoint: Checkpoint, sharding: "Sharding") -> dict[str, Any]:
    """Writes this process's slices; returns entries of the files and of the tensors in them."""
    files: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    for name in SLICED_FILES:
        file = slice_file(name, sharding.number, sharding.count)
        tensors: dict[str, Tensor] = getattr(checkpoint, name)
        entries = slices[name] = dict[str, Any]()
        for key, tensor in tensors.items() if sharding.writes else ():
            one = sharding.slice_of(key, tensor)
            if one is None and sharding.number == 0:
                entries[key] = entry_of(file, tensor.shape, 0, tensor)
            elif one is not None and one.rows:
                entries[key] = entry_of(file, one.shape, one.start, tensor)
        if entries:
            files |= write_files(folder, {file: pieces_of({key: tensors[key] for key in entries})}, {})
    return {"files": files, "slices": slices}
