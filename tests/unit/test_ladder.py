"""The ladder: which rungs there are, what stands between a rung and its speed, and what is left behind."""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout import files
from flatout.config.facts import field_facts
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import micro_batch_of
from flatout.device import Device
from flatout.engine.run import Run
from flatout.errors import ConfigError, DataError, ResourceError, UsageError
from flatout.observe.sheets import draw_picture, figure_of, print_sheet
from flatout.records import BenchProgress, BenchRow, bench_row_from_json, record_to_json
from flatout.resolve.case import Probes
from flatout.resolve.switches import resolve_speed
from flatout.rows import read_rows
from flatout.tuning import ladder, turns
from flatout.tuning.ladder import make_plan
from flatout.tuning.ladder_rows import picture_of, progress_line, sheet_of, total_lines
from flatout.tuning.measure import Steps, borrowed_run, parity_losses, summary_of
from flatout.tuning.practice_data import practice_data, write_random
from flatout.tuning.rungs import (
    BASELINE,
    OWN_SWITCHES,
    TOLERANCES,
    Rung,
    all_rungs,
    as_words,
    choose,
    every_name,
    linked,
    settings_of,
    tolerance_of,
)
from flatout.tuning.tuner import tune
from flatout.tuning.turns import Comparison, chained, compare
from tests.set_up import set_up

Tiny = Callable[..., LoadedConfig]
CUDA = all_rungs(kind="cuda", micro_batch=64, attention="cudnn+fa4", plain_attention="cudnn")
CPU = all_rungs(kind="cpu", micro_batch=16, attention="sdpa")


# --- the list of rungs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rungs", [CUDA, CPU], ids=["cuda", "cpu"])
def test_every_rung_is_a_valid_config_with_the_same_global_batch(rungs: list[Any]):
    climbed = []
    for rung in rungs:
        config = load_config("gpt2-124m", as_words(settings_of(rung, climbed))).config
        size, count = micro_batch_of(config)
        assert size * count * config.model.context == config.train.batch_tokens
        climbed += [rung] if rung.group == "ladder" else []


def test_the_baseline_sets_every_switch_that_decides_speed():
    free = {"device", "memory_limit", "accumulation", "loss_chunk", "threads"}
    fields = {path for path in field_facts() if path.startswith("speed.")}
    assert set(BASELINE) == fields - {f"speed.{name}" for name in free}


def test_a_rung_of_the_ladder_changes_something():
    climbed: list[Any] = []
    for rung in CUDA:
        before = settings_of(dataclasses.replace(rung, words={}), climbed)
        if rung.name not in ("baseline", "full-again") and rung.trick is None:
            assert settings_of(rung, climbed) != before, rung.name
        climbed += [rung] if rung.group == "ladder" else []


@pytest.mark.parametrize(("rungs", "count"), [(CUDA, 16), (CPU, 5)], ids=["cuda", "cpu"])
def test_taking_a_switch_out_takes_out_that_switch(rungs: list[Any], count: int):
    """What it set is as it was before; what cannot be without it goes too, and nothing else does."""
    ladder = [rung for rung in rungs if rung.group == "ladder"]
    top = settings_of(ladder[-1], ladder[:-1])
    taken = [rung for rung in rungs if rung.group == "without"]
    assert len(taken) == count
    for rung in taken:
        place = next(i for i, step in enumerate(ladder) if step.name == rung.name.removeprefix("without-"))
        before, without = settings_of(ladder[place - 1], ladder[: place - 1]), settings_of(rung, ladder)
        for path in ladder[place].words:
            assert without[path] == before[path] != ladder[place].words[path], (rung.name, path)
        changed = {path for path in top if without[path] != top[path]}
        assert changed, rung.name
        alone = rung.name not in ("without-bf16", "without-compile", "without-triton")
        assert changed == set(ladder[place].words) or not alone, rung.name


def test_rungs_that_a_device_lacks_leave_no_gap():
    rungs = linked([rung for rung in CUDA if rung.name not in ("attention", "triton", "residual")])
    by_name = {rung.name: rung for rung in rungs}
    assert by_name["loss"].against == "compile"
    assert "without-triton" not in by_name
    assert by_name["compile-regional"].against == by_name["fp8-mlp"].against == "cuda-graphs"


