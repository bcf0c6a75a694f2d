"""What torch's Chrome trace says of one step: time by kernel, by kind and by named range. Pure functions, no torch.

Idea: the trace is a public format that a person can open too, so the figures come from the very events he sees there.

Contract: `read_trace` takes events as they stand in the file and returns seconds of one step. Device time of a range is
that of the kernels launched in it, whenever they ran: the host's clock says nothing about the device's work.
Trap: a replayed CUDA graph is one launch of many kernels, so its ranges cannot be told apart: `micro-batch` has all.
Trap: on a CPU operators nest. Their own time is what is left when the operators inside are taken away.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# The named ranges of a step, and how deep each one lies.
RANGES = {"data": 0, "micro-batch": 0, "forward": 1, "backward": 1, "optimizer": 0, "reduction": 1}
STEP = "step"

PRODUCTS, ATTENTION, OURS, COMPILED = "matrix products", "attention", "our kernels", "compiled code"
ELEMENTWISE, COPIES, OPTIMIZER, COMMUNICATION = "elementwise", "copies", "optimizer", "communication"
BOOKKEEPING, UNKNOWN = "bookkeeping", "unknown"

# Kernels in src/flatout/ops/kernels by their names in a trace. Those of updates (8-bit, Muon) count as optimizer.
UPDATE_KERNELS = ("_update", "_advance", "_apply", "_symmetric", "_mean_squares", "_second_moment", "_scale_matrices")
OUR_KERNELS = (
    *("_add", "_add_back", "_back", "_make", "_weigh"),
    *("_backward", "_carry", "_drop", "_ends", "_fold", "_forward", "_gate_backward", "_gate_forward", "_gradients"),
    *("_maxima", "_pack", "_round", "_round_delayed", "_rows", "_scale", "_spread", "_states"),
    *("_swiglu_backward", "_table"),
)
# First match wins: a library's attention is full of words for products, and torch's copies are elementwise kernels.
_KERNEL_KINDS = (
    (COMMUNICATION, r"nccl|nvshmem"),
    (ATTENTION, r"sdpa|fmha|flash|attention|attn|cudnn::fusion::(compute_dot_do_o|convert_dq)"),
    (OPTIMIZER, rf"multi_tensor_apply|FusedOptimizer|FusedAdam|LpNorm|^({'|'.join(UPDATE_KERNELS)})$"),
    (OURS, rf"^({'|'.join(OUR_KERNELS)})$"),
    (PRODUCTS, r"nvjet|gemm|gemv|cutlass|cublas|splitK|xmma|^triton_tem_|^triton_mm"),
    (COMPILED, r"^triton_"),
    (COPIES, r"^Mem(cpy|set)|copy_kernel|FillFunctor|CatArray"),
    (ELEMENTWISE, r"at::native|elementwise|reduce_kernel|softmax|layer_norm|embedding"),
)
_NO_WORK = (  # views, and memory that nobody has written to yet
    "t|view|transpose|as_strided|expand|slice|select|reshape|_reshape_alias|unsqueeze|squeeze|permute|split|chunk|"
    r"empty\w*|detach\w*|resolve_\w+|result_type"
)
_OPERATOR_KINDS = (
    (COMMUNICATION, r"^c10d::|^record_param_comms|nccl|gloo"),
    (ATTENTION, r"scaled_dot_product|flash_attention"),
    (OPTIMIZER, r"_fused_adam|^aten::_foreach|^aten::linalg_vector_norm"),
    (PRODUCTS, r"^aten::(addmm_?|mm|bmm|baddbmm_?|matmul|linear|dot|mv|addmv|_addmm_activation)$|mkldnn|mkl"),
    (COMPILED, r"Compiled|cpp_fused|Inductor"),
    # Operators of our own are classes; the work in them has names of its own.
    (
        BOOKKEEPING,
        r"^autograd::|^_?[A-Z]\w*$|Backward\d*$|AccumulateGrad|TorchDynamo|bytecode|Dispatcher|"
        rf"^aten::({_NO_WORK})$",
    ),
    (COPIES, r"^aten::(copy_|clone|contiguous|to|_to_copy|cat|stack|fill_|zero_|zeros\w*|ones\w*|full\w*|new_\w+)$"),
    (ELEMENTWISE, r"^aten::"),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, or on a CPU an operator without those inside it; `seconds` and `calls` of one step."""

    name: str
    kind: str
    seconds: float
    calls: float


