"""The script that completes command lines: it knows what the parsers know, and bash makes sense of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

import flatout
from flatout.cli import main
from flatout.config.catalogue import shipped_names
from flatout.config.facts import field_facts
from flatout.front.commands import COMMANDS, FORMER_NAMES, VERBS

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
    assert complete("") == [*VERBS, "help"]
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
    assert complete("prepare", "")[:2] == ["inspect", "verify"]
    assert complete("prepare", "inspect", "--con") == ["--context"]
    assert complete("prepare", "gpt2-1") == ["gpt2-124m"]
    assert complete("config", "co") == ["copy"]
    assert complete("config", "copy", "gpt2-1") == ["gpt2-124m"]
    assert complete("config", "explain", "optim.learning") == ["optim.learning_rate", "optim.learning_rate="]
    assert complete("estimate", "--gpu") == ["--gpus", "--gpu"]
    assert complete("tune", "l")[0] == "lr"
    assert complete("tune", "--exh") == ["--exhaustive"]
    assert complete("tune", "lr", "--st") == ["--steps"]
    assert complete("completion", "b") == ["bash"]


def test_after_an_equals_sign_the_shell_completes_files(complete):
    # Readline cuts a word at its equals sign.
    assert complete("train", "data.source", "=") == []
    assert complete("train", "data.source", "=", "scr") == []


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


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_every_command_has_help_a_twin_in_python_and_names_what_it_takes(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command.name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: flatout {command.name}")
    if " " not in command.name:
        assert callable(getattr(flatout, command.twin))
    for option in command.options:
        assert option.by_place or option.names[0] in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [40, 80, 200])
def test_help_is_as_wide_as_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["--help"]) == 0
    verbs = capsys.readouterr().out.partition("verbs:\n")[2].partition("\n\n")[0].splitlines()
    assert max(map(len, verbs)) <= width
    assert [line.split()[0] for line in verbs if not line.startswith("   ")] == list(VERBS)
    assert (len(verbs) == len(VERBS)) == (width == 200)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (["lora", "chat.source=a b"], "flatout finetune 'chat.source=a b'"),
        (["data", "inspect", "data/x"], "flatout prepare inspect data/x"),
        (["data", "verify"], "flatout prepare verify"),
        (["tokenizer"], "flatout prepare data.tokenizer=bpe-8192"),
        (["plan", "--size", "7b"], "flatout estimate --gpus 1..8 --size 7b"),
        (["plan", "--gpus", "8..64"], "flatout estimate --gpus 8..64"),
        (["merge", "runs/a", "out"], "flatout export runs/a out"),
        (["bundle", "a"], "flatout report --zip a"),
        (["serve-report", "a", "b"], "flatout report --serve a b"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_former_name_answers_with_the_new_command(words: list[str], now: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: `flatout {words[0]}")
    assert " is now `flatout " in error
    assert hint == f"hint: write `{now}`"
    assert " ".join(now.split()[1:3]) in FORMER_NAMES.values() or now.split()[1] in VERBS
