"""examples/flatout.ipynb, as it is stored and as it runs in a kernel, in an empty folder and without a network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import REPOSITORY

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "flatout.ipynb"


def cells(book: Any) -> dict[str, Any]:
    return {cell["id"]: cell for cell in book["cells"] if cell["cell_type"] == "code"}


def printed(cell: Any) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def check(book: Any) -> None:
    """No error, nothing red, one picture for each run, and few lines beside it."""
    for cell in cells(book).values():
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert "error" not in kinds
        assert [output["text"] for output in cell["outputs"] if output.get("name") == "stderr"] == []
    for name in ("train", "tune"):
        cell = cells(book)[name]
        shown = [list(output["data"]) for output in cell["outputs"] if output["output_type"] == "display_data"]
        assert shown == [["image/png", "text/plain"]], "drawn once, in its place"
        assert all(line.startswith("note: ") for line in printed(cell).splitlines())
        assert len(printed(cell).splitlines()) < 12
    assert "model.safetensors" in printed(cells(book)["export"])
    assert "model-F32.gguf" in printed(cells(book)["export"])


def test_the_stored_notebook_shows_a_run():
    text = NOTEBOOK.read_text(encoding="utf-8")
    book = json.loads(text)
    assert len(text) < 300_000
    assert [cell["execution_count"] for cell in cells(book).values()] == list(range(1, len(cells(book)) + 1))
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    assert all(cell["metadata"] == {} for cell in book["cells"])
    assert f'FLATOUT = "flatout[gguf] @ git+{REPOSITORY}"' in "".join(cells(book)["install"]["source"])
    assert not any(place in text for place in ("/tmp/", "/home/", "/work/", "/root/")), "paths of a machine"
    check(book)


@pytest.mark.parametrize("minutes", [0.1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_notebook_runs(tmp_path: Path, minutes: float):
    subprocess.run([sys.executable, "-m", "tests.notebooks", tmp_path, str(minutes)], cwd=ROOT, check=True)
    book = json.loads((tmp_path / "run.ipynb").read_text(encoding="utf-8"))
    check(book)
    if minutes == 2:
        assert int(printed(cells(book)["chat"]).splitlines()[-1].split()[0]) >= 4, "right answers of 6"
