"""What the documents name exists."""

import re
from pathlib import Path

from flatout.config.facts import field_facts, section_paths

ROOT = Path(__file__).parents[2]
GUIDES = (ROOT / "docs" / "from-the-guides.md").read_text(encoding="utf-8")


def test_every_test_named_in_the_guides_page_exists():
    missing, file, named = [], "", 0
    for name, test in re.findall(r"`((?:unit|parity|end_to_end|architecture)/\w+\.py)?::(\w+)`", GUIDES):
        file = name or file
        named += 1
        if f"def {test}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8"):
            missing.append(f"{file}::{test}")
    assert named > 50
    assert not missing


def test_every_link_between_documents_leads_somewhere():
    """To a file that is there, and to a heading or an anchor in it."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "lab").rglob("*.md"),
    ]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    lost: list[str] = []
    for page, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(texts.get(target, ""))):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert not lost


def anchors(text: str) -> set[str]:
    """As GitHub names the headings of a page, and those that it sets itself."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings} | set(
        re.findall(r'<a id="(.*?)">', text)
    )


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
    assert all("aim of 90%" in row for row in GUIDES.splitlines() if row.startswith("| 002-20"))


def test_every_field_named_in_the_documents_exists():
    known = set(field_facts())
    sections = "|".join(section_paths())
    named: set[str] = set()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        # `optim/rules.py` and `data/batch.py` are files, `train.py` is the guides'
        fields = set(re.findall(rf"`((?:{sections})\.[a-z_0-9]+)(?:=[^`]*)?`", text))
        unknown = {field for field in fields - known if not field.endswith(".py")}
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


def test_the_architecture_page_is_short():
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split()) <= 1_800
