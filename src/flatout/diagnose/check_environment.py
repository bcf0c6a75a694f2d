"""Variables of the environment that slow a run down, hide a GPU or change what torch does; optional packages.

Most runs that are mysteriously slow have one of these set by somebody, years ago, in a shell profile.
Everything here judges a `Machine` and touches nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flatout.config.schema import CleanConfig, DataConfig
from flatout.corpus.document import INSTALL
from flatout.diagnose.machine import Machine
from flatout.finding import Check, Finding, Status, sentence

_check = functools.partial(Check, "environment")


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _is_set(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


class Meaning(NamedTuple):
    """What a variable does, and for which values that matters; `{name}` in the advice is the variable."""

    status: Status
    advice: str
    matters: Callable[[str], bool] = _is_on


# Variables of torch, CUDA and Python.
_ANYWHERE = {
    "TORCHDYNAMO_DISABLE": Meaning(
        "warn", "torch.compile then does nothing, in silence. `unset {name}` if you want it."
    ),
    "TORCH_LOGS": Meaning(
        "note",
        "torch writes logs to the terminal, which costs time and hides what a run says. `unset {name}` if you do not "
        "read them.",
        _is_set,
    ),
}
_ON_GPUS = {
    "CUDA_LAUNCH_BLOCKING": Meaning(
        "warn",
        "The host then waits for every single kernel, and training is several times slower. It is for finding faults "
        "only: `unset {name}`.",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Meaning("warn", "Every allocation then waits for the driver. `unset {name}`."),
    "TRITON_INTERPRET": Meaning(
        "warn", "Triton kernels then run in Python, thousands of times slower. `unset {name}`."
    ),
    "NVIDIA_TF32_OVERRIDE": Meaning(
        "warn",
        "It forbids TF32 to every library, whatever speed.precision says. `unset {name}`.",
        lambda value: value.strip() == "0",
    ),
    "LD_LIBRARY_PATH": Meaning(
        "note",
        "It names CUDA libraries, which are then found before those that torch brings along. If torch fails with a "
        "missing symbol or a version of cuDNN, unset it.",
        lambda value: "cuda" in value.lower() or "cudnn" in value.lower(),
    ),
}
# Those of NCCL and torch.distributed are set for one cluster in a script, and go along to the next.
_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG")
_SLOWER = Meaning(
    "note", "NCCL chooses by itself what is fastest here. `unset {name}` unless you have measured it.", _is_set
)
_OF_RANKS = {
    "NCCL_P2P_DISABLE": Meaning("warn", "GPUs then send through the host, several times slower. Unset it.", _is_set),
    "NCCL_SHM_DISABLE": Meaning("warn", "Processes of a host then send through the network. Unset it.", _is_set),
    "NCCL_P2P_LEVEL": Meaning(
        "warn", "It forbids GPUs to read each other. Unset it.", lambda value: value in ("0", "LOC")
    ),
    "NCCL_DEBUG": Meaning(
        "note", "NCCL writes many lines at the start.", lambda value: value.upper() in ("INFO", "TRACE")
    ),
    **dict.fromkeys(
        ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE"), _SLOWER
    ),
    "TORCH_NCCL_BLOCKING_WAIT": Meaning(
        "warn",
        "The host then waits for every collective, and nothing overlaps. It is for finding faults: unset it.",
        _is_set,
    ),
    _BY_TORCHRUN: Meaning(
        "warn",
        "A rank that is lost then leaves the others waiting forever. Unset it.",
        lambda value: value.strip() == "0",
    ),
    "TORCH_DISTRIBUTED_DEBUG": Meaning(
        "warn",
        "Every collective is then compared between all ranks first, which is slow. Unset it.",
        lambda value: value.upper() == "DETAIL",
    ),
}


def _meanings(area: str, known: Mapping[str, Meaning], environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, one in known.items():
        value = environment.get(name)
        if value is not None and one.matters(value):
            yield Check(area, name).finding(one.status, f"{_shown(name, value)} is set", one.advice.format(name=name))


def check_environment(machine: Machine, data: DataConfig | None, kind: str) -> Iterator[Finding]:
    """Variables that matter here; `kind` is that of the device a run would use."""
    found = [
        *_meanings("environment", _ANYWHERE | (_ON_GPUS if kind == "cuda" else {}), machine.environment),
        *filter(None, (_hiding(machine), _allocator(machine) if kind == "cuda" else None)),
        *_threads(machine, kind),
        *_offline(machine, [] if data is None else source_paths(data)),
    ]
    yield from found or [_check("variables").ok("none that slows a run down or hides something")]


def _shown(name: str, value: str) -> str:
    return f"{name}={value if len(value) <= 60 else value[:57] + '...'}"


def _hiding(machine: Machine) -> Finding | None:
    value, check = machine.environment.get("CUDA_VISIBLE_DEVICES"), _check("CUDA_VISIBLE_DEVICES")
    if value is None or not machine.cards:
        return None
    if value.strip().lower() in ("", "-1", "nodevfiles"):
        return check.warn(
            f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU, and there is a {machine.cards[0].name}",
            "Training would run on the CPU. `unset CUDA_VISIBLE_DEVICES`, or set it to a card's number, such as 0.",
        )
    return check.note(
        f"{_shown('CUDA_VISIBLE_DEVICES', value)} limits which cards are seen",
        "Their numbers begin at 0 again: speed.device=cuda:0 is the first one named there.",
    )


def _allocator(machine: Machine) -> Finding | None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    set_here = [_shown(name, machine.environment[name]) for name in names if machine.environment.get(name)]
    shown, check = " and ".join(set_here), _check("allocator")
    if not set_here:
        return None
    if len(set_here) == 2:
        return check.warn(
            f"both are set: {shown}",
            "They are two names of one setting, and one of them is not heeded. Keep PYTORCH_ALLOC_CONF.",
        )
    if not any("expandable_segments:true" in machine.environment.get(name, "").lower() for name in names):
        return check.note(
            f"{shown} is set",
            "Flatout then leaves torch's allocator alone, and its memory blocks do not grow (speed.expandable_segments "
            "has no effect). Unset it, or add expandable_segments:True to it, if a run dies of fragmentation.",
        )
    return check.ok(f"{shown} is set, with expandable segments")


def _threads(machine: Machine, kind: str) -> Iterator[Finding]:
    usable = max(1, int(machine.usable_cores))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = machine.environment.get(name, "").split(",")[0].strip()
        if not value.isdigit():
            continue
        count = int(value)
        if count > usable:
            yield _check(name).warn(
                f"{name}={count}, and {machine.usable_cores:g} cores may be used",
                f"More threads than cores wait for one another, and torch can be many times slower. Set "
                f"{name}={usable}, or unset it.",
            )
        elif count == 1 and kind == "cpu" and usable >= 4:
            yield _check(name).warn(
                f"{name}=1, and {usable} cores may be used",
                f"Training on the CPU then uses a single core. Unset {name}, or set it to {usable}.",
            )


def _offline(machine: Machine, sources: Sequence[str]) -> Iterator[Finding]:
    if not any(path.startswith("hf:") for path in sources):
        return
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if _is_on(machine.environment.get(name, "")):
            yield _check(name).warn(
                f"{name}=1, and data.source names a dataset of the Hugging Face hub",
                f"Only what lies in its cache can be read. `unset {name}` to let it be downloaded.",
            )


# --- several ranks ----------------------------------------------------------------------------------------------------


def check_nccl(environment: Mapping[str, str], interfaces: Sequence[str], hosts: int) -> Iterator[Finding]:
    """Variables that hurt ranks on this number of hosts, each with what it does; the rest in one line.

    `interfaces` are those of this host.
    """
    set_here = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    slow = "Hosts then talk by TCP, also where there is InfiniBand or RoCE, which is many times faster."
    no_infiniband = {"NCCL_IB_DISABLE": Meaning("warn" if hosts > 1 else "note", slow, _is_set)}
    found = list(_meanings("ranks", _OF_RANKS | no_infiniband, set_here))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        found += filter(None, [_interface(name, set_here.get(name, ""), interfaces, hosts)])
    yield from found
    told = {_BY_TORCHRUN, *(one.name for one in found)}
    rest = [f"{name}={value}" for name, value in sorted(set_here.items()) if name not in told]
    if rest or not found:
        yield Check("ranks", "variables").ok(f"set: {' '.join(rest)}" if rest else "none of NCCL or gloo is set")


def _interface(name: str, value: str, interfaces: Sequence[str], hosts: int) -> Finding | None:
    """An interface that this host does not have; NCCL takes beginnings of names, gloo whole ones."""
    words = [word for word in value.removeprefix("=").split(",") if word]
    if not words or value.startswith("^") or not interfaces:
        return None
    exact, check = name.startswith("GLOO_") or value.startswith("="), Check("ranks", name)
    found = [here for here in interfaces if any(here == word if exact else here.startswith(word) for word in words)]
    if not found:
        have = f"This host has {', '.join(interfaces)}. Set it to one of them, or unset it."
        return check.bad(f"{name}={value}, and this host has no such interface", f"Ranks cannot connect. {have}")
    if found == ["lo"] and hosts > 1:
        return check.bad(f"{name}={value} is this host alone", "Name the interface that other hosts reach.")
    return None


# --- packages ---------------------------------------------------------------------------------------------------------


def source_paths(data: DataConfig) -> list[str]:
    listed = data.source if isinstance(data.source, list) else [] if data.source is None else [data.source]
    paths = [item if isinstance(item, str) else item.path for item in listed]
    return paths + ([] if data.val_source is None else [data.val_source])


def check_packages(machine: Machine, clean: CleanConfig, formats: Iterable[str]) -> Iterator[Finding]:
    """Whether the optional packages are there that a run's text needs.

    `formats` are those of the source's files, with `zst` for files that are compressed so.
    """
    needed: dict[str, str] = {}
    for form in formats:
        for package in _PACKAGES_OF.get(form, ()):
            needed.setdefault(package, f"reading {'.zst' if form == 'zst' else form} files")
    if clean.languages is not None:
        needed.setdefault("resiliparse", "clean.languages")
    if "near_duplicates" in clean.drop:
        needed.setdefault("rensa", "clean.drop=[near_duplicates]")
    for package, user in needed.items():
        yield _package("data", machine, package, user, INSTALL)


_PACKAGES_OF: Mapping[str, tuple[str, ...]] = {
    "parquet": ("pyarrow",),
    "hub": ("datasets",),
    "warc": ("fastwarc", "resiliparse"),
    "zst": ("zstandard",),
}


def check_tracker_packages(machine: Machine, trackers: Sequence[str]) -> Iterator[Finding]:
    """Whether the trackers of output.trackers can be used. TensorBoard's files are written without its package."""
    for name in trackers:
        if name == "tensorboard" and machine.packages.get(name) is None:
            yield Check("config", "packages").note(
                "output.trackers names tensorboard, which is not installed",
                "Its files are written all the same. `pip install tensorboard` to look at them.",
            )
        else:
            install = f"`pip install {name}`, or take it out of output.trackers; metrics.jsonl is written anyway"
            yield _package("config", machine, name, f"output.trackers={name}", install)


def _package(area: str, machine: Machine, module: str, user: str, install: str) -> Finding:
    package, version = module.partition(".")[0], machine.packages.get(module)
    if version is None:
        found = f"{user} needs the package {package}, which is not installed"
        return Check(area, "packages").bad(found, sentence(install))
    return Check(area, "packages").ok(f"{package} {version} is there for {user}")
