"""--gpus and its like: the options by which `train` and `finetune` start several processes themselves."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flatout.errors import HardwareError, UsageError, UserError, many
from flatout.launch import AGENT, START, launch, place_of_slurm
from flatout.words import Parser, quoted

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig
    from flatout.parallel.agent import Hosts

_MOST = 1024
Found = TypeVar("Found")


def add_launching(parser: Parser) -> None:
    number = parser.number
    number("--gpus", 1, _MOST, metavar="N", help="train with N processes, one for each GPU; without GPUs, on the CPU")
    number("--nodes", 1, _MOST, metavar="M", help="hosts that train together; give the same command on each")
    number("--node-rank", 0, _MOST - 1, metavar="R", help="number of this host, from 0")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where hosts meet: an address of host 0 and a free port")
    number("--restarts", 0, 1000, metavar="K", default=3, help="restarts after crashes, kills and hangs (default 3)")


def starts_workers(parsed: argparse.Namespace) -> bool:
    """Whether this process is to start others, rather than to train; refuses options that do not go together."""
    if os.environ.get(AGENT):
        return False  # this is one of them
    alone = [name for name in ("nodes", "node_rank", "meet") if getattr(parsed, name) is not None]
    if parsed.gpus is None:
        if alone:
            option = f"--{alone[0].replace('_', '-')}"
            raise UsageError(
                f"{option} goes with --gpus", f"add --gpus N, the GPUs of this host, or leave {option} out"
            )
        return False
    if os.name == "nt":
        raise HardwareError(
            "--gpus needs signals and process groups, which Windows does not have",
            "use Flatout in WSL, or leave --gpus out and train on one GPU",
        )
    found = launch() if "WORLD_SIZE" in os.environ else None
    if found is not None:
        raise UsageError(
            f"--gpus starts processes, and a launcher has started {found.size} already",
            "leave --gpus out under torchrun, or start `flatout train --gpus N` by itself",
        )
    return True


def start_workers(
    verb: str, parsed: argparse.Namespace, checked: "Callable[[], tuple[LoadedConfig | None, Sequence[str]]]"
) -> int:
    """Starts the processes and stays with them to the end; returns the command's exit code.

    `checked` loads the config, and has the words for them: what is wrong is told here, once, and not by every process.
    """
    from flatout.config.sections import ParallelConfig
    from flatout.parallel.agent import Agent

    hosts_of = _hosts(parsed)
    try:
        loaded, words = checked()
        _check_gpus(parsed.gpus, None if loaded is None else loaded.config.speed.device)
    except UserError as error:
        raise hosts_of(START).refuse(error) from error
    timeout = (ParallelConfig() if loaded is None else loaded.config.parallel).timeout
    return Agent([verb, *words], hosts_of(max(START, timeout)), restarts=parsed.restarts, timeout=timeout).run()


def told_by_one(checked: Callable[[], Found]) -> Found:
    """Understands a command. In one of several processes, one of them tells what is wrong with it."""
    try:
        return checked()
    except UserError as error:
        found = launch()
        if found is None or found.size == 1:
            raise
        from flatout.parallel.ranks import refuse

        raise refuse(found, error) from error


def _hosts(parsed: argparse.Namespace) -> "Callable[[float], Hosts]":
    """How the agents of all hosts meet, given how long to wait for them."""
    from flatout.parallel.agent import OneHost

    nodes, rank, meet = parsed.nodes, parsed.node_rank, parsed.meet
    if nodes is None and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        nodes, rank, meet = _of_slurm(rank, meet)
    if nodes is None and (meet is not None or rank is not None):
        raise UsageError("--node-rank and --meet are for several hosts", "add --nodes M, or leave them out")
    if nodes is None or (nodes == 1 and not rank):
        return lambda _patience: OneHost(parsed.gpus)
    found = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d{1,5})", meet or "")
    if rank is None or found is None or not 0 < int(found[2]) < 65536:
        wrong = "--node-rank" if rank is None else "--meet" if meet is None else f"--meet {quoted(meet)}"
        raise UsageError(
            f"{wrong} is missing" if rank is None or meet is None else f"{wrong} is not HOST:PORT",
            f"give --nodes {nodes} --node-rank R --meet HOST:PORT on each host: its number from 0, and an address of "
            "host 0 with a free port",
        )
    if rank >= nodes:
        raise UsageError(f"--node-rank {rank} is not below --nodes {nodes}", "hosts are numbered from 0")
    from flatout.parallel.many_hosts import ManyHosts

    place = found[1], int(found[2])
    return lambda patience: ManyHosts(parsed.gpus, nodes, rank, place, patience)


def _of_slurm(rank: int | None, meet: str | None) -> tuple[int, int | None, str | None]:
    """srun has started one agent on each host, and says which."""
    tasks, hosts = (int(os.environ.get(f"SLURM_STEP_NUM_{name}", "1")) for name in ("TASKS", "NODES"))
    if tasks != hosts:
        raise UsageError(
            f"srun has started {many(tasks, 'task')} on {many(hosts, 'host')}, and --gpus starts the processes of a "
            "host itself",
            "use --ntasks-per-node=1 with --gpus, or one task for each GPU and no --gpus",
        )
    place_of_slurm()
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return hosts, int(os.environ["SLURM_PROCID"]) if rank is None else rank, meet or where


def _check_gpus(asked: int, device: str | None) -> None:
    """Refuses more processes than there are GPUs, as far as that can be seen without torch."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if names is None else len(names.split(","))
    if device in (None, "cpu") or ":" in device or not cards or asked <= cards or names == "":
        return
    raise HardwareError(
        f"--gpus {asked}, and this host has {cards}", f"use --gpus {cards}, or speed.device=cpu to train without them"
    )
