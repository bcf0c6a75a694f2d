"""Optimizers for tests of a step, with rates as a test wants them."""

import dataclasses
from collections.abc import Sequence

from torch import nn

from flatout.config.schema import OptimConfig
from flatout.engine.setup import Trained, all_weights
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of


def made_optimizers(
    trained: nn.Module | Trained, config: OptimConfig, *, rates: Sequence[float] | None = None, **form
) -> Optimizers:
    """Those of `config`, for a model or for what a run learns; `rates` by applied update, else one that stays."""
    given = trained if isinstance(trained, Trained) else all_weights(trained)
    schedule = list(rates or [config.learning_rate])
    rules = [dataclasses.replace(rule, rate=schedule) for rule in rules_of(config, 1, **form)]
    return Optimizers(rules, given.updated)
