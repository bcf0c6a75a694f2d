"""Cards in hosts: links, collectives, a step over ranks, interruptions, models of Llama's sizes. No torch at import.

Idea: a collective is a ring, as NCCL plans it. Inside a host every GPU passes on all that it receives; between hosts
the GPUs of a host share what crosses. So the bandwidth between hosts counts once for each GPU that takes part:
sharding over hosts with a network card for each GPU is nearly as fast as inside one.

What overlaps:
- Data parallel: gradients are all-reduced once per step, block by block, during the last micro-batch's backward pass.
  Exposed is what a block's backward pass is too short for, and the embedding's gradient at the very end.
- FSDP2: every micro-batch gathers each block's weights twice, for forward and backward, and reduce-scatters its
  gradients (fp32). The next block is gathered while this one computes, so exposed are the first gathers (embedding,
  head and first block), the last reductions, and whatever a block's compute is too short for.
- Hybrid: the same inside one host, and once per step an all-reduce of each rank's shard over the hosts, which have
  links of their own.
Hidden communication counts as free. In truth its kernels take some of the card's processors and memory bandwidth.

Interruptions come at random, at a rate that grows with the number of GPUs. Each costs a restart and the steps since the
last save. In data parallel one rank copies the state to its host and training goes on while it is written; the next
save waits for that. Slices are written by all ranks of one copy of the model while training stands still.

Contract: every figure has its source beside it. Bandwidths are those that collectives reach, not those of a data sheet,
in bytes per second, for each GPU and each direction.
"""

import dataclasses
import math
from collections.abc import Sequence
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
    mfu: float | None = None  # of the peak rate, in training without recomputation; None where it was not measured
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
    """Hosts with equal cards. `inside` and `across` are a card's own unless given."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A form over GPUs: each of `replicas` copies of the state lies on `local` ranks of each of `hosts` hosts."""

    form: str
    local: int
    hosts: int
    replicas: int

    @property
    def shards(self) -> int:
        return self.local * self.hosts


# --- a step over ranks ----------------------------------------------------------------------------------------------

