"""What a run's readings of its card and host say is going wrong (`MachineRecord`), and a speed that is too low for it.

Idea: a single reading may be a moment; each rule wants the same of several in a row. The rules:

    throttling     two readings of the card in a row were held down by heat, or ten in a row by a power limit below the
                   card's own
    slow card      two readings in a row of a busy card below 55% of its highest clock, neither by heat nor by its own
                   power limit
    low speed      half-precision steps with large micro-batches reach less than 15% of the card's peak over 20 seconds
    busy host      in two readings in a row a CPU run's threads waited for cores (0.3 of a thread on average); beside a
                   GPU, others left less than one core, or less than half of the only one
    memory growth  six readings in a row, each higher than any before, went up steadily by 64 MiB at least; also of the
                   least of every 6 and every 36 readings, for slow leaks
    swap           two readings in a row had 16 MiB more on the host's disk than the one before, and memory was short

Contract: pure, as `Alerts`, which asks these rules and says at most so often what they find.
"""

import collections
import itertools
import math
import statistics
from typing import final

from flatout.observe.human import human_bytes, human_seconds
from flatout.records import WAITING, MachineRecord, RunInfo, StepRecord

Found = tuple[str, str]  # the kind of an alert, and what it says

HEAT_READINGS, POWER_READINGS, READINGS = 2, 10, 2
LOW_CLOCK, BUSY_CARD, FULL_DRAW = 0.55, 0.8, 0.85
LOW_MFU, LEAST_SECONDS, COLD_STEPS, FEWEST_STEPS, LARGE_SECONDS = 0.15, 20.0, 3, 5, 0.005
NOBODY = 0.25  # of a core
STRIDES, RISES, STEADY, LEAST_GROWTH = (1, 6, 36), 5, 0.25, 64 * 2**20
SWAP_GROWTH, SHORT_MEMORY = 16 * 2**20, 0.8  # of the host's: below, only pages that nobody uses are moved out


