"""Programs of strangers in a child process: what they may take, and that nothing else is lost with them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flatout import confined
from flatout.confined import Child, ChildLimits, Exceeded
from flatout.errors import ResourceError


def patterns(**limits: float) -> Child:
    return Child("tests.matching", ("tests",), limits=ChildLimits(**{"seconds": 0.1, **limits}))


@pytest.fixture(scope="module")
def child():
    made = patterns()
    yield made
    made.close()


def ask(child: Child, pattern: str, *paths: str) -> list[int]:
    return child.ask({"pattern": pattern, "paths": list(paths)})


def test_it_answers_and_is_there_for_the_next_request(child):
    assert ask(child, "a+", "aa", "b", "a") == [0, 2]
    process = child._process
    assert ask(child, "b", "aa", "b") == [1]
    assert child._process is process


@pytest.mark.skipif(sys.platform == "win32", reason="limits are those of POSIX")
def test_time_ends_and_the_next_request_is_answered(child):
    with pytest.raises(Exceeded, match=r"takes more than 0\.1 s of processor time"):
        ask(child, "(a+)+b", "a" * 60)
    assert ask(child, "a+", "aa") == [0]


def test_the_clock_ends_what_the_system_does_not():
    slow = patterns(seconds=1000, patience=1.0)
    with pytest.raises(Exceeded, match=r"takes more than 1 s$"):
        ask(slow, "(a+)+b", "a" * 60)
    slow.close()


def test_an_answer_that_is_too_long_is_not_read():
    short = Child("tests.matching", ("tests",), limits=ChildLimits(output=100, output_times=0))
    assert ask(short, "a", "a") == [0]
    with pytest.raises(Exceeded, match="writes more than 100 bytes"):
        ask(short, "a", *["a"] * 500)
    assert ask(short, "a", "a") == [0]
    short.close()


def test_what_breaks_the_child_is_told(child):
    with pytest.raises(Exceeded, match="breaks the process"):
        ask(child, "(", "a")
    assert ask(child, "a", "a") == [0]


def test_threads_and_forks_do_not_mix_their_answers(child):
    results: dict[int, list[int]] = {}

    def many(number: int) -> None:
        for _ in range(20):
            results[number] = ask(child, str(number), *map(str, range(8)))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] for number in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_has_a_child_of_its_own_even_while_the_parent_s_is_in_use():
    code = (
        "import os, signal\n"
        "from flatout.confined import Child\n"
        "child = Child('tests.matching', ('tests',))\n"
        "request = {'pattern': 'a', 'paths': ['a']}\n"
        "child.ask(request)\n"
        "with child._lock:\n"  # as another thread holds it
        "    fork = os.fork()\n"
        "    if fork == 0:\n"
        "        signal.alarm(20)\n"
        "        os._exit(child.ask(request)[0] + 7)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7\n"
        "process = child._process\n"
        "assert child.ask(request) == [0] and child._process is process, 'the parent kept its own'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_signals_that_are_for_the_parent_do_not_end_the_child(child):
    assert ask(child, "a", "a") == [0]
    process = child._process
    assert os.getpgid(process.pid) != os.getpgid(0), "a closed terminal signals a whole group"
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(process.pid, number)
    assert ask(child, "a", "a") == [0]
    assert child._process is process


def test_an_answer_that_is_no_json_is_not_the_request_s_fault(child, monkeypatch):
    assert ask(child, "a", "a") == [0]
    monkeypatch.setattr(confined, "_receive", lambda pipe, most: json.loads("{"))
    with pytest.raises(Exceeded, match="breaks the process"):
        ask(child, "a", "a")
    assert child._process is None


def test_an_exit_is_no_limit_where_the_system_has_no_signal_for_it(monkeypatch):
    monkeypatch.delattr(signal, "SIGXCPU", raising=False)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    assert patterns()._why_gone(ended, 1) == "breaks the process that runs it"


@pytest.mark.parametrize("executable", ["", None])
def test_without_a_program_of_its_own_python_is_found_on_the_path(executable, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    odd = patterns()
    assert ask(odd, "a", "a") == [0]
    odd.close()


@pytest.mark.parametrize("executable", ["/nowhere/python", "false"])
def test_without_any_python_it_says_so(executable, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ResourceError, match="no Python could be started"):
        ask(patterns(), "a", "a")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_the_child_ends_with_its_parent_and_knows_no_torch():
    code = (
        "from flatout.data.chat_template import ChatTemplate, child\n"
        "assert ChatTemplate('x', {'default': '{{ 1 }}'}, {}).render([]) == '1'\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(child()._process.pid, flush=True)\n"
        "import os; os._exit(0)\n"  # no farewell at all
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    place = f"/proc/{int(done.stdout)}"
    deadline = time.monotonic() + 600
    while os.path.exists(place) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(place)