def test_choosing_brings_what_is_compared_with():
    rungs = linked(CUDA)
    assert [rung.name for rung in choose(rungs, names=["compile"], only=None)] == ["pad-vocab", "compile"]
    assert [rung.name for rung in choose(rungs, names=["fp8-mlp"], only=None)] == ["cuda-graphs", "fp8-mlp"]
    modes = choose(rungs, names=["compile-regional"], only=None)
    assert [rung.name for rung in modes] == ["cuda-graphs", "without-triton", "compile-regional"]
    only = choose(rungs, names=None, only="without")
    assert [rung.name for rung in only if rung.group != "without"] == ["cuda-graphs"]
    assert choose(rungs, names=None, only=None) == rungs


def test_the_guides_tricks_are_rungs():
    tricks = {rung.trick for rung in CUDA if rung.trick is not None}
    assert tricks == {"empty-cache", "empty-cache-each-step", "gc-collect", "cudnn-benchmark", "split-512"}


def test_the_tolerance_is_that_of_the_coarsest_arithmetic():
    assert tolerance_of(BASELINE) == TOLERANCES["fp32"]
    assert tolerance_of({**BASELINE, "speed.precision": "bf16"}) == TOLERANCES["bf16"]
    assert tolerance_of({**BASELINE, "speed.precision": "bf16", "speed.fp8": "[up]"}) == TOLERANCES["fp8"]
    assert tolerance_of({**BASELINE, "speed.optimizer_state": "8bit"}) == TOLERANCES["8bit"]


def test_every_name_covers_every_device():
    for kind in ("cuda", "mps", "cpu"):
        for attention in ("sdpa", "flash", "cudnn"):
            names = {rung.name for rung in all_rungs(kind=kind, micro_batch=4, attention=attention)}
            assert names <= set(every_name())
    assert "full" in every_name()


@pytest.mark.parametrize("path", OWN_SWITCHES)
def test_a_switch_that_the_ladder_sets_is_refused_as_a_word(path: str, tiny: Tiny):
    with pytest.raises(UsageError) as error:
        climb(tiny(f"{path}={BASELINE[path]}"), "sdpa")
    assert f"sets {path} itself" in error.value.message
    assert "--rungs NAME" in error.value.hint


def test_other_speed_words_stay_allowed(tiny: Tiny):
    rows = climb(tiny("train.batch_tokens=256", "speed.micro_batch=4", "speed.loss_chunk=64"), "micro-batch")
    assert rows["micro-batch"].micro_batch == 4
    assert "speed.micro_batch=4" in rows["micro-batch"].config_words


def test_switches_of_a_file_are_told_not_refused(tiny: Tiny, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "preset: shakespeare-char\nspeed: {attention: reference, kernels: auto, device: cpu}\n", encoding="utf-8"
    )
    said: list[str] = []
    loaded = load_config(tmp_path / "mine.yaml", ["model.layers=1", "model.width=32", "model.heads=2"])
    made = make_plan(loaded, tmp_path / "scratch", 3, 4, None, said.append)
    told = [line for line in said if "sets its switches itself" in line]
    assert len(told) == 1
    assert told[0].endswith("does not use speed.attention=reference")  # auto is the default: nothing is lost
    assert not any("attention" in word for word in made.config_words)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_trains_real_steps(tiny: Tiny):
    run = set_up(tiny())
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    called: list[int] = []
    with Steps(run, after_step=called.append) as stepping:
        untimed, timed = stepping.take(2), stepping.take(4)
        found = summary_of(run, untimed, timed)
    assert called == [1, 2, 3, 4, 5, 6]
    assert int(run.step.updates) == 6
    assert found.steps == 4
    assert all(
        not torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True) if new.ndim > 1
    )
    assert found.milliseconds == pytest.approx(1000 * statistics.median(report.seconds for report in timed))
    assert [report.loss for report in (*untimed, *timed)][:3] == parity_losses(set_up(tiny()), 3)
    assert found.compile_seconds == 0.0
    assert (found.peak_bytes or 0) > 0


