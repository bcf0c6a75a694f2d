"""The command line as a user meets it: fast, two-line errors, right exit codes, signals that save."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import flatout
from flatout import cli
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.front.commands import COMMANDS, VERBS
from flatout.observe.sinks import read_metrics
from tests.called import call
from tests.conftest import TINY
from tests.end_to_end.forked import Forked
from tests.end_to_end.slow_trainer import train_slowly
from tests.end_to_end.strange_terminals import outcome_of

ROOT = Path(__file__).parents[2]


def assert_two_lines(code: int | None, error: str, expected: int = 2) -> None:
    lines = error.splitlines()
    assert code == expected, error
    assert len(lines) == 2, error
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines[1]) > len("hint: ")


@pytest.fixture
def tiny_words(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.source={corpus}", "output.folder=run"]


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from flatout import cli
done = []
for words in json.loads(sys.stdin.read()):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.main(words)
    assert "torch" not in sys.modules, words
    done.append([code, out.getvalue(), error.getvalue()])
json.dump(done, sys.stdout)
"""


@functools.cache
def without_torch() -> dict[tuple[str, ...], tuple[int, str, str]]:
    """(code, output, errors) of helps and mistakes, in a process that fails if torch was imported on the way."""
    environment, words = {**os.environ, "PYTHONPATH": str(ROOT / "src")}, [*HELPS, *MISTAKES]
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER]
    told = subprocess.run(
        command, env=environment, input=json.dumps(words), capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    return {tuple(one): tuple(result) for one, result in zip(words, json.loads(told.stdout), strict=True)}


HELPS = [["--help"], [], ["--version"], *([verb, "--help"] for verb in VERBS), ["config", "show", "--help"]]


MISTAKES = [
    ["trian"], ["train", "--reume", "auto"], ["train", "shakespear-char"], ["train", "modle.layers=3"],
    ["train", "nosuch.yaml"], ["train", "optim.learning_rate=fast"], ["generate", "--tokens", "-3"],
    ["generate", "--top-p", "2"], ["eval", "nowhere"], ["config", "expalin"], ["config", "copy"],
    ["train", "a", "b"], ["train", "--resume"], ["train", "--resume", "nowhere"], ["export", "only-one"],
    ["train", "--hardware", "7gb"], ["generate", "--device", "tpu"], ["eval", "--split", "test"],
    ["config", "schema", "extra"], ["train", "model.width=100", "model.heads=7"], ["-x"], [""], ["serve", "nowhere"],
    ["bench", "--seconds", "1"], ["finetune", "batch_size=4"], ["train", "a", "--config", "b"],
]  # fmt: skip


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_needs_no_torch(words):
    code, output, error = without_torch()[tuple(words)]
    assert code == 0, error
    assert output


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_get_two_lines_without_torch(words):
    code, output, error = without_torch()[tuple(words)]
    assert_two_lines(code, error)
    assert output == ""


def test_suggestions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    for words, suggestion in [
        (["trian"], "flatout train"),
        (["train", "--reume", "x"], "--resume"),
        (["train", "modle.layers=3"], "model.layers"),
        (["train", "shakespear-char"], "shakespeare-char"),
        (["config", "expalin"], "explain"),
        (["train", "--config", "my.yaml"], "check the path"),
        (["train", "a", "--config", "b"], "leave one of them out"),
        (["train", "gpt2"], "did you mean gpt2-124m or"),
        (["train", "data.fields=content"], "did you mean data.field or chat.fields?"),
        (["train", "data=my.txt"], "did you mean data.source?"),
        (["train", "max_chars=5000"], "did you mean data.max_bytes? Take the first documents"),
        (["train", "batch_size=4"], "did you mean train.batch_tokens? Tokens per optimizer step"),
        (["train", "--device", "cpu"], "speed.device=VALUE?"),
        (["train", "--steps", "100"], "train.steps=VALUE?"),
        (["train", "--stpes", "5"], "train.steps=VALUE?"),
        (["train", "--batch-size", "8"], "train.batch_tokens=VALUE? Tokens per optimizer step"),
        (["train", 'output.folder=""'], "output.folder"),
        (["tune", "search", "nospace.yaml"], "the fields to search over"),
        (["config", "copy", "shakespeare-char", ""], "name a .yaml file"),
        (["eval", ""], "name a run folder"),
        (["generate", ".", "What is it?"], "text goes after --prompt"),
        (["generate", "What is it?"], "text goes after --prompt"),
        (["chat", ".", "Hello"], "flatout chat RUN --message Hello"),
        (["train", "--grad-clip", "1"], "optim.clip=VALUE"),
        (["train", "gradient_clip=1"], "optim.clip"),
        (["train", "model.d_model=64"], "model.width"),
        (["explain"], "flatout config explain"),
        (["velocity"], "flatout --help"),
        (["train", "speed.flash=true"], "speed.attention"),
        (["train", "speed.tf32=true"], "speed.precision"),
        (["train", "speed.precision=float32"], "Did you mean fp32"),
        (["train", "speed.fused_optimizer=yes"], "Did you mean on"),
        (["train", "speed.fp8=off"], "Write [] for none"),
        (["train", "speed.fp8=null"], "Write [] for none"),
        (["train", "speed.fp8=up"], "Put brackets around it"),
        (["train", "speed.fp8"], "a setting is SECTION.FIELD=VALUE"),
        (["train", "speed.fp8=[qkv,", "foo]"], "quotes, brackets"),
        (["train", "--data", "mine.txt"], "did you mean data.source=VALUE?"),
        (["train", "--output_dir", "out"], "output.folder=VALUE?"),
        (["train", "--save-steps", "5"], "checkpoint.every=VALUE"),
        (["train", "--optimizer", "muon"], "did you mean optim.optimizer=VALUE?"),
        (["train", "optim.name=muon"], "optim.optimizer is adamw or muon"),
        (["train", "muon=true"], "optim.optimizer is adamw or muon"),
        (["train", "--resume-from-checkpoint", "x"], "--resume auto"),
        (["train", "per_device_train_batch_size=8"], "speed.micro_batch"),
        (["train", "eval_iters=8"], "eval.tokens"),
        (["train", "checkpoint.save_total_limit=8"], "checkpoint.keep"),
        (["config", "search", "sophia"], "optim.optimizer is adamw or muon"),
        (["config", "search", "xyzzy"], "flatout config explain"),
        (["config", "search", "leraning_rate"], "optim.learning_rate"),
        (["train", "data.source=nowhere.txt"], "the folder you are in"),
    ]:
        assert cli.main(words) == 2 or "nowhere.txt" in words[-1]
        assert suggestion in capsys.readouterr().err


def test_settings_are_found_by_a_word(capsys: pytest.CaptureFixture[str]):
    def found(*words: str) -> list[str]:
        assert cli.main(["config", "search", *words]) == 0
        return capsys.readouterr().out.splitlines()

    assert next(iter(found("warmup"))).startswith("optim.warmup ")
    assert found("save_steps") == [
        "checkpoint.every  500  Steps between checkpoints, `2 epochs` or `10 minutes`; 0 saves only at the end and "
        "when interrupted. (elsewhere: save_steps)"
    ]
    assert any(line.startswith("lora.quantize ") for line in found("QLoRA"))
    both = {line.split()[0] for line in found("learning", "rate")}
    assert both < {line.split()[0] for line in found("rate")}
    assert cli.main(["config", "search", "save-steps", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["path"], row["default"], row["elsewhere"]) == ("checkpoint.every", "500", ["save_steps"])


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_hardware_auto_needs_a_gpu():
    done = call(["config", "show", "gpt2-124m", "--hardware", "auto"])
    assert_two_lines(done.code, done.errors)
    assert "looks for a GPU" in done.errors


def test_train_prints_progress_and_a_sample(tiny_words):
    done = call(["train", *tiny_words, "train.steps=20", "output.log_every=5"])
    assert done.code == 0, done.errors + done.trouble
    lines = done.output.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 5
    assert any(line.startswith("eval at step 20: val loss") for line in lines)
    assert "--- sample at step 20 ---" in lines
    assert done.errors == ""


def test_a_run_ends_with_pictures_and_trackers_get_its_records(tiny_words):
    done = call(["train", *tiny_words, "train.steps=20", "output.trackers=[tensorboard]"])
    assert done.code == 0, done.errors + done.trouble
    assert {path.name for path in Path("run/plots").iterdir()} == {
        "metrics.png",
        "results.png",
        "steps.csv",
        "evals.csv",
    }
    assert list(Path("run").rglob("events.out.tfevents.*"))
    done = call(["train", *tiny_words, "train.steps=19", "output.folder=bare"])
    assert done.code == 0, done.errors + done.trouble
    assert not Path("bare/plots").exists()
    assert not list(Path("bare").rglob("events.out.tfevents.*"))


def test_json_prints_records_only_and_equals_the_metrics_file(tiny_words):
    done = call(["train", *tiny_words, "train.steps=5", "--json"])
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert rows[0]["type"] == "run"
    assert rows[-1]["type"] == "end"
    assert [row for row in rows if row["type"] == "step"] == [
        row for row in read_metrics(Path("run/metrics.jsonl")) if row["type"] == "step"
    ]


SCENARIOS: dict[str, dict[str, Any]] = {
    "closed": {"stdout": "closed", "stderr": "closed"},
    "full": {"stdout": "full"},
    "all full": {"stdout": "full", "stderr": "full"},
    "left": {"stdout": "left", "encoding": "ascii"},
    "left with nowhere to complain": {"stdout": "left", "stderr": "closed", "encoding": "ascii"},
    "ascii": {"encoding": "ascii", "words": ["--json"]},
    "interrupt": {"signals": ["SIGINT"], "words": ["train.steps=50000"]},
    "terminate": {"signals": ["SIGTERM"], "words": ["train.steps=50000"]},
    "hang up": {"signals": ["SIGHUP"], "words": ["train.steps=50000"]},
    "nohup": {
        "ignored": ["SIGHUP", "SIGINT"],
        "signals": ["SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"],
        "words": ["train.steps=50000"],
    },
    "save ignored": {"ignored": ["SIGUSR1"], "signals": ["SIGUSR1", "SIGHUP"], "words": ["train.steps=50000"]},
    "full for another verb": {"verb": ["config", "schema"], "stdout": "full"},
    "left by another verb": {"verb": ["config", "schema"], "stdout": "left"},
    "closed for another verb": {"verb": ["config", "schema"], "stdout": "closed"},
    "nowhere for an error": {"verb": ["trian"], "stdout": "full", "stderr": "full"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What came of each scenario, once it is asked for."""
    place = tmp_path_factory.mktemp("terminals")
    text = place / "text.txt"
    text.write_text("\u00e9\u2603\U0001f600\n" * 1000, encoding="utf-8")

    @functools.cache
    def outcome(name: str) -> dict[str, Any]:
        scenario, folder = SCENARIOS[name], place / name
        words = [*TINY, "train.steps=6", "output.log_every=1", f"data.source={text}", f"output.folder={folder}"]
        words = scenario.get("verb") or ["train", *words, *scenario.get("words", [])]
        with contextlib.chdir(place):
            return {**outcome_of({**scenario, "words": words, "folder": folder}), "folder": folder}

    return outcome


@pytest.mark.parametrize("name", ["closed", "full", "all full", "left", "left with nowhere to complain", "ascii"])
def test_a_run_does_not_need_its_terminal(outcomes, name):
    outcome = outcomes(name)
    assert outcome["code"] == 0, outcome["stderr"]
    assert [step for step, _ in list_checkpoints(outcome["folder"] / "checkpoints")] == [6]
    rows = read_metrics(outcome["folder"] / "metrics.jsonl")
    assert [row["step"] for row in rows if row["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["type"] == "end"
    told = outcome["stderr"].splitlines()
    assert len(told) == (name in ("full", "left")), told
    assert all("standard output cannot be written" in line for line in told)


def test_text_beyond_the_encoding_is_written_as_escapes_that_json_knows(outcomes):
    printed = outcomes("ascii")["stdout"]
    assert printed.isascii()
    rows = [json.loads(line) for line in printed.splitlines()]
    kept = read_metrics(outcomes("ascii")["folder"] / "metrics.jsonl")
    assert [row for row in rows if row["type"] == "sample"] == [row for row in kept if row["type"] == "sample"]
    assert any(not row["text"].isascii() for row in kept if row["type"] == "sample")


@pytest.mark.parametrize(("name", "code"), [("interrupt", 130), ("terminate", 143), ("hang up", 129)])
def test_a_signal_saves_and_says_how_to_go_on(outcomes, name, code, monkeypatch):
    outcome = outcomes(name)
    monkeypatch.chdir(outcome["folder"].parent)
    assert outcome["code"] == code, outcome["stderr"]
    (step, path), *_ = list_checkpoints(outcome["folder"] / "checkpoints")
    assert read_checkpoint(path).step == step
    resume = shlex.split(outcome["stderr"].partition("flatout ")[2].partition("`")[0])
    assert resume[:2] == ["train", "--resume"]
    assert Path(resume[2]) == outcome["folder"]
    resumed = call(["train", "--resume", str(outcome["folder"]), f"train.steps={step + 3}", "--json"])
    assert resumed.code == 0, resumed.errors + resumed.trouble
    assert [json.loads(line)["step"] for line in resumed.output.splitlines() if '"type": "step"' in line] == [
        step + 1, step + 2, step + 3,
    ]  # fmt: skip


def test_ignored_signals_stay_ignored_and_sigusr1_saves_without_ending(outcomes):
    outcome = outcomes("nohup")
    assert outcome["code"] == 143, "neither the hang-up nor the interrupt ended it"
    rows = read_metrics(outcome["folder"] / "metrics.jsonl")
    saved = [row["step"] for row in rows if row["type"] == "checkpoint"]
    assert len(saved) == 2, "one for SIGUSR1, one for SIGTERM"
    assert saved[0] >= 6, "the signals before were sent at the steps 2 and 4"
    assert saved[1] > saved[0], "it went on"
    ignored = outcomes("save ignored")
    assert ignored["code"] == 129
    rows = read_metrics(ignored["folder"] / "metrics.jsonl")
    assert sum(row["type"] == "checkpoint" for row in rows) == 1


def test_other_verbs_without_a_terminal(outcomes):
    full = outcomes("full for another verb")
    assert_two_lines(full["code"], full["stderr"], expected=5)
    assert (outcomes("left by another verb")["code"], outcomes("left by another verb")["stderr"]) == (141, "")
    assert (outcomes("closed for another verb")["code"], outcomes("closed for another verb")["stderr"]) == (0, "")
    assert outcomes("nowhere for an error")["code"] == 2


def test_a_second_interrupt_quits_at_once(tiny_words):
    words = [*tiny_words, "train.steps=50000"]
    process = Forked(train_slowly, 3600.0, Path("phase"), False, words, stdout="said", stderr="errors")
    assert process.wait_until(lambda: Path("said").exists() and "\nstep " in Path("said").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait_until(lambda: Path("phase").exists() and Path("phase").read_text() == "saving")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 130, "it waited for the slow save"


def test_nowhere_to_put_temporary_files(monkeypatch, capsys):
    def nowhere(*_):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setitem(COMMANDS, "train", dataclasses.replace(COMMANDS["train"], run=nowhere))
    assert cli.main(["train"]) == 5
    assert capsys.readouterr().err.splitlines() == [
        "error: no folder for temporary files can be written",
        "hint: free some space, or set TMPDIR to a folder with some",
    ]


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """A write beyond `size` fails, as it does on a full disk."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_keeps_the_last_good_checkpoint(tiny_words):
    first = call(["train", *tiny_words, "train.steps=4", "checkpoint.every=2"])
    assert first.code == 0, first.errors + first.trouble
    size = max(file.stat().st_size for file in Path("run/checkpoints/step-00000004").iterdir())
    longer = ["train", *tiny_words, "train.steps=8", "checkpoint.every=2", "--resume", "auto"]
    with small_files(size // 2):
        second = call(longer)
    assert_two_lines(second.code, second.errors, expected=5)
    assert "--resume auto" in second.errors
    assert [step for step, _ in list_checkpoints(Path("run/checkpoints"))][-1] == 4
    third = call(longer)
    assert third.code == 0, third.errors + third.trouble
    assert list_checkpoints(Path("run/checkpoints"))[-1][0] == 8


def test_a_run_folder_that_cannot_be_made_is_told_in_two_lines(tiny_words, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = call(["train", *tiny_words, "output.folder=file/run"])
    assert_two_lines(done.code, done.errors, expected=2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_told_in_two_lines(tiny_words, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = call(["train", *tiny_words, "output.folder=locked/run"])
    assert_two_lines(done.code, done.errors, expected=5)


def test_a_chat_in_the_terminal_remembers_questions_and_answers(tmp_path, monkeypatch, capsys):
    seen: list[list[str]] = []

    def answered(_model: object, messages: list[dict[str, str]], **_how: object) -> Iterator[str]:
        seen.append([f"{one['role']}: {one['content']}" for one in messages])
        yield from (f"answer {len(seen)}", ".")

    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    for name, value in {"load_model": lambda *_, **__: None, "is_untaught": lambda _: False, "chat": answered}.items():
        monkeypatch.setattr(flatout, name, value)
    assert cli.main(["chat", str(tmp_path), "--system", "be brief"]) == 0
    first = ["system: be brief", "user: first"]
    assert seen == [first, [*first, "assistant: answer 1.", "user: second"]]
    assert capsys.readouterr().out == "> answer 1.\n> > answer 2.\n> \n"


def test_divergence_exits_with_4(tiny_words):
    wild = ["optim.learning_rate=100", "optim.clip=0", "optim.warmup=0", "model.qk_norm=false"]
    done = call(["train", *tiny_words, *wild, "optim.schedule=constant", "train.steps=500"])
    assert_two_lines(done.code, done.errors, expected=4)
    assert "batch" in done.errors


def test_verbs_on_a_finished_run(tiny_words, tmp_path, capsys: pytest.CaptureFixture[str]):
    def here(*words: str, expected: int = 0) -> tuple[str, str]:
        """(output, errors), in this process: each start of another takes seconds."""
        assert cli.main(list(words)) == expected
        captured = capsys.readouterr()
        return captured.out, captured.err

    here("train", *tiny_words, "model.family=gpt2", "model.mlp=gelu", "train.steps=20")
    measured = json.loads(here("eval", "run", "--json")[0])
    assert measured["loss"] > 0
    assert measured["bits_per_byte"] > 0
    assert "perplexity" in here("eval", "run")[0]
    ask = ["generate", "run", "--prompt", "the ", "--tokens", "20", "--seed", "3"]
    text, _ = here(*ask)
    assert text.startswith("the ")
    assert text == here(*ask)[0]
    assert_two_lines(3, here("generate", "run", "--prompt", "\u2603", expected=3)[1], expected=3)
    talk = call(["generate", "run", "--interactive", "--tokens", "5"], typed="the \n\u2603\nold\n")
    assert talk.code == 0, talk.trouble
    assert "error: " in talk.errors, "a bad prompt is told"
    assert talk.output.count(">") >= 4, "and the session goes on"
    here("export", "run", "out")
    configs = ["config.json", "generation_config.json", "tokenizer_config.json"]
    written = sorted(["README.md", *configs, "flatout.json", "model.safetensors", "tokenizer.json"])
    assert sorted(path.name for path in Path("out").iterdir()) == written
    assert_two_lines(2, here("export", "run", "out", expected=2)[1])


def test_prepare_counts_by_another_context(tiny_words, tmp_path):
    rows = ["one two three " * 40, "four " * 3, "five six " * 90, "seven " * 20]  # the last has all of the validation
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    words = [f"data.source={text}", f"data.folder={tmp_path / 'made'}", "data.validation=0.01", "--context", "256"]
    told = json.loads(call(["prepare", *tiny_words, *words, "--json"]).output)
    assert told["long_documents"] == {"documents": 2, "tokens": len(rows[0]) + len(rows[2]) + 2}, "an end each"
    assert told["context"] == 256
    assert told["windows"] == (told["train_tokens"] - 1) // 256
    shown = call(["prepare", *tiny_words, *words]).output
    assert "2 of " in shown
    assert "are as long as a window" in shown
    plain = call(["prepare", *tiny_words, *words[:-2]]).output
    assert "windows" in plain
    assert "as long as a window" not in plain


@pytest.mark.parametrize(("limit", "kept"), [("max_documents=10", 10), ("max_bytes=95", 15), ("max_documents=99", 30)])
def test_a_limited_prepare_counts_what_it_took(tmp_path, monkeypatch, limit, kept):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "the ox"}\n{"text": ""}\n' * 30, encoding="utf-8")
    shown = call(["prepare", "data.source=rows.jsonl", "data.tokenizer=bytes", f"data.{limit}"]).output
    assert f"\nkept {kept} of {kept + 30} records from 1 file," in shown
    assert f"of each source its beginning was taken, up to data.{limit}; the rest is left out and not counted" in shown
    assert "\ndropped 30 empty\n" in shown, "and no row that lies past the limit"
    assert "was not read" not in shown


@pytest.mark.parametrize("name", ["my-texts", "./my-texts", "my own", "my.txt", "my-texts/page.html"])
def test_a_text_given_as_a_config_gets_the_command_that_reads_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in ("my-texts/a.md", "my own/a.txt", "my.txt", "my-texts/page.html"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("<p>so: it is\n" * 40, encoding="utf-8")
    for verb in ("prepare", "train"):
        said = call([verb, name])
        assert (said.code, list(tmp_path.glob("data"))) == (2, [])
        assert "not a config" in said.errors
    pasted = shlex.split(said.errors.split("`")[1])
    assert pasted[:2] == ["flatout", "train"]
    assert call(["prepare", *pasted[2:], "data.tokenizer=bytes"]).code == 0


def messy_folder(place: Path) -> Path:
    """Rows under three names, of which some have no text at all, among texts and files of other kinds."""
    place.mkdir()
    rows = {
        "forum.jsonl": [{"id": n, "content": f"what number {n} said"} for n in range(20)],
        "wiki.jsonl": [{"text": f"page {n} of the wiki"} if n % 4 else {"title": "Stub", "id": n} for n in range(16)],
    }
    for name, listed in rows.items():
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    table = [["id", "title", "body"], *([str(n), "Title", f"article {n} as it was"] for n in range(10))]
    (place / "articles.csv").write_text("".join(",".join(row) + "\n" for row in table), encoding="utf-8")
    (place / "note.txt").write_text("a note of some length\n" * 4, encoding="utf-8")
    (place / "tool.py").write_text("print()\n", encoding="utf-8")
    (place / "empty.txt").touch()
    for name in ("a.png", "b.pdf", "c.bin", "d.zip"):
        (place / name).write_bytes(b"\x89\xff\xfe\xf0" * 20)
    return place


def test_a_messy_folder_is_prepared_by_what_is_printed_alone(tmp_path, monkeypatch):
    """Counts are of records, grouped by file and cause, and the settings that hints name make the errors go away."""
    monkeypatch.chdir(tmp_path)
    words = ["prepare", f"data.source={messy_folder(tmp_path / 'in').name}", "data.tokenizer=bytes"]
    said = call(words)
    assert said.code == 3
    told = "passed over 1 .bin (not GPT-2 tokens), 1 .py, 1 empty, 3 binary (.pdf .png .zip)"
    assert f"note: 10 files: read 2 .jsonl, 1 .csv, 1 .txt; {told}" in said.both
    assert "kept 13 of 47 records from 4 files" in said.both
    assert [line for line in said.both.splitlines() if line.startswith("problem:")] == [
        "problem: in/forum.jsonl: 20 records, the first in line 1: the record lacks the field 'text'; there are: id, "
        "content; these rows have the field content",
        "problem: in/articles.csv: 10 records, the first in line 1: there is no column 'text'; there are: id, title, "
        "body; these rows have the field body",
        "problem: in/wiki.jsonl: 4 records, the first in line 1: the record lacks the field 'text'; there are: title, "
        "id; these rows have the field title",
    ]
    assert "error: 34 of 47 records could not be used: in/forum.jsonl: 20 records" in said.both
    assert "data.format=text" not in said.both, "images and archives hold no text"
    setting = "data.field=[text, content, body, title]"
    command = f"`flatout prepare data.source=in data.tokenizer=bytes '{setting}' --overwrite`"
    assert f"hint: to use 34 of them: {command}; or go on" in said.both
    refused = call(["train", *words[1:], setting])
    assert refused.code == 3, "the dataset was prepared with another setting"
    assert "set data.folder to a new folder to prepare it anew" in refused.errors
    said = call(shlex.split(command.strip("`"))[1:])
    assert (said.code, "kept 47 of 47 records" in said.both) == (0, True)
    source = re.search(r"'(data\.source=[^']+)'", said.both)
    assert source is not None, said.both
    said = call([*words, setting, source[1].replace("FILE", "tool.py"), "data.folder=more"])
    assert (said.code, "kept 48 of 48 records" in said.both) == (0, True)
    assert "note: 10 files: read 2 .jsonl, 1 .csv, 1 .py, 1 other; passed over 1 .bin (not GPT-2 tokens), 1 empty" in (
        said.both
    ), "a file that is a source by itself is not passed over, and counted once"


def test_of_many_causes_the_first_are_listed_and_the_records_of_the_rest_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for count in range(1, 13):
        Path(f"in/{count}.jsonl").write_text('{"id": 7}\n' * count, encoding="utf-8")
    Path("in/good.jsonl").write_text('{"text": "what was said"}\n' * 20, encoding="utf-8")
    said = call(["prepare", "data.source=in", "data.tokenizer=bytes"])
    assert said.code == 3
    told = [line for line in said.both.splitlines() if line.startswith("problem:")]
    assert [line.split(":")[1] for line in told[:3]] == [f" in/{count}.jsonl" for count in range(12, 9, -1)]
    assert told[3:] == ["problem: ... and 45 more records of 9 files with the same problem"]
    assert "error: 78 of 98 records could not be used: in/12.jsonl: 12 records, the first in line 1" in said.both


def test_no_hint_throws_a_good_dataset_away(tmp_path, monkeypatch):
    """What would lack more than what is there does not take its place."""
    monkeypatch.chdir(tmp_path)
    messy_folder(tmp_path / "in")
    words = ["prepare", "data.source=in", "data.tokenizer=bytes", "data.folder=data"]
    assert call([*words, "data.field=[text, content, body]"]).code == 3, "the stubs have no text"
    before = tree_of(tmp_path)
    refused = call([*words, "data.field=contents"])
    assert refused.code == 3
    assert "hint: leave data.field out or set 'data.field=[text, content, body]' to" in refused.errors
    assert "--overwrite" not in refused.errors
    refused = call([*words, "data.field=contents", "--overwrite"])
    assert (refused.code, tree_of(tmp_path)) == (3, before)
    assert "data stays as it is: it lacks 4 of 47 records, and the new dataset would lack 46 of 47" in refused.errors
    assert "'data.field=[content, text, body, title]' --overwrite`" in refused.errors, "without the slip"
    assert "set data.folder to a new folder" in refused.errors
    assert call([*words[:-1], "data.folder=other", "data.field=contents"]).code == 3
    assert "kept 43 of 47 records" in call(words).both, "what was prepared is used as it was"
    more = call([*words, "data.field=[text, content, body, title]", "--overwrite"])
    assert (more.code, "kept 47 of 47 records" in more.both) == (0, True)
    assert call([*words, "data.field=[text, content, body]", "--overwrite"]).code == 3
    again = call(words)
    assert (again.code, "kept 47 of 47 records" in again.both) == (0, True)


def tree_of(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_many_files_of_one_problem_hide_no_other_and_the_hint_says_what_replacing_costs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = messy_folder(tmp_path / "in")
    for number in range(12):
        (place / f"{number:02}.txt").write_text("caf\xe9 au lait\n" * 9, encoding="latin-1")
        (place / f"{number:02}.jsonl").write_text('{"content": "another row"}\n', encoding="utf-8")
    (place / "broken.jsonl").write_text('{"text": "a row"}\n{"text": \n', encoding="utf-8")
    said = call(["prepare", "data.source=in", "data.tokenizer=bytes"])
    problems = [line for line in said.both.splitlines() if line.startswith("problem:")]
    assert (said.code, len(problems)) == (3, 11), problems
    assert "problem: ... and 10 more records of 10 files with the same problem" in problems
    assert "problem: ... and 9 more records of 9 files with the same problem" in problems
    assert sum("not UTF-8" in line for line in problems) == 3
    assert any("broken.jsonl, line 2: it is not JSON" in line for line in problems)
    convert = "convert in/00.txt and 11 more files to UTF-8 (from latin-1: `iconv -f latin1 -t utf-8`)"
    assert f"{convert}, or data.invalid_utf8=replace loses those letters" in said.errors
    assert "data.invalid_utf8=replace --overwrite" not in said.errors
    assert "or go on with the rest: `flatout train data.folder=data/in-bytes` (every problem" in said.errors


def test_a_file_that_any_source_of_a_list_reads_is_counted_once_and_not_as_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messy_folder(tmp_path / "in")
    (tmp_path / "in" / "web").mkdir()
    for number in range(4):
        (tmp_path / "in" / "web" / f"{number}.html").write_text(f"<p>page {number} of the web</p>", encoding="utf-8")
    (tmp_path / "in" / "web" / "note.txt").write_text("a note that both read\n", encoding="utf-8")
    names = "[text, content, body, title]"
    plain = call(["prepare", "data.source=in", "data.tokenizer=bytes", f"data.field={names}", "data.folder=plain"])
    way = re.search(r"to read a file or a folder of them too, name it: '(data\.source=[^']+)'", plain.both)
    assert way is not None, plain.both
    source = way[1].replace("FILE-OR-FOLDER", "web")
    words = [source, "data.tokenizer=bytes", f"data.field={names}", "data.folder=data"]
    passed_over = "passed over 1 .bin (not GPT-2 tokens), 1 .py, 1 empty, 3 binary (.pdf .png .zip)"
    before = call(["doctor", "--quick", *words]).both
    assert f"15 files: read 4 .html, 2 .jsonl, 2 .txt, 1 other; {passed_over}" in before
    said = call(["prepare", *words])
    assert (said.code, "from 9 files, " in said.both) == (0, True), said.both
    assert f"15 files: read 4 .html, 2 .jsonl, 2 .txt, 1 other; {passed_over}" in said.both
    assert f"data was prepared from 9 of 15 files; {passed_over}" in call(["doctor", "--quick", *words]).both
    listed = "1 .bin (not GPT-2 tokens), 1 .pdf (binary), 1 .png (binary), 1 .py, 1 .zip (binary), 1 empty"
    assert f"files passed over: {listed}" in " ".join(call(["prepare", "inspect", "data"]).both.split())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_rows_that_all_lack_the_field_get_the_setting_that_reads_them(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(n), "content": f"what number {n} said"} for n in range(20)]
    if name == "rows.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    elif name == "rows.csv":
        Path(name).write_text("".join(",".join(row) + "\n" for row in [rows[0], *(row.values() for row in rows)]))
    else:
        Path(name).write_text(json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows)))
    words = [f"data.source={name}", "data.tokenizer=bytes"]
    found = "".join(call([verb, *words]).both for verb in ("prepare", "doctor"))
    assert "nothing could be read, none of 20 records: rows." in found
    assert found.count("data.field=content reads 20 of them") == 2, found
    assert call(["prepare", *words, "data.field=content"]).code == 0


def test_prepare_reports_and_keeps(tiny_words):
    facts = json.loads(call(["prepare", *tiny_words, "--json"]).output)
    assert facts["train_tokens"] > 1000
    before = Path(facts["folder"], "manifest.json").stat().st_mtime_ns
    assert call(["prepare", *tiny_words]).code == 0
    assert Path(facts["folder"], "manifest.json").stat().st_mtime_ns == before


def test_config_verbs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "gpt2-124m" in call(["config", "presets"]).output
    assert "train.steps" in call(["config", "explain", "train.steps=7"]).output
    assert json.loads(call(["config", "schema"]).output)["type"] == "object"
    shown = call(["config", "show", "gpt2-124m", "--hardware", "8gb"]).output
    (tmp_path / "shown.yaml").write_text(shown)
    assert call(["config", "show", "shown.yaml"]).output == shown
    assert call(["config", "copy", "shakespeare-char", "mine.yaml"]).code == 0
    again = call(["config", "copy", "shakespeare-char", "mine.yaml"])
    assert_two_lines(again.code, again.errors)


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m flatout.cli config schema | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
