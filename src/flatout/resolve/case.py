"""What a switch of `speed` is decided from: config, device, data, trials on the device, and the switches before it.

How many threads torch computes with on a CPU (`speed.threads`).

Threads that share a product wait for the last of them. Where others use the cores too, the last one waits for a core,
and two threads can be many times slower than one. So the number is tried, on products and attention of this model, and
the cores that others use meanwhile are left to them.
Trap: sums are split over threads, so another number of threads changes the last bits of a result.
"""

import dataclasses
import functools
import importlib.util
import statistics
import time
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional

from flatout.config.schema import ModelConfig, RunConfig, SpeedConfig, micro_batch_of
from flatout.config.sizes import GPT2_VOCAB
from flatout.data.batch import Delivery
from flatout.device import Device, arithmetic, cpu_threads
from flatout.host import ThreadTrial, candidates, core_clock, core_use, whole_cores
from flatout.model.compiling import compile_failure
from flatout.model.count import flops_per_token
from flatout.model.execution import Execution
from flatout.model.layers import mlp_width_of
from flatout.ops.attention import attention_failure, picked_kernel
from flatout.ops.documents import BY_BOUNDS, document_failure
from flatout.ops.kernels.cublaslt import missing as cublaslt_missing
from flatout.records import Feature
from flatout.world import World

_PIECE_FLOPS = 3e8  # some milliseconds of one core
_FEWEST, _MOST = 3, 9  # turns
_SECONDS, _TOO_LONG = 0.4, 1.5  # for all turns, and for as few as there may be
# Width, MLP, heads, their size, context: of a small model, where no model is given, and of the largest that is tried.
_SHAPE, _LARGEST = (128, 512, 4, 32, 128), (512, 2048, 8, 128, 1024)


@functools.cache  # rungs and trials of one process are to be compared: they all get the same number
def try_threads(width: int, mlp: int, heads: int, size: int, context: int) -> ThreadTrial:
    """Times a piece of training with 1, 2, 4 ... threads up to the cores there are, in turns."""
    cores, seconds = whole_cores(), dict[int, list[float]]()
    piece = _piece(width, mlp, heads, size, context)
    before, began = core_clock(), time.perf_counter()
    waiting = candidates(cores)
    for turn in range(_MOST):
        for count in waiting:
            with cpu_threads(count):
                piece()  # starts the threads
                started = time.perf_counter()
                piece()
                seconds.setdefault(count, []).append(time.perf_counter() - started)
        best = min(min(times) for times in seconds.values())
        # Those that are far behind twice only take time.
        waiting = [count for count in waiting if turn < 1 or min(seconds[count]) < 2 * best]
        if time.perf_counter() - began > (_SECONDS if turn + 1 >= _FEWEST else _TOO_LONG):
            break
    used = core_use(before, core_clock())
    medians = {count: statistics.median(times) for count, times in seconds.items()}
    return ThreadTrial(seconds=medians, cores=cores, others=None if used is None else used.others)


def shape_of(model: ModelConfig | None) -> tuple[int, ...]:
    """What `try_threads` is asked of a model, or of a small one; those that are larger behave like the largest."""
    if model is None:
        return _SHAPE
    shape = model.width, mlp_width_of(model), model.heads, model.size, model.context
    return tuple(min(own, most) for own, most in zip(shape, _LARGEST, strict=True))


def _piece(width: int, mlp: int, heads: int, size: int, context: int) -> Callable[[], None]:
    """An MLP and attention, forward and backward, of as many tokens as take some milliseconds."""
    tokens = int(_PIECE_FLOPS / (12 * width * mlp))
    tokens = max(64, min(tokens, 4096))
    rows, length = max(1, tokens // context), min(context, tokens)

    def filled(*shape: int) -> torch.Tensor:  # what is multiplied plays no part, and no random stream is touched
        return torch.full(shape, 0.01, requires_grad=True)

    x, up, down = filled(tokens, width), filled(width, mlp), filled(mlp, width)
    q_BHTD, k_BHTD, v_BHTD = (filled(rows, heads, length, size) for _ in range(3))

    def piece() -> None:
        out = functional.gelu(x @ up) @ down
        attended = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        (out.sum() + attended.sum()).backward()
        for tensor in (x, up, down, q_BHTD, k_BHTD, v_BHTD):
            tensor.grad = None

    return piece


NOT_CUDA = "only CUDA devices have it"
BUSY = 0.5  # of a device's peak rate is what a step makes of it
UNKNOWN_PEAK = 1e14


def try_attention(
    backend: str, device: torch.device, *, precision: str, deterministic: bool, **shape: Any
) -> str | None:
    """Why this attention kernel cannot train these shapes under these switches, or None."""
    with arithmetic(precision, deterministic, device):
        return attention_failure(backend, device, product_type(precision), **shape)


def try_documents(backend: str, device: torch.device, *, precision: str, **shape: Any) -> str | None:
    """Why this kernel cannot train packed documents, or None."""
    return document_failure(backend, device, product_type(precision), **shape)


def ask_sdpa(device: torch.device, *, precision: str, deterministic: bool, **shape: Any) -> str | None:
    """Which kernel torch takes for these shapes under these switches, or None where it does not report that."""
    with arithmetic(precision, deterministic, device):
        return picked_kernel(device, product_type(precision), **shape)


def product_type(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probes:
    """What is tried out on the device; tests without one put their own answers here."""

    attention: Callable[..., str | None] = try_attention
    picked: Callable[..., str | None] = ask_sdpa
    documents: Callable[..., str | None] = try_documents
    compiler: Callable[[torch.device], str | None] = compile_failure
    products: Callable[[], str | None] = cublaslt_missing
    threads: Callable[..., ThreadTrial] = try_threads
    triton: Callable[[], bool] = lambda: importlib.util.find_spec("triton") is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed(Execution):
    """What really runs: the value of each switch."""

    device: Device
    precision: str
    compile: str
    cuda_graphs: bool
    fused_optimizer: bool
    optimizer_state: str
    optimizer_offload: bool
    loader: str
    workers: int
    micro_batch: int
    accumulation: int
    threads: int
    expandable_segments: bool
    memory_limit: float | None
    features: tuple[Feature, ...]
    parallel: str = "none"  # or data, fsdp, hybrid
    shards: int = 1  # processes that share one copy of the model

    @functools.cached_property
    def execution(self) -> Execution:
        """The model's share of them."""
        return Execution(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Execution)})

    @property
    def product_type(self) -> torch.dtype:
        return product_type(self.precision)

    def delivery(self, micro_batch: int | None = None, world: World | None = None) -> Delivery:
        """How the loader hands batches to these switches, in one of the processes of `world`."""
        return Delivery(
            device=self.device.torch_device,
            workers=self.workers,
            resident=self.loader == "device",
            micro_batch=micro_batch or self.micro_batch,
            joined=self.document_attention in BY_BOUNDS or self.kernels == "triton",
            world=world or World(),
        )


