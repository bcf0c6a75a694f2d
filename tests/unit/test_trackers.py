"""Trackers: files that their own programs can read, nothing when off, and no way to hurt a run."""

import importlib.util
import json
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import ConfigError
from flatout.observe import trackers as trackers_module
from flatout.observe.trackers import Trackers, _checksum, _Lane, check_trackers, open_trackers, values_of
from flatout.records import EvalRecord, NoticeRecord, Record, RunInfo, SampleRecord, SpanRecord
from tests.unit.seen import end, info, machine, step

HOSTILE = "\x1b[2J ![](http://127.0.0.1:9/beacon.png) <script>alert(1)</script>"


def a_run(first: int = 1, last: int = 20) -> list[Record]:
    return [
        *(
            step(n, loss=5.0 - n / 10, mfu=0.5, memory_bytes=2**31, reserved_bytes=2**32)
            for n in range(first, last + 1)
        ),
        machine(last),
        EvalRecord(
            step=last, loss=2.5, perplexity=12.2, bits_per_byte=1.5, tokens=1, seconds=1.0, best=True, reason="end"
        ),
        SampleRecord(step=last, prompt="once ", text=HOSTILE),
        NoticeRecord(step=last, message="something to know"),
    ]


def write_all(trackers: Trackers, records: list[Record]) -> list[str]:
    messages = [message for record in records for message in trackers.write(record)]
    return messages + trackers.close()


# --- what is told -----------------------------------------------------------------------------------------------------


def test_tags_and_values():
    found = values_of(
        step(7, mfu=0.5, memory_bytes=3 * 2**30, reserved_bytes=2**32, data_seconds=0.1, parameter_norm=9.0)
    )
    assert found.step == 7
    assert found.scalars == {
        "loss/train": 3.0,
        "optimizer/learning_rate": 1e-3,
        "optimizer/gradient_norm": 0.5,
        "optimizer/parameter_norm": 9.0,
        "throughput/tokens_per_second": 2000.0,
        "throughput/mfu": 0.5,
        "throughput/step_seconds": 0.5,
        "throughput/data_wait_share": 0.2,
        "memory/peak_gib": 3.0,
        "memory/reserved_gib": 4.0,
        "progress/tokens": 7000.0,
    }
    assert values_of(a_run()[-3]).scalars["loss/validation"] == 2.5
    assert values_of(machine(3)).scalars["machine/power_watts"] == 650.0
    spans = SpanRecord(step=8, steps=4, seconds={"data": 2.0, "../x y": 1.0}, calls={})
    assert values_of(spans).scalars == {"spans/data_seconds_per_step": 0.5, "spans/.._x_y_seconds_per_step": 0.25}
    ranks = SpanRecord(step=8, steps=4, seconds={"reduction": 1.0}, calls={}, rank_seconds=(3.0, 3.0, 3.6))
    found = {tag: value for tag, value in values_of(ranks).scalars.items() if tag.startswith("ranks/")}
    assert found == pytest.approx({"ranks/slowest_over_median": 1.2, "ranks/waiting_share": 0.25})
    assert values_of(end(9)).texts == {"notices": "finished at step 9 after 9s"}


def test_values_that_are_not_finite_are_no_scalars():
    found = values_of(step(7, loss=math.nan, grad_norm=math.inf))
    assert not {"loss/train", "optimizer/gradient_norm"} & found.scalars.keys()
    assert found.odd.keys() == {"loss/train", "optimizer/gradient_norm"}


# --- TensorBoard's files ----------------------------------------------------------------------------------------------


def frames(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert content[8:12] == _checksum(content[:8])
        message = content[12 : 12 + length]
        assert content[12 + length : 16 + length] == _checksum(message)
        yield message
        content = content[16 + length :]


def event_files(folder: Path) -> list[Path]:
    return sorted((folder / "tensorboard").iterdir())


def test_the_checksum_is_the_one_these_files_use():
    # CRC-32C of "123456789" is 0xE3069283, then rotated by 15 bits and shifted by a constant.
    plain = 0xE3069283
    masked = ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _checksum(b"123456789") == struct.pack("<I", masked)


def test_event_files_are_whole(tmp_path: Path):
    assert write_all(open_trackers(["tensorboard"], tmp_path, info()), a_run()) == []
    (file,) = event_files(tmp_path)
    messages = list(frames(file))
    assert b"brain.Event:2" in messages[0]
    assert sum(b"loss/train" in message for message in messages) == 20
    assert any("\ufffd[2J".encode() in message for message in messages)


def test_a_flushed_file_can_be_read_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers_module, "FLUSH_SECONDS", 0.0)
    trackers = open_trackers(["tensorboard"], tmp_path, info())
    trackers.write(step(1))
    until = time.monotonic() + 600
    while time.monotonic() < until:
        files = event_files(tmp_path) if (tmp_path / "tensorboard").exists() else []
        if files and b"loss/train" in files[0].read_bytes():
            break
        time.sleep(0.01)
    assert b"loss/train" in event_files(tmp_path)[0].read_bytes()
    trackers.close()


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)


