"""How a diverged run goes on: from its last checkpoint with a sound loss, at a lower learning rate.

A run may diverge before its first save. Its starting weights follow from config and seed, so they are built again and
saved as step 0: there is always something to resume from.
"""

import math
import shlex
from pathlib import Path

from flatout.config.load import LoadedConfig
from flatout.config.schema import RunConfig
from flatout.engine.checkpoint import Verdict, list_checkpoints, read_verdict, write_checkpoint, write_verdict
from flatout.engine.loop import JUDGED, Progress, capture, quick_loss
from flatout.engine.run_folder import checkpoints_of
from flatout.engine.setup import setup_run
from flatout.errors import DivergedError

SAFE_RATE = 1e-3  # AdamW trains GPTs of any size at this rate or a lower one
_SOUND = 2.0  # times the loss of guessing all tokens alike: weights above that are not worth going on from


def with_way_back(error: DivergedError, loaded: LoadedConfig | RunConfig, folder: Path, vocab: int) -> DivergedError:
    """The error with the command that trains on. Let go of the run first: it may have to be built again."""
    config = loaded.config if isinstance(loaded, LoadedConfig) else loaded
    found = _newest_sound(folder, vocab)
    where = "the newest checkpoint with a sound loss" if found is not None else "the starting weights"
    point = found if found is not None else _save_start(loaded, folder)
    verb = "train" if config.chat.source is None else "finetune"
    command = " ".join(["flatout", verb, "--resume", shlex.quote(str(point)), *gentler(config)])
    return DivergedError(error.message, f"go on from {where} at a lower learning rate: {command}")


def gentler(config: RunConfig) -> list[str]:
    """Settings that hold where these did not, as words of a command line."""
    words = [f"optim.learning_rate={min(config.optim.learning_rate / 10, SAFE_RATE):g}"]
    return words if 0 < config.optim.clip <= 1 else [*words, "optim.clip=1"]


def _newest_sound(folder: Path, vocab: int) -> Path | None:
    for _, path in reversed(list_checkpoints(checkpoints_of(folder))):
        verdict = read_verdict(path)
        if verdict is None or verdict.loss < _SOUND * math.log(max(vocab, 3)):  # False for NaN
            return path
    return None


def _save_start(loaded: LoadedConfig | RunConfig, folder: Path) -> Path:
    run, progress = setup_run(loaded), Progress()
    path, _ = write_checkpoint(checkpoints_of(folder), capture(run, progress))
    loss = quick_loss(run, run.step.micro_batch)
    write_verdict(path, Verdict(loss=loss, progress={name: getattr(progress, name) for name in JUDGED}))
    return path
