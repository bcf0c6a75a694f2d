"""What only Unix has breaks no verb elsewhere: each works, or is refused in one line and one hint."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_models import write_chat_model
from tests.other_platform import UNIX_MODULES

ROOT = Path(__file__).parents[2]
ON_CPU = ["speed.device=cpu"]
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "train.batch_tokens=64",
         "train.steps=1", "eval.tokens=256", "eval.sample_tokens=4", *ON_CPU]  # fmt: skip
SHORT = [
    ["--help"],
    ["--version"],
    ["doctor", *SMALL],
    ["config", "explain"],
    ["config", "search", "save_steps"],
    ["config", "presets"],
    ["completion", "bash"],
    ["prepare", "--workers", "1"],
    ["train", *SMALL],
    ["train", "--resume", "runs/shakespeare", "train.steps=2"],
    ["eval", "runs/shakespeare", "--tokens", "256"],
    ["generate", "runs/shakespeare", "--tokens", "4"],
    ["report", "runs/shakespeare"],
    ["runs"],
    ["watch", "runs/shakespeare"],
    ["report", "--zip", "runs/shakespeare"],
    ["prepare", "verify", "data/shakespeare-bpe-1024"],
]
LONGER = [
    ["estimate", "--seconds", "1", *SMALL],
    ["tune", "lr", "--steps", "20", *SMALL],
    ["finetune", "model.init_from=base", "chat.source=rows.jsonl", "train.steps=1", "model.context=64",
     "output.folder=tuned"],
    ["export", "tuned", "merged"],
]  # fmt: skip
# What a platform cannot do: the words of the refusal.
REFUSED = {
    "win32": [
        (["train", "--gpus", "2", *SMALL], "Windows"),
        (["tune", "search", "space.yaml", "--study", "study.db", "--trials", "1", *SMALL], "--study"),
    ],
    "darwin": [],
}
# All in one process: importing torch takes longer than everything else.
PROGRAM = """
import contextlib, io, json, sys, traceback
from tests.other_platform import pretend
pretend(sys.argv[1])
from pathlib import Path
from flatout.cli import main
from flatout.corpus import sources
Path("short.txt").write_bytes(sources.shakespeare().read_bytes()[:100_000])
sources.shakespeare = lambda: Path("short.txt").absolute()
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([words, code, out.getvalue(), err.getvalue()]), flush=True)
"""


def test_no_module_needs_a_module_of_unix_to_be_imported():
    """What it imports at its top, outside any condition, is there on every platform."""
    needed = [
        f"{path.name}: {name.name}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name.partition(".")[0] in UNIX_MODULES
    ]
    assert not needed


@pytest.mark.parametrize("platform", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_every_verb_works_or_is_refused_in_words(tmp_path: Path, platform: str):
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "space.yaml").write_text("optim.learning_rate: {log: [1e-4, 1e-2]}\n", encoding="utf-8")
    commands = SHORT + (LONGER if platform == "win32" else []) + [words for words, _ in REFUSED[platform]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, platform, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}, timeout=900,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in results] == commands, done.stderr
    refused = {" ".join(words): why for words, why in REFUSED[platform]}
    for words, code, out, err in results:
        told = f"{' '.join(words)}\n{code}\n{out}{err}"
        if why := refused.get(" ".join(words)):
            assert code == 2, told
            (error, hint) = err.splitlines()
            assert error.startswith("error: "), told
            assert why in error, told
            assert hint.startswith("hint: "), told
        else:
            assert code == 0, told
    metrics = (tmp_path / "runs" / "shakespeare" / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in metrics.splitlines()]
    first = next(record["memory_bytes"] for record in records if record["type"] == "step")
    assert first is None if platform == "win32" else first > 0, "what nobody tells is not said to be nothing"
