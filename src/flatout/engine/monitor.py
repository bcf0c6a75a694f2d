"""Reports of a run besides its numbers: notices, the state of the machine, the reach of eigenstate blocks.

Contract: asking is cheap and never waits for the device in a step. `look_at_eigenstates` copies once from the device to
the host, so it is called at a run's boundaries only. The machine is asked at most every ten seconds, in the loop's own
thread, which takes the host a millisecond or two while the device works on. NVIDIA's driver knows the card, where it is
installed with its Python package; the operating system knows the host.

Shape legend: L eigenstate blocks, K states of one.

Trap: an angle is learned without an end. Beyond half a turn per token a state turns the other way,
more slowly the larger the number; its period is that of what can be seen, token by token.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout.device import Device
from flatout.host import core_clock, core_use, host_memory, load_average, process_bytes, swap_bytes, usable_cores
from flatout.model.eigenstate import Eigenstate
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel
from flatout.records import EigenstateLayer, EigenstateRecord, MachineRecord, NoticeRecord

Answer = TypeVar("Answer")

SECONDS_BETWEEN = 10.0
_POWER, _HEAT = 0x4 | 0x80, 0x20 | 0x40  # bits of the driver's reasons for a lower clock: caps of power, and of heat
_SLOWDOWN = 0x8  # by the hardware itself: power or heat, it does not say
QUANTILES = {"min": 0.0, "10%": 0.1, "50%": 0.5, "90%": 0.9, "max": 1.0}


class Notices:
    """Notices that the loop has not taken yet. Adding one is safe from any thread; a source is asked when it takes."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()  # the thread that saves adds some, too
        self._sources: list[Callable[[], list[str]]] = []

    def add(self, notice: str) -> None:
        self._waiting.append(notice)

    def follow(self, source: Callable[[], list[str]]) -> None:
        """Asks `source` for its notices whenever some are taken."""
        self._sources.append(source)

    def take(self) -> list[str]:
        """All of them, oldest first."""
        notices = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for source in self._sources:
            notices += source()
        return notices


def notices_at(step: int, notices: Iterable[str]) -> Iterator[NoticeRecord]:
    return (NoticeRecord(step=step, message=notice) for notice in notices)


# --- the machine ------------------------------------------------------------------------------------------------------


class MachineWatch:
    """Says how card and host are doing, now and then."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.next = self.began  # the first answer comes with the first step
        self.device = device.torch_device
        self.library, self.handle = open_card(device)
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
        nvml, card = self.library, self.handle
        memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(card))
        reasons = asked(lambda: _clock_reasons(nvml, card)) or 0
        return {
            "utilisation": asked(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100),
            "memory_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "power_watts": asked(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            "power_limit_watts": asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000),
            "temperature": asked(lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))),
            "clock_mhz": asked(lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
            "clock_most_mhz": asked(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM))),
            "power_default_watts": asked(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(card) / 1000),
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
            asked(self.library.nvmlShutdown)
            self.handle = None


# The values of a card: None on a host without one.
_CARD = ("utilisation", "memory_bytes", "power_watts", "power_limit_watts", "temperature", "clock_mhz")


def throttled(reasons: int) -> str:
    """The driver's bits in words."""
    words = [word for word, bits in (("power", _POWER), ("heat", _HEAT)) if reasons & bits]
    return " and ".join(words) or ("hardware" if reasons & _SLOWDOWN else "")


def open_card(device: Device) -> tuple[Any, Any]:
    """The driver's library and its handle of a card; (None, None) where there is none."""
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


def asked(ask: Callable[[], Answer]) -> Answer | None:
    """The answer, or None: a driver refuses single questions for many reasons."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - the library has errors of its own, and the run must not end by any of them
        return None


# --- eigenstate blocks ------------------------------------------------------------------------------------------------


@torch.no_grad()
def look_at_eigenstates(model: LanguageModel, step: int) -> Iterator[EigenstateRecord]:
    """The record of this moment, if there are such blocks."""
    mixers = {
        number: block.attention
        for number, block in enumerate(model.blocks if isinstance(model, GPT) else (), start=1)
        if isinstance(block.attention, Eigenstate)
    }
    if not mixers:
        return
    both_L2K = torch.stack([torch.stack(mixer.eigenvalues()) for mixer in mixers.values()])
    context = model.config.context
    log_decay_LK, angle_LK = both_L2K.cpu().double().unbind(1)
    layers = (
        _layer(number, log_decay_K, angle_K, context)
        for number, log_decay_K, angle_K in zip(mixers, log_decay_LK, angle_LK, strict=True)
    )
    yield EigenstateRecord(step=step, context=context, layers=tuple(layers))


def _layer(number: int, log_decay_K: Tensor, angle_K: Tensor, context: int) -> EigenstateLayer:
    horizon_K = -1.0 / log_decay_K
    turn_K = torch.remainder(angle_K, 2 * math.pi)
    turn_K = torch.minimum(turn_K, 2 * math.pi - turn_K)
    return EigenstateLayer(
        layer=number,
        states=log_decay_K.numel(),
        magnitude=_quantiles(log_decay_K.exp()),
        horizon=_quantiles(horizon_K),
        period=_quantiles(2 * math.pi / turn_K),
        beyond=(horizon_K > context).double().mean().item(),
    )


def _quantiles(values_K: Tensor) -> dict[str, float]:
    """NaN comes last in order, as the largest; so one bad state leaves the others to be seen."""
    ordered = values_K.sort().values
    return {name: ordered[round(share * (len(ordered) - 1))].item() for name, share in QUANTILES.items()}