@dataclasses.dataclass(frozen=True)
class ShardingChoice:
    """How several processes share the model, and why it is not the way that was asked for."""

    form: str = "none"  # of one process; or data, fsdp, hybrid
    shards: int = 1
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchContext:
    """One run on one device."""

    config: RunConfig
    device: Device
    corpus_bytes: int | None  # None where the tokens stay on the host
    vocab: int | None = None
    step_tokens: float | None = None  # of the samples of a step, on average
    probes: Probes = dataclasses.field(default_factory=Probes)
    ranks: int = 1  # that share a step
    ranks_here: int = 1  # those of this host
    threads_before: int | None = None  # of a run that is resumed
    own_model: bool = False  # from Python: nothing of ours knows it
    own_optimizer: bool = False
    sharding: ShardingChoice = dataclasses.field(default_factory=ShardingChoice)
    # What has been decided so far, as `Speed` will have it. Reading a switch too early is an AttributeError.
    used: Speed = dataclasses.field(default_factory=lambda: cast("Speed", types.SimpleNamespace()))

    @property
    def asked(self) -> SpeedConfig:
        return self.config.speed

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def cuda(self) -> bool:
        return self.device.kind == "cuda"

    @property
    def packed(self) -> bool:
        """Whether rows are packed from samples of a chat."""
        return self.config.fine_tunes

    @property
    def several_documents(self) -> bool:
        """Whether a row holds documents or samples that must not see each other."""
        return self.packed or self.config.documents_apart

    @property
    def attends_inside(self) -> bool:
        """Whether attention stays inside the documents or samples of a row."""
        return self.packed or (self.config.documents_apart and self.model.attends)

    @property
    def adapters(self) -> bool:
        return self.config.lora.rank > 0

    @property
    def sharded(self) -> bool:
        """Whether every process holds slices of the weights."""
        return self.sharding.form in ("fsdp", "hybrid")

    @property
    def quantized(self) -> bool:
        return self.config.lora.quantize != "none"

    @functools.cached_property
    def micro_batch_flops(self) -> float:
        size, _ = micro_batch_of(self.config, self.ranks)
        model, most = self.model, size * self.model.context
        tokens, length = most, None
        if self.step_tokens is not None:  # a token of packed rows attends inside its own sample
            tokens = min(self.step_tokens, most)
            length = min(model.context, self.step_tokens / self.config.chat.batch_samples)
        vocab = self.vocab or model.vocab or GPT2_VOCAB
        # Frozen weights get no gradients.
        return flops_per_token(model, vocab, length, adapters=0 if self.adapters else None) * tokens

    @property
    def running_seconds(self) -> float:
        """How long the device takes for a micro-batch, about, where nothing keeps it waiting."""
        return self.micro_batch_flops / (BUSY * (self.device.peak_flops or UNKNOWN_PEAK))

    @functools.cached_property
    def no_triton(self) -> str | None:
        return no_triton(self.device, self.probes)


def no_triton(device: Device, probes: Probes) -> str | None:
    """Why none of our Triton kernels can run here, or None."""
    if device.kind != "cuda":
        return "our kernels run on CUDA devices only"
    if not probes.triton():
        return "triton is not installed"
    if device.capability is not None and device.capability < (8, 0):
        return f"{device.name} is older than Ampere"
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The value a switch gets, and why it is not the one asked for.

    `shown` is how people see the value where that says more; an unlisted answer does not concern this run.
    """

    used: Any
    why: str = ""
    shown: str | None = None
    listed: bool = True
