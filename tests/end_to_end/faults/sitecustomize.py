"""Faults of ranks, on request: Python imports this at its start where this folder is on PYTHONPATH.

FAULT has words: `slow` (a pause in every step, `slow=0.1` a longer one), `memory` (the micro-batch of rank 1 does not
fit unless it is 1), `drift` (a weight of rank 1 changes after step 5), `version` (ours is another) and `stream` (a
stream in small parts and blocks, read by one process for each rank). A file with the name of a fault and a rank in the
working directory has that rank do it once: `hang-0` hangs in its next step, `stuck-0` hangs in its loader, `full-0`
finds the disk full at its next save, `clock-0` sees the clock of the wall jump by an hour. That removes the file.
"""

import errno
import os
import sys
import time
from pathlib import Path

RANK, FAULT = os.environ.get("RANK"), os.environ.get("FAULT", "").split()
if RANK is not None and sys.platform == "linux":
    Path("/proc/self/comm").write_text(f"rank {RANK}")  # by which those who watch the processes know it


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

    import flatout
    from flatout.checkpoints import checkpoint
    from flatout.corpus import sources
    from flatout.data import plan, stream
    from flatout.data.shards import TokenShards
    from flatout.engine import loop, saver
    from flatout.engine.step import TrainStep

    pause = sum(float(word.partition("=")[2] or 0.02) for word in FAULT if word.startswith("slow"))
    accumulate, gather, chunks = TrainStep.accumulate, TokenShards.gather, stream.TokenStream.chunks
    save_files, now = checkpoint.save_files, time.time
    steps = jumped = 0

    def faulty_accumulate(self, *arguments):
        global steps, jumped
        steps += 1
        time.sleep(pause)
        if "memory" in FAULT and RANK == "1" and self.micro_batch > 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        if "drift" in FAULT and RANK == "1" and steps == 6:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] += 1e-3
        if _told("hang"):
            _hang()
        if _told("clock"):
            jumped = 3600 if steps % 2 else -3600
        return accumulate(self, *arguments)

    def faulty_gather(self, *arguments):
        if _told("stuck"):
            _hang()
        return gather(self, *arguments)

    def faulty_chunks(*arguments, **more):
        for chunk in chunks(*arguments, **more):
            if _told("stuck"):
                _hang()
            yield chunk

    def faulty_save(*arguments):
        if _told("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save_files(*arguments)

    TrainStep.accumulate, TokenShards.gather = faulty_accumulate, faulty_gather
    stream.TokenStream.chunks = faulty_chunks
    checkpoint.save_files = faulty_save
    time.time = lambda: now() + jumped
    if "drift" in FAULT:
        loop.COMPARED_EVERY = 4
    if "beside" in FAULT:
        saver.SMALL = 0
    if "version" in FAULT:
        flatout.__version__ = "0.0.0"
    if "stream" in FAULT:
        plan.PART_BYTES = sources._WHOLE_BYTES = 1024
        stream.BLOCK_WINDOWS, stream._SMALL_SOURCE = 32, 0
        stream._worker_count = lambda inputs: 1
