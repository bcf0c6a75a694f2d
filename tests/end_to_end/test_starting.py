"""Pretraining that starts from a run of ours, with a longer context too."""

import shutil
from pathlib import Path

import pytest
import torch

import flatout
from flatout import api
from flatout.config.load import load_config
from flatout.errors import UserError
from flatout.finding import Finding
from flatout.records import NoticeRecord, StepRecord

TINY = [
    "model.layers=2", "model.width=16", "model.heads=2", "train.batch_tokens=128",
    "optim.optimizer=adamw", "optim.embedding_rate=null", "optim.head_rate=null",  # one rate, that STILL stops
    "train.steps=3", "optim.warmup=1", "eval.every=0", "eval.sample_tokens=0",
    "speed.device=cpu", "data.source=text.txt", "data.tokenizer=bytes",
]  # fmt: skip
STILL = "optim.learning_rate=1e-12"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 32 tokens in runs/base, that has moved away from its first weights."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(400)))
    go("model.pattern=EA", "model.context=32", "output.folder=runs/base", "optim.learning_rate=1e-2")


def go(*words: str, resume: str | None = None) -> list:
    return list(flatout.train(load_config(None, [*TINY, *words]), resume=resume))


def logits(run: str) -> torch.Tensor:
    model = api.load_model(run, device="cpu").model
    with torch.no_grad():
        return model.logits(torch.arange(20)[None])


@pytest.mark.usefixtures("base")
def test_a_run_goes_on_from_another_ones_weights_at_a_longer_context():
    words = ["model.pattern=EA", "model.init_from=runs/base", "output.folder=runs/long"]
    records = go(*words, "model.context=128", "checkpoint.every=1", STILL)
    torch.testing.assert_close(logits("runs/long"), logits("runs/base"))
    (told,) = [r.message for r in records if isinstance(r, NoticeRecord) and r.message.startswith("starts from")]
    assert "contexts of 32 tokens; here they have 128. Rotary" in told
    assert api.stored_config(Path("runs/long")).config.model.context == 128
    shutil.rmtree("runs/base")  # it has been copied, and resuming reads nothing of it
    more = go(*words, "model.context=128", "checkpoint.every=1", STILL, "train.steps=4", resume="auto")
    assert [r.step for r in more if isinstance(r, StepRecord)] == [4]


@pytest.mark.usefixtures("base")
def test_other_rotary_frequencies_are_the_users_word():
    slow = ["model.rope_scaling=linear", "model.rope_factor=4"]
    records = go(
        "model.pattern=EA", "model.init_from=runs/base", "model.context=64", *slow, STILL, "output.folder=runs/s"
    )
    assert not any("Rotary" in r.message for r in records if isinstance(r, NoticeRecord))
    assert (logits("runs/s") - logits("runs/base")).abs().max() > 1e-6


REFUSED = {
    "another pattern": (["model.context=32"], "runs/base has model.pattern EA, and here it is A", "model.pattern=EA"),
    "another width": (["model.pattern=EA", "model.width=32"], "model.width 16, and here it is 32", "model.width=16"),
    "ids": (["model.pattern=EA", "model.vocab=300"], "and here there are 300", "model.vocab="),
    "no such folder": (["model.init_from=nowhere"], "there is no folder", "name a folder"),
    "tokenizer": (
        ["model.pattern=EA", "data.tokenizer=char", "data.folder=other"], "another tokenizer", "data.tokenizer=bytes"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_take_the_weights_is_refused_before_anything_is_written(case: str):
    words, message, hint = REFUSED[case]
    with pytest.raises(UserError, match=r".") as refused:
        go("model.init_from=runs/base", "model.context=32", "output.folder=runs/no", *words)
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert not list(Path().glob("runs/no/checkpoints/*"))


@pytest.mark.usefixtures("base")
def test_the_doctor_looks_at_the_start():
    def starts(one: Finding) -> bool:
        return one.name == "start" or one.status == "bad"

    def found(*words: str) -> list[tuple[str, str]]:
        config = load_config(None, [*TINY, "model.init_from=runs/base", *words])
        return [(one.status, one.found) for one in api.doctor(config, quick=True) if starts(one)]

    ((status, words),) = found("model.pattern=EA", "model.context=128")
    assert status == "ok"
    assert words.startswith("starts from runs/base/checkpoints/step-")
    ((status, words),) = found()
    assert status == "bad"
    assert "model.pattern" in words
    assert found("model.init_from=null") == []
