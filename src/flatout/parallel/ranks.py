"""One of several processes that train a model together, on torch.distributed.

Device tensors go by NCCL where every process has a GPU of its own, else by gloo; numbers of the host always by gloo.
Values of the host travel as JSON, never pickled.

Contract: an error before training is printed by one process, with its rank where the others did not have it, and all
of them leave with its exit code. While training goes on, a process that is lost ends the wait of the others: gloo and
NCCL give up after `timeout`, and whoever started the processes ends those that are left.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

import flatout
from flatout.config.alike import different_settings, digest, odd_rank
from flatout.errors import UsageError, UserError
from flatout.launch import START, Launch, LostRankError, OtherProcessError, in_thread
from flatout.pulse import Pulse, State, pulse
from flatout.world import World

_LEAVE = datetime.timedelta(seconds=5)


@dataclasses.dataclass(frozen=True)
class Ranks(World):
    """`store` is where processes leave words for each other."""

    _: dataclasses.KW_ONLY
    store: Store
    timeout: float = 600.0  # seconds that another process is waited for
    _turns: Iterator[int] = dataclasses.field(default_factory=itertools.count, repr=False, compare=False)

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        with self.pulse.waiting():
            dist.all_reduce(total)
        return total

    def follow_first(self, value: Tensor) -> None:
        with self.pulse.waiting():
            dist.broadcast(value, src=0)

    def totals(self, numbers: Sequence[int]) -> list[int]:
        total = torch.tensor(numbers, dtype=torch.int64)
        with self.pulse.waiting():
            dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode("utf-8")
        sizes = [0] * self.size
        sizes[self.rank] = len(data)
        sizes = self.totals(sizes)
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self.pulse.waiting():
            dist.all_gather(rows, own)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 (raised again below, or by another process)
            failed = error
        codes = self.gather(None if failed is None else [type(failed).__name__, str(failed), exit_code_of(failed)])
        where = [rank for rank, code in enumerate(codes) if code is not None]
        if not where:
            return
        # A process of which another failed leaves with its code. Where one of those is the cause, it speaks.
        causes = [rank for rank in where if codes[rank][0] != OtherProcessError.__name__] or where
        if failed is None or self.rank != causes[0]:
            self.pulse.set_state(State.LOST)
            raise OtherProcessError(codes[causes[0]][2]) from failed
        # Where it was the first one's turn, the others have not tried.
        tried = [code for code in codes if code is None or code[0] != OtherProcessError.__name__]
        alike = all(code == tried[0] for code in tried) and (tried == codes or len(set(self.hosts)) == 1)
        raise self.named(failed) if isinstance(failed, UserError) and not alike else failed

    def named(self, error: UserError) -> UserError:
        """The same error, with the rank that had it."""
        named = type(error)(f"rank {self.rank} on {socket.gethostname()}: {error.message}", error.hint)
        named.exit_code = error.exit_code
        return named

    @contextlib.contextmanager
    def rank0_first(self) -> Iterator[None]:
        turn, firsts = next(self._turns), sorted({self.hosts.index(host) for host in self.hosts})
        first_here = self.hosts.index(self.hosts[self.rank])
        for before in {0, first_here} if self.rank != first_here else {0} - {self.rank}:
            self._wait_for(f"turn/{turn}/{before}")
        word = "failed"
        try:
            yield
            word = "passed"
        finally:
            if self.rank == first_here:
                self.store.set(f"turn/{turn}/{self.rank}", word)
        for first in firsts:  # another host may take hours, too, longer than a collective waits
            self._wait_for(f"turn/{turn}/{first}")

    def _wait_for(self, key: str) -> None:
        """Waits as long as it takes: the first process may have data to prepare for hours.

        By asking, because torch prints a warning whenever a wait of its own runs out. A store that does not answer is
        waited for as long as other ranks are.
        """
        pause = 0.01
        with self.pulse.waiting():
            while not (word := self._asked(key)):
                time.sleep(pause)
                pause = min(1.0, 1.2 * pause)
        if word != b"passed":
            raise OtherProcessError

    def _asked(self, key: str) -> bytes:
        """A value of the store; empty where there is none."""
        try:
            return in_thread(lambda: self.store.get(key) if self.store.check([key]) else b"").result(self.timeout)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"the store timed out after {self.timeout:g} s") from error


def exit_code_of(error: Exception) -> int:
    return error.exit_code if isinstance(error, UserError) else 1


@contextlib.contextmanager
def joined(
    found: Launch | None, asked_device: str, *, timeout: float, settings: Mapping[str, Any] | None = None
) -> Iterator[World]:
    """The world of this process: itself alone, or all that a launcher started.

    Processes with different `settings` are refused. A collective that waits longer than `timeout` seconds is an error.
    """
    if found is None:
        yield World()
        return
    join = found.patience(timeout)
    store = _meet(found, join)
    backend = _backend(found, asked_device)
    hosts = _check_alike(found, store, join, backend=backend, settings=settings or {})
    own_pulse = pulse()
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=found.rank,
            world_size=found.size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        own_pulse.set_state(State.WORKING)
        yield Ranks(found.rank, found.size, found.local, own_pulse, store=store, hosts=hosts, timeout=timeout)
        own_pulse.set_state(State.ENDED)
    except RuntimeError as error:
        if not _is_about_others(error, own_pulse):
            raise
        late = re.search(r"time(d )?out|timed out", str(error), re.IGNORECASE) is not None
        own_pulse.set_state(State.TIMED_OUT if late else State.LOST)
        if found.attempt is not None:  # the agent sees which rank it was, and says so
            raise OtherProcessError(1) from error
        raise _lost(found.rank, error) from error
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # others may be gone already
                dist.destroy_process_group()


def _is_about_others(error: RuntimeError, own_pulse: Pulse) -> bool:
    """Whether an error says that other ranks do not answer: gloo has no class for it, but names its own source."""
    named = "NCCL" in str(error) or "/gloo/" in str(error)  # in torch's FSDP the pulse does not know that we wait
    return isinstance(error, dist.DistError) or own_pulse.state is State.WAITING or named


def _lost(rank: int, error: RuntimeError) -> LostRankError:
    reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0] or str(error)
    return LostRankError(
        f"rank {rank} on {socket.gethostname()} gets no answer from another rank: {reason}",
        "see what the others say; the same command with --resume auto goes on from the last checkpoint, and "
        "`flatout train --gpus N` does that by itself",
    )


def _meet(found: Launch, join: float) -> Store:
    """The store that all processes see."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    wait, attempt = datetime.timedelta(seconds=join), found.attempt
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by whoever started the processes

    def opened() -> Store:
        if found.rank or served:
            return next(rendezvous("env://", found.rank, found.size, timeout=wait))[0]
        # An error names the missing ranks later: torch's own wait for all clients only counts them.
        listen = None if attempt is None else attempt.listen
        more = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen}
        return TCPStore(host, int(port), found.size, timeout=wait, **more)

    try:
        store = in_thread(opened).result(join + _LEAVE.total_seconds())
    except (dist.DistError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0] or "no answer"
        if found.rank and "EADDRINUSE" not in reason:
            raise _unreachable(found, reason) from error
        hint = "set MASTER_ADDR to this host and MASTER_PORT (torchrun: --master-port) to a free port"
        raise UsageError(f"rank 0 cannot open {host}:{port}: {reason}", hint) from error
    return PrefixStore("flatout" if attempt is None else f"flatout/{attempt.name}", store)


