"""The verbs that measure, on fine-tuning configs: estimate, bench, ablate, profile, tune lr and tune search."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout import api
from flatout.cli import main
from flatout.config.load import load_config
from flatout.errors import ConfigError, UsageError
from flatout.records import AblateRow, RunInfo
from flatout.tuning import profile
from flatout.tuning.bottleneck import Measurements, judge
from flatout.tuning.changes import read_space
from flatout.tuning.estimate import estimate
from flatout.tuning.lr_range import find_rate, range_test
from flatout.tuning.measure import Steps, borrowed_run
from flatout.tuning.rungs import FULL, SAMPLES, all_rungs, every_name, settings_of
from flatout.tuning.study import StudyResult, search
from tests.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("children_stay")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatout.tuning.estimate.FEWEST", 3)
    monkeypatch.setattr("flatout.tuning.estimate.MOST", 6)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}." * (1 + n % 3)} for n in range(30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")

    def make(*more: str) -> list[str]:
        named = ["model.init_from=base", "chat.source=rows.json", "model.context=64", "lora.rank=4"]
        return [*named, "eval.sample_tokens=4", "speed.device=cpu", "train.epochs=2.0", *more]

    return make


def left_behind() -> set[str]:
    return {path.name for path in Path().iterdir()} - {"base", "rows.json"}


@pytest.mark.parametrize("more", [[], ["lora.rank=0"]], ids=str)
def test_an_estimate_is_what_the_run_is(words, more):
    result = estimate(load_config("lora", words(*more)), seconds=0.05)
    assert left_behind() == set()
    info = next(iter(api.train(load_config("lora", words(*more)))))
    assert isinstance(info, RunInfo)
    assert (result.steps.value, result.batch_tokens) == (info.steps, info.batch_tokens)
    assert result.parameters.value == info.parameters
    trained = info.trained_parameters or info.parameters
    assert result.parameters.note == f"{trained:,} values are trained"
    assert result.epochs.value == 2.0
    assert {part.name: part.times for part in result.parts}["training"] == info.steps
    assert all(part.seconds.value is not None for part in result.parts)
    assert result.checkpoint_bytes.how == "measured"
    assert result.seconds.value is not None


def test_an_estimate_without_a_probe_counts_alone(words, capsys):
    assert main(["estimate", *words(), "--no-probe"]) == 0
    said = capsys.readouterr().out
    assert "8 steps of" in said
    assert "values are trained" in said


def test_the_rate_finder_takes_adapters_and_leaves_nothing(words, capsys):
    result = find_rate(load_config("lora", words()), steps=30)
    assert 1e-6 < result.rate < 1
    assert left_behind() == set()
    assert main(["tune", "lr", *words(), "--steps", "30"]) == 0
    assert "train with: flatout finetune lora model.init_from=base" in capsys.readouterr().out


def test_how_hard_samples_are_is_not_read_as_learning(words):
    with borrowed_run(load_config("lora", words())) as run:
        with Steps(run) as steps:
            seen = [report.loss for report in steps.take(6)]
        points, _ = range_test(run, low=1e-12, high=1e-11, steps=6)
    losses = [point.loss for point in points]
    assert max(seen) - min(seen) > 1e-2
    assert max(losses) - min(losses) < 1e-5


def test_a_search_over_settings_of_adapters(words):
    pytest.importorskip("optuna")
    Path("space.yaml").write_text(
        "optim.learning_rate: {log: [1e-4, 1e-2]}\nlora.rank: {choices: [2, 4]}\n"
        "chat.batch_samples: {choices: [4, 8]}\n",
        encoding="utf-8",
    )
    loaded = load_config("lora", words("train.epochs=null", "train.steps=3"))
    *rows, result = search(loaded, read_space(Path("space.yaml"), loaded), trials=2)
    assert [row.status for row in rows] == ["done", "done"]
    assert isinstance(result, StudyResult)
    assert result.best.values.keys() == {"optim.learning_rate", "lora.rank", "chat.batch_samples"}
    for field in ("chat.train_on: {choices: [last, all]}", "lora.init_from: {choices: [one, two]}"):
        Path("space.yaml").write_text(f"{field}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match="cannot be searched over"):
            read_space(Path("space.yaml"), loaded)


def test_an_ablation_of_adapters(words):
    loaded = load_config("lora", words("train.epochs=null", "train.steps=3"))
    *rows, result = api.ablate(loaded, fields=["lora.rank=2"], seeds=1)
    assert [(row.field, row.steps) for row in rows if isinstance(row, AblateRow)] == [("", 3), ("lora.rank", 3)]
    assert isinstance(result, api.AblateResult)
    assert result.effects[0].difference is not None
    assert not left_behind() - {"data"}


def test_a_profile_of_adapters(words, monkeypatch, capsys):
    judged: list[Measurements] = []
    monkeypatch.setattr(profile, "judge", lambda found, *more: judged.append(found) or judge(found, *more))
    assert main(["profile", *words(), "--steps", "1", "--out", "profiled"]) == 0
    assert [found.batch_setting for found in judged] == ["chat.batch_samples"], "advice names what changes fine-tuning"
    report = json.loads(Path("profiled/profile.json").read_text(encoding="utf-8"))
    assert report["batch_tokens"] > 0
    assert {one["name"] for one in report["ranges"]} >= {"forward", "backward"}
    gradients = next(part for part in report["memory"] if part["name"] == "gradients")
    assert gradients["measured"] < 100_000, "of the adapters alone"


def test_the_ladder_over_samples_has_rungs_of_its_own_and_is_green(words):
    names = ["baseline", "packing", "loss-chunked"]
    rows = list(api.bench(load_config("lora", words()), steps=4, parity_steps=3, rungs=names))
    assert {row.rung: row.status for row in rows if row.rung in names} == dict.fromkeys(names, "green")
    assert all(row.parity is not None and row.parity <= row.tolerance for row in rows)
    assert len({row.batch_tokens for row in rows}) == 1
    assert all(row.steps % 4 == 0 for row in rows), "whole cycles of the chosen steps"
    assert left_behind() == set()
    with pytest.raises(UsageError, match="--batch-tokens is for pretraining"):
        list(api.bench(load_config("lora", words()), steps=3, parity_steps=4, batch_tokens=128))


def test_packing_is_a_rung_of_samples_only():
    how = {"micro_batch": 4, "attention": "sdpa"}
    for kind in ("cpu", "cuda"):
        text, samples = (all_rungs(kind=kind, **how, samples=one) for one in (False, True))
        assert {rung.name for rung in samples} - {rung.name for rung in text} == {"packing", "without-packing"}
        assert not any("loader=device" in rung.words.get("speed.loader", "") for rung in samples)
        assert settings_of(samples[0], [])["chat.packing"] == SAMPLES["chat.packing"]
    assert every_name().count("packing") == 1
    assert every_name()[-1] == FULL
