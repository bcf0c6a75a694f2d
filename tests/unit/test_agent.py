"""What the agent of a host makes of its workers: which of them was the cause, and what is done about it."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flatout import errors
from flatout.checkpoints.checkpoint_files import CHECKPOINT_FILES
from flatout.config.load import load_config
from flatout.errors import HardwareError, UsageError, UserError
from flatout.front import verbs_training
from flatout.launch import Attempt, Launch, launch
from flatout.parallel import agent, many_hosts
from flatout.parallel.agent import Agent, AttemptEnd, Left, OneHost, Place, cause_of, first_of
from flatout.parallel.many_hosts import ManyHosts
from flatout.pulse import Pulse, Slots, State, pulse, stack_of


class Fakes:
    """Workers that left with these codes and states; None is one that still runs."""

    def __init__(self, *ranks: tuple[int | None, State], stopped: int | None = None) -> None:
        self.all = [argparse.Namespace(rank=n, code=code, stopped=n == stopped) for n, (code, _) in enumerate(ranks)]
        for worker in self.all:
            worker.process = argparse.Namespace(pid=100 + worker.rank)
        self._states = [state for _, state in ranks]

    def state(self, worker: Any) -> State:
        return self._states[worker.rank]

    def step(self, worker: Any) -> int:
        return 0 if self._states[worker.rank] is State.STARTING else 7

    def micro_batch(self, worker: Any) -> int:
        return 4

    def stack(self, worker: Any) -> list[str]:
        return ["File x"]


ENDED, LOST, LATE, WORKS, WAITS = State.ENDED, State.LOST, State.TIMED_OUT, State.WORKING, State.WAITING
CASES: dict[str, tuple[Fakes, str, int, int, str]] = {
    "all is well": (Fakes((0, ENDED), (0, ENDED)), "done", 0, 0, ""),
    "killed": (Fakes((1, LOST), (-9, WORKS)), "killed", 1, 137, "was killed by SIGKILL in step 7"),
    "killed at the start": (Fakes((-11, State.STARTING), (1, LOST)), "killed", 0, 139, "SIGSEGV before its first step"),
    "refused": (Fakes((2, LOST), (2, WORKS)), "refused", 1, 2, ""),
    "one is slow to leave": (Fakes((None, LOST), (-9, WORKS)), "killed", 1, 137, "SIGKILL"),
    "signalled": (Fakes((0, ENDED), (143, ENDED)), "stopped", 1, 143, ""),
    "signalled before training": (Fakes((-15, State.STARTING), (1, LOST)), "stopped", 0, 143, ""),
    "stopped": (Fakes((1, LATE), (None, WORKS), stopped=1), "frozen", 1, 1, "was stopped (SIGSTOP) in step 7"),
    "busy": (Fakes((1, LOST), (None, WORKS), (-9, WORKS)), "killed", 2, 137, "SIGKILL"),
    "hung": (Fakes((1, LATE), (None, WORKS)), "stuck", 1, 1, "hangs in step 7"),
    "out of memory": (Fakes((5, State.OUT_OF_MEMORY), (1, LOST)), "memory", 0, 5, "ran out of memory"),
    "our bug": (Fakes((1, LOST), (1, WORKS)), "failed", 1, 1, "failed in step 7"),
    "two waited in vain": (Fakes((1, LATE), (-9, WORKS), (1, LATE)), "killed", 1, 137, "SIGKILL"),
    "a rank that waited is no bug": (Fakes((1, LATE), (1, LATE)), "lost", 0, 1, "got no answer from other ranks"),
    "out of memory before a kill": (Fakes((-9, WORKS), (5, State.OUT_OF_MEMORY)), "memory", 1, 5, "ran out of memory"),
    "nobody answers": (Fakes((1, LOST), (None, WAITS)), "lost", 0, 1, "got no answer"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_found(case: str):
    workers, kind, rank, code, text = CASES[case]
    cause = cause_of(workers)  # pyright: ignore[reportArgumentType]
    assert (cause.kind, cause.rank, cause.code) == (kind, rank, code)
    assert text in cause.text
    assert bool(cause.text) == bool(text), "what the rank itself has told is not told again"
    assert bool(cause.stack) == (kind == "stuck")


USER_ERRORS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.UserError)]


@pytest.mark.parametrize("error", USER_ERRORS, ids=lambda error: error.__name__)
def test_what_a_user_has_to_mend_ends_the_run(error: type[errors.UserError]):
    cause = cause_of(Fakes((1, LOST), (error.exit_code, WORKS)))  # pyright: ignore[reportArgumentType]
    assert cause == AttemptEnd("refused", 1, error.exit_code, steps=7), "the rank has told it, and it is no restart"
    assert cause.ends


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("code", [129, 130, 143])
def test_a_rank_that_was_signalled_has_stopped(code: int):
    """By the code with which a rank ends after it has saved, or by the signal itself where it came before training."""
    for left, state in ((code, ENDED), (128 - code, State.STARTING)):
        cause = cause_of(Fakes((left, state), (1, LOST)))  # pyright: ignore[reportArgumentType]
        assert (cause.kind, cause.rank, cause.code, cause.ends) == ("stopped", 0, code, True)


def test_what_is_tried_again():
    ends = {kind for kind in ("done", "stopped", "refused", "killed", "frozen", "stuck", "memory", "lost", "host")
            if AttemptEnd(kind, 0, 1, steps=3).ends}  # fmt: skip
    assert ends == {"done", "stopped", "refused"}
    assert AttemptEnd("failed", 0, 1, steps=0).ends, "an exception before the first step comes again"
    assert not AttemptEnd("failed", 0, 1, steps=1).ends


def test_a_cause_of_another_host_explains_ours():
    ours, theirs = (
        AttemptEnd("lost", 0, 1, "got no answer", steps=9),
        AttemptEnd("killed", 1, 137, "was killed", steps=8),
    )
    assert first_of([ours, theirs]) == AttemptEnd("killed", 1, 137, "was killed", steps=9)


def test_a_pulse_is_felt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slots = Slots(tmp_path, 2, create=True)
    code = (
        "import time; from flatout.pulse import *; from pathlib import Path; p = pulse(); p.set_state(State.WORKING);"
        "p.at_step(41); p.note_run(Path('runs/x'), accepted=True)\n"
        "def stuck_here():\n    time.sleep(60)\nstuck_here()"
    )
    attempt = Attempt(agent=os.getpid(), pulse=str(tmp_path))
    told = {"FLATOUT_AGENT": attempt.as_json(), "LOCAL_RANK": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **told})
    try:
        while slots.row(1)["step"] != 41:
            assert child.poll() is None
            time.sleep(0.01)
        assert (slots.state(0), slots.state(1)) == (State.STARTING, State.WORKING)
        assert not (tmp_path / "run.json").exists(), "the first worker of a host says where the run is"
        child.send_signal(signal.SIGQUIT)
        until = time.monotonic() + 600
        while "stuck_here" not in "".join(stack_of(tmp_path / "stack-1")[:1]):  # it is written bit by bit
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    monkeypatch.delenv("FLATOUT_AGENT", raising=False)
    assert pulse().folder is None
    with pytest.raises(RuntimeError), (alone := Pulse()).waiting():
        raise RuntimeError
    assert alone.state is State.WAITING, "whoever gets no answer was waiting"


@pytest.mark.parametrize("stopping", [False, True], ids=["to the end", "stopped"])
def test_a_host_does_not_wait_for_ever_where_something_silent_listens(stopping: bool, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(many_hosts, "_CONNECT", 0.2)
        hosts = ManyHosts(1, 2, 1, listening.getsockname(), patience=600 if stopping else 0.3)
        with pytest.raises(UsageError, match=r"cannot reach host 0 at .* does not answer") as raised:
            hosts.meet(Left(), lambda: stopping).__enter__()
        assert "--node-rank 0" in raised.value.hint


def test_workers_learn_what_earlier_attempts_left(monkeypatch: pytest.MonkeyPatch):
    with OneHost(2).meet(Left("runs/x", True, 4, 1), lambda: False) as (place, _, attempt, _listen):
        assert (place.first, place.count, place.size) == (0, 2, 2)
    variables = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in {**variables, "FLATOUT_AGENT": attempt.as_json()}.items():
        monkeypatch.setenv(name, value)
    found = launch()
    assert found is not None
    assert (found.rank, found.size, found.local) == (5, 8, 1)
    assert found.attempt == attempt == Attempt("1", attempt.listen, "runs/x", True, 4)
    assert (found.folder, found.resumes) == (Path("runs/x"), True)


DYING = """
import os, signal
from pathlib import Path
from flatout.pulse import State, pulse
told = pulse()
told.note_run(Path("run"), accepted=True)
told.set_state(State.WORKING)
told.at_step(41)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_restart_says_from_where_and_how_much_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Killed in step 41 with step 30 saved: 40 steps were done, and ten of them come again."""

    def start(command: Any, environment: Any, rank: int, local: int, listen: int | None) -> agent.WorkerProcess:
        process = subprocess.Popen([sys.executable, "-c", DYING], env=environment, start_new_session=True)
        return agent.WorkerProcess(process, rank, local)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "_start", start)
    with pytest.raises(UserError) as caught:
        Agent(["train"], OneHost(1), restarts=1, timeout=60).run()
    assert caught.value.hint == "the run has reached the beginning: nothing was saved yet"
    line = "in step 41: starting all ranks again from the beginning, 40 steps are repeated (0 of 1 restarts left)"
    assert capfd.readouterr().err.rstrip().endswith(line)
    for step in (20, 30):
        saved = Path("run/checkpoints") / f"step-{step:08d}"
        saved.mkdir(parents=True)
        for name in CHECKPOINT_FILES:
            (saved / name).touch()
    with pytest.raises(UserError, match="all 2 restarts are used up") as caught:
        Agent(["train"], OneHost(1), restarts=2, timeout=60).run()
    assert caught.value.hint.startswith("the run has reached step 30: the same command with --resume auto")
    assert caught.value.exit_code == 137
    lines = [line.partition(" was killed by SIGKILL ")[2] for line in capfd.readouterr().err.splitlines()]
    again = "in step 41: starting all ranks again from step 30, 10 steps are repeated"
    assert lines == [f"{again} (1 of 2 restarts left)", f"{again} (0 of 2 restarts left)"]


def test_workers_see_the_variables_of_torchrun_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(agent, "_start", lambda _, environment, *__: seen.append(environment))
    monkeypatch.setattr(agent, "whole_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    agent.Workers(["train"], Place(4, 2, 6, "there", 29500), Attempt("1", None, None, False, None), 3, tmp_path, None)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    assert [[one[name] for name in names] for one in seen] == [["6", "2", "there", "29500", "3"]] * 2
    assert [(one["RANK"], one["LOCAL_RANK"], one["OMP_NUM_THREADS"]) for one in seen] == [
        ("4", "0", "8"),
        ("5", "1", "8"),
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_signal_that_comes_while_workers_start_reaches_them(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Any, environment: Any, rank: int, local: int, listen: int | None) -> agent.WorkerProcess:
        os.kill(os.getpid(), signal.SIGTERM)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        started.append(process)
        return agent.WorkerProcess(process, rank, local)

    monkeypatch.setattr(agent, "_start", start)
    assert Agent(["train"], OneHost(1), restarts=0, timeout=600).run() == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid")
def test_a_signal_for_a_worker_that_has_just_ended_is_lost_and_nothing_else():
    worker = agent.WorkerProcess(
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True), 0, 0
    )
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    worker.signal(signal.SIGTERM)
    worker.look()
    assert worker.code == 3


# --- several hosts ----------------------------------------------------------------------------------------------------


def two_hosts() -> list[ManyHosts]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = "127.0.0.1", found.getsockname()[1]
    return [ManyHosts(1, 2, rank, place, 30.0) for rank in (0, 1)]


def met(hosts: Sequence[ManyHosts]) -> list[Place]:
    def meet(host: ManyHosts) -> Place:
        with host.meet(Left(), lambda: False) as (place, *_):
            return place

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(meet, hosts))


def test_hosts_bring_what_their_attempts_have_left_and_the_smallest_micro_batch_is_for_all(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    brought = [Left(None, False, 4, 1), Left("runs/x", True, 8, 3)]

    def meet(host: ManyHosts, left: Left) -> Left:
        with host.meet(left, lambda: False) as (_, found, *_rest):
            return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, two_hosts(), brought)) == [Left("runs/x", True, 4, 3)] * 2
    with ThreadPoolExecutor(2) as threads:  # in the other order
        assert list(threads.map(meet, two_hosts(), brought[::-1])) == [Left("runs/x", True, 4, 3)] * 2


def test_a_host_that_is_signalled_does_not_end_the_ranks_of_the_others_and_its_code_is_known(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = hosts = two_hosts()
    assert [place.first for place in met(hosts)] == [0, 1]
    assert second.others(AttemptEnd("stopped", 1, 143)) == ()
    time.sleep(1)
    assert not first.failed(), "rank 0 may still be writing"
    assert first_of([AttemptEnd("done", 0, 0), *first.others(AttemptEnd("done", 0, 0))]).code == 143


def test_host_0_may_be_lost_while_hosts_come_together(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = two_hosts()
    lost = first._connected(time.monotonic() + 600, lambda: False)
    lost.set("attempt", '"lost"')
    with ThreadPoolExecutor(1) as thread:
        came = thread.submit(met, [second])
        while not lost.check(["lost/came/1"]):
            time.sleep(0.01)
        del lost
        assert [place.first for place in [*met([first]), *came.result()]] == [0, 1]


def test_other_hosts_have_the_whole_timeout_to_come_and_a_minute_at_least():
    one, two = Launch(0, 8, 0, 8), Launch(0, 16, 0, 8)
    assert [one.patience(3.0), one.patience(600.0), two.patience(3.0), two.patience(600.0)] == [60, 60, 60, 600]


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"gpus": 8, "nodes": None, "node_rank": None, "meet": None, **given})


def test_srun_says_which_hosts_there_are(monkeypatch: pytest.MonkeyPatch):
    told = {"STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "2", "PROCID": "1", "STEP_NODELIST": "gpu[03-04]", "JOB_ID": "77"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    hosts = verbs_training._hosts(options())(600.0)
    assert isinstance(hosts, ManyHosts)
    assert (hosts._nodes, hosts._rank, hosts._meet) == (2, 1, ("gpu03", 20077))
    assert hosts._patience == 600.0
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(UsageError, match="16 tasks on 2 hosts"):
        verbs_training._hosts(options())
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_more_processes_than_gpus_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    loaded = load_config(None, ["train.steps=1"])
    with pytest.raises(HardwareError, match="--gpus 8, and this host has 2") as caught:
        verbs_training.start_workers(options(verb="train"), lambda: (loaded, []))
    assert caught.value.hint == "use --gpus 2, or speed.device=cpu to train without them"
    verbs_training._check_gpus(2, "auto")
    verbs_training._check_gpus(8, "cpu")


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(many_hosts, "_ANSWER", 0.1)  # there is nobody who has to read why
    first, _ = two_hosts()
    first._nodes, first._patience = 3, 0.1
    with (
        pytest.raises(UserError, match=r"1 of 3 hosts came within 0\.1 s: host 1, 2 did not"),
        first.meet(Left(), lambda: False),
    ):
        pass


def test_one_host_of_one_needs_no_place_to_meet():
    """The same command serves any number of hosts."""
    assert isinstance(verbs_training._hosts(options(nodes=1, node_rank=0, meet="here:29500"))(600.0), OneHost)
