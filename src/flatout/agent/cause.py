"""Why an attempt ended: one of its ranks is the cause, the others followed. What is told, and whether to try again."""

import contextlib
import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

from flatout.agent.workers import Worker, Workers
from flatout.pulse import State

_STOPS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_RANKED = ("done", "stopped", "refused", "memory", "killed", "host", "frozen", "stuck", "failed", "lost")


@dataclasses.dataclass(frozen=True)
class Cause:
    """`kind`: done, stopped (by a signal, after saving), refused (the user can mend it), memory (a smaller micro-batch
    may fit), killed, frozen (by SIGSTOP), stuck, failed (an error of ours), host (one is gone), lost (got no answer).

    `text` is empty where the rank itself has told what was wrong. `steps` have been begun.
    """

    kind: str
    rank: int
    code: int
    text: str = ""
    stack: Sequence[str] = ()
    steps: int = 0
    micro_batch: int | None = None

    @property
    def ends(self) -> bool:
        """Whether the run ends here, however many restarts are left."""
        # An error before the first step is the same the next time.
        return self.kind in ("done", "stopped", "refused") or (self.kind == "failed" and not self.steps)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "stack": list(self.stack)}


def first_of(causes: Sequence[Cause]) -> Cause:
    """The one that explains the others: those of all hosts, or of all ranks."""
    named = [cause for cause in causes if cause.kind != "done"] or causes
    chosen = min(named, key=lambda cause: (_RANKED.index(cause.kind), cause.rank))
    return dataclasses.replace(chosen, steps=max(cause.steps for cause in causes))


def cause_of(workers: Workers, *, waited: bool = False) -> Cause:
    """Judges what the workers of this host have left, before the last of them are ended.

    `waited`: ranks of other hosts have, and not in vain for one that is only slow.
    """
    waited = waited or any(workers.state(worker) is State.TIMED_OUT for worker in workers.all)
    return first_of([_of_worker(workers, worker, waited) for worker in workers.all])


def _of_worker(workers: Workers, worker: Worker, waited: bool) -> Cause:
    state, code, steps = workers.state(worker), worker.code, workers.step(worker)
    who = f"rank {worker.rank} (pid {worker.process.pid})"
    when = f"in step {steps}" if steps else "before its first step"
    cause = Cause("done", worker.rank, 0, steps=steps)
    if code is None:
        if worker.stopped:
            return dataclasses.replace(cause, kind="frozen", code=1, text=f"{who} was stopped (SIGSTOP) {when}")
        if waited and state in (State.STARTING, State.WORKING):
            stack, text = workers.stack(worker), f"{who} hangs {when}"
            return dataclasses.replace(cause, kind="stuck", code=1, text=text, stack=stack)
        return dataclasses.replace(cause, kind="lost", code=1, text=f"{who} waited for others {when}")
    number = -code if code < 0 else code - 128
    if number in _STOPS:
        return dataclasses.replace(cause, kind="stopped", code=128 + number)
    if code < 0:
        text = f"{who} was killed by {_name(number)} {when}"
        return dataclasses.replace(cause, kind="killed", code=128 + number, text=text)
    if code == 0:
        return cause
    if state is State.OUT_OF_MEMORY:
        size = workers.micro_batch(worker)
        text = f"{who} ran out of memory {when}"
        return dataclasses.replace(cause, kind="memory", code=code, text=text, micro_batch=size)
    if state in (State.LOST, State.TIMED_OUT):
        return dataclasses.replace(cause, kind="lost", code=code, text=f"{who} got no answer from other ranks {when}")
    if code in (2, 3, 4, 5):
        return dataclasses.replace(cause, kind="refused", code=code)
    return dataclasses.replace(cause, kind="failed", code=code, text=f"{who} failed {when}")


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