@final
class MachineRules:
    """The rules for one run on one machine; `info` is its first record, if that was seen."""

    def __init__(self, info: RunInfo | None = None) -> None:
        self._info = info
        threads = next((one.used for one in info.features if one.name == "threads"), "") if info is not None else ""
        self._threads = int(threads) if threads.isdigit() else None
        self._cpu = info is not None and info.device == "cpu"
        self._hot = self._capped = self._low = self._short = self._swaps = 0
        self._swap: int | None = None
        self._process, self._card = _Growth(), _Growth()
        self._pace = _Pace(info)

    def see(self, record: MachineRecord) -> list[Found | None]:
        """What a reading says together with those before it."""
        rules = (self._throttled, self._clock, self._busy, self._grows, self._swapping)
        return [rule(record) for rule in rules]

    def step(self, record: StepRecord) -> Found | None:
        """What the speed of a step says together with those before it."""
        low = self._pace.add(record)
        if low is None:
            return None
        return "low speed", (
            f"{low:.0%} of the card's peak rate, where such steps reach 30% or more; `flatout doctor` measures the "
            "card, and `flatout profile` says what holds a step"
        )

    def _throttled(self, record: MachineRecord) -> Found | None:
        self._hot = self._hot + 1 if "heat" in record.throttled else 0
        self._capped = self._capped + 1 if _is_capped(record) else 0
        clock = "" if record.clock_mhz is None else f" at {record.clock_mhz:.0f} MHz"
        if self._hot >= HEAT_READINGS:
            degrees = "" if record.temperature is None else f" ({record.temperature:.0f} °C)"
            return "throttling", f"heat{degrees} holds the card's clock down{clock}; improve its cooling"
        if self._capped >= POWER_READINGS and self._hot == 0:
            found = f"power holds the card's clock down{clock}: it is at its limit{_watts(record.power_limit_watts)}"
            return "throttling", f"{found}; {_higher_limit(record)}"
        return None

    def _clock(self, record: MachineRecord) -> Found | None:
        now, most = record.clock_mhz, record.clock_most_mhz
        works = (record.utilisation or 0.0) >= BUSY_CARD and "heat" not in record.throttled
        works = works and not _has_all_its_power(record)
        self._low = self._low + 1 if now is not None and most and works and now < LOW_CLOCK * most else 0
        if self._low < READINGS:
            return None
        found = f"the card works at {now:.0f} of {most:.0f} MHz, far below what is expected of it"
        if _is_capped(record):
            limit = f"its power limit{_watts(record.power_limit_watts)}"
            return "slow card", f"{found}: {limit} holds it down; {_higher_limit(record)}"
        if record.throttled:
            return "slow card", f"{found}: the hardware holds it down; look at its power cables and its cooling"
        return "slow card", (
            f"{found}, and neither heat nor power holds it down; somebody may have set its clock: `nvidia-smi -rgc` "
            "takes that back, and `nvidia-smi -q -d CLOCK` shows it"
        )

    def _busy(self, record: MachineRecord) -> Found | None:
        others, cores, waiting = record.cores_others, record.cores, record.threads_waiting
        alone = self._info is None or self._info.ranks == 1  # else the other ranks are among the others
        if cores is None or (others is None and waiting is None):
            return None
        left = None if others is None or not alone else cores - others
        if not self._cpu:
            short = left is not None and left < min(1.0, 0.5 * cores)
        elif waiting is not None:
            short = waiting >= WAITING
        else:
            short = left is not None and left < (self._threads or 1) - 0.25
        self._short = self._short + 1 if short else 0
        if self._short < READINGS:
            return None
        load = "" if record.load is None else f" (load {record.load:.1f})"
        who = "others" if alone else "others, the other ranks among them,"
        used = f"{who} use {others or 0.0:.1f} of {cores:g} cores{load}"
        if not self._cpu:
            return "busy host", f"{used}, and this run needs one to feed the card; stop the other programs"
        threads, fits = self._threads, max(1, min(int(cores), round(cores if left is None else left)))
        many = "thread waits" if threads == 1 else f"{threads or 'several'} threads wait"
        by_itself = alone and others is not None and others < NOBODY
        if threads is not None and (fits < threads or (by_itself and threads > 1)):  # its readers need a core, too
            advice = f"end this run with Ctrl-C and resume it with speed.threads={min(fits, threads - 1)}"
            advice = advice if by_itself else f"stop the other programs, or {advice}"
        else:
            advice = "stop the other programs, or train when they are done"
        return "busy host", f"the run's {many} for cores: {used}; {advice}"

    def _grows(self, record: MachineRecord) -> Found | None:
        for growth, size, where in (
            (self._process, record.process_bytes, "host"),
            (self._card, record.allocated_bytes, "card"),
        ):
            rate = None if size is None else growth.add(record.elapsed, size)
            if rate is None or size is None:
                continue
            whole, used = record.host_total_bytes, record.host_bytes
            if where == "card":
                whole, used = record.memory_total_bytes, record.memory_bytes
            left = ""
            if whole is not None and used is not None:
                left = f", and what is free lasts for {human_seconds(max(0, whole - used) / rate)}"
            source = "an iterator of your own (data=)" if where == "host" else "code of your own"
            return "memory growth", (
                f"the run's memory on the {where} grows steadily, by {human_bytes(int(60 * rate))} a minute to "
                f"{human_bytes(size)}{left}; something keeps what it should drop, such as {source}: until that is "
                "mended, stop and resume the run now and then, which frees it (checkpoint.every=`10 minutes` saves in "
                "time)"
            )
        return None

    def _swapping(self, record: MachineRecord) -> Found | None:
        before, self._swap = self._swap, record.swap_bytes
        if before is None or record.swap_bytes is None:
            return None
        more = record.swap_bytes - before
        used, whole = record.host_bytes, record.host_total_bytes
        scarce = used is None or whole is None or used >= SHORT_MEMORY * whole
        self._swaps = self._swaps + 1 if more >= SWAP_GROWTH and scarce else 0
        if self._swaps < READINGS:
            return None
        return "swap", (
            f"the host is out of memory and swaps: {human_bytes(record.swap_bytes)} lie on its disk, "
            f"{human_bytes(more)} more than at the last reading; close other programs, or let the run use less (a "
            "smaller speed.micro_batch on a CPU, fewer speed.workers)"
        )


