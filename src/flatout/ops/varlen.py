"""torch's FlashAttention-2 over sequences that lie one after the other, given by their bounds.

Shape legend: N tokens of all sequences, E sequences, H query heads, G key/value heads, D head size.
"""

import inspect

from torch import Tensor


def varlen_flash(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bounds_E: Tensor, longest: int, *, window: int | None = None
) -> Tensor:
    """Causal attention inside each sequence, to the last `window` tokens where that is given."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads as they come; later ones want to be asked for it.
    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters and q_NHD.shape[1] != k_NGD.shape[1]
    how = {"window_size": (-1 if window is None else window - 1, 0), **({"enable_gqa": True} if asked else {})}
    return varlen_attn(q_NHD, k_NGD, v_NGD, bounds_E, bounds_E, longest, longest, **how)  # pyright: ignore
