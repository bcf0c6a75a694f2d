"""Every verb as a function of `flatout`: the same work, nothing printed."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout.config.load import LoadedConfig
from flatout.errors import ConfigError, DataError, UsageError
from flatout.observe.alerts import Alert, Alerts
from flatout.records import StepRecord

Tiny = Callable[..., LoadedConfig]
VERBS = ("ablate", "bench", "chat", "consolidate", "doctor", "estimate", "evaluate", "export", "finetune", "generate",
         "merge", "plot", "prepare", "profile", "report", "search", "serve", "train", "tune",
         "tune_lr")  # fmt: skip


def test_names_are_listed_once_typed_and_documented():
    homes = [name for names in flatout.HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == sorted(flatout.__all__)
    assert {*VERBS, "load_config", "load_model", "EvalRecord", "StepRecord"} <= set(dir(flatout))
    for name in VERBS:
        function = getattr(flatout, name)
        assert inspect.getdoc(function), name
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values()), name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        flatout.trian  # noqa: B018


def test_alerts_are_logged_unless_nobody_wants_them(tiny: Tiny, monkeypatch, caplog):
    def see(_: Alerts, record: flatout.Record) -> list[Alert]:
        return [Alert(record.step, "busy host", "others use the cores")] if isinstance(record, StepRecord) else []

    monkeypatch.setattr(Alerts, "see", see)
    flatout.train(tiny("train.steps=2", "output.folder=a"), on_record=lambda _: None)
    assert [line.getMessage() for line in caplog.records if line.name == "flatout"] == [
        f"step {step} busy host: others use the cores" for step in (1, 2)
    ]
    caplog.clear()
    list(flatout.train(tiny("train.steps=2", "output.folder=b"), alerts=False))
    assert not caplog.records


def test_what_reads_a_run_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import flatout\n"
        "flatout.load_config, flatout.doctor, flatout.plot, flatout.report, flatout.EvalRecord, flatout.Finding\n"
        "config = flatout.load_config('shakespeare-char', hardware='8gb')\n"
        "assert next(one for one in flatout.doctor(config, quick=True) if one.name == 'torch').status == 'bad'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_config_from_a_mapping_and_from_keywords():
    loaded = flatout.load_config(
        {"preset": "shakespeare-char", "train": {"steps": 7}, "model.layers": 2},
        ["train.seed=3"],
        optim={"learning_rate": 2e-3},
        **{"eval.tokens": 1e4},
    )
    config = loaded.config
    assert (config.train.steps, config.model.layers, config.train.seed) == (7, 2, 3)
    assert (config.optim.learning_rate, config.eval.tokens) == (2e-3, 10_000)
    assert config.output.name == "shakespeare-char"
    assert loaded.sources["train.steps"].by_user
    assert loaded.sources["eval.tokens"].where == "keyword"
    words = ["train.steps=7", "model.layers=2", "train.seed=3", "optim.learning_rate=2e-3", "eval.tokens=1e4"]
    assert config == flatout.load_config("shakespeare-char", words).config


@pytest.mark.parametrize(
    ("mapping", "keywords", "told"),
    [
        ({"train": {"stepz": 1}}, {}, r"train\.stepz is not a known key \(did you mean train\.steps"),
        ({"modle": {}}, {}, r"modle is not a known key \(did you mean model"),
        ({}, {"train": 3}, r"train is 3, but it is a section"),
        ({"preset": 3}, {}, r"preset is 3, but it must be a name"),
        ({"train": {"steps": "many"}}, {}, r"the mapping: train\.steps is 'many'"),
        ({"train": {"steps": 1}, "train.steps": 2}, {}, r"the mapping: train\.steps is given twice"),
        ({}, {"train": {"steps": 1}, "train.steps": 2}, r"keyword: train\.steps is given twice"),
        ({}, {"overrides": "train.steps=1"}, "must be a list of words"),
        ({}, {"overrides": [3]}, "must be a list of words"),
        ({}, {"hardware": 3}, "hardware is 3, but it must be a name"),
        (3, {}, "a int was given as the config"),
    ],
)
def test_mistakes_in_a_mapping_are_named(mapping, keywords, told: str):
    with pytest.raises(ConfigError, match=told):
        flatout.load_config(mapping, **keywords)


def test_a_mapping_without_a_preset_says_whose_defaults_it_has():
    (notice,) = flatout.load_config({"train": {"steps": 5}}).notices
    assert notice.startswith("the mapping names no preset, so the ")
    assert flatout.load_config({"preset": "shakespeare-char"}).notices == ()
    assert flatout.load_config(flatout.load_config().config.model_dump()).notices == (), "nothing is left out"


def test_numbers_of_numpy_and_torch_are_numbers():
    loaded = flatout.load_config(train={"steps": np.int64(7)}, optim={"learning_rate": torch.tensor(0.5)})
    assert (loaded.config.train.steps, loaded.config.optim.learning_rate) == (7, 0.5)


@pytest.mark.parametrize("config", ["shakespeare-char", {"train": {"steps": 1}}, 3])
def test_what_is_no_config_is_refused(config):
    for call in (flatout.train, flatout.estimate, flatout.prepare, flatout.finetune):
        with pytest.raises(UsageError, match=f"a {type(config).__name__} was given as the config"):
            next(iter(call(config)))
    for name in ("stop", "on_record"):
        with pytest.raises(UsageError, match=f"a int was given as {name}="):
            flatout.train(flatout.load_config(), **{name: 3})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_is_left_before_its_first_step_can_be_started_again(tiny: Tiny, tmp_path: Path, error):
    config = tiny("train.steps=2", "output.folder=run")

    def fail(_: flatout.Record) -> None:
        raise error

    with pytest.raises(error):
        flatout.train(config, on_record=fail)
    assert not (tmp_path / "run").exists()
    result = flatout.train(config, on_record=lambda _: None)
    assert result.end is not None
    with pytest.raises(UsageError, match="already holds a run"):
        flatout.train(config, on_record=fail)
    assert flatout.stored_config("run").config.train.steps == 2


def test_a_run_and_what_can_be_asked_of_it(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tiny("train.steps=4", f"output.folder={tmp_path / 'run'}")
    ends = [record for record in flatout.train(config) if isinstance(record, flatout.EndRecord)]
    assert len(ends) == 1
    model = flatout.load_model(tmp_path / "run")

    ids = model.tokenizer.encode("the old fox").tolist()
    logits = model(ids)
    assert logits.shape == (len(ids), model.model.vocab)
    assert torch.equal(model([ids, ids])[1], logits)
    assert not logits.requires_grad
    for bad in ([], [[[1]]], [10**6], ids * 1000, "the", [[1, 2], [3]], None, [1.5], torch.zeros(0, 3)):
        with pytest.raises(DataError, match="given to the model"):
            model(bad)

    assert "".join(flatout.chat(model, "the old ", tokens=5, temperature=0.0)) == "".join(
        flatout.generate(model, "the old ", tokens=5, temperature=0.0)
    ), "a model without a template continues the message"
    with pytest.raises(DataError, match="does not end with a message"):
        next(flatout.chat(model, []))

    written = flatout.plot(tmp_path / "run", tmp_path / "plots", svg=True)
    assert {path.suffix for path in written} == {".svg", ".csv"}
    assert all(path.is_file() for path in written)
    assert flatout.report(tmp_path / "run") == tmp_path / "run" / "report.html"
    with pytest.raises(UsageError, match="no run was named"):
        flatout.plot([])
    assert capsys.readouterr() == ("", "")


def test_the_doctor_takes_a_config_that_is_loaded(tiny: Tiny):
    config = tiny("train.steps=4")
    findings = list(flatout.doctor(config, quick=True))
    assert all(isinstance(one, flatout.Finding) for one in findings)
    assert not [one.found for one in findings if one.status == "bad" and one.area in ("config", "data")]
    (steps,) = [one for one in flatout.doctor("shakespeare-char", ["train.stepz=1"], quick=True) if one.advice and
                "train.steps" in one.advice]  # fmt: skip
    assert steps.status == "bad"
    with pytest.raises(UsageError, match="overrides are for a config by its name"):
        flatout.doctor(config, ["train.steps=1"])


def test_measuring_functions_return_what_their_verbs_show(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tiny("train.steps=4")
    found = flatout.tune_lr(config, steps=20)
    assert 1e-7 <= found.rate <= 1.0
    assert "learning_rate" in found.fragment
    with pytest.raises(UsageError, match="a factor of ten"):
        flatout.tune_lr(config, low=0.1, high=0.2)
    assert flatout.estimate(config, probe=False).problem == ""
    done = flatout.profile(config, tmp_path / "profiled", steps=1)
    assert done is not None
    assert json.loads(json.dumps(done.figures)) == json.loads(
        (done.folder / "profile.json").read_text(encoding="utf-8")
    )
    assert capsys.readouterr() == ("", "")


def test_a_search_takes_its_space_from_a_mapping(tiny: Tiny):
    pytest.importorskip("optuna")
    config = tiny("train.steps=2")
    *rows, result = flatout.search({"model.layers": {"choices": [1, 2]}}, config, trials=1)
    assert len(rows) == 1
    assert isinstance(result, flatout.StudyResult)
    for space, told in (({}, "names 0 fields"), ({"model.layers": 3}, "not one form"), ({"x": {}}, "not a known key")):
        with pytest.raises(ConfigError, match=told):
            next(flatout.search(space, config))


def test_finetune_says_what_it_lacks(tiny: Tiny):
    with pytest.raises(UsageError, match="nothing to fine-tune on"):
        flatout.finetune(tiny("train.steps=2"))
    with pytest.raises(UsageError, match="nothing was named to fine-tune on"):
        flatout.finetune()
