"""`flatout bench` from its words to its files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import main
from flatout.config.load import LoadedConfig
from flatout.records import BenchRow
from flatout.tuning import ladder, turns
from flatout.tuning.ladder import Clock
from tests.conftest import TINY

QUICK = ["bench", *TINY, "--steps", "3", "--parity-steps", "3"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "bench.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_ladder_writes_rows_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*QUICK, "--only", "ladder", "--out", "rows"]) == 0
    said = capsys.readouterr()
    rows = rows_in(tmp_path / "rows")
    ladder_names = [row["rung"] for row in rows if row["status"] == "green"]
    assert ladder_names[:3] == ["baseline", "fused-qkv", "sdpa"]
    assert [row["gain"] is None for row in rows if row["status"] == "green"] == [
        True,
        *[False] * (len(ladder_names) - 1),
    ]
    assert rows[0]["factor"] == 1.0
    assert rows[0]["used"]["attention"] == "reference"  # pyright: ignore
    assert rows[0]["micro_batch"] == 2
    assert {row["batch_tokens"] for row in rows} == {64}
    assert all(row["flatout"] == flatout.__version__ for row in rows)
    assert (tmp_path / "rows" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "from the baseline to the full set" in said.out
    assert "[1/7] baseline: green" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]  # no data folder, no run folder


def test_rows_say_what_was_asked_for(corpus: Path, tmp_path: Path):
    words = [*QUICK, f"data.source={corpus}", "data.folder=later", "--rungs", "baseline", "--out", "rows"]
    assert main(words) == 0
    (row,) = rows_in(tmp_path / "rows")
    words_of_row = str(row["config_words"])
    assert str(corpus) in words_of_row
    assert "data.folder=later" in words_of_row


def test_rows_as_json_and_folders_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert main([*QUICK, "--rungs", "baseline,tf32", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rung"], line["status"]) for line in lines] == 2 * [("baseline", "green"), ("tf32", "absent")]
    assert sorted(path.name for path in (tmp_path / "bench").iterdir()) == ["shakespeare", "shakespeare-2"]


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    honest = turns.borrowed_run

    def until_sdpa(loaded: LoadedConfig, **named: bool) -> object:
        if loaded.config.speed.attention == "sdpa":
            raise KeyboardInterrupt
        return honest(loaded, **named)

    monkeypatch.setattr(turns, "borrowed_run", until_sdpa)
    assert main([*QUICK, "--only", "ladder", "--out", "rows"]) == 130
    assert [row["rung"] for row in rows_in(tmp_path / "rows")] == ["baseline", "fused-qkv"]
    assert (tmp_path / "rows" / "bench.png").exists()
    said = capsys.readouterr()
    assert "2 rungs are in rows" in said.err
    assert "from the baseline to fused-qkv, the last rung that was measured: " in said.out
    assert "full set" not in said.out.partition("from the baseline")[0]
    assert "to the full set" not in said.out


def test_sigterm_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    honest = turns.borrowed_run

    def until_fused(loaded: LoadedConfig, **named: bool) -> object:
        if loaded.config.speed.fused_qkv:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(loaded, **named)

    monkeypatch.setattr(turns, "borrowed_run", until_fused)
    assert main([*QUICK, "--only", "ladder", "--out", "rows"]) == 143
    assert [row["rung"] for row in rows_in(tmp_path / "rows")] == ["baseline"]
    assert (tmp_path / "rows" / "bench.png").exists()
    assert "terminated; 1 rung is in rows" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_red_rung_ends_with_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ladder, "parity_losses", lambda _run, steps, _began: [0.0] * steps)
    assert main([*QUICK, "--rungs", "baseline", "--out", "rows"]) == 4
    assert rows_in(tmp_path / "rows")[0]["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rungs", "compil"], "no rung 'compil'"),
        (["--rungs", ","], "--rungs needs names of rungs"),
        (["--rungs", ""], "--rungs needs names of rungs"),
        (["--rungs", "bf16", "--only", "extra"], "--rungs goes without --only"),
        (["--steps", "0"], "--steps"),
        (["--batch-tokens", "100"], "multiple of model.context"),
        (["--ladder"], "unknown option"),
        (["--rungs", "sdpa", "speed.kernels=triton"], "the ladder sets speed.kernels itself"),
        (["--rungs", "without-triton"], "this cpu device has no rung 'without-triton'"),
        (["--out", ""], "--out needs a folder"),
        (["--out", __file__], "is not a folder"),
        (["--out", f"{__file__}/deeper/still"], "is not a folder"),
    ],
)
def test_mistakes_are_two_lines(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*QUICK, *words]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(errors) == 2
    assert message in errors[0]
    assert not list(Path().iterdir())  # a mistake leaves no folder that the next try would stumble over


def test_a_folder_that_cannot_be_made_answers_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(flatout, "bench", lambda *_, **__: pytest.fail("it went on"))
    assert main([*QUICK, "--out", "rows"]) == 5
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "to the folder rows: Permission denied" in errors[0]
    assert "--out" in errors[1]


def test_what_the_machine_lacks_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*QUICK, "--rungs", "triton", "--out", "deep/rows"]) == 2
    said = capsys.readouterr()
    assert "error: nothing was measured: " in said.err
    assert "CUDA" in said.err
    assert "wrote" not in said.out
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    assert main([*QUICK, "--rungs", "tf32,fp8-all", "--out", "mine"]) == 2
    said = capsys.readouterr()
    assert "cannot have tf32, fp8-all" in said.err
    assert "not measured" in said.out, "the reasons are told"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_picture_of_somebody_else_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    picture = tmp_path / "rows" / "bench.png"
    picture.parent.mkdir()
    picture.write_text("mine", encoding="utf-8")
    monkeypatch.setattr(flatout, "bench", lambda *_, **__: pytest.fail("it was measured"))
    assert main([*QUICK, "--rungs", "baseline", "--out", "rows"]) == 2
    assert "error: rows/bench.png is there already" in capsys.readouterr().err
    assert picture.read_text(encoding="utf-8") == "mine"
    assert [path.name for path in picture.parent.iterdir()] == ["bench.png"]


def test_the_folder_by_default_is_one_without_a_picture(tmp_path: Path):
    picture = tmp_path / "bench" / "shakespeare" / "bench.png"
    picture.parent.mkdir(parents=True)
    picture.write_text("mine", encoding="utf-8")
    assert main([*QUICK, "--rungs", "baseline"]) == 0
    assert picture.read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "bench" / "shakespeare-2" / "bench.png").exists()


def test_rows_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "bench.jsonl").write_text("mine", encoding="utf-8")
    assert main([*QUICK, "--rungs", "baseline", "--out", "rows"]) == 2
    assert (tmp_path / "rows" / "bench.jsonl").read_text(encoding="utf-8") == "mine"


def test_a_gain_is_measured_in_turns_or_not_at_all(tmp_path: Path):
    assert main([*QUICK, "--rungs", "sdpa", "--out", "rows"]) == 0
    rows = {row["rung"]: row for row in rows_in(tmp_path / "rows")}
    assert rows["fused-qkv"]["gain"] is rows["sdpa"]["factor"] is None
    assert rows["sdpa"]["pairs"] == 3


def test_the_factor_of_a_rung_whose_neighbours_were_not_asked_for(tmp_path: Path):
    assert main([*QUICK, "--rungs", "baseline,micro-batch", "--out", "rows"]) == 0
    rows = {row["rung"]: row for row in rows_in(tmp_path / "rows")}
    assert list(rows) == ["baseline", "sdpa", "micro-batch"]
    assert rows["sdpa"]["against"] == "fused-qkv"
    assert rows["sdpa"]["gain"] is None, "it was timed with the baseline"
    assert rows["micro-batch"]["factor"] == pytest.approx(rows["sdpa"]["factor"] * rows["micro-batch"]["gain"])  # pyright: ignore


def test_a_limit_on_the_time_leaves_rungs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Clock, "up", True)
    assert main([*QUICK, "--rungs", "fused-qkv", "--out", "rows", "--seconds", "1000"]) == 0
    assert "the time is up; not measured: fused-qkv\n" in capsys.readouterr().err
    assert [row["rung"] for row in rows_in(tmp_path / "rows")] == ["baseline"], "one rung is always measured"


def test_a_limit_that_is_too_short_says_what_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    exact = ladder.parity_losses
    monkeypatch.setattr(ladder, "parity_losses", lambda run, steps, began: (began(15.0), exact(run, steps))[1])
    assert main([*QUICK, "--rungs", "baseline", "--out", "rows", "--seconds", "170"]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith(
        "error: a step of 64 tokens takes 15 s here, and one rung with its parity check about 390.0 s"
    )
    assert hint == "hint: give it more --seconds, or a smaller step: --batch-tokens 16"
    assert not list(tmp_path.iterdir())


def test_from_python_without_files(tmp_path: Path):
    config = flatout.load_config("shakespeare-char", TINY)
    rows = list(flatout.bench(config.config, steps=3, parity_steps=3, rungs=["gc-collect"]))
    assert [row.rung for row in rows] == ["loader-thread", "gc-collect"]
    assert all(isinstance(row, BenchRow) and row.status == "green" for row in rows)
    assert rows[1].steps == 10
    assert rows[1].against == "loader-thread"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--help"], ["--rungs", "nope"], ["--rungs", "sdpa", "speed.kernels=triton"]])
def test_help_and_wrong_rungs_need_no_torch(words: list[str]):
    code = (
        f"import sys; from flatout.cli import main; main(['bench', *{words}]); "
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "sdpa" not in words:  # help and an unknown name both list the rungs
        for name in ("baseline", "without-triton", "checkpointing-selective", "full-again"):
            assert name in done.stdout + done.stderr
        assert "did you mean" not in done.stderr


GREEN = {
    "ladder": ["baseline", "tf32", "bf16", "compile", "loss", "triton"],
    "without": ["without-triton"],
    "extra": ["checkpointing-full", "split-512", "compile-reduce-overhead", "compile-max-autotune", "compile-regional"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("group", GREEN)
def test_the_ladder_on_a_gpu(tmp_path: Path, group: str):
    """A small model through every rung that the card has: each is green, or says why it cannot be had."""
    words = ["model.layers=2", "model.width=256", "model.heads=4", "model.context=256", "train.batch_tokens=4096"]
    words += ["speed.device=cuda", "data.tokenizer=gpt2", "data.source=null", "data.folder=nowhere"]
    # As in a model of full size, a micro-batch has several chunks in the loss: 8 in most rungs, 2 in the baseline's.
    words += ["speed.micro_batch=8", "speed.loss_chunk=256"]
    assert main(["bench", *words, "--only", group, "--steps", "3", "--parity-steps", "5", "--out", "rows"]) == 0
    rows = {row["rung"]: row for row in rows_in(tmp_path / "rows")}
    assert {row["status"] for row in rows.values()} <= {"green", "absent"}
    for name in GREEN[group]:
        assert rows[name]["status"] == "green", rows[name]["reason"]
    if group == "ladder":
        assert rows["compile"]["compile_seconds"] > 0  # pyright: ignore


@pytest.mark.gpu
def test_a_rung_leaves_the_card_clean(tmp_path: Path):

    from flatout.tuning.measure import Steps, borrowed_run, summary_of

    config = flatout.load_config(
        "shakespeare-char", [*TINY, "speed.device=cuda", "model.width=512", "speed.compile=on"]
    )
    torch._C._cuda_clearCublasWorkspaces()  # they stay once a product has been made
    before = torch.cuda.memory_allocated()
    with borrowed_run(config) as run, Steps(run) as steps:
        found = summary_of(run, steps.take(2), steps.take(3))
    assert (found.peak_bytes or 0) > 2**20
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 2**20
