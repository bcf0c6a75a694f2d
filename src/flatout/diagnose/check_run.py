"""The run of a config on a described machine: decided as training decides it, then judged.

The plan is that of `resolve`, so what is found about switches, memory, steps and rates is what training would do. What
training would refuse is a finding in the same words. Nothing is prepared but samples of a fine-tuning run, in a
temporary folder, by the functions that training calls. Nothing is fetched from the hub: where the base is not on this
machine, the run is not checked, and a finding says so.

The least time is a bound, not a guess: the FLOPs of a step at the rate of a matrix product; `flatout estimate` times
real steps. Where several ranks were not asked for, what would be bad for them is a note. Ranks that start compare what
they have by themselves (`parallel.ranks`, `resolve.form`).

This module imports torch: only where `Machine.torch.usable`.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from flatout.checkpoints.base_and_adapter import Base, open_base, open_start
from flatout.checkpoints.run_folder import is_checkpoint
from flatout.config.load import LoadedConfig, with_values
from flatout.config.schema import ChatConfig, ModelConfig
from flatout.config.sizes import Known, usual_vocab
from flatout.config.source import Source
from flatout.data.batch import BatchLoader, DataFacts, Delivery, Span, TrainingData, check_evaluable
from flatout.data.sample_data import SampleData
from flatout.data.sampler import window_count
from flatout.data.samples import row_files
from flatout.data.shard_data import check_length
from flatout.data.tokenizer import Ids, IdTokenizer
from flatout.device import Device, limit_memory
from flatout.diagnose.check_data import TokenFacts
from flatout.diagnose.check_folder import Disk
from flatout.diagnose.check_kernels import DeviceTrials
from flatout.diagnose.machine import Machine
from flatout.errors import UnevenError, UserError, in_gib, many
from flatout.finding import Check, Finding, finding_of, sentence, unchecked
from flatout.host import ThreadTrial
from flatout.model.count import parameter_count
from flatout.model.hub_folder import inventory, is_within_reach
from flatout.model.quantize import check_quantizing
from flatout.resolve.advice import advice_on, known_steps, step_tokens
from flatout.resolve.case import Probes
from flatout.resolve.fit_check import BESIDE_KEPT, check_disk, fit_of, smaller, ways
from flatout.resolve.length import asked_schedule
from flatout.resolve.memory import checkpoint_size, state_of, trained_count
from flatout.resolve.opening import DataSource, Opened, check_even, why_samples_are_made, with_tokenizer
from flatout.resolve.plan import RunPlan
from flatout.resolve.resolve import resolve
from flatout.world import World

# --- the visit --------------------------------------------------------------------------------------------------------

# Checks that go by the number of steps, which is not known of a length in minutes.
_OF_STEPS = ("steps", "length", "warm-up", "evaluation", "saving", "samples")
_MADE = ("data", "folder")  # of samples: it was made for this visit and is gone


class RunVisit:
    """What there is to say of one run. `plan` is None until one of the first three methods could decide it."""

    def __init__(self, machine: Machine, device: Device, index: int, trials: DeviceTrials, world: World) -> None:
        self.machine, self.device, self.index, self.trials, self.world = machine, device, index, trials, world
        self.plan: RunPlan | None = None
        self.tokens = TokenFacts()

    def with_tokenizer(self, asked: LoadedConfig) -> LoadedConfig:
        return with_tokenizer(asked, self.device)

    def decide_on_text(self, asked: LoadedConfig, known: TokenFacts) -> Iterator[Finding]:
        """`known` is what looking at the text has found."""
        self.tokens = known
        exact, expected = DataSource, functools.partial(ExpectedSource, known=known)
        self._decide((exact if known.exact else expected)(asked, self.device))
        if self.plan is not None and asked.size is not None and not known.exact:
            found = "decided as for text that is read once, because its tokens are not counted"
            if known.train_tokens is not None:
                found = f"decided for about {known.train_tokens:,} tokens to train on; a run counts them first"
            yield Check("config", "size").note(found)

    def open(self, asked: LoadedConfig, _: contextlib.ExitStack) -> Iterator[Finding]:
        """Opens data that is neither text nor rows as training does."""
        self._decide(DataSource(asked, self.device))
        if self.plan is not None:
            data = self.plan.data
            known = {"train_tokens": data.facts.train_tokens, "val_tokens": data.val.tokens}
            self.tokens = TokenFacts(exact=True, vocab=data.tokenizer.vocab, **known)
            counted = "" if data.facts.train_tokens is None else f"{data.facts.train_tokens:,} tokens to train on, "
            counted += f"{data.val.tokens:,} to validate, tokenizer {data.tokenizer.kind}"
            yield Check("data", "source").ok(f"{data.facts.place}: {counted} with {data.tokenizer.vocab:,} ids")

    def look_at_rows(self, asked: LoadedConfig, scratch: contextlib.ExitStack) -> Iterator[Finding]:
        folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="flatout-doctor-")))
        ready = yield from look_at_chat(asked, folder)
        if ready is None:
            return
        self._decide(DataSource(ready, self.device))
        if self.plan is not None:
            yield from check_samples(self.plan)

    def _decide(self, source: DataSource) -> None:
        self.plan = resolve(source, self.world, probes=probes_of(self.machine, self.trials), must_fit=False)

    def judge(self, plan: RunPlan, disk: Disk) -> Iterator[Finding | None]:
        about = "" if self.tokens.exact or plan.fine_tunes else "about "
        counted = known_steps(plan) is not None
        for one in (*plan.checks, *advice_on(plan, about=about)):
            by_steps = one.area == "config" and one.name in _OF_STEPS
            if (counted or not by_steps) and (one.area, one.name) != _MADE:
                yield one
        yield from check_space(plan, disk, self.tokens)
        yield from check_start(plan, self.tokens)
        yield from check_memory(plan, self.machine, self.index, self.world.size)
        yield check_time(plan, *least_seconds(plan, self.trials, self.world.size))


# --- a described machine ----------------------------------------------------------------------------------------------


def device_of(machine: Machine, kind: str, index: int, memory_limit: float | None) -> Device:
    """torch's view of a described machine."""
    if kind != "cuda":
        memory = machine.memory_bytes if kind == "cpu" else None
        return Device(torch_device=torch.device(kind), name=kind, memory_bytes=memory, capability=None)
    card = machine.cards[index]
    device = Device(
        torch_device=torch.device("cuda", index),
        name=card.name,
        memory_bytes=card.memory_bytes,
        capability=card.capability,
    )
    return limit_memory(device, memory_limit)


