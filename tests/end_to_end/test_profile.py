"""`flatout profile` from outside: what it finds, what it writes, and that it leaves nothing behind."""

import csv
import dataclasses
import errno
import gzip
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.cli import dispatch
from flatout.device import Device
from flatout.engine.run import Run
from flatout.errors import ConfigError, HardwareError, ResourceError, UsageError
from flatout.front import measuring
from flatout.tuning import profile as profiling
from flatout.tuning.measure import borrowed_run
from flatout.tuning.profile import can_have, fitted, named_ranges, profile_run, quiet_profiler
from tests.conftest import TINY
from tests.set_up import set_up

FILES = {"trace.json.gz", "kernels.csv", "profile.json", "reading.md"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "TIMED_SECONDS", 0.01)


@pytest.fixture
def words(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.source={corpus}"]


def switches() -> tuple:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch._C._autograd._profiler_enabled(),
        os.environ.get("KINETO_LOG_LEVEL"),
        signal.getsignal(signal.SIGTERM),
    )


def events_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def of_class(kind: type[Run], run: Run) -> Run:
    """The same run, which does some things in another way."""
    other = object.__new__(kind)
    vars(other).update(vars(run))
    return other


class SlowRun(Run):
    """A run whose batches come late."""

    def batches(self, first_step: int, position: dict[str, Any] | None = None) -> Any:
        return SlowLoader(super().batches(first_step, position))


class SlowLoader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            time.sleep(0.05)
            yield batch

    def __enter__(self) -> "SlowLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()


@pytest.mark.usefixtures("bf16_products")
def test_it_writes_a_whole_folder_and_nothing_else(words, tmp_path: Path, capsys: pytest.CaptureFixture):
    torch.manual_seed(7)
    before, random = switches(), torch.get_rng_state()
    assert (
        dispatch(
            ["profile", *words, "model.dropout=0.1", "speed.precision=bf16", "speed.micro_batch=2", "--steps", "2"]
        )
        == 0
    )
    assert switches() == before
    assert torch.equal(torch.get_rng_state(), random)
    folder = tmp_path / "profile" / "lines"
    assert {path.name for path in folder.iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile"], "no run, no prepared data, no leftovers"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    report = json.loads((folder / "profile.json").read_text("utf-8"))
    assert report["verdict"]["bottleneck"] in ("compute-bound", "data-bound", "oversubscribed")
    assert (report["profiled_steps"], report["accumulation"], report["micro_batch"]) == (2, 2, 2)
    assert report["step_seconds"] > 0
    assert report["used"]["precision"] == "bf16"
    assert report["busy_seconds"] == pytest.approx(sum(report["seconds_by_kind"].values()), rel=0.01)
    parts = {part["name"]: part for part in report["ranges"]}
    assert parts["micro-batch"]["calls"] == parts["forward"]["calls"] == parts["backward"]["calls"] == 2
    assert parts["optimizer"]["calls"] == parts["data"]["calls"] == 1
    memory = {part["name"]: part["measured"] for part in report["memory"]}
    assert memory["weights"] == memory["gradients"]
    assert memory["optimizer's moments"] >= 2 * memory["weights"]

    with (folder / "kernels.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"matrix products", "elementwise", "optimizer"} <= {row["kind"] for row in rows}
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0, abs=0.01)
    shares = [float(row["share"]) for row in rows]
    assert shares == sorted(shares, reverse=True)

    page = (folder / "reading.md").read_text("utf-8")
    shown = capsys.readouterr()
    assert page.startswith(f"# lines: {report['verdict']['bottleneck']}")
    assert report["verdict"]["sentence"] in page
    assert report["verdict"]["sentence"] in shown.out
    assert "under the profiler" in shown.err


def test_the_ranges_of_the_trace_lie_inside_each_other(words, tmp_path: Path):
    assert dispatch(["profile", *words, "speed.micro_batch=2", "--steps", "1", "--out", "here"]) == 0
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events_of(tmp_path / "here"):
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))

    def inside(inner: str, outer: str) -> bool:
        return all(any(a <= start and end <= b for a, b in found[outer]) for start, end in found[inner])

    assert len(found["step"]) == 1
    assert len(found["forward"]) == len(found["backward"]) == 2
    assert all(inside(name, "step") for name in ("data", "micro-batch", "optimizer"))
    assert inside("forward", "micro-batch")
    assert inside("backward", "micro-batch")
    assert not inside("optimizer", "micro-batch")


