"""The rungs of the ladder: which switches are tried, in which order, and against what each is measured.

Idea: a rung is nothing but words for the config. The ladder starts from the guides' naive trainer and adds one switch
at a time, so that the product of the gains is the factor from bottom to top. In the full set, each switch is then taken
out alone, because what a switch is worth beside the others is not what it was worth when it came. Last come what the
full set leaves out: the memory savers, the other kernels, and the guides' tricks that should do nothing.

Contract: no rung changes what is learned. The global batch stays, so the losses of every rung can be held against one
reference. `settings_of` gives all words of a rung; which of them a device cannot have, `ladder.py` finds out.
Trap: our kernels replace the compiler, so a rung about compile modes stands on torch's operations and must be measured
against the compiled set, not against the full one.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.config.load import LoadedConfig

Group = Literal["ladder", "without", "extra"]
GROUPS: tuple[Group, ...] = ("ladder", "without", "extra")

# The guides' trainer (row 000-30): everything by hand, two sequences at a time. Every switch of `speed` that matters
# to speed stands here, so that nothing of the user's config or of a default leaks into a rung.
BASELINE: dict[str, str] = {
    "speed.precision": "fp32",
    "speed.residual": "fp32",
    "speed.fp8": "[]",
    "speed.kernels": "torch",
    "speed.products": "torch",
    "speed.attention": "reference",
    "speed.scan": "chunked",  # token by token a long context takes minutes
    "speed.fused_qkv": "false",
    "speed.compile": "off",
    "speed.cuda_graphs": "off",
    "speed.loss": "plain",
    "speed.fused_optimizer": "off",
    "speed.optimizer_state": "fp32",
    "speed.optimizer_offload": "false",
    "speed.pad_vocab": "1",
    "speed.micro_batch": "2",
    "speed.checkpointing": "none",
    "speed.loader": "host",
    "speed.workers": "0",
    "speed.expandable_segments": "off",
}

# What a baseline over samples is beside that: each of them has a row of its own.
SAMPLES: dict[str, str] = {"chat.packing": "false"}

# What every rung's losses are held against: exact arithmetic, nothing fused, a micro-batch that fits most cards.
REFERENCE: dict[str, str] = {**BASELINE, "speed.micro_batch": "8"}

# Largest difference from the reference's loss at any step of the gate, in nats. The reasons:
# fp32  the same sums in another order: rounding of 1e-7 a product, grown by twenty updates, stays well below it.
# tf32, bf16, fp16  8 to 11 bits in a product: a loss of 4 to 11 nats moves in its third decimal, its updates with it.
# 8bit  the moments are rounded, so the updates are; the loss itself is exact.
# fp8  4 bits in a product of the chosen layers.
TOLERANCES: dict[str, float] = {"fp32": 0.002, "tf32": 0.02, "bf16": 0.02, "fp16": 0.02, "8bit": 0.02, "fp8": 0.05}

# What the ladder sets by itself. The micro-batch of a config is not lost: the rung micro-batch takes it.
OWN_SWITCHES = tuple(path for path in BASELINE if path != "speed.micro_batch")

COMPILED = "without-triton"  # the full set on torch's operations, compiled
FULL = "full"
WITHOUT = "without-"


@dataclasses.dataclass(frozen=True)
class Rung:
    """One rung: what it changes in the set it stands on, and the rung its gain is measured against.

    `trick` is something of the guides that is no switch and is done around the steps; `shrinks` lets a rung that runs
    out of memory try again with half the micro-batch.
    """

    name: str
    group: Group
    words: dict[str, str]
    against: str | None
    trick: str | None = None
    shrinks: bool = False
    # What taking the switch out of the full set means; None where a later switch has replaced it.
    out: dict[str, str] | None = None
    # In the ladder only on these kinds of device; elsewhere beside it, because `auto` does not choose it there.
    kinds: tuple[str, ...] = ("cuda", "mps", "cpu")

    @property
    def switch(self) -> str:
        """The rung of the ladder whose switch it turns on, or takes out."""
        return self.name.removeprefix(WITHOUT)


def all_rungs(
    *,
    kind: str,
    micro_batch: int,
    attention: str,
    plain_attention: str | None = None,
    eigenstates: bool = False,
    samples: bool = False,
) -> list[Rung]:
    """Every rung for a kind of device, in the order they are measured; `linked` says against what.

    `micro_batch` is what the config asks for, `attention` the backend that `auto` takes on this device, and
    `plain_attention` the one it takes beside torch's own operations, where that is another. Models with `eigenstates`
    have a rung for their scan, runs over `samples` one for packing them and none for tokens on the device.
    """
    plain_attention = plain_attention or attention
    steps = _steps(micro_batch, attention, plain_attention)
    left_out = {"scan": eigenstates, "packing": samples, "device-loader": not samples}
    steps = [step for step in steps if left_out.get(step.name, True)]
    if samples:
        steps[0] = dataclasses.replace(steps[0], words=SAMPLES)
    climbed = [step for step in steps if kind in step.kinds]
    beside = [dataclasses.replace(step, group="extra", against=FULL) for step in steps if kind not in step.kinds]
    without = [Rung(f"{WITHOUT}{step.name}", "without", step.out, FULL) for step in climbed if step.out is not None]
    return [*climbed, *without, *beside, *_extras(kind, attention, plain_attention)]


def linked(rungs: Sequence[Rung]) -> list[Rung]:
    """The rungs that a device can have: each of the ladder against the one below, no switch taken out that is not in.

    `full` becomes the name of the ladder's top.
    """
    ladder = [rung for rung in rungs if rung.group == "ladder"]
    below = {step.name: before.name for before, step in itertools.pairwise(ladder)}
    steps = {rung.name for rung in ladder}
    present = [rung for rung in rungs if rung.group != "without" or rung.switch in steps]
    names = {rung.name for rung in present}

    def against(rung: Rung) -> str | None:
        if rung.group == "ladder":
            return below.get(rung.name)
        return rung.against if rung.against in names else ladder[-1].name

    return [dataclasses.replace(rung, against=against(rung)) for rung in present]


def _speed(**values: str) -> dict[str, str]:
    return {f"speed.{name}": value for name, value in values.items()}


_TORCH_ONLY = _speed(kernels="torch", residual="fp32", products="torch")


def _steps(micro_batch: int, attention: str, plain_attention: str) -> list[Rung]:
    """The ladder, bottom to top; `against` is filled in by the caller."""

    def step(name: str, words: dict[str, str], out: dict[str, str] | None = None, *, shrinks: bool = False) -> Rung:
        return Rung(name, "ladder", words, None, out=out, shrinks=shrinks)

    def cuda(name: str, words: dict[str, str], out: dict[str, str] | None = None) -> Rung:
        return dataclasses.replace(step(name, words, out), kinds=("cuda",))

    no_bf16 = _speed(precision="tf32", residual="fp32", products="torch", attention="sdpa")
    compiled = _TORCH_ONLY | _speed(attention=plain_attention, compile="default", cuda_graphs="off")
    two = _speed(micro_batch=BASELINE["speed.micro_batch"])
    return [
        step("baseline", {}),
        cuda("tf32", _speed(precision="tf32")),
        cuda("bf16", _speed(precision="bf16"), no_bf16),
        step("fused-qkv", _speed(fused_qkv="true"), _speed(fused_qkv="false")),
        step("sdpa", _speed(attention="sdpa"), _speed(attention="reference")),
        step("packing", {"chat.packing": "true"}, SAMPLES),
        step("micro-batch", _speed(micro_batch=str(micro_batch)), two, shrinks=True),
        step("fused-adamw", _speed(fused_optimizer="on"), _speed(fused_optimizer="off")),
        step("pad-vocab", _speed(pad_vocab="64"), _speed(pad_vocab="1")),
        cuda("compile", _speed(compile="default"), _TORCH_ONLY | _speed(compile="off")),
        cuda("attention", _speed(attention=plain_attention), _speed(attention="sdpa")),
        cuda("scan", _speed(scan="triton"), _speed(scan="chunked")),
        cuda("loss", _speed(loss="fused"), _speed(loss="plain")),
        cuda("triton", _speed(kernels="triton", compile="off"), compiled),
        cuda("fa4-backward", _speed(attention=attention), _speed(attention=plain_attention)),
        cuda("residual", _speed(residual="bf16"), _speed(residual="fp32")),
        cuda("products", _speed(products="tuned"), _speed(products="torch")),
        step("loader-thread", _speed(workers="1")),
        cuda("device-loader", _speed(loader="device"), _speed(loader="host")),
        cuda("expandable", _speed(expandable_segments="on"), _speed(expandable_segments="off")),
        cuda("cuda-graphs", _speed(cuda_graphs="on"), _speed(cuda_graphs="off")),
    ]


def _extras(kind: str, attention: str, plain_attention: str) -> list[Rung]:
    """What the full set leaves out, each put into it alone."""

    def extra(name: str, *, against: str = FULL, trick: str | None = None, **words: str) -> Rung:
        return Rung(name, "extra", _speed(**words), against, trick=trick)

    compiled = {"kernels": "torch", "residual": "fp32", "products": "torch", "attention": plain_attention}
    compiled |= {"cuda_graphs": "off"}
    modes = ["reduce-overhead", "max-autotune", "regional"] if kind == "cuda" else ["regional"]
    names = ("flash", "cudnn", "efficient", "fa4", "cudnn+fa4")
    backends = [name for name in names if name not in (attention, plain_attention)]
    tricks = ("empty-cache", "empty-cache-each-step", "gc-collect", "cudnn-benchmark")
    return [
        extra("fp16", precision="fp16", residual="fp32"),
        extra("fp8-mlp", fp8="[up, down]"),
        extra("fp8-all", fp8="[qkv, out, up, down, head]"),
        extra("loss-chunked", loss="chunked"),
        extra("checkpointing-selective", checkpointing="selective"),
        extra("checkpointing-full", checkpointing="full"),
        extra("optimizer-8bit", optimizer_state="8bit"),
        extra("optimizer-offload", optimizer_offload="true"),
        *(extra(f"attention-{name}", attention=name) for name in backends),
        *(extra(f"compile-{mode}", against=COMPILED, **compiled, compile=mode) for mode in modes),
        extra("workers-4", loader="host", workers="4"),
        *(extra(name, trick=name) for name in tricks),
        extra("split-512", expandable_segments="off", trick="split-512"),
        extra("full-again"),  # nothing changed but the time of day: what is no further from 1 than this is noise
    ]


def choose_rungs(
    listed: Sequence[Rung],
    names: Sequence[str] | None,
    only: str | None,
    kind: str,
    absences: Callable[[Sequence[Rung]], Mapping[str, str]],
) -> tuple[list[Rung], list[Rung], list[tuple[Rung, str]]]:
    """Of the rungs of a `kind` of device, those by `names`, or of the group `only`, or all.

    Returns those that the device can have; of these what was asked for and what that is compared with; and what was
    asked for and cannot be had, with the reason.

    `absences` gives a reason for each rung that the device cannot have. To find out may mean to compile or to run a
    switch, so it is asked only for the rungs that are wanted.
    """
    known = [*(rung.name for rung in listed), FULL]
    for name in names or ():
        if name not in known:
            raise UsageError(f"the ladder of this {kind} device has no rung {name!r}", f"it has {', '.join(known)}")
    asked = None if names is None else list(names)
    ladder = [rung for rung in listed if rung.group == "ladder"]
    if asked is not None and FULL in asked:
        absent = absences(ladder)
        asked.append([rung.name for rung in ladder if rung.name not in absent][-1])
    named = [rung for rung in listed if asked_for(rung, names=asked, only=only)]
    wanted = [rung for rung in listed if rung in ladder or rung in named or rung.name == COMPILED]
    absent = absences(wanted)
    present = linked([rung for rung in wanted if rung.name not in absent])
    lacking = [(rung, absent[rung.name]) for rung in named if rung.name in absent]
    return present, choose(present, names=asked, only=only), lacking


def choose(rungs: Sequence[Rung], *, names: Sequence[str] | None, only: str | None) -> list[Rung]:
    """Of linked rungs, those that were asked for and those that their gains are measured against, in order.

    A rung of the ladder stands on all those below it, measured or not.
    """
    wanted = {rung.name for rung in rungs if asked_for(rung, names=names, only=only)}
    by_name = {rung.name: rung for rung in rungs}
    top = [rung.name for rung in rungs if rung.group == "ladder"][-1]
    for name in list(wanted):
        rung = by_name[name]
        wanted |= {rung.against} if rung.against is not None else set()
        wanted |= {top} if rung.group != "ladder" else set()  # what the others stand on
    return [rung for rung in rungs if rung.name in wanted]


def asked_for(rung: Rung, *, names: Sequence[str] | None, only: str | None) -> bool:
    return rung.name in names if names is not None else only in (None, rung.group)


def every_name() -> list[str]:
    """The names that rungs have on any device, and `full`, the top of whatever ladder there is."""
    listed = [
        all_rungs(kind="cuda", micro_batch=1, attention="sdpa", eigenstates=True, samples=samples)
        for samples in (False, True)
    ]
    return [*dict.fromkeys(rung.name for rungs in listed for rung in rungs), FULL]


def check_asked(loaded: "LoadedConfig", names: Sequence[str] | None) -> None:
    """Refuses what no ladder can do, before anything is read or built: unknown rungs, and switches as words."""
    for name in names or ():
        if name not in every_name():
            near = difflib.get_close_matches(name, every_name(), n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else f"the rungs are {', '.join(every_name())}"
            raise UsageError(f"there is no rung {name!r}", hint)
    written = [path for path in OWN_SWITCHES if loaded.sources[path].kind == "override"]
    if written:
        raise UsageError(
            f"the ladder sets {', '.join(written)} itself, rung by rung",
            "leave it out, or choose rungs with --rungs NAME",
        )


def settings_of(rung: Rung, climbed: Sequence[Rung]) -> dict[str, str]:
    """All words of a rung that stands on the climbed rungs of the ladder."""
    settings = dict(BASELINE)
    for below in climbed:
        settings.update(below.words)
    return {**settings, **rung.words}


def tolerance_of(settings: dict[str, str]) -> float:
    """How far the losses of a rung may lie from the reference's, by the coarsest arithmetic in it."""
    kinds = [settings["speed.precision"]]
    kinds += ["fp8"] if settings["speed.fp8"] != "[]" else []
    kinds += ["8bit"] if settings["speed.optimizer_state"] == "8bit" else []
    return max(TOLERANCES[kind] for kind in kinds)


def as_words(settings: dict[str, str]) -> list[str]:
    return [f"{path}={value}" for path, value in settings.items()]
