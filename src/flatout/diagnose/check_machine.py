"""Python, torch, Triton, CUDA and driver, processor, memory and clock: whether they are there and go together.

Everything here judges a `Machine` and touches nothing.
"""

import datetime
import functools
import re
from collections.abc import Iterator

from flatout.diagnose.doctor import Machine, Torch
from flatout.errors import in_gib, many
from flatout.finding import Check, Finding

_check = functools.partial(Check, "machine")

OLDEST_PYTHON, OLDEST_TORCH, NEWEST_TORCH = (3, 11), (2, 11), (2, 13)
# The oldest driver for each generation of CUDA, where the driver does not say what CUDA it knows.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
INSTALL_TORCH = (
    "Install torch 2.11 or newer with this Python's pip: `pip install torch`, or for a certain CUDA the command that "
    "pytorch.org's selector gives."
)


def check_machine(machine: Machine, workers: int | None = None) -> Iterator[Finding | None]:
    """The parts of a machine that every run stands on; `workers` is `speed.workers`."""
    yield _python(machine)
    yield _torch(machine.torch)
    yield _cuda(machine)
    yield _triton(machine)
    yield from _cores(machine, workers)
    yield _memory(machine)
    yield _clock(machine)


def _python(machine: Machine) -> Finding:
    version = ".".join(str(part) for part in machine.python)
    if machine.python[:2] < OLDEST_PYTHON:
        return _check("python").bad(f"Python {version}", "Flatout needs Python 3.11 or newer; install one.")
    return _check("python").ok(f"Python {version} on {machine.system}")


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def usable(torch: Torch) -> bool:
    """Whether Flatout can run on it: there, whole, and not too old."""
    version = numbers(torch.version)[:2]
    return torch.status == "ok" and (not version or version >= OLDEST_TORCH)


def _torch(torch: Torch) -> Finding:
    if torch.status == "missing":
        return _check("torch").bad(
            f"torch is not installed: {torch.reason}",
            f"{INSTALL_TORCH} Nothing can be trained without it; what does not need it was checked all the same.",
        )
    if torch.status == "broken":
        version = f" {torch.version}" if torch.version else ""
        return _check("torch").bad(
            f"torch{version} is installed, but cannot be used: {torch.reason}",
            "Remove it (`pip uninstall torch`) and install it again. If the error names a library (a .so or .dll "
            "file), another copy of that library is found first: look at LD_LIBRARY_PATH. If it names numpy or typing, "
            "those packages are too old or too new for it. What does not need torch was checked all the same.",
        )
    version = numbers(torch.version)[:2]
    built = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs only"
    found = f"torch {torch.version}, built {built}, {many(torch.threads or 0, 'thread')}"
    if version < OLDEST_TORCH:
        return _check("torch").bad(found, f"Flatout needs torch 2.11 or newer. {INSTALL_TORCH}")
    if version > NEWEST_TORCH:
        newest = ".".join(str(part) for part in NEWEST_TORCH)
        return _check("torch").note(found, f"Flatout is tested with torch up to {newest}; this one is newer.")
    return _check("torch").ok(found)


def _cuda(machine: Machine) -> Finding | None:
    """Whether torch, the driver and the card go together."""
    torch, cards = machine.torch, machine.cards
    driver = f"driver {machine.driver}" if machine.driver else "a driver of unknown version"
    if machine.driver_cuda:
        driver += f", which knows CUDA up to {machine.driver_cuda[0]}.{machine.driver_cuda[1]}"
    if torch.status != "ok" or (not cards and not torch.sees_cuda):
        return None if machine.driver is None else _check("driver").ok(driver)
    if torch.cuda is None and torch.sees_cuda:
        advice = "Flatout is not tested there. Its own kernels and most of the advice here are for NVIDIA cards."
        return _check("cuda").note("torch sees a GPU through ROCm", advice)
    if torch.cuda is None:
        return _check("cuda").warn(
            f"there is a {cards[0].name}, but this torch is built for CPUs only",
            "Training would run on the CPU, many times slower. Install a CUDA build of torch with the command that "
            "pytorch.org's selector gives.",
        )
    wanted = numbers(torch.cuda)[:2]
    if _driver_is_old(machine, wanted):
        oldest = OLDEST_DRIVER.get(wanted[0])
        least = f" {oldest[0]}.{oldest[1]} or newer" if oldest else " that knows it"
        return _check("driver").bad(
            f"{driver}; torch is built for CUDA {torch.cuda}",
            f"The driver is too old for this torch. Install driver{least}, or a torch that is built for an older CUDA.",
        )
    if not torch.sees_cuda:
        said = f": {torch.why_not}" if torch.why_not else ""
        return _check("cuda").bad(
            f"there is a {cards[0].name}, but torch sees no CUDA device{said}",
            "Look at CUDA_VISIBLE_DEVICES, which can hide it. In a container, start it with access to GPUs "
            "(`--gpus all`). After an update of the driver, restart the machine: library and kernel module must match.",
        )
    if machine.driver_cuda and machine.driver_cuda < wanted and machine.driver_cuda[0] == wanted[0]:
        return _check("driver").note(
            f"{driver}; torch is built for CUDA {torch.cuda}",
            "That works within one generation of CUDA; what needs the newest driver does not. Update it when you can.",
        )
    return _check("driver").ok(f"{driver}; torch is built for CUDA {torch.cuda}")


