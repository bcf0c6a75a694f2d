"""Following a run that somebody else writes: half lines, files replaced by a resumed run, processes that die."""

import fcntl
import json
import math
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatout.errors import DataError, UsageError
from flatout.observe import runs as following
from flatout.observe.runs import Follower, find_run, follow, record_of, record_of_line, run_state
from flatout.observe.sinks import MetricsFile
from flatout.records import (
    CheckpointRecord,
    EndRecord,
    EpochRecord,
    EvalRecord,
    MachineRecord,
    NoticeRecord,
    Record,
    SampleRecord,
    SpanRecord,
    StepRecord,
    record_to_json,
)
from tests.made_runs import sign_lock
from tests.unit.seen import end, info, step


@contextmanager
def locked(folder: Path, host: str | None = None) -> Iterator[None]:
    """Holds a run's lock as the trainer does."""
    handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sign_lock(folder, 1, host or socket.gethostname())
        yield
    finally:
        os.close(handle)


def write(folder: Path, *records: Record, keep_to_step: int = 10**9) -> None:
    with MetricsFile(folder / "metrics.jsonl", keep_to_step=keep_to_step) as file:
        for record in records:
            file.write(record)


ALL_KINDS: list[Record] = [
    info(),
    step(1, parameter_norm=3.0, data_seconds=0.01, reserved_bytes=5),
    EvalRecord(step=1, loss=2.0, perplexity=7.4, bits_per_byte=None, tokens=5, seconds=0.1, best=True, reason="step"),
    EpochRecord(step=1, epoch=1, mean_loss=2.0, seconds=1.0, windows_per_second=3.0, tokens_per_second=4.0),
    SampleRecord(step=1, prompt="nan", text="inf \u2028 \x1b[2J"),
    CheckpointRecord(step=1, path="p", bytes=3, seconds=0.5, best=False),
    NoticeRecord(step=1, message="nan"),
    SpanRecord(step=1, steps=4, seconds={"data": 0.5, "forward": math.inf}, calls={"data": 4}),
    MachineRecord(
        step=1, elapsed=1.0, utilisation=0.5, memory_bytes=None, power_watts=None, power_limit_watts=None,
        temperature=60.0, clock_mhz=1000.0, throttled="heat",
    ),
    end(1),
]  # fmt: skip


@pytest.mark.parametrize("record", ALL_KINDS, ids=lambda record: type(record).__name__)
def test_every_record_comes_back_as_it_was(record: Record):
    assert record_of_line(record_to_json(record).encode()) == record


def test_numbers_without_a_json_word_come_back():
    back = record_of_line(record_to_json(step(3, loss=math.nan, grad_norm=-math.inf, mfu=math.inf)).encode())
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)
    assert (back.grad_norm, back.mfu) == (-math.inf, math.inf)


def test_optional_and_unknown_fields_are_tolerated():
    row = {
        name: value for name, value in vars(step(4, loss=2)).items() if name not in ("parameter_norm", "data_seconds")
    }
    old = record_of({**row, "type": "step", "invented": [1]})
    assert isinstance(old, StepRecord)
    assert (old.step, old.loss, old.mfu, old.data_seconds) == (4, 2.0, None, None)
    assert isinstance(old.loss, float)
    assert record_of({"type": "step", "step": 4, "loss": 2.0}) is None
    assert record_of({"type": "from the future", "step": 1}) is None
    for line in (b"", b"{", b"[]", b'"step"', b"\xff\xfe", b'{"type": ["step"], "step": 1}', b"[" * 100_000):
        assert record_of_line(line) is None


def test_any_row_gives_a_whole_record_or_none():
    odd = [None, True, -1, 10**400, 0.5, math.nan, math.inf, "", "nan", "text", [], [1], [{}], {}, {"a": {"b": []}}]
    dice, whole = random.Random(7), 0
    for _ in range(3000):
        row = json.loads(record_to_json(dice.choice(ALL_KINDS)))
        row[dice.choice([name for name in row if name != "type"])] = dice.choice(odd)
        record = record_of(row)
        if record is not None:
            assert json.loads(record_to_json(record))["type"] == row["type"]  # every field can be written
            whole_numbers = [value for value in vars(record).values() if type(value) is int]
            assert all(abs(number) <= 2**63 for number in whole_numbers), "`watch` divides them"
            whole += 1
    assert whole > 300


def test_a_half_line_waits_for_its_other_half(tmp_path: Path):
    path, line = tmp_path / "metrics.jsonl", record_to_json(step(1)).encode()
    follower = Follower(tmp_path)
    assert follower.read() == []
    path.write_bytes(line[:20])
    assert follower.read() == []
    path.write_bytes(line)
    assert follower.read() == []
    path.write_bytes(line + b"\n" + b"no record\n" + line[:5])
    assert follower.read() == [step(1)]
    assert follower.read() == []


