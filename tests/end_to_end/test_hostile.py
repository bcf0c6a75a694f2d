"""Hundreds of folders that mean harm: each is read within 2 GB and 30 s, and ends with a word of ours, not a signal."""

import collections
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from flatout import cli
from tests.end_to_end.forked import Forked
from tests.hostile_folders import hostile_folders
from tests.nasty_inputs import TRAIN, TUNE, Kit, make_kit

# Processor time, so that a busy machine does not matter; by the clock a command may take longer.
SECONDS, PATIENCE = 30, 600
MEMORY = 2 * 10**9
CODES = {0, 2, 3, 4, 5}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return make_kit(tmp_path_factory.mktemp("kit") / "kit")


def call(words: list[str], said: Path) -> str:
    """Runs a command in a process of its own; what is wrong with how it ended, nothing where all is well."""
    said.unlink(missing_ok=True)
    running = Forked(cli.main, words, stdout=os.devnull, stderr=said, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    began, most, wrong = time.monotonic(), 0, ""
    while running.poll() is None and not wrong:
        seconds, memory = _used(running.pid)
        most = max(most, memory)
        if seconds > SECONDS or time.monotonic() > began + PATIENCE:
            wrong = f"took {seconds:.0f} s of processor time"
        elif memory > MEMORY:
            wrong = f"took {memory / 1e9:.1f} GB"
        time.sleep(0.02)
    if wrong:
        for process in _tree(running.pid):
            os.kill(process, signal.SIGKILL)
    code = running.wait(60)
    text = said.read_text(encoding="utf-8", errors="replace")
    if wrong:
        return wrong
    if "Traceback" in text:
        return f"a traceback: {text.strip().splitlines()[-1]}"
    if code not in CODES and not (code == 1 and words[0] in ("watch", "doctor")):
        return f"ended with {code}: {text[-500:]!r}"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if code and words[0] not in ("watch", "doctor") and len(errors) != 1:
        return f"ended with {code} and without one error line: {text[-500:]!r}"
    return ""


def _tree(pid: int) -> list[int]:
    """A process and those that it started, and so on."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        try:
            for task in os.listdir(f"/proc/{found[-1]}/task"):
                left += map(int, Path(f"/proc/{found[-1]}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def _used(pid: int) -> tuple[float, int]:
    """Processor time, and memory of its own: not what it shares with the process that it was forked from."""
    seconds, memory = 0.0, 0
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")  # here: Windows has no sysconf
    for process in _tree(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
        except OSError:
            continue
        seconds += sum(map(int, fields[11:15])) / ticks
        memory += (resident - shared) * page
    return seconds, memory


def meet(kit: Kit, place: Path, seed: int, count: int) -> None:
    failures: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    here = place / "here"
    for number, (name, make) in enumerate(hostile_folders(kit, seed, count)):
        here.mkdir()
        os.chdir(here)
        words = make()
        began = time.monotonic()
        wrong = call(words, place / "said")
        shown = [word for word in words if word not in TRAIN and word not in TUNE]
        print(f"{number} {name} {time.monotonic() - began:.1f} s {shown!r:.200} {wrong:.300}", flush=True)
        counts[name] += 1
        if wrong:
            failures.append(f"seed {seed}, {number} {name}: {shown!r:.300}: {wrong[:900]}")
        os.chdir(place)
        shutil.rmtree(here)
    assert not failures, f"{len(failures)} of {sum(counts.values())}:\n" + "\n".join(failures)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory and time are read from /proc")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_hundred_hostile_folders(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    meet(kit, tmp_path, seed, count=100)
