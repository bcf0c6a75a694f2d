"""What limits a step: a trace of torch's profiler added up, and the verdict with the switch to try.

Pure functions, no torch. The trace is a public format that a person can open too, so the figures come from the very
events that stand there. `read_trace` returns seconds of one step by kernel, by kind and by named range. Device time of
a range is that of the kernels launched in it, whenever they ran: the host's clock says nothing about the device's work.

`judge` cuts a step's time into what the device did and what it waited for. `step` is measured without the profiler,
which slows the host down; `busy` is measured with it, because the durations of kernels do not change. What is left
between the two is idle time. As much of it as the host waited for data is the loader's; the rest is the host being
slower than the device. If there is little idle time, the kinds of kernels tell whether arithmetic or memory sets the
pace: matrix products and attention compute, everything else mostly moves bytes. On a CPU, threads may wait for cores,
which the system counts. A setting is proposed only if it is not in use and `possible` says that this machine and model
can have it.

Traps: a replayed CUDA graph is one launch of many kernels, so its ranges cannot be separated: `micro-batch` has all.
On a CPU operators nest; their own time is what is left without the operators inside. A host that runs ahead of the
device waits for data while the device is busy; that wait costs nothing.
"""

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flatout.errors import page
from flatout.records import WAITING

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
    *("_advance_states", "_attend", "_int8_rows", "_of_one_row", "_sample", "_scan", "_settle"),
    *(
        "_backward",
        "_carry",
        "_drop",
        "_embed",
        "_embed_back",
        "_ends",
        "_fold",
        "_forward",
        "_gate_backward",
        "_gate_forward",
        "_gradients",
    ),
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
_NO_WORK = (  # views, and memory that is not written yet
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


# --- the verdict ------------------------------------------------------------------------------------------------------

COMPUTES = (PRODUCTS, ATTENTION)
MOVES = (OURS, COMPILED, ELEMENTWISE, COPIES, OPTIMIZER)

IDLE_SHARE = 0.15  # of the step. Less may be the clock, which is higher while the profiler slows the host down.
MEMORY_SHARE = 0.30  # of the busy time: about 17% in our kernels on an H200 (GPT-2 124M), 55% in torch's own
HIGH_MFU = 0.40
MOST_ADVICE = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a step was like. Seconds are of one step; `step_seconds`, `data_wait_seconds` without the profiler."""

    device_kind: str  # cuda, cpu, mps
    step_seconds: float
    profiled_step_seconds: float
    busy_seconds: float
    data_wait_seconds: float  # how long the host waited for the batch
    seconds_by_kind: Mapping[str, float]
    kernels_per_step: float  # or operators
    batch_tokens: int
    batch_setting: str  # the one that makes a step larger
    flops: float  # of one step, by the convention of model/count.py
    peak_flops_per_second: float | None  # dense half-precision, by the data sheet
    micro_batch: int
    accumulation: int
    context: int
    streaming: bool
    used: Mapping[str, str]  # the switches of `speed` as they really ran
    reduction_seconds: float = 0.0  # how long this rank waited for the gradients of others
    reduces_in: str = ""  # the type in which several ranks add them up
    slowest: str = ""  # the rank that is slower than the others, in words; empty if none is
    threads_waiting: float | None = None  # threads of this process that waited for a core, on average
    cores: float | None = None  # that this process may use
    cores_others: float | None = None  # of them in use by other processes

    @property
    def idle_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.busy_seconds)

    @property
    def idle_for_data_seconds(self) -> float:
        """Idle because of the loader: a host that runs ahead may wait for data while the device is still busy."""
        return min(self.idle_seconds, self.data_wait_seconds)

    @property
    def idle_for_host_seconds(self) -> float:
        """Idle because the host was not fast enough: launches, Python, waiting for a number from the device."""
        return self.idle_seconds - self.idle_for_data_seconds

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_seconds / self.step_seconds)

    @property
    def kernels_per_second(self) -> float:
        return self.kernels_per_step / self.step_seconds

    @property
    def mean_kernel_seconds(self) -> float:
        return sum(self.seconds_by_kind.values()) / max(self.kernels_per_step, 1.0)

    @property
    def tokens_per_second(self) -> float:
        return self.batch_tokens / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.step_seconds

    @property
    def mfu(self) -> float | None:
        return None if self.peak_flops_per_second is None else self.flops_per_second / self.peak_flops_per_second

    @property
    def product_flops_per_second(self) -> float | None:
        """While products and attention run; None where none were seen."""
        seconds = sum(self.seconds_by_kind.get(kind, 0.0) for kind in COMPUTES)
        return self.flops / seconds if seconds > 0 else None

    def share_of(self, *kinds: str) -> float:
        """Of all kernel time, how much these kinds take."""
        total = sum(self.seconds_by_kind.values())
        return sum(self.seconds_by_kind.get(kind, 0.0) for kind in kinds) / total if total > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to try. `words` go on a command line as they are; empty where there is no switch for it."""

    words: str
    why: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """`bottleneck` is compute-bound, memory-bound, launch-bound, data-bound, communication-bound or oversubscribed."""

    bottleneck: str
    sentence: str
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]


