"""docs/guides/python.md as a reader follows it: every example runs, in order. docs/reference is what the code says."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import flatout
from tests.chat_models import write_chat_model
from tests.pages import DOCS, blocks

SMALLER = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "train.batch_tokens=64",
           "eval.tokens=256", "eval.sample_tokens=4", "speed.device=cpu"]  # fmt: skip
TUNED = ["model.context=64", "eval.sample_tokens=4", "speed.device=cpu"]

pytestmark = pytest.mark.usefixtures("children_stay")


@pytest.mark.usefixtures("short_shakespeare")
def test_every_example_of_the_python_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "input": "", "output": f"It is {n + 1}."} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    load = flatout.load_config

    def smaller(target, overrides=(), **more):
        return load(target, [*(TUNED if target == "lora" else SMALLER), *overrides], **more)

    monkeypatch.setattr(flatout, "load_config", smaller)
    examples = [block for block in blocks(DOCS / "guides" / "python.md") if block.language == "python"]
    assert len(examples) > 8
    namespace: dict[str, object] = {}
    for example in examples:
        exec(compile(example.text, example.where, "exec"), namespace)
    said = capsys.readouterr().out
    assert re.search(r"^step 20: validation loss \d\.\d{3}$", said, flags=re.MULTILINE)
    assert "0.002 command line" in said
    assert re.search(r"^runs/second \d\.\d+ finished$", said, flags=re.MULTILINE)
    assert namespace["problems"] == []
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"demo", "second", "texts", "squared", "recurrent", "nadam", "signs", "chart", "tuned"}
    assert (tmp_path / "both.html").is_file()
    assert (tmp_path / "merged" / "config.json").is_file()


def test_the_reference_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    make_reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_reference)
    made = make_reference.pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").iterdir()}
    stale = [name for name in made.keys() | there.keys() if made.get(name) != there.get(name)]
    assert not stale, "run `python docs/make_reference.py`"
