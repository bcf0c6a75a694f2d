"""The whole visit: facts are gathered, checks are made of them in order, findings come out as soon as they are known.

The contract: `examine` never raises for what it finds; a config that cannot be read is a finding, and what does not
depend on it is checked all the same. Facts that are handed over are taken as they are: with a `machine` of somebody
else nothing is run on this one, unless `trials` is None and its torch is the one here.
Under a launcher the first rank examines, and the others `attend`: what concerns all of them is asked of all.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import at_last_stage
from flatout.config.usual import found_by_range_test
from flatout.data.prepare import as_prepared
from flatout.diagnose import check_fit, links
from flatout.diagnose.check_card import check_cards
from flatout.diagnose.check_config import check_config
from flatout.diagnose.check_data import look_at_data
from flatout.diagnose.check_disk import check_disk, measure_disk
from flatout.diagnose.check_environment import check_attention_packages, check_environment, check_tracker_packages
from flatout.diagnose.check_folder import RUNS, check_folder, folder_of
from flatout.diagnose.check_kernels import check_kernels
from flatout.diagnose.check_machine import check_machine, usable
from flatout.diagnose.check_memory import check_memory
from flatout.diagnose.check_nccl import check_nccl
from flatout.diagnose.check_ranks import check_rank_data, check_ranks
from flatout.diagnose.check_tokens import check_tokens, steps_of
from flatout.diagnose.doctor import (
    Check,
    DataFacts,
    Disk,
    Finding,
    Machine,
    Meeting,
    Several,
    Trials,
    finding_of,
    guarded,
)
from flatout.diagnose.machine import gather_machine, look_at_torch
from flatout.diagnose.trials import run_trials
from flatout.errors import UserError
from flatout.launch import Launch

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
    visit = _Visit(target, overrides, hardware, size, quick=quick, machine=machine, progress=progress)
    visit.meet(several, gpus, launched)
    yield from visit.check_machine(trials)
    progress("looking at disk and data")
    yield from visit.check_disk(disk)
    if visit.chat is not None:
        yield from visit.complaints
        yield from _fine_tuning(visit.chat, quick=quick, here=visit.here, works=visit.works)
    elif visit.loaded is None:
        yield from visit.complaints
        found = "data, config and memory were not checked, as the config cannot be read"
        advice = "Mend it and ask again."
        yield Finding(area="config", name="the rest", status="note", found=found, advice=advice, unchecked=True)
    else:
        yield from visit.check_data_and_config(visit.loaded)
        yield from visit.check_memory_and_time(visit.loaded)
    yield from visit.check_ranks()


def attend(launched: Launch, target: str | None, overrides: Sequence[str], size: str | None = None) -> None:
    """Takes part as a rank that is not the first: it answers, and says nothing itself."""
    loaded, _ = _load(target, overrides, None, size)
    if usable(look_at_torch()):
        from flatout.diagnose.meeting import meet

        meet(launched, None if loaded is None else loaded.config)


class _Visit:
    """Facts as they are gathered, and the findings that follow from them, area by area."""

    def __init__(
        self,
        target: str | LoadedConfig | None,
        overrides: Sequence[str],
        hardware: str | None,
        size: str | None,
        *,
        quick: bool,
        machine: Machine | None,
        progress: Progress,
    ) -> None:
        self.target, self.overrides, self.quick, self.progress = target, overrides, quick, progress
        self.size = size
        self.loaded, self.complaints = _load(target, overrides, None if hardware == "auto" else hardware, size)
        self.on_prepared: tuple[str, ...] = ()
        self.chat: LoadedConfig | None = None
        if self.loaded is not None and self.loaded.config.chat.source is not None:
            # The model is that of another folder, and the data are samples: other checks would be of something else.
            self.chat, self.loaded = self.loaded, None
        progress("looking at the machine; importing torch")
        self.here = machine is None
        self.machine = gather_machine() if machine is None else machine
        self.works = usable(self.machine.torch)
        if hardware == "auto" and self.loaded is not None:
            self.loaded, more = _for_card(self.machine, self.loaded)
            self.complaints += more
        if self.loaded is not None and self.loaded.hardware is not None:
            self.loaded, more = _fitted(self.loaded, works=self.works)
            self.complaints += more
        self.config = None if self.loaded is None else self.loaded.config
        self.kind, self.index, complaint = check_fit.kind_of(self.machine, self.config)
        self.complaints += [] if complaint is None else [complaint]
        self.trials = Trials()
        self.package_missing = False  # told with how to get it, and not once more among the switches
        self.about_data: list[Finding] = []
        self.data = DataFacts()
        self.fitted: check_fit.Fit | None = None
        self.switches: list[Finding] = []
        self.disk: Disk | None = None
        self.several: Several | None = None

    def meet(self, several: Several | None, gpus: int | None, launched: Launch | None) -> None:
        """Looks at what several ranks need. First of all, as other ranks are waiting, and to time nothing beside it."""
        cards = len(self.machine.cards) if self.kind == "cuda" else 1
        if several is not None or not (launched or (gpus or cards) > 1):
            self.several = several
            return
        config = self.chat.config if self.chat is not None else self.config
        size = launched.size if launched is not None else gpus or cards
        self.several = Several(size=size, asked=launched is not None or gpus is not None)
        if not (self.here and self.works):
            if launched is not None:
                found = "the ranks were not checked, as torch does not work"
                untold = Finding(area="ranks", name="meeting", status="note", found=found, unchecked=True)
                self.several = dataclasses.replace(self.several, meeting=Meeting(place="", refused=untold))
            return
        self.progress("looking at links between GPUs and ranks")
        meeting = None
        if launched is not None:
            from flatout.diagnose.meeting import meet

            meeting = meet(launched, config)
        port = os.environ.get("MASTER_PORT", "")
        port = int(port) if port.isdecimal() and int(port) < 2**16 else links.TORCHRUN_PORT
        folders: dict[str, str | Path] = {"run folder": RUNS if config is None else folder_of(config)}
        if config is not None and config.data.folder is not None:
            folders["data folder"] = config.data.folder
        self.several = dataclasses.replace(
            self.several,
            distributed=links.has_distributed(),
            nccl=links.nccl_version(),
            links=links.read_links(self.machine.cards[:size]) if self.kind == "cuda" else (),
            shared_memory_bytes=links.shared_memory_bytes(),
            port=port,
            port_free=links.port_is_free(port),
            mounts=links.file_systems(folders),
            interfaces=links.network_interfaces(),
            meeting=meeting,
        )

    @property
    def ranks(self) -> int:
        """How many share a step, as far as somebody asked for several."""
        return self.several.size if self.several is not None and self.several.asked else 1

    def check_ranks(self) -> Iterator[Finding]:
        several = self.several
        if several is None:
            return
        config = self.chat.config if self.chat is not None else self.config
        facts = {"parameters": self.parameters, "step_seconds": self.fitted and self.fitted.step_seconds}
        yield from guarded(
            "ranks", "several GPUs", lambda: check_ranks(several, self.machine, config, self.kind, **facts)
        )
        yield from guarded("ranks", "variables", lambda: check_nccl(several, self.machine.environment))

    def check_machine(self, trials: Trials | None) -> Iterator[Finding]:
        machine, config, kind, index = self.machine, self.config, self.kind, self.index

        def attempt() -> Iterator[Finding]:
            self.trials = run_trials(machine, kind, config, quick=self.quick, index=index, progress=self.progress)
            yield from ()

        yield from guarded("machine", "machine", lambda: check_machine(machine, config))
        yield from guarded("gpu", "card", lambda: check_cards(machine, config, index, overlays=self.chat is None))
        if trials is not None:
            self.trials = trials
        elif self.here and self.works:
            yield from guarded("kernels", "trials", attempt)
        peak = _peak(machine, kind, index) if self.works else None
        whole = self.chat or self.loaded
        threads = "auto" if whole is None else whole.config.speed.threads
        tried = machine, self.trials, config, kind, peak, threads
        yield from guarded("kernels", "kernels", lambda: check_kernels(*tried))
        for finding in () if config is None else check_attention_packages(machine, config):
            self.package_missing = self.package_missing or finding.status == "bad"
            yield finding
        yield from guarded("environment", "variables", lambda: check_environment(machine, config, kind))

    def check_disk(self, disk: Disk | None) -> Iterator[Finding]:
        """Also looks at the data and fits the config to the machine, as room is needed for what both make."""
        loaded, machine = self.loaded, self.machine
        if loaded is not None:
            named = None if isinstance(self.target, LoadedConfig) else self.target
            hosts = 1 if self.several is None else self.several.hosts

            with contextlib.suppress(UserError):  # which looking at the data meets again, and tells
                before = len(loaded.notices)
                self.loaded = loaded = as_prepared(loaded)
                self.on_prepared = loaded.notices[before:]

            def look() -> Iterator[Finding]:
                self.data = yield from look_at_data(loaded.config, machine, named, quick=self.quick)

            def settle() -> Iterator[Finding]:
                place = self.kind, self.index, self.ranks
                self.loaded, said = check_fit.settled(loaded, machine, self.data, *place)
                yield from said

            def fit(loaded: LoadedConfig) -> Iterator[Finding]:
                place = self.kind, self.index, self.ranks, hosts
                self.fitted, refused = check_fit.fit(loaded, machine, self.trials, self.data, *place)
                yield from refused

            self.about_data = list(guarded("data", "source", look))
            self.complaints += guarded("config", "size", settle) if self.works else []
            settled, more = _without_stages(self.loaded or loaded)
            self.complaints += more
            self.loaded, self.config = settled, settled.config
            self.switches = list(guarded("config", "switches", lambda: fit(settled))) if self.works else []
        config = self.config
        self.disk = disk or measure_disk(RUNS if config is None else folder_of(config), quick=self.quick)
        facts = self.disk, config, self.parameters, self.data
        yield from guarded("disk", "space", lambda: check_disk(*facts))

    @property
    def parameters(self) -> int | None:
        return None if self.fitted is None else self.fitted.parameters

    def check_data_and_config(self, loaded: LoadedConfig) -> Iterator[Finding]:
        config, data, parameters, fitted = loaded.config, self.data, self.parameters, self.fitted
        wrote = {path for path, source in loaded.sources.items() if source.by_user}
        yield from (finding for finding in self.about_data if finding.area == "data")
        tokens = list(
            guarded("data", "tokens", lambda: check_tokens(config, data, parameters, "train.epochs" in wrote))
        )
        yield from (finding for finding in tokens if finding.area == "data")
        meeting = None if self.several is None else self.several.meeting
        if meeting is not None:
            yield from guarded("data", "on all ranks", lambda: check_rank_data(meeting, config))
        yield from self.complaints
        for notice in loaded.notices:
            yield Check("config", "as prepared" if notice in self.on_prepared else "preset").note(notice)
        yield from (
            one for one in self.switches if not (self.package_missing and one.found.endswith("is not installed"))
        )
        yield from (finding for finding in (*self.about_data, *tokens) if finding.area != "data")
        if not self.switches and fitted is not None:
            yield from guarded("config", "switches", lambda: [check_fit.check_switches(fitted)])
        if self.works and config.model.init_from is not None:
            from flatout.diagnose.check_chat import check_start

            yield from guarded("config", "start", lambda: check_start(config.model, data.vocab))
        yield from guarded("config", "packages", lambda: check_tracker_packages(self.machine, config))
        yield from guarded("config", "run folder", lambda: [check_folder(config)])
        facts = {"parameters": parameters, "step_seconds": fitted and fitted.step_seconds, "disk": self.disk}
        judged = next(iter(config.optim.rates))
        facts["tested_rate"] = found_by_range_test(loaded.sources[f"optim.{judged}"])
        yield from guarded("config", "config", lambda: check_config(config, data, written=wrote.__contains__, **facts))

    def check_memory_and_time(self, loaded: LoadedConfig) -> Iterator[Finding]:
        fitted, config, host = self.fitted, loaded.config, self.machine.available_bytes

        def on_hardware(name: str) -> LoadedConfig | None:
            from flatout.engine.overlays import fitted_to  # the doctor starts without torch

            with contextlib.suppress(UserError):
                return fitted_to(loaded, name)
            return None

        yield from guarded("memory", "a step", lambda: check_memory(loaded, fitted, host, on_hardware))
        if fitted is not None:
            yield from guarded(
                "memory", "least time", lambda: [check_fit.check_time(config, fitted, steps_of(config, self.data))]
            )


def _fine_tuning(chat: LoadedConfig, *, quick: bool, here: bool, works: bool) -> Iterator[Finding]:
    """Data, config and memory of a config with chat.source, in the order in which findings are told."""
    if not works:
        found = "rows, base, config and memory were not checked, as torch does not work"
        yield Finding(area="config", name="the rest", status="note", found=found, unchecked=True)
        return
    from flatout.diagnose.check_chat import check_chat

    findings = list(guarded("data", "fine-tuning", lambda: check_chat(chat, quick=quick, here=here)))
    for area in ("disk", "data", "config", "memory"):
        yield from (one for one in findings if one.area == area)


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


def _without_stages(loaded: LoadedConfig) -> tuple[LoadedConfig, list[Finding]]:
    """The config with all steps like those of its last stage, which the other checks are of."""
    if not loaded.config.train.staged:
        return loaded, []
    config = at_last_stage(loaded.config)
    count, batch = len(loaded.config.train.stages(config.model.context)), config.train.batch_tokens
    found = f"{count} of equally many tokens; steps are judged as in the last one, with {batch:,} tokens each"
    return dataclasses.replace(loaded, config=config), [Check("config", "stages").note(found)]


def _for_card(machine: Machine, loaded: LoadedConfig) -> tuple[LoadedConfig, list[Finding]]:
    """The config with the memory overlay of this machine's card."""
    memory = machine.cards[0].memory_bytes if machine.cards else None
    if memory is None:
        found = "--hardware auto looks for a GPU, and there is none whose memory is known"
        advice = "Leave it out, or name an overlay: `flatout config presets` lists them."
        return loaded, [Check("config", "hardware").bad(found, advice)]
    return dataclasses.replace(loaded, hardware=hardware_for(memory)), []


def _fitted(loaded: LoadedConfig, *, works: bool) -> tuple[LoadedConfig, list[Finding]]:
    """The config with the overlay that it names; without torch there is no estimate to go by."""
    if not works:
        found = f"the overlay {loaded.hardware} was left out: what fits is reckoned with torch, which does not work"
        return loaded, [Check("config", "hardware").note(found, "Mend torch first, then ask again.")]
    from flatout.engine.overlays import fitted

    return fitted(loaded), []


def _peak(machine: Machine, kind: str, index: int) -> float | None:
    with contextlib.suppress(Exception):
        return check_fit.device_of(machine, kind, index, None).peak_flops
    return None
