"""How kernels are checked: against a reference in float64, in memory that shows what was not written or not ours.

Every tensor that a kernel's launcher makes with `torch.empty` is full of NaN and lies between two guards. An element
that a kernel leaves out fails the comparison; one that it writes beyond the end fails at the end of the test, or
before, where a test makes so many tensors that they cannot all be kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.ops.lora import LoraLayout, LoraPart

DEVICES = [
    # With a GPU in the machine the kernels are compiled for it, and this process cannot interpret them as well.
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
GUARD = 64
KEPT_BYTES = 2**30
SENTINEL = 96.0  # exact in every floating type down to 8 bits

# (relative to the element, relative to the root mean square of the whole tensor)
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 3e-3), torch.bfloat16: (2e-2, 2e-2)}


class GuardedMemory:
    """Stands in for torch.empty and torch.empty_like."""

    def __init__(self) -> None:
        self.empty, self.empty_like = torch.empty, torch.empty_like
        self.buffers: list[Tensor] = []
        self.bytes = 0

    def make(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        kind = dtype or torch.get_default_dtype()
        where = torch.device(device) if device is not None else torch.get_default_device()
        if not kind.is_floating_point or where.type == "meta" or options:
            return self.empty(shape, dtype=dtype, device=device, **options)
        whole = self.empty(shape.numel() + 2 * GUARD, dtype=kind, device=where)
        fill(whole, SENTINEL)
        fill(whole[GUARD : GUARD + shape.numel()], float("nan"))
        if self.bytes + whole.nbytes > KEPT_BYTES:
            self.check()
        self.buffers.append(whole)
        self.bytes += whole.nbytes
        return whole[GUARD : GUARD + shape.numel()].view(shape)

    def make_like(self, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options or x.device.type == "meta" or not x.is_contiguous():
            made = self.empty_like(x, dtype=dtype, **options)
            return made if made.device.type == "meta" or not made.is_floating_point() else fill(made, float("nan"))
        return self.make(x.shape, dtype=dtype or x.dtype, device=x.device)

    def check(self) -> None:
        for whole in self.buffers:
            guards = torch.cat([whole[:GUARD].float(), whole[-GUARD:].float()])
            assert (guards == SENTINEL).all(), "a kernel wrote beyond the end of its output"
        self.buffers.clear()
        self.bytes = 0


def fill(x: Tensor, value: float) -> Tensor:
    return x.copy_(torch.full((), value, device=x.device).to(x.dtype).expand(x.shape))


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, scale: float = 1.0):
    """Normal numbers that do not depend on the device, as a leaf that wants a gradient."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape))
    values = torch.randn(shape, dtype=torch.float64, generator=generator) * scale
    return values.to(device, dtype).requires_grad_()


def strided(x: Tensor) -> Tensor:
    """The same values, but neither dense nor in order in memory."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    wide = wide.transpose(0, -1).contiguous().transpose(0, -1)[..., 1::2]
    return wide.copy_(x.detach())


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as stored in `dtype`; its gradient passes."""
    return x + (x.detach().to(dtype).double() - x.detach())


def assert_near(mine: Tensor, theirs: Tensor, dtype: torch.dtype, what: str, slack: float = 1.0) -> None:
    relative, absolute = TOLERANCE[dtype]
    assert mine.shape == theirs.shape, what
    mine, theirs = mine.detach().double(), theirs.detach().double()
    assert torch.isfinite(mine).all(), f"{what}: not finite"
    size = theirs.square().mean().sqrt() if theirs.numel() else theirs.new_zeros(())
    bound = slack * (relative * theirs.abs() + absolute * size) + 1e-12
    worst = ((mine - theirs).abs() / bound).max() if theirs.numel() else 0.0
    assert worst <= 1.0, f"{what}: {worst:.3g} times the tolerance"


def compare(
    fast: Callable[..., Any],
    slow: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    *,
    dtype: torch.dtype,
    seed: int = 5,
    slack: float = 1.0,
) -> None:
    """Outputs, and gradients of every input, of `fast` in its own types and of `slow` in float64.

    Gradients arrive strided, as any neighbour may send them.
    """
    exact = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    mine, theirs = _as_tuple(fast(*inputs)), _as_tuple(slow(*exact))
    assert len(mine) == len(theirs)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert_near(a, b, dtype, f"output {index}", slack)
    sent = [draw(*a.shape, dtype=a.dtype, device=a.device.type, seed=seed + i).detach() for i, a in enumerate(mine)]
    wanted = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    got = torch.autograd.grad(mine, [inputs[i] for i in wanted], [strided(g) if g.ndim > 1 else g for g in sent])
    expected = torch.autograd.grad(theirs, [exact[i] for i in wanted], [g.double() for g in sent])
    for i, a, b in zip(wanted, got, expected, strict=True):
        assert a.dtype == getattr(inputs[i], "dtype", None)
        assert_near(a, b, dtype, f"gradient of input {i}", slack)


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def shapes_and_types(
    shapes: Sequence[tuple[int, ...]], types: Sequence[Any], *, more: tuple[int, ...], many: tuple[int, ...]
) -> list[Any]:
    """Every shape in every type. The interpreter pays for each row: `more` rows in the last type, `many` on a GPU."""
    every = [(*shape, kind) for shape in shapes for kind in types]
    on_gpu = [pytest.param(*many, kind, marks=pytest.mark.gpu) for kind in types]
    return [*every, (*more, types[-1]), *on_gpu]


def one_part(outputs: int, rank: int, scale: float) -> LoraLayout:
    """One adapter for the whole matrix."""
    return LoraLayout(outputs, (LoraPart(0, outputs, rank, scale),))
