"""The list of runs: what it tells of each, in which order, and what it does where there is none."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.cli import dispatch, main
from flatout.config.suggest import run_hint
from flatout.errors import UsageError
from flatout.observe.runs import SORTS, list_runs
from tests.made_runs import end_of, eval_of, finished_run, info_of, sign_lock, step_of, training, write_run


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs: the oldest and longest finished, one was killed, one has only begun, one has no record."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    finished_run(folder / "long", steps=400)
    write_run(folder / "killed", [info_of(folder / "killed"), *training(folder / "killed", 1, 60, steps=200, every=50)])
    write_run(folder / "begun", [info_of(folder / "begun", steps=9), step_of(1), end_of(folder, 1, "interrupted")])
    (folder / "empty").mkdir()
    sign_lock(folder / "empty")
    (folder / "no run").mkdir()
    for age, name in enumerate(("begun", "empty", "killed", "long")):
        for file in (folder / name).iterdir():
            os.utime(file, (time.time() - 1000 * (age + 1),) * 2)
    return folder


def test_a_row_says_how_a_run_stands(several: Path):
    rows = {Path(row.run).name: row for row in list_runs(several)}
    assert {name: row.state for name, row in rows.items()} == {
        "long": "finished", "killed": "stopped", "begun": "interrupted", "empty": "no records",
    }  # fmt: skip
    assert [(rows[name].step, rows[name].steps) for name in ("long", "killed", "begun", "empty")] == [
        (400, 400), (60, 200), (1, 9), (None, None),
    ]  # fmt: skip
    assert [rows[name].loss_of for name in ("long", "killed", "begun", "empty")] == [
        "validation", "validation", "training", "",
    ]  # fmt: skip
    assert rows["long"].bytes == sum(path.stat().st_size for path in (several / "long").iterdir())
    assert rows["killed"].age_seconds == pytest.approx(3000, abs=60)


def test_a_run_goes_on_as_long_as_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """However long it has said nothing, as one that is paused; and no longer, however lately it has."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.chdir(tmp_path)
    for name, pid, age in (("quiet", os.getpid(), 1000), ("killed", ended.pid, 0)):
        folder = write_run(tmp_path / "runs" / name, [info_of(tmp_path), step_of(1)])
        sign_lock(folder, pid, socket.gethostname())
        os.utime(folder / "metrics.jsonl", (time.time() - age,) * 2)
    assert main(["runs", "--json"]) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert {Path(row["run"]).name: row["state"] for row in rows} == {"quiet": "running", "killed": "stopped"}


def test_the_loss_is_the_best_on_validation_text_or_the_last_of_training(tmp_path: Path):
    losses = [eval_of(step, loss) for step, loss in ((10, 3.0), (20, 2.5), (30, 2.8))]
    write_run(tmp_path / "judged", [info_of(tmp_path), step_of(30, loss=1.0), *losses])
    write_run(tmp_path / "trained", [info_of(tmp_path), step_of(1, loss=2.0), step_of(2, loss=4.0)])
    rows = list_runs(tmp_path, sort="name")
    assert [(row.loss, row.loss_of) for row in rows] == [(2.5, "validation"), (4.0, "training")]


def test_where_losses_do_not_compare_bits_per_byte_lead(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, bits in (("bytes", 1.5), ("gpt2", 1.25)):
        judged = dataclasses.replace(eval_of(10, 3.0), bits_per_byte=bits)
        write_run(tmp_path / name, [info_of(tmp_path, tokenizer=name), step_of(10), judged])
    assert dispatch(["runs", str(tmp_path), "--sort", "name"]) == 0
    head, first, second, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "bits/byte", "loss", "size", "age"]
    assert ("1.5000" in first, "1.2500" in second) == (True, True)
    assert note.startswith("note: losses do not compare: these runs have different tokenizers")
    shutil.rmtree(tmp_path / "bytes")
    assert dispatch(["runs", str(tmp_path)]) == 0
    assert "bits/byte" not in capsys.readouterr().out


def test_the_steps_of_minutes_are_a_plan_and_no_total(tmp_path: Path):
    folder = tmp_path / "timed"
    config = {"train": {"minutes": 2.0, "steps": 9}}
    write_run(
        folder, [info_of(folder, steps=9, config=config), step_of(1), step_of(12), end_of(folder, 12, "finished")]
    )
    (row,) = list_runs(tmp_path)
    assert (row.step, row.steps, row.state) == (12, None, "finished")


def test_rows_are_sorted(several: Path, capsys: pytest.CaptureFixture[str]):
    def order(*words: str) -> list[str]:
        assert dispatch(["runs", *words, "--json"]) == 0
        return [Path(json.loads(line)["run"]).name for line in capsys.readouterr().out.splitlines()]

    assert order() == ["begun", "empty", "killed", "long"], "the newest first"
    assert order("--sort", "name") == ["begun", "empty", "killed", "long"]
    assert order("--sort", "step") == ["long", "killed", "begun", "empty"]
    assert order("--sort", "size")[0] == "long"
    assert order("--sort", "loss")[-2:] == ["begun", "empty"], "a training loss is no validation loss"
    assert order("--sort", "name", "--reverse") == ["long", "killed", "empty", "begun"]
    with pytest.raises(UsageError, match="invalid choice"):
        dispatch(["runs", "--sort", "colour"])
    assert set(SORTS) == {"age", "name", "state", "step", "loss", "size"}


def test_the_table_has_a_line_for_each(several: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "size", "age"]
    assert len(lines) == 4
    assert "runs/killed" in lines[2]
    assert "stopped" in lines[2]
    assert "60 of 200" in lines[2]
    assert "(training)" in lines[0]


def test_without_runs_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in ([], ["nowhere"]):
        assert main(["runs", *words]) == 3
        assert "there is no run under" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["watch", "killd"], 2), (["report", "runs/killd"], 2), (["plot", "runs/killd"], 2), (["eval", "killd"], 2),
        (["generate", "runs/killd/"], 2), (["train", "--resume", "runs/killd"], 2),
    ],
)  # fmt: skip
def test_a_mistyped_run_gets_the_nearest(several: Path, words: list[str], code: int, capsys):
    assert main(words) == code
    assert "did you mean runs/killed? `flatout runs` lists them" in capsys.readouterr().err


def test_a_name_like_no_run_gets_the_usual_hint(several: Path):
    assert run_hint("something-else", "usual") == "usual; `flatout runs` lists yours"
    assert run_hint("ong", "usual").startswith("did you mean runs/long?")
    assert run_hint("x", "usual", several / "nowhere") == "usual"
