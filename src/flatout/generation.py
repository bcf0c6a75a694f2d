"""Model to text, one token at a time, with a key/value cache.

Contract: with temperature 0 the cached and the uncached path give the same tokens; with a seed sampling repeats, and
never touches the process-wide random state. When the context is full, both paths go on from its second half. Of a
prompt that is longer than the context its end is read, as much as fits.
"""

import math
from collections.abc import Collection, Generator, Sequence

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel


def sample_token(
    logits_V: Tensor, *, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    """One token id. Temperature 0 is greedy; top_k and top_p always leave at least one candidate."""
    if not math.isfinite(best := float(logits_V.max())):  # NaN if any is
        raise CheckpointError(
            f"the model gives no probabilities: its largest logit is {best}",
            "its weights are infinite, NaN or too large: name another checkpoint",
        )
    if temperature == 0.0:
        return int(logits_V.argmax())
    logits_V = logits_V.double().cpu()
    scaled_V = (logits_V - logits_V.max()) / temperature  # the largest is 0, so a tiny temperature cannot overflow
    if top_k is not None and top_k < scaled_V.numel():
        smallest = torch.topk(scaled_V, top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest, -torch.inf)
    probabilities_V = torch.softmax(scaled_V, dim=-1)
    if top_p is not None and top_p < 1.0:
        ordered_V, order_V = probabilities_V.sort(descending=True)
        before_V = ordered_V.cumsum(dim=-1) - ordered_V  # mass ahead of each candidate: 0 for the first, which stays
        ordered_V = ordered_V.masked_fill((before_V >= top_p) & (before_V > 0), 0.0)
        probabilities_V = torch.zeros_like(probabilities_V).scatter(0, order_V, ordered_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    count: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
    vocab: int | None = None,
    cached: bool = True,
) -> Generator[int]:
    """Yields up to `count` token ids after `prompt`, ending early after one of `stops`. The model's mode is put back.

    `vocab` keeps to the ids the tokenizer knows, for a model that has more.
    """
    if not prompt:
        raise ValueError("the prompt needs at least one token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    ids = list(prompt)
    start = max(0, len(ids) - context)
    cache = None
    was_training = model.training
    model.eval()
    try:
        for made in range(count):
            if len(ids) - start > context:  # full: keep the second half and begin a new window there
                start = len(ids) - max(1, context // 2)
                cache = None
            with torch.inference_mode():
                feed = ids[start:] if cache is None else ids[-1:]
                if cache is None and cached and isinstance(model, GPT) and model.cacheable:
                    cache = model.empty_cache(positions=len(ids) - start + count - made)
                tokens_BT = torch.tensor([feed], device=device)
                logits_V = model.logits(tokens_BT, cache, last=True)[0, -1, :vocab]
            token = sample_token(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            ids.append(token)
            yield token
            if token in stops:
                return
    finally:
        model.train(was_training)
