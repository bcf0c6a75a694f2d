"""Variables of the environment that slow a run down, hide a GPU or change what torch does; optional packages.

Most runs that are mysteriously slow have one of these set by somebody, years ago, in a shell profile.
Everything here judges a `Machine` and touches nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from flatout.config.schema import RunConfig
from flatout.corpus.document import INSTALL
from flatout.diagnose.doctor import Check, Finding, Machine, Status, sentence

_check = functools.partial(Check, "environment")


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _is_set(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


# What variables do that are on, by how much it matters.
_VARIABLES: dict[Status, dict[str, str]] = {
    "warn": {
        "CUDA_LAUNCH_BLOCKING": "The host then waits for every single kernel, and training is several times slower. It "
        "is for finding faults only: `unset CUDA_LAUNCH_BLOCKING`.",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "Every allocation then goes to the driver and waits. `unset "
        "PYTORCH_NO_CUDA_MEMORY_CACHING`.",
        "TRITON_INTERPRET": "Triton kernels then run in Python, thousands of times slower. `unset TRITON_INTERPRET`.",
        "NVIDIA_TF32_OVERRIDE": "It forbids TF32 to every library, whatever speed.precision says. `unset "
        "NVIDIA_TF32_OVERRIDE`.",
        "TORCHDYNAMO_DISABLE": "torch.compile then does nothing, in silence. `unset TORCHDYNAMO_DISABLE` if you want "
        "it.",
        "TORCH_COMPILE_DEBUG": "Every compilation then writes folders of traces. `unset TORCH_COMPILE_DEBUG`.",
    },
    "note": {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "Compiled code is not kept, so every run compiles anew.",
        "TORCH_LOGS": "torch writes logs to the terminal, which costs time and hides what a run says. `unset "
        "TORCH_LOGS` if you do not read them.",
        "PYTHONDEVMODE": "Python's development mode checks every allocation and slows the host down.",
        "CUBLAS_WORKSPACE_CONFIG": "It limits cuBLAS to a fixed workspace. Deterministic runs need that and set it "
        "themselves; others can be slower with it.",
        "LD_PRELOAD": "A library is loaded before all others. That is fine for a faster allocator; anything else can "
        "clash with torch's own libraries.",
        "LD_LIBRARY_PATH": "It names CUDA libraries, which are then found before those that torch brings along. If "
        "torch fails with a missing symbol or a version of cuDNN, unset it.",
    },
}
# Those that matter by another rule than being on, and those that matter on a GPU only.
_WHEN: dict[str, Callable[[str], bool]] = {
    "NVIDIA_TF32_OVERRIDE": lambda value: value.strip() == "0",
    **dict.fromkeys(("TORCH_LOGS", "CUBLAS_WORKSPACE_CONFIG", "LD_PRELOAD"), _is_set),
    "LD_LIBRARY_PATH": lambda value: "cuda" in value.lower() or "cudnn" in value.lower(),
}
_ON_GPUS = ("CUDA_", "PYTORCH_NO_CUDA", "TRITON_", "NVIDIA_", "CUBLAS_", "LD_LIBRARY_PATH")


def check_environment(machine: Machine, config: RunConfig | None, kind: str) -> Iterator[Finding]:
    """Variables that matter here; `kind` is that of the device a run would use."""
    told = [
        *_rules(machine, kind),
        *filter(None, (_hiding(machine), _allocator(machine, kind))),
        *_threads(machine, kind),
        *_offline(machine, config),
    ]
    if not told:
        yield _check("variables").ok("none that slows a run down or hides something")
    yield from told


def _shown(name: str, value: str) -> str:
    return f"{name}={value if len(value) <= 60 else value[:57] + '...'}"


def _rules(machine: Machine, kind: str) -> Iterator[Finding]:
    for status, variables in _VARIABLES.items():
        for name, advice in variables.items():
            value = machine.environment.get(name)
            here = kind == "cuda" or not name.startswith(_ON_GPUS)
            if here and value is not None and _WHEN.get(name, _is_on)(value):
                yield _check(name).told(status, f"{_shown(name, value)} is set", advice)


def _hiding(machine: Machine) -> Finding | None:
    value = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    hides_all = value.strip() in ("", "-1") or value.strip().lower() == "nodevfiles"
    if hides_all and machine.cards:
        return _check("CUDA_VISIBLE_DEVICES").warn(
            f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU, and there is a {machine.cards[0].name}",
            "Training would run on the CPU. `unset CUDA_VISIBLE_DEVICES`, or set it to a card's number, such as 0.",
        )
    if machine.cards:
        return _check("CUDA_VISIBLE_DEVICES").note(
            f"{_shown('CUDA_VISIBLE_DEVICES', value)} limits which cards are seen",
            "Their numbers begin at 0 again: speed.device=cuda:0 is the first one named there.",
        )


def _allocator(machine: Machine, kind: str) -> Finding | None:
    names = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if machine.environment.get(name)]
    if kind != "cuda" or not names:
        return None
    shown = " and ".join(_shown(name, machine.environment[name]) for name in names)
    words = " ".join(machine.environment[name] for name in names).lower()
    if len(names) == 2:
        return _check("allocator").warn(
            f"both are set: {shown}",
            "They are two names of one setting, and one of them is not heeded. Keep PYTORCH_ALLOC_CONF.",
        )
    if "expandable_segments:true" not in words:
        return _check("allocator").note(
            f"{shown} is set",
            "Flatout then leaves torch's allocator alone, and its memory blocks do not grow (speed.expandable_segments "
            "has no effect). Unset it, or add expandable_segments:True to it, if a run dies of fragmentation.",
        )
    return _check("allocator").ok(f"{shown} is set, with expandable segments")


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


def _offline(machine: Machine, config: RunConfig | None) -> Iterator[Finding]:
    if config is None or not any(path.startswith("hf:") for path in source_paths(config)):
        return
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if _is_on(machine.environment.get(name, "")):
            yield _check(name).warn(
                f"{name}=1, and data.source names a dataset of the Hugging Face hub",
                f"Only what lies in its cache can be read. `unset {name}` to let it be downloaded.",
            )


# --- packages ---------------------------------------------------------------------------------------------------------


def source_paths(config: RunConfig) -> list[str]:
    given = config.data.source
    listed = given if isinstance(given, list) else [] if given is None else [given]
    paths = [item if isinstance(item, str) else item.path for item in listed]
    return paths + ([] if config.data.val_source is None else [config.data.val_source])


def needed_packages(config: RunConfig, formats: Iterable[str]) -> dict[str, str]:
    """Optional packages that a config's data needs, each with what needs it.

    `formats` are those of the source's files, with `zst` for files that are compressed so.
    """
    needed: dict[str, str] = {}
    for form in formats:
        for package in _PACKAGES_OF.get(form, ()):
            needed.setdefault(package, f"reading {'.zst' if form == 'zst' else form} files")
    if config.clean.languages is not None:
        needed.setdefault("resiliparse", "clean.languages")
    if config.clean.near_duplicates is not None:
        needed.setdefault("rensa", "clean.near_duplicates")
    return needed


_PACKAGES_OF: Mapping[str, tuple[str, ...]] = {
    "parquet": ("pyarrow",),
    "saved": ("pyarrow",),
    "hub": ("datasets",),
    "warc": ("fastwarc", "resiliparse"),
    "zst": ("zstandard",),
}


def check_packages(machine: Machine, config: RunConfig, formats: Iterable[str]) -> Iterator[Finding]:
    """Whether the packages that the config's data needs are there."""
    for package, user in needed_packages(config, formats).items():
        yield _package("data", machine, package, user, INSTALL)


def check_attention_packages(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Whether the attention kernel that a config asks for by name is installed."""
    asked = config.speed.attention
    if "fa4" in asked:
        install = "install the extra flatout[fa4] with this Python's pip, or set speed.attention=auto"
        yield _package("kernels", machine, "flash_attn.cute", f"speed.attention={asked}", install)
    elif asked == "fa3":
        install = "install flash_attn_3 as its authors describe, or set speed.attention=auto"
        yield _package("kernels", machine, "flash_attn_interface", "speed.attention=fa3", install)


def check_tracker_packages(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Whether the trackers of output.trackers can be used. TensorBoard's files are written without its package."""
    for name in config.output.trackers:
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