def test_the_second_profile_gets_a_folder_of_its_own_and_json_is_one_object(words, tmp_path: Path, capsys):
    for _ in range(2):
        assert dispatch(["profile", *words, "--steps", "1", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["config"] == "lines"
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["lines", "lines-2"]


def test_an_empty_folder_is_taken_and_a_full_one_refused(words, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert dispatch(["profile", *words, "--steps", "1", "--out", "empty"]) == 0
    assert {path.name for path in (tmp_path / "empty").iterdir()} == FILES
    for taken in ("empty", "empty/profile.json"):
        with pytest.raises(UsageError, match="is there already"):
            dispatch(["profile", *words, "--out", taken])
    with pytest.raises(UsageError, match="no folder"):
        dispatch(["profile", *words, "--out", "empty/profile.json/below"])
    assert {path.name for path in (tmp_path / "empty").iterdir()} == FILES


@pytest.mark.parametrize("bad", [["--steps", "0"], ["--steps", "many"], ["--out", ""], ["speed.precision=bf17"]])
def test_mistakes_answer_before_anything_is_made(words, tmp_path: Path, bad: list[str], monkeypatch):
    monkeypatch.setattr(measuring, "practice_config", lambda *_, **__: pytest.fail("it went on"))
    with pytest.raises((UsageError, ConfigError)):
        dispatch(["profile", *words, *bad])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_a_signal_leaves_nothing(words, tmp_path: Path, monkeypatch, capsys, number: int, code: int, word: str):
    original = profiling._profiled

    def stopped(*values: Any) -> Any:
        original(*values)
        signal.raise_signal(number)
        return original(*values)

    monkeypatch.setattr(profiling, "_profiled", stopped)
    before = switches()
    assert dispatch(["profile", *words, "--steps", "1", "--out", "deep/down"]) == code
    assert word in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert switches() == before


def test_a_full_disk_is_told_and_leaves_nothing(words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(profiling, "write_whole", full)
    with pytest.raises(ResourceError, match=r"trace.json.gz: No space left"):
        dispatch(["profile", *words, "--steps", "1", "--out", "deep/down"])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("bf16_products")
def test_a_profiled_step_learns_what_any_other_learns(tiny):
    def losses(named: bool) -> list[float]:
        run = set_up(tiny("speed.micro_batch=2", "speed.precision=bf16"))
        found = []
        with run.batches(0) as loader:
            for _, batch in zip(range(3), loader, strict=False):
                if named:
                    with named_ranges(run.step), quiet_profiler([torch.profiler.ProfilerActivity.CPU]):
                        found.append(run.step(batch.tokens, batch.targets))
                else:
                    found.append(run.step(batch.tokens, batch.targets))
        return torch.stack(found).tolist()

    assert losses(named=True) == losses(named=False)


@pytest.mark.parametrize("cycle", ["cycle.Only", "cycle. Only"])
def test_torchs_reminder_of_cycles_is_not_shown_and_other_warnings_are(monkeypatch, cycle: str):
    """torch 2.11 warns whenever its profiler is first started, torch 2.13 only where there is a second cycle."""
    start = torch.profiler.profile.prepare_trace
    told = f"Warning: Profiler clears events at the end of each {cycle} events from the current cycle will be reported."

    def reminding(self: torch.profiler.profile) -> None:
        warnings.warn(told, UserWarning, stacklevel=2)
        warnings.warn("CUDA is not available, disabling CUDA profiling", UserWarning, stacklevel=2)
        start(self)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", reminding)
    with (
        pytest.warns(UserWarning, match="CUDA is not available") as heard,
        quiet_profiler([torch.profiler.ProfilerActivity.CPU]),
    ):
        torch.ones(2).sum()
    assert not [str(one.message) for one in heard if "clears events" in str(one.message)]
    with pytest.warns(UserWarning, match="clears events"):
        warnings.warn(told, UserWarning, stacklevel=2)  # it is heard again once the profiler runs


def test_the_step_is_as_it_was_afterwards(tiny, tmp_path: Path):
    run = set_up(tiny())
    before = dict(vars(run.step))
    profile_run(run, tmp_path, steps=1)
    after = vars(run.step)
    assert after.keys() == before.keys()
    for name in ("model", "optimizer", "scope", "graph", "reducer"):
        assert after[name] is before[name]
    assert run.step._update.__func__ is type(run.step)._update  # pyright: ignore[reportFunctionMemberAccess]


def test_a_slow_loader_is_found(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.tuning.profile.core_use", lambda before, after: None)  # whatever else runs here
    loaded = tiny("speed.workers=0")
    with borrowed_run(fitted(loaded, 2)) as run:
        slow = of_class(SlowRun, run)
        report = profile_run(slow, tmp_path, steps=2)
    assert report.verdict.bottleneck == "data-bound"
    assert report.data_wait_seconds >= 0.05
    assert report.verdict.advice[0].words == "speed.workers=2"


def test_a_stream_is_profiled_as_a_stream(words, corpus: Path, tmp_path: Path):
    stream = ["data.streaming=true", "data.tokenizer=bytes", f"data.validation={corpus}"]
    assert dispatch(["profile", *words, *stream, "--steps", "1", "--out", "here"]) == 0
    report = json.loads((tmp_path / "here" / "profile.json").read_text("utf-8"))
    assert "lines.txt" in report["data"]


def test_weights_to_start_from_and_a_short_run_play_no_part(words, tmp_path: Path):
    assert dispatch(["profile", *words, "train.steps=2", "--steps", "1", "--out", "here"]) == 0
    assert json.loads((tmp_path / "here" / "profile.json").read_text("utf-8"))["timed_steps"] >= 4


def test_only_what_a_run_would_accept_is_proposed(tiny):
    run = set_up(tiny("model.dropout=0.1"))
    assert can_have(run, "speed.compile=default")
    assert can_have(run, "speed.loader=host speed.workers=4")
    assert can_have(run, "speed.precision=bf16")
    assert not can_have(run, "speed.cuda_graphs=on")
    assert not can_have(run, "speed.kernels=triton")
    assert not can_have(run, 'speed.fp8="[qkv, out, up, down, head]"')
    assert not can_have(run, "speed.micro_batch=0")


# --- on a GPU, as events tell of it -----------------------------------------------------------------------------------

H200 = Device(torch_device=torch.device("cuda", 0), name="NVIDIA H200", memory_bytes=150_110_011_392, capability=(9, 0))


def launches(steps: int, kernels: int, host: float, device: float) -> list[dict[str, Any]]:
    """Events as Kineto writes them of `steps` steps, a launch every `host` µs of a kernel of `device` µs."""
    events, number = [], 0
    for step in range(steps):
        start = 1000.0 + step * (kernels * host + 100)
        for name, first, length in (("step", 0.0, kernels * host + 90), ("micro-batch", 5.0, kernels * host + 10)):
            span = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": start + first}
            events.append({**span, "dur": length, "args": {"External id": step, "Ev Idx": number}})
        for place in range(kernels):
            number += 1
            when = start + 10 + place * host
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": when}
            events.append({**call, "dur": 4.2, "args": {"cbid": 211, "correlation": number}})
            name = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN" if place % 3 == 0 else "void at::native::elementwise_kernel"
            ran = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": when + 6}
            events.append({**ran, "dur": device, "args": {"stream": 7, "correlation": number, "grid": [8, 1, 1]}})
    return events


def on_an_h200(run: Run, monkeypatch, *, step_seconds: float, events: list[dict[str, Any]]) -> Run:
    """A run on the CPU of which everything that is asked of a GPU says what an H200 might."""

    class Elsewhere(Run):
        def batches(self, first_step: int, position: dict[str, Any] | None = None) -> Any:
            return run.batches(first_step, position)

    sizes = {"memory_allocated": 40, "memory_reserved": 60, "max_memory_allocated": 70, "max_memory_reserved": 80}
    for name, mebibytes in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, size=mebibytes: size * 2**20)
    properties = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(profiling, "_timed", lambda *_: (step_seconds, 1e-5, 4, None))
    monkeypatch.setattr(profiling, "_profiled", lambda *_: (events, 2 * step_seconds))
    there = of_class(Elsewhere, run)
    there.plan = dataclasses.replace(run.plan, speed=dataclasses.replace(run.speed, device=H200))
    return there


def test_short_kernels_of_an_h200_are_read_as_launch_bound_and_graphs_are_proposed(tiny, tmp_path: Path, monkeypatch):
    run = set_up(tiny("speed.micro_batch=1", "speed.cuda_graphs=off", "speed.kernels=torch", "speed.compile=off"))
    events = launches(steps=2, kernels=300, host=9.0, device=2.4)
    report = profile_run(on_an_h200(run, monkeypatch, step_seconds=0.0028, events=events), tmp_path, steps=2)
    assert report.verdict.bottleneck == "launch-bound"
    advised = [advice.words for advice in report.verdict.advice]
    assert advised == ["speed.cuda_graphs=on", "speed.micro_batch=4", "speed.kernels=triton"]
    assert report.busy_seconds == pytest.approx(300 * 2.4e-6)
    assert {one.name: one.device_seconds for one in report.ranges} == pytest.approx({"micro-batch": 300 * 2.4e-6})
    assert report.seconds_by_kind == pytest.approx({"elementwise": 200 * 2.4e-6, "matrix products": 100 * 2.4e-6})
    assert report.peak_flops_per_second == 989.4e12
    memory = {part.name: part.measured for part in report.memory}
    assert memory["peak allocated"] == 70 * 2**20
    assert memory["cached by the allocator between two steps"] == 20 * 2**20
    assert {path.name for path in tmp_path.iterdir()} >= {"kernels.csv", "profile.json"}


def test_long_kernels_of_an_h200_are_not(tiny, tmp_path: Path, monkeypatch):
    run = set_up(tiny("speed.micro_batch=1", "speed.cuda_graphs=off", "speed.kernels=torch", "speed.compile=off"))
    events = launches(steps=2, kernels=300, host=50.0, device=49.0)
    report = profile_run(on_an_h200(run, monkeypatch, step_seconds=0.015, events=events), tmp_path, steps=2)
    assert report.verdict.bottleneck == "memory-bound"


def test_a_profiler_that_sees_no_kernels_is_an_error_and_no_verdict(tiny, tmp_path: Path, monkeypatch):
    run = set_up(tiny())
    with pytest.raises(HardwareError, match="saw no kernels"):
        profile_run(on_an_h200(run, monkeypatch, step_seconds=0.01, events=[]), tmp_path, steps=1)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

# Others may compute on the same card. They make steps longer, and at times a kernel that they interrupt; they change
# neither which kernels run nor from where they are launched.
CUDA = ["speed.device=cuda", "model.width=128", "model.context=128", "train.batch_tokens=1024"]


@pytest.mark.gpu
def test_on_a_gpu_kernels_memory_and_ranges_are_measured(words, tmp_path: Path):
    assert (
        dispatch(
            ["profile", *words, *CUDA, "speed.cuda_graphs=off", "speed.micro_batch=4", "--steps", "2", "--out", "here"]
        )
        == 0
    )
    folder = tmp_path / "here"
    assert {path.name for path in folder.iterdir()} == FILES
    report = json.loads((folder / "profile.json").read_text("utf-8"))
    # All kernels run between the two moments in which the device was waited for; two clocks may differ a little.
    assert 0 < report["busy_seconds"] <= 1.05 * report["profiled_step_seconds"]
    assert {"matrix products", "optimizer"} <= report["seconds_by_kind"].keys()
    parts = {part["name"]: part for part in report["ranges"]}
    for name in ("forward", "backward", "optimizer", "micro-batch"):
        assert parts[name]["device_seconds"] > 0, name
    assert parts["forward"]["calls"] == parts["backward"]["calls"] == parts["micro-batch"]["calls"] == 2
    both = parts["forward"]["device_seconds"] + parts["backward"]["device_seconds"]
    assert both == pytest.approx(parts["micro-batch"]["device_seconds"], rel=0.1)
    memory = {part["name"]: part["measured"] for part in report["memory"]}
    made_of = ["weights", "copies of weights in narrower types", "gradients", "optimizer's moments"]
    made_of += ["tokens on the device, libraries", "activations and working memory at the peak"]
    assert sum(memory[name] for name in made_of) == pytest.approx(memory["peak allocated"], rel=0.02)
    assert memory["peak reserved"] >= memory["peak allocated"]


@pytest.mark.gpu
def test_on_a_gpu_a_replayed_graph_is_one_piece(words, tmp_path: Path):
    assert dispatch(["profile", *words, *CUDA, "speed.cuda_graphs=on", "--steps", "2", "--out", "here"]) == 0
    report = json.loads((tmp_path / "here" / "profile.json").read_text("utf-8"))
    parts = {part["name"]: part for part in report["ranges"]}
    assert "forward" not in parts
    events = events_of(tmp_path / "here")
    calls = [event for event in events if event.get("cat") == "cuda_runtime"]
    replays = [event for event in calls if event["name"].startswith("cudaGraphLaunch")]
    assert len(replays) == 2 * parts["micro-batch"]["calls"]
    numbers = {event["args"]["correlation"] for event in replays}
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    replayed = [event["dur"] for event in device if event["args"].get("correlation") in numbers]
    assert len(replayed) > 10 * len(replays), "one launch, many kernels"
    assert parts["micro-batch"]["device_seconds"] >= 0.99e-6 * sum(replayed) / 2, "and all of them are this range's"
    assert parts["optimizer"]["device_seconds"] > 0
    assert not any(advice["words"] == "speed.cuda_graphs=on" for advice in report["verdict"]["advice"])


@pytest.mark.gpu
def test_on_a_gpu_tiny_kernels_one_by_one_are_launch_bound(words, tmp_path: Path):
    """Others on the card do not change the answer: what they take is time in which none of our kernels runs."""
    slow = ["speed.cuda_graphs=off", "speed.kernels=torch", "speed.compile=off", "speed.micro_batch=1"]
    assert dispatch(["profile", *words, *CUDA, *slow, "--steps", "4", "--out", "here"]) == 0
    report = json.loads((tmp_path / "here" / "profile.json").read_text("utf-8"))
    assert report["kernels_per_step"] > 8 * 50, "eight micro-batches, each with its own launches"
    assert report["verdict"]["bottleneck"] == "launch-bound"
    assert report["verdict"]["advice"][0]["words"] == "speed.cuda_graphs=on"
