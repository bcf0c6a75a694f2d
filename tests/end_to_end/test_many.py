"""Several ranks that are killed, stopped, hung, signalled and started wrongly: the run goes on, or says why not."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout import cli
from flatout.parallel import ranks
from tests.end_to_end import disturbed
from tests.end_to_end.many import Command, assert_same_end, last_step, logged, saved_steps, words
from tests.end_to_end.test_ranks import run_here
from tests.ranks import WORKERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes where Linux lists them")
TWO = ["--gpus", "2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started() -> Iterator[list[Command]]:
    """Commands of a test, none of which outlives it."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.end()


def told_lines(command: Command) -> list[str]:
    return [line for line in command.told.splitlines() if line]


def test_a_killed_and_a_hung_rank_change_nothing_but_time(corpus: Path, started: list[Command]):
    WORKERS.run(2, run_here, str(Path.cwd()), words(corpus, "reference", 40))
    command = Command([*words(corpus, "run", 40, timeout=8), *TWO, "--restarts", "2"], "slow", log="disturbed")
    started.append(command)
    command.wait_until(lambda: last_step("run") >= 12)
    os.kill(command.ranks()[1], signal.SIGKILL)
    command.wait_until(lambda: last_step("run") >= 22)
    command.ranks()
    Path("hang-0").touch()
    assert command.wait() == 0, command.told
    first, *stack, second = told_lines(command)
    again = r"in step \d+: starting all ranks again from step (\d+), \d+ steps are repeated \(%d of 2 restarts left\)"
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL " + again % 1, first)
    assert re.fullmatch(r"rank 0 \(pid \d+\) hangs " + again % 0, second)
    assert any("_hang" in line and line.startswith("rank 0: File") for line in stack), stack
    assert all(line.startswith("rank 0: ") for line in stack), "the agent says nothing else"
    assert_same_end("run", "reference", 40)
    assert logged("run") == logged("reference"), "every step, evaluation and checkpoint once"
    assert not command.left_behind()


def test_out_of_memory_a_stopped_rank_and_signals(corpus: Path, started: list[Command]):
    command = Command([*words(corpus, "run", 5000, 1000, timeout=8), *TWO, "--restarts", "1"], "slow memory")
    started.append(command)
    command.wait_until(lambda: last_step("run") >= 3)
    (line,) = told_lines(command)
    assert re.match(
        r"rank 1 \(pid \d+\) ran out of memory in step 1: starting all ranks again from the beginning", line
    )
    assert line.endswith("with micro-batches of 1 on all")
    notices = (Path("run") / "metrics.jsonl").read_text()
    assert "an earlier attempt ran out of memory: continuing with micro-batches of 1 instead of 2" in notices
    assert "(next time: speed.micro_batch=1, or" in notices
    command.process.send_signal(signal.SIGUSR1)
    command.wait_until(lambda: len(saved_steps("run")) == 1)
    reached = last_step("run")
    command.wait_until(lambda: last_step("run") > reached + 2)
    os.kill(command.ranks()[1], signal.SIGSTOP)
    reached = last_step("run")
    command.wait_until(lambda: last_step("run") > reached + 2)
    assert re.match(r"rank 1 \(pid \d+\) was stopped \(SIGSTOP\) in step \d+: starting", told_lines(command)[-1])
    os.kill(command.ranks()[1], signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert saved_steps("run")[-1] == last_step("run")
    assert "resume with: flatout train --resume run" in command.told
    assert not command.left_behind()


def test_a_rank_whose_weights_drift_is_named(corpus: Path, started: list[Command]):
    command = Command([*words(corpus, "run", 50), *TWO], "drift")
    started.append(command)
    assert command.wait() == 4, command.told
    error, hint = told_lines(command)
    assert error == "error: after step 8 the weights of rank 1 are not those of the others; 4 steps ago they were"
    assert hint.startswith("hint: memory or a GPU may be faulty")


WRONG = {
    "no such setting": ([*TWO, "model.layrs=2"], 2, "model.layrs is not a known key"),
    "hosts without a place to meet": ([*TWO, "--nodes", "2", "--node-rank", "0"], 2, "--meet is missing"),
    "a place without a port": ([*TWO, "--nodes", "2", "--node-rank", "0", "--meet", "here"], 2, "is not HOST:PORT"),
    "hosts without a number": ([*TWO, "--nodes", "2", "--meet", "here:1"], 2, "--node-rank is missing"),
    "a number too high": ([*TWO, "--nodes", "2", "--node-rank", "2", "--meet", "here:1"], 2, "not below --nodes 2"),
    "hosts without processes": (["--nodes", "2"], 2, "--nodes goes with --gpus"),
    "no processes": (["--gpus", "0"], 2, "'0' is not a whole number from 1 to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_start_is_refused_at_once(case: str, capfd: pytest.CaptureFixture[str]):
    arguments, code, message = WRONG[case]
    assert cli.main(["train", *arguments]) == code
    error, hint = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert not list(Path().iterdir())


def test_under_a_launcher_that_has_started_processes_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "refuse", lambda found, error: error)  # there is nobody to wait for
    assert cli.main(["train", *TWO]) == 2
    assert "a launcher has started 2 already" in capfd.readouterr().err


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cli.main(["train", "--gpus", "3"]) == 2
    assert "error: --gpus 3, and this host has 2\nhint: use --gpus 2, or" in capfd.readouterr().err


# --- campaigns --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("data", ["shards", "stream"])
def test_a_hundred_random_faults(data: str, started: list[Command]):
    """Of ranks, agents and loaders: half of them, or of FLATOUT_TEST_FAULTS, for each kind of data."""
    count, rows = int(os.environ.get("FLATOUT_TEST_FAULTS", "100")) // 2, list[disturbed.Row]()
    disturbed.campaign(data, count, started, rows.append)
    print(disturbed.table(rows))


@pytest.mark.slow
def test_soak(started: list[Command]):
    """A fault every 90 s for half an hour; or for as many minutes as FLATOUT_TEST_SOAK says, with as many faults."""
    minutes, rows = float(os.environ.get("FLATOUT_TEST_SOAK", "30")), list[disturbed.Row]()
    disturbed.soak("stream", minutes, 3 * minutes, started, rows.append)
    print(disturbed.table(rows))
    assert disturbed.growth(rows) < disturbed.MOST_MEMORY
