"""What a profile means: one word for the bottleneck, the numbers that led to it, and the switch to try. Pure functions.

Idea: a step's time is cut into what the device did and what it waited for. `step` is measured without the profiler,
which slows the host down; `busy` is measured with it, because the durations of kernels do not change. What is left
between the two is idle time. As much of it as the host waited for data is the loader's; the rest is the host being
slower than the device. If there is little idle time, the kinds of kernels tell whether arithmetic or memory sets the
pace: matrix products and attention compute, everything else mostly moves bytes.

Contract: `judge` takes `Measurements` and returns a `Verdict`. A setting is proposed only if it is not in use and
`possible` says that this machine and model can have it.
Trap: a host that runs ahead of the device waits for data while the device is busy; that wait costs nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping

from flatout.diagnose.trace import ATTENTION, COMPILED, COPIES, ELEMENTWISE, OPTIMIZER, OURS, PRODUCTS

COMPUTES = (PRODUCTS, ATTENTION)
MOVES = (OURS, COMPILED, ELEMENTWISE, COPIES, OPTIMIZER)

IDLE_SHARE = 0.15  # of the step. Less may be the clock, which is higher while the profiler slows the host down.
MEMORY_SHARE = 0.30  # of the busy time: about 17% in our kernels on an H200 (GPT-2 124M), 55% in torch's own
HIGH_MFU = 0.40
MOST_ADVICE = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a step was like. Times are seconds of one step; `step_seconds` and `data_seconds` without the profiler."""

    device: str  # cuda, cpu, mps
    step_seconds: float
    profiled_step_seconds: float
    busy_seconds: float
    data_seconds: float  # how long the host waited for the batch
    seconds_by_kind: Mapping[str, float]
    kernels: float  # kernels, or operators, of one step
    tokens: int
    flops: float  # of one step, by the convention of model/count.py
    peak_flops: float | None  # dense half-precision, by the data sheet
    micro_batch: int
    accumulation: int
    context: int
    streaming: bool
    used: Mapping[str, str]  # the switches of `speed` as they really ran

    @property
    def idle_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.busy_seconds)

    @property
    def data_idle_seconds(self) -> float:
        """Idle because of the loader: a host that runs ahead may wait for data while the device is still busy."""
        return min(self.idle_seconds, self.data_seconds)

    @property
    def host_idle_seconds(self) -> float:
        """Idle because the host was not fast enough: launches, Python, waiting for a number from the device."""
        return self.idle_seconds - self.data_idle_seconds

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_seconds / self.step_seconds)

    @property
    def data_share(self) -> float:
        return self.data_idle_seconds / self.step_seconds

    @property
    def gap_share(self) -> float:
        return self.host_idle_seconds / self.step_seconds

    @property
    def kernels_per_second(self) -> float:
        return self.kernels / self.step_seconds

    @property
    def mean_kernel_seconds(self) -> float:
        return sum(self.seconds_by_kind.values()) / max(self.kernels, 1.0)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def achieved_flops(self) -> float:
        return self.flops / self.step_seconds

    @property
    def mfu(self) -> float | None:
        return None if self.peak_flops is None else self.achieved_flops / self.peak_flops

    @property
    def product_flops(self) -> float | None:
        """FLOP/s while products and attention run; None where none were seen."""
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
class Verdict:
    """`bottleneck` is compute-bound, memory-bound, launch-bound or data-bound."""

    bottleneck: str
    sentence: str
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]


def judge(measured: Measurements, possible: Callable[[str], bool] = lambda words: True) -> Verdict:
    """The bottleneck of a step; `possible` says whether this machine and model can have a setting."""
    bottleneck = _bottleneck(measured)
    sentence, evidence, candidates = {
        "data-bound": _data_bound,
        "launch-bound": _launch_bound,
        "memory-bound": _memory_bound,
        "compute-bound": _compute_bound,
    }[bottleneck](measured)
    advice = [one for one in candidates if not one.words or possible(one.words)][:MOST_ADVICE]
    if not advice:
        advice = [Advice("", "no switch is left that this machine can have; `flatout bench` measures each of them")]
    return Verdict(bottleneck, sentence, evidence, tuple(advice))


def _bottleneck(measured: Measurements) -> str:
    if measured.device != "cuda":  # operators run one after the other on the host: it is either them or the data
        return "data-bound" if measured.data_seconds >= IDLE_SHARE * measured.step_seconds else "compute-bound"
    if measured.idle_seconds >= IDLE_SHARE * measured.step_seconds:
        return "data-bound" if measured.data_idle_seconds >= measured.host_idle_seconds else "launch-bound"
    return "memory-bound" if measured.share_of(*MOVES) >= MEMORY_SHARE else "compute-bound"


