"""What the operating system tells of this host. No torch here: the doctor asks too."""

import contextlib
import os
import re
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
