"""Everything there is to know of this machine, gathered once, into a `Machine`.

The contract: `gather_machine` never raises. torch and triton are imported here, inside of a guard, and nowhere else
before: whoever needs them afterwards looks at `Machine.torch.status` first. A torch whose import failed must not be
imported again, since its half-loaded remains answer the second time with an error that says nothing.
The order matters: the driver is asked before torch is imported, so that the memory in use is that of others. Asking
makes no context on a card.
The trap: inside a container other processes are often not visible, though their memory is.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.diagnose.doctor import Card, Library, Machine, Torch, first_line
from flatout.host import host_memory, load_average, usable_cores

_SECONDS = 10
# Bits of the driver's "why is the clock held down"; idle and the user's own clocks are no trouble.
_HELD_BY = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}
# Packages by the names that are imported; flash_attn.cute is FlashAttention-4, flash_attn_interface FlashAttention-3.
_SAME_NAME = ("pyarrow", "zstandard", "datasets", "fastwarc", "resiliparse", "rensa")
_SAME_NAME += ("tensorboard", "trackio", "wandb", "optuna")
OPTIONAL = {name: name for name in _SAME_NAME} | {
    "flash_attn.cute": "flash-attn-4",
    "flash_attn_interface": "flash_attn_3",
    "pynvml": "nvidia-ml-py",
}
# Variables that change what torch, CUDA or a math library do. The rest may hold secrets and is nobody's business.
_TELLING = re.compile(
    r"^(PYTORCH_|TORCH|CUDA_|CUBLAS_|CUDNN_|NVIDIA_TF32|TRITON_|OMP_|MKL_|OPENBLAS_|GOMP_|KMP_|NCCL_|GLOO_|TF32_"
    r"|HF_(HUB|DATASETS)_OFFLINE$|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHON(OPTIMIZE|MALLOC|FAULTHANDLER|DEVMODE)$|TMPDIR$)"
)


def gather_machine() -> Machine:
    """Looks at this machine. Takes as long as importing torch, plus some tenths of a second."""
    report = read_cards()
    torch = look_at_torch()
    cards, hidden, told_by = _cards(report, torch)
    available, total = host_memory()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        python=(sys.version_info[0], sys.version_info[1], sys.version_info[2]),
        torch=torch,
        triton=look_at_triton(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        load=load_average(),
        memory_bytes=total,
        available_bytes=available,
        environment={name: value for name, value in os.environ.items() if _TELLING.match(name)},
        packages={module: _version(module, package) for module, package in OPTIONAL.items()},
        now=time.time(),
        cards=cards,
        hidden_cards=hidden,
        told_by=told_by,
        driver=report.driver,
        driver_cuda=report.cuda,
        xids=read_xids() if cards else (),
    )


# --- torch and triton -------------------------------------------------------------------------------------------------


def look_at_torch() -> Torch:
    """Imports torch and asks what it sees; a torch that cannot be imported is an answer, too."""
    version = _distribution_version("torch")
    try:
        missing = "torch" not in sys.modules and importlib.util.find_spec("torch") is None
    except (ImportError, ValueError, AttributeError):
        missing = True
    if missing:
        return Torch(status="missing", version=version, reason="there is no package torch for this Python")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
        version = str(torch.__version__)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken build raises whatever it likes
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return Torch(status="missing", version=version, reason=first_line(error))
        return Torch(status="broken", version=version, reason=f"{type(error).__name__}: {first_line(error)}")
    try:
        sees, why = _sees_cuda(torch)
        return Torch(
            status="ok",
            version=version,
            cuda=torch.version.cuda,
            sees_cuda=sees,
            why_not=why,
            mps=bool(torch.backends.mps.is_available()),
            architectures=tuple(torch.cuda.get_arch_list()) if sees else (),
            threads=torch.get_num_threads(),
            wants_triton=_wanted_triton(),
        )
    except Exception as error:  # noqa: BLE001 - such as a folder named torch that is no torch
        reason = f"it is imported, but does not answer: {type(error).__name__}: {first_line(error)}"
        return Torch(status="broken", version=version, reason=reason)


def _sees_cuda(torch: Any) -> tuple[bool, str]:
    """Whether there is a CUDA device, and what torch says if not: it says so in a warning only."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sees = bool(torch.cuda.is_available())
    return sees, "" if sees or not told else first_line(told[-1].message)


def _wanted_triton() -> str | None:
    with contextlib.suppress(Exception):
        for line in importlib.metadata.requires("torch") or ():
            found = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\w.+]+)", line)
            if found:
                return found[1]
    return None


