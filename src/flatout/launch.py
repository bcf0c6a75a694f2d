"""How this process was started: alone, or as one of several by torchrun, srun or mpirun. No torch here.

Several GPUs are not built yet. Until then each of several processes would train the same model in a folder of its own,
so all of them are refused.
"""

import os

from flatout.errors import UsageError


class SeveralProcessesError(UsageError):
    """One of several processes. Only the first one says so."""


# (number of processes, rank of this one), by launcher: torchrun and others like it, Open MPI, MPICH, SLURM's srun.
_VARIABLES = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def launched() -> tuple[str, int, int] | None:
    """(variable, processes, rank) where a launcher started several processes; None where there is only this one."""
    for size_name, rank_name in _VARIABLES:
        size, rank = os.environ.get(size_name, ""), os.environ.get(rank_name, "")
        if size.isdecimal() and int(size) > 1:
            return size_name, int(size), int(rank) if rank.isdecimal() else 0
    return None


def check_one_process() -> None:
    """Refuses to be one of several processes."""
    found = launched()
    if found is not None:
        name, size, _ = found
        raise SeveralProcessesError(
            f"{size} processes were started ({name}={size}), and Flatout trains in one process on one GPU",
            f"start it once, without a launcher: `flatout train`; if nothing launched several, unset {name}",
        )


def is_first() -> bool:
    """Whether this process is the one of several that speaks to the user."""
    found = launched()
    return found is None or found[2] == 0
