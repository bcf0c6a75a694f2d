"""`flatout tune lr` and `flatout tune search` from outside: what they find, write, refuse and survive."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import dispatch
from flatout.config.load import load_config
from flatout.engine import loop
from flatout.engine.state import Progress, capture
from flatout.errors import ConfigError, DataError, DeviceMemoryError, DivergedError, ResourceError, UsageError
from flatout.front import output
from flatout.records import EvalRecord
from flatout.tuning import lr_range, measure
from flatout.tuning.lr_range import find_rate
from flatout.tuning.measure import Steps
from flatout.tuning.study import StudyResult, TrialRow
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.set_up import set_up


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage before and after every run takes longer than these runs do."""
    monkeypatch.setattr("flatout.tuning.measure.free_memory", lambda **_: None)


def words_for(tiny, *more: str) -> list[str]:
    return ["shakespeare-char", *TINY, f"data.source={tiny().config.data.source}", "train.steps=12", *more]


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_the_choice_is_written_as_a_config_that_trains(tiny, tmp_path: Path, capsys):
    out = tmp_path / "lr.yaml"
    before = torch.get_rng_state()
    assert dispatch(["tune", "lr", *words_for(tiny, "train.seed=5"), "--out", str(out), "--steps", "40"]) == 0
    assert torch.equal(torch.get_rng_state(), before)
    shown = capsys.readouterr()
    for name in ("minimum / 10", "knee"):
        assert name in shown.out
    assert "* " in shown.out
    assert f"flatout train {out}" in shown.out
    assert shown.err == ""
    found = load_config(out).config
    assert found.train.seed == 5
    assert 1e-5 < found.optim.learning_rate < 1
    assert found.model.width == 32
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {"lr.yaml", "lr.png", "data"}
    with pytest.raises(UsageError, match="is already there"):
        dispatch(["tune", "lr", *words_for(tiny), "--out", str(out)])


def test_json_is_one_line_with_every_point(tiny, capsys):
    assert dispatch(["tune", "lr", *words_for(tiny), "--json", "--steps", "40", "--from", "1e-6", "--to", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    body = json.loads(lines[0])
    assert len(body["points"]) == 40
    assert body["points"][0]["rate"] == pytest.approx(1e-6)
    assert body["words"] == [f"optim.learning_rate={body['rate']!r}"]


def test_with_muon_every_rate_is_found_told_and_written(tiny, tmp_path: Path, capsys):
    out = tmp_path / "lr.yaml"
    rates = ["optim.optimizer=muon", "optim.muon_rate=0.02", "optim.learning_rate=4e-3", "optim.embedding_rate=0.1"]
    result = find_rate(tiny(*rates), steps=30)
    assert (result.field, result.before) == ("optim.muon_rate", 0.02)
    assert result.found == pytest.approx(
        {path: result.rate * ratio for path, ratio in zip(result.found, (1, 0.2, 5), strict=True)},
        rel=0.06,  # two digits
    )
    assert list(result.words) == [f"{path}={rate!r}" for path, rate in result.found.items()]
    assert dispatch(["tune", "lr", *words_for(tiny, *rates), "--out", str(out), "--steps", "30"]) == 0
    shown = capsys.readouterr().out
    assert "rates are those of optim.muon_rate; optim.learning_rate, optim.embedding_rate rose with it" in shown
    found = load_config(out).config.optim
    assert (found.learning_rate, found.embedding_rate) == pytest.approx(
        (found.muon_rate / 5, found.muon_rate * 5), rel=0.06
    )
    with pytest.raises(UsageError, match=r"--to 50 takes optim\.embedding_rate to 250, and rates above 100") as refused:
        find_rate(tiny(*rates), high=50)
    assert refused.value.hint == "set --to 10", "which takes that rate to 50"


def test_a_file_that_was_found_keeps_the_size_of_its_preset(tiny, tmp_path: Path):
    text = f"data.source={tiny().config.data.source}"
    words = [text, "data.tokenizer=char", "model.context=16", "train.batch_tokens=128"]
    result = find_rate(load_config("modern", words, size="2x32"), steps=20)
    (tmp_path / "found.yaml").write_text(result.fragment, encoding="utf-8")
    model = load_config(tmp_path / "found.yaml").config.model
    assert (model.layers, model.width) == (2, 32)


def test_the_same_seed_finds_the_same_rate(tiny):
    first, second = (find_rate(tiny("model.dropout=0.1"), steps=30) for _ in range(2))
    assert first.points == second.points
    assert first.rate == second.rate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "1e-3", "--to", "2e-3"], "less than a factor of ten"),
        (["--from", "0"], "--from"),
        (["--steps", "3"], "--steps"),
        (["--out", "lr.txt"], "not the name of a .yaml file"),
        (["--plot", "lr.jpg"], "not the name of a .png file"),
        (["--out", "nowhere/lr.yaml"], "does not exist"),
    ],
)
def test_mistakes_answer_before_anything_is_trained(tmp_path: Path, monkeypatch, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lr_range, "borrowed_run", None)
    with pytest.raises(UsageError, match=message):
        dispatch(["tune", "lr", *words])


