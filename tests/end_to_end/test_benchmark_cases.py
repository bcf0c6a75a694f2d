"""A benchmark that may be ended at any time: cases by name, a row as soon as one is done, and rows that stay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
SCRIPT = ROOT / "lab" / "estimate_truth.py"


def start(*words: str, folder: Path) -> subprocess.Popen[str]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    places = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen(command, text=True, cwd=folder, env={**ENVIRONMENT, **places}, **pipes)


def test_a_name_that_is_no_case_is_refused_before_anything_is_done(tmp_path: Path):
    started = start("heathly", folder=tmp_path)
    out, err = started.communicate(timeout=600)
    assert (started.returncode, out) == (2, "")
    assert "no case 'heathly'" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_it_keeps_the_rows_that_are_done(number: int, tmp_path: Path):
    started = start("shakespeare-char-*", "--steps", "4", "--seconds", "0.2", folder=tmp_path)
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
