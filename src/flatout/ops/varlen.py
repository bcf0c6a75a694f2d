"""Attention over sequences that lie one after the other, given by their bounds.

    flash    torch's FlashAttention-2
    fa4      FlashAttention-4

Shape legend: B rows, T positions of a row, E sequences of all rows, H query heads, G key/value heads, D head size.
"""

import inspect
from typing import Any

from torch import Tensor

from flatout.ops.flash_attention_4 import FlashAttention4


def varlen_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, bounds_E: Tensor, longest: int, *, kernel: str, window: int | None
) -> Tensor:
    """Causal attention inside each sequence, to the last `window` tokens where that is given."""
    parts = [x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD)]
    if kernel == "fa4":
        how: dict[str, Any] = {} if window is None else {"window_size_left": window - 1}
        how |= {"cu_seqlens_q": bounds_E, "cu_seqlens_k": bounds_E, "max_seqlen_q": longest, "max_seqlen_k": longest}
        y_NHD = FlashAttention4.apply(*parts, False, how)
    else:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 takes fewer key heads as they come; later ones want to be asked for it.
        grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters and q_BHTD.shape[1] != k_BGTD.shape[1]
        how = {"window_size": (-1 if window is None else window - 1, 0), **({"enable_gqa": True} if grouped else {})}
        y_NHD = varlen_attn(*parts, bounds_E, bounds_E, longest, longest, **how)  # pyright: ignore
    return y_NHD.view(len(q_BHTD), q_BHTD.shape[2], *y_NHD.shape[1:]).transpose(1, 2)  # pyright: ignore
