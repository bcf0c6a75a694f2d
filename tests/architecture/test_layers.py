"""Imports point down only, as the table of rooms in docs/architecture.md has it."""

import ast
import gc
import re
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "flatout"

LAYERS = [
    {"errors", "shown"},
    {"finding", "records", "config", "files", "launch", "host", "lock"},
    {"folders", "confined", "pulse", "rows", "gguf_file"},
    {"device", "world"},
    {"ops", "corpus"},
    {"data", "model", "optim"},
    {"generation", "checkpoints"},
    {"tasks"},
    {"resolve", "parallel"},
    {"engine"},
    {"tuning", "diagnose"},
    {"observe"},
    {"front"},
    {"serving"},
    {"api", "cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# The package itself holds only the version and lazy names; anyone may ask it for the version.
ROOT = "flatout"


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@cache
def imports() -> dict[Path, tuple[set[str], set[str]]]:
    """Every module: the names that it imports, with dots, and the modules of ours that it imports names from."""
    found: dict[Path, tuple[set[str], set[str]]] = {}
    gc.disable()  # it would look at the syntax trees again and again
    for path in modules():
        names, sources = found[path] = (set(), set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
                sources.update({node.module} if node.module and node.module.startswith("flatout.") else ())
    gc.enable()
    return found


def imported_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports()[path][0]]
    return {name[1] for name in parts if name[0] == ROOT and len(name) > 1 and name[1] in LEVEL}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_every_room_has_a_layer():
    assert {room_of(path) for path in modules()} == set(LEVEL)


def test_imports_point_down():
    for path in modules():
        here = room_of(path)
        for room in imported_rooms(path) - {here}:
            assert LEVEL[room] < LEVEL[here], f"{path}: {here} imports {room}, which is not below it"
            if here == "observe":
                assert room in {"errors", "shown", "records", "config", "files", "folders", "lock", "rows"}, (
                    f"{path}: observe reads records only, not {room}"
                )


def test_the_architecture_page_has_every_room_below_those_that_it_imports():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = [
        line.split("|")[1] for line in page.partition("## Rooms")[2].partition("\n## ")[0].splitlines() if "|" in line
    ]
    row = {name: number for number, cell in enumerate(table) for name in re.findall(r"`(\w+)(?:\.py)?`", cell)}
    assert row.keys() == LEVEL.keys() - {"__main__"}
    for path in modules():
        here = room_of(path)
        for room in imported_rooms(path) - {here} if here in row else ():
            assert row[room] <= row[here], f"{path}: {room} stands below {here} on the page"


def test_sibling_modules_form_no_cycle():
    graph = {}
    for path in modules():
        name = ".".join(("flatout", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = imports()[path][1]
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "word", ["pickle", "torch.load", "allow_pickle", "shell=True", "yaml.load(", "trust_remote_code", "weights_only"]
)
def test_nothing_that_executes_what_it_reads(word: str):
    offenders = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if word in text and word in ast.unparse(_without_docstrings(ast.parse(text))):
            offenders.append(path.name)
    # Jobs travel to our own child processes through a pipe that nobody else can write to; no file is ever read so.
    assert set(offenders) <= ({"workers.py"} if word == "pickle" else set())


def test_pickles_never_touch_a_file():
    code = (SOURCE / "data" / "workers.py").read_text(encoding="utf-8")
    assert "open(" not in code.replace("Popen(", "").replace("fdopen(", "")


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value = ast.Constant("")
    return tree
