"""`flatout train` on a slow disk, for processes that are killed."""

import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.checkpoints import checkpoint_files
from flatout.engine import saver, saving, writer


def train_slowly(delay: float, phase: Path, beside: bool, words: list[str]) -> int:
    """Each file of a checkpoint, and its verdict, take `delay` seconds longer to reach the disk.

    That widens the windows in which a kill hits a save or comes between save and verdict. The file `phase` says in
    which of them the process is: training, saving or judging; while a checkpoint is written beside training that is
    saving, too; it is where `beside` says so. What is replaced here stays so in this process.
    """
    real_sync, real_verdict = checkpoint_files.sync_and_hash, saving.write_verdict
    real_write, real_save = saver.write_checkpoint, saver.Saver._save
    writer._START = slow_start(delay)
    saver.SMALL = 0 if beside else saver.SMALL

    def slow_sync(path: Path) -> dict[str, Any]:
        time.sleep(delay)
        return real_sync(path)

    def write_checkpoint(*arguments: Any) -> tuple[Path, int]:
        phase.write_text("saving")
        written = real_write(*arguments)
        phase.write_text("judging")
        return written

    def save_beside(*arguments: Any) -> saver.Saved:
        phase.write_text("saving")
        saved = real_save(*arguments)
        phase.write_text("judging")
        return saved

    def write_verdict(*arguments: Any) -> None:
        time.sleep(2 * delay)
        real_verdict(*arguments)
        phase.write_text("training")

    checkpoint_files.sync_and_hash, saving.write_verdict = slow_sync, write_verdict
    saver.write_checkpoint, saver.Saver._save = write_checkpoint, save_beside
    return cli.main(["train", *words])


def slow_start(delay: float) -> str:
    """What a writer is started with, such that it is slow."""
    imports, rest = (
        "from flatout.checkpoints import checkpoint_files as c; from flatout.engine import writer; import time; ",
        writer._START,
    )
    slow = f"s = c.sync_and_hash; c.sync_and_hash = lambda path: (time.sleep({delay}), s(path))[1]; "
    before, found, after = rest.partition("from flatout.engine.writer")
    assert found
    return f"{before}{imports}{slow}{found}{after}"
