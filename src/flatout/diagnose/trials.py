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
import io
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.config.schema import ModelConfig, SpeedConfig
from flatout.diagnose.doctor import Machine, Trial, Trials, first_line
from flatout.host import ThreadTrial
from flatout.model.compiling import compile_failure
from flatout.ops.attention import attention_failure, causal_attention, install_flash, picked_kernel
from flatout.ops.kernels import cublaslt
from flatout.ops.scan import CHUNK, scan
from flatout.resolve.case import shape_of, try_threads

_STICKY = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address")
_MOST_CONTEXT = 2048  # a trial shows whether a kernel takes the shapes, not how long it takes for all of them
_BURST_SECONDS = 0.15
_ROUND = 16  # products that are launched without waiting: the device never waits for the host between them


def run_trials(
    machine: Machine,
    kind: str,
    speed: SpeedConfig | None = None,
    model: ModelConfig | None = None,
    *,
    apart: bool = False,
    quick: bool = False,
    index: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Trials:
    """Runs what a model needs, or an ordinary one where none is known, on the device of that kind. `apart`: documents
    do not see each other."""
    device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    capability = machine.cards[index].capability if kind == "cuda" and index < len(machine.cards) else None
    precision = product_precision(speed, capability) if kind == "cuda" else "fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    runner = _Runner(machine, device, capability, speed, dtype, quick, progress)
    rates: list[float] = []
    runner.add("matrix product", lambda: rates.append(_product_rate(device, dtype)))
    threads: list[ThreadTrial] = []
    if kind == "cpu":
        runner.add("threads", lambda: threads.append(try_threads(*shape_of(model))))
    picked = _attention(runner, model or ModelConfig(heads=12, width=768, context=1024))
    if model is not None and "E" in model.kinds:
        _scan(runner, model, apart=apart)
    if kind == "cuda":
        _on_cuda(runner)
    _compile(runner)
    if kind == "cuda":
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    rate = rates[0] if rates else None
    return Trials(
        trials=tuple(runner.trials),
        picked=picked,
        product_flops=rate,
        product_type=precision,
        threads=threads[0] if threads else None,
    )


def product_precision(speed: SpeedConfig | None, capability: tuple[int, int] | None) -> str:
    """The type of a run's products on a CUDA card of that capability: bf16, fp16 or fp32."""
    asked = "auto" if speed is None else speed.precision
    if asked in ("auto", "bf16"):
        return "bf16" if capability is not None and capability >= (8, 0) else "fp16"
    return "fp32" if asked == "tf32" else asked


@dataclasses.dataclass
class _Runner:
    """Runs one trial after the other and keeps what came of them. `dtype` is that of the run's products."""

    machine: Machine
    device: Any
    capability: tuple[int, int] | None
    speed: SpeedConfig | None
    dtype: Any
    quick: bool
    progress: Callable[[str], None]
    trials: list[Trial] = dataclasses.field(default_factory=list)
    dead: str = ""

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
        outcome, told = ("works", took) if reason is None else ("fails", reason)
        self.trials.append(Trial(name=name, outcome=outcome, detail=told))

    def skip(self, name: str, why: str) -> None:
        self.trials.append(Trial(name=name, outcome="skipped", detail=why))


def _product_rate(device: Any, dtype: Any) -> float:
    """FLOP/s of one large matrix product: what the chip really gives, by which everything else can be judged."""
    size = 4096 if device.type == "cuda" else 512
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    return 2.0 * size**3 / statistics.median(product_seconds(lambda: torch.mm(a, b), device))


def product_seconds(multiply: Callable[[], object], device: Any) -> list[float]:
    """How long each of many calls took, on the device's own clock where it has one.

    Others on the same card get their turns between our kernels. On the host's clock every wait for a turn counts as if
    the product were slow; on the device's, only the few products that a turn interrupts are, and the median is not.
    That others are there is told by the check "in use".
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


def attention_shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "heads": model.heads,
        "groups": model.kv_heads or model.heads,
        "size": model.size,
        "context": min(model.context, _MOST_CONTEXT),
        "dropout": model.dropout,
    }


def _attention(runner: _Runner, model: ModelConfig) -> str | None:
    """Tries every kernel that is at hand; returns the one that torch itself would take."""
    device, dtype, packages = runner.device, runner.dtype, runner.machine.packages
    shape = attention_shape(model)
    asked = "auto" if runner.speed is None else runner.speed.attention

    if device.type != "cuda":
        runner.add("attention sdpa", lambda: _plain_attention(device, dtype, shape))
        return picked_kernel(device, dtype, **shape)
    backends = ["flash", "cudnn"] if runner.quick else ["flash", "cudnn", "efficient"]
    if packages.get("flash_attn.cute") is not None and not runner.quick:
        backends += ["fa4", "cudnn+fa4"]
    if packages.get("flash_attn_interface") is not None and not runner.quick:
        backends.append("fa3")
    if asked not in ("auto", "sdpa", "reference", *backends):
        backends.append(asked)
    for backend in backends:
        runner.add(f"attention {backend}", functools.partial(attention_failure, backend, device, dtype, **shape))
    with contextlib.suppress(Exception):
        install_flash("sdpa")  # a trial of fa3 leaves it behind torch's flash entry
    return picked_kernel(device, dtype, **shape)


def _plain_attention(device: Any, dtype: Any, shape: Mapping[str, Any]) -> str | None:
    """torch's own choice against attention written out, on a few positions."""
    size = (1, shape["heads"], min(64, shape["context"]), shape["size"])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(3))
    fast, plain = (causal_attention(q, k, v, backend=name) for name in ("sdpa", "reference"))
    difference = float((fast.float() - plain.float()).abs().max())
    return None if difference < 0.02 else f"it is {difference:.2g} away from the reference"


