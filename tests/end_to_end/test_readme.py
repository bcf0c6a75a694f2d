"""The README's Python runs, and its commands exist."""

import re
from pathlib import Path

import pytest

from flatout import cli

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    snippets = blocks("python")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_flatout_command_of_the_readme_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^flatout (.*)$", "\n".join(blocks("sh")), flags=re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        assert command.split()[0] in cli.VERBS, command


def test_the_first_screen_is_a_sentence_two_commands_and_their_output():
    top = README.read_text(encoding="utf-8").splitlines()[:60]
    assert sum(line.strip() in ("make train", "make test") for line in top) == 2
    assert any(re.match(r"eval at step \d+: val loss 1\.\d+", line) for line in top)
