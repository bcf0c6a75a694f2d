"""Muon's update of a matrix: momentum, orthogonalisation by Polar Express, NorMuon's second moment, decay.

The update of a matrix G = U S V' is approximately U V': every direction moves by the same amount. Polar Express (Amsel
et al., arXiv 2505.16932) approximates it by five odd polynomials of degree 5, which need matrix products only.

Contract: numbers are tensors on the device; if `finite` is false, nothing changes. The result for a matrix does not
depend on the values of other matrices in its stack, but its rounding depends on their number: for bit-identical results
keep the stacks the same. Products are in the type of the matrices, so autocast must be off.

Shape legend: N matrices of a stack, R rows, C columns, K = max(R, C).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
SAFETY = 1.02  # keeps singular values below 1 in spite of rounding
NORMUON_BETA = 0.9
SMALLEST = 1e-10  # lower bound of second moments and norms
_TINY = 1e-7


class Numbers(NamedTuple):
    """Scalars of one update, as tensors on the device. `finite` is a boolean."""

    rate: Tensor
    decay: Tensor
    momentum: Tensor
    divisor: Tensor
    finite: Tensor


def product_type(weight: Tensor) -> torch.dtype:
    """The type of orthogonalisation: bf16 on a GPU, the weights' type elsewhere."""
    return torch.bfloat16 if weight.device.type == "cuda" else weight.dtype


def advance_reference(gradient: Tensor, moving: Tensor, out: Tensor | None, numbers: Numbers) -> None:
    """Updates the momentum, and writes the Nesterov momentum, which is then orthogonalised, to `out`."""
    divisor, momentum = (number.to(moving.dtype) for number in (numbers.divisor, numbers.momentum))
    gradient = gradient / divisor
    moved = moving.lerp(gradient, 1 - momentum)
    if out is not None:
        out.copy_(gradient.lerp(moved, momentum))
    moving.copy_(torch.where(numbers.finite, moved, moving))


def apply_reference(weight: Tensor, update: Tensor, numbers: Numbers, *, decays: bool, cautious: bool) -> None:
    """Subtracts rate · (update + decay · weight); `cautious` decays only where update and weight have one sign."""
    rate, decay = (number.to(weight.dtype) for number in (numbers.rate, numbers.decay))
    change = update.to(weight.dtype)
    if decays:
        kept = weight * (change * weight > 0) if cautious else weight
        change = change + decay * kept
    weight.copy_(torch.where(numbers.finite, weight - rate * change, weight))


def gram_reference(x_NRC: Tensor, scale_N11: Tensor | None = None) -> Tensor:
    """Each matrix times its transpose, on the side with the smaller result, times `scale_N11`."""
    square = torch.bmm(x_NRC.mT, x_NRC) if x_NRC.shape[-2] >= x_NRC.shape[-1] else torch.bmm(x_NRC, x_NRC.mT)
    return square if scale_N11 is None else square.mul_(scale_N11)


def polynomial_reference(square_NSS: Tensor, a: float, b: float, c: float, scale_N11: Tensor | None = None) -> Tensor:
    """a + b·S + c·S² of each symmetric matrix S, times `scale_N11`."""
    factor_NSS = torch.baddbmm(square_NSS, square_NSS, square_NSS, beta=b, alpha=c)
    factor_NSS.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor_NSS if scale_N11 is None else factor_NSS.mul_(scale_N11)


class Products(NamedTuple):
    """The two symmetric products of an iteration, by torch or by our kernels."""

    gram: Callable[[Tensor, Tensor | None], Tensor] = gram_reference
    polynomial: Callable[[Tensor, float, float, float, Tensor | None], Tensor] = polynomial_reference


def orthogonalise(
    matrices_NRC: Tensor,
    scale: float = 1.0,
    out: Tensor | None = None,
    iterations: tuple[tuple[float, float, float], ...] = POLAR_EXPRESS,
    products: Products = Products(),  # noqa: B008 - it never changes
) -> Tensor:
    """Approximately U V' of each matrix, times `scale`, in the type of the matrices."""
    if matrices_NRC.device.type == "cpu" and matrices_NRC.shape[-2] < matrices_NRC.shape[-1]:
        # On a CPU torch computes X'X four times as fast as XX'.
        made_NRC = orthogonalise(matrices_NRC.mT.contiguous(), scale, None, iterations, products).mT
        return made_NRC if out is None else out.copy_(made_NRC)
    x = matrices_NRC
    tall = x.shape[-2] >= x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    norm_N11 = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    # The first products are scaled instead of the matrices, which saves a pass over them.
    unit_N11 = 1 / (norm_N11 * SAFETY + _TINY)
    scales: tuple[Tensor | None, Tensor | None] = (unit_N11.square(), unit_N11)
    for number, (a, b, c) in enumerate(iterations, start=1):
        times, place = (scale, out) if number == len(iterations) else (1.0, None)
        # a·x is part of the product, because torch would copy x to add it afterwards
        factor_NSS = products.polynomial(products.gram(x, scales[0]), a * times, b * times, c * times, scales[1])
        x = torch.bmm(x, factor_NSS, out=place) if tall else torch.bmm(factor_NSS, x, out=place)
        scales = (None, None)
    return x


def normalise_reference(update_NRC: Tensor, second_NK: Tensor, finite: Tensor) -> Tensor:
    """Normalises rows of updates (columns, if wide) by their running size, in place; returns the new second moment.

    This is NorMuon (arXiv 2510.05491). It keeps the Frobenius norm of an update.
    """
    axis = -1 if update_NRC.shape[-2] >= update_NRC.shape[-1] else -2
    size = torch.linalg.vector_norm(update_NRC, dim=axis, dtype=second_NK.dtype)
    mean_NK = size.square() / update_NRC.shape[axis]
    moved_NK = second_NK.lerp(mean_NK, 1 - NORMUON_BETA)
    factor_NK = moved_NK.clamp(min=SMALLEST).rsqrt()
    before, after = mean_NK.sum(-1, keepdim=True), (mean_NK * factor_NK.square()).sum(-1, keepdim=True)
    factor_NK = factor_NK * (before.sqrt() / after.sqrt().clamp(min=SMALLEST))
    torch.mul(update_NRC, factor_NK.unsqueeze(axis), out=update_NRC)
    return torch.where(finite, moved_NK, second_NK)
