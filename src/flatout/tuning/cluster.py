"""GPUs in hosts: what is known of some cards and their links, and how long a collective takes over them.

Idea: a collective is a ring, as NCCL plans it. Inside a host every GPU passes on all that it receives; between hosts
the GPUs of a host share what crosses. So the bandwidth between hosts counts once for each GPU that takes part:
sharding over hosts with a network card for each GPU is nearly as fast as inside one.

Contract: every figure has its source beside it. Bandwidths are what collectives reach, not what a data sheet says, in
bytes per second, for each GPU and each direction.
"""

import dataclasses
from typing import TYPE_CHECKING

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.device import Device

GB = 1e9
# Seconds of one step of a ring, beside its bytes: NCCL's own constants for its simple protocol over NVLink and over a
# network (NVIDIA/nccl, src/graph/tuning.cc, hwLat).
HOP_INSIDE, HOP_ACROSS = 3.4e-6, 9.6e-6
# Of a link's data sheet a ring reaches about this share: 80 to 82% on 8 H200 (stas00/ml-engineering, network/README.md,
# "SHARP": all-gather 361 of 450 GB/s). Used where no collective was measured.
REACHED = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU and the hosts it usually comes in."""

    name: str  # as the driver calls it, by which device.py knows its peak rate
    memory: float  # GiB that torch sees
    bandwidth: float  # of its own memory, by the data sheet
    capability: tuple[int, int]
    inside: float  # between GPUs of a host
    inside_source: str
    across: float  # between hosts
    across_source: str
    to_host: float  # from the GPU into pinned memory of its host
    mfu: float | None = None  # of the peak rate, in training without recomputation; None where nobody has measured it
    mfu_source: str = ""

    @property
    def device(self) -> "Device":
        """torch's view of it."""
        import torch  # not before: a mistake in the words answers at once

        from flatout.device import Device

        return Device(
            torch_device=torch.device("cuda", 0),
            name=self.name,
            memory_bytes=int(self.memory * 2**30),
            capability=self.capability,
        )


_RING_H200 = "all-gather on 8 H200, 361 GB/s (stas00/ml-engineering, network/README.md)"
_400 = "80% of 400 Gb/s for each GPU"
_OURS = "GPT of 124M to 1.3B on one H200 reach 0.50 to 0.60 (lab/throughput.jsonl)"
_PCIE4 = "80% of PCIe 4.0 x16, 31.5 GB/s"
_SHARED = "80% of 100 Gb/s for a host of 8"

CARDS = {
    "a100": Card(
        name="NVIDIA A100-SXM4-80GB",
        memory=79.15,
        bandwidth=2.039e12,
        capability=(8, 0),
        inside=235 * GB,
        inside_source="NCCL's own limit for Ampere, 235 GB/s (NVIDIA/nccl, src/graph/tuning.cc)",
        across=REACHED * 25 * GB,
        across_source="80% of 200 Gb/s for each GPU",
        to_host=25 * GB,
        mfu=0.55,
        mfu_source="torchtitan, Llama 3 8B on 64 A100 (lab/plan_rows.jsonl)",
    ),
    "h100": Card(
        name="NVIDIA H100 80GB HBM3",
        memory=79.1,
        bandwidth=3.35e12,
        capability=(9, 0),
        inside=361 * GB,
        inside_source=_RING_H200,
        across=REACHED * 50 * GB,
        across_source=_400,
        to_host=55 * GB,
        mfu=0.39,
        mfu_source="torchtitan, Llama 3.1 8B compiled on H100 held to 500 W (lab/plan_rows.jsonl)",
    ),
    "h200": Card(
        name="NVIDIA H200",
        memory=139.8,
        bandwidth=4.8e12,
        capability=(9, 0),
        inside=361 * GB,
        inside_source=_RING_H200,
        across=REACHED * 50 * GB,
        across_source=_400,
        to_host=55 * GB,
        mfu=0.50,
        mfu_source=_OURS,
    ),
    "b200": Card(
        name="NVIDIA B200",
        memory=178.0,
        bandwidth=8.0e12,
        capability=(10, 0),
        inside=682 * GB,
        inside_source="all-reduce by a ring on 8 B200, 682 GB/s (stas00/ml-engineering, network/README.md)",
        across=REACHED * 50 * GB,
        across_source=_400,
        to_host=55 * GB,
    ),
    "l40s": Card(
        name="NVIDIA L40S",
        memory=44.5,
        bandwidth=0.864e12,
        capability=(8, 9),
        inside=REACHED * 31.5 * GB,
        inside_source=_PCIE4,
        across=REACHED * 12.5 / 8 * GB,
        across_source=_SHARED,
        to_host=25 * GB,
    ),
    "4090": Card(
        name="NVIDIA GeForce RTX 4090",
        memory=23.6,
        bandwidth=1.008e12,
        capability=(8, 9),
        inside=REACHED * 31.5 / 2 * GB,
        inside_source="80% of half of PCIe 4.0 x16: without peer access all passes through the host's memory",
        across=REACHED * 12.5 / 8 * GB,
        across_source=_SHARED,
        to_host=25 * GB,
    ),
}


def card_named(name: str) -> Card:
    if name.lower() not in CARDS:
        raise UsageError(f"--gpu {name[:40]!r} is not a card we know", f"use one of {', '.join(CARDS)}")
    return CARDS[name.lower()]


def card_here() -> tuple[str, Card] | None:
    """This machine's GPU, by the name that it has in the table; None where it is not there."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    name = next((name for name in CARDS if name.upper() in found.name.upper()), None)
    if name is None:
        return None
    return name, dataclasses.replace(CARDS[name], name=found.name, memory=found.total_memory / 2**30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with equal cards. `inside` and `across` are a card's own unless told otherwise."""

    card: Card
    per_host: int
    inside: float
    across: float

    def hosts(self, gpus: int) -> int:
        return -(-gpus // self.per_host)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a collective costs one rank: seconds, bytes sent, and its share of what crosses between hosts."""

    seconds: float = 0.0
    sent: float = 0.0
    crossed: float = 0.0

    def __mul__(self, times: float) -> "Transfer":
        return Transfer(seconds=times * self.seconds, sent=times * self.sent, crossed=times * self.crossed)

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(
            seconds=self.seconds + other.seconds, sent=self.sent + other.sent, crossed=self.crossed + other.crossed
        )


def ring(cluster: Cluster, size: float, local: int, hosts: int) -> Transfer:
    """An all-gather or a reduce-scatter of `size` bytes in all, over `local` ranks of each of `hosts` hosts.

    An all-reduce is both, one after the other. Ranks of a host that are not among the `local` ones may run a ring of
    their own at the same time: each has its own share of the network.
    """
    ranks = local * hosts
    if ranks == 1:
        return Transfer()
    sent, crossed = size * (ranks - 1) / ranks, size * (hosts - 1) / hosts / local
    inside = sent / cluster.inside if local > 1 else 0.0
    hops = (ranks - hosts) * HOP_INSIDE + (hosts - 1) * HOP_ACROSS
    return Transfer(seconds=max(inside, crossed / cluster.across) + hops, sent=sent, crossed=crossed)
