"""Warnings about a run from its records, with what to do about them.

Idea: `Alerts` sees every record once, in order, and keeps a window of the last 128 steps. Each rule compares the new
step with that window. The rules (a step that is far out is put into its window cut to the limit, so that one spike
does not hide the next, and a level that stays becomes the new normal):

    loss spike       loss above the mean + 6 standard deviations, above the median + 6 robust ones (1.4826 times the
                     median distance from the median), half as far again above the median than anything in the
                     window, and 5% above the median
    gradient jump    the same for the logarithm of the gradient norm, and at least 4 times the median
    data stall       the host waited for the batch for more than 20% of each of the last 5 steps
    skipped update   loss or gradient not finite; of fp16, which looks for its scale, 10 within 100 steps
    slow             two blocks in a row (32 steps and 20 seconds at least) below 85% of the run's fastest block

Contract: pure, no clock and no files: the same records give the same alerts, live or read back later. On clean series
(falling, flat, noisy with heavy tails, small batches) fewer than one step in a thousand alerts; the tests measure it.
A kind that has alerted stays quiet for 100 steps, then 200, 400 ... up to 6,400, and then says how many it kept back;
one of card and host also for 2 minutes, then 4, 8 ... up to 128, however short the steps are.
Trap: a resumed run says steps again; everything that was remembered of the time before is forgotten at its `RunInfo`.

Rules about card and host (`MachineRecord`), where a single reading may be a moment:

    throttling     two readings of the card in a row were held down by heat, or ten in a row by a power limit below the
                   card's own
    busy host      in two readings in a row a CPU run's threads waited for cores (0.3 of a thread on average); beside a
                   GPU, others left less than one core, or less than half of the only one
    memory growth  the lowest of every six readings rose steadily six times, by 64 MiB at least
"""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any, final

from flatout.config.optimizers import rate_setting
from flatout.observe.human import human_bytes
from flatout.records import WAITING, MachineRecord, Record, RunInfo, StepRecord

Found = tuple[str, str]  # the kind of an alert, and its message

HEAT_READINGS, POWER_READINGS, BUSY_READINGS = 2, 10, 2
IDLE_OTHERS = 0.25  # of a core: other processes that use less are not the reason for a busy host
STRETCH, RISES, STEADY, LEAST_GROWTH = 6, 5, 0.25, 64 * 2**20


@final
class MachineRules:
    """The rules for one run on one machine; `info` is its first record, if that was seen."""

    def __init__(self, info: RunInfo | None = None) -> None:
        self._info = info
        threads = next((one.used for one in info.features if one.name == "threads"), "") if info is not None else ""
        self._threads = int(threads) if threads.isdigit() else None
        self._cpu = info is not None and info.device == "cpu"
        self._hot = self._capped = self._short = 0
        self._process, self._card = _Growth(), _Growth()

    def see(self, record: MachineRecord) -> list[Found | None]:
        """The alerts of a reading, together with those before it."""
        return [self._throttled(record), self._busy(record), self._grows(record)]

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
        if self._short < BUSY_READINGS:
            return None
        load = "" if record.load is None else f" (load {record.load:.1f})"
        who = "others" if alone else "others, the other ranks among them,"
        used = f"{who} use {others or 0.0:.1f} of {cores:g} cores{load}"
        if not self._cpu:
            return "busy host", f"{used}, and this run needs one to feed the card; stop the other programs"
        advice = "stop the other programs, or train when they are done"
        fits = max(1, min(int(cores), round(cores if left is None else left)))
        by_itself = alone and others is not None and others < IDLE_OTHERS
        fewer = 0 if self._threads is None else min(fits, self._threads - 1)  # its readers need a core, too
        if fewer > 0 and (by_itself or fits < (self._threads or 1)):
            resume = f"end this run with Ctrl-C and resume it with speed.threads={fewer}"
            advice = resume if by_itself else f"stop the other programs, or {resume}"
        return "busy host", f"threads of the run wait for cores: {used}; {advice}"

    def _grows(self, record: MachineRecord) -> Found | None:
        for growth, size, where in (
            (self._process, record.process_bytes, "host"),
            (self._card, record.allocated_bytes, "card"),
        ):
            rate = None if size is None else growth.add(record.elapsed, size)
            if rate is not None and size is not None:
                return "memory growth", (
                    f"the run's memory on the {where} grows steadily, by {human_bytes(int(60 * rate))} a minute to "
                    f"{human_bytes(size)}; look for code of your own that keeps what it should drop, and until then "
                    "resume the run now and then (checkpoint.every=`10 minutes` saves in time)"
                )
        return None


def _is_capped(record: MachineRecord) -> bool:
    """Whether power holds the clock down by a limit below the card's own, which is its full speed."""
    limit, own = record.power_limit_watts, record.power_default_watts
    return "power" in record.throttled and (limit is None or own is None or limit < 0.99 * own)


