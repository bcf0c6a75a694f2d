"""Attention in its plain form, which fast forms are compared with, in outputs and gradients. Do not optimise it.

Shape legend: B batch, T query positions, S key positions, H query heads, G key/value heads, D head size.
"""

import math

import torch
from torch import Tensor

IGNORED = -100  # the target of a token without a label


def attention_reference(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    keep_BHTS: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention, written out. With S > T the queries are the last T of the S positions.

    `keep_BHTS`: dropout factors (0 or 1/(1-p)). `visible`: the mask, if it is not the causal one.
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
    """True where query t sees key s; the queries are the last of the keys."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    return rows >= torch.arange(keys, device=device)[None, :]
