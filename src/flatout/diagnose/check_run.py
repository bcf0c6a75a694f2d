"""A run on a described machine: its plan in spite of what is refused, and whether the machine has room and time for it.

The plan is that of `resolve`, so what is said here of switches, memory, steps and rates is what training would do. The
least time is a bound, not a guess: the FLOPs of a step at the rate of a matrix product; `flatout estimate` times real
steps. This module imports torch: only where `Machine.torch.status` is ok.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flatout.checkpoints.base_model import open_start
from flatout.config.facts import field_facts
from flatout.config.load import LoadedConfig, with_values
from flatout.config.source import DEFAULT
from flatout.device import Device
from flatout.diagnose.doctor import Disk, Machine, Several, TokenFacts, Trials
from flatout.errors import UnevenError, UserError, in_gib, many
from flatout.finding import Check, Finding, finding_of, sentence
from flatout.model.hub_find import is_within_reach
from flatout.resolve.advice import known_steps, step_tokens
from flatout.resolve.case import Probes
from flatout.resolve.fit_check import BESIDE_KEPT, check_disk, fit_of, memory_on, smaller, ways
from flatout.resolve.memory import checkpoint_size, state_of, trained_count
from flatout.resolve.opening import DataSource, check_even
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import resolve
from flatout.world import World

CONTEXT_BYTES = 512 * 2**20  # what CUDA itself holds on a card, beside torch's tensors
FETCHED = "It is fetched from the hub when training starts; the hub is not asked now."
_STEP = Check("memory", "a step")


def decide(
    asked: LoadedConfig,
    sources: Iterable[Callable[[LoadedConfig], DataSource]],
    world: World,
    probes: Probes,
) -> tuple[RunPlan | None, list[Finding]]:
    """The plan of a run, and all that it would be refused for: a setting that is refused is left at its default.

    The first of `sources` that can be opened is taken.
    """
    refused: list[Finding] = []
    for source_of in sources:
        settings: LoadedConfig | None = asked
        while settings is not None:
            try:
                return resolve(source_of(settings), world, probes=probes, must_fit=False), refused
            except UnevenError:  # told by `check_share`
                world = World()
            except UserError as error:
                found = finding_of(error, "config")
                refused += [] if found in refused else [found]
                settings = without(settings, error.setting)
    return None, refused


def without(loaded: LoadedConfig, path: str) -> LoadedConfig | None:
    """The settings as if nobody had written this one; None where nobody did, or where that does not go either."""
    if not path or loaded.sources[path] == DEFAULT:
        return None
    if path.startswith("speed."):  # it falls back to what the machine can have
        return dataclasses.replace(loaded, sources={**loaded.sources, path: DEFAULT})
    try:
        return with_values(loaded, {path: field_facts()[path].default}, DEFAULT)
    except UserError:
        return None


# --- memory -----------------------------------------------------------------------------------------------------------


def check_memory(plan: RunPlan, machine: Machine, index: int, ranks: int) -> Iterator[Finding | None]:
    """Whether a step fits what is free, and what would; whether the host has room for what it keeps."""
    speed, free = plan.speed, _free(machine, plan.speed.device, index)
    if free is None:
        yield _STEP.note("not known, as the device does not tell its memory")
        return
    # A memory limit holds torch's tensors only; on a real card CUDA's own share has to fit as well.
    beside = CONTEXT_BYTES if speed.device.kind == "cuda" and speed.device.limit_bytes is None else 0
    beside += plan.data.facts.corpus_bytes or 0 if speed.loader == "device" else 0
    need = plan.memory.total + beside
    room = f"{in_gib(free)} of {'host memory' if speed.device.kind == 'cpu' else speed.device.name} are free"
    if speed.device.limit_bytes is not None:
        room = f"speed.memory_limit is {in_gib(free)}"
    form = f" in each of {ranks} ranks, parallel.form={speed.parallel}" if ranks > 1 else ""
    found = f"a step of {many(speed.micro_batch, 'sequence')} at once needs about {in_gib(need)}{form}; {room}"
    yield _on_host(plan, machine.available_bytes)
    status = fit_of(need, free)
    if status == "ok":
        yield _STEP.ok(found)
        yield _tiny_micro_batches(plan, free - beside)
        return
    fitting = list(ways(plan, free - beside))
    if status == "warn":
        room = f" {' or '.join(fitting)} would leave room." if fitting else ""
        yield _STEP.warn(found, f"That is tight: fragmentation or an evaluation may not fit any more.{room}")
    elif fitting:
        yield _STEP.bad(found, f"It will run out of memory. What fits: {'; or '.join(fitting)}.")
    else:
        yield _STEP.bad(found, f"No switch makes it fit. {sentence(smaller(shaped=plan.base is None))}")


def _free(machine: Machine, device: Device, index: int) -> int | None:
    """Bytes that a run could have now."""
    if device.kind == "cpu":
        return machine.available_bytes or machine.memory_bytes
    if device.kind != "cuda" or device.memory_bytes is None:
        return device.memory_bytes
    card = machine.cards[index]
    return min((card.memory_bytes or device.memory_bytes) - (card.used_bytes or 0), device.memory_bytes)


def _on_host(plan: RunPlan, have: int | None) -> Finding | None:
    """What an optimizer keeps on the host has to fit there."""
    speed, count = plan.speed, trained_count(plan.settings.config, plan.vocab)
    need = int(state_of(plan.model, plan.optim, speed, count).host * count) if speed.optimizer_offload else 0
    if have is None or need <= 0.8 * have:
        return None
    return Check("memory", "on the host").told(
        "bad" if need > have else "warn",
        f"speed.optimizer_offload keeps {in_gib(need)} in host memory, of which {in_gib(have)} are free",
        "The system would end the run. Close other programs, or set speed.optimizer_state=8bit and "
        "speed.optimizer_offload=false.",
    )


def _tiny_micro_batches(plan: RunPlan, have: int) -> Finding | None:
    """Many small micro-batches where larger ones would fit: the device waits for the host between them."""
    speed, context = plan.speed, plan.model.context
    enough = 8192 if speed.device.kind == "cuda" else 512  # tokens that keep a device busy
    if plan.fine_tunes or speed.accumulation < 8 or speed.micro_batch * context >= enough:
        return None
    share = best = speed.micro_batch
    share *= speed.accumulation
    for size in (size for size in range(best + 1, share + 1) if share % size == 0):
        larger = dataclasses.replace(speed, micro_batch=size, accumulation=share // size)
        memory = memory_on(plan.data, plan.settings.config, plan.vocab, larger)
        if best * context >= enough or fit_of(memory.total, have) != "ok":
            break
        best = size
    if best == speed.micro_batch:
        return None
    return Check("memory", "micro-batch").warn(
        f"{speed.accumulation} micro-batches of {speed.micro_batch} a step, and {best} at once would fit",
        f"So little work at once leaves the device waiting. Set speed.micro_batch={best}, or let `flatout tune` find "
        "the best; the batch and what is learned stay the same.",
    )


# --- time -------------------------------------------------------------------------------------------------------------


def least_seconds(plan: RunPlan, trials: Trials, ranks: int) -> tuple[float | None, str]:
    """The least time of a step, and by whose rate; none for 8-bit products, which are not timed."""
    rate, whose = trials.product_flops, "the rate of a matrix product timed here"
    if rate is None:
        rate, whose = plan.speed.device.peak_flops, f"the peak rate of {plan.speed.device.name}"
    if rate is None or plan.speed.fp8:
        return None, ""
    return plan.flops_per_token * step_tokens(plan) / rate / ranks, whose


def check_time(plan: RunPlan, step_seconds: float | None, whose: str) -> Finding | None:
    """The least time of the run, and its highest rate; a warning where that is days on a CPU."""
    if step_seconds is None:
        return None
    steps = known_steps(plan)
    seconds = 0.0 if steps is None else steps * step_seconds
    least = "" if steps is None else f"at least {_duration(seconds)}, "
    rate = _count(step_tokens(plan) / step_seconds)
    too_long = plan.speed.device.kind == "cpu" and seconds >= 48 * 3600
    estimate = "`flatout estimate` times real steps."
    small = "This model is not for a CPU. Use a machine with a GPU, or begin with the preset shakespeare; "
    return Check("memory", "least time").told(
        "warn" if too_long else "ok",
        f"{least}at most {rate} tokens/s: the FLOPs of a step at {whose}",
        small + estimate if too_long else f"How long it really takes: {estimate}",
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return many(round(seconds), "second")
    hours = seconds / 3600
    if hours < 2:
        return f"{seconds / 60:.0f} minutes"
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _count(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"


# --- disk, start, ranks -----------------------------------------------------------------------------------------------


def check_space(plan: RunPlan, disk: Disk, data: TokenFacts) -> Iterator[Finding]:
    """Room on the disk for the checkpoints that the run keeps, and for shards that are still to be written."""
    if disk.free_bytes is None:
        return
    count, shards = plan.checkpoint.keep + BESIDE_KEPT, data.to_prepare_bytes or 0
    one = checkpoint_size(trained_count(plan.settings.config, plan.vocab), plan.model, plan.optim, plan.speed)
    need = count * one + shards
    for_shards = f", and the shards of the text about {in_gib(shards)}" if shards > 0.05 * count * one + 2**28 else ""
    found = f"{in_gib(disk.free_bytes)} free at {disk.nearest}; up to {count} checkpoints need "
    found += f"{in_gib(count * one)}{for_shards}"
    check = Check("disk", "space")
    try:
        check_disk(Path(disk.nearest), one, count, beside=shards, free=disk.free_bytes)
    except UserError as error:
        yield check.bad(found, sentence(error.hint))
        return
    if disk.free_bytes < 2 * need:
        yield check.warn(found, "It fits, with little to spare for anybody else. Free some space before a long run.")
    else:
        yield check.ok(found)


def check_start(plan: RunPlan, known: TokenFacts) -> Iterator[Finding]:
    """Whether the model can take the weights that pretraining starts from; tokenizers are compared in training."""
    name, check = plan.model.init_from, Check("config", "start")
    if plan.fine_tunes or name is None:
        return
    if not is_within_reach(name):
        yield check.warn(f"{name} is not on this machine", FETCHED)
        return
    try:
        start = open_start(plan.model, plan.vocab if known.vocab or plan.model.vocab else None)
    except UserError as error:
        yield finding_of(error, "config", "start")
    else:
        assert start is not None, "a name was given"
        yield check.ok(start.notice)


def check_share(plan: RunPlan, several: Several) -> Finding | None:
    """Whether ranks share a step evenly."""
    if plan.fine_tunes:
        return None
    check, windows = Check("ranks", "batch"), plan.schedule.at(plan.steps).windows
    try:
        check_even(plan.data, several.size)
    except UnevenError as error:
        divisors = [str(number) for number in range(1, min(windows, 4096) + 1) if windows % number == 0]
        few = f"{sentence(error.hint)[:-1]}: {', '.join(divisors[-8:])}."
        return check.told("bad" if several.asked else "note", error.message, few)
    return check.ok(f"{windows // several.size} of {windows} windows of {plan.model.context:,} tokens a rank and step")
