"""Errors say which setting to change and where it was written; findings are made of them, and of plans."""

import pickle

import pytest

from flatout.config.load import load_config
from flatout.errors import AdapterError, ConfigError, DataError, ResourceError, UserError
from flatout.finding import Check, exit_code, finding_of
from tests.set_up import planned


@pytest.mark.parametrize("word", ["model.width=-1", "optim.learning_rate=fast", "speed.precision=fp7"])
def test_an_error_about_a_value_names_its_setting_and_where_it_was_written(word: str):
    with pytest.raises(ConfigError) as caught:
        load_config("shakespeare-char", [word])
    error = caught.value
    assert (error.setting, error.where) == (word.partition("=")[0], "command line")
    assert error.message == f"command line: {error.what}"
    assert error.what.startswith(error.setting)


def test_an_error_keeps_its_fields_on_the_way_from_another_process():
    for error in (
        UserError("a", "b", where="here", setting="model.width"),
        AdapterError("a", "b", "lora.ranks"),
        ConfigError("a", "b"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert vars(again) == vars(error)
        assert str(again) == str(error)


def test_a_finding_of_an_error_is_named_by_its_setting_and_stands_where_its_exit_code_says():
    named = finding_of(ConfigError("it is wrong", "set it right", setting="model.width"), "config")
    assert (named.area, named.name, named.status) == ("config", "model.width", "bad")
    assert (named.found, named.advice) == ("it is wrong", "Set it right.")
    assert finding_of(DataError("gone", ""), "config").area == "data"
    assert finding_of(ResourceError("full", ""), "memory", "a step").area == "memory"
    assert exit_code([named, finding_of(DataError("gone", ""), "data")]) == 2


def test_a_plan_has_its_checks_with_advice_and_its_notices_are_their_lines(tiny):
    plan = planned(tiny("optim.warmup=100", "eval.every=50", "checkpoint.every=20", "train.steps=8"))
    found = {check.name: check for check in plan.checks}
    assert plan.notices == tuple(check.found for check in plan.checks)
    assert {found[name].status for name in ("warm-up", "evaluation", "saving")} == {"warn"}
    assert "optim.warmup=1" in found["warm-up"].advice
    assert "eval.every=1 " in found["evaluation"].advice
    assert "checkpoint.every=2." in found["saving"].advice
    mended = planned(tiny("optim.warmup=1", "eval.every=1", "checkpoint.every=2", "train.steps=8"))
    assert not {"warm-up", "evaluation", "saving"} & {check.name for check in mended.checks}


def test_a_check_makes_findings_of_every_kind():
    check = Check("data", "rows")
    kinds = [check.ok("x"), check.note("x"), check.warn("x", "y"), check.bad("x", "y")]
    assert [one.status for one in kinds] == ["ok", "note", "warn", "bad"]
    assert exit_code(kinds) == 3
