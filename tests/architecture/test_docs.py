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


def test_every_field_named_in_the_documents_exists():
    known = set(field_facts())
    sections = "|".join(section_paths())
    named: set[str] = set()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        # `optim/schedule.py` and `data/loader.py` are files, `train.py` is the guides'
        fields = set(re.findall(rf"`((?:{sections})\.[a-z_0-9]+)(?:=[^`]*)?`", text))
        unknown = {field for field in fields - known if not field.endswith(".py")}
        assert not unknown, f"{path.name} names {sorted(unknown)}"
        named |= fields & known
    assert len(named) > 0.6 * len(known), "most fields are explained somewhere"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_every_link_of_the_tutorials_leads_somewhere():
    links = 0
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            path = page.parent / file
            assert path.is_file(), f"{page.name} links to {target}"
            assert not anchor or anchor in headings(path), f"{page.name} links to {target}"
            links += 1
    assert links > 20


def drawn_modules() -> set[str]:
    """The modules in the drawing of rooms, as paths: a line further in than a folder's belongs to that folder."""
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    folders: list[tuple[int, str]] = []
    found: set[str] = set()
    for line in drawing.splitlines()[2:]:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent == 0:
            continue
        folders = [(depth, name) for depth, name in folders if depth < indent]
        if folder := re.match(r"\s+(\w+)/", line):
            folders.append((indent, folder[1]))
        found |= {"/".join([*(name for _, name in folders), file]) for file in re.findall(r"\b\w+\.py\b", line)}
    return found


def test_every_module_is_drawn_in_its_room_and_no_other():
    root = ROOT / "src" / "flatout"
    there = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.name != "__init__.py"}
    drawn = drawn_modules()
    assert sorted(there - drawn) == [], "docs/architecture.md does not draw them"
    gone = {
        path for path in drawn - there if path.rpartition("/")[2] not in {name.rpartition("/")[2] for name in there}
    }
    assert not gone, "docs/architecture.md draws what is not there"
