"""What switches are worth here, which settings to choose, what a run will take and what holds a step up.

Contract of `profile`: a folder that cannot be written is refused first. It appears under its name only when everything
in it is there, and files that are there already are never written over. In the ranks of a launcher all take the steps,
and the first one writes.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.config.alike import shared_settings
from flatout.config.load import Config, LoadedConfig
from flatout.data.prepare import data_folder, has_dataset
from flatout.engine.run import Run
from flatout.errors import UsageError, quoted
from flatout.files import disk_errors, write_whole
from flatout.folders import free_folder, whole_folder
from flatout.front.configs import with_sources
from flatout.launch import launch
from flatout.observe.sheets import as_markdown
from flatout.parallel.ranks import joined
from flatout.records import (
    AblateRow,
    BenchProgress,
    BenchRow,
    TuneProgress,
    TuneResult,
    TuneRow,
    ablate_row_from_json,
    bench_row_from_json,
    record_to_json,
)
from flatout.rows import read_rows
from flatout.shown import Shown
from flatout.tuning import profile_page
from flatout.tuning.ablation import SEEDS, AblateResult, RunProgress
from flatout.tuning.ablation import ablate as ablate_fields
from flatout.tuning.changes import check_length, choose, read_space, space_of
from flatout.tuning.cluster import CARDS, GB, Card, Cluster, card_here, card_named
from flatout.tuning.estimate import SECONDS as PROBE_SECONDS
from flatout.tuning.estimate import EstimateResult
from flatout.tuning.estimate import estimate as look_ahead
from flatout.tuning.ladder import bench as climb_ladder
from flatout.tuning.lr_range import HIGH, LOW, STEPS, LrResult, Point, find_rate
from flatout.tuning.many_gpus import PlanResult, Rate, on_card, planned_parameters
from flatout.tuning.many_gpus import plan as plan_on_many
from flatout.tuning.measure import borrowed_run
from flatout.tuning.practice_data import practice_config, scratch_folder, settled_for_runs
from flatout.tuning.profile import attend, fitted, profile_run
from flatout.tuning.study import TRIALS, StudyResult, TrialRow, trial_row_from_json
from flatout.tuning.study import search as search_space
from flatout.tuning.tuner import tune as search_settings
from flatout.world import World

# --- measuring --------------------------------------------------------------------------------------------------------


def bench(
    config: Config | None = None,
    *,
    steps: int = 800,
    parity_steps: int = 20,
    batch_tokens: int | None = None,
    rungs: Sequence[str] | None = None,
    only: str | None = None,
    seconds: float | None = None,
    folder: str | Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[BenchProgress], None] = lambda _: None,
) -> Generator[BenchRow]:
    """Measures every speed switch that this machine has, from the naive baseline up, and yields a row for each.

    A rung first has to show the reference's losses over `parity_steps` steps; then at most `steps` steps are timed, in
    turns with the rung that it is compared with. `rungs` are names, `only` is ladder, without or extra. After about
    `seconds`, no other rung is begun. With a `folder`, rows are also written to bench.jsonl there, from the first
    measured one on.
    """
    path = None if folder is None else Path(folder) / "bench.jsonl"
    if path is not None and path.exists():
        raise UsageError(f"{path} holds the rows of an earlier ladder", "name a new folder")
    how = {"steps": steps, "parity_steps": parity_steps, "batch_tokens": batch_tokens, "names": rungs, "only": only}
    how |= {"seconds": seconds, "notice": notice, "progress": progress}
    ladder = climb_ladder(with_sources(config), **how)
    if path is None:
        yield from ladder
        return
    waiting: list[BenchRow] = []
    for row in ladder:
        waiting.append(row)
        if row.status != "absent" or path.exists():  # rows without a measurement alone would only block the folder
            _append(path, *map(record_to_json, waiting))
            waiting = []
        yield row


def tune(
    config: Config | None = None,
    *,
    memory: float | None = None,
    exhaustive: bool = False,
    seconds: float | None = None,
    progress: Callable[[TuneProgress], None] = lambda _: None,
) -> Generator[TuneRow | TuneResult]:
    """Finds the fastest micro-batch, checkpointing and loss for a config's global batch on this device, in pretraining
    or, where it has `chat.source`, in fine-tuning.

    Yields a row for every setting tried, and a `TuneResult` last; its `fragment` is a config file. `memory` is a cap in
    GiB that emulates a smaller card, `exhaustive` tries everything.
    """
    how = {"memory": memory, "thorough": exhaustive, "seconds": seconds, "progress": progress}
    yield from search_settings(with_sources(config), **how)


def tune_lr(
    config: Config | None = None,
    *,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    progress: Callable[[int, Point], None] = lambda _step, _point: None,
) -> LrResult:
    """Finds a learning rate by a range test: real training steps whose rate rises from `low` to `high`.

    The result's `rate` is the one found, its `fragment` a config file with it.
    """
    if low * 10 > high:
        raise UsageError(
            f"--from {low:g} and --to {high:g} are less than a factor of ten apart",
            "a range test needs rates from far too small to far too large, such as --from 1e-7 --to 1",
        )
    return find_rate(with_sources(config), low=low, high=high, steps=steps, progress=progress)


def search(
    space: str | Path | Mapping[str, Mapping[str, Sequence[Any]]],
    config: Config | None = None,
    *,
    trials: int = TRIALS,
    study: str | Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, dict[str, Any], Any], None] = lambda *_: None,
) -> Generator[TrialRow | StudyResult]:
    """Searches hyperparameters by short real runs; yields a row for each new trial, and a `StudyResult` last.

    `space` is a YAML file of fields and ranges, or what it would hold: `{"model.layers": {"range": [2, 6]}}`.
    `trials` counts the finished ones in all; a `study` file (JSON lines) keeps them, and the same call resumes.
    """
    loaded = with_sources(config)
    found = space_of(space, loaded) if isinstance(space, Mapping) else read_space(Path(space), loaded)
    path = None if study is None else Path(study)
    earlier = []
    if path is not None and path.exists():
        earlier = read_rows(path, trial_row_from_json, "trial", "its trial is taken again", notice)
    for record in search_space(loaded, found, trials=trials, earlier=earlier, notice=notice, progress=progress):
        if path is not None and isinstance(record, TrialRow):
            _append(path, json.dumps(record.to_json()))
        yield record


def ablate(
    config: Config | None = None,
    *,
    fields: Sequence[str] | None = None,
    seeds: int = SEEDS,
    minutes: float | None = None,
    folder: str | Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: RunProgress = lambda *_: None,
) -> Generator[AblateRow | AblateResult]:
    """Trains a config with and without each of some fields; yields a row for each new run, an `AblateResult` last.

    `fields` are words such as `model.qk_norm`, which is flipped, or `optim.schedule=linear`; without them everything
    that the config sets in `model`, `optim` and `train` goes back to its default, one at a time. Pairs of runs have a
    seed in common, `seeds` of them. With a `folder`, rows are kept in ablate.jsonl there, and the same call goes on
    with them. After `minutes` nothing is begun; 0 reads what is there.
    """
    loaded = with_sources(config)
    check_length(loaded)
    # To show what is there, nothing is prepared.
    if loaded.size is None or minutes != 0 or has_dataset(data_folder(loaded.config.data)):
        loaded = settled_for_runs(loaded, notice)
    changes, left_out = choose(fields, loaded)
    path = None if folder is None else Path(folder) / "ablate.jsonl"
    earlier = []
    if path is not None and path.exists():
        earlier = read_rows(path, ablate_row_from_json, "ablate", "its run is trained again", notice)
    how = {"seeds": seeds, "minutes": minutes, "earlier": earlier, "progress": progress}
    for record in ablate_fields(loaded, changes, left_out=left_out, **how):
        if path is not None and isinstance(record, AblateRow):
            _append(path, record_to_json(record))
        yield record


def _append(path: Path, *lines: str) -> None:
    """Adds lines to a file, which is made with its folder."""
    with disk_errors(str(path), safe=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


def estimate(
    config: Config | None = None,
    *,
    price: float | None = None,
    seconds: float = PROBE_SECONDS,
    probe: bool = True,
    imported: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> EstimateResult:
    """Says what the run of a config will take in time, memory, disk and money, from a short timed piece of it.

    `price` is per hour; steps are timed for about `seconds`, or not at all without `probe`. `imported` is how long
    importing took, to be counted into the start-up. A run that does not fit has a `problem` and a `way_out`.
    """
    loaded = with_sources(config)
    return look_ahead(loaded, price=price, seconds=seconds, probe=probe, imported=imported, notice=notice)


def plan(
    config: Config | None = None,
    gpus: Sequence[int] = (1, 2, 4, 8),
    *,
    gpu: str | None = None,
    per_host: int = 8,
    intra: float | None = None,
    inter: float | None = None,
    rate: float | None = None,
    mfu: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> PlanResult:
    """Memory, communication and step time of a run on each of these numbers of GPUs.

    `gpu` is a card's name, by default this machine's, or h100. `intra` and `inter` are what a collective reaches for
    each GPU inside a host and between hosts, in GB/s. One GPU reaches `rate` tokens per second, or the share `mfu` of
    its peak; by default rows of `bench` here decide, or what is known of the card. Measures nothing and needs no GPU.
    """
    name, card = (gpu, card_named(gpu)) if gpu is not None else card_here() or ("h100", CARDS["h100"])
    loaded = with_sources(config)
    before, loaded = len(loaded.notices), on_card(loaded, card)
    for message in loaded.notices[before:]:
        notice(message)
    cluster = Cluster(
        card=card,
        per_host=per_host,
        inside=card.inside if intra is None else intra * GB,
        across=card.across if inter is None else inter * GB,
    )
    speed = _rate_of(name, card, planned_parameters(loaded), rate, mfu)
    return plan_on_many(loaded, cluster, speed, gpus)


def _rate_of(name: str, card: Card, parameters: int, rate: float | None, mfu: float | None) -> Rate:
    """How fast one GPU is: as given, as measured here, or as known of the card."""
    if rate is not None and mfu is not None:
        raise UsageError("--rate and --mfu say the same thing twice", "leave one of them out")
    if rate is not None:
        return Rate(tokens_per_second=rate, source="by --rate")
    if mfu is not None:
        return Rate(mfu=mfu, source="by --mfu")
    measured = max(_measured(name, parameters), key=lambda found: found[1].mfu or 0.0, default=None)
    if measured is not None:
        path, row = measured
        return Rate(mfu=row.mfu, source=f"measured here: rung {row.rung} of {row.config} in {path}")
    if card.mfu is None:
        raise UsageError(
            f"it is not known what share of its peak rate {card.name} reaches in training",
            "give --rate, tokens/s of one GPU with this model, or --mfu such as 0.4; `flatout bench` there measures it",
        )
    return Rate(mfu=card.mfu, source=card.mfu_source)


def _measured(name: str, parameters: int) -> Iterator[tuple[Path, BenchRow]]:
    """Rows of `flatout bench` in its usual place, of this card and a model that is not much smaller.

    A small model keeps a card less busy, up to some hundred million parameters.
    """
    for path in sorted(Path("bench").glob("*/bench.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = bench_row_from_json(line)
            except ValueError:  # another version's, or torn
                continue
            large = row.parameters >= min(parameters / 4, 1e8)
            if row.status == "green" and row.mfu and large and name.upper() in row.device.upper():
                yield path, row


# --- profiling --------------------------------------------------------------------------------------------------------


PAGE = "reading.md"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


@dataclasses.dataclass(frozen=True)
class Profile(Shown):
    """A profile: the folder with its files, and what profile.json there holds."""

    folder: Path
    figures: dict[str, Any]

    def _shown_rows(self) -> dict[str, Any]:
        plain = {name: value for name, value in self.figures.items() if not isinstance(value, dict | list)}
        return {"folder": self.folder, **plain}


def profile(
    config: Config | None = None,
    folder: str | Path | None = None,
    *,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Takes some training steps under torch's profiler and says what limits them, and which switch to try.

    Writes a trace, the kernels and a page to read into a new folder, by default profile/NAME. No run
    is written. Without `steps` it is 4, fewer if a step has many micro-batches. In the ranks of a launcher all but the
    first get None.
    """
    loaded, found = with_sources(config), launch()
    target = _free(folder, loaded) if found is None else None
    with _quiet_profiler(), contextlib.ExitStack() as held:
        world, unfinished = None, None
        if found is not None:
            speed, timeout = loaded.config.speed, loaded.config.parallel.timeout
            meeting = joined(found, speed.device, timeout=timeout, settings=shared_settings(loaded))
            world = held.enter_context(meeting)
        with contextlib.nullcontext() if world is None else world.fail_together():
            if world is None or world.first:
                target = target or _free(folder, loaded)
                unfinished = held.enter_context(_folder_for(target))
        with _practice_run(loaded, steps, world, progress) as (run, described):
            if target is None or unfinished is None:
                attend(run, steps=steps)
                return None
            figures = profile_run(run, unfinished, steps=steps, data=described, progress=progress).to_json()
        with disk_errors(str(target / PAGE), safe=""):
            write_whole(unfinished / PAGE, as_markdown(profile_page.sheet_of(figures, str(target))).encode("utf-8"))
        return Profile(target, figures)


