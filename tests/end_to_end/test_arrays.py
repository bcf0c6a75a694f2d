"""flatout.train with data from Python: it trains, resumes bit-identically, and refuses what does not fit together."""

import numpy as np
import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.config.load import load_config
from flatout.errors import CheckpointError, ConfigError, DataError, UsageError
from flatout.front import training
from flatout.records import NoticeRecord, RunInfo, StepRecord
from tests.conftest import TINY

WORDS = ["model.vocab=32", "train.steps=12", "checkpoint.every=4", "checkpoint.keep=9"]


def config(*words: str):
    return load_config("shakespeare-char", [*TINY, *WORDS, *words])


def arrays(seed: int = 0):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        begin = int(rng.integers(0, 32))
        yield (begin + np.arange(int(rng.integers(1, 60)))) % 32


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def losses(records) -> dict[int, float]:
    return {record.step: record.loss for record in records if isinstance(record, StepRecord)}


@pytest.mark.parametrize("given", [lambda: arrays, lambda: list(arrays())], ids=["function", "dataset"])
def test_arrays_train_and_resume_bit_identically(tmp_path, given):
    whole = list(flatout.train(config("output.folder=whole"), data=given()))
    info = next(record for record in whole if isinstance(record, RunInfo))
    assert (info.vocab, info.windows, info.tokenizer) == (32, None, "ids")
    assert len(losses(whole)) == 12
    assert losses(whole)[12] < losses(whole)[1]
    assert any("held out" in record.message for record in whole if isinstance(record, NoticeRecord))
    stops = iter([False] * 6 + [True])
    list(flatout.train(config("output.folder=cut"), data=given(), stop=lambda: next(stops)))
    rest = list(flatout.train(resume="cut", data=given()))
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 7}
    one, other = (
        read_checkpoint(dict(list_checkpoints(tmp_path / name / "checkpoints"))[12]) for name in ("whole", "cut")
    )
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    assert one.state["stream"] == other.state["stream"]
    model = flatout.load_model("whole")
    assert model.tokenizer.decode([3, 31]) == "3 31"
    assert "".join(flatout.generate(model, "1 2 3", tokens=4))


def test_other_arrays_are_refused_when_a_run_resumes():
    list(flatout.train(config("output.folder=run"), data=arrays, stop=lambda: True))
    with pytest.raises(CheckpointError, match="the arrays given to train"):
        list(flatout.train(resume="run", data=lambda: arrays(5)))
    with pytest.raises(ConfigError, match="neither data"):
        list(flatout.train(resume="run"))


def test_a_generator_that_was_read_before_is_refused_when_a_run_resumes():
    held = list(arrays(7))
    list(flatout.train(config("output.folder=run"), data=arrays, val=held, stop=lambda: True))
    begun = arrays()
    next(begun)
    with pytest.raises(DataError, match="not the one that the run read there"):
        list(flatout.train(resume="run", data=begun, val=held))
    assert len(losses(flatout.train(resume="run", data=arrays(), val=held))) == 11


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["data.source=text.txt"], "data.source is set, and train was given data="),
        (["data.packing=best_fit"], "joins arrays as they come"),
        (["data.stride=4"], "joins arrays as they come"),
        (["train.steps=null", "train.epochs=2.0"], "train.epochs is set"),
        (["eval.every=1 epoch"], "where an epoch of data= ends"),
        (["checkpoint.every=2 epochs"], "where an epoch of data= ends"),
        (["optim.warmup=2 epochs"], "where an epoch of data= ends"),
        (["data.max_documents=5"], "limits are for text"),
        (["model.vocab=null"], "need a vocabulary"),
    ],
)
def test_what_is_for_text_from_files_is_refused(words: list[str], error: str):
    with pytest.raises(ConfigError, match=error):
        next(flatout.train(config(*words), data=arrays))


def test_validation_arrays_alone_are_refused():
    with pytest.raises(UsageError, match="val= without data="):
        next(flatout.train(config(), val=[np.arange(9)]))


def test_a_tokenizer_gives_text_and_its_ids_are_checked():
    texts = [b"the old fox over the dog. " * 5] * 40
    words = ["data.tokenizer=bytes", "model.vocab=null", "train.steps=2", "output.folder=run"]
    rows = [np.frombuffer(text, np.uint8) for text in texts]
    records = list(flatout.train(config(*words), data=rows, val=rows[:1]))
    assert next(record for record in records if isinstance(record, RunInfo)).vocab == 257
    with pytest.raises(DataError, match="token id 300"):
        list(flatout.train(config(*words, "output.folder=other"), data=[np.array([5, 300])] * 9, val=rows[:1]))


def test_a_start_that_fails_before_its_first_step_leaves_the_disk_as_it_was(tmp_path):
    def broken():
        yield np.arange(40) % 32
        raise OSError("the source is gone")

    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):  # not "already holds a run"
        with pytest.raises(OSError, match="the source is gone"):
            list(flatout.train(config("output.folder=run"), data=broken, val=[np.arange(3000) % 32]))
        assert sorted(tmp_path.rglob("*")) == before
    assert list(flatout.train(config("output.folder=run"), data=arrays))


def test_a_start_that_cannot_take_its_files_back_tells_what_went_wrong_first(monkeypatch):
    def broken():
        yield np.arange(40) % 32
        monkeypatch.setattr(training, "read_metrics", unreadable)
        raise ValueError("the source is gone")

    def unreadable(_path):
        raise OSError("the disk is gone")

    with pytest.raises(ValueError, match="the source is gone"):
        list(flatout.train(config("output.folder=run"), data=broken, val=[np.arange(3000) % 32]))