def judge(measured: Measurements, possible: Callable[[str], bool] = lambda words: True) -> Diagnosis:
    """The bottleneck of a step; `possible` says whether this machine and model can have a setting."""
    bottleneck = _bottleneck(measured)
    sentence, evidence, rows = {
        "communication-bound": _communication_bound,
        "oversubscribed": _oversubscribed,
        "data-bound": _data_bound,
        "launch-bound": _launch_bound,
        "memory-bound": _memory_bound,
        "compute-bound": _compute_bound,
    }[bottleneck](measured)
    advice = [Advice(words, why) for when, words, why in rows if when and (not words or possible(words))]
    if not advice:
        advice = [Advice("", "no switch is left that this machine can have; `flatout bench` measures each of them")]
    return Diagnosis(bottleneck, sentence, tuple(evidence), tuple(advice[:MOST_ADVICE]))


def _bottleneck(measured: Measurements) -> str:
    if measured.reduction_seconds >= IDLE_SHARE * measured.step_seconds:
        return "communication-bound"
    if measured.device_kind != "cuda":  # operators run one after the other on the host: it is either them or the data
        waits = measured.data_wait_seconds / measured.step_seconds
        crowded = (measured.threads_waiting or 0.0) >= WAITING
        if measured.device_kind == "cpu" and crowded and waits < 0.5:  # loaders wait for cores, too
            return "oversubscribed"
        return "data-bound" if waits >= IDLE_SHARE else "compute-bound"
    if measured.idle_seconds >= IDLE_SHARE * measured.step_seconds:
        return "data-bound" if measured.idle_for_data_seconds >= measured.idle_for_host_seconds else "launch-bound"
    return "memory-bound" if measured.share_of(*MOVES) >= MEMORY_SHARE else "compute-bound"


# The sentence, the evidence, and what to try, the best first: when it applies, the words for it, and why.
_Verdict = tuple[str, list[str], list[tuple[bool, str, str]]]


def _communication_bound(measured: Measurements) -> _Verdict:
    wait, step = measured.reduction_seconds, measured.step_seconds
    sentence = f"The step waits for gradients of other ranks: {_ms(wait)} of {_ms(step)} ({wait / step:.0%})."
    evidence = [f"gradients are added up in {measured.reduces_in}", "the rank that takes longest: " + measured.slowest]
    slow, wide = bool(measured.slowest), measured.reduces_in == "fp32" and measured.used.get("parallel") == "data"
    rows = [
        (slow, "", f"look at {measured.slowest}: the others wait for it, however fast the links are"),
        (wide, "parallel.reduce=bf16", "sends half the bytes, and rounds their sum"),
        (
            True,
            "",
            f"a larger {measured.batch_setting} gives more to compute for the same gradients, but changes what is "
            "learned",
        ),
    ]
    return sentence, evidence if slow else evidence[:1], rows


def _oversubscribed(measured: Measurements) -> _Verdict:
    threads, cores, others = int(measured.used.get("threads", "1")), measured.cores or 1.0, measured.cores_others or 0.0
    sentence = (
        f"Threads wait for cores: {measured.threads_waiting:.1f} of them on average, while {threads} compute and other "
        f"processes use {others:.1f} of {cores:g} cores."
    )
    evidence = [f"a step takes {_ms(measured.step_seconds)}; threads that share a product wait for the last of them"]
    fits = max(1, min(int(cores), round(cores - others)))
    fewer = f"leaves a core to each thread; now {threads}"
    rows = [
        (fits < threads, f"speed.threads={fits}", fewer),
        (
            others >= 0.5,
            "",
            "stop the other programs, or measure when they are done: figures of a busy machine say little",
        ),
    ]
    return sentence, evidence + _rates(measured), rows