def test_the_figures_of_steps_of_different_lengths(tiny: Tiny):
    run = set_up(tiny())
    with Steps(run) as stepping:
        (report,) = stepping.take(1)
    seconds = (0.9, 0.1, 0.3, 0.2, 0.4)
    untimed, *timed = (dataclasses.replace(report, seconds=spent) for spent in (3.0, *seconds))
    found = summary_of(run, [untimed], timed)
    assert (found.milliseconds, found.mean_milliseconds) == pytest.approx((300, 380))
    assert found.spread == pytest.approx((0.4 - 0.2) / 0.3), "from quartile to quartile"
    assert (found.compile_seconds, found.steps) == (0.0, 5)
    compiled = run.replanned(speed=dataclasses.replace(run.speed, compile="default"))
    assert summary_of(compiled, [untimed], timed).compile_seconds == pytest.approx(2.7)
    assert summary_of(compiled, timed[1:2], timed).compile_seconds == 0.0


def test_stepping_goes_on_where_it_stopped(tiny: Tiny):
    whole = parity_losses(set_up(tiny()), 5)
    with Steps(set_up(tiny())) as stepping:
        assert [report.loss for report in (*stepping.take(2), *stepping.take(3))] == whole
    with pytest.raises(ValueError, match="only 3 steps"):
        parity_losses(set_up(tiny("train.steps=3")), 4)


def test_a_borrowed_run_leaves_no_tensors_behind(tiny: Tiny):
    with borrowed_run(tiny()) as run:
        parity_losses(run, 2)
    assert sum(parameter.numel() for parameter in run.model.parameters()) == 0
    assert not run.step.optimizer.tensors()
    assert all(parameter.grad is None for parameter in run.model.parameters())


# --- the gate ---------------------------------------------------------------------------------------------------------


def climb(loaded: LoadedConfig, *names: str, **named: Any) -> dict[str, BenchRow]:
    settings: dict[str, Any] = {"steps": 3, "parity_steps": 4, "names": names or None, **named}
    return {row.rung: row for row in ladder.bench(loaded, **settings)}


@pytest.mark.usefixtures("bf16_products")
def test_a_rung_that_does_not_match_the_reference_has_no_speed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    exact = ladder.parity_losses

    def shifted(run: Run, steps: int, _began: Any) -> list[float]:
        return [loss + 0.01 for loss in exact(run, steps)]

    monkeypatch.setattr(ladder, "parity_losses", shifted)
    rows = climb(tiny(), "baseline", "fused-qkv", "bf16")
    for name in ("baseline", "fused-qkv"):  # 0.01 is more than exact arithmetic may differ
        row = rows[name]
        assert row.status == "red"
        assert "differ by 0.01" in row.reason
        assert row.parity == pytest.approx(0.01, abs=1e-3)
        assert row.tokens_per_second is row.milliseconds is row.gain is row.factor is row.peak_bytes is None
    assert rows["bf16"].status == "green"  # and less than bf16 may


