"""What really works on this device: kernels are run and compared, not looked up in a table of versions.

The contract: this module imports torch, so it is imported only where `Machine.torch.status` is ok. A trial that raises,
whatever it raises, is a trial that fails. Nothing of the process is left changed but torch's CUDA context.
The trap: after some CUDA errors (an illegal address) every later call of the process fails too; `_Runner` notices and
says so instead of blaming the trials after it.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.config.schema import ModelConfig, SpeedConfig
from flatout.device import Device
from flatout.diagnose.machine import Machine
from flatout.errors import first_line, many
from flatout.finding import Check, Finding, Status
from flatout.host import THREAD_VARIABLES, ThreadTrial
from flatout.model.compiling import compile_failure
from flatout.ops.attention import attention_failure, causal_attention, picked_kernel
from flatout.ops.kernels import cublaslt
from flatout.resolve.case import Probes, no_triton, product_type, shape_of, try_threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTrial:
    """Something that was run on the device to see whether it works."""

    name: str
    outcome: Literal["works", "fails", "skipped"]
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTrials:
    """Everything that was run. `product_flops` is the rate of one large matrix product in `product_type`."""

    trials: tuple[DeviceTrial, ...] = ()
    picked: str | None = None  # torch's own choice of an attention kernel
    product_flops: float | None = None
    product_type: str = ""
    threads: ThreadTrial | None = None  # on a CPU: how long a piece of training takes by number of threads

    def failure(self, name: str) -> str | None:
        """Why a trial failed; None if it worked or was not made."""
        return next((one.detail for one in self.trials if one.name == name and one.outcome == "fails"), None)


_check = functools.partial(Check, "kernels")

_STICKY = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address")
_MOST_CONTEXT = 2048  # a trial shows whether a kernel takes the shapes, not how long it takes for all of them
_BURST_SECONDS = 0.15
_ROUND = 16  # products that are launched without waiting: the device never waits for the host between them


def run_trials(
    machine: Machine,
    device: Device,
    speed: SpeedConfig | None = None,
    model: ModelConfig | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> DeviceTrials:
    """Runs what a model needs, or an ordinary one where none is known, on a device."""
    runner, cuda = _Runner(machine, device, speed, quick, progress), device.kind == "cuda"
    rates: list[float] = []
    runner.add("matrix product", lambda: rates.append(_product_rate(runner.place, runner.dtype)))
    threads: list[ThreadTrial] = []
    if device.kind == "cpu":
        runner.add("threads", lambda: threads.append(try_threads(*shape_of(model))))
    picked = _try_attention(runner, model or ModelConfig(heads=12, width=768, context=1024))
    if cuda:
        _try_on_cuda(runner)
    _try_compile(runner)
    if cuda:
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    return DeviceTrials(
        trials=tuple(runner.trials),
        picked=picked,
        product_flops=next(iter(rates), None),
        product_type=runner.precision,
        threads=next(iter(threads), None),
    )


@dataclasses.dataclass
class _Runner:
    """Runs one trial after the other and keeps what came of them."""

    machine: Machine
    device: Device
    speed: SpeedConfig | None
    quick: bool
    progress: Callable[[str], None]
    trials: list[DeviceTrial] = dataclasses.field(default_factory=list)
    dead: str = ""

    @property
    def place(self) -> torch.device:
        return self.device.torch_device

    @property
    def precision(self) -> str:
        """The type of the run's products: bf16, fp16 or fp32."""
        asked = "auto" if self.speed is None else self.speed.precision
        if self.device.kind != "cuda" or asked in ("fp32", "tf32"):
            return "fp32"
        return "bf16" if asked != "fp16" and self.device.bf16 else "fp16"

    @property
    def dtype(self) -> torch.dtype:
        return product_type(self.precision)

    @property
    def no_triton(self) -> str | None:
        """Why our kernels cannot run here, or None."""
        triton = self.machine.triton.status
        return f"triton is {triton}" if triton != "ok" else no_triton(self.device, Probes())

    def add(self, name: str, attempt: Callable[[], str | None], detail: str = "") -> None:
        """`attempt` returns why it does not work, or None."""
        if self.dead:
            self.skip(name, f"the device stopped answering in the trial before: {self.dead}")
            return
        self.progress(f"trying {name}")
        started = time.perf_counter()
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # compilers print pages before they raise one line
                reason = attempt()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign kernel raises is the answer
            reason = f"{type(error).__name__}: {first_line(error)}"
            if any(word in str(error).lower() for word in _STICKY):
                self.dead = name
        took = f"{detail}{', ' if detail else ''}{time.perf_counter() - started:.1f} s"
        outcome, detail = ("works", took) if reason is None else ("fails", reason)
        self.trials.append(DeviceTrial(name=name, outcome=outcome, detail=detail))

    def skip(self, name: str, why: str) -> None:
        self.trials.append(DeviceTrial(name=name, outcome="skipped", detail=why))


