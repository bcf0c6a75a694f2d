"""The agents of several hosts meet at a store that the agent of host 0 serves, which their workers use, too.

Idea: every attempt has a name of its own, which host 0 writes under `attempt`. Each agent comes with what it knows
(`NAME/came/R`), host 0 puts that together (`NAME/go`), and all start their workers. An agent whose host has failed
writes `NAME/failed`, so that the others need not wait for a time-out, and then `NAME/cause/R`.

A host that was lost comes back by the same command. It finds that it has come to the current attempt before, so that
attempt has failed, and it waits for the next. Host 0 may be lost, too: it comes back with a new store, and what the
others bring along (run folder, restarts) is all it needs.

Contract: a store that does not answer never holds an agent up: its operations run in threads that are given up.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

from flatout.errors import UsageError, UserError
from flatout.launch import Attempt, OtherProcessError, in_thread
from flatout.parallel.agent import AttemptEnd, Hosts, Left, Met, Place

_POLL = 0.2  # seconds
_ANSWER = 5.0  # seconds that the other agents have to say why they ended
_CONNECT = 2  # seconds for one try

Value = TypeVar("Value")


class _SilentError(Exception):
    """The store does not answer."""


@final
class ManyHosts(Hosts):
    """`patience` is how many seconds the hosts have to come, at the start and after a failure."""

    def __init__(self, gpus: int, nodes: int, rank: int, meet: tuple[str, int], patience: float) -> None:
        self._gpus, self._nodes, self._rank, self._meet, self._patience = gpus, nodes, rank, meet, patience
        self._store: Any = None
        self._name = ""  # of the attempt
        self._names = ["?"] * nodes  # of the hosts
        self._failed = threading.Event()
        self.speaks = rank == 0

    @contextlib.contextmanager
    def meet(self, left: Left, stopping: Callable[[], bool]) -> Iterator[Met]:
        go = self._come({"left": dataclasses.asdict(left)}, stopping)
        counts = go["gpus"]
        place = Place(sum(counts[: self._rank]), self._gpus, sum(counts), *self._meet, agents_store=True)
        left = Left(**go["left"])
        # By itself gloo takes the address that the host's name has, which on many hosts is one of the loopback.
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface_to(*self._meet)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        self._failed.clear()
        over = threading.Event()
        listening = threading.Thread(target=self._listen, args=(over,), daemon=True)
        listening.start()
        try:
            yield place, left, Attempt(self._name, None, left.folder, left.accepted, left.micro_batch), None
        finally:
            over.set()
            listening.join(_ANSWER)  # the process would abort if it ended while the thread asks the store

    def refuse(self, error: UserError) -> UserError:
        """This host has an error before it meets the others: the one of them that has to print it gets it back."""
        try:
            self._come({"error": [error.message, error.hint, error.exit_code]}, lambda: False)
        except UserError as seen_by_all:
            return seen_by_all
        return error

    def failed(self) -> bool:
        return self._failed.is_set()

    def others(self, own: AttemptEnd) -> Sequence[AttemptEnd]:
        good = own.kind in ("done", "stopped")
        if not good:
            self._write(f"{self._name}/failed", True)
        self._write(f"{self._name}/cause/{self._rank}", own.as_json())
        if good and self._rank:
            return ()
        found = self._gathered("cause", _ANSWER)  # host 0 stays for it in any case: the store is here
        causes = [AttemptEnd(**cause) for rank, cause in found.items() if rank != self._rank]
        silent = [rank for rank in range(self._nodes) if rank not in found and rank != self._rank]
        if silent and own.kind == "lost":
            who = ", ".join(f"host {rank} ({self._names[rank]})" for rank in silent)
            causes.append(AttemptEnd("host", own.rank, 1, text=f"{who} does not answer", steps=own.steps))
        return causes

    # --- coming together --------------------------------------------------------------------------------------------

    def _come(self, what: dict[str, Any], stopping: Callable[[], bool]) -> dict[str, Any]:
        """Waits for all hosts and returns what host 0 has put together."""
        until, before = time.monotonic() + self._patience, self._name
        while True:
            self._store = self._connected(until, stopping)
            try:
                return self._come_to(before, what, until, stopping)
            except _SilentError:  # host 0 was lost once more, and may come back with another store
                continue

    def _come_to(self, before: str, what: dict[str, Any], until: float, stopping: Callable[[], bool]) -> dict[str, Any]:
        own = {"host": socket.gethostname(), "gpus": self._gpus, "nodes": self._nodes, **what}
        if self._rank == 0:
            self._name = f"{os.getpid()}-{time.monotonic_ns()}"
            self._write("attempt", self._name)
        else:
            self._name = self._next_attempt(before, until, stopping)
        self._write(f"{self._name}/came/{self._rank}", own)
        if self._rank == 0:
            self._write(f"{self._name}/go", self._put_together(until, stopping))
        go = self._wait(f"{self._name}/go", until + _ANSWER, stopping)
        if go is None:
            raise self._missing("host 0 did not answer")
        self._names = go["names"]
        if go["error"] is not None:
            rank, message, hint, code = go["error"]
            if self._rank == 0:
                self._gathered("read", _ANSWER)  # the store stays until all have read why
            else:
                self._write(f"{self._name}/read/{self._rank}", True)
            error = UserError(message, hint)
            error.exit_code = code
            raise error if rank == self._rank else OtherProcessError(code)
        return go

    def _connected(self, until: float, stopping: Callable[[], bool]) -> Any:
        """A connection to the store, which host 0 opens."""
        if self._rank == 0 and self._store is not None:
            return self._store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from torch import distributed as dist
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = self._meet
        how = {"is_master": self._rank == 0, "timeout": datetime.timedelta(seconds=_CONNECT)}
        while True:
            opening = None
            try:
                if self._rank:
                    socket.create_connection((host, port), _CONNECT).close()  # torch is asked where something listens
                opening = in_thread(lambda: TCPStore(host, port, wait_for_workers=False, **how))
                # Something silent keeps it for ever. Otherwise it ends by itself, and the process must not end before.
                least = time.monotonic() + 2 * _CONNECT
                while not opening.done() and (time.monotonic() < least or self._waits(until, stopping)):
                    time.sleep(_POLL / 4)
                return opening.result(timeout=0)
            except (dist.DistError, OSError, ValueError) as error:
                silent = opening is not None and not opening.done()
                why = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
                reason = "what listens there does not answer" if silent else why
                if self._rank == 0:
                    busy = "EADDRINUSE" in reason or "in use" in reason
                    hint = "give another port in --meet, the same on all hosts" if busy else "check --meet"
                    raise UsageError(f"host 0 cannot open {host}:{port}: {reason}", hint) from error
                if not self._waits(until, stopping):
                    raise self._missing(f"cannot reach host 0 at {host}:{port}: {reason}") from error
                time.sleep(_POLL)

    def _waits(self, until: float, stopping: Callable[[], bool]) -> bool:
        return time.monotonic() <= until and not stopping()

    def _next_attempt(self, before: str, until: float, stopping: Callable[[], bool]) -> str:
        """The name of an attempt that this host has not come to yet, unless it was just now."""
        returned = False
        while time.monotonic() < until and not stopping():
            name = self._wait("attempt", until, stopping)
            if name is None:
                break
            new = name != before
            if new and (name == self._name or not self._asked(f"{name}/came/{self._rank}")):
                return name
            if new and not returned:  # this host was lost in the middle of an attempt
                returned, until = True, time.monotonic() + self._patience
                self._write(f"{name}/failed", True)
            time.sleep(_POLL)
        raise self._missing("host 0 has not started another attempt")

    def _put_together(self, until: float, stopping: Callable[[], bool]) -> dict[str, Any]:
        came = [self._wait(f"{self._name}/came/{rank}", until, stopping) for rank in range(self._nodes)]
        missing = [str(rank) for rank, facts in enumerate(came) if facts is None]
        here = [facts for facts in came if facts is not None]
        go: dict[str, Any] = {"names": ["?" if facts is None else facts["host"] for facts in came], "error": None}
        errors = [(rank, facts["error"]) for rank, facts in enumerate(came) if facts and "error" in facts]
        other = next((facts for facts in here if facts["nodes"] != self._nodes), None)
        if errors:
            rank, (message, hint, code) = errors[0]
            alike = len(errors) == self._nodes and all(error == errors[0][1] for _, error in errors)
            go["error"] = [rank, message if alike else f"host {rank} ({go['names'][rank]}): {message}", hint, code]
        elif missing:
            came = f"{len(here)} of {self._nodes} hosts came within {self._patience:g} s"
            hint = "give the same command with its --node-rank on each; parallel.timeout waits longer"
            go["error"] = [0, f"{came}: host {', '.join(missing)} did not", hint, 2]
        elif other is not None:
            message = f"host 0 says --nodes {self._nodes}, {other['host']} says --nodes {other['nodes']}"
            go["error"] = [0, message, "give the same --nodes on all hosts", 2]
        else:
            go["gpus"] = [facts["gpus"] for facts in came]
            known = [facts["left"] for facts in came]
            sizes = [left["micro_batch"] for left in known if left["micro_batch"]]
            best = max(known, key=lambda left: (left["accepted"], left["folder"] is not None, left["restarts"]))
            restarts = max(left["restarts"] for left in known)
            go["left"] = {**best, "micro_batch": min(sizes, default=None), "restarts": restarts}
        return go

    def _missing(self, what: str) -> UsageError:
        hint = "check that the same command runs on host 0 with --node-rank 0, and that no firewall closes the port"
        return UsageError(f"host {self._rank} ({socket.gethostname()}): {what}", hint)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _wait(self, key: str, until: float, stopping: Callable[[], bool]) -> Any:
        """A value of the store; None where it does not come in time."""
        while True:
            value = self._asked(key)
            if value:
                return json.loads(value)
            if time.monotonic() > until or stopping():
                return None
            if value is None:
                raise _SilentError
            time.sleep(_POLL)

    def _asked(self, key: str) -> bytes | None:
        """A value of the store: empty where there is none, None where the store does not answer."""
        return _answer(lambda: self._store.get(key) if self._store.check([key]) else b"", _ANSWER)

    def _write(self, key: str, value: Any) -> None:
        _answer(lambda: self._store.set(key, json.dumps(value)), _ANSWER)

    def _gathered(self, key: str, seconds: float) -> dict[int, Any]:
        """The values of agents under a key, as far as they come in time."""
        until, found = time.monotonic() + seconds, dict[int, Any]()
        while len(found) < self._nodes - (key == "read") and time.monotonic() < until:
            for rank in set(range(self._nodes)) - set(found):
                value = self._asked(f"{self._name}/{key}/{rank}")
                if value:
                    found[rank] = json.loads(value)
                if value is None:
                    return found
            time.sleep(_POLL / 4)
        return found

    def _listen(self, over: threading.Event) -> None:
        """Sets `failed` when another agent says so, or when the store is gone."""
        store, key = self._store, f"{self._name}/failed"
        while not over.wait(2 * _POLL):
            try:
                failed = store.check([key])
            except RuntimeError:
                failed = True
            if failed:
                self._failed.set()
                return


def _answer(ask: Callable[[], Value], seconds: float) -> Value | None:
    """The result of `ask`, or None where it fails or takes too long."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        return in_thread(ask).result(seconds)
    return None


def _interface_to(host: str, port: int) -> str | None:
    """The network interface by which this host reaches another, or which has that address; None where it is unknown."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                get_address = 0x8915  # SIOCGIFADDR
                with contextlib.suppress(OSError):  # one without an address
                    found = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(found[20:24]) == address:
                        return name
    except (ImportError, OSError):
        pass
    return None
