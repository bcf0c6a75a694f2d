"""`flatout train` with a slow disk: each file of a checkpoint takes SECONDS longer to reach it.

    python -m tests.end_to_end.slow_trainer SECONDS [words of flatout train ...]

Only the tests use it: it widens the window in which a kill hits a save.
"""

import sys
import time
from pathlib import Path
from typing import Any

from flatout import cli
from flatout.engine import checkpoint

if __name__ == "__main__":
    delay, real = float(sys.argv[1]), checkpoint.sync_and_hash

    def slowly(path: Path) -> dict[str, Any]:
        time.sleep(delay)
        return real(path)

    checkpoint.sync_and_hash = slowly
    sys.exit(cli.main(["train", *sys.argv[2:]]))
