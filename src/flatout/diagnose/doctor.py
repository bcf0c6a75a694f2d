"""What the doctor knows of a machine, its data and its ranks, as frozen dataclasses; no torch here.

The idea: facts first, judgement second. `machine.gather_machine`, `trials.run_trials`, `check_disk.measure_disk` and
`check_data.look_at_data` collect facts; the functions of the `check_*` modules turn facts into `Finding`s and touch
nothing. So a test, or a person with another machine in mind, hands over other facts. What there is to say of the run
itself comes from its plan (`resolve/checks.py`, `resolve/advice.py`).

The contract: a check never raises. What goes wrong inside of one is a finding as well (`guarded`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from flatout.errors import UserError
from flatout.finding import Check, Finding, finding_of
from flatout.host import ThreadTrial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A package that may be missing or broken; `reason` says how."""

    status: Literal["ok", "missing", "broken"] = "missing"
    version: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torch(Library):
    """torch, and what it sees. Of a torch that cannot be imported only the version is known, if that."""

    cuda: str | None = None  # the CUDA it was built for, such as 13.0
    sees_cuda: bool = False
    why_not: str = ""  # what torch says when it sees none
    mps: bool = False
    architectures: tuple[str, ...] = ()  # cards it has code for: sm_90, compute_90
    threads: int | None = None
    wants_triton: str | None = None  # the exact version its own metadata asks for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU and its state before we touched it; None for what nobody tells."""

    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None  # by others
    processes: tuple[int, ...] = ()  # of others, by process id
    utilisation: float | None = None  # 0 to 1
    temperature: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    clock_mhz: float | None = None
    clock_most_mhz: float | None = None
    throttled: tuple[str, ...] = ()  # power, heat, hardware
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    remapping: str = ""  # rows of its memory that wait for a reset, or could not be replaced
    identity: str = ""  # UUID


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """All that is known of a machine. `cards` come in torch's order, or the driver's where torch sees none."""

    system: str
    python: tuple[int, int, int]
    torch: Torch
    triton: Library
    cores: int
    usable_cores: float  # as the scheduler and the container allow
    load: float | None = None  # processes that ran or waited, as a mean over the last minute
    memory_bytes: int | None
    available_bytes: int | None
    environment: Mapping[str, str]
    packages: Mapping[str, str | None]  # by the name that is imported; None where it is missing
    now: float  # seconds since 1970
    cards: tuple[Card, ...] = ()
    hidden_cards: int = 0  # that the driver has and torch does not see
    told_by: str = ""  # NVML, nvidia-smi or torch
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver knows
    xids: tuple[str, ...] = ()  # errors of the card in the kernel's log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Something that was run on the device to see whether it works."""

    name: str
    outcome: Literal["works", "fails", "skipped"]
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """Everything that was run. `product_flops` is the rate of one large matrix product in `product_type`."""

    trials: tuple[Trial, ...] = ()
    picked: str | None = None  # torch's own choice of an attention kernel
    product_flops: float | None = None
    product_type: str = ""
    threads: ThreadTrial | None = None  # on a CPU: how long a piece of training takes by number of threads

    def failure(self, name: str) -> str | None:
        """Why a trial failed; None if it worked or was not made."""
        return next((one.detail for one in self.trials if one.name == name and one.outcome == "fails"), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk that a run would write to. `nearest` is its closest existing parent, `error` why it is unusable."""

    folder: str
    nearest: str
    free_bytes: int | None = None
    error: str = ""
    write_rate: float | None = None  # bytes per second, on the disk for sure
    read_rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What is known of the tokens; None for what nobody has counted. `exact` is False for an extrapolation."""

    exact: bool = False
    train_tokens: int | None = None
    val_tokens: int | None = None
    vocab: int | None = None
    document_tokens: float | None = None  # the median document's; None where there is one document only
    token_bytes: int = 2
    to_prepare_bytes: int | None = None  # of shards that are still to be written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How two GPUs of this host reach each other; None for what nobody tells."""

    pair: tuple[int, int]
    nvlink: bool | None = None
    peer: bool | None = None  # whether they read each other's memory without the host
    way: str = ""  # what lies between them on PCIe


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank says of itself. `data` is the fingerprint of its prepared data, `unseen` what it cannot read."""

    rank: int
    host: str
    device: str = ""
    python: str = ""
    nccl: str | None = None
    shared_memory_bytes: int | None = None
    data: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""  # why it has no device
    unseen: str = ""
    reduce_seconds: float | None = None  # the median all-reduce
    reduce_error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """What came of ranks that a launcher started. `refused` is why they could not work together."""

    place: str  # address and port of the first one
    backend: str = ""  # of the device's tensors: nccl or gloo
    ranks: tuple[RankFacts, ...] = ()
    folder: str = ""  # where the first rank wrote a file for the others to read
    reduced_bytes: int = 0
    refused: Finding | None = None

    @property
    def hosts(self) -> int:
        return len({one.host for one in self.ranks})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """What matters to `size` ranks, which somebody `asked` for, or which are only possible; None for what is unknown.

    `meeting` is None where no launcher started them. `mounts` has path and file system of each folder, by its name.
    """

    size: int
    asked: bool
    nccl: str | None = None
    links: tuple[Link, ...] = ()
    shared_memory_bytes: int | None = None
    port: int | None = None  # that torchrun would take
    port_free: bool | None = None
    mounts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    meeting: Meeting | None = None

    @property
    def hosts(self) -> int:
        return 1 if self.meeting is None else self.meeting.hosts


def guarded(area: str, name: str, check: Callable[[], Iterable[Finding | None]]) -> Iterator[Finding]:
    """The findings of a check, and where it breaks a finding that says so: one broken check must not hide the rest."""
    try:
        yield from filter(None, check())  # where there is nothing to say, a check says None
    except UserError as error:
        yield finding_of(error, area, name)
    except Exception as error:  # noqa: BLE001 - a doctor that dies tells nobody anything
        yield Check(area, name).warn(
            f"this check broke: {type(error).__name__}: {first_line(error)}",
            "This is a fault of Flatout's doctor, not of your set-up. Please report it with these words.",
        )


def first_line(error: object, most: int = 200) -> str:
    """An error's first line that says something, not longer than fits a terminal."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return line if len(line) <= most else line[: most - 1] + "…"
