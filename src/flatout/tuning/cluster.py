"""Cards in hosts: links, collectives, a step over ranks, models of Llama's sizes. No torch at import.

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

Contract: every figure has its source beside it. Bandwidths are those that collectives reach, not those of a data sheet,
in bytes per second, for each GPU and each direction.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU and the hosts it usually comes in."""

    name: str  # as the driver calls it, by which device.py knows its peak rate
    memory: float  # GiB that torch sees
    bandwidth: float  # of its own memory, by the data sheet
    capability: tuple[int, int]
    inside: float  # between GPUs of a host
    across: float  # between hosts
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


_TITAN_A100 = "torchtitan, Llama 3 8B on 64 A100 (lab/plan_rows.jsonl)"
_TITAN_H100 = "torchtitan, Llama 3.1 8B compiled on H100 held to 500 W (lab/plan_rows.jsonl)"
_OURS = "GPT of 124M to 1.3B on one H200 reach 0.50 to 0.60 (lab/throughput.jsonl)"

# Inside a host: A100 by NCCL's own limit for Ampere (NVIDIA/nccl, src/graph/tuning.cc); Hopper and Blackwell by
# collectives on 8 cards (stas00/ml-engineering, network/README.md): all-gather on H200, all-reduce on B200; L40S by
# PCIe 4.0 x16; RTX 4090 by half of it, since all passes through the host's memory.
# Between hosts: 200 Gb/s for each A100, 400 Gb/s for each H100, H200 and B200, 100 Gb/s for a host of 8 others.
CARDS = {
    "a100": Card(
        "NVIDIA A100-SXM4-80GB", 79.15, 2.039e12, (8, 0), 235 * GB, REACHED * 25 * GB, mfu=0.55, mfu_source=_TITAN_A100
    ),
    "h100": Card(
        "NVIDIA H100 80GB HBM3", 79.1, 3.35e12, (9, 0), 361 * GB, REACHED * 50 * GB, mfu=0.39, mfu_source=_TITAN_H100
    ),
    "h200": Card("NVIDIA H200", 139.8, 4.8e12, (9, 0), 361 * GB, REACHED * 50 * GB, mfu=0.50, mfu_source=_OURS),
    "b200": Card("NVIDIA B200", 178.0, 8.0e12, (10, 0), 682 * GB, REACHED * 50 * GB),
    "l40s": Card("NVIDIA L40S", 44.5, 0.864e12, (8, 9), REACHED * 31.5 * GB, REACHED * 12.5 / 8 * GB),
    "4090": Card("NVIDIA GeForce RTX 4090", 23.6, 1.008e12, (8, 9), REACHED * 31.5 / 2 * GB, REACHED * 12.5 / 8 * GB),
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
    """Hosts with equal cards. `inside` and `across` are a card's own by default."""

    card: Card
    per_host: int
    inside: float
    across: float

    def hosts(self, gpus: int) -> int:
        return -(-gpus // self.per_host)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a collective costs one rank: seconds, and bytes sent."""

    seconds: float = 0.0
    sent: float = 0.0

    def __mul__(self, times: float) -> "Transfer":
        return Transfer(seconds=times * self.seconds, sent=times * self.sent)

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(seconds=self.seconds + other.seconds, sent=self.sent + other.sent)


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
    return Transfer(seconds=max(inside, crossed / cluster.across) + hops, sent=sent)


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


# --- models of Llama's sizes ------------------------------------------------------------------------------------------

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
    named = {word.partition("=")[0] for word in written}
    return [word for word in words if word.partition("=")[0] not in named]
