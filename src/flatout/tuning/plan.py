"""What a ladder is about: a config fitted for measuring, and which rungs its device cannot have.

Contract: only the length, the batch's cap and the warm-up of the config are changed, and each change is said. A rung's
values count as a preset's, so that a device answers with a reason instead of an error.
"""

import dataclasses
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.config.facts import field_facts, value_at
from flatout.config.load import LoadedConfig, load_stored
from flatout.config.schema import SpeedConfig, micro_batch_of
from flatout.config.source import DEFAULT, Source
from flatout.config.yaml_loader import format_value
from flatout.device import Device, allocator_words, detect_device
from flatout.errors import ConfigError, HardwareError, UsageError
from flatout.host import thread_words
from flatout.ops.attention import FA4
from flatout.records import BenchRow
from flatout.resolve.memory import training_flops
from flatout.resolve.opening import DataSource, vocabulary_of
from flatout.resolve.switches import Speed, resolve_speed
from flatout.tuning.measure import machine_of
from flatout.tuning.practice_data import practice_config, practice_samples
from flatout.tuning.rungs import BASELINE, OWN_SWITCHES, Rung, all_rungs, as_words, settings_of
from flatout.tuning.turns import LOOKS, PERIOD, tricks_for

CHOSEN = 4  # steps of a run over samples that are taken
MOST_SEQUENCES = 64  # of a step, unless told otherwise: the naive baseline takes seconds for them on any card
# Fields of `speed` that legitimately end up as something else than was written.
_NOT_CHECKED = ("micro_batch", "accumulation", "workers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a ladder is about: one config, one device, one dataset, and the same facts in every row.

    `chosen` are the steps that a ladder over samples takes, over and over: they differ, so all rungs take the same.
    """

    settings: LoadedConfig
    device: Device
    machine: str
    corpus_bytes: int | None
    data: str
    vocab: int
    batch_tokens: int  # of a step; of the chosen ones on average
    flops_per_token: float
    chosen: tuple[int, ...]
    steps: int
    parity_steps: int
    config_words: tuple[str, ...]
    commit: str | None


def make_plan(
    loaded: LoadedConfig,
    scratch: Path,
    steps: int,
    parity_steps: int,
    batch_tokens: int | None,
    notice: Callable[[str], None],
    earlier: Sequence[BenchRow] = (),
) -> Plan:
    """Fits a config for measuring, and says what was changed for that.

    `earlier` rows are gone on from: with `speed.threads=auto`, the others get as many CPU threads as they had.
    """
    threads = next((int(row.used["threads"]) for row in earlier if row.used.get("threads", "").isdigit()), None)
    samples = None
    if loaded.config.fine_tunes:
        if batch_tokens is not None:
            raise UsageError(
                "--batch-tokens is for pretraining, and this config has chat.source", "set chat.batch_samples"
            )
        samples = practice_samples(loaded, scratch, notice)
        practice, described = samples.settings, samples.described
    else:
        practice, described = practice_config(loaded, scratch, notice)
    notice(f"data: {described}")
    _tell_unused(practice, notice)
    words = [] if samples is not None else [f"train.batch_tokens={_tokens(practice, batch_tokens, notice)}"]
    words += _length(practice, steps, parity_steps, notice)
    fitted = load_stored(practice.config.model_dump(), words, where="bench")
    if samples is None:
        opened = DataSource(fitted, detect_device(fitted.config.speed.device)).open(fitted)
        data, vocab, attended, chosen = opened.data, vocabulary_of(opened), None, ()
        tokens = fitted.config.train.batch_tokens
    else:
        data, vocab, attended, chosen = samples.data, samples.vocab, samples.data.facts.attended, samples.spread(CHOSEN)
        tokens = round(sum(map(samples.tokens, chosen)) / len(chosen))
    return _plan(
        loaded,
        fitted,
        threads,
        corpus_bytes=data.facts.corpus_bytes,
        data=described,
        vocab=vocab,
        batch_tokens=tokens,
        flops_per_token=training_flops(fitted.config, vocab, attended),
        chosen=chosen,
        steps=steps,
        parity_steps=parity_steps,
    )


def _tokens(loaded: LoadedConfig, asked: int | None, notice: Callable[[str], None]) -> int:
    """Tokens of a step, of which there may be fewer than the config has."""
    context = loaded.config.model.context
    tokens = asked or loaded.config.train.batch_tokens
    if tokens % context:
        raise ConfigError(
            f"a batch of {tokens} tokens is not a multiple of model.context {context}",
            f"set --batch-tokens to a multiple of it, such as {max(1, tokens // context) * context}",
        )
    written = asked is not None or loaded.sources["train.batch_tokens"].kind == "override"
    if tokens > MOST_SEQUENCES * context and not written:
        tokens = MOST_SEQUENCES * context
        notice(f"a step has {tokens:,} tokens instead of {loaded.config.train.batch_tokens:,}; --batch-tokens sets it")
    return tokens


def _tell_unused(loaded: LoadedConfig, notice: Callable[[str], None]) -> None:
    unused = [f"{path}={format_value(value_at(loaded.config, path))}" for path in OWN_SWITCHES if _sets(loaded, path)]
    if unused:
        notice(f"the ladder sets its switches itself; of the config it does not use {', '.join(unused)}")


def _length(loaded: LoadedConfig, steps: int, parity_steps: int, notice: Callable[[str], None]) -> list[str]:
    """Words for a run that is long enough to be measured, and whose rate rises soon."""
    warmup = loaded.config.optim.warmup
    is_long = not isinstance(warmup, int)  # a share of a run, or epochs of data, that are not measured
    if is_long or (warmup > parity_steps and loaded.sources["optim.warmup"].kind != "override"):
        warmup = parity_steps
        notice(f"the learning rate reaches its peak in {warmup} steps, so that the parity gate sees weights move")
    turns = LOOKS[-1]  # each with a step that is not timed
    length = max(1000, parity_steps + steps + turns + PERIOD)
    return [f"train.steps={length}", f"optim.warmup={warmup}"]


def _plan(loaded: LoadedConfig, fitted: LoadedConfig, threads_before: int | None, **known: Any) -> Plan:
    device = detect_device(loaded.config.speed.device)
    how = {"vocab": known["vocab"], "threads_before": threads_before}
    threads = resolve_speed(fitted.config, device, None, lambda _: DEFAULT, **how).threads
    if device.kind == "cpu":  # one number for all rungs
        fitted = load_stored(fitted.config.model_dump(), [f"speed.threads={threads}"], where="bench")
    return Plan(
        **known,
        settings=fitted,
        device=device,
        machine=machine_of(device, threads),
        config_words=tuple(
            f"{path}={format_value(value_at(loaded.config, path))}"
            for path, source in loaded.sources.items()
            if source.by_user and not path.startswith("output.") and path not in OWN_SWITCHES
        ),
        commit=commit_of(Path(flatout.__file__).parent),
    )


def _sets(loaded: LoadedConfig, path: str) -> bool:
    """Whether a file or preset gives this switch another value than it has anyway."""
    name = path.removeprefix("speed.")
    default = SpeedConfig.model_fields[name].default
    return loaded.sources[path].kind != "default" and getattr(loaded.config.speed, name) != default


def check_same(plan: Plan, earlier: Sequence[BenchRow]) -> None:
    """Refuses to go on with rows of another config, machine or code: their speeds would not compare."""
    facts: dict[str, tuple[str, object]] = {
        "config": ("the config", plan.settings.config.output.name),
        "batch_tokens": ("train.batch_tokens", plan.batch_tokens),
        "parity_steps": ("--parity-steps", plan.parity_steps),
        "device": ("the device", plan.machine),
        "torch": ("torch", torch.__version__),
        "flatout": ("flatout", flatout.__version__),
        "commit": ("the commit", plan.commit),
    }
    for row in earlier:
        pairs = [(words, getattr(row, name), now) for name, (words, now) in facts.items()]
        before, now = set(row.config_words), set(plan.config_words)
        told = [", ".join(sorted(part)) or "none" for part in (before - now, now - before)]
        for words, was, is_now in [*pairs, ("the settings", *told)]:
            if was != is_now:
                threads = thread_words() if words == "the device" and plan.device.kind == "cpu" else None
                unset = "" if threads is None else f", or go on without {threads}: auto takes the threads of the rows"
                raise UsageError(
                    f"the rows there were measured with {words} {was or 'unknown'}, now it is {is_now or 'unknown'}",
                    f"name a new folder for this ladder{unset}",
                )


def commit_of(folder: Path) -> str | None:
    """The commit of the code that runs, marked where files were changed since; None outside of a git tree."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):  # no git on this machine
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def config_for(plan: Plan, settings: dict[str, str]) -> LoadedConfig:
    """The config of a rung; its values count as a preset's, so that a device answers with a reason, not an error."""
    config = load_stored(plan.settings.config.model_dump(), as_words(settings), where="bench").config
    return LoadedConfig(config, dict.fromkeys(field_facts(), Source("preset", "bench")))


def resolved(plan: Plan, settings: dict[str, str]) -> Speed:
    config = config_for(plan, settings).config
    how = {"vocab": plan.vocab, "step_tokens": plan.batch_tokens if plan.chosen else None}
    return resolve_speed(config, plan.device, plan.corpus_bytes, lambda _: DEFAULT, **how)


def rungs_for(plan: Plan) -> list[Rung]:
    """Every rung that a device of this kind has; `absences` says which of them this very one cannot have."""
    attention = plain_attention = resolved(plan, {"speed.compile": "off"}).execution.attention
    if attention in FA4:
        words = {"speed.attention": "auto", "speed.kernels": "torch", "speed.compile": "off"}
        plain_attention = resolved(plan, words).execution.attention
    return all_rungs(
        kind=plan.device.kind,
        micro_batch=micro_batch_of(plan.settings.config)[0],
        attention=attention,
        plain_attention=plain_attention,
        eigenstates="E" in plan.settings.config.model.kinds,
        samples=bool(plan.chosen),
    )


def absences(plan: Plan, rungs: Sequence[Rung]) -> dict[str, str]:
    """The rungs that this device cannot have, each with the reason."""
    absent: dict[str, str] = {}
    climbed: list[Rung] = []
    for rung in rungs:
        reason = why_absent(plan, rung, settings_of(rung, climbed))
        if reason is not None:
            absent[rung.name] = reason
        elif rung.group == "ladder":
            climbed.append(rung)
    return absent


def why_absent(plan: Plan, rung: Rung, settings: dict[str, str]) -> str | None:
    if rung.trick is not None:
        if rung.trick in tricks_for(plan.device):
            return None
        return "only CUDA devices have it" if plan.device.kind != "cuda" else f"{allocator_words()} is set"
    if rung.name in ("attention", "fa4-backward") and rung.words == rung.out:
        return f"auto takes {rung.words['speed.attention']} here, which the ladder already has"
    # Whether the compiler works is asked by compiling something: not again for every rung above.
    settings = settings if "speed.compile" in rung.words else {**settings, "speed.compile": "off"}
    try:
        refused = refusals(resolved(plan, settings), settings)
    except HardwareError as error:
        return error.message
    own = [reason for path, reason in refused.items() if path in rung.words]
    return own[0] if own else None


def refusals(speed: Speed, settings: dict[str, str]) -> dict[str, str]:
    """The words of a rung that this device does not follow, each with the reason."""
    found = {f"speed.{feature.name}": feature for feature in speed.features}
    refused: dict[str, str] = {}
    for path, asked in settings.items():
        name, feature = path.removeprefix("speed."), found.get(path)
        if name == path:  # no switch of `speed`
            continue
        if feature is None:  # whoever says nothing of a switch has done nothing with it
            refused |= {} if asked == BASELINE.get(path) else {path: f"{name} is not told of"}
        elif name not in _NOT_CHECKED and feature.used.partition(" (")[0] != asked:
            refused[path] = f"{name} is {feature.used} here: {feature.why or 'it was not taken'}"
    return refused
