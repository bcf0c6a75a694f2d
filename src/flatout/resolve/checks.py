"""What is wrong or odd about a plan: refusals that only the whole plan shows, and what a run says before it begins.

Settings that contradict each other are refused when they are loaded (`config/schema.py`), those that a kind of run
never reads in `config/unused.py`. Here is what takes data, device and decided numbers to see. Rules of thumb, which
only the doctor goes by, are in `resolve/advice.py`.
"""

import functools
import shlex
from collections.abc import Iterator
from pathlib import Path

from flatout.checkpoints.base_and_adapter import adapter_at, stored_base, stored_quantize
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.sections import keeps_best
from flatout.config.unused import cut_pattern
from flatout.config.yaml_loader import format_value
from flatout.data.batch import Schedule
from flatout.errors import ConfigError, many
from flatout.finding import Check, Finding
from flatout.model.hub import changes_for_export
from flatout.resolve.fit_check import check_fits, ways
from flatout.resolve.length import too_few_steps
from flatout.resolve.plan import Custom, RunPlan


def check_custom(custom: Custom, config: RunConfig) -> None:
    """Refuses what a model from Python cannot be part of."""
    if not custom.model:
        return
    what = "model= was given"
    if config.fine_tunes:
        raise ConfigError(f"{what}, and chat.source fine-tunes a model from elsewhere", "leave one of them out")
    if config.documents_apart:
        raise ConfigError(
            f"{what}, and data.documents=apart needs attention that knows where documents end",
            "set data.documents=joined",
        )


def check_memory(plan: RunPlan, *, resumed: bool) -> None:
    """Refuses a step that the device cannot have. What a model from Python needs is not known."""
    device = plan.speed.device
    if not plan.custom.model:
        found = functools.partial(ways, plan, device.memory_bytes or 0, resumed=resumed)
        check_fits(plan.memory, device, found, shaped=plan.base is None)


# --- what there is to say of a plan -----------------------------------------------------------------------------------


def checks_on(plan: RunPlan, *, fresh: bool) -> Iterator[Finding]:
    """`fresh` is whether weights come from elsewhere, and not from a checkpoint of the run."""
    config, facts = plan.settings.config, plan.data.facts
    for notice in plan.settings.notices:
        yield Check("config", "settings").note(notice)
    yield from _on_model(plan.model)
    yield from _on_intervals(plan)
    if plan.train.staged and facts.batch_samples is None:
        yield Check("config", "stages").note(_stages(plan.schedule, plan.steps))
    yield from plan.data.notices(plan.speed.delivery())
    if fresh and (few := too_few_steps(config, facts, plan.steps, plan.vocab)) is not None:
        yield Check("config", "steps").warn(few)
    if fresh and plan.base is None and not plan.custom.model and (limit := who_loads_it(config)) is not None:
        yield Check("config", "export").note(limit)
    if fresh:
        yield from _on_adapter(plan)


def _on_model(model: ModelConfig) -> Iterator[Finding]:
    """Blocks that are not what they seem."""
    if (cut := cut_pattern(model)) is not None:
        whole = f"Set model.layers={len(model.pattern)} for the whole pattern, or a pattern that is as short."
        yield Check("config", "pattern").warn(cut, whole)


def _on_intervals(plan: RunPlan) -> Iterator[Finding]:
    """What a run of this length never reaches. An interval of evaluation only where a user wrote it: a preset's is for
    its own length. One of saving always: whoever trusts in it loses the run."""
    asked, optim, steps = plan.settings.config.optim, plan.optim, plan.steps
    every, epochs, saving = plan.eval.steps, plan.eval.epochs, plan.checkpoint
    if 0 < steps < optim.warmup_steps:
        name = "optim.warmup" if isinstance(asked.warmup, int) else f"the warm-up of {asked.warmup}"
        yield Check("config", "warm-up").warn(
            f"{name} is {optim.warmup_steps:,} and the run has {many(steps, 'step')}, so the warm-up is "
            f"cut to {steps:,}: the learning rate reaches its peak in the last step and never falls",
            f"Set {shorter_warmup(plan)}, a twentieth of the run, or train longer.",
        )
    if 0 < steps < every and plan.settings.sources["eval.every"].by_user:
        yield Check("config", "evaluation").warn(
            f"eval.every {every} is never reached in {many(steps, 'step')}: only the end is evaluated",
            f"Set eval.every={max(1, steps // 10)} to see the run learn.",
        )
    if 0 < steps < saving.steps:
        between = keeps_best(plan.eval, saving) and (0 < every < steps or epochs)
        which = "the end and each best so far are" if between else "the end is"
        lost = "everything since its best evaluation" if between else "everything"
        yield Check("config", "saving").warn(
            f"checkpoint.every {saving.every} is never reached in {many(steps, 'step')}: only {which} saved",
            f"A run that is killed loses {lost}. Set checkpoint.every={max(1, steps // 4)}.",
        )


def shorter_warmup(plan: RunPlan) -> str:
    """The setting of a warm-up that is a twentieth of the run."""
    asked = plan.settings.config.optim.warmup
    return f"optim.warmup={max(1, plan.steps // 20) if isinstance(asked, int) else 0.05}"


def _stages(schedule: Schedule, steps: int) -> str:
    """Which steps each stage has, and what they read."""
    firsts = [stage.first_step for stage in schedule.stages]
    listed = []
    for stage, end in zip(schedule.stages, [*firsts[1:], steps], strict=True):
        window = "" if stage.attention_window is None else f", window {stage.attention_window:,}"
        listed.append(f"{stage.first_step + 1:,} to {end:,} of {stage.sequences:,} x {stage.length:,} tokens{window}")
    return f"stages: steps {'; '.join(listed)}"


def _on_adapter(plan: RunPlan) -> Iterator[Finding]:
    """An adapter that training resumes from with its base in other bits works, and does not start where it was."""
    name, ours = plan.lora.init_from, plan.lora.quantize
    if plan.lora.rank and name is not None and Path(name).is_dir():
        folder = adapter_at(name)
        theirs = stored_quantize(folder)
        if stored_base(folder) is not None and ours != theirs:
            yield Check("config", "adapter").warn(
                f"lora.init_from: the adapter was trained with lora.quantize={theirs}, and here it is {ours}, so the "
                "loss does not start where it ended",
                f"Set lora.quantize={theirs}.",
            )


OTHERS = "transformers, vLLM or llama.cpp"
_FEW = 3  # settings that are worth changing one by one; more of them make another model, which a preset is


def who_loads_it(config: RunConfig) -> str | None:
    """What to say at the start of a run whose model only Flatout loads; None where other programs load it, too."""
    if not changes_for_export(config.model):
        return None
    return f"only Flatout loads this model, not {OTHERS}; {way_to_export(config)}"


def way_to_export(config: RunConfig) -> str:
    """The settings or the command that train a model which other programs load."""
    needed = changes_for_export(config.model)
    if len(needed) <= _FEW and config.train.minutes is None:
        words = " ".join(f"model.{field}={format_value(value)}" for field, value in needed.items())
        return f"one that is trained with {words} can be exported"
    length = "" if config.train.minutes is None else f" --minutes {round(config.train.minutes, 3):g}"
    source = f"data.source={config.data.source if isinstance(config.data.source, str) else '...'}"
    return f"`flatout train modern{length} {shlex.quote(source)}` trains one that can be exported"