def _higher_limit(record: MachineRecord) -> str:
    if record.power_default_watts is None:
        return "raise the limit if it was set below the card's own, else this is its full speed"
    return f"`nvidia-smi -pl {record.power_default_watts:.0f}` gives it its own limit back"


def _watts(watts: float | None) -> str:
    return "" if watts is None else f" of {watts:.0f} W"


@final
class _Growth:
    """Whether a size rises steadily, by the lowest of every few readings."""

    def __init__(self) -> None:
        self._stretch: list[tuple[int, float]] = []
        self._lowest: collections.deque[tuple[int, float]] = collections.deque(maxlen=RISES + 1)

    def add(self, elapsed: float, size: int) -> float | None:
        """Bytes per second, where it has grown steadily."""
        self._stretch.append((size, elapsed))
        if len(self._stretch) < STRETCH:
            return None
        self._lowest.append(min(self._stretch))
        self._stretch.clear()
        rises = [after[0] - before[0] for before, after in itertools.pairwise(self._lowest)]
        seconds = self._lowest[-1][1] - self._lowest[0][1]
        if len(rises) < RISES or min(rises) <= STEADY * max(rises) or sum(rises) < LEAST_GROWTH or seconds <= 0:
            return None
        self._lowest.clear()
        return sum(rises) / seconds


WINDOW, FEWEST, SIGMAS = 128, 32, 6.0
BEYOND, SPIKE_SHARE, JUMP_FACTOR = 1.5, 0.05, 4.0
STALL_SHARE, STALL_STEPS, COLD_STEPS = 0.2, 5, 3
OVERFLOWS, OVERFLOW_STEPS = 10, 100
BLOCK_STEPS, BLOCK_SECONDS, SLOW = 32, 20.0, 0.85
QUIET_STEPS, MOST_QUIET_STEPS, QUIET_SECONDS = 100, 6_400, 120.0


@dataclasses.dataclass(frozen=True)
class Alert:
    """Something that is going wrong: `message` says what, and in its last clause what to do."""

    step: int
    kind: str
    message: str


@final
class Alerts:
    """Watches one run; give it every record in order."""

    def __init__(self) -> None:
        self._forget()

    def see(self, record: Record) -> list[Alert]:
        """The alerts that this record raises; most raise none."""
        match record:
            case StepRecord():
                self._steps += 1
                rules = (self._skipped, self._spike, self._jump, self._stall, self._slow)
                found = [rule(record) for rule in rules]
            case MachineRecord():
                found = self._machine.see(record)
            case RunInfo():
                self._forget(record)
                return []
            case _:
                return []
        alerts, elapsed = [], record.elapsed if isinstance(record, MachineRecord) else None
        for kind, message in filter(None, found):
            if (more := self._gates[kind].let_through(record.step, elapsed)) is not None:
                alerts.append(Alert(record.step, kind, message + more))
        return alerts

    def _forget(self, info: RunInfo | None = None) -> None:
        self._config: dict[str, Any] = {} if info is None else info.config
        self._rate = "optim.learning_rate" if info is None else rate_setting(info.config)
        workers = [] if info is None else [one.used for one in info.features if one.name == "workers"]
        self._workers = f" (now {workers[0]})" if workers else ""
        self._gates: dict[str, _Gate] = collections.defaultdict(_Gate)
        self._losses, self._norms = _Level(), _Level()
        self._steps = self._stalled = 0
        self._overflows: collections.deque[int] = collections.deque(maxlen=OVERFLOWS)
        self._speed = _Speed()
        self._machine = MachineRules(info)

    def _skipped(self, record: StepRecord) -> tuple[str, str] | None:
        if record.applied:
            return None
        overflow = record.loss_scale is not None and math.isfinite(record.loss) and record.loss_scale > 1.0
        if not overflow:
            return "skipped update", (
                f"loss {record.loss:.4g} and gradient norm {record.grad_norm:.4g}: the update was skipped; if it "
                f"happens again, lower {self._rate} or lengthen optim.warmup"
            )
        self._overflows.append(record.step)
        if len(self._overflows) < OVERFLOWS or record.step - self._overflows[0] >= OVERFLOW_STEPS:
            return None
        return "skipped update", (
            f"fp16 overflowed {OVERFLOWS} times within {OVERFLOW_STEPS} steps; use speed.precision=bf16 where the GPU "
            f"has it, or lower {self._rate}"
        )

    def _spike(self, record: StepRecord) -> tuple[str, str] | None:
        before = self._losses.add(record.loss, lambda usual: SPIKE_SHARE * abs(usual))
        if before is None:
            return None
        return "loss spike", (
            f"loss {record.loss:.4f} after about {before:.4f}; look at the batch if it is one step, and lower "
            f"{self._rate} if it stays up"
        )

    def _jump(self, record: StepRecord) -> tuple[str, str] | None:
        if not record.grad_norm > 0:
            return None
        before = self._norms.add(math.log(record.grad_norm), lambda _usual: math.log(JUMP_FACTOR))
        if before is None:
            return None
        optim = self._config.get("optim")
        off = isinstance(optim, dict) and optim.get("clip") == 0
        advice = "set optim.clip, which is off" if off else f"lower {self._rate} if it goes on"
        return "gradient jump", (f"gradient norm {record.grad_norm:.3g} after about {math.exp(before):.3g}; {advice}")

    def _stall(self, record: StepRecord) -> tuple[str, str] | None:
        waited = record.data_seconds
        # The first steps wait for readers that have just been started.
        if waited is None or not record.seconds > 0 or self._steps <= COLD_STEPS:
            return None
        share = waited / record.seconds
        self._stalled = self._stalled + 1 if share > STALL_SHARE else 0
        if self._stalled < STALL_STEPS:
            return None
        return "data stall", (
            f"steps wait for data {min(share, 1.0):.0%} of their time; raise speed.workers{self._workers}, put the "
            "data on a faster disk, or prepare it before with data.streaming=false"
        )

    def _slow(self, record: StepRecord) -> tuple[str, str] | None:
        fallen = self._speed.add(record)
        if fallen is None:
            return None
        now, before = fallen
        return "slow", (
            f"{now:,.0f} tokens/s, {1 - now / before:.0%} below the {before:,.0f} of before; see whether another "
            "process uses this machine, and the card's clock and heat"
        )


