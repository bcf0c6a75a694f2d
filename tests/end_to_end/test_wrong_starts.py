"""Runs of two hosts that are started wrongly: one error from one of them, a hint, exit code 2, nothing left running.

Both hosts are this machine, each with a working directory of its own: what is not shared is the other's alone.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.many import Command, words

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes where Linux lists them")
TEXTS = ("the old fox over the moon.\n" * 400, "the red cow over the dog.\n" * 400)


class Hosts:
    """Two commands that are to meet, and what each of them told."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "host-0", folder / "host-1"]
        self.commands: list[Command] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.place = f"127.0.0.1:{free.getsockname()[1]}"
        for here in self.folders:
            here.mkdir()
            (here / "text.txt").write_text(TEXTS[0])

    def start(self, host: int, *more: str, fault: str = "") -> None:
        os.chdir(self.folders[host])
        asked = [*words(Path("text.txt"), "run", 5), "data.folder=data", *more]
        meet = ["--gpus", "1", "--nodes", "2", "--node-rank", str(host), "--meet", self.place]
        self.commands.append(Command([*asked, *meet], fault))

    def ended(self) -> list[tuple[int, list[str]]]:
        """Exit codes, and the lines that were told."""
        found = []
        for command, here in zip(self.commands, self.folders, strict=False):
            while command.process.poll() is None:
                command.ranks()
                time.sleep(0.05)
            assert not command.left_behind()
            found.append((command.wait(), (here / "told").read_text().splitlines()))
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    before, made = Path.cwd(), Hosts(tmp_path)
    yield made
    os.chdir(before)
    for command in made.commands:
        command.end()


def other_versions(hosts: Hosts) -> None:
    hosts.start(0)
    hosts.start(1, fault="version")


def other_data(hosts: Hosts) -> None:
    (hosts.folders[1] / "text.txt").write_text(TEXTS[1])
    shared = f"output.folder={hosts.folders[0] / 'run'}"
    hosts.start(0, shared)
    hosts.start(1, shared)


def missing_variables(hosts: Hosts) -> None:
    os.chdir(hosts.folders[0])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
            patch.setenv(name, value)
        hosts.commands.append(Command(words(Path("text.txt"), "run", 5)))


def port_in_use(hosts: Hosts) -> None:
    host, port = hosts.place.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        hosts.start(0)
        hosts.commands[0].wait()


def folder_on_one_host(hosts: Hosts) -> None:
    hosts.start(0)
    hosts.start(1)


def config_on_one_host(hosts: Hosts) -> None:
    (hosts.folders[0] / "my.yaml").write_text("train: {steps: 3}\n")
    for host in (0, 1):
        hosts.start(host, "my.yaml")


CASES = {
    other_versions: (0, "rank 1 on"),
    other_data: (0, "rank 1 has data"),
    missing_variables: (0, "RANK is not set"),
    port_in_use: (0, "cannot open"),
    folder_on_one_host: (1, "run is not there"),
    config_on_one_host: (1, "my.yaml"),
}


SLOW = (other_versions, other_data, folder_on_one_host)  # ranks start, too


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
    ids=lambda case: case.__name__,
)
def test_one_host_tells_what_is_wrong(case, hosts: Hosts):
    speaker, message = CASES[case]
    case(hosts)
    ended = hosts.ended()
    assert [code for code, _ in ended] == [2] * len(ended)
    assert [len(lines) for _, lines in ended] == [2 if host == speaker else 0 for host in range(len(ended))]
    error, hint = ended[speaker][1]
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert not any((here / "run" / "metrics.jsonl").exists() for here in hosts.folders), "nothing was begun"
