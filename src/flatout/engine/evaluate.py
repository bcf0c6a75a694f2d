"""Loss on a fixed set of windows: no dropout, no label smoothing, the same tokens every time."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from flatout.data.batch import Batch
from flatout.model.protocol import LanguageModel
from flatout.ops.reference import IGNORED
from flatout.world import World


def evaluate(
    model: LanguageModel,
    batches: Iterable[Batch],
    scope: Callable[[], AbstractContextManager[None]],
    world: World | None = None,
) -> tuple[float, int]:
    """(mean loss per labelled token, labelled tokens) of all processes of `world`, which is this one alone by itself.

    The model's train or eval mode is put back.
    """
    world = world or World()
    device = next(model.parameters()).device
    double = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=double, device=device)
    labelled = torch.zeros((), dtype=torch.int64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), scope():
            for batch in batches:
                tokens, targets, layout = batch.tokens, batch.targets, None
                if batch.packed is not None:
                    tokens, targets, layout = batch.packed.part(slice(None), device)
                total += model(tokens, targets, 0.0, layout)
                labelled += (batch.targets != IGNORED).sum()
    finally:
        model.train(was_training)
    count = int(world.sum(labelled))
    return float(world.sum(total)) / max(count, 1), count


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, tokens_per_byte: float | None) -> float | None:
    """Loss per byte of text, in bits: comparable between tokenizers, as loss per token is not."""
    return None if tokens_per_byte is None else loss / math.log(2) * tokens_per_byte