@needs_tensorboard
def test_the_real_tensorboard_shows_what_was_written(tmp_path: Path):
    """Started on loopback, asked over HTTP; the second start of the run went back to step 10."""
    write_all(open_trackers(["tensorboard"], tmp_path, info()), a_run())
    again = [*a_run(11, 12)[:2], step(13, loss=math.nan), *a_run(14, 15)]
    write_all(open_trackers(["tensorboard"], tmp_path, info(start_step=10, resumed_from="x")), again)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--host", "127.0.0.1"]
    with (tmp_path / "out.txt").open("wb") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    try:
        series = fetch(process, port, "scalars/scalars", tag="loss/train")
        assert [row[1] for row in series] == [*range(1, 13), 14, 15]
        assert [row[2] for row in series] == pytest.approx([5.0 - n / 10 for n in [*range(1, 13), 14, 15]])
        validation = fetch(process, port, "scalars/scalars", tag="loss/validation")
        assert [row[1:] for row in validation] == [[15, 2.5]]
        tags = fetch(process, port, "scalars/tags")["tensorboard"]
        wanted = {"throughput/tokens_per_second", "memory/peak_gib", "memory/reserved_gib", "optimizer/learning_rate"}
        assert wanted | {"optimizer/gradient_norm", "machine/power_watts"} <= set(tags)
        (sample,) = fetch(process, port, "text/text", tag="samples")
        assert sample["step"] == 15
        assert "once" in sample["text"]
        assert "<script" not in sample["text"]
        assert "<img" not in sample["text"]
        notices = [row["text"] for row in fetch(process, port, "text/text", tag="notices")]
        assert any("loss/train is nan at step 13" in text for text in notices)
    finally:
        process.terminate()
        process.wait(timeout=600)


def fetch(process: subprocess.Popen[bytes], port: int, path: str, **query: str) -> Any:
    """Waits until TensorBoard has loaded the run."""
    words = urllib.parse.urlencode({"run": "tensorboard", **query})
    last: Exception | None = None
    until = time.monotonic() + 600
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/{path}?{words}", timeout=10) as answer:
                if found := json.load(answer):
                    return found
        except OSError as error:
            last = error
        time.sleep(0.2)
    raise AssertionError(f"no answer from TensorBoard: {last}")


# --- off, failing, hanging --------------------------------------------------------------------------------------------


def test_nothing_is_loaded_for_trackers_that_are_off():
    code = """
import sys, threading
from pathlib import Path
from flatout.observe.trackers import open_trackers
from tests.unit.seen import info, step
trackers = open_trackers([], Path("."), info())
assert trackers.write(step(1)) == [] and trackers.close() == []
assert threading.active_count() == 1
names = {"torch", "tensorboard", "wandb"}
print(sorted(names & set(sys.modules)))
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_missing_package_is_a_mistake_that_can_be_mended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", lambda name: None)
    check_trackers(["tensorboard"])  # its files need no package
    with pytest.raises(ConfigError, match="not installed") as caught:
        check_trackers(["tensorboard", "wandb"])
    assert "pip install wandb" in caught.value.hint


def test_a_tracker_that_cannot_write_is_told_of_once(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("in the way")
    messages = write_all(open_trackers(["tensorboard"], tmp_path, info()), a_run())
    assert len(messages) == 1
    assert messages[0].startswith("TensorBoard failed and is off for the rest of the run: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_stops_the_tracker_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(trackers_module.TensorBoard):  # pyright: ignore[reportGeneralTypeIssues]
        def __init__(self, folder: Path, start: RunInfo) -> None:
            super().__init__(folder, start)
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    monkeypatch.setattr(trackers_module, "TensorBoard", Full)
    messages = write_all(open_trackers(["tensorboard"], tmp_path, info()), a_run())
    assert len(messages) == 1
    assert "No space left" in messages[0]


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers_module, "MOST_WAITING", 5)
    hang = threading.Event()

    class Hanging:
        def write(self, record: Record) -> None:
            hang.wait(60)

        def close(self) -> None: ...

    trackers = Trackers([_Lane("wandb", lambda tell: Hanging(), info())])
    messages = [message for record in a_run() for message in trackers.write(record)]
    assert len(messages) == 1
    assert "cannot keep up" in messages[0]
    assert ["left alone" in message for message in trackers.close(seconds=0.1)] == [True]
    hang.set()


FAKE = """
import json, os, sys, types
print("a line of its own")
def Html(text, inject): return text
def Settings(**values): return None
errors = types.SimpleNamespace(UsageError=ArithmeticError)
class Run:
    def __init__(self, name, **others):
        self.file = open(os.environ["FAKE_OUT"], "w")
        self.say(["init", name, others["resume"], others["config"]])
    def define_metric(self, *names, **how): pass
    def say(self, row): self.file.write(json.dumps(row) + "\\n"); self.file.flush()
    def log(self, values): {log}
    def finish(self): self.say(["finish"])
