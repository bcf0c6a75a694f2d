"""What this machine can do, and why not.

Peak rates are the vendors' dense bf16/fp16 tensor figures, without sparsity; utilisation is only shown where the card
is in the table, because a wrong constant is worse than none.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator

import torch

from flatout.errors import HardwareError

# (pattern in the device's name, dense bf16 or fp16 TFLOP/s). First match wins, so longer names stand first.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"B300", 2250.0),
    (r"B200|GB200", 2250.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"H100|H200|H800|GH200", 989.4),
    (r"A100|A800", 312.0),
    (r"L40S", 362.0),
    (r"\bL4\b", 121.0),
    (r"A40\b|RTX A6000", 149.7),
    (r"A10\b", 125.0),
    (r"V100", 125.0),
    (r"\bT4\b", 65.0),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 4080", 97.5),
    (r"RTX 3090", 71.0),
    (r"RTX 3080", 59.5),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    torch_device: torch.device
    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def peak_flops(self) -> float | None:
        """Dense half-precision FLOP/s by the data sheet, or None where the card is not known."""
        if self.kind != "cuda":
            return None
        for pattern, teraflops in _PEAK_TFLOPS:
            if re.search(pattern, self.name):
                return teraflops * 1e12
        return None

    @property
    def bf16(self) -> bool:
        """Whether bf16 products run on matrix units (Ampere and newer)."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= (8, 0)

    @property
    def fused_optimizer(self) -> bool:
        return self.kind in ("cuda", "cpu", "mps")


def detect_device(asked: str = "auto") -> Device:
    """The device asked for, or the fastest there is; an absent one is an error that names what exists."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if asked.startswith("cuda"):
        if not torch.cuda.is_available():
            raise HardwareError(
                f"speed.device is {asked}, but torch {torch.__version__} sees no CUDA device",
                "use speed.device=cpu, or install a CUDA build of torch and a driver that fits it",
            )
        index = int(asked.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise HardwareError(
                f"speed.device is {asked}, but there are only {torch.cuda.device_count()} CUDA devices",
                f"use cuda:0 to cuda:{torch.cuda.device_count() - 1}",
            )
        properties = torch.cuda.get_device_properties(index)
        return Device(
            torch_device=torch.device("cuda", index),
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=(properties.major, properties.minor),
        )
    if asked == "mps" and not torch.backends.mps.is_available():
        raise HardwareError("speed.device is mps, but this torch has no MPS device", "use speed.device=cpu")
    memory = _host_memory_bytes() if asked == "cpu" else None
    return Device(torch_device=torch.device(asked), name=asked, memory_bytes=memory, capability=None)


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once so far: on CUDA by tensors, elsewhere by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource  # absent on Windows, where nothing else here is tested either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """Sets torch's process-wide arithmetic switches for one piece of work and puts them back.

    They are global in torch; a run in a notebook must not leave its TF32 or determinism behind.
    """
    matmul = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        with autocast(precision, device):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Half-precision matrix products over fp32 weights, or nothing."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)  # pyright: ignore[reportReturnType]