def _is_capped(record: MachineRecord) -> bool:
    """Whether power holds the clock down by a limit that somebody may have set: the card's own is its full speed."""
    limit, own = record.power_limit_watts, record.power_default_watts
    return "power" in record.throttled and (limit is None or own is None or limit < 0.99 * own)


def _has_all_its_power(record: MachineRecord) -> bool:
    """Whether nothing but the card's own limit holds it down; one that is short of power draws less than that."""
    draws, limit = record.power_watts, record.power_limit_watts or 0.0
    return "power" in record.throttled and not _is_capped(record) and (draws is None or draws >= FULL_DRAW * limit)


def _higher_limit(record: MachineRecord) -> str:
    if record.power_default_watts is None:
        return "raise the limit if it was set below the card's own, else this is its full speed"
    return f"`nvidia-smi -pl {record.power_default_watts:.0f}` gives it its own limit back"


def _watts(watts: float | None) -> str:
    return "" if watts is None else f" of {watts:.0f} W"


@final
class _Growth:
    """Whether a size goes up at every reading: of the latest, and of the least of every 6 and every 36."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[int, float]]] = {stride: [] for stride in STRIDES}
        self._least: dict[int, collections.deque[tuple[int, float]]] = {
            stride: collections.deque(maxlen=RISES + 1) for stride in STRIDES
        }
        self._highest = dict.fromkeys(STRIDES, 0)

    def add(self, elapsed: float, size: int) -> float | None:
        """Bytes per second, where it has grown steadily."""
        found = None
        for stride in STRIDES:
            waiting, least = self._waiting[stride], self._least[stride]
            waiting.append((size, elapsed))
            if len(waiting) < stride:
                continue
            lowest = min(waiting)
            waiting.clear()
            if lowest[0] <= self._highest[stride]:
                least.clear()
                continue
            self._highest[stride] = lowest[0]
            least.append(lowest)
            rises = [after[0] - before[0] for before, after in itertools.pairwise(least)]
            seconds = least[-1][1] - least[0][1]
            steady = len(rises) == RISES and min(rises) > 0 and min(rises) >= STEADY * max(rises)
            if steady and sum(rises) >= LEAST_GROWTH and seconds > 0:
                found = sum(rises) / seconds
                least.clear()
        return found


@final
class _Pace:
    """The share of the card's peak that a run reaches, where much is expected: large steps in half precision."""

    def __init__(self, info: RunInfo | None) -> None:
        self._shares: list[float] = []
        self._seconds, self._wanted, self._cold = 0.0, LEAST_SECONDS, COLD_STEPS
        used = {} if info is None else {one.name: one.used for one in info.features}
        self._half = used.get("precision") in ("bf16", "fp16")
        self._tokens = 0 if info is None else info.micro_batch * info.context * info.ranks  # of a micro-batch in each

    def add(self, record: StepRecord) -> float | None:
        """The median over 20 seconds, where that is far too low; then over 40, 80 ...: once told, it is known."""
        rate, share, waited = record.tokens_per_second, record.mfu, record.data_seconds or 0.0
        if not self._half or not share or not rate or not math.isfinite(record.seconds) or self._cold > 0:
            self._cold -= 1
            return None
        small = self._tokens * share / rate < LARGE_SECONDS  # what a micro-batch takes at the peak rate: launches weigh
        if small or waited > 0.2 * record.seconds:  # a step that waits for data has an alert of its own
            return None
        self._shares.append(share)
        self._seconds += record.seconds
        if self._seconds < self._wanted or len(self._shares) < FEWEST_STEPS:
            return None
        median, self._shares, self._seconds = statistics.median(self._shares), [], 0.0
        if median >= LOW_MFU:
            return None
        self._wanted *= 2
        return median