def _driver_is_old(machine: Machine, wanted: tuple[int, ...]) -> bool:
    if machine.driver_cuda is not None:
        return machine.driver_cuda[0] < wanted[0]  # within one major version an older driver will do
    oldest = OLDEST_DRIVER.get(wanted[0])
    return machine.driver is not None and oldest is not None and numbers(machine.driver)[:2] < oldest


def _triton(machine: Machine) -> Finding | None:
    triton, wanted = machine.triton, machine.torch.wants_triton
    on_gpu = bool(machine.cards) and machine.torch.cuda is not None
    exactly = f"triton=={wanted}" if wanted else "triton"
    if triton.status == "missing":
        if on_gpu:
            return _check("triton").warn(
                "triton is not installed",
                f"Our kernels and torch.compile need it on a GPU; without it training is about half as fast. Install "
                f"it with `pip install {exactly}`.",
            )
        return _check("triton").ok("not installed, and not needed without a GPU")
    if triton.status == "broken":
        return _check("triton").warn(
            f"triton {triton.version} is installed, but cannot be imported: {triton.reason}".replace("  ", " "),
            f"torch.compile and our kernels cannot run with it. Install it again: `pip install --force-reinstall "
            f"{exactly}`.",
        )
    if wanted is not None and numbers(triton.version) != numbers(wanted):
        return _check("triton").told(
            "warn" if on_gpu else "note",
            f"triton {triton.version}, but torch {machine.torch.version} wants {wanted}",
            f"Another version can fail in ways that are hard to understand. Install the one torch wants: `pip install "
            f"{exactly}`.",
        )
    return _check("triton").ok(f"triton {triton.version}" + (", as torch wants it" if wanted else ""))


def _cores(machine: Machine, workers: int | None) -> Iterator[Finding]:
    usable = machine.usable_cores
    shown = f"{usable:g} of {machine.cores} cores may be used" if usable < machine.cores else f"{machine.cores} cores"
    yield _check("processor").ok(shown)
    if workers is None:
        return
    if workers > max(1.0, usable):
        best = max(1, min(4, int(usable)))
        yield _check("workers").warn(
            f"speed.workers is {workers}, and {usable:g} cores may be used",
            f"More threads than cores only wait for one another. Set speed.workers={best}: one thread reads tokens "
            "faster than most cards take them, and batches are the same with any number.",
        )
    else:
        yield _check("workers").ok(f"speed.workers {workers} on {usable:g} cores")


def _memory(machine: Machine) -> Finding:
    if machine.memory_bytes is None:
        return _check("memory").note("the size of the host's memory is not known")
    total = in_gib(machine.memory_bytes)
    if machine.available_bytes is None:
        return _check("memory").ok(f"{total} of host memory")
    found = f"{in_gib(machine.available_bytes)} of {total} of host memory are free"
    if machine.available_bytes < 1.5 * 2**30:
        return _check("memory").warn(
            found, "torch alone takes about 1 GiB. Close other programs, or the system may stop the run to save itself."
        )
    return _check("memory").ok(found)


def _clock(machine: Machine) -> Finding:
    """A wrong clock gives checkpoints and logs wrong times, and certificates are refused."""
    now = datetime.datetime.fromtimestamp(machine.now, tz=datetime.UTC)
    shown = f"{now:%Y-%m-%d %H:%M} UTC"
    if not 2025 <= now.year < 2100:
        return _check("clock").warn(f"the clock says {shown}", "Set the clock: downloads and logs depend on it.")
    return _check("clock").ok(shown)
