"""`flatout estimate` from outside: what it tells, that it leaves nothing behind, and that it is true."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout import api
from flatout.config.load import load_config
from flatout.engine.setup import setup_run
from flatout.errors import DataError, ResourceError, UsageError
from flatout.records import CheckpointRecord, StepRecord
from flatout.tuning import estimate_probe
from flatout.tuning.estimate import estimate
from flatout.verbs import estimate as verb
from tests.conftest import TINY
from tests.end_to_end.forked import Forked


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_probe, "FEWEST", 3)
    monkeypatch.setattr(estimate_probe, "MOST", 20)
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
    assert result.parameters.value == sum(weight.numel() for weight in setup_run(loaded).model.parameters())
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
    assert result.kilowatt_hours.value is None, "no card here tells its power"
    own = [cell for cell in result.table if cell.own]
    assert [(cell.micro_batch, cell.context) for cell in own] == [(2, 16)]
    assert own[0].tokens_per_second == result.tokens_per_second.value
    assert own[0].bytes == pytest.approx(result.peak_measured.value, rel=0.01)


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
    assert result.step_seconds.how == "not told"
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


def test_what_does_not_fit_is_shown_with_what_would(tiny, capsys, monkeypatch: pytest.MonkeyPatch):
    from flatout.engine import setup

    monkeypatch.setattr(setup, "check_fits", _no_memory)
    with pytest.raises(ResourceError, match="does not fit as it is: out of device memory"):
        verb.estimate([*_words(tiny), "--seconds", "0.1"])
    assert "micro-batch 16" in capsys.readouterr().out


def _no_memory(*_args):
    raise ResourceError("out of device memory: tried to allocate 4 GiB", "less")


def _words(tiny) -> list[str]:
    source = tiny().config.data.source
    return ["shakespeare-char", *TINY, f"data.source={source}", "train.steps=40"]


def test_the_verb_prints_a_sheet_or_one_json_line(tiny, capsys):
    assert verb.estimate([*_words(tiny), "--seconds", "0.1", "--price", "2"]) == 0
    shown = capsys.readouterr()
    assert "time to finish" in shown.out
    assert "at 2 per hour" in shown.out
    assert shown.err == "", "nobody watches"
    assert verb.estimate([*_words(tiny), "--seconds", "0.1", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    body = json.loads(lines[0])
    assert body["type"] == "estimate"
    assert body["seconds"]["how"] == "projected"
    assert next(part for part in body["parts"] if part["name"] == "start-up")["each"]["note"].startswith("imports")


@pytest.mark.parametrize("words", [["--price", "-1"], ["--price", "much"], ["--seconds", "0"], ["--fast"]])
def test_mistakes_answer_before_anything_is_built(words: list[str]):
    with pytest.raises(UsageError):
        verb.estimate(words)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(flatout.__file__).parents[1])}
COMMAND = "import sys; from flatout.verbs.estimate import estimate; sys.exit(estimate(sys.argv[1:]))"


def test_a_signal_ends_it_and_leaves_nothing(tiny, tmp_path: Path):
    words = [*_words(tiny), "--seconds", "60"]
    files = everything(tmp_path)
    process = Forked(verb.estimate, words, stderr=tmp_path.parent / "told", TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("flatout-estimate-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert (tmp_path.parent / "told").read_text().strip().endswith("terminated; nothing was written")
    assert everything(tmp_path) == files


@pytest.mark.gpu
def test_on_a_gpu_power_is_told_and_the_peak_is_the_allocators(tiny):
    words = ["speed.device=cuda", "model.width=256", "model.context=256", "train.batch_tokens=16384"]
    result = estimate(tiny(*words), seconds=2.0)
    assert result.watts.how == "measured"
    assert 20 < (result.watts.value or 0.0) < 2000
    assert result.kilowatt_hours.how == "projected"
    assert result.peak_measured.value == pytest.approx(result.peak_estimate.value, rel=0.5), (
        "small tensors, much besides"
    )


@pytest.mark.slow
def test_time_and_memory_are_within_a_tenth_of_the_truth(tmp_path: Path):
    """The shakespeare preset, 150 steps, by the clock on the wall; others may be at work here, hence three tries."""
    words = [
        "train.steps=150",
        "eval.every=50",
        "checkpoint.every=75",
        f"data.folder={tmp_path / 'data'}",
        "output.plots=false",
    ]

    def run(*command: str) -> str:
        process = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, text=True
        )
        return process.stdout

    run("-m", "flatout.cli", "prepare", *words)
    rows = []
    for attempt in range(3):
        body = json.loads(run("-c", COMMAND, *words, "--json"))
        began = time.monotonic()
        records = run("-m", "flatout.cli", "train", *words, f"output.folder=run-{attempt}", "--json")
        truth = time.monotonic() - began
        peak = max(json.loads(line).get("memory_bytes") or 0 for line in records.splitlines() if '"step"' in line)
        seconds, memory = body["seconds"]["value"], body["peak_measured"]["value"]
        rows.append((seconds / truth, memory / peak))
        print(f"time {seconds:.1f} of {truth:.1f} s, memory {memory / 2**20:.0f} of {peak / 2**20:.0f} MiB")
        if all(abs(share - 1) <= 0.1 for share in rows[-1]):
            return
    pytest.fail(f"estimate over truth, time and memory: {rows}")


@pytest.mark.slow
def test_the_sum_is_true_by_the_clock_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same by processor time, which the work of others hardly moves; waiting for the disk is not in it."""
    monkeypatch.undo()
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    words = ["train.steps=150", "eval.every=50", "checkpoint.every=75", "output.plots=false", "speed.workers=0"]
    words += [f"data.folder={tmp_path / 'data'}"]
    api.prepare(load_config("shakespeare-char", words))
    rows = []
    for attempt in range(3):  # a neighbour on the same core takes its share all the same
        loaded = load_config("shakespeare-char", [*words, f"output.folder={tmp_path / f'run-{attempt}'}"])
        result = estimate(loaded, seconds=8.0)
        began, peak = time.process_time(), 0
        for record in api.train(loaded):
            peak = max(peak, record.memory_bytes or 0) if isinstance(record, StepRecord) else peak
        truth = time.process_time() - began
        rows.append(((result.seconds.value or 0.0) / truth, (result.peak_measured.value or 0.0) / peak))
        print(f"time {result.seconds.value:.1f} of {truth:.1f} s of the processor, memory {rows[-1][1]:.3f}")
        if all(abs(share - 1) <= 0.1 for share in rows[-1]):
            return
    pytest.fail(f"estimate over truth, time and memory: {rows}")
