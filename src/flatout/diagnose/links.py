"""What this host has for several ranks: links between its GPUs, NCCL, shared memory, file systems, a port.

The contract: facts only, and nothing here raises. What nobody tells is None, or left out.
"""

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.diagnose.doctor import Card, Link

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
        import torch

        pairs = itertools.combinations(range(count), 2)
        return tuple(Link(pair=pair, peer=torch.cuda.can_device_access_peer(*pair)) for pair in pairs)
    return ()


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where it has none."""
    with contextlib.suppress(Exception):
        import torch

        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            from torch.cuda import nccl

            return ".".join(str(part) for part in nccl.version())
    return None


def has_distributed() -> bool:
    with contextlib.suppress(Exception):
        import torch

        return torch.distributed.is_available()
    return False


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
