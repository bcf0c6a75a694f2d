"""What a config becomes on a machine: its switches, whether its steps fit the memory, the least time it takes.

The machine is the one described by a `Machine`, not the one this code runs on: `device_of` makes torch's view of it,
and the answers of trials stand in for the device. So a config can be checked for a card that is elsewhere.
torch is imported here, inside of functions: call them only where `Machine.torch.status` is ok.

The time is a bound, not a guess: the FLOPs of a step (`model/count.py`) at the rate of a matrix product. How long a run
takes is told by `flatout estimate`, which times real steps.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig
from flatout.config.sizes import GPT2_VOCAB
from flatout.config.source import DEFAULT, Source
from flatout.cores import ThreadTrial
from flatout.diagnose.doctor import Check, DataFacts, Finding, Machine, Trials, finding_of
from flatout.errors import UserError, many

if TYPE_CHECKING:
    from flatout.device import Device
    from flatout.engine.case import Probes
    from flatout.engine.features import Speed

CONTEXT_BYTES = 512 * 2**20  # what CUDA itself holds on a card, beside torch's tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A config on a machine whose torch works."""

    parameters: int
    speed: "Speed"
    vocab: int
    corpus_bytes: int | None  # None where the text is streamed
    probes: "Probes"  # that answer for the machine
    need_bytes: int
    have_bytes: int | None
    step_seconds: float | None  # the least that a step takes: its FLOPs at `rate_of`
    rate_of: str
    ranks: int = 1

    def need_of(self, config: RunConfig) -> int | None:
        """What a step of another config would need here; None for one that cannot be had."""
        from flatout.engine.case import Dealing
        from flatout.engine.features import resolve_speed

        known = {"vocab": self.vocab, "probes": self.probes, "ranks": self.ranks}
        known["dealing"] = Dealing(self.speed.parallel, self.speed.shards)
        try:
            speed = resolve_speed(config, self.speed.device, self.corpus_bytes, lambda _: DEFAULT, **known)
        except UserError:
            return None
        return _needed(config, self.vocab, speed, self.corpus_bytes)


def kind_of(machine: Machine, config: RunConfig | None) -> tuple[str, int, Finding | None]:
    """(kind of the device a run would take, its number, what is wrong with the one asked for)."""
    cuda = machine.torch.sees_cuda and bool(machine.cards)
    fastest = "cuda" if cuda else "mps" if machine.torch.mps else "cpu"
    asked = "auto" if config is None else config.speed.device
    name, _, number = asked.partition(":")
    index = int(number or 0)
    complaint = None
    if name == "cuda" and not cuda:
        complaint = ("torch sees no CUDA device", "Set speed.device=auto, or mend what the machine section names.")
    elif name == "cuda" and index >= len(machine.cards):
        most = len(machine.cards) - 1
        complaint = (f"the last card is cuda:{most}", f"Set speed.device=cuda:{most} or less, or auto.")
    elif name == "mps" and not machine.torch.mps:
        complaint = ("this torch has no MPS device", "Set speed.device=auto.")
    if complaint is not None:
        return fastest, 0, Check("config", "device").bad(f"speed.device is {asked}, but {complaint[0]}", complaint[1])
    return (fastest, 0, None) if asked == "auto" else (name, index, None)


def device_of(machine: Machine, kind: str, index: int, memory_limit: float | None) -> "Device":
    """torch's view of a described machine."""
    import torch

    from flatout.device import Device, limit_memory

    if kind == "cuda":
        card = machine.cards[index]
        device = Device(
            torch_device=torch.device("cuda", index),
            name=card.name,
            memory_bytes=card.memory_bytes,
            capability=card.capability,
        )
        return limit_memory(device, memory_limit)
    memory = machine.memory_bytes if kind == "cpu" else None
    return Device(torch_device=torch.device(kind), name=kind, memory_bytes=memory, capability=None)


