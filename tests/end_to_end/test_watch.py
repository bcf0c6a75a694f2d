"""`flatout watch` beside real runs: finished, killed, resumed; piped, as JSON, on a terminal, in the browser."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flatout import api
from flatout.cli import dispatch, main
from flatout.config.load import LoadedConfig
from flatout.errors import DataError, UsageError
from flatout.observe.runs import list_runs
from flatout.observe.sinks import MetricsFile
from flatout.records import Record, record_to_json
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.unit.seen import end, info, machine, step
from tests.unit.test_follow import locked

Load = Callable[..., LoadedConfig]
ROOT = Path(__file__).parents[2]


def write(folder: Path, *records: Record) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsFile(folder / "metrics.jsonl", keep_to_step=10**9) as file:
        for record in records:
            file.write(record)
    return folder


def test_a_finished_run_is_told_as_it_was(tiny: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = list(api.train(tiny("train.steps=12", "output.log_every=4", "output.folder=runs/one")))
    assert dispatch(["watch", "one"]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["1/12", "4/12", "8/12", "12/12"]
    assert lines[-1].startswith("finished at step 12")
    assert dispatch(["watch", str(tmp_path / "runs" / "one"), "--json"]) == 0
    assert capsys.readouterr().out.splitlines() == [record_to_json(record) for record in records]
    assert dispatch(["watch"]) == 0  # the newest


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """A real run in a process of its own, which goes on for long."""
    monkeypatch.chdir(tmp_path)
    words = [*TINY, f"data.source={corpus}", "train.steps=100000", "output.folder=runs/long", "checkpoint.every=5"]
    process = Forked(main, ["train", "shakespeare-char", *words])
    until = time.monotonic() + 6000
    while not (tmp_path / "runs" / "long" / "run.lock").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def when_it_has_steps(folder: Path, count: int, act: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        until = time.monotonic() + 6000
        while time.monotonic() < until:
            path = folder / "metrics.jsonl"
            if path.exists() and path.read_bytes().count(b'"type": "step"') >= count:
                break
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_is_followed_to_its_end(
    trainer: Forked, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
):
    """Watched from before its first record until it is killed, or stopped and saved; nothing is missing or twice."""
    folder = tmp_path / "runs" / "long"
    states: list[str] = []

    def end() -> None:
        trainer.send_signal(signal.SIGSTOP)
        os.utime(folder / "metrics.jsonl", (1e9, 1e9))  # for years it has said nothing
        states.extend(row.state for row in list_runs(tmp_path / "runs"))
        trainer.send_signal(number)
        trainer.send_signal(signal.SIGCONT)

    stopping = when_it_has_steps(folder, 10, end)
    code = dispatch(["watch", "--json"])
    stopping.join()
    trainer.wait()
    os.utime(folder / "metrics.jsonl")  # and now it has said something
    states += [row.state for row in list_runs(tmp_path / "runs")]
    assert states == ["running", "stopped" if number == signal.SIGKILL else "interrupted"]
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    steps = [row["step"] for row in rows if row["type"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 10
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    assert rows == kept
    assert "resume with: flatout train --resume runs/long" in said.err
    if number == signal.SIGKILL:
        assert code == 1
        assert f"no process works in runs/long any more, and step {len(steps)} is its last" in said.err
    else:
        assert code == 0
        assert rows[-1]["reason"] == "interrupted"


def test_a_run_that_diverged_has_no_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = [step(number, applied=False, loss=float("nan")) for number in (5, 6, 7)]
    assert dispatch(["watch", str(write(tmp_path / "bad", info(), step(4), *bad))]) == 1
    said = capsys.readouterr()
    assert "step 7 is its last: the run was killed, or it diverged; resume with" in said.err
    assert "warning: step 5 skipped update" in said.out


def test_a_run_that_never_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.lock").touch()
    assert main(["watch", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "ended before its first record\nhint: " in said
    (tmp_path / "metrics.jsonl").touch()
    for verb in ("plot", "report"):
        assert main([verb, str(tmp_path)]) == 3
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'metrics.jsonl'} holds no run\nhint: ")


def test_a_resumed_run_goes_on_in_the_same_view(tiny: Load, capsys: pytest.CaptureFixture[str]):
    settings = ["output.folder=runs/two", "checkpoint.every=5", "output.log_every=1"]
    first = api.train(tiny("train.steps=8", *settings), stop=lambda: False)
    for record in first:
        if getattr(record, "step", 0) == 7:
            break
    first.close()
    list(api.train(tiny("train.steps=8", *settings), resume="auto"))
    assert dispatch(["watch", "two"]) == 0
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert steps == [f"{number}/8" for number in range(1, 9)]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no run"):
        dispatch(["watch"])
    with pytest.raises(UsageError, match="not a folder"):
        dispatch(["watch", "missing"])
    with pytest.raises(DataError, match="is not a run"):
        dispatch(["watch", str(tmp_path)])
    for words in (["--port", "1"], ["--jsn"], ["a", "b"]):
        with pytest.raises(UsageError):
            dispatch(["watch", *words])


def test_watching_needs_no_torch(tmp_path: Path):
    folder = write(tmp_path / "run", info(), step(1), end(1))
    code = "import sys; from flatout.cli import main; main(['watch', *sys.argv[1:]]); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment)
    assert result.stdout.endswith("False\n"), result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminal_that_stops_watching_is_put_right(tmp_path: Path, number: signal.Signals, code: int):
    """The panel of a run that goes on, until a signal ends the watching; the run's files are as they were."""
    folder = write(tmp_path / "run", info(), *(step(n) for n in range(1, 51)), machine(50))
    ours, theirs = pty.openpty()
    with locked(folder):
        before = sorted(path.name for path in folder.iterdir())
        command = "import sys; from flatout.cli import main; sys.exit(main(['watch', *sys.argv[1:]]))"
        process = subprocess.Popen(
            [sys.executable, "-c", command, str(folder)], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )  # fmt: skip
        os.close(theirs)
        written, sent, until = b"", False, time.monotonic() + 600
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:
                    break
            if b"step 50/1,000" in written and not sent:
                process.send_signal(number)
                sent = True
        assert process.wait(timeout=600) == code
        assert sorted(path.name for path in folder.iterdir()) == before
    os.close(ours)
    assert written.rindex(b"\x1b[?1049l") > written.rindex(b"\x1b[?1049h")
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")
    assert b"step 50/1,000" in written[written.rindex(b"\x1b[?1049l") :]
    assert b"Traceback" not in written