def _random(count: int, size: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same random tensors at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator).to(device, dtype) for _ in range(count)]


def _difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.detach().float() - theirs.detach().float()).abs().max())


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product: what the chip really gives, by which everything else can be judged."""
    size = 4096 if device.type == "cuda" else 512
    a, b = _random(2, (size, size), device, dtype)
    for _ in range(3):
        torch.mm(a, b)
    return 2.0 * size**3 / statistics.median(product_seconds(lambda: torch.mm(a, b), device))


def product_seconds(multiply: Callable[[], object], device: torch.device) -> list[float]:
    """How long each of many calls took, on the device's own clock where it has one.

    Others on the same card get their turns between our kernels. On the host's clock every wait for a turn counts as if
    the product were slow; on the device's, only the few products that a turn interrupts are, and the median is not.
    The check "in use" reports other processes.
    """
    seconds: list[float] = []
    started = time.perf_counter()
    if device.type != "cuda":
        while not seconds or time.perf_counter() - started < _BURST_SECONDS:
            before = time.perf_counter()
            multiply()
            if device.type == "mps":
                torch.mps.synchronize()
            seconds.append(time.perf_counter() - before)
        return seconds
    with torch.cuda.device(device):  # where marks are made
        torch.cuda.synchronize(device)
        while not seconds or time.perf_counter() - started < _BURST_SECONDS:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUND + 1)]
            marks[0].record()
            for mark in marks[1:]:
                multiply()
                mark.record()
            torch.cuda.synchronize(device)
            seconds += [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
    return seconds


# --- attention --------------------------------------------------------------------------------------------------------


def _try_attention(runner: _Runner, model: ModelConfig) -> str | None:
    """Tries every kernel that is at hand; returns the one that torch itself would take."""
    device, dtype, packages = runner.place, runner.dtype, runner.machine.packages
    shape: dict[str, Any] = {"heads": model.heads, "groups": model.kv_heads or model.heads, "size": model.size}
    shape |= {"context": min(model.context, _MOST_CONTEXT), "dropout": model.dropout}
    asked = "auto" if runner.speed is None else runner.speed.attention
    if device.type != "cuda":
        runner.add("attention sdpa", lambda: _plain_attention(device, dtype, shape))
        return picked_kernel(device, dtype, **shape)
    backends = ["flash", "cudnn"]
    if not runner.quick:
        backends.append("efficient")
        backends += ["fa4", "cudnn+fa4"] if packages.get("flash_attn.cute") is not None else []
    if asked not in ("auto", "sdpa", "reference", *backends):
        backends.append(asked)
    for backend in backends:
        runner.add(f"attention {backend}", functools.partial(attention_failure, backend, device, dtype, **shape))
    return picked_kernel(device, dtype, **shape)


def _plain_attention(device: torch.device, dtype: torch.dtype, shape: Mapping[str, Any]) -> str | None:
    """torch's own choice against attention written out, on a few positions."""
    q, k, v = _random(3, (1, shape["heads"], min(64, shape["context"]), shape["size"]), device, dtype)
    difference = _difference(*(causal_attention(q, k, v, backend=name) for name in ("sdpa", "reference")))
    return None if difference < 0.02 else f"it is {difference:.2g} away from the reference"


# --- our kernels, 8-bit products, cuBLASLt ----------------------------------------------------------------------------