_Part = tuple[str, tuple[str, ...], list[Advice]]


def _data_bound(measured: Measurements) -> _Part:
    wait = measured.data_seconds
    sentence = (
        f"The step waits for its batch: {_ms(wait)} of {_ms(measured.step_seconds)} "
        f"({wait / measured.step_seconds:.0%}) pass in the loader."
    )
    evidence = [f"waiting for data {_ms(wait)} a step, the step itself {_ms(measured.step_seconds)}"]
    if measured.device == "cuda":
        evidence.append(
            f"the device is busy {measured.busy_share:.0%} of the time, idle for data {measured.data_share:.0%}"
        )
    advice: list[Advice] = []
    workers = int(measured.used.get("workers", "0") or 0)
    if measured.streaming:
        advice.append(
            Advice("", "prepare the text once with `flatout prepare`: a stream reads and tokenizes in every run")
        )
    elif measured.used.get("loader") == "host":
        if measured.device == "cuda":
            advice.append(Advice("speed.loader=device", "keeps all tokens on the GPU, so nothing is read in a step"))
        advice.append(Advice(f"speed.workers={max(2, 2 * workers)}", f"reads ahead in more threads; now {workers}"))
        advice.append(Advice("", "look at the disk that holds the shards: `flatout doctor` measures it"))
    else:
        advice.append(Advice("speed.loader=host speed.workers=4", "reads batches ahead in threads instead"))
    return sentence, tuple(evidence), advice


def _launch_bound(measured: Measurements) -> _Part:
    mean = 1e6 * measured.mean_kernel_seconds
    sentence = (
        f"The device waits for the host: it is idle {measured.gap_share:.0%} of the step, while the host launches "
        f"{measured.kernels:,.0f} kernels of {mean:.1f} µs on average."
    )
    evidence = (
        f"the device is busy {_ms(measured.busy_seconds)} of {_ms(measured.step_seconds)} ({measured.busy_share:.0%})",
        f"{measured.kernels_per_second:,.0f} kernels per second; a launch takes a host about 5 to 10 µs",
        f"a micro-batch has {measured.micro_batch * measured.context:,} tokens",
    )
    used = measured.used
    advice: list[Advice] = []
    if used.get("cuda_graphs") != "on":
        advice.append(Advice("speed.cuda_graphs=on", "replays a micro-batch with one launch"))
    if measured.accumulation > 1:
        size = min(measured.micro_batch * min(measured.accumulation, 8), measured.micro_batch * measured.accumulation)
        advice.append(Advice(f"speed.micro_batch={size}", f"fewer and longer kernels; now {measured.micro_batch}"))
    if used.get("kernels") != "triton":
        advice.append(Advice("speed.kernels=triton", "our kernels do in one launch what torch does in several"))
    if used.get("compile") == "off" and used.get("kernels") != "triton":
        advice.append(Advice("speed.compile=reduce-overhead", "fuses kernels and replays them as graphs"))
    if used.get("fused_optimizer") == "off":
        advice.append(
            Advice("speed.fused_optimizer=on", "one kernel for the update, and no word to the host before it")
        )
    if measured.accumulation == 1:
        advice.append(Advice("", "a larger train.batch_tokens makes kernels longer, but changes what is learned"))
    return sentence, evidence, advice


def _memory_bound(measured: Measurements) -> _Part:
    share = measured.share_of(*MOVES)
    sentence = (
        f"Kernels that move memory and compute little take {share:.0%} of the device's time; "
        f"products and attention take {measured.share_of(*COMPUTES):.0%}."
    )
    kinds = [(kind, measured.share_of(kind)) for kind in MOVES if measured.share_of(kind) >= 0.01]
    listed = ", ".join(f"{kind} {part:.0%}" for kind, part in sorted(kinds, key=lambda item: -item[1]))
    evidence = (
        f"the device is busy {measured.busy_share:.0%} of the step",
        f"of its time: {listed}",
        *_rates(measured),
    )
    used = measured.used
    advice: list[Advice] = []
    if used.get("precision") in ("fp32", "tf32"):
        advice.append(Advice("speed.precision=bf16", "halves what activations weigh"))
    if used.get("kernels") != "triton":
        advice.append(Advice("speed.kernels=triton", "norms, activations and additions in one pass over memory each"))
        if used.get("compile") == "off":
            advice.append(Advice("speed.compile=default", "torch's compiler fuses elementwise kernels as well"))
    if used.get("loss") != "fused":
        advice.append(Advice("speed.loss=fused", "never writes all logits to memory"))
    if used.get("residual") == "fp32" and used.get("kernels") == "triton":
        advice.append(Advice("speed.residual=bf16", "half the bytes between blocks"))
    if measured.share_of(OPTIMIZER) >= 0.2:
        if used.get("fused_optimizer") == "off":
            advice.append(Advice("speed.fused_optimizer=on", "one pass over weights and moments"))
        advice.append(Advice("", "the update weighs this much because the batch is small; a larger train.batch_tokens "
                                 "changes what is learned"))  # fmt: skip
    return sentence, evidence, advice


