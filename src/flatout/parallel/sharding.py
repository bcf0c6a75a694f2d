"""A model in shards, by torch's own FSDP2 (`fully_shard`): every process holds a slice of every matrix.

Each group (one block or more, the embedding, the head) has its matrices gathered before it runs and given back
afterwards; their gradients are added up and dealt out again as soon as its backward pass is over. What belongs to no
group (positions, a tied embedding) stays gathered from the beginning of a pass to the end of its backward pass.
Vectors, the weights of norms and biases, are whole everywhere: they are a thousandth of a model, and most of the
tensors. Their gradients leave in one bucket.

Contract:
- Gradients are sums over all processes, in fp32 at least. Every micro-batch's are dealt out again at once, so that no
  process ever holds all of them; between hosts of a hybrid they go once a step.
- Matrices are gathered in `gathered`, the type of products, where our kernels run. Their gradients leave in fp32 all
  the same (`Tensor.grad_dtype`); those of positions are rounded once. Otherwise nothing is rounded.
- Optimizers see plain tensors: `parameters` are this process's slices, which share their memory with torch's DTensors,
  and the vectors.
  So every optimizer whose rule works element by element runs as it does in one process.
- Slices are of rows: the first axis, in as many pieces as `torch.chunk` makes, of which the last ones may be empty.
Trap: all processes must take the same number of passes, also in evaluation: a group is gathered by all together.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.tensor import DTensor

from flatout.errors import CheckpointError
from flatout.parallel.ranks import Ranks
from flatout.parallel.reducer import BucketReducer


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """The rows of a tensor that one process holds."""

    shape: tuple[int, ...]  # of the whole tensor
    start: int
    rows: int

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.start : self.start + self.rows]


class Sharding:
    """The shards of one model in this process, by the names of its parameters."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Sequence[nn.Module]],
        world: Ranks,
        *,
        hybrid: bool,
        device: torch.device,
        gathered: torch.dtype | None,
        entries: Sequence[str] = (),
    ) -> None:
        """Shards `model` in place. `entries` are methods that are called from outside besides `forward`."""
        mesh = _mesh(world, device, hybrid=hybrid)
        self.group = mesh.get_group("shard")
        self.number, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._world, self._device, self._gathered = world, device, gathered
        self.writes = not hybrid or mesh.get_local_rank("replicate") == 0  # others hold the same
        wide = None if gathered is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=wide, cast_forward_inputs=False)
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        how = {"mesh": mesh, "mp_policy": policy, "ignored_params": set(vectors)}
        self._modules: list[FSDPModule] = []
        for group in groups:  # one after the other, so that no device ever holds more whole weights than those of one
            for module in group:
                module.to(device)
            self._modules.append(fully_shard(list(group), **how)[0])  # torch keeps one state for all of them
        for left in (*model.parameters(), *model.buffers()):
            if not isinstance(left, DTensor):
                left.data = left.data.to(device)
        self._modules.append(fully_shard(model, reshard_after_forward=False, **how))
        for entry in entries:
            register_fsdp_forward_method(model, entry)
        # Blocks return views, which are never written to.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        self._prepare([*groups, [model]], wide)
        self._set_up(model)
        self._vectors = BucketReducer(vectors, bf16=False, replayed=True, pulse=world.pulse)

    def _prepare(self, groups: Sequence[Sequence[nn.Module]], wide: torch.dtype | None) -> None:
        """Gathers everything once: made in torch's inference mode, whole weights could not be trained afterwards."""
        for module, group in zip(self._modules, groups, strict=True):
            if self.count > 1:  # alone, torch would divide all the same
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_requires_all_reduce(False, recurse=False)
            module.unshard()
            for parameter in (parameter for one in group for parameter in one.parameters()):
                if wide is not None and not isinstance(parameter, DTensor) and parameter.ndim > 1:
                    parameter.grad_dtype = wide
            module.reshard()

    def _set_up(self, model: nn.Module) -> None:
        self._sharded: dict[str, DTensor] = {}
        self._whole_bytes = 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.slices: dict[str, LocalRows] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                self.parameters[name] = parameter
                continue
            local = parameter.to_local()
            self._sharded[name] = parameter
            self._whole_bytes += parameter.numel() * (self._gathered or parameter.dtype).itemsize
            self.parameters[name] = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
            most = -(-parameter.shape[0] // self.count)
            start = min(self.number * most, parameter.shape[0])
            self.slices[name] = LocalRows(tuple(parameter.shape), start, local.shape[0])

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Weights stay whole from one pass to the next, if all processes have the room: for passes of single tokens."""
        if self._world.any(self._room() < self._whole_bytes):
            yield
            return
        *groups, _ = self._modules  # the last one is the model itself, whose own weights stay anyway
        try:
            for module in groups:
                module.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for module in groups:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

    def reshard(self) -> None:
        """Lets go of weights that an evaluation has left whole, after slices were written to."""
        for module in self._modules:
            module.reshard()

    def _room(self) -> float:
        if self._device.type != "cuda":
            return math.inf
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return 0.8 * (torch.cuda.mem_get_info(self._device)[0] + held)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of tensors of which every process has its slices, and one counts the vectors."""
        own = [one for one in tensors if one.ndim > 1 or self.number == 0] or [tensors[0].new_zeros(1)]
        total = torch.nn.utils.get_total_norm(own).square()
        dist.all_reduce(total, group=self.group)
        return total.sqrt()

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's slices of whole tensors, under the name of a parameter or of something that belongs to it."""
        held: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            one = self.slice_of(name, tensor)
            if one is not None and tuple(tensor.shape) != one.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)} in the checkpoint, of which there are no slices: moments "
                    "in 8 bits are not sharded",
                    "resume with parallel.form=data",
                )
            held[name] = tensor if one is None else one.of(tensor).clone()  # a view would keep the whole one
        return held

    def slice_of(self, name: str, tensor: Tensor) -> LocalRows | None:
        """Which slice `tensor`, or what it is a slice of, has here; None for what is whole everywhere."""
        one = self.slices.get(name) or self.slices.get(name.rpartition(".")[0])
        return one if one is not None and tensor.ndim == len(one.shape) else None

    # --- as a `Reducer` of gradients ----------------------------------------------------------------------------------

    in_place = False  # gradients are made anew in every step

    def passes(self, count: int) -> int:
        """How many passes all processes take, where this one has `count` micro-batches."""
        if self._world.size == 1:
            return count
        counts = [0] * self._world.size
        counts[self._world.rank] = count
        return max(self._world.totals(counts))

    def last_micro_batch(self) -> None:
        self._reduce_between_hosts(True)

    def finish(self) -> None:
        self._vectors.finish()
        self._reduce_between_hosts(False)
        for name, parameter in self._sharded.items():
            gradient: Any = parameter.grad
            self.parameters[name].grad = None if gradient is None else gradient.to_local()

    def clear(self) -> None:
        for name, parameter in self._sharded.items():
            parameter.grad = self.parameters[name].grad = None
        self._vectors.clear()

    def _reduce_between_hosts(self, wanted: bool) -> None:
        """Only a hybrid has anything to add up there."""
        for module in self._modules:
            module.set_requires_all_reduce(wanted, recurse=False)


def _mesh(world: Ranks, device: torch.device, *, hybrid: bool) -> DeviceMesh:
    """All processes in one row; `hybrid`: those of each host in a row."""
    if not hybrid:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    hosts = len(set(world.hosts))
    return init_device_mesh(device.type, (hosts, world.size // hosts), mesh_dim_names=("replicate", "shard"))
