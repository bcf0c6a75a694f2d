"""Runs examples/flatout.ipynb in a kernel of this Python, in an empty folder.

    python -m tests.notebooks                          makes its stored outputs anew
    python -m tests.notebooks FOLDER MINUTES [WHEEL]   runs it in FOLDER and leaves run.ipynb there

The package is that of this tree. With a WHEEL, the notebook itself installs that one, where there is no Flatout yet.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "flatout.ipynb"


def execute(folder: Path, to: Path, minutes: str = "2", wheel: str = "") -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in book.cells]
    for cell in book.cells:
        cell.source = re.sub(r"(?m)^MINUTES = .*$", f"MINUTES = {minutes}", cell.source)
        if float(minutes) < 1:
            cell.source = cell.source.replace('"epochs": 20', '"epochs": 2')
        if wheel:
            cell.source = re.sub(r"(?m)^FLATOUT = .*$", f'FLATOUT = "{wheel}"', cell.source)
    environment = {**os.environ, "PYTHONPATH": "" if wheel else str(ROOT / "src"), "IPYTHONDIR": f"{folder}/.ipython"}
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute(env=environment)
    book = nbformat.reads(nbformat.writes(book).replace(f"{folder}/", ""), as_version=4)
    for cell, source in zip(book.cells, sources, strict=True):
        cell.metadata.pop("execution", None)  # times
        cell.source = source
    book.metadata["language_info"] = {"name": "python"}
    nbformat.write(book, to)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        if len(sys.argv) == 1:
            execute(Path(empty), NOTEBOOK)
        else:
            execute(Path(sys.argv[1]), Path(sys.argv[1]) / "run.ipynb", *sys.argv[2:])
