"""A program that may take for ever, for tests of `flatout.confined`: the paths that a regular expression matches."""

import re
from collections.abc import Mapping
from typing import Any


def answer(request: Mapping[str, Any]) -> list[int]:
    fits = re.compile(request["pattern"]).fullmatch
    return [place for place, path in enumerate(request["paths"]) if fits(path)]
