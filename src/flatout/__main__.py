"""`python -m flatout`: the command `flatout` of the Python that is named."""

import sys

from flatout.cli import main

sys.exit(main())
