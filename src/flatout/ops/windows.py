"""Causal attention to the last W tokens only: what a sliding-window layer does.

Idea: a window that is cut out of a full score matrix saves nothing. Each form here touches about 2·W keys per query,
whatever the length of the sequence.

    blocks   torch's attention on blocks of W queries, each with its own and the block before as keys: any device
    flash    torch's FlashAttention-2, which knows windows through its entry for packed sequences
    fa4      FlashAttention-4
    flex     FlexAttention with a banded block mask (ops/attention.py)

Contract: token t sees tokens t-W+1 to t, itself included. Where W reaches over the whole sequence this is causal
attention. The definition is `window_mask` with `attention_reference`.

Shape legend: B batch, T positions, S key positions, H query heads, G key/value heads, D head size, N = B·T, C blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.ops.flash_attention_4 import flash_attention_4
from flatout.ops.reference import attention_reference, causal_mask
from flatout.ops.varlen import varlen_attention


def window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """True where query t may look at key s, the queries being the last of the keys."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    return causal_mask(queries, keys, device) & (rows - torch.arange(keys, device=device)[None, :] < window)


def window_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, window: int, kernel: str) -> Tensor:
    """Attention of every position to itself and the `window` - 1 before it; as many queries as keys."""
    if kernel == "reference":
        length = q_BHTD.shape[2]
        visible = window_mask(length, length, window, q_BHTD.device)
        return attention_reference(q_BHTD, k_BGTD, v_BGTD, visible=visible)
    if kernel == "fa4":
        return flash_attention_4(q_BHTD, k_BGTD, v_BGTD, window=window)
    if kernel == "flash":
        batch, _, length, _ = q_BHTD.shape
        bounds_B = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q_BHTD.device)
        return varlen_attention(q_BHTD, k_BGTD, v_BGTD, bounds_B, length, kernel="flash", window=window)
    assert kernel == "blocks", kernel
    return _blocks(q_BHTD, k_BGTD, v_BGTD, window)


def _blocks(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, window: int) -> Tensor:
    """Queries in blocks of W. Of the 2·W keys of a block its r-th query sees those from r + 1 to r + W."""
    batch, heads, length, size = q_BHTD.shape
    groups = k_BGTD.shape[1]
    grouped = heads != groups
    first = min(window, length)
    q_first, k_first, v_first = (x[:, :, :first] for x in (q_BHTD, k_BGTD, v_BGTD))
    y_BHTD = F.scaled_dot_product_attention(q_first, k_first, v_first, is_causal=True, enable_gqa=grouped)
    if length <= window:
        return y_BHTD
    blocks = -(-length // window)
    spare = blocks * window - length
    q_BHTD, k_BGTD, v_BGTD = (F.pad(x, (0, 0, 0, spare)) for x in (q_BHTD, k_BGTD, v_BGTD))
    # Blocks become the batch and sequences become heads, so that one mask of W x 2·W serves all of them.
    q_CHWD = q_BHTD[:, :, window:].unflatten(2, (blocks - 1, window)).permute(2, 0, 1, 3, 4).flatten(1, 2)
    k_CGSD, v_CGSD = (x.unfold(2, 2 * window, window).permute(2, 0, 1, 4, 3).flatten(1, 2) for x in (k_BGTD, v_BGTD))
    mask_WS = window_mask(window, 2 * window, window, q_BHTD.device)
    rest_CHWD = F.scaled_dot_product_attention(q_CHWD, k_CGSD, v_CGSD, attn_mask=mask_WS, enable_gqa=grouped)
    rest_BHTD = rest_CHWD.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4).reshape(batch, heads, -1, size)
    return torch.cat([y_BHTD, rest_BHTD], dim=2)[:, :, :length]
