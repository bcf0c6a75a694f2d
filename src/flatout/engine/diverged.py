"""How a diverged run goes on: from its last checkpoint with a sound loss, at a lower learning rate.

A run may diverge before its first save. Its starting weights follow from config and seed, so they are built again and
saved as step 0: there is always something to resume from.
"""

import math
import shlex
from pathlib import Path

from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig
from flatout.config.usual import USUAL_MUON_RATE
from flatout.data.array_data import Arrays
from flatout.engine.books import Progress
from flatout.engine.boundary import quick_loss
from flatout.engine.checkpoint import (
    Verdict,
    list_checkpoints,
    read_part,
    read_verdict,
    write_checkpoint,
    write_verdict,
)
from flatout.engine.given import Given
from flatout.engine.run_folder import checkpoints_of
from flatout.engine.saving import as_word, capture, differences
from flatout.engine.setup import setup_run
from flatout.errors import DivergedError, UserError

SAFE_RATE = 1e-3  # AdamW trains GPTs of any size at this rate or a lower one
_SOUND = 2.0  # times the loss of guessing all tokens alike: weights above that are not worth going on from


def with_way_back(
    error: DivergedError,
    loaded: LoadedConfig | RunConfig,
    folder: Path,
    vocab: int,
    arrays: Arrays | None = None,
    given: Given | None = None,
) -> DivergedError:
    """The error with the command that trains on. Let go of the run first: it may have to be built again."""
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    found, gentle = _newest_sound(folder, vocab), " ".join(f"{path}={value}" for path, value in gentler(config).items())
    if found is None and arrays is not None and arrays.once:  # what it gave is gone, and with it the held-out arrays
        return DivergedError(error.message, f"start again with {gentle}")
    where = "the newest checkpoint that is not known to be bad" if found is not None else "the starting weights"
    try:
        point = found if found is not None else _save_start(loaded, folder, arrays, given)
    except UserError as failed:  # of the disk or the memory: what the user has to know first is the divergence
        return DivergedError(error.message, f"start again with {gentle} ({failed.message})")
    names = [*([] if arrays is None else ["data="]), *([] if given is None else given.names)]
    if names:
        gentle = "a lower lr in it" if given is not None and given.own_optimizer else f"{gentle} in its config"
        again = f"flatout.train with the same {', '.join(names)}, resume={str(point)!r} and {gentle}"
        return DivergedError(error.message, f"resume from {where} in Python: {again}")
    verb = "train" if config.chat.source is None else "finetune"
    changed = {path: now for path, _, now in differences(config, read_part(point, "config")) if path[:7] != "output."}
    settings = [as_word(path, value) for path, value in {**changed, **gentler(config)}.items()]
    command = " ".join(["flatout", verb, "--resume", shlex.quote(str(point)), *settings])
    return DivergedError(error.message, f"resume from {where} at a lower learning rate: {command}")


def gentler(config: RunConfig) -> dict[str, str]:
    """Settings that hold where these did not."""
    safe = USUAL_MUON_RATE if config.optim.optimizer == "muon" else SAFE_RATE
    first = next(iter(config.optim.rates.values()))
    rates = {path: f"{rate:g}" for path, rate in config.optim.scaled_rates(min(0.1, safe / first)).items()}
    return rates if 0 < config.optim.clip <= 1 else {**rates, "optim.clip": "1"}


def _newest_sound(folder: Path, vocab: int) -> Path | None:
    for _, path in reversed(list_checkpoints(checkpoints_of(folder))):
        verdict = read_verdict(path)
        if verdict is None or verdict.loss < _SOUND * math.log(max(vocab, 3)):  # False for NaN
            return path
    return None


def _save_start(loaded: LoadedConfig | RunConfig, folder: Path, arrays: Arrays | None, given: Given | None) -> Path:
    run, progress = setup_run(loaded, arrays=arrays, given=given), Progress()
    path, _ = write_checkpoint(checkpoints_of(folder), capture(run, progress))
    loss, _, _ = quick_loss(run, run.step.micro_batch)
    write_verdict(path, Verdict(loss=loss, progress=progress.judged()))
    return path
