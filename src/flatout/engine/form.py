"""How several processes share a model: each holds all of it, or slices of it (`parallel.form`).

Data parallel is taken wherever a step fits the device: it gathers nothing. Slices are for what does not fit; between
hosts, whose links are slow, only gradients go if a host can hold the model in slices of its own (hybrid).
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.config.alike import different_decisions, digest, odd_rank, shared_settings
from flatout.config.schema import RunConfig
from flatout.config.source import Source
from flatout.device import Device
from flatout.engine.case import Dealing, Speed, product_type
from flatout.engine.checkpoint import Checkpoint
from flatout.engine.features import resolve_speed
from flatout.engine.fit_check import fits_well, memory_on, out_of_memory, why_not
from flatout.engine.given import Given
from flatout.engine.length import schedule_of, steps_of
from flatout.engine.opening import Opened, vocabulary_of
from flatout.errors import ConfigError
from flatout.model.count import MemoryEstimate, blocks_gathered
from flatout.model.gpt import GPT
from flatout.parallel.ranks import Ranks
from flatout.world import World

if TYPE_CHECKING:
    from flatout.parallel.sharding import Sharding

# Switches that change results. Micro-batches do: each rank takes its share of an evaluation in batches of that size.
_ALIKE = ("precision", "kernels", "compile", "fp8", "optimizer_state", "optimizer_offload", "fused_optimizer")
_ALIKE += ("micro_batch", "accumulation")


def resolve_form(
    opened: Opened,
    source_of: Callable[[str], Source],
    device: Device,
    world: World,
    given: Given,
    threads_before: int | None = None,
) -> tuple[Speed, MemoryEstimate]:
    """The switches and what a step needs with them, in the first form that fits in all processes, or in the last.

    `threads_before` is how many CPU threads the run had, if it is resumed.
    """
    config, facts = opened.config, opened.data.facts
    with world.together():
        waiting, vocab = dealings(config, world, given), vocabulary_of(opened)
    while True:
        dealing, *waiting = waiting
        with world.together():
            shape = {"vocab": vocab, "step_tokens": facts.step_tokens, "threads_before": threads_before}
            shape |= {"ranks": world.size, "ranks_here": _ranks_here(world), "dealing": dealing}
            shape |= {"own_model": given.model is not None, "own_optimizer": given.own_optimizer}
            speed = resolve_speed(config, device, facts.corpus_bytes, source_of, **shape)
            memory = memory_on(opened.data, config, vocab, speed)
        if not waiting:
            break
        short = world.gather(None if fits_well(memory, device) else why_not(memory, device))
        if not any(short):
            break
        why = f"with {dealing.form} {next(filter(None, short))}"
        waiting = [dataclasses.replace(one, why=why) for one in waiting]
    return speed, memory


def _ranks_here(world: World) -> int:
    return world.hosts.count(world.hosts[world.rank]) if isinstance(world, Ranks) else 1


def dealings(config: RunConfig, world: World, given: Given | None = None) -> list[Dealing]:
    """The forms to try, in order: the one that was asked for, or those that `auto` may take."""
    if not isinstance(world, Ranks):
        return [Dealing()]
    asked, here = config.parallel.form, _equal_hosts(world)
    refused = not_in_slices(config) or (None if given is None else given.not_in_slices())
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


def forms_of(config: RunConfig, size: int, each: int | None) -> list[Dealing]:
    """The forms that a run in several processes tries, as `by_preference` counts them; one that was asked for alone."""
    asked = config.parallel.form
    if asked == "auto":
        return by_preference(size, each)[: None if not_in_slices(config) is None else 1]
    return [Dealing(asked, {"data": 1, "hybrid": each or 1, "fsdp": size}[asked])]


def by_preference(size: int, each: int | None) -> list[Dealing]:
    """What `auto` takes on `size` processes: the first of these that fits.

    `each` is how many processes each of several hosts has; None where there is one host, or where they differ.
    """
    inside = [] if each is None or each == 1 else [Dealing("hybrid", each)]
    return [Dealing("data"), *([] if size == 1 else [*inside, Dealing("fsdp", size)])]


def check_decided(opened: Opened, speed: Speed, world: World, given: Given, resumed: Checkpoint | None) -> None:
    """Refuses processes for which something came out differently that would change what they learn.

    Their settings were equal when they met. Hardware, data and files of a host decide the rest.
    """
    if not isinstance(world, Ranks):
        return
    # On a CPU the norm of gradients is summed in another order by another number of threads.
    names = (*_ALIKE, "threads") if speed.device.kind == "cpu" else _ALIKE
    with world.together():
        schedule = schedule_of(opened.data, resumed)
        decided = shared_settings(opened.config) | {f"speed.{name}": getattr(speed, name) for name in names}
        decided |= {
            "parallel.form": speed.parallel,
            "the vocabulary": vocabulary_of(opened),
            "the number of steps": steps_of(opened.config, opened.data.facts, schedule),
            "the step to resume from": 0 if resumed is None else resumed.step,
            "the state of the checkpoint": "" if resumed is None else digest(resumed.state)[:12],
            "what was given in Python": given.names,
        }
    odd = odd_rank(world.gather(digest(decided)))
    if odd is None:
        return
    everywhere = world.gather(decided)
    with world.together():
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


def _equal_hosts(world: Ranks) -> int | None:
    """The processes of each host, where there are several hosts with as many each, one host after the other."""
    hosts = len(set(world.hosts))
    each = world.size // hosts
    rows = [set(world.hosts[at : at + each]) for at in range(0, world.size, each)]
    alike = len(rows) == hosts and all(len(row) == 1 for row in rows)
    return each if hosts > 1 and each > 1 and alike else None


def in_slices(model: GPT, speed: Speed, world: World) -> "Sharding":
    """Slices of the model on the device of each process."""
    from flatout.parallel.sharding import Sharding  # it takes a second to import

    assert isinstance(world, Ranks), "one process has no shards"
    at_once, blocks = blocks_gathered(model.config), list(model.blocks)
    groups = [blocks[first : first + at_once] for first in range(0, len(blocks), at_once)]
    ends = [] if model.config.tied else [[model.embedding], [model.head]]
    kernels = speed.kernels == "triton"  # which take weights in the type of products; torch's own cast for themselves
    with out_of_memory():
        return Sharding(
            model,
            [*groups, *ends],
            world,
            hybrid=speed.parallel == "hybrid",
            device=speed.device.torch_device,
            gathered=product_type(speed.precision) if kernels and speed.precision in ("bf16", "fp16") else None,
            entries=("logits",),
        )
