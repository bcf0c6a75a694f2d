"""Runs whose checkpoints are written beside training: the same run, and nothing left behind."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints import checkpoint
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint, read_verdict
from flatout.config.load import load_config
from flatout.engine import saver
from flatout.engine.saving import Boundary
from flatout.errors import DivergedError, ResourceError
from flatout.observe.sinks import MetricsFile, read_metrics
from flatout.records import CheckpointRecord, EndRecord, Record, StepRecord
from tests.end_to_end.test_nothing_lost import assert_same_end, poison
from tests.end_to_end.test_resume import stop_after

BOUNDARIES = ["train.steps=12", "checkpoint.every=3", "eval.every=4", "eval.sample_every=6", "checkpoint.keep=2",
              "eval.patience=9", "model.dropout=0.1"]  # fmt: skip


def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes checkpoints beside training from now on, however small they are."""
    monkeypatch.setattr(saver, "SMALL", 0)


def at_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a save never land by itself: it is concluded by the next one, or by the end."""
    monkeypatch.setattr(Boundary, "save_is_done", False)


def of(records: list[Record], kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def told(run: str, *kinds: str) -> list[tuple]:
    rows = [row for row in read_metrics(Path(run) / "metrics.jsonl") if row["type"] in kinds]
    fields = ("type", "step", "loss", "best", "reason", "text", "grad_norm")
    return sorted(tuple(str(row.get(field)) for field in fields) for row in rows)


def check_same_run(mine: str, theirs: str, step: int = 12) -> None:
    kinds = ("step", "eval", "sample", "checkpoint", "epoch", "end")
    assert told(mine, *kinds) == told(theirs, *kinds)
    ours, others = (list_checkpoints(Path(run) / "checkpoints") for run in (mine, theirs))
    assert [number for number, _ in ours] == [number for number, _ in others]
    for (_, path), (_, other) in zip(ours, others, strict=True):
        assert read_verdict(path) == read_verdict(other)
        for name in ("model.safetensors", "optimizer.safetensors", "run.safetensors", "tokenizer.json"):
            assert (path / name).read_bytes() == (other / name).read_bytes()
    assert json.loads(Path(mine, "best.json").read_text()) == json.loads(Path(theirs, "best.json").read_text())
    assert_same_end(mine, theirs, step)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_is_the_same_with_it_and_without(tiny, monkeypatch, late):
    words = [*BOUNDARIES, "optim.ema=0.8"]  # for whose evaluations weights and average change places
    list(flatout.train(tiny(*words, "output.folder=reference")))
    beside(monkeypatch)
    if late:
        at_the_latest(monkeypatch)
    records = list(flatout.train(tiny(*words, "output.folder=run")))
    check_same_run("run", "reference")
    saved = of(records, CheckpointRecord)
    assert [record.step for record in saved] == sorted({record.step for record in saved}), "in the order of steps"
    assert all(record.background_seconds is not None for record in saved)
    for record in saved:
        done = [one.step for one in records[: records.index(record)] if isinstance(one, StepRecord)]
        assert record.step in done
    if late:
        between = records[records.index(saved[0]) - 1]
        assert between.step > saved[0].step, "training went on meanwhile"
    assert isinstance(records[-1], EndRecord)
    assert records[-1].checkpoint == saved[-1].path


def test_small_checkpoints_are_written_at_once(tiny):
    records = list(flatout.train(tiny("train.steps=4", "checkpoint.every=2")))
    assert [record.background_seconds for record in of(records, CheckpointRecord)] == [None, None]


def test_a_disk_that_stays_full_is_the_error_it_was(tiny, monkeypatch):
    def full(*_args):
        raise OSError(28, os.strerror(28))

    beside(monkeypatch)
    list(flatout.train(tiny("train.steps=3", "output.folder=run")))
    monkeypatch.setattr(checkpoint, "save_files", full)
    words = ["train.steps=9", "checkpoint.every=3", "output.folder=run"]
    with pytest.raises(ResourceError, match=r"could not write checkpoint run/checkpoints/step-00000006: No space left"):
        list(flatout.train(tiny(*words), resume="auto"))
    assert [step for step, _ in list_checkpoints(Path("run/checkpoints"))] == [3]


@pytest.mark.parametrize("how", ["left", "error", "diverged"])
def test_whoever_ends_a_run_waits_for_its_last_save(tiny, monkeypatch, how):
    at_the_latest(monkeypatch)
    words = ["train.steps=9", "checkpoint.every=3", "output.folder=run"]
    list(flatout.train(tiny(*words, "output.folder=reference")))
    beside(monkeypatch)
    with monkeypatch.context() as patch:
        if how == "diverged":
            poison(patch, {4, 5, 6})
        run = flatout.train(tiny(*words))

        def read() -> None:
            for record in run:
                if isinstance(record, StepRecord) and record.step == 4 and how != "diverged":
                    if how == "left":
                        run.close()
                    else:
                        run.throw(ValueError("planted"))

        if how == "left":
            read()
        else:
            with pytest.raises(DivergedError if how == "diverged" else ValueError):
                read()
    assert [step for step, _ in list_checkpoints(Path("run/checkpoints"))] == [3]
    assert read_verdict(Path("run/checkpoints/step-00000003")) is not None
    list(flatout.train(tiny(*words), resume="auto"))
    kinds = ("step", "eval", "sample", "checkpoint")
    assert told("run", *kinds) == told("reference", *kinds), "the record of step 3 comes with the resume"
    assert_same_end("run", "reference", 9)


def test_a_run_that_cannot_write_its_records_ends_before_its_folder_is_free(tiny, monkeypatch):
    """Also while somebody keeps the error, and with it all frames."""
    beside(monkeypatch)
    at_the_latest(monkeypatch)
    add = MetricsFile.add

    def failing(self: MetricsFile, record: Record) -> None:
        if isinstance(record, StepRecord) and record.step == 4:
            raise ResourceError("planted", "none")
        add(self, record)

    monkeypatch.setattr(MetricsFile, "add", failing)
    with pytest.raises(ResourceError, match="planted") as kept:
        list(flatout.train(tiny("train.steps=9", "checkpoint.every=3", "output.folder=run")))
    assert read_verdict(Path("run/checkpoints/step-00000003")) is not None
    del kept


def test_an_interrupt_saves_and_waits(tiny, monkeypatch):
    words = [*BOUNDARIES, "output.folder=run"]
    list(flatout.train(tiny(*words, "output.folder=reference")))
    beside(monkeypatch)
    for steps, step in ((3, 3), (2, 5), (3, 8)):
        end = list(flatout.train(tiny(*words), resume="auto", stop=stop_after(steps)))[-1]
        assert (end.step, end.checkpoint) == (step, f"run/checkpoints/step-{step:08d}")
        assert read_verdict(Path(end.checkpoint)) is not None
    list(flatout.train(tiny(*words), resume="auto"))
    assert_same_end("run", "reference", 12)
    assert told("run", "step", "eval", "sample") == told("reference", "step", "eval", "sample")


def test_the_adapters_folder_is_that_of_its_step(tmp_path: Path, monkeypatch):
    """Read when its record comes: by then training has changed the weights."""
    from safetensors.torch import load_file

    from tests.chat_models import write_chat_model

    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    words = ["model.init_from=base", "chat.source=rows.json", "train.epochs=null", "train.steps=6", "eval.every=0",
             "checkpoint.every=2", "speed.device=cpu", "eval.sample_tokens=0"]  # fmt: skip

    def adapters(folder: str) -> list[tuple[int, dict[str, torch.Tensor]]]:
        records = flatout.train(load_config("lora", [*words, f"output.folder={folder}"]))
        place = Path(folder, "adapter", "adapter_model.safetensors")
        return [(record.step, load_file(place)) for record in records if isinstance(record, CheckpointRecord)]

    expected = adapters("at-once")
    beside(monkeypatch)
    at_the_latest(monkeypatch)
    found = adapters("beside")
    assert [step for step, _ in found] == [step for step, _ in expected] == [2, 4, 6]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


# --- by the clock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "saved"), [("0.000001", [1, 2, 3, 4, 5, 6]), ("1000", [6]), ("0", [6])])
def test_a_save_comes_when_minutes_have_passed(tiny, minutes, saved):
    words = ["train.steps=6", "checkpoint.keep=9", f"checkpoint.every={minutes} minutes", "output.folder=run"]
    records = list(flatout.train(tiny(*words)))
    assert [record.step for record in of(records, CheckpointRecord)] == saved


def test_minutes_are_counted_from_the_last_save(tiny, monkeypatch):
    from flatout.engine import loop, saving

    now = itertools.count()  # one second for each time that somebody asks

    class Clock:
        perf_counter = staticmethod(lambda: 0.0)
        monotonic = staticmethod(lambda: float(next(now)))

    monkeypatch.setattr(saving, "time", Clock)
    monkeypatch.setattr(loop, "time", Clock)
    words = ["train.steps=9", "checkpoint.keep=9", "checkpoint.every=0.05 minutes", "output.folder=run"]
    records = list(flatout.train(tiny(*words)))
    assert [record.step for record in of(records, CheckpointRecord)] == [3, 6, 9], "three seconds"


def test_records_that_come_late_are_read_like_others(tiny, monkeypatch):
    """Steps go on before the record of an earlier checkpoint: whoever reads the file takes it as it is."""
    from flatout.observe.sinks import read_history
    from flatout.observe.view import ViewState

    beside(monkeypatch)
    at_the_latest(monkeypatch)
    records = list(flatout.train(tiny(*BOUNDARIES, "output.folder=run")))
    state = ViewState()
    for record in records:
        state.add(record)
    assert state.saved is not None
    assert state.saved.step == 12
    history = read_history(Path("run"))
    assert [row["step"] for row in history.checkpoints] == [3, 4, 6, 8, 9, 12]
    assert history.end is not None
    assert read_checkpoint(Path("run/checkpoints/step-00000012")).step == 12
