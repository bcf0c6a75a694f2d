"""The card's own view of itself: load, memory, power, heat, clock, as NVIDIA's driver tells them.

Asked from the loop at most every ten seconds. An answer takes the host a millisecond or so, during which the device
works on; there is no thread. Nothing is told where there is no NVIDIA card, no driver library, or no package for it.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flatout.device import Device
from flatout.records import MachineRecord

Answer = TypeVar("Answer")

SECONDS_BETWEEN = 10.0
_POWER, _HEAT = 0x4 | 0x80, 0x20 | 0x40  # bits of the driver's reasons for a lower clock: caps of power, and of heat
_SLOWDOWN = 0x8  # by the hardware itself: power or heat, it does not say


class MachineWatch:
    """Says how the card is doing, now and then."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.next = self.began  # the first answer comes with the first step
        self.library, self.handle = _open(device)

    def poll(self, step: int) -> MachineRecord | None:
        """A record if it is time for one and there is something to tell."""
        now = self.clock()
        if self.handle is None or now < self.next:
            return None
        self.next = now + SECONDS_BETWEEN
        library, handle = self.library, self.handle
        memory = _told(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        utilisation = _told(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        reasons = _told(lambda: _clock_reasons(library, handle)) or 0
        return MachineRecord(
            step=step,
            elapsed=now - self.began,
            utilisation=utilisation,
            memory_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=_told(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
            power_limit_watts=_told(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            temperature=_told(lambda: float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
            clock_mhz=_told(lambda: float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))),
            throttled=throttled(reasons),
        )

    def close(self) -> None:
        if self.handle is not None:
            _told(self.library.nvmlShutdown)
            self.handle = None


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
