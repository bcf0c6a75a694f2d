"""A fine-tuning config judged: the base, its chat template, the rows, what is learned of them, adapters, a step.

Last, `check_start`: the weights that pretraining starts from, if any.

The idea: what `flatout finetune` would do before its first step is done here, with the same functions, in a temporary
folder. So what is fine here is fine there, and an error there is a finding here, in the same words. Of a large source
only the first rows are read. Nothing is fetched from the hub: a base that is not here ends the visit, and that is said.

The contract: as for all checks, nothing is raised for what is found; what was not checked is told in a finding of its
own, which is marked so. Needs a torch that works.
"""

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from flatout.config.load import LoadedConfig
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.unused import check_used
from flatout.config.usual import found_by_range_test
from flatout.corpus.document import Row
from flatout.corpus.readers import read_rows
from flatout.corpus.sources import find_files
from flatout.data.make_samples import row_files
from flatout.data.sample_counts import ADVICE, count_told
from flatout.data.sample_data import SampleData
from flatout.data.training_data import DataFacts
from flatout.device import detect_device, limit_memory
from flatout.diagnose.check_config import check_fine_tuning
from flatout.diagnose.check_folder import check_folder, folder_of
from flatout.diagnose.doctor import Check, Finding, finding_of, in_gib
from flatout.engine.base_model import Base, open_base, open_start
from flatout.engine.features import resolve_speed
from flatout.engine.fit_check import check_disk, check_samples_fit, memory_on
from flatout.engine.length import steps_of, too_few_steps
from flatout.engine.opening import described_config, open_sample_data, sample_limit, sample_tokens, why_samples_are_made
from flatout.engine.run_folder import is_checkpoint
from flatout.engine.trained import adapter_plan, checkpoint_size, trained_count
from flatout.errors import UserError, many
from flatout.model.adapter_targets import choose, needless_rank, targets_of
from flatout.model.count import parameter_count
from flatout.model.gpt import empty_model
from flatout.model.hub_find import is_within_reach
from flatout.model.hub_weights import inventory
from flatout.model.quantize import check_quantizing
from flatout.model.whole import weights_of

_WHOLE, _WHOLE_QUICK = 32 * 2**20, 4 * 2**20  # bytes of a source that is read to its end
_FIRST = 2000  # rows of a larger one
_FEW_LABELS = 0.01
_FETCHED = "It is fetched from the hub when training starts; the hub is not asked now."


def check_chat(loaded: LoadedConfig, *, quick: bool, here: bool) -> Iterator[Finding]:
    """Findings on data, config and memory of a fine-tuning config. `here` says that it would run on this machine."""
    try:
        check_used(loaded)
    except UserError as error:
        yield finding_of(error, "config", "settings")
    base = yield from _check_base(loaded.config)
    if base is None:
        yield from _check_sources(loaded.config)
        yield _unchecked("rows, template, adapters and memory were not checked, as there is no base to read them with")
        return
    with tempfile.TemporaryDirectory(prefix="flatout-doctor-") as temporary:
        # What is looked at, and what cannot be where that fails.
        check, rest = Check("config", "context"), "rows, template, adapters and memory"
        why = "the config does not fit its base"
        try:
            config, cut = base.fit(loaded.config, loaded.sources["model.context"])
            if cut:
                loaded = dataclasses.replace(loaded, config=config)
                yield check.note(cut)
            check, rest = Check("data", "template"), "rows, adapters and memory"
            why = "there is no template to write samples by"
            template, said = base.template_for(loaded.config.chat.template)
            name = "none: samples are bare text" if template is None else template.name
            yield check.ok(said or ("the model's own" if name == "model" else name))
            check, rest, why = Check("data", "rows"), "adapters and memory", "there are no samples"
            base, data, whole = _samples(loaded.config, Path(temporary), _WHOLE_QUICK if quick else _WHOLE)
        except UserError as error:
            yield finding_of(error, check.area, check.name)
            yield _unchecked(f"{rest} were not checked, as {why}")
            return
        yield from _check_samples(loaded.config, data, whole=whole)
        yield from _check_run(loaded, base, data, whole=whole, here=here)


def _check_base(config: RunConfig) -> Generator[Finding, None, Base | None]:
    """The model that is trained, as far as it can be seen without reading all of its weights."""
    name = config.model.init_from
    assert name is not None, "checked by the config"
    if not is_within_reach(name):
        yield Check("data", "base").warn(
            f"{name} is not on this machine",
            f"{_FETCHED} Without a network, name a folder with model.init_from.",
        )
        return None
    try:
        base = open_base(name, config.model.context, ignore_code=config.model.ignore_auto_map)
        if not is_checkpoint(base.description.folder):  # those of ours have been hashed
            inventory(base.description)
    except UserError as error:
        yield finding_of(error, "data", "base")
        return None
    size = parameter_count(base.description.config, base.description.vocab)
    kind, dtype = base.description.model_type, base.description.dtype
    stored = "" if dtype is None else f", in {dtype}"
    yield Check("data", "base").ok(f"{base.name}: {kind} with {size:,} parameters{stored}")
    return base


