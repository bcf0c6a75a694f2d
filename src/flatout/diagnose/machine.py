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
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flatout.errors import first_line
from flatout.host import host_memory, load_average, usable_cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A package that may be missing or broken; `reason` says how."""

    status: Literal["ok", "missing", "broken"] = "missing"
    version: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torch(Library):
    """torch, and what it sees. Of a torch that cannot be imported only the version is known, if that."""

    cuda: str | None = None  # the CUDA it was built for, such as 13.0
    sees_cuda: bool = False
    why_not: str = ""  # what torch says when it sees none
    mps: bool = False
    threads: int | None = None
    wants_triton: str | None = None  # the exact version its own metadata asks for

    @property
    def usable(self) -> bool:
        """Whether Flatout can run on it: there, whole, and not too old."""
        version = numbers(self.version)[:2]
        return self.status == "ok" and (not version or version >= OLDEST_TORCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardState:
    """A GPU and its state before we touched it; None for values that are not reported."""

    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None  # by others
    processes: tuple[int, ...] = ()  # of others, by process id
    utilisation: float | None = None  # 0 to 1
    temperature: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None
    clock_most_mhz: float | None = None
    throttled: tuple[str, ...] = ()  # power, heat, hardware
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    identity: str = ""  # UUID


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """All that is known of a machine. `cards` come in torch's order, or the driver's where torch sees none."""

    system: str
    python: tuple[int, int, int]
    torch: Torch
    triton: Library
    cores: int
    usable_cores: float  # as the scheduler and the container allow
    load: float | None = None  # processes that ran or waited, as a mean over the last minute
    memory_bytes: int | None
    available_bytes: int | None
    environment: Mapping[str, str]
    packages: Mapping[str, str | None]  # by the name that is imported; None where it is missing
    cards: tuple[CardState, ...] = ()
    hidden_cards: int = 0  # that the driver has and torch does not see
    cards_by: str = ""  # where the cards are from: NVML or torch
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver knows


OLDEST_TORCH = (2, 11)
# Bits of the driver's "why is the clock held down"; idle and the user's own clocks are no trouble.
_HELD_BY = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}
# Packages by the names that are imported; flash_attn.cute is FlashAttention-4, flash_attn_interface FlashAttention-3.
_SAME_NAME = ("pyarrow", "zstandard", "datasets", "fastwarc", "resiliparse", "rensa")
_SAME_NAME += ("tensorboard", "wandb", "optuna")
OPTIONAL = {name: name for name in _SAME_NAME} | {
    "flash_attn.cute": "flash-attn-4",
    "pynvml": "nvidia-ml-py",
}
# Variables that change what torch, CUDA or a math library do. The rest may hold secrets and is not read.
_RELEVANT = re.compile(
    r"^(PYTORCH_|TORCH|CUDA_|CUBLAS_|CUDNN_|NVIDIA_TF32|TRITON_|OMP_|MKL_|OPENBLAS_|GOMP_|KMP_|NCCL_|GLOO_|TF32_"
    r"|HF_(HUB|DATASETS)_OFFLINE$|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHON(OPTIMIZE|MALLOC|FAULTHANDLER|DEVMODE)$|TMPDIR$)"
)


def gather_machine() -> Machine:
    """Looks at this machine. Takes as long as importing torch, plus some tenths of a second."""
    report = read_cards()
    torch = look_at_torch()
    cards, hidden, cards_by = _cards(report, torch)
    available, total = host_memory()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        python=(sys.version_info[0], sys.version_info[1], sys.version_info[2]),
        torch=torch,
        triton=_imported("triton")[1],
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        load=load_average(),
        memory_bytes=total,
        available_bytes=available,
        environment={name: value for name, value in os.environ.items() if _RELEVANT.match(name)},
        packages={module: _version(module, package) for module, package in OPTIONAL.items()},
        cards=cards,
        hidden_cards=hidden,
        cards_by=cards_by,
        driver=report.driver,
        driver_cuda=report.cuda,
    )


# --- torch and triton -------------------------------------------------------------------------------------------------


def look_at_torch() -> Torch:
    """Imports torch and asks what it sees; a torch that cannot be imported is an answer, too."""
    torch, found = _imported("torch")
    if torch is None:
        return Torch(**vars(found))
    try:
        sees, why = _sees_cuda(torch)
        return Torch(
            status="ok",
            version=found.version,
            cuda=torch.version.cuda,
            sees_cuda=sees,
            why_not=why,
            mps=bool(torch.backends.mps.is_available()),
            threads=torch.get_num_threads(),
            wants_triton=_wanted_triton(),
        )
    except Exception as error:  # noqa: BLE001 - such as a folder named torch that is no torch
        reason = f"it is imported, but does not answer: {type(error).__name__}: {first_line(error)}"
        return Torch(status="broken", version=found.version, reason=reason)


def _imported(name: str) -> tuple[Any, Library]:
    """A package, and what is known of it; None where it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
        return module, Library(status="ok", version=str(module.__version__))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken build raises whatever it likes
        status, reason = "broken", f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            status, reason = "missing", f"there is no package {name} for this Python"
        return None, Library(status=status, version=_installed(name), reason=reason)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _sees_cuda(torch: Any) -> tuple[bool, str]:
    """Whether there is a CUDA device, and what torch says if not: it says so in a warning only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sees = bool(torch.cuda.is_available())
    return sees, "" if sees or not caught else first_line(caught[-1].message)


def _wanted_triton() -> str | None:
    with contextlib.suppress(Exception):
        for line in importlib.metadata.requires("torch") or ():
            found = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\w.+]+)", line)
            if found:
                return found[1]
    return None


def _installed(package: str) -> str:
    """The version by a package's own metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _version(module: str, package: str) -> str | None:
    """The version of an installed package, which is not imported for that; None where it is missing."""
    top, _, inner = module.partition(".")
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(top)
        folders = () if found is None else found.submodule_search_locations or ()
        if found is not None and (not inner or any((Path(folder) / inner).is_dir() for folder in folders)):
            return _installed(package) or "unknown"
    return None


