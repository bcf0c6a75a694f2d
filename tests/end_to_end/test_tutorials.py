"""The tutorials as a reader follows them: every block is run in an empty folder, and prints what the page shows.

`sh` and `python` blocks are run in order, `text` blocks are what the block before prints. Blocks without a language are
shown only. The slow form runs the pages word for word and compares figures: counts exactly, losses within 0.1%; not
times, speeds and sizes. The short form replaces settings by smaller ones and runs commands in this process. It compares
the figures that do not follow from those, and the loss that the page promises after ten steps as it stands.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import flatout
from flatout import cli
from tests.pages import DOCS, Block, agree, blocks, not_printed

PAGES = {page.stem: page for page in sorted((DOCS / "tutorials").glob("[0-9]*.md"))}

# What the short form says instead, in commands and in what they print; each must be on the page.
SMALLER = {
    "1-your-own-text": [
        (
            "model.layers=2 train.steps=100 eval.every=50 eval.tokens=20_000 eval.sample_tokens=200",
            "model.layers=1 model.width=32 model.heads=2 train.batch_tokens=256 train.steps=4 eval.every=2 "
            "eval.tokens=256 eval.sample_tokens=4 speed.device=cpu",
        ),
        ("train.steps=150", "train.steps=6"),
        ("--tokens 200", "--tokens 8"),
        ("flatout eval runs/my", "flatout eval runs/my --tokens 256"),
    ],
    "2-lora-on-your-rows": [
        (
            "model.layers=2 \\\n  train.steps=100 eval.every=50 eval.tokens=10_000 eval.sample_tokens=60",
            "model.layers=1 model.width=32 model.heads=2 train.batch_tokens=256 train.steps=4 eval.every=2 "
            "eval.tokens=256 eval.sample_tokens=4 speed.device=cpu",
        ),
        ("train.epochs=100 optim", "train.epochs=1 eval.sample_tokens=4 speed.device=cpu optim"),
        ("eval.every=100 eval.sample", "eval.every=2 eval.sample"),
        ("--temperature 0", "--temperature 0 --tokens 4"),
        ("A helmet costs 45 francs.\n", ""),  # so few steps do not teach it
    ],
    "3-gpt2-on-a-gpu": [
        ("width: 64 ", "width: 16 "),
        ("context: 64 ", "context: 16 "),
        ("steps: 100", "steps: 4"),
        ("batch_tokens: 512 ", "batch_tokens: 32 "),
        ("every: 50", "every: 2"),
        ("tokens: 4096 ", "tokens: 64 "),
        ("flatout doctor", "flatout doctor --quick"),
        ("--seconds 2 ", "--seconds 0.1 "),
        ("--seconds 10", "--seconds 1"),
    ],
    "4-long-context": [
        ("width: 64", "width: 32"),
        ("context: 256", "context: 32"),
        ("batch_tokens: 1024", "batch_tokens: 64"),
        ("steps: 60", "steps: 4"),
        ("every: 30", "every: 2"),
        ("tokens: 8_192", "tokens: 64"),
        ("model.window=32", "model.window=8"),
        ("model.states=32", "model.states=8"),
        ("model.context=512", "model.context=64"),
        ("train.steps=20", "train.steps=4"),
        ("--tokens 100", "--tokens 8"),
    ],
    "5-from-python": [
        ('"width": 64, "heads": 2, "context": 64', '"width": 32, "heads": 2, "context": 32'),
        ('"steps": 100, "batch_tokens": 1024', '"steps": 6, "batch_tokens": 64'),
        ('"steps": 40, "batch_tokens": 1024', '"steps": 4, "batch_tokens": 64'),
        ("losses) >= 60", "losses) >= 3"),
        ('"every": 50, "tokens": 8192', '"every": 2, "tokens": 256'),
        ('"every": 20', '"every": 2, "tokens": 256'),
        ("tokens=60", "tokens=8"),
    ],
}

# Chosen or counted by the clock.
BY_SPEED = re.compile(r"cost |chose micro-batch |\* ")
# Counts of data and rows, and what is computed for another machine: smaller settings do not change them.
OF_DATA = re.compile(
    r"data: |data/|kept |1 record |1,606 windows|1 of 1 training|\{|  ok    rows |  note  samples |note: samples: "
    r"|small-32k: |   1  data parallel"
)

pytestmark = pytest.mark.usefixtures("children_stay")


def shell(script: str, where: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", script], env={**os.environ, "PATH": path}, text=True, stdout=-1, stderr=-2, check=False
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def commands(block: Block) -> list[list[str]] | None:
    """The words of each command, if `flatout` is all that the block calls."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if not all(line.startswith("flatout ") for line in lines):
        return None
    return [shlex.split(line.removesuffix(" | cat"), comments=True)[1:] for line in lines]


