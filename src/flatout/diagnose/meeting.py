"""Ranks that a launcher started meet, and each says what it is: device, versions, data, what it can read.

Contract: every rank calls `meet` with the same config. The first one gets a `Meeting`, also where they could not work
together; in the others an error goes on as it does in training. A file is written to the run's folder, or the nearest
one above it that exists, and removed again.
"""

import contextlib
import dataclasses
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.config.alike import shared_settings
from flatout.config.schema import ParallelConfig, RunConfig
from flatout.data.manifest import read_manifest
from flatout.data.prepare import data_folder, has_dataset
from flatout.device import detect_device
from flatout.diagnose.check_folder import RUNS, folder_of
from flatout.diagnose.doctor import Meeting, RankFacts, finding_of, first_line
from flatout.diagnose.links import nccl_version, shared_memory_bytes
from flatout.errors import UserError
from flatout.launch import Launch
from flatout.parallel.ranks import joined
from flatout.parallel.reducer import BUCKET_BYTES
from flatout.world import World

TELLING = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_REPEATS, _UNTIMED = 5, 2
_PATIENCE = 30.0  # seconds for the first all-reduce, in which NCCL also builds its connections
_SEEN_WITHIN = 3.0  # seconds: network folders show new files late


def meet(found: Launch, config: RunConfig | None) -> Meeting:
    """What all ranks say of themselves and of each other."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waits = ParallelConfig() if config is None else config.parallel
    device = "auto" if config is None else config.speed.device
    settings = None if config is None else shared_settings(config)
    timeout = min(waits.timeout, 2 * _PATIENCE)
    try:
        with joined(found, device, join=waits.join, timeout=timeout, settings=settings) as world:
            return dataclasses.replace(_asked(world, device, config), place=place)
    except UserError as error:
        if found.rank:
            raise
        return Meeting(place=place, refused=finding_of(error, "ranks", "meeting"))


def _asked(world: World, device: str, config: RunConfig | None) -> Meeting:
    facts: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "nccl": nccl_version(),
        "shared_memory_bytes": shared_memory_bytes(),
        "data": None if config is None else _data(config),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(TELLING)},
    }
    values: torch.Tensor | None = None
    try:
        detected = detect_device(device, world.local)
        facts["device"] = detected.name
        values = torch.empty(BUCKET_BYTES // 4, device=detected.torch_device)
    except (UserError, RuntimeError) as error:  # no GPU for this rank, or one that is broken or full
        facts["error"] = error.message if isinstance(error, UserError) else first_line(error)
    with _file_for_all(world, RUNS if config is None else folder_of(config)) as path:
        facts["unseen"] = "" if path == "" or _is_seen(path) else path
        world.totals([0])  # all have looked before the file goes
    backend = ""
    if world.size > 1 and not world.any(values is None):
        assert values is not None
        backend = "nccl" if values.is_cuda and "cuda:nccl" in str(dist.get_backend_config()) else "gloo"
        facts |= _reduced(world, values)
    ranks = [RankFacts(**one) for one in world.gather(facts)]
    folder = str(Path(path).parent) if path else ""
    return Meeting(place="", backend=backend, ranks=tuple(ranks), folder=folder, reduced_bytes=BUCKET_BYTES)


def _data(config: RunConfig) -> str | None:
    """The fingerprint of the prepared shards; None where there are none."""
    with contextlib.suppress(UserError):
        folder = None if config.data.streaming or config.chat.source is not None else data_folder(config.data)
        if folder is not None and has_dataset(folder):
            return read_manifest(folder).fingerprint
    return None


@contextlib.contextmanager
def _file_for_all(world: World, folder: Path) -> Iterator[str]:
    """A file that the first rank has written; empty where it cannot, which the checks of the disk tell."""
    with contextlib.ExitStack() as held:
        path = ""
        if world.first:
            # as the config has it: a relative path means the working folder of each rank, as in training
            nearest = next((place for place in (folder, *folder.parents) if place.is_dir()), Path())
            with contextlib.suppress(OSError):
                made = held.enter_context(tempfile.NamedTemporaryFile(dir=nearest, prefix=".flatout-doctor-"))
                path = str(nearest / Path(made.name).name)
        yield world.told(path)


def _is_seen(path: str) -> bool:
    until = time.monotonic() + _SEEN_WITHIN
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _reduced(world: World, values: torch.Tensor) -> dict[str, Any]:
    """The time of an all-reduce of `values`, or why there is none."""
    seconds: list[float] = []
    try:
        for number in range(_UNTIMED + _REPEATS):
            values.fill_(float(world.rank + 1))
            _settled(values.device)
            world.totals([0])
            began = time.perf_counter()
            work = dist.all_reduce(values, async_op=True)
            assert work is not None
            while number == 0 and not work.is_completed():
                if time.perf_counter() - began > _PATIENCE:
                    return {"reduce_error": f"it did not end within {_PATIENCE:.0f} s"}
                time.sleep(0.001)
            work.wait()
            _settled(values.device)
            seconds.append(time.perf_counter() - began)
        if not bool((values == world.size * (world.size + 1) / 2).all()):
            return {"reduce_error": "the sum is wrong"}
    except RuntimeError as error:
        return {"reduce_error": first_line(error)}
    return {"reduce_seconds": statistics.median(seconds[_UNTIMED:])}


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
