"""Writes docs/api.md from the signatures and docstrings of `flatout`: `python docs/make_api.py`.

A test compares the page with what this makes, so it is run whenever a signature or a docstring has changed.
"""

import ast
import importlib
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout import api

PAGE = Path(__file__).with_name("api.md")
_HEAD = """# The API
Made from the code by `python docs/make_api.py`. How the functions go together, with examples: [Python](python.md).

`Config` is a `LoadedConfig` or a `RunConfig`. `Progress` is a function that takes a `PrepareProgress`. `ModelGiven` is
a torch module, or a function that takes the built model and returns one or None; `OptimizerGiven` a `Rule`, several, or
a function that takes named parameters and returns a torch optimizer.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for module_name, names in api.HOMES.items():
        module = importlib.import_module(module_name)
        about = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"\n## {module_name}\n{textwrap.fill(about, 120)}\n")
        parts += [f"\n### {name}\n{_described(getattr(api, name))}" for name in names]
    return "".join(parts)


def _described(thing: Any) -> str:
    if inspect.isclass(thing):
        return _class(thing)
    if inspect.isfunction(thing):
        return _function(thing)
    members = ", ".join(f"`{one.__name__}`" for one in typing.get_args(thing))
    return textwrap.fill(f"One of {members}.", 120) + "\n"


def _function(function: Any) -> str:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return f"{_code(_signature(node))}{inspect.getdoc(function)}\n"


def _class(made: type) -> str:
    lines, _ = inspect.getsourcelines(made)
    (node,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(node, ast.ClassDef)
    fields = [lines[one.lineno - 1].strip() for one in node.body if isinstance(one, ast.AnnAssign)]
    about = (made.__doc__ and inspect.getdoc(made)) or ""
    if about.startswith(f"{made.__name__}("):  # made by `dataclass`, where nobody wrote one
        about = ""
    parts = [f"{about}\n" if about else "", _code("\n".join(fields)) if fields else ""]
    return "".join([*parts, *_methods(node)])


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or (one.name[0] == "_" and one.name not in ("__call__", "__init__")):
            continue
        about = ast.get_docstring(one)
        if about is None and one.name != "__init__":
            continue
        is_property = any("property" in ast.unparse(mark) for mark in one.decorator_list)
        shown = f"{one.name}: {ast.unparse(one.returns)}" if is_property and one.returns else _signature(one)
        yield f"{_code(shown)}{'' if about is None else about + chr(10)}"


def _signature(node: ast.FunctionDef) -> str:
    """A call with its types: on one line if it is short, else with a line for each argument."""
    given, returns = node.args, "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    rows = [_argument(*one) for one in zip(given.args, defaults, strict=True) if one[0].arg != "self"]
    rows += ["*"] if given.kwonlyargs else []
    rows += [_argument(*one) for one in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    rows += [] if given.kwarg is None else [f"**{_argument(given.kwarg, None)}"]
    line = f"{node.name}({', '.join(rows)}){returns}"
    return line if len(line) <= 100 else "\n".join([f"{node.name}(", *(f"    {row}," for row in rows), f"){returns}"])


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    typed = one.arg if one.annotation is None else f"{one.arg}: {ast.unparse(one.annotation)}"
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
