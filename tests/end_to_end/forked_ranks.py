"""`flatout train --gpus N` whose ranks are forks of their agent, as the agent is one of a process with torch in it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, final

from flatout import cli
from flatout.parallel import agent
from tests.end_to_end.forked import open_streams


def train_in_forks(words: Sequence[str]) -> int:
    """The command. What is replaced here stays so in this process."""
    agent.subprocess = _Subprocess
    return cli.main(["train", *words])


@final
class _Rank:
    """What the agent asks of a Popen."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        **_: Any,
    ) -> None:
        sys.stdout.flush()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(words[words.index("flatout") + 1 :], env, stdout, None if stderr is None else writer, pass_fds)
        os.close(writer)
        self.stderr: IO[bytes] | None = os.fdopen(reader, "rb")
        if stderr is None:
            self.stderr.close()
            self.stderr = None

    def wait(self, timeout: float | None = None) -> int:
        """Without `timeout`: a process that was killed ends."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Subprocess:
    """The module, as the agent sees it."""

    Popen, DEVNULL, PIPE, TimeoutExpired = _Rank, subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired


def _be_rank(
    words: Sequence[str], env: Mapping[str, str], stdout: int | None, stderr: int | None, pass_fds: Sequence[int]
) -> None:
    """What a process that is started anew would find: a session, files, signals and variables of its own.

    It ends without what the agent would do at its end, such as removing its temporary folder.
    """
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, place in enumerate([nowhere, nowhere if stdout == subprocess.DEVNULL else None, stderr]):
            if place is not None:
                os.dup2(place, number)
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *pass_fds}:
            with contextlib.suppress(OSError):
                os.close(number)
        open_streams()
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # found anew, by this environment
        from tests.end_to_end.faults import sitecustomize  # noqa: F401 (its faults, by this environment)

        code = cli.main(words)
    except BaseException:  # noqa: BLE001 (nothing of the agent may go on here)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
