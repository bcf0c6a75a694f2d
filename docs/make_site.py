"""Builds the site from the pages: `python docs/make_site.py`, or `make docs`.

The pages are written for GitHub. Zensical takes one folder, so pages and pictures are copied to build/pages with their
links rewritten; a link to any other file leads to the repository. The site is build/site. Broken links and anchors are
errors.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.errors import REPOSITORY, SITE

OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PICTURES = (".png", ".svg")
# The folders of the site, and which of their pages come first. The others follow by name.
FIRST = {
    "tutorials": "",
    "guides": "data training before-a-run fine-tuning long-context models after-training watching troubleshooting "
    "speed many-gpus python safety platforms upgrading",
    "coming-from": "",
    "reference": "settings verbs records api",
    "lab": "speed bench recipe minutes finders sizes tune",
    "": "contributing architecture extending security changelog",
}


def build(root: Path, folder: Path) -> int:
    """Writes folder/site from the repository in `root`; returns an exit code."""
    root, stage, config = root.resolve(), folder / "pages", folder / "zensical.toml"
    for old in (stage, folder / "site"):
        shutil.rmtree(old, ignore_errors=True)
    pages, lost = placed(root), list[str]()
    for path, place in pages.items():
        text, pictures, broken = for_the_site(path.read_text(encoding="utf-8"), path, root, pages)
        for picture in pictures:
            (stage / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / pictures[picture], stage / picture)
        (stage / place).parent.mkdir(parents=True, exist_ok=True)
        (stage / place).write_text(text, encoding="utf-8")
        lost += broken
    if lost:
        print(*lost, sep="\n", file=sys.stderr)
        return 1
    here = Path(__file__).parent
    shutil.copy(here / "iframe-worker.js", stage)
    head = {"site_name": "Flatout", "site_url": f"{SITE}/", "repo_url": REPOSITORY, "repo_name": "Repository"}
    head |= {"docs_dir": stage.name, "site_dir": "site", "nav": navigation(pages.values())}
    lines = ["[project]", *(f"{name} = {toml(value)}" for name, value in head.items()), ""]
    config.write_text("\n".join(lines) + (here / "zensical.toml").read_text(encoding="utf-8"), encoding="utf-8")
    quietly = "import sys; sys.tracebacklimit = 0; from zensical.main import cli; cli()"  # its warnings say all
    return subprocess.run([sys.executable, "-c", quietly, "build", "--strict", "--clean", "-f", str(config)]).returncode


def placed(root: Path) -> dict[Path, str]:
    """Every page, and its place on the site; the README of a folder is the folder's index."""
    pages = {path: path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    pages |= {path: path.relative_to(root).as_posix() for path in (root / "lab").glob("*.md")}
    pages |= {path: path.name.lower() for name in OUTSIDE if (path := root / name).exists()}
    return {path: re.sub(r"README\.md$", "index.md", place) for path, place in pages.items()}


def for_the_site(text: str, path: Path, root: Path, pages: dict[Path, str]) -> tuple[str, dict[str, str], list[str]]:
    """A page for the site, the pictures it shows by their place on the site, and its links that lead nowhere."""
    pictures, lost = dict[str, str](), list[str]()

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = (found["link"] or "").partition("#")
        if not target or ":" in target:
            return found[0]
        there = (path.parent / target).resolve()
        if not there.exists() or not there.is_relative_to(root):
            lost.append(f"{path.relative_to(root)}: {found['link']} leads nowhere")
            return found[0]
        place = pages.get(there) or there.relative_to(root).as_posix().removeprefix("docs/")
        if there.suffix in PICTURES:
            pictures[place] = target
        elif there not in pages:
            kind = "tree" if there.is_dir() else "blob"
            return f"]({REPOSITORY}/{kind}/main/{there.relative_to(root).as_posix()})"
        return f"]({posixpath.relpath(place, posixpath.dirname(pages[path]))}{hash_}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)  # text and blocks of code in turns
    parts[::2] = [re.sub(r"`[^`]*`|\]\((?P<link>[^)\s]+)\)", link, part) for part in parts[::2]]
    return spaced("".join(parts)), pictures, lost


def spaced(text: str) -> str:
    """GitHub's Markdown as Zensical wants it: empty lines around lists and code, four spaces for what is in an item."""
    lines, items, code = [""], list[int](), False  # where the text of each open item begins
    for line in text.split("\n"):
        indent, fence = len(line) - len(line.lstrip()), line.lstrip().startswith("```")
        item = None if code else re.match(r" *(?:[-*+]|(\d+)\.) +", line)
        while items and indent < items[-1] and line and not code:
            items.pop()
        begins = item and item[1] in (None, "1") and not re.match(r" |[-*+] |\d+\. ", lines[-1])
        if not items and lines[-1] and (begins or (fence and not code)):
            lines.append("")
        lines.append(" " * 4 * len(items) + line[min(indent, items[-1]) if items else 0 :] if line else "")
        if not items and fence and code:
            lines.append("")
        code = code != fence
        if item:
            items.append(item.end())
    return "\n".join(lines[1:])


def navigation(places: Iterable[str]) -> list[Any]:
    """Tutorials, guides, reference and what contributors need, as Zensical takes them."""
    folders: dict[str, list[str]] = {name: [] for name in FIRST}
    for place in places:
        folders.setdefault(posixpath.dirname(place), []).append(place)
    for folder, found in folders.items():
        first = [posixpath.join(folder, f"{name}.md") for name in ("index", *FIRST.get(folder, "").split())]
        found.sort(key=lambda place: (first.index(place) if place in first else len(first), place))
    front, *others = folders[""]
    parts = {"Home": front, "Tutorials": folders["tutorials"], "Guides": [*folders["guides"]]}
    parts |= {"Reference": folders["reference"], "Contributing": [*others, {"The lab": folders["lab"]}]}
    if folders["coming-from"]:
        parts["Guides"].append({"Coming from": folders["coming-from"]})
    return [{name: part} for name, part in parts.items()]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(name)} = {toml(inner)}' for name, inner in value.items())} }}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[1]
    sys.exit(build(repository, repository / "build"))
