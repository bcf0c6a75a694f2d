"""Programs of strangers in a child process with limits: chat templates, and files of tokenizers.

A template or a tokenizer that comes with a model can run for years or ask for all memory there is, and its
text does not show it. So it never runs in this process. A small child process runs it, with limits on processor time,
memory and the length of its answer. A program that exceeds a limit raises `Exceeded`, and its process is killed.

The child answers requests of one module: `answer(request)`, JSON in and JSON out. It imports that module and nothing of
torch, starts in about a tenth of a second, and ends with the pipe that it reads from. Whoever is done with a child for
now closes it: none should wait beside a training.

Trap: macOS does not enforce the limit on memory, and Windows has none of these limits. There the clock of this process
ends a child that takes too long, and nothing but the machine bounds its memory.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

from flatout.errors import ResourceError

_START = "import sys; sys.path += sys.argv[2:]; from flatout.confined import serve; serve(sys.argv[1])"
_READY = "ready"
_BROKEN = "breaks the process that runs it"


class Exceeded(Exception):  # no UserError: only the caller knows whose program it was, and what to use instead
    """A program exceeded a limit; the message continues "it ..."."""


@dataclass(frozen=True)
class ChildLimits:
    """What one request may take.

    `seconds` is processor time; `patience` is by the clock, for busy machines. The answer may have `output` bytes of
    JSON, and `output_times` as many as the request besides: JSON spells a character of other scripts in six bytes, and
    some templates spell it so again.
    """

    seconds: float = 5
    patience: float = 60.0
    memory: int = 2**30
    output: int = 2**18
    output_times: int = 16


@final
class Child:
    """A process that answers requests, started with the first one, and anew after it was ended."""

    def __init__(self, module: str, packages: Sequence[str] = (), limits: ChildLimits | None = None) -> None:
        """`packages` are those that the module imports beside Python's own library."""
        self._module = module
        self._packages = packages
        self.limits = limits or ChildLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = float("inf")
        self._late = False
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def ask(self, request: Any, parts: int = 1, *, seconds: float | None = None) -> Any:
        """The answer of the child. `parts` is the number of answers in one, `seconds` another limit on its time."""
        seconds = self.limits.seconds if seconds is None else seconds
        content = _packed([seconds, request])
        most = parts * (self.limits.output + self.limits.output_times * len(content))
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            self._deadline = time.monotonic() + self.limits.patience
            try:
                _send(process.stdin, content)
                status, value = _receive(process.stdout, most)
            except _TooLong:
                self._kill()
                raise Exceeded(f"writes more than {most:,} bytes") from None
            except (OSError, EOFError):
                raise Exceeded(self._why_gone(process, seconds)) from None
            except (ValueError, TypeError, RecursionError):  # no answer of `serve`; the request was packed before
                self._kill()
                raise Exceeded(_BROKEN) from None
            except BaseException:  # an interrupt: what the child still writes belongs to no request
                self._kill()
                raise
            finally:
                self._deadline = float("inf")
        if status == "memory":
            raise Exceeded(f"needs more than {self.limits.memory / 2**20:,.0f} MiB of memory")
        return value

    def close(self) -> None:
        """Ends the child, if there is one; the next request starts another."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._late, self._deadline = False, time.monotonic() + self.limits.patience
            self._process = self._start()
            threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        roots = dict.fromkeys(root_of(name) for name in ("flatout", *self._packages))
        words = [_python(), "-I", "-S", "-c", _START, self._module, *roots]
        pipe = subprocess.PIPE
        try:
            # Without buffers, which a fork would have twice; in a session of its own, which no terminal signals.
            process = subprocess.Popen(
                words, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise _no_python() from error
        assert process.stdin is not None
        assert process.stdout is not None
        clock = threading.Timer(self.limits.patience, process.kill)
        clock.start()
        try:
            _send(process.stdin, _packed(self.limits.memory))
            _receive(process.stdout, 100)
        except BaseException as error:
            _forget(process)
            if not isinstance(error, OSError | EOFError | ValueError):
                raise
            raise _no_python() from error
        finally:
            clock.cancel()
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a child that takes too long by the clock; its reader then finds the pipe closed."""
        while process.poll() is None and self._process is process:
            if time.monotonic() > self._deadline:
                self._late = True
                process.kill()
                return
            time.sleep(0.2)

    def _why_gone(self, process: subprocess.Popen[bytes], seconds: float) -> str:
        late, self._process = self._late, None
        code = _forget(process)
        if late:
            return f"takes more than {self.limits.patience:g} s"
        if hasattr(signal, "SIGXCPU") and code == -signal.SIGXCPU:
            return f"takes more than {seconds:.3g} s of processor time"
        return _BROKEN

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _forget(process)

    def _after_fork(self) -> None:
        """In a fork: the process is the parent's, who may be using it and may hold the lock in another thread."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None:
            _close_pipes(process)


def _forget(process: subprocess.Popen[bytes]) -> int:
    """Ends a process and returns its exit code: the one that it ended with before, where it had."""
    _close_pipes(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.2)  # one that reached a limit is about to end, and its code says which
    process.kill()
    return process.wait()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _python() -> str:
    """The program of this Python; inside another program, which has none, the one on the PATH."""
    usual = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return sys.executable or shutil.which(usual) or usual


def _no_python() -> ResourceError:
    return ResourceError(
        "no Python could be started to try out a stranger's program in",
        "make `python3` available on the PATH, in the version that runs Flatout",
    )


def root_of(package: str) -> str:
    """The folder that a package is imported from. The child sees no others: it reads no site-packages of its own."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parents[1])


# --- the child's side -------------------------------------------------------------------------------------------------


def serve(module: str) -> None:
    """Answers requests until the pipe ends."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):  # they are for the parent, which ends this process
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    memory = _receive(source, 100)
    answer: Callable[[Any], Any] = importlib.import_module(module).answer
    for kind, most in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_AS", memory)):
        _limit(kind, most)
    _send(target, _packed(_READY))
    with contextlib.suppress(EOFError):
        while True:
            seconds, request = _receive(source, 2**62)
            # The limit of the operating system is on all that the process ever took, and counts in whole seconds.
            _limit("RLIMIT_CPU", math.ceil(time.process_time() + seconds))
            try:
                content = _packed(["done", answer(request)])
            except MemoryError:
                content = _packed(["memory", None])
            _send(target, content)


def _limit(name: str, most: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


# --- both sides -------------------------------------------------------------------------------------------------------


class _TooLong(Exception):
    """A message is longer than its reader takes."""


def _packed(value: Any) -> bytes:
    content = json.dumps(value).encode("ascii")
    return len(content).to_bytes(8, "little") + content


def _send(pipe: IO[bytes], content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[pipe.write(rest) :]
    pipe.flush()


def _receive(pipe: IO[bytes], most: int) -> Any:
    length = int.from_bytes(_exactly(pipe, 8), "little")
    if length > most:
        raise _TooLong
    return json.loads(_exactly(pipe, length))


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = pipe.read(min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
