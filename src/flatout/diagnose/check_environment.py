"""Variables of the environment that slow a run down or change what torch does, and optional packages.

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


_ALLOCATOR = Meaning(
    "note",
    "Flatout then leaves torch's allocator alone, and its memory blocks do not grow (speed.expandable_segments has no "
    "effect). Unset {name}, or add expandable_segments:True to it, if a run dies of fragmentation.",
    lambda value: value != "" and "expandable_segments:true" not in value.lower(),
)
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
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
}
# Those of NCCL and torch.distributed are set for one cluster in a script, and go along to the next.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_DEBUG")
_OF_RANKS = {
    "NCCL_P2P_DISABLE": Meaning("warn", "GPUs then send through the host, several times slower. Unset it.", _is_set),
    "NCCL_SHM_DISABLE": Meaning("warn", "Processes of a host then send through the network. Unset it.", _is_set),
    "NCCL_IB_DISABLE": Meaning(
        "note", "Hosts then talk by TCP, also where there is InfiniBand or RoCE, which is many times faster.", _is_set
    ),
    "TORCH_NCCL_BLOCKING_WAIT": Meaning(
        "warn",
        "The host then waits for every collective, and nothing overlaps. It is for finding faults: unset it.",
        _is_set,
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Meaning(
        "warn",
        "When one rank is lost, the others then wait forever. Unset it.",
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


def check_environment(machine: Machine, kind: str) -> Iterator[Finding]:
    """Variables that matter here; `kind` is that of the device a run would use."""
    found = list(_meanings("environment", _ANYWHERE | (_ON_GPUS if kind == "cuda" else {}), machine.environment))
    yield from found or [_check("variables").ok("none that slows a run down or hides something")]


def _shown(name: str, value: str) -> str:
    return f"{name}={value if len(value) <= 60 else value[:57] + '...'}"


def check_nccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that hurt several ranks, each with what it does; the rest in one line."""
    set_here = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    found = list(_meanings("ranks", _OF_RANKS, set_here))
    yield from found
    harmful = {one.name for one in found}
    rest = [f"{name}={value}" for name, value in sorted(set_here.items()) if name not in harmful]
    if rest or not found:
        yield Check("ranks", "variables").ok(f"set: {' '.join(rest)}" if rest else "none of NCCL or gloo is set")


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
        if name != "tensorboard":
            install = f"`pip install {name}`, or take it out of output.trackers; metrics.jsonl is written anyway"
            yield _package("config", machine, name, f"output.trackers={name}", install)


def _package(area: str, machine: Machine, module: str, user: str, install: str) -> Finding:
    package, version = module.partition(".")[0], machine.packages.get(module)
    if version is None:
        found = f"{user} needs the package {package}, which is not installed"
        return Check(area, "packages").bad(found, sentence(install))
    return Check(area, "packages").ok(f"{package} {version} is there for {user}")
