"""`flatout` with parts of a few kilobytes, so that a small corpus has many: `small_parts BYTES WORDS...`."""

import sys

from flatout import cli
from flatout.corpus import sources
from flatout.data import plan

if __name__ == "__main__":
    plan.PART_BYTES = sources._WHOLE_BYTES = int(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
