"""`flatout train` on a slow disk, for processes that are killed."""

import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.engine import boundary, checkpoint


def train_slowly(delay: float, phase: Path, words: list[str]) -> int:
    """Each file of a checkpoint, and its verdict, take `delay` seconds longer to reach the disk.

    That widens the windows in which a kill hits a save or comes between save and verdict. The file `phase` says in
    which of them the process is: training, saving or judging. What is replaced here stays so in this process.
    """
    real_sync, real_write, real_verdict = checkpoint.sync_and_hash, boundary.write_checkpoint, boundary.write_verdict

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

    checkpoint.sync_and_hash = slow_sync
    boundary.write_checkpoint, boundary.write_verdict = write_checkpoint, write_verdict
    return cli.main(["train", *words])
