"""Two hosts, as network namespaces with addresses of their own: a link that is cut, a host that is lost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.many import Command, assert_same_end, last_step, words
from tests.end_to_end.two_hosts import Hosts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
STEPS, TIMEOUT = 240, 8


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.end()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        made.__exit__()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.__exit__()


@pytest.mark.slow
def test_a_cut_link_and_a_lost_host_change_nothing_but_time(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Hosts, started: list[Command]
):
    monkeypatch.chdir(tmp_path)
    arguments = words(corpus, "run", STEPS, 20, timeout=TIMEOUT)
    first, second = (hosts.start(host, arguments) for host in (0, 1))
    started += [first, second]
    first.wait_until(lambda: last_step("run") >= 25)
    hosts.set_link("down")
    time.sleep(2)
    hosts.set_link("up")
    first.wait_until(lambda: last_step("run") >= 50)
    assert "starting all ranks again" not in first.told, "a short cut is waited for"
    hosts.set_link("down")
    time.sleep(2 * TIMEOUT)
    hosts.set_link("up")
    reached = last_step("run")
    first.wait_until(lambda: last_step("run") > reached + 25)
    assert "starting all ranks again" in first.told
    assert "starting all ranks again" in second.told
    for pid in (second.process.pid, *second.ranks().values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    second.wait()
    assert not second.left_behind()
    returned = hosts.start(1, arguments)
    started.append(returned)
    assert first.wait(300) == 0, first.told
    assert returned.wait(60) == 0, returned.told
    print(first.told, second.told, sep="\n---\n")
    alone = Command([*words(corpus, "reference", STEPS, 20, timeout=TIMEOUT), "--gpus", "2"], log="told-alone")
    started.append(alone)
    assert alone.wait(300) == 0, alone.told
    assert_same_end("run", "reference", STEPS)
