"""Several GPUs: whether they are there, reach each other, share a batch and a folder, and run the same things.

Everything here judges `Several` and touches nothing. Where nobody asked for several ranks, what would be bad for them
is a note.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from flatout.config.schema import DataConfig
from flatout.diagnose.doctor import Link, Machine, Meeting, RankFacts, Several
from flatout.errors import in_gib
from flatout.finding import Check, Finding

# --- ranks that a launcher started ------------------------------------------------------------------------------------


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
    meeting = several.meeting
    yield _there(several, machine, kind)
    yield _library(several, kind)
    yield _links(several.links) if kind == "cuda" else None
    yield _shared_memory(several) if kind == "cuda" else None
    yield _port(several)
    yield from _folders(several)
    if meeting is not None and meeting.ranks:
        yield from _alike(meeting, kind)
        yield _reduction(several, meeting, reduce, parameters, step_seconds)


def check_rank_data(meeting: Meeting, data: DataConfig) -> Iterator[Finding]:
    """Whether all ranks have the same prepared data."""
    everywhere = [one.data for one in meeting.ranks]
    if len(everywhere) < 2 or not any(everywhere):
        return
    check = Check("data", "on all ranks")
    lacking = [one for one in meeting.ranks if one.data is None]
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
    others = [one for one in meeting.ranks if one.data not in (None, first)]
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
    if several.port is None:  # nobody looked
        return None
    if kind != "cuda":
        return _check("nccl").ok("not needed: without GPUs gradients go by gloo")
    if several.nccl is None:
        advice = "GPUs exchange gradients by NCCL. Install a CUDA build of torch for Linux; it brings NCCL along."
        return _wrong(several, "nccl", "this torch has no NCCL", advice)
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
        "`flatout plan --intra` reckons with it.",
    )


def _pairs(links: Sequence[Link]) -> str:
    named = [f"{link.pair[0]} and {link.pair[1]}" for link in links[:4]]
    more = f" and {len(links) - 4} more pairs" if len(links) > 4 else ""
    return f"GPUs {', '.join(named)}{more}"


def _shared_memory(several: Several) -> Finding | None:
    sizes = [several.shared_memory_bytes]
    sizes += [] if several.meeting is None else [one.shared_memory_bytes for one in several.meeting.ranks]
    least = min((size for size in sizes if size is not None), default=None)
    if least is None:
        return None
    found = f"/dev/shm has {in_gib(least)}" if least >= 2**27 else f"/dev/shm has {least / 2**20:.0f} MiB"
    if least < LEAST_SHARED_MEMORY:
        return _check("shared memory").warn(
            found,
            "NCCL connects processes of a host through it and fails where it is full. Start the container with "
            "--shm-size=1g or more, or with --ipc=host.",
        )
    return _check("shared memory").ok(found)


def _port(several: Several) -> Finding | None:
    if several.meeting is not None or several.port is None or several.port_free is None:
        return None
    if several.port_free:
        return _check("port").ok(f"{several.port} is free")
    return _check("port").note(
        f"{several.port}, torchrun's own, is in use, perhaps by another run",
        "Give torchrun another one (--master-port), or --standalone, which looks for a free one.",
    )


def _folders(several: Several) -> Iterator[Finding]:
    meeting = several.meeting
    blind = [one for one in meeting.ranks if one.unseen] if meeting is not None else []
    if blind:
        yield _check("run folder").bad(
            f"rank 0 wrote a file in {meeting.folder if meeting else ''}, and {_named(blind)} does not see it",
            "Set output.folder to one that all hosts share, under the same path on each.",
        )
    for name, (folder, kind) in several.mounts.items():
        if blind and name == "run folder":
            continue
        shared = kind.rpartition(".")[2].startswith(_SHARED)
        runs = name == "run folder"
        seen = f", and {several.size} ranks see it" if runs and meeting is not None and meeting.folder else ""
        found = f"{folder} is on {kind}{seen}"
        if runs and kind.rpartition(".")[2].startswith(_BUCKETS):
            yield _check(name).warn(
                f"{found}, a bucket",
                "A checkpoint appears by renaming its folder, and buckets cannot rename. Use a volume for runs.",
            )
        elif runs and several.hosts > 1 and not shared and not seen:
            yield _check(name).warn(found, "Other hosts hardly see it. Use a folder that all hosts share.")
        else:
            yield _check(name).ok(found + ("" if shared or seen else ", which other hosts do not see"))


# --- what ranks say ---------------------------------------------------------------------------------------------------


def _alike(meeting: Meeting, kind: str) -> Iterator[Finding]:
    different = [
        _differing(meeting, "Python", lambda one: one.python, "warn", "Install the same version on all hosts."),
        _differing(
            meeting, "NCCL", lambda one: one.nccl or "none", "bad", "Ranks with different versions do not connect."
        ),
        _differing(
            meeting,
            "device",
            lambda one: one.device,
            "warn",
            "All ranks do equal work, so the slowest sets the pace of the others.",
        ),
        _differing(
            meeting,
            "variables",
            lambda one: " ".join(f"{name}={value}" for name, value in sorted(one.variables.items())) or "none set",
            "warn",
            "Ranks whose NCCL_ or GLOO_ variables differ can wait for each other forever. Set them alike.",
        ),
    ]
    told = [finding for finding in different if finding is not None and (kind == "cuda" or finding.name != "NCCL")]
    yield from told
    if not told:
        yield _check("versions").ok("the same flatout, torch, Python and NCCL on all ranks")


def _differing(
    meeting: Meeting, name: str, value: Callable[[RankFacts], str], status: str, advice: str
) -> Finding | None:
    first = value(meeting.ranks[0])
    others = [one for one in meeting.ranks if value(one) != first]
    if not others:
        return None
    found = f"rank 0 on {meeting.ranks[0].host} has {first}, {_named(others)} has {value(others[0])}"
    return _check(name).bad(found, advice) if status == "bad" else _check(name).warn(found, advice)


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
    bandwidth = moved * meeting.reduced_bytes / seconds
    found = (
        f"{meeting.reduced_bytes / 2**20:.0f} MiB in {1000 * seconds:.2f} ms by {backend}: bus bandwidth "
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


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _named(ranks: Iterable[RankFacts]) -> str:
    listed = list(ranks)
    more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
    return f"rank {listed[0].rank} on {listed[0].host}{more}"


def _wrong(several: Several, name: str, found: str, advice: str) -> Finding:
    return _check(name).told("bad" if several.asked else "note", found, advice)
