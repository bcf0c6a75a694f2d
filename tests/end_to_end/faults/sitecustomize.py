"""Faults of ranks, on request: Python imports this at its start where this folder is on PYTHONPATH.

FAULT has words: `slow` (a pause in every step), `memory` (the micro-batch of rank 1 does not fit unless it is 1) and
`drift` (a weight of rank 1 changes after step 5). A file `hang-RANK` in the working directory makes that rank hang in
its next step, a file `stuck-RANK` its loader; both are removed by that.
"""

import os
import time
from pathlib import Path

RANK, FAULT = os.environ.get("RANK"), os.environ.get("FAULT", "").split()


def _told(name: str) -> bool:
    path = Path(f"{name}-{RANK}")
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _hang() -> None:
    while True:
        time.sleep(60)


if RANK is not None and FAULT and "LOCAL_RANK" in os.environ and os.environ.pop("FAULT"):  # not in its children
    import torch

    from flatout.data.shards import TokenShards
    from flatout.engine.step import TrainStep

    accumulate, gather = TrainStep.accumulate, TokenShards.gather
    steps = 0

    def faulty_accumulate(self, *arguments):
        global steps
        steps += 1
        if "slow" in FAULT:
            time.sleep(0.02)
        if "memory" in FAULT and RANK == "1" and self.micro_batch > 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        if "drift" in FAULT and RANK == "1" and steps == 6:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] += 1e-3
        if _told("hang"):
            _hang()
        return accumulate(self, *arguments)

    def faulty_gather(self, *arguments):
        if _told("stuck"):
            _hang()
        return gather(self, *arguments)

    TrainStep.accumulate, TokenShards.gather = faulty_accumulate, faulty_gather
