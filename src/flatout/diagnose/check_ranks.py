"""Several GPUs of this host: whether they are there, reach each other, and can share a batch.

`look_at_ranks` gathers facts; values that are not reported are None, or left out. `check_ranks` judges them and touches
nothing. Where several ranks were not asked for, what would be bad for them is a note. Ranks that start compare what
they have by themselves (`parallel.ranks`, `resolve.form`). This module imports torch: only where
`Machine.torch.usable`.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from flatout.diagnose.machine import Machine
from flatout.errors import UnevenError, in_gib, many
from flatout.finding import Check, Finding, sentence
from flatout.resolve.opening import check_even
from flatout.resolve.plan import RunPlan

SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_MEMORY = 2**30  # as NVIDIA's documentation of NCCL has it for containers
_check = functools.partial(Check, "ranks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """What `size` ranks need, which were `asked` for or are only possible; None for what is unknown."""

    size: int
    asked: bool
    nccl: str | None = ""  # None where torch has none
    apart: tuple[tuple[int, int], ...] = ()  # GPUs that cannot read each other's memory
    shared_memory_bytes: int | None = None


def look_at_ranks(several: Several, kind: str) -> Several:
    """What several ranks on devices of this kind need, as far as this host reports it."""
    apart = unlinked(several.size) if kind == "cuda" else ()
    return dataclasses.replace(several, nccl=nccl_version(), apart=apart, shared_memory_bytes=shared_memory_bytes())


def unlinked(size: int) -> tuple[tuple[int, int], ...]:
    """Pairs of the first GPUs that cannot read each other's memory."""
    pairs = itertools.combinations(range(min(size, torch.cuda.device_count())), 2)
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where it has none."""
    with contextlib.suppress(Exception):
        if dist.is_available() and dist.is_nccl_available():
            from torch.cuda import nccl

            return ".".join(str(part) for part in nccl.version())
    return None


def shared_memory_bytes() -> int | None:
    """The size of the memory that processes of this host share."""
    with contextlib.suppress(OSError, AttributeError):
        found = os.statvfs(SHARED_MEMORY)
        return found.f_frsize * found.f_blocks
    return None


# --- judged -----------------------------------------------------------------------------------------------------------


def check_ranks(several: Several, machine: Machine, kind: str) -> Iterator[Finding | None]:
    """`kind` is that of the device."""
    if kind != "cuda":
        yield _check("ranks").ok(f"{several.size} processes on this host share its cores")
        return
    yield _cards(several, machine)
    yield _library(several)
    yield _links(several)
    yield _shared_memory(several)


def _cards(several: Several, machine: Machine) -> Finding:
    cards = len(machine.cards)
    if several.size > cards:
        return _check("ranks").bad(
            f"{several.size} GPUs were asked for, and this host has {cards}",
            f"Use --gpus {cards}, or ask on the host that has them.",
        )
    names = Counter(card.name for card in machine.cards[: several.size])
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        return _check("ranks").warn(found, "All ranks do equal work, so the slowest card sets the pace of the others.")
    return _check("ranks").ok(found)


def _library(several: Several) -> Finding:
    if several.nccl is None:
        advice = "GPUs exchange gradients by NCCL. Install a CUDA build of torch for Linux; it brings NCCL along."
        return _check("nccl").finding("bad" if several.asked else "note", "this torch has no NCCL", advice)
    return _check("nccl").ok(f"NCCL {several.nccl}")


def _links(several: Several) -> Finding:
    if not several.apart:
        return _check("links").ok("all pairs of GPUs read each other's memory")
    first, second = several.apart[0]
    more = f", nor can {many(len(several.apart) - 1, 'other pair')}" if len(several.apart) > 1 else ""
    return _check("links").warn(
        f"GPUs {first} and {second} cannot read each other's memory{more}",
        "Their gradients go through the host's memory, which is slow; `nvidia-smi topo -m` shows the links. In a "
        "virtual machine or with an IOMMU this is often a setting of the host (ACS); in a container, all GPUs must be "
        "visible to every process.",
    )


def _shared_memory(several: Several) -> Finding | None:
    size = several.shared_memory_bytes
    if size is None:
        return None
    return _check("shared memory").warn_if(
        size < LEAST_SHARED_MEMORY,
        f"/dev/shm has {in_gib(size)}",
        "NCCL connects processes of a host through it and fails where it is full. Start the container with "
        "--shm-size=1g or more, or with --ipc=host.",
    )


def check_share(plan: RunPlan, several: Several) -> Finding | None:
    """Whether ranks share a step evenly."""
    if plan.fine_tunes:
        return None
    check, windows = _check("batch"), plan.schedule.at(plan.steps).windows
    try:
        check_even(plan.data, several.size)
    except UnevenError as error:
        return check.finding("bad" if several.asked else "note", error.message, sentence(error.hint))
    return check.ok(f"{windows // several.size} of {windows} windows of {plan.model.context:,} tokens a rank and step")
