"""`optim.ema`: training does not notice it; evaluation, samples, checkpoints and whoever loads them get the average."""

from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.errors import ConfigError
from flatout.records import EvalRecord, StepRecord
from tests.set_up import set_up

WORDS = ["train.steps=8", "eval.every=4", "checkpoint.every=4", "checkpoint.keep=9", "eval.sample_tokens=0"]


def losses(records, kind=StepRecord) -> dict[int, float]:
    return {record.step: record.loss for record in records if isinstance(record, kind)}


def saved(folder: str, step: int):
    return read_checkpoint(dict(list_checkpoints(Path(folder) / "checkpoints"))[step])


def test_an_averaged_run_learns_as_before_and_is_judged_by_its_average(tiny):
    plain = list(flatout.train(tiny(*WORDS, "output.folder=plain")))
    words = [*WORDS, "optim.ema=0.6", "output.folder=run"]
    records = list(flatout.train(tiny(*words)))
    assert losses(records) == losses(plain)
    mine, theirs = losses(records, EvalRecord), losses(plain, EvalRecord)
    assert all(mine[step] != theirs[step] for step in (4, 8))
    last, before = saved("run", 8), saved("plain", 8)
    for name, weight in before.model.items():
        assert torch.equal(last.optimizer[f"{name}.trained"], weight)
        assert not torch.equal(last.model[name], weight)
    found = flatout.evaluate("run", tokens=512)
    assert found.loss == pytest.approx(mine[8], abs=1e-6)
    # the optimizer's state is that of the run without an average
    assert {name for name in last.optimizer if not name.endswith(".trained")} == set(before.optimizer)


def test_an_averaged_run_resumes_bit_identically_and_with_its_weights_alone(tiny):
    words = [*WORDS, "optim.ema=0.6"]
    whole = list(flatout.train(tiny(*words, "output.folder=whole")))
    for folder, more in (("cut", []), ("off", ["optim.ema=0"])):
        stops = iter([False] * 3 + [True])
        list(flatout.train(tiny(*words, f"output.folder={folder}"), stop=lambda stops=stops: next(stops)))
        rest = list(flatout.train(tiny(*words, *more, f"output.folder={folder}"), resume="auto"))
        assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 4}
    one, other, off = (saved(folder, 8) for folder in ("whole", "cut", "off"))
    for name in one.model:
        assert torch.equal(one.model[name], other.model[name])
        assert torch.equal(one.optimizer[f"{name}.trained"], off.model[name])
    assert not any(name.endswith(".trained") for name in off.optimizer)
    # a run that had none begins one with its weights
    later = set_up(tiny(*words, "output.folder=later"))
    assert later.step.average is not None
    assert later.plan.memory.optimizer == pytest.approx(set_up(tiny(*WORDS)).plan.memory.optimizer * 12 / 8, rel=0.01)


def test_adapters_have_no_average(tiny):
    with pytest.raises(ConfigError, match=r"optim.ema averages whole weights, and lora.rank trains adapters"):
        tiny("optim.ema=0.9", "lora.rank=4", "chat.source=rows.json", "model.init_from=base")
