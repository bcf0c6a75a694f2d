"""Text from a model, token by token, with a key/value cache.

Contract: with temperature 0 the cached and the uncached path give the same tokens. Sampling is reproducible by its seed
and does not use the global random state. When the context is full, both paths continue with its second half. Of a
prompt longer than the context, the last `context` tokens are used.
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
    if not math.isfinite(best := float(logits_V.max())):  # NaN if any logit is NaN
        raise CheckpointError(
            f"the model gives no probabilities: its largest logit is {best}",
            "its weights are infinite, NaN or too large: name another checkpoint",
        )
    if temperature == 0.0:
        return int(logits_V.argmax())
    logits_V = logits_V.double().cpu()
    scaled_V = (logits_V - logits_V.max()) / temperature  # the largest is 0, so that no temperature overflows
    if top_k is not None and top_k < scaled_V.numel():
        smallest = torch.topk(scaled_V, top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest, -torch.inf)
    probabilities_V = torch.softmax(scaled_V, dim=-1)
    if top_p is not None and top_p < 1.0:
        ordered_V, order_V = probabilities_V.sort(descending=True)
        before_V = ordered_V.cumsum(dim=-1) - ordered_V  # mass before each candidate: 0 for the first, which stays
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
    """Yields up to `count` token ids after `prompt`; stops after a token in `stops`. Restores the model's mode.

    `vocab`: only ids below it are sampled, for models with more ids than the tokenizer.
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
            if len(ids) - start > context:  # full: continue with the second half
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