# --- cards ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverReport:
    """What the driver says: its version, the newest CUDA it knows, and every card, hidden ones too."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[CardState, ...] = ()


def read_cards() -> DriverReport:
    """Every card of this machine, by its driver; nothing where there is none, or one of another version."""
    with contextlib.suppress(Exception):
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        try:
            return report_of_nvml(pynvml)
        finally:
            pynvml.nvmlShutdown()
    return DriverReport()


def report_of_nvml(nvml: Any) -> DriverReport:
    """The report of an initialised NVML."""
    cuda = _asked(nvml.nvmlSystemGetCudaDriverVersion)
    return DriverReport(
        driver=_text(_asked(nvml.nvmlSystemGetDriverVersion)),
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        cards=tuple(_nvml_card(nvml, number) for number in range(nvml.nvmlDeviceGetCount())),
    )


def _nvml_card(nvml: Any, number: int) -> CardState:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(name: str, *arguments: Any) -> Any:
        function = getattr(nvml, name, None)
        return None if function is None else _asked(function, handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", 2)) or ask("nvmlDeviceGetMemoryInfo")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits
    milliwatts = (ask(f"nvmlDeviceGet{name}") for name in ("PowerUsage", "EnforcedPowerLimit"))
    power, limit = (None if value is None else value / 1000 for value in milliwatts)
    rates = ask("nvmlDeviceGetUtilizationRates")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
    return CardState(
        name=_text(ask("nvmlDeviceGetName")) or "NVIDIA GPU",
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        processes=tuple(sorted({int(process.pid) for process in processes} - {os.getpid()})),
        utilisation=None if rates is None else rates.gpu / 100,
        temperature=ask("nvmlDeviceGetTemperature", 0),
        power_watts=power,
        power_limit_watts=limit,
        clock_mhz=ask("nvmlDeviceGetClockInfo", 1),
        clock_most_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
        throttled=held_by(int(bits or 0)),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", 1, 0),
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


def held_by(bits: int) -> tuple[str, ...]:
    """Why the driver holds the clock down, in words."""
    return tuple(word for word, mask in _HELD_BY.items() if bits & mask)


def _cards(report: DriverReport, torch: Torch) -> tuple[tuple[CardState, ...], int, str]:
    """The cards in torch's order with what the driver reports of them, how many torch does not see, and the source."""
    if not torch.sees_cuda:
        return report.cards, 0, "NVML" if report.cards else ""
    seen = _torch_cards()
    if not report.cards:
        return tuple(seen), 0, "torch"
    return merged(report.cards, seen), max(0, len(report.cards) - len(seen)), "NVML"


def merged(reported: Sequence[CardState], seen: Sequence[CardState]) -> tuple[CardState, ...]:
    """Torch's cards, each with the state of the driver's card of the same UUID, or else of the same number."""
    by_identity = {card.identity: card for card in reported if card.identity}
    cards: list[CardState] = []
    for number, card in enumerate(seen):
        state = by_identity.get(card.identity) or (reported[number] if number < len(reported) else card)
        own = {"name": card.name, "capability": card.capability, "memory_bytes": card.memory_bytes}
        cards.append(dataclasses.replace(state, **{name: value for name, value in own.items() if value is not None}))
    return tuple(cards)


def _torch_cards() -> list[CardState]:
    import torch

    cards: list[CardState] = []
    for number in range(torch.cuda.device_count()):
        with contextlib.suppress(Exception):
            properties = torch.cuda.get_device_properties(number)
            identity = str(getattr(properties, "uuid", ""))
            card = CardState(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                identity=f"GPU-{identity}" if identity and not identity.startswith("GPU-") else identity,
            )
            cards.append(card)
    return cards
