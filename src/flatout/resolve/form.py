"""How several processes share a model: each holds all of it, or slices of it (`parallel.form`).

Data parallel is taken wherever a step fits the device: it gathers nothing. Slices are for what does not fit; between
hosts, whose links are slow, only gradients go if a host can hold the model in slices of its own (hybrid).
"""

import collections
import dataclasses

from flatout.checkpoints.checkpoint import Checkpoint
from flatout.config.alike import different_decisions, digest, odd_rank, shared_settings
from flatout.config.schema import RunConfig
from flatout.device import Device
from flatout.errors import ConfigError
from flatout.model.count import MemoryEstimate
from flatout.resolve.case import Probes, ShardingChoice, Speed
from flatout.resolve.fit_check import fits_well, memory_on, why_not
from flatout.resolve.opening import Opened
from flatout.resolve.plan import Custom, RunPlan
from flatout.resolve.switches import resolve_speed
from flatout.world import World

# Switches that change results. Micro-batches do: each rank takes its share of an evaluation in batches of that size.
_ALIKE = ("precision", "kernels", "compile", "fp8", "optimizer_state", "optimizer_offload", "fused_optimizer")
_ALIKE += ("micro_batch", "accumulation")


def first_form_that_fits(
    opened: Opened,
    vocab: int,
    device: Device,
    world: World,
    custom: Custom,
    threads_before: int | None = None,
    probes: Probes | None = None,
) -> tuple[Speed, MemoryEstimate]:
    """The switches and what a step needs with them, in the first form that fits in all processes, or in the last.

    `threads_before` is how many CPU threads the run had, if it is resumed.
    """
    settings, facts = opened.settings, opened.data.facts
    with world.fail_together():
        waiting = sharding_choices(settings.config, world, custom)
    while True:
        sharding, *waiting = waiting
        with world.fail_together():
            speed = resolve_speed(
                settings.config,
                device,
                facts.corpus_bytes,
                settings.sources.__getitem__,
                vocab=vocab,
                step_tokens=facts.step_tokens,
                threads_before=threads_before,
                ranks=world.size,
                ranks_here=_ranks_here(world),
                sharding=sharding,
                own_model=custom.model,
                own_optimizer=custom.torch_optimizer,
                probes=probes or Probes(),
            )
            memory = memory_on(opened.data, settings.config, vocab, speed)
        if not waiting:
            break
        short = world.gather(None if fits_well(memory, device) else why_not(memory, device))
        if not any(short):
            break
        why = f"with {sharding.form} {next(filter(None, short))}"
        waiting = [dataclasses.replace(one, why=why) for one in waiting]
    return speed, memory


def _ranks_here(world: World) -> int:
    return world.hosts.count(world.hosts[world.rank]) if world.hosts else 1


def sharding_choices(config: RunConfig, world: World, custom: Custom) -> list[ShardingChoice]:
    """The forms to try, in order: the one that was asked for, or those that `auto` may take."""
    if not world.hosts:
        return [ShardingChoice()]
    asked, here = config.parallel.form, _equal_hosts(world)
    refused = not_in_slices(config) or custom.not_in_slices()
    if asked in ("fsdp", "hybrid"):
        if refused is not None:
            raise ConfigError(f"parallel.form is {asked}, but {refused}", "set parallel.form=data")
        if asked == "hybrid" and here is None:
            hosts = collections.Counter(world.hosts)
            counts = ", ".join(f"{count} on {host}" for host, count in hosts.items())
            raise ConfigError(
                f"parallel.form is hybrid, which takes as many processes on each of several hosts, and there are "
                f"{counts}",
                "set parallel.form=fsdp",
            )
    return forms_of(config, world.size, here)[: None if refused is None else 1]


def forms_of(config: RunConfig, size: int, each: int | None) -> list[ShardingChoice]:
    """The forms that a run in several processes tries, as `by_preference` counts them; one that was asked for alone."""
    asked = config.parallel.form
    if asked == "auto":
        return by_preference(size, each)[: None if not_in_slices(config) is None else 1]
    return [ShardingChoice(asked, {"data": 1, "hybrid": each or 1, "fsdp": size}[asked])]


def by_preference(size: int, each: int | None) -> list[ShardingChoice]:
    """What `auto` takes on `size` processes: the first of these that fits.

    `each` is how many processes each of several hosts has; None where there is one host, or where they differ.
    """
    inside = [] if each is None or each == 1 else [ShardingChoice("hybrid", each)]
    return [ShardingChoice("data"), *([] if size == 1 else [*inside, ShardingChoice("fsdp", size)])]


def check_alike(plan: RunPlan, world: World, resumed: Checkpoint | None) -> None:
    """Refuses processes for which something came out differently that would change what they learn.

    Their settings were equal when they met. Hardware, data and files of a host decide the rest.
    """
    if not world.hosts:
        return
    speed = plan.speed
    # On a CPU the norm of gradients is summed in another order by another number of threads.
    names = (*_ALIKE, "threads") if speed.device.kind == "cpu" else _ALIKE
    decided = shared_settings(plan.settings) | {f"speed.{name}": getattr(speed, name) for name in names}
    decided |= {
        "parallel.form": speed.parallel,
        "the vocabulary": plan.vocab,
        "the number of steps": plan.steps,
        "the step to resume from": 0 if resumed is None else resumed.step,
        "the state of the checkpoint": "" if resumed is None else digest(resumed.state)[:12],
        "what comes from Python": plan.custom.names,
    }
    odd = odd_rank(world.gather(digest(decided)))
    if odd is None:
        return
    everywhere = world.gather(decided)
    with world.fail_together():
        ranks = f"rank 0 on {world.hosts[0]}", f"rank {odd} on {world.hosts[odd]}"
        raise different_decisions(everywhere[0], everywhere[odd], ranks)


def not_in_slices(config: RunConfig) -> str | None:
    """What of this config cannot be sharded, or None."""
    if config.lora.rank:
        return "adapters (lora.rank) are not sharded"
    if "E" in config.model.kinds:
        return "blocks of kind E (model.pattern) are not sharded"
    if config.parallel.reduce == "bf16":
        return "parallel.reduce=bf16 is for data parallel: slices of gradients are added up in fp32"
    return None


def _equal_hosts(world: World) -> int | None:
    """The processes of each host, where there are several hosts with as many each, one host after the other."""
    hosts = len(set(world.hosts))
    each = world.size // hosts
    rows = [set(world.hosts[at : at + each]) for at in range(0, world.size, each)]
    alike = len(rows) == hosts and all(len(row) == 1 for row in rows)
    return each if hosts > 1 and each > 1 and alike else None
