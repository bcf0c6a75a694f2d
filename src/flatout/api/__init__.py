"""Training, data preparation, models in and out, and measuring, as functions.

No global state: a run's random stream, arithmetic switches and files are its own, so several can live in one notebook.
"""

from flatout.api.configs import stored_config
from flatout.api.evaluation import Evaluation, evaluate
from flatout.api.exporting import Merged, consolidate, export, merge
from flatout.api.measuring import bench, tune
from flatout.api.models import LoadedModel, load_model
from flatout.api.text import chat_prompt, generate, is_untaught
from flatout.api.training import prepare, train

__all__ = [
    "Evaluation",
    "LoadedModel",
    "Merged",
    "bench",
    "chat_prompt",
    "consolidate",
    "evaluate",
    "export",
    "generate",
    "is_untaught",
    "load_model",
    "merge",
    "prepare",
    "stored_config",
    "train",
    "tune",
]
