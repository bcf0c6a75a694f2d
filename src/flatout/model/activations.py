"""What a block keeps for backward: everything, only products and attention, nothing, or everything but elsewhere.

`recomputed` is checkpointing: full keeps a block's input alone, selective keeps the results of matrix products and
attention, which cost time, and computes norms, activations and additions again, which cost memory.

`ActivationOffload` moves what is kept to the host's pinned memory and fetches it back in backward. Copies run on a
stream of their own, two tensors at a time: while one leaves, the next is computed; while one is used, the two before it
arrive. A tensor stays on the device until its copy has left, so device memory never holds more than those two.
Left where they are: small tensors, parameters, and casts of parameters, which stay in memory anyway.
Traps:
- A saved tensor may be a view with gaps. Its copy has the same order of axes and no gaps.
- What is fetched must be used: memory that is given back while a copy into it is on its way would be overwritten in
  the hands of its next owner. So nothing is fetched ahead whose users are all served.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LEAST_BYTES = 2**20
AT_ONCE = 2  # tensors on their way in each direction


def recomputed(function: Callable[..., Any], *values: Any, what: str, random: bool) -> Any:
    """`function(*values)`, of whose inner tensors backward computes `what` (selective, full) again.

    `random` says whether the function draws random numbers, which must come again as they were.
    """
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if what == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_what_is_dear)
    return checkpoint(function, *values, **settings)


def _keep_what_is_dear(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _dear() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _dear() -> frozenset[Any]:
    """Matrix products and attention. Names that this torch does not have are left out."""
    names = ["mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear"]
    names += [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    names += ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"]
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(found)


class _Moved:
    """A tensor that lives on the host; `device` holds it while it is on its way out, or back again."""

    __slots__ = ("__weakref__", "device", "event", "host", "key", "place", "previous", "users")

    def __init__(self, device: Tensor, host: Tensor, key: Any, previous: "weakref.ref[_Moved] | None") -> None:
        self.device: Tensor | None = device
        self.host = host
        self.place = device.device
        self.event: Any = None
        self.key = key
        self.previous = previous
        self.users = 1


class ActivationOffload:
    def __init__(self, model: nn.Module, least_bytes: int = LEAST_BYTES) -> None:
        self.model = model
        self.least_bytes = least_bytes
        self.device = torch.device("cpu")
        self.stream: torch.cuda.Stream | None = None
        self.parameters: frozenset[int] = frozenset()
        self.leaving: collections.deque[_Moved] = collections.deque()
        self.last: weakref.ref[_Moved] | None = None
        self.moved_bytes = 0  # in all, for tests and reports

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """What autograd saves inside this context goes to the host."""
        first = next(self.model.parameters())
        if not self.parameters or first.untyped_storage().data_ptr() not in self.parameters:
            self.device = first.device
            self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            self.parameters = frozenset(p.untyped_storage().data_ptr() for p in self.model.parameters())
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def drop(self) -> None:
        """After a pass that failed: waits for copies on their way, and lets go of what they hold on the device."""
        if self.stream is not None:
            self.stream.synchronize()
        self.leaving.clear()
        self.last = None

    def _pack(self, tensor: Tensor) -> "Tensor | _Moved":
        if not self._worth_moving(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        for moved in self.leaving:  # saved by two operations: it is still here, so its address tells it
            if moved.key == key and moved.device is not None:
                moved.users += 1
                return moved
        while len(self.leaving) >= AT_ONCE:
            self._let_go(self.leaving.popleft())
        dense = _without_gaps(tensor.detach())
        pinned = self.stream is not None
        host = torch.empty_strided(dense.shape, dense.stride(), dtype=dense.dtype, pin_memory=pinned)
        moved = _Moved(dense, host, key, self.last)
        moved.event = self._copy(host, dense)
        self.moved_bytes += dense.nbytes
        self.leaving.append(moved)
        self.last = weakref.ref(moved)
        return moved

    def _unpack(self, saved: "Tensor | _Moved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved)
        self._wait(saved)
        tensor = saved.device
        assert tensor is not None
        saved.users -= 1
        if saved.users <= 0:
            saved.device = None
        before = saved
        for _ in range(AT_ONCE):
            before = None if before.previous is None else before.previous()
            if before is None:
                break
            if before.users > 0:
                self._fetch(before)
        return tensor

    def _fetch(self, moved: _Moved) -> None:
        if moved.device is None:
            moved.device = torch.empty_strided(
                moved.host.shape, moved.host.stride(), dtype=moved.host.dtype, device=moved.place
            )
            moved.event = self._copy(moved.device, moved.host)

    def _let_go(self, moved: _Moved) -> None:
        """The device's copy may go as soon as the copy to the host is done, which later work is made to wait for."""
        self._wait(moved)
        moved.device = None

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        if self.stream is None:
            target.copy_(source)
            return None
        # for what makes the source, and for what last used the memory of the target
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def _wait(self, moved: _Moved) -> None:
        if moved.event is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.event)

    def _worth_moving(self, tensor: Tensor) -> bool:
        if tensor.device != self.device or tensor.nbytes < self.least_bytes:
            return False
        return tensor.untyped_storage().data_ptr() not in self.parameters and not _is_a_cast(tensor)


_VIEWS_AND_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0")


def _is_a_cast(tensor: Tensor) -> bool:
    """Whether this is a parameter in another type, as autocast makes and keeps them."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return tensor.grad_fn is not None and node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor if tensor.nbytes == _span(tensor) else tensor.clone(memory_format=torch.preserve_format)


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