def _unreachable(found: Launch, reason: str) -> UserError:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    hint = f"check that rank 0 runs on {host} and that no firewall closes the port"
    return _about_absent(found, UsageError(f"rank {found.rank} cannot reach rank 0 at {host}:{port}: {reason}", hint))


def refuse(found: Launch, error: UserError) -> UserError:
    """The error that a process raises for one that it has before it meets the others, such as in its config.

    All processes see the errors of all. The first that has one prints its error.
    """
    try:
        _check_alike(found, _meet(found, START), START, error=error)
    except UserError as seen_by_all:
        return seen_by_all
    return error


def _check_alike(found: Launch, store: Store, join: float, **own: Any) -> tuple[str, ...]:
    """Waits for all processes and compares what they run and with which settings; returns their hosts."""
    try:
        return in_thread(lambda: _compared(found, store, join, **own)).result(join + 2 * _LEAVE.total_seconds())
    except TimeoutError as error:
        raise _unreachable(found, "it has stopped answering") from error


def _compared(
    found: Launch,
    store: Store,
    join: float,
    *,
    backend: str = "",
    settings: Mapping[str, Any] | None = None,
    error: UserError | None = None,
) -> tuple[str, ...]:
    own: dict[str, Any] = {"host": socket.gethostname(), "flatout": flatout.__version__, "torch": torch.__version__}
    own |= {"backend": backend, "settings": digest(settings or {})}
    if error is not None:
        own["error"] = [error.message, error.hint, error.exit_code]
    keys = [f"here/{rank}" for rank in range(found.size)]
    store.set(f"settings/{found.rank}", json.dumps(settings))  # read only where the hashes differ
    store.compare_set(keys[found.rank], "", json.dumps(own))
    try:
        store.wait(keys, datetime.timedelta(seconds=join))
    except dist.DistStoreError:  # whoever is first to give up says so to all; who comes later finds it there
        for key in keys:
            store.compare_set(key, "", json.dumps({"late": join}))
    all_facts = [json.loads(store.get(key)) for key in keys]
    refusal = _refusal(all_facts)
    if refusal is not None:
        teller, refused = refusal
        came = [rank for rank, facts in enumerate(all_facts) if "late" not in facts]
        _leave_together(found, store, came)
        if len(came) < found.size and not any("error" in facts for facts in all_facts):
            refused = _about_absent(found, refused)
        raise refused if found.rank == teller else OtherProcessError(refused.exit_code)
    hosts = tuple(facts["host"] for facts in all_facts)
    odd = odd_rank([facts["settings"] for facts in all_facts])
    if odd is not None:
        first, other = (json.loads(store.get(f"settings/{rank}")) for rank in (0, odd))
        _leave_together(found, store, range(found.size))
        refused = different_settings(first, other, (f"rank 0 on {hosts[0]}", f"rank {odd} on {hosts[odd]}"))
        # Once on every host: the user has to say which one is wrong.
        raise refused if found.local == 0 else OtherProcessError(refused.exit_code)
    return hosts


