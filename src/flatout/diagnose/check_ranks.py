"""Several GPUs: whether they are there, reach each other, share a batch and a folder, and run the same things.

Facts come first: links between the GPUs of this host, NCCL, file systems, and what ranks of a launcher say of
themselves and of each other. Values that are not reported are None, or left out. Every rank calls `meet` with the same
config. The first one gets a `Meeting`, also where they could not work together; in the others an error
goes on as it does in training. A file is written to the run's folder, or the nearest one above it that exists, and
removed again.
`check_ranks` judges them and touches nothing. Where several ranks were not asked for, what would be bad for them is a
note. This module imports torch: only where `Machine.torch.usable`.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import platform
import re
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.config.alike import shared_settings
from flatout.config.load import LoadedConfig
from flatout.config.schema import DataConfig, ParallelConfig
from flatout.data.prepare import data_folder, has_dataset
from flatout.data.shards import read_manifest
from flatout.device import detect_device
from flatout.diagnose.check_folder import RUNS, folder_of
from flatout.diagnose.machine import CardState, Machine, nvml
from flatout.errors import UnevenError, UserError, first_line, in_gib
from flatout.finding import Check, Finding, Status, finding_of, sentence
from flatout.launch import Launch
from flatout.parallel.ranks import joined
from flatout.parallel.reducer import BUCKET_BYTES
from flatout.resolve.opening import check_even
from flatout.resolve.plan import RunPlan
from flatout.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How two GPUs of this host reach each other; None for values that are not reported."""

    pair: tuple[int, int]
    nvlink: bool | None = None
    peer: bool | None = None  # whether they read each other's memory without the host
    way: str = ""  # what lies between them on PCIe


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank says of itself. `data` is the fingerprint of its prepared data, `unseen` what it cannot read."""

    rank: int
    host: str
    device: str = ""
    python: str = ""
    nccl: str | None = None
    shared_memory_bytes: int | None = None
    data: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""  # why it has no device
    unseen: str = ""
    reduce_seconds: float | None = None  # the median all-reduce
    reduce_error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """What came of ranks that a launcher started. `refused` is why they could not work together."""

    place: str  # address and port of the first one
    backend: str = ""  # of the device's tensors: nccl or gloo
    ranks: tuple[RankFacts, ...] = ()
    folder: str = ""  # where the first rank wrote a file for the others to read
    refused: Finding | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """What matters to `size` ranks, which somebody `asked` for, or which are only possible; None for what is unknown.

    `meeting` is None where no launcher started them. `mounts` has path and file system of each folder, by its name.
    """

    size: int
    asked: bool
    nccl: str | None = ""  # None where torch has none
    links: tuple[Link, ...] = ()
    shared_memory_bytes: int | None = None
    mounts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    meeting: Meeting | None = None

    @property
    def ranks(self) -> tuple[RankFacts, ...]:
        """Those of a launcher that have met."""
        return () if self.meeting is None else self.meeting.ranks

    @property
    def hosts(self) -> int:
        return 1 if self.meeting is None else len({one.host for one in self.ranks})


SHARED_MEMORY = "/dev/shm"
# NVML's levels of topology, in the words of what lies between two cards.
_WAYS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one processor",
    50: "the link between processors",
}


def look_at_ranks(
    several: Several, asked: LoadedConfig | None, cards: Sequence[CardState], found: Launch | None
) -> Several:
    """What several ranks that share these cards need, as far as this host reports it; ranks of a launcher meet."""
    folders: dict[str, str | Path] = {"run folder": _run_folder(asked)}
    if asked is not None and asked.config.data.folder is not None:
        folders["data folder"] = asked.config.data.folder
    meeting = None if found is None else meet(found, asked)
    return dataclasses.replace(
        several,
        nccl=nccl_version(),
        links=read_links(cards),
        shared_memory_bytes=shared_memory_bytes(),
        mounts=file_systems(folders),
        interfaces=network_interfaces(),
        meeting=meeting,
    )


def _run_folder(asked: LoadedConfig | None) -> Path:
    return RUNS if asked is None else folder_of(asked.config.output)


def read_links(cards: Sequence[CardState]) -> tuple[Link, ...]:
    """A link for every pair of cards that torch sees."""
    with contextlib.suppress(Exception), nvml() as library:  # a driver that does not tell
        return links_of_nvml(library, cards)
    return ()


def links_of_nvml(library: Any, cards: Sequence[CardState]) -> tuple[Link, ...]:
    """The links between cards by an initialised NVML; none where a card has no UUID."""
    handles = [library.nvmlDeviceGetHandleByUUID(card.identity) for card in cards if card.identity]
    if len(handles) < len(cards):
        return ()

    def works(index: str, first: Any, second: Any) -> bool | None:
        with contextlib.suppress(Exception):
            status = library.nvmlDeviceGetP2PStatus(first, second, getattr(library, f"NVML_P2P_CAPS_INDEX_{index}"))
            return status == library.NVML_P2P_STATUS_OK
        return None

    links: list[Link] = []
    for one, two in itertools.combinations(range(len(handles)), 2):
        way = ""
        with contextlib.suppress(Exception):
            way = _WAYS.get(library.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[two]), "")
        pair = handles[one], handles[two]
        links.append(Link(pair=(one, two), nvlink=works("NVLINK", *pair), peer=works("READ", *pair), way=way))
    return tuple(links)


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


def file_systems(folders: Mapping[str, str | Path]) -> dict[str, tuple[str, str]]:
    """Each folder with the kind of file system that it lies on, or will lie on."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return {}
    return {
        name: (str(folder), kind)
        for name, folder in folders.items()
        if (kind := mount_of(os.path.realpath(folder), text))
    }