def probes_of(machine: Machine, trials: DeviceTrials) -> Probes:
    """The trials' answers; what was not tried counts as working, unless its package is missing."""

    def attention(backend: str, _device: object, **_: object) -> str | None:
        if "fa4" in backend and machine.packages.get("flash_attn.cute") is None:
            return "flash-attn-4 is not installed (the extra flatout[fa4])"
        return trials.failure(f"attention {backend}")

    cores = max(1, int(machine.usable_cores))
    return Probes(
        attention=attention,
        picked=lambda *_, **__: trials.picked,
        documents=attention,
        compiler=lambda _: trials.failure("torch.compile"),
        products=lambda: trials.failure("cuBLASLt"),
        threads=lambda *_: trials.threads or ThreadTrial(seconds={cores: 0.0}, cores=cores),
        triton=lambda: machine.triton.status == "ok" and trials.failure("triton kernels") is None,
    )


@final
@dataclasses.dataclass(eq=False)
class ExpectedSplit:
    """A split that has not been made yet."""

    split: str
    tokens: int
    folder: str
    text_bytes: int = 0

    def read(self, start: int, length: int) -> Ids:
        raise NotImplementedError("there are no tokens yet")


@final
class ExpectedText(TrainingData):
    """Text as it will be once it is prepared, by what is known of its tokens. It has facts, and no batches."""

    def __init__(self, settings: LoadedConfig, known: TokenFacts, vocab: int) -> None:
        config, data, context = settings.config, settings.config.data, settings.config.model.context
        place = str(data.folder if data.source is None else data.source)
        train, windows = ExpectedSplit("train", known.train_tokens or 0, place), None
        self.val = ExpectedSplit("val", known.val_tokens or 0, place)
        if known.train_tokens is not None and config.data_kind == "text":
            if data.packing == "best_fit":  # about: padding is small
                windows = train.tokens // (context + 1)
            else:
                check_length(train, context)
                windows = window_count(train.tokens, context, data.stride or context)
        if known.val_tokens is not None:
            check_evaluable(self.val)
        self.tokenizer = IdTokenizer(vocab)
        self.schedule = asked_schedule(config, windows)
        self.facts = DataFacts(
            fingerprint="",
            place=place,
            train_tokens=known.train_tokens,
            windows=windows,
            corpus_bytes=None if config.data_kind == "stream" else train.tokens * known.token_bytes,
        )

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        raise NotImplementedError("there are no tokens yet")

    def notices(self, delivery: Delivery) -> tuple[Finding, ...]:
        return ()


@final
class ExpectedSource(DataSource):
    """The text of settings, which stays as it is."""

    def __init__(self, asked: LoadedConfig, device: Device, known: TokenFacts) -> None:
        super().__init__(asked, device)
        self.tokens = known

    @property
    def vocab(self) -> int:
        config = self.asked.config
        return self.tokens.vocab or config.model.vocab or usual_vocab(config.data.tokenizer)

    def known(self) -> Known:
        config = self.asked.config
        unique = None if config.data_kind == "stream" else self.tokens.train_tokens
        return Known(vocab=config.model.vocab or self.vocab, unique=unique)

    def open(self, settings: LoadedConfig) -> Opened:
        return Opened(settings, ExpectedText(settings, self.tokens, self.vocab))

    def start(self, opened: Opened, vocab: int) -> None:
        """Without the text's tokenizer it cannot be compared: `check_start` looks at the rest."""


