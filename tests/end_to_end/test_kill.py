"""SIGKILL at any moment costs at most the steps since the last save that was complete, and never a checkpoint.

That is one checkpoint interval. Beside training a save may take until the next one is due: then it is two.
"""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from flatout import cli
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.observe.sinks import read_metrics
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.end_to_end.slow_trainer import train_slowly

EVERY = 4
PHASE, ERRORS = Path("phase"), Path("errors")


def words(corpus: Path, folder: str, steps: int) -> list[str]:
    extra = ["model.dropout=0.1", f"train.steps={steps}", f"checkpoint.every={EVERY}", "eval.sample_tokens=0"]
    extra += [f"eval.every={2 * EVERY}", "eval.tokens=64"]
    return [
        *(word for word in TINY if not word.startswith(("checkpoint.every", "eval."))),
        *extra, f"data.source={corpus}", f"output.folder={folder}",
    ]  # fmt: skip


def start(arguments: list[str], delay: float, *, beside: bool) -> Forked:
    return Forked(train_slowly, delay, PHASE, beside, [*arguments, "--resume", "auto"], stderr=ERRORS)


def last_step(folder: str) -> int:
    path = Path(folder) / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path) if row["type"] == "step"), default=0) if path.exists() else 0


def last_run(folder: str) -> int:
    """How many processes have begun to train here."""
    path = Path(folder) / "metrics.jsonl"
    return sum(row["type"] == "run" for row in read_metrics(path)) if path.exists() else 0


def logged(run: str) -> list[tuple]:
    """Every step and evaluation, with its loss, and every checkpoint."""
    rows = read_metrics(Path(run) / "metrics.jsonl")
    kinds = ("step", "eval", "checkpoint")
    return [(row["type"], row["step"], row.get("loss"), row.get("best")) for row in rows if row["type"] in kinds]


def checkpoints_in(run: str) -> list[tuple]:
    return [row for row in logged(run) if row[0] == "checkpoint"]


def campaign(corpus: Path, aims: list[str], steps: int, delay: float, seed: int, *, beside: bool) -> Counter[str]:
    """Kills a run once for each aim, checks every resume, and returns how many kills hit which phase."""
    choose = random.Random(seed)
    most = 2 * EVERY if beside else EVERY
    folder, checkpoints = "killed", Path("killed/checkpoints")
    reached, hits = 0, Counter[str]()
    for kill, aim in enumerate(aims):
        PHASE.write_text("training")
        process = start(words(corpus, folder, steps), delay if aim != "training" else 0.0, beside=beside)
        before = last_run(folder)
        if aim == "training":
            alive = process.wait_until(lambda before=before: last_run(folder) > before, pause=0.002)
            time.sleep(choose.uniform(0, 0.3))
        else:
            alive = process.wait_until(lambda aim=aim: PHASE.read_text() == aim, pause=0.002)
            time.sleep(choose.uniform(0, 4 * delay if aim == "saving" else 2 * delay))
        assert alive, f"the run ended by itself: {ERRORS.read_text()}"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert "error" not in ERRORS.read_text(), ERRORS.read_text()
        hits[PHASE.read_text()] += 1
        rows = read_metrics(Path(folder) / "metrics.jsonl")
        resumed_at = [row["start_step"] for row in rows if row["type"] == "run"][-1]
        assert reached - resumed_at <= most, f"kill {kill}: was at {reached}, resumed at {resumed_at}"
        reached = last_step(folder)
        for _, path in list_checkpoints(checkpoints):
            read_checkpoint(path)  # every checkpoint with a final name is whole
    process = start(words(corpus, folder, steps), 0.0, beside=beside)
    assert process.wait() == 0, ERRORS.read_text()
    assert cli.main(["train", *words(corpus, "reference", steps), "--json"]) == 0
    final = f"checkpoints/step-{steps:08d}"
    mine, theirs = read_checkpoint(Path(folder) / final), read_checkpoint(Path("reference") / final)
    for name in ("model", "optimizer", "run"):
        ours, expected = getattr(mine, name), getattr(theirs, name)
        assert all(torch.equal(ours[key], expected[key]) for key in expected), name
    mine, theirs = logged(folder), logged("reference")
    if beside:  # checkpoints are told of when they are written
        mine, theirs = ([row for row in rows if row[0] != "checkpoint"] for rows in (mine, theirs))
        assert sorted(checkpoints_in(folder)) == sorted(checkpoints_in("reference"))
    assert mine == theirs, "the log has every step, evaluation and checkpoint once"
    assert not list(Path(folder).glob("**/*.tmp-*")), "what kills left behind is swept away"
    return hits


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
def test_a_few_kills(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside):
    monkeypatch.chdir(tmp_path)
    hits = campaign(corpus, ["saving"], steps=40, delay=0.05, seed=1, beside=beside)
    assert hits["saving"] + hits["judging"] == 1, "on a busy machine the kill may come after the save"


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
def test_two_hundred_kills(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside):
    monkeypatch.chdir(tmp_path)
    aims = ["saving", "saving", "judging", "training"] * 50
    hits = campaign(corpus, aims, steps=8000, delay=0.05, seed=1, beside=beside)
    print(f"200 kills: {hits['saving']} inside a save, {hits['judging']} between save and verdict")
    assert hits["saving"] >= 60
    assert hits["judging"] >= 20
