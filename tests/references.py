"""Plain forms of operations, written out, which fast ones are compared with.

Shape legend: B batch, T positions, H heads, D head size, W width, V vocabulary, N tokens (B·T), M outputs, K inputs.
"""

import torch
from torch import Tensor

from flatout.ops.reference import IGNORED


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate_reference(x_BHTD: Tensor, base: float, offset: int = 0) -> Tensor:
    """Rotary positions: channel pair (i, i + D/2) is turned by position · base^(-2i/D)."""
    positions, size = x_BHTD.shape[2], x_BHTD.shape[3]
    half = size // 2
    rates = torch.tensor([base ** (-2 * i / size) for i in range(half)], dtype=torch.float64)
    angles_TD = torch.arange(offset, offset + positions, dtype=torch.float64)[:, None] * rates
    turn = torch.polar(torch.ones_like(angles_TD), angles_TD).to(x_BHTD.device)
    pairs = torch.complex(x_BHTD[..., :half].double(), x_BHTD[..., half:].double()) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(x_BHTD.dtype)


def linear_cross_entropy_reference(
    hidden_NW: Tensor, weight_VW: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0, cap: float = 0.0
) -> Tensor:
    """Sum over labelled tokens of -log p(target); smoothing mixes in the uniform distribution over V.

    A cap above 0 bends logits so that none reaches it.
    """
    logits_NV = hidden_NW @ weight_VW.T
    log_p_NV = torch.log_softmax(cap * torch.tanh(logits_NV / cap) if cap > 0 else logits_NV, dim=-1)
    total = hidden_NW.new_zeros(())
    for row, target in zip(log_p_NV, targets_N.tolist(), strict=True):
        if target != IGNORED:
            total = total - (1 - label_smoothing) * row[target] - label_smoothing * row.mean()
    return total


def fp8_rounded(x: Tensor, kind: torch.dtype, scale: float | None = None) -> Tensor:
    """x as an 8-bit type holds it, with one scale: a given one, beyond whose range values are clamped, or that which
    puts the largest magnitude at the type's largest."""
    top = torch.finfo(kind).max
    if scale is None:
        highest = float(x.abs().max())
        scale = top / highest if highest > 0 else 1.0
    return ((x.float() * scale).clamp(-top, top).to(kind).float() / scale).to(x.dtype)


class _Fp8LinearReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, x_scale, dy_scale):
        weight_8 = fp8_rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight_8)
        ctx.dy_scale = dy_scale
        return fp8_rounded(x, torch.float8_e4m3fn, x_scale) @ weight_8.T

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore
        x, weight_8 = ctx.saved_tensors
        dx = fp8_rounded(dy, torch.float8_e4m3fn, ctx.dy_scale) @ weight_8
        return dx, dy.flatten(0, -2).T @ x.flatten(0, -2), None, None


def fp8_linear_reference(
    x: Tensor, weight_MK: Tensor, x_scale: float | None = None, dy_scale: float | None = None
) -> Tensor:
    """x @ weight.T with 8-bit operands forward and towards x; the gradient of the weights is exact."""
    return _Fp8LinearReference.apply(x, weight_MK, x_scale, dy_scale)  # pyright: ignore
