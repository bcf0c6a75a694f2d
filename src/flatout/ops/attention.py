"""Causal attention: torch's fused kernel, or the reference when asked for.

Shape legend: B batch, T query positions, S key positions, H query heads, G key/value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ops.reference import attention_reference, causal_mask


def causal_attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, backend: str, dropout: float = 0.0) -> Tensor:
    """Attention of the last T of S positions to everything before them. `backend` is sdpa or reference."""
    if backend == "reference":
        return attention_reference(q_BHTD, k_BGSD, v_BGSD, keep_BHTS=_dropout_factors(q_BHTD, k_BGSD, dropout))
    queries, keys = q_BHTD.shape[2], k_BGSD.shape[2]
    # Only is_causal reaches the fast kernels; an explicit mask would rule them out, so it is kept for the one case
    # that needs it: several new tokens after a filled cache.
    mask = None if queries in (1, keys) else causal_mask(queries, keys, q_BHTD.device)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and queries > 1,
        enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
    )


def _dropout_factors(q_BHTD: Tensor, k_BGSD: Tensor, dropout: float) -> Tensor | None:
    if dropout == 0.0:
        return None
    shape = (*q_BHTD.shape[:3], k_BGSD.shape[2])
    return F.dropout(torch.ones(shape, dtype=q_BHTD.dtype, device=q_BHTD.device), dropout)
