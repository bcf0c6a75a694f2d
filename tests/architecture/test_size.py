"""The size of the code, held at what was reached.

A change that needs more raises the number in the same commit and says why. A change that needs less lowers it, so that
the numbers only grow on purpose. `python -m tests.architecture.test_size` prints the numbers as they are.
"""

import ast
import fnmatch
import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from flatout.config.schema import RunConfig
from flatout.front.commands import VERBS

HELD = {
    "lines of code": 54_084,  # all Python outside tests: no blank lines, no comments, no docstrings
    "statements": 43_058,  # all Python outside tests: nodes of `ast.stmt`, without docstrings
    "lines that the formatter skips": 115,  # all Python outside tests
    "modules": 256,  # of src/flatout, as all the following
    "modules with one importer": 48,
    "settings": 159,  # leaves of RunConfig, and environment variables of our own
    "verbs": 20,
    "class names with two meanings": 0,
    "modules that import RunConfig": 0,  # besides config, resolve and the command line
    "modules that engine/setup.py imports": 19,  # of our own
}
LONGEST_MODULE = 697  # physical lines, in src; at most
LONGEST_LINE = 120

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flatout"
MAY_IMPORT_THE_CONFIG = ("config", "resolve", "front", "cli", "__main__")
# Environment variables of other programs. Any other name that we read is a setting of ours.
OTHERS_VARIABLES = re.compile(
    r"(CUBLAS|CUDA|FLASH_ATTENTION|GLOO|HF|KINETO|MASTER|MKL|NCCL|OMP|PYTORCH|SLURM|TOKENIZERS|TORCH|TORCHELASTIC|WANDB)_"
    r"|(LOCAL_RANK|LOCAL_WORLD_SIZE|NO_COLOR|PATH|PYTHONPATH|RANK|TERM|TMPDIR|WORLD_SIZE)$"
)
PRAGMA = re.compile(r"\s+# (pyright|noqa|type)\b.*$")  # for other tools; ruff measures lines without them too


