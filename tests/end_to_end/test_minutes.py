"""Runs whose length is told in minutes, from the command line: chosen, trained, ended on time, gone on with."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.cli import main
from flatout.config.load import LoadedConfig, load_config
from flatout.config.sections import keeps_best
from flatout.config.sizes import Shape
from flatout.errors import ConfigError
from flatout.launch import AGENT, Attempt, Launch
from flatout.observe.sinks import read_metrics
from flatout.records import EndRecord, EvalRecord, NoticeRecord, RunInfo, StepRecord
from flatout.tuning import minutes
from flatout.tuning.minutes import SizeSpeed

WSD = ["optim.schedule=wsd", "optim.decay_fraction=0.6", "optim.min_ratio=0.0", "speed.threads=1"]


def test_a_run_ends_on_time_and_goes_on_before_its_cool_down(
    tiny: Callable[..., LoadedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.minutes=0.06", "train.steps=200", "checkpoint.keep=1", *WSD)
    records = list(flatout.train(config))
    info, end = records[0], records[-1]
    assert isinstance(info, RunInfo)
    assert isinstance(end, EndRecord)
    steps = [record for record in records if isinstance(record, StepRecord)]
    rates = [record.learning_rate for record in steps]
    assert rates[-1] < max(rates), "it cools down; how far, a second on a busy machine does not tell"
    assert end.step == steps[-1].step
    assert isinstance(records[-2], EvalRecord) or end.val_loss is not None
    kept = dict(list_checkpoints(Path(info.folder) / "checkpoints"))
    state = read_checkpoint(kept[end.step]).state["deadline"]
    assert state["last_step"] == end.step
    assert state["cooldown_step"] in kept, "the start of the cool-down is kept"

    again = list(flatout.train(config, resume=info.folder))
    assert not any(isinstance(record, StepRecord) for record in again), "it is finished"

    point, words = flatout.more_minutes(info.folder, 0.01)
    assert point == kept[state["cooldown_step"]]
    before = read_checkpoint(point).state["deadline"]["spent"]
    assert float(words[0].removeprefix("train.minutes=")) == pytest.approx(before / 60 + 0.01)
    more = list(flatout.train(flatout.stored_config(point, words), resume=point))
    told = next(record.message for record in more if "train.minutes was" in getattr(record, "message", ""))
    assert len(told.rpartition(" ")[2].replace(".", "").lstrip("0")) <= 3, told
    went_on = [record for record in more if isinstance(record, StepRecord)]
    assert went_on[0].step == state["cooldown_step"] + 1
    assert went_on[-1].learning_rate < went_on[0].learning_rate

    # Several processes get the new length from the one that starts them, and keep it when they are started again.
    commands: list[Any] = []
    agent = SimpleNamespace(run=lambda: 0)
    monkeypatch.setattr("flatout.parallel.agent.Agent", lambda command, *_, **__: commands.append(command) or agent)
    asked = ["--resume", info.folder, "--minutes", "0.01", "--gpus", "2"]
    assert main(["train", *asked]) == 0
    (command,) = commands
    point, words = flatout.more_minutes(info.folder, 0.01)
    assert command == ["train", *asked, "--resume", str(point), *words]
    attempt = Attempt(folder=info.folder, accepted=True)
    monkeypatch.setattr("flatout.front.verbs_training.launch", lambda: Launch(0, 1, 0, 1, attempt=attempt))
    monkeypatch.setenv(AGENT, attempt.as_json())
    trained: list[Any] = []
    monkeypatch.setattr("flatout.train", lambda config, **_: trained.append(config.config.train) or iter(()))
    assert main([word if word != str(point) else "gone" for word in command]) == 0
    (train,) = trained
    assert [f"train.minutes={train.minutes!r}", f"train.steps={train.steps}"] == words


def test_an_interrupted_run_has_the_time_that_is_left(tiny: Callable[..., LoadedConfig]) -> None:
    config, asked = tiny("train.minutes=0.04", "train.steps=200", *WSD), iter(range(10**6))
    records = list(flatout.train(config, stop=lambda: next(asked) >= 5))
    info = records[0]
    assert isinstance(info, RunInfo)
    (_, path), *_ = list_checkpoints(Path(info.folder) / "checkpoints")[::-1]
    spent = read_checkpoint(path).state["deadline"]["spent"]
    assert 0 < spent < 2.4
    end = list(flatout.train(config, resume="auto"))[-1]
    assert isinstance(end, EndRecord)
    assert end.reason == "finished"


def test_minutes_choose_a_size_and_say_why(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tried: list[Shape] = []

    def measured(_loaded: object, shape: Shape, *_: object) -> SizeSpeed:
        tried.append(shape)
        return SizeSpeed(2e-5 * shape.dense(64) / 1e5, 0.002)

    monkeypatch.setattr(minutes, "measured_speed", measured)
    words = [f"data.source={corpus}", "data.tokenizer=char", "speed.threads=1"]
    assert main(["train", "--minutes", "0.012", *words, "output.folder=out"]) == 0
    told, meanwhile = capsys.readouterr()
    assert [f"note: measuring how fast size {shape.name} trains here" for shape in tried] == meanwhile.splitlines()[
        -len(tried) :
    ]
    assert "0.012 minutes on cpu: size " in told
    assert "tokens/s measured" in told
    assert "run: 0.012 minutes, about " in told
    way = f"`flatout train modern --minutes 0.012 data.source={corpus}` trains one that can be exported"
    assert f"note: only Flatout loads this model, not transformers, vLLM or llama.cpp; {way}" in told.splitlines()
    assert main(["export", "out", "exported"]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: transformers has no such model with model.logit_cap=15.0, model.first_mix=true, ")
    assert hint == f"hint: {way}"
    assert 1 <= len(tried) <= 3
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    stored = flatout.stored_config(tmp_path / "out").config
    assert stored.train.minutes == 0.012
    assert stored.train.steps is not None
    assert stored.eval.every, "a text of six epochs is learned by heart at some point"
    assert keeps_best(stored.eval, stored.checkpoint)
    assert stored.model.bigram_rows > 0, "tables of a few characters are small"
    assert rows[-1]["type"] == "end"
    asked = len(tried)
    assert main(["train", "--minutes", "0.012", *words, "output.folder=out", "--resume", "auto"]) == 0
    assert len(tried) == asked, "a resume measures nothing"
    assert "or resume it with --minutes N" in capsys.readouterr().out


def test_the_size_of_a_preset_is_settled_with_its_data(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        f"data.source={corpus}",
        "data.tokenizer=char",
        "eval.tokens=512",
        "eval.sample_tokens=0",
        "speed.threads=1",
    ]
    loaded = load_config(
        "record", [*words, "train.epochs=4", "model.context=64", "train.batch_tokens=4096"], size="4x32"
    )
    records = list(flatout.train(loaded, stop=lambda: True))
    info = records[0]
    assert isinstance(info, RunInfo)
    assert info.config["optim"]["head_decay"] > 0
    told = [record.message for record in records if isinstance(record, NoticeRecord)]
    assert any("the data is read 4.0 times" in line for line in told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.schedule=cosine"], "train.minutes needs a rate that stays up"),
        (["train.tokens=5"], "give exactly one of steps, epochs, tokens, minutes"),
    ],
)
def test_what_cannot_end_on_time_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("record", ["train.minutes=1", "data.source=shakespeare", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps=100"], "--minutes and train.steps both say how long the run is"),
        (["--resume", "runs/x", "train.minutes=2"], "--minutes and train.minutes both say how long the run is"),
        (["--resume", "runs/x", "record"], "--resume RUN with --minutes takes the config of the run"),
        (["--size", ""], "there is no size ''"),
    ],
)
def test_commands_that_contradict_themselves_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--minutes", "1", "data.source=shakespeare", *words]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert message in error
    assert hint.startswith("hint: ")
    assert not list(tmp_path.iterdir())
