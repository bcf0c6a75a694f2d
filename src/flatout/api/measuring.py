"""What switches are worth here, which settings to choose, and what a run will take: results, or generators of rows."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.api.configs import with_sources
from flatout.config.load import Config, load_config
from flatout.data.prepare import data_folder, has_dataset
from flatout.errors import UsageError
from flatout.files import disk_errors
from flatout.observe.measured.bench import read_ablate, read_bench
from flatout.records import AblateRow, BenchProgress, BenchRow, TuneProgress, TuneResult, TuneRow, record_to_json
from flatout.tuning.ablation import BOTH, SECONDS, SEEDS, TOKENS, AblateResult, Told
from flatout.tuning.ablation import ablate as ablate_fields
from flatout.tuning.changes import check_length, choose, read_space, space_of
from flatout.tuning.estimate import SECONDS as PROBE_SECONDS
from flatout.tuning.estimate import EstimateResult
from flatout.tuning.estimate import estimate as look_ahead
from flatout.tuning.ladder import bench as climb_ladder
from flatout.tuning.lr_range import HIGH, LOW, STEPS, LrResult, Point, find_rate
from flatout.tuning.practice_data import settled_for_runs
from flatout.tuning.study import TRIALS, StudyResult, TrialRow
from flatout.tuning.study import search as search_space
from flatout.tuning.tuner import tune as search_settings


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
    go_on: bool = False,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[BenchProgress], None] = lambda _: None,
) -> Generator[BenchRow]:
    """Measures every speed switch that this machine has, from the naive baseline up, and yields a row for each.

    A rung first has to show the reference's losses over `parity_steps` steps; then at most `steps` steps are timed, in
    turns with the rung that it is compared with. `rungs` are names, `only` is ladder, without or extra. After about
    `seconds`, no other rung is begun. With a `folder`, rows are also written to bench.jsonl there, from the first
    measured one on; with `go_on`, rungs that are there already are not measured again.
    """
    path = None if folder is None else Path(folder) / "bench.jsonl"
    if path is not None and path.exists() and not go_on:
        raise UsageError(
            f"{path} holds the rows of an earlier ladder", "name a new folder, or measure what is missing with --go-on"
        )
    ladder = climb_ladder(
        with_sources(config or load_config()),
        steps=steps,
        parity_steps=parity_steps,
        batch_tokens=batch_tokens,
        names=rungs,
        only=only,
        seconds=seconds,
        earlier=[] if path is None or not path.exists() else read_bench(path, notice),
        notice=notice,
        progress=progress,
    )
    if path is None:
        yield from ladder
        return
    waiting: list[BenchRow] = []
    for row in ladder:
        waiting.append(row)
        if row.status != "absent" or path.exists():  # rows without a measurement alone would only block the folder
            _append(path, waiting)
            waiting = []
        yield row


def tune(
    config: Config | None = None,
    *,
    memory: float | None = None,
    exhaustive: bool = False,
    compile: bool = False,
    seconds: float | None = None,
    progress: Callable[[TuneProgress], None] = lambda _: None,
) -> Generator[TuneRow | TuneResult]:
    """Finds the fastest micro-batch, checkpointing and loss for a config's global batch on this device, in pretraining
    or, where it has `chat.source`, in fine-tuning.

    Yields a row for every setting tried, and a `TuneResult` last; its `fragment` is a config file. `memory` is a cap in
    GiB that emulates a smaller card, `exhaustive` tries everything, `compile` torch.compile's modes too (minutes).
    """
    yield from search_settings(
        with_sources(config or load_config()),
        memory=memory,
        thorough=exhaustive,
        compiled=compile,
        seconds=seconds,
        progress=progress,
    )


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
    return find_rate(with_sources(config or load_config()), low=low, high=high, steps=steps, progress=progress)


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
    `trials` counts the finished ones in all; a `study` file (SQLite) keeps them, and the same call goes on with it.
    """
    loaded = with_sources(config or load_config())
    found = space_of(space, loaded) if isinstance(space, Mapping) else read_space(Path(space), loaded)
    kept = None if study is None else Path(study)
    return search_space(loaded, found, trials=trials, study=kept, notice=notice, progress=progress)


def ablate(
    config: Config | None = None,
    *,
    fields: Sequence[str] | None = None,
    seeds: int = SEEDS,
    equal: str = BOTH,
    minutes: float | None = None,
    folder: str | Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    progress: Told = lambda *_: None,
) -> Generator[AblateRow | AblateResult]:
    """Trains a config with and without each of some fields; yields a row for each new run, an `AblateResult` last.

    `fields` are words such as `model.qk_norm`, which is flipped, or `optim.schedule=linear`; without them everything
    that the config sets in `model`, `optim` and `train` goes back to its default, one at a time. Pairs of runs have a
    seed in common, `seeds` of them, and are compared at `equal` tokens, seconds or both. With a `folder`, rows are kept
    in ablate.jsonl there, and the same call goes on with them. After `minutes` nothing is begun; 0 reads what is there.
    """
    loaded = with_sources(config or load_config())
    if equal not in (TOKENS, SECONDS, BOTH):
        raise UsageError(f"runs cannot be compared at equal {equal!r}", "use tokens, seconds or both")
    check_length(loaded)
    # To show what is there, nothing is prepared.
    if loaded.size is None or minutes != 0 or has_dataset(data_folder(loaded.config.data)):
        loaded = settled_for_runs(loaded, notice)
    changes, left_out = choose(fields, loaded)
    path = None if folder is None else Path(folder) / "ablate.jsonl"
    earlier = [] if path is None or not path.exists() else read_ablate(path, notice)
    how = {"seeds": seeds, "equal": equal, "minutes": minutes, "earlier": earlier, "progress": progress}
    for record in ablate_fields(loaded, changes, left_out=left_out, **how):
        if path is not None and isinstance(record, AblateRow):
            _append(path, [record])
        yield record


def _append(path: Path, rows: Sequence[BenchRow | AblateRow]) -> None:
    """Adds rows to a file, which is made with its folder."""
    with disk_errors(str(path), safe=""):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(record_to_json(row) + "\n" for row in rows)


def estimate(
    config: Config | None = None,
    *,
    price: float | None = None,
    seconds: float = PROBE_SECONDS,
    probe: bool = True,
    imported: float | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> EstimateResult:
    """Says what the run of a config will take in time, memory, disk, energy and money, from a short timed piece of it.

    `price` is per hour; steps are timed for about `seconds`, or not at all without `probe`. `imported` is how long
    importing took, to be counted into the start-up. A run that does not fit has a `problem` and a `way_out`.
    """
    loaded = with_sources(config or load_config())
    return look_ahead(loaded, price=price, seconds=seconds, probe=probe, imported=imported, notice=notice)