def _try_on_cuda(runner: _Runner) -> None:
    place = runner.place
    if runner.no_triton:
        runner.skip("triton kernels", runner.no_triton)
    else:
        runner.add("triton kernels", lambda: _our_kernel(place))
    runner.add("cuBLASLt", lambda: _own_products(place, torch.bfloat16 if runner.device.bf16 else torch.float16))
    if runner.device.capability is not None and runner.device.capability >= (8, 9):
        runner.add("fp8 products", lambda: _fp8_product(place))


def _our_kernel(device: torch.device) -> str | None:
    """Our norm with its residual addition, forward and backward, against torch's."""
    # By name: a machine without Triton cannot import it, and reading this module must not import it.
    add_norm = importlib.import_module("flatout.ops.kernels.stream").add_norm
    x, branch = (tensor.requires_grad_() for tensor in _random(2, (64, 256), device))
    weight = torch.ones(256, device=device, requires_grad=True)
    total, h = add_norm(x, branch, None, weight, None, centred=True, eps=1e-5, dtype=torch.float32)
    expected = torch.nn.functional.layer_norm(x + branch, (256,), weight, None, 1e-5)
    mine, theirs = (torch.autograd.grad((y * y).sum(), weight, retain_graph=True)[0] for y in (h, expected))
    apart = max(_difference(h, expected), _difference(total - x, branch), _difference(mine, theirs) / 100)
    return None if apart < 1e-3 else f"the result is {apart:.2g} away from torch's"


def _own_products(device: torch.device, dtype: torch.dtype) -> str | None:
    reason = cublaslt.missing()
    if reason is not None:
        return reason
    a, b = _random(2, (2048, 1024), device, dtype)
    theirs = a @ b.t()
    apart = _difference(cublaslt.multiply(a, b.t()), theirs)
    return None if apart <= 0.02 * (1 + float(theirs.float().abs().max())) else f"it is {apart:.2g} away from torch's"