def test_a_wrong_gradient_turns_a_rung_red(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    """The gate must see weights move wrongly, not only a wrong first loss."""
    honest = turns.borrowed_run

    @contextlib.contextmanager
    def tampered(loaded: LoadedConfig, **named: Any) -> Iterator[Run]:
        with honest(loaded, **named) as run:
            if loaded.config.speed.fused_qkv:
                next(run.model.parameters()).register_hook(torch.neg)  # of the embedding: uphill instead of down
            yield run

    monkeypatch.setattr(turns, "borrowed_run", tampered)
    rows = climb(tiny("optim.learning_rate=2e-2"), "fused-qkv", parity_steps=12)
    assert rows["baseline"].status == "green"
    assert rows["fused-qkv"].status == "red"


def test_a_switch_that_a_run_gives_up_on_the_way_has_no_speed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    honest = turns.borrowed_run

    @contextlib.contextmanager
    def giving_up(loaded: LoadedConfig, **named: Any) -> Iterator[Run]:
        with honest(loaded, **named) as run:
            run.new_notices.add("fused_qkv became false: it did not work out")
            yield run

    monkeypatch.setattr(turns, "borrowed_run", giving_up)
    rows = climb(tiny(), "fused-qkv", "sdpa")
    assert rows["fused-qkv"].status == "failed"
    assert "did not work out" in rows["fused-qkv"].reason
    assert rows["fused-qkv"].tokens_per_second is None
    assert rows["baseline"].status == rows["sdpa"].status == "green"  # it is not what they are about
    assert "did not work out" in rows["sdpa"].reason


def test_no_number_is_never_close():
    assert ladder.largest_difference([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert ladder.largest_difference([1.0, math.nan], [1.0, math.nan]) == math.inf
    assert ladder.largest_difference([1.0, 2.5], [1.25, 2.5]) == 0.25


def test_a_rung_without_memory_says_so_and_the_ladder_goes_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    honest = turns.borrowed_run
    tried: list[int] = []

    def small_card(loaded: LoadedConfig, **named: Any) -> Any:
        size = loaded.config.speed.micro_batch or 0
        if loaded.config.speed.attention == "sdpa":
            tried.append(size)
            if size > 4:
                raise ResourceError("out of device memory: too much", "less")
        if not loaded.config.speed.fused_qkv and loaded.config.speed.attention == "sdpa":
            raise RuntimeError("a kernel broke\nwith a long story")
        return honest(loaded, **named)

    monkeypatch.setattr(turns, "borrowed_run", small_card)
    names = ["sdpa", "micro-batch", "fused-adamw", "without-fused-qkv"]
    rows = climb(tiny("train.batch_tokens=256", "speed.micro_batch=16"), *names)
    assert tried[:4] == [2, 16, 8, 4]  # the micro-batch halves until it fits, and stays so
    assert rows["micro-batch"].status == "green"
    assert rows["micro-batch"].micro_batch == 4
    assert rows["fused-adamw"].micro_batch == 4
    assert rows["fused-adamw"].gain is not None
    assert rows["without-fused-qkv"].status == "failed"
    assert rows["without-fused-qkv"].reason == "RuntimeError: a kernel broke"


def test_a_switch_without_memory_is_not_carried_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    honest = turns.borrowed_run

    def no_sdpa(loaded: LoadedConfig, **named: Any) -> Any:
        if loaded.config.speed.attention == "sdpa":
            raise ResourceError("out of device memory: too much", "less")
        return honest(loaded, **named)

    monkeypatch.setattr(turns, "borrowed_run", no_sdpa)
    rows = climb(tiny(), "fused-qkv", "sdpa", "micro-batch", "without-sdpa")
    assert rows["sdpa"].status == "out_of_memory"
    assert rows["micro-batch"].against == "fused-qkv"
    assert "speed.attention=reference" in rows["micro-batch"].settings
    assert rows["without-sdpa"].status == "absent"
    assert "not in the full set" in rows["without-sdpa"].reason


def test_a_gain_is_over_the_rung_it_was_timed_with_and_a_factor_over_the_baseline():
    found = Comparison(2.0, 1.9, 2.2, 20)
    none = {"gain": None, "factor": None}
    base = ladder.with_ratios(row("baseline", **none), None, None)
    assert (base.gain, base.factor, base.factor_error) == (None, 1.0, 0.0)
    step = ladder.with_ratios(row("sdpa", against="baseline", **none), base, found)
    assert (step.gain, step.gain_low, step.gain_high, step.pairs, step.verdict) == (2.0, 1.9, 2.2, 20, "faster")
    assert step.error == step.factor_error == pytest.approx(math.sqrt(2.2 / 1.9) - 1)
    out = ladder.with_ratios(row("without-sdpa", group="without", against="sdpa", **none), step, found)
    assert (out.gain, out.gain_low, out.gain_high) == pytest.approx((1 / 2.0, 1 / 2.2, 1 / 1.9))
    assert out.verdict == "slower", "of the switch, not of the rung without it"
    assert out.factor == 4.0
    far = ladder.with_ratios(row("micro-batch", against="fused-adamw", **none), step, found)
    assert (far.gain, far.verdict, far.factor) == (None, "", 4.0), "it was timed with another one than it is over"
    assert far.factor_error == pytest.approx(chained([step.error, step.error]))
    few = ladder.with_ratios(row("loss", against="sdpa", **none), step, compare([2.0, 2.1]))
    assert (few.gain, few.error, few.gain_low, few.factor_error) == (2.05, None, None, None)
    assert few.verdict == "too noisy to tell"
    red = row("red", status="red", **NO_SPEED)
    assert ladder.with_ratios(red, step, None) == red


# --- what it is measured on -------------------------------------------------------------------------------------------


def test_a_config_without_data_gets_random_tokens_and_says_so(tiny: Tiny, tmp_path: Path):
    said: list[str] = []
    loaded = tiny("data.folder=nowhere", "data.source=null", "data.tokenizer=bytes")
    rows = climb(loaded, "baseline", notice=said.append)
    assert rows["baseline"].status == "green"
    assert "random tokens" in rows["baseline"].data
    assert any("random tokens" in line for line in said)
    assert not any(tmp_path.iterdir())  # nothing of it stays, and nothing was prepared


def test_no_folder_for_temporary_files_is_an_error_of_the_user(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    def nowhere(*_: object, **__: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    for verb in (lambda: climb(tiny(), "baseline"), lambda: list(tune(tiny()))):
        with pytest.raises(ResourceError) as error:
            verb()
        assert "TMPDIR" in error.value.hint


def test_random_tokens_are_in_the_vocabulary_and_uneven(tmp_path: Path, tiny: Tiny):
    from flatout.data.shards import open_dataset
    from flatout.data.tokenizer import ByteTokenizer

    folder = write_random(tmp_path / "random", ByteTokenizer(), vocab=100, train_tokens=5000, seed=1, val_tokens=50)
    dataset = open_dataset(folder, verify="full")
    ids = torch.from_numpy(dataset.train.read(0, 5000).astype("int64"))
    assert int(ids.max()) < 100
    counts = ids.bincount(minlength=100)
    assert int(counts.max()) > 10 * int(counts.float().median())
    again = write_random(tmp_path / "again", ByteTokenizer(), vocab=100, train_tokens=5000, seed=1, val_tokens=50)
    assert open_dataset(again).manifest.fingerprint == dataset.manifest.fingerprint


def test_prepared_data_is_used_where_it_is(tiny: Tiny, tmp_path: Path):
    from flatout import prepare

    loaded = tiny()
    folder = prepare(loaded)
    data, words = practice_data(loaded, tmp_path / "scratch")
    assert data.folder == str(folder)
    assert data.source is None
    assert str(folder) in words
    assert not (tmp_path / "scratch").exists()


def test_the_batch_is_capped_unless_it_was_asked_for(tiny: Tiny, tmp_path: Path):
    def planned(loaded: LoadedConfig, tokens: int | None = None) -> tuple[int, list[str]]:
        said: list[str] = []
        made = make_plan(loaded, tmp_path / str(len(list(tmp_path.iterdir()))), 3, 4, tokens, said.append)
        return made.settings.config.train.batch_tokens, said

    many = load_config("gpt2-124m", ["speed.device=cpu"])
    tokens, said = planned(many)
    assert tokens == 64 * 1024
    assert any("65,536 tokens instead of 524,288" in line for line in said)
    assert planned(many, 131072)[0] == 131072
    assert planned(load_config("gpt2-124m", ["train.batch_tokens=262144", "speed.device=cpu"]))[0] == 262144
    with pytest.raises(ConfigError, match="not a multiple"):
        planned(many, 1000)


def test_slow_rungs_take_fewer_steps():
    assert ladder.step_count(12, 0.1) == 12
    assert ladder.step_count(12, 1.0) == 8
    assert ladder.step_count(12, 100.0) == 3
    assert ladder.step_count(12, 0.1, whole=10) == 20  # a trick every ten steps comes twice


def test_what_the_device_lacks_is_listed_with_its_reason(tiny: Tiny):
    rows = climb(tiny(), "triton", "tf32", "split-512", "fp8-all")
    assert {row.status for row in rows.values()} == {"absent"}
    assert "CUDA" in rows["triton"].reason
    assert "tf32" in rows["tf32"].reason
    assert rows["split-512"].reason
    with pytest.raises(UsageError) as error:
        climb(tiny(), "micro-bach")
    assert "micro-batch" in error.value.hint


# --- table and picture ------------------------------------------------------------------------------------------------


def row(rung: str, **named: Any) -> BenchRow:
    values: dict[str, Any] = {
        "rung": rung, "group": "ladder", "place": 0, "status": "green", "reason": "", "against": None, "words": (),
        "settings": (),
        "used": {}, "parity": 1e-6, "parity_steps": 20, "tolerance": 0.002, "tokens_per_second": 1000.0,
        "milliseconds": 64.0, "mean_milliseconds": 64.5, "spread": 0.01, "mfu": None, "peak_bytes": 2**30,
        "compile_seconds": 0.0, "steps": 12,
        "gain": 1.5, "factor": 3.0,
        "config": "tiny", "config_words": (), "data": "random", "parameters": 10**6, "context": 64, "batch_tokens": 64,
        "micro_batch": 2, "accumulation": 1, "device": "cpu", "flatout": "0", "torch": "2", "commit": None,
    }  # fmt: skip
    return BenchRow(**(values | named))


NO_SPEED: dict[str, Any] = {
    "tokens_per_second": None, "milliseconds": None, "spread": None, "peak_bytes": None, "compile_seconds": None,
    "gain": None, "factor": None,
}  # fmt: skip


def table(rows: list[BenchRow], *names: str) -> str:
    stream = io.StringIO()
    print_sheet(sheet_of(rows, names), stream)
    return stream.getvalue()


def draw(rows: list[BenchRow], path: Path) -> None:
    draw_picture(picture_of(rows), path)


def test_the_table_shows_speeds_of_green_rungs_only():
    rows = [
        row("baseline", gain=None, factor=1.0),
        row("compile", tokens_per_second=3000.0, compile_seconds=12.5),
        row("fp16", group="extra", status="red", reason="the losses differ by 0.1, more than 0.02", **NO_SPEED),
        row("fp8", group="extra", status="absent", reason="no matrix units\x1b[2J", parity=None, **NO_SPEED),
    ]
    text = table(rows, "baseline", "compile")
    line = next(line for line in text.splitlines() if line.startswith("fp16"))
    assert "red" in line
    assert line.split() == ["fp16", "red", "1.0e-06", *["-"] * 8]
    assert "3,000" in text
    assert "12.5" in text
    assert "from the baseline to the full set: 3.00 times" in text
    assert "not green: fp16" in text
    assert "fp8" in text
    assert "\x1b" not in text


def test_rows_of_earlier_versions_can_be_read():
    old = json.loads(record_to_json(row("sdpa"))) | {
        "claim_rows": ["002-03"],
        "claim": "1.1-1.5x",
        "claim_low": 1.1,
        "claim_high": 1.5,
    }
    for name in ("gain_low", "gain_high", "error", "verdict", "pairs", "factor_error", "load"):
        del old[name]
    assert bench_row_from_json(json.dumps(old)) == row("sdpa")


def test_a_torn_last_row_is_cut_off_and_other_damage_is_named_by_its_line(tmp_path: Path):
    path, said = tmp_path / "bench.jsonl", list[str]()
    good = record_to_json(row("sdpa"))

    def read() -> list[BenchRow]:
        return read_rows(path, bench_row_from_json, "bench", "its rung is measured again", said.append)

    path.write_text(f'{good}\n{{"type": "bench", "ru', encoding="utf-8")
    assert read() == [row("sdpa")]
    assert said == [f"{path}: line 2, the last one, was cut off while it was written, and is dropped"]
    cases = [
        ([good, good, good[:40]], " is damaged in line 3: ", "remove that line"),
        ([good, "\ufffd" * 3, good], " is damaged in line 2: ", "remove that line"),
        ([good, good, '{"type": "step"}'], " is damaged in line 3: ", "a new folder"),
    ]
    for lines, message, hint in cases:
        text = "\n".join([*lines, ""])
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError) as refused:
            read()
        assert f"bench.jsonl{message}" in refused.value.message
        assert hint in refused.value.hint
        assert path.read_text(encoding="utf-8") == text
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(DataError):
        read()
    assert path.read_text(encoding="utf-8") == "mine", "what is not a torn row is not cut off"


def test_the_table_shows_errors_verdicts_and_how_noisy_it_was():
    sure = {"gain": 1.5, "gain_low": 1.45, "gain_high": 1.55, "error": 0.034, "verdict": "faster", "pairs": 20}
    open_ = {
        "gain": 0.54,
        "gain_low": 0.4,
        "gain_high": 1.4,
        "error": 0.87,
        "verdict": "too noisy to tell",
        "pairs": 80,
    }
    rows = [
        row("baseline", gain=None, factor=1.0, factor_error=0.0),
        row("sdpa", against="baseline", factor=1.5, factor_error=0.034, spread=0.3, load=1.5, **sure),
        row("without-pad-vocab", group="without", against="sdpa", factor=2.8, spread=0.5, load=3.25, **open_),
    ]
    text = table(rows, "baseline", "sdpa")
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "1.50x ±3.4%" in lines["sdpa"]
    assert lines["sdpa"].endswith("faster (1.45 to 1.55x)")
    assert "0.54x ±87%" in lines["without-pad-vocab"]
    assert lines["without-pad-vocab"].endswith("too noisy to tell (below 87% nothing is seen)")
    assert "from the baseline to the full set: 1.50 times ±3.4% (" in text
    assert "lay within 40% of each other, load average 1.5 to 3.2; gains are known to ±45.2% (median)" in text
    assert "too noisy to tell: without-pad-vocab. Measure again" in text
    assert "compile s" not in text, "nothing was compiled"


def test_a_rung_that_beats_the_full_set_is_named_only_where_the_error_allows():
    rows = [
        row("baseline", factor=1.0, tokens_per_second=10.0),
        row("sdpa", tokens_per_second=20.0),
        row("fp16", group="extra", against="sdpa", tokens_per_second=99.0, verdict="too noisy to tell"),
        row("workers-4", group="extra", against="sdpa", tokens_per_second=19.0, verdict="faster"),
        row("without-pad-vocab", group="without", against="sdpa", tokens_per_second=19.0, verdict="slower"),
        row("full-again", group="extra", against="sdpa", verdict="slower", gain=0.9, error=0.02),
    ]
    lines = total_lines(rows)
    assert "faster than what it is compared with: workers-4, without-pad-vocab" in lines
    assert any("full-again is the full set once more and came out at 0.90x ±2.0%" in line for line in lines)


def test_one_rung_is_one():
    assert progress_line(BenchProgress(0, 1, "reference", "reference")).endswith("that the rung is held against")
    assert progress_line(BenchProgress(0, 3, "reference", "reference")).endswith("that all 3 rungs are held against")


def test_a_total_needs_both_ends():
    assert total_lines([row("compile")]) == []
    assert "3.00 times" in total_lines([row("baseline", factor=1.0), row("compile", factor=3.0)])[0]


def test_the_full_set_is_named_only_when_its_rung_was_measured():
    rows = [row("baseline", factor=1.0), row("sdpa", factor=0.8)]
    names = ("baseline", "sdpa", "compile", "triton")
    assert total_lines(rows, names)[0].startswith("from the baseline to sdpa, the last rung that was measured: 0.80 ")
    assert "full set" not in table(rows, *names)
    above = [row("compile", status="red", **NO_SPEED), row("triton", status="absent", **NO_SPEED)]
    assert "sdpa" in total_lines([*rows, above[0]], names)[0], "triton may still come"
    assert total_lines([*rows, *above], names)[0].startswith(
        "from the baseline to the full set without compile: 0.80 times"
    )
    assert "one switch at a time, up to the full set" in table([*rows, *above], *names)
    beside = row("without-sdpa", group="without", against="sdpa")
    assert total_lines([*rows, beside])[0].startswith("from the baseline to the full set"), "that is what it is out of"


def test_the_picture_says_what_the_table_says():
    rows = [row("baseline", factor=1.0), row("sdpa", factor=0.8)]
    for names, words in ((("baseline", "sdpa", "compile"), "to sdpa, the last rung"), (("sdpa",), "to the full set")):
        figure = figure_of(picture_of(rows, names))
        texts = [text.get_text() for part in (figure, *figure.axes) for text in part.texts]
        assert any(words in text for text in texts)
        assert ("one switch at a time" in texts) == ("compile" in names)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("baseline", status="red", reason="the losses differ by 3, more than 0.02", **NO_SPEED)],
        [row(f"rung-{number}", gain=10.0 ** (number - 3), tokens_per_second=10.0**number) for number in range(7)],
        [
            row("x", group="without", config="$a_b^{c}$", reason="", gain=1.0),
            row("absent", status="absent", **NO_SPEED),
        ],
    ],
    ids=["none", "red", "wide", "odd"],
)
def test_any_rows_can_be_drawn(rows: list[BenchRow], tmp_path: Path):
    draw(rows, tmp_path / "one.png")
    draw(rows, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_have_known_forms(tmp_path: Path):
    with pytest.raises(UsageError):
        draw([row("a")], tmp_path / "one.bmp")
    with pytest.raises(ResourceError):
        draw([row("a")], tmp_path / "nowhere" / "one.png")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EACCES])