def _check_sources(config: RunConfig) -> Iterator[Finding]:
    """Whether there is anything to read rows from; without a base that is all that can be said of it."""
    for field, source in {"chat.source": config.chat.source, "chat.val_source": config.chat.val_source}.items():
        if source is not None:
            try:
                files = row_files(source, field)
            except UserError as error:
                yield finding_of(error, "data", "rows")
            else:
                size = sum(file.bytes for file in files) / 1e6
                yield Check("data", "rows").ok(f"{source}: {many(len(files), 'file')}, {size:,.1f} MB, not read")


def _samples(config: RunConfig, temporary: Path, most: int) -> tuple[Base, SampleData, bool]:
    """The samples of a config, and whether they are all of them: those that are there, or made for this visit."""
    _, why = why_samples_are_made(config)
    if not why:
        return *open_sample_data(config, None), True
    assert config.chat.source is not None, "checked by the config"
    chat = config.chat
    found = {"source": chat.source, "val_source": chat.val_source}
    cut = {name: _head(name, source, temporary, most) for name, source in found.items() if source is not None}
    chat = chat.model_copy(update={name: str(path) for name, path in cut.items() if path is not None})
    data = config.data.model_copy(update={"folder": str(temporary / "samples")})
    opened = open_sample_data(config.model_copy(update={"chat": chat, "data": data}), None)
    return *opened, all(path is None for path in cut.values())


def _head(name: str, source: str, temporary: Path, most: int) -> Path | None:
    """A file with the first rows of a source that is too large to be read whole; None for one that is not."""
    files = find_files(source).files
    if sum(file.bytes for file in files) <= most:
        return None
    path = temporary / f"{name}.jsonl"
    rows = itertools.chain.from_iterable(read_rows(file) for file in files)
    with path.open("w", encoding="utf-8") as target:
        for row in itertools.islice(rows, _FIRST):
            if isinstance(row, Row):
                target.write(json.dumps(row.value, default=str) + "\n")
    return path


def _check_samples(config: RunConfig, data: SampleData, *, whole: bool) -> Iterator[Finding]:
    manifest, facts = data.sample_set.manifest, data.train.facts()
    counts = manifest["counts"]
    rows, lost = counts.get("rows", 0), counts.get("rows_not_used", 0)
    reading = (manifest.get("reading") or [{}])[0].get("format", config.chat.format)
    part = "" if whole else f"; only the first {_FIRST:,} rows were read"
    yield Check("data", "rows").ok(f"{config.chat.source}: {many(rows - lost, 'row')}, read as {reading}{part}")
    if lost:
        yield Check("data", "rows not used").warn(
            f"{lost:,} of {many(rows, 'row')} cannot be used",
            "`flatout finetune` lists each with its reason in problems.jsonl beside the samples. Mend them if they are "
            "many.",
        )
    held = len(data.val_samples)
    yield Check("data", "samples").ok(
        f"{facts['samples']:,} to train on, {held:,} held out, longest {facts['longest']:,}"
    )
    share = facts["labelled_share"]
    words = f"{share:.1%} of {facts['tokens']:,} tokens are learned"
    if share < _FEW_LABELS:
        yield Check("data", "learned").warn(
            words, "Most of a step is spent on prompts. Look at chat.train_on and the rows."
        )
    else:
        yield Check("data", "learned").ok(words)
    yield from _check_written(counts)
    dropped = sum(counts.get(name, 0) for name in ("dropped_too_long", "dropped_labels_cut"))
    if counts.get("truncated") or dropped:
        cut = counts.get("truncated", 0)
        yield Check("data", "too long").told(
            "warn" if 20 * (cut + dropped) > facts["samples"] else "note",
            f"samples cut to {sample_tokens(config):,} tokens: {cut:,}; dropped for their length: {dropped:,}",
            f"The longest has {counts.get('longest', 0):,} tokens; raise {sample_limit(config)} to keep all of it.",
        )


def _check_written(counts: Mapping[str, int]) -> Iterator[Finding]:
    """What the template made of the rows that need not be what was meant; a warning where it lost text."""
    for name, advice in ADVICE.items():
        if counts.get(name):
            status = "warn" if name.endswith("_left_out") else "note"
            yield Check("data", name.replace("_", " ")).told(
                status, count_told(name, counts[name]), f"{advice[0].upper()}{advice[1:]}."
            )