# --- the plan ---------------------------------------------------------------------------------------------------------

CONTEXT_BYTES = 512 * 2**20  # what CUDA itself holds on a card, beside torch's tensors
FETCHED = "It is fetched from the hub when training starts; the hub is not asked now."
_STEP = Check("memory", "a step")


# --- memory -----------------------------------------------------------------------------------------------------------


def check_memory(plan: RunPlan, machine: Machine, index: int, ranks: int) -> Iterator[Finding | None]:
    """Whether a step fits what is free, and what would; whether the host has room for what it keeps."""
    speed, free = plan.speed, _free(machine, plan.speed.device, index)
    if free is None:
        yield _STEP.note("not known: the device does not report its memory")
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
    return Check("memory", "on the host").finding(
        "bad" if need > have else "warn",
        f"speed.optimizer_offload keeps {in_gib(need)} in host memory, of which {in_gib(have)} are free",
        "The system would end the run. Close other programs, or set speed.optimizer_state=8bit and "
        "speed.optimizer_offload=false.",
    )


# --- time -------------------------------------------------------------------------------------------------------------


def least_seconds(plan: RunPlan, trials: DeviceTrials, ranks: int) -> tuple[float | None, str]:
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
    return Check("memory", "least time").finding(
        "warn" if too_long else "ok",
        f"{least}at most {rate} tokens/s: the FLOPs of a step at {whose}",
        small + estimate if too_long else f"How long it really takes: {estimate}",
    )


def _duration(seconds: float) -> str:
    for unit, length, most in (("second", 1, 120), ("minute", 60, 120), ("hour", 3600, 48)):
        if seconds < most * length:
            return many(round(seconds / length), unit)
    return f"{seconds / 86400:.0f} days"