@final
class _Gate:
    """Lets the first alert of a kind through, then one in 100 steps, 200, 400 ..., and counts what it keeps back.

    For records with a time, 2 minutes have to pass for every 100 of these steps, too.
    """

    def __init__(self) -> None:
        self._quiet_until, self._quiet_until_seconds = -1, -math.inf
        self._pause = QUIET_STEPS
        self._kept_back = 0

    def let_through(self, step: int, elapsed: float | None = None) -> str | None:
        """None to keep it back; else what to add to the message."""
        if step < self._quiet_until or (elapsed is not None and elapsed < self._quiet_until_seconds):
            self._kept_back += 1
            return None
        more = f" (and {self._kept_back} more like it since the last one)" if self._kept_back else ""
        self._quiet_until, self._kept_back = step + self._pause, 0
        self._quiet_until_seconds = (elapsed or 0.0) + QUIET_SECONDS * self._pause / QUIET_STEPS
        self._pause = min(2 * self._pause, MOST_QUIET_STEPS)
        return more


@final
class _Level:
    """The usual height of a noisy series, and whether a value lies far above it."""

    def __init__(self) -> None:
        self._values: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def add(self, value: float, least: Callable[[float], float]) -> float | None:
        """What was usual before, if `value` is far above it, and by more than `least(usual)`."""
        if not math.isfinite(value):
            return None
        usual = None
        if len(self._values) >= FEWEST and value > (highest := max(self._values)):  # seldom: what follows costs more
            mean, median = statistics.fmean(self._values), statistics.median(self._values)
            spread = statistics.pstdev(self._values, mean)
            # The standard deviation that the median distance from the median stands for in normal noise.
            robust = 1.4826 * statistics.median(abs(item - median) for item in self._values)
            limit = max(mean + SIGMAS * spread, median + SIGMAS * robust, median + BEYOND * (highest - median))
            limit = max(limit, median + least(median))
            if value > limit:
                usual, value = median, limit
        self._values.append(value)
        return usual


@final
class _Speed:
    """The speed in blocks of many steps, against the fastest block so far."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._seconds = 0.0
        self._best = 0.0
        self._slow_blocks = 0

    def add(self, record: StepRecord) -> tuple[float, float] | None:
        """(speed now, speed before), where it has been far lower for two whole blocks."""
        rate = record.tokens_per_second
        if rate is None or not math.isfinite(rate) or not math.isfinite(record.seconds):
            return None
        self._rates.append(rate)
        self._seconds += record.seconds
        if len(self._rates) < BLOCK_STEPS or self._seconds < BLOCK_SECONDS:
            return None
        now = statistics.median(self._rates)  # a step with a compilation in it says nothing of the others
        self._rates, self._seconds = [], 0.0
        self._slow_blocks = self._slow_blocks + 1 if now < SLOW * self._best else 0
        before = self._best
        if self._slow_blocks < 2:
            self._best = max(self._best, now)
            return None
        self._best, self._slow_blocks = now, 0  # this is what it is held against from here on
        return now, before
