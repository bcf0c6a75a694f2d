"""Flatout trains GPTs as fast as the machine allows.

    import flatout

    config = flatout.load_config("shakespeare", train={"steps": 100})
    for record in flatout.train(config):
        print(record)

Names are loaded on first use: importing `flatout` costs nothing, and what only reads a run needs no torch. They are
listed once, in `__init__.pyi`, which type checkers read too.
"""

import ast
import importlib
import pkgutil
from typing import Any

__version__ = "0.2.0"


def _homes() -> dict[str, tuple[str, ...]]:
    """The module of every public name, in the order of the stub."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {str(node.module): tuple(alias.name for alias in node.names) for node in imports}


HOMES = _homes()
_HOME_OF = {name: module for module, names in HOMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "api":  # these functions under the name of a module
        return importlib.import_module("flatout.api")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