def settled(
    loaded: LoadedConfig, machine: Machine, data: DataFacts, kind: str, index: int, ranks: int
) -> tuple[LoadedConfig, list[Finding]]:
    """The config with what its preset leaves open until the data is known, as a run would settle it there."""
    from flatout.engine.sizing import sized, uncounted

    config = loaded.config
    known, unique = uncounted(config), None if config.data.streaming else data.train_tokens
    vocab = config.model.vocab or data.vocab or known.vocab
    known = dataclasses.replace(known, vocab=vocab, unique=unique, ranks=ranks)
    complete = sized(loaded, known, device_of(machine, kind, index, config.speed.memory_limit))
    if complete is loaded or data.exact:
        return complete, []
    found = "settled as for text that is read once, because its tokens are not counted"
    if unique is not None:
        found = f"settled for about {unique:,} tokens to train on; a run counts them first"
    return complete, [Check("config", "size").note(found)]


def _probes(machine: Machine, trials: Trials) -> "Probes":
    """The trials' answers; what was not tried counts as working, unless its package is missing."""
    from flatout.engine.case import Probes

    def attention(backend: str, _device: object, **_: object) -> str | None:
        if "fa4" in backend and machine.packages.get("flash_attn.cute") is None:
            return "flash-attn-4 is not installed"
        if backend == "fa3" and machine.packages.get("flash_attn_interface") is None:
            return "flash_attn_3 is not installed"
        return trials.failure(f"attention {backend}")

    return Probes(
        attention=attention,
        picked=lambda *_, **__: trials.picked,
        documents=attention,
        compiler=lambda _: trials.failure("torch.compile"),
        products=lambda: trials.failure("cuBLASLt"),
        threads=lambda *_: trials.threads or ThreadTrial(seconds={_cores(machine): 0.0}, cores=_cores(machine)),
        triton=lambda: machine.triton.status == "ok" and trials.failure("triton kernels") is None,
    )


def _cores(machine: Machine) -> int:
    return max(1, int(machine.usable_cores))


def fit(
    loaded: LoadedConfig,
    machine: Machine,
    trials: Trials,
    data: DataFacts,
    kind: str,
    index: int,
    ranks: int = 1,
    hosts: int = 1,
) -> tuple[Fit, list[Finding]]:
    """What the config becomes in one of `ranks` processes on `hosts` such machines, and the switches it cannot have."""
    from flatout.engine.case import Dealing
    from flatout.engine.features import resolve_speed
    from flatout.engine.fit_check import ROOM
    from flatout.engine.form import forms_of
    from flatout.model.count import flops_per_token, parameter_count

    config = loaded.config
    device = device_of(machine, kind, index, config.speed.memory_limit)
    vocab = config.model.vocab or data.vocab or GPT2_VOCAB
    corpus = None if config.data.streaming else (data.train_tokens or 0) * data.token_bytes
    probes = _probes(machine, trials)

    have = _available(machine, kind, index, device)

    def resolve(source: Callable[[str], Source], dealing: Dealing) -> "Speed":
        shape = {"vocab": vocab, "probes": probes, "ranks": ranks, "dealing": dealing}
        return resolve_speed(config, device, corpus, source, **shape)

    def tried(dealing: Dealing) -> tuple["Speed", int, list[Finding]]:
        findings = []
        try:
            speed = resolve(loaded.sources.__getitem__, dealing)
        except UserError as error:
            findings.append(finding_of(error, "config", "switches"))
            speed = resolve(lambda _: DEFAULT, dealing)
        return speed, _needed(config, vocab, speed, corpus), findings

    each = ranks // hosts if hosts > 1 and ranks % hosts == 0 else None
    forms = [tried(dealing) for dealing in ([Dealing()] if ranks == 1 else forms_of(config, ranks, each))]
    fitting = (one for one in forms if have is None or one[1] <= ROOM * have)
    speed, need, findings = next(fitting, forms[-1])
    rate, rate_of = _fastest(trials, speed, device)
    flops = flops_per_token(config.model, vocab) * config.train.batch_tokens
    fitted = Fit(
        parameters=parameter_count(config.model, vocab),
        speed=speed,
        vocab=vocab,
        corpus_bytes=corpus,
        probes=probes,
        need_bytes=need,
        have_bytes=have,
        step_seconds=None if rate is None else flops / rate / ranks,
        rate_of=rate_of,
        ranks=ranks,
    )
    return fitted, findings


