"""Runs for processes that train together (tests/ranks.py), and what they have learned: told in numbers and hashes."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flatout
from flatout.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, OptimConfig
from flatout.engine import run as engine_run
from flatout.engine.setup import all_weights
from flatout.engine.state import capture, restore, write_sharded
from flatout.engine.step import TrainStep
from flatout.errors import UserError
from flatout.launch import launch
from flatout.model.gpt import build_model
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of
from flatout.parallel.ranks import Ranks, joined
from flatout.records import EvalRecord, NoticeRecord, RunInfo, SampleRecord, StepRecord
from flatout.world import World
from tests.set_up import set_up


@dataclasses.dataclass(frozen=True)
class Told:
    """What one process tells of a run."""

    losses: list[float]  # as exact as they were computed
    windows: list[list[str]]  # of every step, each as a hash
    evaluations: list[float]
    samples: list[str]
    notices: list[str]
    norms: list[float]  # of gradients and, where it was asked for, of parameters
    form: str


def learn(
    folder: Path,
    preset: str,
    words: Sequence[str],
    *,
    double: bool = False,
    resume: str | None = None,
    stop_at: int | None = None,
    hosts: int = 1,
) -> Told:
    """Trains in `folder`; `double` has weights and all arithmetic in float64. `hosts`: so many seem to be there."""
    losses: list[float] = []
    windows: list[list[str]] = []
    real, build = TrainStep.accumulate, engine_run.built_model

    def accumulate(step: TrainStep, tokens: Tensor, *more: Any) -> Tensor:
        windows.append([hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in tokens.cpu()])
        loss = real(step, tokens, *more)
        losses.append(float(loss))
        return loss

    wide = mock.patch.object(engine_run, "built_model", lambda *values, **how: build(*values, **how).double())
    taken = itertools.count(1)
    each = int(os.environ.get("WORLD_SIZE", "1")) // hosts
    name = f"host-{int(os.environ.get('RANK', '0')) // each}"
    with (
        _in(folder),
        mock.patch("socket.gethostname", return_value=name) if hosts > 1 else contextlib.nullcontext(),
        mock.patch.object(TrainStep, "accumulate", accumulate),
        wide if double else contextlib.nullcontext(),
    ):
        stop = (lambda: False) if stop_at is None else lambda: next(taken) == stop_at
        records = list(flatout.train(load_config(preset, words), resume=resume, stop=stop))
    info = next(record for record in records if isinstance(record, RunInfo))
    steps = [record for record in records if isinstance(record, StepRecord)]
    return Told(
        losses=losses,
        windows=windows,
        evaluations=[record.loss for record in records if isinstance(record, EvalRecord)],
        samples=[record.text for record in records if isinstance(record, SampleRecord)],
        notices=[record.message for record in records if isinstance(record, NoticeRecord)],
        norms=[norm for record in steps for norm in (record.grad_norm, record.parameter_norm) if norm is not None],
        form=next((feature.used for feature in info.features if feature.name == "parallel"), "none"),
    )


def attempt(folder: Path, preset: str, words: Sequence[str], hosts: int = 1) -> str:
    """The error of a run that is refused."""
    try:
        learn(folder, preset, words, hosts=hosts)
    except UserError as error:
        return f"{type(error).__name__}: {error.message}; {error.hint}"
    return ""


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        torch.set_grad_enabled(True)


def saved_again(folder: Path, preset: str, words: Sequence[str], checkpoint: Path, target: Path) -> None:
    """Loads a checkpoint into a run of these processes and saves it once more, with no step between."""
    config = load_config(preset, words)
    with _in(folder), joined(launch(), "cpu", timeout=600) as world:
        resumed = read_checkpoint(checkpoint)
        run = set_up(config, resumed=resumed, world=world)
        state = capture(run, restore(run, resumed), resumed.state.get("stream"))
        if run.trained.sharding is not None:
            write_sharded(target, state, run.trained.sharding, world)
        elif world.first:
            write_checkpoint(target, state)


def muon_updated(world: World, *, sharded: bool, normuon: bool) -> dict[str, Tensor]:
    """Weights and state of Muon's matrices, as this process holds them, after three updates of which one is skipped.

    All processes get the same gradients. 84 rows of a matrix are no multiple of the slices of more than four.
    """
    config = OptimConfig(optimizer="normuon" if normuon else "muon", weight_decay=0.5)
    shape = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "context": 8, "mlp": "swiglu", "mlp_width": 42}
    model, sharding = build_model(ModelConfig(tied=False, **shape), 71, seed=1), None
    if sharded:
        from flatout.parallel.sharding import Sharding

        assert isinstance(world, Ranks)
        groups = [[block] for block in model.blocks]
        sharding = Sharding(model, groups, world, hybrid=False, device=torch.device("cpu"), gathered=None)
    trained = all_weights(model, sharding)
    optimizer = Optimizers(rules_of(config, 8, exchange=trained.exchange(world)), trained.updated)
    optimizer.create_state()
    for update in range(3):
        generator = torch.Generator().manual_seed(update)
        whole = {name: torch.randn(shape, generator=generator) for name, shape in trained._shapes().items()}
        own = trained.own(whole)
        for one in trained.updated:
            one.parameter.grad = own[one.name].clone()
        optimizer.look_up(torch.tensor(update))
        optimizer.update(torch.tensor(3.0), torch.tensor(update != 1))
    ours = {one.name for one in optimizer.groups[0].trained}
    held = {**trained.tensors(), **optimizer.tensors()}
    return {name: x.clone() for name, x in held.items() if {name, name.rpartition(".")[0]} & ours}


def muon_in_both_forms(normuon: bool) -> list[dict[str, Tensor]]:
    """The same in data parallel and in slices."""
    with joined(launch(), "cpu", timeout=600) as world:
        return [muon_updated(world, sharded=sharded, normuon=normuon) for sharded in (False, True)]