def _free(out: str | Path | None, loaded: LoadedConfig) -> Path:
    if out is not None:
        return _named_folder(str(out))
    return free_folder(Path("profile") / loaded.config.output.name, os.path.lexists)


@contextlib.contextmanager
def _practice_run(
    loaded: LoadedConfig,
    steps: int | None,
    world: World | None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Run, str]]:
    """A run of the config on data to measure on, and in words what data that is."""
    with scratch_folder("flatout-profile-") as scratch:
        # Of a stream, its reading and tokenizing is what there is to see.
        practice, described = practice_config(loaded, scratch, progress, world=world, streams=True)
        progress("building the model")
        with borrowed_run(fitted(practice, steps), world) as run:
            yield run, described


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keeps torch's profiler, which asks when it is first used, from printing lines for its own developers."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def _named_folder(written: str) -> Path:
    folder = Path(written)
    if not written.strip() or folder.name in ("", ".."):  # the root, or where we are
        raise UsageError(f"--out {quoted(written)} is not the name of a new folder", "for example --out profiles/first")
    with disk_errors(f"to the folder {written}", safe=", or name another one with --out"):
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--out {quoted(written)} is there already and is not an empty folder", "name a new one")
    return folder


@contextlib.contextmanager
def _folder_for(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name at the end of the block, or goes with everything made for it."""
    parent = next(filter(os.path.lexists, folder.absolute().parents))
    if not parent.is_dir():
        raise UsageError(f"{quoted(str(folder))} lies in {quoted(str(parent))}, which is no folder", "name another one")
    with (
        disk_errors(f"to the folder {folder}", safe=", or name another one with --out"),
        whole_folder(folder, occupied=_occupied) as unfinished,
    ):
        yield unfinished


def _occupied(folder: Path, name: str) -> UsageError:
    return UsageError(f"{quoted(str(folder))} is in use by now: {quoted(name)} is in it", "name a new one with --out")
