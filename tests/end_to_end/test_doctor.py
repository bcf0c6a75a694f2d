"""`flatout doctor` from outside: what a person sees, exit codes, JSON, and that it lives without torch."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from flatout.cli import dispatch
from flatout.diagnose import check_kernels
from flatout.errors import UsageError
from tests.conftest import TINY
from tests.made_runs import sign_lock

SOURCE = Path(__file__).parents[2] / "src"
CALL = "import sys; from flatout.cli import dispatch; sys.exit(dispatch(['doctor', *sys.argv[1:]]))"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # what the tests themselves set is nothing to warn of
    return tmp_path


def run(*words: str, folder: Path, before: str = "", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The verb in a process of its own; `before` runs first, `path` comes before everything that is installed."""
    places = [str(place) for place in (path, SOURCE) if place is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{textwrap.dedent(before)}\n{CALL}", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment, check=False
    )


def lines(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict]]:
    code = dispatch(["doctor", *words, "--json"])
    out, _ = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()]


def test_a_healthy_set_up(here: Path, capsys: pytest.CaptureFixture[str]):
    code = dispatch(["doctor", "--quick", "speed.device=cpu"])
    out, err = capsys.readouterr()
    assert code == 0
    assert err == "", "nobody watches, so there is no line to wipe away"
    assert "\x1b" not in out
    for title in ("Machine", "GPU", "Functional checks", "Environment variables", "Disk", "Data", "Config"):
        assert f"\n{title}\n" in f"\n{out}"
    assert "BAD" not in out
    assert "about 1.7 passes over the text" in out
    assert "attention sdpa" in out
    assert re.fullmatch(r"\d+ checks(, all fine\.|: \d+ warnings?, no problems\..*)", out.rstrip().splitlines()[-1])
    assert list(here.iterdir()) == []


def test_problems_come_last_with_their_advice(here: Path, capsys: pytest.CaptureFixture[str]):
    words = ["speed.device=cpu", "data.source=nowhere.txt", "optim.warmup=5000", "--quick"]
    assert dispatch(["doctor", *words]) == 3
    out, _ = capsys.readouterr()
    first, warnings = out.index("BAD   source"), out.index("Warnings: it works, but not well")
    problems = out.index("Problems: training would not work")
    assert first < warnings < problems
    assert "there is no source nowhere.txt" in out[problems:]
    assert "optim.warmup=16, a twentieth of the run" in out[warnings:problems]
    assert re.match(r"\d+ checks: 1 problem, \d+ warnings?\. Mend the problems first", out.rstrip().splitlines()[-1])


def test_json_lines_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]):
    code, rows = lines("speed.device=cpu", "train.stepz=5", "--quick", capsys=capsys)
    assert code == 2
    *findings, summary = rows
    assert {row["type"] for row in findings} == {"finding"}
    assert all({"area", "name", "status", "found", "advice"} <= row.keys() for row in findings)
    bad = [row for row in findings if row["status"] == "bad"]
    assert [row["advice"].partition("?")[0] for row in bad] == ["Did you mean train.steps"]
    assert summary["type"] == "doctor"
    assert summary["checks"] == len(findings)
    assert (summary["bad"], summary["exit_code"]) == (1, 2)


def test_a_prepared_dataset_and_a_run_folder(tiny, here: Path, corpus: Path, capsys: pytest.CaptureFixture[str]):
    from flatout import api

    config = tiny("train.steps=3", f"output.folder={here / 'run'}")
    list(api.train(config))
    words = [
        "shakespeare-char",
        *TINY,
        f"data.source={corpus}",
        "train.steps=3",
        f"output.folder={here / 'run'}",
        "--quick",
    ]
    code, rows = lines(*words, capsys=capsys)
    found = {row["name"]: row for row in rows if row["type"] == "finding"}
    assert code == 0, [row for row in rows if row.get("status") == "bad"]  # a run that can go on is a warning
    assert found["dataset"]["status"] == found["fits config"]["status"] == "ok"
    assert "saved up to step 3" in found["run folder"]["found"]
    assert "--resume auto" in found["run folder"]["advice"]
    assert found["windows"]["found"][0].isdigit(), "counted, not extrapolated"


def test_a_run_that_is_under_way_holds_its_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    from flatout.checkpoints.run_folder import run_lock

    (here / "run").mkdir()
    sign_lock(here / "run", 1, "nowhere")  # of an earlier start
    with run_lock(here / "run") as lock:
        lock.accept()
        code, rows = lines("speed.device=cpu", f"output.folder={here / 'run'}", "--quick", capsys=capsys)
        assert code == 2
        found = [row["found"] for row in rows if row.get("status") == "bad"]
        assert any(f"(pid {os.getpid()} on {socket.gethostname()})" in one for one in found), found


