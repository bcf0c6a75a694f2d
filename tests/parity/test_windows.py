"""Sliding-window attention against its definition: results, gradients, causality, reach, decoding."""

import types

import pytest
import torch
from torch import Tensor

from flatout.ops.attention import (
    causal_attention,
    fa4_missing,
    masked_attention,
    window_attention,
    window_kernel,
    window_mask,
)

CUDA = [
    pytest.param("flash", marks=pytest.mark.gpu),
    pytest.param(
        "fa4", marks=[pytest.mark.gpu, pytest.mark.skipif(fa4_missing() is not None, reason="no flash-attn-4")]
    ),
]


def values(
    batch: int, heads: int, groups: int, length: int, size: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, count, size) for count in (heads, groups, groups)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return [x.transpose(1, 2).detach().requires_grad_() for x in made]


def both(function, inputs: list[Tensor]) -> list[Tensor]:
    y = function(*inputs)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.device, y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize(("length", "window"), [(1, 4), (4, 4), (5, 4), (8, 4), (13, 4), (16, 1), (9, 3), (7, 64)])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
def test_blocks_are_the_reference(length, window, heads, groups):
    inputs = values(2, heads, groups, length, 8)
    expected = both(lambda *x: window_attention(*x, window=window, kernel="reference"), inputs)
    found = both(lambda *x: window_attention(*x, window=window, kernel="blocks"), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kernel", ["reference", "blocks"])
def test_a_window_over_everything_is_causal_attention(kernel):
    inputs = values(1, 2, 2, 12, 8)
    expected = both(lambda *x: causal_attention(*x, backend="reference"), inputs)
    found = both(lambda *x: window_attention(*x, window=12, kernel=kernel), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kernel", ["reference", "blocks"])
def test_a_token_reaches_exactly_its_window(kernel):
    window, length, place = 4, 14, 5
    q, k, v = (x.detach() for x in values(1, 2, 1, length, 8))
    before = window_attention(q, k, v, window=window, kernel=kernel)
    k[:, :, place] += 3.0
    v[:, :, place] -= 1.0
    moved = (window_attention(q, k, v, window=window, kernel=kernel) != before).any(dim=-1).flatten(0, 1).any(dim=0)
    assert moved.nonzero().flatten().tolist() == list(range(place, place + window))


@pytest.mark.parametrize(("queries", "window"), [(1, 4), (3, 4), (5, 2), (2, 100)])
def test_attention_through_a_mask_is_the_end_of_a_full_pass(queries, window):
    q, k, v = (x.detach() for x in values(2, 4, 2, 11, 8))
    whole = window_attention(q, k, v, window=window, kernel="reference")
    visible = window_mask(queries, 11, window, q.device).expand(2, -1, -1)
    torch.testing.assert_close(masked_attention(q[:, :, -queries:], k, v, visible), whole[:, :, -queries:])


def test_the_mask_counts_the_token_itself():
    assert window_mask(3, 5, 2, torch.device("cpu")).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("size", "kernel"), [(64, "flash"), (256, "flash"), (36, "blocks"), (264, "blocks")])
def test_heads_that_flash_attention_has_no_windows_for_go_by_blocks(size, kernel):
    queries = types.SimpleNamespace(is_cuda=True, element_size=lambda: 2, shape=(1, 2, 12, size))
    assert window_kernel("sdpa", queries) == kernel  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kernel", [pytest.param("blocks", marks=pytest.mark.gpu), *CUDA])
@pytest.mark.parametrize(("length", "window", "size"), [(1024, 128, 64), (1000, 300, 128), (4096, 1024, 128)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2)])
def test_kernels_on_the_device_are_the_reference(kernel, length, window, size, heads, groups):
    inputs = values(2, heads, groups, length, size, torch.bfloat16, "cuda")
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = both(lambda *x: window_attention(*x, window=window, kernel="reference"), exact)
    found = both(lambda *x: window_attention(*x, window=window, kernel=kernel), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = mine.detach().float(), theirs.detach()
        assert float((mine - theirs).abs().max()) < 0.03 * (1 + float(theirs.abs().max()))
