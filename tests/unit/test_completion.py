"""The script that completes command lines: it knows what the parsers know, and bash makes sense of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flatout.cli import VERBS, main
from flatout.config.catalogue import shipped_names
from flatout.config.facts import field_facts
from flatout.front.words import described

ASK = """
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_flatout
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What bash offers for the last of these words, in a folder with two runs."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/second", "runs/no-run"):
        Path(name).mkdir(parents=True)
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")

    def ask(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", "flatout", *words], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_verbs_options_presets_settings_and_runs(complete):
    assert complete("") == [*(verb for verb, (_, text) in VERBS.items() if text), "help"]
    assert complete("tr") == ["train"]
    assert complete("train", "--re") == ["--resume", "--restarts"]
    assert complete("train", "gpt2") == [name for name in shipped_names("preset") if name.startswith("gpt2")]
    assert complete("train", "optim.") == [f"{path}=" for path in field_facts() if path.startswith("optim.")]
    assert complete("train", "--resume", "") == ["auto", "runs/first", "runs/second"]
    assert {"runs/first", "runs/second"} <= set(complete("report", "runs/"))
    assert "runs/no-run" not in complete("eval", "runs/f")
    assert complete("train", "--hardware", "8") == ["8gb", "80gb"]
    assert complete("train", "--size", "m") == ["medium"]
    assert complete("train", "small") == [], "a name with a size in it is taken, and not listed"
    assert complete("eval", "--split", "") == ["val", "train"]


def test_actions_have_words_of_their_own(complete):
    assert complete("data", "") == ["inspect", "verify"]
    assert complete("data", "inspect", "--no") == ["--no-picture"]
    assert complete("config", "co") == ["copy"]
    assert complete("config", "copy", "gpt2-1") == ["gpt2-124m"]
    assert complete("tune", "l")[0] == "lr"
    assert complete("tune", "--exh") == ["--exhaustive"]
    assert complete("tune", "lr", "--st") == ["--steps"]
    assert complete("completion", "b") == ["bash"]


def test_values_of_settings(complete):
    # Readline cuts a word at its equals sign.
    assert complete("train", "model.norm", "=") == ["rmsnorm", "layernorm", "plain-rmsnorm"]
    assert complete("train", "model.norm", "=", "la") == ["layernorm"]
    assert complete("train", "data.streaming", "=", "") == ["true", "false"]
    assert complete("train", "data.source", "=", "scr") == ["script"]
    assert complete("train", "train.steps", "=", "") == []


def test_the_zsh_script_has_the_same_candidates(capsys: pytest.CaptureFixture[str]):
    scripts = []
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        scripts.append(capsys.readouterr().out)
    bash, zsh = (script.partition("\n_flatout() {")[0] for script in scripts)
    assert bash == zsh
    assert scripts[1].rstrip().endswith("compdef _flatout flatout")
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=scripts[1], text=True, check=True)


@pytest.mark.parametrize("verb", [verb for verb, (_, text) in VERBS.items() if text])
def test_every_verb_can_be_described_without_doing_anything(verb: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = described(VERBS[verb][0], [])
    assert told.parser is not None or told.actions
    for action in told.actions:
        assert described(VERBS[verb][0], [action]).parser is not None
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
