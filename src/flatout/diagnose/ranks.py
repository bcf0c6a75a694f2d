"""What ranks have: links between the GPUs of this host, NCCL, file systems, a port, and what ranks of a launcher say.

Contract: facts only; what nobody tells is None, or left out. Every rank calls `meet` with the same config. The first
one gets a `Meeting`, also where they could not work together; in the others an error goes on as it does in training. A
file is written to the run's folder, or the nearest one above it that exists, and removed again.
"""

import contextlib
import dataclasses
import itertools
import os
import platform
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flatout.config.alike import shared_settings
from flatout.config.load import LoadedConfig
from flatout.config.schema import ParallelConfig
from flatout.data.manifest import read_manifest
from flatout.data.prepare import data_folder, has_dataset
from flatout.device import detect_device
from flatout.diagnose.check_folder import RUNS, folder_of
from flatout.diagnose.doctor import Card, Link, Meeting, RankFacts, first_line
from flatout.errors import UserError
from flatout.finding import finding_of
from flatout.launch import Launch
from flatout.parallel.ranks import joined
from flatout.parallel.reducer import BUCKET_BYTES
from flatout.world import World

SHARED_MEMORY = "/dev/shm"
TORCHRUN_PORT = 29500
# NVML's levels of topology, in the words of what lies between two cards.
_WAYS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one processor",
    50: "the link between processors",
}


def read_links(cards: Sequence[Card]) -> tuple[Link, ...]:
    """A link for every pair of cards that torch sees."""
    links: tuple[Link, ...] = ()
    with contextlib.suppress(Exception):  # no package, or a driver that does not tell
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        try:
            links = links_of_nvml(pynvml, cards)
        finally:
            pynvml.nvmlShutdown()
    return links or _links_of_torch(len(cards))


def links_of_nvml(nvml: Any, cards: Sequence[Card]) -> tuple[Link, ...]:
    """The links between cards by an initialised NVML; none where a card has no UUID."""
    handles = [nvml.nvmlDeviceGetHandleByUUID(card.identity) for card in cards if card.identity]
    if len(handles) < len(cards):
        return ()

    def works(index: str, first: Any, second: Any) -> bool | None:
        with contextlib.suppress(Exception):
            status = nvml.nvmlDeviceGetP2PStatus(first, second, getattr(nvml, f"NVML_P2P_CAPS_INDEX_{index}"))
            return status == nvml.NVML_P2P_STATUS_OK
        return None

    links: list[Link] = []
    for one, two in itertools.combinations(range(len(handles)), 2):
        way = ""
        with contextlib.suppress(Exception):
            way = _WAYS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[two]), "")
        pair = handles[one], handles[two]
        links.append(Link(pair=(one, two), nvlink=works("NVLINK", *pair), peer=works("READ", *pair), way=way))
    return tuple(links)


def _links_of_torch(count: int) -> tuple[Link, ...]:
    """Whether pairs reach each other, which is all that torch tells."""
    with contextlib.suppress(Exception):
        pairs = itertools.combinations(range(count), 2)
        return tuple(Link(pair=pair, peer=torch.cuda.can_device_access_peer(*pair)) for pair in pairs)
    return ()


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where it has none."""
    with contextlib.suppress(Exception):
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            from torch.cuda import nccl

            return ".".join(str(part) for part in nccl.version())
    return None


def shared_memory_bytes() -> int | None:
    """The size of the memory that processes of this host share."""
    with contextlib.suppress(OSError, AttributeError):
        found = os.statvfs(SHARED_MEMORY)
        return found.f_frsize * found.f_blocks
    return None


def file_systems(folders: Mapping[str, str | Path]) -> dict[str, tuple[str, str]]:
    """Each folder with the kind of file system that it lies on, or will lie on."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return {}
    return {
        name: (str(folder), kind)
        for name, folder in folders.items()
        if (kind := mount_of(os.path.realpath(folder), text))
    }


def mount_of(path: str, text: str) -> str:
    """The file system of a real path by the text of a mountinfo file; the last of several mounts on one place."""
    longest, kind = "", ""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        place = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), (before.split() + [""] * 5)[4])
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if place and after and inside and len(place) >= len(longest):
            words = after.split()
            bucket = words[0] == "fuse" and len(words) > 1  # its source tells what it is
            longest, kind = place, f"fuse.{words[1]}" if bucket else words[0]
    return kind


def port_is_free(port: int) -> bool | None:
    """Whether a process could listen there; None where that cannot be tried."""
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", port))
            return True
    except PermissionError:
        return None
    except OSError:
        return False


def network_interfaces() -> tuple[str, ...]:
    with contextlib.suppress(OSError, AttributeError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


# --- ranks that a launcher started ------------------------------------------------------------------------------------

TELLING = ("NCCL_", "GLOO_", "TORCH_NCCL_")
_REPEATS, _UNTIMED = 5, 2
_PATIENCE = 30.0  # seconds for the first all-reduce, in which NCCL also builds its connections
_SEEN_WITHIN = 3.0  # seconds: network folders show new files late


def meet(found: Launch, loaded: LoadedConfig | None) -> Meeting:
    """What all ranks say of themselves and of each other."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waits = ParallelConfig() if loaded is None else loaded.config.parallel
    device = "auto" if loaded is None else loaded.config.speed.device
    settings = None if loaded is None else shared_settings(loaded)
    timeout = min(waits.timeout, 2 * _PATIENCE)
    try:
        with joined(found, device, timeout=timeout, settings=settings) as world:
            return dataclasses.replace(_asked(world, device, loaded), place=place)
    except UserError as error:
        if found.rank:
            raise
        return Meeting(place=place, refused=finding_of(error, "ranks", "meeting"))


def _asked(world: World, device: str, loaded: LoadedConfig | None) -> Meeting:
    asked = None if loaded is None else loaded.config
    facts: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "nccl": nccl_version(),
        "shared_memory_bytes": shared_memory_bytes(),
        "data": None if loaded is None else _data(loaded),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(TELLING)},
    }
    values: torch.Tensor | None = None
    try:
        detected = detect_device(device, world.local)
        facts["device"] = detected.name
        values = torch.empty(BUCKET_BYTES // 4, device=detected.torch_device)
    except (UserError, RuntimeError) as error:  # no GPU for this rank, or one that is broken or full
        facts["error"] = error.message if isinstance(error, UserError) else first_line(error)
    with _file_for_all(world, RUNS if asked is None else folder_of(asked.output)) as path:
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


def _data(loaded: LoadedConfig) -> str | None:
    """The fingerprint of the prepared shards; None where there are none."""
    with contextlib.suppress(UserError):
        if loaded.config.data_kind == "text" and has_dataset(folder := data_folder(loaded.config.data)):
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
        yield world.broadcast(path)


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