# --- eigenstates ------------------------------------------------------------------------------------------------------


def _scan(runner: _Runner, model: ModelConfig, *, apart: bool) -> None:
    """Tries the ways to compute states that a run could take here: our kernels only where `auto` would."""
    device, capability = runner.device, runner.capability
    paths = ["chunked"]
    if device.type == "cuda" and runner.machine.triton.status == "ok" and (capability or (8, 0)) >= (8, 0):
        paths.insert(0, "triton")
    shape = {"states": min(model.states, 16), "apart": apart}
    for path in paths:
        runner.add(f"scan {path}", functools.partial(scan_failure, path, device, runner.dtype, **shape))


def scan_failure(path: str, device: Any, dtype: Any, *, states: int, apart: bool) -> str | None:
    """How far states and gradients of a path are from those that are made token by token, if that is too far.

    `apart` means that a second document begins inside of the rows.
    """
    rows, positions = 2, 2 * CHUNK + 3  # a state goes through several chunks, and the last one is not full
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Any:
        return torch.rand(*size, generator=generator)

    given = [random(rows, positions, 2 * states).to(dtype), -0.3 * random(states), 3.0 * random(states)]
    begins = None
    if apart:
        begins = torch.zeros(rows, positions, dtype=torch.bool, device=device)
        begins[:, CHUNK + 5] = True

    def run(path: str) -> list[tuple[str, Any]]:
        values = [value.to(device).requires_grad_() for value in given]
        states_BTC, _ = scan(*values, begins_BT=begins, path=path)
        gradients = torch.autograd.grad(states_BTC.float().square().mean(), values)
        return [("result", states_BTC.detach()), *(("gradient", gradient) for gradient in gradients)]

    for (what, mine), (_, theirs) in zip(run(path), run("reference"), strict=True):
        difference, size = float((mine.float() - theirs.float()).abs().max()), float(theirs.float().abs().max())
        if not difference <= 0.02 * size:  # also where it is no number
            return f"{path} is {difference:.2g} away from the reference in its {what}, whose values reach {size:.2g}"
    return None


# --- our kernels, 8-bit products, cuBLASLt ----------------------------------------------------------------------------


def _on_cuda(runner: _Runner) -> None:
    device, capability, triton = runner.device, runner.capability, runner.machine.triton.status
    if triton != "ok":
        runner.skip("triton kernels", f"triton is {triton}")
    elif capability is not None and capability < (8, 0):
        runner.skip("triton kernels", "they are for Ampere and newer")
    else:
        runner.add("triton kernels", lambda: _our_kernel(device))
    runner.add("cuBLASLt", lambda: _own_products(device, capability))
    if capability is not None and capability >= (8, 9):
        runner.add("fp8 products", lambda: _fp8_product(device))


def _our_kernel(device: Any) -> str | None:
    """Our norm with its residual addition, forward and backward, against torch's."""
    # By name: a machine without Triton cannot import it, and nobody should for reading this module.
    add_norm = importlib.import_module("flatout.ops.kernels.norm").add_norm
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(64, 256, generator=generator).to(device).requires_grad_() for _ in range(2))
    weight = torch.ones(256, device=device, requires_grad=True)
    total, h = add_norm(x, branch, None, weight, None, centred=True, eps=1e-5, dtype=torch.float32)
    expected = torch.nn.functional.layer_norm(x + branch, (256,), weight, None, 1e-5)
    mine, theirs = (torch.autograd.grad((y * y).sum(), weight, retain_graph=True)[0] for y in (h, expected))
    apart = max(
        float((h - expected).detach().abs().max()),
        float((total - x - branch).detach().abs().max()),
        float((mine - theirs).abs().max()) / 100,
    )
    return None if apart < 1e-3 else f"the result is {apart:.2g} away from torch's"


def _own_products(device: Any, capability: tuple[int, int] | None) -> str | None:
    reason = cublaslt.missing()
    if reason is not None:
        return reason
    dtype = torch.bfloat16 if product_precision(None, capability) == "bf16" else torch.float16
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2048, 1024, generator=generator).to(device, dtype) for _ in range(2))
    mine, theirs = cublaslt.multiply(a, b.t()), a @ b.t()
    apart = float((mine.float() - theirs.float()).abs().max())
    return None if apart <= 0.02 * (1 + float(theirs.float().abs().max())) else f"it is {apart:.2g} away from torch's"


def _fp8_product(device: Any) -> str | None:
    a = torch.ones(64, 64, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    product = scaled(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return None if float(product.float().mean()) == 64.0 else "a product of ones came out wrong"


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _compile(runner: _Runner) -> None:
    name, device, triton = "torch.compile", runner.device, runner.machine.triton.status
    asked = "auto" if runner.speed is None else runner.speed.compile
    if runner.quick:
        runner.skip(name, "left out by --quick")
    elif device.type != "cuda" and asked in ("auto", "off"):
        runner.skip(name, f"not used on {device.type} unless asked for")
    elif device.type == "cuda" and triton != "ok":
        runner.skip(name, f"triton is {triton}")
    else:
        runner.add(name, lambda: compile_failure(device))
