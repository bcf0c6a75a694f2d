"""Windows and macOS as our modules would see them, on Linux: `pretend("win32")` before flatout is imported.

Idea: our modules get other answers from `os`, `sys` and `signal` than everybody else, and cannot import what the
platform lacks; torch and Python's own library keep what they need. /proc and /sys/fs/cgroup are gone for all.

It shows that nothing breaks for want of a module, a name or a file. It does not show that the real platform behaves as
Linux does in what is left: paths, open files that cannot be replaced, processes, and torch itself are still Linux's.
"""

import builtins
import io
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

UNIX_MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "curses", "syslog", "posix")
_LINUX_NAMES = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create", "pidfd_open", "eventfd")
_UNIX_NAMES = (
    "fork", "forkpty", "getloadavg", "sysconf", "statvfs", "fstatvfs", "getuid", "geteuid", "getgid", "getegid",
    "killpg", "setsid", "getsid", "getpgid", "setpgid", "waitid", "P_PID", "WEXITED", "WNOHANG", "WNOWAIT", "nice",
    "uname", "pread", "preadv", "pwrite", "register_at_fork", "mkfifo", "chown", "fchown", "lchown", "major", "minor",
    "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_SYNC", "get_blocking", "set_blocking", "sendfile",
)  # fmt: skip
_SIGNALS_OF_WINDOWS = {"SIGABRT", "SIGBREAK", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}


class _Seen(types.ModuleType):
    """A module without some of its names, and with other values for some; what is set reaches the real one."""

    def __init__(self, real: types.ModuleType, hidden: set[str], other: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _hidden=hidden, _other=other)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r} here")
        return self._other[name] if name in self._other else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def pretend(platform: str) -> None:
    """From now on modules of ours see `platform`, which is win32 or darwin."""
    windows = platform == "win32"
    names = {name for name in dir(signal) if name.startswith(("SIG", "pthread", "sig")) and name.upper() == name}
    seen: dict[str, types.ModuleType] = {
        "os": _Seen(os, {*_LINUX_NAMES, *(_UNIX_NAMES if windows else ())}, {"name": "nt"} if windows else {}),
        "sys": _Seen(sys, set(), {"platform": platform}),
        "signal": _Seen(signal, names - _SIGNALS_OF_WINDOWS - {"SIG_IGN", "SIG_DFL"} if windows else set(), {}),
    }
    if windows:
        seen["msvcrt"] = _locks_of_windows()
    real_import = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and str((globals or {}).get("__name__", "")).partition(".")[0] == "flatout":
            if windows and name.partition(".")[0] in UNIX_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    _take_away_proc()


def _take_away_proc() -> None:
    real_open, real_listdir = io.open, os.listdir

    def gone(path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(("/proc", "/sys/fs/cgroup"))

    def opened(file: Any, *args: Any, **named: Any) -> Any:
        if gone(file):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return real_open(file, *args, **named)

    def listed(path: Any = ".") -> list[str]:
        if gone(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_listdir(path)

    io.open, builtins.open, os.listdir = opened, opened, listed


def _locks_of_windows() -> types.ModuleType:
    """msvcrt, as far as a file's first byte can be locked by it."""
    import fcntl

    def locking(handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    made = types.ModuleType("msvcrt")
    made.__dict__.update(locking=locking, LK_NBLCK=2)
    return made
