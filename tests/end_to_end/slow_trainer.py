"""`flatout train` on a slow disk, for processes that are killed."""

import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.checkpoints import checkpoint_files
from flatout.engine import saver, saving


def train_slowly(delay: float, phase: Path, beside: bool, words: list[str]) -> int:
    """Each file of a checkpoint, and its verdict, take `delay` seconds longer to reach the disk.

    That widens the windows in which a kill hits a save or comes between save and verdict. The file `phase` says in
    which of them the process is: training, saving or judging; while a checkpoint is written beside training that is
    saving, too; it is where `beside` says so. What is replaced here stays so in this process.
    """
    real_sync, real_verdict = checkpoint_files.sync_and_hash, saving.write_verdict
    real_write = saver.write_checkpoint
    saver.SMALL = 0 if beside else saver.SMALL

    def slow_sync(path: Path) -> dict[str, Any]:
        time.sleep(delay)
        return real_sync(path)

    def write_checkpoint(*arguments: Any) -> tuple[Path, int]:
        phase.write_text("saving")
        written = real_write(*arguments)
        phase.write_text("judging")
        return written

    def write_verdict(*arguments: Any) -> None:
        time.sleep(2 * delay)
        real_verdict(*arguments)
        phase.write_text("training")

    checkpoint_files.sync_and_hash, saving.write_verdict = slow_sync, write_verdict
    saver.write_checkpoint = write_checkpoint
    return cli.main(["train", *words])
