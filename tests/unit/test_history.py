"""A run read back: torn lines, older versions, numbers that JSON lacks, resumes, ends."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import DataError
from flatout.observe.sinks import MetricsFile, read_history
from flatout.records import (
    CheckpointRecord,
    EndRecord,
    EpochRecord,
    EvalRecord,
    MachineRecord,
    NoticeRecord,
    Record,
    RunInfo,
    SampleRecord,
    SpanRecord,
    StepRecord,
)


def info(start: int = 0) -> RunInfo:
    return RunInfo(
        flatout="0", torch="2", device="cpu", folder="runs/a", family="gpt", parameters=1, flops_per_token=1.0,
        memory_estimate_bytes=1, steps=10, batch_tokens=8, micro_batch=1, accumulation=1, context=8, vocab=5,
        train_tokens=None, val_tokens=5, windows=None, dataset="d", tokenizer="char", start_step=start,
        resumed_from=None, features=(), config={"output": {"name": "inf"}},
    )  # fmt: skip


def step(number: int, **named: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number, "epoch": None, "loss": 4.0 - 0.1 * number, "learning_rate": 1e-3, "grad_norm": 1.0,
        "applied": True, "tokens": 8 * number, "seconds": 0.5, "tokens_per_second": 16.0, "mfu": None,
        "memory_bytes": None, "loss_scale": None, "micro_batch": 1,
    }  # fmt: skip
    return StepRecord(**(values | named))


def evaluation(number: int, loss: float) -> EvalRecord:
    return EvalRecord(
        step=number, loss=loss, perplexity=math.inf, bits_per_byte=None, tokens=5, seconds=0.1, best=True, reason="nan"
    )


def end(number: int, reason: str) -> EndRecord:
    return EndRecord(
        step=number, reason=reason, seconds=1.0, val_loss=None, best_loss=None, best_step=None, checkpoint=None
    )


def write(folder: Path, *records: Record, keep_to_step: int = 0) -> Path:
    with MetricsFile(folder / "metrics.jsonl", keep_to_step=keep_to_step) as metrics:
        for record in records:
            metrics.write(record)
    return folder


def test_every_record_comes_back_as_it_was(tmp_path: Path) -> None:
    records: list[Record] = [
        info(),
        step(1, loss=math.nan, grad_norm=math.inf, applied=False),
        evaluation(1, -math.inf),
        EpochRecord(step=1, epoch=1, mean_loss=2.0, seconds=1.0, windows_per_second=1.0, tokens_per_second=8.0),
        SampleRecord(step=1, prompt="nan", text="inf"),
        CheckpointRecord(step=1, path="nan", bytes=5, seconds=0.1, best=True),
        NoticeRecord(step=1, message="-inf"),
        SpanRecord(step=1, steps=1, seconds={"data": math.nan}, calls={"data": 1}),
        MachineRecord(
            step=1, elapsed=1.0, utilisation=math.inf, memory_bytes=None, power_watts=None, power_limit_watts=None,
            temperature=None, clock_mhz=None, throttled="",
        ),
        end(1, "finished"),
    ]  # fmt: skip
    history = read_history(write(tmp_path, *records))
    kinds = (
        history.infos, history.steps, history.evals, history.epochs, history.samples, history.checkpoints,
        history.notices, history.spans, history.machine, history.ends,
    )  # fmt: skip
    for record, rows in zip(records, kinds, strict=True):
        (row,) = rows
        expected = json.loads(json.dumps(dataclasses.asdict(record)))
        # repr, because a NaN is not equal to itself
        assert repr({name: value for name, value in row.items() if name != "type"}) == repr(expected)
    assert history.info == history.infos[0]
    assert history.end == history.ends[0]


def test_a_torn_line_and_lines_of_something_else_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, info(), step(1), step(2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1, 2]\n"step"\n{"no": "type"}\n\n\xff\xfe\n{"type": "of another version", "x": 1}\n')
        file.write(b'{"type": "step", "step": 3, "lo')
    assert read_history(tmp_path).column("step") == [1, 2]


def test_what_an_older_run_did_not_write_is_none(tmp_path: Path) -> None:
    lines = [{"type": "run"}, {"type": "step", "step": 1, "loss": "nan"}, {"type": "step", "step": 2, "seconds": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    history = read_history(tmp_path)
    assert math.isnan(history.column("loss")[0])
    assert history.column("loss")[1] is None
    assert history.column("parameter_norm") == [None, None]
    assert history.column("seconds") == [None, 2.0]
    assert history.end is None


def test_a_resumed_run_has_each_step_once_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, info(), *(step(number) for number in range(1, 7)), end(6, "interrupted"))
    history = read_history(tmp_path)
    assert history.end is not None
    assert history.end["reason"] == "interrupted"
    write(tmp_path, info(4), step(5, loss=9.0), step(6), step(7), keep_to_step=4)
    history = read_history(tmp_path)
    assert history.column("step") == [1, 2, 3, 4, 5, 6, 7]
    assert history.column("loss")[4] == 9.0
    assert [row["start_step"] for row in history.infos] == [0, 4]
    assert history.info["start_step"] == 4
    assert history.end is None


def test_a_run_that_was_interrupted_and_goes_on_has_not_ended(tmp_path: Path) -> None:
    write(tmp_path, info(), step(1), end(1, "interrupted"))
    write(tmp_path, info(1), step(2), keep_to_step=1)
    assert len(read_history(tmp_path).ends) == 1
    assert read_history(tmp_path).end is None
    write(tmp_path, end(2, "finished"), keep_to_step=2)
    history = read_history(tmp_path)
    assert history.end is not None
    assert history.end["reason"] == "finished"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_history(tmp_path)
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_history(tmp_path / "none")
    for content in (b"", b"\x00\x01", b'{"type": "step", "step": 1}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(DataError, match="holds no run"):
            read_history(tmp_path)
