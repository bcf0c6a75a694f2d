"""Spans and the card's state: what the loop tells of time and machine."""

import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.config.load import load_config
from flatout.device import Device
from flatout.engine import loop, monitor
from flatout.engine.monitor import MachineWatch, throttled
from flatout.engine.spans import PendingReports, SpanTotals, StepClock, spans_between
from flatout.errors import UsageError
from flatout.observe.report_data import report_data
from flatout.observe.sinks import read_history
from flatout.records import CheckpointRecord, EvalRecord, MachineRecord, RunInfo, SpanRecord, StepRecord
from flatout.world import World

CPU = torch.device("cpu")
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "train.batch_tokens=64",
         "train.steps=25", "data.tokenizer=bytes", "eval.every=10", "eval.tokens=99", "eval.sample_tokens=4",
         "checkpoint.every=20"]  # fmt: skip


def test_marks_end_one_span_and_begin_the_next():
    clock = StepClock(CPU)
    clock.begin()
    clock.mark("forward")
    clock.begin()  # the step failed and begins anew
    for name in ("forward", "backward", "optimizer"):
        clock.mark(name)
    marks = clock.take()
    assert [mark[0] for mark in marks] == ["wait", "forward", "backward", "optimizer"]
    assert clock.take() == []
    first, last = marks[0][1], marks[-1][1]
    spans = list(spans_between(first, marks))
    assert sum(seconds for _, seconds in spans) == pytest.approx(last.host - first.host)


