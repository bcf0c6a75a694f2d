"""One step of training, spread over ranks: communication and time of data parallel, FSDP2 and hybrid.

What overlaps, and what does not:
- Data parallel: gradients are all-reduced once per step, block by block, while the last micro-batch's backward pass
  goes on. What a block's backward pass is too short for, and the embedding's gradient at the very end, is exposed.
- FSDP2: every micro-batch gathers each block's weights twice, for forward and backward, and reduce-scatters its
  gradients (fp32). The next block is gathered while this one computes, so exposed are the first gathers (embedding,
  head and first block), the last reductions, and whatever a block's compute is too short for.
- Hybrid: the same inside one host, and once per step an all-reduce of each rank's shard over the hosts, which have
  wires of their own.
Hidden communication counts as free. In truth its kernels take some of the card's processors and memory bandwidth.

A rate (`seconds_per_token`) is that of one GPU without recomputation; full checkpointing adds one forward pass.
"""

import dataclasses

from flatout.config.schema import ModelConfig
from flatout.model.count import block_count, flops_per_token, parameter_count
from flatout.resolve.form import by_preference
from flatout.tuning.cluster import Cluster, Transfer, ring

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
    cell: int
    reduced: int = 4
    state: float
    seconds_per_token: float
    again: float = 0.0


def work_of(
    model: ModelConfig,
    vocab: int,
    *,
    seconds_per_token: float,
    state: float,
    cell: int = 2,
    reduced: int = 4,
    again: float = 0.0,
) -> Work:
    blocks = [block_count(model, kind) for kind in model.kinds]
    parameters = parameter_count(model, vocab)
    root = parameters - sum(blocks)
    return Work(
        parameters=parameters,
        layers=model.layers,
        block=max(blocks),
        root=root,
        last=root if model.tied else root - vocab * model.width,
        twice=0 if model.tied else root,
        head_share=6.0 * vocab * model.width / flops_per_token(model, vocab),
        cell=cell,
        reduced=reduced,
        state=state,
        seconds_per_token=seconds_per_token,
        again=again,
    )


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


def layouts(cluster: Cluster, gpus: int) -> list[Layout]:
    """The forms that `gpus` GPUs can take, in the order in which `parallel.form=auto` tries them."""
    hosts = cluster.hosts(gpus)
    local = gpus // hosts
    where = {"data": (1, 1), "hybrid": (local, 1), "fsdp": (local, hosts)}
    found = []
    for sharding in by_preference(gpus, local if hosts > 1 else None):
        ranks, over = where[sharding.form]
        found.append(Layout(form=sharding.form, local=ranks, hosts=over, replicas=gpus // (ranks * over)))
    return found


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
