"""What the documents name exists, what they measured is in the lab, and there are not too many of them."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flatout.config.facts import field_facts, section_paths
from flatout.config.former import FORMER

ROOT = Path(__file__).parents[2]
GUIDES = (ROOT / "lab" / "from-the-guides.md").read_text(encoding="utf-8")
# Written by hand: docs/reference is made from the code.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"),
]
MOST_WORDS = 28_000


def test_every_test_named_in_the_guides_page_exists():
    named = re.findall(r"`((?:unit|parity|end_to_end|architecture)/\w+\.py)::(\w+)`", GUIDES)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]
    assert not missing
    assert len(named) > 200


def test_the_guides_page_has_a_line_for_every_row():
    rows = re.findall(r"^\| (\d{3})-(\d\d) \|", GUIDES, flags=re.MULTILINE)
    counted = {guide: [int(row) for other, row in rows if other == guide] for guide, _ in rows}
    lengths = {"000": 30, "001": 27, "002": 22, "003": 28, "004": 26}
    assert counted == {guide: list(range(1, length + 1)) for guide, length in lengths.items()}


def test_every_link_between_documents_leads_somewhere():
    """To a file that is there, and to a heading or an anchor in it."""
    pages = {*PAGES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")}
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in sorted(pages)
        for link, target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(texts.get(target, "")))
    ]
    assert not lost


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """The links of a page to files and headings: as written, the file, the anchor."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """As GitHub names the headings of a page, and those that it sets itself."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings} | set(
        re.findall(r'<a id="(.*?)">', text)
    )


def test_every_page_is_two_clicks_from_the_readme_at_most():
    """README.md links it, or docs/index.md does, which README.md links."""
    first, index = {target for _, target, _ in links(ROOT / "README.md")}, ROOT / "docs" / "index.md"
    assert index in first
    reached = first | {target for _, target, _ in links(index)}
    pages = {*PAGES, *(ROOT / "docs" / "reference").glob("*.md")} - {ROOT / "README.md"}
    assert not sorted(str(page.relative_to(ROOT)) for page in pages - reached)


def test_pages_written_by_hand_stay_few_words():
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


# What is measured: numbers with a unit of rate. GiB are only beside one or with decimals, as whole GiB may be limits.
RATE = r"(?:tokens/s|tokens (?:a|per) second|images/s|[kMGT]i?B/s|TFLOP/s)"
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
UNIT_FACTORS = [factor**sign for factor in (1.0, 1e3, 1e6, 1e9, 2.0**20, 2.0**30) for sign in (1, -1)]


def test_every_figure_of_speed_names_a_row_of_the_lab_that_has_it():
    """The file stands with the figure, below its table, or in its section; the row has the number when rounded."""
    unnamed: list[str] = []
    for page in PAGES:
        if page.parent.name == "tutorials":
            continue
        for block, near, section in claims(without_code(page.read_text(encoding="utf-8"))):
            named = next((found for text in (near, section) if (found := re.findall(r"lab/(\w+\.jsonl)", text))), [])
            unnamed += [
                f"{page.relative_to(ROOT)}: {figure} is not in {named or 'any file'}"
                for figure in figures(block)
                if not any(has(file, figure) for file in named)
            ]
    assert not unnamed, "\n".join(unnamed)


def claims(text: str) -> Iterator[tuple[str, str, str]]:
    """Paragraphs, list items and tables; each with what names its rows: itself or the text below, and its section."""
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        blocks = [one for one in re.split(r"\n{2,}|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)(?<!\|\n)", section) if one.strip()]
        for number, block in enumerate(blocks):
            below = blocks[number + 1 : number + 2] if block.startswith("|") else []
            yield block, "\n".join([block, *below]), section


def figures(block: str) -> list[str]:
    """Numbers with their units; of a table also those of a column that is headed by the unit."""
    found = [" ".join(pair) for pair in re.findall(rf"({NUMBER})\s+((?:(?:k|M|million) )?{RATE})", block)]
    found += [f"{number} GiB" for number in re.findall(rf"({NUMBER})\s+GiB", block) if "." in number or found]
    if block.startswith("|"):
        rows = [line.strip("|").split("|") for line in block.splitlines()]
        for column, head in enumerate(rows[0]):
            if unit := re.search(rf"{RATE}|GiB", head):
                cells = [row[column].strip(" *") for row in rows[2:] if column < len(row)]
                found += [f"{first[0]} {unit[0]}" for cell in cells if (first := re.match(rf"{NUMBER}$", cell))]
    return found


