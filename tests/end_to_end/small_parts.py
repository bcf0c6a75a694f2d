"""`flatout` with parts of a few kilobytes, so that a small corpus has many: `python -m ...small_parts BYTES WORDS...`."""

import sys

from flatout import cli
from flatout.data import plan

if __name__ == "__main__":
    plan.PART_BYTES = int(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
