"""Flatout trains GPTs as fast as the machine allows.

    import flatout

    config = flatout.load_config("shakespeare-char", ["train.steps=100"])
    for record in flatout.train(config):
        print(record)

Names are loaded on first use, so that importing `flatout` costs nothing and needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.api import bench, evaluate, export, generate, load_model, prepare, train, tune
    from flatout.config.load import load_config

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "bench",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "load_model",
    "prepare",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from flatout.config.load import load_config

        return load_config
    if name in __all__:
        from flatout import api

        return getattr(api, name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
