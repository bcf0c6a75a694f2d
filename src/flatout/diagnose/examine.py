"""The whole visit: facts are gathered, checks are made of them in order, findings come out as soon as they are known.

The contract: `examine` never raises for what it finds; a config that cannot be read is a finding, and what does not
depend on it is checked all the same. Facts that are handed over are taken as they are: with a `machine` of somebody
else nothing is run on this one, unless `trials` is None and its torch is the one here. The run is the one that
`resolve` decides for this machine; without a torch that works there is none.
Under a launcher the first rank examines, and the others `attend`: what concerns all of them is asked of all.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, load_config
from flatout.data.prepare import as_prepared
from flatout.diagnose.check_card import check_cards
from flatout.diagnose.check_data import check_documents, look_at_data
from flatout.diagnose.check_environment import check_environment, check_nccl, check_tracker_packages
from flatout.diagnose.check_folder import RUNS, check_disk, check_folder, check_room, folder_of, measure_disk
from flatout.diagnose.check_kernels import check_kernels
from flatout.diagnose.check_machine import check_machine, usable
from flatout.diagnose.check_ranks import check_rank_data, check_ranks
from flatout.diagnose.doctor import Disk, Machine, Meeting, Several, TokenFacts, Trials, guarded
from flatout.diagnose.machine import gather_machine, look_at_torch
from flatout.errors import UserError
from flatout.finding import Check, Finding, finding_of
from flatout.launch import Launch

if TYPE_CHECKING:
    from flatout.device import Device
    from flatout.resolve.opening import DataSource
    from flatout.resolve.plan import RunPlan

Progress = Callable[[str], None]


def examine(
    target: str | LoadedConfig | None = None,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    size: str | None = None,
    quick: bool = False,
    machine: Machine | None = None,
    trials: Trials | None = None,
    disk: Disk | None = None,
    several: Several | None = None,
    gpus: int | None = None,
    launched: Launch | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Finding]:
    """Checks a machine and a config. `hardware` may be auto; `quick` leaves out compiling and slow trials.

    `gpus` is how many ranks the config is meant for, and `launched` this process as the first of those that a launcher
    started. Several GPUs are looked at without being asked where this machine has them.
    """
    asked, found = _load(target, overrides, None if hardware == "auto" else hardware, size)
    progress("looking at the machine; importing torch")
    here, machine = machine is None, machine or gather_machine()
    if hardware == "auto" and asked is not None:
        asked = _for_card(machine, asked, found)
    visit = _Visit(asked, machine, quick=quick, here=here, progress=progress)
    visit.several = several or visit.meet(gpus, launched)
    yield from visit.check_machine(trials)
    progress("looking at disk and data")
    with visit.scratch:
        found += visit.look()
        found += visit.judge(disk or measure_disk(visit.folder, quick=quick))
    for area in ("disk", "data", "config", "memory"):
        yield from (one for one in found if one.area == area)
    yield from visit.check_ranks()


def attend(launched: Launch, target: str | None, overrides: Sequence[str], size: str | None = None) -> None:
    """Takes part as a rank that is not the first: it answers, and says nothing itself."""
    asked, _ = _load(target, overrides, None, size)
    if usable(look_at_torch()):
        from flatout.diagnose.ranks import meet

        meet(launched, asked)


class _Visit:
    """Facts as they are gathered, and the findings that follow from them.

    What needs torch is imported where it is used: nothing of it before the machine was looked at.
    """

    def __init__(
        self, asked: LoadedConfig | None, machine: Machine, *, quick: bool, here: bool, progress: Progress
    ) -> None:
        self.asked, self.machine, self.quick, self.here, self.progress = asked, machine, quick, here, progress
        self.config = None if asked is None else asked.config
        self.tunes = self.config is not None and self.config.fine_tunes
        self.works = usable(machine.torch)
        speed = None if self.config is None else self.config.speed
        self.kind, self.index, self.no_device = _device(machine, "auto" if speed is None else speed.device)
        self.scratch = contextlib.ExitStack()
        self.trials, self.tokens = Trials(), TokenFacts()
        self.several: Several | None = None
        self.plan: RunPlan | None = None
        self.step_seconds: float | None = None
        self.whole = True  # all rows of a fine-tuning run were read

    @property
    def folder(self) -> Path:
        return RUNS if self.config is None else folder_of(self.config.output)

    def meet(self, gpus: int | None, launched: Launch | None) -> Several | None:
        """Looks at what several ranks need. First of all, as other ranks are waiting, and to time nothing beside it."""
        cards = len(self.machine.cards) if self.kind == "cuda" else 1
        size = launched.size if launched is not None else gpus or cards
        if launched is None and size <= 1:
            return None
        several = Several(size=size, asked=launched is not None or gpus is not None)
        if not (self.here and self.works):
            if launched is None:
                return several
            untold = _unchecked("ranks", "the ranks were not checked, as torch does not work")
            return dataclasses.replace(several, meeting=Meeting(place="", refused=untold))
        self.progress("looking at links between GPUs and ranks")
        from flatout.diagnose import ranks

        port = os.environ.get("MASTER_PORT", "")
        port = int(port) if port.isdecimal() and int(port) < 2**16 else ranks.TORCHRUN_PORT
        folders: dict[str, str | Path] = {"run folder": self.folder}
        if self.config is not None and self.config.data.folder is not None:
            folders["data folder"] = self.config.data.folder
        meeting = None if launched is None else ranks.meet(launched, self.asked)
        return dataclasses.replace(
            several,
            nccl=ranks.nccl_version(),
            links=ranks.read_links(self.machine.cards[:size]) if self.kind == "cuda" else (),
            shared_memory_bytes=ranks.shared_memory_bytes(),
            port=port,
            port_free=ranks.port_is_free(port),
            mounts=ranks.file_systems(folders),
            interfaces=ranks.network_interfaces(),
            meeting=meeting,
        )

    # --- the machine --------------------------------------------------------------------------------------------------

    def check_machine(self, trials: Trials | None) -> Iterator[Finding]:
        machine, config, kind, index = self.machine, self.config, self.kind, self.index
        speed, data = (None, None) if config is None else (config.speed, config.data)
        workers = None if speed is None or self.tunes else speed.workers
        yield from guarded("machine", "machine", lambda: check_machine(machine, workers))
        yield from guarded("gpu", "card", lambda: check_cards(machine, speed, index, overlays=not self.tunes))
        if trials is not None:
            self.trials = trials
        elif self.here and self.works:
            yield from guarded("kernels", "trials", self._try)
        peak = self.device.peak_flops if self.works else None
        yield from guarded("kernels", "kernels", lambda: check_kernels(machine, self.trials, speed, kind, peak))
        yield from guarded("environment", "variables", lambda: check_environment(machine, data, kind))

    def _try(self) -> Iterator[Finding]:
        from flatout.diagnose.trials import run_trials

        speed = model = None
        if self.config is not None:
            speed, model = self.config.speed, None if self.tunes else self.config.model
        apart = self.config is not None and self.config.documents_apart
        how = {"apart": apart, "quick": self.quick, "index": self.index, "progress": self.progress}
        self.trials = run_trials(self.machine, self.kind, speed, model, **how)
        yield from ()

    @property
    def device(self) -> "Device":
        from flatout.diagnose.described import device_of

        limit = None if self.config is None else self.config.speed.memory_limit
        return device_of(self.machine, self.kind, self.index, limit)

    # --- the run ------------------------------------------------------------------------------------------------------

    def look(self) -> Iterator[Finding]:
        """Looks at the data and decides the run, as far as both can be had."""
        asked = self.asked
        if self.no_device is not None:
            yield self.no_device
        if asked is None:
            left = "data, config and memory were not checked, as the config cannot be read"
            yield dataclasses.replace(_unchecked("config", left), advice="Mend it and ask again.")
        elif not asked.config.reads_text:
            look, name = (self._look_at_rows, "fine-tuning") if self.tunes else (self._open, "source")
            if self.works:
                yield from guarded("data", name, lambda: look(asked))
        else:
            with contextlib.suppress(UserError):  # which looking at the data meets again, and tells
                asked = as_prepared(self._with_tokenizer(asked))
            yield from guarded("data", "source", lambda: self._look_at_text(asked))
            if self.works:
                yield from guarded("config", "run", lambda: self._decide_on_text(asked))
        if asked is not None and self.plan is None:
            why = "it cannot be decided" if self.works else "torch does not work"
            yield _unchecked("config", f"steps, settings and memory of the run were not checked, as {why}")

    def _with_tokenizer(self, asked: LoadedConfig) -> LoadedConfig:
        if not self.works:
            return asked
        from flatout.resolve.opening import with_tokenizer

        return with_tokenizer(asked, self.device)

    def _look_at_text(self, asked: LoadedConfig) -> Iterator[Finding]:
        data = asked.config.data
        self.tokens = yield from look_at_data(data, asked.config.clean, self.machine, quick=self.quick)
        yield from check_documents(self.tokens, asked.config.model.context, data.packing)

    def _decide_on_text(self, asked: LoadedConfig) -> Iterator[Finding]:
        from flatout.diagnose.described import ExpectedSource
        from flatout.resolve.opening import DataSource

        device, known = self.device, self.tokens
        uncounted = dataclasses.replace(known, exact=False, train_tokens=None, val_tokens=None)
        as_it_is = [lambda asked: DataSource(asked, device)] if known.exact else []
        expected = [lambda asked, facts=facts: ExpectedSource(asked, device, facts) for facts in (known, uncounted)]
        yield from self._decide(asked, [*as_it_is, *expected])
        if self.plan is not None and asked.size is not None and not known.exact:
            said = "settled as for text that is read once, because its tokens are not counted"
            if known.train_tokens is not None:
                said = f"settled for about {known.train_tokens:,} tokens to train on; a run counts them first"
            yield Check("config", "size").note(said)

    def _open(self, asked: LoadedConfig) -> Iterator[Finding]:
        """Opens data of any other kind as training does."""
        from flatout.resolve.opening import DataSource

        yield from self._decide(asked, [lambda asked: DataSource(asked, self.device)])
        if self.plan is not None:
            data = self.plan.data
            known = {"train_tokens": data.facts.train_tokens, "val_tokens": data.val.tokens}
            self.tokens = TokenFacts(exact=True, vocab=data.tokenizer.vocab, **known)
            counted = "" if data.facts.train_tokens is None else f"{data.facts.train_tokens:,} tokens to train on, "
            told = f"{counted}{data.val.tokens:,} to validate, tokenizer {data.tokenizer.kind}"
            yield Check("data", "source").ok(f"{data.facts.place}: {told} with {data.tokenizer.vocab:,} ids")

    def _look_at_rows(self, asked: LoadedConfig) -> Iterator[Finding]:
        from flatout.diagnose.check_chat import FIRST, check_samples, look_at_chat
        from flatout.resolve.opening import DataSource

        scratch = self.scratch.enter_context(tempfile.TemporaryDirectory(prefix="flatout-doctor-"))
        ready = yield from look_at_chat(asked, Path(scratch), quick=self.quick)
        if ready is None:
            return
        device, rows = self.device, asked.config.chat.source
        yield from self._decide(ready, [lambda asked: DataSource(asked, device)])
        self.whole = ready.config.chat.source == rows
        if self.plan is not None:
            yield from check_samples(self.plan, asked.config.chat)
        if not self.whole:
            yield _unchecked("config", f"{rows} is large: rows after the first {FIRST:,}, and steps, were not checked")

    def _decide(self, asked: LoadedConfig, sources: "list[Callable[[LoadedConfig], DataSource]]") -> Iterator[Finding]:
        from flatout.diagnose.check_run import decide
        from flatout.diagnose.described import probes_of
        from flatout.world import World

        world, meeting = World(), None if self.several is None else self.several.meeting
        if self.ranks > 1:
            met = () if meeting is None else tuple(one.host for one in meeting.ranks)
            world = World(size=self.ranks, hosts=met or ("this host",) * self.ranks)
        self.plan, refused = decide(asked, sources, world, probes_of(self.machine, self.trials))
        yield from refused

    @property
    def ranks(self) -> int:
        """How many share a step, as far as somebody asked for several."""
        return self.several.size if self.several is not None and self.several.asked else 1

    def judge(self, disk: Disk) -> Iterator[Finding]:
        """What there is to say of the run, and of what it needs of disk and machine."""
        config, meeting = self.config, None if self.several is None else self.several.meeting
        yield from check_disk(disk)
        if self.plan is None:
            yield from check_room(disk)
        else:
            plan = self.plan
            yield from guarded("config", "run", lambda: self._judged(plan, disk))
        if config is None:
            return
        if meeting is not None and not self.tunes:
            yield from guarded("data", "on all ranks", lambda: check_rank_data(meeting, config.data))
        yield from guarded("config", "packages", lambda: check_tracker_packages(self.machine, config.output.trackers))
        model, verb = config.model if self.plan is None else self.plan.model, "finetune" if self.tunes else "train"
        yield from guarded("config", "run folder", lambda: [check_folder(config.output, model, verb)])

    def _judged(self, plan: "RunPlan", disk: Disk) -> Iterator[Finding | None]:
        from flatout.diagnose import check_run
        from flatout.resolve.advice import advice_on, known_steps

        self.step_seconds, whose = check_run.least_seconds(plan, self.trials, self.ranks)
        about = "" if self.tokens.exact or self.tunes else "about "
        advice = advice_on(plan, about=about, step_seconds=self.step_seconds, write_rate=disk.write_rate)
        counted = self.whole and known_steps(plan) is not None
        for one in (*plan.checks, *advice):
            by_steps = one.area == "config" and one.name in _OF_STEPS
            if (counted or not by_steps) and (one.area, one.name) != _MADE:
                yield one
        yield from check_run.check_space(plan, disk, self.tokens)
        yield from check_run.check_start(plan, self.tokens)
        yield from check_run.check_memory(plan, self.machine, self.index, self.ranks)
        yield check_run.check_time(plan, self.step_seconds, whose)

    def check_ranks(self) -> Iterator[Finding]:
        several, plan = self.several, self.plan
        if several is None:
            return
        facts = {} if plan is None else {"reduce": plan.parallel.reduce, "step_seconds": self.step_seconds}
        if plan is not None:
            from flatout.model.count import parameter_count

            facts["parameters"] = parameter_count(plan.model, plan.vocab)
        yield from guarded("ranks", "several GPUs", lambda: check_ranks(several, self.machine, self.kind, **facts))
        if plan is not None:
            from flatout.diagnose.check_run import check_share

            yield from guarded("ranks", "batch", lambda: [check_share(plan, several)])
        yield from guarded("ranks", "variables", lambda: check_nccl(several, self.machine.environment))


# Checks that go by the number of steps, which is not known of some rows alone, and of a length in minutes.
_OF_STEPS = ("steps", "length", "warm-up", "evaluation", "saving", "samples")
_MADE = ("data", "folder")  # of samples: it was made for this visit and is gone


def _unchecked(area: str, found: str) -> Finding:
    return Finding(area=area, name="the rest", status="note", found=found, unchecked=True)


# --- the config -------------------------------------------------------------------------------------------------------


def _loaded(
    target: str | LoadedConfig | None, overrides: Sequence[str], hardware: str | None, size: str | None
) -> LoadedConfig:
    if not isinstance(target, LoadedConfig):
        return load_config(target, overrides, hardware=hardware, size=size)
    return target if hardware is None else dataclasses.replace(target, hardware=hardware)


def _load(
    target: str | LoadedConfig | None, overrides: Sequence[str], hardware: str | None, size: str | None
) -> tuple[LoadedConfig | None, list[Finding]]:
    """The config; if it has a mistake, that as a finding, and the config without the words that are to blame."""
    try:
        return _loaded(target, overrides, hardware, size), []
    except UserError as error:
        complaints = [finding_of(error, "config", "values")]
    good: list[str] = []
    loaded: LoadedConfig | None = None
    for overlay in dict.fromkeys((hardware, None)):
        with contextlib.suppress(UserError):
            loaded = _loaded(target, (), overlay, size)
            hardware = overlay
            break
    if loaded is None:
        return None, complaints
    for word in overrides:
        with contextlib.suppress(UserError):
            loaded = _loaded(target, [*good, word], hardware, size)
            good.append(word)
    left = [word for word in overrides if word not in good]
    if left:
        found = f"everything else was checked without {', '.join(left)}"
        advice = "Mend that first, then ask again: what follows from it is not checked yet."
        complaints.append(Check("config", "left out").note(found, advice))
    return loaded, complaints


def _for_card(machine: Machine, asked: LoadedConfig, found: list[Finding]) -> LoadedConfig:
    """The config with the memory overlay of this machine's card."""
    memory = machine.cards[0].memory_bytes if machine.cards else None
    if memory is None:
        none = "--hardware auto looks for a GPU, and there is none whose memory is known"
        advice = "Leave it out, or name an overlay: `flatout config presets` lists them."
        found.append(Check("config", "hardware").bad(none, advice))
        return asked
    return dataclasses.replace(asked, hardware=hardware_for(memory))


def _device(machine: Machine, asked: str) -> tuple[str, int, Finding | None]:
    """(kind of the device a run would take, its number, what is wrong with the one asked for)."""
    if not usable(machine.torch):
        return "cpu", 0, None
    from flatout.device import choose_device

    cards = len(machine.cards) if machine.torch.sees_cuda else 0
    try:
        return *choose_device(asked, cards, mps=machine.torch.mps), None
    except UserError as error:
        return *choose_device("auto", cards, mps=machine.torch.mps), finding_of(error, "config")
