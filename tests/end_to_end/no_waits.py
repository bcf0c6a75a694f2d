"""Steps during which the host must not wait for the device."""

import warnings

import torch

from flatout.engine.run import Run

WARM_UPS, WATCHED = 3, 3  # in the first ones kernels are made, and graphs recorded


def take_steps_without_waiting(run: Run) -> None:
    """Raises where a step after the first few asks the device for something and waits. Batches are there before."""
    with run.batches(0) as loader:
        batches = [next(loader) for _ in range(WARM_UPS + WATCHED)]
    for batch in batches[:WARM_UPS]:
        run.step(batch.tokens, batch.targets)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches[WARM_UPS:]:
            run.step(batch.tokens, batch.targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
