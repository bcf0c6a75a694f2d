"""Gradients of all processes added up in fixed buckets, each as soon as the backward pass has filled it.

torch's DistributedDataParallel sees only gradients that autograd accumulates. Our kernels add into `weight.grad`
themselves, so gradients lie in our own buckets: contiguous, in the reverse order of parameters, the same from the first
step to the last. A parameter's gradient is complete when autograd passes its node, whether or not anything came through
it; a bucket whose parameters are all complete leaves, after those before it, so every process sends in the same order.

Contract: under accumulation gradients are sent once a step, in the last micro-batch's backward pass. Sums are in fp32
unless bf16 was asked for. Nothing here waits for the device: NCCL sends on a stream of its own, and `finish` makes the
current stream wait for it.

Processes that share Muon's work need whole matrices: what they hold goes to an owner, and the result comes back
(`Copies`, `Slices`). What arrives has the bits that were sent. All processes make the same calls in the same order.

Shape legend: N parameters of a unit, R rows that a process holds of each, C columns.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.parallel.ranks import Ranks
from flatout.pulse import Pulse
from flatout.world import World

ALIGNED = 64  # elements: where a gradient begins, as kernels like it
BUCKET_BYTES = 25 * 2**20  # as large as torch's own: small enough to leave early, large enough for the link


@dataclasses.dataclass(eq=False)
class _Bucket:
    values: Tensor  # all gradients of the bucket, one after the other
    waiting: int
    parameters: int
    narrow: Tensor | None = None
    work: Any = None


class BucketReducer:
    """`placed` are parameters whose gradients have a place of their own, such as adapters: they leave at the end.

    So do all where backward passes are `replayed` from a recording, which autograd has no part in.
    """

    in_place = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        bf16: bool,
        replayed: bool,
        placed: Iterable[nn.Parameter] = (),
        pulse: Pulse | None = None,
    ) -> None:
        self._pulse = pulse or Pulse()
        self._buckets: list[_Bucket] = []
        self._nodes: list[Any] = []  # autograd keeps them only as long as somebody does
        self._next = 0
        self._sending = False
        self._bf16 = bf16
        self._placed = list(placed)
        for group in _grouped(list(reversed(parameters))):
            bucket = self._filled(group)
            for parameter in () if replayed else group:
                function = parameter.view_as(parameter).grad_fn
                assert function is not None, "only trained parameters have gradients"
                node: Any = function.next_functions[0][0]
                node.register_hook(self._on_complete(bucket))
                self._nodes.append(node)
            self._buckets.append(bucket)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that a step adds up over all processes."""
        sent = [bucket.values if bucket.narrow is None else bucket.narrow for bucket in self._buckets]
        sent += [parameter.grad for parameter in self._placed if parameter.grad is not None]
        return sum(values.nbytes for values in sent)

    def _filled(self, parameters: Sequence[nn.Parameter]) -> _Bucket:
        sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in parameters]
        values = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, values.split(sizes), strict=True):
            parameter.grad = part[: parameter.numel()].view_as(parameter)
        narrow = torch.empty_like(values, dtype=torch.bfloat16) if self._bf16 else None
        return _Bucket(values, len(parameters), len(parameters), narrow)

    def _on_complete(self, bucket: _Bucket) -> Callable[..., None]:
        def complete(*_: object) -> None:
            if self._sending:
                bucket.waiting -= 1
                self._send_ready()

        return complete

    def passes(self, count: int) -> int:
        return count

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(tensors)

    def last_micro_batch(self) -> None:
        self._sending, self._next = True, 0
        for bucket in self._buckets:
            bucket.waiting = bucket.parameters

    def _send_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        if bucket.narrow is not None:
            bucket.narrow.copy_(bucket.values)
        with self._pulse.waiting():  # not for long, but a rank that is gone is noticed here, too
            bucket.work = dist.all_reduce(bucket.values if bucket.narrow is None else bucket.narrow, async_op=True)

    def finish(self) -> None:
        self._sending = False
        for bucket in self._buckets[self._next :]:  # those of parameters that the pass did not come by
            self._send(bucket)
        self._next = 0
        with self._pulse.waiting():
            for parameter in self._placed:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            for bucket in self._buckets:
                bucket.work.wait()
                bucket.work = None
                if bucket.narrow is not None:
                    bucket.values.copy_(bucket.narrow)

    def clear(self) -> None:
        self._sending = False  # a step that failed may have been
        if self._buckets:  # a sharded model without weights in its norms and without biases has no vectors
            values = [bucket.values for bucket in self._buckets]
            torch._foreach_zero_(values)  # pyright: ignore[reportPrivateImportUsage]


