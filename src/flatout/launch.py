"""How this process was started: alone, or as one of several by torchrun, srun or mpirun. No torch here."""

import dataclasses
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from flatout.errors import UsageError, UserError

Value = TypeVar("Value")
START = 60.0  # seconds in which all processes of one host have started
AGENT = "FLATOUT_AGENT"  # an `Attempt` as JSON, which our agent gives to its workers


class OtherProcessError(UserError):
    """Something went wrong in another of several processes, and that one says so. This one leaves in silence."""

    def __init__(self, exit_code: int = 2) -> None:
        super().__init__("another process of this run failed", "see what it says")
        self.exit_code = exit_code


class LostRankError(UserError):
    """Other ranks are gone, or do not answer."""

    exit_code = 1


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What our agent passes to its workers: which attempt this is, and what earlier ones left.

    `listen` is a socket that is open already, at which rank 0 serves the store. `folder` is the run's, once it was
    chosen; `accepted` is whether an earlier attempt has begun to write there. `micro_batch` is what fits, after an
    earlier attempt ran out of memory. `agent` is the agent's process id, `pulse` the folder of `flatout.pulse`.
    """

    name: str = ""
    listen: int | None = None
    folder: str | None = None
    accepted: bool = False
    micro_batch: int | None = None
    agent: int = 0
    pulse: str | None = None

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among those of a launcher. `restarts` is how often the launcher has started all of them again."""

    rank: int
    size: int
    local: int
    local_size: int
    restarts: int = 0
    attempt: Attempt | None = None  # by our own agent

    def patience(self, timeout: float) -> float:
        """Seconds that all processes have to come: hosts may start one after the other."""
        return START if self.local_size == self.size else max(START, timeout)

    @property
    def folder(self) -> Path | None:
        """The run folder that an earlier attempt has chosen."""
        return None if self.attempt is None or self.attempt.folder is None else Path(self.attempt.folder)

    @property
    def resumes(self) -> bool:
        """Whether this goes on with what an earlier attempt has begun, whatever the command says."""
        return self.restarts > 0 if self.attempt is None else self.attempt.accepted

    def resumed(self, asked: str | None) -> str | None:
        """What the run resumes, where the command said `asked`: started again, the same command resumes."""
        return "auto" if self.resumes and (asked is None or self.attempt is not None) else asked


# (processes, rank, rank on this host, processes on this host), by launcher: torchrun and others like it, SLURM's srun.
_VARIABLES = (
    ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # Open MPI, MPICH: they say nothing of where the first process is


def launch() -> Launch | None:
    """What the launcher says; None where there is none. torchrun with one process counts: it is asked to reduce."""
    for names in _VARIABLES:
        size, rank, local, local_size = (os.environ.get(name, "") for name in names)
        if not size.isdecimal() or (int(size) == 1 and "TORCHELASTIC_RUN_ID" not in os.environ):
            continue
        if names[0].startswith("SLURM"):
            place_of_slurm()
            local_size = re.match(r"\d*", local_size)[0]  # pyright: ignore[reportOptionalSubscript]
        needed = {names[1]: rank, **{name: os.environ.get(name, "") for name in _PLACE}}
        missing = [name for name, value in needed.items() if not value]
        if missing:
            raise UsageError(
                f"{names[0]} says that there are {size} processes, but {' and '.join(missing)} is not set",
                "start them with `flatout train --gpus N` or torchrun, which set all of them; if nothing launched "
                f"several, unset {names[0]}",
            )
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # torch, imported later, warns of every wait that runs out
        count = int(local_size) if local_size.isdecimal() else int(size)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        again = int(restarts) if restarts.isdecimal() else 0
        return Launch(int(rank), int(size), int(local or rank), count, again, attempt_of())
    for name in _OTHERS:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"{size} processes were started by a launcher that Flatout does not know ({name}={size})",
                f"start them by `flatout train --gpus N`, torchrun or srun; if nothing launched several, unset {name}",
            )
    return None


_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def attempt_of() -> Attempt | None:
    """What our agent gave to this process; None where another launcher, or none, has started it."""
    passed: Any = json.loads(os.environ.get(AGENT, "null"))
    return None if passed is None else Attempt(**passed)


def place_of_slurm() -> None:
    """srun says which hosts there are: the first one is where processes meet, at a port that goes by the job."""
    hosts, job = os.environ.get("SLURM_STEP_NODELIST", ""), os.environ.get("SLURM_JOB_ID", "0")
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)
    if found is not None:
        os.environ.setdefault("MASTER_ADDR", found[1] + (found[2] or ""))
    os.environ.setdefault("MASTER_PORT", str(20000 + int(re.sub(r"\D", "", job) or 0) % 10000))


def in_thread(ask: Callable[[], Value]) -> "Future[Value]":
    """What `ask` will return, asked in a thread that may be abandoned.

    For torch's store, all of whose operations wait for ever where the other side is connected and does not answer.
    """
    answer: Future[Value] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 (raised where the answer is read)
            answer.set_exception(error)

    threading.Thread(target=run, name="flatout-meet", daemon=True).start()
    return answer


def check_one_process(verb: str) -> None:
    """Refuses to be one of several processes, for verbs that work alone."""
    found = launch()
    if found is not None and found.size > 1:
        error = UsageError(
            f"{found.size} processes were started, and `flatout {verb}` works in one",
            f"start it once, without a launcher: `flatout {verb}`",
        )
        raise error if found.rank == 0 else OtherProcessError(error.exit_code)
