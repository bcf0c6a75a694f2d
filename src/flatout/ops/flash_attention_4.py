"""FlashAttention-4 of the package flash-attn-4, which compiles its kernels on first use and keeps them on disk.

Queries, keys and values may be views of one buffer, as one product leaves them. Their gradients are then written into
one buffer in the same places, so that whoever packs them for the product back (ops/kernels/heads.py) finds them packed.

The forward pass may be cuDNN's: on an H200 that is the faster one, as FlashAttention-4's backward pass is. What goes
from one to the other is the result and, per query, the logarithm of the sum of exponentials, which both define alike.

Trap: the package is young. The two functions used here are its inner ones, because only they take outputs.

Shape legend: B batch, T positions, H query heads, G key/value heads, D head size.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.ops.packing import packed

# What the package and its compiler have to settle with each other is nothing a user can do anything about. It is said
# here, and not where they are called: that may be inside of a block that puts all filters back at its end.
warnings.filterwarnings("ignore", message=r"Argument \w+ \(position", category=UserWarning)


def fa4_missing() -> str | None:
    """Why it is not at hand, or None."""
    found = importlib.util.find_spec("flash_attn")  # not of flash_attn.cute, which would import FlashAttention-2
    folders = [] if found is None else found.submodule_search_locations or []
    return None if any((Path(folder) / "cute").is_dir() for folder in folders) else "flash-attn-4 is not installed"


@functools.cache
def fa4_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, backward)."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when it is imported
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface._flash_attn_fwd, interface._flash_attn_bwd


def _cudnn_forward(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor]:
    parts = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    y_BHTD, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, True)[:2]
    return y_BHTD.transpose(1, 2).contiguous(), lse.reshape(y_BHTD.shape[:3])  # torch has had it with an axis more


class FlashAttention4(torch.autograd.Function):
    """Of rows [B, T, heads, D], or of sequences one after the other [N, heads, D], whose bounds are in `how`."""

    @staticmethod
    def forward(ctx, q_BTHD, k_BTGD, v_BTGD, cudnn, how):
        ctx.how = {"causal": True, **how}
        if cudnn:
            y_BTHD, lse_BHT = _cudnn_forward(q_BTHD, k_BTGD, v_BTGD)
        else:
            y_BTHD, lse_BHT = fa4_kernels()[0](q_BTHD, k_BTGD, v_BTGD, return_lse=True, **ctx.how)[:2]
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, y_BTHD, lse_BHT)
        return y_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTHD):
        q_BTHD, k_BTGD, v_BTGD, y_BTHD, lse_BHT = ctx.saved_tensors
        parts, into = (q_BTHD, k_BTGD, v_BTGD), {}
        whole = packed(parts) if q_BTHD.dim() == 4 else None
        if whole is not None:
            gradients = torch.empty_like(whole).split([part.shape[2] for part in parts], dim=2)
            into = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        gradients = fa4_kernels()[1](*parts, y_BTHD, dy_BTHD.contiguous(), lse_BHT, **ctx.how, **into)
        return *gradients[:3], None, None


def flash_attention_4(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, cudnn: bool = False, window: int | None = None
) -> Tensor:
    """Causal attention over as many queries as keys, to the last `window` of them where that is given.

    `cudnn` takes cuDNN's forward pass, which knows no windows.
    """
    parts_BTHD = (x.transpose(1, 2) for x in (q_BHTD, k_BGTD, v_BGTD))
    how = {} if window is None else {"window_size_left": window - 1}
    return FlashAttention4.apply(*parts_BTHD, cudnn and window is None, how).transpose(1, 2)  # pyright: ignore