def _data_bound(measured: Measurements) -> _Verdict:
    wait, step, cuda = measured.data_wait_seconds, measured.step_seconds, measured.device_kind == "cuda"
    sentence = f"The step waits for its batch: {_ms(wait)} of {_ms(step)} ({wait / step:.0%}) pass in the loader."
    evidence = [f"waiting for data {_ms(wait)} a step, the step itself {_ms(step)}"]
    if cuda:
        idle = measured.idle_for_data_seconds / step
        evidence.append(f"the device is busy {measured.busy_share:.0%} of the time, idle for data {idle:.0%}")
    workers = int(measured.used.get("workers", "0") or 0)
    stream, host = measured.streaming, not measured.streaming and measured.used.get("loader") == "host"
    rows = [
        (stream, "", "prepare the text once with `flatout prepare`: a stream reads and tokenizes in every run"),
        (host and cuda, "speed.loader=device", "keeps all tokens on the GPU, so nothing is read in a step"),
        (host, f"speed.workers={max(2, 2 * workers)}", f"reads ahead in more threads; now {workers}"),
        (host, "", "look at the disk that holds the shards: `flatout doctor` measures it"),
        (not stream and not host, "speed.loader=host speed.workers=4", "reads batches ahead in threads instead"),
    ]
    return sentence, evidence, rows


def _launch_bound(measured: Measurements) -> _Verdict:
    used, size, count = measured.used, measured.micro_batch, measured.accumulation
    sentence = (
        f"The device waits for the host: it is idle {measured.idle_for_host_seconds / measured.step_seconds:.0%} of "
        f"the step, while the host launches {measured.kernels_per_step:,.0f} kernels of "
        f"{1e6 * measured.mean_kernel_seconds:.1f} µs on average."
    )
    evidence = [
        f"the device is busy {_ms(measured.busy_seconds)} of {_ms(measured.step_seconds)} ({measured.busy_share:.0%})",
        f"{measured.kernels_per_second:,.0f} kernels per second; a launch takes a host about 5 to 10 µs",
        f"a micro-batch has {size * measured.context:,} tokens",
    ]
    torch_kernels = used.get("kernels") != "triton"
    eager = torch_kernels and used.get("compile") == "off"
    single = used.get("fused_optimizer") == "off"
    rows = [
        (used.get("cuda_graphs") != "on", "speed.cuda_graphs=on", "replays a micro-batch with one launch"),
        (count > 1, f"speed.micro_batch={size * min(count, 8)}", f"fewer and longer kernels; now {size}"),
        (torch_kernels, "speed.kernels=triton", "our kernels do in one launch what torch does in several"),
        (eager, "speed.compile=reduce-overhead", "fuses kernels and replays them as graphs"),
        (single, "speed.fused_optimizer=on", "one kernel for the update, and no word to the host before it"),
        (count == 1, "", f"a larger {measured.batch_setting} makes kernels longer, but changes what is learned"),
    ]
    return sentence, evidence, rows


def _memory_bound(measured: Measurements) -> _Verdict:
    used, share = measured.used, measured.share_of(*MOVES)
    sentence = (
        f"Kernels that move memory and compute little take {share:.0%} of the device's time; "
        f"products and attention take {measured.share_of(*COMPUTES):.0%}."
    )
    kinds = [(kind, measured.share_of(kind)) for kind in MOVES if measured.share_of(kind) >= 0.01]
    listed = ", ".join(f"{kind} {part:.0%}" for kind, part in sorted(kinds, key=lambda item: -item[1]))
    evidence = [f"the device is busy {measured.busy_share:.0%} of the step", f"of its time: {listed}"]
    wide, torch_kernels = used.get("precision") in ("fp32", "tf32"), used.get("kernels") != "triton"
    eager, wide_stream = torch_kernels and used.get("compile") == "off", used.get("residual") == "fp32"
    updates = measured.share_of(OPTIMIZER) >= 0.2
    single = updates and used.get("fused_optimizer") == "off"
    small = (
        f"the update weighs this much because the batch is small; a larger {measured.batch_setting} changes what is "
        "learned"
    )
    rows = [
        (wide, "speed.precision=bf16", "halves what activations weigh"),
        (torch_kernels, "speed.kernels=triton", "norms, activations and additions in one pass over memory each"),
        (eager, "speed.compile=default", "torch's compiler fuses elementwise kernels as well"),
        (used.get("loss") != "fused", "speed.loss=fused", "never writes all logits to memory"),
        (wide_stream and not torch_kernels, "speed.residual=bf16", "half the bytes between blocks"),
        (single, "speed.fused_optimizer=on", "one pass over weights and moments"),
        (updates, "", small),
    ]
    return sentence, evidence + _rates(measured), rows