def init(**arguments): return Run(**arguments)
"""


def fake_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> Path:
    """A package called wandb that the child finds first; writes what it is told to the file returned."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(FAKE.replace("{log}", log))
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
    monkeypatch.setenv("FAKE_OUT", str(folder / "said.jsonl"))
    return folder / "said.jsonl"


def test_a_child_is_told_everything_and_its_words_go_to_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    said = fake_wandb(tmp_path, monkeypatch, "self.say([values['step'], values])")
    config = {"data": {"source": ["https://me:pass@example.org/x"], "hf_token": "abc"}, "train": {"batch_tokens": 5}}
    records = [*a_run(), step(21, loss=math.nan), step(22, loss=math.nan)]
    assert write_all(open_trackers(["wandb", "wandb"], tmp_path, info(resumed_from="x", config=config)), records) == []
    rows = [json.loads(line) for line in said.read_text().splitlines()]
    hidden = {
        "data": {"source": ["https://(secret)@example.org/x"], "hf_token": "(secret)"},
        "train": {"batch_tokens": 5},
    }
    assert rows[0] == ["init", tmp_path.name, "allow", hidden]
    assert [row[1]["loss/train"] for row in rows[1:21]] == [5.0 - n / 10 for n in range(1, 21)]
    samples = [row[1]["samples"] for row in rows[1:-1] if "samples" in row[1]]
    assert samples == [
        "<pre>once \ufffd[2J ![](http://127.0.0.1:9/beacon.png) &lt;script&gt;alert(1)&lt;/script&gt;</pre>"
    ]
    notes = [row[1]["notices"] for row in rows[1:-1] if row[0] in (21, 22) and "notices" in row[1]]
    assert notes == ["<pre>loss/train is nan at step 21</pre>"]
    assert rows[-1] == ["finish"]
    assert "a line of its own" in (tmp_path / "wandb.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("raise ValueError('the server\\n said no')", "ValueError: the server said no"),
        ("os._exit(3)", "ended with code 3"),
        ("os.kill(os.getpid(), 9)", "ended with code -9"),
        ("sys.exit(5)", "ended with code 5"),
    ],
)
def test_a_child_that_fails_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, words: str):
    fake_wandb(tmp_path, monkeypatch, log)
    messages = write_all(open_trackers(["wandb"], tmp_path, info()), a_run())
    assert len(messages) == 1
    assert words in messages[0]
    assert "wandb.log" in messages[0]


def test_a_child_outlives_a_killed_trainer_and_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = fake_wandb(tmp_path, monkeypatch, "self.say([values['step'], values])")
    root = Path(__file__).parents[2]
    code = f"""
import os, time
from pathlib import Path
from flatout.observe.trackers import open_trackers
from tests.unit.seen import info, step
trackers = open_trackers(["wandb"], Path({str(tmp_path)!r}), info())
trackers.write(step(1))
while not os.path.exists({str(said)!r}) or "loss/train" not in open({str(said)!r}).read():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), os.environ["PYTHONPATH"]])}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, timeout=600)
    until = time.monotonic() + 600
    while time.monotonic() < until and "finish" not in said.read_text():
        time.sleep(0.01)
    assert said.read_text().endswith('["finish"]\n')


# --- the real packages ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
@pytest.mark.parametrize("mode", ["offline", None])
def test_the_real_wandb_keeps_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None):
    """Also where nobody has logged in: then the run is kept offline, and it is said so."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    messages = write_all(open_trackers(["wandb"], tmp_path, info()), a_run())
    assert ["no login" in message and "wandb sync" in message for message in messages] == ([] if mode else [True])
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for tag in (b"loss/train", b"loss/validation", b"throughput/tokens_per_second", b"memory/peak_gib"):
        assert tag in content
    (sample,) = (tmp_path / "wandb").glob("offline-run-*/files/media/html/samples*")
    assert "&lt;script&gt;" in sample.read_text(encoding="utf-8")
    first = json.loads((tmp_path / "wandb.json").read_text())["id"]
    shutil.rmtree(tmp_path / "wandb")
    write_all(open_trackers(["wandb"], tmp_path, info(start_step=20, resumed_from="x")), [step(21)])
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{first}"))  # the same run goes on
