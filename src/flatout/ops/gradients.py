"""The one door through which gradients of weights leave a backward pass.

A product that makes a weight's gradient adds it to what earlier micro-batches left, which saves autograd a pass over
every gradient. In the first micro-batch there is nothing to add to: autograd gets the gradient and keeps it.

Under FSDP2 a weight inside a block is whole for the length of a pass, a leaf of its own in the type of products, whose
gradient may be wider than itself. The same holds for it: torch takes the gradient when the block's backward is over.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def gradient_type(weight: Tensor) -> torch.dtype:
    """The type in which the gradient of `weight` is kept."""
    return (weight.grad_dtype or weight.dtype) if weight.is_leaf else weight.dtype


def accumulated(weight: Tensor) -> Tensor | None:
    """Where a product adds the gradient of `weight`; None where it must make a tensor of its own."""
    return weight.grad if weight.is_leaf else None


def for_autograd(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """What a backward pass returns for `weight`: nothing where the product added to `accumulated` itself."""
    return None if weight.is_leaf and gradient is weight.grad else gradient


def hold_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives every trained parameter a gradient of zeros where it has none, so that all later ones add in place."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clear_gradients(parameters: Iterable[nn.Parameter], *, drop: bool) -> None:
    """Lets gradients go, or makes them zero where they lie."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    if not drop and held:
        torch._foreach_zero_([p.grad for p in held if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
    for parameter in held if drop else ():
        parameter.grad = None