def _check_run(loaded: LoadedConfig, base: Base, data: SampleData, *, whole: bool, here: bool) -> Iterator[Finding]:
    """Steps, adapters, the run's folder and the memory of a step, of the config as it would be trained."""
    try:
        config = described_config(loaded.config, base, loaded.sources)
    except UserError as error:
        yield finding_of(error, "config", "model")
        yield _unchecked("steps, adapters and memory were not checked, as the config does not fit its base")
        return
    facts, vocab = data.facts, base.description.vocab
    if whole:
        steps, held = steps_of(config, facts), len(data.val_samples.tokens)
        yield from _check_steps(config, facts, steps, vocab)
        known = {"step_tokens": facts.step_tokens or 1.0, "val_tokens": held}
        known["parameters"] = parameter_count(config.model, vocab)
        tested = found_by_range_test(loaded.sources["optim.learning_rate"])
        yield from filter(None, check_fine_tuning(config, steps=steps, tested_rate=tested, **known))
    yield from _check_adapters(config, vocab)
    yield check_folder(config)
    if not whole:
        yield _unchecked(f"{config.chat.source} is large: rows after the first {_FIRST:,}, and steps, were not checked")
    if not here:
        yield _unchecked("the memory of a step was not checked: this is another machine")
        return
    try:
        device = limit_memory(detect_device(config.speed.device), config.speed.memory_limit)
        sources = loaded.sources.__getitem__
        speed = resolve_speed(config, device, None, sources, vocab=vocab, step_tokens=facts.step_tokens)
        memory = memory_on(data, config, vocab, speed)
        check_samples_fit(data, config, vocab, speed, memory)
    except UserError as error:
        yield finding_of(error, "memory", "a step")
    else:
        have = "" if device.memory_bytes is None else f" of {in_gib(device.memory_bytes)}"
        need = in_gib(memory.total)
        yield Check("memory", "a step").ok(f"needs about {need}{have} on {device.name}")


def _check_steps(config: RunConfig, facts: DataFacts, steps: int, vocab: int) -> Iterator[Finding]:
    batch, samples = config.chat.batch_samples, facts.epoch_samples or 0
    if (few := too_few_steps(config, facts, steps, vocab)) is not None:
        found, _, fix = few.partition(": ")
        yield Check("config", "steps").warn(found, f"{fix[0].upper()}{fix[1:]}.")
    else:
        yield Check("config", "steps").ok(f"{many(steps, 'step')} of {many(min(batch, samples), 'sample')}")
    if batch > samples:
        yield Check("config", "batch").warn(
            f"chat.batch_samples is {batch:,}, and there are {samples:,} samples",
            "Every step takes all of them once and is an epoch. Lower chat.batch_samples for more steps in an epoch.",
        )
    optim = config.optim.with_warmup_steps(steps, lambda epochs: math.ceil(epochs * samples / batch))
    if 0 < steps < optim.warmup_steps:
        yield Check("config", "warm-up").warn(
            f"the warm-up has {many(optim.warmup_steps, 'step')}, and the run has {steps:,}",
            "It is cut to the run: the rate would reach its peak in the last step. Lower optim.warmup_steps, or "
            "optim.warmup where that is set.",
        )


def _check_adapters(config: RunConfig, vocab: int) -> Iterator[Finding]:
    if not config.lora.rank:
        count = parameter_count(config.model, vocab)
        yield Check("config", "trained").ok(f"all {count:,} parameters (lora.rank is 0)")
        yield from _check_space(config, count)
        return
    model = empty_model(config.model, vocab, device="meta")
    try:
        plan = adapter_plan(config.lora)
        choices = choose(plan, targets_of(model))
        weights_of(model, plan.also)
        count = trained_count(config, vocab)
        if config.lora.quantize != "none":
            check_quantizing(detect_device(config.speed.device).torch_device)
    except UserError as error:
        yield finding_of(error, "config", "adapters")
        return
    names = sorted({choice.target.name for choice in choices})
    held = "" if config.lora.quantize == "none" else f", the base in 4 bits ({config.lora.quantize})"
    beside = f", and {' and '.join(config.lora.also)} whole" if config.lora.also else ""
    where = f"adapters of rank {config.lora.rank} on {', '.join(names)}{beside}"
    yield Check("config", "trained").ok(f"{where}: {count:,} parameters{held}")
    for found in needless_rank(choices):
        yield Check("config", "rank").note(found)
    yield from _check_space(config, count)


def _check_space(config: RunConfig, trained: int) -> Iterator[Finding]:
    folder = folder_of(config).absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    kept, one = config.checkpoint.keep + 2, checkpoint_size(trained, config, config.speed)
    try:
        check_disk(nearest, one, kept)
    except UserError as error:
        yield finding_of(error, "disk", "checkpoints")
        return
    yield Check("disk", "checkpoints").ok(f"{kept} of them take about {kept * one / 2**20:,.0f} MiB at most")


def _unchecked(found: str) -> Finding:
    return Finding(area="config", name="the rest", status="note", found=found, unchecked=True)


# --- pretraining ------------------------------------------------------------------------------------------------------


def check_start(model: ModelConfig, vocab: int | None) -> Iterator[Finding]:
    """Whether a model of this config can take the weights that pretraining starts from.

    `vocab` is that of the data, if known; tokenizers are compared when training starts.
    """
    name, check = model.init_from, Check("config", "start")
    if name is not None and not is_within_reach(name):
        yield check.warn(f"{name} is not on this machine", _FETCHED)
        return
    try:
        start = open_start(model, model.vocab or vocab)
    except UserError as error:
        yield finding_of(error, "config", "start")
        return
    if start is not None:
        yield check.ok(start.notice)
