"""Loss on a fixed set of windows: no dropout, no label smoothing, the same tokens every time."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn

from flatout.data.loader import Batch
from flatout.data.shards import Tokens, TokenShards
from flatout.data.tokenizer import Tokenizer
from flatout.ops.reference import IGNORED
from flatout.world import World


def evaluate(
    model: nn.Module,
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
                if batch.packed is None:
                    total += model(batch.tokens, batch.targets)
                else:
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


def tokens_per_byte(shards: Tokens, tokenizer: Tokenizer, *, apart: bool) -> float | None:
    """Tokens that are foretold for each byte that they stand for, over a whole split; None where bytes are not known.

    Joined, that is every token but the first, which is not worth a word. Apart, nothing foretells the first token of a
    document: it has no part in the loss, so neither it nor its bytes count. What such tokens hold in bytes is read from
    documents all over the split. The end of a text is a token without bytes, and foretold like any other.
    """
    tokens, size = shards.tokens, float(shards.text_bytes)
    if apart and size:
        assert isinstance(shards, TokenShards), "checked by the config"
        starts = shards.document_starts()
        some = starts[:: -(-len(starts) // _DOCUMENTS)].astype(np.int64)
        first = shards.read_ranges(some, np.ones_like(some))
        tokens -= len(starts)
        size -= len(starts) * sum(_bytes_of(int(id), tokenizer) for id in first) / len(first)
    return tokens / size if size > 0 else None


_DOCUMENTS = 4096  # whose first tokens are looked at; a mean over so many is as good as one over all


def _bytes_of(id: int, tokenizer: Tokenizer) -> int:
    """Bytes of text that a token stands for. One that ends inside of a character decodes to a mark of three bytes, in
    the place of one byte or more that it has: that counts as one."""
    if id == tokenizer.end_of_text:
        return 0
    return len(tokenizer.decode([id]).replace("\ufffd", "?").encode("utf-8"))
