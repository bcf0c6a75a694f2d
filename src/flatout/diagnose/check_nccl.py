"""Variables of NCCL, gloo and torch.distributed that are set: what they do, where that is known to hurt.

They are set for one cluster in a script, and go along to the next. Everything here judges facts and touches nothing.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

from flatout.diagnose.doctor import Check, Finding, Several, Status

_check = functools.partial(Check, "ranks")

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG")


def _on(value: str) -> bool:
    return value.strip() not in ("", "0")


_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SLOWER = "NCCL chooses by itself what is fastest here. `unset {name}` unless you have measured it."
# A variable, when it matters, how much, and what it does.
_RULES: tuple[tuple[str, Callable[[str], bool], Status, str], ...] = (
    ("NCCL_P2P_DISABLE", _on, "warn", "GPUs then send through the host's memory, several times slower. Unset it."),
    ("NCCL_SHM_DISABLE", _on, "warn", "Processes of a host then send through the network. Unset it."),
    ("NCCL_P2P_LEVEL", lambda value: value in ("0", "LOC"), "warn", "It forbids GPUs to read each other. Unset it."),
    ("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "note", "NCCL writes many lines at the start."),
    ("NCCL_ALGO", _on, "note", _SLOWER),
    ("NCCL_PROTO", _on, "note", _SLOWER),
    ("NCCL_MAX_NCHANNELS", _on, "note", _SLOWER),
    ("NCCL_MAX_CTAS", _on, "note", _SLOWER),
    ("NCCL_NTHREADS", _on, "note", _SLOWER),
    ("NCCL_BUFFSIZE", _on, "note", _SLOWER),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        _on,
        "warn",
        "The host then waits for every collective, and nothing overlaps. It is for finding faults: unset it.",
    ),
    (
        _BY_TORCHRUN,
        lambda value: value.strip() == "0",
        "warn",
        "A rank that is lost then leaves the others waiting forever. Unset it.",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        "warn",
        "Every collective is then compared between all ranks first, which is slow. Unset it.",
    ),
)


def check_nccl(several: Several, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that hurt, each with what it does; the rest in one line."""
    set_here = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    told: set[str] = set()
    for name, matters, status, advice in _RULES:
        if name in set_here and matters(set_here[name]):
            told.add(name)
            yield _check(name).told(status, f"{name}={set_here[name]} is set", advice.format(name=name))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        finding = _interface(several, name, set_here.get(name, ""))
        if finding is not None:
            told.add(name)
            yield finding
    if _on(set_here.get("NCCL_IB_DISABLE", "")):
        told.add("NCCL_IB_DISABLE")
        yield _check("NCCL_IB_DISABLE").told(
            "warn" if several.hosts > 1 else "note",
            f"NCCL_IB_DISABLE={set_here['NCCL_IB_DISABLE']} is set",
            "Hosts then talk by TCP, also where there is InfiniBand or RoCE, which is many times faster.",
        )
    rest = [f"{name}={value}" for name, value in sorted(set_here.items()) if name not in told and name != _BY_TORCHRUN]
    if rest or not told:
        yield _check("variables").ok(f"set: {' '.join(rest)}" if rest else "none of NCCL or gloo is set")


def _interface(several: Several, name: str, value: str) -> Finding | None:
    """An interface that this host does not have; NCCL takes beginnings of names, gloo whole ones."""
    words = [word for word in value.removeprefix("=").split(",") if word]
    if not words or value.startswith("^") or not several.interfaces:
        return None
    exact = name.startswith("GLOO_") or value.startswith("=")
    found = [
        here
        for here in several.interfaces
        if any(here == word or (not exact and here.startswith(word)) for word in words)
    ]
    if not found:
        advice = (
            f"Ranks cannot connect. This host has {', '.join(several.interfaces)}. Set it to one of them, or unset it."
        )
        return _check(name).bad(f"{name}={value}, and this host has no such interface", advice)
    if found == ["lo"] and several.hosts > 1:
        return _check(name).bad(f"{name}={value} is this host alone", "Name the interface that other hosts reach.")
    return None