class Timed(nn.Module):
    """A part of a model with spans of its own, one inside the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with flatout.span("whole"), flatout.span("inside"):
            return self.inner(h)


def time_the_first(model: nn.Module) -> None:
    model.blocks[0].mlp = Timed(nn.Linear(32, 32))  # pyright: ignore[reportIndexIssue, reportArgumentType]


def test_spans_of_a_users_own_stand_beside_those_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "train.steps=10", "train.batch_tokens=256", "speed.compile=off"]
    records = list(flatout.train(load_config(None, words), model=time_the_first))
    (spans,) = (record for record in records if isinstance(record, SpanRecord))
    steps = sum(record.seconds for record in records if isinstance(record, StepRecord))
    assert sum(spans.seconds[name] for name in ("wait", "forward", "backward", "optimizer")) == pytest.approx(
        steps, rel=0.05
    )
    assert spans.calls["whole"] == spans.calls["inside"] == spans.calls["forward"], "evaluation is not timed"
    assert 0 < spans.seconds["inside"] < spans.seconds["whole"] < spans.seconds["forward"]
    folder = next(record.folder for record in records if isinstance(record, RunInfo))
    (run,) = report_data([read_history(Path(folder))])["runs"]
    beside = [part["name"] for part in run["time"]["parts"] if part["beside"]]
    assert beside == ["inside", "whole", "data"]
    assert sum(part["share"] for part in run["time"]["parts"] if not part["beside"]) == pytest.approx(1, abs=1e-4)


def test_a_span_changes_nothing_in_compiled_code():
    plain = Timed(nn.Linear(4, 4))
    timed = torch.compile(plain, fullgraph=True, backend="eager")
    rows = torch.ones(2, 4)
    assert torch.equal(timed(rows), plain.inner(rows))


@pytest.mark.parametrize("name", ["forward", "data", ""])
def test_a_span_has_a_name_that_is_not_one_of_ours(name: str):
    with pytest.raises(UsageError, match="cannot be called"):
        flatout.span(name)


def test_totals_are_taken_once():
    totals = SpanTotals()
    totals.add_step([("forward", 1.0), ("backward", 2.0), ("forward", 1.0)])
    totals.add("evaluation", 0.5)
    record = totals.take(7, World())
    assert (record.step, record.steps) == (7, 1)
    assert record.seconds == {"forward": 2.0, "backward": 2.0, "evaluation": 0.5}
    assert record.calls == {"forward": 2, "backward": 1, "evaluation": 1}
    assert totals.take(7, World()).seconds == {}


@pytest.mark.parametrize("words", [[], ["speed.micro_batch=2"]])
def test_a_run_tells_where_its_time_went(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = list(flatout.train(load_config(None, [*SMALL, *words])))
    steps = [record for record in records if isinstance(record, StepRecord)]
    spans = [record for record in records if isinstance(record, SpanRecord)]
    assert [record.step for record in spans] == [10, 20, 25]
    assert [record.steps for record in spans] == [10, 10, 5]
    parts = {"wait", "forward", "backward", "optimizer"}
    for record in spans:
        micro_batches = record.steps * (2 if words else 1)
        assert parts <= record.seconds.keys()
        assert record.calls["forward"] == record.calls["backward"] == micro_batches
        assert record.calls["optimizer"] == record.calls["data"] == record.steps
        inside = sum(seconds for name, seconds in record.seconds.items() if name in parts)
        whole = sum(step.seconds for step in steps if record.step - record.steps < step.step <= record.step)
        assert inside == pytest.approx(whole, rel=0.2)
    beside = {name: sum(record.seconds.get(name, 0.0) for record in spans) for name in ("evaluation", "checkpoint")}
    evaluated = [record.seconds for record in records if isinstance(record, EvalRecord)]
    saved = [record.seconds for record in records if isinstance(record, CheckpointRecord)]
    assert beside["evaluation"] == pytest.approx(sum(evaluated), abs=1e-4)
    assert beside["checkpoint"] == pytest.approx(sum(saved), abs=1e-4)
    assert spans[-1].calls["sample"] == 1
    norms = {step.step: step.parameter_norm for step in steps}
    assert [step for step, norm in norms.items() if norm is not None] == [1, 10, 20, 25]
    assert all(step.data_seconds is not None and step.data_seconds >= 0 for step in steps)


def test_the_wait_for_a_batch_is_its_own_and_not_the_step_before_it(monkeypatch):
    now = 0.0

    def pass_by(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: now))
    waited = []
    for _, seconds in loop.timed(pass_by(seconds) for seconds in (1.0, 2.0, 4.0)):  # pyright: ignore[reportArgumentType]
        waited.append(seconds)
        pass_by(100.0)  # the step
    assert waited == [1.0, 2.0, 4.0]


def test_the_parameter_norm_is_that_of_the_weights_before_the_update(tmp_path, monkeypatch):
    from tests.set_up import set_up

    monkeypatch.chdir(tmp_path)
    run = set_up(load_config(None, SMALL))
    expected = torch.cat([p.detach().flatten() for p in run.model.parameters()]).norm()
    run.step.with_parameter_norm = True
    with run.batches(0) as loader:
        batch = next(iter(loader))
    assert run.step(batch.tokens, batch.targets)[5].item() == pytest.approx(expected.item(), rel=1e-5)
    run.step.with_parameter_norm = False
    assert run.step(batch.tokens, batch.targets)[5] == -1


# --- the card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "words"),
    [(0, ""), (0x1, ""), (0x4, "power"), (0x20, "heat"), (0x40 | 0x80, "power and heat"), (0x8, "hardware")],
)
def test_why_a_clock_is_held_down(bits, words):
    assert throttled(bits) == words


HOST = ("allocated_bytes", "cores", "cores_busy", "cores_others", "threads_waiting", "load", "process_bytes",
        "host_bytes", "host_total_bytes", "swap_bytes")  # fmt: skip


def driver(**changes):
    """A stand-in for the driver's library."""
    library = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: f"handle of {name}",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=2**33, total=2**37),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda handle: 650_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, kind: 61,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1700,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
    }
    for name, answer in {**answers, **changes}.items():
        setattr(library, name, answer)
    return library


def watch(monkeypatch, library) -> tuple[MachineWatch, list[float]]:
    device = Device(torch_device=torch.device("cuda", 0), name="a card", memory_bytes=2**37, capability=(9, 0))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(
        monitor.torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234-5678")
    )
    now = [100.0]
    return MachineWatch(device, clock=lambda: now[0]), now


