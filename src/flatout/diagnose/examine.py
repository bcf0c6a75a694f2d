"""The whole visit: facts are gathered, checks are made of them in order, findings come out as soon as they are known.

The contract: `examine` never raises for what it finds; a config that cannot be read is a finding, and what does not
depend on it is checked all the same. Facts that are handed over are taken as they are: with a `machine` of somebody
else nothing is run on this one, unless `trials` is None and its torch is the one here.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flatout.config.load import LoadedConfig, hardware_for, load_config
from flatout.diagnose import check_fit
from flatout.diagnose.check_card import check_cards
from flatout.diagnose.check_config import check_config
from flatout.diagnose.check_data import look_at_data
from flatout.diagnose.check_disk import check_disk, measure_disk
from flatout.diagnose.check_environment import check_attention_packages, check_environment, check_tracker_packages
from flatout.diagnose.check_folder import RUNS, check_folder, folder_of
from flatout.diagnose.check_kernels import check_kernels
from flatout.diagnose.check_machine import check_machine, usable
from flatout.diagnose.check_memory import check_memory
from flatout.diagnose.check_tokens import check_tokens, steps_of
from flatout.diagnose.doctor import DataFacts, Disk, Finding, Machine, Trials, finding_of, guarded
from flatout.diagnose.machine import gather_machine
from flatout.diagnose.trials import run_trials
from flatout.errors import UserError

Progress = Callable[[str], None]
Facts = TypeVar("Facts")


def examine(
    target: str | None = None,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    quick: bool = False,
    machine: Machine | None = None,
    trials: Trials | None = None,
    disk: Disk | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Finding]:
    """Checks a machine and a config. `hardware` may be auto; `quick` leaves out compiling and slow trials."""
    named = None if hardware == "auto" else hardware
    loaded, complaints = _load(target, overrides, named)
    rest = ("data, config and memory were not checked, as the config cannot be read", "Mend it and ask again.")
    chat = None
    if loaded is not None and loaded.config.chat.source is not None:
        # The model is that of another folder, and the data are samples: other checks would be of something else.
        chat, loaded = loaded, None
    progress("looking at the machine; importing torch")
    here = machine is None
    machine = gather_machine() if machine is None else machine
    if hardware == "auto" and loaded is not None:
        loaded, more = _load_for_card(target, overrides, machine, loaded)
        complaints += more
    config = None if loaded is None else loaded.config
    kind, index, complaint = check_fit.kind_of(machine, config)
    complaints += [] if complaint is None else [complaint]
    works = usable(machine.torch)

    yield from guarded("machine", "machine", lambda: check_machine(machine, config))
    yield from guarded("gpu", "card", lambda: check_cards(machine, config, index))
    if trials is None:
        trials = Trials()
        if here and works:
            tried, broken = _kept(
                "kernels",
                "trials",
                lambda: run_trials(machine, kind, config, quick=quick, index=index, progress=progress),
            )
            trials = tried or trials
            yield from broken
    peak = _peak(machine, kind, index) if works else None
    yield from guarded("kernels", "kernels", lambda: check_kernels(machine, trials, config, kind, peak))
    absent = False  # a package whose absence is told here, with how to get it, and not once more among the switches
    for finding in () if config is None else check_attention_packages(machine, config):
        absent = absent or finding.status == "bad"
        yield finding
    yield from guarded("environment", "variables", lambda: check_environment(machine, config, kind))

    progress("looking at disk and data")
    told: list[Finding] = []
    data = DataFacts()
    if config is not None:
        looked, broken = _kept("data", "source", lambda: look_at_data(config, machine, target, quick=quick))
        told, data = looked or (broken, data)
    fitted, switches = check_fit.Fit(kind=kind, index=index), []
    if loaded is not None and works:
        made, broken = _kept("config", "switches", lambda: check_fit.fit(loaded, machine, trials, data, kind, index))
        fitted, switches = made or (fitted, broken)
    if disk is None:
        disk = measure_disk(RUNS if config is None else folder_of(config), quick=quick)
    yield from guarded("disk", "space", lambda: check_disk(disk, config, fitted.parameters, data))
    if chat is not None:
        yield from complaints
        yield from _fine_tuning(chat, quick=quick, here=here, works=works)
        return
    if loaded is None or config is None:
        yield from complaints
        yield Finding(
            area="config",
            name="the rest",
            status="note",
            found=rest[0],
            advice=rest[1],
            unchecked=True,
        )
        return

    wrote = {path for path, source in loaded.sources.items() if source.by_user}
    yield from (finding for finding in told if finding.area == "data")
    tokens = list(
        guarded("data", "tokens", lambda: check_tokens(config, data, fitted.parameters, "train.epochs" in wrote))
    )
    yield from (finding for finding in tokens if finding.area == "data")
    yield from complaints
    for notice in loaded.notices:
        yield Finding(area="config", name="hardware", status="note", found=notice)
    yield from (one for one in switches if not (absent and one.found.endswith("is not installed")))
    yield from (finding for finding in (*told, *tokens) if finding.area != "data")
    if not switches:
        yield from guarded("config", "switches", lambda: check_fit.check_switches(fitted))
    if works and config.model.init_from is not None:
        from flatout.diagnose.check_start import check_start

        yield from guarded("config", "start", lambda: check_start(config.model, data.vocab))
    yield from guarded("config", "packages", lambda: check_tracker_packages(machine, config))
    yield from guarded("config", "run folder", lambda: check_folder(config))
    yield from guarded(
        "config",
        "config",
        lambda: check_config(
            config,
            data,
            parameters=fitted.parameters,
            step_seconds=fitted.step_seconds,
            disk=disk,
            written=wrote.__contains__,
        ),
    )

    def with_hardware(name: str) -> LoadedConfig | None:
        with contextlib.suppress(UserError):
            return load_config(target, overrides, hardware=name)
        return None

    yield from guarded("memory", "a step", lambda: check_memory(loaded, machine, trials, fitted, with_hardware))
    yield from guarded(
        "memory", "expected speed", lambda: check_fit.check_speed(config, fitted, steps_of(config, data))
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


def _load(
    target: str | None, overrides: Sequence[str], hardware: str | None
) -> tuple[LoadedConfig | None, list[Finding]]:
    """The config; if it has a mistake, that as a finding, and the config without the words that are to blame."""
    try:
        return load_config(target, overrides, hardware=hardware), []
    except UserError as error:
        complaints = [finding_of(error, "config", "values")]
    good: list[str] = []
    loaded: LoadedConfig | None = None
    for overlay in dict.fromkeys((hardware, None)):
        with contextlib.suppress(UserError):
            loaded = load_config(target, (), hardware=overlay)
            hardware = overlay
            break
    if loaded is None:
        return None, complaints
    for word in overrides:
        with contextlib.suppress(UserError):
            loaded = load_config(target, [*good, word], hardware=hardware)
            good.append(word)
    left = [word for word in overrides if word not in good]
    if left:
        complaints.append(
            Finding(
                area="config",
                name="left out",
                status="note",
                found=f"everything else was checked without {', '.join(left)}",
                advice="Mend that first, then ask again: what follows from it is not checked yet.",
            )
        )
    return loaded, complaints


def _load_for_card(
    target: str | None, overrides: Sequence[str], machine: Machine, loaded: LoadedConfig
) -> tuple[LoadedConfig, list[Finding]]:
    """The config with the memory overlay of this machine's card."""
    memory = machine.cards[0].memory_bytes if machine.cards else None
    if memory is None:
        found = "--hardware auto looks for a GPU, and there is none whose memory is known"
        advice = "Leave it out, or name an overlay: `flatout config presets` lists them."
        return loaded, [Finding(area="config", name="hardware", status="bad", found=found, advice=advice)]
    try:
        return load_config(target, overrides, hardware=hardware_for(memory)), []
    except UserError:
        return loaded, []  # its mistake is told already


def _kept(area: str, name: str, gather: Callable[[], Facts]) -> tuple[Facts | None, list[Finding]]:
    """The facts, or None and a finding that says what went wrong in gathering them."""
    kept: list[Facts] = []

    def attempt() -> Iterator[Finding]:
        kept.append(gather())
        yield from ()

    findings = list(guarded(area, name, attempt))
    return (kept[0] if kept else None), findings


def _peak(machine: Machine, kind: str, index: int) -> float | None:
    with contextlib.suppress(Exception):
        return check_fit.device_of(machine, kind, index, None).peak_flops
    return None
