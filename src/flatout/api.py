"""Training, data preparation, models in and out, measuring and looking back, as functions.

No global state: a run's random stream, arithmetic switches and files are its own, so several can live in one notebook.
Nothing here prints. Names are those of `flatout`.
"""

from typing import TYPE_CHECKING, Any

import flatout

if TYPE_CHECKING:
    from flatout import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(flatout, name)
