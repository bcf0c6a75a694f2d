"""Cores: who uses them, and with how many threads a run computes."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import torch

from flatout import host
from flatout.device import cpu_threads
from flatout.host import CoreClock, ThreadTrial, candidates, core_clock, core_use, usable_cores, whole_cores
from flatout.resolve.case import shape_of, try_threads


def clock(now: float, **seconds: float | None) -> CoreClock:
    return CoreClock(**{"now": now, "own": 0.0, "busy": 0.0, "waited": 0.0, **seconds})


def test_what_cores_did_between_two_readings():
    used = core_use(clock(0.0), clock(10.0, own=12.0, busy=20.0, waited=15.0))
    assert used is not None
    assert (used.busy, used.others, used.waiting) == pytest.approx((2.0, 0.8, 1.5))
    assert core_use(clock(0.0), clock(0.01)) is None, "the system counts in hundredths of a second"
    untold = core_use(clock(0.0), clock(10.0, busy=None, waited=None))
    assert untold is not None
    assert (untold.busy, untold.others, untold.waiting) == (None, None, None)
    ended = core_use(clock(0.0, waited=9.0), clock(10.0, own=30.0, busy=20.0, waited=2.0))
    assert ended is not None
    assert (ended.others, ended.waiting) == (0.0, 0.0), "threads that have ended take their seconds along"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_this_process_is_not_among_the_others():
    before = core_clock()
    ends = time.process_time() + 0.2
    while time.process_time() < ends:
        pass
    after = core_clock()
    used = core_use(before, after)
    assert used is not None
    assert used.busy is not None
    assert used.others is not None
    assert (used.busy - used.others) * (after.now - before.now) >= 0.15, "however long it waited for a core"
    assert used.waiting is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_processes_that_it_started_are_not_among_the_others():
    spends = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spends!r}])"]
    before = core_clock()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        alive = core_clock()
        assert alive.own - before.own >= 0.25, "while a child of a child is there"
        child.communicate("\n")
    ended = core_clock()
    assert ended.own >= alive.own - 0.05, "and when it has ended"


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000", "cpu.stat": "usage_usec 7500000"},
        {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000", "cpuacct/cpuacct.usage": "7500000000"},
    ],
    ids=["v2", "v1"],
)
def test_a_container_with_a_quota_tells_of_itself_not_of_its_host(files, monkeypatch):
    monkeypatch.setattr(host, "first_line_of", lambda path: files.get(path.removeprefix("/sys/fs/cgroup/"), ""))
    monkeypatch.setattr(host, "_processors", lambda: set(range(64)))
    assert usable_cores() == 1.5
    assert core_clock().busy == 7.5
    monkeypatch.setattr(host, "_processors", lambda: {0})
    assert usable_cores() == 1.0, "its affinity allows less"
    assert core_clock().busy != 7.5


def test_numbers_of_threads_that_are_tried():
    assert [candidates(cores) for cores in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert 1 <= whole_cores() <= max(1, usable_cores()) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("seconds", "others", "chosen"),
    [
        ({1: 1.0, 2: 0.55}, 0.0, 2),
        ({1: 1.0, 2: 3.5}, 0.0, 1),
        ({1: 1.0, 2: 0.98}, 0.0, 1),  # as good: fewer threads wait for fewer cores
        ({1: 1.0, 2: 0.55}, 1.6, 1),  # others use the second core
        ({1: 1.0, 2: 0.55}, 0.3, 2),
        ({1: 1.0, 2: 0.55}, None, 2),
        ({1: 1.0, 2: 0.55}, 5.0, 1),
    ],
)
def test_the_fastest_number_of_threads_that_find_a_core(seconds, others, chosen):
    trial = ThreadTrial(seconds=seconds, cores=2, others=others)
    assert trial.chosen == chosen
    assert trial.busy == ("speed.threads=2" in trial.why)


def test_threads_are_borrowed():
    before = torch.get_num_threads()
    with contextlib.suppress(ValueError), cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ValueError
    assert torch.get_num_threads() == before


def test_a_trial_leaves_torch_as_it_was_and_is_made_once(monkeypatch):
    try_threads.cache_clear()
    monkeypatch.setattr("flatout.resolve.case.whole_cores", lambda: 2)
    before, state = torch.get_num_threads(), torch.get_rng_state()
    trial = try_threads(*shape_of(None))
    assert set(trial.seconds) == {1, 2}
    assert trial.chosen in (1, 2)
    assert try_threads(*shape_of(None)) is trial
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    try_threads.cache_clear()
