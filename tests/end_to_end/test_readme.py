"""The README's Python runs and prints what it says; its commands, the guides' and the reference's are taken."""

import argparse
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import flatout
from flatout import cli
from flatout.config.catalogue import shipped_names
from flatout.config.load import load_config
from flatout.front.words import Parser
from tests.pages import DOCS, blocks

README = Path(__file__).parents[2] / "README.md"
SMALLER = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=64", "train.batch_tokens=256",
           "eval.tokens=1024"]  # fmt: skip


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As it stands, with a smaller model."""
    monkeypatch.chdir(tmp_path)
    load = flatout.load_config
    monkeypatch.setattr(flatout, "load_config", lambda preset, words: load(preset, [*words, *SMALLER]))
    (snippet,) = [block.text for block in blocks(README) if block.language == "python"]
    exec(compile(snippet, "README.md", "exec"), {})
    evaluated, *text, perplexity = capsys.readouterr().out.splitlines()
    loss = float(re.fullmatch(r"step 20: validation loss (\d+\.\d{3})", evaluated)[1])  # pyright: ignore
    assert 2.5 < loss < math.log(1024), "it learned a little"
    assert len("\n".join(text)) > 50, "what comes after the prompt, tokens of more than a character"
    assert math.exp(loss) * 0.8 < float(perplexity) < math.exp(loss) * 1.2
    assert (tmp_path / "runs" / "demo" / "checkpoints").is_dir()


class Taken(BaseException):
    """A command line was understood; what it asks for is not done."""


def stop_after(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    def parsed(parser: Parser, words: list[str]) -> argparse.Namespace:
        raise Taken(parse(parser, words))

    return parsed


def test_every_command_of_the_pages_is_taken_and_its_settings_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Parser, "parse", stop_after(Parser.parse))
    pages = [README, *sorted((DOCS / "guides").iterdir()), *sorted((DOCS / "reference").iterdir())]
    shown = [
        block.text
        for page in pages
        for block in blocks(page)
        if block.language == "sh" or (page.parent.name == "guides" and not block.language)
    ]
    commands = re.findall(r"^flatout ([a-z].*)$", "\n".join(shown), flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} > {"train", "prepare", "eval", "generate", "tune", "config"}
    presets = set(shipped_names("preset"))
    for command in commands:
        with pytest.raises(Taken) as taken:
            cli.main(shlex.split(command, comments=True))
        asked = vars(taken.value.args[0])
        config = asked.get("config")
        assert config is None or config in presets or config.endswith(".yaml"), command
        if "overrides" in asked and not (asked["verb"] == "estimate" and asked["gpus"]):  # --size is another there
            config = next((name for name in (config, asked.get("field")) if name in presets), None)  # no file is read
            load_config(config, asked["overrides"], size=asked["size"])


@pytest.mark.parametrize("command", ["train --no-such-option", "config shwo", "generate --tokens many"])
def test_a_command_that_would_not_be_taken_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Parser, "parse", stop_after(Parser.parse))
    assert cli.main(shlex.split(command)) == 2


def test_the_first_screen_is_a_sentence_three_commands_and_six_lines_of_output():
    top = README.read_text(encoding="utf-8").splitlines()[:40]
    assert all(command in "\n".join(top) for command in ("make train", "make test", "--minutes"))
    (output,) = re.findall(r"prints, among other lines:\n\n```\n(.*?)```", "\n".join(top), flags=re.DOTALL)
    assert len(output.splitlines()) == 6
    evaluated = re.findall(r"^eval at step (\d+): val loss (\d\.\d+)", output, flags=re.MULTILINE)
    (ended,) = re.findall(r"^finished at step (\d+) .* best val loss (\S+)", output, flags=re.MULTILINE)
    assert evaluated[-1] == ended, "the whole of the default run"
