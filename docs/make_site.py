"""Builds the site from the pages: `python docs/make_site.py`, or `make docs`.

The pages are written for GitHub. Zensical takes one folder, so pages and pictures are laid out anew in build/pages, with
the links between them rewritten; links to other files of the repository lead to its address. The site is build/site.
Broken links and anchors end the build.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.errors import REPOSITORY, SITE

ROOT = Path(__file__).parents[1]
STAGE, OUT = ROOT / "build" / "pages", ROOT / "build" / "site"
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PICTURES = (".png", ".svg")
# The parts of the navigation: a folder, and which of its pages come first. The others follow by name.
FIRST = {
    "tutorials": "",
    "guides": "data training before-a-run fine-tuning long-context models after-training watching troubleshooting speed "
    "many-gpus python safety platforms upgrading",
    "coming-from": "",
    "reference": "settings verbs records api",
    "lab": "speed bench recipe minutes finders sizes tune",
    "": "contributing architecture extending security changelog",
}


def placed() -> dict[Path, str]:
    """Every page, and its place on the site; the README of a folder is the folder's index."""
    pages = {path: path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {path: path.relative_to(ROOT).as_posix() for path in (ROOT / "lab").glob("*.md")}
    pages |= {path: path.name.lower() for name in OUTSIDE if (path := ROOT / name).exists()}
    return {path: re.sub(r"README\.md$", "index.md", place) for path, place in pages.items()}


def relaid(path: Path, pages: dict[Path, str]) -> tuple[str, list[str]]:
    """A page as the site needs it, and its links that lead nowhere."""
    lost: list[str] = []

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = (found["link"] or "").partition("#")
        if not target or ":" in target:
            return found[0]
        there = (path.parent / target).resolve()
        if not there.exists():
            lost.append(f"{path.relative_to(ROOT)}: {found['link']} leads nowhere")
            return found[0]
        inside = there.relative_to(ROOT).as_posix()
        if there.suffix in PICTURES:
            place = inside.removeprefix("docs/")
            (STAGE / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there, STAGE / place)
        elif there in pages:
            place = pages[there]
        else:
            return f"]({REPOSITORY}/{'tree' if there.is_dir() else 'blob'}/main/{inside})"
        return f"]({posixpath.relpath(place, posixpath.dirname(pages[path]))}{hash_}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for at, part in enumerate(parts):  # text and blocks of code in turns; unlike GitHub, Zensical wants gaps
        if at % 2:
            inside_item = part.startswith(" ")
            parts[at] = textwrap.indent(part, " " * (-(len(part) - len(part.lstrip())) % 4)) if inside_item else f"\n{part}\n"
            continue
        text = re.sub(r"`[^`]*`|\]\((?P<link>[^)\s]+)\)", link, part)
        parts[at] = re.sub(r"^(?![-*+] |\d+\. |\s)(.+)\n(?=[-*+] |1\. )", r"\1\n\n", text, flags=re.MULTILINE)
    return "".join(parts), lost


def navigation(places: Iterable[str]) -> list[Any]:
    """The four parts, as Zensical takes them."""
    folders: dict[str, list[str]] = {}
    for place in places:
        folders.setdefault(posixpath.dirname(place), []).append(place)

    def listed(folder: str) -> list[Any]:
        first = [f"{folder}/{name}.md".lstrip("/") for name in ("index", *FIRST[folder].split())]
        return sorted(folders[folder], key=lambda place: (first.index(place) if place in first else len(first), place))

    front, *rest = listed("")
    return [
        {"Flatout": front},
        {"Tutorials": listed("tutorials")},
        {"Guides": [*listed("guides"), *([{"Coming from": listed("coming-from")}] if "coming-from" in folders else [])]},
        {"Reference": listed("reference")},
        {"Contributing": [*rest, {"The lab": listed("lab")}]},
    ]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(name)} = {toml(inner)}' for name, inner in value.items())} }}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def main() -> int:
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.rmtree(OUT, ignore_errors=True)
    pages, lost = placed(), list[str]()
    for path, place in pages.items():
        (STAGE / place).parent.mkdir(parents=True, exist_ok=True)
        text, broken = relaid(path, pages)
        (STAGE / place).write_text(text, encoding="utf-8")
        lost += broken
    if lost:
        print(*lost, sep="\n", file=sys.stderr)
        return 1
    head = {"site_name": "Flatout", "site_url": f"{SITE}/", "repo_url": REPOSITORY, "docs_dir": STAGE.name}
    head |= {"site_dir": OUT.name, "strict": True, "nav": navigation(pages.values())}
    lines = ["[project]", *(f"{name} = {toml(value)}" for name, value in head.items())]
    shutil.copy(ROOT / "docs" / "iframe-worker.js", STAGE)
    config = STAGE.parent / "zensical.toml"
    config.write_text("\n".join(lines) + "\n\n" + (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)])
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
