"""Notices before the first step: settings and weights that are not what they may seem."""

from collections.abc import Callable, Iterator
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.config.unused import cut_pattern, wide_window
from flatout.engine.adapter_folder import adapter_at, stored_base, stored_quantize
from flatout.engine.starting import Start
from flatout.model.adapter_targets import needless_rank
from flatout.model.adapters import Adapters
from flatout.model.gpt import GPT
from flatout.model.quantize import quantized_base


def notices_on_config(config: RunConfig, steps: int, written: Callable[[str], bool]) -> Iterator[str]:
    """Settings that do not mean what they seem to. Intervals only where a user wrote them: those of presets are for
    their own length, and the doctor tells of them."""
    yield from filter(None, (cut_pattern(config.model), wide_window(config.model)))
    if 0 < steps < config.optim.warmup_steps:
        yield (
            f"optim.warmup_steps is {config.optim.warmup_steps:,} and the run has {steps:,} steps, so the warm-up is "
            f"cut to {steps:,}: the learning rate reaches its peak in the last step and never falls"
        )
    every, epochs = config.eval.every, config.eval.epoch_end
    if 0 < steps < every and written("eval.every"):
        which = "the ends of epochs and of the run are" if epochs else "the end is"
        yield f"eval.every {every} is never reached in {steps} steps: only {which} evaluated"
    if 0 < steps < config.checkpoint.every and written("checkpoint.every"):
        between = config.checkpoint.best and (0 < every < steps or epochs)
        which = "the end and each best so far are" if between else "the end is"
        yield f"checkpoint.every {config.checkpoint.every} is never reached in {steps} steps: only {which} saved"


def notices_on_weights(
    config: RunConfig, model: GPT, adapters: Adapters | None, start: Start | None, *, weights: bool
) -> Iterator[str]:
    """`weights` is whether they come from elsewhere, and not from a checkpoint of the run."""
    if start is not None:
        yield start.notice
    base = quantized_base(model)
    if base is not None:
        yield (
            f"base: {base.weights:,} weights of linear layers in 4 bits, {base.bytes / 2**20:,.1f} MiB "
            f"instead of {base.wide_bytes / 2**20:,.1f}"
        )
    if weights:
        yield from _notices_on_adapter(config)
    if adapters is not None:
        yield from needless_rank(adapters.choices)


def _notices_on_adapter(config: RunConfig) -> Iterator[str]:
    """An adapter that training resumes from with its base in other bits works, and does not start where it was."""
    name, ours = config.lora.init_from, config.lora.quantize
    if config.lora.rank and name is not None and Path(name).is_dir():
        folder = adapter_at(name)
        theirs = stored_quantize(folder)
        if stored_base(folder) is not None and ours != theirs:
            yield (
                f"lora.init_from: the adapter was trained with lora.quantize={theirs}, and here it is {ours}, so the "
                "loss does not start where it ended"
            )
