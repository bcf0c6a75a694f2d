"""Runs as one HTML page that needs nothing else: no network, no other file, no torch.

Idea: the page is our own template, style and script, and one JSON text with what `report_data` tells. The script makes
every element from that text with textContent alone.

Contract: nothing that came from a run is ever markup or code. The JSON has no character that could end its element; a
Content-Security-Policy lets run only the script and the style whose hashes it names. A file appears whole or not at
all, and one that is no report of ours is never written over.

Trap: the hashes are of the very bytes between the tags, so nothing may be put inside them after hashing.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError, UsageError
from flatout.files import check_replaceable, disk_errors, write_whole
from flatout.observe.human import printable
from flatout.observe.report.data import report_data
from flatout.observe.sinks import RunHistory, read_history

MARK = "<!doctype html>\n<!-- flatout report -->\n"
MOST_RUNS = 24
_SCRIPTS = ("axes.js", "chart.js", "sections.js", "page.js")  # the last one starts it all
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def read_runs(folders: Sequence[str | Path]) -> list[RunHistory]:
    """The runs in these folders."""
    return [read_history(folder) for folder in chosen_folders(folders)]


def chosen_folders(folders: Sequence[str | Path]) -> list[Path]:
    """These folders, each once, in the order in which they are named."""
    if not folders:
        raise UsageError("no run was named", "name a run folder, such as runs/NAME")
    chosen: dict[Path, Path] = {}
    for folder in folders:
        if "\0" in str(folder):
            raise UsageError("a folder's name cannot hold a zero byte", "name a run folder, such as runs/NAME")
        chosen.setdefault(Path(folder).resolve(), Path(folder))
    if len(chosen) > MOST_RUNS:
        raise UsageError(f"{len(chosen)} runs are too many for one page", f"name at most {MOST_RUNS}")
    return list(chosen.values())


def write_report(
    folders: Sequence[str | Path], path: str | Path, *, overwrite: bool = False, price: float | None = None
) -> int:
    """Writes the page of these runs to `path` and returns its size in bytes.

    With `overwrite`, also in the place of a file that is no report. `price` is what an hour of the machine costs.
    """
    path, histories = Path(path), read_runs(folders)
    check_target(path, overwrite=overwrite)
    content = page_of(report_data(histories, price=price))
    with disk_errors(f"the report {printable(str(path))}", safe=""):
        write_whole(path, content)
    return len(content)


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """Refuses a name at which no report can be put."""
    shown = printable(str(path))
    if path.suffix.lower() not in (".html", ".htm") or "\0" in str(path) or path.is_dir():
        raise UsageError(f"{shown!r} is not the name of an HTML file", "for example --out report.html")
    if not path.parent.is_dir():
        raise ResourceError(f"could not write {shown}: there is no such folder", "create it first, or name another one")
    check_replaceable(path, is_report, overwrite=overwrite, way="name another file with --out")


def is_report(path: Path) -> bool:
    """Whether `write_report` wrote this file."""
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def page_of(data: dict[str, Any], *, live: bool = False) -> bytes:
    """The whole page, as bytes. A live one asks the server it came from for news, and nobody else."""
    style = _part("report.css")
    script = "\n".join(['"use strict";', *(_part(name) for name in _SCRIPTS)])
    values = {
        "policy": policy(script, style, live=live),
        "title": html.escape(data["title"][:200]),
        "style": style,
        "script": script,
        "data": json_for_page(data),
    }
    # One pass over the template: what is put in is not looked at again, so a run's text cannot name a place.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _part("page.html"))
    return (MARK + page).encode("utf-8", "replace")


def json_for_page(data: Any) -> str:
    """JSON that can stand inside a script element: it holds no character with a meaning in HTML, nor beyond ASCII."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match[0]], text)


def policy(script: str, style: str, *, live: bool) -> str:
    """What the browser may do with the page: run our script, apply our style, and if live ask its own server."""
    rules = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    part = importlib.resources.files("flatout.observe.report") / "page" / name
    return part.read_text(encoding="utf-8").replace("\r\n", "\n")
