"""The engine asks data what it wants to know, and never what kind it is."""

import ast
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "src" / "flatout" / "engine"
KINDS = {
    "ArrayData", "ArrayLoader", "Dataset", "DeviceLoader", "HostLoader", "SampleData", "SampleLoader", "SampleOrder",
    "ShardData", "StreamData", "StreamDataset", "StreamLoader", "TokenShards", "TokenStream", "WindowOrder",
}  # fmt: skip
MOST_LINES = 60


def nodes(path: Path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_no_isinstance_on_kinds_of_data():
    asked = [
        f"{path.name}:{node.lineno}"
        for path in sorted(ENGINE.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type")
        if KINDS & {name.id for argument in node.args[1:] for name in ast.walk(argument) if isinstance(name, ast.Name)}
    ]
    assert not asked


def test_setup_and_loop_know_no_kind_by_name():
    for name in ("setup", "loop", "saving", "saver", "state", "run", "recovery"):
        imported = {
            alias.name
            for node in nodes(ENGINE / f"{name}.py")
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not imported & KINDS, name


def test_functions_can_be_read_at_once():
    rooms = [path for room in ("engine", "model", "front") for path in (ENGINE.parent / room).rglob("*.py")]
    rooms = [path for path in rooms if not path.name.startswith("verbs_")]
    assert len(rooms) > 40
    for path in rooms:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MOST_LINES, f"{path.name}: {node.name} has {lines} lines"


def test_the_kind_of_a_config_is_said_in_one_place():
    """`RunConfig.data_kind` and `fine_tunes`. Besides them, only the opening of a kind and the look at text ask."""
    asked = {
        path.relative_to(ENGINE.parent).as_posix()
        for path in sorted(ENGINE.parent.rglob("*.py"))
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and ast.unparse(node).endswith("data.streaming"))
        or (isinstance(node, ast.Compare) and "chat.source is" in ast.unparse(node))
    }
    assert asked == {"config/schema.py", "resolve/opening.py", "diagnose/check_data.py"}