@dataclass
class Source:
    """One file of Python, and what is counted in it."""

    path: Path
    text: str
    code: int = 0
    statements: int = 0
    imports: set[str] = field(default_factory=set)  # names with dots: modules, or what is taken from them
    strings: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # imported, or attributes of something
    classes: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)  # environment variables that are read by a literal name
    executes: list[int] = field(default_factory=list)  # lines that call exec, eval or compile

    @cached_property
    def module(self) -> str:
        return ".".join(self.path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def sources() -> list[Source]:
    """All Python outside tests, measured once."""
    gc.disable()  # it would look at the syntax trees again and again, and take twice as long
    try:
        return [measured(path) for path in sorted(python_files(ROOT))]
    finally:
        gc.enable()


@cache
def package() -> list[Source]:
    return [source for source in sources() if source.path.is_relative_to(PACKAGE)]


def python_files(root: Path) -> Iterator[Path]:
    """Every file of Python that is neither a test nor in a folder that git ignores; works without git."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split() if (ROOT / ".gitignore").exists() else []
    for folder, inside, files in os.walk(root):
        here = Path(folder)
        inside[:] = [
            name
            for name in inside
            if name not in (".git", ".venv", "__pycache__")
            and not (here / name / "pyvenv.cfg").exists()
            and not any(fnmatch.fnmatch(name, rule.strip("/")) for rule in ignored if here == ROOT or rule[0] != "/")
            and here / name != ROOT / "tests"
        ]
        yield from (here / name for name in files if name.endswith((".py", ".pyi")))


def measured(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    source = Source(path, text)
    documented: set[int] = set()  # lines of strings that stand alone as a statement
    quoted: set[int] = set()  # lines of other strings, in which # begins no comment
    for node in nodes(ast.parse(text)):
        if isinstance(node, ast.stmt):
            if is_docstring(node):
                documented.update(lines_of(node))
            else:
                source.statements += 1
        if isinstance(node, ast.Constant | ast.JoinedStr):
            if node.end_lineno != node.lineno:
                quoted.update(lines_of(node))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                source.strings.add(node.value)
        elif isinstance(node, ast.Import):
            source.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import, which is not counted here"
            source.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
            source.names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            source.names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            source.classes.add(node.name)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval", "compile"):
                source.executes.append(node.lineno)
            if isinstance(node.func, ast.Attribute) and node.args and names_environment(node.func):
                source.variables.update(literal(node.args[0]))
        elif isinstance(node, ast.Subscript) and names_environment(node.value):
            source.variables.update(literal(node.slice))
        elif isinstance(node, ast.Compare) and names_environment(node.comparators[0]):
            source.variables.update(literal(node.left))
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        comment = bare.startswith("#") and number not in quoted
        source.code += bool(bare) and not comment and number not in documented
    return source


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in another order and in a third of the time, without names and their contexts."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                left += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context | ast.Name):
                left.append(value)


def is_docstring(node: ast.stmt) -> bool:
    """A string that stands alone: also those below a field, which pydantic reads."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def names_environment(node: ast.expr) -> bool:
    """`os.environ`, `os.environ.get` and the like, `os.getenv`."""
    while isinstance(node, ast.Attribute):
        if node.attr in ("environ", "getenv"):
            return True
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("environ", "getenv")


def literal(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


@cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in package())


def imported_modules(source: Source) -> set[str]:
    """Modules of ours that a module imports: by a statement, or by their name in a string."""
    known = modules()
    found = {name if name in known else name.rpartition(".")[0] for name in source.imports}
    return (found | source.strings) & known - {source.module}


def leaves(model: type[BaseModel]) -> Iterator[str]:
    """Every field of a model that is no model itself, also where models stand in lists or unions."""
    for name, info in model.model_fields.items():
        inner = list(models_in(info.annotation))
        yield from (f"{name}.{leaf}" for one in inner for leaf in leaves(one)) if inner else (name,)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def own_variables() -> set[str]:
    named = {name for source in package() for name in source.strings if re.fullmatch(r"FLATOUT_\w*", name)}
    read = {name for source in package() for name in source.variables}
    return named | {name for name in read if not OTHERS_VARIABLES.match(name)}


@cache
def counted() -> dict[str, int]:
    """The numbers of HELD as they are."""
    importers = Counter(name for source in package() for name in imported_modules(source))
    classes = Counter(name for source in package() for name in source.classes if not name.startswith("_"))
    setup = next(source for source in package() if source.path == PACKAGE / "engine" / "setup.py")
    return {
        "lines of code": sum(source.code for source in sources()),
        "statements": sum(source.statements for source in sources()),
        "lines that the formatter skips": sum(source.text.count("# fmt: skip") for source in sources()),
        "modules": len(modules()),
        "modules with one importer": sum(
            importers[source.module] == 1 for source in package() if source.path.stem not in ("__init__", "__main__")
        ),
        "settings": len(list(leaves(RunConfig))) + len(own_variables()),
        "verbs": len(VERBS),
        "class names with two meanings": sum(number > 1 for number in classes.values()),
        "modules that import RunConfig": sum(
            "RunConfig" in source.names and source.module.split(".")[1] not in MAY_IMPORT_THE_CONFIG
            for source in package()
            if source.path.parent != PACKAGE or source.path.stem != "__init__"
        ),
        "modules that engine/setup.py imports": len(imported_modules(setup)),
    }


def test_the_code_does_not_grow():
    found = counted()
    grown = [f"{found[name]:,} {name}, held at {held:,}" for name, held in HELD.items() if found[name] > held]
    assert not grown, (
        f"the code has grown: {'; '.join(grown)}. "
        "A change that needs more raises the number in the same commit and says why"
    )
    smaller = [f'"{name}": {found[name]}' for name, held in HELD.items() if found[name] < held]
    assert not smaller, f"the code has shrunk, so write into HELD: {', '.join(smaller)}"


def test_no_module_is_longer_than_the_longest():
    long = {source.module: source.text.count("\n") for source in package() if source.text.count("\n") > LONGEST_MODULE}
    assert not long, f"held at {LONGEST_MODULE} lines"


def test_lines_are_not_made_long_to_have_fewer():
    long = [
        f"{source.path.relative_to(ROOT)}:{number}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > LONGEST_LINE and len(PRAGMA.sub("", line)) > LONGEST_LINE
    ]
    assert not long, f"longer than {LONGEST_LINE} characters"
    assert not [source.path for source in sources() if re.search(r"# (fmt|yapf): ?(off|disable)", source.text)]


def test_no_code_hides_in_strings():
    """`exec`, `eval` and `compile` would run what no count above sees."""
    assert not [f"{source.path.relative_to(ROOT)}:{line}" for source in package() for line in source.executes]


if __name__ == "__main__":
    for counted_name, counted_number in counted().items():
        print(f"{counted_name!r}: {counted_number},")
    print("LONGEST_MODULE =", max(source.text.count("\n") for source in package()))
