"""The site: built, its links followed, and its search asked in a browser that has no server and no network."""

import importlib.util
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from flatout.errors import REPOSITORY
from tests.end_to_end import chromium

pytest.importorskip("zensical")
ROOT = Path(__file__).parents[2]
RIGHT_PAGES = {  # one of them is among the first two results
    "resume": ("guides/safety.html", "guides/training.html", "guides/troubleshooting.html"),
    "out of memory": ("guides/speed.html", "guides/troubleshooting.html"),
    "LoRA rank": ("reference/settings.html", "guides/fine-tuning.html"),
    "learning rate": ("guides/before-a-run.html", "guides/training.html"),
}
PARTS = ("h1", "h2", "h3", "li", "pre", "table", "td", "img")
# The results are in the shadow of an element that the page's script adds.
LIST = "[...document.querySelectorAll('body > div')].map((one) => one.shadowRoot).find((one) => one)"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    assert maker.build(ROOT, folder) == 0
    return folder / "site"


class Page(HTMLParser):
    """What a page links, what it loads, and where links may lead in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.over = False
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.article: list[str] = []  # tags, from the page's title on
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if not self.over and (tag == "article" or self.article):
            self.article.append(tag)
        self.ids.update(filter(None, [known.get("id")]))
        if link := known.get("href") or known.get("src"):
            named = tag == "a" or known.get("rel") in ("canonical", "prev", "next")
            (self.links if named else self.loads).append(link)

    def handle_endtag(self, tag: str) -> None:
        self.over = self.over or tag == "article"


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}  # whose links begin with /


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path):
    found = pages(site)
    lost = [f"{path}: loads {link}" for path, page in found.items() for link in page.loads if urlsplit(link).scheme]
    for path, page in found.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in found[target].ids):
                lost.append(f"{path}: {link}")
    assert len(found) > 30
    assert not lost


def test_every_page_is_in_the_navigation(site: Path):
    links = Page(site / "index.html").links
    reached = {(site / urlsplit(link).path).resolve() for link in links if not urlsplit(link).scheme}
    assert not set(pages(site)) - reached


def test_pages_have_what_github_shows(maker: ModuleType, site: Path):
    """Zensical reads lists, tables and code in its own way, so the pages are changed for it."""
    github, different = MarkdownIt("commonmark").enable("table"), []
    for page, place in maker.placed(ROOT).items():
        ours = Counter(Page(site / Path(place).with_suffix(".html")).article)
        theirs = Counter(re.findall(r"<(\w+)", github.render(page.read_text(encoding="utf-8"))))
        different += [f"{place}: {ours[tag]} {tag} of {theirs[tag]}" for tag in PARTS if ours[tag] != theirs[tag]]
    assert not different


def test_broken_links_and_anchors_end_the_build(maker: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for name in ("docs/tutorials", "docs/guides", "docs/reference", "lab"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "README.md").write_text("# Pages\n", encoding="utf-8")
    front = tmp_path / "docs" / "index.md"
    for link, error in (("gone.md", "gone.md leads nowhere"), ("guides/README.md#gone", "anchor does not exist")):
        front.write_text(f"# Front\n\n[there]({link})\n", encoding="utf-8")
        assert maker.build(tmp_path, tmp_path / "build") == 1
        assert error in capfd.readouterr().err
    front.write_text("# Front\n\n[a](../lab/README.md#pages) [b](../lab) `[c](gone.md)`\n", encoding="utf-8")
    assert maker.build(tmp_path, tmp_path / "build") == 0
    assert {"lab/index.html#pages", f"{REPOSITORY}/tree/main/lab"} <= set(
        Page(tmp_path / "build/site/index.html").links
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_search_works_in_a_file(site: Path, tmp_path: Path, width: int):
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set FLATOUT_CHROMIUM to a browser")
    browser = chromium.Browser(program, tmp_path / "profile")
    try:
        browser.open((site / "index.html").as_uri(), width=width, dark=width == 390, touch=width == 390)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("document.body.dataset.mdColorScheme") == ("slate" if width == 390 else "default")
        browser.run("document.querySelector('.md-search__button').click()")
        browser.wait(f"{LIST}?.querySelector('input')")
        for query, wanted in RIGHT_PAGES.items():
            browser.run(f"{LIST}.querySelector('input').select()")
            browser.send("Input.insertText", text=query)
            asked = f"h={query.replace(' ', '+')}#"
            browser.wait(f"{LIST}.querySelector('a')?.href.includes({json.dumps(asked)})")
            found = browser.run(f"[...{LIST}.querySelectorAll('a')].map((one) => one.href)")
            places = [unquote(urlsplit(link).path).removeprefix(f"{site}/") for link in found]
            assert set(places[:2]) & set(wanted), (query, places)
        assert not browser.complaints()
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))]
    finally:
        browser.close()
