"""Bytes that change on the disk after they were written: every change in a run or a dataset is found or harmless."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import flatout
from flatout import cli
from flatout.checkpoints.checkpoint import read_checkpoint
from flatout.errors import UserError
from flatout.records import CheckpointRecord
from tests.damaged import damage_on_disk

ABOUT_INPUT = ("report.json", "problems.jsonl")


def two_lines(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines()] == ["error", "hint"], said
    return said


def rot_checkpoints(tiny, capsys: pytest.CaptureFixture[str], counts: dict[str, int]) -> None:
    """Damages the newest checkpoint: named by a resume that asks for it, survived by `--resume auto`."""
    config = tiny("train.steps=8", "checkpoint.every=4", "output.folder=run")
    list(flatout.train(config))
    newest = Path("run/checkpoints/step-00000008")
    files = sorted(file for file in newest.iterdir() if file.name != "verdict.json")
    assert len(files) == 7
    choose = random.Random(0)
    for kind, count in counts.items():
        for index in range(count):
            file = files[index % len(files)]
            original = file.read_bytes()
            damage_on_disk(file, kind, choose)
            assert cli.main(["train", "--resume", "run"]) == 3
            said = two_lines(capsys)
            assert said.startswith("error: damaged checkpoint")
            assert file.name in said
            run = flatout.train(config, resume="auto")
            first, second = next(run), next(run)
            run.close()
            assert "damaged" in first.message
            assert file.name in first.message
            assert second.start_step == 4, "falls back to the previous good one"
            Path("run/checkpoints/step-00000008.damaged").rename(newest)
            file.write_bytes(original)
    assert read_checkpoint(newest).step == 8


def rot_small_files(tiny, capsys: pytest.CaptureFixture[str], counts: dict[str, int]) -> Counter[str]:
    """Damages what lies beside a checkpoint's own files: the run goes on to the same end, or is refused."""
    words = ["train.steps=8", "checkpoint.every=4", "eval.every=4", "output.folder=run"]
    run = flatout.train(tiny(*words))
    for record in run:
        if isinstance(record, CheckpointRecord):
            break
    run.close()
    shutil.copytree("run", "begun")
    list(flatout.train(tiny(*words), resume="auto"))
    expected = read_checkpoint(Path("run/checkpoints/step-00000008")).model
    names = ("checkpoints/step-00000004/verdict.json", "best.json", "config.yaml", "metrics.jsonl", "run.lock")
    choose, found = random.Random(1), Counter[str]()
    for kind, count in counts.items():
        for index in range(count):
            shutil.rmtree("run")
            shutil.copytree("begun", "run")
            damage_on_disk(Path("run") / names[index % len(names)], kind, choose)
            capsys.readouterr()
            try:
                list(flatout.train(tiny(*words), resume="auto"))
            except UserError:
                found["refused"] += 1
                continue
            found["harmless"] += 1
            mine = read_checkpoint(Path("run/checkpoints/step-00000008")).model
            assert all(torch.equal(mine[name], expected[name]) for name in expected)
    return found


def rot_dataset(tiny, capsys: pytest.CaptureFixture[str], counts: dict[str, int]) -> None:
    """Damages a prepared dataset: every verb that reads it names the file."""
    config = tiny("train.steps=1", "output.folder=run", "data.folder=data/mine")
    list(flatout.train(config))
    files = sorted(path for path in Path("data/mine").iterdir() if path.is_file() and path.stat().st_size)
    choose = random.Random(2)
    for kind, count in counts.items():
        for index in range(count):
            file = files[index % len(files)]
            original = file.read_bytes()
            damage_on_disk(file, kind, choose)
            # What became of the input is told by the report, which measuring a model does not read.
            words = ["prepare", "inspect", "data/mine"] if file.name in ABOUT_INPUT else ["eval", "run"]
            assert cli.main(words) == 3, (file, kind, index)
            assert file.name in two_lines(capsys)
            file.write_bytes(original)
    assert cli.main(["eval", "run"]) == 0


def test_a_few_damaged_checkpoints(tiny, capsys):
    rot_checkpoints(tiny, capsys, {"flip": 7, "cut": 3, "zeros": 2})


def test_a_few_damaged_small_files(tiny, capsys):
    rot_small_files(tiny, capsys, {"flip": 5, "cut": 2, "zeros": 1})


def test_a_few_damaged_datasets(tiny, capsys):
    rot_dataset(tiny, capsys, {"flip": 10, "cut": 5, "zeros": 3})


@pytest.mark.slow
def test_hundreds_of_damaged_checkpoints(tiny, capsys):
    rot_checkpoints(tiny, capsys, {"flip": 301, "cut": 56, "zeros": 28})


@pytest.mark.slow
def test_hundreds_of_damaged_small_files(tiny, capsys):
    print(dict(rot_small_files(tiny, capsys, {"flip": 100, "cut": 30, "zeros": 15})))


@pytest.mark.slow
def test_hundreds_of_damaged_datasets(tiny, capsys):
    rot_dataset(tiny, capsys, {"flip": 300, "cut": 60, "zeros": 30})
