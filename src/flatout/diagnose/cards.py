"""The GPUs as their driver tells of them: through NVML, else through the program nvidia-smi.

The contract: `read_cards` never raises and never touches the card: no context is made, so the memory it reports is
that of others. A machine without an NVIDIA driver gives an empty `DriverReport`.
The trap: inside a container other processes are often not visible, though their memory is.
"""

import contextlib
import csv
import dataclasses
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from flatout.diagnose.doctor import Card

MEBIBYTE = 2**20
_SECONDS = 10
# Bits of the driver's "why is the clock held down"; idle and the user's own clocks are no trouble.
_HELD_BY = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}
# What nvidia-smi is asked for; the numbers are those that a `Card` takes as they are.
_NUMBERS = {
    "temperature": "temperature.gpu",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "power_default_watts": "power.default_limit",
    "clock_mhz": "clocks.sm",
    "clock_most_mhz": "clocks.max.sm",
}
_FIELDS = ("uuid", "name", "driver_version", "compute_cap", "memory.total", "memory.used", "utilization.gpu")
_FIELDS += (*_NUMBERS.values(), "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverReport:
    """What the driver says: its version, the newest CUDA it knows, and every card, hidden ones too."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()
    told_by: str = ""


def read_cards() -> DriverReport:
    """Every card of this machine, from the best source there is."""
    for source in (_by_nvml, _by_program):
        report = source()
        if report is not None:
            return report
    return DriverReport()


def held_by(bits: int) -> tuple[str, ...]:
    """Why the driver holds the clock down, in words."""
    return tuple(word for word, mask in _HELD_BY.items() if bits & mask)


# --- NVML -------------------------------------------------------------------------------------------------------------


def _by_nvml() -> DriverReport | None:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, or a driver of another version: ask somebody else
        return None
    try:
        return report_of_nvml(pynvml)
    except Exception:  # noqa: BLE001
        return None
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
        told_by="NVML",
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


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def _by_program() -> DriverReport | None:
    if shutil.which("nvidia-smi") is None:
        return None
    table = _run(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    if table is None:
        return None
    return report_of_program(table, _run(["nvidia-smi"]) or "")


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def report_of_program(table: str, banner: str) -> DriverReport:
    """The report in what nvidia-smi prints: a row of `_FIELDS` for each card, and its banner with the CUDA version."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(table)) if len(row) == len(_FIELDS)]
    cards = [dict(zip(_FIELDS, row, strict=True)) for row in rows]
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", banner)
    return DriverReport(
        driver=cards[0]["driver_version"] if cards else None,
        cuda=None if found is None else (int(found[1]), int(found[2])),
        cards=tuple(_program_card(card) for card in cards),
        told_by="nvidia-smi",
    )


def _program_card(card: dict[str, str]) -> Card:
    def number(field: str) -> float | None:
        try:
            return float(card[field])
        except ValueError:  # [N/A], [Not Supported]
            return None

    plain: dict[str, Any] = {name: number(field) for name, field in _NUMBERS.items()}
    total, used, load = number("memory.total"), number("memory.used"), number("utilization.gpu")
    errors = number("ecc.errors.uncorrected.volatile.total")
    capability = re.fullmatch(r"(\d+)\.(\d+)", card["compute_cap"])
    bits = re.fullmatch(r"0x[0-9a-fA-F]+", card["clocks_throttle_reasons.active"])
    return Card(
        name=card["name"],
        capability=None if capability is None else (int(capability[1]), int(capability[2])),
        memory_bytes=None if total is None else int(total * MEBIBYTE),
        used_bytes=None if used is None else int(used * MEBIBYTE),
        utilisation=None if load is None else load / 100,
        throttled=() if bits is None else held_by(int(bits[0], 16)),
        uncorrected_errors=None if errors is None else int(errors),
        identity=card["uuid"],
        **plain,
    )


def read_xids() -> tuple[str, ...]:
    """Errors of the cards in the kernel's log, the newest last; nothing where we may not read it."""
    log = _run(["dmesg"]) if shutil.which("dmesg") is not None else None
    return () if log is None else xids_in(log)


def xids_in(log: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"Xid \([^)]*\): (\d+)", log)))[-5:]
