"""Flatout trains GPTs as fast as the machine allows.

    import flatout

    config = flatout.load_config("shakespeare", train={"steps": 100})
    for record in flatout.train(config):
        print(record)

Names are those of `flatout.api`, loaded on first use: importing `flatout` costs nothing and needs no torch.
"""

from typing import TYPE_CHECKING, Any

from flatout import api

if TYPE_CHECKING:
    from flatout.api import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["__version__"]
__all__ += api.__all__


def __getattr__(name: str) -> Any:
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
