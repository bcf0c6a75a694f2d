"""The job of guide 004: its rows, its preset, and the script that measures it, on a small model."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.config.load import load_config
from flatout.config.schema import micro_batch_of
from flatout.data.sample_loader import SampleOrder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_rows_are_those_of_the_guide(tmp_path):
    found = []
    for name in ("one.jsonl", "two.jsonl"):
        subprocess.run([sys.executable, BENCHMARKS / "guide_004_rows.py", tmp_path / name], check=True)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1], "the same at every call"
    rows = [json.loads(line) for line in found[0].splitlines()]
    assert len(rows) == 171
    assert len({json.dumps(row) for row in rows}) == 171
    assert all(row.keys() == {"instruction", "input", "output"} for row in rows)
    assert all(row["instruction"].strip() and row["output"].strip() for row in rows)


def test_the_preset_has_the_guides_settings():
    config = load_config("tinyllama-lora").config
    assert micro_batch_of(config) == (4, 2)
    assert (config.train.epochs, config.train.seed, config.eval.every) == (4.0, 42, 20)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (16, 32.0, 0.05)
    assert (config.chat.validation, config.checkpoint.every, config.checkpoint.keep) == (0.05, 100, 1)
    assert 80 <= 4 * SampleOrder(162, config.chat.batch_samples, 0).steps_per_epoch <= 84


def claims() -> list[dict]:
    """What the script has beside its figures, without running it."""
    tree = ast.parse((BENCHMARKS / "guide_004.py").read_text(encoding="utf-8"))
    found = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "CLAIMS")
    return ast.literal_eval(next(found))


def test_the_figures_have_the_guides_table_beside_them():
    """In the stored rows, too: they are what the script printed."""
    table = [(row["seconds"], row["gb"], row["steps_per_second"]) for row in claims()]
    assert table == [(375, 2.5, 0.18), (190, 3.2, 0.35), (140, 2.7, 0.48), (125, 2.7, 0.53)]
    lines = (BENCHMARKS / "guide_004.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 5
    for row in map(json.loads, lines):
        assert row["guide"] == claims(), row["case"]
        assert min(row["seconds"], row["steps_per_second"], row["tokens_per_second"], row["peak_gib"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
def test_the_script_measures_the_whole_job():
    command = [sys.executable, BENCHMARKS / "guide_004.py", "abc", "--tiny", "guide", "fast"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in told.splitlines()]
    assert [row["case"] for row in rows] == ["guide", "fast"]
    for row in rows:
        assert row["steps"] == 84
        assert len(row["losses"]) == 5
        assert row["losses"][-1] < row["losses"][0]
        assert row["seconds"] > row["first_step_seconds"] > 0
        assert row["guide"] == claims()
