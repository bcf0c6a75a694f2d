"""Two hosts, as network namespaces, and eight faults under our agent and under torchrun. By hand, as root, on Linux:

    python -m tests.end_to_end.two_hosts --json two-hosts.jsonl

Each fault hits a run of two ranks, one on each host. A host that is lost gets the same command again. If the run is not
on again after a minute, or has ended, both hosts get it again. The run must end with the weights of an undisturbed one.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.many import ROOT, Command, assert_same_end, last_step, saved_steps, words

TIMEOUT = 8  # parallel.timeout
STEPS, EVERY, AT = 90, 20, 30  # of the run, between saves, and of the fault
LIMIT = 60  # seconds in which a run should be on again by itself
FAULTS = ("long cut", "host 1 lost", "host 0 lost", "rank killed", "rank stopped", "rank hangs", "memory", "sigterm")


Start = Callable[[int], Command]  # the command of a host


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

    def start(self, host: int, arguments: list[str], fault: str = "slow") -> Command:
        """Our command on one host."""
        meet = ["--nodes", "2", "--node-rank", str(host), "--meet", f"{self.addresses[0]}:29511"]
        prefix = ("ip", "netns", "exec", self.names[host])
        return Command([*arguments, "--gpus", "1", *meet], fault, prefix, log=f"told-{host}")

    def start_torchrun(self, host: int, arguments: list[str], fault: str = "slow") -> Command:
        """The same run under torchrun, with its own rendezvous."""
        # Without the last three each finds itself under the machine's name, which both namespaces share.
        rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-endpoint", f"{self.addresses[0]}:29511", "--rdzv-id", "run"]
        rendezvous += ["--rdzv-conf", f"is_host={host == 0}", "--local-addr", self.addresses[host]]
        settings = [f"GLOO_SOCKET_IFNAME={self.links[host]}"]
        prefix = ("ip", "netns", "exec", self.names[host], "env", *settings, sys.executable, "-m")
        prefix += ("torch.distributed.run", *rendezvous, "-m", "flatout")
        return _Torchrun([*arguments, "--resume", "auto"], fault, prefix, log=f"told-{host}")


class _Torchrun(Command):
    """The launcher runs `flatout` itself."""

    def __init__(self, arguments: list[str], fault: str, prefix: tuple[str, ...], log: str) -> None:
        self.log, self.seen = Path(log), {}
        path = os.pathsep.join([str(ROOT / "tests" / "end_to_end" / "faults"), str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault, "PYTHONPATH": path}
        with self.log.open("a") as told:
            command = [*prefix, "train", *arguments]
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=told)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclasses.dataclass
class Row:
    fault: str
    launcher: str
    seconds: float | None  # until the run was on again by itself, or had ended where it should
    again: int  # commands that the user had to give again, of a lost host its own not counted
    codes: list[int | None]  # of the commands in the end
    same: bool  # weights as without the fault
    saved: int  # the last step that was on the disk when the commands had ended, or after a minute
    lines: int  # that both hosts printed


def kill_all(command: Command) -> None:
    for pid in (*command.all_running(), *command.seen):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.process.wait()


def disturb(fault: str, launcher: str, hosts: Hosts, corpus: Path) -> Row:
    arguments = words(corpus, "run", STEPS, EVERY, timeout=TIMEOUT)
    start = hosts.start if launcher == "agent" else hosts.start_torchrun
    word = "slow memory" if fault == "memory" else "slow"
    commands = [start(host, arguments, word) for host in (0, 1)]
    try:
        return measured(fault, launcher, hosts, commands, lambda host: start(host, arguments, word))
    finally:
        for command in commands:
            command.ranks()
            kill_all(command)


def ended(commands: list[Command]) -> bool:
    return all(command.process.poll() is not None for command in commands)


def wait_for(happened: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (found := happened()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def measured(fault: str, launcher: str, hosts: Hosts, commands: list[Command], start: Start) -> Row:
    if fault != "memory" and not wait_for(lambda: last_step("run") >= AT or ended(commands), 120):
        raise RuntimeError("the run does not start")
    for command in commands:
        command.ranks()
    began = time.monotonic()
    if fault == "long cut":
        hosts.set_link("down")
        time.sleep(2 * TIMEOUT)
        hosts.set_link("up")
    elif fault.startswith("host"):
        lost = int(fault.split()[1])
        kill_all(commands[lost])
        time.sleep(3)
        commands[lost] = start(lost)
    elif fault.startswith("rank"):
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(fault.split()[1])
        if number is None:
            Path("hang-1").touch()
        else:
            os.kill(commands[1].ranks()[1] if launcher == "agent" else worker(commands[1]), number)
    elif fault == "sigterm":
        os.kill(commands[1].process.pid, signal.SIGTERM)
    beyond = last_step("run")
    if fault == "sigterm":
        fine = wait_for(lambda: ended(commands), LIMIT)
    else:
        fine = wait_for(lambda: last_step("run") > beyond + 5 or ended(commands), LIMIT) and last_step("run") > beyond
    seconds, again, saved = time.monotonic() - began, 0, (saved_steps("run") or [0])[-1]
    codes = [command.process.poll() for command in commands]
    if fault == "sigterm" and fine:
        commands[:] = resumed(hosts, launcher, start)  # as anybody would who stopped it
    if not fine:
        for command in commands:
            command.ranks()
            kill_all(command)
        Path("hang-1").unlink(missing_ok=True)
        again = 2
        commands[:] = resumed(hosts, launcher, start)
    wait_for(lambda: ended(commands), 150)
    final = [command.process.poll() for command in commands]
    try:
        assert_same_end("run", "../reference", STEPS)
        same = True
    except Exception:  # noqa: BLE001 - a run that has not come to its end has no such checkpoint
        same = False
    lines = sum(len(Path(f"told-{host}").read_text().splitlines()) for host in (0, 1))
    return Row(fault, launcher, seconds if fine else None, again, [*codes, *final], same, saved, lines)


def resumed(hosts: Hosts, launcher: str, start: Start) -> list[Command]:
    """The same command on both hosts. Ours refuses a folder that holds a run, unless it is to resume."""
    if launcher == "torchrun":
        return [start(host) for host in (0, 1)]
    source = Path("../text").resolve()
    arguments = [*words(source, "run", STEPS, EVERY, timeout=TIMEOUT), "--resume", "auto"]
    return [hosts.start(host, arguments, "slow") for host in (0, 1)]


def worker(command: Command) -> int:
    """The worker of a torchrun, by the name that our faults give it."""
    for pid in command.all_running():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("rank "):
                return pid
    raise RuntimeError("there is no worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("two-hosts.jsonl"))
    parser.add_argument("--faults", nargs="*", default=FAULTS)
    parser.add_argument("--launchers", nargs="*", default=("agent", "torchrun"))
    asked = parser.parse_args()
    out = asked.json.resolve()
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        os.chdir(folder)
        source = Path("text").resolve()
        source.mkdir()
        for number in range(40):
            (source / f"{number}.txt").write_text(f"{number} birds are in the tree. " * (number % 7 + 3))
        alone = Command([*words(source, "reference", STEPS, EVERY, timeout=TIMEOUT), "--gpus", "2"], "slow", ("env",))
        assert alone.wait(300) == 0, alone.told
        for fault in asked.faults:
            for launcher in asked.launchers:
                place = Path(folder, f"{fault}-{launcher}".replace(" ", "-"))
                place.mkdir()
                os.chdir(place)
                began = time.monotonic()
                try:
                    row = dataclasses.asdict(disturb(fault, launcher, hosts, source))
                except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                    row = {"fault": fault, "launcher": launcher, "error": repr(error)}
                hosts.set_link("up")
                row["all"] = round(time.monotonic() - began, 1)
                for host in (0, 1):
                    told = Path(f"told-{host}")
                    text = told.read_text(errors="replace") if told.exists() else ""
                    Path(f"{out}.{place.name}-{host}.txt").write_text(text)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
