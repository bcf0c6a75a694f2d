"""`flatout estimate` from outside: what it tells, that it leaves nothing behind, and that it is true."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout import api
from flatout.cli import dispatch
from flatout.errors import DataError, DeviceMemoryError, ResourceError, UsageError
from flatout.model.gpt import GPT
from flatout.records import CheckpointRecord
from flatout.tuning.estimate import estimate
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.set_up import set_up


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.tuning.estimate.FEWEST", 3)
    monkeypatch.setattr("flatout.tuning.estimate.MOST", 20)
    monkeypatch.setattr("flatout.tuning.measure.free_memory", lambda **_: None)  # takes longer than these runs do


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_it_tells_the_whole_run_and_leaves_nothing_behind(tiny, tmp_path: Path):
    torch.manual_seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1], torch.get_num_threads()
    loaded = tiny("model.dropout=0.1", "eval.every=10", "checkpoint.every=20", "speed.micro_batch=2")
    files = everything(tmp_path)
    result = estimate(loaded, price=3600.0, seconds=0.2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    assert torch.get_num_threads() == before[3]
    assert everything(tmp_path) == files
    assert result.parameters.value == sum(weight.numel() for weight in set_up(loaded).model.parameters())
    assert (result.steps.value, result.tokens.value) == (40, 40 * 64)
    assert (result.micro_batch, result.accumulation) == (2, 2)
    parts = {part.name: part for part in result.parts}
    assert [part.times for part in result.parts] == [1, 40, 4, 1, 4]
    step, size = result.step_seconds.value or 0.0, result.checkpoint_bytes.value or 0.0
    assert parts["training"].seconds.value == pytest.approx(40 * step)
    total = sum(part.seconds.value for part in result.parts)
    assert result.seconds.value == pytest.approx(total)
    assert result.cost.value == pytest.approx(total)
    assert result.tokens_per_second.value == pytest.approx(64 / step)
    assert result.checkpoint_bytes.how == "measured"
    assert size == pytest.approx(12 * (result.parameters.value or 0), rel=0.5)
    assert result.disk_bytes.value == 4 * size
    assert result.epochs.how == "counted"


def test_an_evaluation_of_documents_apart_is_measured_whole(tiny, tmp_path: Path):
    """The first token of each document has no label, which makes no less work."""
    rows = [json.dumps({"text": f"{number} is so"}) for number in range(200)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows), encoding="utf-8")
    words = ["data.source=many.jsonl", "data.tokenizer=bytes", "data.split=document", "data.documents=apart"]
    result = estimate(tiny(*words, "train.steps=3", "eval.tokens=64"), seconds=30.0)
    evaluation = next(part for part in result.parts if part.name == "evaluations")
    assert (evaluation.each.how, evaluation.each.note) == ("measured", "")


def test_a_checkpoint_in_the_estimate_has_the_size_of_the_real_one(tiny):
    loaded = tiny("train.steps=2")
    result = estimate(loaded, seconds=0.05)
    real = [record.bytes for record in api.train(loaded) if isinstance(record, CheckpointRecord)][-1]
    assert result.checkpoint_bytes.value == pytest.approx(real, rel=0.01)


def test_without_a_probe_no_model_is_built_and_no_time_is_told(tiny, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args, **_settings):
        raise AssertionError("a model was built")

    monkeypatch.setattr("flatout.engine.setup.build_model", refuse)
    result = estimate(tiny(), probe=False)
    assert result.seconds.value is None
    assert result.step_seconds.how == "unknown"
    assert result.parts == ()
    assert result.checkpoint_bytes.how == "estimated"
    assert result.peak_estimate.value
    assert result.tokens.value == 40 * 64


def test_a_step_that_takes_too_long_is_put_together_from_shorter_ones(tiny):
    result = estimate(tiny("train.batch_tokens=512", "speed.micro_batch=1"), seconds=0.05)
    assert "put together from steps of 2 and of" in result.step_seconds.note
    assert "out of 32 micro-batches" in result.step_seconds.note
    assert result.tokens_per_second.value == pytest.approx(512 / (result.step_seconds.value or 0.0))


def test_data_that_is_not_here_is_made_up_and_said(tiny):
    words = ("data.source=null", "data.folder=nowhere", "data.tokenizer=bytes", "eval.tokens=100000")
    result = estimate(tiny(*words), seconds=0.05)
    assert "random tokens" in result.data
    assert any("preparing it is not counted" in note for note in result.notes)
    assert result.epochs.value is None
    evaluation = next(part for part in result.parts if part.name == "evaluations")
    assert evaluation.each.how == "projected", "the made-up split is smaller than what is asked for"
    unknown = estimate(tiny(*words, "eval.tokens=null"), seconds=0.05)
    assert next(part for part in unknown.parts if part.name == "evaluations").seconds.value is None
    assert unknown.seconds.value is not None
    assert "evaluations" in unknown.seconds.note
    with pytest.raises(DataError, match="epochs"):
        estimate(tiny(*words, "train.epochs=1", "train.steps=null"), seconds=0.05)


def test_what_does_not_fit_is_shown_before_the_error(tiny, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.resolve.checks.check_fits", _no_memory)
    with pytest.raises(ResourceError, match="does not fit as it is: out of device memory"):
        dispatch(["estimate", *_words(tiny), "--seconds", "0.1"])
    assert "peak memory" in capsys.readouterr().out


def _no_memory(*_args, **_how):
    raise DeviceMemoryError("out of device memory: tried to allocate 4 GiB", "less")


def _words(tiny) -> list[str]:
    source = tiny().config.data.source
    return ["shakespeare-char", *TINY, f"data.source={source}", "train.steps=40"]


def test_the_verb_prints_a_sheet_or_one_json_line(tiny, capsys):
    assert dispatch(["estimate", *_words(tiny), "--seconds", "0.1", "--price", "2"]) == 0
    shown = capsys.readouterr()
    assert "time to finish" in shown.out
    assert "at 2 per hour" in shown.out
    assert shown.err == "", "nobody watches"
    assert dispatch(["estimate", *_words(tiny), "--seconds", "0.1", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    body = json.loads(lines[0])
    assert body["type"] == "estimate"
    assert body["seconds"]["how"] == "projected"
    assert next(part for part in body["parts"] if part["name"] == "start-up")["each"]["note"].startswith("imports")


@pytest.mark.parametrize("words", [["--price", "-1"], ["--price", "much"], ["--seconds", "0"], ["--fast"]])
def test_mistakes_answer_before_anything_is_built(words: list[str]):
    with pytest.raises(UsageError):
        dispatch(["estimate", *words])


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(flatout.__file__).parents[1])}
COMMAND = "import sys; from flatout.cli import dispatch; sys.exit(dispatch(['estimate', *sys.argv[1:]]))"


def test_a_signal_ends_it_and_leaves_nothing(tiny, tmp_path: Path):
    words = [*_words(tiny), "--seconds", "60"]
    files = everything(tmp_path)
    process = Forked(dispatch, ["estimate", *words], stderr=tmp_path.parent / "told", TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 600
    while not any(tmp_path.glob("flatout-estimate-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 143
    assert (tmp_path.parent / "told").read_text().strip().endswith("terminated; nothing was written")
    assert everything(tmp_path) == files


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_allocators(tiny):
    words = ["speed.device=cuda", "model.width=256", "model.context=256", "train.batch_tokens=16384"]
    result = estimate(tiny(*words), seconds=2.0)
    assert result.peak_measured.value == pytest.approx(result.peak_estimate.value, rel=0.5), (
        "small tensors, much besides"
    )


def test_the_sum_is_what_a_run_takes(tiny, monkeypatch: pytest.MonkeyPatch):
    """By a clock that only work moves: so much for each pass of the model and each file that reaches the disk."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def costs(owner: Any, name: str, seconds: Callable[[], float]) -> None:
        real = getattr(owner, name)

        def wrapped(*arguments: Any, **more: Any) -> Any:
            now[0] += seconds()
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, wrapped)

    costs(GPT, "forward", lambda: 0.03 if torch.is_grad_enabled() else 0.01)
    costs(GPT, "logits", lambda: 0.005)
    costs(os, "fsync", lambda: 0.0005)
    loaded = tiny("eval.every=10", "checkpoint.every=20", "eval.sample_every=20")
    result, began = estimate(loaded, seconds=1.0), now[0]
    list(api.train(loaded))
    assert result.seconds.value == pytest.approx(now[0] - began, rel=0.02)
