"""The ready files for clusters: they parse, their flags exist, and their commands are what the page says."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout import cli
from flatout.front.verbs_training import _hosts
from flatout.front.words import Parser
from flatout.parallel.agent import OneHost
from flatout.parallel.many_hosts import ManyHosts

ROOT = Path(__file__).parents[2]
SLURM, SKYPILOT = ROOT / "examples" / "slurm.sbatch", ROOT / "examples" / "skypilot.yaml"
# What `sbatch` has; the value is checked where a mistake would show only in the queue.
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "exclusive": "",
    "time": r"\d\d:\d\d:\d\d", "signal": r"B:USR1@\d+", "requeue": "", "open-mode": "append",
}  # fmt: skip


class Taken(BaseException):
    """A command line was understood; what it asks for is not done."""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes programs of clusters that write their words to a file."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))

    def make(name: str, body: str) -> None:
        (folder / name).write_text(f'#!/bin/bash\necho "{name} ${{*@Q}}" >> "$SAID"\n{body}\n', encoding="utf-8")
        (folder / name).chmod(0o755)

    return make


def said(tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "said"
    return [shlex.split(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `flatout train` makes of a command line."""
    assert words[:2] == ["flatout", "train"]

    def stop(parser: Parser, words: list[str]) -> object:
        raise Taken(parse(parser, words))

    parse = Parser.parse
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse", stop)
        with pytest.raises(Taken) as taken:
            cli.main(words[1:])
    return taken.value.args[0]


def test_directives_of_slurm_are_known():
    text = SLURM.read_text(encoding="utf-8")
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", text, flags=re.MULTILINE))
    assert found.keys() == DIRECTIVES.keys()
    for name, value in found.items():
        assert re.fullmatch(DIRECTIVES[name], value), name
    assert text.index("#SBATCH") > text.index("sbatch --job-name"), "the command stands at the top"
    assert not re.search(r"^\s*[^#\s].*\n(.*\n)*#SBATCH", text, flags=re.MULTILINE), (
        "sbatch reads up to the first command"
    )


SLURM_ENVIRONMENT = {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "my-run"}


def test_slurm_starts_an_agent_on_each_host_that_resumes(
    tmp_path: Path, stubs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
):
    stubs("srun", "exit 7")
    words = ["bash", str(SLURM), "gpt2-124m", "data.folder=/a b"]
    done = subprocess.run(words, env={**os.environ, **SLURM_ENVIRONMENT}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, ""), "what ends the step ends the job"
    (srun,) = said(tmp_path)
    train = understood(srun[1:], monkeypatch)
    assert (train.gpus, train.nodes, train.resume, train.config) == (8, None, "auto", "gpt2-124m")
    assert train.overrides == ["output.folder=runs/my-run", "data.folder=/a b"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"}
    step |= {"SLURM_STEP_NODELIST": "node[3-4]", "SLURM_JOB_ID": "123456"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    hosts = _hosts(train)(1.0)
    assert isinstance(hosts, ManyHosts), "srun says which host is which"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has its handler in place; only Linux says so."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return True
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_slurm_saves_and_goes_back_to_the_queue_near_its_limit(tmp_path: Path, stubs: Callable[[str, str], None]):
    stubs("scontrol", "")
    # A step that saves for a moment after SIGTERM.
    stubs("srun", 'trap \'sleep 0.2; echo saved >> "$SAID"; exit 143\' TERM\necho up >> "$SAID"\nsleep 30 & wait')
    job = subprocess.Popen(["bash", str(SLURM)], env={**os.environ, **SLURM_ENVIRONMENT}, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while not (["up"] in said(tmp_path) and catches(job.pid, signal.SIGUSR1)) and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(600) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # the sleep that the stub left behind
            os.killpg(job.pid, signal.SIGKILL)
    assert said(tmp_path)[-2:] == [["saved"], ["scontrol", "requeue", "123456"]], "in this order"


def test_skypilot_runs_the_same_command_on_every_host(
    tmp_path: Path, stubs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
):
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    assert set(task) == {"name", "num_nodes", "workdir", "resources", "envs", "volumes", "setup", "run"}
    assert all(task["envs"]["RUN"].startswith(place) for place in task["volumes"])
    stubs("flatout", "")
    environment = {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **task["envs"]}
    for nodes, rank, kind in (("2", "1", ManyHosts), ("1", "0", OneHost)):
        place = {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NODE_RANK": rank}
        subprocess.run(["bash", "-euc", task["run"]], env={**os.environ, **environment, **place}, check=True)
        train = understood(said(tmp_path)[-1], monkeypatch)
        assert (train.gpus, train.nodes, train.node_rank) == (8, int(nodes), int(rank))
        assert (train.meet, train.resume, train.config) == ("10.0.0.1:29500", "auto", "gpt2-124m")
        words = ["output.folder=/shared/runs/my-run", "data.folder=/shared/tokens"]
        assert train.overrides == words
        assert isinstance(_hosts(train)(1.0), kind)
    subprocess.run(["bash", "-nc", task["setup"]], check=True)


def test_the_page_gives_the_commands_of_the_files():
    page = (ROOT / "docs" / "guides" / "many-gpus.md").read_text(encoding="utf-8")
    for path in (SLURM, SKYPILOT):
        (command,) = re.findall(r"^# {5}(\S.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert command in page