def look_at_triton() -> Library:
    """Imports Triton, which torch's compiler and our kernels need on a GPU."""
    version = _distribution_version("triton")
    try:
        if importlib.util.find_spec("triton") is None:
            return Library(status="missing", version=version)
        import triton

        return Library(status="ok", version=str(triton.__version__))
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Library(status="broken", version=version, reason=f"{type(error).__name__}: {first_line(error)}")


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _version(module: str, package: str) -> str | None:
    """The version of an installed package, which is not imported for that; None where it is missing."""
    try:
        top, _, inner = module.partition(".")
        found = importlib.util.find_spec(top)
        if found is None:
            return None
        if inner and not any((Path(folder) / inner).is_dir() for folder in found.submodule_search_locations or ()):
            return None
    except (ImportError, ValueError, AttributeError):
        return None
    return _distribution_version(package) or "unknown"


# --- cards ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverReport:
    """What the driver says: its version, the newest CUDA it knows, and every card, hidden ones too."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()


def read_cards() -> DriverReport:
    """Every card of this machine, by its driver; nothing where there is none, or one of another version."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001
        return DriverReport()
    try:
        return report_of_nvml(pynvml)
    except Exception:  # noqa: BLE001
        return DriverReport()
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def report_of_nvml(nvml: Any) -> DriverReport:
    """The report of an initialised NVML."""
    cuda = _asked(nvml.nvmlSystemGetCudaDriverVersion)
    return DriverReport(
        driver=_text(_asked(nvml.nvmlSystemGetDriverVersion)),
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        cards=tuple(_nvml_card(nvml, number) for number in range(nvml.nvmlDeviceGetCount())),
    )


def _nvml_card(nvml: Any, number: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(name: str, *arguments: Any) -> Any:
        function = getattr(nvml, name, None)
        return None if function is None else _asked(function, handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", 2)) or ask("nvmlDeviceGetMemoryInfo")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits
    watts = [
        ask(f"nvmlDeviceGet{name}") for name in ("PowerUsage", "EnforcedPowerLimit", "PowerManagementDefaultLimit")
    ]
    power, limit, default = (None if value is None else value / 1000 for value in watts)
    rates = ask("nvmlDeviceGetUtilizationRates")
    rows = ask("nvmlDeviceGetRemappedRows")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
    return Card(
        name=_text(ask("nvmlDeviceGetName")) or "NVIDIA GPU",
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        processes=tuple(sorted({int(process.pid) for process in processes} - {os.getpid()})),
        utilisation=None if rates is None else rates.gpu / 100,
        temperature=ask("nvmlDeviceGetTemperature", 0),
        power_watts=power,
        power_limit_watts=limit,
        power_default_watts=default,
        clock_mhz=ask("nvmlDeviceGetClockInfo", 1),
        clock_most_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
        throttled=held_by(int(bits or 0)),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        remapping=_remapping(rows),
        identity=_text(ask("nvmlDeviceGetUUID")) or "",
    )


def _asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None: which questions a card answers differs from card to card."""
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001
        return None


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _remapping(rows: Any) -> str:
    if rows is None or len(rows) < 4:
        return ""
    _, _, waiting, failed = rows[:4]
    return "a row could not be replaced" if failed else "a row waits to be replaced" if waiting else ""


def held_by(bits: int) -> tuple[str, ...]:
    """Why the driver holds the clock down, in words."""
    return tuple(word for word, mask in _HELD_BY.items() if bits & mask)


def _cards(report: DriverReport, torch: Torch) -> tuple[tuple[Card, ...], int, str]:
    """The cards in torch's order with the driver's news of them, how many torch does not see, and who told."""
    if not torch.sees_cuda:
        return report.cards, 0, "NVML" if report.cards else ""
    seen = _torch_cards()
    if not report.cards:
        return tuple(card for card, _ in seen), 0, "torch"
    return merged(report.cards, seen), max(0, len(report.cards) - len(seen)), "NVML"


def merged(told: Sequence[Card], seen: Sequence[tuple[Card, int]]) -> tuple[Card, ...]:
    """Torch's cards, each with the state of the driver's card of the same UUID, or else of the same number."""
    by_identity = {card.identity: card for card in told if card.identity}
    cards: list[Card] = []
    for card, number in seen:
        state = by_identity.get(card.identity) or (told[number] if number < len(told) else card)
        own = {"name": card.name, "capability": card.capability, "memory_bytes": card.memory_bytes}
        cards.append(dataclasses.replace(state, **{name: value for name, value in own.items() if value is not None}))
    return tuple(cards)


def _torch_cards() -> list[tuple[Card, int]]:
    import torch

    cards: list[tuple[Card, int]] = []
    for number in range(torch.cuda.device_count()):
        with contextlib.suppress(Exception):
            properties = torch.cuda.get_device_properties(number)
            identity = str(getattr(properties, "uuid", ""))
            card = Card(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                identity=f"GPU-{identity}" if identity and not identity.startswith("GPU-") else identity,
            )
            cards.append((card, number))
    return cards


def read_xids() -> tuple[str, ...]:
    """Errors of the cards in the kernel's log, the newest last; nothing where we may not read it."""
    if shutil.which("dmesg") is None:
        return ()
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return xids_in(done.stdout)


def xids_in(log: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"Xid \([^)]*\): (\d+)", log)))[-5:]
