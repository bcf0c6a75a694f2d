"""A busy machine and a leaking loader: each raises an alert while a run trains, with the way out.

The short form lets readings follow each other quickly, and describes the busy machine. The slow form is
the real thing: three processes for each core, and training until the alert.
"""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flatout
from flatout.config.load import load_config
from flatout.engine import monitor
from flatout.host import CoreClock, usable_cores
from flatout.observe.terminal import TerminalReader
from tests.conftest import TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SECONDS_BETWEEN", 0.05)


def warning_of(loaded, kind: str, **given) -> str:
    """The first line of this kind on a plain terminal, of a run that is stopped then, or after a while."""
    stream, ends = io.StringIO(), time.monotonic() + 600.0
    reader = TerminalReader(10, stream)

    def said() -> str:
        return next((line for line in stream.getvalue().splitlines() if f" {kind}: " in line), "")

    for record in flatout.train(loaded, stop=lambda: bool(said()) or time.monotonic() > ends, **given):
        reader.show(record)
    return said()


@pytest.mark.usefixtures("quick_readings")
def test_a_busy_machine(tiny, monkeypatch):
    began = time.monotonic()

    def clock() -> CoreClock:  # others keep 1.5 of two cores busy, and 1.2 threads of ours wait
        passed = time.monotonic() - began
        return CoreClock(now=passed, own=0.5 * passed, busy=2.0 * passed, waited=1.2 * passed)

    monkeypatch.setattr(monitor, "core_clock", clock)
    monkeypatch.setattr(monitor, "usable_cores", lambda: 2.0)
    line = warning_of(tiny("train.steps=100000", "speed.threads=2"), "busy host")
    assert "threads of the run wait for cores: others use 1.5 of 2 cores" in line
    assert "speed.threads=1" in line


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.usefixtures("quick_readings")
def test_a_leaking_loader(tmp_path, monkeypatch):
    kept: list[np.ndarray] = []

    def leaking() -> Iterator[np.ndarray]:
        while True:
            time.sleep(0.005)
            kept.append(np.ones(2**18))  # 2 MiB
            yield np.arange(64) % 32

    monkeypatch.chdir(tmp_path)
    loaded = load_config("shakespeare-char", [*TINY, "train.steps=100000", "model.vocab=32"])
    line = warning_of(loaded, "memory growth", data=leaking, val=[np.arange(64) % 32])
    assert "the run's memory on the host grows steadily" in line
    assert "code of your own" in line
    assert "checkpoint.every" in line


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hogs() -> Iterator[None]:
    """Three processes for each core, which do nothing but compute."""
    count = 3 * round(usable_cores())
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("hogs")
@pytest.mark.parametrize(("threads", "way"), [("2", "speed.threads=1"), ("auto", "stop the other programs")])
def test_a_machine_that_really_is_busy(tmp_path, threads, way):
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    words = ["shakespeare-char", "train.steps=100000", f"speed.threads={threads}"]
    command = [sys.executable, "-m", "flatout", "train", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = ""
    try:
        for line in process.stdout:
            if line.startswith("warning: ") and "busy host" in line:
                break
        assert way in line
    finally:
        process.kill()
        process.wait()