def mount_of(path: str, text: str) -> str:
    """The file system of a real path by the text of a mountinfo file; the last of several mounts on one place."""
    longest, kind = "", ""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), (before.split() + [""] * 5)[4])
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if place and after and inside and len(place) >= len(longest):
            words = after.split()
            bucket = words[0] == "fuse" and len(words) > 1  # its source says what it is
            longest, kind = place, f"fuse.{words[1]}" if bucket else words[0]
    return kind


def network_interfaces() -> tuple[str, ...]:
    with contextlib.suppress(OSError, AttributeError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


# --- ranks that a launcher started ------------------------------------------------------------------------------------

TELLING = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_REPEATS, _UNTIMED = 5, 2
_PATIENCE = 30.0  # seconds for the first all-reduce, in which NCCL also builds its connections
_SEEN_WITHIN = 3.0  # seconds: network folders show new files late


def meet(found: Launch, loaded: LoadedConfig | None) -> Meeting:
    """What all ranks say of themselves and of each other."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waits = ParallelConfig() if loaded is None else loaded.config.parallel
    device = "auto" if loaded is None else loaded.config.speed.device
    settings = None if loaded is None else shared_settings(loaded)
    timeout = min(waits.timeout, 2 * _PATIENCE)
    try:
        with joined(found, device, timeout=timeout, settings=settings) as world:
            return dataclasses.replace(_asked(world, device, loaded), place=place)
    except UserError as error:
        if found.rank:
            raise
        return Meeting(place=place, refused=finding_of(error, "ranks", "meeting"))


def _asked(world: World, device: str, loaded: LoadedConfig | None) -> Meeting:
    facts: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "nccl": nccl_version(),
        "shared_memory_bytes": shared_memory_bytes(),
        "data": None if loaded is None else _data(loaded),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(TELLING)},
    }
    values: torch.Tensor | None = None
    try:
        detected = detect_device(device, world.local)
        facts["device"] = detected.name
        values = torch.empty(BUCKET_BYTES // 4, device=detected.torch_device)
    except (UserError, RuntimeError) as error:  # no GPU for this rank, or one that is broken or full
        facts["error"] = error.message if isinstance(error, UserError) else first_line(error)
    with _file_for_all(world, _run_folder(loaded)) as path:
        facts["unseen"] = "" if path == "" or _is_seen(path) else path
        world.totals([0])  # all have looked before the file goes
    backend = ""
    if world.size > 1 and not world.any(values is None):
        assert values is not None
        backend = "nccl" if values.is_cuda and "cuda:nccl" in str(dist.get_backend_config()) else "gloo"
        facts |= _reduced(world, values)
    ranks = [RankFacts(**one) for one in world.gather(facts)]
    folder = str(Path(path).parent) if path else ""
    return Meeting(place="", backend=backend, ranks=tuple(ranks), folder=folder)


def _data(loaded: LoadedConfig) -> str | None:
    """The fingerprint of the prepared shards; None where there are none."""
    with contextlib.suppress(UserError):
        if loaded.config.data_kind == "text" and has_dataset(folder := data_folder(loaded.config.data)):
            return read_manifest(folder).fingerprint
    return None


@contextlib.contextmanager
def _file_for_all(world: World, folder: Path) -> Iterator[str]:
    """A file that the first rank has written; empty where it cannot, which the checks of the disk tell."""
    with contextlib.ExitStack() as held:
        path = ""
        if world.first:
            # as the config has it: a relative path means the working folder of each rank, as in training
            nearest = next((place for place in (folder, *folder.parents) if place.is_dir()), Path())
            with contextlib.suppress(OSError):
                made = held.enter_context(tempfile.NamedTemporaryFile(dir=nearest, prefix=".flatout-doctor-"))
                path = str(nearest / Path(made.name).name)
        yield world.broadcast(path)


def _is_seen(path: str) -> bool:
    until = time.monotonic() + _SEEN_WITHIN
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _reduced(world: World, values: torch.Tensor) -> dict[str, Any]:
    """The time of an all-reduce of `values`, or why there is none."""
    seconds: list[float] = []
    try:
        for number in range(_UNTIMED + _REPEATS):
            values.fill_(float(world.rank + 1))
            _settled(values.device)
            world.totals([0])
            began = time.perf_counter()
            work = dist.all_reduce(values, async_op=True)
            assert work is not None
            while number == 0 and not work.is_completed():
                if time.perf_counter() - began > _PATIENCE:
                    return {"reduce_error": f"it did not end within {_PATIENCE:.0f} s"}
                time.sleep(0.001)
            work.wait()
            _settled(values.device)
            seconds.append(time.perf_counter() - began)
        if not bool((values == world.size * (world.size + 1) / 2).all()):
            return {"reduce_error": "the sum is wrong"}
    except RuntimeError as error:
        return {"reduce_error": first_line(error)}
    return {"reduce_seconds": statistics.median(seconds[_UNTIMED:])}


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- judged -----------------------------------------------------------------------------------------------------------

_check = functools.partial(Check, "ranks")

LEAST_SHARED_MEMORY = 2**30  # as NVIDIA's documentation of NCCL has it for containers
_SLOW_NVLINK = 20e9  # bytes per second of bus bandwidth: no NVLink is so slow
_SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "wekafs", "panfs", "orangefs", "pvfs2")
_SHARED += ("9p", "virtiofs", "afs", "sshfs", "juicefs", "ocfs2", "gfs2")
_BUCKETS = ("s3fs", "gcsfuse", "goofys", "rclone", "blobfuse", "mountpoint-s3")


def check_ranks(
    several: Several,
    machine: Machine,
    kind: str,
    *,
    reduce: str = "fp32",
    parameters: int | None = None,
    step_seconds: float | None = None,
) -> Iterator[Finding | None]:
    """`kind` is that of the device, `reduce` is `parallel.reduce`; `step_seconds` is the least time of a rank's share
    of a step, if known."""
    yield _there(several, machine, kind)
    yield _library(several, kind)
    if kind == "cuda":
        yield _links(several.links)
        yield _shared_memory(several)
    yield from _folders(several)
    if several.meeting is not None and several.ranks:
        yield from _alike(several.ranks, kind)
        yield _reduction(several, several.meeting, reduce, parameters, step_seconds)


def check_rank_data(ranks: Sequence[RankFacts], data: DataConfig) -> Iterator[Finding]:
    """Whether all ranks have the same prepared data."""
    everywhere = [one.data for one in ranks]
    if len(everywhere) < 2 or not any(everywhere):
        return
    check = Check("data", "on all ranks")
    lacking = [one for one in ranks if one.data is None]
    if lacking and data.source is None:
        yield check.bad(
            f"{_named(lacking)} has no prepared data in {data.folder}",
            "Put it into a folder that all hosts see, under the same path on each, or copy it to each of them.",
        )
    elif lacking:
        yield check.note(
            f"{_named(lacking)} has no prepared data, and rank {next(i for i, d in enumerate(everywhere) if d)} has",
            "It is prepared there before training, which takes as long again. A folder that all hosts see needs it "
            "once.",
        )
    first = next(found for found in everywhere if found is not None)
    others = [one for one in ranks if one.data not in (None, first)]
    if others:
        yield check.bad(
            f"{_named(others)} has data {str(others[0].data)[:12]}, others have {first[:12]}",
            "Prepare the data once, in a folder that all hosts see, or copy it to each of them.",
        )
    elif not lacking:
        yield check.ok(f"the same data ({first[:12]}) on {len(everywhere)} ranks")


# --- this host --------------------------------------------------------------------------------------------------------


def _there(several: Several, machine: Machine, kind: str) -> Finding | None:
    """The ranks themselves, or cards for as many as were asked for."""
    meeting, check = several.meeting, _check("ranks")
    if meeting is not None:
        if meeting.refused is not None:
            return meeting.refused
        lacking = [one for one in meeting.ranks if one.error]
        if lacking:
            advice = "Start as many processes on a host as it has GPUs."
            return check.bad(f"{_named(lacking)}: {lacking[0].error}", advice)
        hosts = f"{several.hosts} hosts" if several.hosts > 1 else "one host"
        by = f", gradients by {meeting.backend}" if meeting.backend else ""
        return check.ok(f"{several.size} on {hosts} met at {meeting.place}{by}")
    cards = len(machine.cards)
    if kind != "cuda":
        return check.ok(f"{several.size} processes on this host, which share its cores")
    if several.size > cards:
        return check.bad(
            f"{several.size} GPUs were asked for, and this host has {cards}",
            f"Use --gpus {cards}. To check several hosts, start the doctor on all of them: `torchrun ... -m flatout "
            "doctor`.",
        )
    names = Counter(card.name for card in machine.cards[: several.size])
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        return check.warn(found, "All ranks do equal work, so the slowest card sets the pace of the others.")
    return check.ok(found)


def _library(several: Several, kind: str) -> Finding | None:
    if several.nccl == "":  # not looked for
        return None
    if kind != "cuda":
        return _check("nccl").ok("not needed: without GPUs gradients go by gloo")
    if several.nccl is None:
        advice = "GPUs exchange gradients by NCCL. Install a CUDA build of torch for Linux; it brings NCCL along."
        return _check("nccl").finding("bad" if several.asked else "note", "this torch has no NCCL", advice)
    return _check("nccl").ok(f"NCCL {several.nccl}")


def _links(links: Sequence[Link]) -> Finding | None:
    if not links:
        return None
    apart = [link for link in links if link.peer is False]
    if apart:
        where = f" ({apart[0].way} lies between)" if apart[0].way else ""
        return _check("links").warn(
            f"{_pairs(apart)} cannot read each other's memory{where}",
            "Their gradients go through the host's memory, which is slow. In a virtual machine or with an IOMMU this "
            "is often a setting of the host (ACS); in a container, all GPUs must be visible to every process.",
        )
    slow = [link for link in links if link.nvlink is False]
    if not slow:
        known = any(link.nvlink for link in links)
        return _check("links").ok("NVLink between all pairs" if known else "all pairs read each other's memory")
    ways = ", ".join(sorted({link.way for link in slow if link.way}))
    found = f"PCIe between {_pairs(slow) if len(slow) < len(links) else 'all pairs'}{f' ({ways})' if ways else ''}"
    return _check("links").note(
        found,
        "PCIe carries about a tenth of what NVLink does. Larger batches hide it, and parallel.reduce=bf16 halves it; "
        "`flatout estimate --gpus --intra` takes it.",
    )


def _pairs(links: Sequence[Link]) -> str:
    named = [f"{link.pair[0]} and {link.pair[1]}" for link in links[:4]]
    more = f" and {len(links) - 4} more pairs" if len(links) > 4 else ""
    return f"GPUs {', '.join(named)}{more}"


def _shared_memory(several: Several) -> Finding | None:
    sizes = [several.shared_memory_bytes, *(one.shared_memory_bytes for one in several.ranks)]
    least = min((size for size in sizes if size is not None), default=None)
    if least is None:
        return None
    return _check("shared memory").warn_if(
        least < LEAST_SHARED_MEMORY,
        f"/dev/shm has {in_gib(least)}",
        "NCCL connects processes of a host through it and fails where it is full. Start the container with "
        "--shm-size=1g or more, or with --ipc=host.",
    )


def _folders(several: Several) -> Iterator[Finding]:
    told = "" if several.meeting is None else several.meeting.folder
    blind = [one for one in several.ranks if one.unseen]
    if blind:
        yield _check("run folder").bad(
            f"rank 0 wrote a file in {told}, and {_named(blind)} does not see it",
            "Set output.folder to one that all hosts share, under the same path on each.",
        )
    for name, (folder, kind) in several.mounts.items():
        runs, system = name == "run folder", kind.rpartition(".")[2]
        if blind and runs:
            continue
        shared, seen = system.startswith(_SHARED), f", and {several.size} ranks see it" if runs and told else ""
        found = f"{folder} is on {kind}{seen}"
        if runs and system.startswith(_BUCKETS):
            yield _check(name).warn(
                f"{found}, a bucket",
                "A checkpoint appears by renaming its folder, and buckets cannot rename. Use a volume for runs.",
            )
        elif runs and several.hosts > 1 and not shared and not seen:
            yield _check(name).warn(found, "Other hosts hardly see it. Use a folder that all hosts share.")
        else:
            yield _check(name).ok(found + ("" if shared or seen else ", which other hosts do not see"))


# --- what ranks say ---------------------------------------------------------------------------------------------------


# What must be the same in all ranks: its value as text, how bad a difference is, and what to do.
_ALIKE: dict[str, tuple[Callable[[RankFacts], str], Status, str]] = {
    "Python": (lambda one: one.python, "warn", "Install the same version on all hosts."),
    "NCCL": (lambda one: one.nccl or "none", "bad", "Ranks with different versions do not connect."),
    "device": (lambda one: one.device, "warn", "All ranks do equal work, so the slowest sets the pace of the others."),
    "variables": (
        lambda one: " ".join(f"{name}={value}" for name, value in sorted(one.variables.items())) or "none set",
        "warn",
        "Ranks whose NCCL_ or GLOO_ variables differ can wait for each other forever. Set them alike.",
    ),
}


def _alike(ranks: Sequence[RankFacts], kind: str) -> Iterator[Finding]:
    different = False
    for name, (value, status, advice) in _ALIKE.items():
        first = value(ranks[0])
        others = [one for one in ranks if value(one) != first]
        if others and (kind == "cuda" or name != "NCCL"):
            different = True
            found = f"rank 0 on {ranks[0].host} has {first}, {_named(others)} has {value(others[0])}"
            yield _check(name).finding(status, found, advice)
    if not different:
        yield _check("versions").ok("the same flatout, torch, Python and NCCL on all ranks")


def _reduction(
    several: Several, meeting: Meeting, reduce: str, parameters: int | None, step_seconds: float | None
) -> Finding | None:
    check, backend = _check("all-reduce"), {"nccl": "NCCL"}.get(meeting.backend, meeting.backend)
    failed = [one for one in meeting.ranks if one.reduce_error]
    if failed:
        return check.bad(
            f"by {backend}, {_named(failed)}: {failed[0].reduce_error}",
            "NCCL_DEBUG=INFO tells which connection fails. A firewall between hosts, the wrong interface "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) or a full /dev/shm are the usual reasons.",
        )
    seconds = max((one.reduce_seconds or 0.0 for one in meeting.ranks), default=0.0)
    if several.size < 2 or seconds <= 0:
        return None
    moved = 2 * (several.size - 1) / several.size  # of a tensor's bytes, by each rank: as nccl-tests counts them
    bandwidth = moved * BUCKET_BYTES / seconds
    found = (
        f"{BUCKET_BYTES / 2**20:.0f} MiB in {1000 * seconds:.2f} ms by {backend}: bus bandwidth "
        f"{bandwidth / 1e9:.2f} GB/s"
    )
    if several.hosts == 1 and bandwidth < _SLOW_NVLINK and any(link.nvlink for link in several.links):
        return check.warn(
            found,
            "That is far less than NVLink gives. Look at NCCL_ variables, and at what NCCL_DEBUG=INFO says of P2P.",
        )
    if parameters is None:
        return check.ok(found)
    narrow = reduce == "bf16"
    sending = moved * parameters * (2 if narrow else 4) / bandwidth
    found += f"; gradients take {_ms(sending)} a step"
    if step_seconds is not None and sending > step_seconds:
        half = "" if narrow else " parallel.reduce=bf16 halves it."
        return check.warn(
            f"{found}, and a rank computes {_ms(step_seconds)} at least",
            f"Sending can only hide behind computing.{half} A larger train.batch_tokens gives more to compute, and "
            "changes what is learned; fewer ranks send less.",
        )
    return check.ok(found)


def check_share(plan: RunPlan, several: Several) -> Finding | None:
    """Whether ranks share a step evenly."""
    if plan.fine_tunes:
        return None
    check, windows = Check("ranks", "batch"), plan.schedule.at(plan.steps).windows
    try:
        check_even(plan.data, several.size)
    except UnevenError as error:
        divisors = [str(number) for number in range(1, min(windows, 4096) + 1) if windows % number == 0]
        few = f"{sentence(error.hint)[:-1]}: {', '.join(divisors[-8:])}."
        return check.finding("bad" if several.asked else "note", error.message, few)
    return check.ok(f"{windows // several.size} of {windows} windows of {plan.model.context:,} tokens a rank and step")


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _named(ranks: Sequence[RankFacts]) -> str:
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"rank {ranks[0].rank} on {ranks[0].host}{more}"
