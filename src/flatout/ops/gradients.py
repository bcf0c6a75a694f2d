"""Gradient accumulation in the product that computes a weight's gradient.

The product adds to the gradient of earlier micro-batches, which saves autograd a pass over every gradient. In the first
micro-batch there is none: autograd gets the product's result and stores it.

Under FSDP2 a block's weight is gathered for the length of a pass, as a leaf in the type of products whose gradient may
have a wider type. The same holds for it: torch reduces the gradient after the block's backward pass.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def gradient_type(weight: Tensor) -> torch.dtype:
    """The type of `weight`'s gradient."""
    return (weight.grad_dtype or weight.dtype) if weight.is_leaf else weight.dtype


def accumulated(weight: Tensor) -> Tensor | None:
    """The tensor to which a product adds the gradient of `weight`; None if it must make a new one."""
    return weight.grad if weight.is_leaf else None


def for_autograd(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """The return value of a backward pass for `weight`: None if the product added to `accumulated`."""
    return None if weight.is_leaf and gradient is weight.grad else gradient


def hold_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives every trained parameter without a gradient one of zeros, so that later gradients are added in place."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clear_gradients(parameters: Iterable[nn.Parameter], *, drop: bool) -> None:
    """Frees gradients (`drop`), or zeroes them in place."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    if not drop and held:
        torch._foreach_zero_([p.grad for p in held if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
    for parameter in held if drop else ():
        parameter.grad = None
