"""The GPU: its generation and what that means, who else uses it, clocks, power, heat and damage.

What a card can do follows from its generation, so advice does too: what is right on Hopper is an error on Turing.
Everything here judges a `Machine` and touches nothing.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from flatout.config.catalogue import hardware_for
from flatout.config.schema import SpeedConfig
from flatout.diagnose.doctor import Card, Machine
from flatout.errors import in_gib
from flatout.finding import Check, Finding

_check = functools.partial(Check, "gpu")

# Codes of the driver's error messages that mean the card or its seat, and not a program.
_HARD_XIDS = {
    **dict.fromkeys(("48", "63", "64", "94", "95"), "memory damage"),
    "74": "a fault of NVLink",
    "79": "the card fell off the bus",
    "92": "many corrected memory errors",
    **dict.fromkeys(("119", "120"), "its own processor hangs"),
}
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
        found = "no NVIDIA GPU: training runs on the CPU, which is right for small models"
        yield _check("card").ok(
            "Apple GPU, through MPS; training there is in fp32 and eager" if machine.torch.mps else found
        )
        return
    card = machine.cards[min(index, len(machine.cards) - 1)]
    size = "memory of unknown size" if card.memory_bytes is None else in_gib(card.memory_bytes)
    more = (
        f"; {len(machine.cards)} cards, of which a run uses one, or N with --gpus N" if len(machine.cards) > 1 else ""
    )
    hidden = f"; {machine.hidden_cards} more are hidden from torch" if machine.hidden_cards else ""
    yield _check("card").ok(f"{card.name}, {size}{more}{hidden} (told by {machine.told_by})")
    yield from _generation(card, machine, overlays=overlays)
    yield _in_use(card)
    yield from _state(card)
    yield from _health(card, machine)
    if speed is not None:
        yield _precision(card, speed)


def _generation(card: Card, machine: Machine, *, overlays: bool) -> Iterator[Finding | None]:
    if card.capability is None:
        yield _check("generation").note("its compute capability is not known, as torch cannot reach it")
        return
    generation = generation_of(card.capability)
    have = [name for name, oldest in _UNITS.items() if card.capability >= oldest]
    lacks = [name for name in _UNITS if name not in have]
    units = f"{', '.join(have) or 'none of bf16, tf32, fp8'}" + (f"; no {', '.join(lacks)}" if have and lacks else "")
    found = f"{generation.name}, capability {card.capability[0]}.{card.capability[1]}; matrix units: {units}"
    advice = generation.advice
    if card.memory_bytes is not None and overlays:
        advice += f" Its memory overlay is --hardware {hardware_for(card.memory_bytes)}."
    yield _check("generation").told("ok" if "bf16" in have else "note", found, advice)
    yield _built_for(card.capability, machine)


def _built_for(capability: tuple[int, int], machine: Machine) -> Finding | None:
    """torch holds code for certain cards only; others fail in the first kernel, with words few understand."""
    known = machine.torch.architectures
    mine = 10 * capability[0] + capability[1]

    def runs(name: str) -> bool:
        """Code of the card's own generation (sm_), or an older form that the driver compiles again (compute_)."""
        found = re.match(r"(sm|compute)_(\d+)", name)
        number = mine + 1 if found is None else int(found[2])
        return number <= mine and (name.startswith("compute") or number // 10 == capability[0])

    if not known or any(map(runs, known)):
        return None
    return _check("torch's code").bad(
        f"this torch has code for {', '.join(known)}, and the card is sm_{mine}",
        "Its kernels cannot run on this card. Install a build of torch for it: an older one for an old card, a newer "
        "one for a new card.",
    )


def _in_use(card: Card) -> Finding | None:
    if card.used_bytes is None or card.memory_bytes is None:
        return None
    share = card.used_bytes / card.memory_bytes
    found = f"{in_gib(card.used_bytes)} of {in_gib(card.memory_bytes)} are in use by others"
    busy = f", and its units are busy {card.utilisation:.0%} of the time" if (card.utilisation or 0) > 0.1 else ""
    if card.used_bytes > 2**30 and share > 0.05:
        listed = ", ".join(str(process) for process in card.processes[:6])
        who = f" The processes are {listed}." if listed else " Their processes are not visible from here."
        return _check("in use").warn(
            found + busy,
            f"Whoever computes there shares its memory and speed with you.{who} `nvidia-smi` shows them; wait, end "
            "them, or take another card with speed.device=cuda:N.",
        )
    if busy:
        return _check("in use").warn(
            found + busy, "Somebody else computes on this card; your run gets the rest. `nvidia-smi` shows who."
        )
    return _check("in use").ok(f"{in_gib(card.memory_bytes - card.used_bytes)} free, nobody else computes on it")


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


def _state(card: Card) -> Iterator[Finding]:
    if card.throttled:
        reasons, advice = zip(*(_HELD_DOWN[word] for word in card.throttled), strict=True)
        clock = "" if card.clock_mhz is None else f" at {card.clock_mhz:.0f} MHz"
        most = "" if card.clock_most_mhz is None else f" of {card.clock_most_mhz:.0f}"
        found = f"its clock is held down{clock}{most} by {' and '.join(reasons)}"
        yield _check("throttling").warn(found, " ".join(advice))
    elif card.clock_most_mhz is not None:
        yield _check("clocks").ok(f"up to {card.clock_most_mhz:.0f} MHz, not held down")
    if card.temperature is not None:
        check, found = _check("temperature"), f"{card.temperature:.0f} °C"
        hot = "It slows down from about 85 to 90 °C on. See to its cooling before a long run."
        yield check.warn(found, hot) if card.temperature >= 85 else check.ok(found)
    limit, default = card.power_limit_watts, card.power_default_watts
    if limit is not None and default is not None and limit < 0.95 * default:
        yield _check("power cap").note(
            f"{limit:.0f} W, {default:.0f} W by default",
            "Somebody has lowered it. Under full load the card is slower by about the same share; `nvidia-smi -pl` "
            "sets it, as root.",
        )
    elif limit is not None:
        yield _check("power cap").ok(f"{limit:.0f} W")


def _health(card: Card, machine: Machine) -> Iterator[Finding]:
    if card.uncorrected_errors:
        yield _check("memory errors").warn(
            f"{card.uncorrected_errors} errors of its memory could not be corrected since the driver was loaded",
            "Results may be wrong. Reset the card (`nvidia-smi --gpu-reset`, as root) or restart the machine; if they "
            "come back, the card has to be replaced.",
        )
    if card.remapping:
        yield _check("memory rows").warn(
            f"{card.remapping} in its memory",
            "Reset the card or restart the machine, so that the row is replaced; a row that cannot be means a card "
            "for the workshop.",
        )
    hard = [code for code in machine.xids if code in _HARD_XIDS]
    if hard:
        named = ", ".join(f"Xid {code} ({_HARD_XIDS[code]})" for code in hard)
        yield _check("driver errors").warn(
            f"the kernel's log holds {named}",
            "Runs on this machine can die or go wrong. Restart it, watch `dmesg` for Xid, and have the card or its "
            "seat checked if they come back.",
        )
    elif machine.xids:
        yield _check("driver errors").note(
            f"the kernel's log holds Xid {', '.join(machine.xids)}",
            "Those are mostly faults of programs (an illegal address), not of the card.",
        )


def _precision(card: Card, speed: SpeedConfig) -> Finding | None:
    """Arithmetic that works here and is not what the card is good at; what it cannot do is an error elsewhere."""
    asked, capability = speed.precision, card.capability
    if capability is None or speed.device == "cpu":
        return None
    best = "bf16" if capability >= _UNITS["bf16"] else "fp16"
    if asked == "fp16" and best == "bf16":
        return _check("precision").warn(
            f"speed.precision is fp16 on a card with bf16 ({generation_of(capability).name})",
            "fp16 has a small range: it needs a loss scale and can skip updates. bf16 is as fast here and needs "
            "neither. Set speed.precision=auto.",
        )
    if asked == "fp32" and capability >= (7, 0):
        return _check("precision").warn(
            "speed.precision is fp32, which does not use the card's matrix units",
            f"Training is several times slower. Set speed.precision=auto, which is {best} over fp32 weights.",
        )
    return _check("precision").ok(f"{best if asked == 'auto' else asked} over fp32 weights")
