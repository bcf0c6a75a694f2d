"""Tasks on the command line and during training: table, JSON, log, picture, records, report, several runs."""

import json

import pytest

import flatout
from flatout import cli
from flatout.errors import ConfigError
from flatout.observe.report_data import report_data
from flatout.observe.sinks import read_history, read_metrics
from flatout.records import TaskRecord
from tests.end_to_end.test_cli import assert_two_lines

BYTES = ["data.tokenizer=bytes", "train.steps=6", "eval.sample_tokens=0", "eval.tokens=64"]
CHOICES = [
    {"query": "the old", "choices": ["fox", "zzz"], "gold": 0},
    {"query": "a", "choices": ["b", "cow"], "gold": 1},
]
CLOZES = [{"context": "the red", "continuation": "fox"}] * 3


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in (("choices", CHOICES), ("clozes", CLOZES)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


def test_tasks_during_training(tiny, tasks):
    words = [*BYTES, "eval.every=0", "eval.tasks=[tasks]", "eval.tasks_every=4", "eval.tasks_rows=2"]
    records = list(flatout.train(tiny(*words, "output.folder=run", "checkpoint.every=3")))
    found = [record for record in records if isinstance(record, TaskRecord)]
    metrics = [("choices", "acc"), ("choices", "acc_norm"), ("clozes", "acc"), ("clozes", "perplexity")]
    assert [(one.step, one.task, one.metric, one.rows) for one in found] == [
        (step, *each, 2) for step in (4, 6) for each in metrics
    ]
    (run,) = report_data([read_history(tasks.parent / "run")])["runs"]
    assert [row[0] for row in run["tasks"]] == [" ".join(each) for each in metrics]
    assert run["tasks"][0][2].startswith("step 6; ")
    again = flatout.score("run", ["tasks"], limit=2)
    assert again.step == 6
    assert [one.record(6) for one in again.scores] == found[4:]
    resumed = [one for one in flatout.train(resume="run/checkpoints/step-00000003") if isinstance(one, TaskRecord)]
    assert resumed == found
    assert sum(row["type"] == "task" for row in read_metrics(tasks.parent / "run" / "metrics.jsonl")) == 8


def test_tasks_that_cannot_be_asked_end_a_run_before_its_first_step(tiny, tasks):
    with pytest.raises(ConfigError, match="'hellaswag', which is no file"):
        list(flatout.train(tiny(*BYTES, "eval.tasks=[hellaswag]")))


def test_scores_on_the_command_line(tiny, tasks, capsys):
    for name in ("one", "other"):
        list(flatout.train(tiny(*BYTES, f"output.folder={name}", f"train.seed={len(name)}")))

    def call(*words, code=0):
        assert cli.main([*words, "--device", "cpu"] if code == 0 else list(words)) == code
        return capsys.readouterr()

    named = ["--tasks", "choices,clozes", "--task-folder", "tasks"]
    table = call("eval", "one", "other", *named, "--log", "log.jsonl", "--plot", "scores.png").out
    assert [line.split()[0] for line in table.splitlines()[:2]] == ["task", "choices"]
    assert "other - one" in table
    rows = [json.loads(line) for line in (tasks.parent / "log.jsonl").read_text().splitlines()]
    assert [(row["model"], row["task"], row["row"]) for row in rows] == [
        (model, task, row)
        for model in ("one", "other")
        for task, count in (("choices", 2), ("clozes", 3))
        for row in range(count)
    ]
    assert (tasks.parent / "scores.png").read_bytes().startswith(b"\x89PNG")
    kept = read_metrics(tasks.parent / "one" / "tasks.jsonl")
    assert [(row["type"], row["step"], row["task"]) for row in kept[1:3]] == [
        ("task", 6, "choices"),
        ("task", 6, "clozes"),
    ]
    first, second = map(json.loads, call("eval", "one", "other", *named, "--limit", "1", "--json").out.splitlines())
    assert [score["rows"] for score in first["scores"]] == [1, 1, 1, 1]
    assert second["scores"][0]["difference"] == second["scores"][0]["value"] - first["scores"][0]["value"]
    for words, told in [
        (["eval", "one", "--limit", "3"], "--limit is for tasks"),
        (["eval", "one", "--tasks", "tasks", "--stride", "8"], "are for text"),
        (["eval", "one", "--tasks", "tasks", "--log", "log.jsonl"], "is there"),
        (["eval", "one", "--tasks", "tasks", "--log", "log.txt"], "is not the name of a .jsonl file"),
        (["eval", "one", "--tasks", " , "], "no task was named"),
        (["eval", "one", "nowhere", "--tasks", "tasks"], "'nowhere' is not a folder"),
    ]:
        errors = call(*words, code=2).err
        assert_two_lines(2, errors, expected=2)
        assert told in errors


def test_texts_of_several_runs_side_by_side(tiny, capsys):
    for name in ("one", "other"):
        list(flatout.train(tiny(*BYTES, f"output.folder={name}", f"train.seed={len(name)}")))
    with open("prompts.txt", "w", encoding="utf-8") as file:
        file.write("the old\na cow\n")
    how = ["--tokens", "5", "--device", "cpu"]

    def lines(*runs):
        assert cli.main(["generate", *runs, "--prompts", "prompts.txt", *how]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    alone = {name: [row["text"] for row in lines(name)] for name in ("one", "other")}
    assert lines("one", "other") == [
        {"prompt": prompt, "texts": {name: alone[name][number] for name in alone}}
        for number, prompt in enumerate(("the old", "a cow"))
    ]
    assert cli.main(["generate", "one", "other", "--prompt", "the ", *how]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("--- one ---\nthe ")
    assert "--- other ---\nthe " in shown
    assert cli.main(["generate", "one", "other", "--interactive"]) == 2