def has(file: str, figure: str) -> bool:
    """Whether the file has the number, in some unit, when it is rounded to the digits of the figure."""
    number, _, unit = figure.partition(" ")
    value, half = float(number.replace(",", "")), 0.5 * 10.0 ** -len(number.partition(".")[2])
    known = numbers(file)
    for factor in (1.0,) if unit.startswith(("tokens", "images")) else UNIT_FACTORS:
        at = bisect_left(known, (value - half) / factor * (1 - 1e-9))
        if at < len(known) and known[at] <= (value + half) / factor * (1 + 1e-9):
            return True
    return False


@cache
def numbers(file: str) -> list[float]:
    """All numbers in the rows of a file, in order."""
    path = ROOT / "lab" / file
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted(number for line in lines for number in _numbers(json.loads(line)))


def _numbers(row: Any) -> Iterator[float]:
    if isinstance(row, dict | list):
        for one in row.values() if isinstance(row, dict) else row:
            yield from _numbers(one)
    elif isinstance(row, int | float) and not isinstance(row, bool):
        yield float(row)


def test_figures_are_found_and_compared():
    """The rule itself: what counts as a figure, and when a row has it."""
    table = "| case | tokens/s |\n|---|---|\n| a | 101,309 |\n| b, 19.3 GiB | **12** |"
    assert figures(table) == ["19.3 GiB", "101,309 tokens/s", "12 tokens/s"]
    assert figures("at most 8 GiB of memory, 64 MiB of files") == []
    assert figures("it takes 3.7 GiB and 38\n  million tokens a second") == ["38 million tokens a second", "3.7 GiB"]
    assert figures("reads 25.05 MB/s with 3 GiB") == ["25.05 MB/s", "3 GiB"]
    assert has("finetune.jsonl", "101,309 tokens/s")
    assert has("finetune.jsonl", "19.3 GiB")
    assert has("finetune.jsonl", "0.1013 million tokens/s")
    assert not has("finetune.jsonl", "101,308 tokens/s")
    section = "# A\n\nOne.\n\n| x |\n|---|\n| 1 |\n\nBelow.\n- item\n  more\n"
    assert [block for block, _, _ in claims(section)] == [
        "# A",
        "One.",
        "| x |\n|---|\n| 1 |",
        "Below.",
        "- item\n  more\n",
    ]


def test_utilisation_is_defined_in_one_way():
    """A share of time, with an aim: the pages, the report's figures and the row of the guide agree."""
    pages = [
        ROOT / "docs/guides/before-a-run.md",
        ROOT / "docs/guides/watching.md",
        ROOT / "src/flatout/observe/report_data.py",
    ]
    for page in pages:
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert "the share of the time in which some kernel ran" in text, page
        assert "elow 90% the card waits for" in text, page
    assert any("aim of 90%" in row for row in GUIDES.splitlines() if row.startswith("| 002-20"))


def test_every_field_named_in_the_documents_exists():
    known = set(field_facts())
    sections = "|".join(section_paths())
    named: set[str] = set()
    for path in [*PAGES, *sorted((ROOT / "docs" / "reference").glob("*.md")), *sorted((ROOT / "lab").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        # `optim/rules.py` and `data/batch.py` are files, `train.py` is the guides'
        fields = set(re.findall(rf"`((?:{sections})\.[a-z_0-9]+)(?:=[^`]*)?`", text))
        unknown = {field for field in fields - known if not field.endswith(".py")}
        if path.name == "upgrading.md":  # the one page that names settings of earlier versions
            unknown -= FORMER.keys()
        assert not unknown, f"{path.name} names {sorted(unknown)}"
        named |= fields & known
    assert len(named) > 0.6 * len(known), "most fields are explained somewhere"


def test_modules_named_on_the_pages_of_the_code_exist():
    root = ROOT / "src" / "flatout"
    for page in ("architecture.md", "extending.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`([\w/]+\.py)`", text))
        gone = sorted(path for path in named if not (root / path).exists() and not (ROOT / path).exists())
        assert named, page
        assert not gone, f"docs/{page} names what is not there"
