"""Benchmarks whose machine is lent by the minute: cases by name, a row as soon as one is done, and rows that stay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
SMALL = ["--preset", "shakespeare-char", "speed.device=cpu", "train.batch_tokens=256", "model.layers=1", "--steps", "1"]
FAULTS, TRUTH = "profile_faults.py", "estimate_truth.py"


def start(script: str, *words: str, folder: Path) -> subprocess.Popen[str]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    places = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen(command, text=True, cwd=folder, env={**ENVIRONMENT, **places}, **pipes)


def run(script: str, *words: str, folder: Path) -> tuple[int, list[dict], str]:
    out, err = (started := start(script, *words, folder=folder)).communicate(timeout=6000)
    return started.returncode, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("script", [FAULTS, TRUTH])
def test_a_name_that_is_no_case_is_refused_before_anything_is_done(script: str, tmp_path: Path):
    code, rows, err = run(script, "heathly", folder=tmp_path)
    assert (code, rows) == (2, [])
    assert "no case 'heathly'" in err


@pytest.mark.slow
def test_faults_by_name_in_any_order_with_settings_between(tmp_path: Path):
    code, rows, err = run(FAULTS, "slow-loader", *SMALL, "healthy", "--out", "kept", folder=tmp_path)
    assert [row["case"] for row in rows] == ["healthy", "slow-loader"]
    assert [row["right"] for row in rows] == [True, True]
    assert code == 0
    assert rows[1]["data"] > 0.5, "late by two of its own steps, without the healthy case having been asked for"
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"healthy", "slow-loader"}
    assert "2 of 2 bottlenecks were named" in err


@pytest.mark.slow
def test_a_case_that_breaks_is_a_row_and_the_next_one_follows(tmp_path: Path):
    # Settings come after a case's own words, and our kernels are for CUDA.
    code, rows, err = run(FAULTS, "healthy", "no-compile", *SMALL, "speed.kernels=triton", folder=tmp_path)
    assert [row["case"] for row in rows] == ["healthy", "no-compile"]
    assert all("speed.kernels is triton" in row["error"] and not row["right"] for row in rows)
    assert code == 1
    assert "Traceback" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("script", "words"),
    [(FAULTS, ["healthy", "no-compile", "slow-loader", *SMALL]), (TRUTH, ["shakespeare-char-*", "--steps", "4"])],
)
def test_whoever_ends_it_keeps_the_rows_that_are_done(script: str, words: list[str], number: int, tmp_path: Path):
    seconds = ["--seconds", "0.2"] if script == TRUTH else []
    started = start(script, *words, *seconds, folder=tmp_path)
    assert started.stdout is not None
    first = json.loads(started.stdout.readline())
    assert "error" not in first
    started.send_signal(number)
    rest, err = started.communicate(timeout=600)
    assert rest == ""
    if number == signal.SIGTERM:
        assert started.returncode == 143
        assert "terminated; the cases above are done" in err
        assert list((tmp_path / "temporary").iterdir()) == [], "nothing is left behind"
    else:
        assert started.returncode == -signal.SIGKILL
