"""FSDP2: the losses of one process, and checkpoints in slices that any number of processes goes on from."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatout import api
from flatout.engine.checkpoint import Checkpoint, read_checkpoint, verify_checkpoint
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.parallel_runs import Told, learn
from tests.ranks import WORKERS

QUIET = ["optim.learning_rate=3e-3", "checkpoint.keep=9"]
Make = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def words(tmp_path: Path, corpus: Path) -> Make:
    """(preset, words) of a kind of data, all of it in this test's folder; steps have windows for 1, 2, 3 and 4."""

    def make(kind: str, *more: str) -> tuple[str, list[str]]:
        shape = [*TINY, "train.batch_tokens=192", *QUIET]
        if kind == "text":
            return "shakespeare-char", [*shape, f"data.source={corpus}", *more]
        if kind == "stream":
            chance = random.Random(1)
            texts = [
                " ".join(chance.choice(["the", "old", "red", "fox", "ran."]) for _ in range(20)) for _ in range(60)
            ]
            lines = [json.dumps({"text": text}) for text in texts]
            (tmp_path / "rows.jsonl").write_text("\n".join(lines))
            stream = ["data.streaming=true", "data.tokenizer=bytes", "data.val_fraction=0.2", "data.source=rows.jsonl"]
            return "shakespeare-char", [*shape, *stream, *more]
        if not (tmp_path / "base").exists():
            write_chat_model(tmp_path / "base")
            rows = [{"instruction": f"What is {n}?", "input": "", "output": "one " * (1 + n % 7)} for n in range(30)]
            (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        named = ["model.init_from=base", "chat.source=rows.json", "lora.rank=0", "chat.batch_samples=7"]
        quiet = ["output.plots=false", "eval.sample_tokens=4", "speed.device=cpu", "model.context=64", *QUIET]
        return "lora", [*named, *quiet, "train.epochs=null", *more]

    return make


def together(ranks: int, folder: Path, run: tuple[str, list[str]], form: str = "fsdp", **how) -> list[Told]:
    preset, words = run
    return WORKERS.run(ranks, _learn, folder, preset, [*words, f"parallel.form={form}"], how)


def _learn(folder: Path, preset: str, words: list[str], how: dict) -> Told:
    return learn(folder, preset, words, **how)


def check_alike(many: list[Told], one: Told, *, within: float, form: str = "fsdp", dealt: bool = True) -> None:
    for told in many:
        assert told.form == form
        assert told.losses == pytest.approx(one.losses, rel=0, abs=within)
        assert told.evaluations == pytest.approx(one.evaluations, rel=0, abs=max(within, 1e-6))
        assert told.samples == one.samples
        assert told.norms == pytest.approx(one.norms, rel=1e-5)
    if dealt:  # each has its share of every step, in the order of one process
        steps = zip(*(told.windows for told in many), strict=True)
        assert [list(itertools.chain(*shares)) for shares in steps] == one.windows


def at_step(folder: Path, step: int) -> Checkpoint:
    return read_checkpoint(folder / "checkpoints" / f"step-{step:08d}")


def check_equal(ours: Checkpoint, theirs: Checkpoint) -> None:
    for part in ("model", "optimizer"):
        mine, other = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == other.keys()
        assert all(mine[name].dtype == other[name].dtype and torch.equal(mine[name], other[name]) for name in mine)


KINDS = {
    "text": ["model.tied=false", "data.documents=apart"],
    "text, accumulated": ["speed.micro_batch=2", "speed.checkpointing=full"],
    "stream": ["speed.micro_batch=3"],
    "samples": ["speed.micro_batch=2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_slices_learn_what_one_learns(tmp_path: Path, words: Make, kind: str):
    preset, run = words(kind.partition(",")[0], "train.steps=6", "eval.every=3", *KINDS[kind])
    one = learn(tmp_path, preset, [*run, "output.folder=one"], double=True)
    two = together(2, tmp_path, (preset, [*run, "output.folder=two"]), double=True)
    check_alike(two, one, within=1e-9, dealt=kind != "samples")


def test_slices_are_saved_read_anywhere_and_gone_on_from(tmp_path: Path, words: Make):
    preset, run = words("text", "train.steps=6", "checkpoint.every=3", "model.layers=1")
    whole = together(2, tmp_path, (preset, [*run, "output.folder=whole"]))
    folder = tmp_path / "whole" / "checkpoints" / "step-00000003"
    names = {path.name for path in folder.iterdir()}
    assert {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "run.safetensors"} <= names
    assert "model.safetensors" not in names
    verify_checkpoint(folder)
    # one process goes on from slices, and two from what it saved
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    one = learn(tmp_path, preset, [*run, "output.folder=cut", "train.steps=5"], resume="auto")
    assert one.losses == pytest.approx(whole[0].losses[3:5], abs=2e-5)
    assert (tmp_path / "cut" / "checkpoints" / "step-00000005" / "model.safetensors").is_file()
    last = together(2, tmp_path, (preset, [*run, "output.folder=cut"]), resume="auto")
    assert last[1].losses == pytest.approx(whole[0].losses[5:], abs=2e-5)
    # sampling and evaluating work as with any checkpoint
    assert api.load_model(tmp_path / "whole", device="cpu").step == 6