def test_a_run_that_does_not_learn_has_no_rate(tiny):
    with pytest.raises(ConfigError, match="no curve to read"):
        find_rate(tiny(), low=1e-12, high=1e-9, steps=20)


def test_where_the_file_cannot_be_written_in_the_end_the_config_is_printed(tiny, tmp_path: Path, capsys, monkeypatch):
    def full(path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "write_whole", full)
    with pytest.raises(ResourceError):
        dispatch(["tune", "lr", *words_for(tiny), "--out", str(tmp_path / "lr.yaml"), "--steps", "40"])
    assert "learning_rate:" in capsys.readouterr().err
    assert not (tmp_path / "lr.yaml").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("words", [[], ["speed.cuda_graphs=on"], ["speed.precision=fp16", "speed.kernels=torch"]])
def test_on_a_gpu_the_run_is_bit_for_bit_what_it_was(tiny, words: list[str]):
    loaded = tiny("speed.device=cuda", "model.width=64", "model.context=64", "train.batch_tokens=512", *words)
    run = set_up(loaded)
    with Steps(run) as steps:
        steps.take(4)

    def state() -> dict[str, torch.Tensor]:
        held = capture(run, Progress())
        parts = (held.model, held.optimizer, held.run)
        return {
            f"{i}.{name}": value.detach().cpu().clone() for i, part in enumerate(parts) for name, value in part.items()
        }

    before = state()
    points, _ = lr_range.range_test(run, steps=30)
    assert points[-1].loss != points[0].loss
    after = state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path: Path):
    pytest.importorskip("optuna")

    def write(
        text: str = "optim.learning_rate: {log: [1e-4, 1e-1]}\noptim.schedule: {choices: [cosine, wsd]}\n",
    ) -> Path:
        path = tmp_path / "space.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def run(loaded, path: Path, **settings) -> tuple[list[TrialRow], StudyResult]:
    *rows, result = list(flatout.search(path, loaded, **settings))
    assert isinstance(result, StudyResult)
    return rows, result  # pyright: ignore[reportReturnType]


def test_a_search_finds_the_best_of_its_trials_and_writes_it(tiny, space, tmp_path: Path, capsys):
    out = tmp_path / "best.yaml"
    words = [str(space()), *words_for(tiny), "--trials", "4", "--out", str(out)]
    before = torch.get_rng_state()
    assert dispatch(["tune", "search", *words]) == 0
    assert torch.equal(torch.get_rng_state(), before)
    shown = capsys.readouterr()
    assert shown.err.count("trial ") == 4
    assert "best of 4 trials" in shown.out
    found = load_config(out).config
    assert 1e-4 <= found.optim.learning_rate <= 1e-1
    assert found.eval.sample_tokens == 8, "what only trials need is not in the config"
    assert (tmp_path / "best.png").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"best.yaml", "best.png", "space.yaml", "data"}


def test_the_objective_is_the_loss_of_a_real_run(tiny, space):
    from flatout import api
    from flatout.records import EvalRecord

    loaded = tiny("train.steps=12")
    rows, result = run(loaded, space(), trials=2)
    best = result.best
    words = [f"{path}={value}" for path, value in best.values.items()]
    last = [record for record in api.train(tiny("train.steps=12", *words)) if isinstance(record, EvalRecord)][-1]
    assert last.loss == best.loss
    assert best.loss == min(row.loss for row in rows if row.status == "done")


def test_a_study_goes_on_where_it_was(tiny, space, tmp_path: Path):
    loaded, file = tiny("train.steps=12"), tmp_path / "study.jsonl"
    first, _ = run(loaded, space(), trials=2, study=file)
    second, result = run(loaded, space(), trials=4, study=file)
    assert [row.number for row in first] == [0, 1]
    assert [row.number for row in second] == [2, 3]
    assert [row.number for row in result.rows] == [0, 1, 2, 3]
    again, same = run(loaded, space(), trials=4, study=file)
    assert again == []
    assert same.best == result.best
    assert len({row.values["optim.learning_rate"] for row in result.rows}) == 4, "no draw is repeated"


def test_another_space_or_config_is_refused(tiny, space, tmp_path: Path):
    file = tmp_path / "study.jsonl"
    run(tiny("train.steps=12"), space(), trials=1, study=file)
    with pytest.raises(UsageError, match="another space"):
        run(tiny("train.steps=12"), space("optim.learning_rate: {log: [1e-4, 1e-2]}"), trials=2, study=file)
    with pytest.raises(UsageError, match="another config"):
        run(tiny("train.steps=13"), space(), trials=2, study=file)


def test_a_file_that_is_no_study_is_refused_and_stays(tiny, space, tmp_path: Path):
    file = tmp_path / "study.jsonl"
    file.write_bytes(b"no rows at all" * 100)
    with pytest.raises(DataError, match="it is no row"):
        run(tiny("train.steps=12"), space(), trials=1, study=file)
    assert file.read_bytes() == b"no rows at all" * 100


