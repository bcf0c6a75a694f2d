"""A look at the eigenstate blocks of a model: how far back their states reach, and how fast they turn.

Contract: one copy from the device to the host, so it may be asked for at a run's boundaries and never in a step. A
model without such blocks has nothing to tell. Quantiles are those of the states themselves, with nothing in between, so
an infinite or NaN value shows up as what it is.

Shape legend: L eigenstate blocks, K states of one.

Trap: an angle is learned without an end. Beyond half a turn per token a state turns the other way,
more slowly the larger the number; its period is that of what can be seen, token by token.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flatout.model.eigenstate import Eigenstate
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel
from flatout.records import EigenstateLayer, EigenstateRecord

QUANTILES = {"min": 0.0, "10%": 0.1, "50%": 0.5, "90%": 0.9, "max": 1.0}


@torch.no_grad()
def look_at_eigenstates(model: LanguageModel, step: int) -> Iterator[EigenstateRecord]:
    """The record of this moment, if there are such blocks."""
    mixers = {
        number: block.attention
        for number, block in enumerate(model.blocks if isinstance(model, GPT) else (), start=1)
        if isinstance(block.attention, Eigenstate)
    }
    if not mixers:
        return
    both_L2K = torch.stack([torch.stack(mixer.eigenvalues()) for mixer in mixers.values()])
    context = model.config.context
    log_decay_LK, angle_LK = both_L2K.cpu().double().unbind(1)
    layers = (
        _layer(number, log_decay_K, angle_K, context)
        for number, log_decay_K, angle_K in zip(mixers, log_decay_LK, angle_LK, strict=True)
    )
    yield EigenstateRecord(step=step, context=context, layers=tuple(layers))


def _layer(number: int, log_decay_K: Tensor, angle_K: Tensor, context: int) -> EigenstateLayer:
    horizon_K = -1.0 / log_decay_K
    turn_K = torch.remainder(angle_K, 2 * math.pi)
    turn_K = torch.minimum(turn_K, 2 * math.pi - turn_K)
    return EigenstateLayer(
        layer=number,
        states=log_decay_K.numel(),
        magnitude=_quantiles(log_decay_K.exp()),
        horizon=_quantiles(horizon_K),
        period=_quantiles(2 * math.pi / turn_K),
        beyond=(horizon_K > context).double().mean().item(),
    )


def _quantiles(values_K: Tensor) -> dict[str, float]:
    """NaN comes last in order, as the largest; so one bad state leaves the others to be seen."""
    ordered = values_K.sort().values
    return {name: ordered[round(share * (len(ordered) - 1))].item() for name, share in QUANTILES.items()}
