"""Runs examples/flatout.ipynb in a kernel, in an empty folder, with the package of this tree.

python -m tests.notebooks                  makes its stored outputs anew
python -m tests.notebooks FOLDER MINUTES   runs it in FOLDER, trains for MINUTES, and leaves run.ipynb there
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


def execute(folder: Path, to: Path, minutes: str | None) -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in book.cells:
        if minutes is not None:
            cell.source = re.sub(r"(?m)^MINUTES = .*$", f"MINUTES = {minutes}", cell.source)
            if float(minutes) < 1:
                cell.source = cell.source.replace('"epochs": 15', '"epochs": 2')
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "IPYTHONDIR": str(folder / ".ipython")}
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute(env=environment)
    book = nbformat.reads(nbformat.writes(book).replace(f"{folder}/", ""), as_version=4)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times
    book.metadata["language_info"] = {"name": "python"}
    nbformat.write(book, to)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        if len(sys.argv) == 1:
            execute(Path(empty), NOTEBOOK, None)
        else:
            execute(Path(sys.argv[1]), Path(sys.argv[1]) / "run.ipynb", sys.argv[2])
