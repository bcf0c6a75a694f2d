"""Kernels of gates, of values from tables and of the first stream that blocks mix in, against formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from flatout.ops.kernels.heads import Rows, add_values, gate_heads, project_heads
from flatout.ops.kernels.stream import add_norm, begin
from tests.parity.checking import DEVICES, assert_near, compare, draw, rounded, shapes_and_types

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("guarded_memory", "bf16_products"),
]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.mark.parametrize(
    ("rows", "width", "centred", "types"),
    [(5, 48, True, (FP32, FP32)), (5, 48, False, (FP32, BF16)), (3, 100, False, (BF16, BF16))],
)
def test_blocks_that_mix_the_first_stream_in(rows, width, centred, types, device):
    """Three of them, the first without a branch: their gradients of the first stream add up."""
    stream, product = types
    x = draw(rows, width, dtype=stream, device=device)
    branches = [draw(rows, width, dtype=product, device=device, seed=seed) for seed in (1, 2)]
    weight, scale, mix = (draw(size, device=device, seed=3) for size in (width, width, 6))

    def fast(x, one, two, weight, scale, mix):
        x, first = begin(x)
        how = {"centred": centred, "eps": EPS, "dtype": product, "first": first}
        x, one_h = add_norm(x, None, None, weight, None, **how, mix=mix[:2])
        x, two_h = add_norm(x, one, None, weight, None, **how, mix=mix[2:4], scale=scale)
        return *add_norm(x, two, None, weight, None, **how, mix=mix[4:]), one_h, two_h

    def slow(x, one, two, weight, scale, mix):
        first, normed = x, []
        for branch, (a, b) in zip((0.0, one * scale, two), mix.view(3, 2), strict=True):
            x = rounded(a * (x + branch) + b * first, stream)
            apart = x - x.mean(-1, keepdim=True) if centred else x
            normed.append(apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + EPS) * weight)
        return x, normed[2], normed[0], normed[1]

    compare(fast, slow, [x, *branches, weight, scale, mix], dtype=product, slack=3.0)


def gates_reference(h: Tensor, weight: Tensor) -> Tensor:
    return 2 * torch.sigmoid(h[..., : weight.shape[1]] @ weight.mT)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("batch", "positions", "width", "counts", "dtype"),
    shapes_and_types([(2, 5, 48, (2, 0))], [FP32, BF16], more=(1, 70, 20, (2, 4)), many=(3, 200, 64, (2, 4))),
)
def test_gates_come_with_the_heads(batch, positions, width, counts, dtype, device):
    inputs = [
        draw(batch, positions, width, dtype=dtype, device=device),
        draw(32, width, dtype=dtype, device=device, seed=1, scale=0.2),
        draw(sum(counts), 12, device=device, seed=2),
    ]

    def fast(h, weight, gates):
        *heads, values, of_heads = project_heads(h, weight, None, heads=4, groups=2, gates=gates, counts=counts)
        return *heads, *(made for made in (values, of_heads) if made is not None)

    def slow(h, weight, gates):
        parts = (h @ weight.mT).view(batch, positions, 8, 4).transpose(1, 2)
        made = gates_reference(h, gates).split(counts, dim=-1)
        return parts[:, :4], parts[:, 4:6], parts[:, 6:], *(part for part in made if part.shape[-1])

    compare(fast, slow, inputs, dtype=dtype, slack=2.0)


VOCAB = 11


def draw_tokens(batch: int, positions: int, device: str) -> Tensor:
    return torch.randint(VOCAB, (batch, positions), generator=torch.Generator().manual_seed(0)).to(device)


def values_reference(v: Tensor, gates: Tensor, rows: Tensor) -> Tensor:
    return v + gates.transpose(1, 2)[..., None] * rows.unflatten(-1, (v.shape[1], -1)).transpose(1, 2)


@pytest.mark.grid
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("batch", "groups", "positions", "size", "dtype"),
    shapes_and_types([(2, 3, 5, 8)], [FP32, BF16], more=(1, 1, 40, 20), many=(3, 6, 100, 64)),
)
def test_values_from_a_table(batch, groups, positions, size, dtype, deterministic, device):
    """A table serves two blocks, whose gradients of it add up."""
    tokens = draw_tokens(batch, positions, device)
    shape = batch, groups, positions, size
    inputs = [
        *(draw(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2)),
        *(draw(batch, positions, groups, device=device, seed=seed) for seed in (3, 4)),
        draw(VOCAB, groups * size, device=device, seed=5),
    ]

    def fast(v, w, gates, more_gates, table):
        rows = Rows(tokens, table, blocks=2)
        return add_values(v * 1, gates, rows), add_values(w * 1, more_gates, rows)

    def slow(v, w, gates, more_gates, table):
        rows = F.embedding(tokens, table)
        return values_reference(v, gates, rows), values_reference(w, more_gates, rows)

    torch.use_deterministic_algorithms(deterministic)
    try:
        compare(fast, slow, inputs, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_second_micro_batch_adds_to_the_table_s_gradient(device):
    tokens, table = draw_tokens(2, 6, device), draw(VOCAB, 16, device=device)
    v, gates = draw(2, 2, 6, 8, device=device, seed=1), draw(2, 6, 2, device=device, seed=2)
    gradients = []
    for _ in range(3):
        rows = Rows(tokens, table, blocks=2)
        (add_values(v * 1, gates, rows).sum() + add_values(v * 2, gates, rows).sum()).backward()
        assert table.grad is not None
        gradients.append(table.grad.clone())
    expected = torch.zeros(VOCAB, 16, device=device)
    expected.index_add_(0, tokens.flatten(), 2 * gates.detach().repeat_interleave(8, dim=-1).flatten(0, 1))
    for index, found in enumerate(gradients):
        assert_near(found, (index + 1) * expected, FP32, f"after {index + 1}")


def test_values_never_come_from_beyond_a_table(device):
    table, tokens = draw(4, 8, device=device), torch.tensor([[0, 4, -1, 3]], device=device)
    y = add_values(
        torch.zeros(1, 1, 4, 8, device=device), torch.ones(1, 4, 1, device=device), Rows(tokens, table, blocks=1)
    )
    assert torch.equal(torch.isnan(y).all(-1)[0, 0].cpu(), torch.tensor([False, True, True, False]))
    y.backward(torch.ones_like(y))
    assert table.grad is not None
    assert table.grad.sum(1).tolist() == [8.0, 0.0, 0.0, 8.0]


@pytest.mark.parametrize(
    ("batch", "heads", "positions", "size", "dtype"),
    shapes_and_types([(2, 3, 5, 8)], [FP32, BF16], more=(1, 1, 40, 20), many=(3, 6, 100, 64)),
)
def test_gates_of_heads(batch, heads, positions, size, dtype, device):
    y = draw(batch, heads, positions, size, dtype=dtype, device=device)
    gates = draw(batch, positions, heads, device=device, seed=1)
    compare(gate_heads, lambda y, gates: y * gates.transpose(1, 2)[..., None], [y, gates], dtype=dtype)