@dataclasses.dataclass(frozen=True)
class Range:
    """A named range in one step: on the host's clock under the profiler, and the kernels that were launched in it."""

    name: str
    depth: int
    host_seconds: float
    device_seconds: float | None  # None without a device of its own
    calls: float


@dataclasses.dataclass(frozen=True)
class TraceFacts:
    """What a trace says of one step. `busy_seconds` is the time in which at least one kernel or operator ran.

    `exposed_seconds` is the part of it in which only communication ran; None without a device of its own.
    """

    busy_seconds: float
    kernels: tuple[Kernel, ...]
    ranges: tuple[Range, ...]
    exposed_seconds: float | None = None

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind, the longest first."""
        sums: dict[str, float] = {}
        for kernel in self.kernels:
            sums[kernel.kind] = sums.get(kernel.kind, 0.0) + kernel.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def kind_of_kernel(name: str) -> str:
    return next((kind for kind, pattern in _KERNEL_KINDS if re.search(pattern, name)), UNKNOWN)


def kind_of_operator(name: str) -> str:
    return next((kind for kind, pattern in _OPERATOR_KINDS if re.search(pattern, name)), UNKNOWN)


def read_trace(events: Iterable[Mapping[str, Any]], steps: int, *, device: bool) -> TraceFacts:
    """Adds up `steps` steps of a Chrome trace: kernels on a `device`, operators of the stepping thread without one."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [event for event in spans if event.get("cat") == "user_annotation"]
    named = {name: sorted(_interval(mark) for mark in marks if mark["name"] == name) for name in RANGES}
    threads = {mark.get("tid") for mark in marks if mark["name"] == STEP}
    if device:
        found = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        own = [(str(event["name"]), float(event["dur"])) for event in found]
    else:
        found = [event for event in spans if event.get("cat") == "cpu_op" and event.get("tid") in threads]
        own = list(_own_times(found))
    launched = _launch_times(spans, found) if device else []
    kind = kind_of_kernel if device else kind_of_operator
    sums: dict[str, tuple[float, int]] = {}
    for name, microseconds in own:
        total, calls = sums.get(name, (0.0, 0))
        sums[name] = total + microseconds, calls + 1
    kernels = [Kernel(name, kind(name), 1e-6 * total / steps, calls / steps) for name, (total, calls) in sums.items()]
    ranges = [
        Range(
            name=name,
            depth=depth,
            host_seconds=1e-6 * sum(end - start for start, end in named[name]) / steps,
            device_seconds=1e-6 * _launched_in(launched, named[name]) / steps if device else None,
            calls=len(named[name]) / steps,
        )
        for name, depth in RANGES.items()
        if named[name]
    ]
    busy = _covered([_interval(event) for event in found])
    at_work = _covered([_interval(event) for event in found if kind(str(event["name"])) != COMMUNICATION])
    return TraceFacts(
        busy_seconds=1e-6 * busy / steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        ranges=tuple(ranges),
        exposed_seconds=1e-6 * (busy - at_work) / steps if device else None,
    )


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union: two streams at once count once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _own_times(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """(name, duration without the operators inside) of the nested events of one thread."""
    open_events: list[list[Any]] = []  # name, end, own time
    for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        start, end = _interval(event)
        while open_events and open_events[-1][1] <= start:
            name, _, own = open_events.pop()
            yield name, max(0.0, own)
        if open_events:
            open_events[-1][2] -= end - start
        open_events.append([str(event["name"]), end, end - start])
    for name, _, own in open_events:
        yield name, max(0.0, own)


def _launch_times(
    spans: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float]]:
    """(when the host launched it, how long it ran) of every kernel whose launch is in the trace."""
    when = {
        event["args"]["correlation"]: float(event["ts"])
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    pairs = ((when.get(kernel.get("args", {}).get("correlation")), float(kernel["dur"])) for kernel in kernels)
    return [(start, length) for start, length in pairs if start is not None]


def _launched_in(launched: Sequence[tuple[float, float]], ranges: Sequence[tuple[float, float]]) -> float:
    """Backward's kernels come from a thread of autograd, so the time decides, not the thread."""
    starts = [start for start, _ in ranges]
    total = 0.0
    for when, length in launched:
        index = bisect.bisect_right(starts, when) - 1
        if index >= 0 and when <= ranges[index][1]:
            total += length
    return total
