"""Pages of the documentation as a reader follows them: their fenced blocks, in order."""

import re
from collections.abc import Callable, Sequence
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


# Of losses and other decimals. Another number of threads moved none by 0.01%; another CPU or torch rounds otherwise,
# and over a whole run such differences grow.
TOLERANCE = 0.01
# Times, speeds and sizes are the machine's own.
_VARIES = re.compile(r"[kMGT]?(?: ?(?:h|min|m\d\ds|s|ms|B|bytes|[kKMGT]i?B)\b| ?tok(?:ens)?/s)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)*(?:e[-+]?\d+)?")


def figures(line: str) -> list[str]:
    """The numbers of a printed line that do not depend on the machine, in order."""
    found = [(number[0].rstrip(",."), line[number.end() :]) for number in _NUMBER.finditer(line)]
    return [text for text, after in found if not _VARIES.match(after) and text.count(".") < 2]  # no versions


def agree(promised: str, got: str, tolerance: float = TOLERANCE) -> bool:
    """Whether a figure is the promised one: exactly if it is a whole number, else about."""
    if not re.search(r"[.e]", promised):
        return promised == got
    value, last = float(promised.replace(",", "")), promised.partition("e")[0].partition(".")[2]
    digit = 0.0 if "e" in promised else 10.0 ** -len(last)
    return abs(value - float(got.replace(",", ""))) <= max(tolerance * abs(value), 1.01 * digit)


def not_printed(wanted: str, printed: str, compared: Callable[[str], bool] = lambda _: False) -> list[str]:
    """The lines of a `text` block that `printed` does not have in this order.

    `...` alone stands for any lines in between, at a line's end for the rest of it. Figures count in lines that are
    `compared`, as `agree` has it.
    """
    lines = printed.splitlines()
    missing: list[str] = []
    for line in wanted.splitlines():
        start, cut, _ = line.partition("...")
        want, promised = same_but_for_figures(start), figures(start)
        if not want:
            continue

        def fits(
            got: str, line: str = line, cut: str = cut, want: str = want, promised: Sequence[str] = promised
        ) -> bool:
            plain, found = same_but_for_figures(got), figures(got)
            same = plain.startswith(want) if cut else plain == want
            return same and (not compared(line) or all(map(agree, promised, found)))

        at = next((n for n, got in enumerate(lines) if fits(got)), None)
        if at is None:
            missing.append(line)
        else:
            lines = lines[at + 1 :]
    return missing