def test_the_card_is_asked_every_ten_seconds(monkeypatch):
    found, now = watch(monkeypatch, driver())
    assert found.handle == "handle of GPU-1234-5678"
    record = found.poll(3)
    assert record is not None
    host = {name: getattr(record, name) for name in HOST}
    assert record == MachineRecord(
        **host,
        step=3,
        elapsed=0.0,
        utilisation=0.97,
        memory_bytes=2**33,
        memory_total_bytes=2**37,
        power_watts=650.0,
        power_limit_watts=700.0,
        power_default_watts=700.0,
        temperature=61.0,
        clock_mhz=1700.0,
        clock_most_mhz=1980.0,
        throttled="power",
    )
    now[0] += 9.0
    assert found.poll(4) is None
    now[0] += 1.0
    again = found.poll(5)
    assert again is not None
    assert again.elapsed == 10.0
    found.close()
    now[0] += 60.0
    assert found.poll(6) is None


def test_what_a_driver_does_not_tell_is_missing(monkeypatch):
    def refuse(*_):
        raise ValueError("not supported")

    found, _ = watch(
        monkeypatch, driver(nvmlDeviceGetPowerUsage=refuse, nvmlDeviceGetCurrentClocksThrottleReasons=refuse)
    )
    record = found.poll(1)
    assert record is not None
    assert (record.power_watts, record.throttled, record.utilisation) == (None, "", 0.97)
    silent, _ = watch(monkeypatch, driver(nvmlInit=refuse))
    untold = silent.poll(1)
    assert untold is not None
    assert (untold.power_watts, untold.throttled, untold.utilisation) == (None, "", None)


def test_the_host_is_told_with_and_without_a_card():
    now = [100.0]
    watch = MachineWatch(Device(torch_device=CPU, name="cpu", memory_bytes=None, capability=None), lambda: now[0])
    first = watch.poll(1)
    assert first is not None
    assert (first.utilisation, first.clock_mhz, first.throttled, first.allocated_bytes) == (None, None, "", None)
    assert watch.poll(2) is None
    kept = np.ones(2**23)  # 64 MiB
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass
    now[0] += 10.0
    second = watch.poll(3)
    assert second is not None
    assert second.cores is not None
    assert second.cores >= 0.1
    if sys.platform == "linux":
        assert first.process_bytes is not None
        assert second.process_bytes is not None
        assert second.process_bytes - first.process_bytes > 0.9 * kept.nbytes
        assert second.cores_busy is not None
        assert second.cores_busy > 0.1, "by this test at least"
        assert second.host_bytes is not None
        assert second.swap_bytes is not None


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_spans_and_state_of_a_gpu(graphs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = list(flatout.train(load_config(None, [*SMALL, f"speed.cuda_graphs={graphs}"])))
    spans = [record for record in records if isinstance(record, SpanRecord)]
    assert sum(record.steps for record in spans) == 25
    last = spans[-1].calls
    assert ("micro-batch" in last) == (graphs == "on")
    assert ("forward" in last) == (graphs == "off")
    state = next(record for record in records if isinstance(record, MachineRecord))
    assert state.power_watts is not None
    assert all(record.reserved_bytes for record in records if isinstance(record, StepRecord))


def test_ranks_tell_how_long_each_was_at_work_without_waiting_for_the_others():
    class Two(World):
        def gather(self, value):
            return [value, value + 1.0]

    totals = SpanTotals()
    totals.add_step([("forward", 1.0), ("backward", 2.0), ("reduction", 5.0)])
    totals.add("evaluation", 9.0)
    record = totals.take(7, Two(rank=0, size=2))
    assert record.rank_seconds == (3.0, 4.0)
    assert totals.take(8, World()).rank_seconds == ()


def test_reports_with_a_lag_are_read_so_many_steps_later_and_not_before():
    pending = PendingReports(torch.device("cpu"), lag=2)
    read = []
    for step in range(1, 6):
        pending.push(step, torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0]))
        read.append([report.step for report in pending.ready()])
    assert read == [[], [], [1], [2], [3]]
    assert [report.step for report in pending.drain()] == [4, 5]