def test_trials_that_fail_are_told_and_count_as_bad(tiny, space, monkeypatch: pytest.MonkeyPatch):
    """One diverges, one has no memory, one is no config; the best is another one."""
    real, count = loop.train_loop, 0

    def sometimes(*args, **settings):
        nonlocal count
        count += 1
        if count == 2:
            raise DivergedError("3 steps in a row had a non-finite loss", "lower it")
        if count == 3:
            raise DeviceMemoryError("out of device memory: tried to allocate 4 GiB", "less")
        return real(*args, **settings)

    monkeypatch.setattr(measure, "train_loop", sometimes)
    text = "optim.learning_rate: {log: [1e-3, 1e-2]}\nmodel.width: {choices: [32, 33]}\n"
    rows, result = run(tiny("train.steps=12"), space(text), trials=7)
    statuses = [row.status for row in rows]
    assert {"diverged", "out_of_memory", "invalid", "done"} <= set(statuses)
    assert len(rows) == 7
    assert result.best.status == "done"
    assert result.best.values["model.width"] == 32
    assert all(row.reason for row in rows if row.status != "done")


def test_a_search_of_which_nothing_is_left_is_an_error(tiny, space, monkeypatch: pytest.MonkeyPatch):
    def diverges(*_args, **_settings):
        raise DivergedError("non-finite", "lower it")

    monkeypatch.setattr(measure, "train_loop", diverges)
    with pytest.raises(DivergedError, match="none of 2 trials"):
        run(tiny("train.steps=12"), space(), trials=2)


def test_bad_trials_are_cut_short(tiny, space):
    rows, _ = run(tiny("train.steps=24", "eval.every=6"), space("optim.learning_rate: {log: [1e-6, 1e-1]}"), trials=9)
    cut = [row for row in rows if row.status == "pruned"]
    assert cut
    assert all(8 <= row.step < 24 for row in cut), "not in the first third, and not at the end"
    assert all("median" in row.reason for row in cut)


def test_a_killed_search_keeps_what_it_had(tiny, space, tmp_path: Path):
    file = tmp_path / "study.jsonl"
    words = [str(space()), *words_for(tiny, "train.steps=20"), "--study", str(file), "--trials", "400"]
    told = tmp_path / "told"
    process = Forked(dispatch, ["tune", "search", *words], stderr=told, TMPDIR=str(tmp_path))
    assert process.wait_until(lambda: told.exists() and told.read_text().count("\n") >= 2), told.read_text()
    assert all(line.startswith("trial ") for line in told.read_text().splitlines()[:2])
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=600) == -signal.SIGKILL
    kept = file.read_text(encoding="utf-8").count("\n")
    assert kept >= 2
    rows, result = run(tiny("train.steps=20"), space(), trials=kept + 2, study=file)
    assert len(result.rows) == kept + 2
    assert rows == [row for row in result.rows if row.number >= rows[0].number] if rows else True
    assert all(row.status in ("done", "pruned") for row in result.rows)


def test_interrupting_ends_with_what_to_do_next(tiny, space, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_args, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "train_loop", stopped)
    words = [
        str(space()),
        *words_for(tiny),
        "--study",
        str(tmp_path / "study.jsonl"),
        "--out",
        str(tmp_path / "b.yaml"),
    ]
    assert dispatch(["tune", "search", *words]) == 130
    assert "keeps the trials so far" in capsys.readouterr().err
    assert not (tmp_path / "b.yaml").exists()


def test_without_the_package_there_is_one_hint(tiny, space, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(DataError) as caught:
        run(tiny(), space(), trials=1)
    assert "optuna" in caught.value.message
    assert caught.value.hint == "pip install 'flatout[search]'"


def test_the_space_comes_first():
    with pytest.raises(UsageError, match="needs a file"):
        dispatch(["tune", "search", "--trials", "3"])
    with pytest.raises(ConfigError, match="no such file"):
        dispatch(["tune", "search", "nowhere.yaml"])


@pytest.mark.slow
def test_the_choice_is_near_the_best_of_a_grid(tmp_path: Path):
    """The shakespeare preset at its full length, with three seeds and four rates."""
    data = f"data.folder={tmp_path / 'data'}"
    quiet = ["eval.every=0", "eval.sample_tokens=0", "checkpoint.every=0"]
    flatout.prepare(load_config("shakespeare", [data]))
    first = load_config("shakespeare").config.train.seed
    choices = [find_rate(load_config("shakespeare", [data, f"train.seed={first + n}"])).rate for n in range(3)]
    optim = load_config("shakespeare").config.optim

    def loss_at(rate: float) -> float:
        """The last validation loss of a whole run at that rate of the matrices; the other rates are scaled with it."""
        rates = optim.scaled_rates(rate / next(iter(optim.rates.values())))
        words = [*(f"{path}={value!r}" for path, value in rates.items()), f"output.folder={tmp_path / f'{rate:g}'}"]
        records = list(flatout.train(load_config("shakespeare", [data, *quiet, *words])))
        return [record.loss for record in records if isinstance(record, EvalRecord)][-1]

    best = min(loss_at(rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3))
    assert loss_at(choices[0]) / best - 1 < 0.02
    assert max(choices) / min(choices) <= 3