@pytest.mark.parametrize("limit", [1, 7, 100, 1 << 20])
def test_every_record_comes_once_in_any_portions(tmp_path: Path, limit: int):
    follower, records = Follower(tmp_path), [step(number) for number in range(1, 30)]
    seen: list[Record] = []
    for start in range(0, 29, 10):
        write(tmp_path, *records[start : start + 10])
        while fresh := follower.read(limit):
            seen += fresh
    assert seen == records


def test_a_resumed_run_says_nothing_twice(tmp_path: Path):
    """The file is replaced by what was kept of it, then grows: only what is new comes."""
    follower = Follower(tmp_path)
    write(tmp_path, info(), *(step(number) for number in range(1, 9)))
    assert len(follower.read()) == 9
    again = [NoticeRecord(step=4, message="lr changed"), info(start_step=4, resumed_from="x")]
    write(tmp_path, *again, *(step(number, loss=1.0) for number in range(5, 8)), keep_to_step=4)
    assert follower.read() == [*again, *(step(number, loss=1.0) for number in range(5, 8))]
    # A second time, from the same step: its first line is the same as before, and still a start of its own.
    write(tmp_path, info(start_step=4, resumed_from="x"), step(5, loss=0.5), keep_to_step=4)
    assert follower.read() == [info(start_step=4, resumed_from="x"), step(5, loss=0.5)]
    # Replaced while nobody looked, and by now longer than before.
    write(tmp_path, info(start_step=0), *(step(number, loss=9.0) for number in range(1, 60)), keep_to_step=0)
    assert follower.read() == [info(start_step=0), *(step(number, loss=9.0) for number in range(1, 60))]


def test_a_run_is_followed_until_its_lock_is_free(tmp_path: Path):
    waits: list[float] = []

    def others_turn(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            write(tmp_path, info(), step(1))
        if len(waits) == 2:
            write(tmp_path, step(2), end(2))
        if len(waits) == 9:  # an ended run whose process goes on working: it is not left yet
            write(tmp_path, NoticeRecord(step=2, message="plots written"))
            lock.__exit__(None, None, None)

    lock = locked(tmp_path)
    lock.__enter__()
    kinds = [type(record).__name__ for record in follow(tmp_path, wait=others_turn)]
    assert kinds == ["RunInfo", "StepRecord", "StepRecord", "EndRecord", "NoticeRecord"]
    assert len(waits) >= 9


def test_lines_written_just_before_the_end_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, info(), step(1))
    calls = []

    def state(folder: Path) -> str:
        if not calls:
            write(folder, step(2), end(2))  # between our reading and our question
        calls.append(folder)
        return "ended"

    monkeypatch.setattr(following, "run_state", state)
    assert isinstance(list(follow(tmp_path))[-1], EndRecord)


def test_who_works_there(tmp_path: Path):
    assert run_state(tmp_path) == "ended"
    with locked(tmp_path):
        assert run_state(tmp_path) == "running"
    assert run_state(tmp_path) == "ended"
    with locked(tmp_path, host="far-away"):
        assert run_state(tmp_path) == "running"
    assert run_state(tmp_path) == "elsewhere"
    with locked(tmp_path):  # asking has left nothing behind, and a run that came home is not far away
        pass
    assert run_state(tmp_path) == "ended"


def test_the_lock_is_seen_without_the_list_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.lock._listed", lambda _status: False)
    with locked(tmp_path):
        assert run_state(tmp_path) == "running"
    assert run_state(tmp_path) == "ended"


def test_a_run_elsewhere_is_left_only_after_its_last_word(tmp_path: Path):
    with locked(tmp_path, host="far-away"):
        pass
    write(tmp_path, info(), step(1), end(1), info(start_step=1), step(2))  # resumed after a first end
    waits: list[float] = []

    def later(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 20:
            write(tmp_path, end(2))

    assert isinstance(list(follow(tmp_path, wait=later, clock=lambda: float(len(waits))))[-1], EndRecord)


def test_finding_a_run(tmp_path: Path):
    runs = tmp_path / "runs"
    with pytest.raises(DataError, match="there is no run"):
        find_run(None, runs)
    for age, name in enumerate(("new", "old", "begun")):
        (runs / name).mkdir(parents=True)
        file = runs / name / ("run.lock" if name == "begun" else "metrics.jsonl")
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    (runs / "no run").mkdir()
    assert find_run(None, runs) == runs / "new"
    os.utime(runs / "begun" / "run.lock", (2000, 2000))
    assert find_run(None, runs) == runs / "begun"
    assert find_run("old", runs) == runs / "old"
    assert find_run(str(runs / "old"), runs) == runs / "old"
    checkpoint = runs / "old" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert find_run(str(checkpoint), runs).name == "old"
    for name in ("missing", "", "a" * 5000, "zero\0byte"):
        with pytest.raises(UsageError, match="not a folder"):
            find_run(name, runs)
    with pytest.raises(DataError, match="is not a run"):
        find_run("no run", runs)
