"""Which programs load the model that a run trains, and how to train one that other programs load."""

import shlex

from flatout.config.schema import RunConfig
from flatout.config.yaml_loader import format_value
from flatout.model.hub import changes_for_export

OTHERS = "transformers, vLLM or llama.cpp"
_FEW = 3  # settings that are worth changing one by one; more of them make another model, which a preset is


def who_loads_it(config: RunConfig) -> str | None:
    """What to say at the start of a run whose model only Flatout loads; None where other programs load it, too."""
    if not changes_for_export(config.model):
        return None
    return f"only Flatout loads this model, not {OTHERS}; {way_to_export(config)}"


def way_to_export(config: RunConfig) -> str:
    """The settings or the command that train a model which other programs load."""
    needed = changes_for_export(config.model)
    if len(needed) <= _FEW and config.train.minutes is None:
        words = " ".join(f"model.{field}={format_value(value)}" for field, value in needed.items())
        return f"one that is trained with {words} can be exported"
    length = "" if config.train.minutes is None else f" --minutes {config.train.minutes:g}"
    source = f"data.source={config.data.source if isinstance(config.data.source, str) else '...'}"
    return f"`flatout train modern{length} {shlex.quote(source)}` trains one that can be exported"
