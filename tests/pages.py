"""Pages of the documentation as a reader follows them: their fenced blocks, in order."""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"


class Block(NamedTuple):
    language: str
    """The word after the fence: `sh` and `python` are run, `text` is what the block before it prints."""
    text: str
    where: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block of `page`, from its top to its end."""
    content = page.read_text(encoding="utf-8")
    assert content.count("```") % 2 == 0, f"{page.name} has a fence that is never closed"
    found: list[Block] = []
    for fence in re.finditer(r"^```(\w*)\n(.*?)^```$", content, flags=re.DOTALL | re.MULTILINE):
        line = content.count("\n", 0, fence.start()) + 1
        found.append(Block(fence[1], fence[2], f"{page.name}, line {line}"))
    assert 2 * len(found) == content.count("```"), f"{page.name} has a fence that does not begin its line"
    return found


def same_but_for_figures(line: str) -> str:
    """A printed line without what differs between machines: numbers, units that follow from them, and spaces."""
    line = re.sub(r"\d[\d,.]*(?:e[-+]?\d+)?", "#", line)
    line = re.sub(r"#[kMGT]\b|#(?:h|m|s|ms)(?:#(?:m|s))?\b|# (?:h|min|ms|s)\b", "#", line)
    line = re.sub(r"# ?(?:bytes|[kKMGT]i?B)\b", "#", line)
    return " ".join(line.split())


def not_printed(wanted: str, printed: str) -> list[str]:
    """The lines of a `text` block that `printed` does not have in this order, figures aside.

    `...` alone stands for any lines in between, at a line's end for the rest of it.
    """
    lines = [same_but_for_figures(line) for line in printed.splitlines()]
    missing: list[str] = []
    for line in wanted.splitlines():
        start, cut, _ = line.partition("...")
        want = same_but_for_figures(start)
        if not want:
            continue
        at = next((n for n, got in enumerate(lines) if (got.startswith(want) if cut else got == want)), None)
        if at is None:
            missing.append(line)
        else:
            lines = lines[at + 1 :]
    return missing