def _fastest(trials: Trials, speed: "Speed", device: "Device") -> tuple[float | None, str]:
    """FLOPs per second that no step exceeds, and whose rate that is; none for 8-bit products, which are not timed."""
    if speed.execution.fp8:
        return None, ""
    if trials.product_flops is not None:
        return trials.product_flops, "the rate of a matrix product timed here"
    return device.peak_flops, f"the peak rate of {device.name}"


def _needed(config: RunConfig, vocab: int, speed: "Speed", corpus_bytes: int | None) -> int:
    from flatout.engine.memory import memory_of

    # A memory limit holds torch's tensors only; on a real card CUDA's own share has to fit as well.
    own = CONTEXT_BYTES if speed.device.kind == "cuda" and speed.device.limit_bytes is None else 0
    tokens = corpus_bytes or 0 if speed.loader == "device" else 0
    return memory_of(config, vocab, speed).total + own + tokens


def _available(machine: Machine, kind: str, index: int, device: "Device") -> int | None:
    if kind == "cpu":
        return machine.available_bytes or machine.memory_bytes
    if device.memory_bytes is None:
        return None
    if kind != "cuda":
        return device.memory_bytes
    card = machine.cards[index]
    free = (card.memory_bytes or device.memory_bytes) - (card.used_bytes or 0)
    return free if device.limit_bytes is None else min(free, device.limit_bytes)


# --- switches ---------------------------------------------------------------------------------------------------------


def check_switches(fitted: Fit) -> Finding:
    """Switches that came out as something else than was asked for, where that costs something."""
    plain = [feature for feature in fitted.speed.features if feature.why and feature.asked not in ("auto", "null")]
    changed = [feature for feature in plain if feature.asked != feature.used and feature.name not in _HARMLESS]
    if changed:
        listed = "; ".join(f"speed.{one.name} {one.asked} becomes {one.used}: {one.why}" for one in changed)
        advice = "A preset or overlay asked for them; the run goes on without."
        return Check("config", "switches").note(listed, advice)
    shown = [one for one in fitted.speed.features if one.name in ("precision", "kernels", "attention", "compile")]
    return Check("config", "switches").ok(", ".join(f"{one.name} {one.used}" for one in shown))


_HARMLESS = ("micro_batch", "workers", "loss_chunk")


# --- time -------------------------------------------------------------------------------------------------------------


def check_time(config: RunConfig, fitted: Fit, steps: int | None) -> Finding | None:
    """The least time of the run, and its highest rate; a warning where that is days on a CPU."""
    if fitted.step_seconds is None:
        return None
    seconds = None if steps is None else steps * fitted.step_seconds
    least = "" if seconds is None else f"at least {_duration(seconds)}, "
    rate = _count(config.train.batch_tokens / fitted.step_seconds)
    too_long = fitted.speed.device.kind == "cpu" and seconds is not None and seconds >= 48 * 3600
    estimate = "`flatout estimate` times real steps."
    smaller = "This model is not for a CPU. Use a machine with a GPU, or begin with the preset shakespeare; "
    return Check("memory", "least time").told(
        "warn" if too_long else "ok",
        f"{least}at most {rate} tokens/s: the FLOPs of a step at {fitted.rate_of}",
        smaller + estimate if too_long else f"How long it really takes: {estimate}",
    )


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    if seconds < 120:
        return many(round(seconds), "second")
    return (
        f"{seconds / 60:.0f} minutes" if hours < 2 else f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"
    )


def _count(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"