def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    draw([row("a")], tmp_path / "one.png")
    good = (tmp_path / "one.png").read_bytes()

    def fails(*_paths: Path) -> None:
        raise OSError(number, "what the system says")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(ResourceError, match="what the system says") as error:
        draw([row("b")], tmp_path / "one.png")
    assert ("writable" if number == errno.EACCES else "free some space") in error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
    assert (tmp_path / "one.png").read_bytes() == good


def test_a_row_is_one_json_line():
    red = row("a", parity=math.inf, words=("speed.x=1",))
    assert bench_row_from_json(record_to_json(red)) == red
    for line in ("{}", "[]", '{"type": "bench"}', '{"type": "step"}', "not json"):
        with pytest.raises(ValueError, match=r"."):
            bench_row_from_json(line)
    stored = json.loads(record_to_json(red))
    assert stored["type"] == "bench"
    assert stored["parity"] == "inf"
    assert stored["rung"] == "a"


# --- a card that is not here ------------------------------------------------------------------------------------------


EVERYTHING_WORKS = Probes(
    attention=lambda *_, **__: None,
    picked=lambda *_, **__: "flash",
    compiler=lambda _: None,
    triton=lambda: True,
    products=lambda: None,
)


def test_on_a_hopper_card_every_rung_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The switches of a rung do not exclude each other, and none but the named ones gives way."""
    card = Device(torch_device=torch.device("cuda", 0), name="NVIDIA H200", memory_bytes=140 * 2**30, capability=(9, 0))
    monkeypatch.setattr(ladder, "detect_device", lambda _asked: card)
    monkeypatch.setattr(ladder, "resolve_speed", functools.partial(resolve_speed, probes=EVERYTHING_WORKS))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    subject = make_plan(load_config("gpt2-124m"), tmp_path, 12, 20, None, lambda _: None)
    assert ladder.resolved(subject, {"speed.compile": "off"}).execution.attention == "cudnn+fa4"
    absent = ladder.absences(subject, CUDA)
    assert absent.keys() == {"without-fused-qkv"}, absent  # our kernels take one product for queries, keys and values
    full = [rung for rung in CUDA if rung.group == "ladder" and rung.name not in absent]
    giving_way = {}
    for rung in linked([rung for rung in CUDA if rung.name not in absent]):
        below = [step for step in full if CUDA.index(step) < place_of(rung)]
        settings = settings_of(rung, below)
        refused = ladder.refusals(ladder.resolved(subject, settings), settings)
        giving_way |= {rung.name: set(refused)} if refused else {}
    assert not giving_way


def place_of(rung: Rung) -> int:
    return [other.name for other in CUDA].index(rung.name)