def run_here(block: Block, namespace: dict[str, object], capfd: pytest.CaptureFixture[str]) -> str:
    if block.language == "python":
        exec(compile(block.text, block.where, "exec"), namespace)
    elif (calls := commands(block)) is None:
        return shell(block.text, block.where)
    else:
        for words in calls:
            code = cli.main(words)
            assert code == 0, f"{block.where}: flatout {shlex.join(words)} ended with {code}:\n{capfd.readouterr()}"
    captured = capfd.readouterr()
    return captured.out + captured.err


def follow(
    page: Path,
    capfd: pytest.CaptureFixture[str],
    compared: Callable[[str], bool],
    smaller: list[tuple[str, str]] | None = None,
) -> None:
    namespace: dict[str, object] = {}
    printed, seen, ran = "", "", 0
    capfd.readouterr()
    for block in blocks(page):
        seen += block.text
        for old, new in smaller or []:
            block = block._replace(text=block.text.replace(old, new))
        if block.language == "text":
            missing = not_printed(block.text, printed, compared)
            assert not missing, f"{block.where}: not printed: {missing}\n{printed}"
        elif block.language in ("sh", "python"):
            ran += 1
            in_process = smaller is not None or block.language == "python"
            printed = run_here(block, namespace, capfd) if in_process else shell(block.text, block.where)
    assert ran > 4
    assert not [old for old, _ in smaller or [] if old not in seen], "what the short form replaces is on the page"


def loss_after_ten_steps(page: Path) -> float:
    """The loss of the tenth step of the first run that the page trains, with its settings as they stand."""
    files = [block for block in blocks(page) if block.language == "sh"]
    for block in files:
        if commands(block) is None:  # what writes the page's own files
            shell(block.text, block.where)
    if files:
        words = next(words for block in files for words in commands(block) or [] if words[0] == "train")[1:]
        named = [word for word in words if "=" not in word]
        config = "gpt2.yaml" if named == ["tuned.yaml"] else (named or [None])[0]  # what was tuned is another model
        changed = [word for word in words if "=" in word and not word.startswith("output.folder=")]
        loaded = flatout.load_config(config, [*changed, "output.folder=whole", "speed.device=cpu"])
    else:
        namespace: dict[str, object] = {}
        first = next(block for block in blocks(page) if block.language == "python")
        exec(compile(first.text.replace("runs/first", "whole"), first.where, "exec"), namespace)
        loaded = namespace["config"]
    steps = (record for record in flatout.train(loaded) if isinstance(record, flatout.StepRecord))
    return next(record.loss for record in steps if record.step == 10)


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_with_smaller_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    follow(PAGES[name], capfd, lambda line: bool(OF_DATA.match(line)), SMALLER[name])
    (promised,) = re.findall(
        r"fter ten\s+steps\s+the\s+loss\s+is\s+about\s+(\d+\.\d+)", PAGES[name].read_text(encoding="utf-8")
    )
    loss = loss_after_ten_steps(PAGES[name])
    assert agree(promised, f"{loss:.4f}", tolerance=0.001), (
        f"{PAGES[name].name} promises {promised} after ten steps, and it is {loss:.4f}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_word_for_word(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    follow(PAGES[name], capfd, lambda line: not BY_SPEED.match(line))


def test_there_are_five_tutorials_and_the_index_names_each():
    assert len(PAGES) == 5
    index = (DOCS / "tutorials" / "README.md").read_text(encoding="utf-8")
    assert [name for name in PAGES if f"({name}.md)" not in index] == []