FORMS = {"data": "data parallel", "hybrid": "hybrid", "fsdp": "FSDP2"}
# Of the blocks' forward pass, what backward computes again. Selective checkpointing keeps all products.
AGAIN = {"none": 0.0, "selective": 0.0, "full": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A model's step as far as spreading it goes. `root` is what lies outside the blocks: embedding, head, last norm.

    Bytes of each parameter: `cell` of a weight that is gathered, `reduced` of a gradient that leaves, `state` of the
    optimizer's state on the device.
    """

    parameters: int
    layers: int
    block: int
    root: int
    last: int  # whose gradient is ready at the very end: the embedding's
    twice: int  # of `root`, what backward gathers again: nothing where a tied embedding stays whole
    head_share: float  # of a token's FLOPs
    cell: float = 2
    reduced: float = 4
    state: float
    seconds_per_token: float
    again: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on every rank. `communication` is all of it, `exposed` what compute does not hide."""

    compute: float
    update: float
    communication: float
    exposed: float
    sent: float  # bytes by each rank
    crossed: float  # its share of the bytes between hosts

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exposed


def step_time(work: Work, cluster: Cluster, layout: Layout, *, micro_batches: int, tokens: int) -> StepTime:
    """One step of `micro_batches` micro-batches with `tokens` tokens each, on every rank."""
    one = work.seconds_per_token * tokens
    head = work.head_share * one
    forward = (one - head) / work.layers / 3
    block = _Block(forward=forward, backward=(2 + work.again) * forward, head_backward=2 * head / 3)
    spread = _replicated if layout.shards == 1 else _sharded
    total, exposed = spread(work, cluster, layout, block, micro_batches)
    return StepTime(
        compute=micro_batches * (head + work.layers * (block.forward + block.backward)),
        update=update_seconds(work, cluster, layout.shards),
        communication=total.seconds,
        exposed=exposed,
        sent=total.sent,
        crossed=total.crossed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """Seconds of one block in one micro-batch, and of the head before the blocks' backward pass begins."""

    forward: float
    backward: float
    head_backward: float


def update_seconds(work: Work, cluster: Cluster, shards: int) -> float:
    """The optimizer's update: weights, gradients and state read, weights and state written, once each."""
    moved = (4 + 4 + work.state) + (4 + work.state)
    return moved * work.parameters / shards / cluster.card.bandwidth


def _beyond(total: float, last: float, hidden_by: float) -> float:
    """What is exposed of `total` seconds on one wire, beside `hidden_by` seconds of compute that hand over work evenly.

    The wire ends when its last piece has come, which is there only at the end of compute, or when it has worked all
    the time.
    """
    return max(last, total - hidden_by)


def _replicated(
    work: Work, cluster: Cluster, layout: Layout, block: _Block, micro_batches: int
) -> tuple[Transfer, float]:
    """(all communication of a step, seconds of it that are exposed) of data parallel."""
    del micro_batches  # gradients are reduced once per step, in the last backward pass
    hosts = cluster.hosts(layout.replicas)
    local = layout.replicas // hosts

    def reduce(values: float) -> Transfer:
        return ring(cluster, work.reduced * values, local, hosts) * 2

    total = reduce(work.block) * work.layers + reduce(work.root - work.last) + reduce(work.last)
    last = reduce(work.block) + reduce(work.last)
    return total, _beyond(total.seconds, last.seconds, work.layers * block.backward)


def _sharded(work: Work, cluster: Cluster, layout: Layout, block: _Block, micro_batches: int) -> tuple[Transfer, float]:
    """The same of FSDP2, and of hybrid sharding where there are replicas."""

    def over_shards(size: float) -> Transfer:
        return ring(cluster, size, layout.local, layout.hosts)

    def over_replicas(values: float) -> Transfer:
        return ring(cluster, work.reduced * values / layout.shards, 1, layout.replicas) * 2

    gather, reduce = over_shards(work.cell * work.block), over_shards(work.reduced * work.block)
    root_gather, root_reduce = over_shards(work.cell * work.root), over_shards(work.reduced * work.root)
    again = over_shards(work.cell * work.twice)
    gathered, reduced = gather * work.layers + again, reduce * work.layers + root_reduce
    computing = block.head_backward + work.layers * block.backward
    first = (root_gather + gather).seconds + (work.layers - 1) * max(0.0, gather.seconds - block.forward)
    late = _beyond((gathered + reduced).seconds, (reduce + root_reduce).seconds, computing)
    # Between hosts the shards' gradients are added up beside what goes on inside of them, in the last backward pass.
    beside, beside_root = over_replicas(work.block), over_replicas(work.root)
    across = beside * work.layers + beside_root
    after = _beyond(across.seconds, (beside + beside_root).seconds, computing + late)
    total = (root_gather + gather * work.layers + gathered + reduced) * micro_batches + across
    return total, micro_batches * (first + late) + after


# --- interruptions, and models of Llama's sizes ----------------------------------------------------------------------

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4).
FAILURE_HOURS = 54 * 24 * 16_384 / 419
FAILURE_SOURCE = "Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783)"
INTERVALS = (60, 300, 1800, 7200)  # seconds
SHORTEST = 60.0  # seconds between saves: below, evaluation and deletion of older checkpoints are in the way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """Checkpoint and interruptions of one form and number of GPUs. Shares are of the time that steps themselves take.

    `pause_seconds` is how long training stands still for a save, `write_seconds` until it is on the disk.
    """

    form: str
    checkpoint_bytes: int
    pause_seconds: float
    write_seconds: float
    restart_seconds: float
    interruptions_per_day: float
    best_interval: float
    best: float
    by_interval: dict[int, float]


def goodput(interval: float, *, save: float, restart: float, between: float) -> float:
    """The share of time that goes into steps which are kept, with interruptions every `between` seconds on average.

    Exact for interruptions that come independently of each other: an interval and its save begin again until they pass
    without one (Daly, "A higher order estimate of the optimum checkpoint interval", 2006).
    """
    tried = (interval + save) / between
    return 0.0 if tried > 700 else interval / ((between + restart) * math.expm1(tried))


def plan_saves(
    checkpoint: int,
    layout: Layout,
    *,
    to_host: float,
    disk: float,
    restart: float,
    failure_hours: float,
) -> Goodput:
    """Saves of `checkpoint` bytes by the first copy of the model; rates in bytes per second, `disk` for each host."""
    write = checkpoint / layout.hosts / disk
    pause = write if layout.shards > 1 else checkpoint / to_host
    gpus = layout.shards * layout.replicas
    between = failure_hours * 3600 / gpus
    # After a restart every host reads all of it, to check the hashes.
    costs = {"save": pause, "restart": restart + checkpoint / disk, "between": between}
    best = max(SHORTEST, write, math.sqrt(2 * pause * between))  # Young's first-order optimum
    return Goodput(
        form=layout.form,
        checkpoint_bytes=checkpoint,
        pause_seconds=pause,
        write_seconds=write,
        restart_seconds=costs["restart"],
        interruptions_per_day=86_400 / between,
        best_interval=best,
        best=goodput(best, **costs),
        by_interval={interval: goodput(interval, **costs) for interval in INTERVALS if interval >= write},
    )


_LLAMA = "family=gpt norm=rmsnorm positions=rope pattern=A dropout=0 mlp=swiglu tied=false qk_norm=false"
_LLAMA2 = f"{_LLAMA} kv_heads=null vocab=32000 context=4096"
_LLAMA3 = f"{_LLAMA} kv_heads=8 vocab=128256 context=8192"
STEP_TOKENS = 2**22
LLAMAS = {  # settings of the model section
    "7b": f"{_LLAMA2} layers=32 width=4096 heads=32 mlp_width=11008",
    "8b": f"{_LLAMA3} layers=32 width=4096 heads=32 mlp_width=14336",
    "13b": f"{_LLAMA2} layers=40 width=5120 heads=40 mlp_width=13824",
    "70b": f"{_LLAMA3} layers=80 width=8192 heads=64 mlp_width=28672",
}


def llama_words(size: str, written: Sequence[str], *, batch: bool) -> list[str]:
    """The settings of a Llama that the user has not written, `batch` with its usual tokens per step."""
    words = [f"model.{setting}" for setting in LLAMAS[size].split()]
    words += [f"train.batch_tokens={STEP_TOKENS}", "speed.micro_batch=null"] if batch else []
    given = {word.partition("=")[0] for word in written}
    return [word for word in words if word.partition("=")[0] not in given]
