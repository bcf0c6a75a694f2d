"""A kind of data that no command has heard of: its class, its name and its row, and every command takes it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatout
from flatout.cli import main
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import RunConfig
from flatout.data.batch import BatchLoader, DataFacts, Delivery, Raw, Schedule, Span, TrainingData, as_signed
from flatout.data.shards import HeldTokens, Tokens
from flatout.data.tokenizer import IdTokenizer
from flatout.errors import DataError, UsageError
from flatout.finding import Finding
from flatout.records import EvalRecord, StepRecord, TuneResult
from flatout.resolve import opening
from flatout.resolve.length import asked_schedule
from flatout.resolve.opening import DataSource, Kind, Opened
from tests.conftest import TINY

WORDS = [*TINY, "data.source=a.numbers", "train.steps=12", "eval.every=6"]
VOCAB, WINDOWS = 32, 500


class Numbers(TrainingData):
    """Numbers that count up, each window from another one."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.tokenizer = schedule, IdTokenizer(VOCAB)
        self.val, self.train = (
            HeldTokens((np.arange(count) % VOCAB).astype(np.uint16), "a.numbers", split=split)
            for count, split in ((700, "val"), (WINDOWS * schedule.longest, "train"))
        )
        if not Path("a.numbers").exists():
            raise DataError("there is no a.numbers", "write it again")
        fingerprint = Path("a.numbers").read_text(encoding="utf-8")
        counted = {"train_tokens": self.train.tokens, "windows": WINDOWS}
        self.facts = DataFacts(fingerprint=fingerprint, place="a.numbers", **counted)

    def split(self, name: str) -> Tokens:
        return self.train if name == "train" else self.val

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        return NumbersLoader(delivery, span, workers=delivery.workers)

    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        return ()


class NumbersLoader(BatchLoader):
    def _made(self, step: int) -> Raw:
        reading = self.reading(step)
        starts = 7 * np.arange(reading.start, reading.start + reading.windows)
        ids = (starts[:, None] + np.arange(self.schedule.longest + 1)) % VOCAB
        return Raw(step, reading, as_signed(ids.astype(np.uint16)))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The new kind. Says of every time that it was opened whether that was for a run that has ended."""
    found: list[bool] = []

    def opens(source: DataSource, settings: LoadedConfig) -> Opened:
        found.append(source.again)
        return Opened(settings, Numbers(asked_schedule(settings.config, WINDOWS)))

    name: Any = RunConfig.data_kind.fget  # pyright: ignore[reportAttributeAccessIssue]
    named = property(lambda config: "numbers" if str(config.data.source).endswith(".numbers") else name(config))
    monkeypatch.setattr(RunConfig, "data_kind", named)
    monkeypatch.setitem(opening.KINDS, "numbers", Kind(opens))
    monkeypatch.chdir(tmp_path)
    Path("a.numbers").write_text("seven", encoding="utf-8")
    return found


def config(*words: str) -> LoadedConfig:
    return load_config("shakespeare-char", [*WORDS, *words])


def losses(records: Iterable[object]) -> dict[int, float]:
    return {record.step: record.loss for record in records if isinstance(record, StepRecord)}


def test_it_is_trained_resumed_and_evaluated(opened: list[bool]):
    whole = list(flatout.train(config("output.folder=whole")))
    stops = iter([False] * 6 + [True])
    list(flatout.train(config("output.folder=cut"), stop=lambda: next(stops)))
    rest = losses(flatout.train(resume="cut"))
    assert rest == {step: loss for step, loss in losses(whole).items() if step > 7}
    last = [record for record in whole if isinstance(record, EvalRecord)][-1]
    assert not any(opened)
    found = flatout.evaluate("whole", tokens=512)
    assert (found.loss, found.tokens) == (pytest.approx(last.loss, rel=1e-5), last.tokens)
    assert flatout.evaluate("whole", split="train").tokens == WINDOWS * 16 - 1
    assert opened[-2:] == [True, True]
    assert "".join(flatout.generate("whole", "1 2 3", tokens=4))
    Path("a.numbers").write_text("eight", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.numbers is no longer what whole"):
        flatout.evaluate("whole")


def test_it_is_measured_as_it_is(opened: list[bool], capsys: pytest.CaptureFixture[str]):
    told: list[str] = []
    (row,) = flatout.bench(config(), steps=3, parity_steps=3, rungs=["baseline"], notice=told.append)
    assert row.status == "green"
    assert "data: numbers data, as it is" in told
    estimated = flatout.estimate(config(), seconds=0.2)
    assert (estimated.data, estimated.epochs.how) == ("numbers data, as it is", "counted")
    assert flatout.tune_lr(config(), steps=30).data == "numbers data, as it is"
    *_, chosen = flatout.tune(config("speed.micro_batch=2", "speed.checkpointing=none"), seconds=1)
    assert isinstance(chosen, TuneResult)
    assert chosen.data == "numbers data, as it is"
    assert main(["profile", "shakespeare-char", *WORDS, "--steps", "1", "--out", "profiled"]) == 0
    *_, ablated = flatout.ablate(config("train.steps=2"), fields=["model.qk_norm"], seeds=1)
    assert not ablated.missing
    assert len(opened) >= 8
    assert sorted(path.name for path in Path().iterdir()) == ["a.numbers", "profiled"], "nothing was prepared"


def test_the_doctor_opens_it(opened: list[bool]):
    found = {(one.area, one.name): one.found for one in flatout.doctor(config(), quick=True)}
    assert found["data", "source"] == "a.numbers: 8,000 tokens to train on, 700 to validate, tokenizer ids with 32 ids"
    assert "500 windows of 16 tokens" in found["data", "windows"]
    Path("a.numbers").unlink()
    found = [one for one in flatout.doctor(config(), quick=True) if one.status == "bad"]
    assert [(one.area, one.found) for one in found] == [("data", "there is no a.numbers")]


def test_what_is_for_text_alone_refuses_it(opened: list[bool], capsys: pytest.CaptureFixture[str]):
    assert main(["prepare", "shakespeare-char", *WORDS]) == 2
    error, hint = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: `flatout prepare` is for text")
    assert error.endswith("of the kind numbers")
    assert hint.startswith("hint: train on it as it is")
    with pytest.raises(UsageError, match="is for text"):
        flatout.prepare(config())
    assert not opened