def _count(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"


# --- disk and start ---------------------------------------------------------------------------------------------------


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
        yield check.warn(found, "It fits, but leaves little for other files. Free some space before a long run.")
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
        assert start is not None, "init_from is set"
        yield check.ok(start.notice)


# --- what a run is fine-tuned from and on -----------------------------------------------------------------------------

_READ_WHOLE = 32 * 2**20  # bytes of a source from which samples are made for the visit


def look_at_chat(asked: LoadedConfig, temporary: Path) -> Generator[Finding, None, LoadedConfig | None]:
    """Yields what was found of the base, and returns the settings with samples that may be made in a temporary folder;
    None where there is no base to make them for, or too much to read."""
    base, chat = (yield from _check_base(asked.config.model)), asked.config.chat
    why = "" if base is None else why_samples_are_made(asked.config, written=asked.sources["model.context"])[1]
    if base is not None and not why:
        return asked
    size = yield from _check_sources(chat)
    if base is None:
        return None
    if size > _READ_WHOLE:
        yield unchecked("config", f"{chat.source} is large: rows, steps and memory were not checked")
        return None
    return with_values(asked, {"data.folder": str(temporary / "samples")}, Source("preset", "the doctor"))


def check_samples(plan: RunPlan) -> Iterator[Finding]:
    """The rows, and what they are written by."""
    data = plan.data
    assert isinstance(data, SampleData), "there is a chat.source"
    counts, readings = data.sample_set.manifest["counts"], data.sample_set.manifest.get("reading") or [{}]
    rows = counts.get("rows", 0) - counts.get("rows_not_used", 0)
    reading = readings[0].get("format", "conversations")
    yield Check("data", "rows").ok(f"{plan.chat.source}: {many(rows, 'row')}, read as {reading}")
    template = "none: samples are bare text" if data.template is None else data.template.name
    if not any(check.name == "template" for check in plan.checks):
        yield Check("data", "template").ok("the model's own" if template == "model" else template)
    if plan.lora.quantize != "none":
        try:
            check_quantizing(plan.speed.device.torch_device)
        except UserError as error:
            yield finding_of(error, "config", "lora.quantize")


def _check_base(model: ModelConfig) -> Generator[Finding, None, Base | None]:
    """The model that is trained, as far as it can be seen without reading all of its weights."""
    name = model.init_from
    assert name is not None, "checked by the config"
    if not is_within_reach(name):
        yield Check("data", "base").warn(
            f"{name} is not on this machine",
            f"{FETCHED} Without a network, name a folder with model.init_from.",
        )
        return None
    try:
        base = open_base(name, model.context)
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


def _check_sources(chat: ChatConfig) -> Generator[Finding, None, int]:
    """Whether there is anything to read rows from; returns how many bytes."""
    size = 0
    for field, source in {"chat.source": chat.source, "chat.validation": chat.val_source}.items():
        if source is not None:
            files = row_files(source, field)
            size += sum(file.bytes for file in files)
            yield Check("data", field).ok(f"{source}: {many(len(files), 'file')}, {size / 1e6:,.1f} MB")
    return size


# --- several GPUs of this host ----------------------------------------------------------------------------------------

SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_MEMORY = 2**30  # as NVIDIA's documentation of NCCL has it for containers
_ranks = functools.partial(Check, "ranks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """What `size` ranks need, which were `asked` for or are only possible; None for what is unknown."""

    size: int
    asked: bool
    nccl: str | None = ""  # None where torch has none
    apart: tuple[tuple[int, int], ...] = ()  # GPUs that cannot read each other's memory
    shared_memory_bytes: int | None = None


def look_at_ranks(several: Several, kind: str) -> Several:
    """What several ranks on devices of this kind need, as far as this host reports it."""
    apart = unlinked(several.size) if kind == "cuda" else ()
    return dataclasses.replace(several, nccl=nccl_version(), apart=apart, shared_memory_bytes=shared_memory_bytes())


def unlinked(size: int) -> tuple[tuple[int, int], ...]:
    """Pairs of the first GPUs that cannot read each other's memory."""
    pairs = itertools.combinations(range(min(size, torch.cuda.device_count())), 2)
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where it has none."""
    with contextlib.suppress(Exception):
        if dist.is_available() and dist.is_nccl_available():
            from torch.cuda import nccl

            return ".".join(str(part) for part in nccl.version())
    return None


def shared_memory_bytes() -> int | None:
    """The size of the memory that processes of this host share."""
    with contextlib.suppress(OSError, AttributeError):
        found = os.statvfs(SHARED_MEMORY)
        return found.f_frsize * found.f_blocks
    return None


def check_ranks(several: Several, machine: Machine, kind: str) -> Iterator[Finding | None]:
    """`kind` is that of the device."""
    if kind != "cuda":
        yield _ranks("ranks").ok(f"{several.size} processes on this host share its cores")
        return
    yield _cards(several, machine)
    yield _library(several)
    yield _links(several)
    yield _shared_memory(several)


def _cards(several: Several, machine: Machine) -> Finding:
    cards = len(machine.cards)
    if several.size > cards:
        return _ranks("ranks").bad(
            f"{several.size} GPUs were asked for, and this host has {cards}",
            f"Use --gpus {cards}, or ask on the host that has them.",
        )
    names = Counter(card.name for card in machine.cards[: several.size])
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        return _ranks("ranks").warn(found, "All ranks do equal work, so the slowest card sets the pace of the others.")
    return _ranks("ranks").ok(found)


def _library(several: Several) -> Finding:
    if several.nccl is None:
        advice = "GPUs exchange gradients by NCCL. Install a CUDA build of torch for Linux; it brings NCCL along."
        return _ranks("nccl").finding("bad" if several.asked else "note", "this torch has no NCCL", advice)
    return _ranks("nccl").ok(f"NCCL {several.nccl}")


def _links(several: Several) -> Finding:
    if not several.apart:
        return _ranks("links").ok("all pairs of GPUs read each other's memory")
    first, second = several.apart[0]
    more = f", nor can {many(len(several.apart) - 1, 'other pair')}" if len(several.apart) > 1 else ""
    return _ranks("links").warn(
        f"GPUs {first} and {second} cannot read each other's memory{more}",
        "Their gradients go through the host's memory, which is slow; `nvidia-smi topo -m` shows the links. In a "
        "virtual machine or with an IOMMU this is often a setting of the host (ACS); in a container, all GPUs must be "
        "visible to every process.",
    )


def _shared_memory(several: Several) -> Finding | None:
    size = several.shared_memory_bytes
    if size is None:
        return None
    return _ranks("shared memory").warn_if(
        size < LEAST_SHARED_MEMORY,
        f"/dev/shm has {in_gib(size)}",
        "NCCL connects processes of a host through it and fails where it is full. Start the container with "
        "--shm-size=1g or more, or with --ipc=host.",
    )


def check_share(plan: RunPlan, several: Several) -> Finding | None:
    """Whether ranks share a step evenly."""
    if plan.fine_tunes:
        return None
    check, windows = _ranks("batch"), plan.schedule.at(plan.steps).windows
    try:
        check_even(plan.data, several.size)
    except UnevenError as error:
        return check.finding("bad" if several.asked else "note", error.message, sentence(error.hint))
    return check.ok(f"{windows // several.size} of {windows} windows of {plan.model.context:,} tokens a rank and step")
