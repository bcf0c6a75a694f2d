"""Training on whole documents fitted into windows: it learns, and an interrupted run goes on bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import read_checkpoint
from flatout.records import EndRecord, NoticeRecord, RunInfo, StepRecord

STEPS = 60


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Documents of one word up to some twenty windows' worth of tokens."""
    words = ["the old fox", "the red cow", "over the moon", "a sly dog sleeps"]
    texts = [" and ".join(words[(number + k) % 4] for k in range(1 + number % 7 + 20 * (number % 41 == 0)))
             for number in range(400)]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def stop_after(step: int) -> Callable[[], bool]:
    asked = iter(range(1, step + 1))
    return lambda: next(asked, step) >= step


def final(folder: str) -> dict[str, torch.Tensor]:
    checkpoint = read_checkpoint(Path(folder) / "checkpoints" / f"step-{STEPS:08d}")
    return {**checkpoint.model, **{f"optimizer {name}": value for name, value in checkpoint.optimizer.items()}}


@pytest.mark.parametrize("loader", ["host", "device"])
def test_a_packed_run_learns_and_resumes_bit_for_bit(tiny, rows: Path, loader: str):
    words = [f"data.source={rows}", "data.tokenizer=bytes", "data.split=document", "data.packing=best_fit"]
    words += [f"train.steps={STEPS}", f"speed.loader={loader}", "model.dropout=0.1", "optim.learning_rate=0.01"]
    records = list(flatout.train(tiny(*words, "output.folder=whole")))
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]
    assert not any(isinstance(record, NoticeRecord) and "did not change" in record.message for record in records)

    config = tiny(*words, "output.folder=cut")
    *_, end = flatout.train(config, stop=stop_after(23))
    assert isinstance(end, EndRecord)
    assert (end.reason, end.step) == ("interrupted", 23)
    *_, end = flatout.train(config, resume="auto")
    assert end.reason == "finished"
    mine, reference = final("cut"), final("whole")
    assert mine.keys() == reference.keys()
    assert all(torch.equal(mine[name], reference[name]) for name in mine)


def test_packed_and_joined_windows_are_counted_each_in_its_way(tiny, rows: Path):
    words = [f"data.source={rows}", "data.tokenizer=bytes", "data.split=document", "train.steps=1"]
    counts = {}
    for packing in ("concat", "best_fit"):
        info = next(flatout.train(tiny(*words, f"data.packing={packing}", f"output.folder={packing}")))
        assert isinstance(info, RunInfo)
        counts[packing] = info.windows
        assert info.train_tokens is not None
        pairs = info.train_tokens - 1
    # Joined windows waste nothing but a tail; packed ones have some padding, and lose a pair between documents.
    assert counts["concat"] == pairs // 16
    assert counts["concat"] - 400 // 16 <= counts["best_fit"] < 1.1 * counts["concat"]
