"""The machine's own view of itself: the card's load, memory, power, heat and clock, and the host's cores and memory.

Asked from the loop at most every ten seconds. An answer takes the host a millisecond or two, during which the device
works on; there is no thread. The card is told of by NVIDIA's driver, where there is one with a package for it, the host
by the operating system.
"""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flatout.device import Device
from flatout.host import core_clock, core_use, host_memory, load_average, process_bytes, swap_bytes, usable_cores
from flatout.records import MachineRecord

Answer = TypeVar("Answer")

SECONDS_BETWEEN = 10.0
_POWER, _HEAT = 0x4 | 0x80, 0x20 | 0x40  # bits of the driver's reasons for a lower clock: caps of power, and of heat
_SLOWDOWN = 0x8  # by the hardware itself: power or heat, it does not say


class MachineWatch:
    """Says how card and host are doing, now and then."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.next = self.began  # the first answer comes with the first step
        self.device = device.torch_device
        self.library, self.handle = _open(device)
        self.cores = core_clock()

    def poll(self, step: int) -> MachineRecord | None:
        """A record if it is time for one."""
        now = self.clock()
        if now < self.next:
            return None
        self.next = now + SECONDS_BETWEEN
        card = {"throttled": "", **dict.fromkeys(_CARD)} if self.handle is None else self._card()
        return MachineRecord(step=step, elapsed=now - self.began, **card, **self._host())

    def _card(self) -> dict[str, Any]:
        library, handle = self.library, self.handle
        memory = _told(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        reasons = _told(lambda: _clock_reasons(library, handle)) or 0
        return {
            "utilisation": _told(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            "memory_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "power_watts": _told(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
            "power_limit_watts": _told(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "temperature": _told(lambda: float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
            "clock_mhz": _told(lambda: float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))),
            "clock_most_mhz": _told(lambda: float(library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM))),
            "power_default_watts": _told(lambda: library.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000),
            "throttled": throttled(reasons),
        }

    def _host(self) -> dict[str, Any]:
        before, self.cores = self.cores, core_clock()
        used = core_use(before, self.cores)
        available, total = host_memory()
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None,
            "cores": usable_cores(),
            "cores_busy": None if used is None else used.busy,
            "cores_others": None if used is None else used.others,
            "threads_waiting": None if used is None else used.waiting,
            "load": load_average(),
            "process_bytes": process_bytes(),
            "host_bytes": None if total is None or available is None else total - available,
            "host_total_bytes": total,
            "swap_bytes": swap_bytes(),
        }

    def close(self) -> None:
        self.next = math.inf
        if self.handle is not None:
            _told(self.library.nvmlShutdown)
            self.handle = None


# What a card tells of itself, and a host without one does not.
_CARD = ("utilisation", "memory_bytes", "power_watts", "power_limit_watts", "temperature", "clock_mhz")


def throttled(reasons: int) -> str:
    """The driver's bits in words."""
    words = [word for word, bits in (("power", _POWER), ("heat", _HEAT)) if reasons & bits]
    return " and ".join(words) or ("hardware" if reasons & _SLOWDOWN else "")


def _open(device: Device) -> tuple[Any, Any]:
    if device.kind != "cuda":
        return None, None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        # By name, not by number: CUDA's numbers follow CUDA_VISIBLE_DEVICES, the driver's do not.
        unique = torch.cuda.get_device_properties(device.torch_device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{unique}")
    return None, None


def _clock_reasons(library: Any, handle: Any) -> int:
    ask = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return (ask or library.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)


def _told(ask: Callable[[], Answer]) -> Answer | None:
    """The answer, or None: a driver refuses single questions for many reasons, none of them ours."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - the library has errors of its own, and the run must not end by any of them
        return None
