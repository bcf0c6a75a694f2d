"""The whole visit: facts are gathered, checks are made of them in order, findings come out as soon as they are known.

The contract: `examine` never raises for what it finds; a config that cannot be read is a finding, and what does not
depend on it is checked all the same. Facts that are handed over are taken as they are: with the `machine` of another
host nothing is run on this one, unless `trials` is None and its torch is the one here. The run is the one that
`resolve` decides for this machine; without a torch that works there is none.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config.catalogue import hardware_for
from flatout.config.load import LoadedConfig, load_config
from flatout.data.prepare import as_prepared
from flatout.diagnose.check_data import TokenFacts, check_documents, look_at_data
from flatout.diagnose.check_environment import check_environment, check_nccl, check_tracker_packages
from flatout.diagnose.check_folder import RUNS, Disk, check_disk, check_folder, check_room, folder_of, measure_disk
from flatout.diagnose.check_machine import check_cards, check_machine
from flatout.diagnose.machine import Machine, gather_machine
from flatout.errors import UserError, first_line
from flatout.finding import Check, Finding, finding_of, unchecked

if TYPE_CHECKING:
    from flatout.device import Device
    from flatout.diagnose.check_kernels import DeviceTrials
    from flatout.diagnose.check_run import RunVisit, Several
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
    trials: "DeviceTrials | None" = None,
    disk: Disk | None = None,
    several: "Several | None" = None,
    gpus: int | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Finding]:
    """Checks a machine and a config. `hardware` may be auto; `quick` leaves out compiling and slow trials.

    `gpus` is how many ranks the config is meant for. Several GPUs are looked at without being asked where this machine
    has them.
    """
    asked, found = _load(target, overrides, None if hardware == "auto" else hardware, size)
    progress("looking at the machine; importing torch")
    here, machine = machine is None, machine or gather_machine()
    if hardware == "auto" and asked is not None:
        asked = _for_card(machine, asked, found)
    visit = _Visit(asked, machine, quick=quick, here=here, progress=progress)
    visit.look_at_ranks(several, gpus)
    yield from visit.check_machine(trials)
    progress("looking at disk and data")
    with contextlib.ExitStack() as scratch:
        found += visit.decide_run(scratch)
        found += visit.judge_run(disk or measure_disk(visit.folder, quick=quick))
    for area in ("disk", "data", "config", "memory"):
        yield from (one for one in found if one.area == area)
    yield from visit.check_ranks()


def guarded(area: str, name: str, check: Callable[[], Iterable[Finding | None]]) -> Iterator[Finding]:
    """The findings of a check, and where it breaks a finding that says so: one broken check must not hide the rest."""
    try:
        yield from filter(None, check())  # where there is nothing to say, a check says None
    except UserError as error:
        yield finding_of(error, area, name)
    except Exception as error:  # noqa: BLE001 - a doctor that dies reports nothing
        yield Check(area, name).warn(
            f"this check broke: {type(error).__name__}: {first_line(error)}",
            "This is a fault of Flatout's doctor, not of your set-up. Please report it with these words.",
        )


class _Visit:
    """Facts as they are gathered, and the findings that follow from them.

    What needs torch is imported where it is used: nothing of it before the machine was looked at.
    """

    def __init__(
        self, asked: LoadedConfig | None, machine: Machine, *, quick: bool, here: bool, progress: Progress
    ) -> None:
        self.asked, self.machine, self.quick, self.here, self.progress = asked, machine, quick, here, progress
        self.config = None if asked is None else asked.config
        self.speed = None if self.config is None else self.config.speed
        self.tunes = self.config is not None and self.config.fine_tunes
        self.works = machine.torch.usable
        self.kind, self.index, self.no_device = _device(machine, "auto" if self.speed is None else self.speed.device)
        self.ranks = 1  # that share a step, if several were asked for
        self.several: Several | None = None
        self.trials: DeviceTrials | None = None
        self.run: RunVisit | None = None

    @property
    def folder(self) -> Path:
        return RUNS if self.config is None else folder_of(self.config.output)

    @property
    def plan(self) -> "RunPlan | None":
        return None if self.run is None else self.run.plan

    @property
    def device(self) -> "Device":
        from flatout.diagnose.check_run import device_of

        limit = None if self.speed is None else self.speed.memory_limit
        return device_of(self.machine, self.kind, self.index, limit)

    def look_at_ranks(self, several: "Several | None", gpus: int | None) -> None:
        """What several ranks need, where they were asked for or this machine has several cards."""
        size = gpus or (len(self.machine.cards) if self.kind == "cuda" else 1)
        if several is None and self.works and size > 1:
            from flatout.diagnose.check_run import Several, look_at_ranks

            several = Several(size=size, asked=gpus is not None)
            several = look_at_ranks(several, self.kind) if self.here else several
        self.several = several
        self.ranks = (gpus or 1) if several is None else several.size if several.asked else 1

    # --- the machine --------------------------------------------------------------------------------------------------

    def check_machine(self, trials: "DeviceTrials | None") -> Iterator[Finding]:
        machine, speed, kind = self.machine, self.speed, self.kind
        workers = None if speed is None or self.tunes else speed.workers
        yield from guarded("machine", "machine", lambda: check_machine(machine, workers))
        yield from guarded("gpu", "card", lambda: check_cards(machine, speed, self.index, overlays=not self.tunes))
        if self.works:
            self.trials = trials
            yield from guarded("kernels", "kernels", self._check_kernels)
        else:
            why = "They are tried once torch works."
            yield Check("kernels", "kernels").note("not tried, as torch cannot be used", why)
        yield from guarded("environment", "variables", lambda: check_environment(machine, kind))

    def _check_kernels(self) -> Iterator[Finding | None]:
        from flatout.diagnose.check_kernels import DeviceTrials, check_kernels, run_trials

        device, config = self.device, self.config
        if self.trials is None and self.here:
            model = None if config is None or self.tunes else config.model
            how = {"quick": self.quick, "progress": self.progress}
            self.trials = run_trials(self.machine, device, self.speed, model, **how)
        self.trials = self.trials or DeviceTrials()
        yield from check_kernels(self.machine, self.trials, self.speed, self.kind, device.peak_flops)

    # --- the run ------------------------------------------------------------------------------------------------------

    def decide_run(self, scratch: contextlib.ExitStack) -> Iterator[Finding]:
        """Looks at the data and decides the run, as far as both can be had."""
        asked = self.asked
        if self.no_device is not None:
            yield self.no_device
        if asked is None:
            left = "data, config and memory were not checked, as the config cannot be read"
            yield unchecked("config", left, "Mend it and ask again.")
            return
        self.run = run = self._run() if self.works else None
        if asked.config.reads_text:
            with contextlib.suppress(UserError):  # looking at the data meets it again and reports it
                asked = as_prepared(asked if run is None else run.with_tokenizer(asked))
            known = [TokenFacts()]
            yield from guarded("data", "source", lambda: self._look_at_text(asked, known))
            if run is not None:
                yield from guarded("config", "refused", lambda: run.decide_on_text(asked, known[-1]))
        elif run is not None:
            look = run.look_at_rows if self.tunes else run.open
            yield from guarded("data", "refused", lambda: look(asked, scratch))
        if self.plan is None:
            why = "it cannot be decided" if self.works else "torch does not work"
            yield unchecked("config", f"steps, settings and memory of the run were not checked, as {why}")

    def _run(self) -> "RunVisit":
        from flatout.diagnose.check_kernels import DeviceTrials
        from flatout.diagnose.check_run import RunVisit
        from flatout.world import World

        world = World(size=self.ranks, hosts=("this host",) * self.ranks) if self.ranks > 1 else World()
        return RunVisit(self.machine, self.device, self.index, self.trials or DeviceTrials(), world)

    def _look_at_text(self, asked: LoadedConfig, known: list[TokenFacts]) -> Iterator[Finding]:
        data = asked.config.data
        known.append((yield from look_at_data(data, asked.config.clean, self.machine, quick=self.quick)))
        yield from check_documents(known[-1], asked.config.model.context, data.packing)

    def judge_run(self, disk: Disk) -> Iterator[Finding]:
        """What there is to say of the run, and of what it needs of disk and machine."""
        run, plan, config = self.run, self.plan, self.config
        yield from check_disk(disk)
        if run is None or plan is None:
            yield from check_room(disk)
        else:
            yield from guarded("config", "run", lambda: run.judge(plan, disk))
        if config is None:
            return
        yield from guarded("config", "packages", lambda: check_tracker_packages(self.machine, config.output.trackers))
        model, verb = config.model if plan is None else plan.model, "finetune" if self.tunes else "train"
        yield from guarded("config", "run folder", lambda: [check_folder(config.output, model, verb)])

    def check_ranks(self) -> Iterator[Finding]:
        several, plan = self.several, self.plan
        if several is None:
            if self.ranks > 1:
                yield unchecked("ranks", "the ranks were not checked, as torch does not work")
            return
        from flatout.diagnose.check_run import check_ranks, check_share

        yield from guarded("ranks", "several GPUs", lambda: check_ranks(several, self.machine, self.kind))
        if plan is not None:
            yield from guarded("ranks", "batch", lambda: [check_share(plan, several)])
        yield from guarded("ranks", "variables", lambda: check_nccl(self.machine.environment))


# --- the config -------------------------------------------------------------------------------------------------------


def _load(
    target: str | LoadedConfig | None, overrides: Sequence[str], hardware: str | None, size: str | None
) -> tuple[LoadedConfig | None, list[Finding]]:
    """The config, or its mistake as a finding."""
    try:
        if not isinstance(target, LoadedConfig):
            return load_config(target, overrides, hardware=hardware, size=size), []
        return target if hardware is None else dataclasses.replace(target, hardware=hardware), []
    except UserError as error:
        return None, [finding_of(error, "config", "values")]


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
    if not machine.torch.usable:
        return "cpu", 0, None
    from flatout.device import choose_device

    cards = len(machine.cards) if machine.torch.sees_cuda else 0
    try:
        return *choose_device(asked, cards, mps=machine.torch.mps), None
    except UserError as error:
        return *choose_device("auto", cards, mps=machine.torch.mps), finding_of(error, "config")
