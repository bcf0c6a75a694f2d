"""`flatout` with small parts and shards, so that a small corpus has many: `small_parts BYTES WORDS...`."""

import sys

from flatout import cli
from flatout.corpus import sources
from flatout.data import plan, shards

if __name__ == "__main__":
    shards.SHARD_TOKENS = 50_000
    plan.PART_BYTES = sources._WHOLE_BYTES = int(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
