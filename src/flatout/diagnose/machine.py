"""Everything there is to know of this machine, gathered once, into a `Machine`.

The contract: `gather_machine` never raises. torch and triton are imported here, inside of a guard, and nowhere else
before: whoever needs them afterwards looks at `Machine.torch.status` first. A torch whose import failed must not be
imported again, since its half-loaded remains answer the second time with an error that says nothing.
The order matters: the driver is asked before torch is imported, so that the memory in use is that of others.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.cores import load_average, usable_cores
from flatout.diagnose.cards import DriverReport, read_cards, read_xids
from flatout.diagnose.doctor import Card, Library, Machine, Torch, first_line
from flatout.host import host_memory

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
    r"^(PYTORCH_|TORCH|CUDA_|CUBLAS_|CUDNN_|NVIDIA_TF32|TRITON_|OMP_|MKL_|OPENBLAS_|GOMP_|KMP_|NCCL_|GLOO_|HF_(HUB|DATASETS)_OFFLINE$|LD_LIBRARY_PATH$"
    r"|LD_PRELOAD$|PYTHON(OPTIMIZE|MALLOC|FAULTHANDLER|DEVMODE)$|TMPDIR$|TF32_)"
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


def _cards(report: DriverReport, torch: Torch) -> tuple[tuple[Card, ...], int, str]:
    """The cards in torch's order with the driver's news of them, how many torch does not see, and who told."""
    if not torch.sees_cuda:
        return report.cards, 0, report.told_by
    seen = _torch_cards()
    if not report.cards:
        return tuple(card for card, _ in seen), 0, "torch"
    return merged(report.cards, seen), max(0, len(report.cards) - len(seen)), report.told_by


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
