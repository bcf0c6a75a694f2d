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
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        # `optim/schedule.py` and `data/loader.py` are files, `train.py` is the guides'
        for field in re.findall(rf"`((?:{sections})\.[a-z_]+)(?:=[^`]*)?`", text):
            assert field in known or field.endswith(".py"), f"{path.name} names {field}"


def test_every_module_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "src" / "flatout").rglob("*.py")):
        if path.name != "__init__.py":
            assert path.name in text, f"docs/architecture.md does not draw {path.name}"
