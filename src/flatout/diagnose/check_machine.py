"""The machine and its GPU: whether its parts are there and go together, and what state they are in.

What a card can do follows from its generation, so advice does too: what is right on Hopper is an error on Turing.
Everything here judges a `Machine` and touches nothing.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from flatout.config.catalogue import hardware_for
from flatout.config.schema import SpeedConfig
from flatout.diagnose.machine import OLDEST_TORCH, CardState, Machine, Torch, numbers
from flatout.errors import in_gib, many
from flatout.finding import Check, Finding

_check, _gpu = functools.partial(Check, "machine"), functools.partial(Check, "gpu")

OLDEST_PYTHON = (3, 11)
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


def _python(machine: Machine) -> Finding:
    version = ".".join(str(part) for part in machine.python)
    if machine.python[:2] < OLDEST_PYTHON:
        return _check("python").bad(f"Python {version}", "Flatout needs Python 3.11 or newer; install one.")
    return _check("python").ok(f"Python {version} on {machine.system}")


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
    wanted, found = numbers(torch.cuda)[:2], f"{driver}; torch is built for CUDA {torch.cuda}"
    if machine.driver_cuda and machine.driver_cuda[0] < wanted[0]:  # within one major version an older one will do
        advice = "Install a driver that knows this CUDA, or a torch that is built for an older one."
        return _check("driver").bad(found, f"The driver is too old for this torch. {advice}")
    if not torch.sees_cuda:
        why = f": {torch.why_not}" if torch.why_not else ""
        return _check("cuda").bad(
            f"there is a {cards[0].name}, but torch sees no CUDA device{why}",
            "Look at CUDA_VISIBLE_DEVICES, which can hide it. In a container, start it with access to GPUs "
            "(`--gpus all`). After an update of the driver, restart the machine: library and kernel module must match.",
        )
    return _check("driver").ok(found)


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
        return _check("triton").finding(
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
    best, few = max(1, min(4, int(usable))), workers <= max(1.0, usable)
    found = f"speed.workers {workers} on {usable:g} cores"
    yield _check("workers").warn_if(
        not few,
        found if few else f"speed.workers is {workers}, and {usable:g} cores may be used",
        f"More threads than cores only wait for one another. Set speed.workers={best}: one thread reads tokens faster "
        "than most cards take them, and batches are the same with any number.",
    )


def _memory(machine: Machine) -> Finding:
    if machine.memory_bytes is None:
        return _check("memory").note("the size of the host's memory is not known")
    total = in_gib(machine.memory_bytes)
    if machine.available_bytes is None:
        return _check("memory").ok(f"{total} of host memory")
    return _check("memory").warn_if(
        machine.available_bytes < 1.5 * 2**30,
        f"{in_gib(machine.available_bytes)} of {total} of host memory are free",
        "torch alone takes about 1 GiB. Close other programs, or the system may stop the run to save itself.",
    )


# --- the GPU ----------------------------------------------------------------------------------------------------------

# The oldest capability whose matrix units have each type.
_UNITS = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}


class Generation(NamedTuple):
    """What all cards of a capability have in common. `advice` says what to use there."""

    name: str
    advice: str


# By their oldest capability, the newest first: a card belongs to the first one that is not newer than itself.
GENERATIONS = {
    (10, 0): Generation(
        "Blackwell",
        "speed.precision auto is bf16, attention goes to cuDNN; speed.fp8 is worth a measurement with `flatout bench`. "
        "Our kernels were tuned on Hopper: `flatout tune` finds what is best here.",
    ),
    (9, 0): Generation(
        "Hopper",
        "speed.precision auto is bf16, attention goes to cuDNN, or to FlashAttention-4 if flash-attn-4 is installed "
        "(the extra flatout[fa4]); speed.fp8=[qkv,out,up,down,head] is faster still.",
    ),
    (8, 9): Generation(
        "Ada",
        "speed.precision auto is bf16, attention goes to torch's flash kernel; speed.fp8 works here. FlashAttention-3 "
        "and -4 do not.",
    ),
    (8, 0): Generation(
        "Ampere",
        "speed.precision auto is bf16, attention goes to torch's flash kernel. There are no 8-bit units, so leave "
        "speed.fp8 empty.",
    ),
    (7, 5): Generation(
        "Turing",
        "There is no bf16: speed.precision auto is fp16 with a loss scale. Our Triton kernels and flash attention need "
        "Ampere; torch.compile and torch's memory-efficient attention take their place.",
    ),
    (7, 0): Generation(
        "Volta",
        "There is no bf16: speed.precision auto is fp16 with a loss scale. Newer builds of torch have dropped this "
        "generation; our Triton kernels and flash attention need Ampere.",
    ),
    (0, 0): Generation(
        "Pascal or older",
        "It has no matrix units, so half precision brings little, and torch.compile does not support it. Small models "
        "only: begin with the preset shakespeare.",
    ),
}


def generation_of(capability: tuple[int, int]) -> Generation:
    return next(generation for oldest, generation in GENERATIONS.items() if capability >= oldest)


def check_cards(
    machine: Machine, speed: SpeedConfig | None, index: int = 0, *, overlays: bool = True
) -> Iterator[Finding | None]:
    """The cards, and in detail the one that a run would take; without `overlays` none is named."""
    if not machine.cards:
        apple = "Apple GPU, through MPS; training there is in fp32 and eager"
        none = "no NVIDIA GPU: training runs on the CPU, which is right for small models"
        yield _gpu("card").ok(apple if machine.torch.mps else none)
        return
    card = machine.cards[min(index, len(machine.cards) - 1)]
    size = "memory of unknown size" if card.memory_bytes is None else in_gib(card.memory_bytes)
    count = len(machine.cards)
    more = f"; {count} cards, of which a run uses one, or N with --gpus N" if count > 1 else ""
    hidden = f"; {machine.hidden_cards} more are hidden from torch" if machine.hidden_cards else ""
    yield _gpu("card").ok(f"{card.name}, {size}{more}{hidden} (by {machine.cards_by})")
    yield _generation(card, overlays=overlays)
    yield _in_use(card)
    yield _clock(card)
    yield _memory_errors(card)
    if speed is not None:
        yield _precision(card, speed)


def _generation(card: CardState, *, overlays: bool) -> Finding:
    if card.capability is None:
        return _gpu("generation").note("its compute capability is not known, as torch cannot reach it")
    generation = generation_of(card.capability)
    have = [name for name, oldest in _UNITS.items() if card.capability >= oldest]
    lacks = [name for name in _UNITS if name not in have]
    units = f"{', '.join(have) or 'none of bf16, tf32, fp8'}" + (f"; no {', '.join(lacks)}" if have and lacks else "")
    found = f"{generation.name}, capability {card.capability[0]}.{card.capability[1]}; matrix units: {units}"
    advice = generation.advice
    if card.memory_bytes is not None and overlays:
        advice += f" Its memory overlay is --hardware {hardware_for(card.memory_bytes)}."
    return _gpu("generation").finding("ok" if "bf16" in have else "note", found, advice)


def _in_use(card: CardState) -> Finding | None:
    if card.used_bytes is None or card.memory_bytes is None:
        return None
    share = card.used_bytes / card.memory_bytes
    found = f"{in_gib(card.used_bytes)} of {in_gib(card.memory_bytes)} are in use by others"
    busy = f", and its units are busy {card.utilisation:.0%} of the time" if (card.utilisation or 0) > 0.1 else ""
    if card.used_bytes > 2**30 and share > 0.05:
        listed = ", ".join(str(process) for process in card.processes[:6])
        who = f" The processes are {listed}." if listed else " Their processes are not visible from here."
        return _gpu("in use").warn(
            found + busy,
            f"Whoever computes there shares its memory and speed with you.{who} `nvidia-smi` shows them; wait, end "
            "them, or take another card with speed.device=cuda:N.",
        )
    if busy:
        advice = "Somebody else computes on this card; your run gets the rest. `nvidia-smi` shows who."
        return _gpu("in use").warn(found + busy, advice)
    return _gpu("in use").ok(f"{in_gib(card.memory_bytes - card.used_bytes)} free, no other process computes on it")


# Why a clock is held down, and what to do about it.
_HELD_DOWN = {
    "power": (
        "its power cap",
        "Raise the power cap if you may (`nvidia-smi -pl WATTS`, as root), or live with it: work that saves energy, "
        "such as bf16 and fp8, then saves time.",
    ),
    "heat": (
        "heat",
        "See to its cooling: fans, filters, air flow, neighbours. It will be slower than its data sheet until then.",
    ),
    "hardware": (
        "the hardware's own protection",
        "Check its power cables and supply; a card that is short of power protects itself this way.",
    ),
}


def _clock(card: CardState) -> Finding | None:
    """Whether the driver holds the clock down, and why."""
    if card.throttled:
        reasons, advice = zip(*(_HELD_DOWN[word] for word in card.throttled), strict=True)
        clock = "" if card.clock_mhz is None else f" at {card.clock_mhz:.0f} MHz"
        most = "" if card.clock_most_mhz is None else f" of {card.clock_most_mhz:.0f}"
        found = f"its clock is held down{clock}{most} by {' and '.join(reasons)}"
        return _gpu("throttling").warn(found, " ".join(advice))
    if card.clock_most_mhz is None:
        return None
    heat = "" if card.temperature is None else f", {card.temperature:.0f} °C"
    power = "" if card.power_limit_watts is None else f", {card.power_limit_watts:.0f} W at most"
    return _gpu("clocks").ok(f"up to {card.clock_most_mhz:.0f} MHz, not held down{heat}{power}")


def _memory_errors(card: CardState) -> Finding | None:
    if not card.uncorrected_errors:
        return None
    return _gpu("memory errors").warn(
        f"{card.uncorrected_errors} errors of its memory could not be corrected since the driver was loaded",
        "Results may be wrong. Reset the card (`nvidia-smi --gpu-reset`, as root) or restart the machine; if they "
        "come back, the card has to be replaced.",
    )


def _precision(card: CardState, speed: SpeedConfig) -> Finding | None:
    """Arithmetic that works here and is not what the card is good at; what it cannot do is an error elsewhere."""
    asked, capability = speed.precision, card.capability
    if capability is None or speed.device == "cpu":
        return None
    best = "bf16" if capability >= _UNITS["bf16"] else "fp16"
    if asked == "fp16" and best == "bf16":
        return _gpu("precision").warn(
            f"speed.precision is fp16 on a card with bf16 ({generation_of(capability).name})",
            "fp16 has a small range: it needs a loss scale and can skip updates. bf16 is as fast here and needs "
            "neither. Set speed.precision=auto.",
        )
    if asked == "fp32" and capability >= (7, 0):
        return _gpu("precision").warn(
            "speed.precision is fp32, which does not use the card's matrix units",
            f"Training is several times slower. Set speed.precision=auto, which is {best} over fp32 weights.",
        )
    return _gpu("precision").ok(f"{best if asked == 'auto' else asked} over fp32 weights")