def _compute_bound(measured: Measurements) -> _Part:
    used, cuda = measured.used, measured.device == "cuda"
    share = measured.share_of(*COMPUTES)
    if cuda:
        sentence = f"Matrix products and attention take {share:.0%} of the device's time, and it hardly waits."
        evidence = [f"the device is busy {measured.busy_share:.0%} of the step"]
    else:
        sentence = (
            f"Operators take {measured.busy_share:.0%} of the step; waiting for data takes "
            f"{_ms(measured.data_seconds)} of {_ms(measured.step_seconds)}."
        )
        top = sorted(measured.seconds_by_kind.items(), key=lambda item: -item[1])[:3]
        evidence = [", ".join(f"{kind} {measured.share_of(kind):.0%}" for kind, _ in top) + " of the operators' time"]
    evidence += _rates(measured)
    precision, mfu = used.get("precision"), measured.mfu
    advice: list[Advice] = []
    if cuda and precision in ("fp32", "tf32"):
        evidence.append(f"products run in {precision}; the peak is that of half precision")
        advice.append(Advice("speed.precision=bf16", "runs products on the matrix units at their full rate"))
        if precision == "fp32":
            advice.append(Advice("speed.precision=tf32", "if numbers must stay near fp32"))
    if used.get("attention", "").startswith("reference"):
        advice.append(Advice("speed.attention=auto", "a fused attention kernel; now it is written out"))
    if used.get("checkpointing") not in (None, "none"):
        advice.append(Advice("speed.checkpointing=none", "computes nothing twice, if memory allows"))
    if cuda and mfu is not None and mfu < HIGH_MFU and measured.accumulation > 1 and precision not in ("fp32", "tf32"):
        size = measured.micro_batch * 2
        advice.append(
            Advice(f"speed.micro_batch={size}", "larger products reach a higher rate; `flatout tune` finds the best")
        )
    if cuda and used.get("kernels") == "triton" and used.get("products") == "torch" and precision in ("bf16", "fp16"):
        advice.append(Advice("speed.products=tuned", "takes the fastest of the library's kernels for each shape"))
    if cuda and mfu is not None and mfu >= HIGH_MFU and precision in ("bf16", "fp16"):
        advice.append(Advice("", f"nothing cheap is left: {mfu:.0%} of the peak is what good training steps reach"))
    if cuda and used.get("fp8") == "[]" and used.get("kernels") == "triton" and precision == "bf16":
        advice.append(
            Advice('speed.fp8="[qkv, out, up, down, head]"', "8-bit products; off unless asked for, see docs/speed.md")
        )
    if not cuda:
        if measured.busy_share < 1 - IDLE_SHARE and measured.accumulation > 1:
            size = measured.micro_batch * measured.accumulation
            advice.append(Advice(f"speed.micro_batch={size}", "Python's share shrinks with larger micro-batches"))
        if used.get("compile") == "off":
            advice.append(
                Advice("speed.compile=default", "fuses elementwise operators; takes about a minute to compile")
            )
        advice.append(Advice("", "a GPU: `flatout doctor` says what this machine has"))
    return sentence, tuple(evidence), advice


def _rates(measured: Measurements) -> list[str]:
    lines: list[str] = []
    if measured.mfu is not None and measured.peak_flops is not None:
        peak = _flops(measured.peak_flops)
        lines.append(f"{_flops(measured.achieved_flops)} over the whole step, MFU {measured.mfu:.1%} of {peak}")
    else:
        lines.append(f"{_flops(measured.achieved_flops)} over the whole step; the peak of this device is not known")
    if measured.product_flops is not None:
        lines.append(f"{_flops(measured.product_flops)} while products and attention run")
    return lines


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