def _fp8_product(device: torch.device) -> str | None:
    a = torch.ones(64, 64, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = scaled(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return None if float(product.float().mean()) == 64.0 else "a product of ones came out wrong"


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _try_compile(runner: _Runner) -> None:
    name, device, triton = "torch.compile", runner.place, runner.machine.triton.status
    asked = "auto" if runner.speed is None else runner.speed.compile
    if runner.quick:
        runner.skip(name, "left out by --quick")
    elif device.type != "cuda" and asked in ("auto", "off"):
        runner.skip(name, f"not used on {device.type} unless asked for")
    elif device.type == "cuda" and triton != "ok":
        runner.skip(name, f"triton is {triton}")
    else:
        runner.add(name, lambda: compile_failure(device))


# --- what the trials showed -------------------------------------------------------------------------------------------

_SLOWER = 1.2  # times as long as with the best number of threads is worth a word
# Below this share of the data sheet's rate a large product is slower than the card should be.
_SLOW_SHARE = 0.4


def check_kernels(
    machine: Machine, trials: DeviceTrials, speed: SpeedConfig | None, kind: str, peak_flops: float | None
) -> Iterator[Finding | None]:
    """`peak_flops` is the data sheet's rate of the card, None where it is not known."""
    yield _products(trials, kind, peak_flops)
    if kind == "cpu":
        yield _threads(machine, trials, "auto" if speed is None else speed.threads)
    yield _attention(trials, kind)
    for trial in trials.trials:
        if trial.name in ("triton kernels", "cuBLASLt", "fp8 products", "torch.compile"):
            yield _other(trial, speed)


def _products(trials: DeviceTrials, kind: str, peak_flops: float | None) -> Finding | None:
    reason = trials.failure("matrix product")
    if reason is not None:
        return _check("products").bad(
            f"a plain matrix product fails on {kind}: {reason}",
            "Nothing can be trained on this device as it is. If memory is full, see who uses it; if the error speaks "
            "of a kernel image or a driver, torch and driver do not go together; else restart the machine.",
        )
    if trials.product_flops is None:
        return None
    rate = trials.product_flops
    shown = f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:.0f} GFLOP/s"
    found = f"a {trials.product_type} matrix product runs at {shown}"
    if peak_flops is None or trials.product_type == "fp32":
        return _check("products").ok(found)
    share = rate / peak_flops
    return _check("products").warn_if(
        share < _SLOW_SHARE,
        f"{found}, {share:.0%} of the data sheet",
        "A healthy card reaches 60% or more. Look for others who use it, a lowered power cap, heat, or a card that "
        "sits in a slow slot; `nvidia-smi -q -d PERFORMANCE` says what holds its clock down.",
    )


def _threads(machine: Machine, trials: DeviceTrials, asked: int | str) -> Finding | None:
    """How many threads a run takes on this CPU, and whether another number would be faster."""
    trial = trials.threads
    if trial is None:
        return None
    set_by = [f"{name}={machine.environment[name]}" for name in THREAD_VARIABLES if machine.environment.get(name)]
    if isinstance(asked, int):
        used, words = asked, f"speed.threads={asked}"
    elif set_by:
        used, words = machine.torch.threads or 1, set_by[0]
    else:
        used, words = trial.chosen, "speed.threads=auto"
    best, found = trial.chosen, f"{words} gives {many(used, 'thread')}"
    slower = trial.seconds.get(used, 0.0) / trial.seconds[best]
    if used > trial.most or slower > _SLOWER:
        measured = f", {slower:.1f} times slower than {best}" if slower > _SLOWER else ""
        return _check("threads").warn(
            f"{found}{measured}; others use {trial.others or 0.0:.1f} of {trial.cores} cores",
            f"Threads that share a product wait for the last of them, which waits for a core. "
            f"Set speed.threads={best}.",
        )
    if trial.busy:
        return _check("threads").warn(
            f"others use {trial.others or 0.0:.1f} of {trial.cores} cores; {found}",
            "Training and every figure measured now are slower than this machine can be. Stop the other programs, or "
            "train when they are done.",
        )
    return _check("threads").ok(found)


def _attention(trials: DeviceTrials, kind: str) -> Finding | None:
    tried = {one.name.removeprefix("attention "): one for one in trials.trials if one.name.startswith("attention ")}
    if not tried:
        return None
    works = [name for name, one in tried.items() if one.outcome == "works"]
    fails = [f"{name} ({one.detail})" for name, one in tried.items() if one.outcome == "fails"]
    picks = f"; torch itself picks {trials.picked}" if trials.picked else ""
    found = f"run and right: {', '.join(works) or 'none'}{picks}"
    if kind == "cuda" and not works:
        return _check("attention").warn(
            f"no fast kernel runs here: {'; '.join(fails)}",
            "Attention is then written out, which is slow and needs much memory. A head size (model.head_size, or "
            "model.width over model.heads) of 64 or 128 in half precision suits every kernel; older cards have fewer.",
        )
    if (reason := trials.failure("attention sdpa")) is not None:
        return _check("attention").bad(f"torch's attention fails here: {reason}", "Install torch again.")
    if fails:
        return _check("attention").note(found, f"Not usable with these shapes: {'; '.join(fails)}.")
    return _check("attention").ok(found)


_MEANS: dict[str, tuple[Status, str]] = {
    "triton kernels": (
        "warn",
        "Our fused kernels cannot run here, and training falls back to torch's operations, which is slower. A C "
        "compiler must be installed (`apt install gcc`), and triton must be the version that torch wants; "
        "speed.kernels=torch silences this.",
    ),
    "cuBLASLt": (
        "note",
        "Matrix products then take torch's own choice of kernel, which costs some percent of speed. It comes with a "
        "CUDA build of torch; nothing has to be done.",
    ),
    "fp8 products": ("note", "Leave speed.fp8 empty, as it is by default."),
    "torch.compile": (
        "warn",
        "Runs with speed.compile=auto go without it. It needs a C++ compiler (`apt install g++`), the headers of this "
        "Python (`apt install python3-dev`) and a folder for temporary files; speed.compile=off silences this.",
    ),
}


def _other(trial: DeviceTrial, speed: SpeedConfig | None) -> Finding:
    status, advice = _MEANS[trial.name]
    if trial.outcome == "works":
        return _check(trial.name).ok(f"works ({trial.detail})")
    if trial.outcome == "skipped":
        return _check(trial.name).ok(f"not tried: {trial.detail}")
    asked_off = speed is not None and (
        (trial.name == "torch.compile" and speed.compile == "off")
        or (trial.name == "triton kernels" and speed.kernels == "torch")
    )
    return _check(trial.name).finding("note" if asked_off else status, f"does not work: {trial.detail}", advice)