def reducer_of(
    world: World, parameters: Sequence[nn.Parameter], *, in_place: bool, bf16: bool, replayed: bool
) -> BucketReducer | None:
    """Adds up the gradients of these parameters, which stay where they are if `in_place`; None for one process."""
    if not isinstance(world, Ranks):
        return None
    if in_place:
        return BucketReducer([], bf16=bf16, replayed=replayed, placed=parameters, pulse=world.pulse)
    return BucketReducer(parameters, bf16=bf16, replayed=replayed, pulse=world.pulse)


def _grouped(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters of one type that make a bucket; one that is larger by itself has its own."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if not groups or size + bytes_ > BUCKET_BYTES or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += bytes_
    return groups


# --- whole matrices ---------------------------------------------------------------------------------------------------


@final
class Copies:
    """Data parallel: every process has all of it, so only results are sent."""

    def __init__(self, number: int, count: int, pulse: Pulse) -> None:
        self.number, self.count, self._pulse = number, count, pulse

    def room(self, rows: int) -> int:
        return rows

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        return held_NRC if owner == self.number else None

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        received = held_NRC if whole_NRC is None else whole_NRC
        self.follow(received, owner)
        return received

    def follow(self, values: Tensor, owner: int) -> None:
        _broadcast(values, owner, None, self._pulse)


@final
class Slices:
    """FSDP2: every process has some rows of every matrix, the last ones fewer than the others, or none."""

    def __init__(self, number: int, count: int, group: dist.ProcessGroup, pulse: Pulse) -> None:
        self.number, self.count, self._group, self._pulse = number, count, group, pulse

    def room(self, rows: int) -> int:
        return -(-rows // self.count)

    def gather(self, held_NRC: Tensor, rows: int, owner: int) -> Tensor | None:
        mine = owner == self.number
        slices = [torch.empty_like(held_NRC) for _ in range(self.count)] if mine else None
        sent = None if slices is None else [_bits(one) for one in slices]
        with self._pulse.waiting():
            dist.gather(_bits(held_NRC), sent, group=self._group, group_dst=owner)
        return None if slices is None else torch.cat(slices, dim=1)[:, :rows]

    def share(self, whole_NRC: Tensor | None, held_NRC: Tensor, owner: int) -> Tensor:
        received = torch.empty_like(held_NRC)
        sent = None
        if whole_NRC is not None:
            missing = self.count * held_NRC.shape[1] - whole_NRC.shape[1]
            filled = torch.nn.functional.pad(whole_NRC, (0, 0, 0, missing))
            sent = [_bits(one.contiguous()) for one in filled.chunk(self.count, dim=1)]
        with self._pulse.waiting():
            dist.scatter(_bits(received), sent, group=self._group, group_src=owner)
        return received

    def follow(self, values: Tensor, owner: int) -> None:
        _broadcast(values, owner, self._group, self._pulse)


def _broadcast(values: Tensor, owner: int, group: dist.ProcessGroup | None, pulse: Pulse) -> None:
    with pulse.waiting():
        dist.broadcast(_bits(values), group=group, group_src=owner)


def _bits(values: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not know every type."""
    return values.view(torch.uint8)
