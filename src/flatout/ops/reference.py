"""The plain form of every operation: slow, obvious, right. Fast paths elsewhere in this folder are tested against
these, in outputs and in gradients; nothing here may be optimised.

Shape legend: B batch, T query positions, S key positions, H query heads, G key/value heads, D head size, W width,
V vocabulary, N tokens (B·T).
"""

import math

import torch
from torch import Tensor

IGNORED = -100  # a target with this value carries no label and counts nowhere


def attention_reference(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    keep_BHTS: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention, written out. With S > T the queries are the last T of the S positions.

    `keep_BHTS` holds the dropout factors (0 or 1/(1-p)) when there are any, `visible` what a query may look at where
    that is not all before it.
    """
    heads, groups = q_BHTD.shape[1], k_BGSD.shape[1]
    k_BHSD = k_BGSD.repeat_interleave(heads // groups, dim=1)
    v_BHSD = v_BGSD.repeat_interleave(heads // groups, dim=1)
    queries, keys = q_BHTD.shape[2], k_BHSD.shape[2]
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-1, -2) / math.sqrt(q_BHTD.shape[3])
    visible = causal_mask(queries, keys, q_BHTD.device) if visible is None else visible
    weights_BHTS = torch.softmax(scores_BHTS.masked_fill(~visible, -math.inf), dim=-1)
    if keep_BHTS is not None:
        weights_BHTS = weights_BHTS * keep_BHTS
    return weights_BHTS.to(v_BHSD.dtype) @ v_BHSD


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where query t may look at key s, the queries being the last of the keys."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    return rows >= torch.arange(keys, device=device)[None, :]