def _compute_bound(measured: Measurements) -> _Verdict:
    used, cuda = measured.used, measured.device_kind == "cuda"
    if cuda:
        share = measured.share_of(*COMPUTES)
        sentence = f"Matrix products and attention take {share:.0%} of the device's time, and it hardly waits."
        evidence = [f"the device is busy {measured.busy_share:.0%} of the step"]
    else:
        sentence = (
            f"Operators take {measured.busy_share:.0%} of the step; waiting for data takes "
            f"{_ms(measured.data_wait_seconds)} of {_ms(measured.step_seconds)}."
        )
        top = sorted(measured.seconds_by_kind.items(), key=lambda item: -item[1])[:3]
        evidence = [", ".join(f"{kind} {measured.share_of(kind):.0%}" for kind, _ in top) + " of the operators' time"]
    evidence += _rates(measured)
    precision, mfu, size = used.get("precision"), measured.mfu, measured.micro_batch
    wide, half = cuda and precision in ("fp32", "tf32"), cuda and precision in ("bf16", "fp16")
    if wide:
        evidence.append(f"products run in {precision}; the peak is that of half precision")
    ours, several = used.get("kernels") == "triton", measured.accumulation > 1
    low = cuda and not wide and several and mfu is not None and mfu < HIGH_MFU
    waits = not cuda and several and measured.busy_share < 1 - IDLE_SHARE
    written_out = used.get("attention", "").startswith("reference")
    again = used.get("checkpointing") not in (None, "none")
    plain = half and ours and used.get("products") == "torch"
    high = half and mfu is not None and mfu >= HIGH_MFU
    eight_bit = 'speed.fp8="[qkv, out, up, down, head]"'
    could_be_8bit = cuda and ours and precision == "bf16" and used.get("fp8") == "[]"
    eager = not cuda and used.get("compile") == "off"
    rows = [
        (wide, "speed.precision=bf16", "runs products on the matrix units at their full rate"),
        (wide and precision == "fp32", "speed.precision=tf32", "if numbers must stay near fp32"),
        (written_out, "speed.attention=auto", "a fused attention kernel; now it is written out"),
        (again, "speed.checkpointing=none", "computes nothing twice, if memory allows"),
        (low, f"speed.micro_batch={2 * size}", "larger products reach a higher rate; `flatout tune` finds the best"),
        (plain, "speed.products=tuned", "takes the fastest of the library's kernels for each shape"),
        (high, "", f"nothing cheap is left: {mfu or 0.0:.0%} of the peak is what good training steps reach"),
        (could_be_8bit, eight_bit, f"8-bit products; off unless asked for, see {page('guides/speed.md')}"),
        (
            waits,
            f"speed.micro_batch={size * measured.accumulation}",
            "Python's share shrinks with larger micro-batches",
        ),
        (eager, "speed.compile=default", "fuses elementwise operators; takes about a minute to compile"),
        (not cuda, "", "a GPU: `flatout doctor` says what this machine has"),
    ]
    return sentence, evidence, rows


def _rates(measured: Measurements) -> list[str]:
    peak, products = measured.peak_flops_per_second, measured.product_flops_per_second
    known = "; the peak of this device is not known"
    if measured.mfu is not None and peak is not None:
        known = f", MFU {measured.mfu:.1%} of {_flops(peak)}"
    lines = [f"{_flops(measured.flops_per_second)} over the whole step{known}"]
    return lines + ([] if products is None else [f"{_flops(products)} while products and attention run"])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
