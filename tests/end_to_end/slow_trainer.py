"""`flatout train` on a slow disk: each file of a checkpoint, and its verdict, take SECONDS longer to reach it.

    python -m tests.end_to_end.slow_trainer SECONDS PHASE-FILE [words of flatout train ...]

Only the tests use it: it widens the windows in which a kill hits a save or comes between save and verdict, and says in
PHASE-FILE in which of them the process is: training, saving or judging.
"""

import sys
import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.engine import boundary, checkpoint

if __name__ == "__main__":
    delay, phase = float(sys.argv[1]), Path(sys.argv[2])
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
    sys.exit(cli.main(["train", *sys.argv[3:]]))