def test_hostile_names_cannot_reach_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]):
    dispatch(["doctor", "--quick", "speed.device=cpu", "data.source=\x1b]0;owned\x07.txt"])
    out, _ = capsys.readouterr()
    assert "\x1b" not in out
    assert "\x07" not in out


def test_words_are_understood_before_anything_heavy_is_imported(here: Path):
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'numpy' in sys.modules))"
    done = run("--help", folder=here, before=check)
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert done.stdout.rstrip().endswith("False False")
    with pytest.raises(UsageError, match="unknown option '--qick'"):
        dispatch(["doctor", "--qick"])


NO_TORCH = """
    import sys
    class Hook:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {names}:
                raise {error}
    sys.meta_path.insert(0, Hook())
"""


def test_torch_missing_is_a_finding_and_no_traceback(here: Path):
    hook = NO_TORCH.format(
        names=("torch", "triton"), error='ModuleNotFoundError(f"No module named {name!r}", name=name)'
    )
    done = run("output.trackers=[wandb]", "--json", folder=here, before=hook)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [row for row in rows if row.get("status") == "bad"]
    assert [row["name"] for row in bad] == ["torch", "packages"]
    assert "not installed" in bad[0]["found"]
    assert "pip install torch" in bad[0]["advice"]
    assert {row["area"] for row in rows[:-1]} >= {"machine", "disk", "data", "config"}
    assert any(row.get("unchecked") and "as torch does not work" in row["found"] for row in rows)


@pytest.mark.parametrize(
    ("package", "content", "found"),
    [
        ("torch", "raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("torch", "import sys; sys.exit('no')", "SystemExit"),
        ("torch", "__version__ = '2.11.0'", "does not answer"),
        ("triton", "raise ImportError('libtriton.so: undefined symbol')", "undefined symbol"),
    ],
)
def test_a_broken_package_is_a_finding_and_no_traceback(tmp_path: Path, package: str, content: str, found: str):
    broken = tmp_path / "broken" / package
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(content, encoding="utf-8")
    done = run("--json", "--quick", "speed.device=cpu", folder=tmp_path, path=tmp_path / "broken")
    assert "Traceback" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    (row,) = [row for row in rows if row.get("name") == package]
    assert row["status"] == ("bad" if package == "torch" else "warn")
    assert found in row["found"]
    assert done.returncode == (2 if package == "torch" else 0)
    assert not [row for row in rows if "this check broke" in row.get("found", "")]


def test_sigterm_ends_it_with_a_word_and_leaves_nothing(tmp_path: Path):
    slow = tmp_path / "slow" / "torch"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text("print('here', flush=True)\nimport time\ntime.sleep(600)", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{slow.parent}{os.pathsep}{SOURCE}"}
    folder = tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, "-c", CALL, "--quick"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "here\n"
    time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=600)
    assert started.returncode == 143
    assert "terminated" in err
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the doctor itself tries it")
def test_the_trial_of_our_kernels_is_right_in_tritons_interpreter():
    assert check_kernels._our_kernel(torch.device("cpu")) is None


@pytest.mark.slow
def test_compile_is_tried_where_it_is_asked_for(here: Path, capsys: pytest.CaptureFixture[str]):
    _, rows = lines("speed.device=cpu", "speed.compile=default", capsys=capsys)
    (row,) = [row for row in rows if row.get("name") == "torch.compile"]
    assert row["found"].startswith(("works", "does not work"))


@pytest.mark.gpu
def test_on_a_gpu_everything_is_tried_and_right(here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "corpus.txt").write_text("Once upon a time there was a fox. " * 100_000, encoding="utf-8")
    words = [f"data.source={here / 'corpus.txt'}", "train.batch_tokens=65536", "train.steps=20"]
    _, rows = lines("gpt2-124m", *words, "optim.warmup=2", "eval.every=10", "checkpoint.every=10", capsys=capsys)
    found = {row["name"]: row for row in rows[:-1]}
    name = torch.cuda.get_device_name()
    assert name in found["card"]["found"]
    assert found["card"]["status"] == "ok"
    assert not [row for row in rows if row.get("status") == "bad"]
    assert not [row for row in rows if "broke" in row.get("found", "")]
    products = found["products"]
    assert re.match(r"a bf16 matrix product runs at \d+ TFLOP/s", products["found"])
    # Whoever shares the card, or a cap on its power, may take from the rate; both are told by checks of their own.
    alone = found.get("in use", {}).get("status") == "ok" and "throttling" not in found
    assert products["status"] == "ok" or not alone, products
    for trial in ("triton kernels", "cuBLASLt", "torch.compile"):
        assert found[trial]["found"].startswith("works"), found[trial]
    assert "cudnn" in found["attention"]["found"]
    assert found["a step"]["status"] == "ok"
    if "H200" in name:
        assert "at least" in found["least time"]["found"]
        assert found["generation"]["found"].startswith("Hopper")
        assert found["fp8 products"]["found"].startswith("works")
