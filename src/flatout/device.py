"""What this machine can do, and why not; torch's process-wide switches, borrowed.

Peak rates are the vendors' dense bf16/fp16 tensor figures, without sparsity; utilisation is only shown where the card
is in the table, because a wrong constant is worse than none.
"""

import contextlib
import dataclasses
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator

import torch

from flatout.errors import DeviceMemoryError, HardwareError
from flatout.host import host_memory

# torch's generators and switches are those of the process: runs in several threads take turns, step by step.
ONE_AT_A_TIME = threading.RLock()

# (pattern in the device's name, dense bf16 or fp16 TFLOP/s with sums in fp32; None where a name stands for several).
# First match wins, so longer names stand first. Sources: NVIDIA's data sheets of each card for data centres and
# workstations; for GeForce the appendices of its architecture whitepapers (Turing, GA102, Ada, RTX Blackwell), and for
# models that came later the rate of the same tensor cores, 512 FLOP per SM and clock (half of what they reach with sums
# in fp16), times SMs and boost clock on NVIDIA's page of the card.
_PEAK_TFLOPS: tuple[tuple[str, float | None], ...] = (
    (r"Laptop|Max-Q|Mobile", None),  # the clock depends on how much power the laptop gives
    (r"GB200|GB300", 2500.0),
    (r"B200|B300", 2250.0),
    (r"H[12]00 NVL", 835.0),
    (r"H[18]00 PCIe", 756.0),
    (r"H100|H200|H800|GH200", 989.4),
    (r"\bH20\b", 148.0),
    (r"A100|A800", 312.0),
    (r"\bA30\b", 165.0),
    (r"L40S", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
    (r"V100S", 130.0),
    (r"V100-PCIE", 112.0),
    (r"V100", 125.0),
    (r"\bT4G?\b", 65.0),
    (r"RTX 6000 Ada", 364.2),
    (r"RTX 5000 Ada", 261.1),
    (r"RTX 4500 Ada", 158.5),
    (r"RTX 4000 Ada", 106.9),
    (r"RTX 2000 Ada", 48.0),
    (r"RTX A6000", 154.8),
    (r"RTX A5000", 111.1),
    (r"RTX A4500", 94.6),
    (r"RTX A4000", 76.7),
    (r"RTX A2000", 31.9),
    (r"TITAN RTX|Quadro RTX (6|8)000", 130.5),
    (r"Quadro RTX 5000", 89.2),
    (r"Quadro RTX 4000", 57.0),
    (r"TITAN V\b", 110.0),
    (r"RTX 5090 D", None),  # the same chip with a limit on tensor cores that no data sheet gives for fp16
    (r"RTX 5090", 209.5),
    (r"RTX 5080", 112.6),
    (r"RTX 5070 Ti", 87.9),
    (r"RTX 5070", 61.7),
    (r"RTX 5060 Ti", 47.4),
    (r"RTX 5060", 38.4),
    (r"RTX 4090 D", 147.1),
    (r"RTX 4090", 165.2),
    (r"RTX 4080 SUPER", 104.4),
    (r"RTX 4080", 97.5),
    (r"RTX 4070 Ti SUPER", 88.2),
    (r"RTX 4070 Ti", 80.2),
    (r"RTX 4070 SUPER", 71.0),
    (r"RTX 4070", 58.3),
    (r"RTX 4060 Ti", 44.1),
    (r"RTX 4060", 30.2),
    (r"RTX 3090 Ti", 80.0),
    (r"RTX 3090", 71.0),
    (r"RTX 3080 Ti", 68.2),
    (r"RTX 3080", 59.5),
    (r"RTX 3070 Ti", 43.5),
    (r"RTX 3070", 40.6),
    (r"RTX 3060 Ti", 32.4),
    (r"RTX 3060", 25.5),
    (r"RTX 3050", None),  # one name for chips of 2304 and of 2560 cores
    (r"RTX 2080 Ti", 53.8),
    (r"RTX 2080 SUPER", 44.6),
    (r"RTX 2080", 40.3),
    (r"RTX 2070 SUPER", 36.2),
    (r"RTX 2070", 29.9),
    (r"RTX 2060 SUPER", 28.7),
    (r"RTX 2060", 25.8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    torch_device: torch.device
    name: str
    memory_bytes: int | None  # what a run may use: `limit_bytes` where there is a limit
    capability: tuple[int, int] | None
    limit_bytes: int | None = None  # the memory limit of this run, to emulate a smaller card

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def peak_flops(self) -> float | None:
        """Dense half-precision FLOP/s by the data sheet, or None where the card is not known."""
        known = (teraflops for pattern, teraflops in _PEAK_TFLOPS if re.search(pattern, self.name))
        teraflops = next(known, None) if self.kind == "cuda" else None
        return None if teraflops is None else teraflops * 1e12

    @property
    def bf16(self) -> bool:
        """Whether bf16 products run on matrix units (Ampere and newer)."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= (8, 0)


def choose_device(asked: str, cards: int, *, mps: bool, local: int = 0) -> tuple[str, int]:
    """Kind and number of the device asked for, or the fastest, of a machine with this number of CUDA devices.

    `local` is the number of this process on its host: without a number in what was asked, each has a GPU of its own.
    """
    kind, _, number = asked.partition(":")
    if kind == "auto":
        kind = "cuda" if cards else "mps" if mps else "cpu"
    index, wrong = int(number or local), ("", "")
    if kind == "cuda" and not cards:
        hint = "use speed.device=cpu, or install a CUDA build of torch and a driver that fits it"
        wrong = f"torch {torch.__version__} sees no CUDA device", hint
    elif kind == "cuda" and index >= cards and not number:
        raise HardwareError(
            f"process {local + 1} of this host has no GPU: there are {cards}", f"start at most {cards} on this host"
        )
    elif kind == "cuda" and index >= cards:
        there, less = (f"are only {cards} CUDA devices", " or less") if cards > 1 else ("is only one CUDA device", "")
        wrong = f"there {there}", f"use speed.device=cuda:{cards - 1}{less}, or auto"
    elif kind == "mps" and not mps:
        wrong = "this torch has no MPS device", "use speed.device=cpu"
    if wrong[0]:
        raise HardwareError(f"speed.device is {asked}, but {wrong[0]}", wrong[1], setting="speed.device")
    return kind, index if kind == "cuda" else 0


def detect_device(asked: str = "auto", local: int = 0) -> Device:
    """The device asked for, or the fastest there is; an absent one is an error that names what exists."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, index = choose_device(asked, cards, mps=torch.backends.mps.is_available(), local=local)
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(index)
        return Device(
            torch_device=torch.device("cuda", index),
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=(properties.major, properties.minor),
        )
    memory = host_memory()[1] if kind == "cpu" else None
    return Device(torch_device=torch.device(kind), name=kind, memory_bytes=memory, capability=None)


def use_device(device: torch.device) -> None:
    """Makes this the calling thread's current device, by which kernels, events, streams and pinned memory go.

    It is the first GPU in every thread until then, also in a process whose tensors are on another.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def limit_memory(device: Device, gibibytes: float | None) -> Device:
    """The device as a run with a memory limit sees it: with that much memory. Only CUDA's allocator has limits."""
    if gibibytes is None or device.kind != "cuda" or device.memory_bytes is None:
        return device
    limit = min(int(gibibytes * 2**30), device.memory_bytes)
    return dataclasses.replace(device, memory_bytes=limit, limit_bytes=limit)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory held at once so far: on CUDA by tensors, elsewhere by the whole process; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reserved_memory_bytes(device: torch.device) -> int | None:
    """What torch's allocator holds on the device, its cache included; None where it does not say."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device's memory is full.

    Only torch's own allocator has an error class for it. A CPU, a driver called by a kernel's launcher and the matrix
    libraries say it in words.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Turns the device running out of memory into an error with a way out."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise memory_error(error) from error


def memory_error(error: RuntimeError) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"out of device memory: {first_sentence(error)}",
        "lower speed.micro_batch (the global batch stays), set speed.checkpointing=full, or let `flatout tune` find "
        "what fits",
    )


def first_sentence(error: RuntimeError) -> str:
    """What torch says of the failed allocation, without the advice that follows it."""
    text = re.sub(r"^\[enforce fail [^]]*\][ .]*", "", " ".join(str(error).split()))  # how the CPU's allocator begins
    tried = re.search(r"[Tt]ried to allocate [\d.]+ \w+", text)
    return text.partition(". ")[0].removesuffix(".") + (f", {tried.group().lower()}" if tried else "")


def free_memory(device: torch.device) -> None:
    """Frees memory without references: first Python's cycles, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        # The allocator itself waits for one stream only, the one that asked for the memory; others may be using it.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


# The user's own words to torch's allocator; the second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_words() -> str | None:
    """The variable in which the user has spoken to torch's allocator, as NAME=VALUE; what it says goes, not we."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if os.environ.get(name)), None)


def use_expandable_segments(device: torch.device, on: bool) -> bool:
    """Lets CUDA's allocator grow its blocks, from the next block on; returns whether it was set.

    It is a policy of the process and stays: no number depends on it, and the next run says what it wants itself.
    Setting one policy puts the others back to torch's defaults, so nothing is touched where the user has set any.
    """
    if device.type != "cuda" or allocator_words() is not None:
        return False
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
    return True


@contextlib.contextmanager
def memory_limit(device: Device) -> Iterator[None]:
    """Holds torch's allocator to the device's limit for one piece of work and puts the old limit back.

    It counts what torch allocates. The CUDA context, some hundreds of megabytes that a real card of that size would
    have to hold as well, is not among it.
    """
    if device.limit_bytes is None:
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device.torch_device)
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(before, device.limit_bytes / total), device.torch_device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.torch_device)


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """So many threads of torch on the CPU for one piece of work; the number is one for the whole process."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool, device: torch.device, *, keep_casts: bool = True) -> Iterator[None]:
    """Sets torch's process-wide arithmetic switches for one piece of work and puts them back.

    They are global in torch; a run in a notebook must not leave its TF32 or determinism behind. `keep_casts`: autocast
    keeps its copies of weights until the work is done.
    """
    matmul = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        with autocast(precision, device, keep_casts=keep_casts):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        if deterministic:  # not else: the call imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)


@dataclasses.dataclass(frozen=True)
class Scope:
    """torch's process-wide switches as a run wants them: arithmetic, memory, threads."""

    device: Device
    precision: str
    deterministic: bool
    threads: int
    keep_casts: bool = True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Sets them for one piece of work."""
        numbers = arithmetic(self.precision, self.deterministic, self.device.torch_device, keep_casts=self.keep_casts)
        with ONE_AT_A_TIME, memory_limit(self.device), cpu_threads(self.threads), numbers:
            yield


def autocast(
    precision: str, device: torch.device, *, keep_casts: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Half-precision matrix products over fp32 weights, or nothing."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=keep_casts)  # pyright: ignore[reportReturnType]
