"""This host: its memory, its cores, and who uses them.

What the operating system reports about this host. No torch here: the doctor asks too.

Processor cores: how many there are, who uses them, and with how many threads a piece of work is fastest.

No torch here: the doctor asks, too. Values that the system does not report are None; only Linux reports all of them.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


def host_memory() -> tuple[int | None, int | None]:
    """(bytes available, bytes in all) of the host, or of the container if that has less."""
    sizes = _sizes("/proc/meminfo")
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total is None:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = first_line_of("/sys/fs/cgroup/memory.max"), first_line_of("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and total is not None and int(limit) < total:
        total = int(limit)
        left = total - int(used) + _cached() if used.isdigit() else total
        available = left if available is None else min(available, max(0, left))
    return available, total


def swap_bytes() -> int | None:
    """Bytes of the host's memory that lie on its disk."""
    sizes = _sizes("/proc/meminfo")
    total, free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    return None if total is None or free is None else max(0, total - free)


def process_bytes() -> int | None:
    """Bytes that this process has allocated and uses. Files that it has mapped are left out: they can be dropped."""
    return _sizes("/proc/self/status").get("RssAnon")


def _sizes(path: str) -> dict[str, int]:
    """Bytes by name, of a file of the system that has `Name: 123 kB`."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="ascii", errors="replace")
        return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {}


def _cached() -> int:
    """Bytes of files that a container's account holds and gives back when asked."""
    with contextlib.suppress(OSError):
        text = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii", errors="replace")
        found = re.search(r"^file (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def first_line_of(path: str) -> str:
    """The first line of a small file of the system; empty where there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


LIKE_THE_BEST = 1.05  # up to this many times the best time counts as equal: fewer threads have fewer cores to wait for
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which torch counts its threads when it starts


def thread_words() -> str | None:
    """The variable with which the user sets torch's number of threads, as NAME=VALUE."""
    return next((f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if os.environ.get(name)), None)


def usable_cores() -> float:
    """The cores this process may use: of its affinity and of its container's quota, the less."""
    cores, quota = float(len(_processors())), _container_quota()
    return cores if quota is None else max(0.1, min(cores, quota))


def whole_cores() -> int:
    """The physical cores this process may use: two hardware threads of one core share its arithmetic."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {first_line_of(topology.format(number)) or str(number) for number in _processors()}
    return max(1, int(min(len(siblings), usable_cores())))


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _container_quota() -> float | None:
    quota = _quota(first_line_of("/sys/fs/cgroup/cpu.max"))
    if quota is None:
        group = "/sys/fs/cgroup/cpu"
        parts = [first_line_of(f"{group}/cpu.cfs_quota_us"), first_line_of(f"{group}/cpu.cfs_period_us")]
        quota = _quota(" ".join(parts))
    return quota


def _quota(text: str) -> float | None:
    """Cores in `QUOTA PERIOD` of a control group; None where there is no limit."""
    found = re.fullmatch(r"(\d+) (\d+)", text.strip())
    return None if found is None or int(found[2]) == 0 else int(found[1]) / int(found[2])


# --- who uses them ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreClock:
    """Seconds counted so far, to be compared with a later reading."""

    now: float
    own: float  # of this process on cores, and of those that it started
    busy: float | None  # of all processes on the cores that this process may use
    waited: float | None  # of this process's threads, ready to run, for a core


@dataclasses.dataclass(frozen=True)
class CoreUse:
    """What cores did between two readings, in cores: 1.5 of others is one and a half cores that they kept busy."""

    busy: float | None
    others: float | None
    waiting: float | None  # threads of this process that waited for a core, on average


def core_clock() -> CoreClock:
    """A reading; takes a millisecond or so, by the number of threads."""
    return CoreClock(now=time.monotonic(), own=_own_seconds(), busy=_busy_seconds(), waited=_waited_seconds())


def core_use(before: CoreClock, after: CoreClock) -> CoreUse | None:
    """None where the readings are too close to each other: the system counts in hundredths of a second."""
    elapsed = after.now - before.now
    if elapsed < 0.05:
        return None
    busy = others = waiting = None
    if before.busy is not None and after.busy is not None:
        busy = max(0.0, after.busy - before.busy) / elapsed
        others = max(0.0, busy - (after.own - before.own) / elapsed)
    if before.waited is not None and after.waited is not None:  # threads that have ended take their seconds along
        waiting = max(0.0, after.waited - before.waited) / elapsed
    return CoreUse(busy, others, waiting)


def _own_seconds() -> float:
    """Of this process and all below it: a run's readers, its compiler and its writer are no others."""
    times = os.times()
    ticks = 0
    for process in _descendants("self"):
        fields = first_line_of(f"/proc/{process}/stat").rpartition(")")[2].split()  # a name may hold anything
        # As a user and in the kernel, with children that have ended.
        ticks += sum(int(field) for field in fields[11:15] if field.isdigit())
    ended = times.children_user + times.children_system
    return time.process_time() + ended + (ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0)


def _descendants(process: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            for child in first_line_of(f"/proc/{process}/task/{task}/children").split():
                yield child
                yield from _descendants(child)


def _busy_seconds() -> float | None:
    quota = _container_quota()
    if quota is not None and quota < len(_processors()):
        return _container_seconds()  # what the host does beyond the quota takes nothing away
    with contextlib.suppress(OSError, ValueError):
        rows = re.findall(r"^cpu(\d+) (.*)$", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
        here = _processors()
        # user nice system idle iowait irq softirq steal; guests are counted in the first two, too
        counts = [[int(count) for count in row.split()[:8]] for number, row in rows if int(number) in here]
        if counts:
            ticks = sum(sum(row) - sum(row[3:5]) for row in counts)
            return ticks / os.sysconf("SC_CLK_TCK")
    return None


def _container_seconds() -> float | None:
    """Of all processes of this container."""
    for file, unit in (("cpu.stat", 1e6), ("cpuacct/cpuacct.usage", 1e9)):
        found = re.fullmatch(r"(?:usage_usec )?(\d+)", first_line_of(f"/sys/fs/cgroup/{file}").strip())
        if found is not None:
            return int(found[1]) / unit
    return None


def _waited_seconds() -> float | None:
    total, seen = 0, False
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            fields = first_line_of(f"/proc/self/task/{task}/schedstat").split()  # of one that has just ended: nothing
            if len(fields) == 3 and fields[1].isdigit():
                total, seen = total + int(fields[1]), True
    return total / 1e9 if seen else None


def load_average() -> float | None:
    """Processes that ran or waited for a core, as a mean over the last minute."""
    with contextlib.suppress(OSError, AttributeError):  # not on Windows
        return os.getloadavg()[0]
    return None


# --- how many threads -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadTrial:
    """The median seconds of a piece of training by number of threads, and what others used of the cores meanwhile."""

    seconds: Mapping[int, float]
    cores: int
    others: float | None = None

    @property
    def most(self) -> int:
        """Threads that find a core each: with more, some wait for others, and all for them."""
        return max(1, round(self.cores - (self.others or 0.0)))

    @property
    def chosen(self) -> int:
        allowed = {count: seconds for count, seconds in self.seconds.items() if count <= self.most}
        best = min(allowed.values())
        return min(count for count, seconds in allowed.items() if seconds <= LIKE_THE_BEST * best)

    @property
    def busy(self) -> bool:
        """Whether others leave less than all cores to this process."""
        return self.most < self.cores

    @property
    def why(self) -> str:
        if self.busy:
            return f"others use {self.others:.1f} of {self.cores} cores; speed.threads={self.cores} takes all of them"
        return f"the fastest of {', '.join(str(count) for count in sorted(self.seconds))} in a trial"


def candidates(cores: int) -> list[int]:
    """Numbers of threads that are worth trying: 1, 2, 4 ... and all cores."""
    return sorted({min(2**power, cores) for power in range(cores.bit_length() + 1)})
