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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
STEPS, TIMEOUT = 240, 8


@pytest.fixture
def started() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.end()


class Hosts:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        number = os.getpid() % 30000
        self.names = [f"flatout{number}a", f"flatout{number}b"]
        self.links = [f"fl{number}a", f"fl{number}b"]
        self.addresses = [f"10.{77 + number % 100}.0.{host}" for host in (1, 2)]

    def __enter__(self) -> "Hosts":
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def set_link(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], state)

    def start(self, host: int, arguments: list[str]) -> Command:
        meet = ["--nodes", "2", "--node-rank", str(host), "--meet", f"{self.addresses[0]}:29511"]
        prefix = ("ip", "netns", "exec", self.names[host])
        return Command([*arguments, "--gpus", "1", *meet], "slow", prefix, log=f"told-{host}")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


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
