"""Search spaces, read strictly; and what a study makes of its trials, apart from training them."""

import dataclasses
import io
import json
from pathlib import Path

import pytest

from flatout.config.load import load_config
from flatout.errors import ConfigError
from flatout.front.words import one_line
from flatout.observe.sheets import draw_picture, print_sheet
from flatout.resolve.sizing import fitted
from flatout.tuning.changes import Dimension, Space, config_text, read_space, with_values
from flatout.tuning.study import StudyResult, TrialRow, at_the_edge, search_key, trial_line, trial_row_from_json


@pytest.fixture
def read(tmp_path: Path):
    loaded = load_config("shakespeare-char")

    def reading(text: str) -> Space:
        path = tmp_path / "space.yaml"
        path.write_text(text, encoding="utf-8")
        return read_space(path, loaded)

    return reading


def test_every_form_is_read(read):
    space = read(
        "# what to turn\n"
        "optim.learning_rate: {log: [1e-4, 1e-2]}\n"
        "optim.weight_decay: {range: [0, 0.3]}\n"
        "model.layers: {range: [2, 6]}\n"
        "optim.warmup:\n  range: [0, 200]\n"
        "optim.schedule: {choices: [cosine, wsd]}\n"
        "model.mlp_width: {choices: [null, 1e2]}\n"
    )
    found = {one.path: (one.form, one.values, one.whole) for one in space.dimensions}
    assert found == {
        "optim.learning_rate": ("log", (1e-4, 1e-2), False),
        "optim.weight_decay": ("range", (0.0, 0.3), False),
        "model.layers": ("range", (2, 6), True),
        "optim.warmup": ("range", (0, 200), True),
        "optim.schedule": ("choices", ("cosine", "wsd"), False),
        "model.mlp_width": ("choices", (None, 100), False),
    }
    assert isinstance(found["model.mlp_width"][1][1], int)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "names no field", "optim.learning_rate"),
        ("\n".join(f"field{n}: {{range: [0, 1]}}" for n in range(100)), "names 100 fields, at most", "fewer"),
        ("\n\noptim.clp: {range: [0.5, 2]}", "space.yaml:3: optim.clp is not a known key", "optim.clip"),
        ("lr: {log: [1e-4, 1e-2]}", "space.yaml:1: lr is not a known key", "optim.learning_rate"),
        ("optim:\n  learning_rate: {log: [1e-4, 1e-2]}", "space.yaml:1: optim is a section", "optim.learning_rate"),
        ("optim.learning_rate: 1e-3", "not one form of values", "log"),
        ("optim.learning_rate: {log: [1e-4, 1e-2], range: [0, 1]}", "not one form of values", "log"),
        ("optim.learning_rate: {logarithm: [1e-4, 1e-2]}", "is no form of values", "log"),
        ("optim.learning_rate: {log: 1e-4}", "takes a list", "log"),
        ("optim.learning_rate: {log: [1e-4]}", "takes two numbers", "exactly"),
        ("optim.learning_rate: {log: [1e-2, 1e-4]}", "0.01 is not below 0.0001", "low end first"),
        ("optim.weight_decay: {log: [0, 1]}", "begins above 0", "raise"),
        ("optim.learning_rate: {range: [low, high]}", "'low' is not a number", "choices"),
        ("optim.learning_rate: {range: [.nan, 1]}", "is not a number", ""),
        ("optim.learning_rate: {range: [0.1, 1000]}", "learning_rate is 1000.0, but it must be at most 100", ""),
        ("optim.schedule: {choices: [cosine, cosin]}", "optim.schedule is 'cosin', but", "cosine"),
        ("optim.schedule: {choices: [cosine]}", "1 choices", "between 2"),
        ("optim.schedule: {choices: [cosine, cosine]}", "written twice", ""),
        ("optim.schedule: {choices: [[cosine], wsd]}", "single value", ""),
        ("model.layers: {range: [1.5, 3]}", "whole numbers only", ""),
        ("optim.warmup: {steps: [0, 100, 50]}", "is no form of values", "log"),
        ("speed.micro_batch: {range: [1, 8]}", "cannot be searched over: it does not change what is learned", ""),
        ("data.tokenizer: {choices: [char, bytes]}", "could not be compared", ""),
        ("train.steps: {range: [10, 100]}", "the longest run would win", ""),
        ("train.seed: {range: [1, 9]}", "luckiest", ""),
        ("optim.learning_rate: {log: [1e-4, 1e-2]}\noptim.learning_rate: {log: [1e-4, 1]}", "written twice", ""),
        ("- 3", "not a mapping", ""),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(read, text: str, message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in caught.value.message
    assert "space.yaml" in caught.value.message
    assert "command line" not in caught.value.message
    assert hint in caught.value.hint


def test_a_drawn_value_is_rounded_but_stays_inside():
    rate = Dimension("optim.learning_rate", "log", (1.2345e-4, 1e-2), False, "")
    assert rate.settled(0.00345678) == 0.00346
    assert rate.settled(1.2345e-4) == 1.2345e-4
    assert Dimension("model.layers", "range", (1, 8), True, "").settled(3) == 3


def test_the_same_space_in_another_file_is_the_same(read):
    first = read("optim.learning_rate: {log: [1e-4, 1e-2]}\nmodel.layers: {range: [1, 4]}")
    second = read("# another look\nmodel.layers:\n  range: [1, 4.0]\noptim.learning_rate: {log: [0.0001, 0.01]}")
    assert first.spelling == second.spelling
    assert first.spelling != read("optim.learning_rate: {log: [1e-4, 2e-2]}\nmodel.layers: {range: [1, 4]}").spelling


def test_what_must_stay_the_same_in_a_study(read):
    space = read("optim.learning_rate: {log: [1e-4, 1e-2]}")

    def facts(*words: str) -> str:
        return search_key(load_config("shakespeare-char", words), space)

    assert facts("optim.learning_rate=1e-3") == facts("optim.learning_rate=5e-3"), "it is searched over"
    assert facts("output.name=other", "speed.micro_batch=2") == facts()
    assert facts("train.steps=9") != facts()
    assert facts("data.tokenizer=bytes") != facts()
    assert search_key(load_config("shakespeare-char"), read("optim.clip: {range: [1, 2]}")) != facts()


def test_values_become_a_config():
    loaded = with_values(
        load_config("shakespeare-char"), {"optim.schedule": "wsd", "model.mlp_width": None, "optim.clip": 0.5}
    )
    assert (loaded.config.optim.schedule, loaded.config.model.mlp_width, loaded.config.optim.clip) == ("wsd", None, 0.5)
    with pytest.raises(ConfigError, match="width"):
        with_values(loaded, {"model.width": 130})


def test_what_an_overlay_changed_is_in_the_file_that_was_found(tmp_path: Path):
    loaded = fitted(load_config("gpt2-124m", ["train.seed=5"], hardware="8gb"))
    path = tmp_path / "found.yaml"
    path.write_text(config_text(loaded, {"optim.learning_rate": 3e-4}, ", by hand."), encoding="utf-8")
    found = load_config(path).config
    assert loaded.sources["speed.micro_batch"].kind == "hardware"
    assert found.speed.micro_batch == loaded.config.speed.micro_batch
    optim = loaded.config.optim.model_copy(update={"learning_rate": 3e-4})
    assert found == loaded.config.model_copy(update={"optim": optim, "output": found.output})


def row(number: int, loss: float | None, status: str = "done", **values) -> TrialRow:
    known = {"evaluations": ((5, 3.0),), "seconds": 1.0, "best": False, "search": "0"}
    return TrialRow(number=number, status=status, reason="", values=values, loss=loss, step=10, **known)


def test_a_row_is_read_as_it_was_written():
    made = row(3, 2.5, a=1e-3, b=None)
    assert trial_row_from_json(json.dumps(made.to_json())) == made
    with pytest.raises(ValueError, match="another kind"):
        trial_row_from_json('{"type": "step"}')


def study(rows: list[TrialRow]) -> StudyResult:
    return StudyResult(
        rows=tuple(rows),
        best=rows[0],
        forms={"optim.learning_rate": "log", "optim.schedule": "choices", "model.layers": "range"},
        words=(),
        fragment="",
        config="shakespeare-char",
        device="cpu",
        seconds=60.0,
        flatout="0",
        torch="2",
    )


def trial(number: int, loss: float | None, status: str = "done", layers: int = 2) -> TrialRow:
    values = {"optim.learning_rate": 1e-3 * (number + 1), "optim.schedule": "cosine", "model.layers": layers}
    return dataclasses.replace(
        row(number, loss, status), values=values, reason="it burst", step=40, seconds=3.0, best=number == 0
    )


def test_table_and_picture_show_every_kind_of_trial(tmp_path: Path):
    rows = [trial(0, 2.0), trial(1, 2.5, layers=3), trial(2, 3.0, "pruned"), trial(3, None, "diverged"),
            trial(4, None, "out_of_memory"), trial(5, None, "invalid"), trial(6, 1e6)]  # fmt: skip
    stream = io.StringIO()
    print_sheet(study(rows).sheet(), stream)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("*")
    assert "2.0000" in lines[1]
    for words in ("cut short", "diverged", "out of memory", "no valid config"):
        assert any(words in line for line in lines), words
    assert any("at the edge of its range" in line and "learning_rate" in line for line in lines)
    assert not any(" more" in line for line in lines)
    stream = io.StringIO()
    print_sheet(study([trial(number, 2.0 + number) for number in range(23)]).sheet(), stream)
    lines = stream.getvalue().splitlines()
    assert "and 3 more" in lines
    assert lines.index("and 3 more") == 21, "below the head and twenty trials"
    draw_picture(study(rows).picture(), tmp_path / "a.png")
    draw_picture(study(rows).picture(), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw_picture(study([trial(0, 2.0)]).picture(), tmp_path / "one.svg")


def test_the_edge_needs_some_values_to_be_one():
    assert at_the_edge(study([trial(0, 2.0), trial(1, 3.0)])) == []


def test_a_hostile_value_cannot_move_the_cursor():
    told = one_line(trial_line(dataclasses.replace(trial(0, 2.0), values={"optim.schedule": "\x1b[2J\u202eboo"})))
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "boo" in told
