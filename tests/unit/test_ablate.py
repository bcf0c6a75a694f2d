"""`flatout ablate` apart from training: which fields, which runs, which are there already, and what is shown."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flatout import api
from flatout.config.load import load_config
from flatout.errors import ConfigError, DataError, DivergedError
from flatout.observe.picture import is_picture
from flatout.observe.sheets import draw_picture, print_sheet
from flatout.records import AblateRow, EvalRecord, ablate_row_from_json, record_to_json
from flatout.tuning import measure
from flatout.tuning.ablation import AblateResult
from flatout.tuning.changes import Change, changes_to_defaults, choose, named_changes, split_fields

# --- which fields -----------------------------------------------------------------------------------------------------


def test_true_and_false_are_flipped_and_others_written():
    words = split_fields("model.qk_norm, optim.schedule=linear,speed.fp8=[qkv,out],")
    assert words == ["model.qk_norm", "optim.schedule=linear", "speed.fp8=[qkv,out]"]
    assert named_changes(words, load_config("shakespeare-char")) == [
        Change("model.qk_norm", "true", "false"),
        Change("optim.schedule", "wsd", "linear"),
        Change("speed.fp8", "[]", "[qkv, out]"),
    ]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "names no field", "model.qk_norm"),
        (["model.qknorm"], "model.qknorm is not a known key", "did you mean model.qk_norm"),
        (["lr=1"], "lr is not a known key", "optim.learning_rate"),
        (["model.width"], "model.width is 96 and has more than one other value", "model.width=384"),
        (["optim.schedule"], "optim.schedule is wsd and has", "One of cosine, linear"),
        (["optim.schedule=wsd"], "is wsd in the config already", "another value"),
        (["optim.schedule=cosne"], "--fields: optim.schedule is 'cosne'", "cosine"),
        (["model.heads=5"], "not a multiple of heads 5", "model.width"),
        (["model.bias", "model.bias=true"], "model.bias=true is named twice", "leave one"),
        (["train.seed=3"], "train.seed cannot be ablated: the luckiest seed", "leave it out"),
        (["speed.compile=off"], "speed.compile cannot be ablated", "leave it out"),
        (["data.source=x"], "data.source cannot be ablated", "leave it out"),
        (
            ["model.window=64"],
            "--fields: model.window is set, but no block of model.pattern=A is W",
            "leave model.window",
        ),
        (["optim.ema"], "optim.ema is 0.0 and has more than one other value", "optim.ema=VALUE"),
        (["optim"], "optim is a section", "learning_rate"),
    ],
)
def test_what_cannot_be_changed_is_refused(words: list[str], message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        named_changes(words, load_config("shakespeare-char"))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_without_a_list_what_is_set_goes_back_to_its_default():
    set_here = ["optim.clip=0.5", "optim.weight_decay=0.1", "model.mlp=relu2", "train.seed=3"]
    changes, left_out = changes_to_defaults(load_config("shakespeare-char", set_here))
    words = [change.word for change in changes]
    assert {"optim.learning_rate=0.001", "model.mlp=swiglu", "optim.clip=1.0", "train.batch_tokens=16384"} <= set(words)
    assert "optim.weight_decay" not in {change.path for change in changes}, "0.1 is the default"
    assert left_out["model.width"] == "a size"
    assert not {path for path in [*left_out, *words] if path.startswith(("train.seed", "train.steps"))}
    _, left_out = changes_to_defaults(
        load_config("shakespeare-char", ["model.context=192", "train.batch_tokens=19200"])
    )
    assert "alone does not go" in left_out["train.batch_tokens"]
    with pytest.raises(ConfigError, match="sets nothing"):
        changes_to_defaults(load_config({"train": {"steps": 5}, "data": {"source": "shakespeare"}}))


def test_a_length_in_minutes_is_refused():
    with pytest.raises(ConfigError, match="no number of tokens"):
        choose(["model.qk_norm"], load_config("shakespeare-char", ["train.minutes=1.0", "optim.schedule=wsd"]))


# --- which runs -------------------------------------------------------------------------------------------------------

LOSSES = {"model.qk_norm": 0.5, "optim.clip": 0.0}  # what the runs below lose by a change
SPEEDS = {"model.qk_norm": 0.5}  # seconds of a step over that of the config as it is


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configs of all runs that were made; nothing is trained."""
    seen: list[dict[str, Any]] = []

    def train(course: Any, loaded: Any, _folder: Path) -> Any:
        config = loaded.config
        seen.append(config.model_dump())
        if config.optim.learning_rate > 1:
            raise DivergedError("3 steps in a row had a non-finite loss", "lower it")
        plain = config.model.qk_norm
        steps = config.train.steps or config.train.tokens // config.train.batch_tokens
        course.steps = [1.0 if plain else SPEEDS["model.qk_norm"]] * steps
        course.tokens = steps * config.train.batch_tokens
        loss = 2.0 + 0.01 * config.train.seed + (0.0 if plain else LOSSES["model.qk_norm"] + 0.001 * config.train.seed)
        course.curve = [(course.tokens // 2, course.seconds / 2, loss + 0.2), (course.tokens, course.seconds, loss)]
        values = {"perplexity": 1.0, "bits_per_byte": None, "tokens": 1, "seconds": 0.0, "best": True}
        yield EvalRecord(step=steps, loss=loss, reason="end", **values)

    monkeypatch.setattr(measure.WholeRun, "_evaluations", train)
    return seen


def ablated(loaded: Any, **settings: Any) -> tuple[list[AblateRow], AblateResult]:
    *rows, result = list(api.ablate(loaded, **settings))
    assert isinstance(result, AblateResult)
    return rows, result  # pyright: ignore[reportReturnType]


def test_runs_are_paired_by_seed_and_judged(tiny, made):
    rows, result = ablated(tiny("train.seed=5"), fields=["model.qk_norm", "optim.clip=0.5"])
    assert [(row.field, row.seed, row.steps) for row in rows] == [
        (field, seed, 40) for seed in (5, 6) for field in ("", "model.qk_norm", "optim.clip")
    ]
    assert all(config["checkpoint"]["every"] == 0 and config["eval"]["sample_tokens"] == 0 for config in made)
    effects = {one.field: one for one in result.effects}
    assert effects["model.qk_norm"].verdict == "helps"
    assert effects["model.qk_norm"].difference == pytest.approx(0.5055)
    assert effects["model.qk_norm"].step_time == pytest.approx(0.5)
    assert effects["optim.clip"].difference == 0.0
    assert effects["optim.clip"].verdict == "no difference seen"
    assert result.loss == pytest.approx(2.055)
    assert result.missing == 0


def test_another_batch_is_trained_for_as_many_tokens(tiny, made):
    rows, _ = ablated(tiny(), fields=["train.batch_tokens=128"], seeds=1)
    assert [(row.steps, row.tokens) for row in rows] == [(40, 40 * 64), (20, 40 * 64)]


def test_the_same_call_goes_on_with_what_is_there(tiny, made, tmp_path: Path):
    folder = tmp_path / "kept"
    ablated(tiny(), fields=["model.qk_norm"], seeds=1, folder=folder)
    count = len(made)
    rows, first = ablated(tiny(), fields=["model.qk_norm"], seeds=1, folder=folder)
    assert rows == []
    assert len(made) == count
    assert len(first.rows) == 2
    assert [one.verdict for one in first.effects] == [""]
    rows, second = ablated(tiny(), fields=["model.qk_norm", "optim.clip=0.5"], seeds=2, folder=folder)
    assert [(row.field, row.seed) for row in rows] == [
        ("optim.clip", 1337),
        ("", 1338),
        ("model.qk_norm", 1338),
        ("optim.clip", 1338),
    ]
    assert second.effects[0].verdict == "helps"
    # Another config shares nothing, and the rows that are there stay.
    before = (folder / "ablate.jsonl").read_bytes()
    rows, _ = ablated(tiny("model.width=64"), fields=["model.qk_norm"], seeds=1, folder=folder)
    assert len(rows) == 2
    assert (folder / "ablate.jsonl").read_bytes().startswith(before)


def test_rows_at_equal_seconds_of_an_earlier_version_are_passed_over(tiny, made, tmp_path: Path):
    ablated(tiny(), fields=["model.qk_norm"], seeds=1, folder=tmp_path)
    path = tmp_path / "ablate.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps({**row, "equal": "seconds", "loss": 9.0}) + "\n")
    rows, result = ablated(tiny(), fields=["model.qk_norm"], seeds=1, folder=tmp_path)
    assert rows == []
    assert result.effects[0].changed_loss == row["loss"]


def test_a_row_that_was_cut_off_is_made_again_and_other_lines_are_refused(tiny, made, tmp_path: Path):
    path = tmp_path / "ablate.jsonl"
    how = {"fields": ["model.qk_norm"], "seeds": 1, "folder": tmp_path}
    ablated(tiny(), **how)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    told: list[str] = []
    rows, _ = ablated(tiny(), **how, notice=told.append)
    assert [row.field for row in rows] == ["model.qk_norm"]
    assert [line for line in told if "cut off" in line] == told != []
    path.write_bytes(b"somebody's notes\n")
    with pytest.raises(DataError, match="damaged in line 1"):
        ablated(tiny(), **how)
    assert path.read_bytes() == b"somebody's notes\n"


def test_no_minutes_begin_nothing(tiny, made, tmp_path: Path):
    rows, result = ablated(tiny(), fields=["model.qk_norm"], minutes=0.0)
    assert (rows, made, result.missing, result.loss) == ([], [], 4, None)
    tuned = load_config("lora", ["chat.source=rows.jsonl", "data.source=null", "train.steps=3"])
    assert ablated(tuned, fields=["optim.betas=[0.8, 0.95]"], minutes=0.0)[1].missing, "there is no text to ask for"
    assert not list(Path().iterdir()), "not even data is prepared"
    ablated(tiny(), fields=["model.qk_norm"], seeds=1, folder=tmp_path)
    path = tmp_path / "ablate.jsonl"
    slow = [
        dataclasses.replace(ablate_row_from_json(line), whole_seconds=90.0) for line in path.read_text().splitlines()
    ]
    path.write_text("".join(record_to_json(row) + "\n" for row in slow))
    rows, result = ablated(tiny(), fields=["model.qk_norm"], seeds=2, minutes=1.0, folder=tmp_path)
    assert (rows, result.missing) == ([], 2), "a run takes 90 s here"
    rows, result = ablated(tiny(), fields=["model.qk_norm"], seeds=2, minutes=2.0, folder=tmp_path)
    assert (len(rows), result.missing) == (2, 0)


def test_a_change_that_diverges_is_told_and_the_rest_goes_on(tiny, made):
    rows, result = ablated(tiny(), fields=["optim.learning_rate=50", "model.qk_norm"])
    assert {row.status for row in rows if row.field == "optim.learning_rate"} == {"diverged"}
    lost = [one for one in result.effects if one.field == "optim.learning_rate"]
    assert all(one.pairs == 0 and "non-finite" in one.reason and one.verdict == "" for one in lost)
    assert [one.verdict for one in result.effects if one.field == "model.qk_norm"] == ["helps"]
    with pytest.raises(DivergedError, match="non-finite"):  # nothing to compare with
        ablated(tiny("optim.learning_rate=50"), fields=["model.qk_norm"])


# --- what is shown ----------------------------------------------------------------------------------------------------


def shown(result: AblateResult) -> str:
    stream = io.StringIO()
    print_sheet(result.sheet(), stream)
    return stream.getvalue()


def test_the_table_says_what_helps_and_what_could_not_be_seen(tiny, made, tmp_path: Path):
    _, result = ablated(tiny(), fields=["model.qk_norm", "optim.clip=0.5", "optim.learning_rate=50"])
    json.dumps(result.to_json())
    text = shown(result)
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("model.qk_norm")).endswith("keep true (false +1.837)")
    assert "2,560 tokens" in text
    assert "0.50x" in text
    assert "smallest difference that could be seen: " in text
    assert "equal to the last digit with and without: optim.clip" in text
    assert "diverged: 3 steps in a row" in text
    draw_picture(result.picture(), tmp_path / "a.png")
    assert is_picture(tmp_path / "a.png")
    _, result = ablated(tiny(), fields=["model.qk_norm"], seeds=1)
    assert "one pair says nothing of the noise" in shown(result)


def test_what_hurts_is_told_as_the_better_value(tiny, made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOSSES, "model.qk_norm", -0.5 - 1.337)
    _, result = ablated(tiny(), fields=["model.qk_norm"])
    assert result.effects[0].verdict == "hurts"
    assert "model.qk_norm=false instead of true lowered the loss by 0.4" in shown(result)