def _about_absent(found: Launch, error: UserError) -> UserError:
    """Ranks that do not come are a wrong start. Where they have come before, one of them hangs or is stopped: the agent
    sees which, and starts all again."""
    if not found.resumes or found.attempt is None:
        return error
    pulse().set_state(State.TIMED_OUT)
    return OtherProcessError(1)


def _refusal(all_facts: Sequence[dict[str, Any]]) -> tuple[int, UserError] | None:
    """The error that ends the start, and the rank that raises it: the first with an error, or one that came."""
    errors = [(rank, facts["error"]) for rank, facts in enumerate(all_facts) if "error" in facts]
    if errors:
        rank, (message, hint, code) = errors[0]
        alike = len(errors) == len(all_facts) and all(error == errors[0][1] for _, error in errors)
        error = UserError(message if alike else f"rank {rank} on {all_facts[rank]['host']}: {message}", hint)
        error.exit_code = code
        return rank, error
    missing = [str(rank) for rank, facts in enumerate(all_facts) if "late" in facts]
    if missing:
        waited = next(facts["late"] for facts in all_facts if "late" in facts)
        came = f"{len(all_facts) - len(missing)} of {len(all_facts)} processes came within {waited:g} s"
        hint = "look at what the missing ones say; parallel.timeout gives other hosts more time"
        first = next(rank for rank, facts in enumerate(all_facts) if "late" not in facts)
        return first, UsageError(f"{came}: rank {', '.join(missing)} did not", hint)
    for name in ("flatout", "torch"):
        other = next((rank for rank, facts in enumerate(all_facts) if facts[name] != all_facts[0][name]), None)
        if other is not None:
            theirs = all_facts[other]
            return 0, UsageError(
                f"rank 0 on {all_facts[0]['host']} has {name} {all_facts[0][name]}, rank {other} on {theirs['host']} "
                f"has {theirs[name]}",
                "install the same versions on all hosts",
            )
    without = [rank for rank, facts in enumerate(all_facts) if "cuda" not in facts["backend"]]
    if without and len(without) < len(all_facts):
        ranks = ", ".join(f"{rank} on {all_facts[rank]['host']}" for rank in without)
        hint = "see `flatout doctor` on that host, or set speed.device=cpu for all"
        return 0, UsageError(f"rank {ranks} sees no GPU, and others do", hint)
    return None


def _leave_together(found: Launch, store: Store, came: Sequence[int]) -> None:
    """Rank 0 serves the store, and leaves when all that came have read from it, or after a while."""
    with contextlib.suppress(RuntimeError):
        store.set(f"read/{found.rank}", "1")
        if found.rank == 0:
            store.wait([f"read/{rank}" for rank in came], _LEAVE)


def _backend(found: Launch, asked_device: str) -> str:
    """NCCL wants a GPU for every process: several that share one use gloo."""
    kind, _, index = asked_device.partition(":")
    if kind not in ("auto", "cuda") or not torch.cuda.is_available():
        return "gloo"
    shared = index and found.local_size > 1
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
