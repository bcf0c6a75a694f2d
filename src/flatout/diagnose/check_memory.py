"""Whether a step fits the memory there is, and if not, an overlay or switches with which it does.

The contract: every way that is named was reckoned through and fits, with room to spare. What is learned stays the same
with all of them. torch is needed, through `check_fit`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig, SpeedConfig
from flatout.diagnose.check_fit import Fit
from flatout.diagnose.doctor import Check, Finding, in_gib

_STEP = Check("memory", "a step")
_TIGHT = 0.92  # of the memory: fragmentation and evaluation want the rest
# Switches that save memory, the cheapest in time first, each on top of nothing.
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "selective"},
    {"loss": "fused", "loss_chunk": 2048},
    {"checkpointing": "full"},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048, "optimizer_state": "8bit"},
    {"checkpointing": "full", "loss": "fused", "loss_chunk": 2048, "optimizer_offload": True},
)


def check_memory(
    loaded: LoadedConfig,
    fitted: Fit | None,
    host_bytes: int | None,
    with_hardware: Callable[[str], LoadedConfig | None],
) -> Iterator[Finding | None]:
    """Whether a step fits; if not, what would. `host_bytes` are free on the host; `with_hardware` loads the same config
    with a memory overlay."""
    if fitted is None or fitted.have_bytes is None:
        yield _STEP.note("not known, as torch is needed to reckon it, or the device does not tell its memory")
        return
    need, have, config = fitted.need_bytes, fitted.have_bytes, loaded.config
    of = "host memory" if fitted.speed.device.kind == "cpu" else fitted.speed.device.name
    room = f"{in_gib(have)} of {of} are free"
    if fitted.speed.device.limit_bytes is not None:
        room = f"speed.memory_limit is {in_gib(have)}"
    many = "1 sequence" if fitted.speed.micro_batch == 1 else f"{fitted.speed.micro_batch} sequences"
    form = f" in each of {fitted.ranks} ranks, parallel.form={fitted.speed.parallel}" if fitted.ranks > 1 else ""
    found = f"a step of {many} at once needs about {in_gib(need)}{form}; {room}"
    yield _on_host(config, fitted, host_bytes)
    if need <= _TIGHT * have:
        yield _STEP.ok(found)
        yield _tiny_micro_batches(config, fitted, have)
        return
    ways = list(_ways(loaded, fitted, have, with_hardware))
    if need <= have:
        smaller = f" {' or '.join(ways)} would leave room." if ways else ""
        yield _STEP.warn(found, f"That is tight: fragmentation or an evaluation may not fit any more.{smaller}")
        return
    if ways:
        advice = f"It will run out of memory. What fits: {'; or '.join(ways)}. What is learned stays the same."
    else:
        advice = (
            "No switch makes it fit: weights, gradients and moments alone take 16 bytes for each parameter. Lower "
            "model.layers, model.width or model.context, or use a card with more memory."
        )
    yield _STEP.bad(found, advice)


def _on_host(config: RunConfig, fitted: Fit, have: int | None) -> Finding | None:
    """What an optimizer keeps on the host has to fit there, and so has the copy of a checkpoint that was asked for."""
    offloaded, copied = fitted.speed.optimizer_offload, config.checkpoint.asynchronous == "on"
    if not offloaded and not copied:
        return None
    from flatout.engine.trained import checkpoint_size, state_of  # the doctor starts without torch

    need = int(state_of(config, fitted.speed, fitted.parameters).host * fitted.parameters) if offloaded else 0
    need += checkpoint_size(fitted.parameters, config, fitted.speed) if copied else 0
    if have is None or need <= 0.8 * have:
        return None
    names = {"speed.optimizer_offload": offloaded, "checkpoint.asynchronous=on": copied}
    keeping = [name for name, kept in names.items() if kept]
    ways = ["set speed.optimizer_state=8bit and speed.optimizer_offload=false"] if offloaded else []
    ways += ["set checkpoint.asynchronous=off"] if copied else []
    return Check("memory", "on the host").told(
        "bad" if need > have else "warn",
        f"{' and '.join(keeping)} {'keeps' if len(keeping) == 1 else 'keep'} {in_gib(need)} in host memory, of which "
        f"{in_gib(have)} are free",
        f"The system would end the run. Close other programs, or {', or '.join(ways)}.",
    )


def _ways(
    loaded: LoadedConfig, fitted: Fit, have: int, with_hardware: Callable[[str], LoadedConfig | None]
) -> Iterator[str]:
    """Up to three ways to fit, each as words to add to the command line."""
    told, best = 0, 0
    if fitted.speed.device.kind == "cuda":
        name = hardware_for(have)
        other = with_hardware(name)
        need = None if other is None else fitted.need_of(other.config)
        if other is not None and need is not None and need <= _TIGHT * have:
            told += 1
            yield f"--hardware {name} (about {in_gib(need)})"
    for saving in _SAVINGS:
        if told >= 3:
            return
        found = _largest(loaded.config, saving, fitted, have)
        if found is None or found[0] < 2 * best:
            continue  # dearer, and not a larger micro-batch for it
        best, need = found
        words = [f"speed.micro_batch={best}", *(f"speed.{name}={_word(value)}" for name, value in saving.items())]
        told += 1
        yield f"{' '.join(words)} (about {in_gib(need)})"
        if best * 8 >= fitted.speed.micro_batch:
            return  # nothing dearer is worth naming


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _largest(config: RunConfig, saving: dict[str, Any], fitted: Fit, have: int) -> tuple[int, int] | None:
    """The largest micro-batch below the config's that fits with these switches, and what it needs."""
    sequences = config.train.batch_tokens // config.model.context
    # Halving finds the right order of magnitude in few tries; the config takes the next divisor below.
    size = fitted.speed.micro_batch if saving else fitted.speed.micro_batch // 2
    while size >= 1:
        changed = _with_speed(config, {**saving, "micro_batch": size, "accumulation": None})
        need = None if sequences % size else fitted.need_of(changed)
        if need is not None and need <= _TIGHT * have:
            return size, need
        size //= 2
    return None


def _with_speed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    speed = SpeedConfig.model_validate({**config.speed.model_dump(), **changes})
    return config.model_copy(update={"speed": speed})


def _tiny_micro_batches(config: RunConfig, fitted: Fit, have: int) -> Finding | None:
    """Many small micro-batches where larger ones would fit: the device waits for the host between them."""
    speed = fitted.speed
    enough = 8192 if speed.device.kind == "cuda" else 512  # tokens that keep a device busy
    if speed.accumulation < 8 or speed.micro_batch * config.model.context >= enough:
        return None
    sequences = config.train.batch_tokens // config.model.context
    best = speed.micro_batch
    for size in (size for size in range(speed.micro_batch + 1, sequences + 1) if sequences % size == 0):
        need = fitted.need_of(_with_speed(config, {"micro_batch": size, "accumulation": None}))
        if need is None or need > _TIGHT * have:
            break
        best = size
        if size * config.model.context >= enough:
            break
    if best == speed.micro_batch:
        return None
    return Check("memory", "micro-batch").warn(
        f"{speed.accumulation} micro-batches of {speed.micro_batch} a step, and {best} at once would fit",
        f"So little work at once leaves the device waiting. Set speed.micro_batch={best}, or let `flatout tune` find "
        "the best; the batch and what is learned stay the same.",
    )
