"""The disk a run writes to: whether it may, how fast it is, and whether what the config keeps fits on it.

`measure_disk` writes a temporary file that has no name where the system allows that, so nothing is left behind even
when the process is killed. The trap: a file that was just written is read from the system's cache; the pages are
dropped first where that can be asked for, and elsewhere the rate is left out rather than told wrongly.
"""

import dataclasses
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.diagnose.doctor import Check, DataFacts, Disk, Finding, in_gib

_check = functools.partial(Check, "disk")

_CHUNK = 2**22
_SLOW = 50e6  # bytes per second; an ordinary hard disk gives more
_SECONDS = 0.6


def measure_disk(folder: Path, *, quick: bool = False) -> Disk:
    """Looks at the disk of `folder`, which need not exist yet."""
    nearest = _nearest(folder)
    disk = Disk(folder=str(folder), nearest=str(nearest))
    if not nearest.is_dir():
        return dataclasses.replace(disk, error=f"{nearest} is a file, not a folder")
    try:
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return dataclasses.replace(disk, error=f"{nearest}: {error.strerror or error}")
    size = min((8 if quick else 64) * 2**20, max(0, free // 8))
    try:
        write, read = _rates(nearest, size)
    except OSError as error:
        return dataclasses.replace(disk, free_bytes=free, error=f"{nearest}: {error.strerror or error}")
    return dataclasses.replace(disk, free_bytes=free, write_rate=write, read_rate=read)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = Path(os.path.abspath(folder))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _rates(nearest: Path, size: int) -> tuple[float | None, float | None]:
    """Bytes per second written and on the disk, and read back; raises OSError where nothing can be written."""
    chunk = os.urandom(2**20) * (_CHUNK // 2**20)  # not zeros, which some disks do not even store
    with tempfile.TemporaryFile(dir=nearest, prefix=".flatout-doctor-") as file:
        number, written = file.fileno(), 0
        started = time.perf_counter()
        while written < size and time.perf_counter() - started < _SECONDS:
            file.write(chunk)
            written += len(chunk)
        if written == 0:
            file.write(b"1")  # at least whether it may be written
            file.flush()
            return None, None
        file.flush()
        os.fsync(number)
        write = written / (time.perf_counter() - started)
        if not hasattr(os, "posix_fadvise"):
            return write, None
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(_CHUNK):
            if time.perf_counter() - started > _SECONDS:
                break
        return write, file.tell() / (time.perf_counter() - started)


def check_disk(disk: Disk, config: RunConfig | None, parameters: int | None, data: DataFacts) -> Iterator[Finding]:
    """Room, rights and speed of the disk; with a config, against the checkpoints it keeps."""
    if disk.error:
        yield _check("writable").bad(
            f"the run's folder {disk.folder} cannot be written: {disk.error}",
            "Set output.folder to a folder that you may write to, or make this one writable.",
        )
    if disk.free_bytes is not None:
        yield _space(disk, disk.free_bytes, config, parameters, data)
    if disk.write_rate is not None:
        yield _speed(disk, disk.write_rate)


def _space(disk: Disk, free: int, config: RunConfig | None, parameters: int | None, data: DataFacts) -> Finding:
    if config is None or parameters is None:
        low = free < 2**30
        advice = "A run writes checkpoints of 12 bytes for each parameter. Free some space." if low else ""
        return _check("space").told("warn" if low else "ok", f"{in_gib(free)} free at {disk.nearest}", advice)
    # Those it keeps, the best one, and the one being written before an old one is removed.
    from flatout.engine.trained import checkpoint_size  # the doctor starts without torch

    count, one = config.checkpoint.keep + 2, checkpoint_size(parameters, config, config.speed)
    need = count * one
    shards = data.to_prepare_bytes or 0
    for_shards = f", and the shards of the text about {in_gib(shards)}" if shards > 0.05 * need + 2**28 else ""
    size = in_gib(need) if need >= 0.1 * 2**30 else f"{need / 2**20:.0f} MiB"
    found = f"{in_gib(free)} free at {disk.nearest}; up to {count} checkpoints need {size}{for_shards}"
    if free < need + shards:
        fits = max(0, int((free - shards) // one) - 2)
        keep = f" With checkpoint.keep={fits} it would fit." if fits >= 1 else ""
        return _check("space").bad(
            found, f"The run would end with a full disk. Free some space, or set output.folder to another disk.{keep}"
        )
    if free < 2 * (need + shards):
        return _check("space").warn(
            found, "It fits, with little to spare for anybody else. Free some space before a long run."
        )
    return _check("space").ok(found)


def _speed(disk: Disk, write_rate: float) -> Finding:
    read = "" if disk.read_rate is None else f", reads {disk.read_rate / 1e6:.0f} MB/s"
    found = f"writes {write_rate / 1e6:.0f} MB/s{read}"
    if write_rate < _SLOW:
        return _check("speed").warn(
            found,
            "That is slow, perhaps a network folder: the run waits while a checkpoint is written. Set output.folder to "
            "a local disk, or save less often with checkpoint.every.",
        )
    return _check("speed").ok(found)
